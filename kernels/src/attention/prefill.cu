// Attention of a ragged batch of queries over the paged cache, bf16: FlashAttention-2 class.
//
// Grid: a block of four warps for each (tile of queries, KV head), KV heads fastest. A tile is up
// to 128 rows (64 at 256 dimensions), a row one query of one head of the group, so a group reads
// its keys once. Which sequence a tile belongs to follows from cu_seqlens on the device; blocks
// beyond the last tile end at once.
// At 128 dimensions: 80 KiB of shared memory and 255 registers a thread, two blocks a
// multiprocessor, so that one's softmax runs beside the other's products. A warp reads 40 KiB of
// shared memory for 264 products a tile (320 clocks of the multiprocessor's 128 bytes each, against
// some 1700 of its quarter's tensor core): products are the limit, not shared memory; with 16 rows
// a warp it would be the other way round.
// Several splits: the running sums of those before wait in the thread's own memory (a stack frame
// of about 600 bytes, for which the driver sets aside 600 * 2048 bytes a multiprocessor) and are
// touched once a split.
// Considered: sums of the splits in shared memory (64 KiB, leaves one block a multiprocessor); a
// grid over splits with a workspace (as large as q in f32, times the splits). wgmma would lift the
// limit of mma, about six tenths of the tensor cores' rate. Not yet measured on a device.
#include "attention/tile.cuh"

namespace {

constexpr uint32_t WARPS = 4;

// Two tiles of 16 rows a warp halve what is read from shared memory for each product; more values
// than 128 leave no registers.
template <uint32_t D>
constexpr uint32_t TILES = D > 128 ? 1 : 2;
template <uint32_t D>
constexpr uint32_t ROWS = WARPS * 16 * TILES<D>;

// What a block does: queries of one sequence with all heads of one group; row r is head r % group
// of query r / group.
template <uint32_t D>
struct Block {
    uint32_t sequence = 0, kv_head = 0, group = 0, len = 0, rows = 0;
    uint32_t query = 0;     // the first, as a row of q and out
    uint32_t position = 0;  // of the first

    // False where there is nothing to do: the grid has room for the most tiles that a batch can
    // make.
    DEVICE bool find(const Paged<bf16>& call, const uint32_t* cu_seqlens, uint32_t n) {
        group = call.group(), kv_head = blockIdx.x % call.kv_heads;
        uint32_t per_tile = ROWS<D> / group;
        auto tiles = [&](uint32_t i) {
            ASSERT(cu_seqlens[i] <= cu_seqlens[i + 1] && cu_seqlens[i + 1] <= n);
            return divide_up(cu_seqlens[i + 1] - cu_seqlens[i], per_tile);
        };
        Finder finder;
        bool found = finder.find(blockIdx.x / call.kv_heads, call.sequences, tiles);
        if (found) {
            sequence = finder.owner, len = call.seq_lens[sequence];
            // The last tile of a prompt sees the most keys: started first, it does not finish
            // alone.
            uint32_t tile = tiles(sequence) - 1 - finder.offset,
                     queries = cu_seqlens[sequence + 1] - cu_seqlens[sequence];
            ASSERT(queries <= len);
            rows = min(per_tile, queries - tile * per_tile) * group;
            query = cu_seqlens[sequence] + tile * per_tile;
            position = len - queries + tile * per_tile;
        }
        if (blockIdx.x == gridDim.x - 1)
            ASSERT(!finder.find(gridDim.x / call.kv_heads, call.sequences, tiles));
        return found;
    }

    DEVICE size_t head(uint32_t row) const { return kv_head * group + row % group; }

    DEVICE void copy_queries(const Paged<bf16>& call, bf16* q) const {
#pragma unroll 4
        for (uint32_t i = threadIdx.x; i < ROWS<D> * D / 8; i += WARPS * WARP) {
            uint32_t row = i / (D / 8), chunk = i % (D / 8), some = min(row, rows - 1);
            size_t from = static_cast<size_t>(query + some / group) * call.q_stride +
                          head(some) * D + chunk * 8;
            copy_async(q + Rows<D>::at(row, chunk), call.q + from, row < rows);
        }
    }

    // Rows beyond the last stand where the last does.
    DEVICE uint32_t position_of(uint32_t row) const {
        return position + min(row, rows - 1) / group;
    }

    // Within the warp's.
    DEVICE static uint32_t row_of(uint32_t m, uint32_t half) {
        return m * 16 + half * 8 + lane() / 4;
    }

    DEVICE void store_rows(const Paged<bf16>& call, const Sums<D, TILES<D>>& sums) const {
#pragma unroll
        for (uint32_t m = 0; m < TILES<D>; m++)
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                uint32_t row = warp() * 16 * TILES<D> + row_of(m, half);
                if (row >= rows) continue;
                size_t to = static_cast<size_t>(query + row / group) * call.heads + head(row);
                float by = share(sums.weights[m][half * 2]);
#pragma unroll
                for (uint32_t n = 0; n < D / 8; n++) {
                    const float* pair = &sums.out[m][n][half * 2];
                    Vec<bf16, 2> values{
                        from_float<bf16>(pair[0] * by), from_float<bf16>(pair[1] * by)};
                    store(call.out + to * D + n * 8 + lane() % 4 * 2, values);
                }
            }
    }
};

// The rows of this warp.
template <uint32_t D>
struct WarpQueries {
    const Block<D>& block;
    uint32_t first, end;

    DEVICE WarpQueries(const Block<D>& block) : block(block) {
        bool any = warp() * 16 * TILES<D> < block.rows;
        first = position(0), end = any ? position(16 * TILES<D> - 1) + 1 : 0;
    }
    DEVICE uint32_t position(uint32_t row) const {
        return block.position_of(warp() * 16 * TILES<D> + row);
    }
};

// sums: those of the splits before, merged with them.
template <uint32_t D, uint32_t MT>
DEVICE void merge_after(const Sums<D, MT>* before, Sums<D, MT>& sums) {
#pragma unroll
    for (uint32_t m = 0; m < MT; m++)
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            Merge merge(before->largest[m][half], sums.largest[m][half]);
            sums.largest[m][half] = merge.largest;
#pragma unroll
            for (uint32_t i = half * 2; i < half * 2 + 2; i++) {
                sums.weights[m][i] = merge.both(before->weights[m][i], sums.weights[m][i]);
#pragma unroll
                for (uint32_t n = 0; n < D / 8; n++)
                    sums.out[m][n][i] = merge.both(before->out[m][n][i], sums.out[m][n][i]);
            }
        }
}

template <uint32_t D>
DEVICE void prefill(const Paged<bf16>& call, const uint32_t* cu_seqlens, uint32_t n) {
    in_turn();
    constexpr uint32_t MT = TILES<D>;
    bf16 *q = dynamic_shared<bf16>(), *ring = q + ROWS<D> * D;
    Block<D> found;
    if (!found.find(call, cu_seqlens, n)) return;
    found.copy_queries(call, q);
    const Block<D>& block = *in_memory(&found);  // Registers are for tiles.
    WarpQueries<D> queries(block);
    Splits cut({call.lowest(block.position), block.position_of(block.rows - 1) + 1}, call.header);
    const Splits& splits = *in_memory(&cut);
    Keys<D, WARPS * WARP> keys(call, call.table(block.sequence, block.len), block.kv_head);
    Sums<D, MT> sums, kept;
#pragma unroll 1
    for (uint32_t part = 0; part < splits.count; part++) {
        keys.range = splits.part(part);
        attend<D, MT, WARPS>(sums, call, keys, queries, q + warp() * 16 * MT * D, ring);
        if (part > 0) merge_after(in_memory(&kept), sums);
        if (part + 1 < splits.count) *in_memory(&kept) = sums;
    }
    block.store_rows(call, sums);
}

}  // namespace

KERNEL __launch_bounds__(128, 2)
    attention_prefill_16_bf16(PAGED_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n) {
    prefill<16>(PAGED(bf16), cu_seqlens, n);
}
EXPORT(attention_prefill_16_bf16)
KERNEL __launch_bounds__(128, 2)
    attention_prefill_32_bf16(PAGED_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n) {
    prefill<32>(PAGED(bf16), cu_seqlens, n);
}
EXPORT(attention_prefill_32_bf16)
KERNEL __launch_bounds__(128, 2)
    attention_prefill_64_bf16(PAGED_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n) {
    prefill<64>(PAGED(bf16), cu_seqlens, n);
}
EXPORT(attention_prefill_64_bf16)
KERNEL __launch_bounds__(128, 2)
    attention_prefill_80_bf16(PAGED_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n) {
    prefill<80>(PAGED(bf16), cu_seqlens, n);
}
EXPORT(attention_prefill_80_bf16)
KERNEL __launch_bounds__(128, 2)
    attention_prefill_96_bf16(PAGED_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n) {
    prefill<96>(PAGED(bf16), cu_seqlens, n);
}
EXPORT(attention_prefill_96_bf16)
KERNEL __launch_bounds__(128, 2)
    attention_prefill_128_bf16(PAGED_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n) {
    prefill<128>(PAGED(bf16), cu_seqlens, n);
}
EXPORT(attention_prefill_128_bf16)
KERNEL __launch_bounds__(128, 1)
    attention_prefill_256_bf16(PAGED_PARAMETERS(bf16), const uint32_t* cu_seqlens, uint32_t n) {
    prefill<256>(PAGED(bf16), cu_seqlens, n);
}
EXPORT(attention_prefill_256_bf16)
