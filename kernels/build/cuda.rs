//! Compiles the kernels for devices: nvcc makes one fat binary of each `.cu` file. It also provides
//! stand-ins for CUDA's libraries, so that the linker does not need them.

use super::exports;
use super::nvcc::{ARCHITECTURES, DEFAULT, arguments, spilling};
use std::error::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::{env, fs, thread};

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// The libraries that candle's bindings and kernels must link. `gpu/cuda/bind.rs` defines the
/// functions of them that are used; those of CUDA's runtime are used by what
/// `gpu/cuda/not_linked.rs` keeps out.
const LIBRARIES: [&str; 6] = ["cuda", "cudart", "cublas", "cublasLt", "curand", "nvrtc"];

pub(crate) fn build(sources: &[PathBuf]) -> Result<()> {
    for name in [ARCHITECTURES, "NVCC", "CUDA_HOME", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    if env::var("CARGO_CFG_TARGET_OS")? != "linux" || env::var("CARGO_CFG_TARGET_ARCH")? != "x86_64"
    {
        return Err("the feature `cuda` is for Linux on x86-64".into());
    }
    let out = PathBuf::from(env::var("OUT_DIR")?);
    for library in LIBRARIES {
        fs::write(out.join(format!("lib{library}.a")), "!<arch>\n")?;
    }
    println!("cargo::rustc-link-search=native={}", out.display());
    let compiler = Compiler::find()?;
    compile_all(&compiler, sources, &out)?;
    let mut text = table(sources, &out)?;
    let warp_groups = compiler.arguments.iter().any(|argument| argument.ends_with("=sm_90a"));
    writeln!(text, "pub(in crate::gpu) const WARP_GROUPS: bool = {warp_groups};")?;
    Ok(fs::write(out.join("fatbins.rs"), text)?)
}

struct Compiler {
    nvcc: PathBuf,
    version: String,
    arguments: Vec<String>,
    /// The text of all headers, any of which a kernel may include.
    headers: String,
}

impl Compiler {
    fn find() -> Result<Self> {
        let in_home = || env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
        let nvcc = env::var_os("NVCC")
            .map(PathBuf::from)
            .or_else(in_home)
            .unwrap_or_else(|| "nvcc".into());
        let version = Command::new(&nvcc).arg("--version").output().map_err(|error| {
            let missing =
                format!("{} cannot be run ({error}), and the feature `cuda` needs CUDA's compiler", nvcc.display());
            format!("{missing}: set CUDA_HOME to a toolkit, or install one with `eval \"$(kernels/setup-cuda)\"`")
        })?;
        let architectures = env::var(ARCHITECTURES).unwrap_or_else(|_| DEFAULT.into());
        Ok(Self {
            nvcc,
            version: String::from_utf8_lossy(&version.stdout).into_owned(),
            arguments: arguments(&architectures)?,
            headers: headers(Path::new("src"))?,
        })
    }

    /// Compiles one file, unless its output was made from the same source, headers, compiler and
    /// arguments.
    fn compile(&self, source: &Path, out: &Path) -> Result<()> {
        let (output, record) = (fatbin(out, source), fatbin(out, source).with_extension("made-of"));
        let made_of = [
            fs::read_to_string(source)?,
            self.headers.clone(),
            self.version.clone(),
            self.arguments.join(" "),
        ];
        let made_of = made_of.join("\n");
        if output.exists() && fs::read_to_string(&record).is_ok_and(|before| before == made_of) {
            return Ok(());
        }
        // The variable has flags for candle's kernels.
        let ran = Command::new(&self.nvcc)
            .env_remove("NVCC_APPEND_FLAGS")
            .args(&self.arguments)
            .arg(source)
            .arg("-o")
            .arg(&output)
            .output()?;
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        if !ran.status.success() {
            return Err(format!(
                "nvcc refuses {}:\n{}{said}",
                source.display(),
                String::from_utf8_lossy(&ran.stdout)
            )
            .into());
        }
        if let Some(kernel) = spilling(&said) {
            return Err(format!(
                "{}: {kernel} needs more registers than there are",
                source.display()
            )
            .into());
        }
        if said.contains("instructions are serialized") {
            return Err(
                format!("{}: products of warp groups wait:\n{said}", source.display()).into()
            );
        }
        Ok(fs::write(record, made_of)?)
    }
}

/// The text of all headers below a folder.
fn headers(folder: &Path) -> Result<String> {
    let mut text = String::new();
    for path in super::files(folder, "cuh")? {
        text.push_str(&fs::read_to_string(path)?);
    }
    Ok(text)
}

/// Compiles all files, as many at a time as cargo allows.
fn compile_all(compiler: &Compiler, sources: &[PathBuf], out: &Path) -> Result<()> {
    let jobs: usize = env::var("NUM_JOBS")?.parse()?;
    let queue = Mutex::new(sources.iter());
    let next = || queue.lock().ok()?.next();
    let worker = || -> Result<()> {
        while let Some(source) = next() {
            compiler.compile(source, out)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(worker)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().map_err(|_| "a compiling thread panicked")?)
    })
}

/// The path of a source's fat binary.
fn fatbin(out: &Path, source: &Path) -> PathBuf {
    let name: Vec<_> = source
        .with_extension("fatbin")
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    out.join(name.join("-"))
}

/// Rust code of a table with each fat binary and the names of its kernels.
fn table(sources: &[PathBuf], out: &Path) -> Result<String> {
    let mut text = String::from("static FATBINS: &[Fatbin] = &[\n");
    for source in sources {
        let kernels = exports(source)?;
        let image = fatbin(out, source);
        writeln!(
            text,
            "    Fatbin {{ image: include_bytes!(\"{}\"), kernels: &{kernels:?} }},",
            image.display()
        )?;
    }
    text.push_str("];\n");
    Ok(text)
}
