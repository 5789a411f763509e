//! One test for each class of mistake that kernels of this kind have shipped with elsewhere. Each says
//! what went wrong and asserts the right behaviour, on every engine.

mod common;

use common::{
    assert_outputs_right, assert_right, assert_tensors_right, chunk, decode, decode_rows, engines,
    exact, half, label, offers_half, prefill, wait,
};
use eda_wgpu::battery::prefill_split;
use eda_wgpu::generate::{self, Decays, Gates, Keys, Recipe};
use eda_wgpu::{
    Backend, Engine, EngineOptions, Error, GateForm, Operand, PrefillOptions, Problem, Row, Rule,
    Tensors,
};

const MIXED: Recipe = Recipe {
    seed: 0,
    decays: Decays::Mixed,
    gates: Gates::Mixed,
    keys: Keys::Clustered,
    initial_state: true,
};

fn eda(sizes: [usize; 6]) -> Problem {
    Problem::new(Rule::Eda, sizes)
}

/// Went wrong: `exp(g_i − g_j)` evaluated for masked pairs, or one anchor per 64 rows, gave inf or NaN, or
/// silently wrong values from g = −2.5; clamping the exponent instead was wrong by 65 %.
#[test]
fn strong_decay_neither_overflows_nor_is_clamped() {
    let problem = eda([1, 130, 1, 1, 24, 16]);
    let tensors = generate::tensors(&problem, &MIXED);
    for g in [-2.5, -5.0, -20.0, -60.0, -100.0, -1000.0, f32::NEG_INFINITY] {
        let all = vec![g; problem.len(Operand::G)];
        let every = tensors.clone().with(Operand::G, all);
        // Alone in one channel, where the others keep everything.
        let single = (0..problem.len(Operand::G))
            .map(|i| if i % problem.key_dim == 3 { g } else { 0.0 })
            .collect();
        let single = tensors.clone().with(Operand::G, single);
        // At every 21st token only: the pairs across it vanish, those between do not.
        let at = |i: usize| (i / problem.key_dim) % 21 == 20;
        let cliff = (0..problem.len(Operand::G))
            .map(|i| if at(i) { g } else { -1e-3 })
            .collect();
        let cliff = tensors.clone().with(Operand::G, cliff);
        for engine in engines() {
            for (what, tensors) in [("all", &every), ("one", &single), ("cliff", &cliff)] {
                for size in [16, 32, 64] {
                    let outputs = prefill(engine, &problem, tensors, &chunk(size));
                    let what = format!("g = {g} in {what}, chunk {size}");
                    assert_outputs_right(engine, &what, outputs, &exact(&problem, tensors));
                }
            }
        }
    }
}

/// The same class: a sum of log decays that has passed −1000 has no digits left for the small decays
/// that follow, and `−inf − (−inf)` is NaN.
#[test]
fn small_decays_after_a_large_one_keep_their_digits() {
    for rule in [Rule::Gdn, Rule::Eda, Rule::Rwkv7] {
        let problem = Problem::new(rule, [1, 64, 1, 1, 16, 16]);
        let width = problem.row_len(Operand::G);
        for first in [-1e3, -1e6, -1e30, f32::NEG_INFINITY] {
            let g = (0..problem.len(Operand::G))
                .map(|i| if i / width % 16 == 2 { first } else { -0.013 })
                .collect();
            let tensors = generate::tensors(&problem, &MIXED).with(Operand::G, g);
            for engine in engines() {
                assert_tensors_right(engine, &format!("{rule}, {first}"), &problem, &tensors);
            }
        }
    }
}

/// Went wrong: reads past the end where T is not a multiple of the chunk.
#[test]
fn lengths_around_chunk_edges() {
    for tokens in [1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 129] {
        let problem = eda([2, tokens, 1, 1, 16, 12]);
        let tensors = generate::tensors(&problem, &MIXED);
        let expected = exact(&problem, &tensors);
        for engine in engines() {
            for size in [16, 32, 64] {
                let what = format!("{tokens} tokens in chunks of {size}");
                let outputs = prefill(engine, &problem, &tensors, &chunk(size));
                assert_outputs_right(engine, &what, outputs, &expected);
            }
        }
    }
}

/// Went wrong: from 65,536 tokens on, the tail was skipped.
#[test]
fn more_than_65536_tokens() {
    let problem = eda([1, 65_536 + 77, 1, 1, 4, 4]);
    for engine in engines() {
        assert_right(engine, "65,613 tokens", &problem, &MIXED);
    }
}

/// The same class, at a usual head size: more work than one dispatch or submission takes, so that it is
/// done in parts, each of which must find the state of the one before.
#[test]
fn a_prefill_in_many_parts() {
    let problem = eda([1, 20_000, 1, 2, 64, 64]);
    for engine in engines() {
        assert_right(engine, "20,000 tokens", &problem, &MIXED);
    }
}

/// Went wrong: a workgroup count above 65,535 in one dimension, one workgroup for each sequence.
#[test]
fn more_than_65535_sequences() {
    let problem = eda([66_000, 1, 1, 1, 2, 2]);
    let tensors = generate::tensors(&problem, &MIXED);
    let expected = exact(&problem, &tensors);
    for engine in engines() {
        let outputs = prefill(engine, &problem, &tensors, &PrefillOptions::default());
        assert_outputs_right(engine, "prefill", outputs, &expected);

        // Decode over as many rows; the states of the first and the last are looked at.
        let step = problem.clone();
        let mut inputs = tensors.clone();
        inputs.take(Operand::InitialState);
        let expected = exact(&step, &inputs);
        let mut pool = wait(engine.pool(&step, step.batch)).expect("a pool");
        let rows: Vec<Row> = (0..step.batch as i32).map(Row::starts).collect();
        let o = decode_rows(engine, &step, &inputs, &mut pool, &rows).expect("a decode");
        let error = eda_wgpu::relative_error(&o, &expected.o);
        assert!(error < 1e-5, "decode on {}: {error:.2e}", label(engine));
        for slot in [0, step.batch - 1] {
            let state = wait(pool.read(slot)).expect("a state");
            let len = step.state_len();
            let expected = &expected.final_state[slot * len..(slot + 1) * len];
            assert!(eda_wgpu::relative_error(&state, expected) < 1e-5, "{slot}");
        }
    }
}

/// Went wrong: an element count above 2^31 gave finite wrong values. Here a size that cannot be indexed
/// is refused before anything is computed, whatever the sizes are.
#[test]
fn absurd_sizes_are_refused() {
    for sizes in [
        [1 << 40, 1 << 40, 1, 1, 1, 1],
        [usize::MAX, usize::MAX, 1, 1, 1, 1],
        [usize::MAX, 0, 1, 1, 8, 8],
        [1, usize::MAX, 1, 1, 8, 8],
        [1, 1, 1, usize::MAX, 8, 8],
        [1, 1, 1, 1, 257, 8],
        [1, 1, 1, 1, 8, 257],
        [1, 1, 0, 1, 8, 8],
        [1, 1, 1, 0, 8, 8],
        [1, 1, 1, 1, 0, 8],
        [1, 1, 1, 1, 8, 0],
    ] {
        let refused = eda(sizes).validate();
        assert!(refused.is_err(), "{sizes:?}");
    }
}

/// Went wrong: an empty sequence in `cu_seqlens` gave NaN or a deadlock. Right: its state passes through.
#[test]
fn empty_sequences_pass_their_state_through() {
    for offsets in [
        vec![0, 0, 0, 20, 20, 53, 53],
        vec![0, 40, 40],
        vec![0, 0, 16, 32],
        vec![0, 0, 0],
    ] {
        let tokens = offsets[offsets.len() - 1];
        let mut problem = eda([1, tokens, 1, 2, 16, 12]);
        problem.cu_seqlens = Some(offsets.clone());
        let tensors = generate::tensors(&problem, &MIXED);
        let initial = tensors.get(Operand::InitialState).expect("a state");
        let len = problem.value_heads * problem.state_len();
        for engine in engines() {
            let what = format!("{offsets:?}");
            assert_tensors_right(engine, &what, &problem, &tensors);
            let options = PrefillOptions::default();
            let outputs = prefill(engine, &problem, &tensors, &options).expect("a prefill");
            for n in (0..problem.sequences()).filter(|&n| problem.sequence(n).is_empty()) {
                let state = n * len..(n + 1) * len;
                assert_eq!(outputs.final_state[state.clone()], initial[state], "{what}");
            }
        }
    }
}

/// The same class: T = 0. Right: an empty output and the initial state, zero where there is none.
#[test]
fn no_tokens_at_all() {
    let problem = eda([3, 0, 1, 2, 16, 12]);
    for initial_state in [true, false] {
        let recipe = Recipe {
            initial_state,
            ..MIXED
        };
        let tensors = generate::tensors(&problem, &recipe);
        let expected = match tensors.get(Operand::InitialState) {
            Some(state) => state.clone(),
            None => vec![0.0; problem.states_len()],
        };
        for engine in engines() {
            let options = PrefillOptions::default();
            let outputs = prefill(engine, &problem, &tensors, &options).expect("a prefill");
            assert!(outputs.o.is_empty());
            assert_eq!(outputs.final_state, expected, "on {}", label(engine));
        }
    }
}

/// Went wrong: one pass differed from two passes with the state carried.
#[test]
fn one_pass_equals_two() {
    for rule in Rule::ALL {
        let problem = Problem::new(rule, [2, 50, 1, 2, 16, 12]);
        let tensors = generate::tensors(&problem, &MIXED);
        let expected = exact(&problem, &tensors);
        for engine in engines() {
            for at in [0, 1, 16, 31, 49, 50] {
                let outputs = wait(prefill_split(engine, &problem, &tensors.slices(), &[at]));
                assert_outputs_right(engine, &format!("{rule}, at {at}"), outputs, &expected);
            }
        }
    }
}

/// Went wrong: the chunk form and the recurrence returned different states.
#[test]
fn decode_and_prefill_agree() {
    for rule in Rule::ALL {
        let problem = Problem::new(rule, [2, 21, 1, 2, 16, 12]);
        let tensors = generate::tensors(&problem, &MIXED);
        let expected = exact(&problem, &tensors);
        for engine in engines() {
            for (at, step) in [(21, 1), (0, 1), (0, 4), (17, 2)] {
                let outputs = decode(engine, &problem, &tensors, at, step);
                let what = format!("{rule}, {at} by prefill, {step} a step");
                assert_outputs_right(engine, &what, outputs, &expected);
            }
        }
    }
}

/// Went wrong: head sizes such as 60 or 100, where unmasked lanes gave inf · 0.
#[test]
fn odd_head_sizes() {
    for (key_dim, value_dim) in [
        (1, 1),
        (3, 5),
        (7, 64),
        (60, 100),
        (100, 60),
        (33, 31),
        (1, 130),
        (130, 1),
        (255, 7),
        (256, 256),
    ] {
        let problem = eda([1, 35, 1, 1, key_dim, value_dim]);
        let tensors = generate::tensors(&problem, &MIXED);
        let expected = exact(&problem, &tensors);
        for engine in engines() {
            let what = format!("K = {key_dim}, V = {value_dim}");
            assert_tensors_right(engine, &what, &problem, &tensors);
            let outputs = decode(engine, &problem, &tensors, 32, 1);
            assert_outputs_right(engine, &format!("{what}, decode"), outputs, &expected);
        }
    }
}

/// Went wrong: more value heads than key heads were misread.
#[test]
fn grouped_heads() {
    for rule in Rule::ALL {
        for (heads, value_heads) in [(1, 3), (2, 4), (3, 9)] {
            let problem = Problem::new(rule, [2, 20, heads, value_heads, 8, 12]);
            let tensors = generate::tensors(&problem, &MIXED);
            let expected = exact(&problem, &tensors);
            for engine in engines() {
                let what = format!("{rule}, {heads} and {value_heads} heads");
                assert_tensors_right(engine, &what, &problem, &tensors);
                let outputs = decode(engine, &problem, &tensors, 17, 1);
                assert_outputs_right(engine, &format!("{what}, decode"), outputs, &expected);
            }
        }
    }
    let refused = eda([1, 1, 2, 3, 8, 8]).validate();
    assert!(matches!(refused, Err(Error::Tensor { .. })), "{refused:?}");
}

/// Went wrong: inputs of another layout were read as if they had the right one. Right: tensors are dense
/// in the stated shape, and a length that does not fit is an error that names the tensor.
#[test]
fn tensors_that_do_not_fit_are_named() {
    for rule in Rule::ALL {
        let mut problem = Problem::new(rule, [1, 5, 1, 2, 8, 4]);
        problem.cu_seqlens = Some(vec![0, 2, 5]);
        let tensors = generate::tensors(&problem, &MIXED);
        for (operand, values) in tensors.iter() {
            let mut longer = tensors.clone();
            longer.set(operand, [values.as_slice(), &[0.0]].concat());
            let mut shorter = tensors.clone();
            shorter.set(operand, values[1..].to_vec());
            let mut missing = tensors.clone();
            missing.take(operand);
            for (what, tensors) in [("long", longer), ("short", shorter), ("missing", missing)] {
                if what == "missing" && operand == Operand::InitialState {
                    continue;
                }
                refused(&problem, &tensors, operand, &format!("{rule}, {what}"));
            }
        }
        for operand in Operand::ALL.into_iter().filter(|&o| !problem.uses(o)) {
            let extra = tensors.clone().with(operand, vec![0.0; 4]);
            refused(&problem, &extra, operand, &format!("{rule}, extra"));
        }
    }
}

/// Every engine refuses these inputs with an error that names `operand`.
fn refused(problem: &Problem, tensors: &Tensors<Vec<f32>>, operand: Operand, what: &str) {
    for engine in engines() {
        match prefill(engine, problem, tensors, &PrefillOptions::default()) {
            Err(Error::Tensor { tensor, .. }) => {
                assert_eq!(tensor, problem.name(operand), "{what}");
            }
            other => panic!("{what} {operand:?} on {}: {other:?}", label(engine)),
        }
    }
}

/// Sequence offsets that decrease, overrun or fall short are errors, not reads past the end.
#[test]
fn wrong_sequence_offsets_are_refused() {
    for offsets in [
        vec![],
        vec![1, 10],
        vec![0, 6, 4, 10],
        vec![0, 11],
        vec![0, 9],
    ] {
        let mut problem = eda([1, 10, 1, 1, 8, 8]);
        let tensors = generate::tensors(&problem, &Recipe::default());
        problem.cu_seqlens = Some(offsets.clone());
        for engine in engines() {
            match prefill(engine, &problem, &tensors, &PrefillOptions::default()) {
                Err(Error::Tensor { tensor, .. }) => assert_eq!(tensor, "cu_seqlens"),
                other => panic!("{offsets:?} on {}: {other:?}", label(engine)),
            }
        }
    }
}

/// Rows of one token for a pool: a batch of `batch` with `generate`'s inputs from `seed`.
fn step(batch: usize, seed: u64) -> (Problem, Tensors<Vec<f32>>) {
    let problem = eda([batch, 1, 1, 2, 8, 12]);
    let recipe = Recipe {
        seed,
        ..Recipe::default()
    };
    let tensors = generate::tensors(&problem, &recipe);
    (problem, tensors)
}

/// Went wrong: padded tokens changed the state, or gave output. Right: slot −1 is padding, its output is
/// zero and no state is touched, whatever the row holds.
#[test]
fn padding_rows_touch_nothing() {
    let (problem, mut tensors) = step(3, 1);
    for operand in [Operand::V, Operand::Q] {
        let mut values = tensors.take(operand).expect("an input");
        let row = problem.row_len(operand);
        values[row..2 * row].fill(1e30);
        tensors.set(operand, values);
    }
    let o_row = problem.value_heads * problem.value_dim;
    for engine in engines() {
        let mut pool = wait(engine.pool(&problem, 4)).expect("a pool");
        let old: Vec<f32> = (0..problem.value_heads * problem.state_len())
            .map(|i| i as f32)
            .collect();
        for slot in 0..4 {
            wait(pool.write(slot, &old)).expect("a slot");
        }
        let rows = [Row::continues(2), Row::PADDING, Row::continues(0)];
        let o = decode_rows(engine, &problem, &tensors, &mut pool, &rows).expect("a decode");
        assert!(o[o_row..2 * o_row].iter().all(|&x| x == 0.0));
        assert!(o.iter().all(|x| x.is_finite()));
        for slot in [1, 3] {
            assert_eq!(wait(pool.read(slot)).unwrap(), old, "slot {slot}");
        }
        for slot in [0, 2] {
            assert_ne!(wait(pool.read(slot)).unwrap(), old, "slot {slot}");
        }

        // A batch of padding alone.
        let before: Vec<_> = (0..4).map(|slot| wait(pool.read(slot)).unwrap()).collect();
        let rows = [Row::PADDING; 3];
        let o = decode_rows(engine, &problem, &tensors, &mut pool, &rows).expect("a decode");
        assert!(o.iter().all(|&x| x == 0.0));
        for (slot, before) in before.iter().enumerate() {
            assert_eq!(wait(pool.read(slot)).unwrap(), *before, "slot {slot}");
        }
    }
}

/// Went wrong: the state of a finished request leaked into the next one in its slot. Right: a reset row
/// starts from zero, to the last bit what a new pool gives, even where the old state was not finite.
#[test]
fn reset_starts_from_zero() {
    let (problem, tensors) = step(2, 2);
    let len = problem.value_heads * problem.state_len();
    for engine in engines() {
        let mut new = wait(engine.pool(&problem, 2)).expect("a pool");
        let rows = [Row::continues(0), Row::continues(1)];
        let expected = decode_rows(engine, &problem, &tensors, &mut new, &rows).expect("a decode");
        for old in [5.0, f32::INFINITY, f32::NAN] {
            let mut pool = wait(engine.pool(&problem, 2)).expect("a pool");
            for slot in 0..2 {
                wait(pool.write(slot, &vec![old; len])).expect("a slot");
            }
            let rows = [Row::starts(0), Row::starts(1)];
            let o = decode_rows(engine, &problem, &tensors, &mut pool, &rows).expect("a decode");
            assert_eq!(o, expected, "after {old} on {}", label(engine));
            for slot in 0..2 {
                let state = wait(pool.read(slot)).unwrap();
                assert_eq!(state, wait(new.read(slot)).unwrap(), "after {old}");
            }
        }
    }
}

/// The same class, in prefill: a second call with the same engine, smaller and from zero, sees nothing of
/// the first.
#[test]
fn a_call_sees_nothing_of_the_one_before() {
    let large = eda([2, 70, 2, 2, 64, 64]);
    let small = eda([1, 19, 1, 1, 20, 12]);
    let loud = generate::tensors(&large, &MIXED);
    let v = loud.get(Operand::V).expect("values");
    let v = v.iter().map(|v| v * 1e20).collect();
    let loud = loud.with(Operand::V, v);
    for engine in engines() {
        prefill(engine, &large, &loud, &PrefillOptions::default()).expect("a prefill");
        assert_right(engine, "the second call", &small, &Recipe::default());
    }
}

/// States can be read, written and copied, and a copy continues on its own (a prefix that two requests
/// share).
#[test]
fn a_copied_slot_continues_on_its_own() {
    let (problem, first) = step(1, 3);
    let (_, second) = step(1, 4);
    for engine in engines() {
        let mut pool = wait(engine.pool(&problem, 3)).expect("a pool");
        assert_eq!(pool.slots(), 3);
        decode_rows(engine, &problem, &first, &mut pool, &[Row::starts(1)]).expect("a decode");
        let prefix = wait(pool.read(1)).unwrap();
        wait(pool.copy(1, 2)).expect("two slots");
        wait(pool.copy(1, 1)).expect("a copy onto itself changes nothing");
        assert_eq!(wait(pool.read(1)).unwrap(), prefix);
        let rows = [Row::continues(2)];
        let o = decode_rows(engine, &problem, &second, &mut pool, &rows).expect("a decode");
        assert_eq!(wait(pool.read(1)).unwrap(), prefix);
        let rows = [Row::continues(1)];
        let again = decode_rows(engine, &problem, &second, &mut pool, &rows).expect("a decode");
        assert_eq!(o, again);
        assert_eq!(wait(pool.read(1)).unwrap(), wait(pool.read(2)).unwrap());
    }
}

/// Went wrong: an error left a pool half-updated. Right: a request that is refused changes nothing, and
/// the pool goes on.
#[test]
fn a_refused_decode_leaves_the_pool_alone() {
    let (problem, tensors) = step(2, 5);
    let mut short = tensors.clone();
    short.set(Operand::V, vec![0.0; 3]);
    let other = eda([2, 1, 1, 2, 8, 16]);
    let other_tensors = generate::tensors(&other, &Recipe::default());
    let good = [Row::continues(0), Row::continues(1)];
    for engine in engines() {
        let mut pool = wait(engine.pool(&problem, 2)).expect("a pool");
        decode_rows(engine, &problem, &tensors, &mut pool, &good).expect("a decode");
        let before: Vec<_> = (0..2).map(|slot| wait(pool.read(slot)).unwrap()).collect();

        for rows in [
            vec![Row::continues(0), Row::continues(0)],
            vec![Row::continues(0), Row::continues(2)],
            vec![Row::continues(-2), Row::continues(0)],
            vec![Row::continues(0)],
            vec![Row::PADDING; 3],
        ] {
            let result = decode_rows(engine, &problem, &tensors, &mut pool, &rows);
            assert!(
                matches!(&result, Err(Error::Tensor { tensor, .. }) if tensor == "slots"),
                "{rows:?}: {result:?}"
            );
        }
        let result = decode_rows(engine, &problem, &short, &mut pool, &good);
        assert!(
            matches!(&result, Err(Error::Tensor { tensor, .. }) if tensor == "v"),
            "{result:?}"
        );
        // A problem whose states have another size.
        let result = decode_rows(engine, &other, &other_tensors, &mut pool, &good);
        assert!(result.is_err());
        assert!(wait(pool.read(2)).is_err());
        assert!(wait(pool.write(0, &[1.0])).is_err());
        assert!(wait(pool.write(2, &before[0])).is_err());
        assert!(wait(pool.copy(0, 2)).is_err());

        for (slot, before) in before.iter().enumerate() {
            assert_eq!(wait(pool.read(slot)).unwrap(), *before, "slot {slot}");
        }
        decode_rows(engine, &problem, &tensors, &mut pool, &good).expect("a decode");
    }
}

/// Went wrong: states in half precision overflowed. Right: float32 unless asked otherwise; outputs and
/// states are linear in the values, however large or small.
#[test]
fn large_and_small_values_keep_their_digits() {
    let problem = eda([1, 40, 1, 2, 16, 12]);
    for factor in [1e25f32, 1e-25] {
        let mut tensors = generate::tensors(&problem, &MIXED);
        for operand in [Operand::V, Operand::InitialState] {
            let values = tensors.take(operand).expect("an input");
            tensors.set(operand, values.iter().map(|x| x * factor).collect());
        }
        let expected = exact(&problem, &tensors);
        for engine in engines() {
            let what = format!("values of {factor:e}");
            assert_tensors_right(engine, &what, &problem, &tensors);
            let outputs = decode(engine, &problem, &tensors, 32, 1);
            assert_outputs_right(engine, &format!("{what}, decode"), outputs, &expected);
        }
    }
}

/// The same class: storage in float16 is optional, carries float32 states, and does not turn values
/// beyond its range into infinities without a word.
#[test]
fn half_storage_is_optional_and_range_checked() {
    let long = eda([1, 1000, 1, 1, 16, 16]);
    let recipe = Recipe {
        decays: Decays::None,
        ..MIXED
    };
    let tensors = generate::tensors(&long, &recipe);
    let expected = exact(&long, &tensors);
    let beyond = tensors.clone();
    let v = beyond.get(Operand::V).expect("values");
    let v = v.iter().map(|v| v * 1e6).collect();
    let beyond = beyond.with(Operand::V, v);
    for engine in engines() {
        if !offers_half(engine) {
            continue;
        }
        let outputs = prefill(engine, &long, &tensors, &half()).expect("a prefill");
        let error = common::error(&outputs, &expected);
        assert!(error < common::HALF, "{error:.2e} after 1000 tokens");
        match prefill(engine, &long, &beyond, &half()) {
            Err(Error::Tensor { .. } | Error::Unsupported { .. }) => {}
            Ok(outputs) => {
                let error = common::error(&outputs, &exact(&long, &beyond));
                assert!(
                    error < common::HALF,
                    "silently wrong on {}: {error:.2e}",
                    label(engine)
                );
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Went wrong: tests with weak gates hid a wrong formula. Right: strong and uneven gates for every rule,
/// K ≠ V, more than one head, `e` different from `k`.
#[test]
fn strong_uneven_gates_for_every_rule() {
    for rule in Rule::ALL
        .into_iter()
        .chain([1, 3, 4].map(|factors| Rule::DeltaProduct { factors }))
    {
        let problem = Problem::new(rule, [2, 66, 2, 4, 24, 36]);
        for seed in 0..3 {
            for gates in [Gates::Mixed, Gates::NearOne] {
                let recipe = Recipe {
                    seed,
                    gates,
                    ..MIXED
                };
                for engine in engines() {
                    assert_right(engine, &format!("{rule}, {recipe:?}"), &problem, &recipe);
                }
            }
        }
    }
}

/// The same class: where keys repeat and gates are near 1 (or 2), the triangular system is as far from the
/// identity as it gets, and an approximate inverse shows. With gates near 2 every step is a reflection:
/// nothing is forgotten, rounding included, which is what the limit allows for.
#[test]
fn repeated_keys_with_gates_at_the_end() {
    for rule in [
        Rule::Delta,
        Rule::Eda,
        Rule::Gdn2,
        Rule::DeltaProduct { factors: 2 },
    ] {
        for form in [GateForm::Value, GateForm::TwiceSigmoid] {
            let mut problem = Problem::new(rule, [1, 130, 1, 1, 16, 12]);
            (problem.beta, problem.gamma) = (form, form);
            let recipe = Recipe {
                keys: Keys::Repeated,
                gates: Gates::NearOne,
                decays: Decays::None,
                ..MIXED
            };
            let tensors = generate::tensors(&problem, &recipe);
            let expected = exact(&problem, &tensors);
            for engine in engines() {
                for size in [16, 32, 64] {
                    let outputs =
                        prefill(engine, &problem, &tensors, &chunk(size)).expect("a prefill");
                    let (error, limit) = (
                        common::error(&outputs, &expected),
                        common::limit(&problem, &tensors, &expected),
                    );
                    assert!(
                        error <= limit,
                        "{rule}, {form:?}, chunk {size} on {}: {error:.2e}",
                        label(engine)
                    );
                }
            }
        }
    }
}

/// Went wrong: float16 was taken for granted. Right: where it is missing, the error says so, and an
/// unknown chunk size is the same kind of error.
#[test]
fn what_is_not_offered_is_unsupported() {
    let problem = eda([1, 3, 1, 1, 8, 8]);
    let tensors = generate::tensors(&problem, &Recipe::default());
    for engine in engines() {
        // Panics on any other error than `Unsupported`.
        offers_half(engine);
        for size in [0, 1, 24, 65, 1 << 20] {
            let result = prefill(engine, &problem, &tensors, &chunk(size));
            assert!(
                matches!(result, Err(Error::Unsupported { .. })),
                "chunk {size} on {}: {result:?}",
                label(engine)
            );
        }
    }
}

/// Went wrong: programs fell back to the CPU silently. Right: what was asked for is opened and named, or
/// the error says that it is not there.
#[test]
fn the_path_taken_is_reported() {
    let open = |backend, adapter: Option<&str>| {
        wait(Engine::open(&EngineOptions {
            backend,
            adapter: adapter.map(String::from),
            ..EngineOptions::default()
        }))
    };
    let [cpu, gpu] = engines() else {
        panic!("two engines");
    };
    assert_eq!(cpu.description().backend, "cpu");
    assert_eq!(cpu.description().kind, "cpu");
    assert_ne!(gpu.description().backend, "cpu");
    assert!(!gpu.description().adapter.is_empty());
    // `auto` always finds something, and never a software adapter.
    let auto = open(Backend::Auto, None).expect("auto always opens");
    assert_ne!(auto.description().kind, "software");
    let missing = open(Backend::Vulkan, Some("no adapter has this name"));
    assert!(matches!(missing, Err(Error::NoAdapter(_))));
}

/// Went wrong: a NaN or inf in an input poisoned everything silently. Right: it is found and named by
/// tensor and index, and refused unless allowed; `g = −inf` alone is legal.
#[test]
fn non_finite_inputs_are_named() {
    for rule in Rule::ALL {
        let problem = Problem::new(rule, [2, 3, 1, 2, 4, 5]);
        let tensors = generate::tensors(&problem, &MIXED);
        for (operand, values) in tensors.iter() {
            let shape = problem.shape(operand);
            let last: Vec<usize> = shape.iter().map(|n| n - 1).collect();
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = values.clone();
                let i = values.len() - 1;
                values[i] = bad;
                let poisoned = tensors.clone().with(operand, values);
                let result = problem.validate_host(&poisoned.slices(), false);
                if operand == Operand::G && bad == f32::NEG_INFINITY {
                    assert!(result.is_ok(), "{result:?}");
                    continue;
                }
                let Err(Error::Tensor { tensor, found, .. }) = result else {
                    panic!("{rule} {operand:?} {bad}: {result:?}");
                };
                assert_eq!(tensor, problem.name(operand));
                assert!(found.contains(&format!("{last:?}")), "{found}");
                // Allowed on request, but for a log decay above 0.
                let allowed = problem.validate_host(&poisoned.slices(), true).is_ok();
                let positive = operand == Operand::G && bad > 0.0;
                assert_eq!(allowed, !positive, "{rule} {operand:?} {bad}");
            }
        }
        if let Some(g) = tensors.get(Operand::G) {
            let mut g = g.clone();
            g[1] = 0.5;
            let positive = tensors.clone().with(Operand::G, g);
            let result = problem.validate_host(&positive.slices(), false);
            assert!(matches!(result, Err(Error::Tensor { tensor, .. }) if tensor == "g"));
        }
    }
}
