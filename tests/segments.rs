//! Sequences cut into segments that are computed at the same time give what the recurrence gives.
//!
//! A software driver is never taken to gain by it, so every test asks for segments. (How they are chosen is tested
//! beside the model, in `src/gpu/segments.rs`; that a plan has them and what they do to a caller's buffers in
//! `tests/embedding.rs`; the matrix tier in `tests/matrix.rs`.)

mod common;

use common::golden::cases;
use common::{engines, error, exact, half, label, limit, prefill};
use eda_wgpu::battery::{LIMIT, LIMIT_F16};
use eda_wgpu::generate::{self, Decays, Gates, Keys, Recipe};
use eda_wgpu::{Outputs, PrefillOptions, Problem, Rule};

fn segments(count: usize, chunk: usize) -> PrefillOptions {
    PrefillOptions {
        segments: Some(count),
        chunk: Some(chunk),
        ..PrefillOptions::default()
    }
}

#[test]
fn every_rule_at_any_number_of_segments() {
    for rule in Rule::ALL {
        let problem = Problem::new(rule, [2, 203, 2, 4, 20, 33]);
        for (i, decays) in [Decays::Mixed, Decays::Weak, Decays::Cliff]
            .into_iter()
            .enumerate()
        {
            let recipe = Recipe {
                seed: i as u64,
                decays,
                initial_state: i < 2,
                ..Recipe::default()
            };
            let tensors = generate::tensors(&problem, &recipe);
            let expected = exact(&problem, &tensors);
            let most = limit(&problem, &tensors, &expected);
            for engine in engines() {
                for count in [3, 64] {
                    let outputs = prefill(engine, &problem, &tensors, &segments(count, 16));
                    let outputs = outputs.unwrap_or_else(|e| panic!("{rule}: {e}"));
                    let error = error(&outputs, &expected);
                    let what = format!("{rule}, {decays:?}, {count} segments on {}", label(engine));
                    assert!(error <= most, "{what}: {error:.2e}");
                }
            }
        }
    }
}

#[test]
fn golden_and_real_cases() {
    for case in ["golden", "real"].into_iter().flat_map(cases) {
        let expected = Outputs {
            o: case.o.clone(),
            final_state: case.final_state.clone(),
        };
        for engine in engines() {
            let outputs = prefill(engine, &case.problem, &case.tensors, &segments(3, 16));
            let outputs = outputs.unwrap_or_else(|e| panic!("{}: {e}", case.name));
            let error = error(&outputs, &expected);
            let what = format!("{} on {}", case.name, label(engine));
            assert!(error <= LIMIT, "{what}: {error:.2e}");
        }
    }
}

/// Long memories: what a segment does to a state has to be as right as the state.
#[test]
fn nothing_is_lost_where_nothing_is_forgotten() {
    let problem = Problem::new(Rule::Eda, [1, 1000, 1, 1, 64, 64]);
    for keys in [Keys::SameAddress, Keys::Repeated] {
        let recipe = Recipe {
            decays: Decays::None,
            gates: Gates::NearOne,
            keys,
            initial_state: true,
            ..Recipe::default()
        };
        let tensors = generate::tensors(&problem, &recipe);
        let expected = exact(&problem, &tensors);
        for engine in engines() {
            let outputs = prefill(engine, &problem, &tensors, &segments(8, 32)).expect("a prefill");
            let error = error(&outputs, &expected);
            assert!(error <= LIMIT, "{keys:?} on {}: {error:.2e}", label(engine));
        }
    }
}

/// Sequences of all lengths side by side, empty ones too: only the long are cut.
#[test]
fn ragged_sequences() {
    let mut problem = Problem::new(Rule::Eda, [1, 300, 1, 2, 32, 16]);
    problem.cu_seqlens = Some(vec![0, 0, 1, 18, 18, 290, 300, 300]);
    for initial_state in [true, false] {
        let recipe = Recipe {
            initial_state,
            ..Recipe::default()
        };
        let tensors = generate::tensors(&problem, &recipe);
        let expected = exact(&problem, &tensors);
        for engine in engines() {
            let outputs = prefill(engine, &problem, &tensors, &segments(4, 16)).expect("a prefill");
            let error = error(&outputs, &expected);
            assert!(error <= LIMIT, "on {}: {error:.2e}", label(engine));
        }
    }
}

#[test]
fn float16_storage() {
    let problem = Problem::new(Rule::Eda, [1, 150, 1, 2, 33, 19]);
    let tensors = generate::tensors(&problem, &Recipe::default());
    let expected = exact(&problem, &tensors);
    for engine in engines() {
        let options = PrefillOptions {
            segments: Some(3),
            ..half()
        };
        let outputs = prefill(engine, &problem, &tensors, &options).expect("a prefill");
        let error = error(&outputs, &expected);
        assert!(error <= LIMIT_F16, "on {}: {error:.2e}", label(engine));
    }
}

#[test]
fn the_same_segments_give_the_same_bits() {
    let problem = Problem::new(Rule::Eda, [1, 200, 1, 2, 32, 48]);
    let tensors = generate::tensors(&problem, &Recipe::default());
    for engine in engines() {
        let run = || prefill(engine, &problem, &tensors, &segments(4, 16)).expect("a prefill");
        let first = run();
        for i in 1..20 {
            assert!(first == run(), "on {}, run {i}", label(engine));
        }
    }
}
