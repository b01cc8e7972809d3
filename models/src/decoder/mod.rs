//! The decoder skeleton every architecture fills: embedding, pre-norm blocks, final norm, output
//! projection.

pub mod rope;
pub mod workspace;

use crate::blocks::attention::{Attention, Step};
use crate::blocks::mlp::Mlp;

use crate::arch::Blueprint;
use crate::config::RopeScaling;
use crate::loader::LoadOptions;
use crate::loader::store::{Host, Store};
use crate::loader::tensors::Tensors;
use crate::{Error, ForwardBatch, KvCache, Model, ModelConfig, Result};
use candle_core::{DType, Tensor};
use cresset_kernels::Compute;
use cresset_kernels::activation::soft_cap;
use cresset_kernels::embedding::{gather, gather_rows};
use cresset_kernels::linear::{Weight, linear};
use cresset_kernels::norm::{add_rms_norm, rms_norm};
use cresset_kernels::rope::RopeTable;
use workspace::{Logits, Workspace};

pub struct Decoder {
    config: ModelConfig,
    weights: Weights,
    rope: RopeTable,
    /// Of the layers with a sliding window, where it is another.
    sliding_rope: Option<RopeTable>,
    compute: Compute,
    workspace: Workspace,
    /// `residual` and `attended` of the rows whose logits are wanted, same shapes.
    wanted: [Tensor; 2],
    logits: Logits,
}

pub struct Weights<S: Store = Host> {
    pub embedding: S::Matrix,
    pub blocks: Vec<Block<S>>,
    pub norm: S::Vector,
    /// `None`: the embedding's transpose.
    pub head: Option<S::Matrix>,
}

pub struct Block<S: Store = Host> {
    pub attention_norm: S::Vector,
    pub attention: Attention<S>,
    /// Of what the attention adds to the residual stream.
    pub attended_norm: Option<S::Vector>,
    pub mlp_norm: S::Vector,
    pub mlp: Mlp<S>,
    /// Of what the MLP adds.
    pub activated_norm: Option<S::Vector>,
}

impl<S: Store> Block<S> {
    fn load(t: &mut Tensors<S>, index: usize, blueprint: &Blueprint) -> Option<Self> {
        let Blueprint { config, recipe } = blueprint;
        let prefix = format!("model.layers.{index}.");
        let mut norm = |name| t.norm(&format!("{prefix}{name}.weight"), config.hidden_size);
        let attention_norm = norm("input_layernorm");
        let (attended_norm, mlp_norm, activated_norm) = if recipe.sub_layer_norms {
            let (attended, activated) =
                (norm("post_attention_layernorm"), norm("post_feedforward_layernorm"));
            (attended.map(Some), norm("pre_feedforward_layernorm"), activated.map(Some))
        } else {
            (Some(None), norm("post_attention_layernorm"), Some(None))
        };
        let attention = Attention::load(t, &prefix, config, recipe);
        let mlp = Mlp::load(t, &prefix, config, recipe);
        Some(Self {
            attention_norm: attention_norm?,
            attention: attention?,
            attended_norm: attended_norm?,
            mlp_norm: mlp_norm?,
            mlp: mlp?,
            activated_norm: activated_norm?,
        })
    }
}

impl<S: Store> Weights<S> {
    /// Takes every tensor; `None` is a problem that the tensors will tell.
    pub fn load(blueprint: &mut Blueprint, t: &mut Tensors<S>) -> Option<Self> {
        let config = &blueprint.config;
        let embedding =
            t.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size);
        let blocks: Vec<_> = (0..config.layers).map(|i| Block::load(t, i, blueprint)).collect();
        let norm = t.norm("model.norm.weight", config.hidden_size);
        let head = if config.tied_embeddings {
            Some(None)
        } else {
            t.matrix("lm_head.weight", config.vocab_size, config.hidden_size).map(Some)
        };
        // Older checkpoints store what is computed here, and tied ones may store the embedding
        // twice.
        t.ignore("rotary_emb.inv_freq");
        if config.tied_embeddings {
            t.ignore("lm_head.weight");
        }
        if t.has(ROPE_FACTORS) {
            let factors = t.numbers(ROPE_FACTORS, config.rope.rotary_dim / 2)?;
            blueprint.config.rope.scaling = RopeScaling::Factors(factors);
        }
        Some(Self {
            embedding: embedding?,
            blocks: blocks.into_iter().collect::<Option<_>>()?,
            norm: norm?,
            head: head?,
        })
    }
}

/// Divisors of the rotary frequencies, where the file has them.
const ROPE_FACTORS: &str = "rope_freqs.weight";

impl Decoder {
    pub fn new(blueprint: Blueprint, weights: Weights, options: &LoadOptions) -> Result<Self> {
        if !options.device.is_cpu() {
            return Err(Error::Unsupported("this build computes on the CPU only".into()));
        }
        let Blueprint { mut config, recipe } = blueprint;
        if weights.blocks.iter().any(|block| block.mlp.is_quantised()) {
            config.kv_dtype = DType::F16;
        }
        let positions = options.max_context.min(config.max_positions);
        let workspace = Workspace::new(&config, options.max_batched_tokens)?;
        let table = |rope| rope::table(rope, recipe.rope_style, positions);
        let sliding = config.sliding.as_ref().and_then(|sliding| sliding.rope.as_ref());
        Ok(Self {
            rope: table(&config.rope)?,
            sliding_rope: sliding.map(table).transpose()?,
            compute: options.compute.clone(),
            wanted: [workspace.residual.zeros_like()?, workspace.attended.zeros_like()?],
            workspace,
            logits: Logits::new(config.vocab_size)?,
            config,
            weights,
        })
    }

    /// All blocks. Of the last one, what comes after the write into the cache is computed for the
    /// wanted rows alone; they end up, normed, in the workspace that is returned.
    fn blocks(&self, batch: &ForwardBatch, kv: &KvCache) -> Result<Workspace> {
        let (c, eps) = (&self.compute, self.config.rms_norm_eps);
        let mut w = self.workspace.first(batch.input_ids.len())?;
        gather(
            c,
            &self.weights.embedding,
            &batch.input_ids,
            self.config.embedding_scale,
            &w.residual,
        )?;
        let blocks = &self.weights.blocks;
        rms_norm(c, &w.residual, &blocks[0].attention_norm, eps, &w.normed)?;
        for (i, block) in blocks.iter().enumerate() {
            let (step, k, v) = (self.step(i, batch), &kv.k[i], &kv.v[i]);
            block.attention.project(&step, &w, k, v)?;
            let next = blocks.get(i + 1);
            if next.is_none() && batch.logits_indices.is_empty() {
                break;
            }
            Attention::attend(&step, &w, k, v)?;
            if next.is_none() {
                w = self.pick(w, &batch.logits_indices)?;
            }
            block.attention.output(c, &w)?;
            self.norm_delta(block.attended_norm.as_ref(), &mut w)?;
            add_rms_norm(c, &w.residual, &w.delta, &block.mlp_norm, eps, &w.normed)?;
            block.mlp.forward(c, &w)?;
            self.norm_delta(block.activated_norm.as_ref(), &mut w)?;
            let norm = next.map_or(&self.weights.norm, |next| &next.attention_norm);
            add_rms_norm(c, &w.residual, &w.delta, norm, eps, &w.normed)?;
        }
        Ok(w)
    }

    fn step<'a>(&'a self, layer: usize, batch: &'a ForwardBatch) -> Step<'a> {
        let sliding = self.config.sliding.as_ref().filter(|sliding| sliding.layers[layer]);
        Step {
            compute: &self.compute,
            config: &self.config,
            rope: sliding.and(self.sliding_rope.as_ref()).unwrap_or(&self.rope),
            window: sliding.map(|sliding| sliding.window),
            batch,
        }
    }

    /// `delta`, normed; `normed` is lost.
    fn norm_delta(&self, weights: Option<&Tensor>, w: &mut Workspace) -> Result<()> {
        if let Some(weights) = weights {
            rms_norm(&self.compute, &w.delta, weights, self.config.rms_norm_eps, &w.normed)?;
            std::mem::swap(&mut w.delta, &mut w.normed);
        }
        Ok(())
    }

    /// The state of the given rows alone; all of them need no copy.
    fn pick(&self, w: Workspace, rows: &[u32]) -> Result<Workspace> {
        if rows.len() == w.residual.dims()[0] {
            return Ok(w);
        }
        let [residual, attended] = &self.wanted;
        let picked = Workspace {
            residual: residual.narrow(0, 0, rows.len())?,
            attended: attended.narrow(0, 0, rows.len())?,
            ..self.workspace.first(rows.len())?
        };
        gather_rows(&self.compute, &w.residual, rows, &picked.residual)?;
        gather_rows(&self.compute, &w.attended, rows, &picked.attended)?;
        Ok(picked)
    }

    fn check(&self, batch: &ForwardBatch, kv: &KvCache) -> Result<()> {
        let (layers, capacity) = (self.config.layers, self.workspace.residual.dims()[0]);
        if kv.k.len() != layers || kv.v.len() != layers {
            return Err(Error::Batch(format!(
                "a cache of {} layers for a model of {layers}",
                kv.k.len()
            )));
        }
        if batch.input_ids.len() > capacity {
            return Err(Error::Batch(format!(
                "{} tokens in a step of at most {capacity}",
                batch.input_ids.len()
            )));
        }
        batch
            .check(self.config.vocab_size, self.rope.cos.dims()[0], kv.block_size, kv.num_blocks)
            .map_err(Error::Batch)
    }
}

impl Model for Decoder {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(&mut self, batch: &ForwardBatch, kv: &mut KvCache) -> Result<Tensor> {
        self.check(batch, kv)?;
        let w = self.blocks(batch, kv)?;
        let logits = self.logits.rows(batch.logits_indices.len())?;
        if !batch.logits_indices.is_empty() {
            let head = self.weights.head.as_ref().unwrap_or(&self.weights.embedding);
            linear(&self.compute, head, None, &w.normed, &logits)?;
            if let Some(cap) = self.config.logits_softcap {
                soft_cap(&self.compute, cap, &logits)?;
            }
        }
        Ok(logits)
    }

    fn weight_bytes(&self) -> usize {
        let w = &self.weights;
        let blocks: usize = w.blocks.iter().map(|b| b.attention.bytes() + b.mlp.bytes()).sum();
        w.embedding.bytes() + w.head.as_ref().map_or(0, Weight::bytes) + blocks
    }
}
