//! The same inputs give the same bits every time: a missing barrier or an order of additions that depends
//! on timing shows here.

mod common;

use common::{decode, engines, label, prefill};
use eda_wgpu::generate::{self, Recipe};
use eda_wgpu::{PrefillOptions, Problem, Rule, Tensors};

const RUNS: usize = 20;

fn inputs(rule: Rule, sizes: [usize; 6]) -> (Problem, Tensors<Vec<f32>>) {
    let problem = Problem::new(rule, sizes);
    let recipe = Recipe {
        initial_state: true,
        ..Recipe::default()
    };
    let tensors = generate::tensors(&problem, &recipe);
    (problem, tensors)
}

#[test]
fn prefill_gives_the_same_bits() {
    for rule in Rule::ALL {
        let (problem, tensors) = inputs(rule, [2, 83, 2, 4, 32, 48]);
        for engine in engines() {
            let run = || {
                prefill(engine, &problem, &tensors, &PrefillOptions::default()).expect("a prefill")
            };
            let first = run();
            for i in 1..RUNS {
                assert!(first == run(), "{rule} on {}, run {i}", label(engine));
            }
        }
    }
}

#[test]
fn decode_gives_the_same_bits() {
    for rule in Rule::ALL {
        let (problem, tensors) = inputs(rule, [5, 4, 2, 4, 32, 48]);
        for engine in engines() {
            let run = || decode(engine, &problem, &tensors, 0, 1).expect("a decode");
            let first = run();
            for i in 1..RUNS {
                assert!(first == run(), "{rule} on {}, run {i}", label(engine));
            }
        }
    }
}

/// Several callers at once, on one engine, get what one alone gets.
#[test]
fn concurrent_calls_give_the_same_bits() {
    let (problem, tensors) = inputs(Rule::Eda, [1, 70, 1, 2, 32, 32]);
    for engine in engines() {
        let run =
            || prefill(engine, &problem, &tensors, &PrefillOptions::default()).expect("a prefill");
        let alone = run();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
            for thread in threads {
                let outputs = thread.join().expect("no panic");
                assert!(outputs == alone, "on {}", label(engine));
            }
        });
    }
}
