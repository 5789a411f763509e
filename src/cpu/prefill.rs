//! Whole sequences in the chunk form: which core does what.
//!
//! Heads and sequences are independent. A head that would keep one core busy for longer than the rest
//! of the work takes the others is split further: its chunks are loaded in parallel (that part does not
//! depend on the state), and its value columns, which are independent of each other, go through the
//! loaded chunks in parallel.

use super::chunk::{Chunk, Layout, Workspace};
use super::zeros;
use crate::engine::Progress;
use crate::error::Result;
use crate::problem::{Operand, Outputs, Problem, Tensors};
use crate::rows::Rows;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Mutex;

/// Fewest value columns that a head is split into; products of fewer are slow.
const FEWEST_COLUMNS: usize = 16;
/// How often progress is reported, at most.
const REPORTS: usize = 256;

/// Runs a validated problem in chunks of `chunk` tokens.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(super) fn prefill(
    problem: &Problem,
    tensors: &Tensors<&[f32]>,
    chunk: usize,
    progress: Progress<'_>,
) -> Result<Outputs> {
    let mut o = zeros("o", problem.output_len())?;
    let mut final_state = zeros("final_state", problem.states_len())?;
    if let Some(initial) = tensors.get(Operand::InitialState) {
        final_state.copy_from_slice(initial);
    }
    let shared = Shared {
        rows: Rows::new(problem, tensors),
        layout: Layout::new(problem, chunk),
        scale: problem.scale(),
        value_dim: problem.value_dim,
        ticker: Ticker::new(problem, progress),
    };
    tasks(problem, &mut o, &mut final_state)
        .into_par_iter()
        .with_max_len(1)
        .for_each_init(
            || None,
            |kept, task| match task.columns.len() {
                1 => shared.run(kept, task),
                _ => shared.run_split(task),
            },
        );
    Ok(Outputs { o, final_state })
}

/// One head of one sequence.
struct Task<'a> {
    tokens: Range<usize>,
    head: usize,
    /// `[K, V]`: initial, then final state.
    state: &'a mut [f32],
    columns: Vec<Columns<'a>>,
}

/// Value columns of a head, and their part of each token's output.
struct Columns<'a> {
    range: Range<usize>,
    o: Vec<&'a mut [f32]>,
}

fn tasks<'a>(problem: &Problem, o: &'a mut [f32], states: &'a mut [f32]) -> Vec<Task<'a>> {
    let (hv, v) = (problem.value_heads, problem.value_dim);
    let mut rows = o.chunks_exact_mut(v);
    let mut states = states.chunks_exact_mut(problem.state_len());
    let mut tasks = Vec::new();
    for n in 0..problem.sequences() {
        let tokens = problem.sequence(n);
        if tokens.is_empty() {
            // The state passes through.
            states.by_ref().take(hv).for_each(drop);
            continue;
        }
        let width = v.div_ceil(parts(problem, tokens.len()));
        let first = tasks.len();
        tasks.extend(states.by_ref().take(hv).enumerate().map(|(head, state)| {
            let columns = (0..v).step_by(width).map(|at| Columns {
                range: at..v.min(at + width),
                o: Vec::with_capacity(tokens.len()),
            });
            Task {
                tokens: tokens.clone(),
                head,
                state,
                columns: columns.collect(),
            }
        }));
        for _ in tokens {
            for (task, row) in tasks[first..].iter_mut().zip(rows.by_ref()) {
                for (columns, part) in task.columns.iter_mut().zip(row.chunks_mut(width)) {
                    columns.o.push(part);
                }
            }
        }
    }
    tasks
}

/// Into how many groups of columns a head of a sequence of that many tokens is split.
fn parts(problem: &Problem, tokens: usize) -> usize {
    let threads = rayon::current_num_threads();
    let work = problem.total_tokens() * problem.value_heads;
    // Heads of equal length that fill the cores evenly need no splitting.
    let heads = work / tokens;
    let even = work.is_multiple_of(tokens) && heads.is_multiple_of(threads);
    if even || tokens * 2 * threads <= work {
        return 1;
    }
    threads.min(problem.value_dim / FEWEST_COLUMNS).max(1)
}

/// What all tasks use.
struct Shared<'a> {
    rows: Rows<'a>,
    layout: Layout,
    scale: f32,
    value_dim: usize,
    ticker: Ticker<'a>,
}

impl Shared<'_> {
    fn chunks(&self, tokens: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (end, size) = (tokens.end, self.layout.tokens);
        tokens
            .clone()
            .step_by(size)
            .map(move |t| t..end.min(t + size))
    }

    fn load(&self, chunk: &mut Chunk, tokens: Range<usize>, head: usize) {
        chunk.load(&self.layout, &self.rows, self.scale, tokens, head);
    }

    /// A whole head on one core; `kept` holds buffers from one task to the next.
    fn run(&self, kept: &mut Option<(Chunk, Workspace)>, mut task: Task<'_>) {
        let (chunk, work) = kept.get_or_insert_with(|| {
            let work = Workspace::new(&self.layout, self.value_dim);
            (Chunk::new(&self.layout), work)
        });
        for tokens in self.chunks(&task.tokens) {
            let at = tokens.start - task.tokens.start;
            let count = tokens.len();
            self.load(chunk, tokens, task.head);
            for columns in &mut task.columns {
                let o = &mut columns.o[at..at + count];
                chunk.advance(&self.layout, work, columns.range.clone(), task.state, o);
            }
            self.ticker.add(count);
        }
    }

    /// A head on several cores: while its columns go through one group of chunks, the next is loaded.
    fn run_split(&self, task: Task<'_>) {
        struct Part<'a> {
            columns: Columns<'a>,
            state: Vec<f32>,
            work: Workspace,
            done: usize,
        }
        let v = self.value_dim;
        let mut parts: Vec<Part<'_>> = task
            .columns
            .into_iter()
            .map(|columns| Part {
                state: task
                    .state
                    .chunks_exact(v)
                    .flat_map(|row| &row[columns.range.clone()])
                    .copied()
                    .collect(),
                work: Workspace::new(&self.layout, columns.range.len()),
                done: 0,
                columns,
            })
            .collect();

        let ranges: Vec<Range<usize>> = self.chunks(&task.tokens).collect();
        let group = (4 * rayon::current_num_threads()).min(ranges.len());
        let buffers = || -> Vec<Chunk> { (0..group).map(|_| Chunk::new(&self.layout)).collect() };
        let (mut loaded, mut loading) = (buffers(), buffers());
        let load = |chunks: &mut [Chunk], ranges: &[Range<usize>]| {
            chunks
                .par_iter_mut()
                .zip(ranges)
                .for_each(|(chunk, tokens)| self.load(chunk, tokens.clone(), task.head));
        };
        let mut groups = ranges.chunks(group).peekable();
        if let Some(first) = groups.peek() {
            load(&mut loaded, first);
        }
        while let Some(now) = groups.next() {
            let next = groups.peek().copied().unwrap_or_default();
            rayon::join(
                || {
                    parts.par_iter_mut().with_max_len(1).for_each(|part| {
                        for (chunk, tokens) in loaded.iter().zip(now) {
                            let range = part.columns.range.clone();
                            let o = &mut part.columns.o[part.done..][..tokens.len()];
                            chunk.advance(&self.layout, &mut part.work, range, &mut part.state, o);
                            part.done += tokens.len();
                        }
                    });
                },
                || load(&mut loading, next),
            );
            std::mem::swap(&mut loaded, &mut loading);
            self.ticker.add(now.iter().map(|tokens| tokens.len()).sum());
        }

        for part in &parts {
            let width = part.columns.range.len();
            let rows = task.state.chunks_exact_mut(v);
            for (row, part_row) in rows.zip(part.state.chunks_exact(width)) {
                row[part.columns.range.clone()].copy_from_slice(part_row);
            }
        }
    }
}

/// Counts tokens of single heads and reports whole tokens, in ascending order.
struct Ticker<'a> {
    progress: Progress<'a>,
    heads: usize,
    total: usize,
    /// Tokens of heads done, and tokens reported.
    done: Mutex<(usize, usize)>,
}

impl<'a> Ticker<'a> {
    fn new(problem: &Problem, progress: Progress<'a>) -> Self {
        Self {
            progress,
            heads: problem.value_heads,
            total: problem.total_tokens(),
            done: Mutex::default(),
        }
    }

    fn add(&self, tokens: usize) {
        // The counts are plain numbers; a panic in the caller's function leaves them usable.
        let mut done = self
            .done
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        done.0 += tokens;
        let whole = done.0 / self.heads;
        let due = whole == self.total || whole - done.1 > self.total / REPORTS;
        if due && whole > done.1 {
            done.1 = whole;
            (self.progress)(whole, self.total);
        }
    }
}
