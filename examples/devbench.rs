use eda_wgpu::bench::*;
use eda_wgpu::gpu::kernels::PrefillSettings;
use eda_wgpu::*;
fn med(mut v: Vec<f64>) -> (f64, f64) {
    v.sort_by(f64::total_cmp);
    (v[v.len() / 2], v[0])
}
fn main() {
    let quick = std::env::args().any(|a| a == "--quick");
    let Engine::Gpu(engine) = pollster::block_on(Engine::open(&EngineOptions {
        backend: Backend::Vulkan,
        ..Default::default()
    }))
    .unwrap() else {
        panic!()
    };
    println!("{:?}", engine.description());
    let effort = if quick {
        Effort {
            warm_up: std::time::Duration::ZERO,
            samples: 2,
        }
    } else {
        Effort::default()
    };
    let shapes: &[[usize; 6]] = if quick {
        &[[1, 256, 2, 2, 128, 128]]
    } else {
        &[
            [1, 4096, 16, 16, 128, 128],
            [1, 16384, 16, 16, 128, 128],
            [1, 65536, 16, 16, 128, 128],
            [8, 2048, 16, 16, 128, 128],
            [1, 4096, 96, 96, 128, 128],
        ]
    };
    let short = std::env::args().any(|a| a == "--short");
    for shape in &shapes[..if short {
        1.min(shapes.len())
    } else {
        shapes.len()
    }] {
        for (rule, element, chunk) in [
            (Rule::Eda, Element::F32, None),
            (Rule::Eda, Element::F32, Some(16)),
            (Rule::Eda, Element::F16, None),
            (Rule::Kda, Element::F32, None),
            (Rule::Kda, Element::F32, Some(32)),
        ] {
            if shape[1] == 65536 && (rule != Rule::Eda || element != Element::F32) {
                continue;
            }
            let p = Problem::new(rule, *shape);
            let s = PrefillSettings {
                element,
                chunk,
                ..Default::default()
            };
            match prefill(&engine, &p, &s, effort) {
                Ok(v) => {
                    let (m, lo) = med(v);
                    print!(
                        "prefill {rule} {shape:?} {element:?} chunk {chunk:?}: {m:.3} ms (min {lo:.3})"
                    );
                }
                Err(e) => print!("prefill {rule} {shape:?} {element:?}: {e}"),
            }
            if element == Element::F32 {
                for (n, m) in prefill_passes(
                    &engine,
                    &p,
                    &s,
                    Effort {
                        samples: 5,
                        ..effort
                    },
                )
                .unwrap()
                {
                    print!("  {n} {m:.3}");
                }
            }
            println!();
        }
    }
    for b in if quick { vec![1] } else { vec![1, 8, 64, 256] } {
        let p = Problem::new(Rule::Eda, [b, 1, 16, 16, 128, 128]);
        match decode(
            &engine,
            &p,
            Element::F32,
            if quick { 2 } else { 100 },
            effort,
        ) {
            Ok(v) => {
                let (m, lo) = med(v);
                println!("decode B {b}: {:.2} us (min {:.2})", m * 1e3, lo * 1e3);
            }
            Err(e) => println!("decode: {e}"),
        }
    }
}
