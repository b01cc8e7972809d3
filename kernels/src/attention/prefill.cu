// Attention of a ragged batch of queries over the paged cache, bf16: FlashAttention-2 class.
//
// Grid: a block of four warps for each (tile of queries, KV head), KV heads fastest; in the `part`
// kernels times the parts. A tile is up to 128 rows (64 at 256 dimensions), a row one query of one
// head of the group, so a group reads its keys once. Which sequence a tile belongs to follows from
// cu_seqlens on the device; blocks beyond the last tile end at once.
// Where few queries stand behind many keys, tiles alone would leave most multiprocessors without
// work. The `part` kernels divide the keys of each tile into equal parts, whose partial results
// `combine.cu` merges.
// At 128 dimensions: 80 KiB of shared memory and 255 registers a thread, two blocks a
// multiprocessor, so that one's softmax runs beside the other's products. A warp reads 40 KiB of
// shared memory for 264 products a tile (320 clocks of the multiprocessor's 128 bytes each, against
// some 1700 of its quarter's tensor core): products are the limit, not shared memory; with 16 rows
// a warp it would be the other way round.
// Several splits: the state of the splits before waits in the thread's own memory (a stack frame of
// about 600 bytes, for which the driver sets aside 600 * 2048 bytes a multiprocessor) and is
// touched once a split.
// Considered: the state of the splits in shared memory (64 KiB, leaves one block a multiprocessor);
// parts for all prompts (the workspace is as large as q in f32, times the parts). wgmma would lift
// the limit of mma, about six tenths of the tensor cores' rate. On an H200 it reaches
// 294 TFLOP/s for 8192 tokens, 42 % of the library's product.
#include "attention/tile.cuh"

namespace {

constexpr uint32_t WARPS = 4;

// Two tiles of 16 rows a warp halve what is read from shared memory for each product; more values
// than 128 leave no registers.
template <uint32_t D>
constexpr uint32_t ROW_TILES = D > 128 ? 1 : 2;
template <uint32_t D>
constexpr uint32_t TILE_ROWS = WARPS * 16 * ROW_TILES<D>;

// The work of a block: queries of one sequence with all heads of one group. Row r is head r % group
// of query r / group.
template <uint32_t D>
struct QueryTile {
    uint32_t sequence = 0, kv_head = 0, group = 0, len = 0, rows = 0;
    uint32_t query = 0;     // the first query, as a row of q and out
    uint32_t position = 0;  // position of the first query

    // False for a block without work: the grid has room for the most tiles that a batch can make.
    DEVICE bool find(const AttentionParams<bf16>& params, const uint32_t* cu_seqlens, uint32_t n) {
        group = params.group(), kv_head = blockIdx.x % params.kv_heads;
        uint32_t per_tile = TILE_ROWS<D> / group;
        auto tiles = [&](uint32_t i) {
            ASSERT(cu_seqlens[i] <= cu_seqlens[i + 1] && cu_seqlens[i + 1] <= n);
            return divide_up(cu_seqlens[i + 1] - cu_seqlens[i], per_tile);
        };
        WorkSearch search;
        bool found = search.find(blockIdx.x / params.kv_heads, params.sequences, tiles);
        if (found) {
            sequence = search.sequence, len = params.seq_lens[sequence];
            // The last tile of a prompt sees the most keys: started first, it does not finish
            // alone.
            uint32_t tile = tiles(sequence) - 1 - search.index,
                     queries = cu_seqlens[sequence + 1] - cu_seqlens[sequence];
            ASSERT(queries <= len);
            rows = min(per_tile, queries - tile * per_tile) * group;
            query = cu_seqlens[sequence] + tile * per_tile;
            position = len - queries + tile * per_tile;
        }
        if (blockIdx.x == gridDim.x - 1)
            ASSERT(!search.find(gridDim.x / params.kv_heads, params.sequences, tiles));
        return found;
    }

    DEVICE size_t head(uint32_t row) const { return kv_head * group + row % group; }

    DEVICE void copy_queries(const AttentionParams<bf16>& params, bf16* q) const {
#pragma unroll 4
        for (uint32_t i = threadIdx.x; i < TILE_ROWS<D> * D / 8; i += WARPS * WARP) {
            uint32_t row = i / (D / 8), chunk = i % (D / 8), clamped = min(row, rows - 1);
            size_t from = static_cast<size_t>(query + clamped / group) * params.q_stride +
                          head(clamped) * D + chunk * 8;
            copy_async(q + Swizzled<D>::at(row, chunk), params.q + from, row < rows);
        }
    }

    // Rows beyond the last one have the position of the last one.
    DEVICE uint32_t position_of(uint32_t row) const {
        return position + min(row, rows - 1) / group;
    }

    // The row of a value within the warp's rows.
    DEVICE static uint32_t row_of(uint32_t m, uint32_t half) {
        return m * 16 + half * 8 + lane() / 4;
    }

    DEVICE void store_rows(
        const AttentionParams<bf16>& params, const Accumulator<D, ROW_TILES<D>>& acc) const {
#pragma unroll
        for (uint32_t m = 0; m < ROW_TILES<D>; m++)
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                uint32_t row = warp() * 16 * ROW_TILES<D> + row_of(m, half);
                if (row >= rows) continue;
                size_t to = static_cast<size_t>(query + row / group) * params.heads + head(row);
                float by = normaliser(
                    acc.row_max[m][half], acc.row_sum[m][half * 2], params.sinks, head(row));
#pragma unroll
                for (uint32_t n = 0; n < D / 8; n++) {
                    const float* pair = &acc.o[m][n][half * 2];
                    Vec<bf16, 2> values{
                        from_float<bf16>(pair[0] * by), from_float<bf16>(pair[1] * by)};
                    store(params.out + to * D + n * 8 + lane() % 4 * 2, values);
                }
            }
    }

    // Leaves the block's part of each row's result in the workspace, beside the other parts of all
    // queries.
    DEVICE void store_states(const AttentionParams<bf16>& params,
        const Accumulator<D, ROW_TILES<D>>& acc, float* workspace) const {
#pragma unroll
        for (uint32_t m = 0; m < ROW_TILES<D>; m++)
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                uint32_t row = warp() * 16 * ROW_TILES<D> + row_of(m, half);
                if (row >= rows) continue;
                size_t partial = static_cast<size_t>(query + row / group) * gridDim.y + blockIdx.y;
                PartialState to(workspace, params.heads, D, partial, head(row));
#pragma unroll
                for (uint32_t n = 0; n < D / 8; n++) {
                    const float* pair = &acc.o[m][n][half * 2];
                    store(to.out + n * 8 + lane() % 4 * 2, Vec<float, 2>{pair[0], pair[1]});
                }
                if (lane() % 4 == 0)
                    store(to.max_and_sum,
                        Vec<float, 2>{acc.row_max[m][half], acc.row_sum[m][half * 2]});
            }
    }
};

// The keys that this block computes: one of gridDim.y parts, each of equally many tiles.
DEVICE Range own_part(Range keys) {
    uint32_t first = keys.begin / TILE_KEYS, tiles = divide_up(keys.end, TILE_KEYS) - first,
             each = divide_up(tiles, gridDim.y), begin = first + min(blockIdx.y * each, tiles),
             end = first + min((blockIdx.y + 1) * each, tiles);
    return {min(max(begin * TILE_KEYS, keys.begin), keys.end), min(end * TILE_KEYS, keys.end)};
}

// The positions of this warp's rows.
template <uint32_t D>
struct WarpQueries {
    const QueryTile<D>& block;
    uint32_t first, end;

    DEVICE WarpQueries(const QueryTile<D>& block) : block(block) {
        bool any = warp() * 16 * ROW_TILES<D> < block.rows;
        first = position(0), end = any ? position(16 * ROW_TILES<D> - 1) + 1 : 0;
    }
    DEVICE uint32_t position(uint32_t row) const {
        return block.position_of(warp() * 16 * ROW_TILES<D> + row);
    }
};

// Merges the state of the previous splits into that of the split after them.
template <uint32_t D, uint32_t MT>
DEVICE void merge_before(const Accumulator<D, MT>* before, Accumulator<D, MT>& acc) {
#pragma unroll
    for (uint32_t m = 0; m < MT; m++)
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            StateMerge both(before->row_max[m][half], acc.row_max[m][half]);
            acc.row_max[m][half] = both.row_max;
#pragma unroll
            for (uint32_t i = half * 2; i < half * 2 + 2; i++) {
                acc.row_sum[m][i] = both.merge(before->row_sum[m][i], acc.row_sum[m][i]);
#pragma unroll
                for (uint32_t n = 0; n < D / 8; n++)
                    acc.o[m][n][i] = both.merge(before->o[m][n][i], acc.o[m][n][i]);
            }
        }
}

template <uint32_t D, uint32_t SLOTS = 3, bool E4M3 = false>
DEVICE void prefill(const AttentionParams<bf16>& params, const uint32_t* cu_seqlens,
    const uint32_t* split_tokens, uint32_t n) {
    launch_dependents_and_wait();
    constexpr uint32_t MT = ROW_TILES<D>;
    bf16 *q = dynamic_shared<bf16>(), *ring = q + TILE_ROWS<D> * D;
    QueryTile<D> found;
    if (!found.find(params, cu_seqlens, n)) return;
    found.copy_queries(params, q);
    const QueryTile<D>& block = *in_memory(&found);  // Registers are needed for tiles.
    WarpQueries<D> queries(block);
    Splits cut(
        {params.first_key(block.position), block.position_of(block.rows - 1) + 1}, split_tokens);
    const Splits& splits = *in_memory(&cut);
    KvTiles<D, WARPS * WARP, E4M3> made(
        params, params.table(block.sequence, block.len), block.kv_head);
    KvTiles<D, WARPS * WARP, E4M3>& tiles = E4M3 ? *in_memory(&made) : made;  // likewise
    Accumulator<D, MT> acc, before;
#pragma unroll 1
    for (uint32_t split = 0; split < splits.count; split++) {
        tiles.range = splits.range(split);
        attend<D, MT, WARPS, SLOTS, E4M3>(
            acc, params, tiles, queries, q + warp() * 16 * MT * D, ring);
        if (split > 0) merge_before(in_memory(&before), acc);
        if (split + 1 < splits.count) *in_memory(&before) = acc;
    }
    block.store_rows(params, acc);
}

// One part of the keys, of any query that sees some of them.
template <uint32_t D, uint32_t SLOTS = 3, bool E4M3 = false>
DEVICE void prefill_part(
    const AttentionParams<bf16>& params, const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    launch_dependents_and_wait();
    constexpr uint32_t MT = ROW_TILES<D>;
    bf16 *q = dynamic_shared<bf16>(), *ring = q + TILE_ROWS<D> * D;
    QueryTile<D> found;
    if (!found.find(params, cu_seqlens, n)) return;
    Range keys =
        own_part({params.first_key(found.position), found.position_of(found.rows - 1) + 1});
    if (keys.begin < keys.end) found.copy_queries(params, q);
    const QueryTile<D>& block = *in_memory(&found);  // Registers are needed for tiles.
    WarpQueries<D> queries(block);
    KvTiles<D, WARPS * WARP, E4M3> tiles(
        params, params.table(block.sequence, block.len), block.kv_head);
    tiles.range = keys;
    Accumulator<D, MT> acc;
    attend<D, MT, WARPS, SLOTS, E4M3>(acc, params, tiles, queries, q + warp() * 16 * MT * D, ring);
    block.store_states(params, acc, workspace);
}

}  // namespace

KERNEL __launch_bounds__(128, 2)
    attention_prefill_16_bf16(ATTENTION_PARAMETERS(bf16), PREFILL_PARAMETERS) {
    prefill<16>(ATTENTION_PARAMS(bf16), cu_seqlens, split_tokens, n);
}
EXPORT(attention_prefill_16_bf16)
KERNEL __launch_bounds__(128, 2) attention_prefill_part_16_bf16(
    ATTENTION_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    prefill_part<16>(ATTENTION_PARAMS(bf16), cu_seqlens, n, workspace);
}
EXPORT(attention_prefill_part_16_bf16)
KERNEL __launch_bounds__(128, 2)
    attention_prefill_32_bf16(ATTENTION_PARAMETERS(bf16), PREFILL_PARAMETERS) {
    prefill<32>(ATTENTION_PARAMS(bf16), cu_seqlens, split_tokens, n);
}
EXPORT(attention_prefill_32_bf16)
KERNEL __launch_bounds__(128, 2) attention_prefill_part_32_bf16(
    ATTENTION_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    prefill_part<32>(ATTENTION_PARAMS(bf16), cu_seqlens, n, workspace);
}
EXPORT(attention_prefill_part_32_bf16)
KERNEL __launch_bounds__(128, 2)
    attention_prefill_64_bf16(ATTENTION_PARAMETERS(bf16), PREFILL_PARAMETERS) {
    prefill<64>(ATTENTION_PARAMS(bf16), cu_seqlens, split_tokens, n);
}
EXPORT(attention_prefill_64_bf16)
KERNEL __launch_bounds__(128, 2) attention_prefill_part_64_bf16(
    ATTENTION_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    prefill_part<64>(ATTENTION_PARAMS(bf16), cu_seqlens, n, workspace);
}
EXPORT(attention_prefill_part_64_bf16)
KERNEL __launch_bounds__(128, 2)
    attention_prefill_80_bf16(ATTENTION_PARAMETERS(bf16), PREFILL_PARAMETERS) {
    prefill<80>(ATTENTION_PARAMS(bf16), cu_seqlens, split_tokens, n);
}
EXPORT(attention_prefill_80_bf16)
KERNEL __launch_bounds__(128, 2) attention_prefill_part_80_bf16(
    ATTENTION_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    prefill_part<80>(ATTENTION_PARAMS(bf16), cu_seqlens, n, workspace);
}
EXPORT(attention_prefill_part_80_bf16)
KERNEL __launch_bounds__(128, 2)
    attention_prefill_96_bf16(ATTENTION_PARAMETERS(bf16), PREFILL_PARAMETERS) {
    prefill<96>(ATTENTION_PARAMS(bf16), cu_seqlens, split_tokens, n);
}
EXPORT(attention_prefill_96_bf16)
KERNEL __launch_bounds__(128, 2) attention_prefill_part_96_bf16(
    ATTENTION_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    prefill_part<96>(ATTENTION_PARAMS(bf16), cu_seqlens, n, workspace);
}
EXPORT(attention_prefill_part_96_bf16)
KERNEL __launch_bounds__(128, 2)
    attention_prefill_128_bf16(ATTENTION_PARAMETERS(bf16), PREFILL_PARAMETERS) {
    prefill<128>(ATTENTION_PARAMS(bf16), cu_seqlens, split_tokens, n);
}
EXPORT(attention_prefill_128_bf16)
KERNEL __launch_bounds__(128, 2) attention_prefill_part_128_bf16(
    ATTENTION_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    prefill_part<128>(ATTENTION_PARAMS(bf16), cu_seqlens, n, workspace);
}
EXPORT(attention_prefill_part_128_bf16)
KERNEL __launch_bounds__(128, 1)
    attention_prefill_256_bf16(ATTENTION_PARAMETERS(bf16), PREFILL_PARAMETERS) {
    prefill<256>(ATTENTION_PARAMS(bf16), cu_seqlens, split_tokens, n);
}
EXPORT(attention_prefill_256_bf16)
KERNEL __launch_bounds__(128, 1) attention_prefill_part_256_bf16(
    ATTENTION_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    prefill_part<256>(ATTENTION_PARAMS(bf16), cu_seqlens, n, workspace);
}
EXPORT(attention_prefill_part_256_bf16)
// For cards whose blocks have 99 KiB of shared memory.
KERNEL __launch_bounds__(128, 1)
    attention_prefill_256_two_slots_bf16(ATTENTION_PARAMETERS(bf16), PREFILL_PARAMETERS) {
    prefill<256, 2>(ATTENTION_PARAMS(bf16), cu_seqlens, split_tokens, n);
}
EXPORT(attention_prefill_256_two_slots_bf16)
KERNEL __launch_bounds__(128, 1) attention_prefill_part_256_two_slots_bf16(
    ATTENTION_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    prefill_part<256, 2>(ATTENTION_PARAMS(bf16), cu_seqlens, n, workspace);
}
EXPORT(attention_prefill_part_256_two_slots_bf16)
KERNEL __launch_bounds__(128, 2)
    attention_prefill_64_e4m3(ATTENTION_PARAMETERS(bf16), PREFILL_PARAMETERS) {
    prefill<64, 3, true>(ATTENTION_PARAMS(bf16), cu_seqlens, split_tokens, n);
}
EXPORT(attention_prefill_64_e4m3)
KERNEL __launch_bounds__(128, 2) attention_prefill_part_64_e4m3(
    ATTENTION_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    prefill_part<64, 3, true>(ATTENTION_PARAMS(bf16), cu_seqlens, n, workspace);
}
EXPORT(attention_prefill_part_64_e4m3)
KERNEL __launch_bounds__(128, 2)
    attention_prefill_128_e4m3(ATTENTION_PARAMETERS(bf16), PREFILL_PARAMETERS) {
    prefill<128, 3, true>(ATTENTION_PARAMS(bf16), cu_seqlens, split_tokens, n);
}
EXPORT(attention_prefill_128_e4m3)
KERNEL __launch_bounds__(128, 2) attention_prefill_part_128_e4m3(
    ATTENTION_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    prefill_part<128, 3, true>(ATTENTION_PARAMS(bf16), cu_seqlens, n, workspace);
}
EXPORT(attention_prefill_part_128_e4m3)
KERNEL __launch_bounds__(128, 1)
    attention_prefill_256_e4m3(ATTENTION_PARAMETERS(bf16), PREFILL_PARAMETERS) {
    prefill<256, 3, true>(ATTENTION_PARAMS(bf16), cu_seqlens, split_tokens, n);
}
EXPORT(attention_prefill_256_e4m3)
KERNEL __launch_bounds__(128, 1) attention_prefill_part_256_e4m3(
    ATTENTION_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    prefill_part<256, 3, true>(ATTENTION_PARAMS(bf16), cu_seqlens, n, workspace);
}
EXPORT(attention_prefill_part_256_e4m3)
