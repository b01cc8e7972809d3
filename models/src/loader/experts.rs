//! The matrices of a layer's experts, in each of the forms in which files keep them.

use super::store::Raw;
use super::tensors::{Reading, TensorBytes, Tensors};
use cresset_kernels::OpMemory;
use cresset_kernels::linear::WeightType;

impl<M: OpMemory> Tensors<'_, M> {
    /// Takes the matrices of experts, each of which is in a tensor of its own.
    pub fn expert_stack(&mut self, parts: &[(&str, usize)], cols: usize) -> Option<M::Matrix> {
        let found = self.raws(parts, cols)?;
        let raws: Vec<Raw> = found.iter().map(|found| found.raw()).collect();
        let stacked = self.store.experts(&raws);
        self.keep(parts[0].0, stacked)
    }

    /// Takes the matrices `[rows, cols]` of experts from tensors that hold one of each expert, one
    /// below the other: the first expert's of all the tensors come first. `shared_out`: the number
    /// of matrices in a tensor each of which ranks share, with as many rows each.
    pub fn experts(
        &mut self,
        names: &[&str],
        [experts, rows, cols]: [usize; 3],
        shared_out: usize,
    ) -> Option<M::Matrix> {
        let each = experts * rows / shared_out;
        let found: Vec<_> =
            names.iter().map(|name| self.raw_of_matrices(name, shared_out, [each, cols])).collect();
        let found: Vec<_> = found.into_iter().collect::<Option<_>>()?;
        let reading = self.reading;
        let of_expert = |expert: usize| {
            found.iter().map(move |all| match reading {
                Reading::Whole => all.raw().slice(expert * rows, rows),
                Reading::Headers => Raw { rows, ..all.raw() },
            })
        };
        let raws: Vec<Raw> = (0..experts).flat_map(of_expert).collect();
        let stacked = self.store.experts(&raws);
        self.keep(names[0], stacked)
    }

    /// Takes a tensor of `matrices` matrices `[rows, cols]`, one below the other.
    fn raw_of_matrices(
        &mut self,
        name: &str,
        matrices: usize,
        [rows, cols]: [usize; 2],
    ) -> Option<TensorBytes> {
        let cut = self.share.cut(name);
        self.raw_of_rows(name, &vec![(rows, cut.rows); matrices], (cols, cut.columns))
    }

    /// Takes the matrices `[rows, cols]` of experts from one tensor as GPT-OSS has it: the rows of
    /// `parts` matrices take turns, and values that are not MXFP4 are transposed.
    pub fn experts_in_turn(
        &mut self,
        name: &str,
        [experts, rows, cols]: [usize; 3],
        parts: usize,
    ) -> Option<M::Matrix> {
        let transposed = self.dtype(name) != Some(WeightType::MXFP4);
        let [height, width] = if transposed { [cols, rows] } else { [rows, cols] };
        // Where rows take turns, neighbouring ones belong to the same rank.
        let cut = self.share.cut(name);
        let cut = if transposed { cut.transposed() } else { cut };
        let all_rows = vec![(height, cut.rows); experts];
        let found = self.raw_of_rows(name, &all_rows, (width, cut.columns))?;
        let raw = found.raw();
        let bytes: Vec<Vec<u8>> = match self.reading {
            Reading::Whole => (0..experts)
                .map(|expert| in_rows(raw.slice(expert * height, height), transposed, parts))
                .collect(),
            Reading::Headers => vec![Vec::new(); experts],
        };
        let expert = |bytes| Raw { bytes, rows, cols, ..raw };
        let raws: Vec<Raw> = bytes.iter().map(|bytes| expert(bytes)).collect();
        let stacked = self.store.experts(&raws);
        self.keep(name, stacked)
    }

    /// Takes the biases `[experts, len]` of each part of the experts, and puts those of an expert
    /// one after the other. Within a tensor the values of `turns` parts may take turns.
    pub fn expert_bias(
        &mut self,
        names: &[&str],
        [experts, len]: [usize; 2],
        turns: usize,
    ) -> Option<M::Buffer> {
        let found: Vec<_> = names.iter().map(|name| self.values(name, &[experts, len])).collect();
        let found: Vec<Vec<f32>> = found.into_iter().collect::<Option<_>>()?;
        let mut bias = Vec::with_capacity(experts * len * names.len());
        for expert in 0..experts {
            for values in found.iter().map(|all| &all[expert * len..(expert + 1) * len]) {
                bias.extend(in_turn(len, turns).map(|at| values[at]));
            }
        }
        let kept = self.store.bias(bias);
        self.keep(names[0], kept)
    }
}

/// The numbers below `len`, of which each `turns`-th belongs to one part, by part.
fn in_turn(len: usize, turns: usize) -> impl Iterator<Item = usize> {
    (0..turns).flat_map(move |part| (part..len).step_by(turns))
}

/// The rows of a matrix, whose parts take turns, by part.
pub(super) fn in_rows(one: Raw, transposed: bool, parts: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(one.bytes.len());
    if !transposed {
        in_turn(one.rows, parts).for_each(|row| out.extend_from_slice(one.slice(row, 1).bytes));
        return out;
    }
    let size = one.dtype.type_size();
    for row in in_turn(one.cols, parts) {
        let column = one.bytes.chunks_exact(size).skip(row).step_by(one.cols);
        column.for_each(|value| out.extend_from_slice(value));
    }
    out
}
