//! The forms of quantised matrices: as a config describes them, and as tensors make them up.

use cresset_kernels::linear::WeightType;
use safetensors::tensor::Dtype;
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

/// A matrix, or several of one size, of codes with scales.
pub(in crate::loader) struct PackedMatrix {
    pub layout: CodeLayout,
    /// Bits of a stored code.
    pub bits: usize,
    /// The blocks that are made of it.
    pub dtype: WeightType,
    /// `[…, rows, cols]`
    pub shape: Vec<usize>,
    pub rows: usize,
    pub cols: usize,
    /// Rows and columns of a matrix that share a scale.
    pub grid: [usize; 2],
    pub scales: Dtype,
    pub zeros: Option<Dtype>,
    /// Whether the group of each column is stored.
    pub ordered: bool,
}

/// Why a matrix is refused: its files are damaged, or sound but of a kind that this build does not
/// read.
#[derive(Debug)]
pub(in crate::loader) enum MatrixRefusal {
    Damaged(String),
    Unsupported(String),
}

impl MatrixRefusal {
    /// The same, with the name of the matrix.
    pub(in crate::loader) fn of(self, name: &str) -> Self {
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
pub(in crate::loader) struct JoinedTensor {
    /// Their names and shards, in the order in which `form` takes them.
    pub parts: Vec<(String, usize)>,
    pub form: JoinedForm,
}

pub(in crate::loader) enum JoinedForm {
    /// Codes and scales of MXFP4.
    Mxfp4,
    Matrix(PackedMatrix),
}
