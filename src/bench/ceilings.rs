//! What an adapter does at most, measured in the run that is to be judged: a copy and a float32 matrix product.
//!
//! Rates of cards differ by a factor of a thousand; the share of these two compares what kernels make of a card.

use super::Effort;
use super::measure::{Work, sample};
use super::report::{Ceilings, Copy, Product, Samples};
use super::run::{CpuClock, Plan};
use crate::cpu;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::gpu::engine::GpuEngine;
use crate::gpu::kernels::guarded;
use std::time::Duration;

/// The sources, for tests in other compilers.
pub const SOURCES: [(&str, &str); 2] = [
    (
        "ceiling_copy",
        include_str!("../../shaders/ceiling_copy.wgsl"),
    ),
    (
        "ceiling_product",
        include_str!("../../shaders/ceiling_product.wgsl"),
    ),
];

/// Edge of the tile that a workgroup of the product makes.
const TILE: usize = 128;
/// Bytes that a workgroup of the copy moves.
const COPY_GROUP: u64 = 16 << 10;
/// The product grows until it takes this long, milliseconds…
const LONG_ENOUGH_MS: f64 = 4.0;
/// …or has this size.
const LARGEST_PRODUCT: usize = 4096;
/// Sizes of the product on the CPU, the fastest of which counts: caches and numbers of threads differ.
const CPU_PRODUCTS: [usize; 3] = [384, 768, 1536];
/// Time spent on samples of a ceiling, at most.
const BUDGET: Duration = Duration::from_millis(300);

/// Measures both.
///
/// # Errors
/// [`Error::OutOfMemory`], [`Error::DeviceLost`], [`Error::Device`].
pub async fn measure(engine: &Engine, plan: &Plan) -> Result<Ceilings> {
    match engine {
        Engine::Gpu(engine) => Ok(Ceilings {
            copy: copy(engine, plan).await?,
            product: product(engine, plan).await?,
        }),
        Engine::Cpu(_) => Ok(cpu_ceilings(plan)),
    }
}

/// A kernel with whole buffers bound.
struct Kernel {
    pipeline: wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
    groups: (u32, u32),
}

impl Kernel {
    fn new(
        engine: &GpuEngine,
        (name, source): (&str, &str),
        buffers: &[&wgpu::Buffer],
        groups: (u32, u32),
    ) -> Result<Self> {
        let device = engine.kernels().device();
        guarded(device, name, 0, || {
            let source = wgpu::ShaderModuleDescriptor {
                label: Some(name),
                source: wgpu::ShaderSource::Wgsl(source.into()),
            };
            // SAFETY: as for the other kernels, which these are compared with: loops count to a bound, and every
            // index is below the lengths of the buffers, which `copy` and `product` make to measure.
            let module = unsafe {
                device.create_shader_module_trusted(source, wgpu::ShaderRuntimeChecks::unchecked())
            };
            let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(name),
                layout: None,
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: None,
            });
            let entries: Vec<_> = (0u32..)
                .zip(buffers)
                .map(|(binding, buffer)| wgpu::BindGroupEntry {
                    binding,
                    resource: buffer.as_entire_binding(),
                })
                .collect();
            let bind_group = device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(name),
                layout: &pipeline.get_bind_group_layout(0),
                entries: &entries,
            });
            Self {
                pipeline,
                bind_group,
                groups,
            }
        })
    }

    fn work(&self) -> Work<'_> {
        Work {
            parts: 1,
            record: Box::new(|pass, _| {
                pass.set_pipeline(&self.pipeline);
                pass.set_bind_group(0, &self.bind_group, &[]);
                pass.dispatch_workgroups(self.groups.0, self.groups.1, 1);
            }),
        }
    }
}

/// Bytes that the copy has on this kind of adapter: more than its caches hold.
fn copy_bytes(engine: &GpuEngine) -> u64 {
    let wanted: u64 = match engine.description().kind.as_str() {
        "discrete" => 512 << 20,
        "software" => 64 << 20,
        _ => 256 << 20,
    };
    let limits = engine.kernels().device().limits();
    let most = limits
        .max_storage_buffer_binding_size
        .min(limits.max_buffer_size)
        .max(COPY_GROUP);
    // A power of two, so that workgroups fold into two dimensions without a rest.
    wanted.min(1 << most.ilog2())
}

async fn copy(engine: &GpuEngine, plan: &Plan) -> Result<Copy> {
    let mut bytes = copy_bytes(engine);
    let kernels = engine.kernels();
    let usage = wgpu::BufferUsages::STORAGE;
    let buffers = loop {
        let pair = kernels
            .buffer("the source of the copy", bytes, usage, None)
            .and_then(|a| Ok((a, kernels.buffer("the copy", bytes, usage, None)?)));
        match pair {
            // A small card has to do with less.
            Err(Error::OutOfMemory { .. }) if bytes > 1 << 20 => bytes /= 2,
            pair => break pair?,
        }
    };
    let groups = bytes / COPY_GROUP;
    let across = groups.min(1 << 15);
    // At most 2^15 each: no buffer is larger than 2^44 bytes.
    let groups = (across as u32, (groups / across) as u32);
    let kernel = Kernel::new(engine, SOURCES[0], &[&buffers.0, &buffers.1], groups)?;
    let times = sample(engine, plan.effort, Some(BUDGET), &kernel.work()).await?;
    buffers.0.destroy();
    buffers.1.destroy();
    Ok(Copy::new(bytes, times))
}

/// The product's buffers and kernel for one size.
struct Products {
    kernel: Kernel,
    buffers: [wgpu::Buffer; 4],
}

impl Drop for Products {
    fn drop(&mut self) {
        self.buffers.iter().for_each(wgpu::Buffer::destroy);
    }
}

impl Products {
    fn new(engine: &GpuEngine, size: usize, contents: Option<[&[f32]; 2]>) -> Result<Self> {
        let kernels = engine.kernels();
        let bytes = (size * size * 4) as u64;
        let storage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
        let matrix = |what: &str, i: usize| {
            let values = contents.map(|c| bytemuck::cast_slice(c[i]));
            kernels.buffer(what, bytes, storage, values)
        };
        let params = kernels.buffer(
            "the size",
            16,
            wgpu::BufferUsages::UNIFORM,
            Some(bytemuck::cast_slice(&[size as u32, 0, 0, 0])),
        )?;
        let c = kernels.buffer("a product", bytes, storage, None)?;
        let buffers = [params, matrix("a factor", 0)?, matrix("a factor", 1)?, c];
        let tiles = (size / TILE) as u32;
        let [params, a, b, c] = &buffers;
        let kernel = Kernel::new(engine, SOURCES[1], &[params, a, b, c], (tiles, tiles))?;
        Ok(Self { kernel, buffers })
    }
}

async fn product(engine: &GpuEngine, plan: &Plan) -> Result<Product> {
    let once = Effort {
        warm_up: Duration::ZERO,
        samples: 3,
    };
    let limits = engine.kernels().device().limits();
    let most = limits
        .max_storage_buffer_binding_size
        .min(limits.max_buffer_size);
    let mut size = TILE;
    loop {
        let products = Products::new(engine, size, None)?;
        let time = sample(engine, once, Some(BUDGET), &products.kernel.work()).await?;
        let next = size * 2;
        let last = next > LARGEST_PRODUCT || (next * next * 4) as u64 > most;
        if last || time.median_ms() >= LONG_ENOUGH_MS {
            let work = products.kernel.work();
            let times = sample(engine, plan.effort, Some(BUDGET), &work).await?;
            return Ok(Product::new(size, times));
        }
        size = next;
    }
}

/// Copies and products by all threads of the processor.
fn cpu_ceilings(plan: &Plan) -> Ceilings {
    let words = 16 << 20;
    let from = vec![1.0f32; words];
    let mut to = vec![0.0f32; words];
    let clock = CpuClock::new(plan, BUDGET);
    let copy: Samples = clock.sample(|| cpu::copy(&mut to, &from));
    let fastest = CPU_PRODUCTS
        .into_iter()
        .map(|size| {
            let (a, b) = (vec![0.5f32; size * size], vec![0.25f32; size * size]);
            let mut c = vec![0.0f32; size * size];
            let times = clock.sample(|| cpu::square_product(&mut c, &a, &b, size));
            Product::new(size, times)
        })
        .max_by(|a, b| a.gflop_per_s.total_cmp(&b.gflop_per_s));
    let product = fastest.unwrap_or_else(|| Product::new(0, clock.sample(|| {})));
    Ceilings {
        copy: Copy::new(words as u64 * 4, copy),
        product,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Backend, EngineOptions};
    use crate::generate::Rng;
    use naga::valid::{Capabilities, ValidationFlags, Validator};

    /// They run on every WebGPU device: 16 KiB of workgroup memory, 256 invocations, 8 storage buffers.
    #[test]
    fn the_kernels_fit_the_webgpu_default_limits() {
        for (name, source) in SOURCES {
            let module = naga::front::wgsl::parse_str(source)
                .unwrap_or_else(|e| panic!("{}", e.emit_to_string(source)));
            Validator::new(ValidationFlags::all(), Capabilities::empty())
                .validate(&module)
                .unwrap_or_else(|e| panic!("{name}: {e:?}"));
            let mut layouter = naga::proc::Layouter::default();
            layouter.update(module.to_ctx()).expect("a layout");
            let sizes = |space| {
                let of = move |v: &&naga::GlobalVariable| v.space == space;
                let variables = module.global_variables.iter().map(|(_, v)| v);
                variables.filter(of).map(|v| layouter[v.ty].size)
            };
            let workgroup: u32 = sizes(naga::AddressSpace::WorkGroup).sum();
            assert!(workgroup <= 16 << 10, "{name}: {workgroup}");
            let size: u32 = module.entry_points[0].workgroup_size.iter().product();
            assert!(size <= 256, "{name}: {size}");
        }
    }

    fn gpu() -> Box<GpuEngine> {
        let options = EngineOptions {
            backend: if cfg!(target_os = "macos") {
                Backend::Metal
            } else if cfg!(windows) {
                Backend::Dx12
            } else {
                Backend::Vulkan
            },
            adapter: std::env::var("EDA_TEST_ADAPTER").ok(),
            skip_self_test: true,
            ..EngineOptions::default()
        };
        match pollster::block_on(Engine::open(&options)) {
            Ok(Engine::Gpu(engine)) => engine,
            other => panic!("this test needs a GPU driver: {:?}", other.err()),
        }
    }

    /// What is timed is a product: small whole numbers, so that every sum is exact.
    #[test]
    fn the_product_is_right() {
        let engine = gpu();
        let size = 256;
        let mut rng = Rng::new(3);
        let mut matrix = || -> Vec<f32> {
            (0..size * size)
                .map(|_| rng.below(9) as f32 - 4.0)
                .collect()
        };
        let (a, b) = (matrix(), matrix());
        let products = Products::new(&engine, size, Some([&a, &b])).expect("a kernel");
        let device = engine.kernels().device();
        let bytes = (size * size * 4) as u64;
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let readback = engine
            .kernels()
            .buffer("c", bytes, usage, None)
            .expect("fits");
        let mut encoder = device.create_command_encoder(&Default::default());
        (products.kernel.work().record)(&mut encoder.begin_compute_pass(&Default::default()), 0..1);
        encoder.copy_buffer_to_buffer(&products.buffers[3], 0, &readback, 0, bytes);
        engine.queue().submit([encoder.finish()]);
        readback.map_async(wgpu::MapMode::Read, 0..bytes, |r| r.expect("mapped"));
        device
            .poll(wgpu::PollType::wait_indefinitely())
            .expect("done");
        let c: Vec<f32> =
            bytemuck::pod_collect_to_vec(&readback.get_mapped_range(0..bytes).expect("mapped")[..]);
        for i in 0..size {
            for j in 0..size {
                let right: f32 = (0..size).map(|k| a[k * size + i] * b[k * size + j]).sum();
                assert_eq!(c[i * size + j], right, "{i}, {j}");
            }
        }
    }

    #[test]
    fn the_product_on_the_processor_is_right() {
        let size = 37;
        let a: Vec<f32> = (0..size * size).map(|i| (i % 7) as f32 - 3.0).collect();
        let b: Vec<f32> = (0..size * size).map(|i| (i % 5) as f32 - 2.0).collect();
        let mut c = vec![9.0; size * size];
        cpu::square_product(&mut c, &a, &b, size);
        for i in 0..size {
            for j in 0..size {
                let right: f32 = (0..size).map(|k| a[i * size + k] * b[k * size + j]).sum();
                assert_eq!(c[i * size + j], right, "{i}, {j}");
            }
        }
    }
}
