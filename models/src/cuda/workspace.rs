//! The buffers that a step writes beside its activations, allocated once for the largest step.

use super::plans::AttentionKinds;
use crate::{ModelConfig, ModelOptions, Result};
use cresset_kernels::DeviceOps;
use cresset_kernels::attention::gpu::DecodeWorkspace;
use cresset_kernels::gpu::{Buffer, Kind, View};
use cresset_kernels::sampling::gpu as sampling;

pub(super) struct StepWorkspace {
    /// `[rows, vocab_size]` f32.
    pub logits: Buffer,
    /// Partial results of attention, f32.
    partials: Buffer,
    /// The counters of decode's attention, which each launch leaves as it found them.
    counters: Buffer,
    /// `[rows]` u32: the sampled tokens of the last step, until this step samples.
    pub tokens: Buffer,
    /// `[rows, sampling::RESULT_WORDS]` u32.
    pub results: Buffer,
    /// Bytes for the sampler.
    pub sampling: Buffer,
    /// `[rows, sampling::mask_words]` u32: what may be drawn in the rows that keep to formats.
    pub masks: Buffer,
    vocab_size: usize,
}

impl StepWorkspace {
    /// Allocates for up to `options.max_rows` sampled rows in a step.
    pub(super) fn new(
        gpu: &DeviceOps,
        options: &ModelOptions,
        config: &ModelConfig,
        attention: &AttentionKinds,
    ) -> Result<Self> {
        let (rows, vocab_size) = (options.max_rows, config.vocab_size);
        Ok(Self {
            logits: Buffer::new(gpu, Kind::F32, rows * vocab_size)?,
            partials: Buffer::new(gpu, Kind::F32, attention.workspace(rows))?,
            counters: Buffer::zeros(gpu, Kind::U32, attention.counters(rows))?,
            tokens: Buffer::zeros(gpu, Kind::U32, rows)?,
            results: Buffer::new(gpu, Kind::U32, rows * sampling::RESULT_WORDS)?,
            sampling: Buffer::new(gpu, Kind::U8, sampling::workspace(rows, vocab_size))?,
            masks: Buffer::new(gpu, Kind::U32, rows * sampling::mask_words(vocab_size))?,
            vocab_size,
        })
    }

    pub(super) fn attention(&self) -> DecodeWorkspace {
        DecodeWorkspace { partials: self.partials.view(), counters: self.counters.view() }
    }

    /// `[rows, vocab_size]` of the last step, until they are sampled from.
    pub(super) fn logits(&self, rows: usize) -> View {
        self.logits.view().slice(0..rows * self.vocab_size)
    }
}
