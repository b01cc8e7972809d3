// Prefill: attention of a ragged batch of queries over the paged cache, bf16: FlashAttention-2
// class.
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
// parts for all prompts (the workspace is as large as q in f32, times the parts). On an H200 it
// reaches 294 TFLOP/s for 8192 tokens, 42 % of the library's product; mma's limit is about six
// tenths of the tensor cores' rate.
// `group`, at 128 dimensions where the device has warp groups: two of them with 64 rows each, one
// block a multiprocessor. Queries stay in registers. The scores of a tile are multiplied while the
// weights of the tile before are computed, in the same order of sums. A tile takes 1024 cycles of
// the tensor cores, 750 of shared memory (64 KiB read, 32 written), and its weights about 700, of
// which the tensor cores work in 512: some 1300 to 1600 cycles in all. Predicted for an H200: 420
// to 520 TFLOP/s for 8192 tokens. Measured: 302, no more than without warp groups. The scores
// behind the last tile are those of whatever lies in their slot, and nobody reads them: without a
// branch the products overlap.
#include "attention/tile.cuh"
#include "warp_groups.cuh"

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

    template <uint32_t THREADS = WARPS * WARP>
    DEVICE void copy_queries(const AttentionParams<bf16>& params, bf16* q) const {
#pragma unroll 4
        for (uint32_t i = threadIdx.x; i < TILE_ROWS<D> * D / 8; i += THREADS) {
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

    template <uint32_t MT>
    DEVICE void store_rows(
        const AttentionParams<bf16>& params, const Accumulator<D, MT>& acc) const {
#pragma unroll
        for (uint32_t m = 0; m < MT; m++)
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                uint32_t row = warp() * 16 * MT + row_of(m, half);
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
    template <uint32_t MT>
    DEVICE void store_states(const AttentionParams<bf16>& params, const Accumulator<D, MT>& acc,
        float* workspace) const {
#pragma unroll
        for (uint32_t m = 0; m < MT; m++)
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                uint32_t row = warp() * 16 * MT + row_of(m, half);
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
template <uint32_t D, uint32_t MT = ROW_TILES<D>>
struct WarpQueries {
    const QueryTile<D>& block;
    uint32_t first, end;

    DEVICE WarpQueries(const QueryTile<D>& block) : block(block) {
        bool any = warp() * 16 * MT < block.rows;
        first = position(0), end = any ? position(16 * MT - 1) + 1 : 0;
    }
    DEVICE uint32_t position(uint32_t row) const {
        return block.position_of(warp() * 16 * MT + row);
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

// The attention of a block's warps over the keys of `tiles.range`, as `attend` computes it.
template <uint32_t D, uint32_t SLOTS = 3, bool E4M3 = false>
struct PlainAttention {
    static constexpr uint32_t DIMENSIONS = D, MT = ROW_TILES<D>, THREADS = WARPS * WARP;
    // Registers are needed for tiles of other things where codes are widened.
    static constexpr bool TILES_IN_MEMORY = E4M3;
    using Tiles = KvTiles<D, THREADS, E4M3>;

    DEVICE static bf16* shared() { return dynamic_shared<bf16>(); }
    DEVICE static void run(Accumulator<D, MT>& acc, const AttentionParams<bf16>& params,
        Tiles& tiles, const WarpQueries<D, MT>& queries, const bf16* q, bf16* ring) {
        attend<D, MT, WARPS, SLOTS, E4M3>(acc, params, tiles, queries, q, ring);
    }
};

template <class Attention>
DEVICE void prefill(const AttentionParams<bf16>& params, const uint32_t* cu_seqlens,
    const uint32_t* split_tokens, uint32_t n) {
    launch_dependents_and_wait();
    constexpr uint32_t D = Attention::DIMENSIONS, MT = Attention::MT;
    bf16 *q = Attention::shared(), *ring = q + TILE_ROWS<D> * D;
    QueryTile<D> found;
    if (!found.find(params, cu_seqlens, n)) return;
    found.template copy_queries<Attention::THREADS>(params, q);
    const QueryTile<D>& block = *in_memory(&found);  // Registers are needed for tiles.
    WarpQueries<D, MT> queries(block);
    Splits cut(
        {params.first_key(block.position), block.position_of(block.rows - 1) + 1}, split_tokens);
    const Splits& splits = *in_memory(&cut);
    using Tiles = typename Attention::Tiles;
    Tiles made(params.table(block.sequence, block.len), block.kv_head);
    Tiles& tiles = Attention::TILES_IN_MEMORY ? *in_memory(&made) : made;  // likewise
    Accumulator<D, MT> acc, before;
#pragma unroll 1
    for (uint32_t split = 0; split < splits.count; split++) {
        tiles.range = splits.range(split);
        Attention::run(acc, params, tiles, queries, q + warp() * 16 * MT * D, ring);
        if (split > 0) merge_before(in_memory(&before), acc);
        if (split + 1 < splits.count) *in_memory(&before) = acc;
    }
    block.store_rows(params, acc);
}

// One part of the keys, of any query that sees some of them.
template <class Attention>
DEVICE void prefill_part(
    const AttentionParams<bf16>& params, const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    launch_dependents_and_wait();
    constexpr uint32_t D = Attention::DIMENSIONS, MT = Attention::MT;
    bf16 *q = Attention::shared(), *ring = q + TILE_ROWS<D> * D;
    QueryTile<D> found;
    if (!found.find(params, cu_seqlens, n)) return;
    Range keys =
        own_part({params.first_key(found.position), found.position_of(found.rows - 1) + 1});
    if (keys.begin < keys.end) found.template copy_queries<Attention::THREADS>(params, q);
    const QueryTile<D>& block = *in_memory(&found);  // Registers are needed for tiles.
    WarpQueries<D, MT> queries(block);
    typename Attention::Tiles tiles(params.table(block.sequence, block.len), block.kv_head);
    tiles.range = keys;
    Accumulator<D, MT> acc;
    Attention::run(acc, params, tiles, queries, q + warp() * 16 * MT * D, ring);
    block.store_states(params, acc, workspace);
}

// ---- warp groups, at 128 dimensions

constexpr uint32_t GROUP_D = 128, GROUP_THREADS = 2 * WARP_GROUP, GROUP_SLOTS = 4;
constexpr uint32_t TILE_VALUES = TILE_KEYS * GROUP_D, HALF_TILE = TILE_VALUES / 2;

// Tiles of keys and values as products of warp groups take them: 64 dimensions of all keys, and
// then the others.
struct GroupTiles : KvTiles<GROUP_D, GROUP_THREADS, false> {
    using KvTiles<GROUP_D, GROUP_THREADS, false>::KvTiles;

    // Starts copying a tile whose pages lie in these blocks, as `locate` finds them.
    DEVICE void copy(const AttentionParams<bf16>& params, bf16* to, const bf16* cache,
        uint32_t tile, uint32_t blocks) const {
        uint32_t stride = params.kv_heads * GROUP_D, row = threadIdx.x / 16,
                 chunk = threadIdx.x % 16;
#pragma unroll
        for (uint32_t page = 0; page < TILE_KEYS / KV_BLOCK; page++) {
            uint32_t key = tile * TILE_KEYS + page * KV_BLOCK;
            size_t slot =
                static_cast<size_t>(__shfl_sync(FULL_MASK, blocks, page)) * params.block_size +
                (key & (params.block_size - 1)) + row;
            copy_async(to + chunk / 8 * HALF_TILE + (page * KV_BLOCK + row) * 64 +
                           (chunk % 8 ^ row % 8) * 8,
                cache + slot * stride + head + chunk * 8,
                key + row - range.begin < range.end - range.begin);
        }
    }
};

// Attention of the 16 rows of a warp, as `attend` computes it. While the weights of a tile are
// computed, the scores of the next one are multiplied. Slot i of the ring has the values of tile
// i and the keys of tile i + 1, modulo their number.
struct GroupAttention {
    const AttentionParams<bf16>& params;
    GroupTiles& tiles;
    const WarpQueries<GROUP_D, 1>& queries;
    bf16* ring;
    uint32_t first, count, value_blocks;
    uint32_t q[GROUP_D / 16][4];
    float scores[1][TILE_KEYS / 8][4], next_scores[1][TILE_KEYS / 8][4];

    DEVICE bf16* slot(uint32_t i) const { return ring + i % GROUP_SLOTS * 2 * TILE_VALUES; }

    // Starts copying the values of tile `i` and the keys of the one behind it, which was located
    // last.
    DEVICE void copy(uint32_t i) {
        if (i < count) tiles.copy(params, slot(i) + TILE_VALUES, params.v, first + i, value_blocks);
        value_blocks = tiles.block;
        if (i + 1 < count) {
            tiles.copy(params, slot(i), params.k, first + i + 1, tiles.block);
            tiles.locate(params, first + i + 2);
        }
        copy_commit();
    }

    // Starts multiplying the queries by the keys in slot `i`.
    DEVICE void multiply_keys(float (&s)[1][TILE_KEYS / 8][4], uint32_t i) {
        uint64_t keys = describe_matrix(slot(i));
        auto& sums = reinterpret_cast<float (&)[TILE_KEYS / 2]>(s);
        group_mma_fence();
#pragma unroll
        for (uint32_t step = 0; step < GROUP_D / 16; step++)
            group_mma<TILE_KEYS>(
                sums, q[step], keys + step / 4 * (HALF_TILE * 2 >> 4) + step % 4 * 2, step > 0);
        group_mma_commit();
    }

    DEVICE void multiply_values(
        Accumulator<GROUP_D, 1>& acc, const uint32_t (&p)[1][TILE_KEYS / 16][4], uint32_t i) {
        constexpr uint32_t ONES = 0x3f803f80u;
        uint64_t values = describe_matrix(slot(i) + TILE_VALUES, HALF_TILE * 2);
        auto& sums = reinterpret_cast<float (&)[GROUP_D / 2]>(acc.o);
#pragma unroll
        for (uint32_t step = 0; step < TILE_KEYS / 16; step++)
            mma(acc.row_sum[0], p[0][step], {ONES, ONES});
        group_mma_fence();
#pragma unroll
        for (uint32_t step = 0; step < TILE_KEYS / 16; step++)
            group_mma<GROUP_D, true>(sums, p[0][step], values + step * 128, true);
        group_mma_commit();
    }

    DEVICE void load_queries(const bf16* rows) {
#pragma unroll
        for (uint32_t step = 0; step < GROUP_D / 16; step++)
            ldmatrix(q[step], rows + Swizzled<GROUP_D>::at(lane() % 16, step * 2 + lane() / 16));
    }

    DEVICE void weigh(
        Accumulator<GROUP_D, 1>& acc, uint32_t (&p)[1][TILE_KEYS / 16][4], uint32_t tile) {
        if (params.cap_in > 0.0f) soft_cap<1>(scores, params.cap_in);
        if ((tile + 1) * TILE_KEYS > queries.first + 1 ||
            tile * TILE_KEYS < params.first_key(queries.end - 1))
            mask_scores<1>(scores, params, queries, tile);
        softmax_weights<GROUP_D, 1>(scores, p, acc, params);
    }

    // `rows` are the warp's queries; copies into them may still be under way.
    DEVICE void attend(Accumulator<GROUP_D, 1>& acc, const bf16* rows) {
        clear(acc);
        __syncthreads();  // No warp reads the ring any more.
        tiles.locate(params, first);
        copy(0u - 1);
        for (uint32_t i = 0; i < GROUP_SLOTS - 1; i++) copy(i);
        copy_wait<GROUP_SLOTS - 1>();
        fence_async_proxy();
        __syncthreads();
        load_queries(rows);
        multiply_keys(scores, 0u - 1);
        group_mma_wait<0>();
        for (uint32_t i = 0; i < count; i++) {
            uint32_t p[1][TILE_KEYS / 16][4];
            copy_wait<GROUP_SLOTS - 2>();
            fence_async_proxy();
            // All threads' copies of this slot have landed, and the slot before it has been
            // multiplied.
            __syncthreads();
            group_mma_settle(reinterpret_cast<float (&)[TILE_KEYS / 2]>(scores));
            multiply_keys(next_scores, i);
            copy(i + GROUP_SLOTS - 1);
            weigh(acc, p, first + i);
            multiply_values(acc, p, i);
            group_mma_wait<0>();
            group_mma_settle(reinterpret_cast<float (&)[GROUP_D / 2]>(acc.o));
            group_mma_settle(reinterpret_cast<float (&)[TILE_KEYS / 2]>(next_scores));
#pragma unroll
            for (uint32_t n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                for (uint32_t v = 0; v < 4; v++) scores[0][n][v] = next_scores[0][n][v];
        }
    }

    // The interface of PlainAttention.
    static constexpr uint32_t DIMENSIONS = GROUP_D, MT = 1, THREADS = GROUP_THREADS;
    static constexpr bool TILES_IN_MEMORY = false;
    using Tiles = GroupTiles;

    DEVICE static bf16* shared() { return reinterpret_cast<bf16*>(swizzled_shared()); }
    DEVICE static void run(Accumulator<GROUP_D, 1>& acc, const AttentionParams<bf16>& params,
        Tiles& tiles, const WarpQueries<GROUP_D, 1>& queries, const bf16* q, bf16* ring) {
        uint32_t first = tiles.range.begin / TILE_KEYS, end = divide_up(tiles.range.end, TILE_KEYS),
                 count = tiles.range.end > tiles.range.begin ? end - first : 0;
        GroupAttention{params, tiles, queries, ring, first, count, 0, {}, {}, {}}.attend(acc, q);
    }
};

template <class Attention>
DEVICE void prefill_by_groups(const AttentionParams<bf16>& params, const uint32_t* cu_seqlens,
    const uint32_t* split_tokens, uint32_t n) {
    if constexpr (HAS_WARP_GROUPS)
        prefill<Attention>(params, cu_seqlens, split_tokens, n);
    else
        ASSERT(false);
}
template <class Attention>
DEVICE void prefill_part_by_groups(
    const AttentionParams<bf16>& params, const uint32_t* cu_seqlens, uint32_t n, float* workspace) {
    if constexpr (HAS_WARP_GROUPS)
        prefill_part<Attention>(params, cu_seqlens, n, workspace);
    else
        ASSERT(false);
}

}  // namespace

// Prefill of whole keys and of a part of them, by a class of attention.
#define PREFILL(name, threads, blocks, whole, part, ...)                                        \
    KERNEL(attention_prefill_##name, __launch_bounds__(threads, blocks),                        \
        ATTENTION_PARAMETERS(bf16), PREFILL_PARAMETERS) {                                       \
        whole<__VA_ARGS__>(ATTENTION_PARAMS(bf16), cu_seqlens, split_tokens, n);                \
    }                                                                                           \
    KERNEL(attention_prefill_part_##name, __launch_bounds__(threads, blocks),                   \
        ATTENTION_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n, float* workspace) { \
        part<__VA_ARGS__>(ATTENTION_PARAMS(bf16), cu_seqlens, n, workspace);                    \
    }
// The dimensions of a head and the slots follow, and whether the cache has codes.
#define PLAIN(name, blocks, ...) \
    PREFILL(name, 128, blocks, prefill, prefill_part, PlainAttention<__VA_ARGS__>)

PLAIN(16_bf16, 2, 16, 3)
PLAIN(32_bf16, 2, 32, 3)
PLAIN(64_bf16, 2, 64, 3)
PLAIN(80_bf16, 2, 80, 3)
PLAIN(96_bf16, 2, 96, 3)
PLAIN(128_bf16, 2, 128, 3)
PLAIN(256_bf16, 1, 256, 3)
// For cards whose blocks have 99 KiB of shared memory.
PLAIN(256_two_slots_bf16, 1, 256, 2)
PREFILL(128_group_bf16, 256, 1, prefill_by_groups, prefill_part_by_groups, GroupAttention)
PLAIN(64_e4m3, 2, 64, 3, true)
PLAIN(128_e4m3, 2, 128, 3, true)
PLAIN(256_e4m3, 1, 256, 3, true)
