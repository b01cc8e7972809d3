//! Activations of a step, allocated once for the largest step.

use crate::{ModelConfig, Result};
use candle_core::{DType, Device, Tensor};

/// All `[rows, …]` f32.
pub struct Workspace {
    /// `[hidden]`: the residual stream.
    pub residual: Tensor,
    /// `[hidden]`
    pub normed: Tensor,
    /// `[(heads + 2 * kv_heads) * head_dim]`
    pub qkv: Tensor,
    /// `[heads * head_dim]`
    pub attended: Tensor,
    /// `[hidden]`: what a sub-layer adds to the residual stream.
    pub delta: Tensor,
    /// `[2 * intermediate]`
    pub gate_up: Tensor,
    /// `[intermediate]`
    pub activated: Tensor,
}

impl Workspace {
    pub fn new(config: &ModelConfig, rows: usize) -> Result<Self> {
        let zeros = |width| Tensor::zeros((rows, width), DType::F32, &Device::Cpu);
        Ok(Self {
            residual: zeros(config.hidden_size)?,
            normed: zeros(config.hidden_size)?,
            qkv: zeros((config.heads + 2 * config.kv_heads) * config.head_dim)?,
            attended: zeros(config.heads * config.head_dim)?,
            delta: zeros(config.hidden_size)?,
            gate_up: zeros(2 * config.intermediate_size)?,
            activated: zeros(config.intermediate_size)?,
        })
    }

    /// Views of the first `n` rows.
    pub fn first(&self, n: usize) -> Result<Self> {
        let first = |tensor: &Tensor| tensor.narrow(0, 0, n);
        Ok(Self {
            residual: first(&self.residual)?,
            normed: first(&self.normed)?,
            qkv: first(&self.qkv)?,
            attended: first(&self.attended)?,
            delta: first(&self.delta)?,
            gate_up: first(&self.gate_up)?,
            activated: first(&self.activated)?,
        })
    }
}

/// The logits' buffer: grows to the largest number of rows ever wanted.
pub struct Logits {
    buffer: Tensor,
}

impl Logits {
    pub fn new(vocab_size: usize) -> Result<Self> {
        Ok(Self { buffer: Tensor::zeros((1, vocab_size), DType::F32, &Device::Cpu)? })
    }

    /// A view of `n` rows.
    pub fn rows(&mut self, n: usize) -> Result<Tensor> {
        let (rows, vocab_size) = self.buffer.dims2()?;
        if n > rows {
            self.buffer =
                Tensor::zeros((n.next_power_of_two(), vocab_size), DType::F32, &Device::Cpu)?;
        }
        Ok(self.buffer.narrow(0, 0, n)?)
    }
}
