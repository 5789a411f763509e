//! The short way in: the crate opens the best engine of this machine, takes host slices and returns vectors.
//!
//! ```text
//! cargo run --release --example own_device [auto|cpu|vulkan|metal|dx12|gl]
//! ```
//!
//! Computes 500 tokens of Erase-then-Delta Attention in chunks, goes on token by token from the state that they
//! leave, and compares both with the float64 recurrence. Without a GPU the CPU engine runs, and says so.

use eda_wgpu::generate::{self, Recipe};
use eda_wgpu::{
    Backend, DecodeOptions, Engine, EngineOptions, Operand, PrefillOptions, Problem, Row, Rule,
    Tensors, parts, reference, relative_error,
};
use std::slice::from_ref;

fn main() -> eda_wgpu::Result<()> {
    pollster::block_on(run())
}

async fn run() -> eda_wgpu::Result<()> {
    let engine = Engine::open(&EngineOptions {
        backend: backend(),
        ..EngineOptions::default()
    })
    .await?;
    let what = engine.description();
    println!("{} ({}, {})", what.adapter, what.backend, what.kind);

    // One sequence of 512 tokens; 2 key heads, each shared by 2 value heads; K = 64, V = 48.
    let problem = Problem::new(Rule::Eda, [1, 512, 2, 4, 64, 48]);
    // Made-up inputs. A program has its own: q, k, e [B, T, H, K] of unit length, v [B, T, HV, V], the log decay
    // g [B, T, HV, K] and the gates beta and gamma [B, T, HV], one `&[f32]` for each.
    let inputs: Tensors<Vec<f32>> = generate::tensors(&problem, &Recipe::default());
    let inputs = inputs.slices();
    let exact = reference::recurrence::<f64>(&problem, &inputs)?;

    // The first 500 tokens as they would come as a prompt, all at once.
    let (prompt, prompt_inputs) = parts::select(&problem, &inputs, from_ref(&(0..500)));
    let slices = prompt_inputs.slices();
    let options = PrefillOptions::default();
    let run = engine
        .prefill(&prompt, &slices, &options, &|_, _| {})
        .await?;
    let error = relative_error(&run.outputs.o, &exact.o[..prompt.output_len()]);
    println!(
        "prefill of 500 tokens: {:.2} ms, error {error:.1e}",
        run.compute_ms
    );

    // The others one by one. The state lies in slot 0 of a pool on the device and is updated in place.
    let mut pool = engine.pool(&problem, 1).await?;
    pool.write(0, &run.outputs.final_state).await?;
    let mut o = Vec::new();
    for t in 500..512 {
        let (token, token_inputs) = parts::select(&problem, &inputs, from_ref(&(t..t + 1)));
        let slices = token_inputs.slices();
        let rows = [Row::continues(0)];
        let options = DecodeOptions::default();
        let (row, _) = engine
            .decode(&token, &slices, &mut pool, &rows, &options)
            .await?;
        o.extend(row);
    }
    let error = relative_error(&o, &exact.o[prompt.output_len()..]);
    println!("decode of 12 tokens: error {error:.1e}");
    let state = pool.read(0).await?;
    println!(
        "final state {:?}: error {:.1e}",
        problem.shape(Operand::InitialState),
        relative_error(&state, &exact.final_state)
    );
    Ok(())
}

/// The backend named on the command line.
fn backend() -> Backend {
    match std::env::args().nth(1).as_deref() {
        None | Some("auto") => Backend::Auto,
        Some("cpu") => Backend::Cpu,
        Some("vulkan") => Backend::Vulkan,
        Some("metal") => Backend::Metal,
        Some("dx12") => Backend::Dx12,
        Some("gl") => Backend::Gl,
        Some(other) => {
            eprintln!("no backend `{other}`: auto, cpu, vulkan, metal, dx12 or gl");
            std::process::exit(2);
        }
    }
}
