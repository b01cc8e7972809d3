//! Weight matrices in the machine's memory.

use super::format;
use super::pack;
use super::weight_type::WeightType;
use crate::error::{ensure, unsupported};
use crate::gpu::DeviceElement;
use crate::memory::RegionBytes;
use crate::simd::LANES;
use crate::{Compute, Result};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

pub(super) const OP: &str = "linear";

/// A weight matrix `[rows (outputs), cols (inputs)]`, prepared for this CPU. Several matrices with
/// the same `cols` may be stacked into one (fused QKV, gate-up), each part keeping its own type.
pub struct Weight {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) parts: Vec<WeightPart>,
    /// The inputs of its columns, where those are stored in another order.
    pub(super) order: Option<Arc<[u32]>>,
}

/// Rows of one type, in panels of sixteen.
pub(super) struct WeightPart {
    /// Its first row in the whole matrix.
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) dtype: WeightType,
    pub(super) panel_bytes: usize,
    pub(super) data: RegionBytes,
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
    pub(super) fn rounds_activations(&self) -> bool {
        format::of(self.dtype).is_some()
    }

    pub(super) fn panel_count(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    pub(super) fn panels(&self, range: Range<usize>) -> &[u8] {
        &self.data[range.start * self.panel_bytes..range.end * self.panel_bytes]
    }

    /// Outputs of the whole matrix that some panels of this part produce.
    pub(super) fn outputs(&self, panels: &Range<usize>) -> Range<usize> {
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
    pub(super) fn has_small_codes(&self) -> bool {
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
    pub(super) fn gathered<'a>(&self, x: &'a [f32]) -> Cow<'a, [f32]> {
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
}
