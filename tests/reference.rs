//! The float64 recurrence against the case files, whose expectations were computed elsewhere.

mod golden;

use eda_wgpu::reference::recurrence;

/// Relative l2 error between float64 slices.
fn error(x: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(x.len(), expected.len());
    let difference: f64 = x.iter().zip(expected).map(|(x, e)| (x - e).powi(2)).sum();
    let norm: f64 = expected.iter().map(|e| e * e).sum();
    (difference / norm).sqrt()
}

#[test]
fn the_recurrence_agrees_with_every_case_file() {
    let cases = golden::cases("golden")
        .into_iter()
        .chain(golden::cases("real"));
    for case in cases {
        let got = recurrence::<f64>(&case.problem, &case.tensors.slices()).expect(&case.name);
        let o = error(&got.o, &case.o);
        let state = error(&got.final_state, &case.final_state);
        println!("{:<28} o {o:.1e}  state {state:.1e}", case.name);
        let limit = if case.exact { 1e-9 } else { 1e-6 };
        assert!(o < limit, "{}: o {o:e}", case.name);
        assert!(state < 1e-9, "{}: state {state:e}", case.name);
    }
}
