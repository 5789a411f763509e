//! The judge: the recurrence token by token, as the paper writes it.
//!
//! For EDA this is Eq. (8), `S_t = (I − βkkᵀ)(I − γeeᵀ) Diag(α) S_{t−1} + βkvᵀ`, in the three moves of
//! Eqs. (9)-(11): decay, erase at `e`, correct at `k`; then `o_t = scale · S_tᵀ q_t`. Nothing is
//! reordered or batched; in float64 it defines what is right, in float32 it is the baseline that the
//! engines are compared with.

use crate::error::Result;
use crate::problem::{Outputs, Problem, Tensors};
use crate::rows::Rows;
use num_traits::Float;
use rayon::prelude::*;

/// Runs the recurrence in float type `F` (`f64` for the reference). Heads and sequences run in
/// parallel, tokens do not.
///
/// # Errors
/// As [`Problem::validate_lengths`].
pub fn recurrence<F: Float + Send + Sync>(
    problem: &Problem,
    tensors: &Tensors<&[f32]>,
) -> Result<Outputs<F>> {
    problem.validate_lengths(tensors, |t| t.len())?;
    let rows = Rows::new(problem, tensors);
    let (hv, v) = (problem.value_heads, problem.value_dim);
    let initial = tensors.get(crate::problem::Operand::InitialState).copied();
    let state_len = problem.state_len();

    let heads: Vec<(Vec<F>, Vec<F>)> = (0..problem.sequences() * hv)
        .into_par_iter()
        .map(|nh| {
            let mut state: Vec<F> = match initial {
                Some(s) => s[nh * state_len..(nh + 1) * state_len]
                    .iter()
                    .map(|&x| F::from(x).unwrap_or_else(F::nan))
                    .collect(),
                None => vec![F::zero(); state_len],
            };
            let tokens = problem.sequence(nh / hv);
            let mut o = vec![F::zero(); tokens.len() * v];
            let mut step = Step::new(problem);
            for (t, o) in tokens.zip(o.chunks_exact_mut(v)) {
                step.token(&rows, t, nh % hv, &mut state, o);
            }
            (o, state)
        })
        .collect();

    let mut o = vec![F::zero(); problem.output_len()];
    let mut final_state = Vec::with_capacity(problem.states_len());
    for (nh, (head_o, state)) in heads.into_iter().enumerate() {
        for (t, row) in problem.sequence(nh / hv).zip(head_o.chunks_exact(v)) {
            let at = (t * hv + nh % hv) * v;
            o[at..at + v].copy_from_slice(row);
        }
        final_state.extend(state);
    }
    Ok(Outputs { o, final_state })
}

/// The output scale, with the precision of `F`: [`Problem::scale`] rounds `K^-1/2` to float32, which is
/// 1e-8 away from what float64 has to be compared with.
fn scale<F: Float>(p: &Problem) -> F {
    let given = p.scale.map(|scale| F::from(scale).unwrap_or_else(F::nan));
    given.unwrap_or_else(|| F::from(p.key_dim).unwrap_or_else(F::nan).sqrt().recip())
}

/// `x [V] = Sᵀ b` for a state `S [K, V]`.
fn read<F: Float>(state: &[F], b: &[F], x: &mut [F]) {
    x.fill(F::zero());
    for (row, &b) in state.chunks_exact(x.len()).zip(b) {
        for (x, &s) in x.iter_mut().zip(row) {
            *x = *x + b * s;
        }
    }
}

/// Work vectors of one head.
struct Step<F> {
    /// `[K]`
    alpha: Vec<F>,
    a: Vec<F>,
    b: Vec<F>,
    /// `[V]`
    z: Vec<F>,
    x: Vec<F>,
    scale: F,
}

impl<F: Float> Step<F> {
    fn new(p: &Problem) -> Self {
        let k = || vec![F::zero(); p.key_dim];
        let v = || vec![F::zero(); p.value_dim];
        Self {
            alpha: k(),
            a: k(),
            b: k(),
            z: v(),
            x: v(),
            scale: scale(p),
        }
    }

    fn token(&mut self, rows: &Rows<'_>, t: usize, head: usize, state: &mut [F], o: &mut [F]) {
        let v = o.len();
        let substeps = rows.update().substeps();

        // RWKV-7 reads before the decay; x keeps that reading for sub-step 0.
        let undecayed = rows.update().substep(0).read.is_some_and(|r| r.undecayed);
        if undecayed {
            rows.read(t, 0, head, &mut self.b);
            read(state, &self.b, &mut self.x);
        }

        // S ← Diag(α) S
        rows.log_decay(t, head, &mut self.alpha);
        for (row, &g) in state.chunks_exact_mut(v).zip(&self.alpha) {
            let alpha = g.exp();
            for s in row {
                *s = *s * alpha;
            }
        }

        // S ← S + a (z − bᵀS)ᵀ for each sub-step
        for i in 0..substeps {
            rows.write(t, i, head, &mut self.a);
            rows.content(t, i, head, &mut self.z);
            if !(undecayed && i == 0) {
                match rows.read(t, i, head, &mut self.b) {
                    Some(_) => read(state, &self.b, &mut self.x),
                    None => self.x.fill(F::zero()),
                }
            }
            for (row, &a) in state.chunks_exact_mut(v).zip(&self.a) {
                for ((s, &z), &x) in row.iter_mut().zip(&self.z).zip(&self.x) {
                    *s = *s + a * (z - x);
                }
            }
        }

        // o = scale · Sᵀ q, read after the write
        rows.query(t, head, &mut self.b);
        read(state, &self.b, o);
        for o in o {
            *o = *o * self.scale;
        }
    }
}
