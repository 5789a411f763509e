//! `eda run`.

use crate::progress::{self, Progress};
use crate::report::Report;
use crate::{BackendName, Dtype, Failure, TierName, output_file, print, print_json};
use clap::ValueEnum;
use eda_wgpu::engine::{Description, Run};
use eda_wgpu::file::{self, Input, ReadOptions};
use eda_wgpu::gpu::segments::MOST;
use eda_wgpu::{
    Backend, DecodeOptions, Engine, EngineOptions, Error, Outputs, PrefillOptions, Problem, Rule,
    relative_error,
};
use std::path::PathBuf;
use std::time::Instant;

/// Flags of `eda run`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The file holds q, k, v and what else the rule takes (e, g, beta, gamma, p, a, b, w), as F32, F16, BF16
or F64; optionally initial_state and cu_seqlens (I32 or I64). Raw layer inputs are known by name: a with
A_log and dt_bias in place of g, beta_logit and gamma_logit in place of beta and gamma; q, k and e are
then normalised unless metadata `raw` is false. Other metadata: rule, scale, householders, lower_bound,
decay_gate (safe, sigmoid, softplus), allow_neg_eigval. Where the file holds expected_o or
expected_final_state, the relative l2 errors are printed.

Examples:
  eda run layer.safetensors -o out.safetensors
  eda run layer.safetensors --mode decode --json
  eda run layer.safetensors --backend vulkan --adapter llvmpipe --chunk 32
  eda run layer.safetensors --split 100,250        (must give the same as without)")]
pub(crate) struct Args {
    /// File with the inputs.
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    /// File for o and final_state (float32), written beside and renamed. Without it nothing is written.
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: Option<PathBuf>,
    /// Update rule, instead of the one in the file's metadata.
    #[arg(long, value_parser = Rule::ALL.map(Rule::name))]
    rule: Option<String>,
    /// What runs the work.
    #[arg(long, value_enum, default_value = "auto")]
    backend: BackendName,
    /// Part of an adapter's name, or its index in `eda adapters`.
    #[arg(long, value_name = "NAME|INDEX")]
    adapter: Option<String>,
    /// Kernel family.
    #[arg(long, value_enum, default_value = "auto")]
    tier: TierName,
    /// How the tokens are fed.
    #[arg(long, value_enum, default_value = "chunk")]
    mode: Mode,
    /// Tokens a chunk (mode chunk only); the engine chooses otherwise.
    #[arg(long, value_name = "N", value_parser = ["16", "32", "64"])]
    chunk: Option<String>,
    /// Segments that a long sequence is cut into on a GPU and that are computed at the same time (mode chunk only;
    /// 1 for no cut); the engine chooses otherwise.
    #[arg(long, value_name = "N", value_parser = segments, allow_hyphen_values = true)]
    segments: Option<usize>,
    /// Factor on the output, instead of the file's or K^-1/2.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    scale: Option<f32>,
    /// Divide q, k and e by sqrt(sum of squares + 1e-6), whatever the file says.
    #[arg(long)]
    normalize: bool,
    /// Cut the tokens at these positions and carry the state (mode chunk only).
    #[arg(long, value_name = "T1,T2,…", value_delimiter = ',')]
    split: Vec<usize>,
    /// Type in which inputs and outputs are stored (modes chunk and decode); states are float32.
    #[arg(long, value_enum, default_value = "f32")]
    dtype: Dtype,
    /// Take NaN and infinities as they are instead of refusing them; what comes out is then not defined.
    #[arg(long)]
    allow_non_finite: bool,
    /// Print one JSON object instead of the summary. An error that is not finite is 1.797e308 there.
    #[arg(long)]
    json: bool,
}

/// `--mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// The chunked form over whole sequences (prefill).
    Chunk,
    /// Token by token through the decode path, on a pool of states.
    Decode,
    /// The float64 reference, on the processor.
    Recurrent,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Mode::Chunk => "chunk",
            Mode::Decode => "decode",
            Mode::Recurrent => "recurrent",
        }
    }
}

impl Args {
    /// Refuses flags that would have no effect: whoever gave them expects one.
    fn check(&self) -> Result<(), Failure> {
        let mode = self.mode.name();
        let only_chunk = [
            ("--chunk", self.chunk.is_some()),
            ("--segments", self.segments.is_some()),
            ("--split", !self.split.is_empty()),
        ];
        if self.mode != Mode::Chunk
            && let Some((flag, _)) = only_chunk.iter().find(|(_, given)| *given)
        {
            return Err(Failure::Usage(format!(
                "{flag}: expected --mode chunk, found --mode {mode}"
            )));
        }
        let on_cpu = match (self.mode, self.backend) {
            (Mode::Recurrent, BackendName::Auto | BackendName::Cpu) => "--mode recurrent",
            (Mode::Recurrent, _) => {
                return Err(Failure::Usage(
                    "--backend: expected auto or cpu with --mode recurrent, which runs on the \
                     processor, found another"
                        .into(),
                ));
            }
            (_, BackendName::Cpu) => "--backend cpu",
            _ => return Ok(()),
        };
        let only_gpu = [
            ("--adapter", self.adapter.is_some()),
            ("--tier", self.tier != TierName::Auto),
            ("--segments", self.segments.is_some()),
            (
                "--dtype f16",
                self.dtype == Dtype::F16 && self.mode == Mode::Recurrent,
            ),
        ];
        match only_gpu.iter().find(|(_, given)| *given) {
            Some((flag, _)) => Err(Failure::Usage(format!(
                "{flag}: expected a GPU backend, found {on_cpu}"
            ))),
            None => Ok(()),
        }
    }
}

/// Refuses segments where no GPU was found: the CPU engine, which then runs, has none.
pub(crate) fn segments_on_a_gpu(engine: &Engine, asked: Option<usize>) -> eda_wgpu::Result<()> {
    match (engine, asked) {
        (Engine::Cpu(_), Some(n)) => Err(Error::NoAdapter(format!(
            "--segments {n} was asked for, and there is no GPU (software drivers run only when their backend or name \
             is given)"
        ))),
        _ => Ok(()),
    }
}

/// `--segments`.
pub(crate) fn segments(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=MOST).contains(&n) => Ok(n),
        _ => Err(format!("expected a whole number from 1 to {MOST}")),
    }
}

/// Reads, computes, writes, reports.
pub(crate) fn run(args: &Args, pipeline_cache: Option<PathBuf>) -> Result<(), Failure> {
    args.check()?;
    let inputs = std::iter::once(args.input.as_path());
    let output = output_file(args.output.as_deref(), inputs)?;
    let about = |error| Failure::Library {
        file: Some(args.input.clone()),
        error,
    };
    let options = ReadOptions {
        rule: args.rule.clone(),
        scale: args.scale,
        normalize: args.normalize,
        allow_non_finite: args.allow_non_finite,
    };
    let input = file::read(&args.input, &options).map_err(about)?;
    reserve(&input.problem).map_err(about)?;
    let (report, outputs) = compute(args, &input, pipeline_cache).map_err(about)?;
    if let Some(output) = output {
        output.finish(&input.problem, &outputs, &report.metadata(&input.problem))?;
    }
    if args.json {
        return print_json(&report);
    }
    match report.summary(&input.problem, &args.input, args.output.as_deref()) {
        Ok(text) => print(&text),
        Err(e) => Err(Failure::Stdout(std::io::Error::other(e))),
    }
}

/// Asks for the memory of the outputs and gives it back: a small file of many sequences may ask for
/// more states than there is memory, and an engine's own allocation would abort.
fn reserve(problem: &Problem) -> eda_wgpu::Result<()> {
    let values = problem.output_len().saturating_add(problem.states_len());
    // The reference holds its outputs twice in float64.
    Vec::<[f64; 2]>::new()
        .try_reserve_exact(values)
        .map_err(|_| {
            Error::unsupported("values in the outputs", values, "what the memory can hold")
        })
}

/// The processor, as the CPU engine calls it.
fn reference() -> eda_wgpu::Result<Description> {
    let options = EngineOptions {
        backend: Backend::Cpu,
        ..EngineOptions::default()
    };
    let cpu = pollster::block_on(Engine::open(&options))?.description();
    Ok(Description {
        tier: "reference".into(),
        ..cpu
    })
}

fn compute(
    args: &Args,
    input: &Input,
    pipeline_cache: Option<PathBuf>,
) -> eda_wgpu::Result<(Report, Outputs)> {
    let Input {
        problem,
        tensors,
        expected,
    } = input;
    let tensors = tensors.slices();
    if args.mode == Mode::Recurrent {
        let ran = reference()?;
        let start = Instant::now();
        let outputs = progress::spin("float64 reference", || {
            eda_wgpu::reference::recurrence::<f64>(problem, &tensors)
        })?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        // Its arithmetic is float64; the type that lies in memory is what the file's values became.
        let mut report = Report::new(problem, ran, args.mode.name(), "f32");
        (report.compute_ms, report.wall_ms) = (ms, ms);
        // Judged before the outputs are rounded to float32.
        report.error_o = expected.o.as_ref().map(|e| relative_error(&outputs.o, e));
        report.error_final_state = expected
            .final_state
            .as_ref()
            .map(|e| relative_error(&outputs.final_state, e));
        let round = |values: Vec<f64>| values.into_iter().map(|x| x as f32).collect();
        let outputs = Outputs {
            o: round(outputs.o),
            final_state: round(outputs.final_state),
        };
        return Ok((report, outputs));
    }

    let engine = pollster::block_on(Engine::open(&EngineOptions {
        backend: args.backend.into(),
        adapter: args.adapter.clone(),
        tier: args.tier.into(),
        pipeline_cache,
        ..EngineOptions::default()
    }))?;
    segments_on_a_gpu(&engine, args.segments)?;
    let mut ran = engine.description();
    let options = PrefillOptions {
        // One of three numbers by the parser.
        chunk: args.chunk.as_ref().and_then(|n| n.parse().ok()),
        segments: args.segments,
        element: args.dtype.into(),
        allow_non_finite: args.allow_non_finite,
    };
    let bar = Progress::start();
    let on_progress = |done, total| bar.update(done, total);
    let start = Instant::now();
    let run: Run = pollster::block_on(async {
        match args.mode {
            Mode::Decode => {
                eda_wgpu::sequential::decode(
                    &engine,
                    problem,
                    &tensors,
                    &DecodeOptions {
                        element: args.dtype.into(),
                        allow_non_finite: args.allow_non_finite,
                    },
                    &on_progress,
                )
                .await
            }
            _ if !args.split.is_empty() => {
                let points = &args.split;
                eda_wgpu::split::prefill(&engine, problem, &tensors, points, &options, &on_progress)
                    .await
            }
            _ => {
                engine
                    .prefill(problem, &tensors, &options, &on_progress)
                    .await
            }
        }
    })?;
    let wall_ms = start.elapsed().as_secs_f64() * 1e3;
    if let Some(tier) = run.tier {
        tier.name().clone_into(&mut ran.tier);
    }
    let dtype = match args.dtype {
        Dtype::F32 => "f32",
        Dtype::F16 => "f16",
    };
    let mut report = Report::new(problem, ran, args.mode.name(), dtype);
    (report.compute_ms, report.wall_ms) = (run.compute_ms, wall_ms);
    report.segments = run.segments;
    report.error_o = expected
        .o
        .as_ref()
        .map(|e| relative_error(&run.outputs.o, e));
    report.error_final_state = expected
        .final_state
        .as_ref()
        .map(|e| relative_error(&run.outputs.final_state, e));
    Ok((report, run.outputs))
}
