//! The cases in `tests/data`, whose expected outputs were computed in float64 outside of this crate, on
//! every engine and in every mode.

mod common;

use common::golden::{Case, cases};
use common::{HALF, Table, chunk, decode, engines, half, offers_half, prefill, wait};
use eda_wgpu::battery::{self, LIMIT, prefill_split};
use eda_wgpu::{Element, Outputs, PrefillOptions};

fn expected(case: &Case) -> Outputs<f64> {
    Outputs {
        o: case.o.clone(),
        final_state: case.final_state.clone(),
    }
}

/// Everything that is asked of one folder.
fn every_mode(folder: &str) {
    let mut table = Table::default();
    for case in cases(folder) {
        let (tensors, expected) = (case.tensors.slices(), expected(&case));
        for engine in engines() {
            let mut add = |mode: &str, outputs| {
                table.add(&case.name, engine, mode, outputs, &expected, LIMIT);
            };
            for size in [16, 32, 64] {
                let outputs = prefill(engine, &case.problem, &case.tensors, &chunk(size));
                add(&format!("chunk {size}"), outputs);
            }
            let longest = (0..case.problem.sequences())
                .map(|n| case.problem.sequence(n).len())
                .max()
                .unwrap_or(0);
            let mut points = vec![1, 16, 17, (longest / 2) | 1, longest.saturating_sub(1)];
            points.retain(|&at| 0 < at && at < longest);
            points.sort_unstable();
            points.dedup();
            for at in points {
                let outputs = wait(prefill_split(engine, &case.problem, &tensors, &[at]));
                add(&format!("split at {at}"), outputs);
            }
            let outputs = decode(engine, &case.problem, &case.tensors, 0, 1);
            add("decode", outputs);
        }
    }
    table.finish();
}

#[test]
fn golden_cases_in_every_mode() {
    every_mode("golden");
}

#[test]
fn real_layers_in_every_mode() {
    every_mode("real");
}

#[test]
fn the_worked_example_is_exact() {
    let case = cases("golden")
        .into_iter()
        .find(|case| case.name == "eda_worked_example")
        .expect("the worked example");
    for engine in engines() {
        let options = PrefillOptions::default();
        let chunked = prefill(engine, &case.problem, &case.tensors, &options).expect("a prefill");
        let decoded = decode(engine, &case.problem, &case.tensors, 0, 1).expect("a decode");
        for outputs in [chunked, decoded] {
            assert_eq!(outputs.final_state, [0.0, 7.0], "{}", common::label(engine));
            assert_eq!(outputs.o, [7.0], "{}", common::label(engine));
        }
    }
}

#[test]
fn float16_storage() {
    let offering: Vec<_> = engines().iter().filter(|e| offers_half(e)).collect();
    assert!(!offering.is_empty(), "no engine stores float16");
    let mut table = Table::default();
    for case in ["golden", "real"].into_iter().flat_map(cases) {
        for engine in &offering {
            let outputs = prefill(engine, &case.problem, &case.tensors, &half());
            table.add(&case.name, engine, "f16", outputs, &expected(&case), HALF);
            // The last tokens by decode.
            let at = case.problem.tokens.saturating_sub(20);
            let tensors = case.tensors.slices();
            let outputs = wait(battery::decode(
                engine,
                &case.problem,
                &tensors,
                at,
                1,
                Element::F16,
            ));
            table.add(
                &case.name,
                engine,
                "f16 decode",
                outputs,
                &expected(&case),
                HALF,
            );
        }
    }
    table.finish();
}
