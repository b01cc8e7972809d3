//! The options by which a model is loaded and run: one struct for the CPU and for GPUs.

use crate::Result;
use cresset_kernels::DeviceOps;

#[derive(Clone)]
pub struct ModelOptions {
    /// The GPU that computes the model; `None` is the CPU.
    pub gpu: Option<DeviceOps>,
    /// Further GPUs of its group, which compute the model together with it: the ranks from 1 on.
    pub further_ranks: Vec<DeviceOps>,
    /// Worker threads, the engine's own included: they compute on the CPU, and convert the weights
    /// for a GPU.
    pub threads: usize,
    /// Turns every weight into f32 at load: the exact reference mode. On a GPU, activations and
    /// cache are then f32 too, and bf16 otherwise.
    pub dequantise: bool,
    /// Products with quantised weights round activations to eight bits instead of sixteen: on the
    /// CPU those with integers, for which not every machine has instructions; on a GPU those with
    /// weights of E4M3.
    pub byte_activations: bool,
    /// On a GPU, with activations in bf16: keys and values are kept in eight bits.
    pub fp8_cache: bool,
    /// On a GPU: each row has the same bits whichever other rows are in its step. On the CPU that
    /// always holds.
    pub deterministic: bool,
    /// Bytes for the KV cache in the machine's own memory. A GPU's cache has a share of its own.
    pub kv_bytes: usize,
    /// The part of `kv_bytes` that holds states of sequences, 0 to 1, in models with recurrent
    /// layers.
    pub state_share: f64,
    /// Tokens of the first state of a prompt that is kept for later ones, in such models.
    pub state_tokens: usize,
    /// The part of a GPU's memory that the model may take, 0 to 1.
    pub gpu_memory_share: f64,
    /// Bytes of a GPU's memory that the KV cache leaves free, whoever uses the rest: for recorded
    /// steps, the driver and other programs.
    pub gpu_reserve_bytes: usize,
    /// Bytes for the KV cache on a GPU; 0 stands for all that share and reserve leave.
    pub gpu_kv_bytes: usize,
    /// Steps of up to this many rows are recorded on a GPU. 0 records none.
    pub gpu_graph_rows: usize,
    /// Tokens of a block of the KV cache.
    pub block_size: usize,
    /// Largest number of tokens in one step.
    pub max_batched_tokens: usize,
    /// Largest number of sequences in one step.
    pub max_rows: usize,
    /// Longest sequence, tokens; `None` is what the model allows.
    pub max_context: Option<usize>,
}

impl Default for ModelOptions {
    /// One thread of the CPU, and steps of moderate sizes.
    fn default() -> Self {
        Self {
            gpu: None,
            further_ranks: Vec::new(),
            threads: 1,
            dequantise: false,
            byte_activations: false,
            fp8_cache: false,
            deterministic: false,
            kv_bytes: 1 << 30,
            state_share: 0.25,
            state_tokens: 64,
            gpu_memory_share: 0.9,
            gpu_reserve_bytes: 0,
            gpu_kv_bytes: 0,
            gpu_graph_rows: 0,
            block_size: 16,
            max_batched_tokens: 512,
            max_rows: 64,
            max_context: None,
        }
    }
}

impl ModelOptions {
    /// Blocks of the KV cache that `kv_bytes` hold, beside the states.
    pub(crate) fn num_blocks(&self, block_bytes: usize, state_bytes: usize) -> Result<usize> {
        let left = self.kv_bytes.saturating_sub(state_bytes);
        match left / block_bytes {
            0 => Err(crate::Error::OutOfMemory(format!(
                "the KV cache may take {left} bytes, but one block of {} tokens takes \
                 {block_bytes}; allow more",
                self.block_size
            ))),
            blocks => Ok(blocks),
        }
    }

    /// States of sequences, of so many bytes each, that their share of `kv_bytes` holds. A sequence
    /// that runs may take two.
    pub(crate) fn num_states(&self, bytes: usize) -> Result<usize> {
        let most = (self.kv_bytes as f64 * self.state_share) as usize;
        match most.checked_div(bytes) {
            None => Ok(0),
            Some(0 | 1) => Err(crate::Error::OutOfMemory(format!(
                "states of sequences may take {most} bytes, {} of the KV cache, but a sequence \
                 needs two of {bytes} bytes; allow more for the cache or for them",
                self.state_share
            ))),
            Some(states) => Ok(states),
        }
    }
}
