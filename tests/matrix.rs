//! The matrix tier against float64. These tests need an adapter with cooperative matrices and are ignored without
//! being asked for; `scripts/test.sh` runs them on such a GPU if there is one, else on a software driver that it
//! fetches (`cargo test --test matrix -- --ignored`). What holds everywhere comes first.

mod common;
#[path = "common/device.rs"]
mod device;

use common::golden::cases;
use common::{error, exact, half, label, prefill, wait};
use eda_wgpu::bench::ceilings;
use eda_wgpu::bench::report::Op;
use eda_wgpu::bench::run::{self, Plan, Spec};
use eda_wgpu::generate::{self, Decays, Gates, Keys, Recipe};
use eda_wgpu::gpu::kernels::{Kernels, PrefillSettings, Slice};
use eda_wgpu::gpu::matrix::MatrixUnits;
use eda_wgpu::gpu::shaders::ChunkShape;
use eda_wgpu::{
    Backend, Element, Engine, EngineOptions, Error, Operand, PrefillOptions, Problem, Result, Rule,
    Tensors, Tier, adapter,
};
use std::sync::OnceLock;

/// Largest relative l2 error that passes.
const LIMIT: f64 = 2e-3;

fn options(tier: Option<Tier>) -> EngineOptions {
    EngineOptions {
        backend: if cfg!(target_os = "macos") {
            Backend::Metal
        } else {
            Backend::Vulkan
        },
        adapter: std::env::var("EDA_TEST_ADAPTER").ok(),
        tier,
        ..EngineOptions::default()
    }
}

/// An engine whose every prefill runs on matrix units. A machine without them fails the test.
fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| {
        wait(Engine::open(&options(Some(Tier::Matrix)))).unwrap_or_else(|e| {
            panic!("these tests need an adapter with cooperative matrices (scripts/test.sh fetches one): {e}")
        })
    })
}

fn right(what: &str, problem: &Problem, tensors: &Tensors<Vec<f32>>) {
    let outputs = prefill(engine(), problem, tensors, &PrefillOptions::default())
        .unwrap_or_else(|e| panic!("{what}: {e}"));
    let error = error(&outputs, &exact(problem, tensors));
    assert!(error <= LIMIT, "{what}: error {error:.2e}");
}

/// These operands by these factors.
fn scale(tensors: &mut Tensors<Vec<f32>>, by: &[(Operand, f32)]) {
    for &(operand, factor) in by {
        let values = tensors.get_mut(operand).expect("an operand");
        values.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Asking for matrix units where there are none is an error that says so, and where there are some is granted.
#[test]
fn the_matrix_tier_is_granted_or_refused_by_name() {
    let found = wait(adapter::choose(&options(None)))
        .expect("an adapter")
        .expect("an adapter");
    match (
        MatrixUnits::of(&found),
        wait(Engine::open(&options(Some(Tier::Matrix)))),
    ) {
        (Some(_), Ok(engine)) => assert_eq!(engine.description().tier, "matrix"),
        (None, Err(Error::Unsupported { .. })) => {}
        (units, opened) => panic!("{units:?}: {:?}", opened.map(|e| e.description())),
    }
}

/// Sequences cut into segments that are computed at the same time.
#[test]
#[ignore = "needs matrix units"]
fn segments() {
    for rule in Rule::ALL {
        let mut problem = Problem::new(rule, [1, 300, 1, 2, 36, 20]);
        problem.cu_seqlens = Some(vec![0, 18, 18, 290, 300]);
        for decays in [Decays::Mixed, Decays::Weak] {
            let recipe = Recipe {
                decays,
                initial_state: true,
                ..Recipe::default()
            };
            let tensors = generate::tensors(&problem, &recipe);
            let expected = exact(&problem, &tensors);
            for count in [2, 7] {
                let options = PrefillOptions {
                    segments: Some(count),
                    chunk: Some(16),
                    ..PrefillOptions::default()
                };
                let outputs = prefill(engine(), &problem, &tensors, &options)
                    .unwrap_or_else(|e| panic!("{rule}, {count} segments: {e}"));
                let error = error(&outputs, &expected);
                assert!(
                    error <= LIMIT,
                    "{rule}, {decays:?}, {count} segments: {error:.2e}"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs matrix units"]
fn golden_and_real_cases() {
    for case in ["golden", "real"].into_iter().flat_map(cases) {
        let expected = eda_wgpu::Outputs {
            o: case.o.clone(),
            final_state: case.final_state.clone(),
        };
        for element in [Element::F32, Element::F16] {
            let options = PrefillOptions {
                element,
                ..PrefillOptions::default()
            };
            let outputs = prefill(engine(), &case.problem, &case.tensors, &options)
                .unwrap_or_else(|e| panic!("{}: {e}", case.name));
            let error = error(&outputs, &expected);
            assert!(error <= LIMIT, "{} {element:?}: {error:.2e}", case.name);
        }
    }
}

#[test]
#[ignore = "needs matrix units"]
fn every_chunk_size_that_fits() {
    let mut sizes = std::collections::BTreeSet::new();
    for (rule, key_dim) in [
        (Rule::Eda, 32),
        (Rule::Kda, 32),
        (Rule::DeltaProduct { factors: 3 }, 20),
    ] {
        let problem = Problem::new(rule, [1, 150, 1, 2, key_dim, 24]);
        let tensors = generate::tensors(&problem, &Recipe::default());
        let expected = exact(&problem, &tensors);
        for chunk in [16, 32, 64] {
            let outputs = prefill(engine(), &problem, &tensors, &common::chunk(chunk));
            match outputs {
                Ok(outputs) => {
                    let error = error(&outputs, &expected);
                    assert!(error <= LIMIT, "{rule} chunk {chunk}: {error:.2e}");
                    sizes.insert(chunk);
                }
                // (64 sub-steps take 40 KiB of workgroup memory, which not every device has.)
                Err(Error::Unsupported { .. }) if chunk * rule.update().substeps() >= 64 => {}
                Err(e) => panic!("{rule} chunk {chunk}: {e}"),
            }
        }
    }
    assert!(sizes.is_superset(&[16, 32].into()), "{sizes:?}");
}

/// Slow decay, clustered and repeated keys, erase where it writes, gates near one: where products of float16 operands
/// would lose most if the triangle were inverted in float16.
#[test]
#[ignore = "needs matrix units"]
fn the_hard_case() {
    let problem = Problem::new(Rule::Eda, [1, 512, 1, 1, 64, 32]);
    for keys in [Keys::Clustered, Keys::Repeated, Keys::SameAddress] {
        let recipe = Recipe {
            decays: Decays::Weak,
            gates: Gates::NearOne,
            keys,
            initial_state: true,
            ..Recipe::default()
        };
        right(
            &format!("{keys:?}"),
            &problem,
            &generate::tensors(&problem, &recipe),
        );
    }
}

/// Where workgroup memory is small, a chunk's operands pass through it in parts; where there is work for many workgroups of
/// the scan, each has 64 columns.
#[test]
#[ignore = "needs matrix units"]
fn operands_in_parts_and_columns_of_all_kinds() {
    let found = wait(adapter::choose(&options(None)))
        .expect("an adapter")
        .expect("an adapter");
    let units = MatrixUnits::of(&found).expect("matrix units");
    let (mut parts, mut columns, mut apart) = (Vec::new(), Vec::new(), Vec::new());
    let (mut together, mut own_slabs, mut w_over) = (Vec::new(), Vec::new(), Vec::new());
    for (key_dim, value_dim) in [(64, 64), (48, 40), (128, 36), (32, 32)] {
        let limited = |memory: u32| wgpu::Limits {
            max_compute_workgroup_storage_size: memory,
            ..found.limits()
        };
        // The least with which anything runs, and more.
        let problem = Problem::new(Rule::Eda, [2, 70, 1, 2, key_dim, value_dim]);
        let least = (0..)
            .map(|i| i << 8)
            .find(|&m| ChunkShape::on_matrix_units(&problem, 16, units, &limited(m), 1).is_ok())
            .expect("memory enough");
        for memory in [least, 16 << 10, 20 << 10, 24 << 10, 32 << 10] {
            let limits = limited(memory);
            for (rule, width) in [(Rule::Eda, 1), (Rule::Eda, 128), (Rule::Kda, 1)] {
                let problem = Problem::new(rule, [2, 70, 1, 2, key_dim, value_dim]);
                let shape = [32, 16].into_iter().find_map(|chunk| {
                    ChunkShape::on_matrix_units(&problem, chunk, units, &limits, width).ok()
                });
                let Some(shape) = shape else { continue };
                let matrix = shape.matrix.expect("a shape on matrix units");
                parts.extend(matrix.parts);
                columns.push(matrix.columns);
                apart.push(matrix.apart);
                w_over.push(matrix.w_over);
                own_slabs.push(matrix.own_slabs);
                if !matrix.wide {
                    together.push(matrix.together);
                }

                let what = format!("{rule}, K {key_dim}, {memory} bytes, {matrix:?}");
                let host = device::Host::with_matrix_units(&found, limits.clone());
                let mut kernels = Kernels::with_matrix_units(&host.device, Some(units));
                kernels.set_width(width);
                let settings = PrefillSettings {
                    tier: Tier::Matrix,
                    chunk: Some(shape.tokens),
                    segments: Some(1),
                    ..PrefillSettings::default()
                };
                let tensors = generate::tensors(&problem, &Recipe::default());
                let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
                let bytes = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
                let mut buffers = Tensors::new();
                for (operand, values) in tensors.iter() {
                    buffers.set(operand, host.buffer(&bytes(values), usage));
                }
                let mut slices = Tensors::new();
                for (operand, buffer) in buffers.iter() {
                    slices.set(operand, Slice::whole(buffer));
                }
                let o = host.buffer(&bytes(&vec![f32::NAN; problem.output_len()]), usage);
                let state = host.buffer(&bytes(&vec![f32::NAN; problem.states_len()]), usage);
                let (o_slice, state_slice) = (Slice::whole(&o), Slice::whole(&state));
                let plan = kernels.plan_prefill(&problem, &settings).expect(&what);
                let call = kernels
                    .prefill(&plan, &slices, o_slice, state_slice, None)
                    .expect(&what);
                let mut encoder = host.encoder();
                call.record(&mut encoder);
                host.submit(encoder);
                let floats = |bytes: Vec<u8>| {
                    let words = bytes.chunks_exact(4);
                    words
                        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                        .collect::<Vec<f32>>()
                };
                let outputs = eda_wgpu::Outputs {
                    o: floats(host.read(&o)),
                    final_state: floats(host.read(&state)),
                };
                let error = error(&outputs, &exact(&problem, &tensors));
                assert!(error <= LIMIT, "{what}: error {error:.2e}");
                assert_eq!(host.uncaptured(), 0, "{what}");
            }
        }
    }
    assert!(parts.iter().any(|&n| n > 1), "no operand in parts");
    for either in [apart, w_over] {
        assert!(either.contains(&true) && either.contains(&false));
    }
    assert!([1, 2].iter().all(|n| own_slabs.contains(n)));
    assert!([0, 1, 2].iter().all(|n| together.contains(n)));
    assert!([16, 64].iter().all(|n| columns.contains(n)), "{columns:?}");
}

/// How many tokens one product of the pairs pass may hold depends on how far they decay: from a token to 16.
#[test]
#[ignore = "needs matrix units"]
fn decays_of_every_strength() {
    let rules = [
        Rule::Eda,
        Rule::Kda,
        Rule::Gdn,
        Rule::Gdn2,
        Rule::Rwkv7,
        Rule::DeltaProduct { factors: 2 },
    ];
    for rule in rules {
        let problem = Problem::new(rule, [1, 100, 1, 2, 64, 40]);
        let mut tensors = generate::tensors(&problem, &Recipe::default());
        for strength in [0.2, 0.8, 1.6, 3.2, 6.4, 12.8] {
            let mut rng = generate::Rng::new(3);
            let g = (0..problem.len(Operand::G)).map(|_| -strength * rng.uniform(0.8, 1.0));
            tensors.set(Operand::G, g.collect());
            right(&format!("{rule}, decays of {strength}"), &problem, &tensors);
        }
        // One channel of one token alone, in the middle of a block.
        let mut g = vec![-0.1; problem.len(Operand::G)];
        let at = g.len() / 100 * 37;
        g[at] = -60.0;
        tensors.set(Operand::G, g);
        right(&format!("{rule}, one decay of 60"), &problem, &tensors);
    }
}

/// Contents and states of any size neither overflow nor vanish in float16 operands: outputs and states are linear
/// in them, and powers of two change no bit.
#[test]
#[ignore = "needs matrix units"]
fn no_size_of_contents_or_states_overflows_or_vanishes() {
    let problem = Problem::new(Rule::Eda, [1, 70, 1, 1, 32, 24]);
    let recipe = Recipe {
        initial_state: true,
        ..Recipe::default()
    };
    let tensors = generate::tensors(&problem, &recipe);
    let plain = prefill(engine(), &problem, &tensors, &PrefillOptions::default()).expect("plain");
    for power in [-60, -20, 20, 60] {
        let by = 2f32.powi(power);
        let mut scaled = tensors.clone();
        scale(
            &mut scaled,
            &[(Operand::V, by), (Operand::InitialState, by)],
        );
        let outputs =
            prefill(engine(), &problem, &scaled, &PrefillOptions::default()).expect("scaled");
        for (x, y) in plain.o.iter().zip(&outputs.o) {
            assert_eq!(x * by, *y, "o at 2^{power}");
        }
        for (x, y) in plain.final_state.iter().zip(&outputs.final_state) {
            assert_eq!(x * by, *y, "final_state at 2^{power}");
        }
    }
    // A small content into a large state, and the reverse.
    for (contents, state) in [(1e-6, 1e6), (1e6, 1e-6)] {
        let mut mixed = tensors.clone();
        let by = [(Operand::V, contents), (Operand::InitialState, state)];
        scale(&mut mixed, &by);
        right(
            &format!("contents {contents}, state {state}"),
            &problem,
            &mixed,
        );
    }
}

/// A column of contents of another size than its neighbours neither disturbs them nor is disturbed.
#[test]
#[ignore = "needs matrix units"]
fn columns_do_not_disturb_each_other() {
    let problem = Problem::new(Rule::Eda, [1, 70, 1, 1, 32, 24]);
    let mut tensors = generate::tensors(&problem, &Recipe::default());
    for row in tensors.get_mut(Operand::V).expect("v").chunks_mut(24) {
        row[0] *= 1e10;
        row[17] *= 1e-10;
    }
    let expected = exact(&problem, &tensors);
    let outputs = prefill(engine(), &problem, &tensors, &PrefillOptions::default()).expect("a run");
    for column in 0..24 {
        let of = |values: &[f32]| -> Vec<f32> {
            values.iter().skip(column).step_by(24).copied().collect()
        };
        let of_exact = |values: &[f64]| -> Vec<f64> {
            values.iter().skip(column).step_by(24).copied().collect()
        };
        for (found, right) in [
            (&outputs.o, &expected.o),
            (&outputs.final_state, &expected.final_state),
        ] {
            let error = eda_wgpu::relative_error(&of(found), &of_exact(right));
            assert!(error <= LIMIT, "column {column}: {error:.2e}");
        }
    }
}

/// Queries, scales and vectors of any length: what float16 operands hold is their direction.
#[test]
#[ignore = "needs matrix units"]
fn vectors_of_any_length() {
    let run = |what: &str, rule: Rule, factor: Option<f32>, lengths: &[(Operand, f32)]| {
        let mut problem = Problem::new(rule, [1, 70, 1, 1, 32, 24]);
        problem.scale = factor;
        let mut tensors = generate::tensors(&problem, &Recipe::default());
        scale(&mut tensors, lengths);
        right(what, &problem, &tensors);
    };
    for factor in [1e-8, 1e6] {
        run("scale", Rule::Eda, Some(factor), &[]);
    }
    for length in [1e-10, 1e-4, 1e7] {
        run("queries", Rule::Eda, None, &[(Operand::Q, length)]);
    }
    for length in [1e-5, 1e5] {
        run("keys", Rule::Linear, None, &[(Operand::K, length)]);
    }
    // Both sub-steps of RWKV-7 share a power, so b and k may not be of all too different lengths.
    for length in [1e-2, 1e2] {
        let inverse = [(Operand::A, length), (Operand::B, 1.0 / length)];
        run("a and b", Rule::Rwkv7, None, &inverse);
        run("k", Rule::Rwkv7, None, &[(Operand::K, length)]);
    }
    run(
        "short keys",
        Rule::Eda,
        None,
        &[(Operand::K, 1e-3), (Operand::E, 1e-3)],
    );
}

/// Writes so small that what they leave is nothing beside the contents: all that is read is as small. States that were there
/// before, large ones too, stay what they are.
#[test]
#[ignore = "needs matrix units"]
fn faint_writes() {
    for rule in Rule::ALL {
        // What makes all writes of a token faint.
        let faint: &[Operand] = match rule {
            Rule::Linear => &[Operand::K],
            Rule::Rwkv7 => &[Operand::K, Operand::B],
            Rule::Gdn2 => &[Operand::K],
            Rule::Eda => &[Operand::Beta, Operand::Gamma],
            _ => &[Operand::Beta],
        };
        for length in [1e-3, 1e-5, 1e-8, 0.0] {
            for state in [0.0, 1e-6, 1.0, 1e6] {
                let problem = Problem::new(rule, [1, 70, 1, 1, 32, 24]);
                let recipe = Recipe {
                    initial_state: true,
                    decays: Decays::Weak,
                    ..Recipe::default()
                };
                let mut tensors = generate::tensors(&problem, &recipe);
                for &operand in faint {
                    scale(&mut tensors, &[(operand, length)]);
                }
                scale(&mut tensors, &[(Operand::InitialState, state)]);
                right(
                    &format!("{rule}, writes {length:e}, state {state:e}"),
                    &problem,
                    &tensors,
                );
            }
        }
    }
}

/// Sums that grow with the sequence: linear attention on one key.
#[test]
#[ignore = "needs matrix units"]
fn a_state_that_grows_without_bound_stays_finite() {
    // (Long enough, too, that loops which a software driver would stop have to be cut.)
    let problem = Problem::new(Rule::Linear, [1, 20_000, 1, 1, 16, 16]);
    let mut tensors = generate::tensors(&problem, &Recipe::default());
    for operand in [Operand::K, Operand::V] {
        let values = tensors.get_mut(operand).expect("an operand");
        values.fill(if operand == Operand::K { 0.25 } else { 1000.0 });
    }
    right("one key", &problem, &tensors);
}

#[test]
#[ignore = "needs matrix units"]
fn packed_sequences_states_and_parts() {
    let mut packed = Problem::new(Rule::Eda, [1, 100, 2, 4, 32, 24]);
    packed.cu_seqlens = Some(vec![0, 0, 17, 18, 18, 82, 100, 100]);
    let recipe = Recipe {
        initial_state: true,
        ..Recipe::default()
    };
    let tensors = generate::tensors(&packed, &recipe);
    right("packed", &packed, &tensors);

    // Parts of a long input carry the state on.
    let problem = Problem::new(Rule::Eda, [1, 300, 2, 4, 32, 24]);
    let tensors = generate::tensors(&problem, &recipe);
    let expected = exact(&problem, &tensors);
    let Engine::Gpu(gpu) = engine() else {
        panic!("a GPU engine")
    };
    let whole = prefill(engine(), &problem, &tensors, &PrefillOptions::default()).expect("whole");
    gpu.set_part_bytes(1 << 17);
    let parts = prefill(engine(), &problem, &tensors, &PrefillOptions::default());
    gpu.set_part_bytes(256 << 20);
    let parts = parts.expect("parts");
    assert_eq!(whole, parts, "the same chunks in parts give the same bits");
    assert!(error(&parts, &expected) <= LIMIT);
}

#[test]
#[ignore = "needs matrix units"]
fn the_same_bits_every_run() {
    let problem = Problem::new(Rule::Eda, [1, 70, 1, 2, 32, 24]);
    let tensors = generate::tensors(&problem, &Recipe::default());
    let first = prefill(engine(), &problem, &tensors, &half()).expect("a run");
    for _ in 0..20 {
        let again = prefill(engine(), &problem, &tensors, &half()).expect("a run");
        assert_eq!(first, again);
    }
}

/// float32 inputs are never computed with less than float32 unless that is asked for.
#[test]
#[ignore = "needs matrix units"]
fn precision_is_not_lowered_unasked() -> Result<()> {
    let engine = wait(Engine::open(&options(None)))?;
    let problem = Problem::new(Rule::Eda, [1, 70, 1, 2, 32, 24]);
    let tensors = generate::tensors(&problem, &Recipe::default());
    let run = |options: &PrefillOptions| {
        wait(engine.prefill(&problem, &tensors.slices(), options, &|_, _| {}))
    };
    let full = run(&PrefillOptions::default())?;
    assert_eq!(full.tier, Some(Tier::Portable));
    let expected = exact(&problem, &tensors);
    assert!(
        error(&full.outputs, &expected) <= 1e-5,
        "{}",
        label(&engine)
    );
    assert_eq!(run(&half())?.tier, Some(Tier::Matrix));
    Ok(())
}

#[test]
#[ignore = "needs matrix units"]
fn benchmarks_run_the_tier_that_they_name() -> Result<()> {
    let mut engine = wait(Engine::open(&options(None)))?;
    let plan = Plan::of(&engine, true);
    let ceilings = wait(ceilings::measure(&engine, &plan))?;
    for (asked, element, ran) in [
        (None, Element::F16, "matrix"),
        (None, Element::F32, "portable"),
        (Some(Tier::Portable), Element::F16, "portable"),
        (Some(Tier::Matrix), Element::F32, "matrix"),
    ] {
        let Engine::Gpu(gpu) = &mut engine else {
            panic!("{}", label(&engine));
        };
        gpu.set_tier(asked)?;
        let built = gpu.kernels().pipeline_count();
        let spec = Spec {
            op: Op::Prefill,
            rule: Rule::Eda,
            shape: [1, 64, 1, 1, 16, 16],
            element,
            chunk: None,
            segments: None,
        };
        let case = wait(run::case(&engine, &spec, &plan, &ceilings))?;
        assert_eq!(case.tier.as_deref(), Some(ran), "{asked:?} {element:?}");
        let Engine::Gpu(gpu) = &engine else { continue };
        assert!(
            gpu.kernels().pipeline_count() > built,
            "{asked:?} {element:?}"
        );
    }
    Ok(())
}

#[test]
#[ignore = "needs matrix units"]
fn what_does_not_fit_is_refused_or_left_to_the_other_tier() -> Result<()> {
    // More than 64 sub-steps in the smallest chunk.
    let problem = Problem::new(Rule::DeltaProduct { factors: 5 }, [1, 40, 1, 1, 16, 16]);
    let tensors = generate::tensors(&problem, &Recipe::default());
    let refused = prefill(engine(), &problem, &tensors, &PrefillOptions::default());
    assert!(
        matches!(refused, Err(Error::Unsupported { .. })),
        "{refused:?}"
    );
    let engine = wait(Engine::open(&options(None)))?;
    let run = wait(engine.prefill(&problem, &tensors.slices(), &half(), &|_, _| {}))?;
    assert_eq!(run.tier, Some(Tier::Portable));
    Ok(())
}
