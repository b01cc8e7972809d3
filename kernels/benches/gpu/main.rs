//! Measures device kernels at the shapes of an 8B model: `cargo bench -p cresset-kernels --features
//! cuda --bench gpu`. Each is checked before it is timed, and its speed is given as a share of the
//! device's limits, which are measured in the same run. Prints a table for `RESULTS.md`. With
//! `--check` it launches each case once and times nothing, which is for profilers. With
//! `--plain-launches` no kernel begins before the one ahead of it has ended. `--only PART` runs one
//! of the parts `small`, `ends`, `paged`, `experts`, `dense`, `packed`, `eight_bits`. Without a GPU
//! it runs small shapes in the emulator, to test itself.

#![allow(clippy::disallowed_methods, unreachable_pub, reason = "a program that measures time")]

mod case;
mod data;
mod dense;
mod eight_bits;
mod ends;
mod experts;
mod measure;
mod packed;
mod paged;
mod small;

use cresset_kernels::Error;
use cresset_kernels::gpu::{self, DeviceOptions, Emulator, Gpu, GpuSensor};
use measure::{Ceilings, Launches, ceilings, seconds};
use std::sync::{Arc, LazyLock};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Sizes of a decoder.
pub struct Model {
    pub hidden: usize,
    pub ffn: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab_size: usize,
    /// Experts, those chosen for a row, and the rows of an expert's first matrix.
    pub experts: usize,
    pub chosen: usize,
    pub expert_ffn: usize,
    /// The numbers of rows that steps have.
    pub steps: &'static [usize],
    /// Tokens of each sequence that is decoded.
    pub context: usize,
    pub prompts: &'static [usize],
    /// The numbers of rows of products with weights of E4M3.
    pub products: &'static [usize],
    /// Tokens of a split of the keys that are tried at each of these numbers of sequences.
    pub splits: &'static [usize],
    pub split_rows: &'static [usize],
    /// Sequences of one short length beside a long one, tokens.
    pub crowd: (usize, usize, usize),
    /// Queries of a prompt behind a prefix that is in the cache, and tokens in all.
    pub behind_prefix: (usize, usize),
    /// Bytes that repeated launches must read before they read the same ones again, so that no
    /// cache helps.
    pub spread: usize,
    /// More numbers of rows at which kernels for dense weights are compared with each other.
    pub many_rows: &'static [usize],
}

const LLAMA_8B: Model = Model {
    hidden: 4096,
    ffn: 14_336,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    vocab_size: 128_256,
    experts: 32,
    chosen: 8,
    expert_ffn: 1536,
    steps: &[1, 2, 4, 8, 16, 24, 32, 48, 64, 256, 512],
    context: 2048,
    prompts: &[512, 2048, 8192],
    products: &[1, 32, 64, 128, 256, 512, 2048, 8192],
    splits: &[64, 128, 256, 512, 1024, 2048],
    split_rows: &[1, 8, 64],
    crowd: (255, 500, 100_000),
    behind_prefix: (64, 100_000),
    spread: 512 << 20,
    many_rows: &[128, 2048, 8192],
};

const TINY: Model = Model {
    hidden: 72,
    ffn: 200,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    vocab_size: 130,
    experts: 5,
    chosen: 2,
    expert_ffn: 40,
    steps: &[1, 8, 33],
    context: 100,
    prompts: &[40],
    products: &[3, 66],
    splits: &[64, 128],
    split_rows: &[2],
    crowd: (5, 20, 200),
    behind_prefix: (8, 150),
    spread: 64 << 10,
    many_rows: &[70],
};

/// Bytes of the copy, and rows of the matrices of the product, that measure the device's limits.
const COPIED: usize = 4 << 30;
const SIDE: usize = 8192;

fn main() -> Result<()> {
    let asked = |flag: &str| std::env::args().any(|arg| arg == flag);
    let options =
        DeviceOptions { plain_launches: asked("--plain-launches"), ..DeviceOptions::default() };
    let gpu = device(&options)?;
    let emulated = gpu.properties().name == "emulator";
    let model = if emulated { TINY } else { LLAMA_8B };
    let check = emulated || asked("--check");
    let ceilings = if check { None } else { Some(ceilings(&gpu, COPIED, SIDE)?) };
    head(&gpu, ceilings.as_ref());
    let only = std::env::args().skip_while(|arg| arg != "--only").nth(1);
    let parts: [(&str, Box<dyn Iterator<Item = Result<case::Case>>>); 7] = [
        ("small", Box::new(small::cases(&gpu, &model))),
        ("ends", Box::new(ends::cases(&gpu, &model))),
        ("paged", Box::new(paged::cases(&gpu, &model))),
        ("experts", Box::new(experts::cases(&gpu, &model))),
        ("dense", Box::new(dense::cases(&gpu, &model))),
        ("packed", Box::new(packed::cases(&gpu, &model))),
        ("eight_bits", Box::new(eight_bits::cases(&gpu, &model))),
    ];
    let wanted = |part: &str| only.as_ref().is_none_or(|only| only == part);
    if !parts.iter().any(|(part, _)| wanted(part)) {
        return Err(format!("there is no part {}", only.unwrap_or_default()).into());
    }
    let cases = parts.into_iter().filter(|(part, _)| wanted(part)).flat_map(|(_, cases)| cases);
    let mut failed = 0;
    for case in cases {
        if let Err(error) = case.and_then(|case| report(&gpu, &case, ceilings.as_ref())) {
            eprintln!("{error}");
            failed += 1;
        }
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} cases failed").into()) }
}

/// The machine's first GPU, or an emulator if there is none.
fn device(options: &DeviceOptions) -> Result<Arc<dyn Gpu>> {
    match gpu::open_with(0, options) {
        Err(Error::NoDevice(_)) => Ok(Emulator::with(1 << 30, 4)),
        opened => Ok(opened?),
    }
}

fn head(gpu: &Arc<dyn Gpu>, ceilings: Option<&Ceilings>) {
    let properties = gpu.properties();
    println!("Kernels overlap: {}.", if gpu.overlaps() { "yes" } else { "no" });
    match ceilings {
        None => println!("Values are checked, nothing is timed.\n"),
        Some(Ceilings { copy, read, product }) => println!(
            "{} ({}), measured in this run: copy {:.0} GB/s (read and written), \
             reading {:.0} GB/s, bf16 product {:.0} TFLOP/s.\n",
            properties.name,
            properties.versions,
            copy / 1e9,
            read / 1e9,
            product / 1e12
        ),
    }
    println!(
        "| op | shape | rows | µs | GB/s | of reading | TFLOP/s | of product | error | clocks |"
    );
    println!("|---|---|---:|---:|---:|---:|---:|---:|---:|---|");
}

/// Checks, times and prints one case.
fn report(gpu: &Arc<dyn Gpu>, case: &case::Case, ceilings: Option<&Ceilings>) -> Result<()> {
    static SENSOR: LazyLock<Option<GpuSensor>> = LazyLock::new(|| gpu::sensor(0).ok());
    let error = case.check(gpu)?;
    let &case::Case { op, ref shape, n, bytes, flops, .. } = case;
    let Some(ceilings) = ceilings else {
        if gpu.properties().name == "emulator" {
            rehearse(gpu, &*case.launch)?;
        }
        println!("| {op} | {shape} | {n} | | | | | | {error:.0e} | |");
        return Ok(());
    };
    let seconds = seconds(gpu, &*case.launch)?;
    let clocks = SENSOR.as_ref().map(|sensor| sensor.read().clocks()).unwrap_or_default();
    let (bandwidth, rate) = (bytes as f64 / seconds, flops as f64 / seconds);
    println!(
        "| {op} | {shape} | {n} | {:.1} | {:.0} | {:.0} % | {:.1} | {:.0} % | {error:.0e} | \
         {clocks} |",
        seconds * 1e6,
        bandwidth / 1e9,
        100.0 * bandwidth / ceilings.read,
        rate / 1e12,
        100.0 * rate / ceilings.product,
    );
    Ok(())
}

/// Records and replays each case without timing it.
fn rehearse(gpu: &Arc<dyn Gpu>, launch: Launches) -> Result<()> {
    let graph = gpu.capture(&mut || (0..2).try_for_each(launch))?;
    gpu.replay(&graph)?;
    Ok(gpu.synchronise()?)
}
