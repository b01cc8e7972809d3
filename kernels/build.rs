//! Builds the device code: for the emulator with the C++ compiler of this machine.

#[path = "build/emulator.rs"]
mod emulator;

use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=src");
    let sources = sources(Path::new("src"))?;
    if std::env::var_os("CARGO_FEATURE_EMULATOR").is_some() {
        emulator::build(&sources)?;
    }
    Ok(())
}

/// Every `.cu` file below `folder`, sorted.
fn sources(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "cu") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
