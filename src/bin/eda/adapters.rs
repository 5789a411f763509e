//! `eda adapters`.

use crate::{Failure, print, print_json};
use eda_wgpu::{Backend, Engine, EngineOptions};

/// Flags of `eda adapters`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print a JSON array instead of a table.
    #[arg(long)]
    json: bool,
}

/// Lists what is there.
pub(crate) fn adapters(args: &Args) -> Result<(), Failure> {
    let options = EngineOptions {
        backend: Backend::Cpu,
        ..EngineOptions::default()
    };
    let found = [pollster::block_on(Engine::open(&options))?.description()];
    if args.json {
        return print_json(&found);
    }
    let mut text = String::new();
    for (index, d) in found.iter().enumerate() {
        text += &format!(
            "{index}  {} ({}, {}, tier {})\n",
            d.adapter, d.backend, d.kind, d.tier
        );
    }
    print(&text)
}
