//! `eda check`.

use crate::{BackendName, Failure, print, print_json};
use eda_wgpu::{Engine, EngineOptions};

/// Flags of `eda check`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Check this backend alone.
    #[arg(long, value_enum, default_value = "auto")]
    backend: BackendName,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// Compares with float64; for now it only says what it would check.
pub(crate) fn check(args: &Args) -> Result<(), Failure> {
    let options = EngineOptions {
        backend: args.backend.into(),
        ..EngineOptions::default()
    };
    let description = pollster::block_on(Engine::open(&options))?.description();
    if args.json {
        return print_json(&description);
    }
    print(&format!(
        "{} ({})\n",
        description.adapter, description.backend
    ))
}
