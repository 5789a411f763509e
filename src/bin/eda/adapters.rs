//! `eda adapters`.

use crate::{Failure, print, print_json};
use eda_wgpu::adapter::{self, AdapterReport};
use eda_wgpu::cpu::CpuEngine;
use eda_wgpu::engine::Description;

/// Flags of `eda adapters`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print one JSON object, {"adapters": […], "cpu": {…}}, instead of a table.
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(serde::Serialize)]
struct Listing {
    adapters: Vec<AdapterReport>,
    cpu: Description,
}

/// Lists what is there, and the CPU engine, which always is.
pub(crate) fn adapters(args: &Args) -> Result<(), Failure> {
    let listing = Listing {
        adapters: pollster::block_on(adapter::list()),
        cpu: CpuEngine::new().description(),
    };
    if args.json {
        return print_json(&listing);
    }
    let mut text = String::new();
    for a in &listing.adapters {
        let d = &a.description;
        let kib = |bytes: u64| format!("{} KiB", bytes >> 10);
        let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
        let names = |list: Vec<String>| match list.len() {
            0 => "none (below the limits that the kernels need)".to_owned(),
            _ => list.join(", "),
        };
        text += &format!(
            "{}  {} ({}, {})\n   driver    {}\n   tiers     {}\n   elements  {}\n   limits    workgroup memory {}, \
             {} invocations, {} storage buffers, binding {}, buffer {}, offsets of {} bytes, subgroups of {}\n   times     {}\n",
            a.index,
            d.adapter,
            d.backend,
            d.kind,
            d.driver,
            names(a.tiers.iter().map(|t| t.name().to_owned()).collect()),
            names(a.elements.iter().map(|e| e.name().to_owned()).collect()),
            kib(u64::from(a.workgroup_memory)),
            a.workgroup_invocations,
            a.storage_buffers,
            mib(a.storage_binding),
            mib(a.buffer),
            a.binding_alignment,
            match a.subgroup_size {
                [low, high] if low == high => low.to_string(),
                [low, high] => format!("{low} to {high}"),
            },
            if a.timestamps {
                "the device's own clock"
            } else {
                "wall clock only"
            },
        );
    }
    if listing.adapters.is_empty() {
        text += "no adapter\n";
    }
    let cpu = &listing.cpu;
    text += &format!(
        "-  {} (cpu)\n   {}; runs where no GPU is found\n",
        cpu.adapter, cpu.driver
    );
    print(&text)
}
