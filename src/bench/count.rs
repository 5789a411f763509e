//! What a problem asks for, whoever computes it: the operations of the token recurrence and the bytes of its
//! tensors. Implementations do more of either, and what they do more does not count, so that times compare.

use super::report::Op;
use crate::engine::Element;
use crate::gpu::kernels::operand_element;
use crate::problem::{Operand, Problem};
use crate::rule::DecayKind;

/// Floating-point operations on the state in the recurrence as it is defined (see [`crate::rule`]); a
/// multiply-add is two. For each token and value head and each of the `K·V` values of a state: one for the
/// decay where the rule has one, two for each sub-step's read `bᵀS` where it reads, two for its write, two for
/// the output `Sᵀq`. That is `11·K·V` for EDA. What is done on vectors (normalising, gates) is not counted,
/// nor what a chunk form adds.
pub fn flops(problem: &Problem) -> f64 {
    let update = problem.rule.update();
    let decay = match update.decay {
        DecayKind::None => 0.0,
        DecayKind::Scalar | DecayKind::Channel => 1.0,
    };
    let substeps: f64 = (0..update.substeps())
        .map(|i| match update.substep(i).read {
            Some(_) => 4.0,
            None => 2.0,
        })
        .sum();
    let states = tokens(problem) * problem.value_heads as f64;
    states * problem.state_len() as f64 * (decay + substeps + 2.0)
}

/// Bytes that have to be moved at least: inputs and outputs once, as they are stored, and states: in prefill the
/// final ones written in float32 (initial ones are zero), in decode read and written as `state`.
pub fn bytes(op: Op, problem: &Problem, element: Element, state: Element) -> f64 {
    let inputs: f64 = Operand::ALL
        .into_iter()
        .filter(|&o| problem.uses(o) && o != Operand::InitialState)
        .map(|o| {
            let values: f64 = problem.shape(o).into_iter().map(|n| n as f64).product();
            values * operand_element(o, element).bytes() as f64
        })
        .sum();
    let state_bytes = match op {
        Op::Prefill => Element::F32.bytes(),
        Op::Decode => 2 * state.bytes(),
    };
    let outputs = tokens(problem) * (problem.value_heads * problem.value_dim) as f64;
    let states = problem.sequences() as f64 * (problem.value_heads * problem.state_len()) as f64;
    inputs + outputs * element.bytes() as f64 + states * state_bytes as f64
}

/// In float64, as everything here: a report may be of more than this machine counts in words.
fn tokens(problem: &Problem) -> f64 {
    problem.batch as f64 * problem.tokens as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::Rule;

    #[test]
    fn operations_are_those_of_the_definition() {
        for (rule, each) in [
            (Rule::Linear, 4.0),
            (Rule::Delta, 6.0),
            (Rule::Gdn, 7.0),
            (Rule::Kda, 7.0),
            (Rule::Gdn2, 7.0),
            (Rule::Eda, 11.0),
            (Rule::DeltaProduct { factors: 3 }, 15.0),
            (Rule::Comba, 7.0),
            (Rule::Rwkv7, 9.0),
        ] {
            let problem = Problem::new(rule, [2, 5, 1, 3, 7, 11]);
            assert_eq!(flops(&problem), 2.0 * 5.0 * 3.0 * 77.0 * each, "{rule}");
        }
    }

    #[test]
    fn bytes_are_each_tensor_once() {
        // q, k, e: [2, 5, 1, 8]; v, o: [2, 5, 3, 4]; g: [2, 5, 3, 8]; beta, gamma: [2, 5, 3]; states [2, 3, 8, 4].
        let problem = Problem::new(Rule::Eda, [2, 5, 1, 3, 8, 4]);
        let values = 3.0 * 80.0 + 2.0 * 120.0 + 240.0;
        let gates = 60.0;
        let states = 192.0;
        for state in [Element::F32, Element::F16] {
            let prefill = bytes(Op::Prefill, &problem, Element::F32, state);
            assert_eq!(prefill, 4.0 * (values + gates + states));
        }
        let decode = bytes(Op::Decode, &problem, Element::F16, Element::F32);
        assert_eq!(decode, 2.0 * values + 4.0 * gates + 8.0 * states);
        let decode = bytes(Op::Decode, &problem, Element::F32, Element::F16);
        assert_eq!(decode, 4.0 * values + 4.0 * gates + 4.0 * states);
    }
}
