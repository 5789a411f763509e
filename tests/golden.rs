//! The cases in `tests/data`, whose expected outputs were computed in float64 outside of this crate, on
//! every engine and in every mode.

mod common;

use common::{HALF, Table, cases, chunk, engines, half, offers_half, prefill, wait};
use eda_wgpu::battery::{LIMIT, decode, prefill_split};
use eda_wgpu::{PrefillOptions, relative_error};

/// Everything that is asked of one folder.
fn every_mode(folder: &str) {
    let mut table = Table::default();
    for case in cases(folder) {
        let tensors = case.tensors.slices();
        for engine in engines() {
            let mut add = |mode: &str, outputs| {
                table.add(&case.name, engine, mode, outputs, &case.expected, LIMIT);
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
            let outputs = wait(decode(engine, &case.problem, &tensors, 0, 1));
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

/// The reference of this crate agrees with the one that computed the expected outputs.
#[test]
fn the_reference_reproduces_the_expected_outputs() {
    for case in ["golden", "real"].into_iter().flat_map(cases) {
        let outputs = common::exact(&case.problem, &case.tensors);
        let state: Vec<f32> = outputs.final_state.iter().map(|&x| x as f32).collect();
        let o: Vec<f32> = outputs.o.iter().map(|&x| x as f32).collect();
        assert!(
            relative_error(&state, &case.expected.final_state) < 1e-7,
            "{}",
            case.name
        );
        assert!(relative_error(&o, &case.expected.o) < 1e-7, "{}", case.name);
    }
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
        let decoded =
            wait(decode(engine, &case.problem, &case.tensors.slices(), 0, 1)).expect("a decode");
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
            table.add(&case.name, engine, "f16", outputs, &case.expected, HALF);
        }
    }
    table.finish();
}
