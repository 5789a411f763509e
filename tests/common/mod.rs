//! What the integration tests share: the engines under test, the cases in `tests/data`, a table of errors.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod golden;

use eda_wgpu::battery::{self, LIMIT, LIMIT_F16};
use eda_wgpu::engine::DecodeOptions;
use eda_wgpu::generate::{self, Recipe};
use eda_wgpu::{
    Backend, Element, Engine, EngineOptions, Error, Outputs, Pool, PrefillOptions, Problem, Result,
    Row, Rule, Tensors, reference, relative_error,
};
use std::fmt::Write as _;
use std::future::Future;
use std::sync::OnceLock;

/// Runs a future to its end.
pub fn wait<F: Future>(future: F) -> F::Output {
    pollster::block_on(future)
}

/// The engines under test: the CPU engine and a GPU (a software Vulkan driver counts as one). They are
/// opened once per test binary and shared by its threads. `EDA_TEST_ADAPTER` (part of a name, or an
/// index) picks the adapter where there are several.
///
/// A machine without any GPU driver fails the tests: skipped GPU tests would look like passed ones.
pub fn engines() -> &'static [Engine] {
    static ENGINES: OnceLock<Vec<Engine>> = OnceLock::new();
    ENGINES.get_or_init(|| {
        let open = |backend, adapter| {
            wait(Engine::open(&EngineOptions {
                backend,
                adapter,
                ..EngineOptions::default()
            }))
        };
        let backend = if cfg!(target_os = "macos") {
            Backend::Metal
        } else if cfg!(windows) {
            Backend::Dx12
        } else {
            Backend::Vulkan
        };
        let cpu = open(Backend::Cpu, None).expect("the CPU engine always opens");
        match open(backend, std::env::var("EDA_TEST_ADAPTER").ok()) {
            Ok(gpu) => vec![cpu, gpu],
            Err(error) => panic!(
                "these tests need a GPU driver, and opening {backend:?} gave: {error}\n\
                 A software driver is enough: on Debian or Ubuntu `apt-get install mesa-vulkan-drivers libvulkan1`,\n\
                 on Fedora `dnf install mesa-vulkan-drivers vulkan-loader`, on Arch `pacman -S vulkan-swrast vulkan-icd-loader`."
            ),
        }
    })
}

/// `cpu`, `vulkan`, …: which engine a message is about.
pub fn label(engine: &Engine) -> String {
    engine.description().backend
}

/// Options with this chunk size and float32.
pub fn chunk(chunk: usize) -> PrefillOptions {
    PrefillOptions {
        chunk: Some(chunk),
        ..PrefillOptions::default()
    }
}

/// Options with float16 storage.
pub fn half() -> PrefillOptions {
    PrefillOptions {
        element: Element::F16,
        ..PrefillOptions::default()
    }
}

/// A prefill without progress.
pub fn prefill(
    engine: &Engine,
    problem: &Problem,
    tensors: &Tensors<Vec<f32>>,
    options: &PrefillOptions,
) -> Result<Outputs> {
    let run = wait(engine.prefill(problem, &tensors.slices(), options, &|_, _| {}))?;
    Ok(run.outputs)
}

/// Prefill up to token `at` of each sequence and decode from there, `step` tokens a call.
pub fn decode(
    engine: &Engine,
    problem: &Problem,
    tensors: &Tensors<Vec<f32>>,
    at: usize,
    step: usize,
) -> Result<Outputs> {
    let tensors = tensors.slices();
    wait(battery::decode(
        engine,
        problem,
        &tensors,
        at,
        step,
        Element::F32,
    ))
}

/// A decode call with the default options; returns `o`.
pub fn decode_rows(
    engine: &Engine,
    problem: &Problem,
    tensors: &Tensors<Vec<f32>>,
    pool: &mut Pool,
    rows: &[Row],
) -> Result<Vec<f32>> {
    let options = DecodeOptions::default();
    let (o, _) = wait(engine.decode(problem, &tensors.slices(), pool, rows, &options))?;
    Ok(o)
}

/// The float64 reference.
pub fn exact(problem: &Problem, tensors: &Tensors<Vec<f32>>) -> Outputs<f64> {
    reference::recurrence(problem, &tensors.slices()).expect("a valid problem")
}

/// Larger of the errors of `o` and `final_state`.
pub fn error(outputs: &Outputs, expected: &Outputs<f64>) -> f64 {
    relative_error(&outputs.o, &expected.o)
        .max(relative_error(&outputs.final_state, &expected.final_state))
}

/// What an engine may be off by on this problem. Float32 rounding alone, token by token, costs about 2e-7
/// on generated problems; where it costs more (a state that almost cancels, reflections that never
/// forget), 1e-5 would measure the problem and not the engine, so the limit follows that error, never
/// below 1e-5.
pub fn limit(problem: &Problem, tensors: &Tensors<Vec<f32>>, expected: &Outputs<f64>) -> f64 {
    let rounded =
        reference::recurrence::<f32>(problem, &tensors.slices()).expect("a valid problem");
    (20.0 * error(&rounded, expected)).max(LIMIT)
}

/// Asserts that a prefill with the default options agrees with float64.
pub fn assert_right(engine: &Engine, what: &str, problem: &Problem, recipe: &Recipe) {
    assert_tensors_right(engine, what, problem, &generate::tensors(problem, recipe));
}

/// The same for given inputs.
pub fn assert_tensors_right(
    engine: &Engine,
    what: &str,
    problem: &Problem,
    tensors: &Tensors<Vec<f32>>,
) {
    let outputs = prefill(engine, problem, tensors, &PrefillOptions::default());
    assert_outputs_right(engine, what, outputs, &exact(problem, tensors));
}

/// Asserts that a run went well and agrees with float64 to [`LIMIT`].
pub fn assert_outputs_right(
    engine: &Engine,
    what: &str,
    outputs: Result<Outputs>,
    expected: &Outputs<f64>,
) {
    let engine = label(engine);
    let outputs = outputs.unwrap_or_else(|e| panic!("{what} on {engine}: {e}"));
    let error = error(&outputs, expected);
    assert!(error <= LIMIT, "{what} on {engine}: error {error:.2e}");
}

/// Errors by case, printed as a table if one is over its limit.
#[derive(Default)]
pub struct Table {
    rows: String,
    failed: usize,
    cases: usize,
}

impl Table {
    /// Adds the result of a case.
    pub fn add(
        &mut self,
        case: &str,
        engine: &Engine,
        mode: &str,
        outputs: Result<Outputs>,
        expected: &Outputs<f64>,
        limit: f64,
    ) {
        let (measured, right) = match outputs {
            Ok(outputs) => {
                let o = relative_error(&outputs.o, &expected.o);
                let state = relative_error(&outputs.final_state, &expected.final_state);
                (
                    format!("o {o:.2e}  final_state {state:.2e}"),
                    o <= limit && state <= limit,
                )
            }
            Err(error) => (error.to_string(), false),
        };
        let mark = if right { "  " } else { "✗ " };
        let engine = label(engine);
        let _ = writeln!(
            self.rows,
            "{mark}{case:<24} {engine:<8} {mode:<14} {measured}"
        );
        self.cases += 1;
        self.failed += usize::from(!right);
    }

    /// Panics with the table if a case failed, or if there was none.
    pub fn finish(self) {
        assert!(self.cases > 0, "no case ran");
        assert!(
            self.failed == 0,
            "{} of {} cases failed:\n{}",
            self.failed,
            self.cases,
            self.rows
        );
    }
}

/// Whether an engine stores float16; an engine that does not must say so with the right error.
pub fn offers_half(engine: &Engine) -> bool {
    let problem = Problem::new(Rule::Eda, [1, 1, 1, 1, 4, 4]);
    let tensors = generate::tensors(&problem, &Recipe::default());
    match prefill(engine, &problem, &tensors, &half()) {
        Ok(_) => true,
        Err(Error::Unsupported { .. }) => false,
        Err(error) => panic!("float16 on {}: {error}", label(engine)),
    }
}

/// Largest error of float16 storage that passes.
pub const HALF: f64 = LIMIT_F16;
