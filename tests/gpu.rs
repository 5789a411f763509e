//! What goes wrong on real adapters: limits, long inputs, lost devices, full memory, repeated and concurrent use.
//! Each test names the class of bug that it is about.

#[path = "common/device.rs"]
mod device;

use device::{adapter, wait};
use eda_wgpu::adapter::describe;
use eda_wgpu::battery::LIMIT;
use eda_wgpu::generate::{self, Recipe};
use eda_wgpu::gpu::engine::{GpuEngine, GpuPool};
use eda_wgpu::gpu::kernels::PrefillSettings;
use eda_wgpu::gpu::shaders::Pass;
use eda_wgpu::reference::recurrence;
use eda_wgpu::{
    DecodeOptions, Element, Engine, Error, Operand, Outputs, PrefillOptions, Problem, Result, Row,
    Rule, Tensors, Tier, relative_error,
};
use std::sync::OnceLock;
use std::sync::mpsc;
use std::time::Duration;

/// An engine on a device of its own, with the adapter's limits as `change` leaves them.
fn open(change: impl FnOnce(&mut wgpu::Limits)) -> GpuEngine {
    let adapter = adapter();
    let mut limits = adapter.limits();
    change(&mut limits);
    let wanted = wgpu::Features::SHADER_F16 | wgpu::Features::TIMESTAMP_QUERY;
    let (device, queue) = wait(adapter.request_device(&wgpu::DeviceDescriptor {
        required_features: adapter.features() & wanted,
        required_limits: limits.clone(),
        ..Default::default()
    }))
    .expect("a device with these limits");
    assert_eq!(device.limits(), limits, "the device is held to them");
    let description = describe(&adapter.get_info(), Tier::Portable);
    GpuEngine::from_device(&device, &queue, description)
}

/// The engine of the tests that need nothing special.
fn engine() -> &'static GpuEngine {
    static ENGINE: OnceLock<GpuEngine> = OnceLock::new();
    ENGINE.get_or_init(|| open(|_| {}))
}

fn inputs(problem: &Problem, initial_state: bool) -> (Tensors<Vec<f32>>, Outputs<f64>) {
    let recipe = Recipe {
        initial_state,
        ..Recipe::default()
    };
    let tensors = generate::tensors(problem, &recipe);
    let expected = recurrence(problem, &tensors.slices()).expect("a valid problem");
    (tensors, expected)
}

fn prefill(
    engine: &GpuEngine,
    problem: &Problem,
    tensors: &Tensors<Vec<f32>>,
    options: &PrefillOptions,
) -> Result<Outputs> {
    wait(engine.prefill(problem, &tensors.slices(), options, &|_, _| {})).map(|run| run.outputs)
}

/// Decodes the whole problem in one call, from the initial states written into a pool.
fn decode(engine: &GpuEngine, problem: &Problem, tensors: &Tensors<Vec<f32>>) -> Result<Outputs> {
    let mut tensors = tensors.clone();
    let initial = tensors.take(Operand::InitialState);
    let mut pool = engine.pool(problem, problem.batch)?;
    let words = problem.value_heads * problem.state_len();
    for (slot, state) in initial
        .iter()
        .flat_map(|s| s.chunks_exact(words))
        .enumerate()
    {
        pool.write(slot, state)?;
    }
    let rows: Vec<Row> = (0..problem.batch as i32).map(Row::continues).collect();
    let options = DecodeOptions::default();
    let (o, _) = wait(engine.decode(problem, &tensors.slices(), &mut pool, &rows, &options))?;
    let mut final_state = Vec::new();
    for slot in 0..problem.batch {
        final_state.extend(wait(pool.read(slot))?);
    }
    Ok(Outputs { o, final_state })
}

fn assert_right(what: &str, outputs: Result<Outputs>, expected: &Outputs<f64>) {
    let outputs = outputs.unwrap_or_else(|e| panic!("{what}: {e}"));
    let o = relative_error(&outputs.o, &expected.o);
    let state = relative_error(&outputs.final_state, &expected.final_state);
    assert!(
        o <= LIMIT && state <= LIMIT,
        "{what}: o {o:.2e}, state {state:.2e}"
    );
}

/// The engine computes what it should: what follows an error in the tests below.
fn assert_works(engine: &GpuEngine) {
    let problem = Problem::new(Rule::Eda, [2, 21, 1, 1, 16, 8]);
    let (tensors, expected) = inputs(&problem, true);
    let options = PrefillOptions::default();
    let outputs = prefill(engine, &problem, &tensors, &options);
    assert_right("a small prefill", outputs, &expected);
    assert_right(
        "a small decode",
        decode(engine, &problem, &tensors),
        &expected,
    );
}

fn assert_unsupported(outputs: Result<impl Sized>, what: &str) {
    match outputs {
        Err(Error::Unsupported { what: found, .. }) => assert!(found.contains(what), "{found}"),
        Err(other) => panic!("{what}: {other}"),
        Ok(_) => panic!("{what}: accepted"),
    }
}

/// "driver computes garbage": Mesa's software rasteriser stops all loops of an invocation after 65,535 iterations
/// and says nothing, so that no dispatch may ask for more.
#[test]
fn long_loops_are_cut() {
    for (rule, tokens, key_dim, chunk) in [
        (Rule::Eda, 6000, 128, 64),
        (Rule::Linear, 9000, 60, 32),
        (Rule::DeltaProduct { factors: 16 }, 200, 256, 16),
    ] {
        let problem = Problem::new(rule, [1, tokens, 1, 1, key_dim, 4]);
        let (tensors, expected) = inputs(&problem, true);
        let options = PrefillOptions {
            chunk: Some(chunk),
            ..PrefillOptions::default()
        };
        let outputs = prefill(engine(), &problem, &tensors, &options);
        assert_right(&format!("{rule} prefill"), outputs, &expected);
        let outputs = decode(engine(), &problem, &tensors);
        assert_right(&format!("{rule} decode"), outputs, &expected);
    }
}

/// "workgroup count > 65,535 in a dimension".
#[test]
fn more_than_65535_workgroups() {
    // One group for each row and value head.
    let problem = Problem::new(Rule::Kda, [1100, 1, 1, 64, 1, 1]);
    let (tensors, expected) = inputs(&problem, true);
    let outputs = decode(engine(), &problem, &tensors);
    assert_right("decode", outputs, &expected);

    // One group for each sequence, most of them empty.
    let mut offsets = vec![0; 70_000];
    offsets.extend([5, 5, 40]);
    let mut problem = Problem::new(Rule::Eda, [1, 40, 1, 1, 1, 1]);
    problem.cu_seqlens = Some(offsets);
    let (tensors, expected) = inputs(&problem, true);
    let outputs = prefill(engine(), &problem, &tensors, &PrefillOptions::default());
    assert_right("prefill", outputs, &expected);
}

/// "128 MiB binding limit exceeded: validation panic": rows, states, gates and scratch memory many times larger
/// than a binding are cut to it, and what cannot be cut is refused with both numbers.
#[test]
fn bindings_are_cut_to_the_devices_limit() {
    let engine = open(|limits| limits.max_storage_buffer_binding_size = 1 << 16);
    let options = PrefillOptions::default();
    for rule in [Rule::Eda, Rule::DeltaProduct { factors: 3 }] {
        let mut problem = Problem::new(rule, [1, 700, 2, 4, 16, 16]);
        let mut offsets: Vec<usize> = (0..39).map(|i| i * i / 4).collect();
        offsets.extend([361, 700]);
        problem.cu_seqlens = Some(offsets);
        assert!(problem.len(Operand::V) * 4 > 1 << 16);
        assert!(problem.states_len() * 4 > 1 << 16);
        let settings = PrefillSettings::default();
        let plan = engine.kernels().plan_prefill(&problem, &settings);
        assert!(plan.expect("a plan").steps() > 10, "{rule}");
        let (tensors, expected) = inputs(&problem, true);
        let outputs = prefill(&engine, &problem, &tensors, &options);
        assert_right(&format!("{rule} prefill"), outputs, &expected);

        let problem = Problem::new(rule, [40, 10, 2, 4, 16, 16]);
        assert!(problem.len(Operand::V) * 4 > 1 << 16);
        let (tensors, expected) = inputs(&problem, true);
        let outputs = decode(&engine, &problem, &tensors);
        assert_right(&format!("{rule} decode"), outputs, &expected);
    }
    // Gates are float32 whatever the element type, and the widest rows of one-channel heads.
    if engine
        .kernels()
        .device()
        .features()
        .contains(wgpu::Features::SHADER_F16)
    {
        let problem = Problem::new(Rule::Kda, [1, 400, 1, 64, 1, 1]);
        let (tensors, expected) = inputs(&problem, true);
        let options = PrefillOptions {
            element: Element::F16,
            // (Scratch memory for a chunk of 64 would exceed the binding.)
            chunk: Some(32),
            ..PrefillOptions::default()
        };
        let outputs = prefill(&engine, &problem, &tensors, &options).expect("float16");
        let error = relative_error(&outputs.o, &expected.o);
        assert!(
            error <= eda_wgpu::battery::LIMIT_F16,
            "float16: {error:.2e}"
        );
    }

    let refused = |sizes: [usize; 6], in_prefill: &str, in_decode: Option<&str>| {
        let problem = Problem::new(Rule::Eda, sizes);
        let (tensors, _) = inputs(&problem, true);
        let outputs = prefill(&engine, &problem, &tensors, &options);
        assert_unsupported(outputs, in_prefill);
        if let Some(what) = in_decode {
            assert_unsupported(decode(&engine, &problem, &tensors), what);
        }
    };
    // 80 KiB of states; a chunk's 197 KiB of scratch memory; 70 KiB of rows in a chunk.
    let states = Some("one slot's states");
    refused([1, 10, 1, 20, 32, 32], "one sequence's states", states);
    refused([1, 20, 1, 1, 256, 1], "scratch memory for one chunk", None);
    refused(
        [1, 20, 1, 1100, 1, 1],
        "one chunk's rows",
        Some("one batch row"),
    );
    assert_works(&engine);
}

/// "T > 65,536: tail skipped".
#[test]
fn long_sequences_with_a_ragged_tail() {
    let problem = Problem::new(Rule::Eda, [1, 200_001, 1, 1, 2, 3]);
    let (tensors, expected) = inputs(&problem, true);
    let outputs = prefill(engine(), &problem, &tensors, &PrefillOptions::default());
    let outputs = outputs.expect("a prefill");
    // The last tokens alone, so that a wrong tail is not lost in the norm of the rest.
    let tail = expected.o.len() - 3 * 70;
    let error = relative_error(&outputs.o[tail..], &expected.o[tail..]);
    assert!(error <= LIMIT, "the tail: {error:.2e}");
    assert_right("all", Ok(outputs), &expected);

    // Decode takes what it is given in one call, however much; the reset counts once.
    let problem = Problem::new(Rule::Eda, [3, 7001, 1, 1, 2, 3]);
    let (tensors, mut expected) = inputs(&problem, false);
    let mut pool = engine().pool(&problem, 2).expect("a pool");
    pool.write(0, &[9.0; 6]).expect("a write");
    pool.write(1, &[0.0; 6]).expect("a write");
    let rows = [Row::starts(0), Row::continues(1), Row::PADDING];
    let options = DecodeOptions::default();
    let slices = tensors.slices();
    let (o, _) = wait(engine().decode(&problem, &slices, &mut pool, &rows, &options))
        .expect("a long decode");
    let mut final_state = wait(pool.read(0)).expect("a state");
    final_state.extend(wait(pool.read(1)).expect("a state"));
    expected.o[2 * 7001 * 3..].fill(0.0);
    expected.final_state.truncate(12);
    assert_right("decode", Ok(Outputs { o, final_state }), &expected);
}

/// "one pass differs from two passes with the state carried": parts that go through the device one after the
/// other, two at a time, give the bits of one part. (Segments are chosen for each part, so none are cut here.)
#[test]
fn parts_of_a_long_prefill_give_the_bits_of_one() {
    let whole = open(|_| {});
    let cut = open(|_| {});
    cut.set_part_bytes(1);
    for rule in [Rule::Eda, Rule::Rwkv7] {
        let mut problem = Problem::new(rule, [1, 1000, 1, 2, 16, 24]);
        for offsets in [None, Some(vec![0, 0, 150, 155, 155, 990, 1000, 1000])] {
            problem.cu_seqlens = offsets;
            let (tensors, expected) = inputs(&problem, true);
            for chunk in [None, Some(16)] {
                let options = PrefillOptions {
                    chunk,
                    segments: Some(1),
                    ..PrefillOptions::default()
                };
                let one = prefill(&whole, &problem, &tensors, &options).expect("a prefill");
                let seen = std::sync::Mutex::new(vec![]);
                let progress = |done, all| seen.lock().expect("no panic").push((done, all));
                let run = wait(cut.prefill(&problem, &tensors.slices(), &options, &progress))
                    .expect("a prefill in parts");
                let seen = seen.into_inner().expect("no panic");
                assert!(seen.len() > 16, "{} reports of progress", seen.len());
                assert_eq!(seen.last(), Some(&(1000, 1000)));
                assert!(run.outputs == one, "{rule} {chunk:?}: other bits in parts");
                assert_right("both", Ok(one), &expected);
            }
        }
    }
}

/// "pipelines compiled again at every call".
#[test]
fn pipelines_are_built_once() {
    let engine = open(|_| {});
    let options = PrefillOptions {
        chunk: Some(16),
        ..PrefillOptions::default()
    };
    let run = |tokens| {
        let problem = Problem::new(Rule::Eda, [2, tokens, 1, 1, 16, 8]);
        let (tensors, expected) = inputs(&problem, true);
        let outputs = prefill(&engine, &problem, &tensors, &options);
        assert_right("prefill", outputs, &expected);
        assert_right("decode", decode(&engine, &problem, &tensors), &expected);
        engine.kernels().pipeline_count()
    };
    let count = run(20);
    // One for each pass of the portable tier, but for the copy of gates and the join of segments.
    let passes = Pass::ALL.into_iter().filter(|pass| !pass.is_matrix());
    assert_eq!(count, passes.count() - 2);
    for tokens in [20, 1, 33, 100] {
        assert_eq!(run(tokens), count, "{tokens} tokens");
    }
}

/// States stored as float16: rounded once a call, with float32 arithmetic; slots are read, written and copied as
/// values. Refused where the device has no float16, where a slot is not a whole number of words, and on the CPU.
#[test]
fn states_may_lie_in_memory_as_float16() {
    let odd = Problem::new(Rule::Eda, [1, 1, 1, 1, 9, 5]);
    let half = |problem: &Problem| engine().pool_with(problem, 2, Element::F16);
    let features = engine().kernels().device().features();
    if !features.contains(wgpu::Features::SHADER_F16) {
        assert!(half(&odd).is_err());
        return;
    }
    assert!(half(&odd).is_err(), "45 values");
    for rule in Rule::ALL {
        // Two columns a load, partly filled workgroups too; a column a load, for the one size or the other.
        for [k, v] in [[128, 128], [20, 100], [36, 6], [60, 33], [30, 36]] {
            let problem = Problem::new(rule, [2, 24, 1, 2, k, v]);
            let recipe = Recipe {
                initial_state: true,
                ..Recipe::default()
            };
            let mut tensors = generate::tensors(&problem, &recipe);
            let states: Vec<f32> = tensors.slices().get(Operand::InitialState).expect("states")[..]
                .iter()
                .map(|&x| half::f16::from_f32(x).to_f32())
                .collect();
            tensors.set(Operand::InitialState, states.clone());
            let expected = recurrence::<f64>(&problem, &tensors.slices()).expect("valid");
            let mut inputs = tensors.slices();
            inputs.take(Operand::InitialState);
            let mut pool = half(&problem).expect("a pool");
            let slot = states.len() / 2;
            pool.write(0, &states[..slot]).expect("written");
            pool.write(1, &states[slot..]).expect("written");
            assert_eq!(wait(pool.read(1)).expect("read"), states[slot..]);
            let rows = [Row::continues(0), Row::continues(1)];
            let options = DecodeOptions::default();
            let (o, _) = wait(engine().decode(&problem, &inputs, &mut pool, &rows, &options))
                .expect("decoded");
            // Nothing was rounded on the way.
            let error = relative_error(&o, &expected.o);
            assert!(error <= LIMIT, "{rule}, {k} x {v}: o {error:.2e}");
            pool.copy(1, 0).expect("copied");
            let found = wait(pool.read(0)).expect("read");
            let error = relative_error(&found, &expected.final_state[slot..]);
            assert!(error <= 5e-4, "{rule}, {k} x {v}: state {error:.2e}");
        }
    }
}

/// "memory kept after use".
#[test]
fn memory_is_freed_after_use() {
    let engine = open(|_| {});
    let allocated = || {
        let report = engine.kernels().device().generate_allocator_report();
        report.map(|r| r.total_allocated_bytes)
    };
    let problem = Problem::new(Rule::Kda, [1, 1024, 1, 2, 64, 64]);
    let bytes = problem.len(Operand::V) as u64 * 4;
    let tensors = generate::tensors(&problem, &Recipe::default());
    let small = Problem::new(Rule::Kda, [1, 1, 1, 2, 64, 64]);
    let token = generate::tensors(&small, &Recipe::default());
    // One run first: what is allocated once for good.
    prefill(&engine, &problem, &tensors, &PrefillOptions::default()).expect("a prefill");
    let before = allocated();
    for _ in 0..15 {
        prefill(&engine, &problem, &tensors, &PrefillOptions::default()).expect("a prefill");
        decode(&engine, &small, &token).expect("a decode");
    }
    let after = allocated();
    match (before, after) {
        (Some(before), Some(after)) => assert!(
            after <= before + bytes,
            "{before} bytes were allocated after one run, {after} after sixteen"
        ),
        // These two allocate through an allocator that reports; others keep their own counsel.
        _ if cfg!(any(target_os = "linux", windows)) => panic!("no report"),
        _ => {}
    }
}

/// "memory kept after use", of a pool: its states go when it goes, and it may be as large as a buffer.
#[test]
fn a_dropped_pool_is_freed() {
    let engine = open(|_| {});
    let problem = Problem::new(Rule::Kda, [1, 1, 1, 1, 256, 256]);
    let bytes = || {
        let report = engine.kernels().device().generate_allocator_report();
        report.map_or(0, |r| r.total_allocated_bytes)
    };
    let before = bytes();
    for _ in 0..20 {
        let mut pool = engine.pool(&problem, 400).expect("100 MiB");
        pool.copy(0, 399).expect("a copy");
        assert!(
            wait(pool.read(399))
                .expect("a state")
                .iter()
                .all(|&x| x == 0.0)
        );
    }
    assert!(bytes() <= before + (100 << 20), "{before} then {}", bytes());
}

/// "out of memory reported as device loss": device loss is its own error on every call, and a new engine works.
#[test]
fn a_lost_device_is_reported_as_lost() {
    let lost = open(|_| {});
    let problem = Problem::new(Rule::Eda, [1, 20, 1, 1, 16, 8]);
    let (tensors, expected) = inputs(&problem, false);
    let options = PrefillOptions::default();
    let mut pool = lost.pool(&problem, 2).expect("a pool");
    assert_right(
        "before",
        prefill(&lost, &problem, &tensors, &options),
        &expected,
    );
    lost.kernels().device().destroy();

    let is_lost = |what: &str, error: Option<Error>| match error {
        Some(Error::DeviceLost(_)) => {}
        Some(other) => panic!("{what}: {other}"),
        None => panic!("{what}: went through"),
    };
    let state = vec![0.0; 16 * 8];
    let slices = tensors.slices();
    let decode_options = DecodeOptions::default();
    for _ in 0..2 {
        is_lost(
            "prefill",
            prefill(&lost, &problem, &tensors, &options).err(),
        );
        let rows = [Row::continues(0)];
        let decoded = lost.decode(&problem, &slices, &mut pool, &rows, &decode_options);
        is_lost("decode", wait(decoded).err());
        is_lost("pool", lost.pool(&problem, 1).err());
        is_lost("read", wait(pool.read(0)).err());
        is_lost("write", pool.write(0, &state).err());
        is_lost("copy", pool.copy(0, 1).err());
    }
    drop(pool);
    assert_works(&open(|_| {}));
}

/// A loss that comes between two calls is noticed by whichever call is next.
#[test]
fn a_loss_is_noticed_by_the_next_call() {
    type Next = fn(&GpuEngine, &mut GpuPool) -> Option<Error>;
    let calls: [(&str, Next); 5] = [
        ("decode", |engine, pool| {
            let problem = Problem::new(Rule::Eda, [1, 1, 1, 1, 16, 8]);
            let (tensors, _) = inputs(&problem, false);
            let rows = [Row::continues(0)];
            let options = DecodeOptions::default();
            wait(engine.decode(&problem, &tensors.slices(), pool, &rows, &options)).err()
        }),
        ("pool", |engine, _| {
            let problem = Problem::new(Rule::Eda, [1, 1, 1, 1, 16, 8]);
            engine.pool(&problem, 1).err()
        }),
        ("read", |_, pool| wait(pool.read(0)).err()),
        ("write", |_, pool| pool.write(0, &[0.0; 128]).err()),
        ("copy", |_, pool| pool.copy(0, 1).err()),
    ];
    for (what, call) in calls {
        let engine = open(|_| {});
        let problem = Problem::new(Rule::Eda, [1, 1, 1, 1, 16, 8]);
        let mut pool = engine.pool(&problem, 2).expect("a pool");
        engine.kernels().device().destroy();
        let error = call(&engine, &mut pool);
        assert!(
            matches!(error, Some(Error::DeviceLost(_))),
            "{what}: {error:?}"
        );
    }
}

/// More than a buffer can be is refused, with both numbers, and harms nothing.
#[test]
fn impossible_sizes_are_refused() {
    let engine = open(|_| {});
    let problem = Problem::new(Rule::Eda, [1, 1, 1, 4, 128, 128]);
    for slots in [1 << 20, 1 << 40, usize::MAX / 4, usize::MAX] {
        assert_unsupported(engine.pool(&problem, slots), "the state pool");
    }
    assert_works(&engine);
}

const CHILD: &str = "EDA_TEST_FULL_MEMORY";

/// "out of memory reported as device loss": a full memory is its own error, and once something is freed the
/// engine goes on. Runs in a process of its own, whose memory can be limited.
#[test]
fn full_memory_is_reported_as_such() {
    let this = std::env::current_exe().expect("this test");
    let output = std::process::Command::new(this)
        .args([
            "--exact",
            "full_memory_child",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(CHILD, "1")
        .output()
        .expect("this test runs again");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert!(text.contains("memory was full"), "{text}\n{errors}");
}

/// The other half of [`full_memory_is_reported_as_such`]; on its own it does nothing.
#[test]
fn full_memory_child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let engine = open(|_| {});
    assert_works(&engine);
    if engine.description().kind == "software" && cfg!(target_os = "linux") {
        // A software adapter's memory is this process's: it may grow by 1.5 GiB.
        let status = std::fs::read_to_string("/proc/self/status").expect("/proc");
        let line = status.lines().find(|l| l.starts_with("VmSize:"));
        let kib: u64 = line
            .and_then(|l| l.split_whitespace().nth(1)?.parse().ok())
            .expect("a size");
        let limited = std::process::Command::new("prlimit")
            .arg(format!("--pid={}", std::process::id()))
            .arg(format!("--as={}", (kib << 10) + (3 << 29)))
            .status();
        assert!(limited.expect("prlimit (util-linux)").success());
    }
    let problem = Problem::new(Rule::Eda, [1, 1, 1, 1, 256, 256]);
    let slots = 2048; // 512 MiB
    let mut pools = Vec::new();
    let error = loop {
        match engine.pool(&problem, slots) {
            Ok(pool) => pools.push(pool),
            Err(error) => break error,
        }
        assert!(pools.len() < 1000, "512 GiB did not fill the memory");
    };
    let Error::OutOfMemory { what, bytes } = &error else {
        panic!("after {} pools: {error}", pools.len());
    };
    assert_eq!((what.as_str(), *bytes), ("the state pool", 512 << 20));
    assert!(!pools.is_empty());
    pools.pop();
    assert_works(&engine);
    println!("memory was full after {} pools", pools.len() + 1);
}

/// "state lost after an error": a decode call that is refused leaves the pool as it was.
#[test]
fn a_pool_survives_an_error_in_decode() {
    let engine = open(|limits| limits.max_storage_buffer_binding_size = 1 << 16);
    let problem = Problem::new(Rule::Eda, [2, 1, 1, 1, 16, 8]);
    let (mut tensors, expected) = inputs(&problem, true);
    let initial = tensors.take(Operand::InitialState).expect("states");
    let mut pool = engine.pool(&problem, 3).expect("a pool");
    pool.write(2, &initial[..128]).expect("a write");
    pool.write(0, &initial[128..]).expect("a write");
    let right = [Row::continues(2), Row::continues(0)];
    let options = DecodeOptions::default();

    let mut refused = |problem: &Problem, tensors: &Tensors<Vec<f32>>, rows: &[Row]| {
        let slices = tensors.slices();
        let error =
            wait(engine.decode(problem, &slices, &mut pool, rows, &options)).expect_err("an error");
        assert!(
            matches!(error, Error::Tensor { .. } | Error::Unsupported { .. }),
            "{error}"
        );
        for (slot, right) in [(2, &initial[..128]), (0, &initial[128..]), (1, &[0.0; 128])] {
            let state = wait(pool.read(slot)).expect("a state");
            assert_eq!(state, right, "slot {slot} after {error}");
        }
    };
    refused(&problem, &tensors, &right[..1]);
    refused(&problem, &tensors, &[Row::starts(0), Row::starts(3)]);
    refused(&problem, &tensors, &[Row::starts(1), Row::starts(1)]);
    let mut short = tensors.clone();
    short.set(Operand::Beta, vec![0.5; 1]);
    refused(&problem, &short, &right);
    let other = Problem::new(Rule::Eda, [2, 1, 1, 1, 8, 8]);
    refused(&other, &inputs(&other, false).0, &right);
    // Found only when the work is cut: one row's tokens do not fit a binding.
    let long = Problem::new(Rule::Eda, [2, 2000, 1, 1, 16, 8]);
    let starts = [Row::starts(2), Row::starts(0)];
    refused(
        &long,
        &generate::tensors(&long, &Recipe::default()),
        &starts,
    );

    let slices = tensors.slices();
    let (o, _) = wait(engine.decode(&problem, &slices, &mut pool, &right, &options))
        .expect("the right call");
    let mut final_state = wait(pool.read(2)).expect("a state");
    final_state.extend(wait(pool.read(0)).expect("a state"));
    assert_right("afterwards", Ok(Outputs { o, final_state }), &expected);
}

/// A pool belongs to its engine.
#[test]
fn a_pool_of_another_device_is_refused() {
    let (one, other) = (open(|_| {}), open(|_| {}));
    let problem = Problem::new(Rule::Kda, [1, 1, 1, 1, 8, 8]);
    let (tensors, _) = inputs(&problem, false);
    let mut pool = other.pool(&problem, 1).expect("a pool");
    let rows = [Row::continues(0)];
    let options = DecodeOptions::default();
    let error = wait(one.decode(&problem, &tensors.slices(), &mut pool, &rows, &options)).err();
    assert!(
        matches!(&error, Some(Error::Tensor { tensor, .. }) if tensor == "the state pool"),
        "{error:?}"
    );
}

/// "`map_async` never resolves without polling": several threads and engines at once all come back, right.
#[test]
fn threads_and_engines_do_not_wait_for_each_other() {
    let (sender, receiver) = mpsc::channel();
    let engines = [(); 2].map(|()| std::sync::Arc::new(open(|_| {})));
    for thread in 0..4 {
        let (engine, sender) = (engines[thread % 2].clone(), sender.clone());
        std::thread::spawn(move || {
            for _ in 0..5 {
                assert_works(&engine);
            }
            sender.send(thread).expect("the test waits");
        });
    }
    drop(sender);
    for _ in 0..4 {
        receiver
            .recv_timeout(Duration::from_secs(120))
            .expect("every thread comes back, none having panicked");
    }

    // Two calls of one thread that take turns, neither run to its end first.
    let problem = Problem::new(Rule::Eda, [1, 100, 1, 1, 16, 8]);
    let (tensors, expected) = inputs(&problem, false);
    let slices = tensors.slices();
    let options = PrefillOptions::default();
    let run = |engine: &'static GpuEngine| engine.prefill(&problem, &slices, &options, &|_, _| {});
    let (first, second) = wait(async { futures::join!(run(engine()), run(engine())) });
    for run in [first, second] {
        assert_right("joined", run.map(|r| r.outputs), &expected);
    }
}

/// "driver computes garbage": an engine that is opened in the ordinary way has computed a known case first.
#[test]
fn an_opened_engine_has_tested_itself() {
    let engine = wait(Engine::open(&device::options())).expect("an engine");
    let Engine::Gpu(gpu) = &engine else {
        panic!("{:?} is no GPU engine", engine.description());
    };
    assert!(gpu.kernels().pipeline_count() >= 5, "nothing was computed");
    wait(engine.self_test()).expect("the same again");
}
