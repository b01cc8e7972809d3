//! Times launches, and measures the limits of the device.

use crate::Result;
use crate::data::{bf16s, output};
use cresset_kernels::gpu::{Buffer, Gemm, Gpu, Kind};
use std::sync::Arc;
use std::time::Instant;

/// The i-th launch of a series.
pub type Launches<'a> = &'a dyn Fn(usize) -> cresset_kernels::Result<()>;

/// Launches in one graph. They are recorded, so that the host's part of a launch does not count.
const LAUNCHES: usize = 32;
const ROUNDS: usize = 5;
/// The least time that a round takes.
const ROUND_SECONDS: f64 = 0.01;

/// The seconds of one launch, from the median round of replayed graphs.
pub fn seconds(gpu: &Arc<dyn Gpu>, launch: Launches) -> Result<f64> {
    let graph = gpu.capture(&mut || (0..LAUNCHES).try_for_each(launch))?;
    let replay = |times: usize| -> Result<f64> {
        let start = Instant::now();
        for _ in 0..times {
            gpu.replay(&graph)?;
        }
        gpu.synchronise()?;
        Ok(start.elapsed().as_secs_f64())
    };
    replay(1)?;
    let times = (ROUND_SECONDS / replay(1)?).ceil() as usize;
    let mut rounds = (0..ROUNDS).map(|_| replay(times)).collect::<Result<Vec<f64>>>()?;
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[ROUNDS / 2] / (times * LAUNCHES) as f64)
}

/// The limits of the device: bytes read and written by a copy, bytes read by the library's product
/// with one row, and multiplications and additions, each per second. The driver's copy is no limit
/// for kernels: an H200 copied at 2.8 TB/s and read at 4.5.
pub struct Ceilings {
    pub copy: f64,
    pub read: f64,
    pub product: f64,
}

/// Measures the limits by a copy and a matrix of `bytes` bytes, well beyond any cache, and a
/// product of square matrices of `size` rows. Their values are random: with zeros the device would
/// draw less power than with a model, and clock higher.
pub fn ceilings(gpu: &Arc<dyn Gpu>, bytes: usize, size: usize) -> Result<Ceilings> {
    let [from, to] = [Buffer::zeros(gpu, Kind::U8, bytes)?, Buffer::zeros(gpu, Kind::U8, bytes)?];
    let copy = 2.0 * bytes as f64 / seconds(gpu, &|_| gpu.copy(from.view(), to.view()))?;
    drop([from, to]);
    let read = bytes as f64 / library_seconds(gpu, 1, bytes / 2 / size, size)?;
    let product = 2.0 * (size as f64).powi(3) / library_seconds(gpu, size, size, size)?;
    Ok(Ceilings { copy, read, product })
}

/// The seconds of the library's product of `n` rows with a matrix.
fn library_seconds(gpu: &Arc<dyn Gpu>, n: usize, rows: usize, cols: usize) -> Result<f64> {
    let [x, w] = [bf16s(gpu, 1, n * cols)?, bf16s(gpu, 2, rows * cols)?];
    let out = output(gpu, Kind::Bf16, n * rows)?;
    let (x, w, out) = (x.view(), w.view(), out.view());
    let gemm = Gemm::contiguous(x, w, out, [n, rows, cols]);
    // The first run is outside a recording, as it may allocate or measure.
    gpu.gemm(&gemm)?;
    seconds(gpu, &|_| gpu.gemm(&gemm))
}
