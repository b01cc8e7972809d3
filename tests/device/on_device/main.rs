//! Runs a model from a Hugging Face folder on a GPU, compares its answers, and measures its times:
//!
//! - `on_device check FOLDER bf16|f32` prints as JSON the answers to `FOLDER/prompts.json` (`[[id,
//!   …], …]`). They must be the same with and without recorded steps, and with `deterministic`
//!   alone or in a batch.
//! - `on_device speed FOLDER`: start, prompts, decoding, a few streams, the host's part of a step.
//! - `on_device offline FOLDER`: throughput with as many sequences as the cache holds.
//! - `on_device deterministic FOLDER`: the cost of `deterministic`.
//! - `on_device survive FOLDER`: requests must not be affected by others that are cancelled,
//!   preempted or find no memory.
//!
//! All but the first print a table with targets. A missed target is no failure; a wrong token is.
//! `--plain-launches` at the end starts each kernel only when the one before it has ended.
//! `--emulate` at the very end runs the kernels on the CPU at small sizes, for tests of this
//! program; its times mean nothing. Without a GPU the program exits with 3.

#![allow(clippy::disallowed_methods, unreachable_pub, reason = "a program that measures time")]

mod answers;
mod check;
#[path = "../../../kernels/benches/gpu/data.rs"]
mod data;
mod deterministic;
#[path = "../../../kernels/benches/gpu/measure.rs"]
mod measure;
mod model;
mod offline;
mod online;
mod sequence;
mod speed;
mod survive;
mod targets;

use cresset_kernels::gpu::{self, Emulator, Kind};
use model::Source;
use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

const USAGE: &str = "usage: on_device check FOLDER bf16|f32 [--plain-launches] [--emulate]
       on_device speed|offline|deterministic|survive FOLDER [--plain-launches] [--emulate]";
const NO_DEVICE: u8 = 3;
/// Bytes of the emulator's memory.
const MEMORY: usize = 64 << 20;
const MULTIPROCESSORS: u32 = 4;

fn main() -> Result<ExitCode> {
    let began = Instant::now();
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let emulated = args.pop_if(|last| last == "--emulate").is_some();
    let plain_launches = args.pop_if(|last| last == "--plain-launches").is_some();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (folder, judge): (&str, fn(&Source) -> Result<()>) = match args[..] {
        ["check", folder, "bf16"] => (folder, |source| check::check(source, Kind::Bf16)),
        ["check", folder, "f32"] => (folder, |source| check::check(source, Kind::F32)),
        ["speed", folder] => (folder, speed::speed),
        ["offline", folder] => (folder, offline::offline),
        ["deterministic", folder] => (folder, deterministic::deterministic),
        ["survive", folder] => (folder, survive::survive),
        _ => return Err(USAGE.into()),
    };
    // The node keeps measurements of products in the same folder, so that they are known at the
    // next start.
    let options = gpu::DeviceOptions { folder: Some(cresset::config::cache_dir()), plain_launches };
    let opened = || gpu::open_with(0, &options);
    let gpu = match if emulated { Ok(Emulator::with(MEMORY, MULTIPROCESSORS)) } else { opened() } {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("on_device: {error}");
            return Ok(ExitCode::from(NO_DEVICE));
        }
    };
    judge(&Source { folder: folder.into(), gpu, emulated, began })?;
    Ok(ExitCode::SUCCESS)
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
