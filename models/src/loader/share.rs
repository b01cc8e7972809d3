//! Cuts out of each tensor what one of several ranks needs of it. The first matrices of attention
//! and of MLPs are shared out by rows, so that each rank has some heads and some inner values; the
//! second ones by columns, so that each rank computes a part of every sum. The other tensors are
//! the same on all ranks. Shoeybi et al. 2019, "Megatron-LM".

use super::store::Raw;
use cresset_kernels::gpu::Rank;
use std::ops::Range;

/// The rank whose shares are loaded.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RankShare {
    pub rank: Rank,
    /// Into how many parts the KV heads of the layer under way are shared out. It is less than the
    /// number of ranks where some ranks have the same head.
    pub kv_parts: usize,
}

/// One of several equal parts along an axis of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AxisPart {
    count: usize,
    number: usize,
}

/// The part of each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AxisParts {
    pub rows: AxisPart,
    pub columns: AxisPart,
}

impl AxisPart {
    pub(super) const WHOLE: Self = Self { count: 1, number: 0 };
    pub(super) const HALVES: [Self; 2] =
        [Self { count: 2, number: 0 }, Self { count: 2, number: 1 }];

    /// The length of the whole axis.
    pub(super) fn whole(self, own: usize) -> usize {
        own * self.count
    }

    fn range(self, own: usize) -> Range<usize> {
        self.number * own..(self.number + 1) * own
    }
}

impl AxisParts {
    /// The cut of the transposed tensor.
    pub(super) fn transposed(self) -> Self {
        Self { rows: self.columns, columns: self.rows }
    }
}

/// Whether a tensor is a vector, or has one for each expert.
fn is_vector(name: &str) -> bool {
    matches!(name.rsplit('.').next(), Some("bias" | "sinks"))
}

/// The name of the module that a tensor belongs to, without those around it.
fn module(name: &str) -> &str {
    let module = [".weight", ".bias"].iter().find_map(|end| name.strip_suffix(end));
    module.unwrap_or(name).rsplit('.').next().unwrap_or_default()
}

impl RankShare {
    /// How this rank's share is cut out of the tensor with this name.
    pub(super) fn cut(&self, name: &str) -> AxisParts {
        let rows = match module(name) {
            "q_proj" | "q_b_proj" | "kv_b_proj" | "k_b_proj" | "v_b_proj" | "sinks"
            | "gate_proj" | "up_proj" | "gate_up_proj" => self.own(),
            "k_proj" | "v_proj" => self.own_kv(),
            "o_proj" | "down_proj" if !is_vector(name) => {
                return AxisParts { rows: AxisPart::WHOLE, columns: self.own() };
            }
            _ => AxisPart::WHOLE,
        };
        let cut = AxisParts { rows, columns: AxisPart::WHOLE };
        // A vector is read as one row.
        if is_vector(name) { cut.transposed() } else { cut }
    }

    /// The part of what is shared out evenly.
    pub(super) fn own(&self) -> AxisPart {
        AxisPart { count: self.rank.count, number: self.rank.number }
    }

    /// The part of the KV heads.
    pub(super) fn own_kv(&self) -> AxisPart {
        let count = self.kv_parts.max(1);
        AxisPart { count, number: self.rank.number * count / self.rank.count }
    }

    /// Whether another rank adds this bias to a sum to which all ranks contribute.
    pub(super) fn leaves_to_others(&self, name: &str) -> bool {
        let sums = matches!(module(name), "o_proj" | "down_proj");
        self.rank.number > 0 && is_vector(name) && sums
    }
}

/// The bytes of a rank's share of a matrix. `rows`: the number of this rank's rows in each of the
/// matrices that lie one below the other, and which part of that matrix they are.
///
/// # Errors
/// When the columns cannot be cut there. The text says why.
pub(super) fn share_of(
    whole: &Raw,
    rows: &[(usize, AxisPart)],
    columns: AxisPart,
) -> Result<Vec<u8>, String> {
    let (all, block) = (whole.cols, whole.dtype.block_size());
    let own = columns.range(all / columns.count);
    if own.len() < all && whole.order.is_some() {
        return Err("its columns are in an order of their own".into());
    }
    if !own.start.is_multiple_of(block) || !own.len().is_multiple_of(block) {
        let (dtype, own) = (whole.dtype.name(), own.len());
        return Err(format!(
            "{own} of its {all} columns are no whole blocks of {block} in {dtype}"
        ));
    }
    let size = whole.dtype.type_size();
    let bytes = own.start / block * size..own.end / block * size;
    let (mut share, mut first) = (Vec::new(), 0);
    for &(len, part) in rows {
        let own = whole.slice(first + part.range(len).start, len);
        first += part.whole(len);
        for row in own.bytes.chunks_exact(whole.stride().max(1)) {
            share.extend_from_slice(&row[bytes.clone()]);
        }
    }
    Ok(share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_kernels::linear::WeightType;

    fn share(number: usize, count: usize, kv_parts: usize) -> RankShare {
        RankShare { rank: Rank { number, count }, kv_parts }
    }

    #[test]
    fn names_tell_how_tensors_are_cut() {
        let (whole, own) = (AxisPart::WHOLE, AxisPart { count: 4, number: 3 });
        let kv = AxisPart { count: 2, number: 1 };
        let check = |name: &str, rows, columns| {
            let found = share(3, 4, 2).cut(&format!("model.layers.0.{name}"));
            assert_eq!(found, AxisParts { rows, columns }, "{name}");
        };
        check("self_attn.q_proj.weight", own, whole);
        check("self_attn.q_proj.bias", whole, own);
        check("self_attn.k_proj.weight", kv, whole);
        check("self_attn.v_proj.bias", whole, kv);
        check("self_attn.o_proj.weight", whole, own);
        check("self_attn.o_proj.bias", whole, whole);
        check("self_attn.sinks", whole, own);
        check("self_attn.kv_a_proj_with_mqa.weight", whole, whole);
        check("self_attn.kv_b_proj.weight", own, whole);
        check("self_attn.q_norm.weight", whole, whole);
        check("mlp.experts.7.gate_proj.weight", own, whole);
        check("mlp.experts.gate_up_proj", own, whole);
        check("mlp.experts.gate_up_proj.bias", whole, own);
        check("mlp.experts.down_proj", whole, own);
        check("mlp.gate.weight", whole, whole);
        check("mlp.shared_expert.down_proj.weight", whole, own);
        check("mlp.shared_expert_gate.weight", whole, whole);
        check("linear_attn.in_proj_qkv.weight", whole, whole);
        check("conv.out_proj.weight", whole, whole);
        assert!(share(1, 2, 2).leaves_to_others("mlp.down_proj.bias"));
        assert!(!share(0, 2, 2).leaves_to_others("mlp.down_proj.bias"));
        assert!(!share(1, 2, 2).leaves_to_others("mlp.up_proj.bias"));
        assert!(!share(1, 2, 2).leaves_to_others("mlp.down_proj.weight"));
    }

    #[test]
    fn a_share_has_its_rows_and_columns() {
        let bytes: Vec<u8> = (0..36).collect();
        let whole = Raw { dtype: WeightType::F16, bytes: &bytes, rows: 3, cols: 6, order: None };
        let check = |rows: &[(usize, AxisPart)], columns, expect: &[u8]| {
            assert_eq!(share_of(&whole, rows, columns).unwrap(), expect);
        };
        let second = AxisPart { count: 2, number: 1 };
        let third = AxisPart { count: 3, number: 2 };
        check(&[(3, AxisPart::WHOLE)], AxisPart::WHOLE, &bytes);
        check(&[(1, third)], AxisPart::WHOLE, &bytes[24..]);
        check(&[(1, second), (1, AxisPart::WHOLE)], AxisPart::WHOLE, &bytes[12..]);
        check(&[(1, AxisPart::WHOLE), (1, second)], third, &[8, 9, 10, 11, 32, 33, 34, 35]);
    }

    #[test]
    fn columns_are_cut_between_blocks_alone() {
        let bytes = vec![0; 2 * 18];
        let whole = Raw { dtype: WeightType::Q4_0, bytes: &bytes, rows: 1, cols: 64, order: None };
        let rows = [(1, AxisPart::WHOLE)];
        let part = |count| AxisPart { count, number: 0 };
        assert_eq!(share_of(&whole, &rows, part(2)).unwrap().len(), 18);
        let why = share_of(&whole, &rows, part(4)).unwrap_err();
        assert_eq!(why, "16 of its 64 columns are no whole blocks of 32 in Q4_0");
        let order = (0..64).rev().collect::<Vec<_>>().into();
        let ordered = Raw { order: Some(&order), ..whole };
        assert!(share_of(&ordered, &rows, part(2)).unwrap_err().contains("order of their own"));
        assert!(share_of(&ordered, &rows, part(1)).is_ok());
    }
}
