//! The vectors a token contributes to the recurrence, read from host tensors: the query, the decay, and
//! for each sub-step its write vector, read vector and content.
//!
//! This is where a [`Rule`](crate::rule::Rule)'s description meets the named tensors;
//! `shaders/rule.wgsl` and `shaders/content.wgsl` are its twins on the GPU.

use crate::layer;
use crate::problem::{Decay, Operand, Problem, Tensors};
use crate::rule::{Content, DecayKind, Gate, Read, Update, Vector};
use num_traits::Float;

/// Reads the vectors of single tokens. Methods are inlined always: the loops in them are then compiled for
/// the vector width of the caller. Tokens are numbered through all batch rows.
pub struct Rows<'a> {
    problem: &'a Problem,
    update: Update,
    tensors: &'a Tensors<&'a [f32]>,
    /// Operands with a vector for each token.
    operands: Vec<Operand>,
}

#[inline(always)]
fn cast<F: Float>(x: f32) -> F {
    F::from(x).unwrap_or_else(F::nan)
}

impl<'a> Rows<'a> {
    /// Views `tensors`, which must have passed [`Problem::validate_lengths`].
    pub fn new(problem: &'a Problem, tensors: &'a Tensors<&'a [f32]>) -> Self {
        Self {
            problem,
            update: problem.rule.update(),
            tensors,
            operands: Operand::ALL
                .into_iter()
                .filter(|&o| problem.uses(o) && problem.rows_per_token(o) > 0)
                .filter(|o| !matches!(o, Operand::Beta | Operand::Gamma))
                .collect(),
        }
    }

    /// The rule spelled out.
    pub fn update(&self) -> &Update {
        &self.update
    }

    /// Row `row` of a `[…, heads, width]` operand at `head`.
    #[inline(always)]
    fn slice(&self, operand: Operand, row: usize, head: usize, width: usize) -> &'a [f32] {
        let tensor: &'a [f32] = self.tensors.get(operand).copied().unwrap_or_default();
        let start = row * self.problem.row_len(operand) + head * width;
        &tensor[start..start + width]
    }

    /// The head of a key-side operand that `value_head` uses.
    #[inline(always)]
    fn key_side_head(&self, operand: Operand, value_head: usize) -> usize {
        let p = self.problem;
        if operand == Operand::B && p.row_len(operand) == p.value_heads * p.key_dim {
            value_head
        } else {
            p.key_head(value_head)
        }
    }

    #[inline(always)]
    fn key_side<F: Float>(&self, operand: Operand, row: usize, value_head: usize, out: &mut [F]) {
        let p = self.problem;
        let head = self.key_side_head(operand, value_head);
        for (o, &x) in out
            .iter_mut()
            .zip(self.slice(operand, row, head, p.key_dim))
        {
            *o = cast(x);
        }
        if p.normalize && matches!(operand, Operand::Q | Operand::K | Operand::E) {
            layer::normalize(out);
        }
    }

    #[inline(always)]
    fn vector<F: Float>(&self, vector: Vector, token: usize, i: usize, head: usize, out: &mut [F]) {
        match vector {
            Vector::K => self.key_side(Operand::K, self.update.row(token, i), head, out),
            Vector::E => self.key_side(Operand::E, token, head, out),
            Vector::P => self.key_side(Operand::P, token, head, out),
            Vector::B => self.key_side(Operand::B, token, head, out),
            Vector::MinusA => {
                self.key_side(Operand::A, token, head, out);
                for x in out {
                    *x = -*x;
                }
            }
            Vector::BTimesK => {
                self.key_side(Operand::K, self.update.row(token, i), head, out);
                let p = self.problem;
                let b = self.slice(Operand::B, token, head, p.key_dim);
                for (x, &b) in out.iter_mut().zip(b) {
                    *x = *x * cast(b);
                }
            }
        }
    }

    #[inline(always)]
    fn gate<F: Float>(&self, gate: Gate, token: usize, i: usize, head: usize) -> F {
        let (operand, row, form) = match gate {
            Gate::One => return F::one(),
            Gate::Beta => (Operand::Beta, self.update.row(token, i), self.problem.beta),
            Gate::Gamma => (Operand::Gamma, token, self.problem.gamma),
        };
        layer::gate(form, cast(self.slice(operand, row, head, 1)[0]))
    }

    /// Calls `f` with each row that the vectors of a token are read from; with none for a token that
    /// does not exist.
    #[inline(always)]
    pub(crate) fn sources(&self, token: usize, value_head: usize, mut f: impl FnMut(&'a [f32])) {
        let p = self.problem;
        if token >= p.total_tokens() {
            return;
        }
        for &operand in &self.operands {
            let (head, width) = match operand {
                Operand::V | Operand::W => (value_head, p.value_dim),
                Operand::G if p.decay_per_head => (value_head, 1),
                Operand::G => (value_head, p.key_dim),
                _ => (self.key_side_head(operand, value_head), p.key_dim),
            };
            let rows = p.rows_per_token(operand);
            for row in token * rows..(token + 1) * rows {
                f(self.slice(operand, row, head, width));
            }
        }
    }

    /// `q_t`, `[K]`, without the output scale.
    #[inline(always)]
    pub fn query<F: Float>(&self, token: usize, head: usize, out: &mut [F]) {
        self.key_side(Operand::Q, token, head, out);
    }

    /// The log decay `g_t <= 0`, `[K]` (0 where the rule has none).
    pub fn log_decay<F: Float>(&self, token: usize, head: usize, out: &mut [F]) {
        let p = self.problem;
        if self.update.decay == DecayKind::None {
            out.fill(F::zero());
            return;
        }
        let width = if p.decay_per_head { 1 } else { p.key_dim };
        let g = self.slice(Operand::G, token, head, width);
        for (d, o) in out.iter_mut().enumerate() {
            let d = if p.decay_per_head { 0 } else { d };
            *o = match p.decay {
                Decay::Log => cast(g[d]),
                Decay::Gate(form) => {
                    let a_log = self.slice(Operand::ALog, 0, head, 1)[0];
                    let dt_bias = self.slice(Operand::DtBias, 0, head, width)[d];
                    layer::log_decay(form, cast::<F>(g[d]) + cast(dt_bias), cast(a_log))
                }
            };
        }
    }

    /// What [`Self::log_decay`] is made of, for engines with a faster way: `g` (or the layer's `a`),
    /// then `dt_bias` and `A_log` where [`Problem::decay`] is a gate. `[K]`, or one value where the
    /// decay is one per head; `None` where the rule has no decay.
    #[inline(always)]
    pub(crate) fn decay_inputs(
        &self,
        token: usize,
        head: usize,
    ) -> Option<(&'a [f32], &'a [f32], f32)> {
        let p = self.problem;
        if self.update.decay == DecayKind::None {
            return None;
        }
        let width = if p.decay_per_head { 1 } else { p.key_dim };
        let g = self.slice(Operand::G, token, head, width);
        Some(match p.decay {
            Decay::Log => (g, &[], 0.0),
            Decay::Gate(_) => {
                let a_log = self.slice(Operand::ALog, 0, head, 1)[0];
                (g, self.slice(Operand::DtBias, 0, head, width), a_log)
            }
        })
    }

    /// The gated write vector `a` of sub-step `i`, `[K]`.
    #[inline(always)]
    pub fn write<F: Float>(&self, token: usize, i: usize, head: usize, out: &mut [F]) {
        let step = self.update.substep(i);
        self.vector(step.write, token, i, head, out);
        let gate = self.write_gate::<F>(token, i, head);
        for x in out {
            *x = *x * gate;
        }
    }

    /// The gate in the write vector of sub-step `i`.
    #[inline(always)]
    pub(crate) fn write_gate<F: Float>(&self, token: usize, i: usize, head: usize) -> F {
        self.gate(self.update.substep(i).gate, token, i, head)
    }

    /// The read vector `b` of sub-step `i`, `[K]`; `None` (and `out` zero) where it reads nothing.
    #[inline(always)]
    pub fn read<F: Float>(
        &self,
        token: usize,
        i: usize,
        head: usize,
        out: &mut [F],
    ) -> Option<Read> {
        let read = self.update.substep(i).read;
        match read {
            Some(read) => self.vector(read.vector, token, i, head, out),
            None => out.fill(F::zero()),
        }
        read
    }

    /// The content `z` of sub-step `i`, `[V]`.
    #[inline(always)]
    pub fn content<F: Float>(&self, token: usize, i: usize, head: usize, out: &mut [F]) {
        let content = self.update.substep(i).content;
        if content == Content::Zero {
            out.fill(F::zero());
            return;
        }
        let width = self.problem.value_dim;
        let v = self.slice(Operand::V, self.update.row(token, i), head, width);
        for (o, &v) in out.iter_mut().zip(v) {
            *o = cast(v);
        }
        if content == Content::WTimesV {
            let w = self.slice(Operand::W, token, head, width);
            for (o, &w) in out.iter_mut().zip(w) {
                *o = *o * cast(w);
            }
        }
    }
}
