//! Rows by their numbers on a device. `embedding.cu` says how.

use crate::Result;
use crate::gpu::{Gpu, View};

pub struct Gather {
    /// `[vocab_size, width]`, f32 or bf16.
    pub table: View,
    pub width: usize,
    /// `[n]` u32.
    pub ids: View,
    /// Where the i-th value is not `u32::MAX`, it is the index into `previous` of the i-th id, instead of `ids[i]`: `[n]` u32 each.
    pub feedback: View,
    /// The tokens of the step before; its length is free.
    pub previous: View,
    /// What every value is multiplied with.
    pub scale: f32,
    /// `[n, width]` of the table's kind.
    pub out: View,
}

pub fn gather(gpu: &dyn Gpu, args: &Gather) -> Result<()> {
    let _ = (gpu, args);
    Err(crate::Error::Unsupported { op: "embedding", detail: "the device path is being written".into() })
}

/// `out[i] = from[rows[i]]`, `width` values each, of one kind; `rows` u32.
pub fn gather_rows(gpu: &dyn Gpu, from: View, width: usize, rows: View, out: View) -> Result<()> {
    let _ = (gpu, from, width, rows, out);
    Err(crate::Error::Unsupported { op: "embedding", detail: "the device path is being written".into() })
}
