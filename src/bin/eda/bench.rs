//! `eda bench`.

use crate::progress::Progress;
use crate::table::{Table, number, time};
use crate::{BackendName, Dtype, Failure, TierName, compare, output_file, print};
use clap::ValueEnum;
use eda_wgpu::bench::ceilings;
use eda_wgpu::bench::report::{self, Adapter, Case, Op, Pipelines, Report, Skipped, Timing};
use eda_wgpu::bench::run::{self, Plan, Spec};
use eda_wgpu::gpu::cache::Found;
use eda_wgpu::{Element, Engine, EngineOptions, Error, Rule, Tier};
use std::path::PathBuf;
use std::time::SystemTime;

/// Flags of `eda bench`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_long_help = "\
Inputs are random and lie on the device already; the final state is written within the time. On a GPU the
device is kept busy for 300 ms before the first sample. Times are those of the device's own clock where it
has one, else of the host's over many repetitions; the report says which.

Rates are made of what the problem asks for, not of what the kernels do, so that they compare:
  GFLOP/s  operations on the state in the token recurrence: for each token, value head and value of the state 1
           for the decay, 2 for each read and 2 for each write of a sub-step, 2 for the output (EDA: 11·K·V)
  GB/s     inputs, outputs and states, each once (decode: states read and written)
The shares are those of this adapter's own ceilings, measured in the same run: a float32 matrix product and a
copy in its memory. Prefill is given with --shape B,T,H,HV,K,V; in decode, T tokens (usually 1) are one step,
and a sample is the mean of dependent steps recorded together.

Without --shape, discrete GPUs run a large set (K = V = 128, 16 and more heads, up to 65,536 tokens), other GPUs
and the CPU engine a medium one, software drivers, and everything with --quick, a small one. To compare two
machines, give both the same shapes (or --quick).

Examples:
  eda bench                                               this machine's best adapter
  eda bench --json mine.json                              keep all samples
  eda bench --op prefill --rule eda,kda --shape 1,4096,16,16,128,128 --dtype f16
  eda bench --op decode --state f16                       states stored as float16
  eda bench --backend cpu --quick
  eda bench compare theirs.json mine.json --svg both.svg  tables and a picture of two such files")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    flags: Flags,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Compare runs: times and ratios of each case, the first file being the base.
    Compare(compare::Args),
}

#[derive(Debug, clap::Args)]
struct Flags {
    /// Time this alone. (With --shape: prefill where T is above 1, else decode.)
    #[arg(long, value_enum)]
    op: Option<OpName>,
    /// Update rules.
    #[arg(long, value_delimiter = ',', default_value = "eda", value_parser = Rule::ALL.map(Rule::name))]
    rule: Vec<String>,
    /// Sizes; may be given several times.
    #[arg(long, value_name = "B,T,H,HV,K,V", value_parser = shape, allow_hyphen_values = true)]
    shape: Vec<[usize; 6]>,
    /// What runs the work.
    #[arg(long, value_enum, default_value = "auto")]
    backend: BackendName,
    /// Part of an adapter's name, or its index in `eda adapters`.
    #[arg(long, value_name = "NAME|INDEX")]
    adapter: Option<String>,
    /// Kernel family.
    #[arg(long, value_enum, default_value = "auto")]
    tier: TierName,
    /// Type in which inputs and outputs are stored.
    #[arg(long, value_enum, default_value = "f32")]
    dtype: Dtype,
    /// Type in which decode stores states, on a GPU; those of prefill are float32.
    #[arg(long, value_enum, default_value = "f32")]
    state: Dtype,
    /// Tokens a chunk, in prefill; the engine chooses otherwise.
    #[arg(long, value_name = "N", value_parser = ["16", "32", "64"])]
    chunk: Option<String>,
    /// Segments that a long sequence is cut into on a GPU and that are computed at the same time, in prefill (1 for no
    /// cut); chosen otherwise.
    #[arg(long, value_name = "N", value_parser = crate::run::segments, allow_hyphen_values = true)]
    segments: Option<usize>,
    /// Small shapes, fewer samples.
    #[arg(long)]
    quick: bool,
    /// Write everything measured to this file, written beside and renamed.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// `--op`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OpName {
    /// The chunk form over whole sequences.
    Prefill,
    /// Tokens that continue states.
    Decode,
}

impl From<OpName> for Op {
    fn from(name: OpName) -> Self {
        match name {
            OpName::Prefill => Self::Prefill,
            OpName::Decode => Self::Decode,
        }
    }
}

/// Six sizes, none of them 0.
fn shape(text: &str) -> Result<[usize; 6], String> {
    let sizes: Result<Vec<usize>, _> = text.split(',').map(|s| s.trim().parse()).collect();
    match sizes.ok().and_then(|s| <[usize; 6]>::try_from(s).ok()) {
        Some(sizes) if !sizes.contains(&0) => Ok(sizes),
        _ => Err("expected six whole numbers above 0, B,T,H,HV,K,V".into()),
    }
}

impl Flags {
    /// Refuses flags that would have no effect.
    fn check(&self) -> Result<(), Failure> {
        if self.backend == BackendName::Cpu {
            let only_gpu = [
                ("--adapter", self.adapter.is_some()),
                ("--tier", self.tier != TierName::Auto),
                ("--state f16", self.state == Dtype::F16),
                ("--segments", self.segments.is_some()),
            ];
            if let Some((flag, _)) = only_gpu.iter().find(|(_, given)| *given) {
                return Err(Failure::Usage(format!(
                    "{flag}: expected a GPU backend, found --backend cpu"
                )));
            }
        }
        let only_in = [
            ("--chunk", self.chunk.is_some(), Op::Prefill),
            ("--tier matrix", self.tier == TierName::Matrix, Op::Prefill),
            ("--segments", self.segments.is_some(), Op::Prefill),
            ("--state f16", self.state == Dtype::F16, Op::Decode),
        ];
        match only_in
            .iter()
            .find(|(_, given, op)| *given && !self.runs(*op))
        {
            Some((flag, _, op)) => Err(Failure::Usage(format!(
                "{flag}: expected a case of {}, found none",
                op.name()
            ))),
            None => Ok(()),
        }
    }

    /// What is timed of a shape.
    fn op_of(&self, shape: &[usize; 6]) -> Op {
        match self.op {
            Some(op) => op.into(),
            None if shape[1] > 1 => Op::Prefill,
            None => Op::Decode,
        }
    }

    /// Whether any case is one of this operation.
    fn runs(&self, op: Op) -> bool {
        match (self.op, self.shape.is_empty()) {
            (None, true) => true,
            (Some(wanted), _) => Op::from(wanted) == op,
            (None, false) => self.shape.iter().any(|shape| self.op_of(shape) == op),
        }
    }

    fn rules(&self) -> eda_wgpu::Result<Vec<Rule>> {
        // DeltaProduct has two factors, as everywhere where nothing else is said.
        self.rule
            .iter()
            .map(|name| Rule::from_name(name, 2))
            .collect()
    }

    /// What to run on this engine, and what the set of shapes is called.
    fn specs(&self, engine: &Engine) -> eda_wgpu::Result<(&'static str, Vec<Spec>)> {
        let mut set = "given";
        let mut shapes: Vec<(Op, [usize; 6])> = Vec::new();
        if self.shape.is_empty() {
            for op in [Op::Prefill, Op::Decode] {
                if self.runs(op) {
                    let (name, sizes) = run::default_shapes(engine, op, self.quick);
                    set = name;
                    shapes.extend(sizes.into_iter().map(|s| (op, s)));
                }
            }
        }
        shapes.extend(self.shape.iter().map(|shape| (self.op_of(shape), *shape)));
        let mut specs: Vec<Spec> = Vec::new();
        for rule in self.rules()? {
            for &(op, shape) in &shapes {
                let spec = Spec {
                    op,
                    rule,
                    shape,
                    element: self.dtype.into(),
                    // One of three numbers by the parser.
                    chunk: self.chunk.as_ref().and_then(|n| n.parse().ok()),
                    segments: self.segments,
                };
                // What was asked for twice is measured once.
                if !specs.contains(&spec) {
                    specs.push(spec);
                }
            }
        }
        Ok((set, specs))
    }
}

/// Runs, or compares earlier runs.
pub(crate) fn bench(args: &Args, pipeline_cache: Option<PathBuf>) -> Result<(), Failure> {
    match &args.command {
        Some(Command::Compare(args)) => compare::compare(args),
        None => measure(&args.flags, pipeline_cache),
    }
}

fn measure(flags: &Flags, pipeline_cache: Option<PathBuf>) -> Result<(), Failure> {
    flags.check()?;
    let output = output_file(flags.json.as_deref(), std::iter::empty())?;
    let date = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let options = EngineOptions {
        backend: flags.backend.into(),
        adapter: flags.adapter.clone(),
        tier: flags.tier.into(),
        pipeline_cache,
        ..EngineOptions::default()
    };
    let engine = pollster::block_on(Engine::open(&options))?;
    crate::run::segments_on_a_gpu(&engine, flags.segments)?;
    let (set, specs) = flags.specs(&engine)?;
    let given = !flags.shape.is_empty();
    if given {
        // A size that no engine takes is a mistake to be told before anything is measured.
        for spec in &specs {
            spec.problem().validate()?;
        }
    }
    let plan = Plan::of(&engine, flags.quick);
    let state = flags.state.into();
    let bar = Progress::of("measurements");
    let total = specs.len() + 2;
    let pipelines = match &engine {
        Engine::Gpu(_) => Some(pipelines(&options, &specs, state)?),
        _ => None,
    };
    bar.update(1, total);
    let ceilings = pollster::block_on(ceilings::measure(&engine, &plan))?;
    bar.update(2, total);
    let mut cases = Vec::new();
    let mut skipped = Vec::new();
    for (i, spec) in specs.iter().enumerate() {
        match pollster::block_on(run::case_with(&engine, spec, state, &plan, &ceilings)) {
            Ok(case) => cases.push(case),
            // The sets are made for cards of all sizes; what does not fit a small one is left out, and said.
            Err(e @ (Error::Unsupported { .. } | Error::OutOfMemory { .. })) if !given => {
                skipped.push(Skipped {
                    case: spec.key(state).to_string(),
                    reason: e.to_string(),
                });
            }
            Err(Error::Unsupported { what, found, limit }) if specs.len() > 1 => {
                let what = format!("{}: {what}", spec.key(state));
                return Err(Error::unsupported(what, found, limit).into());
            }
            Err(e) => return Err(e.into()),
        }
        bar.update(i + 3, total);
    }
    drop(bar);
    if let (true, Some(first)) = (cases.is_empty(), skipped.first()) {
        return Err(Error::unsupported(
            first.case.clone(),
            first.reason.clone(),
            "what this adapter runs",
        )
        .into());
    }
    let report = Report {
        format: report::FORMAT.into(),
        crate_version: env!("CARGO_PKG_VERSION").into(),
        commit: option_env!("EDA_COMMIT").map(Into::into),
        date,
        os: std::env::consts::OS.into(),
        arch: std::env::consts::ARCH.into(),
        quick: flags.quick,
        tier: report::tier_of(&cases, &engine.description().tier),
        adapter: Adapter::of(&engine),
        ceilings,
        pipelines,
        cases,
        skipped,
    };
    if let Some(output) = output {
        output.finish_with(|sink| {
            serde_json::to_writer_pretty(&mut *sink, &report)?;
            sink.write_all(b"\n")
        })?;
    }
    let disk = match &engine {
        Engine::Gpu(gpu) => gpu.pipeline_cache().map(|cache| cache.found()),
        _ => None,
    };
    print(&summary(
        &report,
        set,
        disk,
        options.pipeline_cache.is_some(),
    ))
}

/// Times the building of pipelines on a new device, and on another one that finds what the first left on disk.
/// The user's own cache has no part in it.
fn pipelines(
    options: &EngineOptions,
    specs: &[Spec],
    state: Element,
) -> Result<Pipelines, Failure> {
    let directory = tempfile::tempdir().ok();
    let build = || -> eda_wgpu::Result<Option<(usize, f64, bool)>> {
        let engine = pollster::block_on(Engine::open(&EngineOptions {
            skip_self_test: true,
            pipeline_cache: directory.as_ref().map(|d| d.path().to_owned()),
            ..options.clone()
        }))?;
        let Engine::Gpu(engine) = &engine else {
            return Ok(None);
        };
        let (count, ms) = run::build_pipelines(engine, specs, state)?;
        let kept = engine.pipeline_cache().map(|cache| cache.found());
        Ok(Some((count, ms, kept == Some(Found::Pipelines))))
    };
    let (count, first_ms) = build()?.map_or((0, 0.0), |(count, ms, _)| (count, ms));
    let second_ms = match build()? {
        Some((_, ms, true)) => Some(ms),
        _ => None,
    };
    Ok(Pipelines {
        count,
        first_ms,
        second_ms,
    })
}

/// How a prefill was cut, and the tier where it is not that of every adapter.
fn chunk_of(case: &Case) -> String {
    let Some(chunk) = case.chunk else {
        return "-".into();
    };
    let mut text = chunk.to_string();
    if case.segments > 0 {
        text += &format!(", {} segments", case.segments);
    }
    if case.tier.as_deref() == Some(Tier::Matrix.name()) {
        text += ", matrix";
    }
    text
}

/// For people.
fn summary(report: &Report, set: &str, disk: Option<Found>, cached: bool) -> String {
    let mut text = compare::headline(report);
    text.push('\n');
    let report::Ceilings { copy, product } = &report.ceilings;
    text += &format!(
        "ceilings   copy {} GB/s ({} MiB), float32 product {} GFLOP/s ({n} x {n} x {n})\n",
        number(copy.gb_per_s),
        copy.bytes >> 20,
        number(product.gflop_per_s),
        n = product.size,
    );
    if let Some(p) = &report.pipelines {
        let again = match p.second_ms {
            Some(ms) => format!("{} from a saved cache", time(ms)),
            None => "no pipeline cache on this adapter".into(),
        };
        text += &format!(
            "pipelines  {} built in {}; {again}\n",
            p.count,
            time(p.first_ms)
        );
        let kept = match disk {
            Some(Found::Pipelines) => "pipelines of an earlier run were found",
            Some(Found::Nothing) => "kept for the next run",
            Some(Found::Refused) => {
                "what was there is damaged, foreign or open to others, and was not used"
            }
            None if cached => "none on this adapter",
            None => "off",
        };
        text += &format!("cache      {kept}\n");
    }
    let clocks: Vec<&str> = [Timing::Timestamps, Timing::Wall]
        .into_iter()
        .filter(|&t| report.cases.iter().any(|c| c.times.timing == t))
        .map(Timing::name)
        .collect();
    text += &format!(
        "shapes     {}, timed by {}\n\n",
        match set {
            "given" => "as given".into(),
            set => format!("the {set} set"),
        },
        clocks.join(" and ")
    );
    let mut table = Table::new([
        "case",
        "chunk",
        "time",
        "min..max",
        "tokens/s",
        "GFLOP/s",
        "of product",
        "GB/s",
        "of copy",
    ]);
    for c in &report.cases {
        table.row([
            c.key().to_string(),
            chunk_of(c),
            time(c.median_ms),
            format!("{}..{}", time(c.min_ms), time(c.max_ms)),
            number(c.tokens_per_s),
            number(c.gflop_per_s),
            share(c.share_of_product),
            number(c.gb_per_s),
            share(c.share_of_copy),
        ]);
    }
    text += &table.plain();
    for line in report.cases.iter().filter_map(long_run) {
        text += &line;
    }
    for s in &report.skipped {
        text += &format!("not run: {}: {}\n", s.case, s.reason);
    }
    text
}

fn share(share: f64) -> String {
    format!("{} %", number(share * 100.0))
}

/// One line on a long row of decode steps.
fn long_run(case: &Case) -> Option<String> {
    let run = case.long_run.as_ref()?;
    Some(format!(
        "{}: {} steps in one submission, {} a step in the first {n}, {} in the last {n}\n",
        case.key(),
        run.steps,
        time(run.first_ms),
        time(run.last_ms),
        n = run.block,
    ))
}
