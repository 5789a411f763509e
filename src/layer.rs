//! What a layer does to its projections before the recurrence: gates, decays, normalisation.
//!
//! The host functions here are generic over the float type, so that the float64 reference and the CPU
//! engine share them; `shaders/layer.wgsl` is their twin on the GPU.

use crate::problem::{DecayGate, GateForm};
use num_traits::Float;

/// Added to `Σx²` under the root of the L2 normalisation.
pub const NORM_EPSILON: f64 = 1e-6;

fn constant<F: Float>(x: f64) -> F {
    // Every float type here represents these constants (rounded).
    F::from(x).unwrap_or_else(F::nan)
}

/// `1 / (1 + exp(−x))`, without overflow at either end.
#[inline]
pub fn sigmoid<F: Float>(x: F) -> F {
    let e = (-x.abs()).exp();
    let small = e / (F::one() + e);
    if x >= F::zero() {
        F::one() - small
    } else {
        small
    }
}

/// `ln(1 + exp(x))`, without overflow.
pub fn softplus<F: Float>(x: F) -> F {
    x.max(F::zero()) + (-x.abs()).exp().ln_1p()
}

/// The gate from what the caller gave.
#[inline]
pub fn gate<F: Float>(form: GateForm, x: F) -> F {
    match form {
        GateForm::Value => x,
        GateForm::Sigmoid => sigmoid(x),
        GateForm::TwiceSigmoid => sigmoid(x) + sigmoid(x),
    }
}

/// The log decay `g` from the layer's `a + dt_bias = x` and `A_log`.
pub fn log_decay<F: Float>(form: DecayGate, x: F, a_log: F) -> F {
    let a = a_log.exp();
    match form {
        DecayGate::Safe { lower_bound } => {
            // ℓ + (−ℓ)·exp(−u) = ℓ·(1 − exp(−u)) = −ℓ·expm1(−u), which keeps small decays exact.
            let l = constant::<F>(f64::from(lower_bound));
            -l * (-(a / l.abs()) * softplus(x)).exp_m1()
        }
        DecayGate::Sigmoid { lower_bound } => {
            constant::<F>(f64::from(lower_bound)) * sigmoid(a * x)
        }
        DecayGate::Softplus => -a * softplus(x),
    }
}

/// `x / sqrt(Σx² + 1e-6)` in place.
#[inline]
pub fn normalize<F: Float>(x: &mut [F]) {
    // Eight partial sums: one alone would wait for each addition before the next.
    let mut sums = [F::zero(); 8];
    let (eights, rest) = x.as_chunks::<8>();
    for eight in eights {
        for (sum, &x) in sums.iter_mut().zip(eight) {
            *sum = *sum + x * x;
        }
    }
    for (sum, &x) in sums.iter_mut().zip(rest) {
        *sum = *sum + x * x;
    }
    let sum = sums.into_iter().fold(F::zero(), |s, x| s + x);
    let inverse = (sum + constant(NORM_EPSILON)).sqrt().recip();
    for x in x {
        *x = *x * inverse;
    }
}
