//! Sequences that each have a part of the cache to themselves, and the steps that carry them on.

use crate::BLOCK_SIZE;
use cresset_kernels::sampling::gpu::{GREEDY, RowParams};
use cresset_models::ForwardBatch;
use cresset_models::gpu::Row;

pub struct Sequence {
    /// Tokens in the cache.
    pub computed: usize,
    blocks: Vec<u32>,
}

impl Sequence {
    /// So many sequences with room for so many tokens each.
    pub fn several(count: usize, tokens: usize) -> Vec<Self> {
        let each = tokens.div_ceil(BLOCK_SIZE) as u32;
        let blocks = |i: u32| (i * each..(i + 1) * each).collect();
        (0..count as u32).map(|i| Self { computed: 0, blocks: blocks(i) }).collect()
    }
}

/// New tokens of each sequence; the logits of the last are wanted. The sequences are as after the step.
pub fn step<'a>(parts: impl IntoIterator<Item = (&'a mut Sequence, &'a [u32])>) -> ForwardBatch {
    let mut batch = ForwardBatch { cu_seqlens_q: vec![0], ..ForwardBatch::default() };
    for (sequence, new) in parts {
        let positions = sequence.computed..sequence.computed + new.len();
        let slot = |i: usize| sequence.blocks[i / BLOCK_SIZE] * BLOCK_SIZE as u32 + (i % BLOCK_SIZE) as u32;
        batch.input_ids.extend_from_slice(new);
        batch.slot_mapping.extend(positions.clone().map(slot));
        batch.positions.extend(positions.clone().map(|position| position as u32));
        batch.cu_seqlens_q.push(batch.input_ids.len() as u32);
        batch.seq_lens.push(positions.end as u32);
        batch.block_tables.push(sequence.blocks[..positions.end.div_ceil(BLOCK_SIZE)].to_vec());
        batch.logits_indices.push(batch.input_ids.len() as u32 - 1);
        sequence.computed = positions.end;
    }
    batch
}

/// The likeliest token of each row.
pub fn greedy(rows: usize, logprobs: Option<u8>) -> Vec<Row> {
    vec![(RowParams { logprobs, ..GREEDY }, Vec::new()); rows]
}
