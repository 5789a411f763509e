//! The CPU engine against the float32 recurrence, on the cores of this machine.
//!
//! ```text
//! cargo bench --bench cpu              T = 4096
//! cargo bench --bench cpu -- --quick   T = 1024
//! ```
//!
//! | benchmark | what is timed |
//! |---|---|
//! | `prefill EDA/engine` | a whole prefill of one sequence from host memory: outputs and final state allocated and written |
//! | `prefill EDA/recurrence` | the same by [`recurrence`], token by token, the heads spread over the cores (one head: one core) |
//! | `decode EDA` | one token for each row of a batch, each with its own state; the throughput is that of the state, read and written |
//!
//! After each shape of prefill the two are run in turns and the ratio of their shortest times is printed; the goal is
//! 5 at HV = 4, K = V = 128. `pytorch_chunked.py` compares with PyTorch; what was measured is in `NOTES.md`.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use eda_wgpu::cpu::CpuEngine;
use eda_wgpu::reference::recurrence;
use eda_wgpu::{Operand, PrefillOptions, Problem, Row, Rule, Tensors};
use std::time::{Duration, Instant};

/// Unit keys, uneven decays, gates in (0, 1).
fn inputs(problem: &Problem) -> Tensors<Vec<f32>> {
    let mut state = 1u64;
    let mut next = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let mut tensors = Tensors::new();
    for operand in Operand::ALL {
        if operand == Operand::InitialState || !problem.uses(operand) {
            continue;
        }
        let mut values: Vec<f32> = (0..problem.len(operand)).map(|_| next()).collect();
        match operand {
            Operand::G => values.iter_mut().for_each(|x| *x *= -*x),
            Operand::Beta | Operand::Gamma => {}
            _ => {
                for row in values.chunks_exact_mut(problem.key_dim) {
                    row.iter_mut().for_each(|x| *x -= 0.5);
                    let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
                    row.iter_mut().for_each(|x| *x /= norm);
                }
            }
        }
        tensors.set(operand, values);
    }
    tensors
}

/// The shortest times of two functions run in turns: other programs can only add to one, and do to both.
fn shortest(mut f: impl FnMut(), mut g: impl FnMut()) -> [Duration; 2] {
    let once = |f: &mut dyn FnMut()| {
        let start = Instant::now();
        f();
        start.elapsed()
    };
    let mut best = [Duration::MAX; 2];
    for _ in 0..9 {
        best = [best[0].min(once(&mut f)), best[1].min(once(&mut g))];
    }
    best
}

fn prefill(c: &mut Criterion) {
    let engine = CpuEngine::new();
    let options = PrefillOptions::default();
    let quick = std::env::args().any(|a| a == "--quick");
    let tokens = if quick { 1024 } else { 4096 };
    for (heads, dim) in [(4, 128), (1, 128), (16, 64)] {
        let problem = Problem::new(Rule::Eda, [1, tokens, heads, heads, dim, dim]);
        let tensors = inputs(&problem);
        let slices = tensors.slices();
        let run = || engine.prefill(&problem, &slices, &options, &|_, _| {});
        let shape = format!("T={tokens} HV={heads} K=V={dim}");

        let mut group = c.benchmark_group("prefill EDA");
        group
            .sample_size(10)
            .throughput(Throughput::Elements(tokens as u64));
        group.bench_function(BenchmarkId::new("engine", &shape), |b| b.iter(run));
        group.bench_function(BenchmarkId::new("recurrence", &shape), |b| {
            b.iter(|| recurrence::<f32>(&problem, &slices));
        });
        group.finish();

        let [engine_time, plain_time] = shortest(
            || drop(run()),
            || drop(recurrence::<f32>(&problem, &slices)),
        );
        let ratio = plain_time.as_secs_f64() / engine_time.as_secs_f64();
        println!(
            "EDA {shape}: {engine_time:.2?} against {plain_time:.2?}, {ratio:.1} times as fast\n"
        );
    }
}

fn decode(c: &mut Criterion) {
    let engine = CpuEngine::new();
    let mut group = c.benchmark_group("decode EDA");
    group.sample_size(10);
    for batch in [1, 64] {
        let problem = Problem::new(Rule::Eda, [batch, 1, 16, 16, 128, 128]);
        let tensors = inputs(&problem);
        let slices = tensors.slices();
        let rows: Vec<Row> = (0..batch).map(|i| Row::continues(i as i32)).collect();
        let Ok(mut pool) = engine.pool(&problem, batch) else {
            return;
        };
        group.throughput(Throughput::Bytes(problem.states_len() as u64 * 8));
        group.bench_function(
            BenchmarkId::new("HV=16 K=V=128", format!("B={batch}")),
            |b| {
                b.iter(|| engine.decode(&problem, &slices, &mut pool, &rows, &Default::default()));
            },
        );
    }
    group.finish();
}

criterion_group!(benches, prefill, decode);
criterion_main!(benches);
