//! The kernels on the adapter of this machine: a GPU where there is one, else a software driver, whose name
//! and kind are printed. Without any adapter this fails.
//!
//! ```text
//! cargo bench --bench gpu              samples enough for statistics
//! cargo bench --bench gpu -- --quick   a first look
//! ```
//!
//! | benchmark | what is timed |
//! |---|---|
//! | `prefill` | a whole prefill of one sequence in float32: all five passes, outputs and final state written |
//! | `decode` | one token for each row of a batch, each with its own state: the mean of a few dependent steps recorded together |
//!
//! Inputs are on the device already. Times are the device's own (timestamps around the compute pass) where it
//! has them, else from submission to completion. Sizes are small enough for a software driver, so that on a
//! GPU the figures say more about latency than about throughput; `eda bench` runs large shapes, and
//! `benches/NOTES.md` has what they took.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use eda_wgpu::bench::{self, Effort};
use eda_wgpu::gpu::engine::GpuEngine;
use eda_wgpu::gpu::kernels::PrefillSettings;
use eda_wgpu::{Backend, Element, Engine, EngineOptions, Problem, Result, Rule};
use std::time::Duration;

/// Most samples of one query set.
const SAMPLES: u64 = 1024;

/// The GPU that `auto` takes, else any adapter of a backend, software drivers included.
fn open() -> Box<GpuEngine> {
    let mut found = Vec::new();
    for backend in [
        Backend::Auto,
        Backend::Vulkan,
        Backend::Metal,
        Backend::Dx12,
        Backend::Gl,
    ] {
        let options = EngineOptions {
            backend,
            ..EngineOptions::default()
        };
        match pollster::block_on(Engine::open(&options)) {
            Ok(Engine::Gpu(engine)) => return engine,
            Ok(_) => found.push(format!("{backend:?}: no GPU")),
            Err(error) => found.push(format!("{backend:?}: {error}")),
        }
    }
    eprintln!(
        "No adapter to measure. Install a driver (the software driver lavapipe will do), or run \
         `cargo bench --bench cpu` alone. Tried:\n  {}",
        found.join("\n  ")
    );
    std::process::exit(1);
}

/// The sum of `count` samples that `run` returns in milliseconds. Before each set, one run is thrown away.
fn total(count: u64, run: impl Fn(Effort) -> Result<Vec<f64>>) -> Duration {
    let mut milliseconds = 0.0;
    let mut left = count;
    while left > 0 {
        let samples = left.min(SAMPLES);
        left -= samples;
        let effort = Effort {
            warm_up: Duration::ZERO,
            samples: samples as usize,
        };
        match run(effort) {
            Ok(times) => milliseconds += times.iter().sum::<f64>(),
            Err(error) => {
                eprintln!("{error}");
                std::process::exit(1);
            }
        }
    }
    Duration::from_secs_f64(milliseconds * 1e-3)
}

fn prefill(c: &mut Criterion, engine: &GpuEngine) {
    let tokens = 256;
    let mut group = c.benchmark_group("prefill");
    group
        .sample_size(10)
        .throughput(Throughput::Elements(tokens as u64));
    for (name, rule) in [("EDA", Rule::Eda), ("KDA", Rule::Kda)] {
        let problem = Problem::new(rule, [1, tokens, 2, 2, 64, 64]);
        let settings = PrefillSettings::default();
        let id = BenchmarkId::new(name, format!("T={tokens} HV=2 K=V=64"));
        group.bench_function(id, |b| {
            b.iter_custom(|count| {
                total(count, |effort| {
                    bench::prefill(engine, &problem, &settings, effort)
                })
            });
        });
    }
    group.finish();
}

fn decode(c: &mut Criterion, engine: &GpuEngine) {
    const STEPS: usize = 4;
    let batch = 4;
    let mut group = c.benchmark_group("decode");
    let problem = Problem::new(Rule::Eda, [batch, 1, 4, 4, 128, 128]);
    // The state is read once and written once.
    group
        .sample_size(10)
        .throughput(Throughput::Bytes(problem.states_len() as u64 * 8));
    let id = BenchmarkId::new("EDA", format!("B={batch} HV=4 K=V=128"));
    group.bench_function(id, |b| {
        b.iter_custom(|count| {
            total(count, |effort| {
                bench::decode(engine, &problem, Element::F32, STEPS, effort)
            })
        });
    });
    group.finish();
}

fn benches(c: &mut Criterion) {
    let engine = open();
    let what = engine.description();
    println!(
        "{} ({}, {}, tier {}), driver {}",
        what.adapter, what.backend, what.kind, what.tier, what.driver
    );
    prefill(c, &engine);
    decode(c, &engine);
}

criterion_group!(all, benches);
criterion_main!(all);
