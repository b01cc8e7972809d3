//! A small model that guesses the tokens of a large one with the same tokenizer.
//!
//! It reads each text as far as the large model has, and then goes on alone. Each of its tokens is
//! drawn with the request's own parameters, seed and position, so it is the large model's where
//! their probabilities are near each other. Keys and values are in blocks of its own, which no two
//! texts share: those of a wrong guess are simply written over.

#![expect(clippy::disallowed_methods, reason = "it measures what a guess costs")]

use super::batch::placed;
use super::block_manager::{BlockManager, BlockOwner, BlockTable};
use super::error::EngineError;
use super::panics::catch_panic;
use super::runner::{RowResult, Runner};
use super::scheduler::EngineOptions;
use super::sequence::SequenceId;
use super::speculation::{DraftCost, Proposer, Wanted};
use cresset_base::AccountId;
use cresset_kernels::sampling::params::RowSampling;
use cresset_models::ForwardBatch;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A row of a step that measures what a guess costs has no more tokens than this: its last guess
/// and the token that the large model drew behind it.
const FEW_TOKENS: usize = 2;

pub struct DraftModel {
    runner: Box<dyn Runner>,
    options: EngineOptions,
    /// Ids below this are tokens of both models.
    vocabulary: u32,
    blocks: BlockManager,
    /// The texts that are not being guessed at the moment.
    texts: BTreeMap<SequenceId, KnownText>,
    /// The number of calls of `propose` so far.
    calls: u64,
    cost: DraftCost,
}

/// A text, as far as it was read.
struct KnownText {
    table: BlockTable,
    /// The tokens whose keys and values are in the blocks, maybe with wrong guesses at their end.
    tokens: Vec<u32>,
    /// The number of the call that asked for it last.
    asked: u64,
}

/// A text whose next tokens are being guessed.
struct OpenText {
    id: SequenceId,
    /// The text, with the guesses so far.
    row: RowSampling,
    guesses: usize,
    most: usize,
    known: KnownText,
    /// Whether another step may give a guess.
    open: bool,
}

impl DraftModel {
    /// `runner` computes one step at a time and keeps no states. Its blocks and limits are those of
    /// `options`; `vocabulary` is the size of the smaller vocabulary of both models.
    pub fn new(runner: Box<dyn Runner>, options: EngineOptions, vocabulary: usize) -> Self {
        assert!(runner.depth() == 1 && options.cache.states == 0, "a guess can be taken back");
        let (kinds, in_flight) = (options.cache.clone(), options.most_in_flight());
        // Nothing is found again, so the hashes of prefixes need no secret.
        let blocks =
            BlockManager::new(options.num_blocks, options.block_size, kinds, in_flight, [0; 32]);
        let (texts, vocabulary, cost) = (BTreeMap::new(), vocabulary as u32, DraftCost::default());
        Self { runner, options, vocabulary, blocks, texts, calls: 0, cost }
    }

    /// Gives back the blocks of a text that has ended.
    pub fn forget(&mut self, id: SequenceId) {
        if let Some(mut text) = self.texts.remove(&id) {
            self.blocks.release(&mut text.table);
        }
    }

    /// Number of blocks that texts hold.
    pub fn blocks_used(&self) -> usize {
        self.blocks.used()
    }

    fn open(&mut self, wanted: Wanted) -> OpenText {
        let Wanted { id, row, most, .. } = wanted;
        let owner = BlockOwner { account: AccountId(uuid::Uuid::nil()), application: None };
        let unread = || KnownText { table: BlockTable::new(owner, 0), tokens: vec![], asked: 0 };
        let mut known = self.texts.remove(&id).unwrap_or_else(unread);
        let same = known.tokens.iter().zip(row.tokens.iter()).take_while(|(a, b)| a == b).count();
        // The last token is read again where all are known: it gives the next one.
        known.tokens.truncate(same.min(row.tokens.len() - 1));
        known.asked = self.calls;
        OpenText { id, row, guesses: 0, most, known, open: most > 0 }
    }

    /// Computes a step of the texts that are open. False when none is.
    fn step(&mut self, texts: &mut [OpenText]) -> Result<bool, EngineError> {
        let rows = self.rows(texts);
        if rows.is_empty() {
            return Ok(false);
        }
        let began = Instant::now();
        let (batch, sampled) = self.batch(texts, &rows);
        let results = catch_panic(|| {
            self.runner.launch(&batch, &sampled)?;
            self.runner.collect()
        })?;
        if rows.iter().all(|(_, span)| span.len() <= FEW_TOKENS) {
            self.cost.note(began.elapsed().as_secs_f64() / rows.len() as f64);
        }
        let mut results = results.into_iter();
        for (index, span) in rows {
            let text = &mut texts[index];
            text.known.tokens.extend_from_slice(&text.row.tokens[span.clone()]);
            // A long text is read in several steps of the engine, and guessed in the last.
            let result = text.is_read().then(|| results.next()).flatten();
            text.take(result, self.vocabulary);
        }
        Ok(true)
    }

    /// The index of each open text that is read in the next step, and the positions that are read.
    /// A text for which the blocks have no room is closed.
    fn rows(&mut self, texts: &mut [OpenText]) -> Vec<(usize, Range<usize>)> {
        let (mut rows, mut budget) = (Vec::new(), self.options.max_batched_tokens);
        for (index, text) in texts.iter_mut().enumerate().filter(|(_, text)| text.open) {
            let from = text.known.tokens.len();
            let to = text.row.tokens.len().min(from + budget);
            let unknown = text.row.tokens[from..to].iter().any(|id| *id >= self.vocabulary);
            text.open = to > from
                && to <= self.options.max_context
                && !unknown
                && self.make_room(&mut text.known.table, from, to);
            if text.open {
                budget -= to - from;
                rows.push((index, from..to));
            }
        }
        rows
    }

    /// Claims blocks for the tokens `from..to`. Where too few are free, those texts lose theirs
    /// that were asked for longest ago, but none of this call or the one before.
    fn make_room(&mut self, table: &mut BlockTable, from: usize, to: usize) -> bool {
        while !self.blocks.claim(table, from, to) {
            let oldest = self.texts.iter().min_by_key(|(_, text)| text.asked);
            let idle = oldest.filter(|(_, text)| text.asked + 1 < self.calls);
            let Some(id) = idle.map(|(id, _)| *id) else { return false };
            self.forget(id);
        }
        true
    }

    fn batch(
        &self,
        texts: &[OpenText],
        rows: &[(usize, Range<usize>)],
    ) -> (ForwardBatch, Vec<RowSampling>) {
        let spans = rows.iter().map(|(index, span)| (span.clone(), &texts[*index].known.table));
        let spans: Vec<_> = spans.collect();
        let mut batch = placed(&spans, self.options.block_size, self.blocks.groups());
        let mut sampled = Vec::with_capacity(rows.len());
        for (index, span) in rows {
            let row = &texts[*index].row;
            batch.input_ids.extend_from_slice(&row.tokens[span.clone()]);
            if span.end == row.tokens.len() {
                batch.logits_indices.push(batch.input_ids.len() as u32 - 1);
                sampled.push(row.clone());
            }
        }
        (batch, sampled)
    }
}

impl OpenText {
    fn is_read(&self) -> bool {
        self.known.tokens.len() == self.row.tokens.len()
    }

    /// Takes over the result of its row, if that has one, as a guess.
    fn take(&mut self, result: Option<RowResult>, vocabulary: u32) {
        let token = result.and_then(Result::ok).map(|sampled| sampled.token);
        let token = token.filter(|id| *id < vocabulary);
        if let Some(token) = token {
            Arc::make_mut(&mut self.row.tokens).push(token);
            self.guesses += 1;
        }
        self.open = token.is_some() && self.guesses < self.most;
    }

    fn into_guesses(self) -> (SequenceId, KnownText, Vec<u32>) {
        let text = self.row.tokens.len() - self.guesses;
        (self.id, self.known, self.row.tokens[text..].to_vec())
    }
}

impl Proposer for DraftModel {
    fn seconds_per_draft(&self) -> f64 {
        self.cost.seconds()
    }

    fn propose(&mut self, wanted: Vec<Wanted>) -> Vec<Vec<u32>> {
        self.calls += 1;
        let mut texts: Vec<_> = wanted.into_iter().map(|wanted| self.open(wanted)).collect();
        let failure = loop {
            match self.step(&mut texts) {
                Ok(true) => {}
                Ok(false) => break None,
                Err(error) => break Some(error),
            }
        };
        let mut guesses = Vec::with_capacity(texts.len());
        for text in texts {
            let (id, known, tokens) = text.into_guesses();
            self.texts.insert(id, known);
            guesses.push(if failure.is_none() { tokens } else { Vec::new() });
        }
        if let Some(error) = failure {
            tracing::warn!(reason = %error, "the draft model has failed and guesses no more");
            self.cost.give_up();
            for text in std::mem::take(&mut self.texts).values_mut() {
                self.blocks.release(&mut text.table);
            }
        }
        guesses
    }
}

#[cfg(test)]
mod tests;
