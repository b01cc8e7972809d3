//! The decoder skeleton on a device: the same ops in the same order as on the CPU. Nothing here
//! depends on what changes from step to step but the shape, so a step can be recorded and replayed.

use super::cache::KvCache;
use super::inputs::{Inputs, Sequences, Shape};
use super::store::Device;
use super::workspace::{Activations, Workspace};
use super::{Options, max_splits};
use crate::arch::Blueprint;
use crate::blocks::attention::Attention;
use crate::decoder::Weights;
use crate::decoder::rope;
use crate::{Error, ModelConfig, Result};
use cresset_kernels::activation::gpu::gated;
use cresset_kernels::attention::gpu::{Paged, decode, prefill};
use cresset_kernels::embedding::gpu::{Gather, gather, gather_rows};
use cresset_kernels::gpu::{Buffer, Gpu, View};
use cresset_kernels::linear::gpu::{Linear, Mode, linear};
use cresset_kernels::norm::gpu::{Norm, norm};
use cresset_kernels::rope::gpu::{QkNorm, RopeKv, rope_kv_write};
use cresset_kernels::rope::{RopeStyle, RopeTable};
use cresset_kernels::sampling::gpu::{History, RESULT_WORDS, Sample, sample, soft_cap};
use std::ops::Range;
use std::sync::Arc;

pub struct Decoder {
    gpu: Arc<dyn Gpu>,
    pub config: ModelConfig,
    weights: Weights<Device>,
    style: RopeStyle,
    rope: Rope,
    /// Of the layers with a sliding window, where it is another.
    sliding_rope: Option<Rope>,
    mode: Mode,
    pub workspace: Workspace,
}

/// `[positions, rotary_dim / 2]` f32 each.
struct Rope {
    rotary_dim: usize,
    cos: Buffer,
    sin: Buffer,
}

impl Rope {
    fn new(gpu: &Arc<dyn Gpu>, table: &RopeTable) -> Result<Self> {
        let upload = |values: &candle_core::Tensor| {
            let values: Vec<f32> = values.flatten_all()?.to_vec1()?;
            Ok::<_, Error>(Buffer::from_slice(gpu, &values)?)
        };
        Ok(Self {
            rotary_dim: 2 * table.cos.dims()[1],
            cos: upload(&table.cos)?,
            sin: upload(&table.sin)?,
        })
    }
}

/// What the layers of a step take.
struct Step<'a> {
    kv: &'a KvCache,
    inputs: &'a Inputs,
    shape: &'a Shape,
}

impl Decoder {
    pub fn new(blueprint: Blueprint, weights: Weights<Device>, options: &Options) -> Result<Self> {
        let Blueprint { config, recipe } = blueprint;
        let gpu = &options.gpu;
        let rope = |rope| {
            Rope::new(gpu, &rope::table(rope, recipe.rope_style, options.positions(&config))?)
        };
        let sliding = config.sliding.as_ref().and_then(|sliding| sliding.rope.as_ref());
        let sizes = (options.max_tokens(), options.max_rows);
        Ok(Self {
            gpu: gpu.clone(),
            weights,
            style: recipe.rope_style,
            rope: rope(&config.rope)?,
            sliding_rope: sliding.map(rope).transpose()?,
            mode: if options.deterministic { Mode::Invariant } else { Mode::Fast },
            workspace: Workspace::new(gpu, &config, options.kind, sizes, |rows| {
                max_splits(options, &config, rows)
            })?,
            config,
        })
    }

    /// From token ids to the tokens of the wanted rows, and their results.
    pub fn step(&self, kv: &KvCache, inputs: &Inputs, shape: &Shape) -> Result<()> {
        self.forward(kv, inputs, shape)?;
        let (w, rows) = (&self.workspace, shape.rows);
        if rows == 0 {
            return Ok(());
        }
        let Sequences { header, seq_lens, tables } = inputs.all(shape);
        let args = Sample {
            logits: self.logits(rows),
            vocab_size: self.config.vocab_size,
            params: inputs.sampling(shape),
            history: History {
                tokens: kv.tokens.view(),
                seq_lens,
                tables,
                header,
                block_size: kv.block_size,
            },
            tokens: w.tokens.view().slice(0..rows),
            results: w.results.view().slice(0..rows * RESULT_WORDS),
            workspace: w.sampling.view(),
        };
        Ok(sample(&*self.gpu, &args)?)
    }

    /// `[rows, vocab_size]` of the last step, until they are sampled from.
    pub fn logits(&self, rows: usize) -> View {
        self.workspace.logits.view().slice(0..rows * self.config.vocab_size)
    }

    /// K and V of every token into the cache, and the logits of the wanted rows.
    pub fn forward(&self, kv: &KvCache, inputs: &Inputs, shape: &Shape) -> Result<()> {
        let (gpu, w, weights) = (&*self.gpu, &self.workspace, &self.weights);
        let mut x = w.first(shape.tokens);
        let embedding = Gather {
            table: weights.embedding.view(),
            width: self.config.hidden_size,
            ids: inputs.ids(shape),
            feedback: inputs.feedback(shape),
            previous: w.tokens.view(),
            slots: inputs.slots(shape),
            history: kv.tokens.view(),
            scale: self.config.embedding_scale,
            out: x.residual,
        };
        gather(gpu, &embedding)?;
        self.norm(x.residual, None, &weights.blocks[0].attention_norm, x.normed)?;
        let step = Step { kv, inputs, shape };
        for i in 0..weights.blocks.len() {
            let last = i + 1 == weights.blocks.len();
            self.project(&step, i, &x)?;
            if last && shape.rows == 0 {
                return Ok(());
            }
            self.attend(&step, i, &x)?;
            if last && shape.rows < shape.tokens {
                x = self.pick(&step, &x)?;
            }
            self.finish_block(i, &x)?;
        }
        let head = weights.head.as_ref().unwrap_or(&weights.embedding);
        let logits = self.logits(shape.rows);
        self.linear(head, None, x.normed, logits, self.config.hidden_size)?;
        self.config.logits_softcap.map_or(Ok(()), |cap| Ok(soft_cap(gpu, logits, cap)?))
    }

    /// `normed` → K and V in the cache, Q in `qkv`.
    fn project(&self, s: &Step, layer: usize, x: &Activations) -> Result<()> {
        let (c, attention) = (&self.config, &self.weights.blocks[layer].attention);
        self.linear(&attention.qkv, attention.qkv_bias.as_ref(), x.normed, x.qkv, c.hidden_size)?;
        let sliding = self.sliding_rope.as_ref().filter(|_| self.window(layer).is_some());
        let rope = sliding.unwrap_or(&self.rope);
        let qk_norm = attention.qk_norm.as_ref();
        let args = RopeKv {
            qkv: x.qkv,
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            positions: s.inputs.positions(s.shape),
            slots: s.inputs.slots(s.shape),
            rotary_dim: rope.rotary_dim,
            cos: rope.cos.view(),
            sin: rope.sin.view(),
            style: self.style,
            qk_norm: qk_norm.map(|[q, k]| QkNorm { q: q.view(), k: k.view(), eps: c.rms_norm_eps }),
            k_cache: s.kv.k[layer].view(),
            v_cache: s.kv.v[layer].view(),
        };
        Ok(rope_kv_write(&*self.gpu, &args)?)
    }

    /// `qkv` and the cache → `attended`.
    fn attend(&self, s: &Step, layer: usize, x: &Activations) -> Result<()> {
        let (c, shape, gpu) = (&self.config, s.shape, &*self.gpu);
        let (stride, width) = ((c.heads + 2 * c.kv_heads) * c.head_dim, c.heads * c.head_dim);
        let args = |of: Sequences, tokens: Range<usize>| Paged {
            q: x.qkv.slice(tokens.start * stride..tokens.end * stride),
            q_stride: stride,
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            k_cache: s.kv.k[layer].view(),
            v_cache: s.kv.v[layer].view(),
            block_size: s.kv.block_size,
            seq_lens: of.seq_lens,
            block_tables: of.tables,
            header: of.header,
            scale: c.attention_scale,
            window: self.window(layer),
            softcap: c.attention_softcap,
            out: x.attended.slice(tokens.start * width..tokens.end * width),
        };
        if shape.decodes > 0 {
            let args = args(s.inputs.decodes(shape), 0..shape.decodes);
            decode(gpu, &args, shape.max_splits, self.workspace.attention.view())?;
        }
        if shape.decodes < shape.sequences {
            let args = args(s.inputs.others(shape), shape.decodes..shape.tokens);
            prefill(gpu, &args, s.inputs.cu_seqlens(shape), shape.most_queries)?;
        }
        Ok(())
    }

    /// The state of the wanted rows alone.
    fn pick(&self, s: &Step, x: &Activations) -> Result<Activations> {
        let (picked, rows) = (self.workspace.wanted(s.shape.rows), s.inputs.wanted(s.shape));
        let c = &self.config;
        gather_rows(&*self.gpu, x.residual, c.hidden_size, rows, picked.residual)?;
        gather_rows(&*self.gpu, x.attended, c.heads * c.head_dim, rows, picked.attended)?;
        Ok(picked)
    }

    /// `attended` → the residual stream behind the block, and `normed` for the next one.
    fn finish_block(&self, layer: usize, x: &Activations) -> Result<()> {
        let (c, blocks) = (&self.config, &self.weights.blocks);
        let block = &blocks[layer];
        let Attention { output, output_bias, .. } = &block.attention;
        self.linear(output, output_bias.as_ref(), x.attended, x.delta, c.heads * c.head_dim)?;
        self.norm_delta(block.attended_norm.as_ref(), x)?;
        self.norm(x.residual, Some(x.delta), &block.mlp_norm, x.normed)?;
        let mlp = &block.mlp;
        self.linear(&mlp.gate_up, mlp.gate_up_bias.as_ref(), x.normed, x.gate_up, c.hidden_size)?;
        gated(&*self.gpu, mlp.activation, x.gate_up, c.intermediate_size, x.activated)?;
        self.linear(&mlp.down, mlp.down_bias.as_ref(), x.activated, x.delta, c.intermediate_size)?;
        self.norm_delta(block.activated_norm.as_ref(), x)?;
        let next = blocks.get(layer + 1).map_or(&self.weights.norm, |next| &next.attention_norm);
        self.norm(x.residual, Some(x.delta), next, x.normed)
    }

    fn norm_delta(&self, weight: Option<&Buffer>, x: &Activations) -> Result<()> {
        weight.map_or(Ok(()), |weight| self.norm(x.delta, None, weight, x.delta))
    }

    fn norm(&self, x: View, delta: Option<View>, weight: &Buffer, out: View) -> Result<()> {
        Ok(norm(
            &*self.gpu,
            &Norm { x, delta, weight: weight.view(), eps: self.config.rms_norm_eps, out },
        )?)
    }

    fn linear(
        &self,
        w: &Buffer,
        bias: Option<&Buffer>,
        x: View,
        out: View,
        cols: usize,
    ) -> Result<()> {
        let (w, bias) = (w.view(), bias.map(Buffer::view));
        Ok(linear(
            &*self.gpu,
            &Linear { x, w, bias, rows: w.len() / cols, cols, out, mode: self.mode },
        )?)
    }

    fn window(&self, layer: usize) -> Option<usize> {
        self.config
            .sliding
            .as_ref()
            .filter(|sliding| sliding.layers[layer])
            .map(|sliding| sliding.window)
    }
}
