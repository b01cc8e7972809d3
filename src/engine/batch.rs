//! Turns a scheduled step into the runner's input.

use super::scheduler::{ScheduledStep, Scheduler, StepRow};
use super::sequence::Sequence;
use cresset_kernels::sampling::params::RowSampling;
use cresset_models::ForwardBatch;

/// The flattened input of `step`, the latest scheduled one, and how to sample each of its
/// `logits_indices`.
pub fn forward_batch(
    scheduler: &Scheduler,
    step: &ScheduledStep,
) -> (ForwardBatch, Vec<RowSampling>) {
    let block_size = scheduler.options().block_size;
    let groups = scheduler.blocks().groups();
    let (tokens, sequences) = (step.num_tokens(), step.rows.len());
    let mut batch = ForwardBatch {
        input_ids: Vec::with_capacity(tokens),
        feedback: Vec::new(),
        positions: Vec::with_capacity(tokens),
        slot_mapping: Vec::with_capacity(tokens * groups),
        cu_seqlens_q: Vec::with_capacity(sequences + 1),
        seq_lens: Vec::with_capacity(sequences),
        block_tables: Vec::with_capacity(sequences * groups),
        logits_indices: Vec::with_capacity(sequences),
        ..ForwardBatch::default()
    };
    batch.cu_seqlens_q.push(0);
    let mut rows = Vec::with_capacity(sequences);
    for row in &step.rows {
        let sequence = scheduler.get(row.id).expect("invariant: scheduled ids are live");
        push_tokens(&mut batch, sequence, row);
        push_states(&mut batch, sequence, row);
        if row.samples {
            let end = batch.input_ids.len();
            batch.logits_indices.extend((end - row.results()..end).map(|index| index as u32));
            let samplings = 0..=row.drafts;
            rows.extend(samplings.map(|drafts| sequence.row_sampling(row.feedback, drafts)));
        }
    }
    if !batch.feedback.is_empty() {
        batch.feedback.resize(tokens, None);
    }
    if batch.state_reads.len() > sequences {
        batch.part_starts.push(tokens as u32);
    } else {
        batch.part_starts.clear();
    }
    for group in 0..groups {
        for row in &step.rows {
            let sequence = scheduler.get(row.id).expect("invariant: scheduled ids are live");
            push_blocks(&mut batch, &sequence.table.groups()[group], row, block_size);
        }
    }
    (batch, rows)
}

fn push_tokens(batch: &mut ForwardBatch, sequence: &Sequence, row: &StepRow) {
    if row.feedback.is_some() {
        batch.feedback.resize(batch.input_ids.len(), None);
        batch.feedback.push(row.feedback);
    }
    match row.feedback {
        Some(_) => batch.input_ids.push(0),
        None => batch.input_ids.extend(&sequence.tokens[row.from..row.end()]),
    }
    batch.input_ids.extend(&sequence.drafts()[..row.drafts]);
    let end = row.end() + row.drafts;
    batch.positions.extend((row.from..end).map(|position| position as u32));
    batch.cu_seqlens_q.push(batch.input_ids.len() as u32);
    batch.seq_lens.push(end as u32);
}

/// A row and each of its drafts go on from a state and leave one, if the model has states.
fn push_states(batch: &mut ForwardBatch, sequence: &Sequence, row: &StepRow) {
    let moves = sequence.table.state_moves();
    batch.state_reads.extend(moves.iter().map(|states| states.read));
    batch.state_writes.extend(moves.iter().map(|states| states.write));
    if !moves.is_empty() {
        let end = batch.input_ids.len() as u32;
        let drafts = end - row.drafts as u32..end;
        batch.part_starts.push(drafts.start - row.num_tokens as u32);
        batch.part_starts.extend(drafts);
    }
}

fn push_blocks(batch: &mut ForwardBatch, blocks: &[u32], row: &StepRow, block_size: usize) {
    for position in row.from..row.end() + row.drafts {
        let slot = blocks[position / block_size] as usize * block_size + position % block_size;
        batch.slot_mapping.push(slot as u32);
    }
    batch.block_tables.push(blocks.to_vec());
}
