//! From a step to what the runner is given.

use super::sampler::RowSampling;
use super::scheduler::{Scheduler, Step};
use super::sequence::Sequence;
use cresset_models::ForwardBatch;

/// The flattened input of `step`, and how to sample each of its `logits_indices`.
pub fn forward_batch(scheduler: &Scheduler, step: &Step, block_size: usize) -> (ForwardBatch, Vec<RowSampling>) {
    let (tokens, sequences) = (step.num_tokens(), step.rows.len());
    let mut batch = ForwardBatch {
        input_ids: Vec::with_capacity(tokens),
        positions: Vec::with_capacity(tokens),
        slot_mapping: Vec::with_capacity(tokens),
        cu_seqlens_q: Vec::with_capacity(sequences + 1),
        seq_lens: Vec::with_capacity(sequences),
        block_tables: Vec::with_capacity(sequences),
        logits_indices: Vec::with_capacity(sequences),
    };
    batch.cu_seqlens_q.push(0);
    let mut rows = Vec::with_capacity(sequences);
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
