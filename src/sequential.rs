//! Whole sequences through the decode path, token by token: what a model does while it generates, over
//! inputs that are all there already.

use crate::engine::{DecodeOptions, Engine, Progress, Run, Tier};
use crate::error::Result;
use crate::problem::{Operand, Outputs, Problem, Tensors};
use crate::slots::Row;
use std::borrow::Cow;

/// Runs `problem` by [`Engine::decode`], one token of every sequence a step, on a pool with a slot for
/// each sequence. Sequences that have ended are padding rows. Progress counts steps.
///
/// # Errors
/// As [`Problem::validate_lengths`], [`Engine::pool`] and [`Engine::decode`].
pub async fn decode(
    engine: &Engine,
    problem: &Problem,
    tensors: &Tensors<&[f32]>,
    options: &DecodeOptions,
    progress: Progress<'_>,
) -> Result<Run> {
    problem.validate_lengths(tensors, |t| t.len())?;
    let sequences = problem.sequences();
    let steps = (0..sequences)
        .map(|n| problem.sequence(n).len())
        .max()
        .unwrap_or(0);
    let step = Problem {
        batch: sequences,
        tokens: 1,
        cu_seqlens: None,
        ..problem.clone()
    };

    let state_len = problem.value_heads * problem.state_len();
    let mut pool = engine.pool(&step, sequences).await?;
    if let Some(initial) = tensors.get(Operand::InitialState) {
        for (slot, state) in initial.chunks_exact(state_len).enumerate() {
            pool.write(slot, state).await?;
        }
    }

    // Inputs of one step, [N, 1, …]; the rows of padding keep what was there, which nothing reads.
    let mut inputs = tensors.map(|operand, &values| match problem.rows_per_token(operand) {
        0 => Cow::Borrowed(values),
        _ => Cow::Owned(vec![0.0; step.len(operand)]),
    });
    inputs.take(Operand::InitialState);
    let mut rows = vec![Row::PADDING; sequences];
    let mut o = vec![0.0; problem.output_len()];
    let o_row = problem.value_heads * problem.value_dim;
    let mut compute_ms = 0.0;
    for t in 0..steps {
        for (n, row) in rows.iter_mut().enumerate() {
            *row = if t < problem.sequence(n).len() {
                // The pool checks slots against its size, so a number over i32 is refused there.
                Row::continues(i32::try_from(n).unwrap_or(i32::MAX))
            } else {
                Row::PADDING
            };
        }
        let token_of = |n: usize| problem.sequence(n).start + t;
        let running = |n: &usize| !rows[*n].is_padding();
        for operand in Operand::ALL {
            let (Some(all), Some(Cow::Owned(now))) =
                (tensors.get(operand), inputs.get_mut(operand))
            else {
                continue;
            };
            let len = problem.rows_per_token(operand) * problem.row_len(operand);
            for n in (0..sequences).filter(running) {
                let at = token_of(n) * len;
                now[n * len..(n + 1) * len].copy_from_slice(&all[at..at + len]);
            }
        }
        let (step_o, ms) = engine
            .decode(&step, &inputs.slices(), &mut pool, &rows, options)
            .await?;
        for n in (0..sequences).filter(running) {
            let at = token_of(n) * o_row;
            o[at..at + o_row].copy_from_slice(&step_o[n * o_row..(n + 1) * o_row]);
        }
        compute_ms += ms;
        progress(t + 1, steps);
    }

    let mut final_state = Vec::with_capacity(problem.states_len());
    for slot in 0..sequences {
        final_state.extend(pool.read(slot).await?);
    }
    Ok(Run {
        outputs: Outputs { o, final_state },
        compute_ms,
        tier: matches!(engine, Engine::Gpu(_)).then_some(Tier::Portable),
        segments: 0,
    })
}
