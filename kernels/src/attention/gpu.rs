//! Paged attention on a device. `tile.cuh` describes the computation, for decode and prefill.

mod any;

use super::plan::{DecodeGrid, KeyPiece, TILE};
use super::{Attention, AttentionArgs, AttentionShape, OP};
use crate::error::{ensure, unsupported};
use crate::gpu::{Arg, Gpu, Kind, Launch, View};
use crate::operand::DeviceOps;
use crate::rope::{E4M3, cached};
use crate::{Error, Result, args};

/// Some sequences whose lengths and blocks are on the device.
#[derive(Clone, Copy, Debug)]
pub struct PagedSequences {
    /// `[sequences]` u32: tokens of each in the cache after this step; its last query has position
    /// `seq_len - 1`.
    pub seq_lens: View,
    /// u32: the blocks of each sequence, one sequence after the other, perhaps among other words.
    pub tables: View,
    /// `[sequences + 1]` u32: the place in `tables` of each sequence's first block, and of the end
    /// of the last one's.
    pub table_starts: View,
}

/// A [`DecodePlan`](super::plan::DecodePlan) on the device.
#[derive(Clone, Copy, Debug)]
pub struct DecodePieces {
    /// `[shares + 1]` u32: the plan's `shares`, as numbers of pieces from the start of `pieces`.
    pub shares: View,
    /// u32, aligned to 16 bytes: the words of the plan's pieces, which may stand among others.
    pub pieces: View,
    /// `[sequences + 1]` u32: the plan's `partials`.
    pub partials: View,
}

/// Memory that the blocks of decode share.
#[derive(Clone, Copy, Debug)]
pub struct DecodeWorkspace {
    /// f32, aligned to 16 bytes: partial results, [`partial_values`] of the most that a plan has.
    pub partials: View,
    /// u32: a counter for each tile of heads of each sequence, that is [`DecodeGrid::head_tiles`]
    /// times the sequences. They are 0 before a launch and after it.
    pub counters: View,
}

/// All sequences of a step. Everything that changes from step to step is read on the device, so a
/// recorded launch stays right; a block or length out of bounds there ends the step.
#[derive(Clone, Copy, Debug)]
pub struct StepSequences<'a> {
    /// The first sequences, with one query each: query i belongs to sequence i.
    pub decodes: PagedSequences,
    /// Their plan for each window that layers have.
    pub plans: &'a [(Option<usize>, DecodePieces)],
    pub workspace: DecodeWorkspace,
    /// The other sequences, with any number of queries.
    pub prefills: PagedSequences,
    pub queries: PrefillQueries,
}

/// The queries of the sequences that prefill computes, and how their keys may be cut.
#[derive(Clone, Copy, Debug)]
pub struct PrefillQueries {
    /// `[sequences + 1]` u32: the first query of each sequence, from 0.
    pub cu_seqlens: View,
    /// At least the number of queries of any sequence.
    pub most: usize,
    /// `[1]` u32: the tokens of a split, a multiple of 64. A block computes keys split by split,
    /// which gains nothing: use [`WHOLE`] unless the bits must equal those of decode with fixed
    /// cuts.
    pub split: View,
    /// The most tokens of any sequence. With it, blocks share the keys of few queries in parts that
    /// depend on the whole step; without it, each block computes all keys of its queries.
    pub longest: Option<usize>,
    /// f32: partial results. Keys are divided into no more parts than it has room for.
    pub workspace: View,
}

/// The arguments for sequences of one kind.
pub type PagedArgs = AttentionArgs<View, PagedSequences>;

impl Attention for DeviceOps {
    type Sequences<'a> = StepSequences<'a>;

    fn attend(&self, args: &AttentionArgs<View, StepSequences<'_>>) -> Result<()> {
        let &AttentionArgs { q, k_cache, v_cache, sinks, shape, sequences: step, out } = args;
        let (stride, width) = (shape.q_stride, shape.heads * shape.value_dim());
        let paged =
            |sequences, q, out| PagedArgs { q, k_cache, v_cache, sinks, shape, sequences, out };
        let decodes = step.decodes.seq_lens.len();
        if decodes > 0 {
            let (q, out) = (q.slice(0..decodes * stride), out.slice(0..decodes * width));
            let args = paged(step.decodes, q, out);
            decode(&**self, &args, step.plan(shape.window)?, &step.workspace)?;
        }
        if !step.prefills.seq_lens.is_empty() {
            let q = q.slice(decodes * stride..q.len());
            let args = paged(step.prefills, q, out.slice(decodes * width..out.len()));
            prefill(&**self, &args, &step.queries)?;
        }
        Ok(())
    }
}

impl StepSequences<'_> {
    fn plan(&self, window: Option<usize>) -> Result<&DecodePieces> {
        let found = self.plans.iter().find(|(own, _)| *own == window);
        let missing = || Error::Shape { op: OP, detail: format!("no plan for window {window:?}") };
        found.map(|(_, plan)| plan).ok_or_else(missing)
    }
}

/// The heads of an attention, on which its kernels and their grids depend.
#[derive(Clone, Copy, Debug)]
pub struct HeadShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// As [`AttentionShape`] says.
    pub value_prefix: Option<usize>,
    /// Whether K and V are kept as [`E4M3`].
    pub e4m3: bool,
}

impl HeadShape {
    /// Dimensions of a value.
    pub fn value_dim(&self) -> usize {
        self.value_prefix.unwrap_or(self.head_dim)
    }

    /// The dimensions of keys and values.
    fn dims(&self) -> [usize; 2] {
        [self.head_dim, self.value_dim()]
    }

    /// Query heads for each KV head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// The kernels of `decode.cu` and `prefill.cu` for such heads beside queries in bf16.
    fn own_kernels(&self) -> impl Iterator<Item = &'static HeadKernels> {
        let Self { head_dim, value_prefix, e4m3, .. } = *self;
        let fits = move |own: &&HeadKernels| own.head_dim == head_dim && own.e4m3 == e4m3;
        KERNELS.iter().filter(move |own| value_prefix.is_none() && fits(own))
    }

    /// Whether there are some.
    ///
    /// # Errors
    /// When there are none, and K and V are kept as [`E4M3`], which no other kernels read.
    fn has_own_kernels(&self) -> Result<bool> {
        let found = self.own_kernels().next().is_some();
        if self.e4m3 && !found {
            let what = format!("heads of {} in a cache of fp8", self.head_dim);
            return Err(unsupported(OP, format!("{what}: those of 64, 128 and 256 are, alone")));
        }
        Ok(found)
    }
}

impl From<&PagedArgs> for HeadShape {
    fn from(args: &PagedArgs) -> Self {
        let AttentionShape { heads, kv_heads, head_dim, value_prefix, .. } = args.shape;
        let e4m3 = args.k_cache.kind() == E4M3;
        Self { heads, kv_heads, head_dim, value_prefix, e4m3 }
    }
}

/// Tokens of a split that no sequence exceeds.
pub const WHOLE: u32 = 1 << 31;

/// The most blocks of 32 threads that run on one multiprocessor at once.
const MOST_RESIDENT: usize = 32;
/// Blocks of decode in f32 for which work is planned on each multiprocessor. That kernel is for
/// tests of exactness.
const F32_BLOCKS: usize = 4;

/// The kernels for a head size, beside queries in bf16.
struct HeadKernels {
    head_dim: usize,
    /// Whether they read a cache of codes; others read bf16.
    e4m3: bool,
    /// Tiles of keys in their rings.
    slots: usize,
    decode: &'static str,
    prefill: &'static str,
    /// Prefill of one part of the keys.
    part: &'static str,
}

macro_rules! head_kernels {
    ($(($head_dim:expr, $slots:expr, $name:literal)),* $(,)?) => { [$(HeadKernels {
        head_dim: $head_dim,
        e4m3: matches!($name.as_bytes(), [.., b'e', b'4', b'm', b'3']),
        slots: $slots,
        decode: concat!("attention_decode_", $name),
        prefill: concat!("attention_prefill_", $name),
        part: concat!("attention_prefill_part_", $name),
    }),*] };
}

/// The first that fits the device is used.
const KERNELS: [HeadKernels; 11] = head_kernels![
    (16, 3, "16_bf16"),
    (32, 3, "32_bf16"),
    (64, 3, "64_bf16"),
    (64, 3, "64_e4m3"),
    (80, 3, "80_bf16"),
    (96, 3, "96_bf16"),
    (128, 3, "128_bf16"),
    (128, 3, "128_e4m3"),
    (256, 3, "256_bf16"),
    (256, 2, "256_two_slots_bf16"),
    (256, 3, "256_e4m3"),
];

/// Prefill's kernels for a head size on a device.
struct PrefillKernels {
    whole: &'static str,
    /// Prefill of one part of the keys.
    part: &'static str,
    threads: u32,
    shared_bytes: u32,
    /// Blocks for which a multiprocessor has registers.
    resident: usize,
}

impl PrefillKernels {
    /// With warp groups there are four slots, each for a tile of keys and one of values.
    fn find(gpu: &dyn Gpu, heads: &HeadShape) -> Result<Self> {
        let rows = prefill_rows(heads.head_dim);
        if heads.head_dim == 128 && !heads.e4m3 && gpu.properties().warp_groups {
            return Ok(Self {
                whole: "attention_prefill_128_group_bf16",
                part: "attention_prefill_part_128_group_bf16",
                threads: 256,
                shared_bytes: ((rows + 4 * 2 * TILE) * 128 * Kind::Bf16.bytes()) as u32,
                resident: 1,
            });
        }
        let (shared_bytes, kernels) = kernels(gpu, heads, rows)?;
        let HeadKernels { prefill: whole, part, .. } = *kernels;
        Ok(Self { whole, part, threads: 128, shared_bytes, resident: 2 })
    }

    /// Blocks that a device runs at once.
    fn blocks(&self, gpu: &dyn Gpu) -> usize {
        let properties = gpu.properties();
        let resident = properties.resident(self.shared_bytes).min(self.resident);
        properties.multiprocessors as usize * resident
    }
}

/// The fewest tiles of keys in a part of prefill.
const LEAST_TILES: usize = 4;
/// Blocks with which a multiprocessor's memory is expected to be busy.
const ENOUGH_BLOCKS: usize = 2;
/// Rows of queries in a tile of decode.
const DECODE_ROWS: usize = 16;

/// Attention of one query a sequence: query i belongs to sequence i. Every piece of the plan is
/// computed by some block; the block that leaves the last partial result of a sequence and of a
/// tile of heads in `workspace` merges them.
pub fn decode(
    gpu: &dyn Gpu,
    args: &PagedArgs,
    plan: &DecodePieces,
    workspace: &DecodeWorkspace,
) -> Result<()> {
    let n = check(args)?;
    let sequences = args.sequences.seq_lens.len();
    let heads = HeadShape::from(args);
    ensure(OP, n == sequences, || format!("{n} queries of {sequences} sequences"))?;
    check_plan(plan, sequences)?;
    let grid = decode_grid(gpu, args.q.kind(), &heads)?;
    check_workspace(workspace, sequences * grid.head_tiles)?;
    if n == 0 {
        return Ok(());
    }
    let &DecodeWorkspace { partials, counters } = workspace;
    let (shares, most) = (plan.shares.len() - 1, partials.len() / partial_values(1, &heads));
    let mut params = parameters(args);
    params.extend(args![plan.shares, plan.pieces, plan.partials, partials, counters, shares]);
    params.extend(args![plan.pieces.len(), most]);
    params.extend(sizes(args));
    gpu.launch(&decode_launch(gpu, args, &grid, shares)?, &params)
}

/// The number of f32 values that `partials` partial results of `decode` take.
pub fn partial_values(partials: usize, heads: &HeadShape) -> usize {
    partials * heads.heads * (heads.value_dim() + 2).next_multiple_of(4)
}

/// The dimensions of keys and values, for kernels that are made for any.
fn sizes(args: &PagedArgs) -> Vec<Arg> {
    let heads = HeadShape::from(args);
    if args.q.kind() == Kind::Bf16 && heads.own_kernels().next().is_some() {
        return Vec::new();
    }
    args![heads.head_dim, heads.value_dim()].to_vec()
}

fn check_plan(plan: &DecodePieces, sequences: usize) -> Result<()> {
    let DecodePieces { shares, pieces, partials } = plan;
    let fits = [shares, pieces, partials].iter().all(|view| view.kind() == Kind::U32)
        && shares.len() > 1
        && partials.len() == sequences + 1
        && pieces.address().is_multiple_of((KeyPiece::WORDS * Kind::U32.bytes()) as u64);
    ensure(OP, fits, || format!("{plan:?} for {sequences} sequences"))
}

fn check_workspace(workspace: &DecodeWorkspace, counters: usize) -> Result<()> {
    let DecodeWorkspace { partials, counters: own } = workspace;
    let fits = partials.kind() == Kind::F32
        && partials.address().is_multiple_of(16)
        && own.kind() == Kind::U32
        && own.len() >= counters;
    ensure(OP, fits, || format!("{workspace:?} for {counters} counters"))
}

/// The kernel of decode for some heads, and what its blocks take.
struct DecodeKernel {
    name: &'static str,
    /// Query heads of a tile.
    rows: usize,
    threads: u32,
    shared_bytes: u32,
}

fn decode_kernel(gpu: &dyn Gpu, heads: &HeadShape) -> Result<DecodeKernel> {
    if heads.has_own_kernels()? {
        let (shared_bytes, own) = kernels(gpu, heads, DECODE_ROWS)?;
        return Ok(DecodeKernel { name: own.decode, rows: DECODE_ROWS, threads: 32, shared_bytes });
    }
    let (shared_bytes, any) = any::kernels(gpu, heads.dims(), heads.group())?;
    Ok(DecodeKernel { name: any.decode, rows: any.rows, threads: any::THREADS, shared_bytes })
}

/// The blocks of `decode` that a device runs at once, for plans.
///
/// # Errors
/// When there is no kernel for such heads that fits the device.
pub fn decode_grid(gpu: &dyn Gpu, kind: Kind, heads: &HeadShape) -> Result<DecodeGrid> {
    let multiprocessors = gpu.properties().multiprocessors as usize;
    if kind == Kind::F32 {
        return Ok(DecodeGrid {
            multiprocessors,
            resident: F32_BLOCKS,
            enough: ENOUGH_BLOCKS,
            head_tiles: heads.heads,
        });
    }
    let DecodeKernel { rows, threads, shared_bytes, .. } = decode_kernel(gpu, heads)?;
    let head_tiles = heads.kv_heads * heads.group().div_ceil(rows);
    let most = MOST_RESIDENT * 32 / threads as usize;
    let resident = gpu.properties().resident(shared_bytes).min(most);
    // A warp takes twice as long for a tile whose codes it widens.
    let enough = if heads.e4m3 { resident } else { ENOUGH_BLOCKS };
    Ok(DecodeGrid { multiprocessors, resident, enough, head_tiles })
}

/// Attention of any number of queries a sequence. A query's result has the same bits as with
/// `decode`, if keys are not divided into parts, and all splits end where the pieces of `decode`
/// do.
pub fn prefill(gpu: &dyn Gpu, args: &PagedArgs, queries: &PrefillQueries) -> Result<()> {
    let n = check(args)?;
    let &PrefillQueries { cu_seqlens, split, workspace, .. } = queries;
    let words = [cu_seqlens, split].iter().all(|view| view.kind() == Kind::U32);
    let sequences = args.sequences.seq_lens.len();
    let fits = words && cu_seqlens.len() == sequences + 1 && split.len() == 1;
    let holds = workspace.kind() == Kind::F32 && workspace.address().is_multiple_of(8);
    ensure(OP, fits && holds, || format!("{queries:?} for {sequences} sequences"))?;
    if n == 0 {
        return Ok(());
    }
    let heads = args.shape.heads;
    let mut params = parameters(args);
    let (launch, parts) = if args.q.kind() == Kind::F32 {
        let blocks = [n as u32, heads as u32, 1];
        let kernel = "attention_prefill_f32";
        (Launch { kernel, blocks, threads: 32, shared_bytes: 0 }, 1)
    } else if HeadShape::from(args).has_own_kernels()? {
        prefill_launch(gpu, args, queries, n)?
    } else {
        (any_prefill_launch(gpu, args, queries, n)?, 1)
    };
    if parts == 1 {
        params.extend(args![cu_seqlens, split, n]);
        params.extend(sizes(args));
        return gpu.launch(&launch, &params);
    }
    params.extend(args![cu_seqlens, n, workspace]);
    gpu.launch(&launch, &params)?;
    let blocks = [(n * heads).div_ceil(4) as u32, 1, 1];
    let kernel = "attention_combine_parts_bf16";
    let params = args![workspace, args.out, args.sinks, n, heads, args.shape.head_dim, parts];
    gpu.launch(&Launch { kernel, blocks, threads: 128, shared_bytes: 0 }, &params)
}

/// The launch for `n` queries of heads without kernels of their own.
fn any_prefill_launch(
    gpu: &dyn Gpu,
    args: &PagedArgs,
    queries: &PrefillQueries,
    n: usize,
) -> Result<Launch> {
    let (heads, group) = (HeadShape::from(args), args.shape.group());
    let (shared_bytes, any) = any::kernels(gpu, heads.dims(), n * group)?;
    let (sequences, most) = (args.sequences.seq_lens.len(), queries.most * group);
    let tiles = prefill_tiles(n * group, sequences, most, any.rows);
    let blocks = [(tiles * heads.kv_heads) as u32, 1, 1];
    Ok(Launch { kernel: any.prefill, blocks, threads: any::THREADS, shared_bytes })
}

/// The launch for `n` queries, and the parts into which it divides their keys.
fn prefill_launch(
    gpu: &dyn Gpu,
    args: &PagedArgs,
    queries: &PrefillQueries,
    n: usize,
) -> Result<(Launch, usize)> {
    let AttentionShape { kv_heads, head_dim, window, .. } = args.shape;
    let (rows, group) = (prefill_rows(head_dim), args.shape.group());
    let heads = HeadShape::from(args);
    let kernels = PrefillKernels::find(gpu, &heads)?;
    ensure(OP, group <= rows, || {
        format!("{group} query heads for each KV head, where {rows} are the most")
    })?;
    let (sequences, per_tile) = (args.sequences.seq_lens.len(), rows / group);
    let blocks = prefill_tiles(n, sequences, queries.most, per_tile) * kv_heads;
    // The queries of a tile see one window, and as many tokens more as there are other queries.
    let visible = |longest: usize| window.map_or(longest, |window| longest.min(window + per_tile));
    let tiles = queries.longest.map_or(0, |longest| visible(longest).div_ceil(TILE));
    let room = queries.workspace.len() / partial_values(n, &heads);
    let parts = key_parts(kernels.blocks(gpu), blocks, tiles).min(room).max(1);
    let kernel = if parts == 1 { kernels.whole } else { kernels.part };
    let blocks = [blocks as u32, parts as u32, 1];
    let PrefillKernels { threads, shared_bytes, .. } = kernels;
    Ok((Launch { kernel, blocks, threads, shared_bytes }, parts))
}

/// The parts into which `tiles` tiles of keys are divided where there are `blocks` blocks of
/// queries: as many as the device runs at once, but none so short that merging costs more than it
/// saves.
fn key_parts(at_once: usize, blocks: usize, tiles: usize) -> usize {
    (at_once / blocks).min(tiles / LEAST_TILES).max(1)
}

/// The f32 values of all partial results that `prefill` ever leaves at once.
///
/// # Errors
/// When no kernel for heads of `head_dim` fits the device.
pub fn prefill_values(gpu: &dyn Gpu, kind: Kind, heads: &HeadShape) -> Result<usize> {
    if kind == Kind::F32 || !heads.has_own_kernels()? {
        return Ok(0);
    }
    let kernels = PrefillKernels::find(gpu, heads)?;
    let of_a_block = HeadShape { heads: 1, ..*heads };
    Ok(kernels.blocks(gpu) * partial_values(prefill_rows(heads.head_dim), &of_a_block))
}

/// Bytes of shared memory for a tile of `rows` queries and a ring of tiles of keys, as `tile.cuh`
/// has them.
fn shared_bytes(rows: usize, kernels: &HeadKernels) -> u32 {
    let (dim, bf16) = (kernels.head_dim, Kind::Bf16.bytes());
    let key = if kernels.e4m3 { cached(E4M3, 1, dim) } else { dim * bf16 };
    (rows * dim * bf16 + kernels.slots * TILE * key) as u32
}

/// Rows (queries × heads of a group) of a block of prefill, as `prefill.cu` has them.
fn prefill_rows(head_dim: usize) -> usize {
    if head_dim > 128 { 64 } else { 128 }
}

/// A bound on the number of tiles: no distribution of `n` queries over `sequences` has more.
fn prefill_tiles(
    n: usize,
    sequences: usize,
    most_queries: usize,
    queries_per_tile: usize,
) -> usize {
    (n / queries_per_tile + sequences.min(n))
        .min(sequences * most_queries.div_ceil(queries_per_tile))
        .max(1)
}

/// Launches as many blocks as the device runs at once, or as many as there are work items.
fn decode_launch(
    gpu: &dyn Gpu,
    args: &PagedArgs,
    grid: &DecodeGrid,
    shares: usize,
) -> Result<Launch> {
    let heads = HeadShape::from(args);
    if args.q.kind() == Kind::F32 {
        let (kernel, blocks) = ("attention_decode_f32", [shares as u32, heads.heads as u32, 1]);
        return Ok(Launch { kernel, blocks, threads: 32, shared_bytes: 0 });
    }
    let DecodeKernel { name: kernel, threads, shared_bytes, .. } = decode_kernel(gpu, &heads)?;
    let blocks = (shares * grid.head_tiles).min(grid.multiprocessors * grid.resident);
    Ok(Launch { kernel, blocks: [blocks as u32, 1, 1], threads, shared_bytes })
}

/// Bytes of shared memory of a block with a tile of `rows` queries, and the kernels of decode and
/// prefill whose ring of keys fits beside it.
fn kernels(gpu: &dyn Gpu, heads: &HeadShape, rows: usize) -> Result<(u32, &'static HeadKernels)> {
    let most = gpu.properties().shared_bytes;
    let mut sized = heads.own_kernels().map(|kernels| (shared_bytes(rows, kernels), kernels));
    sized.find(|(bytes, _)| *bytes <= most).ok_or_else(|| {
        let has = format!("blocks of this GPU have {} KiB of shared memory", most >> 10);
        let heads = format!("heads of {} in bf16", heads.head_dim);
        unsupported(OP, format!("{heads}: {has}, which is too little"))
    })
}

fn window(args: &PagedArgs) -> u32 {
    args.shape.window.and_then(|window| u32::try_from(window).ok()).unwrap_or(u32::MAX)
}

/// The arguments for `ATTENTION_PARAMETERS` of `paged.cuh`.
fn parameters(args: &PagedArgs) -> Vec<Arg> {
    let blocks = args.blocks();
    let log2_e = std::f32::consts::LOG2_E;
    let AttentionShape { q_stride, heads, kv_heads, block_size, scale, .. } = args.shape;
    let (to_log2, cap_in) = match args.shape.softcap {
        None => (scale * log2_e, 0.0),
        Some(cap) => (cap * log2_e, scale / cap),
    };
    let &PagedArgs { q, sinks, out, .. } = args;
    let [k_cache, v_cache] = [args.k_cache, args.v_cache].map(View::in_pairs);
    let PagedSequences { seq_lens, tables, table_starts } = args.sequences;
    let mut params = args![q, k_cache, v_cache, out, seq_lens, tables, table_starts].to_vec();
    params.extend(args![sinks, q_stride, heads, kv_heads, seq_lens.len(), blocks, block_size]);
    params.extend(args![tables.len(), window(args), to_log2, cap_in]);
    params
}

/// Returns the number of queries.
fn check(args: &PagedArgs) -> Result<usize> {
    let n = args.check()?;
    let PagedSequences { seq_lens, tables, table_starts } = args.sequences;
    let (kind, head_dim, block_size) = (args.q.kind(), args.shape.head_dim, args.shape.block_size);
    let words = [seq_lens, tables, table_starts].iter().all(|view| view.kind() == Kind::U32);
    let fits = words && table_starts.len() == seq_lens.len() + 1;
    ensure(OP, fits, || format!("{:?}", args.sequences))?;
    let kept = args.k_cache.kind();
    let caches = (kept == kind || kept == E4M3 && kind == Kind::Bf16)
        && block_size.is_power_of_two()
        && block_size >= 16;
    ensure(OP, caches, || {
        let blocks = format!("in blocks of {block_size} tokens (a power of two, at least 16)");
        format!("caches {:?} {blocks} for {:?}", args.k_cache, args.q)
    })?;
    let values = args.shape.value_dim();
    if values > any::MOST_VALUES {
        let limit = any::MOST_VALUES;
        let most = format!("values of {values}, where {limit} dimensions are the most");
        return Err(unsupported(OP, most));
    }
    if kind == Kind::Bf16 && head_dim.is_multiple_of(8) {
        check_alignment(args)?;
    }
    Ok(n)
}

/// Checks alignment, as rows that consist of whole vectors are copied 16 bytes at a time.
fn check_alignment(args: &PagedArgs) -> Result<()> {
    let starts = [args.q, args.k_cache, args.v_cache, args.out]
        .iter()
        .all(|view| view.address().is_multiple_of(16));
    let (q, stride) = (args.q, args.shape.q_stride);
    ensure(OP, starts && stride.is_multiple_of(8), || {
        format!("{q:?} with rows of {stride} elements: rows start at multiples of 16 bytes")
    })
}

#[cfg(test)]
mod tests;
