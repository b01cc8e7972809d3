//! Matrices of Hugging Face's files whose codes, scales and zeros are in tensors of their own: as
//! FP8, compressed-tensors, GPTQ and AWQ have them. A reader makes one entry of the tensors of a
//! matrix, and of their bytes the blocks of a `WeightType`, which hold the same numbers.

mod codes;
mod matrix;
#[cfg(test)]
mod tests;

use super::file::Bytes;
use super::mxfp4;
use super::safetensors::ShardEntry;
use matrix::PackedMatrix;
use safetensors::tensor::Dtype;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How the matrices of a checkpoint are quantised, as its config says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantisation {
    pub layout: CodeLayout,
    /// Bits of a code.
    pub bits: usize,
    /// Rows and columns that share a scale, where it is for both.
    pub block: Option<[usize; 2]>,
    /// Columns of a row that share a scale; `None`: all.
    pub group: Option<usize>,
}

/// Where codes are, and how they are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeLayout {
    /// A float or a signed integer in each byte, under the matrix's own name: `[…, rows, cols]`.
    Bytes,
    /// compressed-tensors: words `[rows, cols / codes of a word]`, the first code in the lowest
    /// bits; zeros are packed along the rows.
    Rows,
    /// GPTQ: words `[cols / codes of a word, rows]`; zeros are packed along the rows. In the first
    /// version of the format they are stored less one.
    Gptq { zeros_less_one: bool },
    /// AWQ's "gemm": words `[cols, rows / 8]`, whose codes are in an order of their own.
    Awq,
}

/// The ends of the names of a matrix's tensors. They follow what its codes' name begins with.
struct PartNames {
    codes: &'static str,
    /// The end of the matrix's own name.
    whole: &'static str,
    scales: &'static [&'static str],
    zeros: &'static str,
    /// Those of the numbers of the columns' groups.
    order: &'static str,
}

const BYTES: PartNames = PartNames {
    codes: "",
    whole: "",
    scales: &["_scale_inv", "_scale"],
    zeros: "_zero_point",
    order: "_g_idx",
};
const ROWS: PartNames = PartNames { codes: "_packed", ..BYTES };
const WORDS: PartNames = PartNames {
    codes: "qweight",
    whole: "weight",
    scales: &["scales"],
    zeros: "qzeros",
    order: "g_idx",
};

/// The ends of names of tensors that nothing needs: activations and caches are wider here than
/// those that such scales are for, and a shape follows from those of codes.
const UNUSED: [&str; 8] = [
    ".weight_shape",
    ".activation_scale",
    ".input_scale",
    ".input_zero_point",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
];

/// Why a matrix is refused: its files are damaged, or sound but of a kind that this build does not
/// read.
#[derive(Debug)]
pub(super) enum MatrixRefusal {
    Damaged(String),
    Unsupported(String),
}

impl MatrixRefusal {
    /// The same, with the name of the matrix.
    pub(super) fn of(self, name: &str) -> Self {
        let named = |what: String| format!("tensor {name:?} {what}");
        match self {
            Self::Damaged(what) => Self::Damaged(named(what)),
            Self::Unsupported(what) => Self::Unsupported(named(what)),
        }
    }
}

/// The inputs of a matrix's columns, where those are not in the order of the inputs.
pub(crate) type ColumnOrder = Option<Arc<[u32]>>;

/// Tensors of the files that make up one matrix.
pub(super) struct JoinedTensor {
    /// Their names and shards, in the order in which `form` takes them.
    pub parts: Vec<(String, usize)>,
    pub form: JoinedForm,
}

pub(super) enum JoinedForm {
    /// Codes and scales of MXFP4.
    Mxfp4,
    Matrix(PackedMatrix),
}

impl JoinedTensor {
    /// The blocks of the matrix, from the bytes of its parts.
    pub(super) fn blocks(&self, parts: &[Bytes]) -> Result<(Vec<u8>, ColumnOrder), MatrixRefusal> {
        match &self.form {
            JoinedForm::Mxfp4 => Ok((mxfp4::blocks(&parts[0], &parts[1]), None)),
            JoinedForm::Matrix(matrix) => matrix.blocks(parts),
        }
    }
}

impl Quantisation {
    fn names(&self) -> &'static PartNames {
        match self.layout {
            CodeLayout::Bytes => &BYTES,
            CodeLayout::Rows => &ROWS,
            CodeLayout::Gptq { .. } | CodeLayout::Awq => &WORDS,
        }
    }

    /// The beginnings of the names of all matrices that are quantised.
    fn found(&self, entries: &BTreeMap<String, ShardEntry>) -> Vec<String> {
        let names = self.names();
        let is_codes = |name: &str, entry: &ShardEntry| match self.layout {
            CodeLayout::Bytes => {
                [Dtype::F8_E4M3, Dtype::F8_E5M2, Dtype::I8].contains(&entry.stored)
                    && !name.ends_with(names.zeros)
            }
            _ => true,
        };
        let base = |(name, entry): (&String, &ShardEntry)| {
            let base = name.strip_suffix(names.codes).filter(|_| is_codes(name, entry))?;
            Some(base.to_owned())
        };
        entries.iter().filter_map(base).collect()
    }
}

/// Makes one entry of the tensors of each matrix, and leaves out tensors that nothing needs.
pub(super) fn join(
    entries: &mut BTreeMap<String, ShardEntry>,
    quantisation: &Quantisation,
) -> Result<(), MatrixRefusal> {
    let names = quantisation.names();
    for base in quantisation.found(entries) {
        let whole = format!("{base}{}", names.whole);
        let joined = join_one(entries, quantisation, &base).map_err(|what| what.of(&whole))?;
        entries.insert(whole, joined);
    }
    entries.retain(|name, _| !UNUSED.iter().any(|end| name.ends_with(end)));
    Ok(())
}

/// Takes out the tensors of a matrix and makes one entry of them.
fn join_one(
    entries: &mut BTreeMap<String, ShardEntry>,
    quantisation: &Quantisation,
    base: &str,
) -> Result<ShardEntry, MatrixRefusal> {
    let names = quantisation.names();
    let mut take = |end: &str| entries.remove_entry(&format!("{base}{end}"));
    let codes = take(names.codes);
    let scales = names.scales.iter().find_map(|end| take(end));
    let (zeros, order) = (take(names.zeros), take(names.order));
    let forms = [&codes, &scales, &zeros, &order].map(|part| part.as_ref().map(|(_, entry)| entry));
    let matrix = PackedMatrix::new(quantisation, forms)?;
    let (shape, dtype) = (matrix.shape.clone(), matrix.dtype);
    let parts = [codes, scales, zeros, order].into_iter().flatten();
    let parts = parts.map(|(name, entry)| (name, entry.shard)).collect();
    let form = JoinedForm::Matrix(matrix);
    Ok(ShardEntry::joined(shape, dtype, JoinedTensor { parts, form }))
}
