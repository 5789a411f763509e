//! The exact reductions of the family: one rule with special inputs is another rule. The reference shows
//! them to the last bit where the arithmetic is the same; each engine, running the general rule, is
//! compared with the float64 reference of the special one.

mod common;

use common::{assert_outputs_right, decode, engines, exact, prefill};
use eda_wgpu::generate::{self, Gates, Keys, Recipe};
use eda_wgpu::{Operand, Outputs, PrefillOptions, Problem, Rule, Tensors};

const SIZES: [usize; 6] = [2, 45, 1, 2, 24, 20];

type Inputs = Tensors<Vec<f32>>;

fn recipe(seed: u64) -> Recipe {
    Recipe {
        seed,
        initial_state: true,
        ..Recipe::default()
    }
}

fn draw(rule: Rule, recipe: &Recipe) -> (Problem, Inputs) {
    let problem = Problem::new(rule, SIZES);
    let tensors = generate::tensors(&problem, recipe);
    (problem, tensors)
}

/// The inputs that `rule` uses, from those of another rule.
fn keep(problem: &Problem, tensors: &Inputs) -> Inputs {
    let mut kept = Tensors::new();
    for (operand, tensor) in tensors.iter().filter(|(o, _)| problem.uses(*o)) {
        kept.set(operand, tensor.clone());
    }
    kept
}

/// Every engine, by prefill and by decode, gives `expected` for the general rule's inputs.
fn engines_agree(what: &str, problem: &Problem, tensors: &Inputs, expected: &Outputs<f64>) {
    for engine in engines() {
        let outputs = prefill(engine, problem, tensors, &PrefillOptions::default());
        assert_outputs_right(engine, what, outputs, expected);
        let outputs = decode(engine, problem, tensors, 0, 1);
        assert_outputs_right(engine, &format!("{what}, decode"), outputs, expected);
    }
}

#[test]
fn eda_without_erasing_is_kda() {
    let (eda, mut tensors) = draw(Rule::Eda, &recipe(1));
    tensors.set(Operand::Gamma, vec![0.0; eda.len(Operand::Gamma)]);
    let kda = Problem::new(Rule::Kda, SIZES);
    let expected = exact(&kda, &keep(&kda, &tensors));
    assert_eq!(exact(&eda, &tensors), expected);
    engines_agree("γ = 0", &eda, &tensors, &expected);
}

#[test]
fn kda_with_one_decay_per_head_is_gdn() {
    let (gdn, tensors) = draw(Rule::Gdn, &recipe(2));
    let expected = exact(&gdn, &tensors);

    // As a channel decay whose channels agree …
    let kda = Problem::new(Rule::Kda, SIZES);
    let g = tensors.get(Operand::G).expect("a decay");
    let channels = g.iter().flat_map(|&g| vec![g; kda.key_dim]).collect();
    let spread = tensors.clone().with(Operand::G, channels);
    assert_eq!(exact(&kda, &spread), expected);
    engines_agree("KDA with equal channels", &kda, &spread, &expected);

    // … and as one number a head.
    let mut per_head = kda;
    per_head.decay_per_head = true;
    assert_eq!(exact(&per_head, &tensors), expected);
    engines_agree("KDA with a decay per head", &per_head, &tensors, &expected);
}

#[test]
fn gdn_and_kda_without_decay_are_delta() {
    let delta = Problem::new(Rule::Delta, SIZES);
    for rule in [Rule::Gdn, Rule::Kda] {
        let (problem, mut tensors) = draw(rule, &recipe(3));
        tensors.set(Operand::G, vec![0.0; problem.len(Operand::G)]);
        let expected = exact(&delta, &keep(&delta, &tensors));
        assert_eq!(exact(&problem, &tensors), expected);
        engines_agree(&format!("{rule}, g = 0"), &problem, &tensors, &expected);
    }
}

/// With `e = k` the two steps are one with the gate `1 − (1−β)(1−γ)` on the old content, and `β` on the
/// new. As KDA that is `β' = 1 − (1−β)(1−γ)` with the value `v·β/β'`.
#[test]
fn eda_at_one_address_is_kda_with_a_joint_gate() {
    let mixed = Recipe {
        keys: Keys::SameAddress,
        ..recipe(4)
    };
    let near_one = Recipe {
        gates: Gates::NearOne,
        ..mixed
    };
    for recipe in [mixed, near_one] {
        let (eda, tensors) = draw(Rule::Eda, &recipe);
        let gate = |operand| tensors.get(operand).expect("a gate");
        let joint: Vec<f32> = gate(Operand::Beta)
            .iter()
            .zip(gate(Operand::Gamma))
            .map(|(&beta, &gamma)| beta + gamma - beta * gamma)
            .collect();
        let values = gate(Operand::V)
            .chunks_exact(eda.value_dim)
            .zip(gate(Operand::Beta).iter().zip(&joint))
            .flat_map(|(v, (beta, joint))| v.iter().map(move |v| v * beta / joint))
            .collect();
        let kda = Problem::new(Rule::Kda, SIZES);
        let single = keep(&kda, &tensors)
            .with(Operand::Beta, joint)
            .with(Operand::V, values);
        // The joint gate and the values are rounded to float32, and k has length 1 only to float32.
        let expected = exact(&kda, &single);
        let error = relative(&exact(&eda, &tensors), &expected);
        assert!(error < 1e-6, "reference: {error:.2e}");
        engines_agree("e = k", &eda, &tensors, &expected);
    }
}

#[test]
fn deltaproduct_with_one_factor_is_gdn() {
    let (gdn, tensors) = draw(Rule::Gdn, &recipe(5));
    let expected = exact(&gdn, &tensors);
    let product = Problem::new(Rule::DeltaProduct { factors: 1 }, SIZES);
    assert_eq!(exact(&product, &tensors), expected);
    engines_agree("one factor", &product, &tensors, &expected);
}

#[test]
fn comba_reading_where_it_writes_is_gdn() {
    let (comba, mut tensors) = draw(Rule::Comba, &recipe(6));
    let k = tensors.get(Operand::K).expect("keys").clone();
    tensors.set(Operand::P, k);
    let gdn = Problem::new(Rule::Gdn, SIZES);
    let expected = exact(&gdn, &keep(&gdn, &tensors));
    assert_eq!(exact(&comba, &tensors), expected);
    engines_agree("p = k", &comba, &tensors, &expected);
}

/// `b = β` and `w = β` in every channel: `k (βv − (βk)ᵀS)ᵀ` is `βk (v − kᵀS)ᵀ`.
#[test]
fn gdn2_with_equal_gates_is_kda() {
    let (kda, tensors) = draw(Rule::Kda, &recipe(7));
    let expected = exact(&kda, &tensors);
    let gdn2 = Problem::new(Rule::Gdn2, SIZES);
    let spread = |width: usize| {
        let beta = tensors.get(Operand::Beta).expect("a gate");
        beta.iter().flat_map(|&beta| vec![beta; width]).collect()
    };
    let equal = keep(&gdn2, &tensors)
        .with(Operand::B, spread(gdn2.key_dim))
        .with(Operand::W, spread(gdn2.value_dim));
    let error = relative(&exact(&gdn2, &equal), &expected);
    assert!(error < 1e-12, "reference: {error:.2e}");
    engines_agree("b = w = β", &gdn2, &equal, &expected);
}

/// With `b = 0` RWKV-7 replaces nothing: it decays and adds, which is linear
/// attention where `g = 0`.
#[test]
fn rwkv7_without_replacement_and_decay_is_linear_attention() {
    let (rwkv7, mut tensors) = draw(Rule::Rwkv7, &recipe(8));
    tensors.set(Operand::B, vec![0.0; rwkv7.len(Operand::B)]);
    tensors.set(Operand::G, vec![0.0; rwkv7.len(Operand::G)]);
    let linear = Problem::new(Rule::Linear, SIZES);
    let expected = exact(&linear, &keep(&linear, &tensors));
    assert_eq!(exact(&rwkv7, &tensors), expected);
    engines_agree("b = 0, g = 0", &rwkv7, &tensors, &expected);
}

/// Relative l2 error between two float64 outputs.
fn relative(x: &Outputs<f64>, y: &Outputs<f64>) -> f64 {
    let one = |x: &[f64], y: &[f64]| {
        let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
        norm(&mut x.iter().zip(y).map(|(x, y)| x - y)) / norm(&mut y.iter().copied())
    };
    one(&x.o, &y.o).max(one(&x.final_state, &y.final_state))
}
