//! What a benchmark run leaves: the JSON of `eda bench --json`, which a browser's run leaves as well.
//!
//! The types hold numbers as they were measured and what follows from them, so that a file can be read without
//! this crate. Reading, [`Report::check`] finds what no measurement can have been.

use super::count;
use crate::cpu;
use crate::engine::{Element, Engine, Tier};
use crate::gpu::plan::CHUNK_SIZES;
use crate::gpu::segments::MOST as MOST_SEGMENTS;
use crate::problem::{MAX_ROWS, Problem};
use crate::rule::{MAX_SUBSTEPS, Rule};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fmt;

/// The value of [`Report::format`].
pub const FORMAT: &str = "eda-bench/1";
/// A longer sample is a mistake: a day, in milliseconds.
pub const LONGEST_MS: f64 = 86_400_000.0;
/// No size of a shape is larger.
const LARGEST_SIZE: usize = u32::MAX as usize;

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`FORMAT`].
    pub format: String,
    /// Version of this crate.
    pub crate_version: String,
    /// Commit that it was built from, followed by `-modified` where the sources differed; null where unknown.
    #[serde(default)]
    pub commit: Option<String>,
    /// When the run began, UTC, as in `2026-06-30T12:00:00Z`.
    pub date: String,
    /// Operating system, `browser` in one.
    pub os: String,
    /// Processor architecture.
    pub arch: String,
    /// Fewer samples were taken, of small shapes.
    pub quick: bool,
    /// What ran.
    pub adapter: Adapter,
    /// Kernel family of the prefills, both where they differ; `cpu` for the CPU engine.
    pub tier: String,
    /// What this adapter does at most, measured in the same run.
    pub ceilings: Ceilings,
    /// Time to build the pipelines; null for the CPU engine.
    #[serde(default)]
    pub pipelines: Option<Pipelines>,
    /// What was timed.
    pub cases: Vec<Case>,
    /// Cases that this adapter could not run.
    #[serde(default)]
    pub skipped: Vec<Skipped>,
}

/// What ran the work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adapter {
    /// Name of the adapter, or of the processor for the CPU engine.
    pub name: String,
    /// `vulkan`, `metal`, `dx12`, `gl`, `webgpu` or `cpu`.
    pub backend: String,
    /// `discrete`, `integrated`, `virtual`, `software`, `other` or `cpu`.
    pub device_type: String,
    /// PCI vendor, 0 where unknown.
    pub vendor_id: u32,
    /// PCI device, 0 where unknown.
    pub device_id: u32,
    /// Driver.
    pub driver: String,
    /// Its version and what else it says of itself.
    pub driver_info: String,
}

impl Adapter {
    /// What an engine runs on.
    pub fn of(engine: &Engine) -> Self {
        let description = engine.description();
        let info = match engine {
            Engine::Gpu(engine) => Some(engine.kernels().device().adapter_info()),
            Engine::Cpu(_) => None,
        };
        let (vendor_id, device_id) = info.as_ref().map_or((0, 0), |i| (i.vendor, i.device));
        let (driver, driver_info) = match info {
            Some(info) => (info.driver, info.driver_info),
            None => (description.driver, String::new()),
        };
        Self {
            name: description.adapter,
            backend: description.backend,
            device_type: description.kind,
            vendor_id,
            device_id,
            driver,
            driver_info,
        }
    }
}

/// How times were taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Timing {
    /// The device's own clock, before the first and after the last pass.
    Timestamps,
    /// The host's clock, from the first submission to the completion of the last, divided by the number of
    /// repetitions.
    Wall,
}

impl Timing {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Timing::Timestamps => "the device's clock",
            Timing::Wall => "the host's clock",
        }
    }
}

/// Samples of one measurement, in the order in which they were taken.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Samples {
    /// How times were taken.
    pub timing: Timing,
    /// Repetitions that a sample is the mean of.
    pub repetitions: usize,
    /// All samples, milliseconds.
    pub samples_ms: Vec<f64>,
}

impl Samples {
    /// The median, milliseconds; the mean of the middle two where there is no middle one. 0 without samples.
    pub fn median_ms(&self) -> f64 {
        let mut sorted = self.samples_ms.clone();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => 0.0,
            n if n % 2 == 1 => sorted[n / 2],
            n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
        }
    }

    /// The shortest, milliseconds.
    pub fn min_ms(&self) -> f64 {
        self.samples_ms.iter().copied().fold(f64::MAX, f64::min)
    }

    /// The longest, milliseconds.
    pub fn max_ms(&self) -> f64 {
        self.samples_ms.iter().copied().fold(0.0, f64::max)
    }
}

/// What the adapter does at most.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// A copy in device memory.
    pub copy: Copy,
    /// A float32 matrix product.
    pub product: Product,
}

/// `shaders/ceiling_copy.wgsl`, or copies by all threads on the CPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Copy {
    /// Bytes copied; as many are read as are written.
    pub bytes: u64,
    /// Times.
    pub times: Samples,
    /// Median time, milliseconds.
    pub median_ms: f64,
    /// Bytes read and bytes written, 10⁹ a second at the median time.
    pub gb_per_s: f64,
}

/// `shaders/ceiling_product.wgsl`, or the `gemm` crate on all threads on the CPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Product {
    /// Rows and columns of the square matrices.
    pub size: usize,
    /// Times.
    pub times: Samples,
    /// Median time, milliseconds.
    pub median_ms: f64,
    /// 2·size³ operations, 10⁹ a second at the median time.
    pub gflop_per_s: f64,
}

impl Copy {
    /// From its times.
    pub fn new(bytes: u64, times: Samples) -> Self {
        let median_ms = times.median_ms();
        Self {
            bytes,
            median_ms,
            gb_per_s: rate(2.0 * bytes as f64, median_ms),
            times,
        }
    }
}

impl Product {
    /// From its times.
    pub fn new(size: usize, times: Samples) -> Self {
        let median_ms = times.median_ms();
        Self {
            size,
            median_ms,
            gflop_per_s: rate(2.0 * (size as f64).powi(3), median_ms),
            times,
        }
    }
}

/// 10⁹ a second.
fn rate(count: f64, ms: f64) -> f64 {
    if ms > 0.0 { count / ms * 1e-6 } else { 0.0 }
}

/// Time to build the pipelines of all cases, from WGSL text to what the driver runs. A driver may have a cache
/// of its own, which makes the first time shorter than it would be on a new machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pipelines {
    /// Pipelines built.
    pub count: usize,
    /// On a new device, with an empty pipeline cache: milliseconds.
    pub first_ms: f64,
    /// On another new device, with the cache that the first one left on disk: milliseconds. Null where the
    /// adapter has no `PIPELINE_CACHE`.
    #[serde(default)]
    pub second_ms: Option<f64>,
}

/// Whole sequences, or one call of decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// The chunk form over whole sequences, all passes.
    Prefill,
    /// Tokens that continue states.
    Decode,
}

impl Op {
    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Op::Prefill => "prefill",
            Op::Decode => "decode",
        }
    }
}

/// What makes two cases comparable.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Prefill or decode.
    pub op: Op,
    /// [Name](Rule::name) of the rule.
    pub rule: String,
    /// Delta steps a token (DeltaProduct's `n`; 1 for other rules).
    pub factors: usize,
    /// `[B, T, H, HV, K, V]`; `T` is the number of tokens of one call.
    pub shape: [usize; 6],
    /// Type in which inputs and outputs are stored.
    pub dtype: Element,
    /// Type in which decode stores states; float32 in prefill.
    pub state: Element,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [b, t, h, hv, k, v] = self.shape;
        write!(f, "{} {}", self.op.name(), self.rule)?;
        if self.factors > 1 {
            write!(f, " n={}", self.factors)?;
        }
        write!(f, " {b},{t},{h},{hv},{k},{v} {}", self.dtype.name())?;
        match self.state {
            Element::F32 => Ok(()),
            state => write!(f, " state {}", state.name()),
        }
    }
}

impl Key {
    /// The key of a problem with float32 states.
    pub fn new(op: Op, problem: &Problem, dtype: Element) -> Self {
        Self {
            op,
            rule: problem.rule.name().to_owned(),
            factors: problem.rule.update().factors,
            shape: [
                problem.batch,
                problem.tokens,
                problem.heads,
                problem.value_heads,
                problem.key_dim,
                problem.value_dim,
            ],
            dtype,
            state: Element::F32,
        }
    }
}

/// One case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// Prefill or decode.
    pub op: Op,
    /// [Name](Rule::name) of the rule.
    pub rule: String,
    /// Delta steps a token (DeltaProduct's `n`; 1 for other rules).
    pub factors: usize,
    /// `[B, T, H, HV, K, V]`; `T` is the number of tokens of one call.
    pub shape: [usize; 6],
    /// Type in which inputs and outputs are stored.
    pub dtype: Element,
    /// Type in which decode stores states, float32 in prefill; so where it is absent.
    #[serde(default)]
    pub state: Element,
    /// Tokens a chunk; null in decode, and where the engine did not say.
    #[serde(default)]
    pub chunk: Option<usize>,
    /// The most segments of sequences that a prefill computes at the same time; 0 where none is cut, and where the file
    /// does not say.
    #[serde(default)]
    pub segments: usize,
    /// Kernel family of a prefill on a GPU; null in decode, and where the file does not say.
    #[serde(default)]
    pub tier: Option<String>,
    /// Dependent calls recorded together, of which a sample is the mean; 1 in prefill.
    pub steps: usize,
    /// The final state is written within the time: always in this version.
    pub final_state_written: bool,
    /// The device was kept busy this long before the first sample, milliseconds.
    pub warm_up_ms: f64,
    /// Times.
    pub times: Samples,
    /// Median time, milliseconds.
    pub median_ms: f64,
    /// Shortest time, milliseconds.
    pub min_ms: f64,
    /// Longest time, milliseconds.
    pub max_ms: f64,
    /// Operations of the token recurrence, 10⁹: [`count::flops`].
    pub gflops: f64,
    /// Inputs, outputs and states, each once, 10⁹ bytes: [`count::bytes`].
    pub gbytes: f64,
    /// `B · T` a second at the median time.
    pub tokens_per_s: f64,
    /// `gflops` a second at the median time.
    pub gflop_per_s: f64,
    /// `gbytes` a second at the median time.
    pub gb_per_s: f64,
    /// `gflop_per_s` over the product's; above 1 where matrix units do what the float32 product cannot.
    pub share_of_product: f64,
    /// `gb_per_s` over the copy's; above 1 where what is moved stays in a cache that the copy does not fit.
    pub share_of_copy: f64,
    /// A long row of decode steps; null in prefill and where the device has no clock.
    #[serde(default)]
    pub long_run: Option<LongRun>,
}

/// Many dependent decode steps in one submission, block by block: whether time grows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LongRun {
    /// Steps in all.
    pub steps: usize,
    /// Steps a block.
    pub block: usize,
    /// Time of a step, the mean of each block, milliseconds.
    pub block_ms: Vec<f64>,
    /// The first of them.
    pub first_ms: f64,
    /// The last of them.
    pub last_ms: f64,
}

impl LongRun {
    /// From the mean step of each block, milliseconds; `None` without blocks.
    pub fn new(block: usize, block_ms: Vec<f64>) -> Option<Self> {
        Some(Self {
            steps: block * block_ms.len(),
            block,
            first_ms: *block_ms.first()?,
            last_ms: *block_ms.last()?,
            block_ms,
        })
    }

    fn check(&self, op: Op, at: &str) -> Result<(), Fault> {
        if op == Op::Prefill {
            return fault(at, "null in prefill", "an object");
        }
        for (i, &ms) in self.block_ms.iter().enumerate() {
            time(&|| format!("{at}.block_ms[{i}]"), ms)?;
        }
        let blocks = self.block_ms.len();
        let (Some(&first), Some(&last)) = (self.block_ms.first(), self.block_ms.last()) else {
            return fault(format!("{at}.block_ms"), "at least one block", "none");
        };
        if self.block == 0 || self.block.checked_mul(blocks) != Some(self.steps) {
            let expected = format!("{blocks} blocks of {}, at least 1 each", self.block);
            return fault(format!("{at}.steps"), expected, self.steps);
        }
        follow(
            &format!("{at}."),
            &[
                ("first_ms", self.first_ms, first),
                ("last_ms", self.last_ms, last),
            ],
        )
    }
}

impl Case {
    /// From its times and the ceilings of the same run, with float32 states.
    pub fn new(op: Op, problem: &Problem, dtype: Element, times: Samples, on: &Ceilings) -> Self {
        Self::with_state(op, problem, dtype, Element::F32, times, on)
    }

    /// The same with states stored as `state`.
    pub fn with_state(
        op: Op,
        problem: &Problem,
        dtype: Element,
        state: Element,
        times: Samples,
        on: &Ceilings,
    ) -> Self {
        let median_ms = times.median_ms();
        let gflops = count::flops(problem) * 1e-9;
        let gbytes = count::bytes(op, problem, dtype, state) * 1e-9;
        let gflop_per_s = rate(gflops * 1e9, median_ms);
        let gb_per_s = rate(gbytes * 1e9, median_ms);
        let share = |rate: f64, most: f64| if most > 0.0 { rate / most } else { 0.0 };
        let key = Key::new(op, problem, dtype);
        Self {
            op,
            rule: key.rule,
            factors: key.factors,
            shape: key.shape,
            dtype,
            state,
            chunk: None,
            segments: 0,
            tier: None,
            steps: 1,
            final_state_written: true,
            warm_up_ms: 0.0,
            median_ms,
            min_ms: times.min_ms(),
            max_ms: times.max_ms(),
            gflops,
            gbytes,
            tokens_per_s: rate(problem.total_tokens() as f64 * 1e9, median_ms),
            gflop_per_s,
            gb_per_s,
            share_of_product: share(gflop_per_s, on.product.gflop_per_s),
            share_of_copy: share(gb_per_s, on.copy.gb_per_s),
            long_run: None,
            times,
        }
    }
}

/// What [`Report::tier`] says of cases on an engine of this tier.
pub fn tier_of(cases: &[Case], engine: &str) -> String {
    let mut tiers: Vec<&str> = cases.iter().filter_map(|c| c.tier.as_deref()).collect();
    tiers.sort_unstable();
    tiers.dedup();
    match tiers[..] {
        // (Decode has one family on all GPUs.)
        [] if engine == "cpu" => engine.to_owned(),
        [] => Tier::Portable.name().to_owned(),
        _ => tiers.join(" and "),
    }
}

/// A case that could not be run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// What was to be run, as a [`Key`] is printed.
    pub case: String,
    /// Why it was not.
    pub reason: String,
}

/// A value that no run can have left.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{key}`: expected {expected}, found {found}")]
pub struct Fault {
    /// The key, as in `cases[3].times.samples_ms[0]`.
    pub key: String,
    /// What could have been there.
    pub expected: String,
    /// What was there.
    pub found: String,
}

fn fault<T>(
    key: impl Into<String>,
    expected: impl fmt::Display,
    found: impl fmt::Display,
) -> Result<T, Fault> {
    Err(Fault {
        key: key.into(),
        expected: expected.to_string(),
        found: found.to_string(),
    })
}

/// Checks a number that has to be within `low..=high`; NaN is not.
fn within(
    key: &dyn Fn() -> String,
    x: f64,
    [low, high]: [f64; 2],
    unit: &str,
) -> Result<(), Fault> {
    if x >= low && x <= high {
        return Ok(());
    }
    fault(key(), format!("{low:e} to {high:e}{unit}"), x)
}

/// Checks numbers that follow from others: name, found, right. A tool that wrote the file again may have rounded.
fn follow(at: &str, numbers: &[(&str, f64, f64)]) -> Result<(), Fault> {
    for &(name, found, right) in numbers {
        // (NaN is not near anything.)
        let near = (found - right).abs() <= 1e-6 * right.abs();
        if !near {
            let expected = format!("{right}, which follows from the other values");
            return fault(format!("{at}{name}"), expected, found);
        }
    }
    Ok(())
}

/// Whether it is a date as in [`Report::date`].
fn is_date(text: &str) -> bool {
    let pattern = b"0000-00-00T00:00:00Z";
    let bytes = text.as_bytes();
    let formed = bytes.len() == pattern.len()
        && bytes.iter().zip(pattern).all(|(b, p)| match p {
            b'0' => b.is_ascii_digit(),
            p => b == p,
        });
    let number = |range| text.get(range).and_then(|s: &str| s.parse::<u32>().ok());
    let within = |range, low, high| number(range).is_some_and(|n| (low..=high).contains(&n));
    let days = match (number(0..4), number(5..7)) {
        (Some(y), Some(2)) if y % 4 == 0 && (y % 100 != 0 || y % 400 == 0) => 29,
        (_, Some(2)) => 28,
        (_, Some(4 | 6 | 9 | 11)) => 30,
        _ => 31,
    };
    formed
        && within(5..7, 1, 12)
        && within(8..10, 1, days)
        && within(11..13, 0, 23)
        && within(14..16, 0, 59)
        // (60 is a leap second.)
        && within(17..19, 0, 60)
}

/// Whether it is a commit as in [`Report::commit`].
fn is_commit(text: &str) -> bool {
    let hash = text.strip_suffix("-modified").unwrap_or(text);
    matches!(hash.len(), 40 | 64) && hash.bytes().all(|b| b.is_ascii_hexdigit())
}

/// A time, milliseconds: more than nothing, less than a day.
fn time(key: &dyn Fn() -> String, ms: f64) -> Result<(), Fault> {
    within(key, ms, [1e-9, LONGEST_MS], " ms")
}

fn samples(at: &str, times: &Samples) -> Result<(), Fault> {
    if times.samples_ms.is_empty() {
        return fault(format!("{at}samples_ms"), "at least one sample", "none");
    }
    if times.repetitions == 0 {
        return fault(format!("{at}repetitions"), "at least 1", 0);
    }
    for (i, &ms) in times.samples_ms.iter().enumerate() {
        time(&|| format!("{at}samples_ms[{i}]"), ms)?;
    }
    Ok(())
}

impl Report {
    /// Checks that the values can be those of a run.
    ///
    /// # Errors
    /// [`Fault`] naming the first key that has a wrong value: another format, a date or commit that is none, no
    /// cases, a case given twice, a rule, size or chunk that does not exist, a time that is not positive or longer
    /// than a day, a number that does not follow from the samples and sizes that it is made of.
    pub fn check(&self) -> Result<(), Fault> {
        const RATE: [f64; 2] = [1e-12, 1e12];
        if self.format != FORMAT {
            return fault(
                "format",
                format!("`{FORMAT}`"),
                format!("`{}`", self.format),
            );
        }
        if let Some(commit) = self.commit.as_ref().filter(|c| !is_commit(c)) {
            return fault(
                "commit",
                "null or 40 or 64 hexadecimal digits, perhaps with `-modified`",
                format!("`{commit}`"),
            );
        }
        if !is_date(&self.date) {
            return fault(
                "date",
                "UTC as in `2026-06-30T12:00:00Z`",
                format!("`{}`", self.date),
            );
        }
        let Ceilings { copy, product } = &self.ceilings;
        samples("ceilings.copy.times.", &copy.times)?;
        samples("ceilings.product.times.", &product.times)?;
        for (key, rate) in [
            ("ceilings.copy.gb_per_s", copy.gb_per_s),
            ("ceilings.product.gflop_per_s", product.gflop_per_s),
        ] {
            within(&|| key.to_owned(), rate, RATE, "")?;
        }
        let right = Copy::new(copy.bytes, copy.times.clone());
        follow(
            "ceilings.copy.",
            &[
                ("median_ms", copy.median_ms, right.median_ms),
                ("gb_per_s", copy.gb_per_s, right.gb_per_s),
            ],
        )?;
        let right = Product::new(product.size, product.times.clone());
        follow(
            "ceilings.product.",
            &[
                ("median_ms", product.median_ms, right.median_ms),
                ("gflop_per_s", product.gflop_per_s, right.gflop_per_s),
            ],
        )?;
        if let Some(Pipelines {
            first_ms,
            second_ms,
            ..
        }) = &self.pipelines
        {
            const TIME: [f64; 2] = [0.0, LONGEST_MS];
            within(&|| "pipelines.first_ms".into(), *first_ms, TIME, " ms")?;
            if let Some(ms) = second_ms {
                within(&|| "pipelines.second_ms".into(), *ms, TIME, " ms")?;
            }
        }
        if self.cases.is_empty() {
            return fault("cases", "at least one case", "none");
        }
        let mut seen = HashSet::new();
        for (i, case) in self.cases.iter().enumerate() {
            case.check(&format!("cases[{i}]."), &self.ceilings)?;
            if !seen.insert(case.key()) {
                let found = format!("a second {}", case.key());
                return fault(format!("cases[{i}]"), "each case once", found);
            }
        }
        let tiers = match self.cases.iter().any(|case| case.tier.is_some()) {
            true => vec![tier_of(&self.cases, "")],
            false => ["portable", "matrix", "cpu"].map(str::to_owned).into(),
        };
        if !tiers.contains(&self.tier) {
            return fault("tier", tiers.join(", "), format!("`{}`", self.tier));
        }
        Ok(())
    }
}

impl Case {
    /// What makes it comparable.
    pub fn key(&self) -> Key {
        Key {
            op: self.op,
            rule: self.rule.clone(),
            factors: self.factors,
            shape: self.shape,
            dtype: self.dtype,
            state: self.state,
        }
    }

    fn check(&self, at: &str, on: &Ceilings) -> Result<(), Fault> {
        // Only DeltaProduct has a choice.
        let factors = match self.rule.as_str() {
            "deltaproduct" => 1..=MAX_SUBSTEPS,
            _ => 1..=1,
        };
        let Ok(rule) = Rule::from_name(&self.rule, self.factors) else {
            let rules = Rule::ALL.map(Rule::name).join(", ");
            return fault(
                format!("{at}rule"),
                format!("one of {rules}"),
                format!("`{}`", self.rule),
            );
        };
        if !factors.contains(&self.factors) {
            return fault(
                format!("{at}factors"),
                format!("{} to {}", factors.start(), factors.end()),
                self.factors,
            );
        }
        let sound = |&size: &usize| (1..=LARGEST_SIZE).contains(&size);
        if let Some(i) = self.shape.iter().position(|size| !sound(size)) {
            return fault(
                format!("{at}shape[{i}]"),
                format!("1 to {LARGEST_SIZE}"),
                self.shape[i],
            );
        }
        // (Of one token: how many fit memory is a matter of the machine that reads, and another one has run this.)
        let [_, _, heads, value_heads, key_dim, value_dim] = self.shape;
        let token = Problem::new(rule, [1, 1, heads, value_heads, key_dim, value_dim]);
        if let Err(e) = token.validate() {
            return fault(format!("{at}shape"), "sizes of a problem", e);
        }
        let [batch, tokens, ..] = self.shape.map(|n| n as u128);
        let rows = batch * tokens * self.factors as u128;
        if rows > MAX_ROWS as u128 {
            let expected = format!("at most {MAX_ROWS} batch · tokens · factors");
            return fault(format!("{at}shape"), expected, rows);
        }
        let problem = Problem::new(rule, self.shape);
        let chunks = [cpu::DEFAULT_CHUNK].into_iter().chain(CHUNK_SIZES);
        match (self.op, self.chunk) {
            (_, None) => {}
            (Op::Prefill, Some(n)) if chunks.clone().any(|chunk| chunk == n) => {}
            (Op::Prefill, Some(n)) => {
                let chunks: Vec<String> = chunks.map(|n| n.to_string()).collect();
                let expected = format!("null or one of {}", chunks.join(", "));
                return fault(format!("{at}chunk"), expected, n);
            }
            (Op::Decode, Some(n)) => return fault(format!("{at}chunk"), "null in decode", n),
        }
        match (self.op, self.segments) {
            (_, 0) => {}
            (Op::Prefill, n) if n <= MOST_SEGMENTS => {}
            (Op::Prefill, n) => {
                return fault(
                    format!("{at}segments"),
                    format!("at most {MOST_SEGMENTS}"),
                    n,
                );
            }
            (Op::Decode, n) => return fault(format!("{at}segments"), "0 in decode", n),
        }
        if let Some(tier) = &self.tier {
            let known = [Tier::Portable, Tier::Matrix].map(Tier::name);
            if self.op == Op::Decode || !known.contains(&tier.as_str()) {
                let expected = match self.op {
                    Op::Prefill => format!("null or one of {}", known.join(", ")),
                    Op::Decode => "null in decode".to_owned(),
                };
                return fault(format!("{at}tier"), expected, format!("`{tier}`"));
            }
        }
        match (self.op, self.steps) {
            (_, 0) => return fault(format!("{at}steps"), "at least 1", 0),
            (Op::Prefill, n @ 2..) => return fault(format!("{at}steps"), "1 in prefill", n),
            _ => {}
        }
        if !self.final_state_written {
            return fault(format!("{at}final_state_written"), true, false);
        }
        let warm_up = || format!("{at}warm_up_ms");
        within(&warm_up, self.warm_up_ms, [0.0, LONGEST_MS], " ms")?;
        samples(&format!("{at}times."), &self.times)?;
        if self.op == Op::Prefill && self.state != Element::F32 {
            let found = format!("`{}`", self.state.name());
            return fault(format!("{at}state"), "`f32` in prefill", found);
        }
        let times = self.times.clone();
        let right = Self::with_state(self.op, &problem, self.dtype, self.state, times, on);
        follow(
            at,
            &[
                ("median_ms", self.median_ms, right.median_ms),
                ("min_ms", self.min_ms, right.min_ms),
                ("max_ms", self.max_ms, right.max_ms),
                ("gflops", self.gflops, right.gflops),
                ("gbytes", self.gbytes, right.gbytes),
                ("tokens_per_s", self.tokens_per_s, right.tokens_per_s),
                ("gflop_per_s", self.gflop_per_s, right.gflop_per_s),
                ("gb_per_s", self.gb_per_s, right.gb_per_s),
                (
                    "share_of_product",
                    self.share_of_product,
                    right.share_of_product,
                ),
                ("share_of_copy", self.share_of_copy, right.share_of_copy),
            ],
        )?;
        match &self.long_run {
            Some(run) => run.check(self.op, &format!("{at}long_run")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(samples_ms: &[f64]) -> Samples {
        Samples {
            timing: Timing::Wall,
            repetitions: 1,
            samples_ms: samples_ms.to_vec(),
        }
    }

    #[test]
    fn medians_are_those_of_any_order() {
        assert_eq!(times(&[3.0, 1.0, 2.0]).median_ms(), 2.0);
        assert_eq!(times(&[4.0, 1.0, 2.0, 3.0]).median_ms(), 2.5);
        assert_eq!(times(&[]).median_ms(), 0.0);
    }

    #[test]
    fn dates_and_commits_are_told_from_other_text() {
        for date in [
            "2026-06-30T12:00:00Z",
            "2024-02-29T23:59:59Z",
            "2000-02-29T00:00:00Z",
        ] {
            assert!(is_date(date), "{date}");
        }
        for other in [
            "",
            "today",
            "2026-06-30",
            "2026-06-31T12:00:00Z",
            "2026-02-29T12:00:00Z",
            "1900-02-29T12:00:00Z",
            "2026-13-01T12:00:00Z",
            "2026-00-01T12:00:00Z",
            "2026-06-00T12:00:00Z",
            "2026-06-30T24:00:00Z",
            "2026-06-30T12:60:00Z",
            "2026-06-30T12:00:00+",
            "2026-06-30T12:00:00.0Z",
            "+026-06-30T12:00:00Z",
            "2026-06-3\u{202e}T12:00:00",
        ] {
            assert!(!is_date(other), "{other}");
        }
        let hash = "0123456789abcdef0123456789abcdef01234567";
        assert!(is_commit(hash) && is_commit(&format!("{hash}-modified")));
        for other in ["", "-modified", &hash[1..], &format!("{hash}-x"), "main"] {
            assert!(!is_commit(other), "{other}");
        }
    }

    #[test]
    fn rates_and_shares_follow_from_the_median() {
        let on = Ceilings {
            copy: Copy::new(1 << 20, times(&[1.0])),
            product: Product::new(100, times(&[1.0])),
        };
        assert_eq!(on.copy.gb_per_s, 2.0 * f64::from(1 << 20) * 1e-6);
        assert_eq!(on.product.gflop_per_s, 2.0);
        let problem = Problem::new(Rule::Eda, [2, 1, 1, 2, 4, 8]);
        let case = Case::new(Op::Decode, &problem, Element::F32, times(&[0.5]), &on);
        assert_eq!(case.tokens_per_s, 4000.0);
        assert!((case.gflop_per_s - case.gflops * 2000.0).abs() < 1e-12);
        assert!((case.share_of_product - case.gflop_per_s / 2.0).abs() < 1e-12);
        assert!((case.share_of_copy - case.gb_per_s / on.copy.gb_per_s).abs() < 1e-12);
    }
}
