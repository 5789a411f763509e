//! The convenient way in: opens an adapter (or the CPU engine), takes host slices, returns host vectors.
//!
//! An [`Engine`] is one of two things behind one interface, and always says which: the GPU kernels on an
//! adapter, or the CPU engine. Programs that own a `wgpu::Device` use the kernels directly instead.

use crate::adapter;
use crate::cpu::{CpuEngine, CpuPool};
use crate::error::{Error, Result};
use crate::generate;
use crate::gpu::engine::{GpuEngine, GpuPool};
use crate::gpu::kernels::{operand_element, validate_decode};
use crate::problem::{Decay, Operand, Outputs, Problem, Tensors, relative_error};
use crate::reference;
use crate::rule::Rule;
use crate::slots::Row;
use serde::Serialize;

/// What may run the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backend {
    /// A discrete GPU, else an integrated one, else the CPU engine. Software adapters are not taken.
    #[default]
    Auto,
    /// The CPU engine.
    Cpu,
    /// Vulkan.
    Vulkan,
    /// Metal.
    Metal,
    /// Direct3D 12.
    Dx12,
    /// OpenGL (ES).
    Gl,
    /// The browser's WebGPU, which is there in a browser only.
    WebGpu,
}

impl Backend {
    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Auto => "auto",
            Backend::Cpu => "cpu",
            Backend::Vulkan => "vulkan",
            Backend::Metal => "metal",
            Backend::Dx12 => "dx12",
            Backend::Gl => "gl",
            Backend::WebGpu => "webgpu",
        }
    }
}

/// Kernel family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Tier {
    /// float32 arithmetic within the WebGPU default limits; runs on every adapter.
    #[default]
    Portable,
    /// Prefill on matrix units: float16 operands, float32 sums and state. Decode is that of [`Tier::Portable`].
    Matrix,
}

impl Tier {
    /// Name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Portable => "portable",
            Tier::Matrix => "matrix",
        }
    }

    /// Largest relative l2 error against float64 that is right: for float32 arithmetic, and for float16 operands.
    pub const fn error_limit(self) -> f64 {
        match self {
            Tier::Portable => 1e-5,
            Tier::Matrix => 2e-3,
        }
    }
}

/// Type in which inputs and outputs lie in GPU memory. Arithmetic and states are float32.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, serde::Deserialize, PartialOrd, Ord,
)]
#[serde(rename_all = "lowercase")]
pub enum Element {
    /// float32.
    #[default]
    F32,
    /// float16; needs the adapter's `SHADER_F16`.
    F16,
}

impl Element {
    /// Name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Element::F32 => "f32",
            Element::F16 => "f16",
        }
    }
}

/// Which engine to open.
#[derive(Debug, Clone, Default)]
pub struct EngineOptions {
    /// Backend.
    pub backend: Backend,
    /// Part of the adapter's name (any case), or its index in the list of [`crate::adapter::list`].
    pub adapter: Option<String>,
    /// Kernel family of prefills. Where `None`: [`Tier::Matrix`] for float16 inputs where the adapter has matrix
    /// units, else [`Tier::Portable`], so that float32 inputs keep float32 precision.
    pub tier: Option<Tier>,
    /// Skips the small known case that is computed when an adapter is opened.
    pub skip_self_test: bool,
    /// Directory in which pipelines are kept between runs, where the adapter can
    /// (see [`crate::gpu::cache`]). It is made when there is something to keep; that nothing can be read or
    /// written there is no error.
    #[cfg(feature = "pipeline-cache")]
    pub pipeline_cache: Option<std::path::PathBuf>,
}

/// What runs the work, for reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Description {
    /// Adapter name, or the processor for the CPU engine.
    pub adapter: String,
    /// `vulkan`, `metal`, `dx12`, `gl`, `webgpu` or `cpu`.
    pub backend: String,
    /// Kernel family, or `cpu`.
    pub tier: String,
    /// `discrete`, `integrated`, `virtual`, `software`, `other` or `cpu`.
    pub kind: String,
    /// Driver name and version, where known.
    pub driver: String,
}

/// Options of one prefill.
#[derive(Debug, Clone, Default)]
pub struct PrefillOptions {
    /// Tokens a chunk: 16, 32 or 64; chosen by the engine where `None`.
    pub chunk: Option<usize>,
    /// Segments that a long sequence is cut into on a GPU and that are computed at the same time (1 for no cut);
    /// chosen by the engine where `None`: see [`crate::gpu::kernels::PrefillSettings::segments`].
    pub segments: Option<usize>,
    /// Storage type of inputs and outputs on the GPU.
    pub element: Element,
    /// Takes NaN and infinities as they are. What comes out is then not defined.
    pub allow_non_finite: bool,
}

/// Options of a decode call.
#[derive(Debug, Clone, Default)]
pub struct DecodeOptions {
    /// Storage type of inputs and outputs on the GPU; states are float32.
    pub element: Element,
    /// Takes NaN and infinities as they are. What comes out is then not defined.
    pub allow_non_finite: bool,
}

/// Outputs with their times.
#[derive(Debug, Clone)]
pub struct Run {
    /// Outputs.
    pub outputs: Outputs,
    /// Device (or engine) time of the passes, milliseconds.
    pub compute_ms: f64,
    /// Kernel family that ran; `None` on the CPU engine.
    pub tier: Option<Tier>,
    /// The most segments of sequences that were computed at the same time; 0 where none was cut.
    pub segments: usize,
}

/// Called with (tokens done, tokens in all) as work goes on.
pub type Progress<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// An opened engine.
#[non_exhaustive]
pub enum Engine {
    /// The CPU engine.
    Cpu(CpuEngine),
    /// The kernels on an adapter.
    Gpu(Box<GpuEngine>),
}

/// States kept by an engine, one per slot, `[slots, HV, K, V]` float32.
#[non_exhaustive]
pub enum Pool {
    /// In host memory.
    Cpu(CpuPool),
    /// On the device.
    Gpu(GpuPool),
}

/// Refuses values that float16 storage would turn into infinities. (A log decay below -65504 is full decay
/// either way.)
pub(crate) fn check_half_range(problem: &Problem, tensors: &Tensors<&[f32]>) -> Result<()> {
    for (operand, values) in tensors.iter() {
        let full_decay = operand == Operand::G && problem.decay == Decay::Log;
        if full_decay || operand_element(operand, Element::F16) == Element::F32 {
            continue;
        }
        let lost = values
            .iter()
            .position(|&x| x.is_finite() && half::f16::from_f32(x).is_infinite());
        if let Some(i) = lost {
            return Err(Error::tensor(
                problem.name(operand),
                format!("values within ±{} for float16 storage", half::f16::MAX),
                format!("{} at flat index {i}", values[i]),
            ));
        }
    }
    Ok(())
}

impl Engine {
    /// Opens an engine.
    ///
    /// # Errors
    /// [`Error::NoAdapter`] where no adapter fits (never for [`Backend::Auto`] without an adapter name or tier:
    /// the CPU engine always exists), [`Error::Device`], [`Error::SelfTest`].
    pub async fn open(options: &EngineOptions) -> Result<Self> {
        if options.backend == Backend::Cpu {
            return Ok(Self::Cpu(CpuEngine::new()));
        }
        match adapter::choose(options).await? {
            Some(adapter) => {
                let mut engine = GpuEngine::open(&adapter).await?;
                engine.set_tier(options.tier)?;
                #[cfg(feature = "pipeline-cache")]
                if let Some(directory) = &options.pipeline_cache {
                    engine.keep_pipelines(directory);
                }
                engine.test_matrix_units_first(!options.skip_self_test);
                let engine = Self::Gpu(Box::new(engine));
                if !options.skip_self_test {
                    engine.self_test().await?;
                }
                Ok(engine)
            }
            // A kernel family is a GPU's: whoever names one does not get the CPU engine for it.
            None => match options.tier {
                Some(tier) => Err(Error::NoAdapter(format!(
                    "tier {} was asked for, and there is no GPU (software drivers run only when their backend or name \
                     is given)",
                    tier.name()
                ))),
                None => Ok(Self::Cpu(CpuEngine::new())),
            },
        }
    }

    /// Computes a small case with strong, uneven gates in both modes and compares it with float64. Drivers
    /// that compile a shader wrongly are not rare; an engine on one refuses to open. (Matrix units that were not
    /// asked for by name are tested before they are first used.)
    ///
    /// # Errors
    /// [`Error::SelfTest`] where an answer is wrong.
    pub async fn self_test(&self) -> Result<()> {
        let (problem, tensors) = test_case();
        let tensors = tensors.slices();
        let right = reference::recurrence::<f64>(&problem, &tensors)?;
        let run = self
            .prefill(&problem, &tensors, &PrefillOptions::default(), &|_, _| {})
            .await?;
        let mut pool = self.pool(&problem, 1).await?;
        let (o, _) = self
            .decode(
                &problem,
                &tensors,
                &mut pool,
                &[Row::continues(0)],
                &DecodeOptions::default(),
            )
            .await?;
        let state = pool.read(0).await?;
        let limit = Tier::error_limit;
        let prefill = limit(run.tier.unwrap_or_default());
        let decode = limit(Tier::Portable);
        for (case, found, right, limit) in [
            ("prefill", &run.outputs.o, &right.o, prefill),
            (
                "prefill's final state",
                &run.outputs.final_state,
                &right.final_state,
                prefill,
            ),
            ("decode", &o, &right.o, decode),
            ("decode's state", &state, &right.final_state, decode),
        ] {
            judge(&self.description().adapter, case, found, right, limit)?;
        }
        Ok(())
    }

    /// What runs.
    pub fn description(&self) -> Description {
        match self {
            Self::Cpu(engine) => engine.description(),
            Self::Gpu(engine) => engine.description(),
        }
    }

    /// The chunked form over whole sequences.
    ///
    /// # Errors
    /// As [`Problem::validate_host`]; [`Error::Unsupported`], [`Error::OutOfMemory`],
    /// [`Error::DeviceLost`]; [`Error::SelfTest`] from matrix units that are wrong when first used.
    pub async fn prefill(
        &self,
        problem: &Problem,
        tensors: &Tensors<&[f32]>,
        options: &PrefillOptions,
        progress: Progress<'_>,
    ) -> Result<Run> {
        problem.validate_host(tensors, options.allow_non_finite)?;
        if options.element == Element::F16 {
            check_half_range(problem, tensors)?;
        }
        match self {
            Self::Cpu(engine) => engine.prefill(problem, tensors, options, progress),
            Self::Gpu(engine) => {
                if engine.tier_of(problem, options) == Tier::Matrix
                    && engine.has_untested_matrix_units()
                {
                    test_matrix_units(engine).await?;
                }
                engine.prefill(problem, tensors, options, progress).await
            }
        }
    }

    /// A pool of `slots` zero states for problems with these heads and sizes.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::OutOfMemory`].
    pub async fn pool(&self, problem: &Problem, slots: usize) -> Result<Pool> {
        match self {
            Self::Cpu(engine) => Ok(Pool::Cpu(engine.pool(problem, slots)?)),
            Self::Gpu(engine) => {
                let pool = engine.pool(problem, slots);
                Ok(Pool::Gpu(engine.diagnosed(pool).await?))
            }
        }
    }

    /// The same with states that lie in memory as `state`: float16 halves what decode has to move, and rounds
    /// each state once a call; arithmetic stays float32. Values beyond float16's range become infinite.
    ///
    /// # Errors
    /// As [`Engine::pool`]; [`Error::Unsupported`] for float16 on the CPU, on a device without it, and for
    /// states of an odd number of values.
    pub async fn pool_with(&self, problem: &Problem, slots: usize, state: Element) -> Result<Pool> {
        match (self, state) {
            (_, Element::F32) => self.pool(problem, slots).await,
            (Self::Gpu(engine), _) => Ok(Pool::Gpu(engine.pool_with(problem, slots, state)?)),
            (Self::Cpu(_), _) => Err(Error::unsupported(
                "state storage type on the CPU",
                "float16",
                "float32",
            )),
        }
    }

    /// Continues the states in a pool by `problem.tokens` tokens (one, or a few) for each batch row.
    /// `problem` is not packed and has no initial state; the states in the pool are updated in place.
    /// Returns `o [B, T, HV, V]`, and the device time in milliseconds. Where an error is returned before
    /// anything ran, the pool is as it was.
    ///
    /// # Errors
    /// [`Error::Tensor`] for wrong inputs or rows, [`Error::Unsupported`], [`Error::DeviceLost`].
    pub async fn decode(
        &self,
        problem: &Problem,
        tensors: &Tensors<&[f32]>,
        pool: &mut Pool,
        rows: &[Row],
        options: &DecodeOptions,
    ) -> Result<(Vec<f32>, f64)> {
        validate_decode(problem, tensors)?;
        problem.validate_host(tensors, options.allow_non_finite)?;
        if options.element == Element::F16 {
            check_half_range(problem, tensors)?;
        }
        match (self, pool) {
            (Self::Cpu(engine), Pool::Cpu(pool)) => {
                engine.decode(problem, tensors, pool, rows, options)
            }
            (Self::Gpu(engine), Pool::Gpu(pool)) => {
                engine.decode(problem, tensors, pool, rows, options).await
            }
            _ => Err(Error::tensor(
                "the state pool",
                "one of this engine",
                "one of another",
            )),
        }
    }
}

/// The small known case of the self-tests.
fn test_case() -> (Problem, Tensors<Vec<f32>>) {
    let problem = Problem::new(Rule::Eda, [1, 37, 1, 2, 20, 12]);
    let tensors = generate::tensors(&problem, &generate::Recipe::default());
    (problem, tensors)
}

/// The self-test of matrix units that nobody asked for by name, before they are first used.
pub(crate) async fn test_matrix_units(engine: &GpuEngine) -> Result<()> {
    let (problem, tensors) = test_case();
    let tensors = tensors.slices();
    let right = reference::recurrence::<f64>(&problem, &tensors)?;
    let options = PrefillOptions {
        element: Element::F16,
        ..PrefillOptions::default()
    };
    let run = engine
        .prefill(&problem, &tensors, &options, &|_, _| {})
        .await?;
    let adapter = engine.description().adapter;
    for (case, found, right) in [
        ("prefill on matrix units", &run.outputs.o, &right.o),
        (
            "prefill's final state on matrix units",
            &run.outputs.final_state,
            &right.final_state,
        ),
    ] {
        judge(&adapter, case, found, right, Tier::Matrix.error_limit())?;
    }
    engine.test_matrix_units_first(false);
    Ok(())
}

/// Whether an answer of the self-test is right.
fn judge(adapter: &str, case: &str, found: &[f32], right: &[f64], limit: f64) -> Result<()> {
    let error = relative_error(found, right);
    if error <= limit {
        return Ok(());
    }
    Err(Error::SelfTest {
        adapter: adapter.to_owned(),
        case: case.to_owned(),
        error,
        limit,
    })
}

impl Pool {
    /// Number of slots.
    pub fn slots(&self) -> usize {
        match self {
            Self::Cpu(pool) => pool.slots(),
            Self::Gpu(pool) => pool.slots(),
        }
    }

    /// The state in `slot`, `[HV, K, V]`.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a slot that does not exist, [`Error::DeviceLost`].
    pub async fn read(&self, slot: usize) -> Result<Vec<f32>> {
        match self {
            Self::Cpu(pool) => pool.read(slot),
            Self::Gpu(pool) => pool.read(slot).await,
        }
    }

    /// Replaces the state in `slot` by `state [HV, K, V]`.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a slot that does not exist or a wrong length, [`Error::DeviceLost`].
    pub async fn write(&mut self, slot: usize, state: &[f32]) -> Result<()> {
        match self {
            Self::Cpu(pool) => pool.write(slot, state),
            Self::Gpu(pool) => pool.write(slot, state),
        }
    }

    /// Copies the state in slot `from` to slot `to` (prefix reuse).
    ///
    /// # Errors
    /// [`Error::Tensor`] for a slot that does not exist, [`Error::DeviceLost`].
    pub async fn copy(&mut self, from: usize, to: usize) -> Result<()> {
        match self {
            Self::Cpu(pool) => pool.copy(from, to),
            Self::Gpu(pool) => pool.copy(from, to),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "Driver computes garbage": one wrong value, a zero output, a NaN or a missing value refuse the adapter.
    #[test]
    fn the_self_test_refuses_a_wrong_answer_and_says_which() {
        let right: Vec<f64> = (0..100).map(|i| f64::from(i) - 50.0).collect();
        let found: Vec<f32> = right.iter().map(|&x| x as f32).collect();
        judge("gpu", "decode", &found, &right, 1e-5).expect("right");

        let wrong = |change: &dyn Fn(&mut Vec<f32>)| {
            let mut found = found.clone();
            change(&mut found);
            judge("gpu", "decode", &found, &right, 1e-5).expect_err("wrong")
        };
        let error = wrong(&|x| x[7] += 0.01);
        let message = error.to_string();
        assert!(
            message.contains("gpu") && message.contains("decode"),
            "{message}"
        );
        for error in [
            error,
            wrong(&|x| x.fill(0.0)),
            wrong(&|x| x[99] = f32::NAN),
            wrong(&|x| x[0] = f32::INFINITY),
            wrong(&|x| x.rotate_left(1)),
            wrong(&|x| x.truncate(99)),
        ] {
            assert!(matches!(error, Error::SelfTest { .. }), "{error}");
        }
    }
}
