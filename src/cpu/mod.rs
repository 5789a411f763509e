//! The CPU engine: the chunk form and the one-pass decode in float32, on all cores.
//!
//! It serves where there is no GPU, and it is an independent second answer where there is one: it shares
//! with the shaders the description of the rules ([`crate::rule`]) and the formulas of the chunk form, not the
//! code. Every rule runs through the same two routines, driven by [`crate::rows`].

mod chunk;
mod decode;
mod dense;
mod kernel;
mod math;
mod prefill;

use crate::engine::{
    DecodeOptions, Description, Element, PrefillOptions, Progress, Run, check_half_range,
};
use crate::error::{Error, Result};
use crate::gpu::kernels::operand_element;
use crate::problem::{Operand, Problem, Tensors};
use crate::rows::Rows;
use crate::slots::{Row, validate_rows};
use half::f16;
use rayon::prelude::*;
use std::borrow::Cow;
use web_time::Instant;

/// The engine that runs on the processor. It has no state of its own and always exists.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct CpuEngine {}

/// States in host memory, one for each slot, `[slots, HV, K, V]`.
#[derive(Debug, Clone)]
pub struct CpuPool {
    states: Vec<f32>,
    slots: usize,
    /// `HV`, `K`, `V`.
    sizes: [usize; 3],
}

fn sizes(problem: &Problem) -> [usize; 3] {
    [problem.value_heads, problem.key_dim, problem.value_dim]
}

/// Zeros, or an error where the allocator has no room for them.
fn zeros(what: &str, len: usize) -> Result<Vec<f32>> {
    let mut probe: Vec<f32> = Vec::new();
    probe
        .try_reserve_exact(len)
        .map_err(|_| Error::OutOfMemory {
            what: what.into(),
            bytes: (len as u64).saturating_mul(4),
        })?;
    drop(probe);
    // Unlike filling the reserved vector, this leaves first touching the pages to the threads that use
    // them.
    Ok(vec![0.0; len])
}

impl CpuEngine {
    /// The engine.
    pub fn new() -> Self {
        Self::default()
    }

    /// The processor and the number of threads.
    pub fn description(&self) -> Description {
        let threads = rayon::current_num_threads();
        let plural = if threads == 1 { "" } else { "s" };
        Description {
            adapter: format!("{} ({threads} thread{plural})", processor()),
            backend: "cpu".into(),
            tier: "cpu".into(),
            kind: "cpu".into(),
            driver: concat!("eda-wgpu ", env!("CARGO_PKG_VERSION")).into(),
        }
    }

    /// The chunked form over whole sequences.
    ///
    /// With [`Element::F16`], tensors that run over tokens are rounded to float16 before and `o` after
    /// (a value of `o` beyond 65504 becomes infinite), so that results are those of float16 storage;
    /// arithmetic, parameters and states are float32 either way.
    ///
    /// # Errors
    /// As [`Problem::validate_lengths`]; [`Error::Unsupported`] for a chunk that is not 16, 32 or 64;
    /// [`Error::Tensor`] for a value that float16 cannot hold where that is asked for;
    /// [`Error::OutOfMemory`].
    pub fn prefill(
        &self,
        problem: &Problem,
        tensors: &Tensors<&[f32]>,
        options: &PrefillOptions,
        progress: Progress<'_>,
    ) -> Result<Run> {
        problem.validate_lengths(tensors, |t| t.len())?;
        let chunk = match options.chunk {
            None => DEFAULT_CHUNK,
            Some(chunk @ (16 | 32 | 64)) => chunk,
            Some(other) => return Err(Error::unsupported("chunk", other, "16, 32 or 64")),
        };
        if options.element == Element::F32 {
            let start = Instant::now();
            let outputs = prefill::prefill(problem, tensors, chunk, progress)?;
            return Ok(Run {
                outputs,
                compute_ms: milliseconds(start),
                tier: None,
                segments: 0,
            });
        }
        let rounded = round_operands(problem, tensors)?;
        let start = Instant::now();
        let mut outputs = prefill::prefill(problem, &rounded.slices(), chunk, progress)?;
        round_outputs(&mut outputs.o);
        Ok(Run {
            outputs,
            compute_ms: milliseconds(start),
            tier: None,
            segments: 0,
        })
    }

    /// A pool of `slots` zero states for problems with these heads and sizes.
    ///
    /// # Errors
    /// As [`Problem::validate`]; [`Error::OutOfMemory`].
    pub fn pool(&self, problem: &Problem, slots: usize) -> Result<CpuPool> {
        problem.validate()?;
        let sizes = sizes(problem);
        let len = sizes
            .iter()
            .try_fold(slots, |len, &size| len.checked_mul(size))
            .unwrap_or(usize::MAX);
        Ok(CpuPool {
            states: zeros("the pool of states", len)?,
            slots,
            sizes,
        })
    }

    /// Continues states of a pool by `problem.tokens` tokens for each batch row; returns `o` and the
    /// time in milliseconds. Where an error is returned, the pool is as it was. [`Element::F16`] rounds as in
    /// [`CpuEngine::prefill`].
    ///
    /// # Errors
    /// As [`Problem::validate_lengths`] and [`validate_rows`]; [`Error::Tensor`] for a packed problem,
    /// one with an initial state, or one of other sizes than the pool; [`Error::OutOfMemory`].
    pub fn decode(
        &self,
        problem: &Problem,
        tensors: &Tensors<&[f32]>,
        pool: &mut CpuPool,
        rows: &[Row],
        options: &DecodeOptions,
    ) -> Result<(Vec<f32>, f64)> {
        problem.validate_lengths(tensors, |t| t.len())?;
        if options.element == Element::F16 {
            let rounded = round_operands(problem, tensors)?;
            let exact = DecodeOptions {
                element: Element::F32,
                ..options.clone()
            };
            let (mut o, ms) = self.decode(problem, &rounded.slices(), pool, rows, &exact)?;
            round_outputs(&mut o);
            return Ok((o, ms));
        }
        if problem.cu_seqlens.is_some() {
            return Err(Error::tensor(
                "cu_seqlens",
                "no packed sequences in a decode",
                "some",
            ));
        }
        if tensors.get(Operand::InitialState).is_some() {
            return Err(Error::tensor(
                "initial_state",
                "no such tensor in a decode, whose states are in the pool",
                "one",
            ));
        }
        if pool.sizes != sizes(problem) {
            return Err(Error::tensor(
                "pool",
                format!("states [HV, K, V] of {:?}", sizes(problem)),
                format!("{:?}", pool.sizes),
            ));
        }
        validate_rows(rows, problem.batch, pool.slots)?;

        let start = Instant::now();
        let mut o = zeros("o", problem.output_len())?;
        let mut tasks = decode_tasks(problem, pool, rows, &mut o);
        let vectors = Rows::new(problem, tensors);
        let run = |step: &mut decode::Step, task: &mut DecodeTask<'_>| {
            if task.reset {
                task.state.fill(0.0);
            }
            for (t, o) in task.o.iter_mut().enumerate() {
                dense::vectorised(
                    #[inline(always)]
                    || {
                        step.token(&vectors, task.first + t, task.head, task.state, o);
                    },
                );
            }
        };
        if let [task] = tasks.as_mut_slice() {
            run(&mut decode::Step::new(problem), task);
        } else {
            tasks
                .par_iter_mut()
                .for_each_init(|| decode::Step::new(problem), run);
        }
        drop(tasks);
        Ok((o, milliseconds(start)))
    }
}

/// One head of one batch row of a decode.
struct DecodeTask<'a> {
    /// First token, numbered through all batch rows.
    first: usize,
    head: usize,
    reset: bool,
    state: &'a mut [f32],
    o: Vec<&'a mut [f32]>,
}

/// The heads of all rows that are not padding, with their states.
fn decode_tasks<'a>(
    problem: &Problem,
    pool: &'a mut CpuPool,
    rows: &[Row],
    o: &'a mut [f32],
) -> Vec<DecodeTask<'a>> {
    let (hv, v, state_len) = (problem.value_heads, problem.value_dim, problem.state_len());
    let row_len = problem.tokens * hv * v;
    let mut outputs: Vec<&mut [f32]> = Vec::with_capacity(rows.len());
    let mut rest = o;
    for _ in rows {
        let (row, after) = rest.split_at_mut(row_len);
        outputs.push(row);
        rest = after;
    }
    let mut named: Vec<(usize, usize, &mut [f32])> = outputs
        .into_iter()
        .enumerate()
        .filter_map(|(i, o)| Some((usize::try_from(rows[i].slot).ok()?, i, o)))
        .collect();
    // Slots in ascending order can be taken out of the pool one after the other.
    named.sort_unstable_by_key(|&(slot, ..)| slot);

    let mut tasks = Vec::with_capacity(named.len() * hv);
    let (mut rest, mut passed) = (pool.states.as_mut_slice(), 0);
    for (slot, i, o) in named {
        let (_, after) = rest.split_at_mut((slot - passed) * hv * state_len);
        let (states, after) = after.split_at_mut(hv * state_len);
        (rest, passed) = (after, slot + 1);
        let first = tasks.len();
        tasks.extend(
            states
                .chunks_exact_mut(state_len)
                .enumerate()
                .map(|(head, state)| DecodeTask {
                    first: i * problem.tokens,
                    head,
                    reset: rows[i].reset,
                    state,
                    o: Vec::with_capacity(problem.tokens),
                }),
        );
        for (at, o) in o.chunks_exact_mut(v).enumerate() {
            tasks[first + at % hv].o.push(o);
        }
    }
    tasks
}

impl CpuPool {
    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Where a slot's state lies.
    fn range(&self, slot: usize) -> Result<std::ops::Range<usize>> {
        if slot >= self.slots {
            return Err(Error::tensor(
                "slots",
                format!("a slot below {}", self.slots),
                slot,
            ));
        }
        let len: usize = self.sizes.iter().product();
        Ok(slot * len..(slot + 1) * len)
    }

    /// The state in `slot`, `[HV, K, V]`.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a slot that does not exist.
    pub fn read(&self, slot: usize) -> Result<Vec<f32>> {
        Ok(self.states[self.range(slot)?].to_vec())
    }

    /// Replaces the state in `slot` by `state [HV, K, V]`.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a slot that does not exist or a wrong length.
    pub fn write(&mut self, slot: usize, state: &[f32]) -> Result<()> {
        let range = self.range(slot)?;
        if state.len() != range.len() {
            return Err(Error::tensor(
                "state",
                format!("{} values, shape {:?}", range.len(), self.sizes),
                format!("{} values", state.len()),
            ));
        }
        self.states[range].copy_from_slice(state);
        Ok(())
    }

    /// Copies the state in slot `from` to slot `to`.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a slot that does not exist.
    pub fn copy(&mut self, from: usize, to: usize) -> Result<()> {
        let (from, to) = (self.range(from)?, self.range(to)?);
        self.states.copy_within(from, to.start);
        Ok(())
    }
}

/// Tokens a chunk where the caller does not say: with fewer, less is computed inside a chunk; products with the
/// state run at nearly the full rate of the processor from here on.
pub(crate) const DEFAULT_CHUNK: usize = 8;

/// The operands as float16 storage would hold them; gates, parameters and states are float32 in any case.
fn round_operands<'a>(
    problem: &Problem,
    tensors: &Tensors<&'a [f32]>,
) -> Result<Tensors<Cow<'a, [f32]>>> {
    check_half_range(problem, tensors)?;
    Ok(tensors.map(|operand, &values| {
        if operand_element(operand, Element::F16) == Element::F32 {
            return Cow::Borrowed(values);
        }
        Cow::Owned(
            values
                .par_iter()
                .map(|&x| f16::from_f32(x).to_f32())
                .collect(),
        )
    }))
}

/// Outputs as float16 storage would hold them.
fn round_outputs(o: &mut [f32]) {
    o.par_iter_mut()
        .for_each(|o| *o = f16::from_f32(*o).to_f32());
}

fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// Name of the processor, where the system tells it.
fn processor() -> String {
    std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| {
            text.lines()
                .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
                .map(|(_, name)| name.trim().to_owned())
        })
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| std::env::consts::ARCH.into())
}

/// Copies on all threads: what the memory gives to a program that does nothing else.
pub(crate) fn copy(to: &mut [f32], from: &[f32]) {
    const PART: usize = 1 << 18;
    to.par_chunks_mut(PART)
        .zip(from.par_chunks(PART))
        .for_each(|(to, from)| to.copy_from_slice(from));
}

/// `c = a b` of square matrices on all threads, each of which makes some rows of `c`.
pub(crate) fn square_product(c: &mut [f32], a: &[f32], b: &[f32], size: usize) {
    assert!([c.len(), a.len(), b.len()] == [size * size; 3]);
    let rows = size.div_ceil(rayon::current_num_threads()).max(1);
    // Slices of float32 are shorter than `isize::MAX` bytes.
    let stride = size as isize;
    c.par_chunks_mut(rows * size)
        .zip(a.par_chunks(rows * size))
        .for_each(|(c, a)| {
            // SAFETY: `c` and `a` are the same whole rows of matrices `size` wide and `b` is one of `size` by
            // `size`, all row-major, so every element that sizes and strides name lies in its slice; `c` is borrowed
            // mutably and overlaps neither of the others.
            unsafe {
                gemm::gemm(
                    c.len() / size,
                    size,
                    size,
                    c.as_mut_ptr(),
                    1,
                    stride,
                    false,
                    a.as_ptr(),
                    1,
                    stride,
                    b.as_ptr(),
                    1,
                    stride,
                    0.0f32,
                    1.0f32,
                    false,
                    false,
                    false,
                    gemm::Parallelism::None,
                );
            }
        });
}
