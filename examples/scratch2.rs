use eda_wgpu::*;
fn main() {
    pollster::block_on(async {
        let engine = Engine::open(&EngineOptions { backend: Backend::Vulkan, ..Default::default() }).await.unwrap();
        for t in [500usize, 700, 1300] {
        let p = Problem::new(Rule::Eda, [1, t, 1, 1, 128, 128]);
        let tensors = generate::tensors(&p, &Default::default());
        let t = tensors.slices();
        let r = reference::recurrence::<f64>(&p, &t).unwrap();
        let Engine::Gpu(g) = &engine else { panic!() };
        let run = g.prefill(&p, &t, &PrefillOptions::default(), &|_, _| {}).await.unwrap();
        let first = run.outputs.o.iter().zip(&r.o).position(|(a, b)| (*a as f64 - b).abs() > 1e-4);
        println!("{} {} first wrong token {:?}", relative_error(&run.outputs.o, &r.o), relative_error(&run.outputs.final_state, &r.final_state), first.map(|f| f / 128));
        }
    });
}
