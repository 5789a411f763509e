//! Cases on an engine, as `eda bench` runs them: ceilings first, then each case.

use super::count;
use super::measure::{blocks, sample};
use super::report::{Case, Ceilings, Key, LongRun, Op, Samples, Timing};
use super::{Bound, DeviceInputs, Effort, bind_decode, bind_prefill, random_values};
use crate::cpu::{self, CpuEngine};
use crate::engine::{DecodeOptions, Element, Engine, PrefillOptions, Tier, test_matrix_units};
use crate::error::{Error, Result};
use crate::gpu::engine::GpuEngine;
use crate::gpu::kernels::{DecodeSettings, PrefillSettings};
use crate::problem::{Operand, Problem, Tensors};
use crate::rule::Rule;
use crate::slots::Row;
use std::convert::Infallible;
use std::time::Duration;
use web_time::Instant;

/// Blocks of a long run of decode steps.
const BLOCKS: u32 = 10;
/// Steps a block, where they are short.
const BLOCK_STEPS: usize = 100;
/// A long run is one submission: no longer than systems leave a device alone, milliseconds.
const LONG_RUN_MS: f64 = 400.0;
/// Decode steps recorded together take about this long, milliseconds.
const STEPS_MS: f64 = 20.0;

/// A case to run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spec {
    /// Prefill or decode.
    pub op: Op,
    /// Rule.
    pub rule: Rule,
    /// `[B, T, H, HV, K, V]`.
    pub shape: [usize; 6],
    /// Type in which inputs and outputs are stored.
    pub element: Element,
    /// Tokens a chunk; chosen by the engine where `None`.
    pub chunk: Option<usize>,
    /// Segments of a long sequence on a GPU; chosen by the engine where `None`.
    pub segments: Option<usize>,
}

impl Spec {
    /// The problem.
    pub fn problem(&self) -> Problem {
        Problem::new(self.rule, self.shape)
    }

    /// What it is called where decode stores states as `state`.
    pub fn key(&self, state: Element) -> Key {
        Key {
            state: self.stored(state),
            ..Key::new(self.op, &self.problem(), self.element)
        }
    }

    /// Type of its states where decode stores them as `state`.
    fn stored(&self, state: Element) -> Element {
        match self.op {
            Op::Prefill => Element::F32,
            Op::Decode => state,
        }
    }
}

/// How much is measured on an engine.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Warm-up and samples of each case.
    pub effort: Effort,
    /// Time for the samples of a case; at least five are taken.
    pub budget: Duration,
}

impl Plan {
    /// For an engine: 300 ms of warm-up and 30 samples on a GPU; less where a processor does the work, whose
    /// clocks do not sleep, and where it has to be `quick`.
    pub fn of(engine: &Engine, quick: bool) -> Self {
        let (warm_up, samples) = match engine {
            Engine::Cpu(_) if quick => (0, 5),
            Engine::Cpu(_) => (100, 15),
            Engine::Gpu(gpu) if gpu.description().kind == "software" => (0, 5),
            Engine::Gpu(_) if quick => (300, 10),
            Engine::Gpu(_) => (300, 30),
        };
        Self {
            effort: Effort {
                warm_up: Duration::from_millis(warm_up),
                samples,
            },
            budget: Duration::from_secs(if quick { 1 } else { 5 }),
        }
    }
}

/// The shapes that are run where none are given, `[B, T, H, HV, K, V]`, and what they are called.
///
/// Discrete GPUs have those of long prompts and large batches of 16 and more heads; other GPUs and the CPU engine
/// smaller ones; software drivers, and every engine when `quick`, ones that take milliseconds.
pub fn default_shapes(engine: &Engine, op: Op, quick: bool) -> (&'static str, Vec<[usize; 6]>) {
    let prefill = |sizes: &[(usize, usize, usize, usize)]| {
        let shape = |&(b, t, h, d): &(usize, usize, usize, usize)| [b, t, h, h, d, d];
        sizes.iter().map(shape).collect()
    };
    let decode = |batches: &[usize], heads: usize| {
        let shape = |&b: &usize| [b, 1, heads, heads, 128, 128];
        batches.iter().map(shape).collect()
    };
    let kind = match engine {
        Engine::Cpu(_) => "cpu",
        Engine::Gpu(gpu) => match gpu.description().kind.as_str() {
            "discrete" => "discrete",
            "software" => "software",
            _ => "gpu",
        },
    };
    match (kind, op) {
        (kind, op) if quick || kind == "software" => {
            let shapes = match op {
                Op::Prefill => prefill(&[(1, 256, 2, 64), (1, 256, 2, 128)]),
                Op::Decode => decode(&[1, 4], 4),
            };
            ("small", shapes)
        }
        ("discrete", Op::Prefill) => {
            let shapes = prefill(&[
                (1, 4096, 16, 128),
                (1, 16384, 16, 128),
                (1, 65536, 16, 128),
                (8, 2048, 16, 128),
                (1, 4096, 96, 128),
            ]);
            ("large", shapes)
        }
        ("discrete", Op::Decode) => ("large", decode(&[1, 8, 64, 256], 16)),
        (_, Op::Prefill) => (
            "medium",
            prefill(&[(1, 1024, 4, 64), (1, 4096, 4, 128), (4, 1024, 4, 128)]),
        ),
        (_, Op::Decode) => ("medium", decode(&[1, 8, 32], 16)),
    }
}

/// Runs one case, with float32 states.
///
/// # Errors
/// As [`case_with`].
pub async fn case(engine: &Engine, spec: &Spec, plan: &Plan, ceilings: &Ceilings) -> Result<Case> {
    case_with(engine, spec, Element::F32, plan, ceilings).await
}

/// The same where decode stores states as `state`.
///
/// # Errors
/// As the kernels and the engines: [`crate::Error::Tensor`], [`crate::Error::Unsupported`],
/// [`crate::Error::OutOfMemory`], [`crate::Error::DeviceLost`].
pub async fn case_with(
    engine: &Engine,
    spec: &Spec,
    state: Element,
    plan: &Plan,
    ceilings: &Ceilings,
) -> Result<Case> {
    let problem = spec.problem();
    problem.validate()?;
    let state = spec.stored(state);
    if spec.op == Op::Decode {
        // No slots: only to hear whether the engine has such states.
        engine.pool_with(&problem, 0, state).await?;
    }
    let measured = match engine {
        Engine::Gpu(engine) => on_gpu(engine, spec, state, &problem, plan).await?,
        Engine::Cpu(engine) => on_cpu(engine, spec, &problem, plan)?,
    };
    let (op, times) = (spec.op, measured.times);
    let case = Case::with_state(op, &problem, spec.element, state, times, ceilings);
    Ok(Case {
        chunk: measured.chunk,
        segments: measured.segments,
        tier: measured.tier.map(|tier| tier.name().to_owned()),
        steps: measured.steps,
        warm_up_ms: plan.effort.warm_up.as_secs_f64() * 1e3,
        long_run: measured.long_run,
        ..case
    })
}

struct Measured {
    times: Samples,
    chunk: Option<usize>,
    segments: usize,
    tier: Option<Tier>,
    steps: usize,
    long_run: Option<LongRun>,
}

/// The kernel family that a prefill takes, as [`Engine::prefill`] would.
fn tier_of(engine: &GpuEngine, spec: &Spec, problem: &Problem) -> Tier {
    let options = PrefillOptions {
        chunk: spec.chunk,
        segments: spec.segments,
        element: spec.element,
        ..PrefillOptions::default()
    };
    engine.tier_of(problem, &options)
}

fn bind(
    engine: &GpuEngine,
    spec: &Spec,
    state: Element,
    problem: &Problem,
    inputs: DeviceInputs,
) -> Result<Bound> {
    match spec.op {
        Op::Prefill => {
            let settings = PrefillSettings {
                chunk: spec.chunk,
                segments: spec.segments,
                element: spec.element,
                tier: tier_of(engine, spec, problem),
                ..PrefillSettings::default()
            };
            bind_prefill(engine, problem, &settings, inputs)
        }
        Op::Decode => {
            let settings = DecodeSettings {
                element: spec.element,
                state,
            };
            bind_decode(engine, problem, settings, inputs)
        }
    }
}

async fn on_gpu(
    engine: &GpuEngine,
    spec: &Spec,
    state: Element,
    problem: &Problem,
    plan: &Plan,
) -> Result<Measured> {
    let tier = (spec.op == Op::Prefill).then(|| tier_of(engine, spec, problem));
    if tier == Some(Tier::Matrix) && engine.has_untested_matrix_units() {
        test_matrix_units(engine).await?;
    }
    let inputs = DeviceInputs::new(engine, problem, spec.element)?;
    let bound = bind(engine, spec, state, problem, inputs)?;
    if spec.op == Op::Prefill {
        let times = sample(engine, plan.effort, Some(plan.budget), &bound.once()).await?;
        return Ok(Measured {
            times,
            chunk: bound.chunk,
            segments: bound.segments,
            tier,
            steps: 1,
            long_run: None,
        });
    }
    let few = Effort {
        warm_up: Duration::ZERO,
        samples: 3,
    };
    let step_ms = sample(engine, few, Some(plan.budget), &bound.once())
        .await?
        .median_ms()
        .max(1e-4);
    let steps = ((STEPS_MS / step_ms) as usize).clamp(1, BLOCK_STEPS);
    let work = bound.repeated(steps);
    let mut times = sample(engine, plan.effort, Some(plan.budget), &work).await?;
    for ms in &mut times.samples_ms {
        *ms /= steps as f64;
    }
    let step_ms = times.median_ms().max(1e-4);
    let most = LONG_RUN_MS / f64::from(BLOCKS) / step_ms;
    let block = (most as usize).clamp(1, BLOCK_STEPS);
    let block_ms = blocks(engine, BLOCKS, &bound.repeated(block)).await?;
    let block_ms = block_ms.unwrap_or_default();
    let long_run = LongRun::new(block, block_ms.iter().map(|ms| ms / block as f64).collect());
    Ok(Measured {
        times,
        chunk: None,
        segments: 0,
        tier: None,
        steps,
        long_run,
    })
}

/// Builds the pipelines of all cases, of decode with states stored as `state`: how many there are, and how long building
/// them took, from WGSL text to what the driver runs, milliseconds. A case that the device does not run is left out.
///
/// # Errors
/// [`crate::Error::DeviceLost`].
pub fn build_pipelines(engine: &GpuEngine, specs: &[Spec], state: Element) -> Result<(usize, f64)> {
    let before = engine.kernels().pipeline_count();
    let mut done: Vec<Spec> = Vec::new();
    let mut ms = 0.0;
    for spec in specs {
        // (Sequences and tokens count: they decide on columns a workgroup and on segments.)
        if done.contains(spec) {
            continue;
        }
        done.push(*spec);
        let problem = spec.problem();
        if problem.validate().is_err() {
            continue;
        }
        let inputs = DeviceInputs::unfilled(engine, &problem, spec.element);
        // Binding a second time costs everything but the pipelines.
        let time = || {
            let begun = Instant::now();
            let bound = inputs
                .clone()
                .and_then(|inputs| bind(engine, spec, state, &problem, inputs));
            (begun.elapsed().as_secs_f64() * 1e3, bound.is_ok())
        };
        if let (first, true) = time() {
            ms += (first - time().0).max(0.0);
        }
        engine.check()?;
    }
    Ok((engine.kernels().pipeline_count() - before, ms))
}

/// Times work on the processor by the host's clock.
pub(super) struct CpuClock {
    effort: Effort,
    budget: Duration,
}

impl CpuClock {
    pub(super) fn new(plan: &Plan, budget: Duration) -> Self {
        Self {
            effort: plan.effort,
            budget,
        }
    }

    /// Samples of work whose time is all of its time.
    pub(super) fn sample(&self, mut work: impl FnMut()) -> Samples {
        let timed = || {
            let begun = Instant::now();
            work();
            Ok(begun.elapsed().as_secs_f64() * 1e3)
        };
        // The closure does not fail.
        self.sample_ms(timed)
            .unwrap_or_else(|never: Infallible| match never {})
    }

    /// Samples of work that says how long it took, milliseconds.
    fn sample_ms<E>(&self, mut work: impl FnMut() -> Result<f64, E>) -> Result<Samples, E> {
        let begun = Instant::now();
        let whole = loop {
            let run = Instant::now();
            work()?;
            if begun.elapsed() >= self.effort.warm_up {
                break run.elapsed();
            }
        };
        let fit = self.budget.as_secs_f64() / whole.as_secs_f64().max(1e-9);
        let count = self.effort.samples.min((fit as usize).max(5)).max(1);
        let samples_ms = (0..count)
            // A clock that did not move says no more than that it was quick.
            .map(|_| Ok(work()?.max(1e-6)))
            .collect::<Result<_, E>>()?;
        Ok(Samples {
            timing: Timing::Wall,
            repetitions: 1,
            samples_ms,
        })
    }
}

fn on_cpu(engine: &CpuEngine, spec: &Spec, problem: &Problem, plan: &Plan) -> Result<Measured> {
    // Asked for and given back: filling a vector that there is no room for would end the program.
    let bytes = count::bytes(spec.op, problem, Element::F32, Element::F32);
    if Vec::<u8>::new().try_reserve_exact(bytes as usize).is_err() {
        return Err(Error::OutOfMemory {
            what: "the inputs and outputs".into(),
            bytes: bytes as u64,
        });
    }
    let mut tensors = Tensors::new();
    for operand in Operand::ALL {
        if problem.uses(operand) && operand != Operand::InitialState {
            let len = problem.len(operand);
            tensors.set(operand, random_values(problem, operand, len, 7));
        }
    }
    let tensors = tensors.slices();
    let clock = CpuClock::new(plan, plan.budget);
    let times = match spec.op {
        Op::Prefill => {
            let options = PrefillOptions {
                chunk: spec.chunk,
                element: spec.element,
                ..PrefillOptions::default()
            };
            clock.sample_ms(|| {
                let run = engine.prefill(problem, &tensors, &options, &|_, _| {})?;
                Ok::<_, Error>(run.compute_ms)
            })?
        }
        Op::Decode => {
            let mut pool = engine.pool(problem, problem.batch)?;
            let rows: Vec<Row> = (0..problem.batch)
                .map(|i| Row::continues(i as i32))
                .collect();
            let options = DecodeOptions {
                element: spec.element,
                ..DecodeOptions::default()
            };
            clock.sample_ms(|| {
                let (_, ms) = engine.decode(problem, &tensors, &mut pool, &rows, &options)?;
                Ok::<_, Error>(ms)
            })?
        }
    };
    Ok(Measured {
        times,
        chunk: (spec.op == Op::Prefill).then(|| spec.chunk.unwrap_or(cpu::DEFAULT_CHUNK)),
        segments: 0,
        tier: None,
        steps: 1,
        long_run: None,
    })
}
