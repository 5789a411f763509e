//! Writes the assembled shaders to a folder (`target/shaders` where none is named), for compilers other than wgpu's own: each text once as a
//! `.wgsl` file, and `manifest.json`, a list of what is to be compiled:
//!
//! ```json
//! [{"file": "decode-f32-gates.wgsl", "entryPoint": "main", "constants": {"K": 128, "V": 128}, "storageBuffers": 8}]
//! ```
//!
//! Run with `cargo run --release --example shaders [FOLDER]`.

#[path = "../tests/common/shaders.rs"]
mod shaders;

use std::io::Result;
use std::path::{Path, PathBuf};

fn main() -> Result<()> {
    let folder = match std::env::args_os().nth(1) {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("target/shaders"),
    };
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    let entries = shaders::covering();
    let mut manifest = Vec::new();
    for entry in &entries {
        let file = format!("{}.wgsl", entry.text_name());
        std::fs::write(folder.join(&file), entry.source())?;
        let constants: serde_json::Map<_, _> = entry
            .constants
            .iter()
            .map(|&(name, value)| (name.to_owned(), value.into()))
            .collect();
        manifest.push(serde_json::json!({
            "file": file,
            "entryPoint": "main",
            "constants": constants,
            "storageBuffers": entry.storage_buffers(),
        }));
    }
    for (name, source) in eda_wgpu::bench::ceilings::SOURCES {
        let file = format!("{name}.wgsl");
        std::fs::write(folder.join(&file), source)?;
        manifest.push(serde_json::json!({
            "file": file,
            "entryPoint": "main",
            "constants": {},
            "storageBuffers": source.matches("var<storage").count(),
        }));
    }
    let text = serde_json::to_string_pretty(&manifest)?;
    std::fs::write(folder.join("manifest.json"), text)?;
    println!("{} entries in {}", manifest.len(), folder.display());
    Ok(())
}
