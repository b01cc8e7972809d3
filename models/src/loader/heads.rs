//! Matrices whose rows belong to the heads of attention.

use super::experts::in_rows;
use super::store::Raw;
use super::tensors::{Optional, Reading, TensorBytes, Tensors};
use crate::Result;
use crate::config::LatentConfig;
use crate::spec::Presence;
use cresset_kernels::OpMemory;
use cresset_kernels::gpu::DeviceElement;
use cresset_kernels::linear::WeightType;

/// Divides a tensor that has for each head some rows of one part, then of the next: returns the
/// rows of each part, head by head.
pub(super) fn rows_of_parts<const N: usize>(
    whole: &TensorBytes,
    parts: [usize; N],
    reading: Reading,
) -> [Vec<u8>; N] {
    let raw = whole.raw();
    let rows = if reading == Reading::Whole { raw.rows } else { 0 };
    let mut next = 0;
    parts.map(|len| {
        let first = next;
        next += len;
        let heads = (first..rows).step_by(parts.iter().sum());
        heads.flat_map(|row| raw.slice(row, len).bytes).copied().collect()
    })
}

impl<M: OpMemory> Tensors<'_, M> {
    /// Takes biases as [`Self::bias_if`] does; the last one is there twice.
    pub fn bias_with_copy(
        &mut self,
        presence: Presence,
        parts: &[(&str, usize)],
    ) -> Option<Optional<M::Buffer>> {
        let Some(mut found) = self.biases(presence, parts)? else { return Some(None) };
        found.extend(found.last().cloned());
        self.bias(parts[0].0, &found).map(Some)
    }

    /// Takes matrices as [`Self::stack`] does, where the first one has for each head `head_dim`
    /// rows of its own and then `head_dim` rows of a gate. Returns the stack without the gates, and
    /// the gates of all heads.
    pub fn gated_stack(
        &mut self,
        parts: &[(&str, usize)],
        cols: usize,
        head_dim: usize,
    ) -> Option<(M::Matrix, M::Matrix)> {
        let found = self.raws(parts, cols)?;
        let mut raws: Vec<Raw> = found.iter().map(TensorBytes::raw).collect();
        let first = raws[0];
        let halves = rows_of_parts(&found[0], [head_dim; 2], self.reading);
        let [own, gates] =
            halves.each_ref().map(|bytes| Raw { bytes, rows: first.rows / 2, ..first });
        raws[0] = own;
        let (stacked, gates) = (self.store.matrix(&raws), self.store.matrix(&[gates]));
        self.keep(parts[0].0, stacked).zip(self.keep(parts[0].0, gates))
    }

    /// Takes the biases of matrices that [`Self::gated_stack`] takes, those of the gates apart.
    pub fn gated_biases(
        &mut self,
        presence: Presence,
        parts: &[(&str, usize)],
        head_dim: usize,
    ) -> Option<[Optional<M::Buffer>; 2]> {
        let Some(mut found) = self.biases(presence, parts)? else { return Some([None, None]) };
        let halves = |first: usize| {
            let heads = found[0].chunks(2 * head_dim);
            heads.flat_map(|head| &head[first..][..head_dim]).copied().collect::<Vec<_>>()
        };
        let (own, gates) = (halves(0), halves(head_dim));
        found[0] = own;
        let (stacked, gates) = (self.bias(parts[0].0, &found), self.bias(parts[0].0, &[gates]));
        Some([Some(stacked?), Some(gates?)])
    }

    /// Takes a tensor that has rows of some parts for each head. Returns matrices that have as many
    /// of the parts as `counts` says, one below the other, each of all heads.
    pub fn split_heads<const N: usize, const K: usize>(
        &mut self,
        name: &str,
        heads: usize,
        parts: [usize; N],
        counts: [usize; K],
        cols: usize,
    ) -> Option<[M::Matrix; K]> {
        let found = self.raw(name, &[heads * parts.iter().sum::<usize>(), cols])?;
        let bytes = rows_of_parts(&found, parts, self.reading);
        let part = |i: usize| Raw { bytes: &bytes[i], rows: heads * parts[i], ..found.raw() };
        let mut parts = (0..N).map(part);
        let stacked = counts.map(|count| {
            let stacked = self.store.matrix(&parts.by_ref().take(count).collect::<Vec<_>>());
            self.keep(name, stacked)
        });
        stacked.into_iter().collect::<Option<Vec<_>>>()?.try_into().ok()
    }

    /// Takes the matrices of latent attention that each head has: `[rank, plain]`, which takes
    /// queries to the latent vectors, and `[value, rank]`, which makes values of those. Files have
    /// them so, or in one tensor that makes keys and values of latent vectors.
    pub fn latent_heads(
        &mut self,
        prefix: &str,
        heads: usize,
        latent: LatentConfig,
    ) -> Option<[M::Matrix; 2]> {
        let LatentConfig { rank, plain, value, .. } = latent;
        let [keys, values, both] =
            ["k_b_proj", "v_b_proj", "kv_b_proj"].map(|part| format!("{prefix}{part}.weight"));
        if self.has(&keys) {
            let keys = self.experts(&[&keys], [heads, rank, plain], 1);
            let values = self.experts(&[&values], [heads, value, rank], 1);
            return Some([keys?, values?]);
        }
        let found = self.raw(&both, &[heads * (plain + value), rank])?;
        let [keys, values] = rows_of_parts(&found, [plain, value], self.reading);
        let raw = |bytes, rows| Raw { bytes, rows, ..found.raw() };
        let keys = self.transposed(&both, &raw(&keys, heads * plain), heads);
        let values = self.stack_of_heads(&both, &raw(&values, heads * value), heads);
        Some([keys?, values?])
    }

    /// Puts the matrices of heads, one below the other, in parts of their own.
    fn stack_of_heads(&mut self, name: &str, whole: &Raw, heads: usize) -> Option<M::Matrix> {
        let rows = whole.rows / heads;
        let head = |head| match self.reading {
            Reading::Whole => whole.slice(head * rows, rows),
            Reading::Headers => Raw { rows, ..*whole },
        };
        let raws: Vec<Raw> = (0..heads).map(head).collect();
        let stacked = self.store.experts(&raws);
        self.keep(name, stacked)
    }

    /// The same of transposed matrices. Blocks lie along rows, so their values are transposed.
    fn transposed(&mut self, name: &str, whole: &Raw, heads: usize) -> Option<M::Matrix> {
        let values;
        let mut dense = *whole;
        if whole.dtype.block_size() > 1 {
            values = self.keep(name, in_f32(whole, self.reading))?;
            dense = Raw { dtype: WeightType::F32, bytes: &values, order: None, ..*whole };
        }
        let rows = whole.rows / heads;
        let bytes: Vec<u8> = match self.reading {
            Reading::Whole => (0..heads)
                .flat_map(|head| in_rows(dense.slice(head * rows, rows), true, 1))
                .collect(),
            Reading::Headers => Vec::new(),
        };
        let turned = Raw { bytes: &bytes, rows: heads * whole.cols, cols: rows, ..dense };
        self.stack_of_heads(name, &turned, heads)
    }
}

/// The bytes of a matrix's values in f32.
fn in_f32(matrix: &Raw, reading: Reading) -> Result<Vec<u8>> {
    if reading == Reading::Headers {
        return Ok(Vec::new());
    }
    let values = matrix.values()?;
    let mut bytes = vec![0; size_of_val(&values[..])];
    f32::encode(&values, &mut bytes);
    Ok(bytes)
}
