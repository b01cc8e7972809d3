//! The options by which a model is loaded and run: one struct for the CPU and for GPUs.

use crate::Result;
use cresset_kernels::DeviceOps;

/// The settings of an engine that reach a model as they are written, with documentation, bounds and
/// default. `$define` is a macro that makes something of these fields: this crate its options, a
/// node the section of its configuration. So a setting is added here, and where it is used.
#[macro_export]
macro_rules! model_settings {
    ($define:ident) => {
        $define! {
            /// Share of `kv_mib` that holds states of sequences, in models with recurrent layers. A
            /// sequence that runs may need two of them; the others are kept for prompts that begin
            /// alike.
            #[schemars(range(min = 0.01, max = 0.9))]
            pub state_share: f64 = 0.25,
            /// Length at which a prompt's first state is kept in such models, tokens; further ones
            /// are at twice as many each, and at its end. A prompt that begins like an earlier one
            /// goes on from the last of them that they have in common.
            #[schemars(range(min = 16, max = 1 << 20))]
            pub state_tokens: usize = 64,
            /// Share of a GPU's memory that all loaded models together may take.
            #[schemars(range(min = 0.05, max = 1))]
            pub gpu_memory_share: f64 = 0.9,
            /// Memory of a GPU that models leave free for recorded steps, the driver, the desktop
            /// and other programs, MiB.
            #[schemars(range(min = 0, max = 1 << 20))]
            pub gpu_reserve_mib: usize = 512,
            /// Memory for the key-value cache of each loaded model on a GPU, MiB. 0 takes all that
            /// weights, workspace and reserve leave, so one model is loaded at a time; with a
            /// limit, as many as fit.
            #[schemars(range(min = 0, max = 1 << 24))]
            pub gpu_kv_mib: usize = 0,
            /// Largest decoding step that is recorded once at start and then replayed on a GPU,
            /// sequences. 0 records none.
            #[schemars(range(min = 0, max = 1_024))]
            pub gpu_graph_rows: usize = 512,
            /// On a GPU, gives the same tokens whatever else runs and however a prompt is cut, at
            /// some cost in speed. The CPU always does.
            pub deterministic: bool = false,
            /// Tokens in one block of the key-value cache.
            #[schemars(extend("enum" = [16, 32, 64]))]
            pub block_size: usize = 16,
            /// Tokens computed in one step, prompt chunks and generated tokens together.
            #[schemars(range(min = 16, max = 65_536))]
            pub max_batched_tokens: usize = 512,
            /// Sequences in one step; at most `max_batched_tokens`, since each needs a token.
            #[schemars(range(min = 1, max = 65_536))]
            pub max_rows: usize = 256,
            /// Turns every weight into f32 at load: the exact reference, at several times the
            /// memory. On a GPU, activations and cache are then f32 too, and bf16 otherwise.
            pub dequantise: bool = false,
        }
    };
}

macro_rules! model_options {
    ($($(#[doc = $about:literal])* $(#[schemars $bounds:tt])? pub $setting:ident: $type:ty =
        $default:expr,)*) => {
        #[derive(Clone)]
        pub struct ModelOptions {
            /// The GPU that computes the model; `None` is the CPU.
            pub gpu: Option<DeviceOps>,
            /// Further GPUs of its group, which compute the model together with it: the ranks from
            /// 1 on.
            pub further_ranks: Vec<DeviceOps>,
            /// Worker threads, the engine's own included: they compute on the CPU, and convert the
            /// weights for a GPU.
            pub threads: usize,
            /// Products with quantised weights round activations to eight bits instead of sixteen:
            /// on the CPU those with integers, for which not every machine has instructions; on a
            /// GPU those with weights of E4M3.
            pub byte_activations: bool,
            /// On a GPU, with activations in bf16: keys and values are kept in eight bits.
            pub fp8_cache: bool,
            /// On the CPU: a head that guesses tokens is loaded, if the model has one.
            pub guesses: bool,
            /// Bytes for the KV cache in the machine's own memory. A GPU's cache has a share of its
            /// own.
            pub kv_bytes: usize,
            /// Longest sequence, tokens; `None` is what the model allows.
            pub max_context: Option<usize>,
            $($(#[doc = $about])* pub $setting: $type,)*
        }

        impl Default for ModelOptions {
            /// One thread of the CPU, a cache of 1 GiB, and the defaults of the settings.
            fn default() -> Self {
                Self {
                    gpu: None,
                    further_ranks: Vec::new(),
                    threads: 1,
                    byte_activations: false,
                    fp8_cache: false,
                    guesses: false,
                    kv_bytes: 1 << 30,
                    max_context: None,
                    $($setting: $default,)*
                }
            }
        }
    };
}

model_settings!(model_options);

impl ModelOptions {
    /// Most tokens of a sequence that are scheduled and not committed: those of two steps.
    pub(crate) fn most_in_flight(&self) -> usize {
        2 * self.max_batched_tokens
    }

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

    /// The number of states of `bytes` bytes that their share of `kv_bytes` holds. A sequence that
    /// runs may take two.
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
