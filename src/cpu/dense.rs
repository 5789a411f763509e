//! Loops over vectors.

/// Runs `f`, compiled for the widest vectors that this processor is found to have: loops in it, and in
/// what is inlined into it, take their width from here.
#[inline(always)]
pub(super) fn vectorised<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// `Σ xᵢ yᵢ`, in eight partial sums.
#[inline(always)]
pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let (x8, x_rest) = x.as_chunks::<8>();
    let (y8, y_rest) = y.as_chunks::<8>();
    for (x, y) in x8.iter().zip(y8) {
        for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
            *sum += x * y;
        }
    }
    let rest: f32 = x_rest.iter().zip(y_rest).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f32>() + rest
}

/// `y += factor · x`
#[inline(always)]
pub(super) fn add_scaled(y: &mut [f32], factor: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

/// `y ← x ⊙ y`; what falls below the normal range becomes 0: strong decays would fill the products with
/// subnormal numbers, which some processors handle in microcode.
#[inline(always)]
pub(super) fn scale_each(y: &mut [f32], x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        let product = *y * x;
        *y = if product.abs() < f32::MIN_POSITIVE {
            0.0
        } else {
            product
        };
    }
}
