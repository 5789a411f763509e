//! Development alone: `devdecode f32|f16 B,H[,K,V] …` prints the median time of a decode step, microseconds, as the mean of
//! 100 dependent steps recorded together, for states stored so. `EDA_DECODE` chooses the shape (see `src/gpu/decode.rs`).
//! `RULE` names the rule (eda), `ELEMENT=f16` the inputs' type, `SAMPLES` (9) and `STEPS` (100) the effort.
//! `devdecode dump DIR` writes the text that a GPU is given for EDA, one token, K = V = 128, with its constants, for both types of
//! states: what `.carry/dev/regs` reads to print registers.
//! `devdecode check` compares decodes of many rules and sizes with float64.
use eda_wgpu::bench::{Effort, decode_with};
use eda_wgpu::generate::{self, Recipe};
use eda_wgpu::gpu::decode::decode_shape;
use eda_wgpu::gpu::engine::GpuEngine;
use eda_wgpu::gpu::kernels::DecodeSettings;
use eda_wgpu::gpu::shaders::{self, Pass, Variant};
use eda_wgpu::reference::recurrence;
use eda_wgpu::relative_error;
use eda_wgpu::{DecodeOptions, Element, Engine, EngineOptions, Operand, Problem, Row, Rule};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let get = |name: &str| std::env::var(name).ok();
    let number = |name: &str, or: usize| get(name).and_then(|v| v.parse().ok()).unwrap_or(or);
    let element = |name: &str| match name {
        "f16" => Element::F16,
        _ => Element::F32,
    };
    let settings = DecodeSettings {
        element: element(&get("ELEMENT").unwrap_or_default()),
        state: element(&arguments[0]),
    };
    if arguments[0] == "dump" {
        dump(&arguments[1]);
        return;
    }
    let rule: Rule =
        get("RULE").map_or(Rule::Eda, |name| Rule::from_name(&name, 2).expect("a rule"));
    let options = EngineOptions {
        backend: eda_wgpu::Backend::Vulkan,
        ..Default::default()
    };
    let engine = pollster::block_on(Engine::open(&options)).expect("an engine");
    let Engine::Gpu(gpu) = &engine else {
        panic!("no GPU")
    };
    if arguments[0] == "check" {
        check(gpu);
        return;
    }
    let shape = get("EDA_DECODE").unwrap_or_default();
    print!("{} {shape:32}", arguments[0]);
    for argument in &arguments[1..] {
        let sizes: Vec<usize> = argument
            .split(',')
            .map(|n| n.parse().expect("a number"))
            .collect();
        let (k, v) = match sizes[2..] {
            [k, v] => (k, v),
            _ => (128, 128),
        };
        let problem = Problem::new(rule, [sizes[0], 1, sizes[1], sizes[1], k, v]);
        let effort = Effort {
            warm_up: std::time::Duration::from_millis(number("WARM", 300) as u64),
            samples: number("SAMPLES", 9),
        };
        match decode_with(gpu, &problem, settings, number("STEPS", 100), effort) {
            Ok(mut ms) => {
                ms.sort_by(f64::total_cmp);
                let us = |i: usize| ms[i] * 1e3;
                print!(
                    "  {argument} {:.2} ({:.2}-{:.2})",
                    us(ms.len() / 2),
                    us(0),
                    us(ms.len() - 1)
                );
            }
            Err(e) => print!("  {argument} {e}"),
        }
    }
    println!();
}

fn check(gpu: &GpuEngine) {
    let all_sizes = [[60, 36], [37, 96], [128, 128], [96, 37], [30, 12]];
    // Two sub-steps a factor, one, one that reads before the decay, contents with a factor of their own, two factors.
    let factors = 2;
    let rules = [
        Rule::Eda,
        Rule::Kda,
        Rule::Rwkv7,
        Rule::Gdn2,
        Rule::DeltaProduct { factors },
    ];
    let mut worst = [
        (0.0, String::new()),
        (0.0, String::new()),
        (0.0, String::new()),
    ];
    let mut count = 0;
    for rule in rules {
        for &[k, v] in if rule == Rule::Eda {
            &all_sizes[..]
        } else {
            &all_sizes[..2]
        } {
            for (tokens, normalize) in [(1, false), (1, true), (3, false)] {
                if normalize && (k != 60 || rule != Rule::Eda) {
                    continue;
                }
                let mut problem = Problem::new(rule, [3, tokens, 1, 2, k, v]);
                problem.normalize = normalize;
                let recipe = Recipe {
                    initial_state: true,
                    ..Recipe::default()
                };
                let mut tensors = generate::tensors(&problem, &recipe);
                for state in [Element::F32, Element::F16] {
                    if k * v % 2 == 1 {
                        continue;
                    }
                    let slices = tensors.slices();
                    let given = slices.get(Operand::InitialState).expect("states").to_vec();
                    let mut states = given.clone();
                    if state == Element::F16 {
                        states = given
                            .iter()
                            .map(|&x| half::f16::from_f32(x).to_f32())
                            .collect();
                    }
                    // The last row starts from zero.
                    let slot = states.len() / 3;
                    states[2 * slot..].fill(0.0);
                    tensors.set(Operand::InitialState, states.clone());
                    let expected = recurrence::<f64>(&problem, &tensors.slices()).expect("valid");
                    let mut inputs = tensors.slices();
                    inputs.take(Operand::InitialState);
                    let mut pool = gpu.pool_with(&problem, 4, state).expect("a pool");
                    pool.write(2, &states[..slot]).expect("written");
                    pool.write(0, &states[slot..2 * slot]).expect("written");
                    pool.write(3, &given[2 * slot..]).expect("written");
                    let rows = [Row::continues(2), Row::continues(0), Row::starts(3)];
                    let options = DecodeOptions::default();
                    let run = gpu.decode(&problem, &inputs, &mut pool, &rows, &options);
                    let (o, _) = pollster::block_on(run).expect("decoded");
                    let mut found = Vec::new();
                    for slot in [2, 0, 3] {
                        found.extend(pollster::block_on(pool.read(slot)).expect("read"));
                    }
                    let o = relative_error(&o, &expected.o);
                    let s = relative_error(&found, &expected.final_state);
                    let half = usize::from(state == Element::F16);
                    let what = format!(
                        "{rule} {tokens} tokens, {k} x {v}, {state:?}, normalize {normalize}"
                    );
                    for (i, e) in [(0, o), (1 + half, s)] {
                        if e.is_nan() || e > worst[i].0 {
                            worst[i] = (e, what.clone());
                        }
                    }
                    let right = o <= 1e-5 && s <= [1e-5, 5e-4][half];
                    if !right {
                        println!("WRONG {what}: o {o:.2e}, state {s:.2e}");
                    }
                    count += 1;
                }
            }
        }
    }
    for ((e, what), of) in worst.iter().zip(["o", "state f32", "state f16"]) {
        println!("{of}: {e:.2e} ({what})");
    }
    println!(
        "{count} cases, {}",
        std::env::var("EDA_DECODE").unwrap_or_default()
    );
}

fn dump(folder: &str) {
    let problem = Problem::new(Rule::Eda, [256, 1, 16, 16, 128, 128]);
    let asked = std::env::var("EDA_DECODE").unwrap_or_else(|_| "default".into());
    for (state, name) in [(Element::F32, "f32"), (Element::F16, "f16")] {
        let shape = decode_shape(&problem, state);
        let variant = Variant {
            state,
            columns: shape.thread_columns,
            by_four: shape.by_four,
            ..shaders::variant(Pass::Decode, &problem, Element::F32, 0)
        };
        let text = shaders::unroll(
            &shaders::source(Pass::Decode, variant),
            &shape.unrolled(&problem),
        );
        let mut constants = shaders::constants(Pass::Decode, &problem, None);
        constants.extend(shape.constants(&problem));
        let lines: Vec<_> = constants.iter().map(|(n, x)| format!("{n} {x}")).collect();
        let file = format!("{folder}/{name}_{}", asked.replace(['=', ','], "_"));
        std::fs::create_dir_all(folder).expect("a folder");
        std::fs::write(format!("{file}.wgsl"), text).expect("written");
        std::fs::write(format!("{file}.const"), lines.join("\n")).expect("written");
    }
}
