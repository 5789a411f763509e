//! Whole sequences in the chunk form: which core does what.
//!
//! Heads and sequences are independent. A head that would keep one core busy for longer than the rest
//! of the work takes the others is split further: its chunks are loaded in parallel (that part does not
//! depend on the state), and its value columns, which are independent of each other, go through the
//! loaded chunks in parallel.

use super::chunk::{Chunk, Layout, State, Workspace};
use super::kernel::PANEL;
use super::zeros;
use crate::engine::Progress;
use crate::error::Result;
use crate::problem::{Operand, Outputs, Problem, Tensors};
use crate::rows::Rows;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Mutex;

/// Most heads that one core takes through the chunks together; more gain nothing.
const HEADS_TOGETHER: usize = 4;
/// Most values of states that one core works on together.
const STATES_IN_CACHE: usize = 1 << 16;
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
        ticker: Ticker::new(problem, progress),
    };
    let groups = groups(problem, tasks(problem, &mut o, &mut final_state));
    groups.into_par_iter().with_max_len(1).for_each_init(
        || None,
        |kept, mut group| match group[0].columns.len() {
            1 => shared.run(kept, &mut group),
            _ => group.into_iter().for_each(|task| shared.run_split(task)),
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
        let width = v
            .div_ceil(parts(problem, tokens.len()))
            .next_multiple_of(PANEL);
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
    threads.min(problem.value_dim.div_ceil(PANEL))
}

/// Heads of one sequence that one core takes through each chunk together, so that it reads the inputs in
/// longer runs. No more than leave every core as much to do as the others, nor than its cache has room for.
fn groups<'a>(problem: &Problem, tasks: Vec<Task<'a>>) -> Vec<Vec<Task<'a>>> {
    let (heads, threads) = (tasks.len(), rayon::current_num_threads());
    let most = STATES_IN_CACHE / problem.state_len().max(1);
    let busiest = |together: usize| heads.div_ceil(together).div_ceil(threads) * together;
    let together = (2..=most.min(HEADS_TOGETHER))
        .rfind(|&together| busiest(together) == busiest(1))
        .unwrap_or(1);
    let mut groups: Vec<Vec<Task<'a>>> = Vec::with_capacity(heads);
    for task in tasks {
        match groups.last_mut() {
            Some(group)
                if group.len() < together
                    && group[0].tokens == task.tokens
                    && task.columns.len() == 1 =>
            {
                group.push(task);
            }
            _ => groups.push(vec![task]),
        }
    }
    groups
}

/// What all tasks use.
struct Shared<'a> {
    rows: Rows<'a>,
    layout: Layout,
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
        chunk.load(&self.layout, &self.rows, tokens, head);
    }

    /// Whole heads on one core; `kept` holds buffers from one group to the next.
    fn run(&self, kept: &mut Option<(Chunk, Workspace)>, group: &mut [Task<'_>]) {
        let (chunk, work) = kept.get_or_insert_with(|| {
            let work = Workspace::new(&self.layout);
            (Chunk::new(&self.layout), work)
        });
        let state = |task: &Task<'_>| {
            let range = task.columns[0].range.clone();
            State::new(&self.layout, range, task.state)
        };
        let mut states: Vec<State> = group.iter().map(state).collect();
        let all = group[0].tokens.clone();
        for tokens in self.chunks(&all) {
            let o = tokens.start - all.start..tokens.end - all.start;
            for (task, state) in group.iter_mut().zip(&mut states) {
                self.load(chunk, tokens.clone(), task.head);
                let o = &mut task.columns[0].o[o.clone()];
                chunk.advance(&self.layout, work, state, o);
            }
            self.ticker.add(tokens.len() * group.len());
        }
        for (task, state) in group.iter_mut().zip(&states) {
            state.store(&self.layout, task.state);
        }
    }

    /// A head on several cores: while its columns go through one group of chunks, the next is loaded.
    fn run_split(&self, task: Task<'_>) {
        struct Part<'a> {
            o: Vec<&'a mut [f32]>,
            state: State,
            work: Workspace,
            done: usize,
        }
        let mut parts: Vec<Part<'_>> = task
            .columns
            .into_iter()
            .map(|columns| Part {
                o: columns.o,
                state: State::new(&self.layout, columns.range, task.state),
                work: Workspace::new(&self.layout),
                done: 0,
            })
            .collect();

        let ranges: Vec<Range<usize>> = self.chunks(&task.tokens).collect();
        let group = (8 * rayon::current_num_threads()).min(ranges.len());
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
                            let o = &mut part.o[part.done..][..tokens.len()];
                            chunk.advance(&self.layout, &mut part.work, &mut part.state, o);
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
            part.state.store(&self.layout, task.state);
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
