//! Compiles the kernels for the emulator: each `.cu` file as C++ against `gpu/emulator/simt.h`. It
//! writes a table of the kernels that they export.

use super::exports;
use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;

/// The C++ compiler of this machine, which reads kernels for the emulator.
pub(crate) fn compiler() -> cc::Build {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").include("src").opt_level(2).flags([
        "-x",
        "c++",
        "-Wno-unused-function",
        "-Wno-unknown-pragmas",
        "-ffp-contract=off",
    ]);
    build
}

pub(crate) fn build(sources: &[PathBuf]) -> Result<(), Box<dyn Error + Send + Sync>> {
    compiler()
        .file("src/gpu/emulator/simt.cpp")
        .files(sources)
        .try_compile("cresset_emulated_kernels")?;
    let mut names = Vec::new();
    for source in sources {
        names.extend(exports(source)?);
    }
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    Ok(std::fs::write(out.join("emulated.rs"), table(&names)?)?)
}

/// Rust code of a table with each kernel's name and functions.
fn table(names: &[String]) -> Result<String, std::fmt::Error> {
    let mut text = String::from("unsafe extern \"C\" {\n");
    for name in names {
        writeln!(
            text,
            "    fn simt_run_{name}(grid: *const Grid, args: *const *const c_void) -> *const c_char;"
        )?;
        writeln!(text, "    fn simt_signature_{name}() -> *const c_char;")?;
    }
    writeln!(text, "}}\nstatic KERNELS: &[(&str, RunKernel, Signature)] = &[")?;
    for name in names {
        writeln!(text, "    (\"{name}\", simt_run_{name}, simt_signature_{name}),")?;
    }
    writeln!(text, "];")?;
    Ok(text)
}
