//! What a quantised matrix is, as the types and shapes of its tensors tell.

use super::form::{CodeLayout, MatrixRefusal, PackedMatrix, Quantisation};
use crate::loader::shard_entry::ShardEntry;
use cresset_kernels::linear::WeightType;
use safetensors::tensor::Dtype;

type Fitting<T = ()> = Result<T, MatrixRefusal>;

/// Why a matrix is refused whose tensors contradict each other.
pub(super) fn damaged<T>(what: String) -> Fitting<T> {
    Err(MatrixRefusal::Damaged(what))
}

impl PackedMatrix {
    /// `parts` are codes, scales, zeros and groups of columns.
    pub(super) fn new(
        quantisation: &Quantisation,
        parts: [Option<&ShardEntry>; 4],
    ) -> Fitting<Self> {
        let [Some(codes), Some(scales), zeros, order] = parts else {
            return damaged("has no scales beside its codes".into());
        };
        let matrix = Self::of_codes(quantisation, codes, scales)?;
        matrix.check_scales(scales)?;
        matrix.check_zeros(zeros)?;
        if let Some(order) = order {
            matrix.check_part("groups of columns", order, Dtype::I32, &[matrix.cols])?;
        }
        let zeros = zeros.map(|zeros| zeros.stored);
        Ok(Self { zeros, ordered: order.is_some(), ..matrix })
    }

    fn of_codes(
        quantisation: &Quantisation,
        codes: &ShardEntry,
        scales: &ShardEntry,
    ) -> Fitting<Self> {
        let &Quantisation { layout, bits, .. } = quantisation;
        let shape = quantisation.shape(codes)?;
        let [rows, cols] = [shape[shape.len() - 2], shape[shape.len() - 1]];
        if shape.contains(&0) {
            return damaged(format!("has the shape {shape:?}"));
        }
        let grid = quantisation.grid(rows, cols, scales);
        let bits = if layout == CodeLayout::Bytes { 8 } else { bits };
        let dtype = quantisation.block_type(codes.stored, grid[1], cols)?;
        let (scales, zeros, ordered) = (scales.stored, None, false);
        Ok(Self { layout, bits, dtype, shape, rows, cols, grid, scales, zeros, ordered })
    }

    /// The numbers of rows and of columns of scales, of all matrices.
    pub(super) fn scale_counts(&self) -> [usize; 2] {
        let matrices: usize = self.shape[..self.shape.len() - 2].iter().product();
        let [rows, cols] = self.grid;
        [matrices * self.rows.div_ceil(rows), self.cols.div_ceil(cols)]
    }

    /// Codes of a word.
    pub(super) fn per_word(&self) -> usize {
        32 / self.bits
    }

    pub(super) fn is_float(&self) -> bool {
        self.dtype.name().starts_with('F')
    }

    fn check_scales(&self, scales: &ShardEntry) -> Fitting {
        let [height, width] = self.scale_counts();
        let known = match scales.stored {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 => true,
            // Powers of two.
            Dtype::F8_E8M0 => self.is_float(),
            _ => false,
        };
        if !known {
            return damaged(format!("has scales of the type {:?}", scales.stored));
        }
        match self.layout {
            CodeLayout::Bytes | CodeLayout::Rows => {
                self.check_shape("scales", scales, &self.shape_of_scales())
            }
            _ => self.check_shape("scales", scales, &[width, height]),
        }
    }

    fn check_zeros(&self, zeros: Option<&ShardEntry>) -> Fitting {
        const WHAT: &str = "zeros";
        let [height, width] = self.scale_counts();
        let words = height.div_ceil(self.per_word());
        match (self.layout, zeros) {
            (CodeLayout::Bytes | CodeLayout::Rows, None) => Ok(()),
            (_, None) => damaged("has no zeros beside its codes".into()),
            (_, Some(_)) if self.is_float() => damaged("has zeros beside floats".into()),
            (CodeLayout::Rows, Some(zeros)) if zeros.stored == Dtype::I32 => {
                self.check_shape(WHAT, zeros, &[words, width])
            }
            (CodeLayout::Bytes | CodeLayout::Rows, Some(zeros)) => {
                self.check_part(WHAT, zeros, Dtype::I8, &self.shape_of_scales())
            }
            (_, Some(zeros)) => self.check_part(WHAT, zeros, Dtype::I32, &[width, words]),
        }
    }

    /// The shape of scales that are in the order of the matrices' rows.
    fn shape_of_scales(&self) -> Vec<usize> {
        let [rows, cols] = [self.rows.div_ceil(self.grid[0]), self.cols.div_ceil(self.grid[1])];
        [&self.shape[..self.shape.len() - 2], &[rows, cols]].concat()
    }

    fn check_part(&self, what: &str, part: &ShardEntry, stored: Dtype, shape: &[usize]) -> Fitting {
        if part.stored != stored {
            return damaged(format!("has {what} of the type {:?}", part.stored));
        }
        self.check_shape(what, part, shape)
    }

    /// Dimensions of one count for nothing: a scale may have no dimension, or several.
    fn check_shape(&self, what: &str, part: &ShardEntry, shape: &[usize]) -> Fitting {
        let sizes = |shape: &[usize]| shape.iter().copied().filter(|n| *n != 1).collect::<Vec<_>>();
        if sizes(&part.shape) == sizes(shape) {
            return Ok(());
        }
        damaged(format!(
            "of {:?} has {what} of shape {:?} instead of {shape:?}",
            self.shape, part.shape
        ))
    }
}

impl Quantisation {
    /// The shape of a matrix with such codes.
    fn shape(&self, codes: &ShardEntry) -> Fitting<Vec<usize>> {
        let widened = |words: usize| words.saturating_mul(32 / self.bits);
        let packed = codes.stored == Dtype::I32;
        match (self.layout, &codes.shape[..]) {
            (CodeLayout::Bytes, shape @ [.., _, _]) => Ok(shape.to_vec()),
            (CodeLayout::Rows, &[rows, words]) if packed => Ok(vec![rows, widened(words)]),
            (CodeLayout::Gptq { .. }, &[words, rows]) if packed => Ok(vec![rows, widened(words)]),
            (CodeLayout::Awq, &[cols, words]) if packed => Ok(vec![widened(words), cols]),
            _ => {
                damaged(format!("has codes of shape {:?} and type {:?}", codes.shape, codes.stored))
            }
        }
    }

    /// Rows and columns that share a scale.
    fn grid(&self, rows: usize, cols: usize, scales: &ShardEntry) -> [usize; 2] {
        let own = scales.shape.iter().filter(|size| **size != 1).count();
        match self.block {
            Some(block) => block,
            None if own == 0 && self.layout == CodeLayout::Bytes => [rows, cols],
            None => [1, self.group.unwrap_or(cols)],
        }
    }

    /// The blocks that hold such codes, the widest first.
    fn block_types(&self, codes: Dtype) -> &'static [WeightType] {
        match (codes, self.bits) {
            (Dtype::F8_E4M3, _) => &[WeightType::E4M3By128, WeightType::E4M3By32],
            (Dtype::F8_E5M2, _) => &[WeightType::E5M2By32],
            (Dtype::I32, 4) => &[WeightType::Int4By128, WeightType::Int4By64, WeightType::Int4By32],
            _ => &[WeightType::Int8By128, WeightType::Int8By32],
        }
    }

    /// The widest blocks of which none has columns with different scales.
    fn block_type(&self, codes: Dtype, group: usize, cols: usize) -> Fitting<WeightType> {
        if self.block.is_none() && !cols.is_multiple_of(group) {
            return damaged(format!("has {cols} columns, which are no whole groups of {group}"));
        }
        let fits = |dtype: &&WeightType| {
            let width = dtype.block_size();
            cols.is_multiple_of(width) && (group.is_multiple_of(width) || group >= cols)
        };
        self.block_types(codes).iter().find(fits).copied().ok_or_else(|| {
            MatrixRefusal::Unsupported(format!(
                "has a scale for every {group} of its {cols} columns, and this build reads whole \
                 groups of 32: use the release's bf16, f16 or f32 files, or a GGUF file"
            ))
        })
    }
}
