//! What a GPU can do at most, as the shares of other figures are taken of it: a large copy and a large bf16 product, through
//! the seam that models use. `cargo run --release -p cresset-kernels --features cuda --example ceilings`.

use cresset_kernels::Result;
use cresset_kernels::gpu::{self, Buffer, Gemm, Gpu, Kind};
use std::sync::Arc;
use std::time::Instant;

/// Repetitions of which the median counts, and calls in each.
const ROUNDS: usize = 9;
const CALLS: usize = 10;
/// Well beyond any cache, bytes.
const COPIED: usize = 4 << 30;
const SIDE: usize = 8192;

fn main() -> Result<()> {
    let gpu = gpu::open(0)?;
    println!("{:?}", gpu.properties());
    let from = Buffer::zeros(&gpu, Kind::U8, COPIED)?;
    let to = Buffer::zeros(&gpu, Kind::U8, COPIED)?;
    let copy = seconds(&gpu, || gpu.copy(from.view(), to.view()))?;
    println!("copy of {COPIED} bytes: {:.0} GB/s read and written", 2.0 * COPIED as f64 / copy / 1e9);
    drop((from, to));
    let [x, w, out] = [0; 3].map(|_| Buffer::zeros(&gpu, Kind::Bf16, SIDE * SIDE));
    let (x, w, out) = (x?, w?, out?);
    // Zeros would draw less power than models do, and clock higher.
    for buffer in [&x, &w] {
        gpu.fill(buffer.view(), 0x3e)?;
    }
    let (x, w, view) = (x.view(), w.view(), out.view());
    let gemm = Gemm { x, x_stride: SIDE, w, bias: None, out: view, out_stride: SIDE, n: SIDE, rows: SIDE, cols: SIDE };
    let product = seconds(&gpu, || gpu.gemm(&gemm))?;
    println!("bf16 product of {SIDE}³: {:.0} TFLOP/s", 2.0 * (SIDE as f64).powi(3) / product / 1e12);
    Ok(())
}

/// Of one call, after warming up.
fn seconds(gpu: &Arc<dyn Gpu>, call: impl Fn() -> Result<()>) -> Result<f64> {
    let mut rounds = Vec::new();
    for _ in 0..=ROUNDS {
        gpu.synchronise()?;
        let start = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        gpu.synchronise()?;
        rounds.push(start.elapsed().as_secs_f64() / CALLS as f64);
    }
    rounds.remove(0);
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[ROUNDS / 2])
}
