//! Guesses tokens with the model's own head, as drafts for speculative decoding.
//!
//! The head has K and V of every position whose next token is known, in the blocks of the model's
//! layers: each step runs it over its tokens without logits, which ends behind the write of K and
//! V. Where a block is found again by another sequence, K and V of its last position may be those
//! of another next token. That can spoil a guess, and changes nothing else.

use super::CpuModel;
use crate::cache_kinds::CacheKinds;
use crate::{Error, ForwardBatch, Result, WantedGuesses};
use cresset_kernels::sampling::SampleResult;
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// A sequence whose next tokens are being guessed.
struct GuessedSequence {
    wanted: WantedGuesses,
    guesses: usize,
    /// The row whose state the next guess goes on from. `None`: there will be none.
    source: Option<u32>,
}

impl GuessedSequence {
    /// The position at which the next guess is made: the one before the last token.
    fn position(&self) -> Option<usize> {
        self.wanted.row.tokens.len().checked_sub(2)
    }

    /// Its slot, if the sequence has a block for it.
    fn slot(&self, block_size: usize) -> Option<u32> {
        let position = self.position()?;
        let block = *self.wanted.blocks.get(position / block_size)? as usize;
        u32::try_from(block * block_size + position % block_size).ok()
    }

    /// Takes over what row `row` gave.
    fn take(&mut self, result: SampleResult, row: usize, block_size: usize) {
        self.source = result.ok().and_then(|sampled| {
            Arc::make_mut(&mut self.wanted.row.tokens).push(sampled.token);
            self.guesses += 1;
            let more = self.guesses < self.wanted.most && self.slot(block_size).is_some();
            more.then_some(row as u32)
        });
    }

    fn into_guesses(self) -> Vec<u32> {
        let tokens = &self.wanted.row.tokens;
        tokens[tokens.len() - self.guesses..].to_vec()
    }
}

impl CpuModel {
    /// Runs the head over the tokens of a step that was just computed and gave these results.
    pub(super) fn follow(&mut self, batch: &ForwardBatch, results: &[SampleResult]) -> Result<()> {
        if batch.following.is_empty() {
            return Ok(());
        }
        let (ids, no_logits) = (batch.ids_behind(results), self.logits(0)?);
        let sources: Vec<u32> = (0..ids.len() as u32).collect();
        self.compute(batch, &ids, &no_logits, Some(&sources))?;
        self.known_slots.extend(&batch.slot_mapping);
        Ok(())
    }

    /// The guesses of each sequence.
    pub(super) fn guess_all(&mut self, wanted: Vec<WantedGuesses>) -> Result<Vec<Vec<u32>>> {
        let block_size = self.kv.block_size;
        let known = std::mem::take(&mut self.known_slots);
        let begin = |wanted: WantedGuesses| {
            let mut sequence = GuessedSequence { wanted, guesses: 0, source: None };
            let slot = sequence.slot(block_size).filter(|_| sequence.wanted.most > 0);
            let row = known.iter().position(|known| Some(*known) == slot);
            sequence.source = row.map(|row| row as u32);
            sequence
        };
        let mut sequences: Vec<_> = wanted.into_iter().map(begin).collect();
        loop {
            let mut open: Vec<_> =
                sequences.iter_mut().filter(|sequence| sequence.source.is_some()).collect();
            if open.is_empty() {
                break;
            }
            let results = self.guess_next(&open)?;
            for (row, (sequence, result)) in open.iter_mut().zip(results).enumerate() {
                sequence.take(result, row, block_size);
            }
        }
        Ok(sequences.into_iter().map(GuessedSequence::into_guesses).collect())
    }

    /// Guesses one token of each sequence.
    fn guess_next(&mut self, open: &[&mut GuessedSequence]) -> Result<Vec<SampleResult>> {
        let batch = self.positions_of(open);
        let (vocabulary, positions) = (self.decoder.config.vocab_size, self.decoder.positions);
        let (block_size, blocks) = (self.kv.block_size, self.kv.num_blocks);
        // The head has no state, whatever the model's layers have.
        let checked =
            batch.check(vocabulary, positions, block_size, blocks, &CacheKinds::default());
        checked.map_err(Error::Batch)?;
        let logits = self.logits(open.len())?;
        let sources: Vec<u32> = open.iter().filter_map(|sequence| sequence.source).collect();
        self.compute(&batch, &batch.input_ids, &logits, Some(&sources))?;
        let rows: Vec<_> = open.iter().map(|sequence| sequence.wanted.row.clone()).collect();
        Ok(self.sampler.sample(&self.decoder.ops, (&logits).into(), &rows)?)
    }

    /// One position of each sequence, with the id of the token behind it.
    fn positions_of(&self, open: &[&mut GuessedSequence]) -> ForwardBatch {
        let mut batch = ForwardBatch { cu_seqlens_q: vec![0], ..ForwardBatch::default() };
        for (row, sequence) in (0..).zip(open) {
            let WantedGuesses { row: sampling, blocks, .. } = &sequence.wanted;
            let position = sequence.position().unwrap_or_default() as u32;
            batch.input_ids.extend(sampling.tokens.last());
            batch.positions.push(position);
            batch.seq_lens.push(position + 1);
            batch.slot_mapping.extend(sequence.slot(self.kv.block_size));
            batch.block_tables.push(blocks.clone());
            batch.cu_seqlens_q.push(row + 1);
            batch.logits_indices.push(row);
        }
        batch
    }
}
