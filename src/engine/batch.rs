//! Turns a scheduled step into the runner's input.

use super::block_manager::BlockTable;
use super::scheduler::{ScheduledStep, Scheduler, StepRow};
use super::sequence::Sequence;
use cresset_kernels::sampling::params::RowSampling;
use cresset_models::ForwardBatch;
use std::ops::Range;

/// The flattened input of `step`, the latest scheduled one, and how to sample each of its
/// `logits_indices`.
pub fn forward_batch(
    scheduler: &Scheduler,
    step: &ScheduledStep,
) -> (ForwardBatch, Vec<RowSampling>) {
    let sequence =
        |row: &StepRow| scheduler.get(row.id).expect("invariant: scheduled ids are live");
    let place = |row: &StepRow| (row.from..row.end() + row.drafts, &sequence(row).table);
    let places: Vec<_> = step.rows.iter().map(place).collect();
    let mut batch = placed(&places, scheduler.options().block_size, scheduler.blocks().groups());
    let (tokens, sequences) = (step.num_tokens(), step.rows.len());
    let mut rows = Vec::with_capacity(sequences);
    for row in &step.rows {
        let sequence = sequence(row);
        push_tokens(&mut batch, sequence, row);
        push_states(&mut batch, sequence, row);
        batch.following.push(sequence.tokens.get(row.end()).copied().unwrap_or(0));
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
    (batch, rows)
}

/// The sampled rows of the only step in flight, with all tokens before, which are known by now;
/// `None` for those of sequences that have ended since it was launched.
pub fn known_rows(scheduler: &Scheduler) -> Vec<Option<RowSampling>> {
    let rows = scheduler.in_flight().iter().flatten().filter(|row| row.samples);
    rows.map(|row| Some(scheduler.get(row.id)?.row_sampling(None, 0))).collect()
}

/// A batch of rows, each of some positions of the sequence with these blocks. It lacks the tokens,
/// and which of them give logits.
pub(super) fn placed(
    rows: &[(Range<usize>, &BlockTable)],
    block_size: usize,
    groups: usize,
) -> ForwardBatch {
    let mut batch = ForwardBatch { cu_seqlens_q: vec![0], ..ForwardBatch::default() };
    for (span, _) in rows {
        batch.positions.extend(span.clone().map(|position| position as u32));
        batch.cu_seqlens_q.push(batch.positions.len() as u32);
        batch.seq_lens.push(span.end as u32);
    }
    for group in 0..groups {
        for (span, table) in rows {
            let blocks = &table.groups()[group];
            let block = |position: usize| blocks[position / block_size] as usize;
            let slot = |position| (block(position) * block_size + position % block_size) as u32;
            batch.slot_mapping.extend(span.clone().map(slot));
            batch.block_tables.push(blocks.clone());
        }
    }
    batch
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
