//! Attention over a paged cache.

use crate::case::{Case, TOLERANCE};
use crate::data::{bf16s, output, value};
use crate::{Model, Result};
use cresset_kernels::attention::AttentionShape;
use cresset_kernels::attention::gpu::{
    PagedArgs, PagedSequences, decode, decode_workspace, prefill, tokens_per_split,
};
use cresset_kernels::gpu::{Buffer, Gpu, Kind};
use std::sync::Arc;

const BLOCK_SIZE: usize = 16;
const MAX_SPLITS: usize = 32;
/// Keys of a split where there is only one.
const WHOLE: u32 = 1 << 31;

pub fn cases<'a>(
    gpu: &'a Arc<dyn Gpu>,
    model: &'a Model,
) -> impl Iterator<Item = Result<Case>> + 'a {
    let decodes = model.steps.iter().map(|n| decoded(gpu, model, *n));
    decodes.chain(model.prompts.iter().map(|n| prefilled(gpu, model, *n)))
}

/// A cache with `sequences` sequences of `tokens` tokens each. All have the same keys and values,
/// but each has its own blocks.
struct Cache {
    k: Arc<Buffer>,
    v: Arc<Buffer>,
    lens: Buffer,
    tables: Buffer,
    header: Buffer,
}

impl Cache {
    fn new(
        gpu: &Arc<dyn Gpu>,
        m: &Model,
        sequences: usize,
        tokens: usize,
        split: u32,
    ) -> Result<Self> {
        let blocks = tokens.div_ceil(BLOCK_SIZE);
        let stride = blocks * BLOCK_SIZE * m.kv_heads * m.head_dim;
        let copies = |seed| -> Result<Arc<Buffer>> {
            let first = bf16s(gpu, seed, stride)?;
            let all = output(gpu, Kind::Bf16, sequences * stride)?;
            for i in 0..sequences {
                gpu.copy(first.view(), all.view().slice(i * stride..(i + 1) * stride))?;
            }
            gpu.synchronise()?;
            Ok(all)
        };
        let tables: Vec<u32> = (0..(sequences * blocks) as u32).collect();
        Ok(Self {
            k: copies(1)?,
            v: copies(2)?,
            lens: Buffer::from_slice(gpu, &vec![tokens as u32; sequences])?,
            tables: Buffer::from_slice(gpu, &tables)?,
            header: Buffer::from_slice(gpu, &[blocks as u32, split])?,
        })
    }

    fn args(&self, m: &Model, q: &Buffer, out: &Buffer) -> PagedArgs {
        let &Model { heads, kv_heads, head_dim, .. } = m;
        PagedArgs {
            q: q.view(),
            k_cache: self.k.view(),
            v_cache: self.v.view(),
            shape: AttentionShape {
                q_stride: (heads + 2 * kv_heads) * head_dim,
                heads,
                kv_heads,
                head_dim,
                block_size: BLOCK_SIZE,
                scale: 1.0 / (head_dim as f32).sqrt(),
                window: None,
                softcap: None,
            },
            sequences: PagedSequences {
                header: self.header.view(),
                seq_lens: self.lens.view(),
                tables: self.tables.view(),
            },
            out: out.view(),
        }
    }
}

fn queries(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<(Arc<Buffer>, Arc<Buffer>)> {
    let q = bf16s(gpu, 0, n * (m.heads + 2 * m.kv_heads) * m.head_dim)?;
    Ok((q, output(gpu, Kind::Bf16, n * m.heads * m.head_dim)?))
}

/// Decode: one query of each of `n` sequences.
fn decoded(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<Case> {
    let tokens = m.context;
    let split = tokens_per_split(&**gpu, n, m.kv_heads, tokens, tokens, MAX_SPLITS, false);
    let cache = Cache::new(gpu, m, n, tokens, split as u32)?;
    let (q, out) = queries(gpu, m, n)?;
    let workspace = output(gpu, Kind::F32, decode_workspace(n, m.heads, m.head_dim, MAX_SPLITS))?;
    let args = cache.args(m, &q, &out);
    let on = gpu.clone();
    let launch = move |_| {
        let _alive = (&cache, &q);
        decode(&*on, &args, MAX_SPLITS, workspace.view())
    };
    let width = m.heads * m.head_dim;
    Ok(Case {
        op: "decode attention",
        shape: format!("{tokens} tokens, splits of {split}"),
        n,
        bytes: n * (2 * tokens * m.kv_heads * m.head_dim + 2 * width) * 2,
        flops: 4 * n * tokens * width,
        tolerance: TOLERANCE,
        out,
        want: attended(m, move |_| tokens),
        launch: Box::new(launch),
    })
}

/// Prefill: all queries of one sequence.
fn prefilled(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<Case> {
    let cache = Cache::new(gpu, m, 1, n, WHOLE)?;
    let (q, out) = queries(gpu, m, n)?;
    let spans = Buffer::from_slice(gpu, &[0, n as u32])?;
    let args = cache.args(m, &q, &out);
    let on = gpu.clone();
    let launch = move |_| {
        let _alive = (&cache, &q);
        prefill(&*on, &args, spans.view(), n)
    };
    let width = m.heads * m.head_dim;
    Ok(Case {
        op: "prefill attention",
        shape: format!("{n} tokens"),
        n,
        bytes: n * (2 * m.kv_heads * m.head_dim + 2 * width) * 2,
        flops: 4 * width * (n * (n + 1) / 2),
        tolerance: TOLERANCE,
        out,
        want: attended(m, |query| query + 1),
        launch: Box::new(launch),
    })
}

/// An output computed by the definition; `visible` tells the number of keys that a query sees.
fn attended(m: &Model, visible: impl Fn(usize) -> usize + 'static) -> Box<dyn Fn(usize) -> f64> {
    let &Model { heads, kv_heads, head_dim, .. } = m;
    Box::new(move |i| {
        let (query, head, d) = (i / (heads * head_dim), i / head_dim % heads, i % head_dim);
        let q = query * (heads + 2 * kv_heads) * head_dim + head * head_dim;
        let row = |key: usize| (key * kv_heads + head / (heads / kv_heads)) * head_dim;
        let score =
            |key| (0..head_dim).map(|c| value(0, q + c) * value(1, row(key) + c)).sum::<f64>();
        let weights: Vec<f64> =
            (0..visible(query)).map(|k| (score(k) / (head_dim as f64).sqrt()).exp()).collect();
        let sum: f64 =
            weights.iter().enumerate().map(|(key, weight)| weight * value(2, row(key) + d)).sum();
        sum / weights.iter().sum::<f64>()
    })
}
