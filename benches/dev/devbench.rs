use eda_wgpu::bench::{Effort, prefill, prefill_passes};
use eda_wgpu::gpu::engine::GpuEngine;
use eda_wgpu::gpu::kernels::PrefillSettings;
use eda_wgpu::{Element, Engine, EngineOptions, Problem, Rule, Tier};
// devbench tier element scratch_MiB B,T,H[,rule] ...
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let tier = if a[1] == "matrix" { Tier::Matrix } else { Tier::Portable };
    let element = if a[2] == "f16" { Element::F16 } else { Element::F32 };
    let scratch: u64 = a[3].parse().unwrap();
    let get = |n: &str| std::env::var(n).ok().and_then(|v| v.parse::<usize>().ok());
    let options = EngineOptions { backend: eda_wgpu::Backend::Vulkan, ..Default::default() };
    let engine = pollster::block_on(Engine::open(&options)).unwrap();
    let Engine::Gpu(gpu) = &engine else { panic!() };
    let gpu: &GpuEngine = gpu;
    let samples = get("SAMPLES").unwrap_or(10);
    for s in &a[4..] {
        let f: Vec<&str> = s.split(',').collect();
        let n = |i: usize| f[i].parse::<usize>().unwrap();
        let rule = match f.get(3).copied().unwrap_or("eda") { "kda" => Rule::Kda, "gdn" => Rule::Gdn, "dp" => Rule::DeltaProduct { factors: 2 }, _ => Rule::Eda };
        let problem = Problem::new(rule, [n(0), n(1), n(2), n(2), 128, 128]);
        let settings = PrefillSettings { element, tier, scratch_limit: scratch << 20, chunk: get("CHUNK"), segments: get("SEGMENTS"), ..Default::default() };
        let effort = Effort { warm_up: std::time::Duration::from_millis(300), samples };
        let all = prefill(gpu, &problem, &settings, effort);
        let mut v = match all { Ok(v) => v, Err(e) => { println!("{s} {e}"); continue } };
        v.sort_by(f64::total_cmp);
        print!("{s:16} {:.4} ({:.4}-{:.4})", v[v.len() / 2], v[0], v[v.len() - 1]);
        if get("PASSES").is_some() {
            for (name, ms) in prefill_passes(gpu, &problem, &settings, Effort { warm_up: std::time::Duration::from_millis(30), samples: samples.min(6) }).unwrap() { print!("  {name} {ms:.4}"); }
        }
        println!();
    }
}
