//! Dense products on a device: cuBLASLt, the row-by-row kernel for few rows, and the kernel whose result for a row depends on
//! nothing else. `linear.cu` says how.

use crate::Result;
use crate::gpu::{Gpu, View};

/// How a product may be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Whatever is fastest for this number of rows.
    Fast,
    /// A row's result has the same bits whatever other rows there are.
    Invariant,
}

/// `out[n, rows] = x[n, cols] · wᵀ (+ bias)`, `w: [rows, cols]`; `x`, `w`, `bias` of one kind (f32 or bf16), `out` of that kind or f32.
pub struct Linear {
    pub x: View,
    pub w: View,
    pub bias: Option<View>,
    pub rows: usize,
    pub cols: usize,
    pub out: View,
    pub mode: Mode,
}

pub fn linear(gpu: &dyn Gpu, args: &Linear) -> Result<()> {
    let _ = (gpu, args);
    Err(crate::Error::Unsupported { op: "linear", detail: "the device path is being written".into() })
}
