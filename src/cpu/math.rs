//! Elementary functions over slices: no branches and no calls in the loops, so that the compiler
//! vectorises them. The library functions that [`crate::layer`] uses take longer for the decays of a
//! token than all the products of its chunk.

use crate::problem::{Decay, DecayGate};
use crate::rows::Rows;
use std::f32::consts::LOG2_E;

/// The decay `α = exp(g)` of a token, `[K]`; in float32 what [`Rows::log_decay`] and `exp` give, to a few
/// units in the last place.
#[inline(always)]
pub(super) fn decay(rows: &Rows<'_>, form: Decay, token: usize, head: usize, alpha: &mut [f32]) {
    let Some((g, bias, a_log)) = rows.decay_inputs(token, head) else {
        alpha.fill(1.0);
        return;
    };
    let (one, _) = alpha.split_at_mut(g.len());
    let a = a_log.exp();
    match form {
        Decay::Log => each(one, g, g, |g, _| g),
        Decay::Gate(DecayGate::Safe { lower_bound: l }) => {
            let slope = -(a / l.abs());
            each(one, g, bias, |x, bias| {
                -l * exp_m1(slope * softplus(x + bias))
            });
        }
        Decay::Gate(DecayGate::Sigmoid { lower_bound: l }) => {
            each(one, g, bias, |x, bias| l * sigmoid(a * (x + bias)));
        }
        Decay::Gate(DecayGate::Softplus) => {
            each(one, g, bias, |x, bias| -a * softplus(x + bias));
        }
    }
    if g.len() == 1 {
        let value = alpha[0];
        alpha.fill(value);
    }
}

/// `alpha ← exp(g(x, bias))`
#[inline(always)]
fn each(alpha: &mut [f32], x: &[f32], bias: &[f32], g: impl Fn(f32, f32) -> f32) {
    for ((alpha, &x), &bias) in alpha.iter_mut().zip(x).zip(bias) {
        *alpha = exp(g(x, bias));
    }
}

/// 1.5·2^23: added to a small number, it leaves the nearest integer in the low bits.
const ROUND: f32 = 12_582_912.0;
/// Arguments below give 0 (`exp`): the result would leave the normal range.
const SMALLEST: f32 = -87.33;

/// For `x <= 0`: `(p, 2^n)` with `exp(x) = (1 + p) · 2^n`.
#[inline(always)]
fn exp_parts(x: f32) -> (f32, f32) {
    // ln 2 in two parts, the first with few enough bits that n times it is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    // The series of exp; |r| <= 0.35, so the first term left out is below 1e-8.
    let p = 1.0 / 5_040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    (
        p * (r * r) + r,
        f32::from_bits(exponent.wrapping_add(127) << 23),
    )
}

/// `exp(x)` for `x <= 0`; exactly 1 at 0, 0 where the result would be below the normal range (`-inf`
/// included), NaN at NaN.
#[inline(always)]
fn exp(x: f32) -> f32 {
    let (p, power) = exp_parts(x);
    if x < SMALLEST { 0.0 } else { (1.0 + p) * power }
}

/// `exp(x) − 1` for `x <= 0`.
#[inline(always)]
fn exp_m1(x: f32) -> f32 {
    let (p, power) = exp_parts(x);
    if x < SMALLEST {
        -1.0
    } else {
        p * power + (power - 1.0)
    }
}

/// `ln(1 + exp(x))`
#[inline(always)]
fn softplus(x: f32) -> f32 {
    // ln(1 + u) = 2·artanh(s), s = u / (2 + u) <= 1/3.
    let u = exp(-x.abs());
    let s = u / (2.0 + u);
    let s2 = s * s;
    let p = 1.0 / 15.0;
    let p = p * s2 + 1.0 / 13.0;
    let p = p * s2 + 1.0 / 11.0;
    let p = p * s2 + 1.0 / 9.0;
    let p = p * s2 + 1.0 / 7.0;
    let p = p * s2 + 1.0 / 5.0;
    let p = p * s2 + 1.0 / 3.0;
    let positive = if x < 0.0 { 0.0 } else { x };
    positive + 2.0 * (s + s * (s2 * p))
}

/// `1 / (1 + exp(−x))`
#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    let u = exp(-x.abs());
    let small = u / (1.0 + u);
    if x < 0.0 { small } else { 1.0 - small }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer;

    #[test]
    fn functions_are_right_to_the_last_places() {
        let mut worst = [0.0f64; 4];
        let mut note = |i: usize, got: f32, right: f64| {
            worst[i] = worst[i].max((f64::from(got) - right).abs() / right.abs());
        };
        for i in 1..=873_000 {
            let x = -(i as f32) * 1e-4;
            let exact = f64::from(x);
            note(0, exp(x), exact.exp());
            note(1, exp_m1(x), exact.exp_m1());
            for (x, exact) in [(x, exact), (-x, -exact)] {
                note(2, softplus(x), layer::softplus(exact));
                note(3, sigmoid(x), layer::sigmoid(exact));
            }
        }
        assert!(worst.iter().all(|&w| w < 4e-7), "{worst:?}");
    }

    #[test]
    fn exp_is_exact_at_the_ends() {
        let ends = [0.0, -0.0, -1000.0, f32::NEG_INFINITY].map(exp);
        assert_eq!(ends, [1.0, 1.0, 0.0, 0.0]);
        assert!(exp(f32::NAN).is_nan() && exp(f32::NEG_INFINITY) == 0.0);
        assert_eq!(exp_m1(0.0), 0.0);
    }
}
