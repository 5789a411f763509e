//! One chunk of tokens of one head: what of it does not depend on the state ([`Chunk::load`]), and the
//! step that takes the state through it ([`Chunk::advance`]).
//!
//! With `t(r)` the token of sub-step `r`, and decays as products of `α = exp(g)` over the tokens between,
//!
//! ```text
//! L[r,s] = Σ_d b_r[d] a_s[d] Π_{t(s) < u ≤ t(r)} α_u[d]     s < r
//! A[t,r] = Σ_d q_t[d] a_r[d] Π_{t(r) < u ≤ t} α_u[d]        t(r) ≤ t
//! U      = (I + L)^-1 (Z − B̃ S₀)                            B̃: b_r decayed from the chunk's start
//! O      = Q̃ S₀ + A U                                       Q̃: q_t decayed from the chunk's start
//! S_end  = Diag(Π α) S₀ + Ãᵀ U                              Ã: a_r decayed to the chunk's end
//! ```
//!
//! **Levels.** No sum of `g` is ever formed. A pair of tokens `s < t` first differs in some bit `b`; with
//! `m = (t >> b) << b` the product over `s < u ≤ t` is the one over `m ≤ u ≤ t` (a factor on row `t`)
//! times the one over `s < u < m` (a factor on column `s`), both at most 1. So level `b` is one plain
//! product for each block of `2^(b+1)` tokens: rows of its upper half times columns of its lower half.
//! Going up one level multiplies the rows of each upper half by the lower half's whole decay, and the
//! columns of each lower half by the upper half's; after the last level the rows are `B̃` and `Q̃`, the
//! columns `Ã`. Decays of 0 (`g = -inf`) and 1 are exact throughout.
//!
//! **Signs.** Read vectors are negated where they are loaded, so that every product is added.

use super::dense::{Matrix, Store, add_scaled, dot, product, scale_each, vectorised};
use super::math;
use crate::problem::{Decay, Problem};
use crate::rows::Rows;
use crate::rule::DecayKind;
use std::ops::Range;

/// Sub-steps that are solved together, at most, unless one token has more.
const SOLVE_TOGETHER: usize = 16;

/// Sizes that all chunks of a problem share.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    /// Tokens a chunk, a power of two.
    pub(super) tokens: usize,
    key_dim: usize,
    value_dim: usize,
    /// `n`, sub-steps a token.
    substeps: usize,
    /// The sub-steps that read, ascending.
    reads: Vec<usize>,
    /// For each sub-step its place among those, if it reads.
    read_of: Vec<Option<usize>>,
    /// Sub-step 0 reads before the decay.
    undecayed: bool,
    decays: bool,
    decay: Decay,
    /// Tokens solved together, a power of two.
    block: usize,
}

impl Layout {
    pub(super) fn new(problem: &Problem, tokens: usize) -> Self {
        let update = problem.rule.update();
        let substeps = update.substeps();
        let reads = (0..substeps).filter(|&i| update.substep(i).read.is_some());
        let reads: Vec<usize> = reads.collect();
        let mut block = tokens;
        while block > 1 && block * substeps > SOLVE_TOGETHER {
            block /= 2;
        }
        Self {
            tokens,
            key_dim: problem.key_dim,
            value_dim: problem.value_dim,
            substeps,
            read_of: (0..substeps)
                .map(|i| reads.binary_search(&i).ok())
                .collect(),
            reads,
            undecayed: update.substep(0).read.is_some_and(|r| r.undecayed),
            decays: update.decay != DecayKind::None,
            decay: problem.decay,
            block,
        }
    }

    /// Rows of a token on the left of products: its reads, then its query.
    fn rows(&self) -> usize {
        self.reads.len() + 1
    }
}

/// A chunk's share of the work that does not depend on the state.
pub(super) struct Chunk {
    /// Tokens in this chunk; fewer than the layout's in the last one of a sequence.
    tokens: usize,
    /// `[tokens · rows, K]`: −reads and scaled query of each token, decayed from the chunk's start.
    left: Vec<f32>,
    /// `[tokens · n, K]`: writes, decayed to the chunk's end.
    right: Vec<f32>,
    /// `[tokens · n, V]`: contents.
    content: Vec<f32>,
    /// `[tokens, K]`: decays; row 0 ends as that of the whole chunk.
    decay: Vec<f32>,
    /// `[tokens · rows, tokens · n]`: `−L` and `A`, rows as in `left`.
    mixing: Vec<f32>,
    /// For each block of tokens `[block · (n + 1), block · n]`: its `(I + L)^-1`, then its `A (I + L)^-1`.
    solve: Vec<f32>,
}

/// Values that [`Chunk::advance`] works on, for `columns` value columns.
pub(super) struct Workspace {
    /// `[tokens · rows, columns]`: `−B̃ S₀` and `Q̃ S₀`, and what earlier sub-steps add to them.
    from_state: Vec<f32>,
    /// `[tokens · n, columns]`
    u: Vec<f32>,
    /// `[block · n, columns]`: right-hand side.
    rhs: Vec<f32>,
}

impl Workspace {
    pub(super) fn new(layout: &Layout, columns: usize) -> Self {
        let steps = layout.tokens * layout.substeps;
        Self {
            from_state: vec![0.0; layout.tokens * layout.rows() * columns],
            u: vec![0.0; steps * columns],
            rhs: vec![0.0; layout.block * layout.substeps * columns],
        }
    }
}

impl Chunk {
    pub(super) fn new(layout: &Layout) -> Self {
        let (tokens, n, k) = (layout.tokens, layout.substeps, layout.key_dim);
        Self {
            tokens: 0,
            left: vec![0.0; tokens * layout.rows() * k],
            right: vec![0.0; tokens * n * k],
            content: vec![0.0; tokens * n * layout.value_dim],
            decay: vec![0.0; tokens * k],
            mixing: vec![0.0; tokens * layout.rows() * tokens * n],
            solve: vec![0.0; tokens * (n + 1) * layout.block * n],
        }
    }

    /// Fills the chunk with `tokens` (numbered through all batch rows) of a head.
    pub(super) fn load(
        &mut self,
        layout: &Layout,
        rows: &Rows<'_>,
        scale: f32,
        tokens: Range<usize>,
        head: usize,
    ) {
        self.tokens = tokens.len();
        for (t, token) in tokens.enumerate() {
            vectorised(
                #[inline(always)]
                || self.load_token(layout, rows, scale, t, token, head),
            );
        }
        self.levels(layout);
        vectorised(
            #[inline(always)]
            || self.invert(layout),
        );
    }

    /// The vectors of one token, and the pairs inside the token, between which nothing decays.
    #[inline(always)]
    fn load_token(
        &mut self,
        layout: &Layout,
        rows: &Rows<'_>,
        scale: f32,
        t: usize,
        token: usize,
        head: usize,
    ) {
        let (n, k, v, per_token) = (
            layout.substeps,
            layout.key_dim,
            layout.value_dim,
            layout.rows(),
        );
        let left = &mut self.left[t * per_token * k..(t + 1) * per_token * k];
        let right = &mut self.right[t * n * k..(t + 1) * n * k];
        let content = &mut self.content[t * n * v..(t + 1) * n * v];
        let (reads, query) = left.split_at_mut(layout.reads.len() * k);
        rows.query(token, head, query);
        query.iter_mut().for_each(|x| *x *= scale);
        for (read, &i) in reads.chunks_exact_mut(k).zip(&layout.reads) {
            rows.read(token, i, head, read);
            read.iter_mut().for_each(|x| *x = -*x);
        }
        for (i, write) in right.chunks_exact_mut(k).enumerate() {
            rows.write(token, i, head, write);
        }
        for (i, content) in content.chunks_exact_mut(v).enumerate() {
            rows.content(token, i, head, content);
        }

        let stride = layout.tokens * n;
        for (row, x) in left.chunks_exact(k).enumerate() {
            let before = layout.reads.get(row).copied().unwrap_or(n);
            let at = (t * per_token + row) * stride + t * n;
            let mixing = &mut self.mixing[at..at + before];
            for (m, write) in mixing.iter_mut().zip(right.chunks_exact(k)) {
                *m = dot(x, write);
            }
        }

        if layout.decays {
            let alpha = &mut self.decay[t * k..(t + 1) * k];
            math::decay(rows, layout.decay, token, head, alpha);
            let first = usize::from(layout.undecayed);
            for row in left.chunks_exact_mut(k).skip(first) {
                scale_each(row, alpha);
            }
        }
    }

    /// The pairs of different tokens, level by level (see the module).
    fn levels(&mut self, layout: &Layout) {
        let (n, k, per_token) = (layout.substeps, layout.key_dim, layout.rows());
        let stride = layout.tokens * n;
        let mut half = 1;
        while half < self.tokens {
            for low in (0..self.tokens).step_by(2 * half) {
                let mid = low + half;
                if mid >= self.tokens {
                    break;
                }
                let high = self.tokens.min(mid + half);
                let left = &mut self.left[mid * per_token * k..high * per_token * k];
                let right = &mut self.right[low * n * k..mid * n * k];
                product(
                    &mut self.mixing[mid * per_token * stride + low * n..],
                    stride,
                    Store::Replace,
                    Matrix::new(left, [(high - mid) * per_token, k], k),
                    Matrix::new(right, [half * n, k], k).transposed(),
                );
                if layout.decays {
                    let (lower, upper) = self.decay.split_at_mut(mid * k);
                    let (lower, upper) = (&mut lower[low * k..][..k], &upper[..k]);
                    vectorised(
                        #[inline(always)]
                        || {
                            for row in left.chunks_exact_mut(k) {
                                scale_each(row, lower);
                            }
                            for row in right.chunks_exact_mut(k) {
                                scale_each(row, upper);
                            }
                            scale_each(lower, upper);
                        },
                    );
                }
            }
            half *= 2;
        }
    }

    /// `(I + L)^-1` and `A (I + L)^-1` of each block of tokens, by forward substitution.
    #[inline(always)]
    fn invert(&mut self, layout: &Layout) {
        let (n, per_token, block) = (layout.substeps, layout.rows(), layout.block);
        let (stride, width) = (layout.tokens * n, block * n);
        for start in (0..self.tokens).step_by(block) {
            let len = block.min(self.tokens - start);
            let solve = &mut self.solve[start * (n + 1) * width..][..len * (n + 1) * width];
            let (inverse, output) = solve.split_at_mut(len * n * width);
            for t in 0..len {
                let row_of = |i: usize| {
                    let at = ((start + t) * per_token + i) * stride + start * n;
                    &self.mixing[at..at + width]
                };
                for i in 0..n {
                    // Row r of the inverse is e_r − Σ_s L[r,s] · row s.
                    let r = t * n + i;
                    let (done, rest) = inverse.split_at_mut(r * width);
                    let row = &mut rest[..width];
                    row.fill(0.0);
                    row[r] = 1.0;
                    if let Some(read) = layout.read_of[i] {
                        for (s, &l) in row_of(read)[..r].iter().enumerate() {
                            add_scaled(&mut row[..=s], l, &done[s * width..=s * width + s]);
                        }
                    }
                }
                let row = &mut output[t * width..(t + 1) * width];
                row.fill(0.0);
                for (s, &a) in row_of(layout.reads.len())[..(t + 1) * n].iter().enumerate() {
                    add_scaled(&mut row[..=s], a, &inverse[s * width..=s * width + s]);
                }
            }
        }
    }

    /// Takes value columns `columns` of the state, `state [K, columns]`, through the chunk; `o` has one
    /// row of those columns for each token.
    pub(super) fn advance(
        &self,
        layout: &Layout,
        work: &mut Workspace,
        columns: Range<usize>,
        state: &mut [f32],
        o: &mut [&mut [f32]],
    ) {
        let (n, k, per_token, block) =
            (layout.substeps, layout.key_dim, layout.rows(), layout.block);
        let (stride, width) = (layout.tokens * n, block * n);
        let (reads, w) = (layout.reads.len(), columns.len());
        let (tokens, steps) = (self.tokens, self.tokens * n);

        product(
            &mut work.from_state,
            w,
            Store::Replace,
            Matrix::new(&self.left, [tokens * per_token, k], k),
            Matrix::new(state, [k, w], w),
        );
        for start in (0..tokens).step_by(block) {
            let len = block.min(tokens - start);
            let from_state = &mut work.from_state[start * per_token * w..];
            let (before, u) = work.u.split_at_mut(start * n * w);
            if start > 0 {
                product(
                    from_state,
                    w,
                    Store::Add,
                    Matrix::new(
                        &self.mixing[start * per_token * stride..],
                        [len * per_token, start * n],
                        stride,
                    ),
                    Matrix::new(before, [start * n, w], w),
                );
            }

            let contents = self.content[start * n * layout.value_dim..]
                .chunks_exact(layout.value_dim)
                .map(|row| &row[columns.clone()]);
            let rhs = &mut work.rhs[..len * n * w];
            vectorised(
                #[inline(always)]
                || {
                    for (r, (rhs, content)) in rhs.chunks_exact_mut(w).zip(contents).enumerate() {
                        rhs.copy_from_slice(content);
                        if let Some(read) = layout.read_of[r % n] {
                            let at = (r / n * per_token + read) * w;
                            add_scaled(rhs, 1.0, &from_state[at..at + w]);
                        }
                    }
                },
            );

            let solve = &self.solve[start * (n + 1) * width..][..len * (n + 1) * width];
            let (inverse, output) = solve.split_at(len * n * width);
            let rhs = Matrix::new(rhs, [len * n, w], w);
            let inverse = Matrix::new(inverse, [len * n, len * n], width);
            product(u, w, Store::Replace, inverse, rhs);
            product(
                &mut from_state[reads * w..],
                per_token * w,
                Store::Add,
                Matrix::new(output, [len, len * n], width),
                rhs,
            );
        }
        for (o, x) in o
            .iter_mut()
            .zip(work.from_state.chunks_exact(per_token * w))
        {
            o.copy_from_slice(&x[reads * w..]);
        }

        if layout.decays {
            vectorised(
                #[inline(always)]
                || {
                    for (row, &alpha) in state.chunks_exact_mut(w).zip(&self.decay) {
                        row.iter_mut().for_each(|s| *s *= alpha);
                    }
                },
            );
        }
        product(
            state,
            w,
            Store::Add,
            Matrix::new(&self.right, [steps, k], k).transposed(),
            Matrix::new(&work.u, [steps, w], w),
        );
    }
}
