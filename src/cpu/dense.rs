//! Products of small dense matrices, through the `gemm` crate, and loops over vectors.

/// A borrowed matrix: element `(i, j)` lies at `i · row_stride + j · column_stride`.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A row-major `[rows, columns]` matrix whose rows start `stride` values apart.
    pub(super) fn new(values: &'a [f32], [rows, columns]: [usize; 2], stride: usize) -> Self {
        assert!(columns <= stride && covers(values.len(), rows, columns, stride));
        Self {
            values,
            rows,
            columns,
            row_stride: stride,
            column_stride: 1,
        }
    }

    /// The same values seen as the transposed matrix.
    pub(super) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// Whether `len` values hold `rows` rows of `columns` values, `stride` apart.
fn covers(len: usize, rows: usize, columns: usize, stride: usize) -> bool {
    rows == 0 || columns == 0 || (rows - 1) * stride + columns <= len
}

/// What becomes of the values in the destination of a [`product`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Store {
    /// They are overwritten.
    Replace,
    /// The product is added to them.
    Add,
}

/// `to = a · b` or `to += a · b`; the rows of `to` start `stride` values apart.
///
/// Runs on the calling thread alone: the engine's parallelism lies outside, over heads and chunks.
pub(super) fn product(to: &mut [f32], stride: usize, store: Store, a: Matrix<'_>, b: Matrix<'_>) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert!(k == b.rows && n <= stride && covers(to.len(), m, n, stride));
    // No stride exceeds the length of a slice in memory, so it fits isize.
    let signed = |x: usize| x as isize;
    // SAFETY: `Matrix::new` and the assertion above make every element that the sizes and strides
    // name lie inside its slice; `to` is borrowed mutably, so it overlaps neither `a` nor `b`, and
    // its rows do not overlap each other (`n <= stride`).
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            to.as_mut_ptr(),
            1,
            signed(stride),
            store == Store::Add,
            a.values.as_ptr(),
            signed(a.column_stride),
            signed(a.row_stride),
            b.values.as_ptr(),
            signed(b.column_stride),
            signed(b.row_stride),
            1.0f32,
            1.0f32,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

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
