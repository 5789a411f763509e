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
    /// Prefill 1: decayed rows, the triangle `L` and the masked queries `A`.
    Pairs,
    /// Prefill 2: `(I + L)^-1`.
    Solve,
    /// Prefill 3: what a chunk does to the state.
    Fold,
    /// Prefill 4: the states and outputs; before that, where there are segments, what they do to any state.
    Scan,
    /// Prefill, where there are segments, in either tier: the states in which they start.
    Join,
    /// Decode.
    Decode,
    /// Matrix tier, prefill 1: decayed rows, `(I + L)^-1` and `A (I + L)^-1`.
    MatrixPairs,
    /// Matrix tier, prefill 2: the states and outputs.
    MatrixScan,
    /// The same where workgroups are many, see [`MatrixShape::wide`].
    MatrixScanWide,
}

impl Pass {
    /// Every pass.
    pub const ALL: [Pass; 10] = [
        Pass::Pack,
        Pass::Pairs,
        Pass::Solve,
        Pass::Fold,
        Pass::Scan,
        Pass::Join,
        Pass::Decode,
        Pass::MatrixPairs,
        Pass::MatrixScan,
        Pass::MatrixScanWide,
    ];

    /// Whether it runs on matrix units.
    pub fn is_matrix(self) -> bool {
        matches!(
            self,
            Pass::MatrixPairs | Pass::MatrixScan | Pass::MatrixScanWide
        )
    }

    /// Name of the file that holds the entry point `main`.
    pub fn name(self) -> &'static str {
        match self {
            Pass::Pack => "pack",
            Pass::Pairs => "prefill_pairs",
            Pass::Solve => "prefill_solve",
            Pass::Fold => "prefill_fold",
            Pass::Scan => "prefill_scan",
            Pass::Join => "prefill_join",
            Pass::Decode => "decode",
            Pass::MatrixPairs => "matrix_pairs",
            Pass::MatrixScan => "matrix_scan",
            Pass::MatrixScanWide => "matrix_scan_wide",
        }
    }
}

/// Which text a pass is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Storage type of inputs and outputs.
    pub element: Element,
    /// Storage type of the states in decode.
    pub state: Element,
    /// The pass reads the rule's second own operand.
    pub second: bool,
    /// The pass reads gates.
    pub gates: bool,
    /// Inputs share a buffer with something that is written, so that every binding must be `read_write`.
    pub shared: bool,
    /// The keys' side, or that of the values, is read (and written) four elements at a time; in decode the keys' side, and
    /// the states two: see [`can_read_by_four`].
    pub by_four: bool,
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
        Pass::Pairs => {
            add(&[(Binding::Table, Read)]);
            add(&keys);
            add(&[(Binding::Scratch, Write)]);
        }
        Pass::MatrixPairs => {
            add(&[(Binding::Table, Read)]);
            add(&keys);
            add(&[(Binding::Scratch, Write), (Binding::Halves, Write)]);
        }
        Pass::MatrixScan | Pass::MatrixScanWide => add(&[
            (Binding::Table, Read),
            (Binding::V, Read),
            (Binding::Initial, Read),
            (Binding::O, Write),
            (Binding::State, Write),
            // (Only read, see the shader.)
            (Binding::Scratch, Write),
            (Binding::Halves, Write),
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
        Pass::Join => add(&[
            (Binding::Table, Read),
            (Binding::Initial, Read),
            (Binding::State, Read),
            (Binding::Scratch, Write),
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

/// The same for the matrix tier, which no browser has.
macro_rules! matrix_part {
    ($name:literal) => {
        if cfg!(target_arch = "wasm32") {
            ""
        } else {
            part!($name)
        }
    };
}

/// The WGSL text of a pass; its entry point is `main`.
pub fn source(pass: Pass, variant: Variant) -> String {
    let element = match variant.element {
        Element::F32 => part!("element_f32"),
        Element::F16 => part!("element_f16"),
    };
    let second = match (variant.second, variant.by_four) {
        (true, true) => part!("second_by_four"),
        (true, false) => part!("second"),
        (false, _) => part!("no_second"),
    };
    let keys = if variant.by_four {
        part!("keys_by_four")
    } else {
        part!("keys")
    };
    let gates = if variant.gates {
        part!("gates")
    } else {
        part!("no_gates")
    };
    let (params, layer, rule, chunk) = (
        part!("params"),
        part!("layer"),
        part!("rule"),
        part!("chunk"),
    );
    // (A thread of decode has two columns.)
    let (values, outputs) = if variant.by_four && pass != Pass::Decode {
        (part!("values_by_four"), part!("outputs_by_four"))
    } else {
        (part!("values"), part!("outputs"))
    };
    let content = part!("content");
    let norms = part!("norms");
    let (matrix, tile, matrix_chunk) = (
        matrix_part!("matrix"),
        match variant.edge {
            8 => matrix_part!("matrix_tile_8"),
            _ => matrix_part!("matrix_tile_16"),
        },
        matrix_part!("matrix_chunk"),
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
            norms,
            matrix_part!("matrix_pairs"),
            matrix_part!("matrix_solve"),
        ],
        Pass::MatrixScan | Pass::MatrixScanWide => vec![
            matrix,
            element,
            tile,
            params,
            second,
            values,
            outputs,
            content,
            matrix_chunk,
            matrix_part!("matrix_scan_common"),
            if pass == Pass::MatrixScan {
                matrix_part!("matrix_scan")
            } else {
                matrix_part!("matrix_scan_wide")
            },
        ],
        Pass::Pack => vec![params, part!("pack")],
        Pass::Pairs => vec![
            element,
            params,
            layer,
            keys,
            second,
            gates,
            rule,
            chunk,
            norms,
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
        Pass::Join => vec![params, part!("prefill_join")],
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
            match variant.state {
                Element::F32 => part!("state_f32"),
                Element::F16 => part!("state_f16"),
            },
            if variant.by_four {
                part!("columns_side_by_side")
            } else {
                part!("columns_apart")
            },
            norms,
            part!("decode"),
        ],
    };
    let mut text = parts.join("\n");
    if variant.state == Element::F16 && variant.element == Element::F32 {
        text.insert_str(0, "enable f16;\n");
    }
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

/// Writes out the loops marked `// unrolled`, whose bounds are numbers or named in `bounds`: drivers keep an array of
/// cooperative matrices in registers only where every index is a constant, and do not unroll such loops themselves.
///
/// A marked loop reads `for (var i = 0u; i < BOUND; i++) {  // unrolled`, starts a line and ends with a line of its own.
/// One that reads `for (var once = 0u; once < u32(CONDITION); once++) {  // if` becomes a condition.
pub fn unroll(text: &str, bounds: &[(&'static str, usize)]) -> String {
    let mut out = String::with_capacity(2 * text.len());
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(condition) = loop_once(line) {
            out.push_str(&format!("if ({condition}) {{\n"));
            continue;
        }
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
    let named = || bounds.iter().find(|(b, _)| *b == bound).map(|(_, n)| *n);
    let number = bound.strip_suffix('u').and_then(|n| n.parse().ok());
    Some((name, number.or_else(named)?))
}

/// The condition of a loop that runs once or not at all, which depends on counters that are numbers by now.
fn loop_once(line: &str) -> Option<&str> {
    let head = line.trim().strip_suffix("// if")?.trim_end();
    head.strip_prefix("for (var once = 0u; once < u32(")?
        .strip_suffix("); once++) {")
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
    matches!(pass, Pass::Pairs | Pass::Decode | Pass::MatrixPairs)
}

/// Whether a pass reads the values' side.
fn touches_contents(pass: Pass) -> bool {
    matches!(
        pass,
        Pass::Scan | Pass::Decode | Pass::MatrixScan | Pass::MatrixScanWide
    )
}

/// Whether a pass has a text that reads the keys' or the values' side four elements at a time ([`Variant::by_four`]). It
/// also takes bindings in which each operand of that side starts at a multiple of four elements, and ends at one; in
/// decode, states at a multiple of two.
pub fn can_read_by_four(pass: Pass, problem: &Problem) -> bool {
    match pass {
        Pass::Pairs | Pass::MatrixPairs => problem.key_dim.is_multiple_of(4),
        Pass::Scan | Pass::MatrixScan | Pass::MatrixScanWide => problem.value_dim.is_multiple_of(4),
        Pass::Decode => problem.key_dim.is_multiple_of(4) && problem.value_dim.is_multiple_of(2),
        _ => false,
    }
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
        state: Element::F32,
        second: reads_second(problem, pass),
        gates: touches_rule(pass) && reads_gates(problem),
        shared: false,
        by_four: false,
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
    /// Sub-steps of a chunk that have a content.
    pub contents: usize,
    /// `K` rounded up to a multiple of 16.
    pub key_pad: usize,
    /// Value columns a workgroup of the scan.
    pub columns: usize,
    /// Rows of `[S; Z]`, or of what takes its place, in the scan's workgroup memory.
    pub shared_rows: usize,
    /// Key channels a workgroup of the fold.
    pub fold_channels: usize,
    /// Words at the end of them that are only there to be read in vain.
    pub tail: usize,
    /// float32 words of scratch memory for one chunk of one head.
    pub stride: usize,
    /// On matrix units: how their passes cut the work. (Columns and channels above are then not used.)
    pub matrix: Option<MatrixShape>,
}

/// Threads of a workgroup of the scan.
const SCAN_THREADS: usize = 256;
/// Float words in the 16 KiB of workgroup memory that every device grants.
const WORKGROUP_WORDS: usize = 4096;

impl ChunkShape {
    /// The shape for chunks of `tokens`; `None` where the tiles do not fit 16 KiB.
    pub fn new(problem: &Problem, tokens: usize) -> Option<Self> {
        let update = problem.rule.update();
        let substeps = update.substeps() * tokens;
        let (stride, _) = content_steps(problem);
        let contents = substeps / stride;
        let key_pad = problem.key_dim.next_multiple_of(16);
        if substeps > 256 {
            return None;
        }
        let rows = substeps + tokens;
        let (columns, shared_rows) = [16, 8, 4].into_iter().find_map(|columns| {
            let (rows, state) = scan_tiles(columns, rows, key_pad);
            // What is exchanged: every second row.
            let exchanged = rows.max(state).div_ceil(2) * SCAN_THREADS * 4 / columns;
            let shared = exchanged.max(key_pad + contents);
            let fits = (shared + substeps) * columns <= WORKGROUP_WORDS;
            (fits && rows <= 8).then_some((columns, shared))
        })?;
        // What the scan's last tile of channels reads past its end.
        let past = (key_pad.next_multiple_of(SCAN_THREADS * 2 / columns) - key_pad) * 4;
        let tail = past.saturating_sub(key_pad);
        Some(Self {
            tokens,
            substeps,
            contents,
            key_pad,
            columns,
            shared_rows,
            fold_channels: if substeps > 128 { 16 } else { 32 },
            stride: rows * (substeps + key_pad + contents) + substeps * key_pad + key_pad + tail,
            tail,
            matrix: None,
        })
    }

    /// The shape for chunks of `tokens` on matrix units, see [`MatrixShape::new`].
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] where the passes do not fit the device.
    pub fn on_matrix_units(
        problem: &Problem,
        tokens: usize,
        units: MatrixUnits,
        limits: &wgpu::Limits,
        width: usize,
    ) -> Result<Self> {
        let update = problem.rule.update();
        let matrix = MatrixShape::new(problem, tokens, units, limits, width)?;
        Ok(Self {
            tokens,
            substeps: update.substeps() * tokens,
            contents: update.factors * tokens,
            key_pad: problem.key_dim.next_multiple_of(16),
            columns: matrix.columns,
            shared_rows: 0,
            fold_channels: 0,
            tail: 0,
            stride: matrix.stride(),
            matrix: Some(matrix),
        })
    }
}

/// Rows of a thread of the scan in its first product, of four parts, and in its second, of two.
fn scan_tiles(columns: usize, rows: usize, key_pad: usize) -> (usize, usize) {
    let down = SCAN_THREADS / (columns / 4);
    (rows.div_ceil(down / 4), key_pad.div_ceil(down / 2))
}

/// Which sub-steps have a content, as `(stride, offset)`: those numbered `stride · j + offset`.
fn content_steps(problem: &Problem) -> (usize, usize) {
    let update = problem.rule.update();
    let has = |i: usize| update.pattern[i].content != Content::Zero;
    match update.pattern.len() {
        2 if !has(0) => (2, 1),
        2 if !has(1) => (2, 0),
        _ => (1, 0),
    }
}

/// Most loop iterations that one invocation of any pass runs through, unless a driver is known to be sound.
/// Mesa's software rasteriser ends every loop of an invocation, silently, once it has counted 65,535
/// iterations in all of them.
pub const MAX_ITERATIONS: usize = 60_000;

/// No fewer loop iterations than an invocation of the scan needs for a chunk: for every step of its two products
/// one to load and one to multiply a tile, and what is around them.
pub fn scan_iterations(shape: &ChunkShape) -> usize {
    if let Some(matrix) = &shape.matrix {
        return matrix.scan_iterations();
    }
    192 + (shape.key_pad + shape.contents) / 16 + shape.substeps / 8
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
    variant: Variant,
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
    match pass {
        Pass::Pack => return Vec::new(),
        Pass::Join => {
            let threads = problem.key_dim.next_multiple_of(64);
            out.push(("THREADS", threads as f64));
            return out;
        }
        _ => {}
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
    if let Some(matrix) = chunk.and_then(|c| c.matrix) {
        out.extend(matrix.constants(pass));
        return out;
    }
    if let Some(chunk) = chunk.filter(|_| pass != Pass::Decode) {
        out.extend([
            ("C", chunk.tokens as f64),
            ("R", chunk.substeps as f64),
            ("KP", chunk.key_pad as f64),
            ("FB", chunk.fold_channels as f64),
            ("TAIL", chunk.tail as f64),
        ]);
        let (stride, offset) = content_steps(problem);
        out.extend([
            ("CONTENT_STRIDE", stride as f64),
            ("CONTENT_OFFSET", offset as f64),
        ]);
        match pass {
            Pass::Pairs => out.extend(pairs_constants(problem, chunk)),
            Pass::Solve => out.extend(solve_constants(chunk)),
            Pass::Scan => {
                out.extend([
                    ("VB", chunk.columns as f64),
                    ("SHARED", chunk.shared_rows as f64),
                ]);
            }
            _ => {}
        }
    }
    if pass == Pass::Decode {
        let columns = decode_columns(variant);
        let channels = problem.key_dim.div_ceil(DECODE_GROUPS);
        out.extend([
            ("THREADS", (columns / 2 * DECODE_GROUPS) as f64),
            ("COLUMNS", columns as f64),
            ("KG", channels.next_multiple_of(4) as f64),
        ]);
    }
    out
}

/// Rows (reads and the query) and columns (writes) of a token that one workgroup of [`Pass::Pairs`] takes, and
/// how many workgroups it takes for all of them, for chunks of `tokens`.
fn pairs_groups(problem: &Problem, tokens: usize) -> [(usize, usize); 2] {
    let n = problem.rule.update().substeps();
    // Two columns of 64 tokens would not fit workgroup memory beside three rows.
    let columns = if tokens > 32 { 1 } else { n.min(2) };
    [
        ((n + 1).min(3), (n + 1).div_ceil(3)),
        (columns, n.div_ceil(columns)),
    ]
}

/// Workgroups of [`Pass::Pairs`] for one chunk of one head.
pub fn pairs_workgroups(problem: &Problem, chunk: &ChunkShape) -> usize {
    pairs_groups(problem, chunk.tokens)
        .iter()
        .map(|(_, groups)| groups)
        .product()
}

fn pairs_constants(problem: &Problem, chunk: &ChunkShape) -> Vec<(&'static str, f64)> {
    let c = chunk.tokens;
    let [(rows, row_groups), (columns, column_groups)] = pairs_groups(problem, c);
    let levels = c.ilog2() as usize - 1;
    let mut out = vec![
        ("LEVELS", levels as f64),
        ("RV", rows as f64),
        ("CV", columns as f64),
        ("ROW_GROUPS", row_groups as f64),
        ("COLUMN_GROUPS", column_groups as f64),
    ];
    if !problem.normalize {
        out.extend([("NORM_COUNT", 1.0), ("NORM_PARTS", 1.0)]);
    }
    out
}

/// Where [`Pass::Solve`] keeps `L` and `A`: in workgroup memory as far as they fit.
fn solve_constants(chunk: &ChunkShape) -> Vec<(&'static str, f64)> {
    let quads = chunk.substeps / 4;
    // Rows of A above the first that sees a column, for every four columns. (What is more is zeros.)
    let skip = if chunk.substeps == 2 * chunk.tokens {
        2
    } else {
        0
    };
    let words = |rows: usize, skip: usize| {
        quads * (chunk.substeps + rows) - (4 + skip) / 2 * quads * (quads - 1)
    };
    let (rows, skip, words) = match words(chunk.tokens, skip) {
        _ if chunk.substeps > 64 => (0, 0, 1),
        both if both * 4 <= WORKGROUP_WORDS => (chunk.tokens, skip, both),
        _ => (0, 0, words(0, 0)),
    };
    vec![
        ("IN_WORKGROUP", f64::from(u8::from(words > 1))),
        ("A_IN_WORKGROUP", f64::from(u8::from(rows > 0))),
        ("A_ROWS", rows as f64),
        ("A_SKIP", skip as f64),
        ("WORDS", words as f64),
    ]
}

/// Value columns that a decode workgroup covers, two a thread: fewer where one load takes both, as timed fastest
/// (`benches/NOTES.md`).
pub fn decode_columns(variant: Variant) -> usize {
    if variant.by_four { 32 } else { 64 }
}

/// Groups of threads of a decode workgroup, each with channels of its own.
const DECODE_GROUPS: usize = 4;
