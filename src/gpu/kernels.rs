//! The kernels on a device that somebody else may own: they record into the caller's encoder, over slices of
//! the caller's buffers, and do nothing else. No submit, no wait, no read-back, no callback replaced.
//!
//! ```no_run
//! # use eda_wgpu::{gpu::kernels::*, Operand, Problem, Rule, Tensors};
//! # fn f(device: &wgpu::Device, queue: &wgpu::Queue, buffer: &wgpu::Buffer) -> eda_wgpu::Result<()> {
//! let kernels = Kernels::new(device);
//! let problem = Problem::new(Rule::Kda, [1, 4096, 4, 4, 128, 128]);
//! # let slice = |i: u64| Slice { buffer, offset: i << 24, size: 4096 * 4 * 128 * 4 };
//! let tensors = Tensors::new().with(Operand::Q, slice(0)).with(Operand::K, slice(1)); // …
//! let plan = kernels.plan_prefill(&problem, &PrefillSettings::default())?;
//! let call = kernels.prefill(&plan, &tensors, slice(5), slice(6), None)?;
//! let mut encoder = device.create_command_encoder(&Default::default());
//! call.record(&mut encoder);
//! queue.submit([encoder.finish()]);
//! # Ok(()) }
//! ```

use super::matrix::{self, MatrixUnits};
use super::plan::{self, Bounds, Step};
use super::segments;
use super::shaders::{self, Access, Binding, ChunkShape, Pass, Variant};
use crate::engine::{Element, Tier};
use crate::error::{Error, Result};
use crate::problem::{Decay, DecayGate, Operand, Problem, Tensors};
use crate::slots::{Row, validate_rows};
use bytemuck::{Pod, Zeroable};
use futures::FutureExt;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A tensor's place: bytes `offset .. offset + size` of a buffer with `STORAGE` usage, contiguous, row-major.
/// The offset is a multiple of 4; it need not be aligned to the device's binding offsets. (At multiples of 16, what lies
/// there is loaded several elements at a time.)
#[derive(Debug, Clone, Copy)]
pub struct Slice<'a> {
    /// The buffer.
    pub buffer: &'a wgpu::Buffer,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
}

impl<'a> Slice<'a> {
    /// The whole of a buffer.
    pub fn whole(buffer: &'a wgpu::Buffer) -> Self {
        Self {
            buffer,
            offset: 0,
            size: buffer.size(),
        }
    }
}

impl Element {
    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            Element::F32 => 4,
            Element::F16 => 2,
        }
    }
}

/// `struct Params` of `shaders/params.wgsl`.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct Params {
    heads: u32,
    value_heads: u32,
    first_head: u32,
    head_count: u32,
    chunk_count: u32,
    piece_at: u32,
    piece_count: u32,
    row_count: u32,
    tokens: u32,
    first_token: u32,
    last_token: u32,
    scale: f32,
    lower_bound: f32,
    q_at: u32,
    k_at: u32,
    x1_at: u32,
    x2_at: u32,
    g_at: u32,
    v_at: u32,
    o_at: u32,
    initial_at: u32,
    state_at: u32,
    beta_at: u32,
    gamma_at: u32,
    a_log_at: u32,
    dt_bias_at: u32,
    scratch_at: u32,
    halves_at: u32,
    transition_at: u32,
    /// To a multiple of 16 bytes.
    unused: [u32; 3],
}

const PARAMS_SIZE: u64 = size_of::<Params>() as u64;
/// Batch rows a decode dispatch: `slots` in `shaders/decode.wgsl` holds two an entry.
const ROWS_PER_DISPATCH: usize = 2048;
/// `RESET` in `shaders/decode.wgsl`.
const RESET: i32 = 0x4000_0000;

/// Held while its pipeline is built, so that threads build different ones at the same time and none twice.
type PipelineSlot = Arc<Mutex<Option<Arc<Pipeline>>>>;

struct Pipeline {
    pipeline: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
}

#[derive(PartialEq, Eq, Hash)]
struct PipelineKey {
    pass: Pass,
    variant: Variant,
    constants: Vec<(&'static str, u64)>,
}

/// Bindings that the passes number (the largest of [`Binding`], plus one).
const BINDINGS: usize = Binding::Halves as usize + 1;
/// Bytes bound in place of an operand that is absent or empty.
const NOTHING: u64 = 256;

/// Pipelines for a device, built when first used and kept.
pub struct Kernels {
    device: wgpu::Device,
    limits: wgpu::Limits,
    features: wgpu::Features,
    /// A processor plays the GPU.
    software: bool,
    matrix: Option<MatrixUnits>,
    width: Option<usize>,
    /// Bound in place of operands that are absent or empty: [`NOTHING`] bytes for each binding number, since
    /// browsers refuse writable bindings that overlap.
    nothing: wgpu::Buffer,
    pipelines: Mutex<HashMap<PipelineKey, PipelineSlot>>,
    /// Where the driver looks before it compiles, and what it adds to.
    pipeline_cache: Option<wgpu::PipelineCache>,
}

/// Settings of a prefill.
#[derive(Debug, Clone)]
pub struct PrefillSettings {
    /// Tokens a chunk, chosen where `None`.
    pub chunk: Option<usize>,
    /// Storage type of q, k, v, e, p, a, b, w, g and o. (beta, gamma, A_log, dt_bias and states are float32.)
    pub element: Element,
    /// Most bytes of scratch memory for chunks; long problems are cut into steps that fit it.
    pub scratch_limit: u64,
    /// The final-state slice already holds the states that the sequences continue.
    pub continues: bool,
    /// An initial-state slice will be given.
    pub has_initial: bool,
    /// Kernel family. [`Tier::Matrix`] needs [`Kernels::with_matrix_units`].
    pub tier: Tier,
    /// Segments that long sequences are cut into and that are computed at the same time, at most
    /// [`segments::MOST`] (1 for no cut); where `None`, as many as pay by a model of a device of
    /// [`Kernels::width`]. Scratch memory for them comes on top of `scratch_limit`, at most a quarter of it.
    pub segments: Option<usize>,
}

impl Default for PrefillSettings {
    fn default() -> Self {
        Self {
            chunk: None,
            element: Element::F32,
            scratch_limit: 194 << 20,
            continues: false,
            has_initial: false,
            tier: Tier::Portable,
            segments: None,
        }
    }
}

/// How a decode's tensors lie in memory; its arithmetic is float32 in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DecodeSettings {
    /// Storage type of q, k, v, e, p, a, b, w, g and o. (beta, gamma, A_log and dt_bias are float32.)
    pub element: Element,
    /// Storage type of the states in the pool.
    pub state: Element,
}

/// How a prefill is cut up on a device; holds for every call with the same problem and settings.
pub struct PrefillPlan {
    problem: Problem,
    settings: PrefillSettings,
    shape: ChunkShape,
    steps: Vec<Step>,
    /// Tables of the steps, and where each starts.
    table: wgpu::Buffer,
    table_at: Vec<u64>,
    /// Bytes for chunks, a multiple of 256; the gates come last where they have to be gathered.
    chunk_bytes: u64,
    /// Bytes for the slots of segments, a multiple of 256; they follow the chunks.
    segment_bytes: u64,
    gate_bytes: u64,
}

impl PrefillPlan {
    /// Bytes of scratch memory that a call needs.
    pub fn scratch_bytes(&self) -> u64 {
        self.chunk_bytes + self.segment_bytes + self.gate_bytes
    }

    /// The most segments that are computed at the same time, of all sequences of a step; 0 where none is cut.
    pub fn segments(&self) -> usize {
        self.steps.iter().map(|s| s.slots).max().unwrap_or(0)
    }

    /// Tokens a chunk.
    pub fn chunk(&self) -> usize {
        self.shape.tokens
    }

    /// Number of steps; each is a bounded amount of work: the passes of the prefill, after a dispatch for each gate
    /// tensor where gates have to be gathered.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// Tokens (summed over heads and divided by them, rounded) that step `i` advances.
    pub fn step_tokens(&self, i: usize) -> usize {
        let step = &self.steps[i];
        let tokens: usize = step.table[..step.chunks]
            .iter()
            .map(|c| c[1] as usize)
            .sum();
        tokens * step.heads.len() / self.problem.value_heads
    }
}

struct Dispatch {
    #[cfg_attr(target_arch = "wasm32", allow(dead_code, reason = "for timing"))]
    pass: Pass,
    pipeline: Arc<Pipeline>,
    bind_group: wgpu::BindGroup,
    groups: (u32, u32),
}

impl Dispatch {
    fn record(&self, pass: &mut wgpu::ComputePass<'_>) {
        pass.set_pipeline(&self.pipeline.pipeline);
        pass.set_bind_group(0, &self.bind_group, &[]);
        pass.dispatch_workgroups(self.groups.0, self.groups.1, 1);
    }
}

/// A call with its buffers bound, ready to be recorded (any number of times).
pub struct Call {
    steps: Vec<Vec<Dispatch>>,
}

impl Call {
    /// Records the whole operation.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder) {
        self.record_steps(encoder, 0..self.steps.len(), None);
    }

    /// Number of steps that [`Call::record_steps`] can record apart.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// Records some of the steps, which must reach the queue in order.
    pub fn record_steps(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        steps: std::ops::Range<usize>,
        timestamps: Option<wgpu::ComputePassTimestampWrites<'_>>,
    ) {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
            label: Some("eda"),
            timestamp_writes: timestamps,
        });
        self.record_into(&mut pass, steps);
    }

    /// Whether the pass occurs.
    pub(crate) fn has(&self, pass: Pass) -> bool {
        self.steps.iter().flatten().any(|d| d.pass == pass)
    }

    /// Records the dispatches of one pass alone, for timing it.
    #[cfg_attr(target_arch = "wasm32", allow(dead_code, reason = "for timing"))]
    pub(crate) fn record_only(&self, compute: &mut wgpu::ComputePass<'_>, pass: Pass) {
        for dispatch in self.steps.iter().flatten().filter(|d| d.pass == pass) {
            dispatch.record(compute);
        }
    }

    /// Records some of the steps into a compute pass that the caller has begun. Several calls may go into one
    /// pass; each sees what the ones before it wrote.
    pub fn record_into(&self, pass: &mut wgpu::ComputePass<'_>, steps: std::ops::Range<usize>) {
        for dispatch in self
            .steps
            .iter()
            .take(steps.end)
            .skip(steps.start)
            .flatten()
        {
            dispatch.record(pass);
        }
    }
}

/// A buffer range in a bind group, and whose it is.
#[derive(Clone, Copy)]
struct Bound<'a> {
    buffer: &'a wgpu::Buffer,
    offset: u64,
    size: u64,
}

/// What is bound where in one step, by binding number.
#[derive(Clone)]
struct Bindings<'a> {
    bound: [Option<Bound<'a>>; BINDINGS],
    nothing: &'a wgpu::Buffer,
}

impl<'a> Bindings<'a> {
    fn set(&mut self, binding: Binding, bound: impl Into<Option<Bound<'a>>>) {
        self.bound[binding as usize] = bound.into();
    }

    fn get(&self, binding: Binding) -> Bound<'a> {
        self.bound[binding as usize].unwrap_or(Bound {
            buffer: self.nothing,
            offset: binding as u64 * NOTHING,
            size: NOTHING,
        })
    }
}

/// A slice by name, with the bytes of it that are used.
type Named<'a> = (&'static str, Slice<'a>, u64);

/// Refuses written slices that overlap each other or one that is read: what is in them would depend on timing.
fn check_overlaps(written: &[Named<'_>], read: &[Named<'_>]) -> Result<()> {
    for (i, (name, a, a_bytes)) in written.iter().enumerate() {
        for (other, b, b_bytes) in written[i + 1..].iter().chain(read) {
            let overlap = a.buffer == b.buffer
                && a.offset < b.offset.saturating_add(*b_bytes)
                && b.offset < a.offset.saturating_add(*a_bytes);
            if overlap && *a_bytes > 0 && *b_bytes > 0 {
                return Err(Error::tensor(
                    *name,
                    "bytes that no other slice has, since they are written",
                    format!(
                        "bytes {}..{} over `{other}` at {}..{}",
                        a.offset,
                        a.offset + a_bytes,
                        b.offset,
                        b.offset + b_bytes
                    ),
                ));
            }
        }
    }
    Ok(())
}

/// Workgroups folded into two dimensions of at most 65,535.
fn fold(groups: u64, what: &str) -> Result<(u32, u32)> {
    const SIDE: u64 = 65_535;
    let y = groups.div_ceil(SIDE).max(1);
    if y > SIDE {
        return Err(Error::unsupported(
            format!("workgroups of {what}"),
            groups,
            SIDE * SIDE,
        ));
    }
    let x = groups.div_ceil(y);
    // Both fit u32 by the bound above.
    Ok((x as u32, y as u32))
}

fn offset_u32(what: &str, elements: u64) -> Result<u32> {
    u32::try_from(elements).map_err(|_| {
        Error::unsupported(format!("offset of {what} in elements"), elements, u32::MAX)
    })
}

/// Runs `create` under error scopes of our own; what they caught comes later.
#[cfg(target_arch = "wasm32")]
pub(crate) fn guarded<T>(
    device: &wgpu::Device,
    what: &str,
    bytes: u64,
    create: impl FnOnce() -> T,
) -> Result<T> {
    Ok(super::scopes::guarded(device, what, bytes, create))
}

/// Runs `create` under error scopes of our own and turns what they caught into an [`Error`].
#[cfg(not(target_arch = "wasm32"))]
pub(crate) fn guarded<T>(
    device: &wgpu::Device,
    what: &str,
    bytes: u64,
    create: impl FnOnce() -> T,
) -> Result<T> {
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let value = create();
    // Natively the result is there at once.
    let caught = [
        memory.pop().now_or_never(),
        internal.pop().now_or_never(),
        validation.pop().now_or_never(),
    ];
    match caught.into_iter().flatten().flatten().next() {
        Some(error) => Err(reported(error, what, bytes)),
        None => Ok(value),
    }
}

/// What wgpu reports, as an [`Error`] of this crate.
pub(super) fn reported(error: wgpu::Error, what: &str, bytes: u64) -> Error {
    match error {
        wgpu::Error::OutOfMemory { .. } => Error::OutOfMemory {
            what: what.to_owned(),
            bytes,
        },
        other => Error::Device(format!("{what}: {other}")),
    }
}

impl Kernels {
    /// Kernels for a device; costs nothing until a plan is made.
    pub fn new(device: &wgpu::Device) -> Self {
        // On a device that is already lost (or full) this buffer is invalid, and so is every later call; the
        // error is theirs to report, not the owner's uncaptured one.
        let scopes = [
            wgpu::ErrorFilter::Validation,
            wgpu::ErrorFilter::OutOfMemory,
        ]
        .map(|filter| device.push_error_scope(filter));
        let nothing = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("eda: nothing"),
            size: NOTHING * BINDINGS as u64,
            usage: wgpu::BufferUsages::STORAGE,
            mapped_at_creation: false,
        });
        for scope in scopes.into_iter().rev() {
            let _ = scope.pop().now_or_never();
        }
        Self {
            device: device.clone(),
            limits: device.limits(),
            features: device.features(),
            software: device.adapter_info().device_type == wgpu::DeviceType::Cpu,
            matrix: None,
            width: None,
            nothing,
            pipelines: Mutex::new(HashMap::new()),
            pipeline_cache: None,
        }
    }

    /// Kernels that may also run on matrix units: `units` are [`MatrixUnits::of`] the device's adapter. Without the
    /// features in [`matrix::FEATURES`] the device has none.
    pub fn with_matrix_units(device: &wgpu::Device, units: Option<MatrixUnits>) -> Self {
        let mut kernels = Self::new(device);
        kernels.matrix = units.filter(|_| kernels.features.contains(matrix::FEATURES));
        kernels
    }

    /// The matrix units that [`Tier::Matrix`] runs on.
    pub fn matrix_units(&self) -> Option<MatrixUnits> {
        self.matrix
    }

    /// Pipelines are looked up in this cache of the device's before the driver compiles them, and added to it.
    /// Saving it is up to its owner.
    #[must_use]
    pub fn with_pipeline_cache(mut self, cache: Option<wgpu::PipelineCache>) -> Self {
        self.pipeline_cache = cache;
        self
    }

    /// The device.
    pub fn device(&self) -> &wgpu::Device {
        &self.device
    }

    /// Pipelines built so far.
    pub fn pipeline_count(&self) -> usize {
        self.pipelines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .filter(|slot| slot.lock().is_ok_and(|pipeline| pipeline.is_some()))
            .count()
    }

    /// Creates a buffer, reporting what went wrong as an [`Error`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] above the device's buffer size, [`Error::OutOfMemory`].
    pub fn buffer(
        &self,
        what: &str,
        size: u64,
        usage: wgpu::BufferUsages,
        contents: Option<&[u8]>,
    ) -> Result<wgpu::Buffer> {
        let limit = self.limits.max_buffer_size & !3;
        if size > limit {
            return Err(Error::unsupported(
                format!("bytes of {what}"),
                size,
                format!("{limit} (the device's buffer size)"),
            ));
        }
        let size = size.next_multiple_of(4).max(256);
        guarded(&self.device, what, size, || {
            let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(what),
                size,
                usage,
                mapped_at_creation: contents.is_some(),
            });
            if let Some(contents) = contents {
                if let Ok(mut view) = buffer.slice(..).get_mapped_range_mut() {
                    view.slice(..contents.len()).copy_from_slice(contents);
                }
                buffer.unmap();
            }
            buffer
        })
    }

    pub(super) fn check_element(&self, element: Element) -> Result<()> {
        if element == Element::F16 && !self.features.contains(wgpu::Features::SHADER_F16) {
            return Err(Error::unsupported(
                "element type",
                "float16",
                "float32: the device has no SHADER_F16",
            ));
        }
        Ok(())
    }

    fn bounds(&self, settings: &PrefillSettings) -> Bounds {
        Bounds {
            scratch: settings
                .scratch_limit
                .min(self.limits.max_buffer_size - 512),
            binding: self.binding_limit(),
            element: settings.element,
            // A browser says nothing about the device that it runs on.
            iterations: match self.device.adapter_info().device_type {
                wgpu::DeviceType::DiscreteGpu | wgpu::DeviceType::IntegratedGpu => usize::MAX,
                _ => shaders::MAX_ITERATIONS,
            },
            segments: settings.segments,
            width: self.width(),
        }
    }

    /// How many workgroups of a scan the device is taken to run in about the time of one, which decides where
    /// sequences are cut into segments: 128 for a discrete GPU, 16 for an integrated one, else 1 (no cut).
    pub fn width(&self) -> usize {
        self.width
            .unwrap_or_else(|| match self.device.adapter_info().device_type {
                wgpu::DeviceType::DiscreteGpu => 128,
                wgpu::DeviceType::IntegratedGpu => 16,
                _ => 1,
            })
    }

    /// Says how wide the device is, where it is known better.
    pub fn set_width(&mut self, workgroups: usize) {
        self.width = Some(workgroups);
    }

    /// Largest binding that is used: shaders index words with 32 bits.
    fn binding_limit(&self) -> u64 {
        self.limits.max_storage_buffer_binding_size.min(1 << 32) & !255
    }

    /// Cuts a prefill for this device. Costs a small buffer; the pipelines are built by [`Kernels::prefill`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] where a size exceeds what the device or the kernels take.
    pub fn plan_prefill(
        &self,
        problem: &Problem,
        settings: &PrefillSettings,
    ) -> Result<PrefillPlan> {
        problem.validate()?;
        self.check_element(settings.element)?;
        let shape = self.chunk_shape(problem, settings)?;
        let steps = plan::steps(
            problem,
            &shape,
            &self.bounds(settings),
            settings.has_initial,
            settings.continues,
        )?;
        let mut table = Vec::new();
        let mut table_at = Vec::new();
        for step in &steps {
            let alignment = self.limits.min_storage_buffer_offset_alignment as usize;
            table.resize(table.len().next_multiple_of(alignment.max(16)), 0u8);
            table_at.push(table.len() as u64);
            table.extend_from_slice(bytemuck::cast_slice(&step.table));
        }
        let most = |f: &dyn Fn(&Step) -> u64| steps.iter().map(f).max().unwrap_or(0);
        let chunk_bytes = most(&|s| s.scratch_words(&shape) * 4).next_multiple_of(256);
        let gate_bytes = most(&|s| self.gate_words(problem, s.tokens.len()) * 4);
        let segment_bytes =
            most(&|s| s.slots as u64 * segments::slot_bytes(problem)).next_multiple_of(256);
        let table = self.buffer(
            "the table of chunks",
            table.len() as u64,
            wgpu::BufferUsages::STORAGE,
            Some(&table),
        )?;
        Ok(PrefillPlan {
            problem: problem.clone(),
            settings: settings.clone(),
            shape,
            steps,
            table,
            table_at,
            chunk_bytes,
            segment_bytes,
            gate_bytes,
        })
    }

    /// How a prefill cuts sequences into chunks.
    fn chunk_shape(&self, problem: &Problem, settings: &PrefillSettings) -> Result<ChunkShape> {
        if settings.tier == Tier::Portable {
            return plan::chunk_shape(problem, settings.chunk);
        }
        let Some(units) = self.matrix else {
            return Err(Error::unsupported(
                "tier",
                "matrix",
                "portable: the device has no matrix units that the kernels can use",
            ));
        };
        plan::matrix_chunk_shape(problem, settings.chunk, units, &self.limits, self.width())
    }

    /// Tokens a chunk that a prefill takes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a size that the problem or the device does not take.
    pub fn chunk(&self, problem: &Problem, settings: &PrefillSettings) -> Result<usize> {
        Ok(self.chunk_shape(problem, settings)?.tokens)
    }

    /// Whether a prefill can run on this device's matrix units.
    pub fn fits_matrix_units(&self, problem: &Problem, chunk: Option<usize>) -> bool {
        self.matrix.is_some_and(|units| {
            plan::matrix_chunk_shape(problem, chunk, units, &self.limits, self.width()).is_ok()
        })
    }

    /// Float words that gathering the gates of `tokens` tokens takes.
    fn gate_words(&self, problem: &Problem, tokens: usize) -> u64 {
        GATES
            .into_iter()
            .filter(|&o| problem.uses(o))
            .map(|o| match problem.rows_per_token(o) {
                0 => problem.row_len(o) as u64,
                rows => (tokens * rows * problem.row_len(o)) as u64,
            })
            .sum()
    }

    /// Binds a prefill: `o [B, T, HV, V]` and `final_state [N, HV, K, V]` (float32) are written, nothing
    /// outside them. `scratch` needs [`PrefillPlan::scratch_bytes`], at an offset that is a multiple of 16; it is
    /// allocated where `None`, and lives as long as the call.
    ///
    /// Slices may lie in one and the same buffer as long as those that are written overlap no other. (Sequences
    /// that continue the states in `final_state` take no initial state but [`PrefillSettings::continues`].)
    /// In a browser the slices of a buffer that is also written must in addition start at multiples of 256.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a missing, extra or misplaced slice, [`Error::Unsupported`] where the device
    /// grants too little, [`Error::OutOfMemory`].
    pub fn prefill(
        &self,
        plan: &PrefillPlan,
        tensors: &Tensors<Slice<'_>>,
        o: Slice<'_>,
        final_state: Slice<'_>,
        scratch: Option<Slice<'_>>,
    ) -> Result<Call> {
        let problem = &plan.problem;
        let element = plan.settings.element;
        self.check_slices(problem, element, tensors)?;
        self.check_slice("o", o, problem.output_len() as u64 * element.bytes())?;
        self.check_slice("final_state", final_state, problem.states_len() as u64 * 4)?;
        if plan.settings.has_initial != tensors.get(Operand::InitialState).is_some() {
            return Err(Error::tensor(
                "initial_state",
                if plan.settings.has_initial {
                    "a slice, as planned"
                } else {
                    "none, as planned"
                },
                "the opposite",
            ));
        }
        let owned;
        let scratch = match scratch {
            Some(s) => {
                self.check_slice("scratch", s, plan.scratch_bytes())?;
                s
            }
            None => {
                owned = self.buffer(
                    "scratch memory",
                    plan.scratch_bytes(),
                    wgpu::BufferUsages::STORAGE,
                    None,
                )?;
                Slice::whole(&owned)
            }
        };
        check_overlaps(
            &[
                ("o", o, problem.output_len() as u64 * element.bytes()),
                ("final_state", final_state, problem.states_len() as u64 * 4),
                ("scratch", scratch, plan.scratch_bytes()),
            ],
            &named(problem, element, tensors),
        )?;

        let mut writer = ParamsWriter::default();
        let mut prepared = Vec::with_capacity(plan.steps.len());
        for (step, &table_at) in plan.steps.iter().zip(&plan.table_at) {
            let mut params = self.problem_params(problem);
            params.first_head = step.heads.start as u32;
            params.head_count = step.heads.len() as u32;
            params.chunk_count = step.chunks as u32;
            let mut bound = self.no_bindings();
            let rows = step.tokens.clone();
            self.bind_operands(problem, element, tensors, &rows, &mut params, &mut bound)?;
            let (at, range) = self.range("o", o, output_rows(problem, &rows), element.bytes())?;
            params.o_at = at;
            bound.set(Binding::O, range);
            let state_words = plan::state_bytes(problem) / 4;
            let states =
                step.states.start as u64 * state_words..step.states.end as u64 * state_words;
            let (at, range) = self.range("final_state", final_state, states.clone(), 4)?;
            params.state_at = at;
            bound.set(Binding::State, range);
            if let Some(&initial) = tensors.get(Operand::InitialState) {
                let (at, range) = self.range("initial_state", initial, states, 4)?;
                params.initial_at = at;
                bound.set(Binding::Initial, range);
            }
            bound.set(
                Binding::Table,
                Bound {
                    buffer: &plan.table,
                    offset: table_at,
                    size: (step.table.len() as u64 * 16).max(16),
                },
            );
            let (words, halves) = step.scratch_parts(&plan.shape);
            // (Counted in vec4s of float16; both parts start at multiples of 16 bytes.)
            let (at, range) = self.range("scratch", scratch, halves, 4)?;
            params.halves_at = at / 2;
            bound.set(Binding::Halves, range);
            let (at, range) = self.range("scratch", scratch, words, 4)?;
            // The scan views scratch memory in vec4s, the bytes before it included.
            if !at.is_multiple_of(4) {
                return Err(Error::tensor(
                    "scratch",
                    "an offset that is a multiple of 16 bytes",
                    scratch.offset,
                ));
            }
            params.scratch_at = at;
            bound.set(Binding::Scratch, range);
            let packs = self.bind_gates(
                problem,
                tensors,
                &[o, final_state, scratch],
                &rows,
                Slice {
                    offset: scratch.offset + plan.chunk_bytes + plan.segment_bytes,
                    size: plan.gate_bytes,
                    ..scratch
                },
                &mut params,
                &mut bound,
                &mut writer,
            )?;
            let segments = Slice {
                offset: scratch.offset + plan.chunk_bytes,
                size: plan.segment_bytes,
                ..scratch
            };
            let works = self.works(plan, step, segments, params, bound)?;
            let works: Vec<_> = works
                .into_iter()
                .map(|work| (writer.push(work.params), work))
                .collect();
            prepared.push((packs, works));
        }
        let uniforms = self.buffer(
            "parameters",
            writer.bytes.len() as u64,
            wgpu::BufferUsages::UNIFORM,
            Some(&writer.bytes),
        )?;

        let mut steps = Vec::with_capacity(prepared.len());
        for (packs, works) in prepared {
            let mut dispatches = self.pack_dispatches(packs, &uniforms)?;
            for (at, mut work) in works {
                work.bound.set(Binding::Params, params_at(&uniforms, at));
                let mut variant = self.variant(work.pass, problem, element);
                variant.by_four = shaders::can_read_by_four(work.pass, problem)
                    && lies_by_four(work.pass, variant, &work.params, &work.bound);
                dispatches.push(self.dispatch_variant(
                    work.pass,
                    variant,
                    problem,
                    Some(&plan.shape),
                    work.transition,
                    &work.bound,
                    work.groups,
                )?);
            }
            steps.push(dispatches);
        }
        Ok(Call { steps })
    }

    /// The passes of a step, in order, with what each is bound to. `params` and `bound` are those of the passes over
    /// chunks; `segments` is the memory for slots.
    fn works<'a>(
        &'a self,
        plan: &PrefillPlan,
        step: &Step,
        segments: Slice<'a>,
        params: Params,
        bound: Bindings<'a>,
    ) -> Result<Vec<Work<'a>>> {
        let (problem, shape) = (&plan.problem, &plan.shape);
        let heads = step.heads.len() as u64;
        let chunk_heads = step.chunks as u64 * heads;
        let blocks = |columns: usize, each: usize| columns.div_ceil(each) as u64;
        let over_chunks = if let Some(matrix) = &shape.matrix {
            vec![(Pass::MatrixPairs, matrix.pairs_workgroups(chunk_heads))]
        } else {
            let pairs = shaders::pairs_workgroups(problem, shape) as u64;
            vec![
                (Pass::Pairs, chunk_heads * pairs),
                (Pass::Solve, chunk_heads),
                (
                    Pass::Fold,
                    chunk_heads * blocks(shape.key_pad, shape.fold_channels),
                ),
            ]
        };
        let mut out: Vec<_> = over_chunks
            .into_iter()
            .map(|(pass, groups)| Work {
                pass,
                transition: false,
                params,
                bound: bound.clone(),
                groups,
            })
            .collect();

        let scan = shape.matrix.map_or(Pass::Scan, |m| m.scan());
        let values = blocks(problem.value_dim, shape.columns);
        let mut over =
            |pass, transition, entries: &std::ops::Range<usize>, blocks: u64, params, bound| {
                out.push(Work {
                    pass,
                    transition,
                    params: Params {
                        piece_at: entries.start as u32,
                        piece_count: entries.len() as u32,
                        ..params
                    },
                    bound,
                    groups: entries.len() as u64 * heads * blocks,
                });
            };
        let (mut params, mut bound) = (params, bound);
        if step.slots > 0 {
            let words = step.slots as u64 * segments::slot_bytes(problem) / 4;
            let states = step.slots as u64 * plan::state_bytes(problem) / 4;
            let (at, slots) = self.range("scratch", segments, 0..words, 4)?;
            let transition_at = offset_u32("the transitions", u64::from(at) + states)?;
            let transitions = Params {
                state_at: at,
                transition_at,
                ..params
            };
            let keys = blocks(problem.key_dim, shape.columns);
            let mut transitions_bound = bound.clone();
            transitions_bound.set(Binding::State, slots);
            transitions_bound.set(Binding::Initial, None);
            over(
                scan,
                true,
                &step.transitions,
                values + keys,
                transitions,
                transitions_bound,
            );
            let joins = Params {
                scratch_at: at,
                transition_at,
                ..params
            };
            let mut joins_bound = bound.clone();
            joins_bound.set(Binding::Scratch, slots);
            let columns = blocks(problem.value_dim, 4);
            over(Pass::Join, false, &step.joins, columns, joins, joins_bound);
            params.initial_at = at;
            bound.set(Binding::Initial, slots);
        }
        over(scan, false, &step.scans, values, params, bound);
        out.retain(|work| work.groups > 0);
        Ok(out)
    }

    /// Binds a decode: each batch row continues the state in its slot of `pool [slots, HV, K, V]` (float32) by
    /// `problem.tokens` tokens, in place; `o [B, T, HV, V]` is written (zero for padding rows). The problem is
    /// neither packed nor has an initial state.
    ///
    /// # Errors
    /// As [`Kernels::prefill`].
    pub fn decode(
        &self,
        problem: &Problem,
        element: Element,
        tensors: &Tensors<Slice<'_>>,
        o: Slice<'_>,
        pool: Slice<'_>,
        rows: &[Row],
    ) -> Result<Call> {
        let settings = DecodeSettings {
            element,
            state: Element::F32,
        };
        self.decode_with(problem, settings, tensors, o, pool, rows)
    }

    /// The same with states stored as [`DecodeSettings::state`]: float16 halves the traffic, and rounds each
    /// state once a call.
    ///
    /// # Errors
    /// As [`Kernels::prefill`].
    pub fn decode_with(
        &self,
        problem: &Problem,
        settings: DecodeSettings,
        tensors: &Tensors<Slice<'_>>,
        o: Slice<'_>,
        pool: Slice<'_>,
        rows: &[Row],
    ) -> Result<Call> {
        let DecodeSettings { element, state } = settings;
        self.check_element(state)?;
        problem.validate()?;
        self.check_element(element)?;
        validate_decode(problem, tensors)?;
        self.check_slices(problem, element, tensors)?;
        self.check_slice("o", o, problem.output_len() as u64 * element.bytes())?;
        let slot_words = (problem.value_heads * problem.state_len()) as u64;
        let slot_bytes = slot_words * state.bytes();
        let slots = pool.size / slot_bytes;
        self.check_slice("the state pool", pool, slots * slot_bytes)?;
        validate_rows(rows, problem.batch, slots as usize)?;

        check_overlaps(
            &[
                ("o", o, problem.output_len() as u64 * element.bytes()),
                ("the state pool", pool, slots * slot_bytes),
            ],
            &named(problem, element, tensors),
        )?;

        // The part of the pool that one binding covers.
        let bounds = self.bounds(&PrefillSettings {
            element,
            ..PrefillSettings::default()
        });
        let binding = bounds.binding;
        let window = (bounds.window() / slot_bytes) as usize;
        if window == 0 {
            return Err(Error::unsupported(
                "bytes of one slot's states",
                slot_bytes,
                format!("{binding} (the device's binding size)"),
            ));
        }
        // The same for the rows of the operands.
        let row_bytes = plan::token_bytes(problem, element) * problem.tokens as u64;
        let batch_window = (bounds.window() / row_bytes.max(1)) as usize;
        if batch_window == 0 {
            return Err(Error::unsupported(
                "bytes of one batch row",
                row_bytes,
                format!("{binding} (the device's binding size)"),
            ));
        }

        // Rows that go into one dispatch: near in the batch and in the pool.
        let mut groups: std::collections::BTreeMap<(usize, usize), Vec<[i32; 2]>> =
            std::collections::BTreeMap::new();
        for (i, row) in rows.iter().enumerate() {
            let slot = usize::try_from(row.slot).unwrap_or(0);
            let code = match row {
                row if row.is_padding() => -1,
                Row { reset: true, .. } => (slot % window) as i32 | RESET,
                _ => (slot % window) as i32,
            };
            let group = groups.entry((i / batch_window, slot / window)).or_default();
            group.push([(i % batch_window) as i32, code]);
        }
        let scratch_words = self.gate_words(
            problem,
            problem.total_tokens().min(batch_window * problem.tokens),
        );
        let mut scratch = None;
        let mut writer = ParamsWriter::default();
        let mut prepared = Vec::new();
        let tokens = (bounds.iterations / shaders::decode_iterations(problem)).max(1);
        for ((batch_group, slot_group), mut entries) in groups {
            let first = batch_group * batch_window;
            let end = (first + batch_window).min(problem.batch);
            let range = first * problem.tokens..end * problem.tokens;
            // (Once where there are no tokens, for the rows that start from zero.)
            for at in (0..problem.tokens.max(1)).step_by(tokens) {
                let some = at..problem.tokens.min(at.saturating_add(tokens));
                for entries in entries.chunks(ROWS_PER_DISPATCH) {
                    prepared.push((range.clone(), slot_group, some.clone(), entries.to_vec()));
                }
                // What follows continues what this dispatch leaves.
                for entry in entries.iter_mut().filter(|entry| entry[1] >= RESET) {
                    entry[1] -= RESET;
                }
            }
        }
        let mut bound_steps = Vec::new();
        for (range, slot_group, some, entries) in &prepared {
            let mut params = self.problem_params(problem);
            params.head_count = problem.value_heads as u32;
            params.row_count = entries.len() as u32;
            params.tokens = problem.tokens as u32;
            params.first_token = some.start as u32;
            params.last_token = some.end as u32;
            let mut bound = self.no_bindings();
            self.bind_operands(problem, element, tensors, range, &mut params, &mut bound)?;
            let (at, r) = self.range("o", o, output_rows(problem, range), element.bytes())?;
            params.o_at = at;
            bound.set(Binding::O, r);
            let first_slot = (slot_group * window) as u64;
            let last_slot = (first_slot + window as u64).min(slots);
            let words = first_slot * slot_words..last_slot * slot_words;
            let (at, r) = self.range("the state pool", pool, words, state.bytes())?;
            params.state_at = at;
            bound.set(Binding::State, r);
            let mut table = vec![[0i32; 2]; ROWS_PER_DISPATCH];
            table[..entries.len()].copy_from_slice(entries);
            let table_at = writer.push_bytes(bytemuck::cast_slice(&table));
            bound_steps.push((params, bound, table_at, range.clone(), entries.len()));
        }
        if scratch_words > 0
            && self
                .gates_in_one_buffer(problem, tensors, &[o, pool])
                .is_none()
        {
            scratch = Some(self.buffer(
                "gathered gates",
                scratch_words * 4,
                wgpu::BufferUsages::STORAGE,
                None,
            )?);
        }
        let gathered = scratch
            .as_ref()
            .map_or(Slice::whole(&self.nothing), Slice::whole);
        let mut ready = Vec::new();
        for (mut params, mut bound, table_at, range, count) in bound_steps {
            let packs = self.bind_gates(
                problem,
                tensors,
                &[o, pool],
                &range,
                gathered,
                &mut params,
                &mut bound,
                &mut writer,
            )?;
            let at = writer.push(params);
            let mut variant = Variant {
                state,
                ..shaders::variant(Pass::Decode, problem, element, 0)
            };
            variant.by_four = shaders::can_read_by_four(Pass::Decode, problem)
                && lies_by_four(Pass::Decode, variant, &params, &bound);
            ready.push((bound, packs, variant, at, table_at, count));
        }
        let uniforms = self.buffer(
            "parameters",
            writer.bytes.len() as u64,
            wgpu::BufferUsages::UNIFORM,
            Some(&writer.bytes),
        )?;
        let mut steps = Vec::with_capacity(ready.len());
        for (mut bound, packs, variant, at, table_at, count) in ready {
            let mut dispatches = self.pack_dispatches(packs, &uniforms)?;
            bound.set(Binding::Params, params_at(&uniforms, at));
            bound.set(
                Binding::Table,
                Bound {
                    buffer: &uniforms,
                    offset: table_at,
                    size: ROWS_PER_DISPATCH as u64 * 8,
                },
            );
            let columns = problem.value_dim.div_ceil(shaders::decode_columns(variant));
            let groups = (count * problem.value_heads) as u64 * columns as u64;
            dispatches.push(self.dispatch_variant(
                Pass::Decode,
                variant,
                problem,
                None,
                false,
                &bound,
                groups,
            )?);
            steps.push(dispatches);
        }
        Ok(Call { steps })
    }

    fn problem_params(&self, problem: &Problem) -> Params {
        let lower_bound = match problem.decay {
            Decay::Gate(DecayGate::Safe { lower_bound } | DecayGate::Sigmoid { lower_bound }) => {
                lower_bound
            }
            _ => -1.0,
        };
        Params {
            heads: problem.heads as u32,
            value_heads: problem.value_heads as u32,
            scale: problem.scale(),
            lower_bound,
            ..Params::default()
        }
    }

    fn no_bindings(&self) -> Bindings<'_> {
        Bindings {
            bound: [None; BINDINGS],
            nothing: &self.nothing,
        }
    }

    /// The aligned binding that covers elements `range` of a slice (none where the range is empty), and the
    /// element of the binding at which the range starts.
    fn range<'a>(
        &'a self,
        what: &str,
        slice: Slice<'a>,
        range: std::ops::Range<u64>,
        element: u64,
    ) -> Result<(u32, Option<Bound<'a>>)> {
        if range.is_empty() {
            return Ok((0, None));
        }
        let alignment = u64::from(self.limits.min_storage_buffer_offset_alignment);
        let start = slice.offset + range.start * element;
        let end = (slice.offset + range.end * element).next_multiple_of(4);
        let offset = start - start % alignment;
        let size = end - offset;
        let limit = self.limits.max_storage_buffer_binding_size;
        if size > limit {
            return Err(Error::unsupported(
                format!("bytes of {what} in one binding"),
                size,
                format!("{limit} (the device's binding size)"),
            ));
        }
        let at = offset_u32(what, (start - offset) / element)?;
        Ok((
            at,
            Some(Bound {
                buffer: slice.buffer,
                offset,
                size,
            }),
        ))
    }

    fn check_slice(&self, name: &str, slice: Slice<'_>, bytes: u64) -> Result<()> {
        if slice.size < bytes {
            return Err(Error::tensor(
                name,
                format!("a slice of {bytes} bytes"),
                format!("{} bytes", slice.size),
            ));
        }
        if bytes == 0 {
            return Ok(());
        }
        if !slice.offset.is_multiple_of(4) {
            return Err(Error::tensor(
                name,
                "an offset that is a multiple of 4 bytes",
                slice.offset,
            ));
        }
        let end = slice.offset.saturating_add(bytes.next_multiple_of(4));
        if end > slice.buffer.size() {
            return Err(Error::tensor(
                name,
                format!("a slice within its buffer of {} bytes", slice.buffer.size()),
                format!("one that ends at byte {end}"),
            ));
        }
        if !slice.buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            return Err(Error::tensor(
                name,
                "a buffer with STORAGE usage",
                format!("{:?}", slice.buffer.usage()),
            ));
        }
        Ok(())
    }

    fn check_slices(
        &self,
        problem: &Problem,
        element: Element,
        tensors: &Tensors<Slice<'_>>,
    ) -> Result<()> {
        // Lengths in elements; a slice may be longer than needed but not shorter.
        let needed = |o: Operand| problem.len(o) as u64 * operand_element(o, element).bytes();
        let lengths = tensors.map(|o, s| {
            if s.size >= needed(o) {
                problem.len(o)
            } else {
                (s.size / operand_element(o, element).bytes()) as usize
            }
        });
        problem.validate_lengths(&lengths, |&l| l)?;
        for (o, &slice) in tensors.iter() {
            self.check_slice(problem.name(o), slice, needed(o))?;
        }
        Ok(())
    }

    /// Binds the operands of tokens `rows`, gates excepted.
    fn bind_operands<'a>(
        &'a self,
        problem: &Problem,
        element: Element,
        tensors: &Tensors<Slice<'a>>,
        rows: &std::ops::Range<usize>,
        params: &mut Params,
        bound: &mut Bindings<'a>,
    ) -> Result<()> {
        let (x1, x2) = shaders::own_operands(problem);
        for (operand, binding, at) in [
            (Some(Operand::Q), Binding::Q, &mut params.q_at),
            (Some(Operand::K), Binding::K, &mut params.k_at),
            (x1, Binding::X1, &mut params.x1_at),
            (x2, Binding::X2, &mut params.x2_at),
            (Some(Operand::G), Binding::G, &mut params.g_at),
            (Some(Operand::V), Binding::V, &mut params.v_at),
        ] {
            let Some(operand) = operand else { continue };
            let Some(&slice) = tensors.get(operand) else {
                continue;
            };
            let row = (problem.rows_per_token(operand) * problem.row_len(operand)) as u64;
            let range = rows.start as u64 * row..rows.end as u64 * row;
            let name = problem.name(operand);
            let (start, b) = self.range(name, slice, range, element.bytes())?;
            *at = start;
            bound.set(binding, b);
        }
        Ok(())
    }

    /// The range that covers all gates, where they lie in one buffer with nothing written in between (in a
    /// browser, which refuses overlapping bindings once the buffer is written: nothing else in between).
    fn gates_in_one_buffer<'a>(
        &self,
        problem: &Problem,
        tensors: &Tensors<Slice<'a>>,
        written: &[Slice<'_>],
    ) -> Option<Slice<'a>> {
        let mut cover: Option<Slice<'a>> = None;
        for gate in GATES {
            let Some(&slice) = tensors.get(gate) else {
                continue;
            };
            let end = slice.offset + problem.len(gate) as u64 * 4;
            cover = Some(match cover {
                None => Slice {
                    size: end - slice.offset,
                    ..slice
                },
                Some(c) if c.buffer == slice.buffer => {
                    let start = c.offset.min(slice.offset);
                    let end = (c.offset + c.size).max(end);
                    Slice {
                        buffer: c.buffer,
                        offset: start,
                        size: end - start,
                    }
                }
                Some(_) => return None,
            });
        }
        let cover = cover?;
        let alignment = u64::from(self.limits.min_storage_buffer_offset_alignment);
        let start = cover.offset - cover.offset % alignment;
        let end = cover.offset + cover.size;
        let clear_of = |w: &Slice<'_>| {
            w.buffer != cover.buffer || w.offset >= end || w.offset + w.size <= start
        };
        let mut clear = written.iter().all(clear_of);
        if cfg!(target_arch = "wasm32") && written.iter().any(|w| w.buffer == cover.buffer) {
            clear &= tensors
                .iter()
                .all(|(o, slice)| GATES.contains(&o) || clear_of(slice));
        }
        (clear && end - start <= self.limits.max_storage_buffer_binding_size).then_some(cover)
    }

    /// Binds the gates of tokens `rows`, directly or through `gathered`; returns the copies to be made.
    #[allow(clippy::too_many_arguments)]
    fn bind_gates<'a>(
        &'a self,
        problem: &Problem,
        tensors: &Tensors<Slice<'a>>,
        written: &[Slice<'_>],
        rows: &std::ops::Range<usize>,
        gathered: Slice<'a>,
        params: &mut Params,
        bound: &mut Bindings<'a>,
        writer: &mut ParamsWriter,
    ) -> Result<Vec<Pack<'a>>> {
        let rows_of = |gate: Operand| match problem.rows_per_token(gate) {
            0 => 0..problem.row_len(gate) as u64,
            n => {
                let row = (n * problem.row_len(gate)) as u64;
                rows.start as u64 * row..rows.end as u64 * row
            }
        };
        let mut packs = Vec::new();
        if let Some(cover) = self.gates_in_one_buffer(problem, tensors, written) {
            let (at, b) = self.range("the gates", cover, 0..cover.size / 4, 4)?;
            bound.set(Binding::Gates, b);
            for gate in GATES {
                if let Some(slice) = tensors.get(gate) {
                    let words = (slice.offset - cover.offset) / 4 + rows_of(gate).start;
                    *gate_at(params, gate) = offset_u32(problem.name(gate), u64::from(at) + words)?;
                }
            }
            return Ok(packs);
        }
        let mut filled = 0;
        for gate in GATES {
            let Some(&slice) = tensors.get(gate) else {
                continue;
            };
            let range = rows_of(gate);
            let words = range.end - range.start;
            let (source_at, source) = self.range(problem.name(gate), slice, range, 4)?;
            let (target_at, target) =
                self.range("the gathered gates", gathered, filled..filled + words, 4)?;
            let (Some(source), Some(target)) = (source, target) else {
                continue;
            };
            let pack = Params {
                tokens: offset_u32(problem.name(gate), words)?,
                q_at: source_at,
                scratch_at: target_at,
                ..Params::default()
            };
            packs.push(Pack {
                source,
                target,
                params_at: writer.push(pack),
                words,
            });
            *gate_at(params, gate) = offset_u32("the gathered gates", filled)?;
            filled += words;
        }
        if filled > 0 {
            let (at, b) = self.range("the gathered gates", gathered, 0..filled, 4)?;
            for gate in GATES {
                *gate_at(params, gate) += at;
            }
            bound.set(Binding::Gates, b);
        }
        Ok(packs)
    }

    fn pack_dispatches(
        &self,
        packs: Vec<Pack<'_>>,
        uniforms: &wgpu::Buffer,
    ) -> Result<Vec<Dispatch>> {
        packs
            .into_iter()
            .map(|pack| {
                let mut bound = self.no_bindings();
                bound.set(Binding::Params, params_at(uniforms, pack.params_at));
                bound.set(Binding::Q, pack.source);
                bound.set(Binding::Scratch, pack.target);
                let any = Problem::new(crate::rule::Rule::Linear, [1, 1, 1, 1, 1, 1]);
                let groups = pack.words.div_ceil(256);
                self.dispatch(Pass::Pack, &any, Element::F32, None, &bound, groups)
            })
            .collect()
    }

    /// Chooses and builds the pipeline of a pass and binds its buffers.
    fn dispatch(
        &self,
        pass: Pass,
        problem: &Problem,
        element: Element,
        shape: Option<&ChunkShape>,
        bound: &Bindings<'_>,
        groups: u64,
    ) -> Result<Dispatch> {
        let variant = self.variant(pass, problem, element);
        self.dispatch_variant(pass, variant, problem, shape, false, bound, groups)
    }

    fn variant(&self, pass: Pass, problem: &Problem, element: Element) -> Variant {
        let edge = self.matrix.map_or(0, |units| units.edge);
        shaders::variant(pass, problem, element, edge)
    }

    #[allow(clippy::too_many_arguments)]
    fn dispatch_variant(
        &self,
        pass: Pass,
        mut variant: Variant,
        problem: &Problem,
        shape: Option<&ChunkShape>,
        transition: bool,
        bound: &Bindings<'_>,
        groups: u64,
    ) -> Result<Dispatch> {
        let list = shaders::bindings(pass, variant);
        let storage: Vec<_> = list
            .iter()
            .filter(|(_, access)| *access != Access::Uniform)
            .collect();
        if storage.len() > self.limits.max_storage_buffers_per_shader_stage as usize {
            return Err(Error::unsupported(
                format!(
                    "storage buffers of {} for rule {}",
                    pass.name(),
                    problem.rule
                ),
                storage.len(),
                format!(
                    "{} (the device's limit)",
                    self.limits.max_storage_buffers_per_shader_stage
                ),
            ));
        }
        let shares = |with: &dyn Fn(Access) -> bool| {
            storage.iter().any(|(a, access)| {
                *access == Access::Write
                    && storage.iter().any(|(b, other)| {
                        a != b && with(*other) && bound.get(*a).buffer == bound.get(*b).buffer
                    })
            })
        };
        // wgpu refuses a buffer that one dispatch binds both to read and to write.
        variant.shared = pass == Pass::MatrixPairs || shares(&|other| other == Access::Read);
        if cfg!(target_arch = "wasm32") && shares(&|_| true) {
            let ranges: Vec<_> = storage.iter().map(|(b, _)| bound.get(*b)).collect();
            for (i, a) in ranges.iter().enumerate() {
                if ranges[i + 1..].iter().any(|b| {
                    a.buffer == b.buffer
                        && a.offset < b.offset + b.size
                        && b.offset < a.offset + a.size
                }) {
                    return Err(Error::tensor(
                        pass.name(),
                        "bindings that do not overlap: slices at multiples of 256 bytes in a buffer that is written",
                        format!("two at byte {}", a.offset),
                    ));
                }
            }
        }
        let mut constants = shaders::constants(pass, variant, problem, shape);
        if transition {
            constants.push(("TRANSITION", 1.0));
        }
        let unrolled = shape
            .and_then(|s| s.matrix)
            .map(|matrix| matrix.unrolled())
            .unwrap_or_default();
        let pipeline = self.pipeline(pass, variant, &constants, &unrolled)?;
        let entries: Vec<_> = list
            .iter()
            .map(|&(binding, _)| {
                let b = bound.get(binding);
                wgpu::BindGroupEntry {
                    binding: binding as u32,
                    resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                        buffer: b.buffer,
                        offset: b.offset,
                        size: wgpu::BufferSize::new(b.size),
                    }),
                }
            })
            .collect();
        let bind_group = guarded(&self.device, pass.name(), 0, || {
            self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(pass.name()),
                layout: &pipeline.layout,
                entries: &entries,
            })
        })?;
        Ok(Dispatch {
            pass,
            pipeline,
            bind_group,
            groups: fold(groups, pass.name())?,
        })
    }

    fn pipeline(
        &self,
        pass: Pass,
        variant: Variant,
        constants: &[(&'static str, f64)],
        unrolled: &[(&'static str, usize)],
    ) -> Result<Arc<Pipeline>> {
        let key = PipelineKey {
            pass,
            variant,
            constants: constants.iter().map(|&(n, v)| (n, v.to_bits())).collect(),
        };
        let slot = self
            .pipelines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(key)
            .or_default()
            .clone();
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = slot.as_ref() {
            return Ok(found.clone());
        }
        let entries: Vec<_> = shaders::bindings(pass, variant)
            .into_iter()
            .map(|(binding, access)| wgpu::BindGroupLayoutEntry {
                binding: binding as u32,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: match access {
                        Access::Uniform => wgpu::BufferBindingType::Uniform,
                        access => wgpu::BufferBindingType::Storage {
                            read_only: access == Access::Read
                                && (!variant.shared || binding == Binding::Table),
                        },
                    },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        // Software compilers take minutes for long texts; who knows which one a browser has.
        let mut text = shaders::source(pass, variant);
        if !self.software && !cfg!(target_arch = "wasm32") {
            text = shaders::unroll(&text, unrolled);
        }
        let built = guarded(&self.device, pass.name(), 0, || {
            let source = wgpu::ShaderModuleDescriptor {
                label: Some(pass.name()),
                source: wgpu::ShaderSource::Wgsl(text.into()),
            };
            // Software drivers compile unrolled loops for seconds and gain nothing by it.
            let checks = if self.software {
                wgpu::ShaderRuntimeChecks::checked()
            } else {
                wgpu::ShaderRuntimeChecks::unchecked()
            };
            // SAFETY: the shaders are this crate's own. Every loop in them counts to a bound, every divisor is
            // a positive constant or a size that was checked, and every index is below a length that the host
            // has checked against the slice it bound, so the checks that wgpu would add never trigger; they
            // keep drivers from unrolling loops and so cost a multiple of the run time.
            let module = unsafe { self.device.create_shader_module_trusted(source, checks) };
            let layout = self
                .device
                .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                    label: Some(pass.name()),
                    entries: &entries,
                });
            let pipeline_layout =
                self.device
                    .create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                        label: Some(pass.name()),
                        bind_group_layouts: &[Some(&layout)],
                        immediate_size: 0,
                    });
            let pipeline = self
                .device
                .create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                    label: Some(pass.name()),
                    layout: Some(&pipeline_layout),
                    module: &module,
                    entry_point: Some("main"),
                    compilation_options: wgpu::PipelineCompilationOptions {
                        constants,
                        // Every word of workgroup memory is written before it is read.
                        zero_initialize_workgroup_memory: false,
                    },
                    cache: self.pipeline_cache.as_ref(),
                });
            Pipeline { pipeline, layout }
        })?;
        let built = Arc::new(built);
        *slot = Some(built.clone());
        Ok(built)
    }
}

/// The inputs, with the bytes that are read.
fn named<'a>(problem: &Problem, element: Element, tensors: &Tensors<Slice<'a>>) -> Vec<Named<'a>> {
    tensors
        .iter()
        .map(|(o, &slice)| {
            let bytes = problem.len(o) as u64 * operand_element(o, element).bytes();
            (problem.name(o), slice, bytes)
        })
        .collect()
}

const GATES: [Operand; 4] = [
    Operand::Beta,
    Operand::Gamma,
    Operand::ALog,
    Operand::DtBias,
];

/// Element type of an operand: gates and states are always float32.
pub fn operand_element(operand: Operand, element: Element) -> Element {
    match operand {
        Operand::InitialState => Element::F32,
        o if GATES.contains(&o) => Element::F32,
        _ => element,
    }
}

fn gate_at(params: &mut Params, gate: Operand) -> &mut u32 {
    match gate {
        Operand::Beta => &mut params.beta_at,
        Operand::Gamma => &mut params.gamma_at,
        Operand::ALog => &mut params.a_log_at,
        _ => &mut params.dt_bias_at,
    }
}

fn output_rows(problem: &Problem, rows: &std::ops::Range<usize>) -> std::ops::Range<u64> {
    let row = (problem.value_heads * problem.value_dim) as u64;
    rows.start as u64 * row..rows.end as u64 * row
}

/// Checks what decode asks beyond a valid problem.
///
/// # Errors
/// [`Error::Tensor`] for packed sequences or an initial state.
pub fn validate_decode<T>(problem: &Problem, tensors: &Tensors<T>) -> Result<()> {
    if problem.cu_seqlens.is_some() {
        return Err(Error::tensor(
            "cu_seqlens",
            "none in decode: every batch row has the same number of tokens",
            "packed sequences",
        ));
    }
    if tensors.get(Operand::InitialState).is_some() {
        return Err(Error::tensor(
            "initial_state",
            "none in decode: states are in the pool",
            "one",
        ));
    }
    Ok(())
}

/// Whether what a pass binds of the keys' and the values' side can be read four elements at a time: each operand starts
/// and ends at a multiple of four. (In decode, states at a multiple of two.)
fn lies_by_four(pass: Pass, variant: Variant, params: &Params, bound: &Bindings<'_>) -> bool {
    shaders::bindings(pass, variant)
        .into_iter()
        .all(|(binding, _)| {
            let (at, count, element) = match binding {
                Binding::Q => (params.q_at, 4, variant.element),
                Binding::K => (params.k_at, 4, variant.element),
                Binding::X1 => (params.x1_at, 4, variant.element),
                Binding::X2 => (params.x2_at, 4, variant.element),
                Binding::G => (params.g_at, 4, variant.element),
                Binding::V => (params.v_at, 4, variant.element),
                Binding::O => (params.o_at, 4, variant.element),
                Binding::State if pass == Pass::Decode => (params.state_at, 2, variant.state),
                _ => return true,
            };
            let bytes = u64::from(count) * element.bytes();
            let Bound { offset, size, .. } = bound.get(binding);
            at.is_multiple_of(count) && offset.is_multiple_of(bytes) && size.is_multiple_of(bytes)
        })
}

/// A dispatch of a prefill before its parameters have a place.
struct Work<'a> {
    pass: Pass,
    /// The scan's first run.
    transition: bool,
    params: Params,
    bound: Bindings<'a>,
    groups: u64,
}

/// One copy of gates into scratch memory.
struct Pack<'a> {
    source: Bound<'a>,
    target: Bound<'a>,
    params_at: u64,
    words: u64,
}

/// Collects uniforms at offsets that every device accepts.
#[derive(Default)]
struct ParamsWriter {
    bytes: Vec<u8>,
}

impl ParamsWriter {
    fn push(&mut self, params: Params) -> u64 {
        self.push_bytes(bytemuck::bytes_of(&params))
    }

    fn push_bytes(&mut self, bytes: &[u8]) -> u64 {
        let at = self.bytes.len().next_multiple_of(256);
        self.bytes.resize(at, 0);
        self.bytes.extend_from_slice(bytes);
        at as u64
    }
}

fn params_at(uniforms: &wgpu::Buffer, at: u64) -> Bound<'_> {
    Bound {
        buffer: uniforms,
        offset: at,
        size: PARAMS_SIZE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "Workgroup count > 65,535 in a dimension": folded, with few to spare, up to what 32 bits can number.
    #[test]
    fn workgroups_fold_into_two_dimensions() {
        for groups in [
            0,
            1,
            65_535,
            65_536,
            70_000,
            131_070,
            1 << 31,
            65_535 * 65_535,
        ] {
            let (x, y) = fold(groups, "a pass").expect("fits");
            assert!(
                x <= 65_535 && (1..=65_535).contains(&y),
                "{groups}: {x} x {y}"
            );
            let all = u64::from(x) * u64::from(y);
            assert!(
                (groups..groups + u64::from(y)).contains(&all),
                "{groups}: {all}"
            );
            assert!(all <= u64::from(u32::MAX));
        }
        assert!(fold(65_535 * 65_535 + 1, "a pass").is_err());
    }

    /// "Element count > 2^31: finite wrong values": an offset that 32 bits do not hold is an error.
    #[test]
    fn offsets_are_checked() {
        assert_eq!(offset_u32("q", 1 << 31).expect("fits"), 1 << 31);
        let error = offset_u32("q", 1 << 32).expect_err("too far");
        assert!(error.to_string().contains("4294967296"), "{error}");
    }

    /// A uniform buffer's struct is a multiple of 16 bytes, as `shaders/params.wgsl` lays it out.
    #[test]
    fn parameters_are_laid_out_as_in_wgsl() {
        assert!(PARAMS_SIZE.is_multiple_of(16));
        let wgsl = include_str!("../../shaders/params.wgsl");
        let body = wgsl.split("struct Params {").nth(1).expect("the struct");
        let members = body.split('}').next().expect("its end");
        let count = members.matches(": u32,").count() + members.matches(": f32,").count();
        assert_eq!(count as u64 * 4, PARAMS_SIZE);
    }
}
