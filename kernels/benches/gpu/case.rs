//! One op at one shape: what to launch, what it moves, and what some of its outputs must be.

use crate::Result;
use crate::data::value;
use cresset_kernels::gpu::{Buffer, Gpu, Kind};
use half::bf16;
use std::sync::Arc;

/// Outputs looked at.
const SAMPLES: usize = 64;
/// Of the largest value wanted: what rounding to bf16 makes.
pub const TOLERANCE: f64 = 1e-2;

pub struct Case {
    pub op: &'static str,
    pub shape: String,
    pub n: usize,
    /// Read and written at least, and multiplied or added.
    pub bytes: usize,
    pub flops: usize,
    /// Of the largest value wanted.
    pub tolerance: f64,
    pub out: Arc<Buffer>,
    /// The output at an index, after the first launch.
    pub want: Box<dyn Fn(usize) -> f64>,
    /// The i-th launch in a row: not of the same weights as the one before.
    pub launch: Box<dyn Fn(usize) -> cresset_kernels::Result<()>>,
}

impl Case {
    /// Launches once; the largest error of the sampled outputs, or that it is too large.
    pub fn check(&self, gpu: &Arc<dyn Gpu>) -> Result<f64> {
        (self.launch)(0)?;
        gpu.synchronise()?;
        let got = read(&self.out)?;
        let indices = (0..SAMPLES).map(|i| (i * 7_919 + i * got.len() / SAMPLES) % got.len());
        let pairs: Vec<(f64, f64)> = indices.map(|i| (got[i], (self.want)(i))).collect();
        let largest = pairs.iter().fold(1e-6, |m: f64, (_, want)| m.max(want.abs()));
        let error =
            pairs.iter().map(|(got, want)| (got - want).abs() / largest).fold(0.0, f64::max);
        if error <= self.tolerance && pairs.iter().all(|(got, _)| got.is_finite()) {
            return Ok(error);
        }
        Err(format!(
            "{} {} at {} rows: an error of {error:.1e} of the largest value",
            self.op, self.shape, self.n
        )
        .into())
    }
}

fn read(buffer: &Buffer) -> Result<Vec<f64>> {
    Ok(match buffer.view().kind() {
        Kind::Bf16 => buffer.to_vec::<bf16>()?.into_iter().map(bf16::to_f64).collect(),
        Kind::U32 => buffer.to_vec::<u32>()?.into_iter().map(f64::from).collect(),
        _ => buffer.to_vec::<f32>()?.into_iter().map(f64::from).collect(),
    })
}

pub fn f32s(gpu: &Arc<dyn Gpu>, seed: usize, len: usize) -> Result<Arc<Buffer>> {
    let values: Vec<f32> = (0..len).map(|i| value(seed, i) as f32).collect();
    Ok(Arc::new(Buffer::from_slice(gpu, &values)?))
}
