//! Attention on the CPU: tiles of queries over splits of keys. Each split has an online softmax of
//! its own (Milakov and Gimelshein 2018; Dao et al. 2023, FlashAttention-2), and the splits are
//! then merged in order.
//!
//! Splits and tiles of keys start at fixed positions, and a query is never multiplied with a key
//! that it does not see, so neither chunking, nor neighbours, nor the block size, nor the threads
//! can change a bit of a result. The splits of a single query are tasks of their own, so that one
//! sequence keeps all threads busy.
//!
//! Steps, predicted and measured (SmolLM2-135M, one token at 512, two threads; `RESULTS.md` has the
//! tables):
//! - K kept with its keys side by side and both caches read in place, in f16, instead of gathering
//!   64 keys at a time and transposing them: 3.7 ms of 10.3 should become 0.5. Measured: about 1,
//!   1.4 times as many tokens.
//! - Six rows through the registers instead of four: no difference; taken out again.
//! - Prefetching the next keys and the values: no difference; taken out again.

use super::query_tile::{CpuArgs, QueryTile, ROWS, RowState, RowStates, first_key};
use super::tile::{KeyTile, TILE, attend_keys, gather};
use super::{Attention, AttentionArgs, AttentionShape, OP};
use crate::element::Element;
use crate::error::{ensure, shape};
use crate::gpu::Kind;
use crate::operand::{Operand, TensorView};
use crate::parts::Parts;
use crate::simd::{Isa, LANES, Lanes, vectorised};
use crate::storage::{read, write, wrong_type};
use crate::{Compute, Result};
use half::f16;
use std::cell::RefCell;
use std::ops::Range;

/// The sequences of a step, in the machine's memory.
#[derive(Clone, Copy, Debug)]
pub struct HostSequences<'a> {
    /// `[sequences + 1]`: rows of each sequence's queries.
    pub cu_seqlens_q: &'a [u32],
    /// `[sequences]`: tokens of each in the cache after this step; its last query has position
    /// `seq_len - 1`.
    pub seq_lens: &'a [u32],
    /// Each sequence's blocks, in order. Those that none of its queries sees are not read.
    pub block_tables: &'a [Vec<u32>],
}

type Args<'a> = AttentionArgs<TensorView<'a>, HostSequences<'a>>;

impl Attention for Compute {
    type Sequences<'a> = HostSequences<'a>;

    fn attend(&self, args: &Args) -> Result<()> {
        let n = args.check()?;
        check_sequences(args, n)?;
        match args.k_cache.kind() {
            Kind::F32 => run_as::<f32>(self, args),
            Kind::F16 => run_as::<f16>(self, args),
            _ => Err(wrong_type(OP, args.k_cache)),
        }
    }
}

fn run_as<E: Element>(c: &Compute, args: &Args) -> Result<()> {
    let q = read::<f32>(OP, args.q)?;
    let k = read::<E>(OP, args.k_cache)?;
    let v = match args.shape.value_prefix {
        Some(_) => None,
        None => Some(read::<E>(OP, args.v_cache)?),
    };
    let v = v.as_deref().unwrap_or_default();
    let sinks = args.sinks.map(|sinks| read::<f32>(OP, sinks)).transpose()?;
    let inputs = CpuArgs { q: &q, k: &k, v, sinks: sinks.as_deref(), shape: args.shape };
    let tiles = query_tiles(&args.sequences, queries_per_tile(args.shape.group()));
    write(OP, args.out, |out| run(Isa::best(), c, &inputs, &tiles, out))
}

fn query_tiles<'a>(sequences: &HostSequences<'a>, queries: usize) -> Vec<QueryTile<'a>> {
    let mut tiles = Vec::new();
    for (i, span) in sequences.cu_seqlens_q.windows(2).enumerate() {
        let (start, end) = (span[0] as usize, span[1] as usize);
        let first = sequences.seq_lens[i] as usize - (end - start);
        tiles.extend((start..end).step_by(queries).map(|row| QueryTile {
            rows: row..end.min(row + queries),
            position: first + row - start,
            blocks: &sequences.block_tables[i],
        }));
    }
    tiles
}

/// Checks everything that an index could reach before anything is read: a wrong block is another
/// sequence's memory.
fn check_sequences(args: &Args, n: usize) -> Result<()> {
    let HostSequences { cu_seqlens_q, seq_lens, block_tables } = args.sequences;
    let (sequences, blocks, block_size) = (seq_lens.len(), args.blocks(), args.shape.block_size);
    let ends = (cu_seqlens_q.first(), cu_seqlens_q.last());
    let ok = cu_seqlens_q.len() == sequences + 1
        && block_tables.len() == sequences
        && ends == (Some(&0), Some(&(n as u32)));
    ensure(OP, ok, || {
        let tables = block_tables.len();
        format!("{sequences} sequences, {tables} tables and spans {ends:?} for {n} rows")
    })?;
    for (i, table) in block_tables.iter().enumerate() {
        let (start, end, len) = (cu_seqlens_q[i], cu_seqlens_q[i + 1], seq_lens[i]);
        ensure(OP, start <= end && end - start <= len, || {
            format!("sequence {i}: rows {start}..{end} for {len} tokens")
        })?;
        ensure(OP, table.len() * block_size >= len as usize, || {
            format!("sequence {i}: {} blocks of {block_size} for {len} tokens", table.len())
        })?;
        let unseen = first_key(args.shape.window, (len - (end - start)) as usize) / block_size;
        if let Some(block) = table.iter().skip(unseen).find(|b| **b as usize >= blocks) {
            return Err(shape(OP, format!("sequence {i}: block {block} of a cache of {blocks}")));
        }
    }
    Ok(())
}

/// Keys of a split: enough of them that merging the split costs little in comparison.
const SPLIT: usize = 4 * TILE;
/// Queries of a tile: 32 rows, so that reading the keys costs little in comparison.
pub(super) fn queries_per_tile(group: usize) -> usize {
    (32 / group).max(1)
}

/// The work of one task: all heads of a group for a tile of queries, over some splits.
struct SplitTask<'a> {
    tile: &'a QueryTile<'a>,
    kv_head: usize,
    splits: Range<usize>,
    /// The index at which the task leaves its state, if its tile has several splits.
    part: Option<usize>,
}

fn tasks<'a, E>(p: &CpuArgs<E>, tiles: &'a [QueryTile]) -> Vec<SplitTask<'a>> {
    let (mut tasks, mut parts) = (Vec::new(), 0..);
    // The last tiles of a prompt see the most keys. They are started first, so that no thread works
    // on one of them alone at the end.
    for (tile, kv_head) in
        tiles.iter().rev().flat_map(|tile| (0..p.shape.kv_heads).map(move |head| (tile, head)))
    {
        let seen = p.seen(tile);
        let splits = seen.start / SPLIT..seen.end.div_ceil(SPLIT);
        if tile.rows.len() == 1 && splits.len() > 1 {
            let split = |i| SplitTask { tile, kv_head, splits: i..i + 1, part: parts.next() };
            tasks.extend(splits.map(split));
        } else {
            tasks.push(SplitTask { tile, kv_head, splits, part: None });
        }
    }
    tasks
}

/// Computes the attention of all tiles. `out` is the whole output, and each of its rows is in one
/// of the tiles.
pub(super) fn run<E: Element>(
    isa: Isa,
    c: &Compute,
    p: &CpuArgs<E>,
    tiles: &[QueryTile],
    out: &mut [f32],
) {
    let out = Parts::new(out);
    let tasks = tasks(p, tiles);
    let count = tasks.iter().filter(|task| task.part.is_some()).count();
    PARTS.with_borrow_mut(|parts| {
        if parts.len() < count {
            parts.resize_with(count, RowStates::default);
        }
        let shared = Parts::new(&mut parts[..]);
        c.run(tasks.len(), |i| {
            let SplitTask { tile, kv_head, ref splits, part } = tasks[i];
            SCRATCH.with_borrow_mut(|AttentionScratch { q, part: own, whole }| {
                pack(p, tile, kv_head, q);
                if let Some(part) = part {
                    // SAFETY: each part belongs to one task.
                    let part = unsafe { &mut shared.slice(part..part + 1)[0] };
                    return sum_split(isa, p, tile, kv_head, splits.start, q, part);
                }
                whole.clear(p, tile);
                for split in splits.clone() {
                    sum_split(isa, p, tile, kv_head, split, q, own);
                    merge(isa, whole, own);
                }
                whole.finish(p, tile, kv_head, &out);
            });
        });
        let whole = |task: &SplitTask| (task.tile.rows.start, task.kv_head);
        let split = tasks.iter().filter(|task| task.part.is_some()).zip(parts).collect::<Vec<_>>();
        for of_one in split.chunk_by(|a, b| whole(a.0) == whole(b.0)) {
            let SplitTask { tile, kv_head, .. } = *of_one[0].0;
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.whole.clear(p, tile);
                for (_, part) in of_one {
                    merge(isa, &mut scratch.whole, part);
                }
                scratch.whole.finish(p, tile, kv_head, &out);
            });
        }
    });
}

thread_local! {
    static SCRATCH: RefCell<AttentionScratch> = RefCell::default();
    /// The states of splits that are tasks of their own. The calling thread keeps them.
    static PARTS: RefCell<Vec<RowStates>> = RefCell::default();
}

/// Buffers of one worker, which are reused from call to call.
#[derive(Default)]
struct AttentionScratch {
    /// Queries in chunks of up to `ROWS` rows, each chunk `[head_dim, rows]`.
    q: Vec<f32>,
    part: RowStates,
    whole: RowStates,
}

fn pack<E>(p: &CpuArgs<E>, tile: &QueryTile, kv_head: usize, q: &mut Vec<f32>) {
    q.resize(tile.rows.len() * p.shape.group() * p.shape.head_dim, 0.0);
    for (chunk, packed) in q.chunks_mut(ROWS * p.shape.head_dim).enumerate() {
        let rows = packed.len() / p.shape.head_dim;
        for r in 0..rows {
            let row = chunk * ROWS + r;
            let start = (tile.rows.start + row / p.shape.group()) * p.shape.q_stride
                + (kv_head * p.shape.group() + row % p.shape.group()) * p.shape.head_dim;
            for (d, q) in p.q[start..start + p.shape.head_dim].iter().enumerate() {
                packed[d * rows + r] = *q;
            }
        }
    }
}

vectorised! {
    /// Sets `rows` to the states of the tile's rows over one split.
    fn sum_split<E: Element>(
        p: &CpuArgs<E>,
        tile: &QueryTile,
        kv_head: usize,
        split: usize,
        q: &[f32],
        rows: &mut RowStates,
    ) = sum_keys
}

#[inline(always)]
fn sum_keys<L: Lanes, E: Element>(
    p: &CpuArgs<E>,
    tile: &QueryTile,
    kv_head: usize,
    split: usize,
    q: &[f32],
    rows: &mut RowStates,
) {
    rows.clear(p, tile);
    let seen = p.seen(tile);
    let (first, last) =
        ((seen.start / TILE * TILE).max(split * SPLIT), seen.end.min((split + 1) * SPLIT));
    for start in (first..last).step_by(TILE) {
        let positions = start..last.min(start + TILE);
        let (copied, copy);
        let (p, keys) = if p.shape.block_size.is_multiple_of(LANES) {
            let mut keys = KeyTile::new(p, tile.blocks, kv_head, positions, seen.start);
            match p.shape.value_prefix {
                None => (p, keys),
                Some(width) => {
                    copied = [Vec::new(), keys.copy_values(p, width)];
                    copy = CpuArgs { v: &copied[1], ..*p };
                    (&copy, keys)
                }
            }
        } else {
            copied = gather(p, tile.blocks, kv_head, positions.clone(), seen.start);
            let shape = AttentionShape { block_size: TILE, ..p.shape };
            copy = CpuArgs { q: p.q, k: &copied[0], v: &copied[1], sinks: None, shape };
            // The copy has one block of one head, so every position is in block 0 of head 0.
            (&copy, KeyTile::new(&copy, &vec![0; last.div_ceil(TILE)], 0, positions, 0))
        };
        attend_keys::<L, E>(p, tile, &keys, q, rows);
    }
}

vectorised! {
    fn merge(whole: &mut RowStates, part: &RowStates) = merge_rows
}

#[inline(always)]
fn merge_rows<L: Lanes>(whole: &mut RowStates, part: &RowStates) {
    let width = part.acc.len() / part.state.len();
    let sums = whole.acc.chunks_exact_mut(width).zip(part.acc.chunks_exact(width));
    for ((sums, more), (state, other)) in sums.zip(whole.state.iter_mut().zip(&part.state)) {
        // The row sees no key of this split.
        if other.sum == 0.0 {
            continue;
        }
        let max = if other.max > state.max { other.max } else { state.max };
        let old = L::splat(state.max - max).exp().to_array()[0];
        let new = L::splat(other.max - max).exp().to_array()[0];
        for (sum, more) in sums.as_chunks_mut().0.iter_mut().zip(more.as_chunks().0) {
            L::load(more).mul_add(L::splat(new), L::load(sum).mul(L::splat(old))).store(sum);
        }
        *state = RowState { max, sum: state.sum * old + other.sum * new };
    }
}
