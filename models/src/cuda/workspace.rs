//! What a step writes, allocated once for the largest step.

use crate::{ModelConfig, Result};
use cresset_kernels::attention::gpu::decode_workspace;
use cresset_kernels::gpu::{Buffer, Gpu, Kind, View};
use cresset_kernels::sampling::gpu as sampling;
use std::sync::Arc;

pub struct Workspace {
    /// `[tokens, …]` of the activations' kind, in the order of [`Activations`].
    activations: [(usize, Buffer); 7],
    /// `[rows, …]`: residual stream and attention's results of the rows whose logits are wanted.
    wanted: [(usize, Buffer); 2],
    /// `[rows, vocab_size]` f32.
    pub logits: Buffer,
    /// Partial results of attention, f32.
    pub attention: Buffer,
    /// `[rows]` u32: the tokens of a step, which are those of the step before until it samples.
    pub tokens: Buffer,
    /// `[rows, sampling::RESULT_WORDS]` u32.
    pub results: Buffer,
    /// Bytes.
    pub sampling: Buffer,
}

/// Views of a step's rows.
#[derive(Clone, Copy)]
pub struct Activations {
    /// `[hidden]`: the residual stream.
    pub residual: View,
    /// `[hidden]`
    pub normed: View,
    /// `[(heads + 2 * kv_heads) * head_dim]`
    pub qkv: View,
    /// `[heads * head_dim]`
    pub attended: View,
    /// `[hidden]`: what a sub-layer adds to the residual stream.
    pub delta: View,
    /// `[2 * intermediate]`
    pub gate_up: View,
    /// `[intermediate]`
    pub activated: View,
}

impl Workspace {
    /// For so many tokens and sampled rows in a step, and an attention that cuts sequences into
    /// `max_splits(rows)`.
    pub fn new(
        gpu: &Arc<dyn Gpu>,
        config: &ModelConfig,
        kind: Kind,
        (tokens, rows): (usize, usize),
        max_splits: impl Fn(usize) -> usize,
    ) -> Result<Self> {
        let ModelConfig {
            hidden_size: hidden,
            intermediate_size: inner,
            heads,
            kv_heads,
            head_dim,
            ..
        } = *config;
        let matrix = |rows: usize, width: usize| {
            Ok::<_, crate::Error>((width, Buffer::new(gpu, kind, rows * width)?))
        };
        let (q, qkv) = (heads * head_dim, (heads + 2 * kv_heads) * head_dim);
        let partial = (1..=rows)
            .map(|n| decode_workspace(n, heads, head_dim, max_splits(n)))
            .max()
            .unwrap_or(0);
        Ok(Self {
            activations: [
                matrix(tokens, hidden)?,
                matrix(tokens, hidden)?,
                matrix(tokens, qkv)?,
                matrix(tokens, q)?,
                matrix(tokens, hidden)?,
                matrix(tokens, 2 * inner)?,
                matrix(tokens, inner)?,
            ],
            wanted: [matrix(rows, hidden)?, matrix(rows, q)?],
            logits: Buffer::new(gpu, Kind::F32, rows * config.vocab_size)?,
            attention: Buffer::new(gpu, Kind::F32, partial)?,
            tokens: Buffer::zeros(gpu, Kind::U32, rows)?,
            results: Buffer::new(gpu, Kind::U32, rows * sampling::RESULT_WORDS)?,
            sampling: Buffer::new(gpu, Kind::U8, sampling::workspace(rows, config.vocab_size))?,
        })
    }

    /// The first `n` rows.
    pub fn first(&self, n: usize) -> Activations {
        let [residual, normed, qkv, attended, delta, gate_up, activated] =
            self.activations.each_ref().map(|matrix| first(matrix, n));
        Activations { residual, normed, qkv, attended, delta, gate_up, activated }
    }

    /// `n` rows for what [`Decoder::forward`](super::decoder::Decoder::forward) goes on with when
    /// it drops the others.
    pub fn wanted(&self, n: usize) -> Activations {
        let [residual, attended] = self.wanted.each_ref().map(|matrix| first(matrix, n));
        Activations { residual, attended, ..self.first(n) }
    }
}

fn first((width, buffer): &(usize, Buffer), n: usize) -> View {
    buffer.view().slice(0..n * width)
}
