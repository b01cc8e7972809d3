//! The settings of the engine and of the models that it runs.

use cresset_base::section;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Makes the section of the inference engine, which ends with the settings of a model.
macro_rules! engine_section {
($($model_settings:tt)*) => { section! {
/// The inference engine.
pub struct EngineSettings {
    /// Where models run: `cpu`, `cuda:0` (the first NVIDIA GPU; `cuda:1` the second), or `auto`:
    /// the first GPU where the build and the machine have one that this build supports, with
    /// `gpu_least_free_mib` free, else the CPU. A GPU needs a build with the feature `cuda`.
    pub device: DeviceSetting = DeviceSetting::Auto,
    /// Several devices of one kind in place of `device`, such as `["cuda:0", "cuda:1"]`: each has
    /// an engine of its own for each model that is loaded on it. `cpu` may stand more than once,
    /// and each such engine has `threads` of its own and the whole memory is shared out evenly.
    pub devices: Vec<DeviceSetting> = Vec::new(),
    /// Number of GPUs that compute each model together, for models that are too large for one:
    /// with 2, the first two of `devices` are one place for models, the next two another one.
    /// Every GPU has a share of each weight and of the key-value cache. It needs NVIDIA's NCCL.
    #[schemars(range(min = 1, max = 16))]
    pub tensor_parallel: usize = 1,
    /// Compute threads on the CPU. 0 uses every core.
    #[schemars(range(min = 0, max = 1_024))]
    pub threads: usize = 0,
    /// Vector instructions of the CPU's kernels: `auto` takes the fastest that the machine has.
    /// Answers of one set may differ from another's in the last digits of log-probabilities, so
    /// each is qualified for itself.
    pub instruction_set: InstructionSetSetting = InstructionSetSetting::Auto,
    /// Bits to which activations are rounded where they are multiplied by quantised weights. 8
    /// reads prompts faster and answers less exactly, and is qualified for itself. The CPU rounds
    /// them beside integers, and needs the instruction set `avx512`, `avx_vnni`, `avx2`, or `neon`
    /// on a machine with products of bytes. A GPU of compute capability 8.9 or later (RTX 40 and
    /// 50, H100, H200) rounds them beside weights in FP8 (E4M3), to numbers of the same form; all
    /// other activations stay in bf16 there.
    #[schemars(extend("enum" = [16, 8]))]
    pub activations: usize = 16,
    /// How a GPU keeps keys and values: `auto` in the type of the activations, `fp8` in eight bits
    /// (e4m3, with a scale for each token and head). That halves the memory and the reading of the
    /// cache, answers less exactly, and is qualified for itself. Heads have 64, 128 or 256 values.
    pub kv_dtype: KvTypeSetting = KvTypeSetting::Auto,
    /// Memory for the key-value cache of each loaded model on the CPU, MiB. On a GPU, `gpu_kv_mib`
    /// decides it.
    #[schemars(range(min = 1, max = 1 << 24))]
    pub kv_mib: usize = 1024,
    /// Memory that must be free on a GPU at the start, MiB, for `auto` to take it: where less is
    /// free, models run on the CPU.
    #[schemars(range(min = 0, max = 1 << 20))]
    pub gpu_least_free_mib: usize = 2048,
    /// Memory for weights and key-value caches of all loaded models together, MiB. Idle models make
    /// room for those that are asked for. 0 takes three quarters of the machine's memory, or of the
    /// container's limit where that is lower; on a GPU, what `gpu_memory_share` and
    /// `gpu_reserve_mib` allow, which is also the most that another value has there.
    #[schemars(range(min = 0, max = 1 << 24))]
    pub memory_mib: usize = 0,
    /// How long a request waits for its model to be loaded before it is turned away as overloaded,
    /// seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub model_wait_seconds: u64 = 60,
    /// Requests of a model that may fail in its engine in a row before the model leaves readiness
    /// and `/v1/models`. It returns when a short request of the node's own has been answered.
    #[schemars(range(min = 1, max = 1_000))]
    pub withdraw_after_failures: u32 = 5,
    /// Between two such requests of the node's own, and the longest that one may take, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub canary_pause_seconds: u64 = 30,
    /// Longest time for which a loaded model computes its boot canary before it is served, seconds:
    /// 64 positions whose tokens its qualification recorded. What is not computed by then is not
    /// compared.
    #[schemars(range(min = 1, max = 60))]
    pub boot_canary_seconds: u64 = 5,
    /// Time without a finished step, while requests wait for one, after which the node is not ready
    /// and the model is not offered, seconds; ten times the slowest step seen, where that is
    /// longer. After five times as long the process ends, so that it is started again. Raise it, or
    /// lower `max_batched_tokens`, where steps of a large model take that long.
    #[schemars(range(min = 1, max = 86_400))]
    pub stalled_step_seconds: u64 = 60,
    /// Sequences waiting to start before new ones are refused as overloaded.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub max_waiting: usize = 1024,
    /// Longest prompt plus output served, tokens. 0 takes the model's own limit.
    #[schemars(range(min = 0, max = 1 << 24))]
    pub max_context: usize = 0,
    /// Tokens of a step in which a model's proof alone runs, in the background: a request that
    /// comes meanwhile waits for such a step at most.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub background_tokens: usize = 16,
    /// Most tokens that are guessed of a sequence and computed beside its next one, from what
    /// followed the same words earlier in its text, and else by a head for further tokens that some
    /// models have. They change no answer and are never billed; a sequence in which they seldom
    /// come true, or an engine with too much to do, tries none. 0 switches them off. The CPU only,
    /// and not for answers that keep to a format.
    #[schemars(range(min = 0, max = 64))]
    pub speculative_tokens: usize = 16,
    /// Small models that guess the tokens of large ones where nothing recurs in the text: the left
    /// release is served, and the right one, with the same tokenizer, is loaded beside it. It
    /// needs no qualification, because it changes no answer; where its guesses seldom come true,
    /// it is not asked. The CPU only.
    pub draft_models: BTreeMap<String, String> = BTreeMap::new(),
    $($model_settings)*
}
} };
}

cresset_models::model_settings!(engine_section);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(extend("pattern" = "^(auto|cpu|cuda:[0-9]{1,2})$"))]
pub enum DeviceSetting {
    Auto,
    Cpu,
    /// The GPU with this number, as the driver counts them.
    Cuda(usize),
}

impl TryFrom<String> for DeviceSetting {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let plain =
            |digits: &&str| digits.len() <= 2 && digits.bytes().all(|digit| digit.is_ascii_digit());
        let number = text.strip_prefix("cuda:").filter(plain);
        match (text.as_str(), number.and_then(|digits| digits.parse().ok())) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            (_, Some(number)) => Ok(Self::Cuda(number)),
            _ => Err(format!("{text:?} is no device: use \"auto\", \"cpu\" or \"cuda:0\"")),
        }
    }
}

impl From<DeviceSetting> for String {
    fn from(device: DeviceSetting) -> Self {
        match device {
            DeviceSetting::Auto => "auto".into(),
            DeviceSetting::Cpu => "cpu".into(),
            DeviceSetting::Cuda(number) => format!("cuda:{number}"),
        }
    }
}

/// The types of keys and values in the cache, as `engine.kv_dtype` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KvTypeSetting {
    Auto,
    Fp8,
}

/// Instructions that a processor may lack, as `engine.instruction_set` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InstructionSetSetting {
    Auto,
    Avx512,
    AvxVnni,
    Avx2,
    Neon,
    Portable,
}

impl InstructionSetSetting {
    /// The set that is asked for; `None` leaves the choice to the machine.
    pub fn wanted(self) -> Option<&'static str> {
        match self {
            Self::Auto => None,
            Self::Avx512 => Some("avx512"),
            Self::AvxVnni => Some("avx_vnni"),
            Self::Avx2 => Some("avx2"),
            Self::Neon => Some("neon"),
            Self::Portable => Some("portable"),
        }
    }
}
