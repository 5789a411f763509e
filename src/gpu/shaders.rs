//! The shader sources and how a pass is put together from them.
//!
//! A pass is the concatenation of a few files of `shaders/`, chosen by element type and by which operands
//! the rule has; everything else is override constants. The same text goes to every backend and browser.

use super::matrix::{MatrixShape, MatrixUnits};
use crate::engine::Element;
use crate::error::Result;
use crate::problem::{Decay, DecayGate, GateForm, Operand, Problem};
use crate::rule::{Content, DecayKind, Gate, Vector};

/// A compute pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Gathers the gates into scratch memory.
    Pack,
    /// Prefill 1: decayed rows.
    Rows,
    /// Prefill 2: the triangle `L` and the masked queries `A`.
    Pairs,
    /// Prefill 3: `(I + L)^-1`.
    Solve,
    /// Prefill 4: what a chunk does to the state.
    Fold,
    /// Prefill 5: the states and outputs.
    Scan,
    /// Decode.
    Decode,
    /// Matrix tier, prefill 1: decayed rows, `L` and `A`.
    MatrixPairs,
    /// Matrix tier, prefill 2: what a chunk does to the state.
    MatrixSolve,
    /// Matrix tier, prefill 3: the states and outputs.
    MatrixScan,
}

impl Pass {
    /// Every pass.
    pub const ALL: [Pass; 10] = [
        Pass::Pack,
        Pass::Rows,
        Pass::Pairs,
        Pass::Solve,
        Pass::Fold,
        Pass::Scan,
        Pass::Decode,
        Pass::MatrixPairs,
        Pass::MatrixSolve,
        Pass::MatrixScan,
    ];

    /// Whether it runs on matrix units.
    pub fn is_matrix(self) -> bool {
        matches!(
            self,
            Pass::MatrixPairs | Pass::MatrixSolve | Pass::MatrixScan
        )
    }

    /// Name of the file that holds the entry point `main`.
    pub fn name(self) -> &'static str {
        match self {
            Pass::Pack => "pack",
            Pass::Rows => "prefill_rows",
            Pass::Pairs => "prefill_pairs",
            Pass::Solve => "prefill_solve",
            Pass::Fold => "prefill_fold",
            Pass::Scan => "prefill_scan",
            Pass::Decode => "decode",
            Pass::MatrixPairs => "matrix_pairs",
            Pass::MatrixSolve => "matrix_solve",
            Pass::MatrixScan => "matrix_scan",
        }
    }
}

/// Which text a pass is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Storage type of inputs and outputs.
    pub element: Element,
    /// The pass reads the rule's second own operand.
    pub second: bool,
    /// The pass reads gates.
    pub gates: bool,
    /// Inputs share a buffer with something that is written, so that every binding must be `read_write`.
    pub shared: bool,
    /// Edge of the matrix units' tiles; 0 for passes that use none.
    pub edge: usize,
}

/// Binding numbers in group 0, the same in every pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Binding {
    /// `Params`, uniform.
    Params = 0,
    /// Chunks and pieces (storage), or the rows of a decode batch (uniform).
    Table = 1,
    /// `q`; the source of [`Pass::Pack`].
    Q = 2,
    /// `k`.
    K = 3,
    /// The rule's own vector.
    X1 = 4,
    /// The rule's second own operand.
    X2 = 5,
    /// `g`.
    G = 6,
    /// The gates.
    Gates = 7,
    /// `v`.
    V = 8,
    /// `o`.
    O = 9,
    /// `initial_state`.
    Initial = 10,
    /// The states.
    State = 11,
    /// Scratch memory; of the matrix tier, its float32 part.
    Scratch = 12,
    /// The float16 part of the matrix tier's scratch memory.
    Halves = 13,
}

/// What a pass does with a binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Uniform buffer.
    Uniform,
    /// Storage buffer, only read.
    Read,
    /// Storage buffer, written.
    Write,
}

/// The bindings of a pass.
pub fn bindings(pass: Pass, variant: Variant) -> Vec<(Binding, Access)> {
    use Access::{Read, Uniform, Write};
    let mut out = vec![(Binding::Params, Uniform)];
    let mut add = |list: &[(Binding, Access)]| out.extend_from_slice(list);
    let keys = [
        (Binding::Q, Read),
        (Binding::K, Read),
        (Binding::X1, Read),
        (Binding::G, Read),
    ];
    match pass {
        Pass::Pack => add(&[(Binding::Q, Read), (Binding::Scratch, Write)]),
        Pass::Rows | Pass::Pairs => {
            add(&[(Binding::Table, Read)]);
            add(&keys);
            add(&[(Binding::Scratch, Write)]);
        }
        Pass::MatrixPairs => {
            add(&[(Binding::Table, Read)]);
            add(&keys);
            add(&[(Binding::Scratch, Write), (Binding::Halves, Write)]);
        }
        Pass::MatrixSolve => add(&[
            (Binding::Table, Read),
            (Binding::Scratch, Write),
            (Binding::Halves, Write),
        ]),
        Pass::MatrixScan => add(&[
            (Binding::Table, Read),
            (Binding::V, Read),
            (Binding::Initial, Read),
            (Binding::O, Write),
            (Binding::State, Write),
            (Binding::Scratch, Read),
            (Binding::Halves, Read),
        ]),
        Pass::Solve | Pass::Fold => add(&[(Binding::Table, Read), (Binding::Scratch, Write)]),
        Pass::Scan => add(&[
            (Binding::Table, Read),
            (Binding::V, Read),
            (Binding::Initial, Read),
            (Binding::O, Write),
            (Binding::State, Write),
            (Binding::Scratch, Read),
        ]),
        Pass::Decode => {
            add(&[(Binding::Table, Uniform)]);
            add(&keys);
            add(&[
                (Binding::V, Read),
                (Binding::O, Write),
                (Binding::State, Write),
            ]);
        }
    }
    if variant.second {
        out.push((Binding::X2, Read));
    }
    if variant.gates {
        out.push((Binding::Gates, Read));
    }
    out
}

macro_rules! part {
    ($name:literal) => {
        include_str!(concat!("../../shaders/", $name, ".wgsl"))
    };
}

/// The WGSL text of a pass; its entry point is `main`.
pub fn source(pass: Pass, variant: Variant) -> String {
    let element = match variant.element {
        Element::F32 => part!("element_f32"),
        Element::F16 => part!("element_f16"),
    };
    let second = if variant.second {
        part!("second")
    } else {
        part!("no_second")
    };
    let gates = if variant.gates {
        part!("gates")
    } else {
        part!("no_gates")
    };
    let (params, keys, layer, rule, chunk) = (
        part!("params"),
        part!("keys"),
        part!("layer"),
        part!("rule"),
        part!("chunk"),
    );
    let (values, outputs, content) = (part!("values"), part!("outputs"), part!("content"));
    let (matrix, tile, matrix_chunk) = (
        part!("matrix"),
        match variant.edge {
            8 => part!("matrix_tile_8"),
            _ => part!("matrix_tile_16"),
        },
        part!("matrix_chunk"),
    );
    let parts = match pass {
        Pass::MatrixPairs => vec![
            matrix,
            element,
            tile,
            params,
            layer,
            keys,
            second,
            gates,
            rule,
            matrix_chunk,
            part!("matrix_pairs"),
        ],
        Pass::MatrixSolve => vec![matrix, tile, params, matrix_chunk, part!("matrix_solve")],
        Pass::MatrixScan => vec![
            matrix,
            element,
            tile,
            params,
            second,
            values,
            outputs,
            content,
            matrix_chunk,
            part!("matrix_scan"),
        ],
        Pass::Pack => vec![params, part!("pack")],
        Pass::Rows => vec![
            element,
            params,
            layer,
            keys,
            second,
            gates,
            rule,
            chunk,
            part!("prefill_rows"),
        ],
        Pass::Pairs => vec![
            element,
            params,
            layer,
            keys,
            second,
            gates,
            rule,
            chunk,
            part!("prefill_pairs"),
        ],
        Pass::Solve => vec![params, chunk, part!("prefill_solve")],
        Pass::Fold => vec![params, chunk, part!("prefill_fold"), part!("product")],
        Pass::Scan => vec![
            element,
            params,
            second,
            values,
            outputs,
            content,
            chunk,
            part!("prefill_scan"),
            part!("product"),
        ],
        Pass::Decode => vec![
            element,
            params,
            layer,
            keys,
            second,
            gates,
            values,
            outputs,
            rule,
            content,
            part!("decode"),
        ],
    };
    let text = parts.join("\n");
    if !variant.shared {
        return text;
    }
    // The table is always a buffer of ours and stays read-only, which keeps loop bounds uniform.
    text.lines()
        .map(|line| {
            if line.contains("> table:") {
                line.to_owned()
            } else {
                line.replace("<storage, read>", "<storage, read_write>")
            }
        })
        .collect::<Vec<_>>()
        .join("\n")
}

/// Writes out the loops marked `// unrolled`, whose bounds are named in `bounds`: drivers keep an array of
/// cooperative matrices in registers only where every index is a constant, and do not unroll such loops themselves.
///
/// A marked loop reads `for (var i = 0u; i < BOUND; i++) {  // unrolled`, starts a line and ends with a line of its own.
pub fn unroll(text: &str, bounds: &[(&'static str, usize)]) -> String {
    let mut out = String::with_capacity(2 * text.len());
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some((name, count)) = unrolled_loop(line, bounds) else {
            out.push_str(line);
            out.push('\n');
            continue;
        };
        let mut depth = 1;
        let mut body = String::new();
        for inner in lines.by_ref() {
            depth += inner.matches('{').count();
            depth -= inner.matches('}').count();
            if depth == 0 {
                break;
            }
            body.push_str(inner);
            body.push('\n');
        }
        let body = unroll(&body, bounds);
        for i in 0..count {
            out.push_str("{\n");
            out.push_str(&replace_word(&body, name, &format!("{i}u")));
            out.push_str("}\n");
        }
    }
    out
}

/// The counter and the number of iterations of a loop to be written out.
fn unrolled_loop<'a>(line: &'a str, bounds: &[(&'static str, usize)]) -> Option<(&'a str, usize)> {
    let head = line.trim().strip_suffix("// unrolled")?.trim_end();
    let head = head.strip_prefix("for (var ")?.strip_suffix("++) {")?;
    let (name, rest) = head.split_once(" = 0u; ")?;
    let bound = rest.split_once(" < ")?.1.split_once("; ")?.0;
    let count = bounds.iter().find(|(b, _)| *b == bound)?.1;
    Some((name, count))
}

fn replace_word(text: &str, word: &str, with: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let part_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    while let Some(at) = rest.find(word) {
        let (before, after) = (&rest[..at], &rest[at + word.len()..]);
        // (A member or a component, `v.x`, is no counter.)
        let whole =
            !before.ends_with(|c| part_of_name(c) || c == '.') && !after.starts_with(part_of_name);
        out.push_str(before);
        out.push_str(if whole { with } else { word });
        rest = after;
    }
    out + rest
}

/// Which operands take the two rule-specific bindings.
pub fn own_operands(problem: &Problem) -> (Option<Operand>, Option<Operand>) {
    let used = |o: &Operand| problem.uses(*o);
    if problem.uses(Operand::A) {
        return (Some(Operand::A), Some(Operand::B));
    }
    let first = [Operand::E, Operand::P, Operand::B].into_iter().find(used);
    (first, Some(Operand::W).filter(used))
}

/// Whether the rule, in this form, reads gates.
pub fn reads_gates(problem: &Problem) -> bool {
    [Operand::Beta, Operand::Gamma, Operand::ALog]
        .into_iter()
        .any(|o| problem.uses(o))
}

/// Whether a pass needs the second own operand: RWKV-7's `b` is a key-side vector, GDN-2's `w` belongs to
/// the values.
pub fn reads_second(problem: &Problem, pass: Pass) -> bool {
    match own_operands(problem).1 {
        Some(Operand::B) => touches_rule(pass),
        Some(_) => touches_contents(pass),
        None => false,
    }
}

/// Whether a pass reads the keys' side of the inputs.
fn touches_rule(pass: Pass) -> bool {
    matches!(
        pass,
        Pass::Rows | Pass::Pairs | Pass::Decode | Pass::MatrixPairs
    )
}

/// Whether a pass reads the values' side.
fn touches_contents(pass: Pass) -> bool {
    matches!(pass, Pass::Scan | Pass::Decode | Pass::MatrixScan)
}

/// The text that a pass needs for a rule in this form, on slices that share no buffer with what is written.
/// `edge` is that of the matrix units' tiles, for the passes that use them.
pub fn variant(pass: Pass, problem: &Problem, element: Element, edge: usize) -> Variant {
    Variant {
        // Passes over scratch memory alone are the same for every element type.
        element: if touches_rule(pass) || touches_contents(pass) {
            element
        } else {
            Element::F32
        },
        second: reads_second(problem, pass),
        gates: touches_rule(pass) && reads_gates(problem),
        shared: false,
        edge: if pass.is_matrix() { edge } else { 0 },
    }
}

/// How the chunked passes cut the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChunkShape {
    /// Tokens a chunk, `C`.
    pub tokens: usize,
    /// Sub-steps a chunk, `R = n C`.
    pub substeps: usize,
    /// `K` rounded up to a multiple of 16.
    pub key_pad: usize,
    /// Value columns a workgroup of the scan.
    pub columns: usize,
    /// Key channels a workgroup of the fold.
    pub fold_channels: usize,
    /// float32 words of scratch memory for one chunk of one head.
    pub stride: usize,
    /// On matrix units: how their passes cut the work. (Columns and channels above are then not used.)
    pub matrix: Option<MatrixShape>,
}

impl ChunkShape {
    /// The shape for chunks of `tokens`; `None` where the scan's tiles do not fit 16 KiB.
    pub fn new(problem: &Problem, tokens: usize) -> Option<Self> {
        let update = problem.rule.update();
        let substeps = update.substeps() * tokens;
        let key_pad = problem.key_dim.next_multiple_of(16);
        if substeps > 256 {
            return None;
        }
        // S, Z and U, in float32, in the 16 KiB of workgroup memory that every device grants.
        let columns = [32, 16, 8, 4]
            .into_iter()
            .find(|columns| (key_pad + 2 * substeps) * columns <= 4096)?;
        let fold_channels = [32, 16, 8]
            .into_iter()
            .find(|channels| substeps * channels <= 2048)?;
        Some(Self {
            tokens,
            substeps,
            key_pad,
            columns,
            fold_channels,
            stride: (2 * substeps + tokens + 1) * key_pad
                + substeps * (substeps + tokens)
                + (2 + update.factors) * tokens,
            matrix: None,
        })
    }

    /// The shape for chunks of `tokens` on matrix units.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] where the passes do not fit the device.
    pub fn on_matrix_units(
        problem: &Problem,
        tokens: usize,
        units: MatrixUnits,
        limits: &wgpu::Limits,
    ) -> Result<Self> {
        let matrix = MatrixShape::new(problem, tokens, units, limits)?;
        Ok(Self {
            tokens,
            substeps: problem.rule.update().substeps() * tokens,
            key_pad: problem.key_dim.next_multiple_of(16),
            columns: matrix.columns,
            fold_channels: 0,
            stride: matrix.floats + matrix.halves,
            matrix: Some(matrix),
        })
    }
}

/// Most loop iterations that one invocation of any pass runs through, unless a driver is known to be sound.
/// Mesa's software rasteriser ends every loop of an invocation, silently, once it has counted 65,535
/// iterations in all of them.
pub const MAX_ITERATIONS: usize = 60_000;

/// No fewer loop iterations than an invocation of the scan needs for a chunk: each innermost one makes a
/// multiply-add over four columns at least, and what is around them costs less than they do.
pub fn scan_iterations(shape: &ChunkShape) -> usize {
    let (r, c, kp) = (shape.substeps, shape.tokens, shape.key_pad);
    if let Some(matrix) = &shape.matrix {
        return matrix.scan_iterations(c, r, kp);
    }
    let down = 128 / (shape.columns / 4);
    let rows = (r + c).div_ceil(down) * (kp + r);
    let state = kp.div_ceil(4 * down) * 4 * r;
    2 * (rows + state) + 64
}

/// The same for a token in decode.
pub fn decode_iterations(problem: &Problem) -> usize {
    let factors = problem.rule.update().factors;
    let norms = (2 + factors) * (problem.key_dim / 16 + 20);
    64 + norms + factors * (2 * problem.key_dim.next_multiple_of(16) + 128)
}

/// Override constants of a pass.
pub fn constants(
    pass: Pass,
    problem: &Problem,
    chunk: Option<&ChunkShape>,
) -> Vec<(&'static str, f64)> {
    let update = problem.rule.update();
    let mut out: Vec<(&'static str, f64)> = vec![
        ("K", problem.key_dim as f64),
        ("V", problem.value_dim as f64),
        ("PATTERN", update.pattern.len() as f64),
        ("FACTORS", update.factors as f64),
    ];
    if pass == Pass::Pack {
        return Vec::new();
    }
    let first = update.pattern[0];
    let second = *update.pattern.last().unwrap_or(&first);
    if touches_rule(pass) {
        let vector = |v: Vector| match v {
            Vector::K => 1.0,
            Vector::E => 2.0,
            Vector::P => 3.0,
            Vector::MinusA => 4.0,
            Vector::B => 5.0,
            Vector::BTimesK => 6.0,
        };
        let gate = |g: Gate| match g {
            Gate::One => 0.0,
            Gate::Beta => 1.0,
            Gate::Gamma => 2.0,
        };
        let form = |f: GateForm| match f {
            GateForm::Value => 0.0,
            GateForm::Sigmoid => 1.0,
            GateForm::TwiceSigmoid => 2.0,
        };
        let decay = match update.decay {
            DecayKind::None => 0.0,
            _ if problem.decay_per_head => 1.0,
            _ => 2.0,
        };
        let decay_form = match problem.decay {
            Decay::Log => 0.0,
            Decay::Gate(DecayGate::Safe { .. }) => 1.0,
            Decay::Gate(DecayGate::Sigmoid { .. }) => 2.0,
            Decay::Gate(DecayGate::Softplus) => 3.0,
        };
        let undecayed = first.read.is_some_and(|r| r.undecayed);
        out.extend([
            ("WRITE_0", vector(first.write)),
            ("WRITE_1", vector(second.write)),
            ("READ_0", first.read.map_or(0.0, |r| vector(r.vector))),
            ("READ_1", second.read.map_or(0.0, |r| vector(r.vector))),
            ("GATE_0", gate(first.gate)),
            ("GATE_1", gate(second.gate)),
            ("UNDECAYED", f64::from(u8::from(undecayed))),
            ("DECAY", decay),
            ("DECAY_FORM", decay_form),
            ("BETA_FORM", form(problem.beta)),
            ("GAMMA_FORM", form(problem.gamma)),
            ("NORMALIZE", f64::from(u8::from(problem.normalize))),
        ]);
    }
    if touches_contents(pass) {
        let content = |c: Content| match c {
            Content::Zero => 0.0,
            Content::V => 1.0,
            Content::WTimesV => 2.0,
        };
        out.extend([
            ("CONTENT_0", content(first.content)),
            ("CONTENT_1", content(second.content)),
        ]);
    }
    if let Some((chunk, matrix)) = chunk.and_then(|c| Some((c, c.matrix?))) {
        out.extend(matrix.constants(pass, chunk.tokens, chunk.substeps, chunk.key_pad));
        return out;
    }
    if let Some(chunk) = chunk.filter(|_| pass != Pass::Decode) {
        out.extend([
            ("C", chunk.tokens as f64),
            ("R", chunk.substeps as f64),
            ("KP", chunk.key_pad as f64),
        ]);
        if pass == Pass::Scan {
            out.push(("VB", chunk.columns as f64));
        }
        if pass == Pass::Fold {
            out.push(("FB", chunk.fold_channels as f64));
        }
    }
    if pass == Pass::Decode {
        let groups = DECODE_THREADS / DECODE_COLUMNS;
        out.extend([
            ("THREADS", DECODE_THREADS as f64),
            ("COLUMNS", DECODE_COLUMNS as f64),
            (
                "KG",
                problem.key_dim.div_ceil(groups).next_multiple_of(4) as f64,
            ),
        ]);
    }
    out
}

/// Threads of a decode workgroup.
pub const DECODE_THREADS: usize = 128;
/// Value columns that a decode workgroup covers.
pub const DECODE_COLUMNS: usize = 32;
