//! The kernels as a guest: a program that owns a wgpu device and its buffers (an engine, a tensor framework)
//! has a prefill and a decode step recorded into its own command encoder.
//!
//! ```text
//! cargo run --release --example callers_device
//! ```
//!
//! Everything lies in slices of one buffer, as a framework's memory pool would hand them out: inputs, outputs and
//! states. The kernels submit nothing, wait for nothing and replace no callback.

use eda_wgpu::generate::{self, Recipe};
use eda_wgpu::gpu::kernels::{Kernels, PrefillSettings, Slice};
use eda_wgpu::{Element, Problem, Row, Rule, Tensors, parts, reference, relative_error};
use std::error::Error;
use std::slice::from_ref;

const PROMPT: usize = 300;

fn main() -> Result<(), Box<dyn Error>> {
    pollster::block_on(run())
}

async fn run() -> Result<(), Box<dyn Error>> {
    // The program's own device; WebGPU's default limits are enough.
    let instance = wgpu::Instance::default();
    let adapter = instance.request_adapter(&Default::default()).await?;
    let (device, queue) = adapter.request_device(&Default::default()).await?;
    println!("{}", adapter.get_info().name);

    // A prompt and one more token, with made-up inputs.
    let problem = Problem::new(Rule::Eda, [1, PROMPT + 1, 2, 4, 64, 48]);
    let inputs = generate::tensors(&problem, &Recipe::default());
    let inputs = inputs.slices();
    let exact = reference::recurrence::<f64>(&problem, &inputs)?;
    let (prompt, prompt_inputs) = parts::select(&problem, &inputs, from_ref(&(0..PROMPT)));
    let (token, token_inputs) = parts::select(&problem, &inputs, from_ref(&(PROMPT..PROMPT + 1)));

    // The program's own buffer: a place for each tensor.
    let mut memory = Memory::default();
    let prompt_places = prompt_inputs.map(|_, x| memory.place(x));
    let token_places = token_inputs.map(|_, x| memory.place(x));
    let prompt_o = memory.reserve(prompt.output_len());
    let token_o = memory.reserve(token.output_len());
    let state = memory.reserve(prompt.states_len());
    let buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("memory"),
        size: memory.bytes.len() as u64,
        usage: wgpu::BufferUsages::STORAGE
            | wgpu::BufferUsages::COPY_DST
            | wgpu::BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    });
    queue.write_buffer(&buffer, 0, &memory.bytes);
    let slice = |place: &Place| Slice {
        buffer: &buffer,
        offset: place.offset,
        size: place.size,
    };
    let slices = |places: &Tensors<Place>| places.map(|_, place| slice(place));

    // Pipelines are built when they are first needed and kept; a program has one of these.
    let kernels = Kernels::new(&device);
    // The plan says how much scratch memory a prefill takes, if the program wants to provide it; `None` below
    // leaves it to the kernels.
    let plan = kernels.plan_prefill(&prompt, &PrefillSettings::default())?;
    println!(
        "prefill: {} tokens a chunk, {} steps, {} bytes of scratch memory",
        plan.chunk(),
        plan.steps(),
        plan.scratch_bytes()
    );
    let prefill = kernels.prefill(
        &plan,
        &slices(&prompt_places),
        slice(&prompt_o),
        slice(&state),
        None,
    )?;
    // Decode takes a pool of states; this one has a single slot, the state that prefill leaves.
    let decode = kernels.decode(
        &token,
        Element::F32,
        &slices(&token_places),
        slice(&token_o),
        slice(&state),
        &[Row::continues(0)],
    )?;

    // One encoder, one submission: the program's.
    let mut encoder = device.create_command_encoder(&Default::default());
    prefill.record(&mut encoder);
    decode.record(&mut encoder);
    let readback = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("read-back"),
        size: buffer.size(),
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    encoder.copy_buffer_to_buffer(&buffer, 0, &readback, 0, buffer.size());
    queue.submit([encoder.finish()]);

    readback.map_async(wgpu::MapMode::Read, .., |result| {
        if let Err(error) = result {
            eprintln!("read-back: {error}");
        }
    });
    device.poll(wgpu::PollType::wait_indefinitely())?;
    let bytes = readback.get_mapped_range(..)?;
    let values = |place: &Place| -> Vec<f32> {
        let start = place.offset as usize;
        bytemuck::pod_collect_to_vec(&bytes[start..start + place.size as usize])
    };
    let (before, after) = exact.o.split_at(prompt.output_len());
    for (what, place, right) in [
        ("prefill", &prompt_o, before),
        ("decode", &token_o, after),
        ("state", &state, &exact.final_state),
    ] {
        println!(
            "{what}: error {:.1e}",
            relative_error(&values(place), right)
        );
    }
    Ok(())
}

/// Bytes of a buffer.
#[derive(Debug, Clone, Copy)]
struct Place {
    offset: u64,
    size: u64,
}

/// What a memory pool does, as plainly as possible.
#[derive(Default)]
struct Memory {
    bytes: Vec<u8>,
}

impl Memory {
    /// A place for so many float32 values, at a multiple of 256 bytes. What is in it does not matter.
    fn reserve(&mut self, values: usize) -> Place {
        let offset = self.bytes.len();
        let size = values * 4;
        self.bytes
            .resize((offset + size).next_multiple_of(256), 0xAB);
        Place {
            offset: offset as u64,
            size: size as u64,
        }
    }

    /// A place with these values in it.
    fn place(&mut self, values: &[f32]) -> Place {
        let place = self.reserve(values.len());
        let start = place.offset as usize;
        self.bytes[start..start + values.len() * 4].copy_from_slice(bytemuck::cast_slice(values));
        place
    }
}
