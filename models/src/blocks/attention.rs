//! Grouped-query self-attention with a fused QKV projection. Ainslie et al. 2023, "GQA".

use crate::Result;
use crate::config::KvHeads;
use crate::decoder::rope::RopeBuffers;
use crate::decoder::{Activations, LayerLoader, LayerStep, Stream};
use crate::loader::tensors::Optional;
use crate::planted::{OpFault, argument, other_pairs};
use crate::spec::QkNorms;
use cresset_kernels::Ops;
use cresset_kernels::activation::GateArgs;
use cresset_kernels::attention::{AttentionArgs, AttentionShape};
use cresset_kernels::norm::NormColumnsArgs;
use cresset_kernels::rope::{QkNorm, RopeArgs};
use std::sync::Arc;

pub struct SelfAttention<O: Ops> {
    qkv: O::Matrix,
    qkv_bias: Option<O::Buffer>,
    gate: Option<OutputGate<O>>,
    /// The heads of K and V, and whether they are another layer's.
    kv: KvHeads,
    shares: bool,
    /// Norms on Q and on K: of each head, or of all heads as one vector.
    qk_norm: QkNorms,
    norms: Option<[O::Buffer; 2]>,
    /// `[head_dim]`: ones, by which each head of V is normed.
    value_norm: Option<O::Buffer>,
    output: O::Matrix,
    output_bias: Option<O::Buffer>,
    rope: Arc<RopeBuffers<O>>,
    window: Option<usize>,
    /// `[heads]` f32
    sinks: Option<O::Buffer>,
    /// `[tokens, (heads + 2 * kv_heads) * head_dim]`, or Q alone.
    projected: Activations<O>,
    /// `[tokens, heads * head_dim]`: the heads' results.
    attended: Activations<O>,
    /// `[logits rows, heads * head_dim]`: the results of the rows whose logits are computed.
    selected: Activations<O>,
}

/// By the sigmoid of which the results are multiplied.
struct OutputGate<O: Ops> {
    /// `[heads * head_dim, hidden]`
    weight: O::Matrix,
    bias: Option<O::Buffer>,
    /// `[tokens, heads * head_dim]`
    values: Activations<O>,
}

/// The matrices of Q, of `q` rows, and of K and V, of `kv` rows each, as one; and that of a gate.
fn projection<O: Ops>(
    l: &mut LayerLoader<O>,
    name: impl Fn(&str) -> String,
    [q, kv]: [usize; 2],
) -> (Option<O::Matrix>, Option<O::Matrix>) {
    let (config, options) = (&l.spec.config, &l.spec.options);
    let copies_k = options.full_key_is_value && l.sliding().is_none();
    let [wq, wk, wv] = ["q_proj.weight", "k_proj.weight", "v_proj.weight"].map(&name);
    let (t, fused, hidden) = (&mut *l.tensors, name("qkv_proj.weight"), config.hidden_size);
    if options.attention_gate {
        let parts = [(&*wq, 2 * q), (&*wk, kv), (&*wv, kv)];
        return t.gated_stack(&parts, hidden, config.head_dim).unzip();
    }
    let whole = if kv == 0 {
        // The layer reads the K and V of another. Files have some that are not used.
        for unused in [&wk, &wv, &name("k_norm.weight")] {
            t.ignore_one(unused);
        }
        t.matrix(&wq, q, hidden)
    } else if copies_k {
        t.stack_of(&[(&wq, q), (&wk, kv)], hidden, 3)
    } else if t.has(&fused) {
        t.fused(&fused, &[(&wq, q), (&wk, kv), (&wv, kv)], hidden)
    } else {
        t.stack(&[(&wq, q), (&wk, kv), (&wv, kv)], hidden)
    };
    (whole, None)
}

/// The biases of the same two.
fn biases<O: Ops>(
    l: &mut LayerLoader<O>,
    name: impl Fn(&str) -> String,
    [q, kv]: [usize; 2],
) -> Option<[Optional<O::Buffer>; 2]> {
    let (config, options) = (&l.spec.config, &l.spec.options);
    let copies_k = options.full_key_is_value && l.sliding().is_none();
    let [bq, bk, bv] = ["q_proj.bias", "k_proj.bias", "v_proj.bias"].map(&name);
    let (t, presence) = (&mut *l.tensors, options.qkv_bias);
    if options.attention_gate {
        let parts = [(&*bq, 2 * q), (&*bk, kv), (&*bv, kv)];
        return t.gated_biases(presence, &parts, config.head_dim);
    }
    let bias = if kv == 0 {
        for unused in [&bk, &bv] {
            t.ignore_one(unused);
        }
        t.bias_if(presence, &[(&bq, q)])
    } else if copies_k {
        t.bias_with_copy(presence, &[(&bq, q), (&bk, kv)])
    } else {
        t.bias_if(presence, &[(&bq, q), (&bk, kv), (&bv, kv)])
    };
    Some([bias?, None])
}

impl<O: Ops> SelfAttention<O> {
    /// `prefix` ends with a dot.
    pub fn load(l: &mut LayerLoader<O>, prefix: &str) -> Option<Self> {
        let (config, options) = (&l.spec.config, &l.spec.options);
        let (own, shares) = (config.kv_heads_of(l.layer), config.donor(l.layer).is_some());
        let (q, kv) = (config.heads * own.dim, if shares { 0 } else { own.width() });
        let name = |part: &str| format!("{prefix}self_attn.{part}");
        let (qkv, gate) = projection(l, name, [q, kv]);
        let qkv_biases = biases(l, name, [q, kv]);
        let t = &mut *l.tensors;
        let lens = match options.qk_norm {
            QkNorms::None => None,
            QkNorms::EachHead => Some([own.dim; 2]),
            QkNorms::AllHeads => Some([q, kv]),
        };
        let mut norm = |(part, len): (&str, usize)| match part {
            "k" if shares => t.ones(len),
            _ => t.norm(&name(&format!("{part}_norm.weight")), len),
        };
        let norms = lens.map(|[q, k]| (norm(("q", q)), norm(("k", k))));
        let value_norm = (options.value_norm && !shares).then(|| t.ones(own.dim));
        let output = t.matrix(&name("o_proj.weight"), config.hidden_size, q);
        let output_bias =
            t.bias_if(options.output_bias, &[(&name("o_proj.bias"), config.hidden_size)]);
        let sinks = if options.sinks {
            Some(t.vector(&name("sinks"), config.heads, |sink| sink)?)
        } else {
            None
        };
        let norms = match norms {
            Some((q, k)) => Some([q?, k?]),
            None => None,
        };
        let value_norm = match value_norm {
            Some(ones) => Some(ones?),
            None => None,
        };
        let (qkv, [qkv_bias, bias]) = (qkv?, qkv_biases?);
        let (output, output_bias) = (output?, output_bias?);
        let gate = match gate {
            Some(weight) => {
                Some(OutputGate { weight, bias, values: l.rows("attention gates", q)? })
            }
            None => None,
        };
        Some(Self {
            qkv,
            qkv_bias,
            gate,
            kv: own,
            shares,
            qk_norm: options.qk_norm,
            norms,
            value_norm,
            output,
            output_bias,
            rope: l.rope()?,
            sinks,
            window: l.sliding().map(|sliding| sliding.window),
            projected: l.rows("attention qkv", q + 2 * kv)?,
            attended: l.rows("attention results", q)?,
            selected: l.selected_rows("attention results selected", q)?,
        })
    }

    /// `x.input()` → `x.sublayer_out()`, with K and V written into the cache.
    pub fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        self.project(s, x)?;
        if s.ends_here(x) {
            return Ok(());
        }
        self.attend(s, x)?;
        if let Some(OutputGate { weight, bias, values }) = &self.gate {
            let gate = values.first(x.rows());
            s.input_linear(weight, bias.as_ref(), x, gate)?;
            s.ops.gate(&GateArgs { x: self.attended.first(x.rows()), gate })?;
        }
        let attended = s.select_rows(x, &self.attended, &self.selected)?;
        let (bias, heads) = (self.output_bias.as_ref(), attended.first(x.rows()));
        let out = x.sublayer_out();
        s.linear(&self.output, bias, heads, out)?;
        s.add_ranks(out)
    }

    /// `x.input()` → K and V in the cache, Q in `projected`.
    fn project<'a>(&'a self, s: &LayerStep<'a, O>, x: &Stream<'a, O>) -> Result<()> {
        let qkv = self.projected.first(x.rows());
        s.input_linear(&self.qkv, self.qkv_bias.as_ref(), x, qkv)?;
        let (heads, eps, head_dim) = (s.config.heads, s.config.rms_norm_eps, self.kv.dim);
        let kv_heads = if self.shares { 0 } else { self.kv.count };
        let (cache, stride) = (s.kv.of_layer(s.layer), self.projected.width);
        let mut norms = self.norms.as_ref().map(|norms| norms.each_ref().map(O::view));
        if let Some(weights) = norms.take_if(|_| self.qk_norm == QkNorms::AllHeads) {
            for (weight, first) in weights.into_iter().zip([0, heads * head_dim]) {
                s.ops.norm_columns(&NormColumnsArgs { x: qkv, stride, first, weight, eps })?;
            }
        }
        if let Some(ones) = &self.value_norm {
            let (weight, stride) = (O::view(ones), self.projected.width);
            for head in heads + kv_heads..heads + 2 * kv_heads {
                let first = head * head_dim;
                s.ops.norm_columns(&NormColumnsArgs { x: qkv, stride, first, weight, eps })?;
            }
        }
        Ok(s.ops.rope_kv_write(&RopeArgs {
            qkv,
            heads,
            kv_heads,
            head_dim,
            positions: s.batch.positions,
            slots: s.batch.groups[cache.group].slots,
            table: argument(OpFault::RotationPairs, self.rope.table(), other_pairs),
            qk_norm: norms.map(|[q, k]| QkNorm { q, k, eps }),
            k_cache: cache.k,
            v_cache: cache.v,
            block_size: s.kv.block_size,
        })?)
    }

    /// `projected` and the cache → `attended`.
    fn attend<'a>(&'a self, s: &LayerStep<'a, O>, x: &Stream<'a, O>) -> Result<()> {
        let (heads, KvHeads { count: kv_heads, dim: head_dim }) = (s.config.heads, self.kv);
        let attention_scale = s.config.attention_scale;
        let cache = s.kv.of_layer(s.layer);
        let shape = AttentionShape {
            q_stride: self.projected.width,
            heads,
            kv_heads,
            head_dim,
            value_prefix: None,
            block_size: s.kv.block_size,
            scale: argument(OpFault::AttentionScale, attention_scale, |scale| scale * 1.02),
            window: argument(OpFault::AttentionWindow, self.window, |_| Some(head_dim)),
            softcap: s.config.attention_softcap,
        };
        Ok(s.ops.attend(&AttentionArgs {
            q: self.projected.first(x.rows()),
            k_cache: cache.k,
            v_cache: cache.v,
            sinks: self.sinks.as_ref().map(O::view),
            shape,
            sequences: s.batch.groups[cache.group].sequences,
            out: self.attended.first(x.rows()),
        })?)
    }
}
