//! Times of launches, and what the device can do at most.

use crate::Result;
use crate::data::{bf16s, output};
use cresset_kernels::gpu::{Buffer, Gemm, Gpu, Kind};
use std::sync::Arc;
use std::time::Instant;

/// The i-th launch in a row.
pub type Launches<'a> = &'a dyn Fn(usize) -> cresset_kernels::Result<()>;

/// Launches of one graph: the host's part of a launch does not count.
const LAUNCHES: usize = 32;
const ROUNDS: usize = 7;
/// That a round takes at least.
const ROUND_SECONDS: f64 = 0.02;

/// Seconds of one launch: the median round of replayed graphs.
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

/// Bytes read and written, and multiplications and additions, each per second.
pub struct Ceilings {
    pub copy: f64,
    pub product: f64,
}

/// Of a copy of so many bytes, well beyond any cache, and a product of square matrices of so many
/// rows. Their values are random: zeros would draw less power than models do, and clock higher.
pub fn ceilings(gpu: &Arc<dyn Gpu>, bytes: usize, size: usize) -> Result<Ceilings> {
    let [from, to] = [Buffer::zeros(gpu, Kind::U8, bytes)?, Buffer::zeros(gpu, Kind::U8, bytes)?];
    let copy = 2.0 * bytes as f64 / seconds(gpu, &|_| gpu.copy(from.view(), to.view()))?;
    let [x, w] = [bf16s(gpu, 1, size * size)?, bf16s(gpu, 2, size * size)?];
    let out = output(gpu, Kind::Bf16, size * size)?;
    let gemm = Gemm {
        x: x.view(),
        x_stride: size,
        w: w.view(),
        bias: None,
        out: out.view(),
        out_stride: size,
        n: size,
        rows: size,
        cols: size,
    };
    // Once outside a recording, for whatever is made at first use.
    gpu.gemm(&gemm)?;
    let product = 2.0 * (size as f64).powi(3) / seconds(gpu, &|_| gpu.gemm(&gemm))?;
    Ok(Ceilings { copy, product })
}
