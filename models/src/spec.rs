//! What a decoder is built from: its sizes, which parts its layers have, and how its files name
//! them. Architectures read it from configs; the loader, the blocks and the decoder follow it.

use crate::error::damaged;
use crate::{ModelConfig, Result};
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;
use std::path::Path;

/// A decoder's shape and how its layers are made, as read from an architecture's config.
pub struct ArchSpec {
    pub config: ModelConfig,
    pub options: LayerOptions,
}

/// The kinds of layers. Architectures whose layers have the same parts in the same order share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    Llama,
    Gemma2,
    Olmo2,
    Gemma4(Gemma4Parts),
}

/// The order of the values in a tensor that holds the matrices of all experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FusedExperts {
    /// The matrices stand one below the other. Gate and up may share a tensor.
    Stacked,
    /// The same, or each matrix is transposed: the tensor's shape tells. Gate and up share one.
    StackedOrTransposed,
    /// Each matrix is transposed, unless it is in MXFP4. The rows of gate and of up take turns.
    InterleavedTransposed,
}

/// Norms on Q and K before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorms {
    None,
    /// Each head is normed, all with one weight.
    EachHead,
    /// All heads are normed as one vector.
    AllHeads,
}

/// The parts of Gemma 4 that not all its models have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemma4Parts {
    /// The width of a token's input for each layer; 0 without them.
    pub input_width: usize,
    /// The rows of the table of those inputs.
    pub input_rows: usize,
    /// Layers that read the K and V of another have an MLP of twice the width.
    pub double_wide: bool,
}

/// Which parts the layers of an architecture have, and how their files name them.
#[derive(Clone, Copy, Debug)]
pub struct LayerOptions {
    pub layer: LayerKind,
    pub rope_style: RopeStyle,
    pub activation: Activation,
    /// Biases of Q, K and V.
    pub qkv_bias: Presence,
    /// Bias of the attention's output projection.
    pub output_bias: Presence,
    pub mlp_bias: Presence,
    pub qk_norm: QkNorms,
    /// Each head of V is normed, without weights.
    pub value_norm: bool,
    /// In layers without a window V is what K is before its norm.
    pub full_key_is_value: bool,
    /// A gate on the results of attention, whose rows follow those of each head of Q.
    pub attention_gate: bool,
    /// A score for each head that takes part in the softmax of attention and has no value.
    pub sinks: bool,
    /// Biases of experts and of their router.
    pub expert_bias: bool,
    /// A factor for each expert, by which its weights are multiplied.
    pub expert_factors: bool,
    pub fused_experts: FusedExperts,
    /// Layers behind the model's that predict further tokens. The first is that of the head which
    /// guesses tokens, where one is wanted; the others are not used.
    pub further_layers: usize,
    pub names: NameMap,
}

impl LayerOptions {
    /// Llama's layer with SwiGLU, no biases, no QK-norm.
    pub(crate) const fn plain(rope_style: RopeStyle) -> Self {
        Self {
            layer: LayerKind::Llama,
            rope_style,
            activation: Activation::Silu,
            qkv_bias: Presence::Never,
            output_bias: Presence::Never,
            mlp_bias: Presence::Never,
            qk_norm: QkNorms::None,
            value_norm: false,
            full_key_is_value: false,
            attention_gate: false,
            sinks: false,
            expert_bias: false,
            expert_factors: false,
            fused_experts: FusedExperts::Stacked,
            further_layers: 0,
            names: NameMap::USUAL,
        }
    }
}

impl ArchSpec {
    /// Refuses sizes that contradict each other.
    pub(crate) fn checked(self, path: &Path) -> Result<Self> {
        self.config.check().map_err(|what| damaged(path, &what))?;
        Ok(self)
    }
}

/// Whether an architecture has a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    Never,
    Optional,
    Always,
}

impl Presence {
    pub fn when(flag: bool) -> Self {
        if flag { Self::Always } else { Self::Never }
    }
}

/// The differences of an architecture's names and conventions in files from the usual ones.
#[derive(Clone, Copy, Debug)]
pub struct NameMap {
    /// Modules or tensors of a layer, or tensors of the model, that have another name in GGUF: HF
    /// name, GGUF name.
    pub gguf: &'static [(&'static str, &'static str)],
    /// Parts of the names of a layer's tensors that are others in Hugging Face's files: the usual
    /// one, the one there. They are replaced in this order.
    pub hf: &'static [(&'static str, &'static str)],
    /// Whether one has to be added to the stored weights of norms.
    pub norms_less_one: bool,
}

impl NameMap {
    /// No differences.
    pub const USUAL: Self = Self { gguf: &[], hf: &[], norms_less_one: false };
}
