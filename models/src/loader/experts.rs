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

    /// Takes the matrices `[rows, cols]` of experts from one tensor that has each transposed,
    /// unless they are in MXFP4. A matrix has `parts` of as many rows, which may take turns.
    pub fn transposed_experts(
        &mut self,
        name: &str,
        [experts, rows, cols]: [usize; 3],
        parts: usize,
        in_turn: bool,
    ) -> Option<M::Matrix> {
        let transposed = self.dtype(name) != Some(WeightType::MXFP4);
        let cut = self.share.cut(name);
        let [height, width] = [cut.rows.whole(rows), cut.columns.whole(cols)];
        let [stored_rows, stored_cols] = if transposed { [width, height] } else { [height, width] };
        let found = self.read(name, &[experts * stored_rows, stored_cols])?;
        let (raw, turns) = (found.raw(), if in_turn { parts } else { 1 });
        let own_rows = vec![(rows / parts, cut.rows); parts];
        let mut own = Vec::with_capacity(experts);
        for expert in 0..experts {
            let bytes = match self.reading {
                Reading::Whole => {
                    in_rows(raw.slice(expert * stored_rows, stored_rows), transposed, turns)
                }
                Reading::Headers => Vec::new(),
            };
            let whole = Raw { bytes: &bytes, rows: height, cols: width, ..raw };
            let is_cut = (height, width) != (rows, cols);
            let share = is_cut.then(|| self.share_of(name, &whole, &own_rows, cut.columns));
            own.push(share.unwrap_or(Some(bytes))?);
        }
        let raws: Vec<Raw> = own.iter().map(|bytes| Raw { bytes, rows, cols, ..raw }).collect();
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
