//! The adapters of this machine: what each is, what it offers, and which one is taken.

use crate::engine::{Backend, Description, Element, EngineOptions, Tier};
use crate::error::{Error, Result};
use crate::gpu::matrix::MatrixUnits;
use serde::Serialize;

/// One adapter as `eda adapters` lists it.
#[derive(Debug, Clone, Serialize)]
pub struct AdapterReport {
    /// Index in [`list`], accepted by [`EngineOptions::adapter`].
    pub index: usize,
    /// What it is.
    #[serde(flatten)]
    pub description: Description,
    /// Kernel families that run on it.
    pub tiers: Vec<Tier>,
    /// Storage types that it offers.
    pub elements: Vec<Element>,
    /// Timestamps are there, so that device times are the device's own.
    pub timestamps: bool,
    /// Workgroup memory, bytes.
    pub workgroup_memory: u32,
    /// Invocations a workgroup.
    pub workgroup_invocations: u32,
    /// Storage buffers a shader stage.
    pub storage_buffers: u32,
    /// Largest storage binding, bytes.
    pub storage_binding: u64,
    /// Largest buffer, bytes.
    pub buffer: u64,
    /// Alignment of binding offsets, bytes.
    pub binding_alignment: u32,
    /// Smallest and largest subgroup.
    pub subgroup_size: [u32; 2],
}

fn backends(backend: Backend) -> wgpu::Backends {
    match backend {
        Backend::Auto => wgpu::Backends::all(),
        Backend::Cpu => wgpu::Backends::empty(),
        Backend::Vulkan => wgpu::Backends::VULKAN,
        Backend::Metal => wgpu::Backends::METAL,
        Backend::Dx12 => wgpu::Backends::DX12,
        Backend::Gl => wgpu::Backends::GL,
        Backend::WebGpu => wgpu::Backends::BROWSER_WEBGPU,
    }
}

/// Name of a kind of adapter.
pub fn kind(device_type: wgpu::DeviceType) -> &'static str {
    match device_type {
        wgpu::DeviceType::DiscreteGpu => "discrete",
        wgpu::DeviceType::IntegratedGpu => "integrated",
        wgpu::DeviceType::VirtualGpu => "virtual",
        wgpu::DeviceType::Cpu => "software",
        wgpu::DeviceType::Other => "other",
    }
}

/// Lower is taken first.
fn preference(device_type: wgpu::DeviceType) -> usize {
    match device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    }
}

/// Name of a backend: that on the command line, where it has one.
fn backend_name(backend: wgpu::Backend) -> &'static str {
    match backend {
        wgpu::Backend::Noop => "noop",
        wgpu::Backend::Vulkan => Backend::Vulkan.name(),
        wgpu::Backend::Metal => Backend::Metal.name(),
        wgpu::Backend::Dx12 => Backend::Dx12.name(),
        wgpu::Backend::Gl => Backend::Gl.name(),
        wgpu::Backend::BrowserWebGpu => Backend::WebGpu.name(),
    }
}

/// What an adapter is, as the reports say it.
pub fn describe(info: &wgpu::AdapterInfo, tier: Tier) -> Description {
    let driver = [&info.driver, &info.driver_info]
        .into_iter()
        .filter(|s| !s.is_empty())
        .cloned()
        .collect::<Vec<_>>()
        .join(" ");
    Description {
        adapter: info.name.clone(),
        backend: backend_name(info.backend).to_owned(),
        tier: tier.name().to_owned(),
        kind: kind(info.device_type).to_owned(),
        driver,
    }
}

/// Whether the kernels can run there at all: compute shaders within the WebGPU default limits.
fn runs_kernels(adapter: &wgpu::Adapter) -> bool {
    let limits = adapter.limits();
    adapter
        .get_downlevel_capabilities()
        .flags
        .contains(wgpu::DownlevelFlags::COMPUTE_SHADERS)
        && limits.max_compute_workgroup_storage_size >= 16_384
        && limits.max_compute_invocations_per_workgroup >= 256
        && limits.max_storage_buffers_per_shader_stage >= 8
}

async fn enumerate(backends: wgpu::Backends) -> Vec<wgpu::Adapter> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends,
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    instance.enumerate_adapters(backends).await
}

fn report(index: usize, adapter: &wgpu::Adapter) -> AdapterReport {
    let info = adapter.get_info();
    let limits = adapter.limits();
    let features = adapter.features();
    let runs = runs_kernels(adapter);
    let mut elements = Vec::new();
    let mut tiers = Vec::new();
    if runs {
        tiers.push(Tier::Portable);
        if MatrixUnits::of(adapter).is_some() {
            tiers.push(Tier::Matrix);
        }
        elements.push(Element::F32);
        if features.contains(wgpu::Features::SHADER_F16) {
            elements.push(Element::F16);
        }
    }
    AdapterReport {
        index,
        description: describe(&info, Tier::Portable),
        tiers,
        elements,
        timestamps: features.contains(wgpu::Features::TIMESTAMP_QUERY),
        workgroup_memory: limits.max_compute_workgroup_storage_size,
        workgroup_invocations: limits.max_compute_invocations_per_workgroup,
        storage_buffers: limits.max_storage_buffers_per_shader_stage,
        storage_binding: limits.max_storage_buffer_binding_size,
        buffer: limits.max_buffer_size,
        binding_alignment: limits.min_storage_buffer_offset_alignment,
        subgroup_size: [info.subgroup_min_size, info.subgroup_max_size],
    }
}

/// Every adapter of this machine, on every backend.
pub async fn list() -> Vec<AdapterReport> {
    enumerate(wgpu::Backends::all())
        .await
        .iter()
        .enumerate()
        .map(|(i, a)| report(i, a))
        .collect()
}

/// The adapter that `options` ask for. `None` for [`Backend::Auto`] where there is no GPU and no name was
/// given: the CPU engine runs then.
///
/// # Errors
/// [`Error::NoAdapter`] listing what there is.
pub async fn choose(options: &EngineOptions) -> Result<Option<wgpu::Adapter>> {
    let wanted = backends(options.backend);
    // Indices count every adapter. Otherwise only what is asked for is woken: looking for OpenGL starts window
    // system libraries, which complain on machines without one.
    let index = options
        .adapter
        .as_ref()
        .and_then(|a| a.parse::<usize>().ok());
    let looked_at = match index {
        Some(_) => wgpu::Backends::all(),
        None if options.backend == Backend::Auto && options.adapter.is_none() => {
            wgpu::Backends::PRIMARY
        }
        None => wanted,
    };
    let all = enumerate(looked_at).await;
    let mut found: Vec<(usize, &wgpu::Adapter)> = all
        .iter()
        .enumerate()
        .filter(|(i, a)| {
            let info = a.get_info();
            let named = match (index, &options.adapter) {
                (Some(n), _) => n == *i,
                (None, Some(name)) => info.name.to_lowercase().contains(&name.to_lowercase()),
                (None, None) => true,
            };
            named && wanted.contains(wgpu::Backends::from(info.backend))
        })
        .collect();
    let automatic = options.backend == Backend::Auto && options.adapter.is_none();
    // A browser tells a software adapter from the others, and nothing else.
    let worst = if cfg!(target_arch = "wasm32") { 3 } else { 1 };
    found.retain(|(_, a)| {
        runs_kernels(a) && !(automatic && preference(a.get_info().device_type) > worst)
    });
    found.sort_by_key(|(i, a)| (preference(a.get_info().device_type), *i));
    if let Some((_, adapter)) = found.first() {
        return Ok(Some((*adapter).clone()));
    }
    if automatic {
        return Ok(None);
    }
    let there: Vec<String> = enumerate(wgpu::Backends::all())
        .await
        .iter()
        .enumerate()
        .map(|(i, a)| {
            let info = a.get_info();
            let note = if runs_kernels(a) {
                ""
            } else {
                ", below the limits"
            };
            format!("{i}: {} ({}{note})", info.name, info.backend)
        })
        .collect();
    Err(Error::NoAdapter(format!(
        "nothing matches backend {}{}; there is {}",
        options.backend.name(),
        options
            .adapter
            .as_ref()
            .map_or(String::new(), |a| format!(" and adapter `{a}`")),
        if there.is_empty() {
            "no adapter at all".to_owned()
        } else {
            there.join(", ")
        }
    )))
}
