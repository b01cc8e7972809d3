//! From a step to what the runner is given.

use super::sampler::RowSampling;
use super::scheduler::{Scheduler, Step};
use super::sequence::Sequence;
use cresset_models::ForwardBatch;

/// The flattened input of `step`, and how to sample each of its `logits_indices`.
pub fn forward_batch(scheduler: &Scheduler, step: &Step, block_size: usize) -> (ForwardBatch, Vec<RowSampling>) {
    let mut batch = ForwardBatch { cu_seqlens_q: vec![0], ..ForwardBatch::default() };
    let mut rows = Vec::new();
    for row in &step.rows {
        let sequence = scheduler.get(row.id).expect("invariant: scheduled ids are live");
        push_tokens(&mut batch, sequence, row.num_tokens, block_size);
        if row.samples {
            batch.logits_indices.push(batch.input_ids.len() as u32 - 1);
            rows.push(sequence.row_sampling());
        }
    }
    (batch, rows)
}

fn push_tokens(batch: &mut ForwardBatch, sequence: &Sequence, count: usize, block_size: usize) {
    let blocks = sequence.table.blocks();
    let from = sequence.num_computed_tokens;
    for position in from..from + count {
        let slot = blocks[position / block_size] as usize * block_size + position % block_size;
        batch.input_ids.push(sequence.tokens[position]);
        batch.positions.push(position as u32);
        batch.slot_mapping.push(slot as u32);
    }
    batch.cu_seqlens_q.push(batch.input_ids.len() as u32);
    batch.seq_lens.push((from + count) as u32);
    batch.block_tables.push(blocks.to_vec());
}
