//! An opened adapter: host slices in, host vectors out. Long prefills go through in parts, so that GPU memory
//! stays bounded and upload, compute and read-back overlap; one submission is a bounded amount of work.

use super::kernels::{
    Call, DecodeSettings, Kernels, PrefillSettings, Slice, guarded, operand_element, reported,
};
use super::matrix::{self, MatrixUnits};
use crate::adapter;
use crate::engine::{DecodeOptions, Description, Element, PrefillOptions, Progress, Run, Tier};
use crate::error::{Error, Result};
use crate::problem::{Operand, Outputs, Problem, Tensors};
use crate::slots::{Row, validate_rows};
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use web_time::Instant;

/// Inputs and outputs of one part of a long prefill, bytes. Two parts are on the device at a time. A browser copies
/// them through memory of its own.
const PART_BYTES: usize = if cfg!(target_arch = "wasm32") {
    64 << 20
} else {
    256 << 20
};
/// Floating-point operations a submission: a tenth of a second at 200 GFLOP/s, far from any watchdog.
const SUBMISSION_FLOPS: f64 = 20e9;

/// What happened to the device, told by its callbacks.
#[derive(Default)]
struct Health {
    lost: Option<String>,
    error: Option<Error>,
}

/// The GPU engine.
pub struct GpuEngine {
    description: Description,
    kernels: Kernels,
    tier: Option<Tier>,
    untested_matrix_units: AtomicBool,
    queue: wgpu::Queue,
    health: Arc<Mutex<Health>>,
    part_bytes: AtomicUsize,
    #[cfg(feature = "pipeline-cache")]
    pipeline_cache: Option<super::cache::DiskCache>,
}

/// States on the GPU, one per slot, `[slots, HV, K, V]`. Freed when dropped.
pub struct GpuPool {
    buffer: wgpu::Buffer,
    element: Element,
    slots: usize,
    /// `[HV, K, V]`
    shape: [usize; 3],
    device: wgpu::Device,
    queue: wgpu::Queue,
    health: Arc<Mutex<Health>>,
}

impl Drop for GpuPool {
    fn drop(&mut self) {
        self.buffer.destroy();
    }
}

/// Buffers that are freed at once when they go out of use, not when the driver gets round to it.
struct Owned(wgpu::Buffer);

impl Drop for Owned {
    fn drop(&mut self) {
        self.0.destroy();
    }
}

fn lock(health: &Mutex<Health>) -> std::sync::MutexGuard<'_, Health> {
    health.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error that the device's callbacks have reported since the last look. They are called when the device is
/// polled; in a browser, when they are due.
fn check_device(device: &wgpu::Device, health: &Mutex<Health>) -> Result<()> {
    // A failed poll is a lost device, whose callback has then been called.
    let _ = device.poll(wgpu::PollType::Poll);
    check_health(health)
}

/// On a lost device things fail in many ways, all of which mean that it is lost. In a browser, what error scopes
/// caught is the first cause of whatever else went wrong.
async fn diagnosed<T>(
    device: &wgpu::Device,
    health: &Mutex<Health>,
    result: Result<T>,
) -> Result<T> {
    #[cfg(target_arch = "wasm32")]
    if let Some(error) = super::scopes::settled(device).await {
        // A device that is lost says so first; what followed from the error is not reported again.
        check_health(health).or_else(|e| match e {
            Error::DeviceLost(_) => Err(e),
            _ => Ok(()),
        })?;
        return Err(error);
    }
    if let Err(Error::Device(_)) = &result {
        check_device(device, health)?;
    }
    result
}

fn check_health(health: &Mutex<Health>) -> Result<()> {
    let mut health = lock(health);
    if let Some(reason) = &health.lost {
        return Err(Error::DeviceLost(reason.clone()));
    }
    match health.error.take() {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// Waits for a mapping; natively somebody has to poll, in a browser the event loop does.
async fn mapped(
    device: &wgpu::Device,
    health: &Mutex<Health>,
    receiver: futures::channel::oneshot::Receiver<std::result::Result<(), wgpu::BufferAsyncError>>,
) -> Result<()> {
    #[cfg(not(target_arch = "wasm32"))]
    if let Err(e) = device.poll(wgpu::PollType::wait_indefinitely()) {
        check_health(health)?;
        return Err(Error::Device(format!("waiting for the device: {e}")));
    }
    #[cfg(target_arch = "wasm32")]
    let _ = device;
    let outcome = receiver.await;
    check_health(health)?;
    match outcome {
        Ok(Ok(())) => Ok(()),
        Ok(Err(e)) => Err(Error::Device(format!("reading back: {e}"))),
        Err(_) => Err(Error::DeviceLost("a read-back never completed".into())),
    }
}

type Mapping = futures::channel::oneshot::Receiver<std::result::Result<(), wgpu::BufferAsyncError>>;

fn map(buffer: &wgpu::Buffer, bytes: u64) -> Mapping {
    let (sender, receiver) = futures::channel::oneshot::channel();
    buffer.map_async(wgpu::MapMode::Read, 0..bytes, move |r| {
        // The receiver is gone only where an earlier error ended the call.
        let _ = sender.send(r);
    });
    receiver
}

fn view(buffer: &wgpu::Buffer, bytes: u64) -> Result<wgpu::BufferView> {
    buffer
        .get_mapped_range(0..bytes)
        .map_err(|e| Error::Device(format!("reading back: {e}")))
}

/// The tokens of a problem that one part covers, as a packed problem of its own.
struct Part {
    problem: Problem,
    tokens: Range<usize>,
    /// Sequences whose tokens (or, empty, whose place) are in this part.
    sequences: Range<usize>,
    /// The first of them was begun by an earlier part.
    continues: bool,
}

/// Cuts a problem into parts of at most `limit` tokens. A part either continues one sequence that an earlier
/// part began (and holds nothing else), or begins all of its sequences.
fn parts(problem: &Problem, limit: usize) -> Vec<Part> {
    let mut out = Vec::new();
    let count = problem.sequences();
    let mut n = 0;
    while n < count {
        let first = problem.sequence(n);
        let mut end = n + 1;
        let mut cuts = vec![];
        if first.len() > limit {
            let mut at = first.start;
            while at < first.end {
                cuts.push(at..(at + limit).min(first.end));
                at += limit;
            }
        } else {
            while end < count && problem.sequence(end).end - first.start <= limit {
                end += 1;
            }
            cuts.push(first.start..problem.sequence(end - 1).end);
        }
        for tokens in cuts {
            let offsets = (n..end)
                .map(|i| problem.sequence(i))
                .map(|s| s.start.max(tokens.start) - tokens.start)
                .chain([tokens.len()])
                .collect();
            out.push(Part {
                problem: Problem {
                    batch: 1,
                    tokens: tokens.len(),
                    cu_seqlens: Some(offsets),
                    ..problem.clone()
                },
                continues: tokens.start > first.start,
                sequences: n..end,
                tokens,
            });
        }
        n = end;
    }
    out
}

/// Bytes of a tensor as it lies on the device.
fn device_bytes(values: &[f32], element: Element) -> Cow<'_, [u8]> {
    match element {
        Element::F32 => Cow::Borrowed(bytemuck::cast_slice(values)),
        Element::F16 => {
            let mut out = vec![f16::ZERO; values.len().next_multiple_of(2)];
            out[..values.len()].convert_from_f32_slice(values);
            Cow::Owned(bytemuck::cast_slice(&out).to_vec())
        }
    }
}

fn host_values(bytes: &[u8], element: Element, out: &mut [f32]) {
    match element {
        Element::F32 => out.copy_from_slice(&bytemuck::cast_slice(bytes)[..out.len()]),
        Element::F16 => {
            let values: &[f16] = bytemuck::cast_slice(bytes);
            values[..out.len()].convert_to_f32_slice(out);
        }
    }
}

/// Where the operands of a (part of a) problem lie in one upload buffer.
struct Layout {
    ranges: Vec<(Operand, u64, u64)>,
    size: u64,
}

impl Layout {
    fn new(problem: &Problem, tensors: &Tensors<&[f32]>, element: Element) -> Self {
        let mut size = 0u64;
        let mut ranges = Vec::new();
        // The gates lie side by side, so that they can be bound as one.
        for (operand, _) in tensors.iter() {
            if operand == Operand::InitialState {
                continue;
            }
            let bytes = problem.len(operand) as u64 * operand_element(operand, element).bytes();
            ranges.push((operand, size, bytes));
            size = (size + bytes).next_multiple_of(256);
        }
        Self { ranges, size }
    }

    fn slices<'a>(&self, buffer: &'a wgpu::Buffer) -> Tensors<Slice<'a>> {
        let mut out = Tensors::new();
        for &(operand, offset, size) in &self.ranges {
            out.set(
                operand,
                Slice {
                    buffer,
                    offset,
                    size,
                },
            );
        }
        out
    }
}

/// A part that is on its way: its read-back, and what must live until it is there.
struct InFlight {
    tokens: Range<usize>,
    readback: Owned,
    bytes: u64,
    mapping: Mapping,
    stamps: Option<(Owned, u64, Mapping)>,
    segments: usize,
    _buffers: [Owned; 3],
}

impl GpuEngine {
    /// Opens an adapter with everything it offers that the kernels use.
    ///
    /// # Errors
    /// [`Error::Device`] where the adapter gives no device.
    pub async fn open(chosen: &wgpu::Adapter) -> Result<Self> {
        let units = MatrixUnits::of(chosen);
        let mut wanted = wgpu::Features::SHADER_F16
            | wgpu::Features::TIMESTAMP_QUERY
            | wgpu::Features::PIPELINE_CACHE;
        if units.is_some() {
            wanted |= matrix::FEATURES;
        }
        let features = chosen.features() & wanted;
        let (device, queue) = chosen
            .request_device(&wgpu::DeviceDescriptor {
                label: Some("eda"),
                required_features: features,
                required_limits: chosen.limits(),
                // SAFETY: what is experimental and asked for is cooperative matrices alone, used by this crate's own
                // shaders, whose sizes are checked against what the adapter says it supports.
                experimental_features: if units.is_some() {
                    unsafe { wgpu::ExperimentalFeatures::enabled() }
                } else {
                    wgpu::ExperimentalFeatures::disabled()
                },
                ..Default::default()
            })
            .await
            .map_err(|e| Error::Device(format!("{}: {e}", chosen.get_info().name)))?;
        let mut engine = Self::from_device(
            &device,
            &queue,
            adapter::describe(&chosen.get_info(), Tier::Portable),
        );
        engine.kernels = Kernels::with_matrix_units(&device, units);
        Ok(engine)
    }

    /// Takes one kernel family for every prefill, or (`None`) chooses as [`GpuEngine::tier_of`] says.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for [`Tier::Matrix`] where the adapter has no matrix units that the kernels can use.
    pub fn set_tier(&mut self, tier: Option<Tier>) -> Result<()> {
        if tier == Some(Tier::Matrix) && self.kernels.matrix_units().is_none() {
            return Err(Error::unsupported(
                format!("tier on {}", self.description.adapter),
                Tier::Matrix.name(),
                Tier::Portable.name(),
            ));
        }
        self.tier = tier;
        self.description.tier = tier.unwrap_or_default().name().to_owned();
        Ok(())
    }

    /// Whether [`crate::Engine::prefill`] is to test the matrix units before it uses them.
    pub(crate) fn test_matrix_units_first(&self, test: bool) {
        self.untested_matrix_units.store(test, Ordering::Relaxed);
    }

    pub(crate) fn has_untested_matrix_units(&self) -> bool {
        self.untested_matrix_units.load(Ordering::Relaxed)
    }

    /// The kernel family that every prefill takes; `None` where it is chosen for each.
    pub fn tier(&self) -> Option<Tier> {
        self.tier
    }

    /// The kernel family that a prefill takes: what was asked for; else matrix units for float16 inputs where
    /// they can run this problem, and float32 arithmetic for everything else.
    pub fn tier_of(&self, problem: &Problem, options: &PrefillOptions) -> Tier {
        self.tier.unwrap_or_else(|| {
            let half = options.element == Element::F16;
            if half && self.kernels.fits_matrix_units(problem, options.chunk) {
                Tier::Matrix
            } else {
                Tier::Portable
            }
        })
    }

    /// An engine on a device that this crate may have to itself: its lost and error callbacks are set.
    pub fn from_device(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        description: Description,
    ) -> Self {
        let engine = Self::watched(device, queue, description);
        let lost = engine.health.clone();
        device.set_device_lost_callback(move |reason, message| {
            lock(&lost).lost = Some(format!("{reason:?}: {message}"));
        });
        let errors = engine.health.clone();
        device.on_uncaptured_error(Arc::new(move |error| {
            lock(&errors).error = Some(reported(error, "a transfer", 0));
        }));
        engine
    }

    /// An engine on a device that somebody else watches, and tells with [`GpuEngine::report`].
    pub(crate) fn watched(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        description: Description,
    ) -> Self {
        Self {
            description,
            kernels: Kernels::new(device),
            tier: None,
            untested_matrix_units: AtomicBool::new(false),
            queue: queue.clone(),
            health: Arc::default(),
            part_bytes: AtomicUsize::new(PART_BYTES),
            #[cfg(feature = "pipeline-cache")]
            pipeline_cache: None,
        }
    }

    /// Keeps pipelines in `directory` from now on: reads what an earlier run left, and writes what is new when
    /// the engine is dropped. Without the device feature `PIPELINE_CACHE` nothing happens.
    #[cfg(feature = "pipeline-cache")]
    pub fn keep_pipelines(&mut self, directory: &std::path::Path) {
        let device = self.kernels.device().clone();
        let kept = super::cache::DiskCache::open(&device, directory);
        self.kernels = Kernels::with_matrix_units(&device, self.kernels.matrix_units())
            .with_pipeline_cache(kept.as_ref().map(|c| c.cache().clone()));
        self.pipeline_cache = kept;
    }

    /// The pipelines on disk, where they are kept.
    #[cfg(feature = "pipeline-cache")]
    pub fn pipeline_cache(&self) -> Option<&super::cache::DiskCache> {
        self.pipeline_cache.as_ref()
    }

    /// What the device has reported since the last look.
    pub(crate) fn check(&self) -> Result<()> {
        check_device(self.device(), &self.health)
    }

    /// What is known about the loss of the device.
    #[cfg(all(target_arch = "wasm32", feature = "web"))]
    pub(crate) fn lost(&self) -> Option<String> {
        lock(&self.health).lost.clone()
    }

    /// Something happened to the device outside of any call. The first loss stays; another error is returned by
    /// the next call.
    #[cfg(all(target_arch = "wasm32", feature = "web"))]
    pub(crate) fn report(&self, error: Error) {
        let mut health = lock(&self.health);
        match error {
            Error::DeviceLost(reason) => {
                health.lost.get_or_insert(reason);
            }
            error => health.error = Some(error),
        }
    }

    /// What runs.
    pub fn description(&self) -> Description {
        self.description.clone()
    }

    /// The kernels, for recording onto this engine's device.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// The queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.queue
    }

    /// Bytes of inputs and outputs that go to the device at a time; long prefills are cut to it.
    pub fn set_part_bytes(&self, bytes: usize) {
        self.part_bytes.store(bytes, Ordering::Relaxed);
    }

    fn device(&self) -> &wgpu::Device {
        self.kernels.device()
    }

    fn storage(&self, what: &str, size: u64) -> Result<Owned> {
        let usage = wgpu::BufferUsages::STORAGE
            | wgpu::BufferUsages::COPY_DST
            | wgpu::BufferUsages::COPY_SRC;
        self.kernels.buffer(what, size, usage, None).map(Owned)
    }

    fn readback(&self, size: u64) -> Result<Owned> {
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        self.kernels
            .buffer("the read-back", size, usage, None)
            .map(Owned)
    }

    /// The chunked form. See [`crate::Engine::prefill`].
    ///
    /// # Errors
    /// As there.
    pub async fn prefill(
        &self,
        problem: &Problem,
        tensors: &Tensors<&[f32]>,
        options: &PrefillOptions,
        progress: Progress<'_>,
    ) -> Result<Run> {
        check_device(self.device(), &self.health)?;
        let run = self.prefill_parts(problem, tensors, options, progress);
        diagnosed(self.device(), &self.health, run.await).await
    }

    async fn prefill_parts(
        &self,
        problem: &Problem,
        tensors: &Tensors<&[f32]>,
        options: &PrefillOptions,
        progress: Progress<'_>,
    ) -> Result<Run> {
        problem.validate_lengths(tensors, |t| t.len())?;
        let element = options.element;
        let token_bytes: usize = Operand::ALL
            .into_iter()
            .filter(|&o| problem.uses(o) && problem.rows_per_token(o) > 0)
            .map(|o| {
                problem.rows_per_token(o)
                    * problem.row_len(o)
                    * operand_element(o, element).bytes() as usize
            })
            .sum::<usize>()
            + problem.value_heads * problem.value_dim * element.bytes() as usize;
        // All operands of a part lie in one buffer.
        let part_bytes = self
            .part_bytes
            .load(Ordering::Relaxed)
            .min(usize::try_from(self.device().limits().max_buffer_size / 2).unwrap_or(usize::MAX));
        let limit = (part_bytes / token_bytes.max(1)).max(64) / 64 * 64;

        let state_words = problem.value_heads * problem.state_len();
        let states = self.storage("the states", problem.states_len() as u64 * 4)?;
        let initial = tensors.get(Operand::InitialState).copied();
        if let Some(initial) = initial {
            self.queue
                .write_buffer(&states.0, 0, bytemuck::cast_slice(initial));
        }

        let mut o = vec![0.0; problem.output_len()];
        let mut compute_ms = 0.0;
        let mut segments = 0;
        let mut flying: VecDeque<InFlight> = VecDeque::new();
        let mut done = 0;
        let begun = Instant::now();
        for part in parts(problem, limit) {
            // Two parts at a time: one computes while the other is uploaded or read back.
            if flying.len() == 2
                && let Some(part) = flying.pop_front()
            {
                done += part.tokens.len();
                compute_ms += self.land(problem, element, part, &mut o).await?;
                progress(done, problem.total_tokens());
            }
            let first_state = (part.sequences.start * state_words * 4) as u64;
            let final_state = Slice {
                buffer: &states.0,
                offset: first_state,
                size: (part.sequences.len() * state_words * 4) as u64,
            };
            // Initial states were written where the final states go; zero states need no upload.
            let continues = part.continues || initial.is_some();
            let flight = self.launch(
                problem,
                &part,
                tensors,
                options,
                final_state,
                continues,
                progress,
                done,
            )?;
            segments = segments.max(flight.segments);
            flying.push_back(flight);
        }
        while let Some(part) = flying.pop_front() {
            done += part.tokens.len();
            compute_ms += self.land(problem, element, part, &mut o).await?;
            progress(done, problem.total_tokens());
        }
        if !self
            .device()
            .features()
            .contains(wgpu::Features::TIMESTAMP_QUERY)
        {
            compute_ms = begun.elapsed().as_secs_f64() * 1e3;
        }
        let final_state = read_values(
            self.device(),
            &self.queue,
            &self.health,
            &states.0,
            0,
            Element::F32,
            problem.states_len(),
        )
        .await?;
        Ok(Run {
            outputs: Outputs { o, final_state },
            compute_ms,
            tier: Some(self.tier_of(problem, options)),
            segments,
        })
    }

    /// Uploads a part, submits its passes and starts its read-back.
    #[allow(clippy::too_many_arguments)]
    fn launch(
        &self,
        problem: &Problem,
        part: &Part,
        tensors: &Tensors<&[f32]>,
        options: &PrefillOptions,
        final_state: Slice<'_>,
        continues: bool,
        progress: Progress<'_>,
        done: usize,
    ) -> Result<InFlight> {
        let element = options.element;
        let layout = Layout::new(&part.problem, tensors, element);
        let inputs = self.storage("the inputs", layout.size)?;
        for &(operand, offset, _) in &layout.ranges {
            let values = tensors.get(operand).copied().unwrap_or_default();
            let row = problem.rows_per_token(operand) * problem.row_len(operand);
            let values = match problem.rows_per_token(operand) {
                0 => values,
                _ => &values[part.tokens.start * row..part.tokens.end * row],
            };
            let bytes = device_bytes(values, operand_element(operand, element));
            if !bytes.is_empty() {
                self.queue.write_buffer(&inputs.0, offset, &bytes);
            }
        }
        let bytes = (part.problem.output_len() as u64 * element.bytes()).next_multiple_of(4);
        let output = self.storage("the outputs", bytes)?;
        let readback = self.readback(bytes)?;
        // A short part takes the chunk size of the whole: the same pipelines and, but for segments, the same bits.
        let settings = PrefillSettings {
            chunk: options.chunk,
            segments: options.segments,
            element,
            tier: self.tier_of(problem, options),
            ..PrefillSettings::default()
        };
        let plan = self.kernels.plan_prefill(
            &part.problem,
            &PrefillSettings {
                chunk: Some(self.kernels.chunk(problem, &settings)?),
                continues,
                ..settings
            },
        )?;
        let scratch = self.storage("scratch memory", plan.scratch_bytes())?;
        let call = self.kernels.prefill(
            &plan,
            &layout.slices(&inputs.0),
            Slice::whole(&output.0),
            final_state,
            Some(Slice::whole(&scratch.0)),
        )?;

        // Steps that go into one submission.
        let token_flops = token_flops(problem, plan.chunk()) * problem.value_heads as f64;
        let mut submissions = Vec::new();
        let (mut start, mut flops) = (0, 0.0);
        for i in 0..plan.steps() {
            flops += plan.step_tokens(i) as f64 * token_flops;
            if flops >= SUBMISSION_FLOPS || i + 1 == plan.steps() {
                submissions.push(start..i + 1);
                (start, flops) = (i + 1, 0.0);
            }
        }
        let stamps = self.submit(&call, &submissions, |i| {
            let tokens: usize = submissions[..=i]
                .iter()
                .flat_map(Clone::clone)
                .map(|s| plan.step_tokens(s))
                .sum();
            progress(done + tokens.min(part.tokens.len()), problem.total_tokens());
        })?;

        let mut encoder = self.device().create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(&output.0, 0, &readback.0, 0, bytes);
        self.queue.submit([encoder.finish()]);
        let mapping = map(&readback.0, bytes);
        check_health(&self.health)?;
        Ok(InFlight {
            tokens: part.tokens.clone(),
            readback,
            bytes,
            mapping,
            stamps,
            segments: plan.segments(),
            _buffers: [inputs, output, scratch],
        })
    }

    /// Submits the given groups of steps, with a time stamp at either end of each where the device has them.
    fn submit(
        &self,
        call: &Call,
        submissions: &[Range<usize>],
        submitted: impl Fn(usize),
    ) -> Result<Option<(Owned, u64, Mapping)>> {
        let count = submissions.len() as u32;
        // wgpu allows 4,096 queries a set.
        let timed = self
            .device()
            .features()
            .contains(wgpu::Features::TIMESTAMP_QUERY)
            && (1..=2048).contains(&count);
        let queries = timed.then(|| {
            self.device().create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("eda: times"),
                ty: wgpu::QueryType::Timestamp,
                count: count * 2,
            })
        });
        for (i, steps) in submissions.iter().enumerate() {
            let mut encoder = self.device().create_command_encoder(&Default::default());
            let at = i as u32 * 2;
            call.record_steps(
                &mut encoder,
                steps.clone(),
                queries
                    .as_ref()
                    .map(|query_set| wgpu::ComputePassTimestampWrites {
                        query_set,
                        beginning_of_pass_write_index: Some(at),
                        end_of_pass_write_index: Some(at + 1),
                    }),
            );
            self.queue.submit([encoder.finish()]);
            submitted(i);
        }
        let Some(queries) = queries else {
            return Ok(None);
        };
        let bytes = u64::from(count) * 16;
        let resolved = Owned(self.kernels.buffer(
            "times",
            bytes,
            wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            None,
        )?);
        let readback = self.readback(bytes)?;
        let mut encoder = self.device().create_command_encoder(&Default::default());
        encoder.resolve_query_set(&queries, 0..count * 2, &resolved.0, 0);
        encoder.copy_buffer_to_buffer(&resolved.0, 0, &readback.0, 0, bytes);
        self.queue.submit([encoder.finish()]);
        let mapping = map(&readback.0, bytes);
        Ok(Some((readback, bytes, mapping)))
    }

    /// Sum of the times between pairs of stamps, milliseconds.
    async fn elapsed(&self, stamps: Option<(Owned, u64, Mapping)>) -> Result<f64> {
        let Some((buffer, bytes, mapping)) = stamps else {
            return Ok(0.0);
        };
        mapped(self.device(), &self.health, mapping).await?;
        let view = view(&buffer.0, bytes)?;
        let ticks: Vec<u64> = bytemuck::pod_collect_to_vec(&view[..]);
        let total: u64 = ticks
            .chunks_exact(2)
            .map(|pair| pair[1].saturating_sub(pair[0]))
            .sum();
        Ok(total as f64 * f64::from(self.queue.get_timestamp_period()) * 1e-6)
    }

    /// Waits for a part and copies its outputs; returns its device time, milliseconds.
    async fn land(
        &self,
        problem: &Problem,
        element: Element,
        part: InFlight,
        o: &mut [f32],
    ) -> Result<f64> {
        mapped(self.device(), &self.health, part.mapping).await?;
        let row = problem.value_heads * problem.value_dim;
        let out = &mut o[part.tokens.start * row..part.tokens.end * row];
        if !out.is_empty() {
            host_values(&view(&part.readback.0, part.bytes)?[..], element, out);
        }
        self.elapsed(part.stamps).await
    }

    /// The result of something that could not wait for what error scopes caught, or that.
    pub(crate) async fn diagnosed<T>(&self, result: Result<T>) -> Result<T> {
        diagnosed(self.device(), &self.health, result).await
    }

    /// A pool of zero states, float32. In a browser the next call tells if there was no memory for it.
    ///
    /// # Errors
    /// As [`crate::Engine::pool`].
    pub fn pool(&self, problem: &Problem, slots: usize) -> Result<GpuPool> {
        self.pool_with(problem, slots, Element::F32)
    }

    /// A pool of zero states that lie in memory as `element`.
    ///
    /// # Errors
    /// As [`crate::Engine::pool_with`].
    pub fn pool_with(&self, problem: &Problem, slots: usize, element: Element) -> Result<GpuPool> {
        check_device(self.device(), &self.health)?;
        problem.validate()?;
        self.kernels.check_element(element)?;
        let words = problem.value_heads * problem.state_len();
        let slot_bytes = words as u64 * element.bytes();
        // Slots are copied, which goes by four bytes.
        if !slot_bytes.is_multiple_of(4) {
            return Err(Error::unsupported(
                "values of a state in a float16 pool",
                words,
                "an even number",
            ));
        }
        let bytes = (slots as u64).saturating_mul(slot_bytes);
        // A new buffer is zero, by the WebGPU specification.
        let usage = wgpu::BufferUsages::STORAGE
            | wgpu::BufferUsages::COPY_DST
            | wgpu::BufferUsages::COPY_SRC;
        let buffer = self.kernels.buffer("the state pool", bytes, usage, None)?;
        Ok(GpuPool {
            buffer,
            element,
            slots,
            shape: [problem.value_heads, problem.key_dim, problem.value_dim],
            device: self.device().clone(),
            queue: self.queue.clone(),
            health: self.health.clone(),
        })
    }

    /// Continues states. See [`crate::Engine::decode`].
    ///
    /// # Errors
    /// As there.
    pub async fn decode(
        &self,
        problem: &Problem,
        tensors: &Tensors<&[f32]>,
        pool: &mut GpuPool,
        rows: &[Row],
        options: &DecodeOptions,
    ) -> Result<(Vec<f32>, f64)> {
        check_device(self.device(), &self.health)?;
        let run = self.decode_rows(problem, tensors, pool, rows, options.element);
        diagnosed(self.device(), &self.health, run.await).await
    }

    async fn decode_rows(
        &self,
        problem: &Problem,
        tensors: &Tensors<&[f32]>,
        pool: &mut GpuPool,
        rows: &[Row],
        element: Element,
    ) -> Result<(Vec<f32>, f64)> {
        problem.validate_lengths(tensors, |t| t.len())?;
        validate_rows(rows, problem.batch, pool.slots)?;
        if pool.device != *self.device() {
            return Err(Error::tensor(
                "the state pool",
                "one of this engine",
                "one of another device",
            ));
        }
        let shape = [problem.value_heads, problem.key_dim, problem.value_dim];
        if shape != pool.shape {
            return Err(Error::tensor(
                "the state pool",
                format!("states [HV, K, V] = {shape:?}"),
                format!("{:?}", pool.shape),
            ));
        }
        let layout = Layout::new(problem, tensors, element);
        let inputs = self.storage("the inputs", layout.size)?;
        for &(operand, offset, _) in &layout.ranges {
            let values = tensors.get(operand).copied().unwrap_or_default();
            let bytes = device_bytes(values, operand_element(operand, element));
            if !bytes.is_empty() {
                self.queue.write_buffer(&inputs.0, offset, &bytes);
            }
        }
        let bytes = (problem.output_len() as u64 * element.bytes()).next_multiple_of(4);
        let output = self.storage("the outputs", bytes)?;
        let readback = self.readback(bytes)?;
        let call = self.kernels.decode_with(
            problem,
            DecodeSettings {
                element,
                state: pool.element,
            },
            &layout.slices(&inputs.0),
            Slice::whole(&output.0),
            Slice {
                buffer: &pool.buffer,
                offset: 0,
                size: pool.slots as u64 * pool.slot_bytes(),
            },
            rows,
        )?;
        let begun = Instant::now();
        let all = 0..call.steps();
        let stamps = self.submit(&call, std::slice::from_ref(&all), |_| {})?;
        let mut encoder = self.device().create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(&output.0, 0, &readback.0, 0, bytes);
        self.queue.submit([encoder.finish()]);
        let mapping = map(&readback.0, bytes);
        mapped(self.device(), &self.health, mapping).await?;
        let mut o = vec![0.0; problem.output_len()];
        if !o.is_empty() {
            host_values(&view(&readback.0, bytes)?[..], element, &mut o);
        }
        let timed = stamps.is_some();
        let mut ms = self.elapsed(stamps).await?;
        if !timed {
            ms = begun.elapsed().as_secs_f64() * 1e3;
        }
        Ok((o, ms))
    }
}

/// Multiply-adds a token and value head, times two.
fn token_flops(problem: &Problem, chunk: usize) -> f64 {
    let n = problem.rule.update().substeps() as f64;
    let (k, v, c) = (
        problem.key_dim as f64,
        problem.value_dim as f64,
        chunk as f64,
    );
    let with_state = (2.0 * n + 1.0) * k * v;
    let in_chunk = n * (n + 1.0) * c * k + n * n * c * v + n * c * v;
    2.0 * (with_state + in_chunk)
}

async fn read_values(
    device: &wgpu::Device,
    queue: &wgpu::Queue,
    health: &Mutex<Health>,
    buffer: &wgpu::Buffer,
    offset: u64,
    element: Element,
    count: usize,
) -> Result<Vec<f32>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let bytes = count as u64 * element.bytes();
    let readback = Owned(guarded(device, "the read-back", bytes, || {
        device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("eda: read-back"),
            size: bytes,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    })?);
    let mut encoder = device.create_command_encoder(&Default::default());
    encoder.copy_buffer_to_buffer(buffer, offset, &readback.0, 0, bytes);
    queue.submit([encoder.finish()]);
    let mapping = map(&readback.0, bytes);
    mapped(device, health, mapping).await?;
    let mut values = vec![0.0; count];
    host_values(&view(&readback.0, bytes)?[..], element, &mut values);
    Ok(values)
}

impl GpuPool {
    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    fn state_len(&self) -> usize {
        self.shape.iter().product()
    }

    fn slot_bytes(&self) -> u64 {
        self.state_len() as u64 * self.element.bytes()
    }

    /// How the states lie in memory.
    pub fn element(&self) -> Element {
        self.element
    }

    fn slot_offset(&self, slot: usize) -> Result<u64> {
        if slot >= self.slots {
            return Err(Error::tensor("slot", format!("below {}", self.slots), slot));
        }
        check_device(&self.device, &self.health)?;
        Ok(slot as u64 * self.slot_bytes())
    }

    /// The state in a slot, `[HV, K, V]`.
    ///
    /// # Errors
    /// As [`crate::Pool::read`].
    pub async fn read(&self, slot: usize) -> Result<Vec<f32>> {
        let offset = self.slot_offset(slot)?;
        read_values(
            &self.device,
            &self.queue,
            &self.health,
            &self.buffer,
            offset,
            self.element,
            self.state_len(),
        )
        .await
    }

    /// Replaces the state in a slot.
    ///
    /// # Errors
    /// As [`crate::Pool::write`].
    pub fn write(&mut self, slot: usize, state: &[f32]) -> Result<()> {
        let offset = self.slot_offset(slot)?;
        if state.len() != self.state_len() {
            return Err(Error::tensor(
                "state",
                format!("{} values, [HV, K, V] = {:?}", self.state_len(), self.shape),
                format!("{} values", state.len()),
            ));
        }
        let bytes = device_bytes(state, self.element);
        self.queue.write_buffer(&self.buffer, offset, &bytes);
        check_health(&self.health)
    }

    /// Copies a state to another slot.
    ///
    /// # Errors
    /// As [`crate::Pool::copy`].
    pub fn copy(&mut self, from: usize, to: usize) -> Result<()> {
        let (from, to) = (self.slot_offset(from)?, self.slot_offset(to)?);
        if from == to {
            return Ok(());
        }
        // A copy within one buffer is not allowed, so it goes through another.
        let bytes = self.slot_bytes();
        let between = guarded(&self.device, "a copy of a slot", bytes, || {
            self.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("eda: slot copy"),
                size: bytes,
                usage: wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        })?;
        let mut encoder = self.device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(&self.buffer, from, &between, 0, bytes);
        encoder.copy_buffer_to_buffer(&between, 0, &self.buffer, to, bytes);
        self.queue.submit([encoder.finish()]);
        check_health(&self.health)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rule;

    #[test]
    fn parts_cover_every_token_once_and_continue_one_sequence_at_a_time() {
        for offsets in [
            vec![0, 1000],
            vec![0, 0, 10, 400, 400, 1000, 1000],
            vec![0, 64, 128, 1000],
        ] {
            let mut p = Problem::new(Rule::Kda, [1, 1000, 1, 1, 4, 4]);
            p.cu_seqlens = Some(offsets.clone());
            for limit in [64, 128, 320, 5000] {
                let parts = parts(&p, limit);
                let mut at = 0;
                let mut sequence = 0;
                for part in &parts {
                    part.problem.validate().expect("a valid part");
                    assert_eq!(part.tokens.start, at);
                    assert!(part.tokens.len() <= limit);
                    at = part.tokens.end;
                    if part.continues {
                        assert_eq!(part.sequences, sequence - 1..sequence);
                    } else {
                        assert_eq!(part.sequences.start, sequence);
                    }
                    sequence = part.sequences.end;
                }
                assert_eq!((at, sequence), (1000, offsets.len() - 1));
            }
        }
    }
}
