//! Measures `linear` beside candle and beside the limits of the machine: `cargo bench -p
//! cresset-kernels --bench linear [-- [threads] [smol | table | formats] [types…] [ROWSxCOLS…]]`.
//!
//! Every case is checked against the reference before it is timed. Contenders take turns, and the
//! best round counts, since the load of other programs on a shared machine only adds time.

#![allow(clippy::disallowed_methods, unreachable_pub, reason = "a program that measures time")]
#![allow(unsafe_code, reason = "one measurement is written in AVX-512")]

use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use cresset_kernels::Compute;
use cresset_kernels::linear::WeightType;
use cresset_kernels::linear::{Linear, LinearArgs, Mode, Weight, linear_reference};
use cresset_kernels::operand::{Operand, TensorView};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

type BoxError = Box<dyn std::error::Error>;

/// `(rows, cols)`.
const SHAPES: [(usize, usize); 5] =
    [(576, 576), (1536, 576), (576, 1536), (49152, 576), (2048, 8192)];
const BATCHES: [usize; 6] = [1, 4, 8, 16, 64, 512];
/// A case is repeated for this long.
const BUDGET: Duration = Duration::from_millis(250);

fn main() -> Result<(), BoxError> {
    // cargo adds `--bench` to the arguments of a bench.
    let mut args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = match args.first().map(|arg| arg.parse()) {
        Some(Ok(threads)) => {
            args.remove(0);
            threads
        }
        _ => cores,
    };
    let bench = Bench::new(threads);
    match args.split_first() {
        Some((mode, types)) if mode == "table" => bench.table(types),
        Some((mode, types)) if mode == "smol" => bench.smollm2(types),
        Some((mode, _)) if mode == "formats" => bench.formats(),
        Some((other, _)) => Err(format!("unknown mode {other}: table, smol or formats").into()),
        None => {
            bench.smollm2(&[])?;
            bench.table(&[])
        }
    }
}

/// The types of GGUF files that candle can quantise to, or those that it lacks.
fn types(in_candle: bool) -> impl Iterator<Item = WeightType> {
    // These two hold activations alone.
    let of_weights = |dtype: &WeightType| !matches!(dtype, WeightType::Q8_1 | WeightType::Q8K);
    let types = (0..64).filter_map(WeightType::from_gguf).filter(of_weights);
    types.filter(move |dtype| dtype.in_candle().is_some() == in_candle)
}

fn wanted_shape(rows: usize, cols: usize, args: &[String]) -> bool {
    let mut named = args.iter().filter(|arg| arg.contains('x')).peekable();
    named.peek().is_none() || named.any(|name| *name == format!("{rows}x{cols}"))
}

fn wanted(dtype: WeightType, types: &[String]) -> bool {
    let mut named = types.iter().filter(|arg| !arg.contains('x')).peekable();
    named.peek().is_none() || named.any(|name| *name == format!("{dtype:?}"))
}

struct Bench {
    c: Compute,
    /// Ceilings of all threads together.
    gflops: f64,
    gbytes: f64,
}

impl Bench {
    fn new(threads: usize) -> Self {
        let c = Compute::new(threads);
        let gflops = ceiling::multiply_adds(&c);
        let (gbytes, copy) = (ceiling::read(&c), ceiling::copy(&c));
        println!(
            "{threads} threads, at most {gflops:.0} GFLOP/s, {gbytes:.1} GB/s read, {copy:.1} GB/s copied (read + written)"
        );
        println!("handing out an op: {:.2} µs\n", ceiling::hand_out(&c));
        Self { c, gflops, gbytes }
    }

    fn table(&self, named: &[String]) -> Result<(), BoxError> {
        println!(
            "| type | rows × cols | n | µs | GB/s | of read | GFLOP/s | of peak | candle µs | × candle |"
        );
        println!("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|");
        for dtype in types(true).filter(|dtype| wanted(*dtype, named)) {
            for (rows, cols) in SHAPES {
                if cols.is_multiple_of(dtype.block_size()) && wanted_shape(rows, cols, named) {
                    self.rows_of_table(dtype, rows, cols)?;
                }
            }
        }
        Ok(())
    }

    /// The formats that candle lacks beside Q4_K, whose time theirs is given as a share of.
    fn formats(&self) -> Result<(), BoxError> {
        let (rows, cols) = (2048, 8192);
        println!("| type | n | µs | GB/s | of the time of Q4_K |");
        println!("|---|---:|---:|---:|---:|");
        let weigh = |dtype: WeightType| -> Result<_, BoxError> {
            if dtype.in_candle().is_some() {
                return Ok((dtype, matrices(dtype, rows, cols)?.0));
            }
            // Bytes below 32 keep every scale finite.
            let bytes = rows * cols / dtype.block_size() * dtype.type_size();
            let raw: Vec<u8> = (0..bytes).map(|i| (i * 37 % 32) as u8).collect();
            Ok((dtype, Weight::from_ggml(dtype, &raw, rows, cols)?))
        };
        let compared = std::iter::once(WeightType::Q4K).chain(types(false));
        let weights: Vec<_> = compared.map(weigh).collect::<Result<_, _>>()?;
        for n in [1, 16, 64] {
            let x = Tensor::randn(0f32, 1.0, (n, cols), &Device::Cpu)?;
            let out = Tensor::full(f32::NAN, (n, rows), &Device::Cpu)?.contiguous()?;
            for (_, weight) in &weights {
                self.linear(weight, &x, &out, n)?;
                check(weight, &x.flatten_all()?.to_vec1()?, &out.flatten_all()?.to_vec1()?)?;
            }
            let mut calls: Vec<_> = weights
                .iter()
                .map(|(_, weight)| || self.linear(weight, &x, &out, n).expect("checked sizes"))
                .collect();
            let mut contenders: Vec<_> =
                calls.iter_mut().map(|call| call as &mut dyn FnMut()).collect();
            let times = best(&mut contenders);
            for ((dtype, weight), time) in weights.iter().zip(&times) {
                println!(
                    "| {} | {n} | {:.0} | {:.1} | {:.0} % |",
                    dtype.name(),
                    time * 1e6,
                    weight.bytes() as f64 / time / 1e9,
                    100.0 * time / times[0],
                );
            }
        }
        Ok(())
    }

    fn rows_of_table(&self, dtype: WeightType, rows: usize, cols: usize) -> Result<(), BoxError> {
        let (weight, theirs) = matrices(dtype, rows, cols)?;
        for n in BATCHES {
            let x = Tensor::randn(0f32, 1.0, (n, cols), &Device::Cpu)?;
            let out = Tensor::full(f32::NAN, (n, rows), &Device::Cpu)?.contiguous()?;
            self.linear(&weight, &x, &out, n)?;
            check(&weight, &x.flatten_all()?.to_vec1()?, &out.flatten_all()?.to_vec1()?)?;
            let times = best(&mut [
                &mut || self.linear(&weight, &x, &out, n).expect("checked sizes"),
                &mut || {
                    black_box(theirs.forward(&x).expect("candle multiplies"));
                },
            ]);
            self.print_row(dtype, rows, cols, n, weight.bytes(), &times);
        }
        Ok(())
    }

    /// Multiplies the first values of `x` as `n` rows, into the first values of `out`.
    fn linear(
        &self,
        w: &Weight,
        x: &Tensor,
        out: &Tensor,
        n: usize,
    ) -> cresset_kernels::Result<()> {
        let first = |tensor, len| TensorView::from(tensor).slice(0..len);
        let (x, out) = (first(x, n * w.cols()), first(out, n * w.rows()));
        self.c.linear(&LinearArgs { x, w, bias: None, out, mode: Mode::Fast })
    }

    fn print_row(
        &self,
        dtype: WeightType,
        rows: usize,
        cols: usize,
        n: usize,
        bytes: usize,
        times: &[f64],
    ) {
        let gbytes = bytes as f64 / times[0] / 1e9;
        let gflops = 2.0 * (rows * cols * n) as f64 / times[0] / 1e9;
        println!(
            "| {dtype:?} | {rows} × {cols} | {n} | {:.1} | {gbytes:.1} | {:.0} % | {gflops:.0} | {:.0} % | {:.1} | {:.1} |",
            times[0] * 1e6,
            100.0 * gbytes / self.gbytes,
            100.0 * gflops / self.gflops,
            times[1] * 1e6,
            times[1] / times[0],
        );
    }

    /// All linears of SmolLM2-135M (30 layers, tied head), each layer with its own weights so that
    /// caches see the real traffic.
    fn smollm2(&self, types: &[String]) -> Result<(), BoxError> {
        for dtype in [WeightType::Q4_1, WeightType::Q4_0, WeightType::Q8_0, WeightType::F16] {
            if !wanted(dtype, types) {
                continue;
            }
            let shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536)];
            let layers: Vec<_> = (0..30)
                .flat_map(|_| shapes)
                .map(|(rows, cols)| matrices(dtype, rows, cols))
                .collect::<Result<_, _>>()?;
            let head = matrices(dtype, 49152, 576)?;
            let decode: Vec<_> = layers.iter().chain([&head]).collect();
            self.pass(dtype, "decode with head", 1, &decode)?;
            self.pass(dtype, "decode of 8 with head", 8, &decode)?;
            self.pass(
                dtype,
                "prefill of 512 without head",
                512,
                &layers.iter().collect::<Vec<_>>(),
            )?;
        }
        println!();
        Ok(())
    }

    /// One pass over the matrices, in order. The time is the sum of each call's best: a pass is
    /// long enough to be interrupted, a call is not, and between two calls of one matrix all others
    /// have gone through the caches.
    fn pass(
        &self,
        dtype: WeightType,
        what: &str,
        n: usize,
        matrices: &[&(Weight, Theirs)],
    ) -> Result<(), BoxError> {
        let x = Tensor::randn(0f32, 1.0, (n, 1536), &Device::Cpu)?;
        let narrow = x.narrow(1, 0, 576)?.contiguous()?;
        let out = Tensor::zeros(n * 49152, DType::F32, &Device::Cpu)?;
        let ours = sum_of_best(matrices, 12 * BUDGET, |(w, _)| {
            self.linear(w, &x, &out, n).expect("sizes fit");
        });
        let candle = sum_of_best(matrices, 4 * BUDGET, |(w, theirs)| {
            let x = if w.cols() == 576 { &narrow } else { &x };
            black_box(theirs.forward(x).expect("candle multiplies"));
        });
        let work: usize = matrices.iter().map(|(w, _)| w.rows() * w.cols()).sum();
        let bytes: usize = matrices.iter().map(|(w, _)| w.bytes()).sum();
        let gflops = 2.0 * (work * n) as f64 / ours / 1e9;
        println!(
            "SmolLM2 {dtype:?} {what}: {:.0} tok/s, {:.1} GB/s, {gflops:.0} GFLOP/s ({:.0} % of peak), candle {:.0} tok/s",
            n as f64 / ours,
            bytes as f64 / ours / 1e9,
            100.0 * gflops / self.gflops,
            n as f64 / candle,
        );
        Ok(())
    }
}

/// Returns seconds: the sum of each call's best over at least two rounds.
fn sum_of_best<T>(items: &[&T], budget: Duration, mut call: impl FnMut(&T)) -> f64 {
    let mut best = vec![f64::INFINITY; items.len()];
    let begin = Instant::now();
    for round in 0.. {
        if round >= 2 && begin.elapsed() > budget {
            break;
        }
        for (item, best) in items.iter().zip(&mut best) {
            let start = Instant::now();
            call(item);
            *best = best.min(start.elapsed().as_secs_f64());
        }
    }
    best.iter().sum()
}

enum Theirs {
    Quantised(QMatMul),
    Dense(Tensor),
}

impl Theirs {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Theirs::Quantised(matmul) => matmul.forward(x),
            Theirs::Dense(w) => x.to_dtype(w.dtype())?.matmul(&w.t()?),
        }
    }
}

/// The same random matrix for both contenders.
fn matrices(dtype: WeightType, rows: usize, cols: usize) -> Result<(Weight, Theirs), BoxError> {
    let dense = Tensor::randn(0f32, 1.0, (rows, cols), &Device::Cpu)?;
    let q = QTensor::quantize(&dense, dtype.in_candle().expect("candle has it"))?;
    let weight = Weight::from_ggml(dtype, &q.data()?, rows, cols)?;
    let theirs = match dtype {
        WeightType::F32 => Theirs::Dense(dense),
        WeightType::F16 => Theirs::Dense(dense.to_dtype(DType::F16)?),
        WeightType::BF16 => Theirs::Dense(dense.to_dtype(DType::BF16)?),
        _ => Theirs::Quantised(QMatMul::from_arc(Arc::new(q))?),
    };
    Ok((weight, theirs))
}

/// The first and last token's outputs against the reference.
fn check(w: &Weight, x: &[f32], out: &[f32]) -> Result<(), BoxError> {
    let (cols, rows) = (w.cols(), w.rows());
    for (x, out) in [(&x[..cols], &out[..rows]), (&x[x.len() - cols..], &out[out.len() - rows..])] {
        let want = linear_reference(w, None, x);
        let close =
            |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * (cols as f32).sqrt() * (1.0 + b.abs());
        if !out.iter().zip(&want).all(close) {
            return Err(format!("[{rows}, {cols}] differs from the reference").into());
        }
    }
    Ok(())
}

/// Seconds of each contender's best round; they take turns.
fn best(contenders: &mut [&mut dyn FnMut()]) -> Vec<f64> {
    let mut best = vec![f64::INFINITY; contenders.len()];
    let mut spent = vec![Duration::ZERO; contenders.len()];
    for _ in 0..2000 {
        for (i, contender) in contenders.iter_mut().enumerate() {
            if spent[i] > BUDGET {
                continue;
            }
            let start = Instant::now();
            contender();
            let took = start.elapsed();
            spent[i] += took;
            best[i] = best[i].min(took.as_secs_f64());
        }
    }
    best
}

/// Measurements of the limits of the machine.
mod ceiling {
    use super::{Compute, best, black_box};
    use std::sync::atomic::Ordering;

    /// GFLOP/s of independent fused multiply-adds in registers.
    pub fn multiply_adds(c: &Compute) -> f64 {
        const STEPS: usize = 200_000;
        let seconds = best(&mut [&mut || c.run(c.threads(), |_| chains(STEPS))])[0];
        (c.threads() * STEPS * CHAINS * WIDTH * 2) as f64 / seconds / 1e9
    }

    const CHAINS: usize = 16;
    const WIDTH: usize = 16;

    #[cfg(target_arch = "x86_64")]
    fn chains(steps: usize) {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: just detected.
            unsafe { chains_avx512(steps) }
        } else {
            chains_portable(steps);
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn chains(steps: usize) {
        chains_portable(steps);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn chains_avx512(steps: usize) {
        use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_set1_ps};
        let (a, b) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(1e-3)));
        let mut sums = [_mm512_set1_ps(1.0); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
    }

    fn chains_portable(steps: usize) {
        let (a, b) = (black_box(0.999f32), black_box(1e-3f32));
        let mut sums = [[1f32; WIDTH]; CHAINS];
        for _ in 0..steps {
            for sum in sums.iter_mut().flatten() {
                *sum = *sum * a + b;
            }
        }
        black_box(sums);
    }

    /// µs that a run takes over the longest of its tasks, one per thread, each known to be on a
    /// thread of its own.
    pub fn hand_out(c: &Compute) -> f64 {
        let arrived = std::sync::atomic::AtomicUsize::new(0);
        let rounds = 1000;
        let seconds = best(&mut [&mut || {
            for round in 1..=rounds {
                c.run(c.threads(), |_| {
                    arrived.fetch_add(1, Ordering::Relaxed);
                    while arrived.load(Ordering::Relaxed) < round * c.threads() {
                        std::hint::spin_loop();
                    }
                });
            }
            arrived.store(0, Ordering::Relaxed);
        }])[0];
        seconds / rounds as f64 * 1e6
    }

    const BUFFER: usize = 64 << 20;

    /// GB/s of reading memory that no cache holds.
    pub fn read(c: &Compute) -> f64 {
        let data = vec![1u64; BUFFER];
        let part = BUFFER / c.threads();
        let sum = |i: usize| data[i * part..][..part].iter().fold(0u64, |a, b| a ^ b);
        let seconds = best(&mut [&mut || {
            c.run(c.threads(), |i| {
                black_box(sum(i));
            });
        }])[0];
        (BUFFER * 8) as f64 / seconds / 1e9
    }

    /// GB/s of copying, both directions counted.
    pub fn copy(c: &Compute) -> f64 {
        let from = vec![1u64; BUFFER / 2];
        let mut to = vec![0u64; BUFFER / 2];
        let part = BUFFER / 2 / c.threads();
        let slots: Vec<_> = to.chunks_exact_mut(part).map(std::sync::Mutex::new).collect();
        let seconds = best(&mut [&mut || {
            c.run(slots.len(), |i| {
                let mut slot = slots[i].lock().expect("each task has its own slot");
                slot.copy_from_slice(&from[i * part..][..part]);
            });
        }])[0];
        (BUFFER * 8) as f64 / seconds / 1e9
    }
}
