//! Parts of a problem along its tokens: how a long run is split, and how a sequence is fed to decode.

use crate::problem::{Operand, Problem, Tensors};
use std::ops::Range;

/// The tokens in `ranges` (numbered through all batch rows) as a problem of its own with one sequence per
/// range: a batch where all ranges have the same length, packed otherwise. Layer parameters go along,
/// the initial state does not.
///
/// Tensors must have passed [`Problem::validate_lengths`], and each range must lie in one sequence.
pub fn select(
    problem: &Problem,
    tensors: &Tensors<&[f32]>,
    ranges: &[Range<usize>],
) -> (Problem, Tensors<Vec<f32>>) {
    let mut part = problem.clone();
    let tokens = ranges.first().map_or(0, Range::len);
    if ranges.iter().all(|r| r.len() == tokens) {
        (part.batch, part.tokens, part.cu_seqlens) = (ranges.len(), tokens, None);
    } else {
        let mut offsets = vec![0];
        for range in ranges {
            offsets.push(offsets[offsets.len() - 1] + range.len());
        }
        (part.batch, part.tokens) = (1, offsets[ranges.len()]);
        part.cu_seqlens = Some(offsets);
    }

    let mut selected = Tensors::new();
    for (operand, tensor) in tensors.iter() {
        if operand == Operand::InitialState {
            continue;
        }
        let row = problem.rows_per_token(operand) * problem.row_len(operand);
        let values = match row {
            0 => tensor.to_vec(),
            _ => ranges
                .iter()
                .flat_map(|r| &tensor[r.start * row..r.end * row])
                .copied()
                .collect(),
        };
        selected.set(operand, values);
    }
    (part, selected)
}

/// Puts the output of a part (`[…, HV, V]` in the order of `ranges`) to its place in `o [B, T, HV, V]`.
pub fn place(problem: &Problem, ranges: &[Range<usize>], part: &[f32], o: &mut [f32]) {
    let row = problem.value_heads * problem.value_dim;
    let mut rest = part;
    for range in ranges {
        let (head, tail) = rest.split_at(range.len() * row);
        o[range.start * row..range.end * row].copy_from_slice(head);
        rest = tail;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{self, Recipe};
    use crate::reference::recurrence;
    use crate::rule::Rule;

    #[test]
    fn parts_in_turn_are_the_whole() {
        for (rule, batch, cu_seqlens) in [
            (Rule::DeltaProduct { factors: 2 }, 3, None),
            (Rule::Eda, 1, Some(vec![0, 4, 4, 11])),
        ] {
            let mut problem = Problem::new(rule, [batch, 11, 1, 2, 5, 3]);
            problem.cu_seqlens = cu_seqlens;
            let tensors = generate::tensors(&problem, &Recipe::default());
            let whole = recurrence::<f32>(&problem, &tensors.slices()).unwrap();

            let sequences = 0..problem.sequences();
            let cut = |from: usize, to: usize| -> Vec<Range<usize>> {
                sequences
                    .clone()
                    .map(|n| problem.sequence(n))
                    .map(|s| (s.start + from).min(s.end)..(s.start.saturating_add(to)).min(s.end))
                    .collect()
            };
            let mut o = vec![0.0; problem.output_len()];
            let mut state = None;
            for ranges in [cut(0, 5), cut(5, usize::MAX)] {
                let (part, mut inputs) = select(&problem, &tensors.slices(), &ranges);
                if let Some(state) = state {
                    inputs.set(Operand::InitialState, state);
                }
                let outputs = recurrence::<f32>(&part, &inputs.slices()).unwrap();
                place(&problem, &ranges, &outputs.o, &mut o);
                state = Some(outputs.final_state);
            }
            assert_eq!(o, whole.o);
            assert_eq!(state, Some(whole.final_state));
        }
    }
}
