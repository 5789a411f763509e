//! A problem cut along its tokens, the state carried from piece to piece.
//!
//! The recurrence knows no pieces, so the outputs must be those of the whole whatever the cuts are; a
//! caller with a long input uses this to bound what is in memory at once, and the tests use it to show
//! that the carried state is the state.

use crate::engine::{Engine, PrefillOptions, Progress, Run};
use crate::error::{Error, Result};
use crate::problem::{Operand, Outputs, Problem, Tensors};
use std::borrow::Cow;
use std::ops::Range;

/// The part of a problem that covers `tokens` (`0..T`) of each batch row, and its inputs. They start
/// from `state [N, HV, K, V]`, the initial state where `None`.
///
/// Of packed sequences all `N` stay; those without a token in the range are empty and pass their state
/// on. Inputs of one batch row are borrowed, since its tokens lie together; those of several are copied.
///
/// `tensors` must have passed [`Problem::validate_lengths`], and `tokens` must lie within `0..T`.
pub fn piece<'a>(
    problem: &Problem,
    tensors: &Tensors<&'a [f32]>,
    tokens: Range<usize>,
    state: Option<&'a [f32]>,
) -> (Problem, Tensors<Cow<'a, [f32]>>) {
    let part = Problem {
        tokens: tokens.len(),
        cu_seqlens: problem.cu_seqlens.as_ref().map(|offsets| {
            offsets
                .iter()
                .map(|&at| at.clamp(tokens.start, tokens.end) - tokens.start)
                .collect()
        }),
        ..problem.clone()
    };
    let mut inputs = tensors.map(|operand, &values| {
        let row = problem.rows_per_token(operand) * problem.row_len(operand);
        if row == 0 || problem.rows_per_token(operand) == 0 {
            return Cow::Borrowed(values);
        }
        let within = tokens.start * row..tokens.end * row;
        if problem.batch == 1 {
            return Cow::Borrowed(&values[within]);
        }
        let mut copy = Vec::with_capacity(problem.batch * within.len());
        for b in 0..problem.batch {
            let batch_row = b * problem.tokens * row;
            copy.extend_from_slice(&values[batch_row + within.start..batch_row + within.end]);
        }
        Cow::Owned(copy)
    });
    if let Some(state) = state {
        inputs.set(Operand::InitialState, Cow::Borrowed(state));
    }
    (part, inputs)
}

/// [`Engine::prefill`] in pieces cut at `points`: token positions in `0..=T` of each batch row (of the
/// packed axis for packed sequences) that do not decrease. Empty pieces are run too.
///
/// # Errors
/// [`Error::Unsupported`] for points that decrease or lie outside; else as [`Engine::prefill`].
pub async fn prefill(
    engine: &Engine,
    problem: &Problem,
    tensors: &Tensors<&[f32]>,
    points: &[usize],
    options: &PrefillOptions,
    progress: Progress<'_>,
) -> Result<Run> {
    problem.validate_lengths(tensors, |t| t.len())?;
    if !points.is_sorted() || points.last().is_some_and(|&last| last > problem.tokens) {
        return Err(Error::unsupported(
            "split",
            format!("{points:?}"),
            format!(
                "token positions from 0 to {} that do not decrease",
                problem.tokens
            ),
        ));
    }
    let row = problem.value_heads * problem.value_dim;
    let total = problem.total_tokens();
    let mut o = vec![0.0; problem.output_len()];
    let mut state: Option<Vec<f32>> = None;
    let mut compute_ms = 0.0;
    let mut tier = None;
    let mut segments = 0;
    let mut start = 0;
    for &end in points.iter().chain([&problem.tokens]) {
        let (part, inputs) = piece(problem, tensors, start..end, state.as_deref());
        let before = problem.batch * start;
        let run = engine
            .prefill(&part, &inputs.slices(), options, &|done, _| {
                progress(before + done, total)
            })
            .await?;
        drop(inputs);
        // `o` of the piece is [B, end - start, HV, V].
        let len = (end - start) * row;
        for b in 0..problem.batch {
            let at = (b * problem.tokens + start) * row;
            o[at..at + len].copy_from_slice(&run.outputs.o[b * len..(b + 1) * len]);
        }
        compute_ms += run.compute_ms;
        tier = run.tier;
        segments = segments.max(run.segments);
        state = Some(run.outputs.final_state);
        start = end;
    }
    Ok(Run {
        outputs: Outputs {
            o,
            // There is always a piece, the one that ends at T.
            final_state: state.unwrap_or_default(),
        },
        compute_ms,
        tier,
        segments,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::Rule;

    /// Two batch rows of DeltaProduct (two rows of k, v and beta a token).
    #[test]
    fn piece_takes_the_same_tokens_of_each_batch_row() {
        let problem = Problem::new(Rule::DeltaProduct { factors: 2 }, [2, 3, 1, 1, 1, 1]);
        let six: Vec<f32> = (0..6u8).map(f32::from).collect();
        let twelve: Vec<f32> = (0..12u8).map(f32::from).collect();
        let tensors = Tensors::new()
            .with(Operand::Q, six.as_slice())
            .with(Operand::K, twelve.as_slice());
        let (part, inputs) = piece(&problem, &tensors, 1..3, Some(&[8.0, 9.0]));
        assert_eq!(part.tokens, 2);
        assert_eq!(**inputs.get(Operand::Q).unwrap(), [1.0, 2.0, 4.0, 5.0]);
        assert_eq!(
            **inputs.get(Operand::K).unwrap(),
            [2.0, 3.0, 4.0, 5.0, 8.0, 9.0, 10.0, 11.0]
        );
        assert_eq!(**inputs.get(Operand::InitialState).unwrap(), [8.0, 9.0]);
    }

    #[test]
    fn piece_of_packed_sequences_keeps_the_empty_ones() {
        let mut problem = Problem::new(Rule::Linear, [1, 10, 1, 1, 1, 1]);
        problem.cu_seqlens = Some(vec![0, 4, 4, 10]);
        let q: Vec<f32> = (0..10u8).map(f32::from).collect();
        let tensors = Tensors::new().with(Operand::Q, q.as_slice());
        let (part, inputs) = piece(&problem, &tensors, 6..10, None);
        assert_eq!(part.cu_seqlens, Some(vec![0, 0, 0, 4]));
        assert!(matches!(inputs.get(Operand::Q), Some(Cow::Borrowed(_))));
        assert_eq!(**inputs.get(Operand::Q).unwrap(), [6.0, 7.0, 8.0, 9.0]);
    }
}
