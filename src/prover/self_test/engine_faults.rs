//! Faults between the scheduler and the model: wrong steps, wrong results, and ops with wrong
//! arguments.

use cresset_engine::{EngineError, RowResult, RowSampling, Runner, SamplingParams};
use cresset_models::ForwardBatch;
use cresset_models::planted::{self, OpFault};
use std::sync::Arc;

/// A fault of an engine, in force for its whole life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineFault {
    Op(OpFault),
    /// The first token of every further chunk of a prompt is the one before it.
    ChunkOffByOne,
    /// A sequence that is computed again after it lost its blocks has other outputs.
    ResumedWithoutOutputs,
    /// Two sequences of a step read each other's second block.
    BlocksSwapped,
    /// Two rows of a step get each other's token.
    RowsSwapped,
    /// Every guessed token counts as the one drawn.
    DraftsKept,
    /// All rows share one seed.
    SeedShared,
    /// `top_k` lets one token more through.
    TopKOffByOne,
    /// `top_p` has no effect.
    TopPIgnored,
    /// The presence penalty has no effect.
    PenaltyIgnored,
    /// The account is no part of what a prefix is found by.
    AccountIgnored,
}

/// A runner with a fault.
pub(crate) struct FaultyRunner {
    inner: Box<dyn Runner>,
    fault: EngineFault,
    /// Tokens of a block of the cache.
    block_size: usize,
    /// For each result of the step launched last, the draft in the place of its token.
    drafts: Vec<Option<u32>>,
}

impl FaultyRunner {
    pub(crate) fn new(inner: Box<dyn Runner>, fault: EngineFault, block_size: usize) -> Self {
        Self { inner, fault, block_size, drafts: Vec::new() }
    }

    fn spoil_rows(&self, rows: &[RowSampling]) -> Vec<RowSampling> {
        let spoiled = |row: &RowSampling| {
            let mut params = SamplingParams::clone(&row.params);
            match self.fault {
                EngineFault::SeedShared => params.seed = 1,
                EngineFault::TopKOffByOne if params.top_k > 0 => params.top_k += 1,
                EngineFault::TopPIgnored => params.top_p = 1.0,
                EngineFault::PenaltyIgnored => params.presence_penalty = 0.0,
                _ => {}
            }
            RowSampling { params: Arc::new(params), ..row.clone() }
        };
        rows.iter().map(spoiled).collect()
    }

    fn spoil_batch(&self, batch: &mut ForwardBatch, rows: &[RowSampling]) {
        match self.fault {
            EngineFault::ChunkOffByOne => repeat_first_tokens(batch),
            EngineFault::ResumedWithoutOutputs => drop_outputs(batch, rows),
            EngineFault::BlocksSwapped => swap_blocks(batch, self.block_size),
            _ => {}
        }
    }
}

/// The rows of each sequence.
fn spans(batch: &ForwardBatch) -> Vec<std::ops::Range<usize>> {
    batch.cu_seqlens_q.windows(2).map(|ends| ends[0] as usize..ends[1] as usize).collect()
}

/// Whether the rows are a part of a prompt that is longer than a token. Those of a sequence that
/// decodes all give logits.
fn is_chunk(batch: &ForwardBatch, span: &std::ops::Range<usize>) -> bool {
    span.len() > 1 && batch.logits_indices.binary_search(&(span.start as u32)).is_err()
}

/// For each row that gives logits, the draft behind it.
fn drafts(batch: &ForwardBatch) -> Vec<Option<u32>> {
    let ends = &batch.cu_seqlens_q;
    let behind =
        |row: &u32| (!ends.contains(&(row + 1))).then(|| batch.input_ids[*row as usize + 1]);
    batch.logits_indices.iter().map(behind).collect()
}

fn repeat_first_tokens(batch: &mut ForwardBatch) {
    for span in spans(batch) {
        if is_chunk(batch, &span) && batch.positions[span.start] > 0 {
            batch.input_ids[span.start] = batch.input_ids[span.start + 1];
        }
    }
}

/// Replaces outputs that come as a part of a prompt: they are computed again.
fn drop_outputs(batch: &mut ForwardBatch, rows: &[RowSampling]) {
    for (row, sampling) in batch.logits_indices.clone().into_iter().zip(rows) {
        let found = spans(batch).into_iter().find(|span| span.contains(&(row as usize)));
        for at in found.filter(|span| is_chunk(batch, span)).into_iter().flatten() {
            if batch.positions[at] as usize >= sampling.prompt_len {
                batch.input_ids[at] = 0;
            }
        }
    }
}

/// Swaps the second blocks of two sequences that write behind them, so that the step stays valid:
/// the first ones may hold the same words of the template.
fn swap_blocks(batch: &mut ForwardBatch, block_size: usize) {
    let behind =
        |span: &std::ops::Range<usize>| batch.positions[span.start] as usize >= 2 * block_size;
    let long: Vec<bool> = spans(batch).iter().map(behind).collect();
    let tables = batch.block_tables.iter_mut().zip(long);
    let mut first = tables.filter(|(_, long)| *long).map(|(table, _)| &mut table[1]);
    if let (Some(a), Some(b)) = (first.next(), first.next()) {
        std::mem::swap(a, b);
    }
}

impl Runner for FaultyRunner {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        self.drafts = drafts(batch);
        let mut spoiled = batch.clone();
        self.spoil_batch(&mut spoiled, rows);
        let rows = self.spoil_rows(rows);
        match self.fault {
            EngineFault::Op(fault) => planted::with(fault, || self.inner.launch(&spoiled, &rows)),
            _ => self.inner.launch(&spoiled, &rows),
        }
    }

    fn sample(&mut self, rows: &[Option<RowSampling>]) -> Result<(), EngineError> {
        self.inner.sample(rows)
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        let mut results = self.inner.collect()?;
        if self.fault == EngineFault::RowsSwapped && results.len() > 1 {
            results.swap(0, 1);
        }
        if self.fault == EngineFault::DraftsKept {
            for (result, draft) in results.iter_mut().zip(&self.drafts) {
                if let (Ok(sampled), Some(draft)) = (result, draft) {
                    sampled.token = *draft;
                }
            }
        }
        Ok(results)
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn recover(&mut self) -> Result<(), EngineError> {
        self.inner.recover()
    }
}
