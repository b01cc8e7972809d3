//! Grouped-query self-attention with a fused QKV projection. Ainslie et al. 2023, "GQA".

use crate::arch::Recipe;
use crate::decoder::workspace::Workspace;
use crate::loader::store::{Host, Store};
use crate::loader::tensors::Tensors;
use crate::{ForwardBatch, ModelConfig, Result};
use candle_core::Tensor;
use cresset_kernels::Compute;
use cresset_kernels::attention::{AttentionArgs, paged_attention};
use cresset_kernels::linear::linear;
use cresset_kernels::rope::{QkNorm, RopeKvArgs, RopeTable, rope_kv_write};

pub struct Attention<S: Store = Host> {
    pub qkv: S::Matrix,
    pub qkv_bias: Option<S::Vector>,
    /// Of the heads of Q and of K.
    pub qk_norm: Option<[S::Vector; 2]>,
    pub output: S::Matrix,
    pub output_bias: Option<S::Vector>,
}

/// What the attention of a layer takes from its step.
pub struct Step<'a> {
    pub compute: &'a Compute,
    pub config: &'a ModelConfig,
    pub rope: &'a RopeTable,
    pub window: Option<usize>,
    pub batch: &'a ForwardBatch,
}

impl<S: Store> Attention<S> {
    /// `prefix` ends with a dot.
    pub fn load(
        t: &mut Tensors<S>,
        prefix: &str,
        config: &ModelConfig,
        recipe: &Recipe,
    ) -> Option<Self> {
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let name = |part: &str| format!("{prefix}self_attn.{part}");
        let parts =
            |kind: &str| ["q_proj", "k_proj", "v_proj"].map(|p| name(&format!("{p}.{kind}")));
        let ([wq, wk, wv], [bq, bk, bv]) = (parts("weight"), parts("bias"));
        let qkv = t.stack(&[(&wq, q), (&wk, kv), (&wv, kv)], config.hidden_size);
        let qkv_bias = t.bias_if(recipe.qkv_bias, &[(&bq, q), (&bk, kv), (&bv, kv)]);
        let mut norm = |part| {
            if recipe.qk_norm { t.norm(&name(part), config.head_dim).map(Some) } else { Some(None) }
        };
        let (q_norm, k_norm) = (norm("q_norm.weight"), norm("k_norm.weight"));
        let output = t.matrix(&name("o_proj.weight"), config.hidden_size, q);
        let output_bias =
            t.bias_if(recipe.output_bias, &[(&name("o_proj.bias"), config.hidden_size)]);
        let norms = q_norm?.zip(k_norm?);
        Some(Self {
            qkv: qkv?,
            qkv_bias: qkv_bias?,
            qk_norm: norms.map(<[_; 2]>::from),
            output: output?,
            output_bias: output_bias?,
        })
    }
}

impl Attention {
    /// `normed` → K and V in the cache, Q in `qkv`.
    pub fn project(
        &self,
        s: &Step,
        w: &Workspace,
        k_cache: &Tensor,
        v_cache: &Tensor,
    ) -> Result<()> {
        linear(s.compute, &self.qkv, self.qkv_bias.as_ref(), &w.normed, &w.qkv)?;
        let qk_norm =
            self.qk_norm.clone().map(|[q, k]| QkNorm { q, k, eps: s.config.rms_norm_eps });
        Ok(rope_kv_write(
            s.compute,
            &RopeKvArgs {
                qkv: &w.qkv,
                heads: s.config.heads,
                kv_heads: s.config.kv_heads,
                head_dim: s.config.head_dim,
                positions: &s.batch.positions,
                slot_mapping: &s.batch.slot_mapping,
                table: s.rope,
                qk_norm: qk_norm.as_ref(),
                k_cache,
                v_cache,
            },
        )?)
    }

    /// `qkv` and the cache → `attended`.
    pub fn attend(s: &Step, w: &Workspace, k_cache: &Tensor, v_cache: &Tensor) -> Result<()> {
        Ok(paged_attention(
            s.compute,
            &AttentionArgs {
                q: &w.qkv,
                heads: s.config.heads,
                kv_heads: s.config.kv_heads,
                head_dim: s.config.head_dim,
                k_cache,
                v_cache,
                cu_seqlens_q: &s.batch.cu_seqlens_q,
                seq_lens: &s.batch.seq_lens,
                block_tables: &s.batch.block_tables,
                scale: s.config.attention_scale,
                window: s.window,
                softcap: s.config.attention_softcap,
                out: &w.attended,
            },
        )?)
    }

    /// `attended` → `delta`.
    pub fn output(&self, compute: &Compute, w: &Workspace) -> Result<()> {
        Ok(linear(compute, &self.output, self.output_bias.as_ref(), &w.attended, &w.delta)?)
    }

    pub fn bytes(&self) -> usize {
        self.qkv.bytes() + self.output.bytes()
    }
}
