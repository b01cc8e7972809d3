//! One op at one shape: its launches, the bytes that it moves, and the expected values of some of
//! its outputs.

use crate::Result;
use crate::data::{in_parts, value};
use cresset_kernels::gpu::{Buffer, Gpu, Kind};
use half::bf16;
use std::sync::Arc;

/// The number of outputs that are checked.
const SAMPLES: usize = 64;
/// The tolerance, as a share of the largest expected value: the error of rounding to bf16.
pub const TOLERANCE: f64 = 1e-2;

pub struct Case {
    pub op: &'static str,
    pub shape: String,
    pub n: usize,
    /// Bytes that must be read and written, and multiplications and additions.
    pub bytes: usize,
    pub flops: usize,
    /// The tolerance, as a share of the largest expected value.
    pub tolerance: f64,
    pub out: Arc<Buffer>,
    /// The expected output at an index, after the first launch.
    pub want: Box<dyn Fn(usize) -> f64 + Sync>,
    /// The i-th launch of a series. It uses other weights than the previous one.
    pub launch: Box<dyn Fn(usize) -> cresset_kernels::Result<()>>,
}

impl Case {
    /// Launches once and returns the largest error of the checked outputs.
    ///
    /// # Errors
    /// When it is larger than the tolerance.
    pub fn check(&self, gpu: &Arc<dyn Gpu>) -> Result<f64> {
        (self.launch)(0)?;
        gpu.synchronise()?;
        let got = read(&self.out)?;
        // Only what the threads need, as a case's launches are those of this thread.
        let (want, mut pairs) = (&self.want, vec![(0.0, 0.0); SAMPLES]);
        in_parts(&mut pairs, 1, |first, part| {
            for (i, pair) in (first..).zip(part) {
                let i = (i * 7_919 + i * got.len() / SAMPLES) % got.len();
                *pair = (got[i], want(i));
            }
        });
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
