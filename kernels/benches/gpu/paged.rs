//! Attention over a paged cache.

use crate::case::{Case, TOLERANCE};
use crate::data::{bf16s, output, value};
use crate::{Model, Result};
use cresset_kernels::attention::AttentionShape;
use cresset_kernels::attention::gpu::{
    DecodePieces, DecodeWorkspace, HeadShape, PagedArgs, PagedSequences, PrefillQueries, WHOLE,
    decode, decode_grid, partial_values, prefill, prefill_values,
};
use cresset_kernels::attention::plan::{DecodePlan, KeyCuts, KeyPiece};
use cresset_kernels::gpu::{Buffer, Gpu, Kind};
use cresset_kernels::rope::{E4M3, cached};
use std::sync::Arc;

/// Tokens of a block; attention is tried with other sizes too.
const BLOCK_SIZE: usize = 16;
const OTHER_BLOCK_SIZES: [usize; 2] = [32, 64];

pub fn cases<'a>(
    gpu: &'a Arc<dyn Gpu>,
    model: &'a Model,
) -> impl Iterator<Item = Result<Case>> + 'a {
    let even = |n| vec![model.context; n];
    let decoded =
        move |lens: &[usize], cuts, size| decoded(gpu, model, lens, Kind::Bf16, cuts, size);
    let anywhere = KeyCuts::Anywhere;
    let decodes = model.steps.iter().map(move |n| decoded(&even(*n), anywhere, BLOCK_SIZE));
    let splits = model.split_rows.iter().flat_map(move |n| {
        let splits = model.splits.iter();
        splits.map(move |split| decoded(&even(*n), KeyCuts::Every(*split), BLOCK_SIZE))
    });
    let sizes = OTHER_BLOCK_SIZES.into_iter().flat_map(move |size| {
        let rows = model.split_rows.iter();
        rows.map(move |n| decoded(&even(*n), anywhere, size))
    });
    let coded = model.steps.iter();
    let coded =
        coded.map(move |n| self::decoded(gpu, model, &even(*n), E4M3, anywhere, BLOCK_SIZE));
    let (count, short, long) = model.crowd;
    let crowd = [vec![short; count], vec![long]].concat();
    let spread = vec![(count * short + long) / (count + 1); count + 1];
    let crowds = [spread, crowd].into_iter().map(move |lens| decoded(&lens, anywhere, BLOCK_SIZE));
    let (queries, tokens) = model.behind_prefix;
    let prompts = model.prompts.iter().map(|n| (*n, *n)).chain([(queries, tokens)]);
    let prompts = prompts.map(|(queries, tokens)| prefilled(gpu, model, queries, tokens));
    decodes.chain(coded).chain(splits).chain(sizes).chain(crowds).chain(prompts)
}

/// Fills a cache in e4m3: each value is the code of 1 times the scale of these two bytes.
const CODE: u8 = 0x38;
const CODED: f64 = 1.4375 / (1 << 15) as f64;

/// A cache with a sequence of each length. All have the same keys and values, as far as they go,
/// but each has its own blocks.
struct Cache {
    block_size: usize,
    k: Arc<Buffer>,
    v: Arc<Buffer>,
    lens: Buffer,
    tables: Buffer,
    table_starts: Buffer,
}

impl Cache {
    fn new(
        gpu: &Arc<dyn Gpu>,
        m: &Model,
        lens: &[usize],
        kind: Kind,
        block_size: usize,
    ) -> Result<Self> {
        let longest = lens.iter().copied().max().unwrap_or(1).div_ceil(block_size);
        let block = block_size * cached(kind, m.kv_heads, m.head_dim);
        let blocks: Vec<usize> = lens.iter().map(|len| len.div_ceil(block_size)).collect();
        let copies = |seed| -> Result<Arc<Buffer>> {
            let all = output(gpu, kind, blocks.iter().sum::<usize>() * block)?;
            if kind == E4M3 {
                gpu.fill(all.view(), CODE)?;
                return Ok(all);
            }
            let first = bf16s(gpu, seed, longest * block)?;
            let mut at = 0;
            for count in &blocks {
                let part = first.view().slice(0..count * block);
                gpu.copy(part, all.view().slice(at..at + count * block))?;
                at += count * block;
            }
            gpu.synchronise()?;
            Ok(all)
        };
        let starts = blocks.iter().scan(0, |end, count| {
            *end += *count as u32;
            Some(*end)
        });
        let starts: Vec<u32> = std::iter::once(0).chain(starts).collect();
        let tables: Vec<u32> = (0..blocks.iter().sum::<usize>() as u32).collect();
        let lens: Vec<u32> = lens.iter().map(|len| *len as u32).collect();
        Ok(Self {
            block_size,
            k: copies(1)?,
            v: copies(2)?,
            lens: Buffer::from_slice(gpu, &lens)?,
            tables: Buffer::from_slice(gpu, &tables)?,
            table_starts: Buffer::from_slice(gpu, &starts)?,
        })
    }

    fn args(&self, m: &Model, q: &Buffer, out: &Buffer) -> PagedArgs {
        let &Model { heads, kv_heads, head_dim, .. } = m;
        PagedArgs {
            q: q.view(),
            k_cache: self.k.view(),
            v_cache: self.v.view(),
            sinks: None,
            shape: AttentionShape {
                q_stride: (heads + 2 * kv_heads) * head_dim,
                heads,
                kv_heads,
                head_dim,
                value_prefix: None,
                block_size: self.block_size,
                scale: 1.0 / (head_dim as f32).sqrt(),
                window: None,
                softcap: None,
            },
            sequences: PagedSequences {
                seq_lens: self.lens.view(),
                tables: self.tables.view(),
                table_starts: self.table_starts.view(),
            },
            out: out.view(),
        }
    }
}

fn queries(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<(Arc<Buffer>, Arc<Buffer>)> {
    let q = bf16s(gpu, 0, n * (m.heads + 2 * m.kv_heads) * m.head_dim)?;
    Ok((q, output(gpu, Kind::Bf16, n * m.heads * m.head_dim)?))
}

fn heads(m: &Model, kept: Kind) -> HeadShape {
    let &Model { heads, kv_heads, head_dim, .. } = m;
    HeadShape { heads, kv_heads, head_dim, value_prefix: None, e4m3: kept == E4M3 }
}

/// The plan of decode on the device, and its workspace.
struct Planned {
    shares: Buffer,
    pieces: Buffer,
    partials: Buffer,
    workspace: Arc<Buffer>,
    counters: Buffer,
    count: usize,
}

impl Planned {
    fn new(gpu: &Arc<dyn Gpu>, heads: &HeadShape, lens: &[usize], cuts: KeyCuts) -> Result<Self> {
        let lens: Vec<u32> = lens.iter().map(|len| *len as u32).collect();
        let grid = decode_grid(&**gpu, Kind::Bf16, heads)?;
        let plan = DecodePlan::new(&lens, None, cuts, &grid);
        let pieces: Vec<u32> = plan.pieces.iter().flat_map(KeyPiece::words).collect();
        let partials = plan.partials.last().copied().unwrap_or(0) as usize;
        let values = partial_values(partials, heads);
        Ok(Self {
            shares: Buffer::from_slice(gpu, &plan.shares)?,
            pieces: Buffer::from_slice(gpu, &pieces)?,
            partials: Buffer::from_slice(gpu, &plan.partials)?,
            workspace: output(gpu, Kind::F32, values)?,
            counters: Buffer::zeros(gpu, Kind::U32, lens.len() * grid.head_tiles)?,
            count: plan.pieces.len(),
        })
    }

    fn views(&self) -> DecodePieces {
        let [shares, pieces, partials] =
            [&self.shares, &self.pieces, &self.partials].map(Buffer::view);
        DecodePieces { shares, pieces, partials }
    }

    fn workspace(&self) -> DecodeWorkspace {
        DecodeWorkspace { partials: self.workspace.view(), counters: self.counters.view() }
    }
}

/// Decode: one query of each sequence, over a cache of the kind `kept`.
fn decoded(
    gpu: &Arc<dyn Gpu>,
    m: &Model,
    lens: &[usize],
    kept: Kind,
    cuts: KeyCuts,
    block_size: usize,
) -> Result<Case> {
    let (n, longest) = (lens.len(), lens.iter().copied().max().unwrap_or(1));
    let plan = Planned::new(gpu, &heads(m, kept), lens, cuts)?;
    let cache = Cache::new(gpu, m, lens, kept, block_size)?;
    let (q, out) = queries(gpu, m, n)?;
    let args = cache.args(m, &q, &out);
    let (on, pieces) = (gpu.clone(), plan.count);
    let launch = move |_| {
        let _alive = (&cache, &q);
        decode(&*on, &args, &plan.views(), &plan.workspace())
    };
    let (width, tokens) = (m.heads * m.head_dim, lens.iter().sum::<usize>());
    let mean = tokens / n;
    let lens = lens.to_vec();
    Ok(Case {
        op: if kept == E4M3 { "decode attention, fp8" } else { "decode attention" },
        shape: format!("{mean} tokens, at most {longest}, {pieces} pieces, blocks of {block_size}"),
        n,
        bytes: 2 * tokens * cached(kept, m.kv_heads, m.head_dim) * kept.bytes() + 4 * n * width,
        flops: 4 * tokens * width,
        tolerance: TOLERANCE,
        out,
        want: if kept == E4M3 { Box::new(|_| CODED) } else { attended(m, move |i| lens[i]) },
        launch: Box::new(launch),
    })
}

/// Prefill: the last queries of one sequence of `tokens` tokens.
fn prefilled(gpu: &Arc<dyn Gpu>, m: &Model, n: usize, tokens: usize) -> Result<Case> {
    let cache = Cache::new(gpu, m, &[tokens], Kind::Bf16, BLOCK_SIZE)?;
    let (q, out) = queries(gpu, m, n)?;
    let spans = Buffer::from_slice(gpu, &[0, n as u32])?;
    let split = Buffer::from_slice(gpu, &[WHOLE])?;
    let workspace =
        output(gpu, Kind::F32, prefill_values(&**gpu, Kind::Bf16, &heads(m, Kind::Bf16))?)?;
    let args = cache.args(m, &q, &out);
    let on = gpu.clone();
    let launch = move |_| {
        let _alive = (&cache, &q);
        let queries = PrefillQueries {
            cu_seqlens: spans.view(),
            most: n,
            split: split.view(),
            longest: Some(tokens),
            workspace: workspace.view(),
        };
        prefill(&*on, &args, &queries)
    };
    let (width, before) = (m.heads * m.head_dim, tokens - n);
    Ok(Case {
        op: "prefill attention",
        shape: format!("{n} of {tokens} tokens"),
        n,
        bytes: (2 * tokens * m.kv_heads * m.head_dim + 2 * n * width) * 2,
        flops: 4 * width * (n * before + n * (n + 1) / 2),
        tolerance: TOLERANCE,
        out,
        want: attended(m, move |query| before + query + 1),
        launch: Box::new(launch),
    })
}

/// An output computed by the definition; `visible` tells the number of keys that a query sees.
fn attended(
    m: &Model,
    visible: impl Fn(usize) -> usize + Sync + 'static,
) -> Box<dyn Fn(usize) -> f64 + Sync> {
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
