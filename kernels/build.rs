//! Builds the device code: with nvcc for devices, and for the emulator with the C++ compiler of
//! this machine.

#![expect(
    clippy::disallowed_methods,
    reason = "cargo gives a build script its settings in the environment"
)]

#[path = "build/cuda.rs"]
mod cuda;
#[path = "build/emulator.rs"]
mod emulator;
#[path = "build/nvcc.rs"]
mod nvcc;

use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let sources = files(Path::new("src"), "cu")?;
    // The files are named one by one, because most changes in the folder are to Rust files. A new
    // file is noticed when one of these changes.
    for extension in ["cu", "cuh", "h", "cpp"] {
        for file in files(Path::new("src"), extension)? {
            println!("cargo::rerun-if-changed={}", file.display());
        }
    }
    if std::env::var_os("CARGO_FEATURE_EMULATOR").is_some() {
        emulator::build(&sources)?;
    }
    if std::env::var_os("CARGO_FEATURE_CUDA").is_some() {
        cuda::build(&sources)?;
    }
    Ok(())
}

/// Every file below `folder` with this extension, sorted.
fn files(folder: &Path, extension: &str) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path, extension)?);
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The names of a source's kernels: those of the functions that `KERNEL` of the emulator defines
/// for each, once the preprocessor has written out all macros.
fn exports(source: &Path) -> Result<Vec<String>, cc::Error> {
    let text = emulator::compiler().file(source).try_expand()?;
    let text = String::from_utf8_lossy(&text);
    let functions = text.split("simt_signature_").skip(1);
    Ok(functions.filter_map(|rest| Some(rest.split_once('(')?.0.to_owned())).collect())
}
