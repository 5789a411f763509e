use eda_wgpu::*;
// Relative l2 error of the matrix tier on a few strong problems, against the CPU engine in float32 on the same f16-rounded inputs.
fn main() {
    let tier = if std::env::args().nth(1).as_deref() == Some("portable") { Tier::Portable } else { Tier::Matrix };
    let mut gpu = pollster::block_on(Engine::open(&EngineOptions { backend: Backend::Vulkan, ..Default::default() })).unwrap();
    if let Engine::Gpu(g) = &mut gpu { g.set_tier(Some(tier)).unwrap(); }
    let cpu = pollster::block_on(Engine::open(&EngineOptions { backend: Backend::Cpu, ..Default::default() })).unwrap();
    let el = if tier == Tier::Matrix { Element::F16 } else { Element::F32 };
    let rel = |a: &[f32], b: &[f32]| { let (mut n, mut d) = (0f64, 0f64); for (x, y) in a.iter().zip(b) { n += (*x as f64 - *y as f64).powi(2); d += (*y as f64).powi(2); } (n / d.max(1e-300)).sqrt() };
    use eda_wgpu::generate::{Recipe, Decays, tensors};
    for (rule, dims) in [(Rule::Eda, [1, 333, 2, 4, 128, 128]), (Rule::Eda, [2, 97, 2, 2, 64, 96]), (Rule::Eda, [1, 200, 1, 2, 24, 40]), (Rule::Kda, [1, 200, 2, 2, 128, 128]), (Rule::DeltaProduct { factors: 2 }, [1, 150, 2, 2, 128, 128]), (Rule::Rwkv7, [1, 150, 2, 2, 64, 64]), (Rule::Gdn, [1, 150, 2, 2, 96, 128])] {
        for decays in [Decays::Mixed, Decays::Weak, Decays::Floor, Decays::None, Decays::Cliff] {
            let mut p = Problem::new(rule, dims);
            p.normalize = false;
            let t = tensors(&p, &Recipe { seed: 5, decays, initial_state: true, ..Default::default() });
            let o = PrefillOptions { element: el, ..Default::default() };
            let t = { let mut r = Tensors::new(); for (k, v) in t.iter() { r.set(k, v.as_slice()); } r };
            let g = pollster::block_on(gpu.prefill(&p, &t, &o, &|_, _| ()));
            let c = pollster::block_on(cpu.prefill(&p, &t, &PrefillOptions { element: el, ..Default::default() }, &|_, _| ()));
            match (g, c) { (Ok(g), Ok(c)) => println!("{rule:?} {dims:?} {decays:?}: o {:.2e} s {:.2e}", rel(&g.outputs.o, &c.outputs.o), rel(&g.outputs.final_state, &c.outputs.final_state)), (g, c) => println!("{rule:?} {dims:?} {decays:?}: {:?} {:?}", g.err().map(|e| e.to_string()), c.err().map(|e| e.to_string())) }
        }
    }
}
