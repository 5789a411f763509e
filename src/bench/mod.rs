//! Times whole operations, by the device's own clock where it has one.
//!
//! Inputs are random (unit keys, decays around -0.35, gates in (0, 1)), already on the device. The device is kept
//! busy for a while before the first sample, since clocks rise under load, and samples follow back to back.
//!
//! | | |
//! |---|---|
//! | [`prefill`], [`prefill_passes`], [`decode`] | one problem on a GPU, samples in milliseconds |
//! | [`run`] | cases on any engine, against its own [`ceilings`], as `eda bench` does; async, also for browsers |
//! | [`report`] | the JSON that this leaves |
//! | [`count`] | the operations and bytes that rates are made of |

pub mod ceilings;
pub mod count;
mod measure;
pub mod report;
pub mod run;

use measure::{Work, now, sample};

use crate::engine::Element;
use crate::error::Result;
use crate::generate::Rng;
use crate::gpu::engine::GpuEngine;
use crate::gpu::kernels::{Call, DecodeSettings, PrefillSettings, Slice, operand_element};
use crate::gpu::shaders::Pass;
use crate::problem::{Operand, Problem, Tensors};
use crate::slots::Row;
use half::f16;
use std::time::Duration;

/// How long and how often.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Keep the device busy this long before the first sample.
    pub warm_up: Duration,
    /// Samples.
    pub samples: usize,
}

impl Default for Effort {
    fn default() -> Self {
        Self {
            warm_up: Duration::from_millis(300),
            samples: 30,
        }
    }
}

/// Random values for an operand, `len` of them: rows of `K` with unit norm for keys.
pub fn random_values(problem: &Problem, operand: Operand, len: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed ^ (operand as u64) << 32);
    let mut out: Vec<f32> = (0..len)
        .map(|_| match operand {
            Operand::G => -0.7 * rng.uniform(0.0, 1.0),
            Operand::Beta | Operand::Gamma | Operand::W => rng.uniform(0.0, 1.0),
            _ => rng.uniform(-1.0, 1.0),
        })
        .collect();
    if matches!(
        operand,
        Operand::Q | Operand::K | Operand::E | Operand::P | Operand::A | Operand::B
    ) {
        for row in out.chunks_mut(problem.key_dim) {
            crate::layer::normalize(row);
        }
    }
    out
}

/// Operands of a problem on the device, each in a buffer of its own, the gates in one.
#[derive(Clone)]
pub struct DeviceInputs {
    buffers: Vec<(Operand, wgpu::Buffer, u64, u64)>,
}

impl DeviceInputs {
    /// Generates and uploads. Long tensors repeat a block of random rows.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], [`crate::Error::Unsupported`].
    pub fn new(engine: &GpuEngine, problem: &Problem, element: Element) -> Result<Self> {
        Self::make(engine, problem, element, true)
    }

    /// Buffers alone, for binding them without running anything.
    fn unfilled(engine: &GpuEngine, problem: &Problem, element: Element) -> Result<Self> {
        Self::make(engine, problem, element, false)
    }

    fn make(engine: &GpuEngine, problem: &Problem, element: Element, fill: bool) -> Result<Self> {
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
        let kernels = engine.kernels();
        let used = |o: &Operand| problem.uses(*o) && *o != Operand::InitialState;
        let is_gate = |o: Operand| operand_element(o, Element::F16) == Element::F32;
        let gates: Vec<Operand> = Operand::ALL
            .into_iter()
            .filter(|&o| used(&o) && is_gate(o))
            .collect();
        let gate_bytes: u64 = gates
            .iter()
            .map(|&o| (problem.len(o) as u64 * 4).next_multiple_of(256))
            .sum();
        let gate_buffer = kernels.buffer("gates", gate_bytes, usage, None)?;
        let mut gate_at = 0;
        let mut buffers = Vec::new();
        for operand in Operand::ALL.into_iter().filter(used) {
            let element = operand_element(operand, element);
            let size = problem.len(operand) as u64 * element.bytes();
            let (buffer, offset) = if is_gate(operand) {
                let at = gate_at;
                gate_at += size.next_multiple_of(256);
                (gate_buffer.clone(), at)
            } else {
                (kernels.buffer(problem.name(operand), size, usage, None)?, 0)
            };
            if !fill {
                buffers.push((operand, buffer, offset, size));
                continue;
            }
            let block = (1usize << 22).min(problem.len(operand).next_multiple_of(problem.key_dim));
            let block = block / problem.key_dim * problem.key_dim;
            let values = random_values(problem, operand, block.max(problem.key_dim), 7);
            let mut bytes: Vec<u8> = match element {
                Element::F32 => bytemuck::cast_slice(&values).to_vec(),
                Element::F16 => values
                    .iter()
                    .flat_map(|&x| f16::from_f32(x).to_le_bytes())
                    .collect(),
            };
            // (Copies are of whole words.)
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            let mut at = 0;
            while at < size {
                let n = (size - at).min(bytes.len() as u64);
                let n = if at + n == size { n } else { n / 4 * 4 };
                let padded = (n.next_multiple_of(4) as usize).min(bytes.len());
                engine
                    .queue()
                    .write_buffer(&buffer, offset + at, &bytes[..padded]);
                engine.queue().submit([]);
                at += n;
            }
            buffers.push((operand, buffer, offset, size));
        }
        Ok(Self { buffers })
    }

    /// The slices.
    pub fn slices(&self) -> Tensors<Slice<'_>> {
        let mut out = Tensors::new();
        for (operand, buffer, offset, size) in &self.buffers {
            out.set(
                *operand,
                Slice {
                    buffer,
                    offset: *offset,
                    size: *size,
                },
            );
        }
        out
    }
}

/// A prefill or decode bound to random inputs on the device. The buffers live as long as it does.
struct Bound {
    call: Call,
    /// Tokens a chunk; decode has none.
    chunk: Option<usize>,
    /// Segments at the same time; 0 where none is cut.
    segments: usize,
    _inputs: DeviceInputs,
}

fn bind_prefill(
    engine: &GpuEngine,
    problem: &Problem,
    settings: &PrefillSettings,
    inputs: DeviceInputs,
) -> Result<Bound> {
    let kernels = engine.kernels();
    let usage = wgpu::BufferUsages::STORAGE;
    let o_bytes = problem.output_len() as u64 * settings.element.bytes();
    let o = kernels.buffer("the outputs", o_bytes, usage, None)?;
    let state_bytes = problem.states_len() as u64 * 4;
    let state = kernels.buffer("the states", state_bytes, usage, None)?;
    let plan = kernels.plan_prefill(problem, settings)?;
    let (o, state) = (Slice::whole(&o), Slice::whole(&state));
    Ok(Bound {
        call: kernels.prefill(&plan, &inputs.slices(), o, state, None)?,
        chunk: Some(plan.chunk()),
        segments: plan.segments(),
        _inputs: inputs,
    })
}

fn bind_decode(
    engine: &GpuEngine,
    problem: &Problem,
    settings: DecodeSettings,
    inputs: DeviceInputs,
) -> Result<Bound> {
    let kernels = engine.kernels();
    let usage = wgpu::BufferUsages::STORAGE;
    let o_bytes = problem.output_len() as u64 * settings.element.bytes();
    let o = kernels.buffer("the outputs", o_bytes, usage, None)?;
    let values = problem.batch * problem.value_heads * problem.state_len();
    let pool_bytes = values as u64 * settings.state.bytes();
    let pool = kernels.buffer("the state pool", pool_bytes, usage, None)?;
    let rows: Vec<Row> = (0..problem.batch)
        .map(|i| Row::continues(i as i32))
        .collect();
    let pool = Slice {
        buffer: &pool,
        offset: 0,
        size: pool_bytes,
    };
    let o = Slice::whole(&o);
    Ok(Bound {
        call: kernels.decode_with(problem, settings, &inputs.slices(), o, pool, &rows)?,
        chunk: None,
        segments: 0,
        _inputs: inputs,
    })
}

impl Bound {
    /// The whole operation, cut where a submission may end.
    fn once(&self) -> Work<'_> {
        Work {
            parts: self.call.steps(),
            record: Box::new(|pass, parts| self.call.record_into(pass, parts)),
        }
    }

    /// The operation `times` over; each run continues what the one before left.
    fn repeated(&self, times: usize) -> Work<'_> {
        Work {
            parts: times,
            record: Box::new(|pass, parts| {
                for _ in parts {
                    self.call.record_into(pass, 0..self.call.steps());
                }
            }),
        }
    }
}

/// Times whole prefills (all passes, final state written), milliseconds a sample.
///
/// # Errors
/// As the kernels.
pub fn prefill(
    engine: &GpuEngine,
    problem: &Problem,
    settings: &PrefillSettings,
    effort: Effort,
) -> Result<Vec<f64>> {
    let inputs = DeviceInputs::new(engine, problem, settings.element)?;
    let bound = bind_prefill(engine, problem, settings, inputs)?;
    Ok(now(sample(engine, effort, None, &bound.once()))?.samples_ms)
}

/// Times each pass of a prefill alone (the others' results are those of an earlier run): medians, milliseconds.
///
/// # Errors
/// As the kernels.
pub fn prefill_passes(
    engine: &GpuEngine,
    problem: &Problem,
    settings: &PrefillSettings,
    effort: Effort,
) -> Result<Vec<(&'static str, f64)>> {
    let inputs = DeviceInputs::new(engine, problem, settings.element)?;
    let bound = bind_prefill(engine, problem, settings, inputs)?;
    let once = Effort {
        samples: 1,
        ..effort
    };
    now(sample(engine, once, None, &bound.once()))?;
    Pass::ALL
        .into_iter()
        .filter(|&which| bound.call.has(which))
        .map(|which| {
            let work = Work {
                parts: 1,
                record: Box::new(|pass, _| bound.call.record_only(pass, which)),
            };
            let times = now(sample(engine, effort, None, &work))?;
            Ok((which.name(), times.median_ms()))
        })
        .collect()
}

/// Times decode steps of one token for `problem.batch` rows, each with its own slot: milliseconds a step, as
/// the mean over `steps` dependent steps recorded together.
///
/// # Errors
/// As the kernels.
pub fn decode(
    engine: &GpuEngine,
    problem: &Problem,
    element: Element,
    steps: usize,
    effort: Effort,
) -> Result<Vec<f64>> {
    let settings = DecodeSettings {
        element,
        state: Element::F32,
    };
    decode_with(engine, problem, settings, steps, effort)
}

/// The same with states stored as [`DecodeSettings::state`].
///
/// # Errors
/// As the kernels.
pub fn decode_with(
    engine: &GpuEngine,
    problem: &Problem,
    settings: DecodeSettings,
    steps: usize,
    effort: Effort,
) -> Result<Vec<f64>> {
    let inputs = DeviceInputs::new(engine, problem, settings.element)?;
    let bound = bind_decode(engine, problem, settings, inputs)?;
    let mut samples = now(sample(engine, effort, None, &bound.repeated(steps)))?.samples_ms;
    for s in &mut samples {
        *s /= steps as f64;
    }
    Ok(samples)
}
