//! The blocks of a quantised matrix, from the bytes of its tensors. Codes, scales and zeros are
//! moved and never rounded.

use super::form::{CodeLayout, ColumnOrder, MatrixRefusal, PackedMatrix};
use super::matrix::damaged;
use crate::loader::file::Bytes;
use crate::loader::store::Raw;
use cresset_kernels::linear::WeightType;
use safetensors::tensor::Dtype;
use std::borrow::Cow;

/// The code of a word, from its lowest bits on, of each of the eight outputs that AWQ puts into it.
const AWQ_PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
/// The code of E4M3 that stands for no number, but for its sign.
const NOT_A_NUMBER: u8 = 0x7f;

impl PackedMatrix {
    /// `parts` are the bytes of codes, scales, zeros and groups of columns, as far as it has them.
    pub(super) fn blocks(&self, parts: &[Bytes]) -> Result<(Vec<u8>, ColumnOrder), MatrixRefusal> {
        let mut parts = parts.iter();
        let mut next = || parts.next().expect("invariant: there are bytes of every tensor");
        let (codes, scales) = (self.codes(next())?, self.scales(next())?);
        let zeros = if self.zeros.is_some() { Some(self.zeros(next())?) } else { None };
        let order = if self.ordered { self.order(next())? } else { None };
        let blocks = match &order {
            Some(order) => self.put_together(&reordered(&codes, order), &scales, zeros.as_deref()),
            None => self.put_together(&codes, &scales, zeros.as_deref()),
        };
        Ok((blocks, order))
    }

    /// `codes` are all, row by row; scales and zeros are `[rows of scales, columns of scales]`.
    fn put_together(&self, codes: &[u8], scales: &[f32], zeros: Option<&[u8]>) -> Vec<u8> {
        let (columns, [tall, wide]) = (self.dtype.block_size(), self.grid);
        let [_, width] = self.scale_counts();
        let mut out = Vec::with_capacity(codes.len() / columns * self.dtype.type_size());
        for (row, codes) in codes.chunks_exact(self.cols).enumerate() {
            let above = row / self.rows * self.rows.div_ceil(tall) + row % self.rows / tall;
            for (block, codes) in codes.chunks_exact(columns).enumerate() {
                let at = above * width + block * columns / wide;
                out.extend(scales[at].to_le_bytes());
                if !self.is_float() {
                    out.push(zeros.map_or(1 << (self.bits - 1), |zeros| zeros[at]));
                }
                if self.bits == 4 {
                    out.extend(codes.as_chunks().0.iter().map(|[low, high]| low | high << 4));
                } else {
                    out.extend_from_slice(codes);
                }
            }
        }
        out
    }

    /// All codes, one in a byte, row by row.
    fn codes<'a>(&self, bytes: &'a [u8]) -> Result<Cow<'a, [u8]>, MatrixRefusal> {
        Ok(match self.layout {
            CodeLayout::Bytes if self.is_float() => {
                let is_e4m3 = self.dtype != WeightType::E5M2By32;
                if is_e4m3 && bytes.iter().any(|code| code & 0x7f == NOT_A_NUMBER) {
                    return damaged("has a code that stands for no number (NaN)".into());
                }
                Cow::Borrowed(bytes)
            }
            CodeLayout::Bytes => bytes.iter().map(|code| code ^ 0x80).collect(),
            CodeLayout::Rows => self.unpacked(bytes).into(),
            CodeLayout::Gptq { .. } => self.gptq_codes(bytes).into(),
            CodeLayout::Awq => self.awq_codes(bytes).into(),
        })
    }

    /// The codes of words, those in the lowest bits first.
    fn unpacked(&self, words: &[u8]) -> Vec<u8> {
        if self.bits == 8 {
            return words.to_vec();
        }
        words.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect()
    }

    /// Words `[cols / codes of a word, rows]`, each with codes of one row.
    fn gptq_codes(&self, words: &[u8]) -> Vec<u8> {
        let count = self.per_word();
        let mut codes = vec![0; self.rows * self.cols];
        for (i, word) in words.as_chunks::<4>().0.iter().enumerate() {
            let at = i % self.rows * self.cols + i / self.rows * count;
            codes[at..at + count].copy_from_slice(&self.unpacked(word));
        }
        codes
    }

    /// Words `[cols, rows / 8]`, each with codes of one column.
    fn awq_codes(&self, words: &[u8]) -> Vec<u8> {
        let mut codes = vec![0; self.rows * self.cols];
        let per_column = self.rows / AWQ_PLACES.len();
        for (i, word) in words.as_chunks::<4>().0.iter().enumerate() {
            let (column, first) = (i / per_column, i % per_column * AWQ_PLACES.len());
            for (row, place) in AWQ_PLACES.iter().enumerate() {
                let code = word[place / 2] >> (place % 2 * 4) & 15;
                codes[(first + row) * self.cols + column] = code;
            }
        }
        codes
    }

    fn scales(&self, bytes: &[u8]) -> Result<Vec<f32>, MatrixRefusal> {
        let values = |dtype: WeightType| {
            let cols = bytes.len() / dtype.type_size();
            let raw = Raw { dtype, bytes, rows: 1, cols, order: None };
            raw.values().map_err(|error| MatrixRefusal::Damaged(error.to_string()))
        };
        let scales = match self.scales {
            Dtype::F32 => values(WeightType::F32)?,
            Dtype::F16 => values(WeightType::F16)?,
            Dtype::BF16 => values(WeightType::BF16)?,
            _ => bytes.iter().map(|exponent| 2f32.powi(i32::from(*exponent) - 127)).collect(),
        };
        if scales.iter().any(|scale| !scale.is_finite()) {
            return damaged("has a scale that is not finite".into());
        }
        Ok(self.by_rows(|row, group, [height, width]| match self.layout {
            CodeLayout::Bytes | CodeLayout::Rows => scales[row * width + group],
            _ => scales[group * height + row],
        }))
    }

    /// The codes that mean zero.
    fn zeros(&self, bytes: &[u8]) -> Result<Vec<u8>, MatrixRefusal> {
        if self.zeros == Some(Dtype::I8) {
            return Ok(bytes.iter().map(|zero| zero.wrapping_add(1 << (self.bits - 1))).collect());
        }
        let (words, count) = (self.unpacked(bytes), self.per_word());
        let of_row =
            |row: usize, group: usize, height: usize| group * height.next_multiple_of(count) + row;
        let zeros = self.by_rows(|row, group, [height, width]| match self.layout {
            CodeLayout::Awq => {
                words[of_row(row - row % count + AWQ_PLACES[row % count], group, height)]
            }
            CodeLayout::Gptq { .. } => words[of_row(row, group, height)],
            _ => words[(row / count * width + group) * count + row % count],
        });
        let less_one = self.layout == (CodeLayout::Gptq { zeros_less_one: true });
        if less_one { self.one_more(&zeros) } else { Ok(zeros) }
    }

    /// The zeros that are stored less one.
    fn one_more(&self, zeros: &[u8]) -> Result<Vec<u8>, MatrixRefusal> {
        let largest = u8::MAX >> (8 - self.bits);
        if zeros.contains(&largest) {
            return damaged(format!(
                "has a zero that is stored as {largest}, which stands for 0 to some programs and \
                 for {} to others",
                u32::from(largest) + 1
            ));
        }
        Ok(zeros.iter().map(|zero| zero + 1).collect())
    }

    /// A value for each row and group of columns: `value` gets their numbers and counts.
    fn by_rows<T>(&self, value: impl Fn(usize, usize, [usize; 2]) -> T) -> Vec<T> {
        let counts = self.scale_counts();
        let at = |i: usize| value(i / counts[1], i % counts[1], counts);
        (0..counts[0] * counts[1]).map(at).collect()
    }

    /// The order of the columns in which their groups follow one another, where the files have them
    /// in another one: those of a group stand as they stood (`desc_act`, `actorder`).
    fn order(&self, bytes: &[u8]) -> Result<ColumnOrder, MatrixRefusal> {
        let ([_, count], width) = (self.scale_counts(), self.grid[1]);
        let mut groups = vec![Vec::new(); count];
        for (column, group) in (0..).zip(bytes.as_chunks().0) {
            let group = i32::from_le_bytes(*group);
            let Some(columns) = usize::try_from(group).ok().and_then(|at| groups.get_mut(at))
            else {
                return damaged(format!(
                    "has a column of the group {group}, and there are {count}"
                ));
            };
            columns.push(column);
        }
        let sizes = || groups.iter().map(Vec::len).enumerate();
        if let Some((group, size)) = sizes().find(|(_, size)| *size != width.min(self.cols)) {
            return Err(MatrixRefusal::Unsupported(format!(
                "has {size} columns in the group {group} instead of {width}, which this build \
                 cannot read: use files that were made without desc_act, or a GGUF file"
            )));
        }
        let order: Vec<u32> = groups.concat();
        Ok((!order.is_sorted()).then(|| order.into()))
    }
}

/// The codes of each row in another order.
fn reordered(codes: &[u8], order: &[u32]) -> Vec<u8> {
    let rows = codes.chunks_exact(order.len());
    rows.flat_map(|row| order.iter().map(|column| row[*column as usize])).collect()
}
