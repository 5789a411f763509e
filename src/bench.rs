//! Times the kernels on a device: whole operations, by the device's own clock.
//!
//! Inputs are random (unit keys, decays around -0.35, gates in (0, 1)), already on the device. The device is kept
//! busy for a while before the first sample, since clocks rise under load, and samples follow back to back.

use crate::engine::Element;
use crate::error::{Error, Result};
use crate::generate::Rng;
use crate::gpu::engine::GpuEngine;
use crate::gpu::kernels::{Call, DecodeSettings, PrefillSettings, Slice, operand_element};
use crate::gpu::shaders::Pass;
use crate::problem::{Operand, Problem, Tensors};
use crate::slots::Row;
use half::f16;
use std::time::{Duration, Instant};

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
pub struct DeviceInputs {
    buffers: Vec<(Operand, wgpu::Buffer, u64, u64)>,
}

impl DeviceInputs {
    /// Generates and uploads. Long tensors repeat a block of random rows.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Unsupported`].
    pub fn new(engine: &GpuEngine, problem: &Problem, element: Element) -> Result<Self> {
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
            let block = (1usize << 22).min(problem.len(operand).next_multiple_of(problem.key_dim));
            let block = block / problem.key_dim * problem.key_dim;
            let values = random_values(problem, operand, block.max(problem.key_dim), 7);
            let bytes: Vec<u8> = match element {
                Element::F32 => bytemuck::cast_slice(&values).to_vec(),
                Element::F16 => values
                    .iter()
                    .flat_map(|&x| f16::from_f32(x).to_le_bytes())
                    .collect(),
            };
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

fn wait(engine: &GpuEngine) -> Result<()> {
    engine
        .kernels()
        .device()
        .poll(wgpu::PollType::wait_indefinitely())
        .map(|_| ())
        .map_err(|e| Error::Device(format!("waiting for the device: {e}")))
}

/// Times `record` between two stamps, milliseconds a sample.
fn sample(
    engine: &GpuEngine,
    effort: Effort,
    record: &dyn Fn(&mut wgpu::ComputePass<'_>),
) -> Result<Vec<f64>> {
    let device = engine.kernels().device();
    let run = |stamps: Option<(&wgpu::QuerySet, u32)>| {
        let mut encoder = device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: Some("eda: bench"),
                timestamp_writes: stamps.map(|(query_set, at)| wgpu::ComputePassTimestampWrites {
                    query_set,
                    beginning_of_pass_write_index: Some(at),
                    end_of_pass_write_index: Some(at + 1),
                }),
            });
            record(&mut pass);
        }
        engine.queue().submit([encoder.finish()]);
    };
    let begun = Instant::now();
    loop {
        run(None);
        wait(engine)?;
        if begun.elapsed() >= effort.warm_up {
            break;
        }
    }
    if !device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
        return (0..effort.samples)
            .map(|_| {
                let begun = Instant::now();
                run(None);
                wait(engine)?;
                Ok(begun.elapsed().as_secs_f64() * 1e3)
            })
            .collect();
    }
    let count = effort.samples as u32;
    let queries = device.create_query_set(&wgpu::QuerySetDescriptor {
        label: Some("eda: bench"),
        ty: wgpu::QueryType::Timestamp,
        count: count * 2,
    });
    for i in 0..count {
        run(Some((&queries, i * 2)));
    }
    let bytes = u64::from(count) * 16;
    let kernels = engine.kernels();
    let resolved = kernels.buffer(
        "times",
        bytes,
        wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
        None,
    )?;
    let readback = kernels.buffer(
        "times",
        bytes,
        wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        None,
    )?;
    let mut encoder = device.create_command_encoder(&Default::default());
    encoder.resolve_query_set(&queries, 0..count * 2, &resolved, 0);
    encoder.copy_buffer_to_buffer(&resolved, 0, &readback, 0, bytes);
    engine.queue().submit([encoder.finish()]);
    readback.map_async(wgpu::MapMode::Read, 0..bytes, |_| {});
    wait(engine)?;
    let view = readback
        .get_mapped_range(0..bytes)
        .map_err(|e| Error::Device(format!("reading times: {e}")))?;
    let ticks: Vec<u64> = bytemuck::pod_collect_to_vec(&view[..]);
    let period = f64::from(engine.queue().get_timestamp_period()) * 1e-6;
    Ok(ticks
        .chunks_exact(2)
        .map(|p| p[1].saturating_sub(p[0]) as f64 * period)
        .collect())
}

/// Calls `time` with a prefill that is bound to random inputs on the device.
fn with_prefill<T>(
    engine: &GpuEngine,
    problem: &Problem,
    settings: &PrefillSettings,
    time: impl FnOnce(&Call) -> Result<T>,
) -> Result<T> {
    let inputs = DeviceInputs::new(engine, problem, settings.element)?;
    let kernels = engine.kernels();
    let usage = wgpu::BufferUsages::STORAGE;
    let o_bytes = problem.output_len() as u64 * settings.element.bytes();
    let o = kernels.buffer("the outputs", o_bytes, usage, None)?;
    let state_bytes = problem.states_len() as u64 * 4;
    let state = kernels.buffer("the states", state_bytes, usage, None)?;
    let plan = kernels.plan_prefill(problem, settings)?;
    let (o, state) = (Slice::whole(&o), Slice::whole(&state));
    time(&kernels.prefill(&plan, &inputs.slices(), o, state, None)?)
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
    with_prefill(engine, problem, settings, |call| {
        sample(engine, effort, &|pass| {
            call.record_into(pass, 0..call.steps());
        })
    })
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
    with_prefill(engine, problem, settings, |call| {
        let once = Effort {
            samples: 1,
            ..effort
        };
        sample(engine, once, &|pass| {
            call.record_into(pass, 0..call.steps());
        })?;
        [Pass::Pairs, Pass::Solve, Pass::Fold, Pass::Scan]
            .into_iter()
            .map(|which| {
                let mut times = sample(engine, effort, &|pass| call.record_only(pass, which))?;
                times.sort_by(f64::total_cmp);
                Ok((which.name(), times[times.len() / 2]))
            })
            .collect()
    })
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
    let element = settings.element;
    let inputs = DeviceInputs::new(engine, problem, element)?;
    let kernels = engine.kernels();
    let usage = wgpu::BufferUsages::STORAGE;
    let o_bytes = problem.output_len() as u64 * element.bytes();
    let o = kernels.buffer("the outputs", o_bytes, usage, None)?;
    let values = problem.batch * problem.value_heads * problem.state_len();
    let pool_bytes = values as u64 * settings.state.bytes();
    let pool = kernels.buffer("the state pool", pool_bytes, usage, None)?;
    let rows: Vec<Row> = (0..problem.batch)
        .map(|i| Row::continues(i as i32))
        .collect();
    let call: Call = kernels.decode_with(
        problem,
        settings,
        &inputs.slices(),
        Slice::whole(&o),
        Slice {
            buffer: &pool,
            offset: 0,
            size: pool_bytes,
        },
        &rows,
    )?;
    let mut samples = sample(engine, effort, &|pass| {
        for _ in 0..steps {
            call.record_into(pass, 0..call.steps());
        }
    })?;
    for s in &mut samples {
        *s /= steps as f64;
    }
    Ok(samples)
}
