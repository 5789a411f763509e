//! Devices for the tests that own one: the adapter under test, opened with the limits a test asks for.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use eda_wgpu::{Backend, EngineOptions, adapter};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Waits for a future.
pub fn wait<T>(future: impl Future<Output = T>) -> T {
    pollster::block_on(future)
}

/// Options that open the adapter under test; `EDA_TEST_ADAPTER` (part of a name, or an index) picks one of
/// several.
pub fn options() -> EngineOptions {
    EngineOptions {
        backend: if cfg!(target_os = "macos") {
            Backend::Metal
        } else if cfg!(windows) {
            Backend::Dx12
        } else {
            Backend::Vulkan
        },
        adapter: std::env::var("EDA_TEST_ADAPTER").ok(),
        ..EngineOptions::default()
    }
}

/// The adapter under test. A machine without one fails the test: skipped GPU tests would look like passed ones.
pub fn adapter() -> wgpu::Adapter {
    match wait(adapter::choose(&options())) {
        Ok(Some(adapter)) => adapter,
        other => panic!(
            "this test needs a GPU driver, and looking for one gave: {:?}\n\
             A software driver is enough: `apt-get install mesa-vulkan-drivers libvulkan1` or its like.",
            other.err()
        ),
    }
}

/// A program that owns a device, with an error handler of its own.
pub struct Host {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    uncaptured: Arc<AtomicUsize>,
}

impl Host {
    /// A device with exactly these limits, and float16 where the adapter has it.
    pub fn new(limits: wgpu::Limits) -> Self {
        Self::on(&adapter(), limits)
    }

    /// The same on an adapter that is already there.
    pub fn on(adapter: &wgpu::Adapter, limits: wgpu::Limits) -> Self {
        let features = adapter.features() & wgpu::Features::SHADER_F16;
        Self::with(adapter, limits, features)
    }

    /// A device whose matrix units can be used.
    pub fn with_matrix_units(adapter: &wgpu::Adapter, limits: wgpu::Limits) -> Self {
        Self::with(adapter, limits, eda_wgpu::gpu::matrix::FEATURES)
    }

    fn with(adapter: &wgpu::Adapter, limits: wgpu::Limits, features: wgpu::Features) -> Self {
        let experimental = features.contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX);
        let (device, queue) = wait(adapter.request_device(&wgpu::DeviceDescriptor {
            label: Some("host"),
            required_features: features,
            required_limits: limits,
            experimental_features: if experimental {
                // SAFETY: what is experimental are cooperative matrices, in the shaders under test alone.
                unsafe { wgpu::ExperimentalFeatures::enabled() }
            } else {
                wgpu::ExperimentalFeatures::disabled()
            },
            ..Default::default()
        }))
        .expect("a device with these limits");
        let uncaptured = Arc::new(AtomicUsize::new(0));
        let count = uncaptured.clone();
        device.on_uncaptured_error(Arc::new(move |error| {
            eprintln!("uncaptured: {error}");
            count.fetch_add(1, Ordering::SeqCst);
        }));
        Self {
            device,
            queue,
            uncaptured,
        }
    }

    /// Errors that reached the host's own handler.
    pub fn uncaptured(&self) -> usize {
        self.uncaptured.load(Ordering::SeqCst)
    }

    /// A buffer with these bytes.
    pub fn buffer(&self, bytes: &[u8], usage: wgpu::BufferUsages) -> wgpu::Buffer {
        let size = (bytes.len() as u64).next_multiple_of(4).max(4);
        let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("host"),
            size,
            usage,
            mapped_at_creation: true,
        });
        buffer
            .slice(..)
            .get_mapped_range_mut()
            .expect("mapped at creation")
            .slice(..bytes.len())
            .copy_from_slice(bytes);
        buffer.unmap();
        buffer
    }

    /// Submits one encoder.
    pub fn submit(&self, encoder: wgpu::CommandEncoder) {
        self.queue.submit([encoder.finish()]);
    }

    /// A new encoder.
    pub fn encoder(&self) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&Default::default())
    }

    /// The bytes of a buffer with `COPY_SRC` usage, once all that was submitted is done.
    pub fn read(&self, buffer: &wgpu::Buffer) -> Vec<u8> {
        let readback = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("host"),
            size: buffer.size(),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = self.encoder();
        encoder.copy_buffer_to_buffer(buffer, 0, &readback, 0, buffer.size());
        self.submit(encoder);
        readback.map_async(wgpu::MapMode::Read, .., |r| r.expect("a mapping"));
        self.device
            .poll(wgpu::PollType::wait_indefinitely())
            .expect("the device answers");
        readback.get_mapped_range(..).expect("mapped").to_vec()
    }
}
