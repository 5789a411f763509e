//! Random sizes, rules, forms, gates and sequences: prefill, split runs and decode agree with float64.
//!
//! `PROPTEST_CASES` sets the number of cases; a GPU gets fewer by default, since in CI it is a software
//! driver.

mod common;

use common::{decode, engines, exact, label, prefill, wait};
use eda_wgpu::battery::prefill_split;
use eda_wgpu::generate::{self, Decays, Gates, Keys, Recipe};
use eda_wgpu::{
    Decay, DecayGate, Engine, GateForm, Outputs, PrefillOptions, Problem, Result, Rule, Tensors,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

fn rules() -> impl Strategy<Value = Rule> {
    prop_oneof![
        4 => Just(Rule::Eda),
        9 => prop::sample::select(&Rule::ALL[..]),
        1 => (1u8..=4).prop_map(|factors| Rule::DeltaProduct { factors }),
    ]
}

/// `K` or `V`: mostly small, some beyond one subgroup or tile.
fn dims() -> impl Strategy<Value = usize> {
    prop_oneof![6 => 1usize..=40, 1 => 41usize..=130]
}

/// A batch of up to three rows, or packed sequences of which some are empty.
fn sequences() -> impl Strategy<Value = (usize, usize, Option<Vec<usize>>)> {
    let packed = prop::collection::vec(prop_oneof![1 => Just(0), 4 => 0usize..=40], 0..=5);
    prop_oneof![
        (1usize..=3, 0usize..=80).prop_map(|(batch, tokens)| (batch, tokens, None)),
        packed.prop_map(|lengths| {
            let mut offsets = vec![0];
            for length in lengths {
                offsets.push(offsets[offsets.len() - 1] + length);
            }
            (1, offsets[offsets.len() - 1], Some(offsets))
        }),
    ]
}

/// The form of the inputs: prepared, or as a layer hands them over.
fn forms() -> impl Strategy<Value = Option<(DecayGate, GateForm)>> {
    let bound = (-8.0f32..-0.5).boxed();
    let gates = prop_oneof![
        bound
            .clone()
            .prop_map(|lower_bound| DecayGate::Safe { lower_bound }),
        bound.prop_map(|lower_bound| DecayGate::Sigmoid { lower_bound }),
        Just(DecayGate::Softplus),
    ];
    let raw = (gates, any::<bool>()).prop_map(|(gate, twice)| {
        let form = match twice {
            true => GateForm::TwiceSigmoid,
            false => GateForm::Sigmoid,
        };
        (gate, form)
    });
    prop_oneof![2 => Just(None), 1 => raw.prop_map(Some)]
}

fn problems() -> impl Strategy<Value = Problem> {
    (
        rules(),
        sequences(),
        (1usize..=3, 1usize..=3),
        (dims(), dims()),
        forms(),
        (any::<bool>(), prop::option::of(0.1f32..2.0)),
    )
        .prop_map(
            |(
                rule,
                (batch, tokens, cu_seqlens),
                (heads, group),
                (k, v),
                form,
                (per_head, scale),
            )| {
                let mut problem = Problem::new(rule, [batch, tokens, heads, heads * group, k, v]);
                problem.cu_seqlens = cu_seqlens;
                problem.scale = scale;
                problem.decay_per_head |= per_head;
                if let Some((gate, form)) = form {
                    problem.normalize = true;
                    problem.decay = Decay::Gate(gate);
                    // A gate above 1 makes Comba grow: its read and write addresses differ.
                    let form = match rule {
                        Rule::Comba => GateForm::Sigmoid,
                        _ => form,
                    };
                    (problem.beta, problem.gamma) = (form, form);
                }
                problem
            },
        )
}

fn recipes() -> impl Strategy<Value = Recipe> {
    let decays = [
        Decays::Mixed,
        Decays::Mixed,
        Decays::None,
        Decays::Weak,
        Decays::Floor,
        Decays::Cliff,
        Decays::Full,
    ];
    let keys = [Keys::Clustered, Keys::Repeated, Keys::SameAddress];
    (
        any::<u32>(),
        prop::sample::select(decays.to_vec()),
        prop::sample::select(vec![Gates::Mixed, Gates::NearOne]),
        prop::sample::select(keys.to_vec()),
        any::<bool>(),
    )
        .prop_map(|(seed, decays, gates, keys, initial_state)| Recipe {
            seed: u64::from(seed),
            decays,
            gates,
            keys,
            initial_state,
        })
}

/// Runs a property on each engine; `run` makes outputs for a problem and three random numbers.
fn check(run: impl Fn(&Engine, &Problem, &Tensors<Vec<f32>>, [usize; 3]) -> Result<Outputs>) {
    let cases = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|n| n.parse().ok());
    for engine in engines() {
        let engine_name = label(engine);
        let mut runner = TestRunner::new(Config {
            cases: cases.unwrap_or(if engine_name == "cpu" { 64 } else { 16 }),
            // A failing case is printed in full and drawn from its seed; no file is needed to see it again.
            failure_persistence: None,
            ..Config::default()
        });
        let input = (problems(), recipes(), any::<[u16; 3]>());
        let outcome = runner.run(&input, |(problem, recipe, random)| {
            let tensors = generate::tensors(&problem, &recipe);
            let expected = exact(&problem, &tensors);
            let limit = common::limit(&problem, &tensors, &expected);
            let outputs = run(engine, &problem, &tensors, random.map(usize::from))
                .map_err(|e| TestCaseError::fail(e.to_string()))?;
            let error = common::error(&outputs, &expected);
            prop_assert!(error <= limit, "error {error:.2e}, limit {limit:.0e}");
            Ok(())
        });
        outcome.unwrap_or_else(|e| panic!("on {engine_name}: {e}"));
    }
}

#[test]
fn prefill_agrees_with_float64_at_every_chunk_size_and_number_of_segments() {
    check(|engine, problem, tensors, [chunk, segments, _]| {
        let options = PrefillOptions {
            chunk: [None, Some(16), Some(32), Some(64)][chunk % 4],
            segments: [None, Some(2 + segments % 5)][segments % 2],
            ..PrefillOptions::default()
        };
        prefill(engine, problem, tensors, &options)
    });
}

#[test]
fn a_split_anywhere_changes_nothing() {
    check(|engine, problem, tensors, random| {
        let mut at = random.map(|x| x % (problem.tokens + 1));
        at.sort_unstable();
        wait(prefill_split(engine, problem, &tensors.slices(), &at))
    });
}

#[test]
fn decode_continues_a_prefill_anywhere() {
    check(|engine, problem, tensors, [at, step, _]| {
        // At most 24 tokens are decoded, so that a software driver is done soon.
        let first = problem.tokens.saturating_sub(24);
        let at = first + at % (problem.tokens - first + 1);
        decode(engine, problem, tensors, at, 1 + step % 4)
    });
}
