//! Matrices of Hugging Face's files whose codes, scales and zeros are in tensors of their own: as
//! FP8, compressed-tensors, GPTQ and AWQ have them. A reader makes one entry of the tensors of a
//! matrix, and of their bytes the blocks of a `WeightType`, which hold the same numbers.

mod codes;
pub(crate) mod form;
mod matrix;
#[cfg(test)]
mod tests;

use super::file::Bytes;
use super::mxfp4;
use super::shard_entry::ShardEntry;
pub(crate) use form::{CodeLayout, Quantisation};
use form::{ColumnOrder, JoinedForm, JoinedTensor, MatrixRefusal, PackedMatrix};
use safetensors::tensor::Dtype;
use std::collections::BTreeMap;

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
