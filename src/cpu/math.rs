//! Elementary functions over slices, written so that the compiler vectorises them.

/// `x ← exp(x)` for `x <= 0`, to about one unit in the last place; exactly 1 at 0, 0 where the result
/// would be below the normal range (`-inf` included), NaN at NaN.
pub(super) fn exp(x: &mut [f32]) {
    for x in x {
        *x = exp_one(*x);
    }
}

#[inline(always)]
fn exp_one(x: f32) -> f32 {
    // x = n·ln 2 + r; adding 1.5·2^23 rounds to an integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first with few enough bits that n times it is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const SMALLEST: f32 = -87.33;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    // The series of exp; |r| <= 0.35, so the first term left out is below 1e-8.
    let p = 1.0 / 5_040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    let power = f32::from_bits(exponent.wrapping_add(127) << 23);
    if x < SMALLEST { 0.0 } else { p * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_right_to_the_last_places() {
        let mut worst = 0.0f64;
        for i in 0..=873_000 {
            let x = -(i as f32) * 1e-4;
            let right = f64::from(x).exp();
            worst = worst.max((f64::from(exp_one(x)) / right - 1.0).abs());
        }
        assert!(worst < 1.5e-7, "{worst:e}");
    }

    #[test]
    fn exp_is_exact_at_the_ends() {
        let mut x = [0.0, -0.0, -1000.0, f32::NEG_INFINITY, f32::NAN];
        exp(&mut x);
        assert_eq!(x[..4], [1.0, 1.0, 0.0, 0.0]);
        assert!(x[4].is_nan());
    }
}
