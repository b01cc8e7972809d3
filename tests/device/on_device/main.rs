//! Runs a model from a Hugging Face folder on a GPU, compares its answers, and measures its times:
//!
//! - `on_device check FOLDER bf16|f32` prints as JSON the answers to `FOLDER/prompts.json` (`[[id,
//!   …], …]`). They must be the same with and without recorded steps, and with `deterministic`
//!   alone or in a batch.
//! - `on_device device` tells which device it finds, and whether kernels overlap on it.
//! - `on_device fault` provokes a fault of a kernel, and tells what the device answers afterwards.
//! - `on_device speed FOLDER`: start, prompts, decoding, formats, a few streams, the host's part of
//!   a step;
//!   `on_device speed FILE.gguf`: start, prompts and decoding with quantised weights.
//! - `on_device speed-fp8 FOLDER`: activations of eight bits beside the folder's weights of E4M3,
//!   and `on_device speed-kv8 FOLDER`: a cache in E4M3; how far answers move, prompts and decoding.
//! - `on_device anatomy FOLDER`: the time that each kind of op adds to a step.
//! - `on_device offline FOLDER`: throughput with as many sequences as the cache holds;
//!   `offline-others`, with lengths that have no target; `offline-fp8`, all lengths with weights,
//!   activations and cache in E4M3.
//! - `on_device deterministic FOLDER`: the cost of `deterministic`.
//! - `on_device tiny-model FOLDER` writes a tiny model, and `FOLDER/fp8` with weights of E4M3, for
//!   `--emulate`.
//! - `on_device survive FOLDER`: requests must not be affected by others that are cancelled,
//!   preempted or find no memory.
//!
//! Those that measure print a table with targets. A missed target is no failure; a wrong token is.
//! `--plain-launches` at the end starts each kernel only when the one before it has ended.
//! `--emulate` at the very end runs the kernels on the CPU at small sizes, for tests of this
//! program; its times mean nothing. Without a GPU the program exits with 3.

#![allow(clippy::disallowed_methods, unreachable_pub, reason = "a program that measures time")]

mod anatomy;
mod answers;
mod check;
#[path = "../../../kernels/benches/gpu/data.rs"]
mod data;
mod deterministic;
mod eight_bits;
mod fault;
mod formats;
#[path = "../../../kernels/benches/gpu/measure.rs"]
mod measure;
mod model;
mod offline;
mod online;
mod ranks;
mod sequence;
mod speed;
mod survive;
mod targets;

use cresset_kernels::gpu::{self, Emulator, Gpu, Kind, Properties};
use cresset_models::testing::{TinyLlama, vocab_size};
use eight_bits::{EightBits, eight_bits};
use model::Source;
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

const USAGE: &str = "usage: on_device check FOLDER bf16|f32 [OPTION…]
       on_device speed|speed-fp8|speed-kv8|anatomy FOLDER [OPTION…]
       on_device offline|offline-others|offline-fp8|deterministic|survive FOLDER [OPTION…]
       on_device device|fault|ranks [OPTION…]
       on_device tiny-model FOLDER
options, in this order: --plain-launches --emulate";
const NO_DEVICE: u8 = 3;
/// Bytes of the emulator's memory.
const MEMORY: usize = 64 << 20;
/// Its multiprocessors: few, because each block of a grid that fills the device takes time.
const MULTIPROCESSORS: u32 = 4;
/// More than machines have.
const MOST_GPUS: usize = 64;

fn main() -> Result<ExitCode> {
    let began = Instant::now();
    // The device tells in the log why kernels do not overlap.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let emulated = args.pop_if(|last| last == "--emulate").is_some();
    let plain_launches = args.pop_if(|last| last == "--plain-launches").is_some();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let options = gpu::DeviceOptions { plain_launches, ..gpu::DeviceOptions::default() };
    let open = || if emulated { Ok(emulator(&options)) } else { gpu::open_with(0, &options) };
    let (path, judge): (&str, fn(&Source) -> Result<()>) = match args[..] {
        ["check", path, "bf16"] => (path, |source| check::check(source, Kind::Bf16)),
        ["check", path, "f32"] => (path, |source| check::check(source, Kind::F32)),
        ["device"] => ("", |source| {
            targets::head();
            source.describe();
            Ok(())
        }),
        // It opens the device more than once.
        ["fault"] => return fault::fault(&open).map(|()| ExitCode::SUCCESS),
        ["ranks"] => {
            let group = if emulated { Ok(emulated_group(&options)) } else { all_gpus(&options) };
            return group.and_then(|gpus| ranks::ranks(&gpus)).map(|()| ExitCode::SUCCESS);
        }
        ["tiny-model", folder] => {
            return write_tiny_model(Path::new(folder)).map(|()| ExitCode::SUCCESS);
        }
        ["speed", path] => (path, speed::speed),
        ["speed-fp8", path] => (path, |source| eight_bits(source, EightBits::Activations)),
        ["speed-kv8", path] => (path, |source| eight_bits(source, EightBits::Cache)),
        ["anatomy", path] => (path, anatomy::anatomy),
        ["offline", path] => (path, |source| offline::offline(source, true)),
        ["offline-fp8", path] => (path, offline::offline_fp8),
        ["offline-others", path] => (path, |source| offline::offline(source, false)),
        ["deterministic", path] => (path, deterministic::deterministic),
        ["survive", path] => (path, survive::survive),
        _ => return Err(USAGE.into()),
    };
    let gpu = match open() {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("on_device: {error}");
            return Ok(ExitCode::from(NO_DEVICE));
        }
    };
    // Calls come one after the other: what one has measured is known to the next.
    let (products, folder) = (options.products, cresset_node::config::cache_dir());
    let properties = gpu.properties().clone();
    products.read_from(&folder, &properties);
    judge(&Source { path: path.into(), gpu, emulated, eight_bits: None, began })?;
    products.write_to(&folder, &properties)?;
    Ok(ExitCode::SUCCESS)
}

/// A device whose kernels overlap, or one of an architecture on which they cannot.
fn emulator(options: &gpu::DeviceOptions) -> Arc<dyn Gpu> {
    let h200 = Emulator::card("h200", MEMORY).expect("the emulator knows this card");
    let capability = if options.plain_launches { (8, 0) } else { h200.capability };
    let warp_groups = !options.plain_launches;
    Emulator::of(Properties { capability, multiprocessors: MULTIPROCESSORS, warp_groups, ..h200 })
}

/// All GPUs of the machine, as ranks.
fn all_gpus(options: &gpu::DeviceOptions) -> Result<Vec<Arc<dyn Gpu>>> {
    let first = gpu::probe(0)?;
    let alike = |number: &usize| gpu::probe(*number).is_ok_and(|found| found.name == first.name);
    let numbers: Vec<usize> = (0..MOST_GPUS).take_while(alike).collect();
    Ok(gpu::open_group(&numbers, options)?)
}

fn emulated_group(options: &gpu::DeviceOptions) -> Vec<Arc<dyn Gpu>> {
    let limits = emulator(options).properties().clone();
    Emulator::group(&[limits.clone(), limits])
}

/// Writes tiny models and their prompts. Caches in E4M3 are for heads of 64, the library multiplies
/// codes in whole blocks of 128 columns, and the anatomy of a step tells products by their sizes.
fn write_tiny_model(folder: &Path) -> Result<()> {
    let sizes = TinyLlama { hidden: 128, intermediate: 256, heads: 2, ..TinyLlama::default() };
    let tiny = TinyLlama { kv_heads: 1, tied: false, ..sizes };
    tiny.write_safetensors(folder)?;
    tiny.write_e4m3(&folder.join("fp8"))?;
    let prompts = [1, 7, 33].map(|len| tokens(len, len, vocab_size()));
    Ok(std::fs::write(folder.join("prompts.json"), serde_json::to_vec(&prompts)?)?)
}

/// Random tokens, different for each seed.
fn tokens(seed: usize, count: usize, vocab_size: usize) -> Vec<u32> {
    let mixed = |i: usize| ((seed << 32 | i) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 24;
    (0..count).map(|i| (mixed(i) % vocab_size as u64) as u32).collect()
}

/// The median of at least one value.
fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    percentile(values, 50)
}

fn percentile(values: impl IntoIterator<Item = f64>, percent: usize) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[(values.len() * percent / 100).min(values.len() - 1)]
}
