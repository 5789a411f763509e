//! A few tokens for each of many states, each state read once and written once a token.
//!
//! With `Ŝ = Diag(α) S`, the readings `x_r = b_rᵀ Ŝ` and `y = qᵀ Ŝ` are taken in one pass; what the
//! sub-steps of the token do to each other is left to dot products of their vectors:
//!
//! ```text
//! u_r = z_r − x_r − Σ_{s<r} (b_r·a_s) u_s        o = scale · (y + Σ_r (q·a_r) u_r)
//! S ← Ŝ + Σ_r a_r u_rᵀ
//! ```
//!
//! A read before the decay (RWKV-7) takes `x_0 = b_0ᵀ S` instead.

use super::dense::{add_scaled, dot, scale_each};
use super::math;
use crate::problem::{Decay, Problem};
use crate::rows::Rows;

/// Vectors of one token of one head.
pub(super) struct Step {
    key_dim: usize,
    value_dim: usize,
    substeps: usize,
    scale: f32,
    form: Decay,
    /// `[K]`
    alpha: Vec<f32>,
    /// `[n + 1, K]`: reads, then the query.
    left: Vec<f32>,
    /// `[n, K]`: writes.
    right: Vec<f32>,
    /// `[n + 1, V]`: readings of the state.
    readings: Vec<f32>,
    /// `[n, V]`: content, then `u`.
    u: Vec<f32>,
}

impl Step {
    pub(super) fn new(problem: &Problem) -> Self {
        let (k, v) = (problem.key_dim, problem.value_dim);
        let n = problem.rule.update().substeps();
        Self {
            key_dim: k,
            value_dim: v,
            substeps: n,
            scale: problem.scale(),
            form: problem.decay,
            alpha: vec![0.0; k],
            left: vec![0.0; (n + 1) * k],
            right: vec![0.0; n * k],
            readings: vec![0.0; (n + 1) * v],
            u: vec![0.0; n * v],
        }
    }

    /// Takes `state [K, V]` through one token and writes its output `o [V]`.
    #[inline(always)]
    pub(super) fn token(
        &mut self,
        rows: &Rows<'_>,
        token: usize,
        head: usize,
        state: &mut [f32],
        o: &mut [f32],
    ) {
        let (k, v, n) = (self.key_dim, self.value_dim, self.substeps);
        math::decay(rows, self.form, token, head, &mut self.alpha);
        for i in 0..n {
            rows.read(token, i, head, &mut self.left[i * k..(i + 1) * k]);
            rows.write(token, i, head, &mut self.right[i * k..(i + 1) * k]);
            rows.content(token, i, head, &mut self.u[i * v..(i + 1) * v]);
        }
        rows.query(token, head, &mut self.left[n * k..]);

        // u and o but for the readings need the vectors without decay; the readings need them with it.
        let mut between = [[0.0f32; crate::rule::MAX_SUBSTEPS]; crate::rule::MAX_SUBSTEPS + 1];
        for (between, left) in between.iter_mut().zip(self.left.chunks_exact(k)) {
            for (x, right) in between.iter_mut().zip(self.right.chunks_exact(k)) {
                *x = dot(left, right);
            }
        }
        let undecayed = rows.update().substep(0).read.is_some_and(|r| r.undecayed);
        for left in self.left.chunks_exact_mut(k).skip(usize::from(undecayed)) {
            scale_each(left, &self.alpha);
        }

        self.readings.fill(0.0);
        read(state, &self.left, &mut self.readings, v);

        for (r, (reading, between)) in self.readings.chunks_exact(v).zip(&between).enumerate() {
            let (before, u) = self.u.split_at_mut(r * v);
            let Some(u) = u.get_mut(..v) else {
                // The last reading is the query's.
                break;
            };
            add_scaled(u, -1.0, reading);
            for (before, &x) in before.chunks_exact(v).zip(between) {
                add_scaled(u, -x, before);
            }
        }
        o.copy_from_slice(&self.readings[n * v..]);
        for (u, &x) in self.u.chunks_exact(v).zip(&between[n]) {
            add_scaled(o, x, u);
        }
        o.iter_mut().for_each(|o| *o *= self.scale);

        write(state, &self.alpha, &self.right, &self.u, v);
    }
}

/// `readings[r] += left[r]ᵀ · state`, four rows of the state at a time so that the readings are loaded
/// and stored a quarter as often.
#[inline(always)]
fn read(state: &[f32], left: &[f32], readings: &mut [f32], v: usize) {
    let k = state.len() / v;
    for (at, rows) in state.chunks(4 * v).enumerate() {
        let (at, count) = (4 * at, rows.len() / v);
        for (left, x) in left.chunks_exact(k).zip(readings.chunks_exact_mut(v)) {
            let left = &left[at..at + count];
            if let &[c0, c1, c2, c3] = left {
                let (r01, r23) = rows.split_at(2 * v);
                let ((r0, r1), (r2, r3)) = (r01.split_at(v), r23.split_at(v));
                for ((((x, s0), s1), s2), s3) in x.iter_mut().zip(r0).zip(r1).zip(r2).zip(r3) {
                    *x += (c0 * s0 + c1 * s1) + (c2 * s2 + c3 * s3);
                }
            } else {
                for (row, &c) in rows.chunks_exact(v).zip(left) {
                    add_scaled(x, c, row);
                }
            }
        }
    }
}

/// `state ← Diag(alpha) · state + Σ_r right[r] · u[r]ᵀ`
#[inline(always)]
fn write(state: &mut [f32], alpha: &[f32], right: &[f32], u: &[f32], v: usize) {
    let k = alpha.len();
    for (d, (row, &alpha)) in state.chunks_exact_mut(v).zip(alpha).enumerate() {
        let mut pairs = u.chunks_exact(2 * v);
        let mut writes = right[d..].chunks(2 * k);
        let mut alpha = alpha;
        for u in pairs.by_ref() {
            let (u0, u1) = u.split_at(v);
            let (a0, a1) = writes.next().map_or((0.0, 0.0), |a| (a[0], a[k]));
            for ((s, u0), u1) in row.iter_mut().zip(u0).zip(u1) {
                *s = alpha * *s + (a0 * u0 + a1 * u1);
            }
            alpha = 1.0;
        }
        if let Some(a) = writes.next()
            && !pairs.remainder().is_empty()
        {
            for (s, u) in row.iter_mut().zip(pairs.remainder()) {
                *s = alpha * *s + a[0] * u;
            }
        }
    }
}
