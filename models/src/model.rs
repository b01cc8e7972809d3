//! A loaded model, as the engine calls it: on the CPU or on devices.

use crate::cache_kinds::CacheKinds;
use crate::{Error, ForwardBatch, ModelConfig, Result};
use cresset_kernels::sampling::{RowSampling, SampleResult};

/// A sequence whose next tokens are to be guessed.
#[derive(Clone, Debug)]
pub struct WantedGuesses {
    /// The parameters by which its next token will be sampled. Guesses are sampled by them too.
    pub row: RowSampling,
    /// Its blocks in the first group of layers. It gets no guess that needs another block.
    pub blocks: Vec<u32>,
    pub most: usize,
}

/// A loaded decoder with its KV cache and sampler.
pub trait Model: Send {
    fn config(&self) -> &ModelConfig;

    /// Bytes of weights held in memory.
    fn weight_bytes(&self) -> usize;

    /// Bytes of memory that the model takes, its KV cache included: those of the device's memory on
    /// a device.
    fn memory_bytes(&self) -> usize;

    /// Blocks of the KV cache that batches may name.
    fn num_blocks(&self) -> usize;

    /// How layers share these blocks.
    fn cache_kinds(&self) -> &CacheKinds;

    /// Most steps that may be launched and not yet collected.
    fn depth(&self) -> usize;

    /// Starts one step over a ragged batch. `rows[i]` says how to sample from the logits of
    /// `batch.logits_indices[i]`, the last token of its sequence. Where the batch's `feedback`
    /// names a result, it is one of the step launched just before. The K and V of every token of
    /// the batch are in the cache once the step is collected.
    ///
    /// On the CPU, and on a GPU with `deterministic`, a row's result has the same bits whatever
    /// else is in the batch and however its prompt was chunked.
    ///
    /// If the format of a row waits for a token (`RowSampling::awaits_mask`), the step is not
    /// sampled yet: `sample` must be called before the next launch.
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<()>;

    /// Samples the step launched last, of which a format waited for a token. Its rows are given
    /// again, with all tokens before; `None` stands for one whose sequence has ended since, which
    /// gets no result if it has a format. Fails if no such step waits.
    fn sample(&mut self, rows: &[Option<RowSampling>]) -> Result<()> {
        Err(Error::Batch(format!("no step waits for the formats of {} rows", rows.len())))
    }

    /// Whether the model has a head that guesses tokens.
    fn guesses(&self) -> bool {
        false
    }

    /// Guesses the next tokens of sequences, at most as many as each wants: with the model's head,
    /// from the states of the step collected last. Sequences that had no row there get none.
    fn guess(&mut self, wanted: Vec<WantedGuesses>) -> Result<Vec<Vec<u32>>> {
        Ok(vec![Vec::new(); wanted.len()])
    }

    /// Waits for the oldest launched step and returns its results, one for each of its rows.
    fn collect(&mut self) -> Result<Vec<SampleResult>>;

    /// Drops everything launched. Fails on a device that has failed, because it stays unusable.
    fn recover(&mut self) -> Result<()>;
}
