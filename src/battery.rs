//! The built-in checks (`eda check`): one list of cases that every engine runs against float64.
//!
//! Small on purpose (a few seconds on a software adapter), yet each class of mistake this field knows has
//! a case: uneven and unbounded decay, ragged and empty sequences, odd sizes, grouped heads, states
//! carried between calls, slots of a pool. Anybody can run it on an unknown GPU and paste the result.

use crate::engine::{DecodeOptions, Element, Engine, Pool, PrefillOptions, Tier};
use crate::error::{Error, Result};
use crate::generate::{self, Decays, Gates, Keys, Recipe};
use crate::parts;
use crate::problem::{
    Decay, DecayGate, GateForm, Operand, Outputs, Problem, Tensors, relative_error,
};
use crate::reference;
use crate::rule::Rule;
use crate::slots::Row;
use serde::Serialize;
use std::ops::Range;

/// Largest relative l2 error of `o` and `final_state` against float64 that passes.
pub const LIMIT: f64 = Tier::Portable.error_limit();
/// The same for inputs and outputs stored as float16, and for prefill on matrix units.
pub const LIMIT_F16: f64 = Tier::Matrix.error_limit();

/// What became of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Right.
    Passed,
    /// Wrong, or an error.
    Failed,
    /// This engine does not offer what the case is about: float16 storage, or sizes that do not fit its matrix units.
    NotOffered,
}

/// The result of one case on one engine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// Name of the case.
    pub case: String,
    /// Larger of the relative l2 errors of `o` and `final_state`; `None` where nothing was computed.
    pub error: Option<f64>,
    /// Largest error that passes.
    pub limit: f64,
    /// Outcome.
    pub outcome: Outcome,
    /// Both errors, or what went wrong.
    pub detail: String,
}

/// One built-in case: a problem, its inputs and what is done with them.
#[derive(Debug, Clone)]
pub struct Case {
    /// Name, unique in the list.
    pub name: String,
    /// Largest error that passes.
    pub limit: f64,
    problem: Problem,
    tensors: Tensors<Vec<f32>>,
    check: Check,
}

#[derive(Debug, Clone)]
enum Check {
    /// One prefill with these options.
    Prefill(PrefillOptions),
    /// A prefill at each chunk size.
    Chunks,
    /// Prefills of consecutive parts, ending at these tokens and at the end.
    Split(Vec<usize>),
    /// Decode of the whole with this many tokens a call.
    Decode(usize),
    /// Prefill up to this token, decode from there, with inputs and outputs stored as this.
    PrefillThenDecode(usize, Element),
    /// Padding, reset and copied slots in one pool.
    Slots,
    /// The same bits from every run of prefill and decode.
    Repeat,
}

/// Why a case did not give outputs to measure.
enum Trouble {
    Engine(Error),
    Wrong(String),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Engine(error)
    }
}

/// Runs every case on `engine`. `progress` is called before each with its index, the number of cases and
/// its name. An engine's error fails its case and the next one runs.
pub async fn run(engine: &Engine, progress: &dyn Fn(usize, usize, &str)) -> Vec<Verdict> {
    let cases = cases();
    let mut verdicts = Vec::with_capacity(cases.len());
    for (i, case) in cases.iter().enumerate() {
        progress(i, cases.len(), &case.name);
        verdicts.push(case.run(engine).await);
    }
    verdicts
}

/// The cases, the same in every build.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: &str, problem: Problem, recipe: Recipe, check: Check| {
        cases.push(Case {
            name: name.into(),
            limit: LIMIT,
            tensors: generate::tensors(&problem, &recipe),
            problem,
            check,
        });
    };
    let prefill = || Check::Prefill(PrefillOptions::default());
    let mixed = Recipe {
        initial_state: true,
        ..Recipe::default()
    };
    let zero = Recipe::default();
    let eda = |sizes| Problem::new(Rule::Eda, sizes);

    for rule in Rule::ALL {
        let name = |what: &str| format!("{rule}, {what}");
        let problem = Problem::new(rule, [2, 45, 1, 2, 32, 24]);
        add(&name("prefill"), problem, mixed, prefill());
        let problem = Problem::new(rule, [3, 7, 1, 2, 32, 24]);
        add(&name("decode"), problem, mixed, Check::Decode(1));
    }
    let three = Rule::DeltaProduct { factors: 3 };
    add(
        "deltaproduct, three factors",
        Problem::new(three, [1, 40, 1, 1, 32, 24]),
        mixed,
        prefill(),
    );

    for (key_dim, value_dim) in [(60, 100), (20, 12), (1, 1), (256, 256)] {
        let name = format!("sizes {key_dim} x {value_dim}, prefill and decode");
        let problem = eda([1, 37, 1, 1, key_dim, value_dim]);
        add(
            &name,
            problem,
            mixed,
            Check::PrefillThenDecode(33, Element::F32),
        );
    }
    add(
        "grouped heads",
        eda([1, 50, 2, 4, 64, 48]),
        mixed,
        prefill(),
    );
    let mut packed = eda([1, 100, 2, 2, 32, 32]);
    packed.cu_seqlens = Some(vec![0, 0, 17, 18, 18, 82, 100, 100]);
    add("packed, empty sequences", packed.clone(), mixed, prefill());
    add("packed, decode", packed, mixed, Check::Decode(16));
    add("no tokens", eda([2, 0, 1, 2, 32, 24]), mixed, prefill());
    add("one token", eda([3, 1, 1, 2, 32, 24]), mixed, prefill());

    for (name, decays) in [
        ("decay at the floor of -5", Decays::Floor),
        ("decay off a cliff of -1000", Decays::Cliff),
        ("decay of -inf", Decays::Full),
        ("no decay", Decays::None),
    ] {
        let recipe = Recipe { decays, ..mixed };
        add(name, eda([1, 100, 1, 1, 32, 32]), recipe, prefill());
    }
    let same = Recipe {
        keys: Keys::SameAddress,
        ..mixed
    };
    add(
        "erase where it writes",
        eda([1, 70, 1, 1, 32, 32]),
        same,
        prefill(),
    );
    let repeated = Recipe {
        keys: Keys::Repeated,
        gates: Gates::NearOne,
        decays: Decays::Weak,
        ..mixed
    };
    add(
        "repeated keys, gates near 1",
        eda([1, 100, 1, 1, 32, 32]),
        repeated,
        prefill(),
    );

    for (name, gate, form) in [
        (
            "raw inputs, safe gate",
            DecayGate::Safe { lower_bound: -5.0 },
            GateForm::Sigmoid,
        ),
        (
            "raw inputs, sigmoid gate",
            DecayGate::Sigmoid { lower_bound: -5.0 },
            GateForm::Sigmoid,
        ),
        (
            "raw inputs, unbounded gate, gates up to 2",
            DecayGate::Softplus,
            GateForm::TwiceSigmoid,
        ),
    ] {
        let mut raw = eda([1, 52, 1, 2, 32, 32]);
        raw.normalize = true;
        raw.decay = Decay::Gate(gate);
        (raw.beta, raw.gamma) = (form, form);
        add(name, raw, mixed, Check::PrefillThenDecode(48, Element::F32));
    }

    add(
        "chunks of 16, 32 and 64",
        eda([1, 130, 1, 2, 32, 24]),
        zero,
        Check::Chunks,
    );
    add(
        "the same, keys of 16",
        Problem::new(Rule::Kda, [1, 130, 1, 2, 16, 24]),
        zero,
        Check::Chunks,
    );
    add(
        "segments at the same time",
        eda([1, 75, 1, 2, 32, 24]),
        mixed,
        Check::Prefill(PrefillOptions {
            chunk: Some(16),
            segments: Some(3),
            ..PrefillOptions::default()
        }),
    );
    add(
        "split in three",
        eda([2, 75, 1, 2, 32, 24]),
        zero,
        Check::Split(vec![1, 38]),
    );
    add(
        "decode, five tokens a call",
        eda([2, 23, 1, 2, 32, 24]),
        mixed,
        Check::Decode(5),
    );
    add("slots", eda([4, 1, 1, 2, 32, 24]), zero, Check::Slots);
    add(
        "the same bits every run",
        eda([1, 70, 1, 2, 32, 24]),
        mixed,
        Check::Repeat,
    );
    cases.push(worked_example());

    // What is read is as small, so it may not vanish beside the contents.
    let problem = eda([1, 70, 1, 2, 32, 24]);
    let mut tensors = generate::tensors(&problem, &zero);
    for operand in [Operand::Beta, Operand::Gamma] {
        for gate in tensors.get_mut(operand).into_iter().flatten() {
            *gate *= 1e-6;
        }
    }
    cases.push(Case {
        name: "faint writes".into(),
        limit: LIMIT,
        tensors,
        problem,
        check: prefill(),
    });

    let problem = eda([1, 64, 1, 2, 32, 32]);
    let weak = Recipe {
        decays: Decays::Weak,
        ..mixed
    };
    cases.push(Case {
        name: "float16 storage".into(),
        limit: LIMIT_F16,
        tensors: generate::tensors(&problem, &weak),
        problem,
        check: Check::PrefillThenDecode(60, Element::F16),
    });
    cases
}

/// The state (3, 5) becomes (0, 7): the first address is erased, the second overwritten, exactly.
fn worked_example() -> Case {
    let mut problem = Problem::new(Rule::Eda, [1, 1, 1, 1, 2, 1]);
    problem.scale = Some(1.0);
    let tensors = Tensors::new()
        .with(Operand::Q, vec![1.0, 1.0])
        .with(Operand::K, vec![0.0, 1.0])
        .with(Operand::V, vec![7.0])
        .with(Operand::E, vec![1.0, 0.0])
        .with(Operand::G, vec![0.0, 0.0])
        .with(Operand::Beta, vec![1.0])
        .with(Operand::Gamma, vec![1.0])
        .with(Operand::InitialState, vec![3.0, 5.0]);
    Case {
        name: "worked example, exact".into(),
        limit: 0.0,
        problem,
        tensors,
        check: Check::Prefill(PrefillOptions::default()),
    }
}

impl Case {
    /// Runs the case.
    pub async fn run(&self, engine: &Engine) -> Verdict {
        let matrix = on_matrix_units(engine);
        let limit = if matrix && self.prefills() && self.limit > 0.0 {
            self.limit.max(LIMIT_F16)
        } else {
            self.limit
        };
        let mut verdict = Verdict {
            case: self.name.clone(),
            error: None,
            limit,
            outcome: Outcome::Failed,
            detail: String::new(),
        };
        match self.errors(engine).await {
            Ok((o, state)) => {
                let error = o.max(state);
                if error <= limit {
                    verdict.outcome = Outcome::Passed;
                }
                // An infinite error (a value that is not finite) has no number in JSON.
                verdict.error = error.is_finite().then_some(error);
                verdict.detail = format!("o {o:.1e}, final_state {state:.1e}");
            }
            Err(Trouble::Engine(error)) => {
                if (self.half() || matrix) && matches!(error, Error::Unsupported { .. }) {
                    verdict.outcome = Outcome::NotOffered;
                }
                verdict.detail = error.to_string();
            }
            Err(Trouble::Wrong(what)) => verdict.detail = what,
        }
        verdict
    }

    fn prefills(&self) -> bool {
        !matches!(self.check, Check::Decode(_) | Check::Slots)
    }

    fn half(&self) -> bool {
        matches!(self.check, Check::PrefillThenDecode(_, Element::F16))
    }

    /// Relative errors of `o` and of `final_state` against float64, the largest where several runs count.
    async fn errors(&self, engine: &Engine) -> Result<(f64, f64), Trouble> {
        let problem = &self.problem;
        let tensors = self.tensors.slices();
        problem.validate_host(&tensors, false)?;
        let expected = reference::recurrence::<f64>(problem, &tensors)?;
        let options = |chunk| PrefillOptions {
            chunk,
            ..PrefillOptions::default()
        };
        let runs = match &self.check {
            Check::Prefill(options) => vec![prefill(engine, problem, &tensors, options).await?],
            Check::Chunks => {
                let mut runs = Vec::new();
                for chunk in [16, 32, 64] {
                    match prefill(engine, problem, &tensors, &options(Some(chunk))).await {
                        // Matrix units may not hold the larger ones.
                        Err(Error::Unsupported { .. })
                            if !runs.is_empty() && on_matrix_units(engine) => {}
                        run => runs.push(run?),
                    }
                }
                runs
            }
            Check::Split(at) => vec![prefill_split(engine, problem, &tensors, at).await?],
            Check::Decode(tokens) => {
                vec![decode(engine, problem, &tensors, 0, *tokens, Element::F32).await?]
            }
            Check::PrefillThenDecode(at, element) => {
                vec![decode(engine, problem, &tensors, *at, 1, *element).await?]
            }
            Check::Slots => vec![slots(engine, problem, &tensors).await?],
            Check::Repeat => {
                let mut runs: Vec<Outputs> = Vec::new();
                for at in [problem.tokens, problem.tokens, 66, 66] {
                    runs.push(decode(engine, problem, &tensors, at, 1, Element::F32).await?);
                }
                if runs[0] != runs[1] || runs[2] != runs[3] {
                    return Err(Trouble::Wrong("two runs gave different bits".into()));
                }
                runs
            }
        };
        Ok(runs.iter().fold((0.0, 0.0), |(o, state), run| {
            (
                relative_error(&run.o, &expected.o).max(o),
                relative_error(&run.final_state, &expected.final_state).max(state),
            )
        }))
    }
}

/// Whether every prefill of an engine runs on matrix units.
fn on_matrix_units(engine: &Engine) -> bool {
    matches!(engine, Engine::Gpu(engine) if engine.tier() == Some(Tier::Matrix))
}

async fn prefill(
    engine: &Engine,
    problem: &Problem,
    tensors: &Tensors<&[f32]>,
    options: &PrefillOptions,
) -> Result<Outputs> {
    let run = engine
        .prefill(problem, tensors, options, &|_, _| {})
        .await?;
    Ok(run.outputs)
}

/// One decode call; returns `o`.
async fn step_rows(
    engine: &Engine,
    problem: &Problem,
    tensors: &Tensors<&[f32]>,
    pool: &mut Pool,
    rows: &[Row],
    element: Element,
) -> Result<Vec<f32>> {
    let options = DecodeOptions {
        element,
        ..DecodeOptions::default()
    };
    let (o, _) = engine
        .decode(problem, tensors, pool, rows, &options)
        .await?;
    Ok(o)
}

/// Tokens `from..to` of every sequence, as far as it has them.
fn tokens(problem: &Problem, from: usize, to: usize) -> Vec<Range<usize>> {
    (0..problem.sequences())
        .map(|n| problem.sequence(n))
        .map(|s| (s.start + from).min(s.end)..(s.start + to).min(s.end))
        .collect()
}

/// Prefills the parts of each sequence that end at the tokens `at` (ascending) and at its end, the state
/// carried from part to part.
///
/// # Errors
/// As [`Engine::prefill`].
pub async fn prefill_split(
    engine: &Engine,
    problem: &Problem,
    tensors: &Tensors<&[f32]>,
    at: &[usize],
) -> Result<Outputs> {
    let mut o = vec![0.0; problem.output_len()];
    let mut state = tensors.get(Operand::InitialState).map(|s| s.to_vec());
    let mut from = 0;
    for &to in at.iter().chain(&[problem.tokens]) {
        let ranges = tokens(problem, from, to);
        let (part, mut inputs) = parts::select(problem, tensors, &ranges);
        if let Some(state) = state {
            inputs.set(Operand::InitialState, state);
        }
        let outputs = prefill(engine, &part, &inputs.slices(), &PrefillOptions::default()).await?;
        parts::place(problem, &ranges, &outputs.o, &mut o);
        state = Some(outputs.final_state);
        from = to;
    }
    Ok(Outputs {
        o,
        final_state: state.unwrap_or_default(),
    })
}

/// Prefills the first `at` tokens of each sequence and decodes the others, `step` tokens a call, all
/// sequences in one batch. A sequence that has ended stays in the batch as padding. `element` is how
/// inputs and outputs are stored.
///
/// # Errors
/// As [`Engine::prefill`] and [`Engine::decode`].
pub async fn decode(
    engine: &Engine,
    problem: &Problem,
    tensors: &Tensors<&[f32]>,
    at: usize,
    step: usize,
    element: Element,
) -> Result<Outputs> {
    let sequences = problem.sequences();
    let state_len = problem.value_heads * problem.state_len();
    let mut o = vec![0.0; problem.output_len()];
    let mut states = tensors.get(Operand::InitialState).map(|s| s.to_vec());
    if at > 0 {
        let ranges = tokens(problem, 0, at);
        let (part, mut inputs) = parts::select(problem, tensors, &ranges);
        if let Some(states) = states {
            inputs.set(Operand::InitialState, states);
        }
        let options = PrefillOptions {
            element,
            ..PrefillOptions::default()
        };
        let outputs = prefill(engine, &part, &inputs.slices(), &options).await?;
        parts::place(problem, &ranges, &outputs.o, &mut o);
        states = Some(outputs.final_state);
    }

    // Slots in reverse order of the sequences, so that a row taken for its slot shows.
    let slot = |n: usize| sequences - 1 - n;
    let mut pool = engine.pool(problem, sequences.max(1)).await?;
    for n in 0..sequences {
        if let Some(states) = &states {
            let state = &states[n * state_len..(n + 1) * state_len];
            pool.write(slot(n), state).await?;
        }
    }
    // Sequences that have tokens to decode, each with the token it is at.
    let mut live: Vec<(usize, Range<usize>)> = tokens(problem, at, problem.tokens)
        .into_iter()
        .enumerate()
        .filter(|(_, rest)| !rest.is_empty())
        .collect();
    let mut fresh = states.is_none();
    while let Some(left) = live.iter().map(|(_, r)| r.len()).filter(|&n| n > 0).min() {
        let step = step.clamp(1, left);
        // Padding rows repeat the last tokens of their sequence, or any others.
        let ranges: Vec<Range<usize>> = live
            .iter()
            .map(|(_, rest)| rest.start.min(problem.total_tokens() - step))
            .map(|start| start..start + step)
            .collect();
        let rows: Vec<Row> = live
            .iter()
            .map(|(n, rest)| match rest.is_empty() {
                true => Row::PADDING,
                false => Row {
                    slot: i32::try_from(slot(*n)).unwrap_or(i32::MAX),
                    reset: fresh,
                },
            })
            .collect();
        let (part, inputs) = parts::select(problem, tensors, &ranges);
        let part_o = step_rows(engine, &part, &inputs.slices(), &mut pool, &rows, element).await?;
        let row_len = step * problem.value_heads * problem.value_dim;
        for (i, row) in rows.iter().enumerate() {
            if !row.is_padding() {
                let part_o = &part_o[i * row_len..(i + 1) * row_len];
                parts::place(problem, &ranges[i..i + 1], part_o, &mut o);
                live[i].1.start += step;
            }
        }
        fresh = false;
    }
    Ok(Outputs {
        o,
        final_state: read_all(&pool, (0..sequences).map(slot)).await?,
    })
}

async fn read_all(pool: &Pool, slots: impl Iterator<Item = usize>) -> Result<Vec<f32>> {
    let mut states = Vec::new();
    for slot in slots {
        states.extend(pool.read(slot).await?);
    }
    Ok(states)
}

/// What a server does with a pool: rows out of order, padding, a slot that starts afresh, a prefix shared
/// by copying. The problem has one token and four rows; returns what it should have computed from zero.
async fn slots(
    engine: &Engine,
    problem: &Problem,
    tensors: &Tensors<&[f32]>,
) -> Result<Outputs, Trouble> {
    let wrong = |what: &str| Err(Trouble::Wrong(what.into()));
    let row_len = problem.value_heads * problem.value_dim;
    let mut pool = engine.pool(problem, 6).await?;
    let old = vec![3.0; problem.value_heads * problem.state_len()];
    for slot in 0..6 {
        pool.write(slot, &old).await?;
    }

    // Slots 5, 2 and 0 start afresh although they hold an old state; row 2 is padding.
    let rows = [Row::starts(5), Row::starts(2), Row::PADDING, Row::starts(0)];
    let o = step_rows(engine, problem, tensors, &mut pool, &rows, Element::F32).await?;
    if o[2 * row_len..3 * row_len].iter().any(|&x| x != 0.0) {
        return wrong("the output of a padding row is not zero");
    }
    for slot in [1, 3, 4] {
        if pool.read(slot).await? != old {
            return wrong("a slot that no row names changed");
        }
    }

    // Row 2's sequence now starts in slot 3, the others are padding.
    let rows = [Row::PADDING, Row::PADDING, Row::starts(3), Row::PADDING];
    let before = pool.read(5).await?;
    let second = step_rows(engine, problem, tensors, &mut pool, &rows, Element::F32).await?;
    if pool.read(5).await? != before {
        return wrong("a padding row changed a state");
    }
    let mut all = o;
    all[2 * row_len..3 * row_len].copy_from_slice(&second[2 * row_len..3 * row_len]);

    // A copied slot continues on its own: decoding in the copy leaves the original alone.
    pool.copy(0, 4).await?;
    if pool.read(4).await? != pool.read(0).await? {
        return wrong("a copied slot differs from its original");
    }
    let final_state = read_all(&pool, [5, 2, 3, 0].into_iter()).await?;
    let rows = [Row::continues(4), Row::PADDING, Row::PADDING, Row::PADDING];
    step_rows(engine, problem, tensors, &mut pool, &rows, Element::F32).await?;
    if read_all(&pool, [5, 2, 3, 0].into_iter()).await? != final_state {
        return wrong("decoding in a copy changed another slot");
    }
    Ok(Outputs {
        o: all,
        final_state,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_problems_valid() {
        let mut names = std::collections::HashSet::new();
        for case in cases() {
            case.problem
                .validate_host(&case.tensors.slices(), false)
                .unwrap();
            assert!(names.insert(case.name.clone()), "{}", case.name);
        }
    }

    /// The limits judge the engine only where float32 itself is well below them.
    #[test]
    fn float32_is_good_enough_for_every_case() {
        for case in cases() {
            let tensors = case.tensors.slices();
            let exact = reference::recurrence::<f64>(&case.problem, &tensors).unwrap();
            let rounded = reference::recurrence::<f32>(&case.problem, &tensors).unwrap();
            let error = relative_error(&rounded.o, &exact.o)
                .max(relative_error(&rounded.final_state, &exact.final_state));
            assert!(error < 2e-6, "{}: {error}", case.name);
        }
    }
}
