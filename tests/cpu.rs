//! The CPU engine: prefill at every chunk size and decode, against the case files and against the
//! float64 recurrence.

#[path = "common/golden.rs"]
mod golden;

use eda_wgpu::cpu::CpuEngine;
use eda_wgpu::problem::Outputs;
use eda_wgpu::reference::recurrence;
use eda_wgpu::rule::DecayKind;
use eda_wgpu::{
    Decay, DecayGate, Element, Error, GateForm, Operand, PrefillOptions, Problem, Row, Rule,
    Tensors, relative_error,
};
use proptest::prelude::*;
use std::sync::Mutex;

const CHUNKS: [usize; 3] = [16, 32, 64];

fn prefill(problem: &Problem, tensors: &Tensors<Vec<f32>>, chunk: usize) -> Outputs {
    let options = PrefillOptions {
        chunk: Some(chunk),
        ..PrefillOptions::default()
    };
    let run = CpuEngine::new().prefill(problem, &tensors.slices(), &options, &|_, _| {});
    run.expect("a prefill").outputs
}

/// Every sequence by decode, `tokens` at a time.
fn decode(problem: &Problem, tensors: &Tensors<Vec<f32>>, tokens: usize) -> Outputs {
    let engine = CpuEngine::new();
    let mut pool = engine.pool(problem, problem.sequences()).expect("a pool");
    let states = tensors.get(Operand::InitialState);
    let state_len = problem.value_heads * problem.state_len();
    let mut o = Vec::new();
    let mut final_state = Vec::new();
    for n in 0..problem.sequences() {
        if let Some(states) = states {
            let state = &states[n * state_len..(n + 1) * state_len];
            pool.write(n, state).expect("a slot");
        }
        let sequence = problem.sequence(n);
        for first in sequence.clone().step_by(tokens) {
            let range = first..sequence.end.min(first + tokens);
            let mut step = problem.clone();
            (step.batch, step.tokens, step.cu_seqlens) = (1, range.len(), None);
            let mut part = Tensors::new();
            for (operand, values) in tensors.iter() {
                let rows = problem.rows_per_token(operand) * problem.row_len(operand);
                match operand {
                    Operand::InitialState => {}
                    _ if rows == 0 => part.set(operand, values.clone()),
                    _ => part.set(
                        operand,
                        values[range.start * rows..range.end * rows].to_vec(),
                    ),
                }
            }
            let row = [Row::continues(n as i32)];
            let (out, _) = engine
                .decode(&step, &part.slices(), &mut pool, &row, &Default::default())
                .expect("a decode");
            o.extend(out);
        }
        final_state.extend(pool.read(n).expect("a slot"));
    }
    Outputs { o, final_state }
}

#[track_caller]
fn assert_near(what: &str, got: &Outputs, o: &[f64], final_state: &[f64], limit: f64) {
    let o = relative_error(&got.o, o);
    let state = relative_error(&got.final_state, final_state);
    println!("{what:<44} o {o:.1e}  state {state:.1e}");
    assert!(o < limit && state < limit, "{what}: {o:e}, {state:e}");
}

#[test]
fn every_case_file_in_every_chunk_size_and_token_by_token() {
    for case in golden::cases("golden")
        .into_iter()
        .chain(golden::cases("real"))
    {
        let (p, t) = (&case.problem, &case.tensors);
        for chunk in CHUNKS {
            let what = format!("{} chunk {chunk}", case.name);
            assert_near(
                &what,
                &prefill(p, t, chunk),
                &case.o,
                &case.final_state,
                1e-5,
            );
        }
        for tokens in [1, 3] {
            let what = format!("{} decode by {tokens}", case.name);
            assert_near(
                &what,
                &decode(p, t, tokens),
                &case.o,
                &case.final_state,
                1e-5,
            );
        }
    }
}

#[test]
fn the_worked_example_is_exact() {
    let cases = golden::cases("golden");
    let case = cases.iter().find(|c| c.name == "eda_worked_example");
    let case = case.expect("the worked example");
    for chunk in CHUNKS {
        let state = prefill(&case.problem, &case.tensors, chunk).final_state;
        assert_eq!(state, [0.0, 7.0]);
    }
    assert_eq!(
        decode(&case.problem, &case.tensors, 1).final_state,
        [0.0, 7.0]
    );
}

/// Numbers in (-1, 1), the same for the same seed.
fn noise(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Inputs as a layer gives them: unit keys, gates in (0, 1), and `decay` from a number in (0, 1).
fn inputs(
    problem: &Problem,
    seed: u64,
    with_state: bool,
    decay: impl Fn(f32) -> f32,
) -> Tensors<Vec<f32>> {
    let mut next = noise(seed);
    let mut tensors = Tensors::new();
    for operand in Operand::ALL {
        if !problem.uses(operand) || (operand == Operand::InitialState && !with_state) {
            continue;
        }
        let mut values: Vec<f32> = (0..problem.len(operand)).map(|_| next()).collect();
        let unit = |x: &f32| (x + 1.0) / 2.0;
        match operand {
            Operand::Q | Operand::K | Operand::E | Operand::P | Operand::A | Operand::B => {
                for row in values.chunks_exact_mut(problem.key_dim) {
                    let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-3);
                    row.iter_mut().for_each(|x| *x /= norm);
                }
            }
            Operand::G if problem.decay == Decay::Log => {
                values = values.iter().map(|x| decay(unit(x))).collect();
            }
            Operand::Beta | Operand::Gamma => values = values.iter().map(unit).collect(),
            _ => {}
        }
        tensors.set(operand, values);
    }
    tensors
}

/// Weak, strong and total decays side by side.
fn extreme(x: f32) -> f32 {
    match (x * 8.0) as u32 {
        0 => f32::NEG_INFINITY,
        1 => -1000.0,
        2 => 0.0,
        3 => -60.0,
        4 => -5.0 * (x * 8.0).fract(),
        _ => -1e-4,
    }
}

#[test]
fn extreme_decays_side_by_side() {
    for rule in Rule::ALL {
        let mut problem = Problem::new(rule, [2, 150, 2, 4, 24, 20]);
        for per_head in [true, false] {
            let scalar = rule.update().decay == DecayKind::Scalar;
            problem.decay_per_head = per_head || scalar;
            let tensors = inputs(&problem, 7, true, extreme);
            let right = recurrence::<f64>(&problem, &tensors.slices()).expect("a recurrence");
            for chunk in CHUNKS {
                let got = prefill(&problem, &tensors, chunk);
                let what = format!("extreme {rule} chunk {chunk}");
                assert_near(&what, &got, &right.o, &right.final_state, 1e-5);
            }
            let got = decode(&problem, &tensors, 5);
            let what = format!("extreme {rule} decode");
            assert_near(&what, &got, &right.o, &right.final_state, 1e-5);
        }
    }
}

#[test]
fn a_few_heads_over_many_cores() {
    // Fewer heads than any machine has cores: the columns of the one head are split, unevenly.
    for value_dim in [1, 31, 72, 128] {
        let problem = Problem::new(Rule::Eda, [1, 700, 1, 1, 40, value_dim]);
        let tensors = inputs(&problem, 3, true, |x| -3.0 * x * x);
        let right = recurrence::<f64>(&problem, &tensors.slices()).expect("a recurrence");
        let threads = rayon::ThreadPoolBuilder::new().num_threads(5).build();
        let got = threads
            .expect("a thread pool")
            .install(|| prefill(&problem, &tensors, 32));
        let what = format!("one head, V = {value_dim}");
        assert_near(&what, &got, &right.o, &right.final_state, 1e-5);
    }
}

#[test]
fn repeated_runs_are_equal_to_the_bit() {
    let problem = Problem::new(Rule::Eda, [1, 500, 1, 1, 64, 64]);
    let tensors = inputs(&problem, 11, true, |x| -x);
    let first = prefill(&problem, &tensors, 32);
    for _ in 0..3 {
        assert_eq!(prefill(&problem, &tensors, 32), first);
    }
}

#[test]
fn no_tokens_pass_the_state_through() {
    for offsets in [None, Some(vec![0, 0, 0]), Some(vec![0])] {
        let mut problem = Problem::new(Rule::Kda, [1, 0, 1, 2, 8, 8]);
        problem.cu_seqlens = offsets;
        let tensors = inputs(&problem, 1, true, |x| -x);
        let got = prefill(&problem, &tensors, 16);
        assert!(got.o.is_empty());
        assert_eq!(
            &got.final_state,
            tensors.get(Operand::InitialState).expect("given")
        );
    }
}

#[test]
fn other_chunk_sizes_are_refused() {
    let problem = Problem::new(Rule::Linear, [1, 4, 1, 1, 4, 4]);
    let tensors = inputs(&problem, 1, false, |x| -x);
    for chunk in [0, 1, 17, 128] {
        let options = PrefillOptions {
            chunk: Some(chunk),
            ..PrefillOptions::default()
        };
        let run = CpuEngine::new().prefill(&problem, &tensors.slices(), &options, &|_, _| {});
        assert!(matches!(run, Err(Error::Unsupported { .. })));
    }
}

#[test]
fn progress_ascends_to_the_end() {
    for (hv, tokens) in [(1, 3000), (4, 999)] {
        let problem = Problem::new(Rule::Delta, [1, tokens, 1, hv, 16, 16]);
        let tensors = inputs(&problem, 1, false, |x| -x);
        let seen = Mutex::new(Vec::new());
        let report = |done, total| {
            assert_eq!(total, tokens);
            seen.lock().expect("a lock").push(done);
        };
        let options = PrefillOptions::default();
        let run = CpuEngine::new().prefill(&problem, &tensors.slices(), &options, &report);
        run.expect("a prefill");
        let seen = seen.into_inner().expect("a lock");
        assert!(seen.is_sorted_by(|a, b| a < b), "{seen:?}");
        assert_eq!(seen.last(), Some(&tokens));
    }
}

#[test]
fn float16_storage_rounds_inputs_and_outputs() {
    let problem = Problem::new(Rule::Eda, [1, 100, 2, 2, 32, 32]);
    let mut tensors = inputs(&problem, 5, true, |x| -2.0 * x);
    let options = PrefillOptions {
        element: Element::F16,
        ..PrefillOptions::default()
    };
    let run = |t: &Tensors<Vec<f32>>| {
        CpuEngine::new().prefill(&problem, &t.slices(), &options, &|_, _| {})
    };
    let got = run(&tensors).expect("a prefill").outputs;
    let round = |x: f32| half::f16::from_f32(x).to_f32();
    assert!(got.o.iter().all(|&o| o == round(o)));
    let rounded = tensors.map(|operand, values| match operand {
        // Gates and states are float32 in any case.
        Operand::InitialState | Operand::Beta | Operand::Gamma => values.clone(),
        _ => values.iter().map(|&x| round(x)).collect(),
    });
    let right = recurrence::<f64>(&problem, &rounded.slices()).expect("a recurrence");
    assert!(relative_error(&got.o, &right.o) < 5e-4);
    assert!(relative_error(&got.final_state, &right.final_state) < 1e-5);

    let mut v = tensors.take(Operand::V).expect("given");
    v[70] = 1e6;
    tensors.set(Operand::V, v);
    let error = run(&tensors).expect_err("a value out of range");
    assert!(
        matches!(&error, Error::Tensor { tensor, .. } if tensor == "v"),
        "{error}"
    );
}

#[test]
fn the_pool_keeps_what_it_should() {
    let engine = CpuEngine::new();
    let problem = Problem::new(Rule::Eda, [4, 2, 1, 2, 12, 10]);
    let tensors = inputs(&problem, 9, false, |x| -x);
    let mut pool = engine.pool(&problem, 6).expect("a pool");
    assert_eq!(pool.slots(), 6);
    let len = 2 * 12 * 10;
    let mut next = noise(4);
    let states: Vec<Vec<f32>> = (0..6).map(|_| (0..len).map(|_| next()).collect()).collect();
    for (slot, state) in states.iter().enumerate() {
        pool.write(slot, state).expect("a slot");
    }

    let rows = [
        Row::continues(4),
        Row::PADDING,
        Row::starts(1),
        Row::continues(0),
    ];
    let (o, _) = engine
        .decode(
            &problem,
            &tensors.slices(),
            &mut pool,
            &rows,
            &Default::default(),
        )
        .expect("a decode");

    // The same by the recurrence, with the states that the rows stand for.
    let mut whole = tensors.clone();
    let zero = vec![0.0; len];
    let initial = [&states[4], &zero, &zero, &states[0]];
    let initial = initial.into_iter().flatten().copied().collect();
    whole.set(Operand::InitialState, initial);
    let right = recurrence::<f64>(&problem, &whole.slices()).expect("a recurrence");
    let row = 2 * 2 * 10;
    assert!(
        o[row..2 * row].iter().all(|&x| x == 0.0),
        "padding has no output"
    );
    for (i, row_of) in rows.iter().enumerate().filter(|(_, r)| !r.is_padding()) {
        assert!(relative_error(&o[i * row..][..row], &right.o[i * row..][..row]) < 1e-5);
        let state = pool.read(row_of.slot as usize).expect("a slot");
        assert!(relative_error(&state, &right.final_state[i * len..][..len]) < 1e-5);
    }
    for slot in [2, 3, 5] {
        assert_eq!(pool.read(slot).expect("a slot"), states[slot], "untouched");
    }

    pool.copy(4, 2).expect("slots");
    assert_eq!(pool.read(2).expect("a slot"), pool.read(4).expect("a slot"));
    assert!(pool.read(6).is_err() && pool.copy(0, 6).is_err() && pool.copy(6, 0).is_err());
    assert!(pool.write(0, &zero[1..]).is_err() && pool.write(6, &zero).is_err());
}

#[test]
fn a_wrong_decode_leaves_the_pool_untouched() {
    let engine = CpuEngine::new();
    let problem = Problem::new(Rule::Gdn, [2, 1, 1, 1, 4, 4]);
    let tensors = inputs(&problem, 9, false, |x| -x);
    let mut pool = engine.pool(&problem, 2).expect("a pool");
    let state = vec![1.5; 16];
    pool.write(0, &state).expect("a slot");
    let rows = [Row::starts(0), Row::continues(1)];

    let mut refused = |problem: &Problem, tensors: &Tensors<Vec<f32>>, rows: &[Row]| {
        let run = engine.decode(
            problem,
            &tensors.slices(),
            &mut pool,
            rows,
            &Default::default(),
        );
        assert!(matches!(run, Err(Error::Tensor { .. })), "{run:?}");
        assert_eq!(pool.read(0).expect("a slot"), state);
    };
    refused(&problem, &tensors, &rows[..1]);
    refused(&problem, &tensors, &[rows[0], rows[0]]);
    refused(&problem, &tensors, &[rows[0], Row::continues(2)]);
    refused(&problem, &tensors, &[rows[0], Row::continues(-2)]);
    let mut short = tensors.clone();
    short.set(Operand::V, vec![0.0]);
    refused(&problem, &short, &rows);
    let with_state = inputs(&problem, 9, true, |x| -x);
    refused(&problem, &with_state, &rows);
    let other = Problem::new(Rule::Gdn, [2, 1, 1, 1, 4, 5]);
    refused(&other, &inputs(&other, 9, false, |x| -x), &rows);
    let mut packed = Problem::new(Rule::Gdn, [1, 2, 1, 1, 4, 4]);
    packed.cu_seqlens = Some(vec![0, 1, 2]);
    refused(&packed, &inputs(&packed, 9, false, |x| -x), &rows);
}

#[test]
fn the_description_says_it_is_the_processor() {
    let d = CpuEngine::new().description();
    assert_eq!((&*d.backend, &*d.tier, &*d.kind), ("cpu", "cpu", "cpu"));
    assert!(d.adapter.contains("thread") && d.driver.starts_with("eda-wgpu "));
}

fn any_rule() -> impl Strategy<Value = Rule> {
    let product = (1u8..=16).prop_map(|factors| Rule::DeltaProduct { factors });
    prop_oneof![4 => proptest::sample::select(Rule::ALL.to_vec()), 1 => product]
}

/// Ascending offsets from 0 to `tokens`, equal ones among them.
fn offsets(tokens: usize) -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(0..=tokens, 0..4).prop_map(move |mut cuts| {
        cuts.extend([0, tokens]);
        cuts.sort_unstable();
        cuts
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Any rule, sizes, sequences, forms of the inputs and chunk size; strong and weak decays mixed.
    #[test]
    fn agrees_with_the_recurrence(
        rule in any_rule(),
        (batch, heads, groups) in (1usize..3, 1usize..3, 1usize..3),
        (k, v) in (1usize..50, 1usize..50),
        (tokens, cuts) in (0usize..140).prop_flat_map(|t| (Just(t), proptest::option::of(offsets(t)))),
        chunk in proptest::sample::select(CHUNKS.to_vec()),
        gate in proptest::option::of(0..3),
        forms in 0usize..3,
        (normalize, per_head, with_state) in any::<(bool, bool, bool)>(),
        seed in any::<u64>(),
    ) {
        let batch = if cuts.is_some() { 1 } else { batch };
        let mut problem = Problem::new(rule, [batch, tokens, heads, heads * groups, k, v]);
        problem.cu_seqlens = cuts;
        problem.normalize = normalize;
        problem.decay_per_head |= per_head;
        problem.decay = match gate {
            None => Decay::Log,
            Some(0) => Decay::Gate(DecayGate::Safe { lower_bound: -5.0 }),
            Some(1) => Decay::Gate(DecayGate::Sigmoid { lower_bound: -5.0 }),
            _ => Decay::Gate(DecayGate::Softplus),
        };
        problem.beta = [GateForm::Value, GateForm::Sigmoid, GateForm::TwiceSigmoid][forms];
        problem.gamma = problem.beta;
        let tensors = inputs(&problem, seed, with_state, |x| match (x * 3.0) as u32 {
            0 => -1e-3 * x,
            1 => extreme(x.fract()),
            _ => -5.0 * x,
        });
        let right = recurrence::<f64>(&problem, &tensors.slices()).expect("a recurrence");
        // What float32 itself makes of the case, which need not be well conditioned.
        let plain = recurrence::<f32>(&problem, &tensors.slices()).expect("a recurrence");
        for (name, got) in [
            ("prefill", prefill(&problem, &tensors, chunk)),
            ("decode", decode(&problem, &tensors, 7)),
        ] {
            for (got, plain, right) in [
                (&got.o, &plain.o, &right.o),
                (&got.final_state, &plain.final_state, &right.final_state),
            ] {
                let error = relative_error(got, right);
                let limit = 1e-5 + 10.0 * relative_error(plain, right);
                prop_assert!(error < limit, "{name}: {error:e}, at most {limit:e}");
            }
        }
    }
}
