//! The inner loops of the chunk form, on explicit vectors.
//!
//! Operands lie in pieces of [`PIECE`] key channels and panels of [`PANEL`] value columns, so that a loop
//! reads memory in order and addresses it by constants; sums stay in registers. A register tile has as
//! many rows as the registers of the processor allow.

use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut};
use pulp::Simd;

/// Key channels that lie together.
pub(super) const PIECE: usize = 16;
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Piece(pub(super) [f32; PIECE]);
/// Value columns that lie together.
pub(super) const PANEL: usize = 32;
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Strip(pub(super) [f32; PANEL]);
/// Left rows that lie together: those of a register tile of [`read`] where vectors are widest.
pub(super) const GROUP: usize = 12;
pub(super) type Group = [Piece; GROUP];

/// `a · b + c`, in one operation where the processor has one.
#[inline(always)]
fn multiply_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
    if S::IS_SCALAR {
        // There it would be a call of a library function.
        simd.add_f32s(simd.mul_f32s(a, b), c)
    } else {
        simd.mul_add_e_f32s(a, b, c)
    }
}

/// Rows of `N` vectors each.
#[inline(always)]
fn vectors<S: Simd, const N: usize>(values: &[impl Pod]) -> &[[S::f32s; N]] {
    S::as_simd_f32s(cast_slice(values)).0.as_chunks().0
}

/// Rows of `N` vectors each.
#[inline(always)]
fn vectors_mut<S: Simd, const N: usize>(values: &mut [impl Pod]) -> &mut [[S::f32s; N]] {
    S::as_mut_simd_f32s(cast_slice_mut(values))
        .0
        .as_chunks_mut()
        .0
}

/// Calls `$kernel` with the number of vectors that a [`Strip`] is and the rows of a register tile, which is
/// the last of `$rows` for vectors of fewer than 16 values.
macro_rules! by_lanes {
    ($kernel:ident, $wide:literal, $narrow:literal, $arguments:tt) => {
        match S::F32_LANES {
            16 => $kernel::<S, 2, $wide>$arguments,
            8 => $kernel::<S, 4, $narrow>$arguments,
            4 => $kernel::<S, 8, $narrow>$arguments,
            _ => $kernel::<S, PANEL, 1>$arguments,
        }
    };
}

/// `out [GROUP, PANEL] = left [GROUP, K] · state [K, PANEL]`, of which the first `rows` rows are wanted.
#[inline(always)]
pub(super) fn read<S: Simd>(
    simd: S,
    left: &[Group],
    rows: usize,
    state: &[Strip],
    out: &mut [Strip; GROUP],
) {
    if S::F32_LANES == 16 && rows <= 4 {
        return read_tiles::<S, 2, 4>(simd, left, rows, state, out);
    }
    if S::F32_LANES == 16 && rows <= 8 {
        return read_tiles::<S, 2, 8>(simd, left, rows, state, out);
    }
    by_lanes!(read_tiles, 12, 3, (simd, left, rows, state, out));
}

#[inline(always)]
fn read_tiles<S: Simd, const VECS: usize, const ROWS: usize>(
    simd: S,
    left: &[Group],
    rows: usize,
    state: &[Strip],
    out: &mut [Strip; GROUP],
) {
    let state = vectors::<S, VECS>(state).as_chunks::<PIECE>().0;
    let out = vectors_mut::<S, VECS>(out);
    for (tile, out) in out
        .chunks_exact_mut(ROWS)
        .enumerate()
        .take(rows.div_ceil(ROWS))
    {
        let mut sums = [[simd.splat_f32s(0.0); VECS]; ROWS];
        for (left, state) in left.iter().zip(state) {
            let Some(left) = left[tile * ROWS..].first_chunk::<ROWS>() else {
                return;
            };
            for (d, state) in state.iter().enumerate() {
                for i in 0..ROWS {
                    let x = simd.splat_f32s(left[i].0[d]);
                    for j in 0..VECS {
                        sums[i][j] = multiply_add(simd, x, state[j], sums[i][j]);
                    }
                }
            }
        }
        out.copy_from_slice(&sums);
    }
}

/// `state ← Diag(alpha) state + rightᵀ u` for [`PIECE`] rows of a panel of the state; `right [R]`, `u [R, PANEL]`.
#[inline(always)]
pub(super) fn update<S: Simd>(
    simd: S,
    alpha: Option<&Piece>,
    right: &[Piece],
    u: &[Strip],
    state: &mut [Strip; PIECE],
) {
    by_lanes!(update_tiles, 8, 2, (simd, alpha, right, u, state));
}

#[inline(always)]
fn update_tiles<S: Simd, const VECS: usize, const ROWS: usize>(
    simd: S,
    alpha: Option<&Piece>,
    right: &[Piece],
    u: &[Strip],
    state: &mut [Strip; PIECE],
) {
    let u = vectors::<S, VECS>(u);
    let state = vectors_mut::<S, VECS>(state);
    for (tile, state) in state.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
        let first = tile * ROWS;
        let mut sums = *state;
        if let Some(alpha) = alpha {
            let Some(alpha) = alpha.0[first..].first_chunk::<ROWS>() else {
                return;
            };
            for (sums, &alpha) in sums.iter_mut().zip(alpha) {
                let alpha = simd.splat_f32s(alpha);
                for sum in sums {
                    *sum = simd.mul_f32s(alpha, *sum);
                }
            }
        }
        for (right, u) in right.iter().zip(u) {
            let Some(right) = right.0[first..].first_chunk::<ROWS>() else {
                return;
            };
            for i in 0..ROWS {
                let x = simd.splat_f32s(right[i]);
                for j in 0..VECS {
                    sums[i][j] = multiply_add(simd, x, u[j], sums[i][j]);
                }
            }
        }
        *state = sums;
    }
}

/// `to += Σ_s factors[s] · u[s]` for rows of `to`; those of `factors` start `stride` values apart.
#[inline(always)]
pub(super) fn combine<S: Simd>(
    simd: S,
    factors: &[f32],
    stride: usize,
    u: &[Strip],
    to: &mut [Strip],
) {
    let (mut factors, mut to) = (factors, to);
    while !to.is_empty() {
        let count = to.len().min(3);
        let (now, rest) = to.split_at_mut(count);
        match count {
            1 => combine_by_lanes::<S, 1>(simd, factors, stride, u, now),
            2 => combine_by_lanes::<S, 2>(simd, factors, stride, u, now),
            _ => combine_by_lanes::<S, 3>(simd, factors, stride, u, now),
        }
        to = rest;
        factors = factors.get(count * stride..).unwrap_or_default();
    }
}

#[inline(always)]
fn combine_by_lanes<S: Simd, const ROWS: usize>(
    simd: S,
    factors: &[f32],
    stride: usize,
    u: &[Strip],
    to: &mut [Strip],
) {
    match S::F32_LANES {
        16 => combine_rows::<S, 2, ROWS>(simd, factors, stride, u, to),
        8 => combine_rows::<S, 4, ROWS>(simd, factors, stride, u, to),
        4 => combine_rows::<S, 8, ROWS>(simd, factors, stride, u, to),
        _ => combine_rows::<S, PANEL, ROWS>(simd, factors, stride, u, to),
    }
}

#[inline(always)]
fn combine_rows<S: Simd, const VECS: usize, const ROWS: usize>(
    simd: S,
    factors: &[f32],
    stride: usize,
    u: &[Strip],
    to: &mut [Strip],
) {
    let u = vectors::<S, VECS>(u);
    let to = vectors_mut::<S, VECS>(to);
    let Some(to) = to.first_chunk_mut::<ROWS>() else {
        return;
    };
    let mut rows = [&factors[..0]; ROWS];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = &factors[i * stride..][..u.len()];
    }
    let mut sums = *to;
    for (s, u) in u.iter().enumerate() {
        for i in 0..ROWS {
            let x = simd.splat_f32s(rows[i][s]);
            for j in 0..VECS {
                sums[i][j] = multiply_add(simd, x, u[j], sums[i][j]);
            }
        }
    }
    *to = sums;
}

/// `to[i, j] = left row (row + i) · right row (column + j)` for a tile of at most 3 by 4, with `left [K / PIECE]`
/// one group of rows and `right [K / PIECE, stride]`; rows of `to` start `to_stride` values apart.
#[derive(Clone, Copy)]
pub(super) struct Dots<'a> {
    pub(super) left: &'a [Group],
    pub(super) right: &'a [Piece],
    pub(super) stride: usize,
}

/// A token's part of the forward substitution.
pub(super) struct Token<'a> {
    /// `[rows, stride]`: `−L` and `A`, for its reads and its query.
    pub(super) mixing: &'a [f32],
    pub(super) stride: usize,
    /// Sub-steps before it.
    pub(super) before: usize,
}

impl Token<'_> {
    /// For a rule whose `N` sub-steps all read: `u` of the token from `u` of those before, what its `ROWS` = `N` + 1
    /// rows read from the state, and its contents; then its output.
    #[inline(always)]
    pub(super) fn solve<S: Simd, const N: usize, const ROWS: usize>(
        &self,
        simd: S,
        from_state: &[Strip],
        contents: [Option<&Strip>; N],
        u: &mut [Strip],
        o: &mut Strip,
    ) {
        match S::F32_LANES {
            16 => self.solve_by::<S, 2, N, ROWS>(simd, from_state, contents, u, o),
            8 => self.solve_by::<S, 4, N, ROWS>(simd, from_state, contents, u, o),
            4 => self.solve_by::<S, 8, N, ROWS>(simd, from_state, contents, u, o),
            _ => self.solve_by::<S, PANEL, N, ROWS>(simd, from_state, contents, u, o),
        }
    }

    #[inline(always)]
    fn solve_by<S: Simd, const VECS: usize, const N: usize, const ROWS: usize>(
        &self,
        simd: S,
        from_state: &[Strip],
        contents: [Option<&Strip>; N],
        u: &mut [Strip],
        o: &mut Strip,
    ) {
        let Some(from_state) = vectors::<S, VECS>(from_state).first_chunk::<ROWS>() else {
            return;
        };
        let mut rows = [&self.mixing[..0]; ROWS];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = &self.mixing[i * self.stride..][..self.before + N];
        }
        let (before, now) = vectors_mut::<S, VECS>(u).split_at_mut(self.before);
        let Some(now) = now.first_chunk_mut::<N>() else {
            return;
        };
        let mut sums = *from_state;
        for (s, u) in before.iter().enumerate() {
            for i in 0..ROWS {
                let x = simd.splat_f32s(rows[i][s]);
                for j in 0..VECS {
                    sums[i][j] = multiply_add(simd, x, u[j], sums[i][j]);
                }
            }
        }
        for i in 0..N {
            let mut u = sums[i];
            if let Some(content) = contents[i] {
                let content = S::as_simd_f32s(&content.0).0;
                for (u, &content) in u.iter_mut().zip(content) {
                    *u = simd.add_f32s(*u, content);
                }
            }
            now[i] = u;
            for row in i + 1..ROWS {
                let x = simd.splat_f32s(rows[row][self.before + i]);
                for j in 0..VECS {
                    sums[row][j] = multiply_add(simd, x, u[j], sums[row][j]);
                }
            }
        }
        let o = S::as_mut_simd_f32s(&mut o.0).0;
        o.copy_from_slice(&sums[N]);
    }
}

impl Dots<'_> {
    #[inline(always)]
    pub(super) fn tile<S: Simd>(
        self,
        simd: S,
        [row, rows]: [usize; 2],
        [column, columns]: [usize; 2],
        to: &mut [f32],
        to_stride: usize,
    ) {
        macro_rules! tile {
            ($m:literal, $n:literal) => {
                match S::F32_LANES {
                    16 => self.fixed::<S, 1, $m, $n>(simd, row, column, to, to_stride),
                    8 => self.fixed::<S, 2, $m, $n>(simd, row, column, to, to_stride),
                    4 => self.fixed::<S, 4, $m, $n>(simd, row, column, to, to_stride),
                    _ => self.fixed::<S, PIECE, $m, $n>(simd, row, column, to, to_stride),
                }
            };
        }
        match (rows, columns) {
            (1, 1) => tile!(1, 1),
            (1, 2) => tile!(1, 2),
            (1, 3) => tile!(1, 3),
            (1, _) => tile!(1, 4),
            (2, 1) => tile!(2, 1),
            (2, 2) => tile!(2, 2),
            (2, 3) => tile!(2, 3),
            (2, _) => tile!(2, 4),
            (_, 1) => tile!(3, 1),
            (_, 2) => tile!(3, 2),
            (_, 3) => tile!(3, 3),
            (_, _) => tile!(3, 4),
        }
    }

    #[inline(always)]
    fn fixed<S: Simd, const VECS: usize, const M: usize, const N: usize>(
        self,
        simd: S,
        row: usize,
        column: usize,
        to: &mut [f32],
        to_stride: usize,
    ) {
        let mut sums = [[simd.splat_f32s(0.0); N]; M];
        for (left, right) in self.left.iter().zip(self.right.chunks_exact(self.stride)) {
            let left = vectors::<S, VECS>(&left[row..row + M]);
            let right = vectors::<S, VECS>(&right[column..column + N]);
            let (Some(left), Some(right)) = (left.first_chunk::<M>(), right.first_chunk::<N>())
            else {
                return;
            };
            for v in 0..VECS {
                for i in 0..M {
                    for j in 0..N {
                        sums[i][j] = multiply_add(simd, left[i][v], right[j][v], sums[i][j]);
                    }
                }
            }
        }
        for (to, sums) in to.chunks_mut(to_stride).zip(sums) {
            for (to, sum) in to[..N].iter_mut().zip(sums) {
                *to = simd.reduce_sum_f32s(sum);
            }
        }
    }
}

/// `Σ xᵢ yᵢ` over pieces.
#[inline(always)]
pub(super) fn dot<S: Simd>(simd: S, x: &[Piece], y: &[Piece]) -> f32 {
    let mut sum = simd.splat_f32s(0.0);
    let (x, y) = (
        S::as_simd_f32s(cast_slice(x)).0,
        S::as_simd_f32s(cast_slice(y)).0,
    );
    for (&x, &y) in x.iter().zip(y) {
        sum = multiply_add(simd, x, y, sum);
    }
    simd.reduce_sum_f32s(sum)
}

/// `y ← x ⊙ y` for each of `pieces`; what falls below the normal range becomes 0, as in
/// [`scale_each`](super::dense::scale_each).
#[inline(always)]
pub(super) fn scale<S: Simd>(simd: S, pieces: &mut [Piece], x: &Piece) {
    for y in pieces {
        let before = *y;
        scaled(simd, &before, x, y);
    }
}

/// `to ← x ⊙ y`, flushed as in [`scale`].
#[inline(always)]
pub(super) fn scaled<S: Simd>(simd: S, x: &Piece, y: &Piece, to: &mut Piece) {
    let least = simd.splat_f32s(f32::MIN_POSITIVE);
    let zero = simd.splat_f32s(0.0);
    let (x, y) = (S::as_simd_f32s(&x.0).0, S::as_simd_f32s(&y.0).0);
    for ((&x, &y), to) in x.iter().zip(y).zip(S::as_mut_simd_f32s(&mut to.0).0) {
        let product = simd.mul_f32s(x, y);
        let tiny = simd.less_than_f32s(simd.abs_f32s(product), least);
        *to = simd.select_f32s(tiny, zero, product);
    }
}
