use eda_wgpu::*;
fn main() {
    pollster::block_on(async {
        let engine = Engine::open(&EngineOptions {
            backend: Backend::Vulkan,
            ..Default::default()
        })
        .await
        .unwrap();
        println!("{:?}", engine.description());
        let mut files: Vec<_> = ["tests/data/golden", "tests/data/real"]
            .iter()
            .flat_map(|d| std::fs::read_dir(d).unwrap().map(|e| e.unwrap().path()))
            .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
            .collect();
        files.sort();
        for f in files {
            let data = file::read(&f, &Default::default()).unwrap();
            let t = data.tensors.slices();
            let exp_o = data.expected.o.clone().unwrap();
            let exp_s = data.expected.final_state.clone().unwrap();
            print!("{:40}", f.file_name().unwrap().to_string_lossy());
            for chunk in [16, 32, 64] {
                for element in [Element::F32, Element::F16] {
                    let begun = std::time::Instant::now();
                    match engine
                        .prefill(
                            &data.problem,
                            &t,
                            &PrefillOptions {
                                chunk: Some(chunk),
                                element,
                                ..Default::default()
                            },
                            &|_, _| {},
                        )
                        .await
                    {
                        Ok(run) => print!(
                            " {:.1e}/{:.1e} {:4.0}ms",
                            relative_error(&run.outputs.o, &exp_o),
                            relative_error(&run.outputs.final_state, &exp_s),
                            begun.elapsed().as_secs_f64() * 1e3
                        ),
                        Err(e) => print!(" {e}"),
                    }
                }
            }
            match sequential::decode(&engine, &data.problem, &t, &Default::default(), &|_, _| {})
                .await
            {
                Ok(run) => print!(
                    " decode {:.1e}/{:.1e}",
                    relative_error(&run.outputs.o, &exp_o),
                    relative_error(&run.outputs.final_state, &exp_s)
                ),
                Err(e) => print!(" {e}"),
            }
            println!();
        }
    });
}
