//! `out[n, rows] = x[n, cols] · Wᵀ (+ bias)` with dense or block-quantised weights.
//!
//! Dense weights and floats of eight bits are multiplied with f32 activations by fused
//! multiply-adds (`tile`). Block-quantised weights stay quantised in memory, and their codes, where
//! they are integers, are multiplied with activations rounded to sixteen bits (`rounding`) in exact
//! integer sums (`integer`). On a device the codes are multiplied with activations in bf16, in sums
//! of f32 (`gpu`).
#![expect(
    clippy::inline_always,
    reason = "vector code must end up inside the function that enables its instructions"
)]

mod args;
mod cpu;
mod device_format;
mod format;
pub mod gpu;
mod i_quants;
mod integer;
mod machines;
mod matmul;
mod pack;
mod reference;
mod rounding;
#[cfg(test)]
mod tests;
mod tile;
mod values;
mod weight_type;

pub use args::{HeadLinearArgs, LinearArgs, Mode};
pub use device_format::{BAND_ROWS, DeviceFormat, packed_types};
pub(crate) use matmul::run_chosen;
pub use reference::{linear as linear_reference, rounded_to_e4m3};

use crate::gpu::DeviceElement;
use crate::memory::RegionBytes;
use crate::operand::OpMemory;
use crate::simd::LANES;
use crate::storage::{ensure, unsupported};
use crate::{Compute, Result};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
pub use weight_type::WeightType;

const OP: &str = "linear";
const HEADS: &str = "head_linear";

pub trait Linear: OpMemory {
    /// Each output is summed in an order that depends on `cols` and the weight's type alone (on a
    /// device with [`Mode::Invariant`]), never on `n`, the thread count or neighbours: one row
    /// gives the same bits alone and in a batch.
    fn linear(&self, args: &LinearArgs<Self::View<'_>>) -> Result<()>;

    /// The same where the rows of `x` are rounded already, if products with the matrix round them:
    /// by a norm or an activation. The result is that of `linear`, which rounds them once more.
    fn rounded_linear(&self, args: &LinearArgs<Self::View<'_>>) -> Result<()> {
        self.linear(args)
    }

    /// The products of heads with matrices of their own, summed in the same order. A device has no
    /// kernel for them yet.
    fn head_linear(&self, args: &HeadLinearArgs<Self::View<'_>>) -> Result<()>;
}

/// A weight matrix `[rows (outputs), cols (inputs)]`, prepared for this CPU. Several matrices with
/// the same `cols` may be stacked into one (fused QKV, gate-up), each part keeping its own type.
pub struct Weight {
    rows: usize,
    cols: usize,
    parts: Vec<WeightPart>,
    /// The inputs of its columns, where those are stored in another order.
    order: Option<Arc<[u32]>>,
}

/// Rows of one type, in panels of sixteen.
struct WeightPart {
    /// Its first row in the whole matrix.
    first: usize,
    rows: usize,
    dtype: WeightType,
    panel_bytes: usize,
    data: RegionBytes,
}

impl WeightPart {
    fn new(c: &Compute, dtype: WeightType, raw: &[u8], rows: usize, cols: usize) -> Result<Self> {
        let blocks = cols / dtype.block_size();
        let expected = rows.checked_mul(blocks).and_then(|b| b.checked_mul(dtype.type_size()));
        ensure(OP, cols.is_multiple_of(dtype.block_size()), || {
            format!("{cols} columns are not whole {dtype:?} blocks")
        })?;
        let got = raw.len();
        ensure(OP, expected == Some(got), || {
            format!("[{rows}, {cols}] {dtype:?} takes {expected:?} bytes, got {got}")
        })?;
        let (panel_bytes, data) = match (dtype, format::of(dtype)) {
            _ if raw.is_empty() => (0, RegionBytes::zeroed(0)),
            (_, Some(format)) => {
                let data = pack::quantised(c, dtype, &format, raw, rows, cols);
                (format.panel_bytes(cols), data)
            }
            (WeightType::F32 | WeightType::F16 | WeightType::BF16, None) => {
                pack::dense(raw, rows, cols, dtype.type_size())
            }
            (WeightType::E4M3By32 | WeightType::E4M3By128 | WeightType::E5M2By32, None) => {
                pack::scaled(raw, rows, cols, dtype.block_size())
            }
            (other, None) => return Err(unsupported(OP, format!("weights of type {other:?}"))),
        };
        Ok(Self { first: 0, rows, dtype, panel_bytes, data })
    }

    /// Whether it has integer codes, which are multiplied with rounded activations.
    fn rounds_activations(&self) -> bool {
        format::of(self.dtype).is_some()
    }

    fn panel_count(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    fn panels(&self, range: Range<usize>) -> &[u8] {
        &self.data[range.start * self.panel_bytes..range.end * self.panel_bytes]
    }

    /// Outputs of the whole matrix that some panels of this part produce.
    fn outputs(&self, panels: &Range<usize>) -> Range<usize> {
        self.first + panels.start * LANES..self.first + self.rows.min(panels.end * LANES)
    }
}

impl std::fmt::Debug for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Weight[{}, {}]", self.rows, self.cols)
    }
}

impl Weight {
    /// Whether any of its rows are multiplied with rounded activations.
    pub(crate) fn rounds_activations(&self) -> bool {
        self.parts.iter().any(WeightPart::rounds_activations)
    }

    /// Whether no number that a code stands for takes more than seven bits.
    #[cfg(target_arch = "x86_64")]
    fn has_small_codes(&self) -> bool {
        let is_small = |format: format::Format| format.largest_code() < 128;
        self.parts.iter().filter_map(|part| format::of(part.dtype)).all(is_small)
    }

    /// Makes a weight of raw little-endian blocks (F32, F16, BF16 and every block type), row-major
    /// `[rows, cols]`.
    pub fn from_ggml(dtype: WeightType, raw: &[u8], rows: usize, cols: usize) -> Result<Self> {
        Self::packed(&Compute::new(1), dtype, raw, rows, cols)
    }

    /// [`Self::from_ggml`] by several threads.
    pub fn packed(
        c: &Compute,
        dtype: WeightType,
        raw: &[u8],
        rows: usize,
        cols: usize,
    ) -> Result<Self> {
        let parts = vec![WeightPart::new(c, dtype, raw, rows, cols)?];
        Ok(Self { rows, cols, parts, order: None })
    }

    /// The same weight, whose column `i` is for the input `order[i]`. Products gather the inputs in
    /// this order first; rows that are read have their values in the order of the inputs.
    ///
    /// # Errors
    /// `order` must have each of the columns once.
    pub fn with_order(self, order: Arc<[u32]>) -> Result<Self> {
        let mut seen = vec![false; self.cols];
        let is_new = |input: &u32| {
            seen.get_mut(*input as usize).is_some_and(|seen| !std::mem::replace(seen, true))
        };
        let is_order = order.len() == self.cols && order.iter().all(is_new);
        ensure(OP, is_order, || format!("no order of {} columns", self.cols))?;
        Ok(Self { order: Some(order), ..self })
    }

    /// Rows of inputs in the order of the columns.
    fn gathered<'a>(&self, x: &'a [f32]) -> Cow<'a, [f32]> {
        let Some(order) = &self.order else { return Cow::Borrowed(x) };
        let rows = x.chunks_exact(self.cols);
        rows.flat_map(|row| order.iter().map(|input| row[*input as usize])).collect()
    }

    /// Stacks matrices along the output dimension.
    pub fn stack(parts: Vec<Weight>) -> Result<Self> {
        let cols = parts.first().map_or(0, |w| w.cols);
        let order = parts.first().and_then(|w| w.order.clone());
        let mut whole = Self { rows: 0, cols, parts: Vec::new(), order };
        for weight in parts {
            let other = weight.cols;
            ensure(OP, other == cols, || {
                format!("stacked matrices have {cols} and {other} columns")
            })?;
            ensure(OP, weight.order == whole.order, || {
                "stacked matrices have their columns in different orders".into()
            })?;
            let first = whole.rows;
            whole.rows += weight.rows;
            let moved = |part: WeightPart| WeightPart { first: first + part.first, ..part };
            whole.parts.extend(weight.parts.into_iter().map(moved));
        }
        Ok(whole)
    }

    /// The same matrix dequantised to f32 (the exactness reference mode).
    pub fn to_f32(&self) -> Result<Self> {
        let mut values = vec![0f32; self.cols];
        let row_bytes = size_of_val(&values[..]);
        let mut bytes = vec![0; self.rows * row_bytes];
        for (row, out) in bytes.chunks_exact_mut(row_bytes.max(1)).enumerate() {
            self.row_f32(row, &mut values);
            f32::encode(&values, out);
        }
        Self::from_ggml(WeightType::F32, &bytes, self.rows, self.cols)
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Whether any part is block-quantised.
    pub fn is_quantised(&self) -> bool {
        !self.parts.iter().all(|part| part.dtype.is_dense())
    }

    /// Whether it consists of `count` matrices of equal rows and parts, one below the other.
    pub(crate) fn is_stack_of(&self, count: usize) -> bool {
        let (parts, rows) = (self.parts.len() / count, self.rows / count);
        parts > 0
            && self.rows == count * rows
            && self.parts.len() == count * parts
            && (0..count).all(|i| self.parts[i * parts].first == i * rows)
    }

    /// Bytes of memory held.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.data.len()).sum()
    }

    /// Dequantises one row (`out.len() == cols`): embedding look-up from a tied matrix.
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "a row has as many values as columns");
        let holds = |part: &&WeightPart| (part.first..part.first + part.rows).contains(&row);
        let part = self.parts.iter().find(holds).expect("invariant: the row is one of this matrix");
        values::row(part, row - part.first, out);
        if let Some(order) = &self.order {
            let stored = out.to_vec();
            for (input, value) in order.iter().zip(stored) {
                out[*input as usize] = value;
            }
        }
    }
}
