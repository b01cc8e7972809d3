//! A model in Hugging Face layout on a GPU, for judging it against other implementations and by the clock:
//!
//! `on_device check FOLDER KIND PROMPTS.json` prints what it says to each prompt (`[[id, …], …]`) as JSON.
//! `on_device measure FOLDER KIND` prints a table of times and rates.
//!
//! KIND is `bf16` or `f32`. `--emulate` at the end runs the kernels on the CPU, which is for testing this program. Without a
//! GPU it exits with 3.

mod check;
mod measure;
mod sequence;

use cresset_kernels::Compute;
use cresset_kernels::gpu::{self, Emulator, Gpu, Kind};
use cresset_models::ModelSource;
use cresset_models::gpu::{GpuModel, Options};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const USAGE: &str = "usage: on_device check FOLDER bf16|f32 PROMPTS.json [--emulate]
       on_device measure FOLDER bf16|f32 [--emulate]";
const BLOCK_SIZE: usize = 16;
const NO_DEVICE: u8 = 3;

/// A folder, and the device that its model goes to.
struct Source {
    folder: PathBuf,
    kind: Kind,
    gpu: Arc<dyn Gpu>,
}

fn main() -> Result<ExitCode> {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let emulate = args.pop_if(|last| last == "--emulate").is_some();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (folder, kind) = match args[..] {
        ["check", folder, kind, _] | ["measure", folder, kind] => (folder.into(), kind),
        _ => return Err(USAGE.into()),
    };
    let kind = match kind {
        "bf16" => Kind::Bf16,
        "f32" => Kind::F32,
        _ => return Err(USAGE.into()),
    };
    let gpu = match if emulate { Ok(Emulator::new()) } else { gpu::open(0) } {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("on_device: {error}");
            return Ok(ExitCode::from(NO_DEVICE));
        }
    };
    let source = Source { folder, kind, gpu };
    match args.get(3) {
        Some(prompts) => check::check(&source, prompts)?,
        None => measure::measure(&source)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// What of the options the two uses choose.
#[derive(Clone, Copy)]
struct Sizes {
    deterministic: bool,
    max_batched_tokens: usize,
    max_rows: usize,
    max_context: usize,
    /// Whether steps of one token a row are recorded.
    graphs: bool,
}

impl Source {
    /// The model and the seconds until it was ready.
    fn load(&self, sizes: Sizes) -> Result<(GpuModel, f64)> {
        let options = Options {
            gpu: self.gpu.clone(),
            compute: Compute::new(std::thread::available_parallelism()?.get()),
            kind: self.kind,
            deterministic: sizes.deterministic,
            memory_share: 0.9,
            block_size: BLOCK_SIZE,
            max_batched_tokens: sizes.max_batched_tokens,
            max_rows: sizes.max_rows,
            max_context: sizes.max_context,
            graph_rows: if sizes.graphs { sizes.max_rows } else { 0 },
        };
        let start = Instant::now();
        let model = GpuModel::load(&ModelSource::HfFolder(self.folder.clone()), options)?;
        Ok((model, start.elapsed().as_secs_f64()))
    }
}
