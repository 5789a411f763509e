//! The update rules, each as *decay, then sub-steps*: the one description that the float64
//! reference, the CPU engine and the shaders follow.
//!
//! Every rule of the family turns the state `S` (`[K, V]`, one per sequence and value head) into the
//! next one by a decay `S ← Diag(α) S` and then one or more sub-steps
//!
//! ```text
//! S ← S + a (z − bᵀ S)ᵀ        write along a [K], read at b [K], content z [V]
//! ```
//!
//! | rule | decay | sub-steps (a, b, z) |
//! |---|---|---|
//! | [`Rule::Linear`] | none | (k, 0, v) |
//! | [`Rule::Delta`] | none | (βk, k, v) |
//! | [`Rule::Gdn`] | scalar | (βk, k, v) |
//! | [`Rule::Kda`] | channel | (βk, k, v) |
//! | [`Rule::Gdn2`] | channel | (k, b⊙k, w⊙v) |
//! | [`Rule::Eda`] | channel | (γe, e, 0), (βk, k, v) |
//! | [`Rule::DeltaProduct`] | scalar | (β₁k₁, k₁, v₁), …, (βₙkₙ, kₙ, vₙ) |
//! | [`Rule::Comba`] | scalar | (βk, p, v) |
//! | [`Rule::Rwkv7`] | channel | (b, −a/α, 0), (k, 0, v) |

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Largest number of sub-steps a token may have (DeltaProduct's `n`).
pub const MAX_SUBSTEPS: usize = 16;

/// An update rule. See the [module table](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Rule {
    /// Linear attention.
    Linear,
    /// DeltaNet.
    Delta,
    /// Gated DeltaNet.
    Gdn,
    /// Kimi Delta Attention.
    Kda,
    /// Gated DeltaNet with separate read and write gates per channel.
    Gdn2,
    /// Erase-then-Delta Attention, Eq. (8) of arXiv 2606.26560.
    Eda,
    /// DeltaProduct with `factors` generalised Householder factors a token.
    DeltaProduct {
        /// Number of delta steps per token (`k`, `v` and `beta` have `factors · T` rows).
        factors: u8,
    },
    /// Comba (its query correction happens outside).
    Comba,
    /// RWKV-7.
    Rwkv7,
}

/// How the state decays before the sub-steps of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DecayKind {
    /// `α = 1`.
    None,
    /// One `α` per value head.
    Scalar,
    /// One `α` per value head and key channel.
    Channel,
}

/// A key-side vector `[K]` of a sub-step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Vector {
    /// `k`.
    K,
    /// `e`, the erase address.
    E,
    /// `p`, Comba's read address.
    P,
    /// RWKV-7's `a`, which is read with a minus sign.
    MinusA,
    /// RWKV-7's `b`.
    B,
    /// GDN-2's `b ⊙ k`.
    BTimesK,
}

/// The scalar gate on the write vector of a sub-step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gate {
    /// 1.
    One,
    /// `beta`.
    Beta,
    /// `gamma`.
    Gamma,
}

/// The value-side content `z` (`[V]`) of a sub-step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Content {
    /// 0: the sub-step only removes.
    Zero,
    /// `v`.
    V,
    /// GDN-2's `w ⊙ v`.
    WTimesV,
}

/// Where a sub-step reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Read {
    /// The read address `b`.
    pub vector: Vector,
    /// Reads the state as it was before this token's decay (RWKV-7's `a/α` without the division).
    /// Only the first sub-step of a token may do so.
    pub undecayed: bool,
}

/// One sub-step `S ← S + gate·write (content − readᵀ S)ᵀ`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SubStep {
    /// Direction of the write.
    pub write: Vector,
    /// Gate on the write.
    pub gate: Gate,
    /// Read address, or none for a plain addition.
    pub read: Option<Read>,
    /// Content.
    pub content: Content,
}

/// A rule spelled out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Update {
    /// The decay.
    pub decay: DecayKind,
    /// The pattern of sub-steps.
    pub pattern: &'static [SubStep],
    /// How often the pattern is repeated in one token; `k`, `v`, `beta` then have that many rows a token.
    pub factors: usize,
}

impl Update {
    /// Sub-steps per token, `n`.
    pub fn substeps(&self) -> usize {
        self.pattern.len() * self.factors
    }

    /// Sub-step `i` of a token, `i < n`.
    pub fn substep(&self, i: usize) -> SubStep {
        self.pattern[i % self.pattern.len()]
    }

    /// The row of `k`, `v` and `beta` that sub-step `i` of token `t` uses.
    pub fn row(&self, t: usize, i: usize) -> usize {
        t * self.factors + i / self.pattern.len()
    }
}

const fn step(write: Vector, gate: Gate, read: Option<Vector>, content: Content) -> SubStep {
    SubStep {
        write,
        gate,
        read: match read {
            Some(vector) => Some(Read {
                vector,
                undecayed: false,
            }),
            None => None,
        },
        content,
    }
}

const ADD: SubStep = step(Vector::K, Gate::One, None, Content::V);
const DELTA: SubStep = step(Vector::K, Gate::Beta, Some(Vector::K), Content::V);
const ERASE: SubStep = step(Vector::E, Gate::Gamma, Some(Vector::E), Content::Zero);
const GDN2: SubStep = step(
    Vector::K,
    Gate::One,
    Some(Vector::BTimesK),
    Content::WTimesV,
);
const COMBA: SubStep = step(Vector::K, Gate::Beta, Some(Vector::P), Content::V);
const REPLACE: SubStep = SubStep {
    write: Vector::B,
    gate: Gate::One,
    read: Some(Read {
        vector: Vector::MinusA,
        undecayed: true,
    }),
    content: Content::Zero,
};

impl Rule {
    /// Every rule, DeltaProduct with two factors.
    pub const ALL: [Rule; 9] = [
        Rule::Linear,
        Rule::Delta,
        Rule::Gdn,
        Rule::Kda,
        Rule::Gdn2,
        Rule::Eda,
        Rule::DeltaProduct { factors: 2 },
        Rule::Comba,
        Rule::Rwkv7,
    ];

    /// The rule spelled out as decay and sub-steps.
    pub fn update(self) -> Update {
        let (decay, pattern): (DecayKind, &'static [SubStep]) = match self {
            Rule::Linear => (DecayKind::None, &[ADD]),
            Rule::Delta => (DecayKind::None, &[DELTA]),
            Rule::Gdn => (DecayKind::Scalar, &[DELTA]),
            Rule::Kda => (DecayKind::Channel, &[DELTA]),
            Rule::Gdn2 => (DecayKind::Channel, &[GDN2]),
            Rule::Eda => (DecayKind::Channel, &[ERASE, DELTA]),
            Rule::DeltaProduct { .. } => (DecayKind::Scalar, &[DELTA]),
            Rule::Comba => (DecayKind::Scalar, &[COMBA]),
            Rule::Rwkv7 => (DecayKind::Channel, &[REPLACE, ADD]),
        };
        let factors = match self {
            Rule::DeltaProduct { factors } => factors as usize,
            _ => 1,
        };
        Update {
            decay,
            pattern,
            factors,
        }
    }

    /// Name in files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Rule::Linear => "linear",
            Rule::Delta => "delta",
            Rule::Gdn => "gdn",
            Rule::Kda => "kda",
            Rule::Gdn2 => "gdn2",
            Rule::Eda => "eda",
            Rule::DeltaProduct { .. } => "deltaproduct",
            Rule::Comba => "comba",
            Rule::Rwkv7 => "rwkv7",
        }
    }

    /// The rule of that [name](Rule::name); `factors` is used by DeltaProduct alone.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an unknown name or a number of factors outside `1..=16`.
    pub fn from_name(name: &str, factors: usize) -> Result<Rule> {
        if name == "deltaproduct" {
            return match u8::try_from(factors) {
                Ok(factors) if (1..=MAX_SUBSTEPS).contains(&(factors as usize)) => {
                    Ok(Rule::DeltaProduct { factors })
                }
                _ => Err(Error::unsupported(
                    "householders",
                    factors,
                    format!("1 to {MAX_SUBSTEPS}"),
                )),
            };
        }
        Rule::ALL
            .into_iter()
            .find(|r| r.name() == name)
            .ok_or_else(|| {
                let names: Vec<_> = Rule::ALL.iter().map(|r| r.name()).collect();
                Error::unsupported(
                    "rule",
                    format!("`{name}`"),
                    format!("one of {}", names.join(", ")),
                )
            })
    }
}

impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
