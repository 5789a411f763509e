//! Inputs to check an engine with: deterministic, valid for any rule and form, and strong where weak ones
//! would hide a mistake (uneven decays, gates at both ends, keys that repeat, `e` different from `k`).
//!
//! Every rule's inputs are drawn so that the recurrence neither grows nor loses its digits: a float32
//! evaluation token by token stays within about 2e-6 of the float64 one, so an engine that is further off
//! than 1e-5 is wrong, not unlucky.

use crate::problem::{Decay, GateForm, Operand, Problem, Tensors};
use crate::rule::Rule;

/// A small generator of random numbers (SplitMix64): the same numbers for a seed on every machine.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A stream of its own for each seed.
    pub fn new(seed: u64) -> Self {
        // One step apart, neighbouring seeds would give the same stream shifted by one.
        let mut rng = Self(seed.wrapping_mul(0xD134_2543_DE82_EF95));
        rng.bits();
        rng
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `[low, high)`.
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        let unit = (self.bits() >> 40) as f32 / (1u32 << 24) as f32;
        low + (high - low) * unit
    }

    /// Bell-shaped with mean 0 and variance 1: a sum of four uniforms, which needs no logarithm and is
    /// therefore the same to the last bit everywhere.
    pub fn normal(&mut self) -> f32 {
        let bits = self.bits();
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xFFFF).sum();
        (sum as f32 / 65_536.0 - 2.0) * 3f32.sqrt()
    }

    /// Uniform in `0..n`; `n` is at least 1.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// True with probability `p`.
    pub fn chance(&mut self, p: f32) -> bool {
        self.uniform(0.0, 1.0) < p
    }
}

/// Log decays. A layer's own gate ([`Decay::Gate`]) draws its inputs over its whole range instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Decays {
    /// Uneven: neighbouring channels and tokens differ, from about 0 over −0.3, −5, −60 and −1000 to −inf.
    #[default]
    Mixed,
    /// 0 everywhere.
    None,
    /// Between −0.3 and 0.
    Weak,
    /// The floor of the bounded gate, −5, everywhere.
    Floor,
    /// About 0 but for single tokens of −1000, each on half of the channels.
    Cliff,
    /// −inf everywhere: no state survives a token.
    Full,
}

/// Gates in (0, 1); in (0, 2) where the form is [`GateForm::TwiceSigmoid`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Gates {
    /// Near 0, near 1 and between.
    #[default]
    Mixed,
    /// Above 0.99 (of the largest value).
    NearOne,
}

/// Addresses: unit vectors, before the random lengths that a problem with `normalize` gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Keys {
    /// In clusters, now and then repeated exactly; `e` and `k` share the clusters but differ.
    #[default]
    Clustered,
    /// Three addresses for all tokens, so that every write hits what was written before.
    Repeated,
    /// `e = k`, else clustered.
    SameAddress,
}

/// What inputs to draw for a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recipe {
    /// Seed; every tensor has a stream of its own.
    pub seed: u64,
    /// Log decays.
    pub decays: Decays,
    /// Gates.
    pub gates: Gates,
    /// Addresses.
    pub keys: Keys,
    /// Gives an initial state.
    pub initial_state: bool,
}

/// Inputs for `problem`, one tensor for each operand that it uses.
pub fn tensors(problem: &Problem, recipe: &Recipe) -> Tensors<Vec<f32>> {
    let p = problem;
    let stream = |operand: Operand| Rng::new(recipe.seed * 64 + 1 + operand as u64);
    let mut out: Tensors<Vec<f32>> = Tensors::new();
    for operand in Operand::ALL.into_iter().filter(|&o| p.uses(o)) {
        let mut rng = stream(operand);
        let n = p.len(operand);
        let values: Vec<f32> = match operand {
            Operand::Q => addresses(p, recipe, n, &mut rng),
            Operand::K => addresses(p, recipe, n, &mut rng),
            Operand::E if recipe.keys == Keys::SameAddress => {
                addresses(p, recipe, n, &mut stream(Operand::K))
            }
            Operand::E => addresses(p, recipe, n, &mut rng),
            // κ̂ with a minus sign; b = κ̂ ⊙ η with η in (0, 1) below makes the recurrence contract.
            Operand::A => {
                let mut a = addresses(p, recipe, n, &mut rng);
                a.iter_mut().for_each(|x| *x = -*x);
                a
            }
            Operand::P => {
                let k = out.get(Operand::K).map(Vec::as_slice).unwrap_or_default();
                near(k, p.key_dim, &mut rng)
            }
            Operand::B if p.rule == Rule::Gdn2 => {
                (0..n).map(|_| probability(recipe, &mut rng)).collect()
            }
            Operand::B => {
                let a = out.get(Operand::A).map(Vec::as_slice).unwrap_or_default();
                let mut b = Vec::with_capacity(n);
                for a in a.chunks_exact(p.key_dim) {
                    // One rate for a token and head, a little uneven over the channels.
                    let eta = probability(recipe, &mut rng);
                    b.extend(a.iter().map(|a| -a * eta * rng.uniform(0.8, 1.0)));
                }
                b
            }
            Operand::W => (0..n).map(|_| probability(recipe, &mut rng)).collect(),
            Operand::V | Operand::InitialState => (0..n).map(|_| rng.normal()).collect(),
            Operand::G if p.decay == Decay::Log => log_decays(p, recipe, n, &mut rng),
            Operand::G => gate_inputs(n, &mut rng),
            Operand::ALog => (0..n).map(|_| rng.uniform(1.0, 16.0).ln()).collect(),
            // softplus⁻¹ of about 0.001 to 0.1, where layers start.
            Operand::DtBias => (0..n).map(|_| rng.uniform(-6.9, -2.2)).collect(),
            Operand::Beta => gates(p.beta, recipe, n, &mut rng),
            Operand::Gamma => gates(p.gamma, recipe, n, &mut rng),
        };
        if operand != Operand::InitialState || recipe.initial_state {
            out.set(operand, values);
        }
    }
    if p.normalize {
        for operand in [Operand::Q, Operand::K, Operand::E] {
            if let Some(mut values) = out.take(operand) {
                lengthen(&mut values, p.key_dim, &mut stream(operand));
                out.set(operand, values);
            }
        }
    }
    out
}

fn unit(x: &mut [f32]) {
    let norm = x.iter().map(|x| x * x).sum::<f32>().sqrt();
    if norm > 0.0 {
        x.iter_mut().for_each(|x| *x /= norm);
    } else if let Some(first) = x.first_mut() {
        *first = 1.0;
    }
}

fn direction(dim: usize, rng: &mut Rng) -> Vec<f32> {
    let mut x: Vec<f32> = (0..dim).map(|_| rng.normal()).collect();
    unit(&mut x);
    x
}

/// Unit vectors `[…, K]`, `len` values in all.
fn addresses(p: &Problem, recipe: &Recipe, len: usize, rng: &mut Rng) -> Vec<f32> {
    // The clusters are common to q, k, e and a, so that reads, writes and erasures meet.
    let mut common = Rng::new(recipe.seed * 64);
    let centres: Vec<Vec<f32>> = (0..3).map(|_| direction(p.key_dim, &mut common)).collect();
    let mut out = Vec::with_capacity(len);
    while out.len() < len {
        let mut x = direction(p.key_dim, rng);
        let centre = &centres[rng.below(centres.len())];
        let choice = rng.uniform(0.0, 1.0);
        if recipe.keys == Keys::Repeated || choice < 0.1 {
            x.copy_from_slice(centre);
        } else if choice < 0.6 {
            x.iter_mut()
                .zip(centre)
                .for_each(|(x, c)| *x = c + 0.5 * *x);
            unit(&mut x);
        }
        out.extend(x);
    }
    out
}

/// Vectors near those of `k`, a little shorter than 1 (Comba's read address).
fn near(k: &[f32], dim: usize, rng: &mut Rng) -> Vec<f32> {
    let mut out = Vec::with_capacity(k.len());
    for k in k.chunks_exact(dim) {
        let mut x = direction(dim, rng);
        x.iter_mut().zip(k).for_each(|(x, k)| *x = k + 0.15 * *x);
        unit(&mut x);
        let length = rng.uniform(0.7, 1.0);
        out.extend(x.iter().map(|x| x * length));
    }
    out
}

/// Gives unit vectors the lengths of a raw projection, 1/16 to 16, and turns a few into zero: the
/// `1e-6` under the root then counts.
fn lengthen(x: &mut [f32], dim: usize, rng: &mut Rng) {
    for x in x.chunks_exact_mut(dim) {
        let length = if rng.chance(0.02) {
            0.0
        } else {
            rng.uniform(-4.0, 4.0).exp2()
        };
        x.iter_mut().for_each(|x| *x *= length);
    }
}

/// A number in (0, 1), often close to an end.
fn probability(recipe: &Recipe, rng: &mut Rng) -> f32 {
    let edge = rng.uniform(1e-4, 1e-2);
    match (recipe.gates, rng.below(4)) {
        (Gates::NearOne, _) | (Gates::Mixed, 0) => 1.0 - edge,
        (Gates::Mixed, 1) => edge,
        (Gates::Mixed, _) => rng.uniform(0.1, 0.9),
    }
}

fn gates(form: GateForm, recipe: &Recipe, len: usize, rng: &mut Rng) -> Vec<f32> {
    (0..len)
        .map(|_| {
            let p = probability(recipe, rng);
            match form {
                GateForm::Value => p,
                GateForm::Sigmoid | GateForm::TwiceSigmoid => (p / (1.0 - p)).ln(),
            }
        })
        .collect()
}

fn log_decays(p: &Problem, recipe: &Recipe, len: usize, rng: &mut Rng) -> Vec<f32> {
    let width = p.row_len(Operand::G);
    // Half of the channels (for scalar decays: heads) never decay hard, so that some content crosses chunks.
    let gentle: Vec<bool> = (0..width).map(|c| rng.chance(0.5) && c > 0).collect();
    let mut cliff = None;
    let mut out = Vec::with_capacity(len);
    while out.len() < len {
        let column = out.len() % width;
        if column == 0 {
            cliff = rng.chance(0.1).then(|| rng.below(2));
        }
        out.push(match recipe.decays {
            Decays::None => 0.0,
            Decays::Weak => -rng.uniform(0.0, 0.3),
            Decays::Floor => -5.0,
            Decays::Full => f32::NEG_INFINITY,
            Decays::Cliff if cliff == Some(column % 2) => -1000.0,
            Decays::Cliff => -rng.uniform(0.0, 1e-3),
            Decays::Mixed => match rng.below(if gentle[column] { 32 } else { 40 }) {
                0..16 => -rng.uniform(0.0, 1e-3),
                16..32 => -rng.uniform(0.0, 0.6),
                32..36 => -rng.uniform(4.0, 5.0),
                36..38 => -60.0,
                38 => -1000.0,
                _ => f32::NEG_INFINITY,
            },
        });
    }
    out
}

/// The layer's `a`: mostly moderate, now and then far out on either side.
fn gate_inputs(len: usize, rng: &mut Rng) -> Vec<f32> {
    (0..len)
        .map(|_| match rng.below(10) {
            0 => -20.0,
            1 => rng.uniform(5.0, 15.0),
            _ => 3.0 * rng.normal(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{DecayGate, relative_error};
    use crate::reference::recurrence;

    /// The error of float32 arithmetic itself on this problem, token by token.
    fn conditioning(problem: &Problem, recipe: &Recipe) -> f64 {
        let tensors = tensors(problem, recipe);
        let tensors = tensors.slices();
        problem.validate_host(&tensors, false).unwrap();
        let exact = recurrence::<f64>(problem, &tensors).unwrap();
        let rounded = recurrence::<f32>(problem, &tensors).unwrap();
        let largest = exact.final_state.iter().fold(0f64, |m, x| m.max(x.abs()));
        assert!(largest < 300.0, "the state grew to {largest}");
        relative_error(&rounded.o, &exact.o)
            .max(relative_error(&rounded.final_state, &exact.final_state))
    }

    #[test]
    fn every_recipe_is_well_conditioned() {
        let mut worst = (0.0, String::new());
        for rule in Rule::ALL {
            for decays in [
                Decays::Mixed,
                Decays::None,
                Decays::Weak,
                Decays::Floor,
                Decays::Cliff,
                Decays::Full,
            ] {
                for gates in [Gates::Mixed, Gates::NearOne] {
                    for keys in [Keys::Clustered, Keys::Repeated, Keys::SameAddress] {
                        for seed in 0..3 {
                            let problem = Problem::new(rule, [1, 100, 1, 2, 24, 20]);
                            let recipe = Recipe {
                                seed,
                                decays,
                                gates,
                                keys,
                                initial_state: seed > 0,
                            };
                            let error = conditioning(&problem, &recipe);
                            if error > worst.0 {
                                worst = (error, format!("{rule} {recipe:?}"));
                            }
                        }
                    }
                }
            }
        }
        assert!(worst.0 < 2e-6, "{worst:?}");
    }

    #[test]
    fn raw_inputs_are_well_conditioned() {
        for decay in [
            DecayGate::Safe { lower_bound: -5.0 },
            DecayGate::Sigmoid { lower_bound: -5.0 },
            DecayGate::Softplus,
        ] {
            for form in [GateForm::Sigmoid, GateForm::TwiceSigmoid] {
                let mut problem = Problem::new(Rule::Eda, [2, 70, 1, 2, 32, 32]);
                problem.decay = Decay::Gate(decay);
                problem.normalize = true;
                (problem.beta, problem.gamma) = (form, form);
                let error = conditioning(&problem, &Recipe::default());
                assert!(error < 2e-6, "{decay:?} {form:?}: {error}");
            }
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_tensors() {
        let problem = Problem::new(Rule::Rwkv7, [2, 9, 1, 2, 8, 6]);
        let recipe = Recipe::default();
        let draw = |recipe: &Recipe| tensors(&problem, recipe);
        for (operand, tensor) in draw(&recipe).iter() {
            assert_eq!(Some(tensor), draw(&recipe).get(operand));
            let other = draw(&Recipe { seed: 1, ..recipe });
            assert_ne!(Some(tensor), other.get(operand), "{operand:?}");
        }
    }
}
