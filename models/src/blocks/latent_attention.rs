//! Multi-head latent attention. DeepSeek-AI 2024, "DeepSeek-V2".
//!
//! Each token caches one vector for all heads, from which a head's keys and values would be
//! computed by matrices of its own, and behind it the one key that is rotated. These matrices are
//! moved to the other side of the products: a head's query is multiplied by the one of its keys,
//! and what the head reads of the vectors by the one of its values. So all heads attend to the
//! cached vectors as they are, prompts as single tokens, and both get the same bits.

use crate::Result;
use crate::config::{LatentConfig, ModelConfig};
use crate::decoder::rope::RopeBuffers;
use crate::decoder::{Activations, LayerLoader, LayerStep, Stream};
use crate::planted::{OpFault, argument, other_pairs};
use cresset_kernels::Ops;
use cresset_kernels::attention::{AttentionArgs, AttentionShape};
use cresset_kernels::linear::HeadLinearArgs;
use cresset_kernels::norm::NormColumnsArgs;
use cresset_kernels::rope::RopeLatentArgs;
use std::sync::Arc;

pub struct LatentAttention<O: Ops> {
    config: LatentConfig,
    query_vector: Option<Compressed<O>>,
    /// `[heads * plain, …]` and `[heads * rotated, …]`: the two parts of queries, computed from
    /// that vector or from the layer's input.
    query_parts: [O::Matrix; 2],
    /// What is cached: the vector, which is normed, and the key.
    latent: Compressed<O>,
    /// `[heads * rank, plain]`: by these, queries meet the vectors in place of keys.
    key_heads: O::Matrix,
    /// `[heads * value, rank]`: by these, what was read of the vectors becomes values.
    value_heads: O::Matrix,
    output: O::Matrix,
    output_bias: Option<O::Buffer>,
    rope: Arc<RopeBuffers<O>>,
    /// `[tokens, heads * plain]` and `[tokens, heads * rotated]`
    parts: [Activations<O>; 2],
    /// `[tokens, heads * rank]`: the first part of queries as it meets the vectors, and then what
    /// the heads read of them.
    in_latent: Activations<O>,
    /// `[tokens, heads * (rank + rotated)]`
    queries: Activations<O>,
    /// `[tokens, heads * value]`
    values: Activations<O>,
    /// `[logits rows, heads * value]`
    selected: Activations<O>,
}

/// A vector that is computed from the layer's input, the first columns of which are normed.
struct Compressed<O: Ops> {
    weight: O::Matrix,
    bias: Option<O::Buffer>,
    norm: O::Buffer,
    /// `[tokens, the vector's length]`
    vector: Activations<O>,
}

/// The epsilon of these norms, whatever that of the others is.
const EPSILON: f32 = 1e-6;

impl<O: Ops> Compressed<O> {
    /// Loads the matrix and the norm of these two names; `lens` are those of the vector and of its
    /// normed part.
    fn load(
        l: &mut LayerLoader<O>,
        names: [&str; 2],
        [len, normed]: [usize; 2],
        activations: &'static str,
    ) -> Option<Self> {
        let [matrix, norm] = names.map(|name| format!("{}self_attn.{name}.", l.prefix()));
        let name = |part: &str| format!("{matrix}{part}");
        let weight = l.tensors.matrix(&name("weight"), len, l.spec.config.hidden_size);
        let bias = l.tensors.bias_if(l.spec.options.qkv_bias, &[(&name("bias"), len)]);
        let norm = l.tensors.norm(&format!("{norm}weight"), normed);
        let (weight, bias, norm) = (weight?, bias?, norm?);
        Some(Self { weight, bias, norm, vector: l.rows(activations, len)? })
    }

    /// `x.input()` → `vector`.
    fn compute<'a>(&'a self, s: &LayerStep<'a, O>, x: &Stream<'a, O>) -> Result<O::View<'a>> {
        let vector = self.vector.first(x.rows());
        s.whole_linear(&self.weight, self.bias.as_ref(), x.input(), vector)?;
        s.ops.norm_columns(&NormColumnsArgs {
            x: vector,
            stride: self.vector.width,
            first: 0,
            weight: O::view(&self.norm),
            eps: argument(OpFault::Epsilon, EPSILON, |eps| eps * 1e3),
        })?;
        Ok(vector)
    }
}

/// Loads the vector from which queries are computed, if there is one, and the matrices of their two
/// parts.
fn load_queries<O: Ops>(
    l: &mut LayerLoader<O>,
    prefix: &str,
    config: LatentConfig,
) -> Option<(Option<Compressed<O>>, [O::Matrix; 2])> {
    let &ModelConfig { heads, hidden_size, .. } = &l.spec.config;
    let (vector, matrix) = match config.query_rank {
        Some(rank) => {
            let names = ["q_a_proj", "q_a_layernorm"];
            (Compressed::load(l, names, [rank; 2], "latent query").map(Some), "q_b_proj")
        }
        None => (Some(None), "q_proj"),
    };
    let (name, width) =
        (format!("{prefix}self_attn.{matrix}.weight"), config.query_rank.unwrap_or(hidden_size));
    let parts = [config.plain, config.rotated];
    let parts = l.tensors.split_heads(&name, heads, parts, [1, 1], width);
    Some((vector?, parts?))
}

impl<O: Ops> LatentAttention<O> {
    /// `prefix` ends with a dot.
    pub fn load(l: &mut LayerLoader<O>, prefix: &str, config: LatentConfig) -> Option<Self> {
        let LatentConfig { rank, plain, rotated, value, .. } = config;
        let &ModelConfig { heads, hidden_size: hidden, .. } = &l.spec.config;
        let queries = load_queries(l, prefix, config);
        let names = ["kv_a_proj_with_mqa", "kv_a_layernorm"];
        let latent = Compressed::load(l, names, [rank + rotated, rank], "latent vector");
        let of_heads = l.tensors.latent_heads(&format!("{prefix}self_attn."), heads, config);
        let name = |part: &str| format!("{prefix}self_attn.o_proj.{part}");
        let output = l.tensors.matrix(&name("weight"), hidden, heads * value);
        let presence = l.spec.options.output_bias;
        let output_bias = l.tensors.bias_if(presence, &[(&name("bias"), hidden)]);
        let ((query_vector, query_parts), latent) = (queries?, latent?);
        let ([key_heads, value_heads], output, output_bias) = (of_heads?, output?, output_bias?);
        Some(Self {
            config,
            query_vector,
            query_parts,
            latent,
            key_heads,
            value_heads,
            output,
            output_bias,
            rope: l.rope()?,
            parts: [
                l.rows("latent queries not rotated", heads * plain)?,
                l.rows("latent queries rotated", heads * rotated)?,
            ],
            in_latent: l.rows("latent results", heads * rank)?,
            queries: l.rows("latent queries", heads * (rank + rotated))?,
            values: l.rows("latent values", heads * value)?,
            selected: l.selected_rows("latent values selected", heads * value)?,
        })
    }

    /// `x.input()` → `x.sublayer_out()`, with the tokens' vectors written into the cache.
    pub fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        self.project(s, x)?;
        if s.ends_here(x) {
            return Ok(());
        }
        self.attend(s, x)?;
        let (read, values) = (self.in_latent.first(x.rows()), self.values.first(x.rows()));
        by_heads(s, &self.value_heads, read, values)?;
        let values = s.select_rows(x, &self.values, &self.selected)?;
        let (bias, out) = (self.output_bias.as_ref(), x.sublayer_out());
        s.linear(&self.output, bias, values.first(x.rows()), out)?;
        s.add_ranks(out)
    }

    /// `x.input()` → the two parts of queries, the first as it meets the vectors.
    fn query<'a>(&'a self, s: &LayerStep<'a, O>, x: &Stream<'a, O>) -> Result<[O::View<'a>; 2]> {
        let from = match &self.query_vector {
            Some(compressed) => compressed.compute(s, x)?,
            None => x.input(),
        };
        let [plain, rotary] = self.parts.each_ref().map(|part| part.first(x.rows()));
        for (weight, part) in self.query_parts.iter().zip([plain, rotary]) {
            s.linear(weight, None, from, part)?;
        }
        let absorbed = self.in_latent.first(x.rows());
        by_heads(s, &self.key_heads, plain, absorbed)?;
        Ok([absorbed, rotary])
    }

    /// `x.input()` → the vectors and keys in the cache, `queries`.
    fn project<'a>(&'a self, s: &LayerStep<'a, O>, x: &Stream<'a, O>) -> Result<()> {
        let (latent, [plain, rotary]) = (self.latent.compute(s, x)?, self.query(s, x)?);
        let cache = s.kv.of_layer(s.layer);
        Ok(s.ops.rope_latent(&RopeLatentArgs {
            plain,
            rotary,
            latent,
            heads: s.config.heads,
            rank: self.config.rank,
            positions: s.batch.positions,
            slots: s.batch.groups[cache.group].slots,
            table: argument(OpFault::RotationPairs, self.rope.table(), other_pairs),
            queries: self.queries.first(x.rows()),
            cache: cache.k,
            block_size: s.kv.block_size,
        })?)
    }

    /// `queries` and the cache → `in_latent`.
    fn attend<'a>(&'a self, s: &LayerStep<'a, O>, x: &Stream<'a, O>) -> Result<()> {
        let &ModelConfig { heads, head_dim, attention_scale, .. } = s.config;
        let cache = s.kv.of_layer(s.layer);
        let shape = AttentionShape {
            q_stride: self.queries.width,
            heads,
            kv_heads: 1,
            head_dim,
            value_prefix: Some(self.config.rank),
            block_size: s.kv.block_size,
            scale: argument(OpFault::AttentionScale, attention_scale, |scale| scale * 1.02),
            window: argument(OpFault::AttentionWindow, None, |_| Some(head_dim)),
            softcap: None,
        };
        Ok(s.ops.attend(&AttentionArgs {
            q: self.queries.first(x.rows()),
            k_cache: cache.k,
            v_cache: cache.v,
            sinks: None,
            shape,
            sequences: s.batch.groups[cache.group].sequences,
            out: self.in_latent.first(x.rows()),
        })?)
    }
}

/// Multiplies each head's part of `x` by the head's own matrix.
fn by_heads<'a, O: Ops>(
    s: &LayerStep<'a, O>,
    w: &'a O::Matrix,
    x: O::View<'a>,
    out: O::View<'a>,
) -> Result<()> {
    let (w, heads) = (O::matrix(w), s.config.heads);
    Ok(s.ops.head_linear(&HeadLinearArgs { x, w, heads, out })?)
}
