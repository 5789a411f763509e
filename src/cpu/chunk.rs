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
//!
//! **Substitution.** `(I + L) U = Z − B̃ S₀` is solved row by row, with the value columns side by side: for the few
//! sub-steps of a chunk that is half the work of a product with the inverse, which need not be formed.
//!
//! **Layout.** Vectors over key channels are cut into pieces, padded with zeros to whole ones. `left` has groups of
//! rows, in each the pieces of all its rows for the first channels, then for the next; `right` has the
//! pieces of all its rows for the first channels, then for the next. The state of some value columns is
//! panels of `[K, 32]`. So the inner loops ([`super::kernel`]) read what they need in order.

use super::dense::scale_each;
use super::kernel::{self, Dots, GROUP, Group, PANEL, PIECE, Piece, Strip, Token};
use super::math;
use crate::problem::{Decay, Problem};
use crate::rows::Rows;
use crate::rule::{Content, DecayKind};
use bytemuck::{Zeroable, cast_slice_mut};
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Sizes that all chunks of a problem share.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    /// Tokens a chunk, a power of two.
    pub(super) tokens: usize,
    key_dim: usize,
    /// Pieces of a vector over key channels.
    pieces: usize,
    value_dim: usize,
    /// `n`, sub-steps a token.
    substeps: usize,
    /// The sub-steps that read, ascending.
    reads: Vec<usize>,
    /// For each sub-step its place among those, if it reads.
    read_of: Vec<Option<usize>>,
    /// For each sub-step, whether its write vector is its read vector but for the gate.
    writes_read: Vec<bool>,
    /// The sub-steps whose content is not zero, ascending.
    contents: Vec<usize>,
    /// For each sub-step its place among those.
    content_of: Vec<Option<usize>>,
    /// Sub-step 0 reads before the decay.
    undecayed: bool,
    decays: bool,
    decay: Decay,
    scale: f32,
}

impl Layout {
    pub(super) fn new(problem: &Problem, tokens: usize) -> Self {
        let update = problem.rule.update();
        let all = 0..update.substeps();
        let step = |&i: &usize| update.substep(i);
        let reads: Vec<usize> = all.clone().filter(|i| step(i).read.is_some()).collect();
        let contents = all.clone().filter(|i| step(i).content != Content::Zero);
        let contents: Vec<usize> = contents.collect();
        Self {
            tokens,
            key_dim: problem.key_dim,
            pieces: problem.key_dim.div_ceil(PIECE),
            value_dim: problem.value_dim,
            substeps: update.substeps(),
            read_of: all.clone().map(|i| reads.binary_search(&i).ok()).collect(),
            reads,
            writes_read: all
                .clone()
                .map(|i| step(&i).read.is_some_and(|r| r.vector == step(&i).write))
                .collect(),
            content_of: all.map(|i| contents.binary_search(&i).ok()).collect(),
            contents,
            undecayed: update.substep(0).read.is_some_and(|r| r.undecayed),
            decays: update.decay != DecayKind::None,
            decay: problem.decay,
            scale: problem.scale(),
        }
    }

    /// Rows of a token on the left of products: its reads, then its query.
    fn rows(&self) -> usize {
        self.reads.len() + 1
    }

    /// Panels of all value columns.
    fn panels(&self) -> usize {
        self.value_dim.div_ceil(PANEL)
    }
}

/// A chunk's share of the work that does not depend on the state.
pub(super) struct Chunk {
    /// Tokens in this chunk; fewer than the layout's in the last one of a sequence.
    tokens: usize,
    /// `[groups, pieces]`: −reads and scaled query of each token, decayed from the chunk's start.
    left: Vec<Group>,
    /// `[pieces, tokens · n]`: writes, decayed to the chunk's end.
    right: Vec<Piece>,
    /// `[tokens · contents, panels]`
    content: Vec<Strip>,
    /// `[tokens, pieces]`: decays; row 0 ends as that of the whole chunk.
    decay: Vec<Piece>,
    /// `[tokens · rows, tokens · n]`: `−L` and `A`, rows as in `left`.
    mixing: Vec<f32>,
    /// `[rows + n, pieces]`: the vectors of one token, before any decay.
    token: Vec<Piece>,
}

/// Values that [`Chunk::advance`] works on.
pub(super) struct Workspace {
    /// `[groups, GROUP]`, rows as in [`Chunk::left`]: `−B̃ S₀` and `Q̃ S₀`, and what earlier sub-steps add to them.
    from_state: Vec<[Strip; GROUP]>,
    /// `[tokens · n]`
    u: Vec<Strip>,
}

impl Workspace {
    pub(super) fn new(layout: &Layout) -> Self {
        let rows = layout.tokens * layout.rows();
        Self {
            from_state: vec![[Strip::zeroed(); GROUP]; rows.div_ceil(GROUP)],
            u: vec![Strip::zeroed(); layout.tokens * layout.substeps],
        }
    }
}

/// Some value columns of a state, a whole number of panels but for the last columns of all.
pub(super) struct State {
    columns: Range<usize>,
    /// `[panels, K]`, rows padded to whole pieces.
    strips: Vec<Strip>,
}

impl State {
    /// Columns of a `[K, V]` matrix.
    pub(super) fn new(layout: &Layout, columns: Range<usize>, values: &[f32]) -> Self {
        let panels = columns.len().div_ceil(PANEL);
        let mut state = Self {
            columns,
            strips: vec![Strip::zeroed(); panels * layout.pieces * PIECE],
        };
        state.set(layout, values);
        state
    }

    fn set(&mut self, layout: &Layout, values: &[f32]) {
        let panels = self
            .strips
            .chunks_exact_mut(layout.pieces * PIECE)
            .zip(self.columns.clone().step_by(PANEL));
        for (panel, at) in panels {
            let end = self.columns.end.min(at + PANEL);
            for (strip, row) in panel.iter_mut().zip(values.chunks_exact(layout.value_dim)) {
                strip.0[..end - at].copy_from_slice(&row[at..end]);
            }
        }
    }

    /// Writes its columns of a `[K, V]` matrix.
    pub(super) fn store(&self, layout: &Layout, values: &mut [f32]) {
        let panels = self
            .strips
            .chunks_exact(layout.pieces * PIECE)
            .zip(self.columns.clone().step_by(PANEL));
        for (panel, at) in panels {
            let end = self.columns.end.min(at + PANEL);
            for (strip, row) in panel.iter().zip(values.chunks_exact_mut(layout.value_dim)) {
                row[at..end].copy_from_slice(&strip.0[..end - at]);
            }
        }
    }
}

/// Calls `f` with the vectors of this processor.
#[inline(always)]
fn with_simd<W: WithSimd>(f: W) -> W::Output {
    pulp::Arch::new().dispatch(f)
}

/// Asks for values that will be read soon: rows of one head are too far apart in memory for the processor to
/// foresee.
#[inline(always)]
fn prefetch(values: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        const LINE: usize = 64 / size_of::<f32>();
        // Where a row does not start with a line, it ends in one more.
        let places = values.chunks(LINE).map(<[f32]>::as_ptr);
        for place in places.chain(values.last().map(std::ptr::from_ref)) {
            // SAFETY: any address may be given, nothing is read; every x86-64 processor has the instruction.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(place.cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

impl Chunk {
    pub(super) fn new(layout: &Layout) -> Self {
        let (tokens, n) = (layout.tokens, layout.substeps);
        let (rows, pieces) = (layout.rows(), layout.pieces);
        let groups = (tokens * rows).div_ceil(GROUP);
        let zero = Piece::zeroed();
        Self {
            tokens: 0,
            left: vec![[zero; GROUP]; groups * pieces],
            right: vec![zero; tokens * n * pieces],
            content: vec![Strip::zeroed(); tokens * layout.contents.len() * layout.panels()],
            decay: vec![zero; tokens * pieces],
            mixing: vec![0.0; tokens * rows * tokens * n],
            token: vec![zero; (rows + n) * pieces],
        }
    }

    /// Fills the chunk with `tokens` (numbered through all batch rows) of a head.
    pub(super) fn load(
        &mut self,
        layout: &Layout,
        rows: &Rows<'_>,
        tokens: Range<usize>,
        head: usize,
    ) {
        struct Load<'a> {
            chunk: &'a mut Chunk,
            layout: &'a Layout,
            rows: &'a Rows<'a>,
            tokens: Range<usize>,
            head: usize,
        }
        impl WithSimd for Load<'_> {
            type Output = ();

            #[inline(always)]
            fn with_simd<S: Simd>(self, simd: S) {
                let Self {
                    chunk,
                    layout,
                    rows,
                    tokens,
                    head,
                } = self;
                for (t, token) in tokens.enumerate() {
                    rows.sources(token + layout.tokens, head, prefetch);
                    chunk.load_token(simd, layout, rows, t, token, head);
                }
                chunk.levels(simd, layout);
            }
        }
        self.tokens = tokens.len();
        with_simd(Load {
            chunk: self,
            layout,
            rows,
            tokens,
            head,
        });
    }

    /// The vectors of one token, and the pairs inside the token, between which nothing decays.
    #[inline(always)]
    fn load_token<S: Simd>(
        &mut self,
        simd: S,
        layout: &Layout,
        rows: &Rows<'_>,
        t: usize,
        token: usize,
        head: usize,
    ) {
        let (n, k, pieces, per_token) = (
            layout.substeps,
            layout.key_dim,
            layout.pieces,
            layout.rows(),
        );
        let (left, right) = self.token.split_at_mut(per_token * pieces);
        let row = |of: &mut [Piece], i: usize| -> Range<usize> {
            debug_assert!((i + 1) * pieces <= of.len());
            i * pieces..(i + 1) * pieces
        };
        for i in 0..n {
            let at = row(right, i);
            let right = &mut right[at];
            let write = &mut cast_slice_mut(right)[..k];
            let Some(read) = layout.read_of[i] else {
                rows.write::<f32>(token, i, head, write);
                continue;
            };
            let at = row(left, read);
            let left = &mut left[at];
            let left: &mut [f32] = cast_slice_mut(left);
            rows.read(token, i, head, &mut left[..k]);
            if layout.writes_read[i] {
                let gate: f32 = rows.write_gate(token, i, head);
                for (write, left) in write.iter_mut().zip(&*left) {
                    *write = gate * left;
                }
            } else {
                rows.write::<f32>(token, i, head, write);
            }
            left.iter_mut().for_each(|x| *x = -*x);
        }
        let at = row(left, layout.reads.len());
        let query: &mut [f32] = cast_slice_mut(&mut left[at]);
        rows.query(token, head, &mut query[..k]);
        query.iter_mut().for_each(|x| *x *= layout.scale);

        let (v, panels) = (layout.value_dim, layout.panels());
        for (c, &i) in layout.contents.iter().enumerate() {
            let at = (t * layout.contents.len() + c) * panels;
            let content = &mut self.content[at..at + panels];
            rows.content::<f32>(token, i, head, &mut cast_slice_mut(content)[..v]);
        }

        // Pairs inside the token.
        let stride = layout.tokens * n;
        for (i, x) in left.chunks_exact(pieces).enumerate() {
            let before = layout.reads.get(i).copied().unwrap_or(n);
            let at = (t * per_token + i) * stride + t * n;
            let mixing = &mut self.mixing[at..at + before];
            for (m, write) in mixing.iter_mut().zip(right.chunks_exact(pieces)) {
                *m = kernel::dot(simd, x, write);
            }
        }

        let alpha = &mut self.decay[t * pieces..(t + 1) * pieces];
        if layout.decays {
            math::decay(
                rows,
                layout.decay,
                token,
                head,
                &mut cast_slice_mut(alpha)[..k],
            );
        }
        for (i, x) in left.chunks_exact(pieces).enumerate() {
            let at = t * per_token + i;
            let group = &mut self.left[at / GROUP * pieces..][..pieces];
            for ((group, x), alpha) in group.iter_mut().zip(x).zip(&*alpha) {
                let to = &mut group[at % GROUP];
                if layout.decays && !(layout.undecayed && i == 0) {
                    kernel::scaled(simd, x, alpha, to);
                } else {
                    *to = *x;
                }
            }
        }
        for (i, x) in right.chunks_exact(pieces).enumerate() {
            for (column, x) in self.right.chunks_exact_mut(stride).zip(x) {
                column[t * n + i] = *x;
            }
        }
    }

    /// The pairs of different tokens, level by level (see the module).
    #[inline(always)]
    fn levels<S: Simd>(&mut self, simd: S, layout: &Layout) {
        let (n, pieces, per_token) = (layout.substeps, layout.pieces, layout.rows());
        let stride = layout.tokens * n;
        let mut half = 1;
        while half < self.tokens {
            for low in (0..self.tokens).step_by(2 * half) {
                let mid = low + half;
                if mid >= self.tokens {
                    break;
                }
                let high = self.tokens.min(mid + half);
                let columns = low * n..mid * n;
                let (mut row, end) = (mid * per_token, high * per_token);
                while row < end {
                    let inside = row % GROUP;
                    let rows = (end - row).min(3).min(GROUP - inside);
                    let dots = Dots {
                        left: &self.left[row / GROUP * pieces..][..pieces],
                        right: &self.right,
                        stride,
                    };
                    for column in columns.clone().step_by(4) {
                        let count = (columns.end - column).min(4);
                        let to = &mut self.mixing[row * stride + column..];
                        dots.tile(simd, [inside, rows], [column, count], to, stride);
                    }
                    row += rows;
                }
                if layout.decays {
                    self.rescale(simd, layout, [low, mid, high]);
                }
            }
            half *= 2;
        }
    }

    /// After a level: rows of the upper half decay through the lower half, columns of the lower half through
    /// the upper.
    #[inline(always)]
    fn rescale<S: Simd>(&mut self, simd: S, layout: &Layout, [low, mid, high]: [usize; 3]) {
        let (n, pieces, per_token) = (layout.substeps, layout.pieces, layout.rows());
        let (lower, upper) = self.decay.split_at_mut(mid * pieces);
        let (lower, upper) = (&mut lower[low * pieces..][..pieces], &upper[..pieces]);
        let (mut row, end) = (mid * per_token, high * per_token);
        while row < end {
            let inside = row % GROUP;
            let rows = (end - row).min(GROUP - inside);
            let group = &mut self.left[row / GROUP * pieces..][..pieces];
            for (group, lower) in group.iter_mut().zip(&*lower) {
                kernel::scale(simd, &mut group[inside..inside + rows], lower);
            }
            row += rows;
        }
        let columns = self.right.chunks_exact_mut(layout.tokens * n);
        for (column, upper) in columns.zip(upper) {
            kernel::scale(simd, &mut column[low * n..mid * n], upper);
        }
        for (lower, upper) in lower.iter_mut().zip(upper) {
            scale_each(&mut lower.0, &upper.0);
        }
    }

    /// Takes value columns of the state through the chunk; `o` has one row of those columns for each token.
    pub(super) fn advance(
        &self,
        layout: &Layout,
        work: &mut Workspace,
        state: &mut State,
        o: &mut [&mut [f32]],
    ) {
        struct Advance<'a, 'o> {
            chunk: &'a Chunk,
            layout: &'a Layout,
            work: &'a mut Workspace,
            state: &'a mut State,
            o: &'a mut [&'o mut [f32]],
        }
        impl WithSimd for Advance<'_, '_> {
            type Output = ();

            #[inline(always)]
            fn with_simd<S: Simd>(self, simd: S) {
                let Self {
                    chunk,
                    layout,
                    work,
                    state,
                    o,
                } = self;
                let first = state.columns.start;
                let panels = state.strips.chunks_exact_mut(layout.pieces * PIECE);
                for (i, panel) in panels.enumerate() {
                    let at = i * PANEL;
                    chunk.read(simd, layout, work, panel);
                    chunk.solve(simd, layout, work, first / PANEL + i, |t, values| {
                        let o = &mut o[t][at..];
                        match o.first_chunk_mut() {
                            Some(o) => *o = values.0,
                            None => o.copy_from_slice(&values.0[..o.len()]),
                        }
                    });
                    chunk.write(simd, layout, work, panel);
                }
            }
        }
        with_simd(Advance {
            chunk: self,
            layout,
            work,
            state,
            o,
        });
    }

    /// `−B̃ S₀` and `Q̃ S₀`.
    #[inline(always)]
    fn read<S: Simd>(&self, simd: S, layout: &Layout, work: &mut Workspace, state: &[Strip]) {
        let mut rows = self.tokens * layout.rows();
        for (left, out) in self
            .left
            .chunks_exact(layout.pieces)
            .zip(&mut work.from_state)
        {
            if rows == 0 {
                break;
            }
            kernel::read(simd, left, rows.min(GROUP), state, out);
            rows = rows.saturating_sub(GROUP);
        }
    }

    /// `U` by forward substitution, and the outputs.
    #[inline(always)]
    fn solve<S: Simd>(
        &self,
        simd: S,
        layout: &Layout,
        work: &mut Workspace,
        panel: usize,
        mut output: impl FnMut(usize, &Strip),
    ) {
        let (n, per_token) = (layout.substeps, layout.rows());
        let stride = layout.tokens * n;
        let (panels, contents) = (layout.panels(), layout.contents.len());
        let from_state = work.from_state.as_flattened_mut();
        for t in 0..self.tokens {
            let rows = &mut from_state[t * per_token..(t + 1) * per_token];
            let token = Token {
                mixing: &self.mixing[t * per_token * stride..(t + 1) * per_token * stride],
                stride,
                before: t * n,
            };
            let content = |i: usize| -> Option<&Strip> {
                let c = layout.content_of[i]?;
                Some(&self.content[(t * contents + c) * panels + panel])
            };
            let mut o = Strip::zeroed();
            match (n, layout.reads.len()) {
                (1, 1) => {
                    let contents = [content(0)];
                    token.solve::<S, 1, 2>(simd, rows, contents, &mut work.u, &mut o);
                }
                (2, 2) => {
                    let contents = [content(0), content(1)];
                    token.solve::<S, 2, 3>(simd, rows, contents, &mut work.u, &mut o);
                }
                _ => {
                    self.solve_any(simd, layout, &token, rows, content, &mut work.u);
                    o = rows[layout.reads.len()];
                }
            }
            output(t, &o);
        }
    }

    /// One token of [`Self::solve`] for any number of sub-steps, reading or not; the output is left in the last of `rows`.
    #[inline(always)]
    fn solve_any<'a, S: Simd>(
        &self,
        simd: S,
        layout: &Layout,
        token: &Token<'_>,
        rows: &mut [Strip],
        content: impl Fn(usize) -> Option<&'a Strip>,
        u: &mut [Strip],
    ) {
        let &Token {
            mixing,
            stride,
            before: first,
        } = token;
        let (before, now) = u.split_at_mut(first);
        kernel::combine(simd, mixing, stride, before, rows);
        for i in 0..layout.substeps {
            let (earlier, u) = now.split_at_mut(i);
            let u = &mut u[0];
            match layout.read_of[i] {
                Some(read) => {
                    let factors = &mixing[read * stride + first..];
                    kernel::combine(simd, factors, stride, earlier, &mut rows[read..=read]);
                    *u = rows[read];
                }
                None => *u = Strip::zeroed(),
            }
            if let Some(content) = content(i) {
                for (u, z) in u.0.iter_mut().zip(&content.0) {
                    *u += z;
                }
            }
        }
        let query = layout.reads.len();
        let factors = &mixing[query * stride + first..];
        kernel::combine(
            simd,
            factors,
            stride,
            &now[..layout.substeps],
            &mut rows[query..],
        );
    }

    /// The state at the chunk's end.
    #[inline(always)]
    fn write<S: Simd>(&self, simd: S, layout: &Layout, work: &Workspace, state: &mut [Strip]) {
        let steps = self.tokens * layout.substeps;
        let columns = self.right.chunks_exact(layout.tokens * layout.substeps);
        for ((state, right), alpha) in state
            .as_chunks_mut()
            .0
            .iter_mut()
            .zip(columns)
            .zip(&self.decay)
        {
            let alpha = layout.decays.then_some(alpha);
            kernel::update(simd, alpha, &right[..steps], &work.u[..steps], state);
        }
    }
}
