//! How a prefill is cut into dispatches that fit the device: which chunks and heads go together, so that
//! scratch memory, bindings and the length of one dispatch stay bounded whatever the size of the problem.

use super::kernels::operand_element;
use super::matrix::MatrixUnits;
use super::segments;
use super::shaders::{self, ChunkShape};
use crate::engine::Element;
use crate::error::{Error, Result};
use crate::problem::{Operand, Problem};
use std::ops::Range;

/// Chunk sizes that can be asked for.
pub const CHUNK_SIZES: [usize; 3] = [16, 32, 64];

/// What the cut has to respect.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Bytes of scratch memory for chunks.
    pub scratch: u64,
    /// Largest storage binding, bytes.
    pub binding: u64,
    /// Storage type of the inputs.
    pub element: Element,
    /// Loop iterations of one invocation.
    pub iterations: usize,
    /// Segments that were asked for.
    pub segments: Option<usize>,
    /// Workgroups of the scan that the device runs in about the time of one.
    pub width: usize,
}

impl Bounds {
    /// Bytes of a binding that data may fill: it may start up to 256 bytes early to be aligned, and ends on a
    /// multiple of 4.
    pub fn window(&self) -> u64 {
        self.binding.saturating_sub(512)
    }
}

/// Where a piece of a sequence finds the state it continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Zero.
    Zero = 0,
    /// The initial states.
    Initial = 1,
    /// The final states: an earlier piece, or the caller, left it there.
    Carried = 2,
}

/// Dispatches over one set of chunks and heads: the passes of a prefill.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Step {
    /// Tokens that the bindings cover, numbered through all batch rows.
    pub tokens: Range<usize>,
    /// Sequences whose states the bindings cover.
    pub states: Range<usize>,
    /// `(first token in the binding, tokens, 0, 0)` for each chunk, then what the scan goes through (pieces of
    /// sequences, see [`segments::scan_entry`]) and, where they are cut into segments, what its first run and the
    /// join do.
    pub table: Vec<[u32; 4]>,
    /// How many entries of the table are chunks.
    pub chunks: usize,
    /// Where the entries of the scan are.
    pub scans: Range<usize>,
    /// Where those of its first run are.
    pub transitions: Range<usize>,
    /// Where those of the join are: `(first slot, segments, state in the binding, source)`.
    pub joins: Range<usize>,
    /// Segments, each of which has a slot.
    pub slots: usize,
    /// Value heads of this step.
    pub heads: Range<usize>,
}

impl Step {
    /// What the scan goes through: `(first chunk, chunks, state in the binding, source)`.
    pub fn pieces(&self) -> impl Iterator<Item = &[u32; 4]> {
        self.table[self.scans.clone()].iter()
    }

    /// Puts entries at the end of the table; where they are.
    pub fn append(&mut self, entries: Vec<[u32; 4]>) -> Range<usize> {
        let start = self.table.len();
        self.table.extend(entries);
        start..self.table.len()
    }

    /// Float words of scratch memory for the chunks of this step.
    pub fn scratch_words(&self, shape: &ChunkShape) -> u64 {
        self.scratch_parts(shape).1.end
    }

    /// The words of scratch memory that hold float32, and those that hold float16 (the matrix tier's alone). They
    /// are bindings of their own, so the second starts where any device lets a binding start.
    pub fn scratch_parts(&self, shape: &ChunkShape) -> (Range<u64>, Range<u64>) {
        scratch_parts(shape, (self.chunks * self.heads.len()) as u64)
    }
}

/// The same for so many chunks of a head.
fn scratch_parts(shape: &ChunkShape, chunk_heads: u64) -> (Range<u64>, Range<u64>) {
    match &shape.matrix {
        None => {
            let words = chunk_heads * shape.stride as u64;
            (0..words, words..words)
        }
        Some(matrix) => {
            let words = matrix.floats(chunk_heads);
            let start = words.next_multiple_of(64);
            (
                0..words,
                start..start + chunk_heads * matrix.halves() as u64,
            )
        }
    }
}

/// How many chunks of a head fit so many bytes of scratch memory.
fn chunk_heads_in(shape: &ChunkShape, bytes: u64) -> usize {
    // The size grows with the number, by no less than `stride`.
    let (mut fits, mut beyond) = (0, bytes / (shape.stride as u64 * 4) + 1);
    while beyond - fits > 1 {
        let middle = fits + (beyond - fits) / 2;
        if scratch_parts(shape, middle).1.end * 4 <= bytes {
            fits = middle;
        } else {
            beyond = middle;
        }
    }
    fits as usize
}

/// The chunk size for a problem: what was asked for, or the largest whose triangle has at most 64 rows.
///
/// # Errors
/// [`Error::Unsupported`] for a size that does not exist or has too many sub-steps.
pub fn chunk_shape(problem: &Problem, asked: Option<usize>) -> Result<ChunkShape> {
    let n = problem.rule.update().substeps();
    let tokens = match asked {
        Some(c) if CHUNK_SIZES.contains(&c) => c,
        Some(c) => return Err(Error::unsupported("chunk", c, "one of 16, 32, 64")),
        None => {
            let longest = (0..problem.sequences())
                .map(|i| problem.sequence(i).len())
                .max()
                .unwrap_or(0);
            CHUNK_SIZES
                .into_iter()
                .filter(|c| c * n <= 64)
                .find(|&c| c >= longest)
                .or_else(|| CHUNK_SIZES.into_iter().rev().find(|c| c * n <= 64))
                .unwrap_or(16)
        }
    };
    ChunkShape::new(problem, tokens).ok_or_else(|| {
        Error::unsupported(
            "chunk · sub-steps per token",
            format!("{tokens} · {n}"),
            "256",
        )
    })
}

/// The same for the matrix tier: what was asked for, or the largest that fits the device, `width` workgroups wide.
///
/// # Errors
/// [`Error::Unsupported`] where none fits.
pub fn matrix_chunk_shape(
    problem: &Problem,
    asked: Option<usize>,
    units: MatrixUnits,
    limits: &wgpu::Limits,
    width: usize,
) -> Result<ChunkShape> {
    if let Some(c) = asked.filter(|c| !CHUNK_SIZES.contains(c)) {
        return Err(Error::unsupported("chunk", c, "one of 16, 32, 64"));
    }
    let lengths = (0..problem.sequences()).map(|i| problem.sequence(i).len());
    let longest = lengths.max().unwrap_or(0);
    let shape = |c| ChunkShape::on_matrix_units(problem, c, units, limits, width);
    match asked {
        Some(c) => shape(c),
        None => {
            // As large as it may be, but no larger than the longest sequence needs. Where workgroups are so many that the scan
            // is wide, the pass before it takes as long, and that grows with the square of a chunk (`benches/NOTES.md`).
            let enough = CHUNK_SIZES.into_iter().find(|&c| c >= longest);
            let shapes = CHUNK_SIZES
                .into_iter()
                .rev()
                .filter(|&c| enough.is_none_or(|enough| c <= enough))
                .filter_map(|c| shape(c).ok())
                .collect::<Vec<_>>();
            let is_wide = |shape: &&ChunkShape| shape.matrix.is_some_and(|m| m.wide);
            shapes
                .iter()
                .find(|shape| !is_wide(shape) || shape.tokens <= 32)
                .or(shapes.first())
                .cloned()
                .map_or_else(|| shape(CHUNK_SIZES[0]), Ok)
        }
    }
}

/// Bytes that one token has in the operand (or output) that is widest, gates counting as one operand: they may
/// have to be gathered into one binding.
pub fn token_bytes(problem: &Problem, element: Element) -> u64 {
    let bytes = |o: Operand| {
        let values = problem.rows_per_token(o) * problem.row_len(o);
        values as u64 * operand_element(o, element).bytes()
    };
    let used = || Operand::ALL.into_iter().filter(|&o| problem.uses(o));
    let gates = used()
        .filter(|&o| matches!(o, Operand::Beta | Operand::Gamma))
        .map(bytes)
        .sum();
    used().map(bytes).max().unwrap_or(1).max(gates).max(1)
}

/// Bytes of the states of one sequence.
pub fn state_bytes(problem: &Problem) -> u64 {
    (problem.value_heads * problem.state_len()) as u64 * 4
}

/// Cuts a prefill into steps. `continues`: the final states already hold what the sequences continue.
///
/// # Errors
/// [`Error::Unsupported`] where one chunk of one head, one chunk's rows or the states of one sequence exceed
/// a bound.
pub fn steps(
    problem: &Problem,
    shape: &ChunkShape,
    bounds: &Bounds,
    has_initial: bool,
    continues: bool,
) -> Result<Vec<Step>> {
    let chunk_heads = chunk_heads_in(shape, bounds.scratch.min(bounds.binding));
    if chunk_heads == 0 {
        let chunk_bytes = scratch_parts(shape, 1).1.end * 4;
        return Err(Error::unsupported(
            "scratch memory for one chunk of one head",
            format!("{chunk_bytes} bytes"),
            format!("{} bytes", bounds.scratch.min(bounds.binding)),
        ));
    }
    let head_count = problem.value_heads.min(chunk_heads);
    let chunks_per_step = chunk_heads / head_count;
    let chunks_per_piece = (bounds.iterations / shaders::scan_iterations(shape)).max(1);
    let span = (bounds.window() / token_bytes(problem, bounds.element)) as usize;
    if span < shape.tokens {
        return Err(Error::unsupported(
            "bytes of one chunk's rows in a binding",
            format!("{} tokens", shape.tokens),
            format!("{span} tokens in {} bytes", bounds.binding),
        ));
    }

    let states = (bounds.window() / state_bytes(problem)) as usize;
    if states == 0 {
        return Err(Error::unsupported(
            "bytes of one sequence's states in a binding",
            state_bytes(problem),
            bounds.window(),
        ));
    }

    let mut windows = Vec::new();
    let mut first = 0;
    while first < problem.sequences() {
        let start = problem.sequence(first).start;
        // As many sequences as fit a step with at least one chunk each, and the bindings of rows and states.
        let mut last = first;
        let mut busy = 0;
        while last < problem.sequences() {
            let s = problem.sequence(last);
            let more = usize::from(!s.is_empty());
            let fits =
                s.end - start <= span && busy + more <= chunks_per_step && last - first < states;
            if last > first && !fits {
                break;
            }
            busy += more;
            last += 1;
        }
        window_steps(
            problem,
            shape,
            first..last,
            chunks_per_step,
            chunks_per_piece,
            span,
            if continues {
                Source::Carried
            } else if has_initial {
                Source::Initial
            } else {
                Source::Zero
            },
            &mut windows,
        );
        first = last;
    }

    let mut out = Vec::with_capacity(windows.len());
    for window in windows {
        let mut head = 0;
        while head < problem.value_heads {
            let end = (head + head_count).min(problem.value_heads);
            let mut step = Step {
                heads: head..end,
                ..window.clone()
            };
            segments::cut(&mut step, problem, shape, bounds);
            out.push(step);
            head = end;
        }
    }
    Ok(out)
}

/// Steps over sequences `group`, each advancing by the same share of a step's chunks.
#[allow(clippy::too_many_arguments)]
fn window_steps(
    problem: &Problem,
    shape: &ChunkShape,
    group: Range<usize>,
    chunks_per_step: usize,
    chunks_per_piece: usize,
    span: usize,
    source: Source,
    out: &mut Vec<Step>,
) {
    let mut rest: Vec<(usize, Range<usize>)> =
        group.clone().map(|n| (n, problem.sequence(n))).collect();
    let mut first_step = true;
    while !rest.is_empty() {
        let busy = rest.iter().filter(|(_, t)| !t.is_empty()).count();
        let mut share = (chunks_per_step / busy.max(1)).min(chunks_per_piece) * shape.tokens;
        if rest.len() == 1 {
            share = share.min(span / shape.tokens * shape.tokens);
        }
        let mut chunks = Vec::new();
        let mut pieces = Vec::new();
        let covered = rest.iter().filter(|(_, t)| !t.is_empty());
        let start = covered.clone().map(|(_, t)| t.start).min().unwrap_or(0);
        let end = covered
            .map(|(_, t)| t.end.min(t.start + share))
            .max()
            .unwrap_or(start);
        for (n, tokens) in &mut rest {
            let stop = tokens.end.min(tokens.start + share);
            let first_chunk = chunks.len();
            let mut at = tokens.start;
            while at < stop {
                let count = shape.tokens.min(stop - at);
                chunks.push([(at - start) as u32, count as u32, 0, 0]);
                at += count;
            }
            let from = if first_step { source } else { Source::Carried };
            let state = (*n - group.start) as u32;
            pieces.push(segments::scan_entry(
                first_chunk as u32,
                (chunks.len() - first_chunk) as u32,
                state,
                from,
                state,
            ));
            tokens.start = stop;
        }
        rest.retain(|(_, t)| !t.is_empty());
        first_step = false;
        let mut step = Step {
            tokens: start..end,
            states: group.clone(),
            chunks: chunks.len(),
            table: chunks,
            ..Step::default()
        };
        step.scans = step.append(pieces);
        out.push(step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rule;

    fn covers(problem: &Problem, shape: &ChunkShape, bounds: &Bounds) -> Vec<Step> {
        let steps = steps(problem, shape, bounds, true, false).expect("a plan");
        let hv = problem.value_heads;
        let mut seen = vec![0u32; problem.total_tokens() * hv];
        let mut next: Vec<Vec<usize>> = (0..problem.sequences())
            .map(|n| vec![problem.sequence(n).start; hv])
            .collect();
        let mut visited = vec![vec![false; hv]; problem.sequences()];
        for step in &steps {
            assert!(step.scratch_words(shape) * 4 <= bounds.scratch);
            let bytes = step.tokens.len() as u64 * token_bytes(problem, bounds.element);
            assert!(bytes <= bounds.window());
            assert!(step.states.len() as u64 * state_bytes(problem) <= bounds.window());
            for piece in step.pieces() {
                let n = step.states.start + piece[2] as usize;
                assert!(step.states.contains(&n));
                for h in step.heads.clone() {
                    let source = if visited[n][h] {
                        Source::Carried
                    } else {
                        Source::Initial
                    };
                    assert_eq!(piece[3], source as u32 | piece[2] << 2);
                    let iterations = piece[1] as usize * shaders::scan_iterations(shape);
                    assert!(iterations <= bounds.iterations);
                    visited[n][h] = true;
                    for c in &step.table[piece[0] as usize..(piece[0] + piece[1]) as usize] {
                        let first = step.tokens.start + c[0] as usize;
                        assert_eq!(first, next[n][h], "tokens in order");
                        next[n][h] += c[1] as usize;
                        for t in first..first + c[1] as usize {
                            seen[t * hv + h] += 1;
                        }
                    }
                }
            }
        }
        assert!(seen.iter().all(|&s| s == 1));
        assert!(visited.iter().flatten().all(|&v| v));
        steps
    }

    #[test]
    fn every_token_of_every_head_is_covered_once_in_order_and_within_the_bounds() {
        for (tokens, offsets) in [
            (0, None),
            (1, None),
            (1000, None),
            (1000, Some(vec![0, 0, 17, 17, 300, 1000, 1000])),
            (77, Some((0..=77).collect::<Vec<_>>())),
        ] {
            for (scratch, binding) in [(1 << 30, 1 << 30), (1 << 20, 1 << 20), (200_000, 100_000)] {
                let mut p = Problem::new(Rule::Eda, [1, tokens, 2, 6, 60, 33]);
                p.cu_seqlens = offsets.clone();
                for chunk in CHUNK_SIZES {
                    let shape = chunk_shape(&p, Some(chunk)).expect("a shape");
                    let bounds = Bounds {
                        scratch,
                        binding,
                        element: Element::F32,
                        iterations: shaders::MAX_ITERATIONS,
                        segments: None,
                        width: 1,
                    };
                    if shape.stride as u64 * 4 <= scratch.min(binding) {
                        covers(&p, &shape, &bounds);
                    }
                }
            }
        }
    }

    #[test]
    fn what_cannot_fit_is_refused_with_both_numbers() {
        let p = Problem::new(Rule::Eda, [1, 100, 1, 1, 128, 128]);
        let shape = chunk_shape(&p, None).expect("a shape");
        let bounds = Bounds {
            scratch: 1000,
            binding: 1000,
            element: Element::F32,
            iterations: shaders::MAX_ITERATIONS,
            segments: None,
            width: 1,
        };
        let e = steps(&p, &shape, &bounds, false, false).expect_err("too small");
        assert!(e.to_string().contains("1000 bytes"), "{e}");
        assert!(chunk_shape(&p, Some(48)).is_err());
        let wide = Problem::new(Rule::DeltaProduct { factors: 8 }, [1, 9, 1, 1, 8, 8]);
        assert!(chunk_shape(&wide, Some(64)).is_err());
        assert!(chunk_shape(&wide, Some(32)).is_ok());
    }

    #[test]
    fn gates_count_as_one_operand() {
        // One value a token in every operand, two gates that may have to lie side by side.
        let p = Problem::new(Rule::Eda, [9, 1, 3, 3, 1, 1]);
        assert_eq!(token_bytes(&p, Element::F32), 2 * 3 * 4);
        let wide = Problem::new(Rule::Eda, [9, 1, 3, 3, 8, 1]);
        assert_eq!(token_bytes(&wide, Element::F32), 8 * 3 * 4);
    }
}
