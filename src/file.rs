//! Problems in safetensors files: the reader, which trusts nothing, and the writer, which never leaves
//! half a file.
//!
//! # What a file holds
//! The tensors of [`Problem::shape`] under the names of [`Problem::name`], as F32, F16, BF16 or F64
//! (converted to float32 on reading), `cu_seqlens [N + 1]` as I32 or I64 for packed sequences, and, to
//! check a run against, `expected_o` and `expected_final_state` (kept in float64). `expected_g` is
//! allowed and ignored. Any other tensor is an error.
//!
//! | metadata | meaning | where absent |
//! |---|---|---|
//! | `rule` | [`Rule::name`] | must be in [`ReadOptions::rule`] |
//! | `scale` | factor on the output | `K^-1/2` |
//! | `householders` | DeltaProduct's factors | rows of `k` per row of `q` |
//! | `raw` | q, k, e are to be normalised | true where a raw layer input is there |
//! | `decay_gate` | `safe`, `sigmoid`, `softplus`: how `a` becomes `g` | `safe` for eda, `sigmoid` for kda with a `lower_bound`, else `softplus` |
//! | `lower_bound` | `ℓ` of the bounded gates | −5 for `safe` |
//! | `allow_neg_eigval` | gates are 2·sigmoid of their logits | false |
//!
//! Raw layer inputs are known by name: `a` (except for RWKV-7, whose `a` is another tensor) with `A_log`
//! and `dt_bias` in place of `g`; `beta_logit` and `gamma_logit` in place of `beta` and `gamma`.
//!
//! # Why not the `safetensors` crate
//! Its reader wants the whole file in one buffer and lets a repeated key win silently. Here each tensor
//! is read straight into the vector that is handed on, so a file of n bytes of float32 costs n bytes.

use crate::error::{Error, Result};
use crate::problem::{Decay, DecayGate, GateForm, Operand, Problem, Tensors};
use crate::rule::{DecayKind, Rule};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

#[cfg(not(target_arch = "wasm32"))]
mod output;
#[cfg(not(target_arch = "wasm32"))]
pub use output::OutputFile;

/// Largest header, the limit of the format itself.
const MAX_HEADER: u64 = 100_000_000;
/// Tensors here have at most 4 dimensions; anything above this is refused while parsing, so that a
/// header of `[0,0,0,…` cannot grow in memory.
const MAX_RANK: usize = 8;
/// Bytes converted at a time where the file's type is not the type in memory.
const PIECE: usize = 1 << 16;

/// What the caller knows better than the file.
#[derive(Debug, Clone, Default)]
pub struct ReadOptions {
    /// Name of the rule, instead of the file's.
    pub rule: Option<String>,
    /// Factor on the output, instead of the file's.
    pub scale: Option<f32>,
    /// q, k and e are normalised whatever the file says.
    pub normalize: bool,
    /// Takes NaN and infinities as they are.
    pub allow_non_finite: bool,
}

/// What a file says the outputs should be.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Expected {
    /// `expected_o [B, T, HV, V]`.
    pub o: Option<Vec<f64>>,
    /// `expected_final_state [N, HV, K, V]`.
    pub final_state: Option<Vec<f64>>,
}

/// A file's content, checked by [`Problem::validate_host`].
#[derive(Debug, Clone)]
pub struct Input {
    /// Rule, sizes, sequences and forms.
    pub problem: Problem,
    /// The tensors, in float32.
    pub tensors: Tensors<Vec<f32>>,
    /// What should come out.
    pub expected: Expected,
}

/// Reads a problem from a file.
///
/// # Errors
/// [`Error::File`] where the file cannot be read or is no safetensors file, [`Error::Tensor`] for a
/// tensor that is missing, unknown or wrong, [`Error::Unsupported`] for a size or option out of range.
pub fn read(path: &Path, options: &ReadOptions) -> Result<Input> {
    let failed = |e: std::io::Error| file_error(path, e);
    // Asked before opening: opening a pipe would wait for a writer.
    let about = std::fs::metadata(path).map_err(failed)?;
    if !about.is_file() {
        return Err(file_error(
            path,
            "expected a regular file, found something else",
        ));
    }
    let source = File::open(path).map_err(failed)?;
    let length = source.metadata().map_err(failed)?.len();
    read_from(source, length, path, options)
}

/// Reads a problem from `length` bytes of `source`, which `path` names in messages.
///
/// No allocation is larger than four times `length` (float16 expectations kept as float64).
///
/// # Errors
/// As [`read`].
pub fn read_from(
    mut source: impl Read + Seek,
    length: u64,
    path: &Path,
    options: &ReadOptions,
) -> Result<Input> {
    let header = Header::read(&mut source, length, path)?;
    let mut problem = header.problem(path, options)?;
    let mut reader = TensorReader {
        source,
        header: &header,
        path,
    };
    if header.has("cu_seqlens") {
        problem.cu_seqlens = Some(reader.offsets()?);
    }
    problem.validate()?;
    header.refuse_extra(&problem)?;
    // All shapes before any data: a mistake in a file of gigabytes shows at once.
    for operand in Operand::ALL.into_iter().filter(|&o| problem.uses(o)) {
        let (name, shape) = (problem.name(operand), problem.shape(operand));
        if !header.has(name) && operand != Operand::InitialState {
            return Err(missing(name, format!("shape {shape:?}")));
        }
        header.expect_shape(name, &shape)?;
    }
    let (o, final_state) = ("expected_o", "expected_final_state");
    header.expect_shape(o, &output_shape(&problem))?;
    header.expect_shape(final_state, &problem.shape(Operand::InitialState))?;

    let mut tensors = Tensors::new();
    for operand in Operand::ALL.into_iter().filter(|&o| problem.uses(o)) {
        let name = problem.name(operand);
        if header.has(name) {
            tensors.set(operand, reader.floats::<f32>(name)?);
        }
    }
    problem.validate_host(&tensors.slices(), options.allow_non_finite)?;
    let expected = Expected {
        o: reader.expectation(o, options.allow_non_finite)?,
        final_state: reader.expectation(final_state, options.allow_non_finite)?,
    };
    Ok(Input {
        problem,
        tensors,
        expected,
    })
}

fn file_error(path: &Path, message: impl fmt::Display) -> Error {
    Error::File {
        path: path.display().to_string(),
        message: message.to_string(),
    }
}

fn missing(name: &str, expected: impl fmt::Display) -> Error {
    Error::tensor(name, expected, "no such tensor")
}

/// A name or message from a file, fit for one line of a report.
fn printable(text: &str) -> String {
    const LONGEST: usize = 200;
    let mut line: String = text
        .chars()
        .take(LONGEST)
        .flat_map(char::escape_debug)
        .collect();
    if text.chars().nth(LONGEST).is_some() {
        line.push('…');
    }
    // escape_debug is for string literals; quotes need no escape here.
    line.replace("\\\"", "\"").replace("\\'", "'")
}

/// Element types that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dtype {
    F16,
    Bf16,
    F32,
    F64,
    I32,
    I64,
}

impl Dtype {
    fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "F16" => Self::F16,
            "BF16" => Self::Bf16,
            "F32" => Self::F32,
            "F64" => Self::F64,
            "I32" => Self::I32,
            "I64" => Self::I64,
            _ => return None,
        })
    }

    fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
        }
    }
}

/// One tensor's entry in the header.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    #[serde(deserialize_with = "shape")]
    shape: Vec<usize>,
    /// Begin and end in the data that follows the header, in bytes.
    data_offsets: (u64, u64),
}

fn shape<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    struct Dimensions;
    impl<'de> Visitor<'de> for Dimensions {
        type Value = Vec<usize>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a shape of at most {MAX_RANK} dimensions")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut shape = Vec::with_capacity(4);
            while let Some(n) = seq.next_element()? {
                if shape.len() == MAX_RANK {
                    return Err(serde::de::Error::invalid_length(MAX_RANK + 1, &self));
                }
                shape.push(n);
            }
            Ok(shape)
        }
    }
    deserializer.deserialize_seq(Dimensions)
}

/// Adds to a map what must not be there yet: of two equal keys neither may win.
fn insert_once<V, E: serde::de::Error>(
    map: &mut BTreeMap<String, V>,
    key: String,
    value: V,
) -> Result<(), E> {
    if map.contains_key(&key) {
        return Err(E::custom(format_args!(
            "expected each key once, found `{}` again",
            printable(&key)
        )));
    }
    map.insert(key, value);
    Ok(())
}

/// The object under `__metadata__`.
struct Metadata(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Strings;
        impl<'de> Visitor<'de> for Strings {
            type Value = Metadata;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut values = BTreeMap::new();
                while let Some((key, value)) = map.next_entry()? {
                    insert_once(&mut values, key, value)?;
                }
                Ok(Metadata(values))
            }
        }
        deserializer.deserialize_map(Strings)
    }
}

/// The JSON at the front of the file.
#[derive(Default)]
struct Json {
    metadata: Option<Metadata>,
    entries: BTreeMap<String, Entry>,
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Json;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with an entry for each tensor")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                use serde::de::Error as _;
                let mut json = Json::default();
                while let Some(key) = map.next_key::<String>()? {
                    let context = |e: A::Error, key: &str| {
                        A::Error::custom(format_args!("`{}`: {e}", printable(key)))
                    };
                    if key == "__metadata__" {
                        if json.metadata.is_some() {
                            return Err(A::Error::duplicate_field("__metadata__"));
                        }
                        json.metadata = Some(map.next_value().map_err(|e| context(e, &key))?);
                    } else {
                        let entry = map.next_value().map_err(|e| context(e, &key))?;
                        insert_once(&mut json.entries, key, entry)?;
                    }
                }
                Ok(json)
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// What the front of a file says, with every extent checked against the file's length.
struct Header {
    metadata: BTreeMap<String, String>,
    entries: BTreeMap<String, Entry>,
    /// Where the data begins in the file, in bytes.
    data: u64,
}

impl Header {
    fn read(source: &mut impl Read, length: u64, path: &Path) -> Result<Self> {
        let failed = |e: std::io::Error| file_error(path, e);
        if length < 8 {
            return Err(file_error(
                path,
                format!("expected a safetensors header, found {length} bytes"),
            ));
        }
        let mut prefix = [0; 8];
        source.read_exact(&mut prefix).map_err(failed)?;
        let header = u64::from_le_bytes(prefix);
        let most = MAX_HEADER.min(length - 8);
        if header > most {
            return Err(file_error(
                path,
                format!("expected a header of at most {most} bytes, found a length of {header}"),
            ));
        }
        // At most MAX_HEADER, which fits every usize.
        let mut json = vec![0; header as usize];
        source.read_exact(&mut json).map_err(failed)?;
        let json: Json = serde_json::from_slice(&json).map_err(|e| {
            file_error(
                path,
                format!("bad safetensors header: {}", printable(&e.to_string())),
            )
        })?;
        let header = Self {
            metadata: json.metadata.map(|m| m.0).unwrap_or_default(),
            entries: json.entries,
            data: 8 + header,
        };
        header.check_extents(length - header.data, path)?;
        Ok(header)
    }

    /// The tensors must cover the `bytes` after the header without gap or overlap, each as long as its
    /// shape and type say.
    fn check_extents(&self, bytes: u64, path: &Path) -> Result<()> {
        let mut in_order: Vec<(&String, &Entry)> = self.entries.iter().collect();
        in_order.sort_by_key(|(_, entry)| entry.data_offsets);
        let mut at = 0;
        for (name, entry) in in_order {
            let (begin, end) = entry.data_offsets;
            if begin != at || end < begin || end > bytes {
                return Err(Error::tensor(
                    printable(name),
                    format!("data offsets from {at} to at most {bytes}"),
                    format!("{begin} to {end}"),
                ));
            }
            at = end;
            // An unknown type is refused where the tensor is used.
            let Some(dtype) = Dtype::from_name(&entry.dtype) else {
                continue;
            };
            let size = entry
                .shape
                .iter()
                .try_fold(dtype.bytes() as u64, |n, &d| n.checked_mul(d as u64));
            if size != Some(end - begin) {
                return Err(Error::tensor(
                    printable(name),
                    match size {
                        Some(size) => format!("{size} bytes for {} {:?}", entry.dtype, entry.shape),
                        None => "a shape whose size fits 64 bits".into(),
                    },
                    format!("{} bytes, shape {:?}", end - begin, entry.shape),
                ));
            }
        }
        if at != bytes {
            return Err(file_error(
                path,
                format!("expected {at} bytes of tensors after the header, found {bytes}"),
            ));
        }
        Ok(())
    }

    fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The shape of a tensor that must have `N` dimensions, named by `axes`.
    fn dimensions<const N: usize>(&self, name: &str, axes: &str) -> Result<[usize; N]> {
        let entry = self.entries.get(name).ok_or_else(|| missing(name, axes))?;
        entry.shape.as_slice().try_into().map_err(|_| {
            Error::tensor(
                name,
                format!("{N} dimensions {axes}"),
                format!("shape {:?}", entry.shape),
            )
        })
    }

    fn expect_shape(&self, name: &str, shape: &[usize]) -> Result<()> {
        match self.entries.get(name) {
            Some(entry) if entry.shape != shape => Err(Error::tensor(
                name,
                format!("shape {shape:?}"),
                format!("shape {:?}", entry.shape),
            )),
            _ => Ok(()),
        }
    }

    fn refuse_extra(&self, problem: &Problem) -> Result<()> {
        let known: Vec<&str> = Operand::ALL
            .into_iter()
            .filter(|&o| problem.uses(o))
            .map(|o| problem.name(o))
            .collect();
        let beside = [
            "cu_seqlens",
            "expected_o",
            "expected_final_state",
            "expected_g",
        ];
        for (name, entry) in &self.entries {
            if !known.contains(&name.as_str()) && !beside.contains(&name.as_str()) {
                return Err(Error::tensor(
                    printable(name),
                    format!("only {} for rule {}", known.join(", "), problem.rule),
                    format!("an extra tensor of shape {:?}", entry.shape),
                ));
            }
        }
        Ok(())
    }

    /// A metadata value, read by `parse`; `expected` says what it takes.
    fn metadata<T>(
        &self,
        path: &Path,
        key: &str,
        expected: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(text) = self.metadata.get(key) else {
            return Ok(None);
        };
        match parse(text) {
            Some(value) => Ok(Some(value)),
            None => Err(file_error(
                path,
                format!(
                    "metadata `{key}`: expected {expected}, found `{}`",
                    printable(text)
                ),
            )),
        }
    }

    /// Rule, sizes and forms; everything but the sequences.
    fn problem(&self, path: &Path, options: &ReadOptions) -> Result<Problem> {
        let number = |key| self.metadata(path, key, "a number", |s| s.trim().parse::<f32>().ok());
        let flag = |key| {
            self.metadata(path, key, "`true` or `false`", |s| match s.trim() {
                "true" | "True" | "1" => Some(true),
                "false" | "False" | "0" => Some(false),
                _ => None,
            })
        };
        let [batch, tokens, heads, key_dim] = self.dimensions("q", "[B, T, H, K]")?;
        let [_, value_rows, value_heads, value_dim] = self.dimensions("v", "[B, T, HV, V]")?;
        let given = self.metadata(path, "householders", "a whole number", |s| {
            s.trim().parse::<usize>().ok()
        })?;
        // Without the key, DeltaProduct's factors are the rows of v for each row of q.
        let factors = given.unwrap_or(match value_rows.checked_div(tokens) {
            Some(n) if n * tokens == value_rows => n,
            _ => 1,
        });
        let name = options.rule.as_ref().or_else(|| self.metadata.get("rule"));
        let Some(name) = name else {
            return Err(file_error(
                path,
                "metadata `rule`: expected the name of a rule (or one on the command line), found none",
            ));
        };
        let rule = Rule::from_name(&printable(name), factors)?;
        if let (Some(n), false) = (given, matches!(rule, Rule::DeltaProduct { .. }))
            && n != 1
        {
            return Err(file_error(
                path,
                format!("metadata `householders`: expected none or 1 for rule {rule}, found {n}"),
            ));
        }

        let mut problem = Problem::new(
            rule,
            [batch, tokens, heads, value_heads, key_dim, value_dim],
        );
        problem.scale = match options.scale {
            Some(scale) => Some(scale),
            None => number("scale")?,
        };

        let forms = Forms {
            has: |name: &str| self.has(name),
            allow_neg_eigval: flag("allow_neg_eigval")?.unwrap_or(false),
            raw: match options.normalize {
                true => Some(true),
                false => flag("raw")?,
            },
        };
        forms.set(&mut problem, || {
            self.decay_gate(path, rule, number("lower_bound")?)
        })?;
        if rule.update().decay != DecayKind::None {
            let name = problem.name(Operand::G);
            let rank = self.entries.get(name).map(|entry| entry.shape.len());
            problem.decay_per_head = match rank {
                Some(3) => true,
                Some(4) => false,
                Some(_) => {
                    self.dimensions::<4>(name, "[B, T, HV, K], or 3 [B, T, HV]")?;
                    false
                }
                None => problem.decay_per_head,
            };
        }
        Ok(problem)
    }

    fn decay_gate(&self, path: &Path, rule: Rule, lower_bound: Option<f32>) -> Result<DecayGate> {
        let name = self.metadata.get("decay_gate").map(|s| printable(s.trim()));
        decay_gate(rule, name.as_deref(), lower_bound).map_err(|e| match e {
            Error::Unsupported { what, found, limit } => file_error(
                path,
                format!("metadata `{what}`: expected {limit}, found {found}"),
            ),
            e => e,
        })
    }
}

/// What form a problem's inputs have, as their names tell.
pub(crate) struct Forms<F> {
    /// Whether there is a tensor of a name.
    pub(crate) has: F,
    /// Gates are twice the sigmoid of their logits.
    pub(crate) allow_neg_eigval: bool,
    /// Addresses are to be normalised; told by the names where `None`.
    pub(crate) raw: Option<bool>,
}

impl<F: Fn(&str) -> bool> Forms<F> {
    /// Sets the forms of decay and gates; `decay_gate` is asked where the decay is a raw input.
    pub(crate) fn set<E>(
        &self,
        problem: &mut Problem,
        decay_gate: impl FnOnce() -> Result<DecayGate, E>,
    ) -> Result<(), E> {
        let has = &self.has;
        let rule = problem.rule;
        let gate_inputs = has("A_log") || has("dt_bias");
        let raw_decay = rule.update().decay != DecayKind::None
            && ((rule != Rule::Rwkv7 && has("a")) || (!has("g") && gate_inputs));
        if raw_decay {
            problem.decay = Decay::Gate(decay_gate()?);
        }
        let logit = match self.allow_neg_eigval {
            true => GateForm::TwiceSigmoid,
            false => GateForm::Sigmoid,
        };
        if has("beta_logit") {
            problem.beta = logit;
        }
        if has("gamma_logit") {
            problem.gamma = logit;
        }
        let raw = raw_decay || gate_inputs || has("beta_logit") || has("gamma_logit");
        problem.normalize = self.raw.unwrap_or(raw);
        Ok(())
    }
}

/// The decay gate of that name, or the rule's own.
pub(crate) fn decay_gate(
    rule: Rule,
    name: Option<&str>,
    lower_bound: Option<f32>,
) -> Result<DecayGate> {
    let name = name.unwrap_or(match rule {
        Rule::Eda => "safe",
        Rule::Kda if lower_bound.is_some() => "sigmoid",
        _ => "softplus",
    });
    let (what, found, limit) = match (name, lower_bound) {
        ("safe", bound) => {
            return Ok(DecayGate::Safe {
                lower_bound: bound.unwrap_or(-5.0),
            });
        }
        ("sigmoid", Some(lower_bound)) => return Ok(DecayGate::Sigmoid { lower_bound }),
        ("softplus", None) => return Ok(DecayGate::Softplus),
        ("sigmoid", None) => (
            "lower_bound",
            "none".into(),
            "a number for decay_gate `sigmoid`",
        ),
        // Dropping a stated bound would give a silently different decay.
        ("softplus", Some(bound)) => (
            "lower_bound",
            bound.to_string(),
            "none for decay_gate `softplus` (or decay_gate `safe` or `sigmoid`)",
        ),
        (other, _) => (
            "decay_gate",
            format!("`{other}`"),
            "`safe`, `sigmoid` or `softplus`",
        ),
    };
    Err(Error::unsupported(what, found, limit))
}

/// A number that the data can be converted to.
trait Float: bytemuck::Pod {
    /// The dtype that needs no conversion.
    const DTYPE: Dtype;
    fn from_f32(x: f32) -> Self;
    fn from_f64(x: f64) -> Self;
    /// The value whose bytes, in little-endian order, are those of `self` in memory.
    fn with_native_bytes(self) -> Self;
}

impl Float for f32 {
    const DTYPE: Dtype = Dtype::F32;
    fn from_f32(x: f32) -> Self {
        x
    }
    fn from_f64(x: f64) -> Self {
        x as f32
    }
    fn with_native_bytes(self) -> Self {
        Self::from_bits(u32::from_le(self.to_bits()))
    }
}

impl Float for f64 {
    const DTYPE: Dtype = Dtype::F64;
    fn from_f32(x: f32) -> Self {
        x.into()
    }
    fn from_f64(x: f64) -> Self {
        x
    }
    fn with_native_bytes(self) -> Self {
        Self::from_bits(u64::from_le(self.to_bits()))
    }
}

struct TensorReader<'a, S> {
    source: S,
    header: &'a Header,
    path: &'a Path,
}

impl<S: Read + Seek> TensorReader<'_, S> {
    /// Moves to a tensor's data; returns its dtype and number of values.
    fn find(&mut self, name: &str, expected: &str) -> Result<(Dtype, usize)> {
        let entry = self
            .header
            .entries
            .get(name)
            .ok_or_else(|| missing(name, expected))?;
        let unsupported = || Error::tensor(name, expected, printable(&entry.dtype));
        let dtype = Dtype::from_name(&entry.dtype).ok_or_else(unsupported)?;
        if matches!(dtype, Dtype::I32 | Dtype::I64) != (name == "cu_seqlens") {
            return Err(unsupported());
        }
        let (begin, end) = entry.data_offsets;
        self.source
            .seek(SeekFrom::Start(self.header.data + begin))
            .map_err(|e| file_error(self.path, e))?;
        let values = usize::try_from((end - begin) / dtype.bytes() as u64).map_err(|_| {
            Error::tensor(name, "a tensor that fits the address space", end - begin)
        })?;
        Ok((dtype, values))
    }

    /// Hands the next `bytes` to `f` in pieces that hold whole values.
    fn pieces(&mut self, bytes: usize, mut f: impl FnMut(&[u8])) -> Result<()> {
        let mut buffer = [0; PIECE];
        let mut left = bytes;
        while left > 0 {
            let piece = &mut buffer[..left.min(PIECE)];
            self.source
                .read_exact(piece)
                .map_err(|e| file_error(self.path, e))?;
            f(piece);
            left -= piece.len();
        }
        Ok(())
    }

    fn floats<F: Float>(&mut self, name: &str) -> Result<Vec<F>> {
        let (dtype, n) = self.find(name, "F32, F16, BF16 or F64")?;
        if dtype == F::DTYPE {
            let mut values = vec![F::zeroed(); n];
            self.source
                .read_exact(bytemuck::cast_slice_mut(&mut values))
                .map_err(|e| file_error(self.path, e))?;
            if cfg!(target_endian = "big") {
                for x in &mut values {
                    *x = x.with_native_bytes();
                }
            }
            return Ok(values);
        }
        let mut values = Vec::with_capacity(n);
        self.pieces(n * dtype.bytes(), |bytes| match dtype {
            Dtype::F16 => {
                values.extend(words(bytes).map(|b| F::from_f32(half::f16::from_le_bytes(b).into())))
            }
            Dtype::Bf16 => values
                .extend(words(bytes).map(|b| F::from_f32(half::bf16::from_le_bytes(b).into()))),
            Dtype::F32 => values.extend(words(bytes).map(|b| F::from_f32(f32::from_le_bytes(b)))),
            Dtype::F64 => values.extend(words(bytes).map(|b| F::from_f64(f64::from_le_bytes(b)))),
            // `find` refuses integers here.
            Dtype::I32 | Dtype::I64 => {}
        })?;
        Ok(values)
    }

    /// `expected_…`, where the file has it.
    fn expectation(&mut self, name: &str, allow_non_finite: bool) -> Result<Option<Vec<f64>>> {
        if !self.header.has(name) {
            return Ok(None);
        }
        let values = self.floats::<f64>(name)?;
        match values.iter().position(|x| !x.is_finite()) {
            Some(i) if !allow_non_finite => Err(Error::tensor(
                name,
                "finite values",
                format!("{} at position {i}", values[i]),
            )),
            _ => Ok(Some(values)),
        }
    }

    fn offsets(&mut self) -> Result<Vec<usize>> {
        let name = "cu_seqlens";
        self.header.dimensions::<1>(name, "[N + 1]")?;
        let (dtype, n) = self.find(name, "I32 or I64")?;
        let mut offsets = Vec::with_capacity(n);
        let mut bad = None;
        self.pieces(n * dtype.bytes(), |bytes| {
            let mut push = |x: i64| match usize::try_from(x) {
                Ok(x) => offsets.push(x),
                Err(_) => {
                    bad.get_or_insert((offsets.len(), x));
                }
            };
            match dtype {
                Dtype::I32 => words(bytes).for_each(|b| push(i32::from_le_bytes(b).into())),
                _ => words(bytes).for_each(|b| push(i64::from_le_bytes(b))),
            }
        })?;
        match bad {
            Some((i, x)) => Err(Error::tensor(
                name,
                "offsets that are not negative",
                format!("{x} at index {i}"),
            )),
            None => Ok(offsets),
        }
    }
}

/// The values of `N` bytes each in `bytes`.
fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks().0.iter().copied()
}

/// One tensor to be written.
#[derive(Debug, Clone)]
pub struct NamedTensor<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Shape; its product is the number of values.
    pub shape: Vec<usize>,
    /// Values, row-major.
    pub values: &'a [f32],
}

/// Writes float32 tensors and string metadata in the safetensors format.
///
/// # Errors
/// What `sink` returns.
pub fn write_to(
    mut sink: impl Write,
    tensors: &[NamedTensor<'_>],
    metadata: &BTreeMap<String, String>,
) -> std::io::Result<()> {
    let mut header = serde_json::Map::new();
    if !metadata.is_empty() {
        header.insert("__metadata__".into(), serde_json::json!(metadata));
    }
    let mut at = 0;
    for tensor in tensors {
        debug_assert_eq!(tensor.shape.iter().product::<usize>(), tensor.values.len());
        let end = at + size_of_val(tensor.values);
        let entry =
            serde_json::json!({"dtype": "F32", "shape": tensor.shape, "data_offsets": [at, end]});
        header.insert(tensor.name.into(), entry);
        at = end;
    }
    let mut header = serde_json::to_vec(&header)?;
    // The data begins at a multiple of 8 bytes, so that a mapped file can be read in place.
    header.resize(header.len().next_multiple_of(8), b' ');
    sink.write_all(&(header.len() as u64).to_le_bytes())?;
    sink.write_all(&header)?;
    for tensor in tensors {
        if cfg!(target_endian = "little") {
            sink.write_all(bytemuck::cast_slice(tensor.values))?;
        } else {
            for x in tensor.values {
                sink.write_all(&x.to_le_bytes())?;
            }
        }
    }
    sink.flush()
}

/// `[B, T, HV, V]`.
fn output_shape(problem: &Problem) -> Vec<usize> {
    vec![
        problem.batch,
        problem.tokens,
        problem.value_heads,
        problem.value_dim,
    ]
}
