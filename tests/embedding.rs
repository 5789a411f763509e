//! The kernels as a guest on somebody else's device: WebGPU's default limits, slices of one shared buffer as
//! inputs, outputs, states and scratch memory, recording into the host's encoder and nothing else.

#[path = "common/device.rs"]
mod device;

use device::Host;
use eda_wgpu::battery::{LIMIT, LIMIT_F16};
use eda_wgpu::generate::{self, Recipe};
use eda_wgpu::gpu::kernels::{Call, Kernels, PrefillPlan, PrefillSettings, Slice, operand_element};
use eda_wgpu::reference::recurrence;
use eda_wgpu::{
    Decay, DecayGate, Element, Error, GateForm, Operand, Outputs, Problem, Row, Rule, Tensors,
    relative_error,
};
use half::f16;
use std::ops::Range;
use std::sync::OnceLock;

/// What every WebGPU device grants, and nothing more.
fn webgpu_host() -> Host {
    let limits = wgpu::Limits::default();
    assert_eq!(limits.max_storage_buffers_per_shader_stage, 8);
    assert_eq!(limits.max_compute_workgroup_storage_size, 16 << 10);
    assert_eq!(limits.max_compute_invocations_per_workgroup, 256);
    assert_eq!(limits.max_storage_buffer_binding_size, 128 << 20);
    assert_eq!(limits.max_buffer_size, 256 << 20);
    assert_eq!(limits.max_compute_workgroups_per_dimension, 65_535);
    assert_eq!(limits.min_storage_buffer_offset_alignment, 256);
    let host = Host::new(limits.clone());
    assert_eq!(host.device.limits(), limits, "the device is held to them");
    host
}

/// A host and its kernels for the tests that only compute, so that pipelines are built once.
fn shared() -> (&'static Host, &'static Kernels) {
    static SHARED: OnceLock<(Host, Kernels)> = OnceLock::new();
    let (host, kernels) = SHARED.get_or_init(|| {
        let host = webgpu_host();
        let kernels = Kernels::new(&host.device);
        (host, kernels)
    });
    (host, kernels)
}

/// Fills whatever is not an input: NaN as float32 and as either float16 half.
const GARBAGE: [u8; 4] = 0xFFC1_FE5Au32.to_le_bytes();
const STORAGE: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE
    .union(wgpu::BufferUsages::COPY_SRC)
    .union(wgpu::BufferUsages::COPY_DST);

/// How slices lie in buffers.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    /// One buffer, offsets that are multiples of 256.
    Aligned,
    /// One buffer, offsets that are multiples of 4 but not of 256 (scratch: 16).
    Odd,
    /// As `Aligned`, but for a pool of states, which starts four bytes on.
    OddPool,
    /// A buffer for each.
    Separate,
}

/// The host's memory: what lies where, before it goes to the device.
struct Memory {
    layout: Layout,
    /// Contents of the buffers.
    buffers: Vec<Vec<u8>>,
}

/// A buffer's number and the bytes of it.
#[derive(Debug, Clone)]
struct Place {
    buffer: usize,
    bytes: Range<usize>,
}

impl Memory {
    fn new(layout: Layout) -> Self {
        Self {
            layout,
            buffers: vec![],
        }
    }

    fn garbage(bytes: &mut Vec<u8>, len: usize) {
        while bytes.len() < len {
            bytes.push(GARBAGE[bytes.len() % 4]);
        }
    }

    /// A place with the given contents.
    fn put(&mut self, contents: &[u8]) -> Place {
        let place = self.reserve(contents.len());
        self.buffers[place.buffer][place.bytes.clone()].copy_from_slice(contents);
        place
    }

    /// A place full of garbage, with garbage on either side.
    fn reserve(&mut self, len: usize) -> Place {
        if self.buffers.is_empty() || self.layout == Layout::Separate {
            self.buffers.push(vec![]);
        }
        let last = self.buffers.len() - 1;
        let bytes = &mut self.buffers[last];
        let start = match self.layout {
            Layout::Aligned | Layout::OddPool => (bytes.len() + 1).next_multiple_of(256),
            Layout::Odd => match (bytes.len() + 1).next_multiple_of(16) {
                at if at % 256 == 0 => at + 16,
                at => at,
            },
            Layout::Separate => 0,
        };
        let end = start + len;
        Self::garbage(bytes, end.next_multiple_of(4) + 12);
        Place {
            buffer: last,
            bytes: start..end,
        }
    }

    /// The same, four bytes on: as unaligned as a slice may be.
    fn put_unaligned(&mut self, contents: &[u8]) -> Place {
        if self.layout == Layout::Odd {
            self.reserve(4);
            let mut place = self.reserve(contents.len() + 4);
            place.bytes.start += 4;
            self.buffers[place.buffer][place.bytes.clone()].copy_from_slice(contents);
            return place;
        }
        self.put(contents)
    }

    fn upload(&self, host: &Host) -> Vec<wgpu::Buffer> {
        self.buffers
            .iter()
            .map(|bytes| host.buffer(bytes, STORAGE))
            .collect()
    }
}

fn slice<'a>(buffers: &'a [wgpu::Buffer], place: &Place) -> Slice<'a> {
    Slice {
        buffer: &buffers[place.buffer],
        offset: place.bytes.start as u64,
        size: place.bytes.len() as u64,
    }
}

fn encode(values: &[f32], element: Element) -> Vec<u8> {
    match element {
        Element::F32 => bytemuck::cast_slice(values).to_vec(),
        Element::F16 => values
            .iter()
            .flat_map(|&x| f16::from_f32(x).to_le_bytes())
            .collect(),
    }
}

fn decode_values(bytes: &[u8], element: Element) -> Vec<f32> {
    match element {
        Element::F32 => bytemuck::pod_collect_to_vec(bytes),
        Element::F16 => bytes
            .chunks_exact(2)
            .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect(),
    }
}

/// Places the inputs.
fn inputs(
    memory: &mut Memory,
    problem: &Problem,
    element: Element,
    tensors: &Tensors<Vec<f32>>,
) -> Tensors<Place> {
    // Not in the order of the operands, so that gates have other tensors between them.
    let mut places = Tensors::new();
    for operand in [
        Operand::Beta,
        Operand::V,
        Operand::Q,
        Operand::DtBias,
        Operand::K,
        Operand::Gamma,
        Operand::E,
        Operand::InitialState,
        Operand::P,
        Operand::A,
        Operand::ALog,
        Operand::B,
        Operand::W,
        Operand::G,
    ] {
        if let Some(values) = tensors.get(operand) {
            assert_eq!(values.len(), problem.len(operand));
            let bytes = encode(values, operand_element(operand, element));
            places.set(operand, memory.put_unaligned(&bytes));
        }
    }
    places
}

/// Asserts that nothing changed but the given places, in any buffer.
fn assert_untouched(host: &Host, memory: &Memory, buffers: &[wgpu::Buffer], written: &[&Place]) {
    for (number, (before, buffer)) in memory.buffers.iter().zip(buffers).enumerate() {
        let after = host.read(buffer);
        for (i, (a, b)) in before.iter().zip(&after).enumerate() {
            let allowed = written
                .iter()
                .any(|p| p.buffer == number && p.bytes.contains(&i));
            assert!(
                a == b || allowed,
                "byte {i} of buffer {number} changed from {a:#04x} to {b:#04x}"
            );
        }
    }
    assert_eq!(host.uncaptured(), 0, "errors reached the host");
}

fn take(host: &Host, buffers: &[wgpu::Buffer], place: &Place) -> Vec<u8> {
    host.read(&buffers[place.buffer])[place.bytes.clone()].to_vec()
}

fn assert_near(what: &str, found: &[f32], right: &[f64], limit: f64) {
    let error = relative_error(found, right);
    assert!(error <= limit, "{what}: error {error:.2e}");
}

fn limit(element: Element) -> f64 {
    match element {
        Element::F32 => LIMIT,
        Element::F16 => LIMIT_F16,
    }
}

/// One prefill, recorded by the kernels and submitted here; nothing outside the outputs may change.
fn check_prefill(
    host: &Host,
    kernels: &Kernels,
    problem: &Problem,
    settings: &PrefillSettings,
    layout: Layout,
    own_scratch: bool,
) {
    let what = format!("{} prefill, {layout:?}, {settings:?}", problem.rule);
    let recipe = Recipe {
        initial_state: settings.has_initial || settings.continues,
        ..Recipe::default()
    };
    let mut tensors = generate::tensors(problem, &recipe);
    let expected: Outputs<f64> = recurrence(problem, &tensors.slices()).expect("a valid problem");
    let continued = if settings.continues {
        tensors.take(Operand::InitialState)
    } else {
        None
    };

    let plan = kernels.plan_prefill(problem, settings).expect("a plan");
    let mut memory = Memory::new(layout);
    let o = memory.reserve(problem.output_len() * settings.element.bytes() as usize);
    let places = inputs(&mut memory, problem, settings.element, &tensors);
    let state = match &continued {
        Some(state) => memory.put_unaligned(&encode(state, Element::F32)),
        None => memory.reserve(problem.states_len() * 4),
    };
    let scratch = memory.reserve(plan.scratch_bytes() as usize);
    let buffers = memory.upload(host);

    let call = kernels
        .prefill(
            &plan,
            &places.map(|_, p| slice(&buffers, p)),
            slice(&buffers, &o),
            slice(&buffers, &state),
            own_scratch.then(|| slice(&buffers, &scratch)),
        )
        .unwrap_or_else(|e| panic!("{what}: {e}"));
    let mut encoder = host.encoder();
    call.record(&mut encoder);
    host.submit(encoder);

    assert_untouched(host, &memory, &buffers, &[&o, &state, &scratch]);
    let found = decode_values(&take(host, &buffers, &o), settings.element);
    assert_near(&what, &found, &expected.o, limit(settings.element));
    let found = decode_values(&take(host, &buffers, &state), Element::F32);
    let name = format!("{what}, final state");
    assert_near(
        &name,
        &found,
        &expected.final_state,
        limit(settings.element),
    );
}

/// One decode call on a pool with more slots than rows: padding, reset and continued rows.
fn check_decode(
    host: &Host,
    kernels: &Kernels,
    problem: &Problem,
    element: Element,
    layout: Layout,
) {
    let what = format!("{} decode, {element:?}, {layout:?}", problem.rule);
    assert_eq!(problem.batch, 4);
    let rows = [
        Row::continues(5),
        Row::PADDING,
        Row::starts(0),
        Row::continues(2),
    ];
    let recipe = Recipe {
        initial_state: true,
        ..Recipe::default()
    };
    let mut tensors = generate::tensors(problem, &recipe);
    let words = problem.value_heads * problem.state_len();
    if let Some(states) = tensors.get_mut(Operand::InitialState) {
        states[2 * words..3 * words].fill(0.0);
    }
    let expected: Outputs<f64> = recurrence(problem, &tensors.slices()).expect("a valid problem");
    let states = tensors.take(Operand::InitialState).expect("states");

    let mut memory = Memory::new(layout);
    let places = inputs(&mut memory, problem, element, &tensors);
    let mut pool = memory.reserve(7 * words * 4 + 4);
    match layout {
        Layout::OddPool => pool.bytes.start += 4,
        _ => pool.bytes.end -= 4,
    }
    for (i, row) in rows.iter().enumerate() {
        if row.slot >= 0 && !row.reset {
            let at = pool.bytes.start + row.slot as usize * words * 4;
            let state = encode(&states[i * words..(i + 1) * words], Element::F32);
            memory.buffers[pool.buffer][at..at + words * 4].copy_from_slice(&state);
        }
    }
    let o = memory.reserve(problem.output_len() * element.bytes() as usize);
    let buffers = memory.upload(host);
    let call = kernels
        .decode(
            problem,
            element,
            &places.map(|_, p| slice(&buffers, p)),
            slice(&buffers, &o),
            slice(&buffers, &pool),
            &rows,
        )
        .unwrap_or_else(|e| panic!("{what}: {e}"));
    let mut encoder = host.encoder();
    call.record(&mut encoder);
    host.submit(encoder);

    // The slots that rows name may change, the others may not.
    let slot = |slot: i32| {
        let at = pool.bytes.start + slot as usize * words * 4;
        Place {
            buffer: pool.buffer,
            bytes: at..at + words * 4,
        }
    };
    let written = [o.clone(), slot(5), slot(0), slot(2)];
    assert_untouched(host, &memory, &buffers, &written.each_ref());
    let found = decode_values(&take(host, &buffers, &o), element);
    let row = problem.tokens * problem.value_heads * problem.value_dim;
    for (i, rows) in rows.iter().enumerate() {
        let found = &found[i * row..(i + 1) * row];
        let right = &expected.o[i * row..(i + 1) * row];
        if rows.is_padding() {
            assert!(found.iter().all(|&x| x == 0.0), "{what}: padding is zero");
            continue;
        }
        assert_near(&format!("{what}, row {i}"), found, right, limit(element));
        let found = decode_values(&take(host, &buffers, &slot(rows.slot)), Element::F32);
        let right = &expected.final_state[i * words..(i + 1) * words];
        let name = format!("{what}, state of row {i}");
        assert_near(&name, &found, right, limit(element));
    }
}

fn with_initial() -> PrefillSettings {
    PrefillSettings {
        has_initial: true,
        ..PrefillSettings::default()
    }
}

/// "Never whole buffers", "aliasing": every rule on slices of one buffer under WebGPU's default limits.
#[test]
fn every_rule_runs_on_slices_of_one_buffer() {
    let (host, kernels) = shared();
    for rule in Rule::ALL {
        for layout in [Layout::Aligned, Layout::Odd] {
            let problem = Problem::new(rule, [2, 37, 1, 2, 20, 12]);
            check_prefill(host, kernels, &problem, &with_initial(), layout, true);
            let problem = Problem::new(rule, [4, 3, 1, 2, 20, 12]);
            check_decode(host, kernels, &problem, Element::F32, layout);
        }
    }
}

/// Decode reads states two columns a load, and vectors by four channels, where all of them lie for it, and an element at a
/// time where one does not; another pipeline, the same results.
#[test]
fn decode_takes_states_wherever_they_lie() {
    let host = webgpu_host();
    let kernels = Kernels::new(&host.device);
    let mut count = 0;
    for rule in [Rule::Eda, Rule::Rwkv7, Rule::DeltaProduct { factors: 2 }] {
        for (sizes, layout, new) in [
            ([4, 3, 1, 2, 36, 38], Layout::Aligned, 1),
            ([4, 3, 1, 2, 36, 38], Layout::OddPool, 1),
            ([4, 2, 1, 2, 36, 38], Layout::Odd, 0),
            ([4, 3, 1, 2, 36, 37], Layout::Aligned, 1),
            ([4, 3, 1, 2, 36, 37], Layout::OddPool, 0),
        ] {
            let problem = Problem::new(rule, sizes);
            check_decode(&host, &kernels, &problem, Element::F32, layout);
            count += new;
            assert_eq!(
                kernels.pipeline_count(),
                count,
                "{rule} {sizes:?} {layout:?}"
            );
        }
    }
}

/// Gates in buffers of their own take a copy (they are bound as one); everything else is bound as it is.
#[test]
fn rules_run_on_a_buffer_for_each_tensor() {
    let (host, kernels) = shared();
    for rule in [
        Rule::Linear,
        Rule::Eda,
        Rule::Gdn2,
        Rule::Rwkv7,
        Rule::DeltaProduct { factors: 2 },
    ] {
        let problem = Problem::new(rule, [2, 37, 1, 2, 20, 12]);
        let layout = Layout::Separate;
        check_prefill(host, kernels, &problem, &with_initial(), layout, true);
        let problem = Problem::new(rule, [4, 3, 1, 2, 20, 12]);
        check_decode(host, kernels, &problem, Element::F32, layout);
    }
}

/// Scratch memory may be the kernels' own.
#[test]
fn scratch_memory_is_optional() {
    let (host, kernels) = shared();
    let problem = Problem::new(Rule::Eda, [2, 37, 1, 2, 20, 12]);
    for layout in [Layout::Aligned, Layout::Separate] {
        check_prefill(host, kernels, &problem, &with_initial(), layout, false);
    }
}

/// Initial and final states in one place, continued there.
#[test]
fn states_are_continued_in_place() {
    let (host, kernels) = shared();
    let settings = PrefillSettings {
        continues: true,
        ..PrefillSettings::default()
    };
    for rule in [Rule::Eda, Rule::Rwkv7, Rule::Gdn] {
        for layout in [Layout::Aligned, Layout::Odd, Layout::Separate] {
            let problem = Problem::new(rule, [3, 50, 2, 4, 16, 24]);
            check_prefill(host, kernels, &problem, &settings, layout, true);
        }
    }
}

/// Packed sequences with empty ones at either end and between: their states pass through.
#[test]
fn packed_and_empty_sequences() {
    let (host, kernels) = shared();
    for offsets in [
        vec![0, 0, 17, 17, 17, 40, 64, 64],
        vec![0, 0, 0],
        vec![0],
        vec![0, 64],
    ] {
        let tokens = offsets[offsets.len() - 1];
        let mut problem = Problem::new(Rule::Eda, [1, tokens, 1, 2, 20, 12]);
        problem.cu_seqlens = Some(offsets);
        for layout in [Layout::Aligned, Layout::Odd, Layout::Separate] {
            check_prefill(host, kernels, &problem, &with_initial(), layout, true);
            let settings = PrefillSettings::default();
            check_prefill(host, kernels, &problem, &settings, layout, true);
        }
    }
    // No batch row at all, and rows without tokens.
    for sizes in [[0, 9, 1, 1, 8, 8], [3, 0, 1, 1, 8, 8]] {
        let problem = Problem::new(Rule::Kda, sizes);
        let layout = Layout::Aligned;
        check_prefill(host, kernels, &problem, &with_initial(), layout, true);
    }
    // A reset counts even where no token follows it.
    for layout in [Layout::Aligned, Layout::Separate] {
        let problem = Problem::new(Rule::Eda, [4, 0, 1, 2, 20, 12]);
        check_decode(host, kernels, &problem, Element::F32, layout);
    }
}

/// Segments that are computed at the same time have their states in scratch memory; nothing else is written.
#[test]
fn segments_in_slices_of_one_buffer() {
    let (host, kernels) = shared();
    let mut problem = Problem::new(Rule::Eda, [1, 120, 1, 2, 20, 12]);
    problem.cu_seqlens = Some(vec![0, 9, 9, 111, 120]);
    for (has_initial, continues) in [(true, false), (false, true), (false, false)] {
        let settings = PrefillSettings {
            has_initial,
            continues,
            segments: Some(3),
            chunk: Some(16),
            ..PrefillSettings::default()
        };
        let plan = kernels.plan_prefill(&problem, &settings).expect("a plan");
        // Three of the long sequence, one of each other.
        assert_eq!(plan.segments(), 6);
        for layout in [Layout::Aligned, Layout::Odd, Layout::Separate] {
            for scratch in [true, false] {
                check_prefill(host, kernels, &problem, &settings, layout, scratch);
            }
        }
    }
}

/// float16 inputs and outputs, an odd number of them at the end of each slice.
#[test]
fn float16_slices() {
    let (host, kernels) = shared();
    if !host.device.features().contains(wgpu::Features::SHADER_F16) {
        let problem = Problem::new(Rule::Eda, [1, 9, 1, 1, 8, 8]);
        let settings = PrefillSettings {
            element: Element::F16,
            ..PrefillSettings::default()
        };
        let error = kernels.plan_prefill(&problem, &settings);
        assert!(matches!(error.err(), Some(Error::Unsupported { .. })));
        return;
    }
    let settings = PrefillSettings {
        element: Element::F16,
        has_initial: true,
        ..PrefillSettings::default()
    };
    for rule in [Rule::Eda, Rule::Gdn2, Rule::Rwkv7] {
        for layout in [Layout::Aligned, Layout::Odd, Layout::Separate] {
            let problem = Problem::new(rule, [1, 37, 1, 1, 19, 13]);
            check_prefill(host, kernels, &problem, &settings, layout, true);
            let problem = Problem::new(rule, [4, 1, 1, 1, 19, 13]);
            check_decode(host, kernels, &problem, Element::F16, layout);
        }
    }
}

fn raw(rule: Rule, sizes: [usize; 6], gate: DecayGate) -> Problem {
    let mut problem = Problem::new(rule, sizes);
    problem.normalize = true;
    problem.decay = Decay::Gate(gate);
    (problem.beta, problem.gamma) = (GateForm::Sigmoid, GateForm::TwiceSigmoid);
    problem
}

/// "8-storage-buffer limit exceeded": a layer's raw inputs fit eight bindings; where a rule with two vectors of
/// its own decodes with a raw decay, nine are needed, and a device with eight says so.
#[test]
fn raw_forms_fit_eight_bindings_or_say_so() {
    let (host, kernels) = shared();
    let gate = DecayGate::Safe { lower_bound: -5.0 };
    for (rule, layout) in [
        (Rule::Eda, Layout::Odd),
        (Rule::Eda, Layout::Separate),
        (Rule::Delta, Layout::Odd),
        (Rule::Gdn, Layout::Separate),
        (Rule::Gdn2, Layout::Odd),
        (Rule::Rwkv7, Layout::Separate),
    ] {
        let problem = raw(rule, [2, 37, 1, 2, 20, 12], gate);
        check_prefill(host, kernels, &problem, &with_initial(), layout, true);
        let problem = raw(rule, [4, 2, 1, 2, 20, 12], gate);
        if !matches!(rule, Rule::Gdn2 | Rule::Rwkv7) {
            check_decode(host, kernels, &problem, Element::F32, layout);
        }
    }
    for rule in [Rule::Gdn2, Rule::Rwkv7] {
        let problem = raw(rule, [1, 1, 1, 1, 8, 8], gate);
        let buffer = host.buffer(&[0; 1024], STORAGE);
        let at = |i: u64| Slice {
            buffer: &buffer,
            offset: i * 64,
            size: 64,
        };
        let wide = host.buffer(&[0; 256], STORAGE);
        let tensors = generate::tensors(&problem, &Recipe::default());
        let slices = tensors.map(|o, _| at(o as u64));
        let error = kernels
            .decode(
                &problem,
                Element::F32,
                &slices,
                at(15),
                Slice::whole(&wide),
                &[Row::continues(0)],
            )
            .err()
            .expect("nine bindings");
        let Error::Unsupported { what, found, limit } = &error else {
            panic!("{error}");
        };
        assert!(what.contains("storage buffers"), "{error}");
        assert_eq!((found.as_str(), &limit[..1]), ("9", "8"), "{error}");
    }
    assert_eq!(host.uncaptured(), 0);
}

/// The slices of a small EDA prefill, each in a buffer of its own.
struct Guest {
    problem: Problem,
    expected: Outputs<f64>,
    memory: Memory,
    places: Tensors<Place>,
    o: Place,
    state: Place,
}

impl Guest {
    fn new(layout: Layout, sizes: [usize; 6], recipe: &Recipe) -> Self {
        let problem = Problem::new(Rule::Eda, sizes);
        let tensors = generate::tensors(&problem, recipe);
        let expected = recurrence(&problem, &tensors.slices()).expect("a valid problem");
        let mut memory = Memory::new(layout);
        let places = inputs(&mut memory, &problem, Element::F32, &tensors);
        let o = memory.reserve(problem.output_len() * 4);
        let state = memory.reserve(problem.states_len() * 4);
        Self {
            problem,
            expected,
            memory,
            places,
            o,
            state,
        }
    }

    fn call(&self, kernels: &Kernels, plan: &PrefillPlan, buffers: &[wgpu::Buffer]) -> Call {
        kernels
            .prefill(
                plan,
                &self.places.map(|_, p| slice(buffers, p)),
                slice(buffers, &self.o),
                slice(buffers, &self.state),
                None,
            )
            .expect("a call")
    }

    fn check(&self, host: &Host, buffers: &[wgpu::Buffer]) {
        assert_untouched(host, &self.memory, buffers, &[&self.o, &self.state]);
        let o = decode_values(&take(host, buffers, &self.o), Element::F32);
        assert_near("o", &o, &self.expected.o, LIMIT);
        let state = decode_values(&take(host, buffers, &self.state), Element::F32);
        assert_near("state", &state, &self.expected.final_state, LIMIT);
    }
}

/// "Recording only": nothing reaches the queue until the host submits, once, what several calls recorded.
#[test]
fn several_calls_in_one_encoder_and_one_submission() {
    let (host, kernels) = shared();
    let first = Guest::new(Layout::Aligned, [1, 50, 1, 2, 20, 12], &Recipe::default());
    let recipe = Recipe {
        seed: 1,
        ..Recipe::default()
    };
    let second = Guest::new(Layout::Odd, [1, 20, 1, 2, 20, 12], &recipe);
    let settings = PrefillSettings::default();
    let plan = kernels.plan_prefill(&first.problem, &settings).expect("ok");
    let again = PrefillSettings {
        continues: true,
        ..settings
    };
    let plan_second = kernels.plan_prefill(&second.problem, &again).expect("ok");
    let buffers = first.memory.upload(host);
    let buffers_second = second.memory.upload(host);

    // The second call continues the state that the first leaves in the first's buffer.
    let call = first.call(kernels, &plan, &buffers);
    let continuing = kernels
        .prefill(
            &plan_second,
            &second.places.map(|_, p| slice(&buffers_second, p)),
            slice(&buffers_second, &second.o),
            slice(&buffers, &first.state),
            None,
        )
        .expect("a call");

    let mut dropped = host.encoder();
    call.record(&mut dropped);
    drop(dropped);
    assert_untouched(host, &first.memory, &buffers, &[]);

    let mut encoder = host.encoder();
    call.record(&mut encoder);
    continuing.record(&mut encoder);
    assert_untouched(host, &first.memory, &buffers, &[]);
    assert_untouched(host, &second.memory, &buffers_second, &[]);
    host.submit(encoder);

    // The whole of both, token by token.
    let mut problem = first.problem.clone();
    problem.tokens = 70;
    let tensors = generate::tensors(&first.problem, &Recipe::default());
    let more = generate::tensors(&second.problem, &recipe);
    let joined = tensors.map(|o, x| {
        let mut x = x.clone();
        x.extend(more.get(o).expect("the same operands"));
        x
    });
    let expected: Outputs<f64> = recurrence(&problem, &joined.slices()).expect("valid");
    assert_untouched(host, &second.memory, &buffers_second, &[&second.o]);
    let mut o = decode_values(&take(host, &buffers, &first.o), Element::F32);
    let bytes = take(host, &buffers_second, &second.o);
    o.extend(decode_values(&bytes, Element::F32));
    assert_near("o", &o, &expected.o, LIMIT);
    let state = decode_values(&take(host, &buffers, &first.state), Element::F32);
    assert_near("state", &state, &expected.final_state, LIMIT);
}

/// A call stands for its buffers, not for one run: recorded again, a decode goes another token on.
#[test]
fn a_call_can_be_recorded_again() {
    let (host, kernels) = shared();
    let problem = Problem::new(Rule::Eda, [1, 1, 1, 2, 20, 12]);
    let tensors = generate::tensors(&problem, &Recipe::default());
    let mut memory = Memory::new(Layout::Aligned);
    let places = inputs(&mut memory, &problem, Element::F32, &tensors);
    let o = memory.reserve(problem.output_len() * 4);
    let pool = memory.put(&vec![0; problem.states_len() * 4]);
    let buffers = memory.upload(host);
    let call = kernels
        .decode(
            &problem,
            Element::F32,
            &places.map(|_, p| slice(&buffers, p)),
            slice(&buffers, &o),
            slice(&buffers, &pool),
            &[Row::continues(0)],
        )
        .expect("a call");
    let mut encoder = host.encoder();
    for _ in 0..3 {
        call.record(&mut encoder);
    }
    host.submit(encoder);
    let mut repeated = problem.clone();
    repeated.tokens = 3;
    let tensors = tensors.map(|_, x| x.repeat(3));
    let expected: Outputs<f64> = recurrence(&repeated, &tensors.slices()).expect("valid");
    let found = decode_values(&take(host, &buffers, &o), Element::F32);
    let last = &expected.o[expected.o.len() - found.len()..];
    assert_near("the last output", &found, last, LIMIT);
    let state = decode_values(&take(host, &buffers, &pool), Element::F32);
    assert_near("state", &state, &expected.final_state, LIMIT);
    assert_eq!(host.uncaptured(), 0);
}

fn is_shared<T: Send + Sync + 'static>() {}

/// "Threads": the kernels are `Send + Sync + 'static` and record through `&self`, from several threads at once.
#[test]
fn threads_record_with_one_kernels_object() {
    is_shared::<Kernels>();
    is_shared::<PrefillPlan>();
    is_shared::<Call>();
    let host = webgpu_host();
    let kernels = Kernels::new(&host.device);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (host, kernels) = (&host, &kernels);
            scope.spawn(move || {
                let recipe = Recipe {
                    seed,
                    ..Recipe::default()
                };
                let guest = Guest::new(Layout::Aligned, [1, 40, 1, 1, 16, 16], &recipe);
                let plan = kernels
                    .plan_prefill(&guest.problem, &PrefillSettings::default())
                    .expect("a plan");
                let buffers = guest.memory.upload(host);
                let mut encoder = host.encoder();
                guest.call(kernels, &plan, &buffers).record(&mut encoder);
                host.submit(encoder);
                guest.check(host, &buffers);
            });
        }
    });
}

/// "Errors": whatever is wrong with a slice is found before anything is recorded, is named, and never reaches
/// the host's handler.
#[test]
fn wrong_slices_are_typed_errors() {
    let adapter = device::adapter();
    let host = Host::on(&adapter, wgpu::Limits::default());
    let kernels = Kernels::new(&host.device);
    let problem = Problem::new(Rule::Eda, [2, 20, 1, 1, 16, 16]);
    let settings = with_initial();
    let plan = kernels.plan_prefill(&problem, &settings).expect("a plan");
    let scratch_bytes = plan.scratch_bytes();
    assert!(scratch_bytes < 1 << 18, "the places below hold it");

    // Everything 256 KiB apart in 8 MiB, so that each can be moved.
    let buffer = host.buffer(&vec![0; 8 << 20], STORAGE);
    let unusable = host.buffer(&vec![0; 1 << 18], wgpu::BufferUsages::COPY_DST);
    let at = |i: u64, size: u64| Slice {
        buffer: &buffer,
        offset: i << 18,
        size,
    };
    let tensors = generate::tensors(
        &problem,
        &Recipe {
            initial_state: true,
            ..Recipe::default()
        },
    );
    let inputs = tensors.map(|o, x| at(o as u64, x.len() as u64 * 4));
    let o = at(20, problem.output_len() as u64 * 4);
    let state = at(21, problem.states_len() as u64 * 4);
    let scratch = at(22, scratch_bytes);

    type Change<'a> =
        Box<dyn Fn(&mut Tensors<Slice<'a>>, &mut Slice<'a>, &mut Slice<'a>, &mut Slice<'a>) + 'a>;
    let q = *inputs.get(Operand::Q).expect("q");
    let initial = *inputs.get(Operand::InitialState).expect("a state");
    let unusable = &unusable;
    let cases: Vec<(&str, &str, Change<'_>)> = vec![
        (
            "q",
            "too short",
            Box::new(|t, _, _, _| size(t, Operand::Q, -1)),
        ),
        (
            "beta",
            "too short",
            Box::new(|t, _, _, _| size(t, Operand::Beta, -4)),
        ),
        (
            "q",
            "misaligned",
            Box::new(|t, _, _, _| shift(t, Operand::Q, 2)),
        ),
        (
            "gamma",
            "misaligned",
            Box::new(|t, _, _, _| shift(t, Operand::Gamma, 1)),
        ),
        (
            "k",
            "past the end",
            Box::new(|t, _, _, _| shift(t, Operand::K, 8 << 20)),
        ),
        (
            "v",
            "at the end of all",
            Box::new(|t, _, _, _| {
                if let Some(s) = t.get_mut(Operand::V) {
                    s.offset = u64::MAX - 3;
                }
            }),
        ),
        (
            "g",
            "not a storage buffer",
            Box::new(|t, _, _, _| {
                if let Some(s) = t.get_mut(Operand::G) {
                    (s.buffer, s.offset) = (unusable, 0);
                }
            }),
        ),
        (
            "e",
            "missing",
            Box::new(|t, _, _, _| {
                t.take(Operand::E);
            }),
        ),
        (
            "p",
            "extra",
            Box::new(move |t, _, _, _| t.set(Operand::P, q)),
        ),
        (
            "initial_state",
            "planned but missing",
            Box::new(|t, _, _, _| {
                t.take(Operand::InitialState);
            }),
        ),
        ("o", "too short", Box::new(|_, o, _, _| o.size -= 1)),
        ("o", "misaligned", Box::new(|_, o, _, _| o.offset += 3)),
        (
            "o",
            "past the end",
            Box::new(|_, o, _, _| o.offset = (8 << 20) - 16),
        ),
        (
            "o",
            "not a storage buffer",
            Box::new(|_, o, _, _| {
                (o.buffer, o.offset) = (unusable, 0);
            }),
        ),
        (
            "o",
            "over an input",
            Box::new(move |_, o, _, _| o.offset = q.offset),
        ),
        (
            "o",
            "over the last word of an input",
            Box::new(move |_, o, _, _| {
                o.offset = q.offset + q.size - 4;
            }),
        ),
        (
            "o",
            "over the first word of the state",
            Box::new(|_, o, s, _| {
                o.offset = s.offset + 4 - o.size;
            }),
        ),
        (
            "o",
            "over scratch memory",
            Box::new(|_, o, _, s| s.offset = o.offset),
        ),
        (
            "final_state",
            "too short",
            Box::new(|_, _, s, _| s.size -= 4),
        ),
        (
            "final_state",
            "misaligned",
            Box::new(|_, _, s, _| s.offset += 2),
        ),
        (
            "final_state",
            "past the end",
            Box::new(|_, _, s, _| s.offset = 8 << 20),
        ),
        (
            "final_state",
            "over the initial state",
            Box::new(move |_, _, s, _| {
                s.offset = initial.offset;
            }),
        ),
        (
            "final_state",
            "over scratch memory",
            Box::new(|_, _, s, x| {
                x.offset = s.offset;
            }),
        ),
        ("scratch", "too short", Box::new(|_, _, _, x| x.size -= 4)),
        (
            "scratch",
            "misaligned",
            Box::new(|_, _, _, x| x.offset += 1),
        ),
        (
            "scratch",
            "not a multiple of 16",
            Box::new(|_, _, _, x| x.offset += 4),
        ),
        (
            "scratch",
            "past the end",
            Box::new(|_, _, _, x| x.offset = (8 << 20) - 4096),
        ),
        (
            "scratch",
            "not a storage buffer",
            Box::new(|_, _, _, x| {
                (x.buffer, x.offset) = (unusable, 0);
            }),
        ),
        (
            "scratch",
            "over an input",
            Box::new(move |_, _, _, x| x.offset = q.offset),
        ),
    ];
    let run = |t: &Tensors<Slice<'_>>, o, s, x| kernels.prefill(&plan, t, o, s, Some(x));
    run(&inputs, o, state, scratch).expect("the unchanged slices are right");
    for (name, what, change) in cases {
        let (mut t, mut o, mut s, mut x) = (inputs.clone(), o, state, scratch);
        change(&mut t, &mut o, &mut s, &mut x);
        match run(&t, o, s, x) {
            Err(Error::Tensor { tensor, .. }) => assert_eq!(tensor, name, "{what}"),
            Err(other) => panic!("{name} {what}: {other}"),
            Ok(_) => panic!("{name} {what}: accepted"),
        }
        assert_eq!(host.uncaptured(), 0, "{name} {what}");
    }

    // Decode.
    let mut t = inputs.clone();
    t.take(Operand::InitialState);
    let rows = [Row::continues(0), Row::continues(1)];
    let decode = |t: &Tensors<Slice<'_>>, o, pool, rows: &[Row]| {
        kernels.decode(&problem, Element::F32, t, o, pool, rows)
    };
    decode(&t, o, state, &rows).expect("the unchanged slices are right");
    let mut past = state;
    past.offset = (8 << 20) - 64;
    let mut short = state;
    short.size -= 4;
    let mut over = state;
    over.offset = o.offset;
    let mut input = state;
    input.offset = q.offset;
    let mut misaligned = state;
    misaligned.offset += 2;
    for (name, found) in [
        ("initial_state", decode(&inputs, o, state, &rows)),
        ("the state pool", decode(&t, o, past, &rows)),
        ("the state pool", decode(&t, o, misaligned, &rows)),
        ("the state pool", decode(&t, o, input, &rows)),
        ("o", decode(&t, o, over, &rows)),
        ("slots", decode(&t, o, short, &rows)),
        ("slots", decode(&t, o, state, &rows[..1])),
        ("slots", decode(&t, o, state, &[rows[0], rows[0]])),
        (
            "slots",
            decode(&t, o, state, &[rows[0], Row::continues(-2)]),
        ),
    ] {
        match found {
            Err(Error::Tensor { tensor, .. }) => assert_eq!(tensor, name),
            Err(other) => panic!("{name}: {other}"),
            Ok(_) => panic!("{name}: accepted"),
        }
    }

    // A buffer of another device is refused by wgpu, and that too is ours to report.
    let stranger = Host::on(&adapter, wgpu::Limits::default());
    let foreign = stranger.buffer(&[0; 4096], STORAGE);
    let mut t = inputs.clone();
    t.set(Operand::Q, Slice::whole(&foreign));
    let error = run(&t, o, state, scratch).err().expect("another device's");
    assert!(matches!(error, Error::Device(_)), "{error}");
    assert_eq!(host.uncaptured() + stranger.uncaptured(), 0);
}

fn size(t: &mut Tensors<Slice<'_>>, operand: Operand, by: i64) {
    if let Some(s) = t.get_mut(operand) {
        s.size = s.size.saturating_add_signed(by);
    }
}

fn shift(t: &mut Tensors<Slice<'_>>, operand: Operand, by: u64) {
    if let Some(s) = t.get_mut(operand) {
        s.offset += by;
    }
}

/// The host's callbacks stay the host's: an error of its own still reaches its handler, and losing the device
/// reaches its callback.
#[test]
fn the_hosts_callbacks_stay_in_place() {
    let host = webgpu_host();
    let (sender, receiver) = std::sync::mpsc::channel();
    host.device.set_device_lost_callback(move |reason, _| {
        // The receiver outlives the device.
        let _ = sender.send(reason);
    });
    let kernels = Kernels::new(&host.device);
    let problem = Problem::new(Rule::Eda, [1, 20, 1, 1, 16, 16]);
    check_prefill(
        &host,
        &kernels,
        &problem,
        &with_initial(),
        Layout::Aligned,
        true,
    );
    // A map-only buffer with storage usage is invalid: the host's own mistake.
    let _ = host.device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 16,
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::MAP_WRITE,
        mapped_at_creation: false,
    });
    assert_eq!(host.uncaptured(), 1, "the host hears of its own errors");
    host.device.destroy();
    // What polling says of a lost device is not the point here.
    let _ = host.device.poll(wgpu::PollType::wait_indefinitely());
    let reason = receiver
        .recv_timeout(std::time::Duration::from_secs(20))
        .expect("the host hears of the loss");
    assert_eq!(reason, wgpu::DeviceLostReason::Destroyed);
    // A guest on a lost device neither panics nor reports elsewhere.
    let kernels = Kernels::new(&host.device);
    let _ = kernels.plan_prefill(&problem, &PrefillSettings::default());
    assert_eq!(host.uncaptured(), 1);
}
