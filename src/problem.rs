//! What is to be computed: the rule, the sizes, the sequences and the form in which the inputs come.

use crate::error::{Error, Result};
use crate::rule::{Content, DecayKind, Gate, Rule, Vector};

/// Largest `K` and `V`.
pub const MAX_HEAD_DIM: usize = 256;
/// Largest `H` and `HV`.
pub const MAX_HEADS: usize = 65_535;
/// Largest `A_log`: `exp(A_log)` and its product with a gate stay finite in float32.
pub const MAX_A_LOG: f32 = 80.0;
/// What is expected where a value is NaN or infinite.
pub(crate) const FINITE: &str = "finite values";
/// Largest number of rows (`batch · tokens · factors`) in one problem.
pub const MAX_ROWS: usize = 1 << 31;

/// The named input tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operand {
    /// `q [B, T, H, K]`, query.
    Q,
    /// `k [B, T, H, K]`, write address.
    K,
    /// `v [B, T, HV, V]`, value.
    V,
    /// `e [B, T, H, K]`, erase address (EDA).
    E,
    /// `p [B, T, H, K]`, read address (Comba).
    P,
    /// `a [B, T, H, K]` (RWKV-7).
    A,
    /// `b [B, T, H, K]` (RWKV-7) or `[B, T, HV, K]` (GDN-2).
    B,
    /// `w [B, T, HV, V]` (GDN-2).
    W,
    /// The decay: `g` (natural log, `<= 0`), or the layer's `a` where [`Decay::Gate`] turns it into `g`.
    /// `[B, T, HV, K]`, or `[B, T, HV]` where it is one per head.
    G,
    /// `A_log [HV]`, for [`Decay::Gate`].
    ALog,
    /// `dt_bias [HV, K]` (or `[HV]`), for [`Decay::Gate`].
    DtBias,
    /// `beta [B, T, HV]`, write gate or its logit.
    Beta,
    /// `gamma [B, T, HV]`, erase gate or its logit.
    Gamma,
    /// `initial_state [N, HV, K, V]`; zero where absent.
    InitialState,
}

impl Operand {
    /// Every operand, in the order of [`Tensors`].
    pub const ALL: [Operand; 14] = [
        Operand::Q,
        Operand::K,
        Operand::V,
        Operand::E,
        Operand::P,
        Operand::A,
        Operand::B,
        Operand::W,
        Operand::G,
        Operand::ALog,
        Operand::DtBias,
        Operand::Beta,
        Operand::Gamma,
        Operand::InitialState,
    ];
}

/// One value per operand, absent where the rule does not use it: host slices, GPU slices, …
#[derive(Debug, Clone)]
pub struct Tensors<T>([Option<T>; Operand::ALL.len()]);

impl<T> Default for Tensors<T> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| None))
    }
}

impl<T> Tensors<T> {
    /// No tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor (builder style).
    #[must_use]
    pub fn with(mut self, operand: Operand, tensor: T) -> Self {
        self.set(operand, tensor);
        self
    }

    /// Adds or replaces a tensor.
    pub fn set(&mut self, operand: Operand, tensor: T) {
        self.0[operand as usize] = Some(tensor);
    }

    /// Takes a tensor out.
    pub fn take(&mut self, operand: Operand) -> Option<T> {
        self.0[operand as usize].take()
    }

    /// The tensor, if present.
    pub fn get(&self, operand: Operand) -> Option<&T> {
        self.0[operand as usize].as_ref()
    }

    /// The tensor, if present, to be changed.
    pub fn get_mut(&mut self, operand: Operand) -> Option<&mut T> {
        self.0[operand as usize].as_mut()
    }

    /// The tensors that are present, with their names.
    pub fn iter(&self) -> impl Iterator<Item = (Operand, &T)> {
        Operand::ALL
            .into_iter()
            .zip(&self.0)
            .filter_map(|(o, t)| t.as_ref().map(|t| (o, t)))
    }

    /// The same tensors in another representation.
    pub fn map<'a, U>(&'a self, mut f: impl FnMut(Operand, &'a T) -> U) -> Tensors<U> {
        let mut out = Tensors::new();
        for (operand, tensor) in self.iter() {
            out.set(operand, f(operand, tensor));
        }
        out
    }
}

impl<T: AsRef<[f32]>> Tensors<T> {
    /// Borrowed views of host tensors.
    pub fn slices(&self) -> Tensors<&[f32]> {
        let mut out = Tensors::new();
        for (operand, tensor) in self.iter() {
            out.set(operand, tensor.as_ref());
        }
        out
    }
}

/// How a gate (`beta`, `gamma`) comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GateForm {
    /// The gate itself.
    #[default]
    Value,
    /// A logit: the gate is `sigmoid(x)`.
    Sigmoid,
    /// A logit: the gate is `2·sigmoid(x)` (negative eigenvalues allowed).
    TwiceSigmoid,
}

/// The decay gates a layer may use; `A = exp(A_log)`, `x = a + dt_bias`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DecayGate {
    /// EDA's, Eqs. (14)-(15): `g = ℓ + (−ℓ)·exp(−(A/|ℓ|)·softplus(x))`, `ℓ = lower_bound < 0`.
    Safe {
        /// `ℓ`.
        lower_bound: f32,
    },
    /// KDA's bounded gate: `g = ℓ·sigmoid(A·x)`.
    Sigmoid {
        /// `ℓ`.
        lower_bound: f32,
    },
    /// Unbounded: `g = −A·softplus(x)`.
    Softplus,
}

/// How the decay comes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Decay {
    /// [`Operand::G`] is the log decay `g <= 0` (`-inf` is full decay).
    #[default]
    Log,
    /// [`Operand::G`] is the layer's `a`; `A_log` and `dt_bias` are given.
    Gate(DecayGate),
}

/// Everything about a call except the data. Build one with [`Problem::new`], then set the fields that
/// differ; [`Problem::validate`] checks it as a whole.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// Update rule.
    pub rule: Rule,
    /// `B`.
    pub batch: usize,
    /// `T`, tokens of each batch row. May be 0.
    pub tokens: usize,
    /// `H`, query/key heads.
    pub heads: usize,
    /// `HV`, value heads; a multiple of `H`. Value head `h` uses key head `h / (HV/H)`.
    pub value_heads: usize,
    /// `K`, in `1..=256`.
    pub key_dim: usize,
    /// `V`, in `1..=256`.
    pub value_dim: usize,
    /// Packed sequences (`B = 1`): `N + 1` ascending offsets from 0 to `T`. Empty sequences are legal.
    pub cu_seqlens: Option<Vec<usize>>,
    /// Factor on the output, `K^-1/2` where `None`.
    pub scale: Option<f32>,
    /// The decay is one number a head, `[B, T, HV]`. Always so for rules with a scalar decay.
    pub decay_per_head: bool,
    /// Form of the decay.
    pub decay: Decay,
    /// q, k and e are divided by `sqrt(Σx² + 1e-6)` per head.
    pub normalize: bool,
    /// Form of `beta`.
    pub beta: GateForm,
    /// Form of `gamma`.
    pub gamma: GateForm,
}

impl Problem {
    /// A problem with prepared inputs (unit keys, `g` in log space, gates in (0, 1)).
    pub fn new(
        rule: Rule,
        [batch, tokens, heads, value_heads, key_dim, value_dim]: [usize; 6],
    ) -> Self {
        Self {
            rule,
            batch,
            tokens,
            heads,
            value_heads,
            key_dim,
            value_dim,
            cu_seqlens: None,
            scale: None,
            decay_per_head: rule.update().decay == DecayKind::Scalar,
            decay: Decay::Log,
            normalize: false,
            beta: GateForm::Value,
            gamma: GateForm::Value,
        }
    }

    /// The factor on the output.
    pub fn scale(&self) -> f32 {
        self.scale
            .unwrap_or_else(|| 1.0 / (self.key_dim as f32).sqrt())
    }

    /// `B · T`: tokens are numbered through all batch rows.
    pub fn total_tokens(&self) -> usize {
        self.batch * self.tokens
    }

    /// `N`, the number of sequences, each with a state.
    pub fn sequences(&self) -> usize {
        match &self.cu_seqlens {
            Some(offsets) => offsets.len().saturating_sub(1),
            None => self.batch,
        }
    }

    /// Tokens of sequence `n`, numbered through all batch rows.
    pub fn sequence(&self, n: usize) -> std::ops::Range<usize> {
        match &self.cu_seqlens {
            Some(offsets) => offsets[n]..offsets[n + 1],
            None => n * self.tokens..(n + 1) * self.tokens,
        }
    }

    /// Key head of a value head.
    pub fn key_head(&self, value_head: usize) -> usize {
        value_head / (self.value_heads / self.heads)
    }

    /// Values in one state, `K · V`.
    pub fn state_len(&self) -> usize {
        self.key_dim * self.value_dim
    }

    /// Values in `o`, `B · T · HV · V`.
    pub fn output_len(&self) -> usize {
        self.total_tokens() * self.value_heads * self.value_dim
    }

    /// Values in the states of all sequences, `N · HV · K · V`.
    pub fn states_len(&self) -> usize {
        self.sequences() * self.value_heads * self.state_len()
    }

    /// Whether the rule uses this operand; `None` where it may be left out.
    pub fn uses(&self, operand: Operand) -> bool {
        let update = self.rule.update();
        let vector = |v: Vector| {
            update
                .pattern
                .iter()
                .any(|s| s.write == v || s.read.is_some_and(|r| r.vector == v))
        };
        let gated = |g: Gate| update.pattern.iter().any(|s| s.gate == g);
        let gate_inputs = update.decay != DecayKind::None && matches!(self.decay, Decay::Gate(_));
        match operand {
            Operand::Q | Operand::K | Operand::V | Operand::InitialState => true,
            Operand::E => vector(Vector::E),
            Operand::P => vector(Vector::P),
            Operand::A => vector(Vector::MinusA),
            Operand::B => vector(Vector::B) || vector(Vector::BTimesK),
            Operand::W => update.pattern.iter().any(|s| s.content == Content::WTimesV),
            Operand::G => update.decay != DecayKind::None,
            Operand::ALog | Operand::DtBias => gate_inputs,
            Operand::Beta => gated(Gate::Beta),
            Operand::Gamma => gated(Gate::Gamma),
        }
    }

    /// Rows a token has in this operand: `factors` for `k`, `v`, `beta`; 1 for other per-token
    /// operands; 0 for operands that do not run over tokens.
    pub fn rows_per_token(&self, operand: Operand) -> usize {
        match operand {
            Operand::K | Operand::V | Operand::Beta => self.rule.update().factors,
            Operand::ALog | Operand::DtBias | Operand::InitialState => 0,
            _ => 1,
        }
    }

    /// Values of one row of a per-token operand (`H·K`, `HV·V`, `HV`, …), or of the whole of another.
    pub fn row_len(&self, operand: Operand) -> usize {
        let decay = if self.decay_per_head { 1 } else { self.key_dim };
        match operand {
            Operand::Q | Operand::K | Operand::E | Operand::P | Operand::A => {
                self.heads * self.key_dim
            }
            Operand::B if self.rule == Rule::Gdn2 => self.value_heads * self.key_dim,
            Operand::B => self.heads * self.key_dim,
            Operand::V | Operand::W => self.value_heads * self.value_dim,
            Operand::G | Operand::DtBias => self.value_heads * decay,
            Operand::ALog | Operand::Beta | Operand::Gamma => self.value_heads,
            Operand::InitialState => self.states_len(),
        }
    }

    /// Number of values of an operand.
    pub fn len(&self, operand: Operand) -> usize {
        match self.rows_per_token(operand) {
            0 => self.row_len(operand),
            rows => self.total_tokens() * rows * self.row_len(operand),
        }
    }

    /// Shape of an operand, as in the file format.
    pub fn shape(&self, operand: Operand) -> Vec<usize> {
        let rows = self.tokens * self.rows_per_token(operand);
        let (b, h, hv, k, v) = (
            self.batch,
            self.heads,
            self.value_heads,
            self.key_dim,
            self.value_dim,
        );
        match operand {
            Operand::Q | Operand::K | Operand::E | Operand::P | Operand::A => vec![b, rows, h, k],
            Operand::B if self.rule == Rule::Gdn2 => vec![b, rows, hv, k],
            Operand::B => vec![b, rows, h, k],
            Operand::V | Operand::W => vec![b, rows, hv, v],
            Operand::G if self.decay_per_head => vec![b, rows, hv],
            Operand::G => vec![b, rows, hv, k],
            Operand::Beta | Operand::Gamma => vec![b, rows, hv],
            Operand::ALog => vec![hv],
            Operand::DtBias if self.decay_per_head => vec![hv],
            Operand::DtBias => vec![hv, k],
            Operand::InitialState => vec![self.sequences(), hv, k, v],
        }
    }

    /// Name of an operand in files and messages; it depends on the form (`beta` or `beta_logit`).
    pub fn name(&self, operand: Operand) -> &'static str {
        match operand {
            Operand::Q => "q",
            Operand::K => "k",
            Operand::V => "v",
            Operand::E => "e",
            Operand::P => "p",
            Operand::A => "a",
            Operand::B => "b",
            Operand::W => "w",
            Operand::G if self.decay == Decay::Log => "g",
            Operand::G => "a",
            Operand::ALog => "A_log",
            Operand::DtBias => "dt_bias",
            Operand::Beta if self.beta == GateForm::Value => "beta",
            Operand::Beta => "beta_logit",
            Operand::Gamma if self.gamma == GateForm::Value => "gamma",
            Operand::Gamma => "gamma_logit",
            Operand::InitialState => "initial_state",
        }
    }

    /// Checks sizes, sequences and forms.
    ///
    /// # Errors
    /// [`Error::Unsupported`] or [`Error::Tensor`], naming the quantity and both numbers.
    pub fn validate(&self) -> Result<()> {
        for (what, found, limit) in [
            ("key_dim", self.key_dim, MAX_HEAD_DIM),
            ("value_dim", self.value_dim, MAX_HEAD_DIM),
            ("heads", self.heads, MAX_HEADS),
            ("value_heads", self.value_heads, MAX_HEADS),
            (
                "sub-steps per token",
                self.rule.update().substeps(),
                crate::rule::MAX_SUBSTEPS,
            ),
        ] {
            if found == 0 || found > limit {
                return Err(Error::unsupported(what, found, format!("1 to {limit}")));
            }
        }
        if !self.value_heads.is_multiple_of(self.heads) {
            return Err(Error::tensor(
                "v",
                format!(
                    "a number of value heads that is a multiple of the {} key heads",
                    self.heads
                ),
                format!("{} value heads", self.value_heads),
            ));
        }
        // An empty dimension makes an empty tensor whatever the others are, so each is bounded as if
        // none were empty: nothing below overflows, and no state is allocated for a batch of 2^60.
        let factors = self.rule.update().factors as u128;
        let rows = (self.batch.max(1) as u128 * self.tokens.max(1) as u128).saturating_mul(factors);
        if rows > MAX_ROWS as u128 {
            return Err(Error::unsupported(
                "batch · tokens · factors",
                rows,
                MAX_ROWS,
            ));
        }
        let widest = self.value_heads as u128 * self.key_dim.max(self.value_dim) as u128;
        let states = self.sequences() as u128 * self.value_heads as u128 * self.state_len() as u128;
        if (rows * widest).max(states) > isize::MAX as u128 / 8 {
            return Err(Error::unsupported(
                "values in a tensor",
                (rows * widest).max(states),
                isize::MAX / 8,
            ));
        }
        if self.rule.update().decay == DecayKind::Scalar && !self.decay_per_head {
            return Err(Error::tensor(
                self.name(Operand::G),
                format!("one decay per head ([B, T, HV]) for rule {}", self.rule),
                "one per channel",
            ));
        }
        if let Decay::Gate(DecayGate::Safe { lower_bound } | DecayGate::Sigmoid { lower_bound }) =
            self.decay
            && !(lower_bound < 0.0 && lower_bound.is_finite())
        {
            return Err(Error::unsupported(
                "lower_bound",
                lower_bound,
                "a finite number below 0",
            ));
        }
        if !self.scale().is_finite() {
            return Err(Error::unsupported("scale", self.scale(), "a finite number"));
        }
        if let Some(offsets) = &self.cu_seqlens {
            self.validate_sequences(offsets)?;
        }
        Ok(())
    }

    fn validate_sequences(&self, offsets: &[usize]) -> Result<()> {
        let bad =
            |expected: String, found: String| Err(Error::tensor("cu_seqlens", expected, found));
        if self.batch != 1 {
            return bad(
                "batch 1 with packed sequences".into(),
                format!("batch {}", self.batch),
            );
        }
        let (Some(&first), Some(&last)) = (offsets.first(), offsets.last()) else {
            return bad("at least one offset".into(), "none".into());
        };
        if first != 0 {
            return bad("a first offset of 0".into(), format!("{first}"));
        }
        if let Some(i) = (1..offsets.len()).find(|&i| offsets[i] < offsets[i - 1]) {
            return bad(
                "offsets that do not decrease".into(),
                format!("{} after {} at index {i}", offsets[i], offsets[i - 1]),
            );
        }
        if last != self.tokens {
            return bad(
                format!("a last offset equal to the {} tokens", self.tokens),
                format!("{last}"),
            );
        }
        Ok(())
    }

    /// Checks that exactly the operands of the rule are there, each with the right number of values.
    ///
    /// # Errors
    /// [`Error::Tensor`] naming the first tensor that is missing, extra or of the wrong length.
    pub fn validate_lengths<T>(
        &self,
        tensors: &Tensors<T>,
        length: impl Fn(&T) -> usize,
    ) -> Result<()> {
        self.validate()?;
        for operand in Operand::ALL {
            let name = self.name(operand);
            match tensors.get(operand) {
                Some(_) if !self.uses(operand) => {
                    return Err(Error::tensor(
                        name,
                        format!("no such tensor for rule {} in this form", self.rule),
                        "one",
                    ));
                }
                None if self.uses(operand) && operand != Operand::InitialState => {
                    return Err(Error::tensor(
                        name,
                        format!("shape {:?}", self.shape(operand)),
                        "no such tensor",
                    ));
                }
                Some(t) if length(t) != self.len(operand) => {
                    return Err(Error::tensor(
                        name,
                        format!(
                            "{} values, shape {:?}",
                            self.len(operand),
                            self.shape(operand)
                        ),
                        format!("{} values", length(t)),
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks host tensors: presence, lengths, `g <= 0`, and finite values (`g = -inf` is legal).
    ///
    /// # Errors
    /// [`Error::Tensor`] with the tensor and the index of the first bad value.
    pub fn validate_host(&self, tensors: &Tensors<&[f32]>, allow_non_finite: bool) -> Result<()> {
        self.validate_lengths(tensors, |t| t.len())?;
        for (operand, values) in tensors.iter() {
            let log_decay = operand == Operand::G && self.decay == Decay::Log;
            let bad = values.iter().position(|&x| {
                (log_decay && x > 0.0)
                    || !(allow_non_finite || x.is_finite() || (log_decay && x == f32::NEG_INFINITY))
            });
            if let Some(i) = bad {
                let expected = if log_decay {
                    "log decays that are at most 0 (or -inf)"
                } else {
                    FINITE
                };
                let index = unravel(i, &self.shape(operand));
                return Err(Error::tensor(
                    self.name(operand),
                    expected,
                    format!("{} at index {index:?}", values[i]),
                ));
            }
            self.validate_range(operand, values)?;
        }
        Ok(())
    }

    /// What float32 cannot carry through the layer's own functions: exp(A_log) and the norms.
    fn validate_range(&self, operand: Operand, values: &[f32]) -> Result<()> {
        let bad = match operand {
            Operand::ALog => values.iter().position(|&x| x > MAX_A_LOG),
            Operand::Q | Operand::K | Operand::E if self.normalize => values
                .chunks(self.key_dim)
                .position(|row| {
                    let finite = row.iter().all(|x| x.is_finite());
                    finite && row.iter().map(|x| x * x).sum::<f32>().is_infinite()
                })
                .map(|row| row * self.key_dim),
            _ => None,
        };
        let Some(i) = bad else { return Ok(()) };
        let index = unravel(i, &self.shape(operand));
        Err(match operand {
            Operand::ALog => Error::tensor(
                self.name(operand),
                format!("values of at most {MAX_A_LOG}, so that exp(A_log) is finite in float32"),
                format!("{} at index {index:?}", values[i]),
            ),
            _ => Error::tensor(
                self.name(operand),
                "rows whose sum of squares is finite in float32, to be normalised",
                format!("one that overflows at index {:?}", &index[..3]),
            ),
        })
    }
}

/// Index in each dimension of flat index `i`.
fn unravel(mut i: usize, shape: &[usize]) -> Vec<usize> {
    let mut index: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&n| {
            let at = i % n.max(1);
            i /= n.max(1);
            at
        })
        .collect();
    index.reverse();
    index
}

/// What a call returns on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct Outputs<F = f32> {
    /// `o [B, T, HV, V]`.
    pub o: Vec<F>,
    /// `final_state [N, HV, K, V]`.
    pub final_state: Vec<F>,
}

/// Relative l2 error `‖x − reference‖ / ‖reference‖` (the norm of `x` where the reference is zero, 0 for
/// two empty slices, infinite where the lengths differ or a value is not finite).
pub fn relative_error<F: Copy + Into<f64>>(x: &[F], reference: &[f64]) -> f64 {
    if x.len() != reference.len() {
        return f64::INFINITY;
    }
    let (mut difference, mut norm) = (0.0f64, 0.0f64);
    for (&x, &r) in x.iter().zip(reference) {
        difference += (x.into() - r).powi(2);
        norm += r * r;
    }
    let error = if norm > 0.0 {
        (difference / norm).sqrt()
    } else {
        difference.sqrt()
    };
    if error.is_nan() { f64::INFINITY } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_float32_cannot_carry_is_refused_by_name_and_index() {
        let mut problem = Problem::new(Rule::Kda, [1, 2, 1, 1, 2, 1]);
        problem.decay = Decay::Gate(DecayGate::Softplus);
        problem.normalize = true;
        let four = [0.5f32; 4];
        let tensors = |k: &'static [f32], a_log: &'static [f32]| {
            Tensors::<&[f32]>::new()
                .with(Operand::Q, &four)
                .with(Operand::K, k)
                .with(Operand::V, &[1.0, 2.0])
                .with(Operand::G, &four)
                .with(Operand::ALog, a_log)
                .with(Operand::DtBias, &[0.0, 0.0])
                .with(Operand::Beta, &[0.5, 0.5])
        };
        let check = |k, a_log| problem.validate_host(&tensors(k, a_log), false);
        assert!(check(&[1.0, 2.0, 3.0, 4.0], &[80.0]).is_ok());
        let error = check(&[1.0, 2.0, 3.0, 4.0], &[90.0])
            .unwrap_err()
            .to_string();
        assert!(error.contains("`A_log`") && error.contains("90"), "{error}");
        let error = check(&[1.0, 2.0, 1e20, 4.0], &[0.0])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`k`") && error.contains("[0, 1, 0]"),
            "{error}"
        );
    }
}
