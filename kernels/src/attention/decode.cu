// Attention of one query a sequence over the paged cache, bf16; `combine.cu` merges the splits
// where there are several.
//
// Bytes moved: each visible key's K and V of each KV head once, 4 * head_dim bytes; nothing else
// counts. So the aim is enough bytes under way on every multiprocessor, with arithmetic that stays
// below the time of the copies.
// Grid: as many blocks as run at once (at 128 dimensions 52 KiB of shared memory each, 4 a
// multiprocessor, 528 on 132). Each block is one warp, and the 16 rows of its tile are the query
// heads of a group. Work items are dealt out by the lengths on the device, so a recorded launch
// serves every batch up to its size, and splits that a sequence does not have cost nothing. At
// batch 1 the host chooses splits short enough for two warps a multiprocessor; a sequence of one
// split writes its result at once.
// At 128 dimensions a tile of 64 keys is 32 KiB, about 1300 instructions and 132 products of a
// warp: with one tile under way while one is multiplied, four warps should keep up with three times
// the 21 bytes a clock that 4.8 TB/s gives a multiprocessor.
// Considered: four warps a block that share a tile (scores by keys, sums by dimensions), which
// gives shorter chains at batch 1, but two barriers and a passage through shared memory a tile, for
// time that copies cover anyway; a grid of (splits, heads, sequences), where a long context allows
// 64 splits, so 512 short sequences would start a quarter of a million blocks that have nothing to
// do. Not yet measured on a device.
#include "attention/tile.cuh"

namespace {

constexpr uint32_t TILE_HEADS = 16;  // heads of a group in one tile of rows

// A work item is a (sequence, split, tile of heads). Each block is one warp with its own ring of
// tiles and takes every gridDim.x-th item, tiles of heads fastest, so that neighbours read
// neighbouring memory.
template <uint32_t D>
struct WorkItem {
    uint32_t sequence, kv_head, head, rows, split, split_count;
    Range range;

    DEVICE WorkItem(const AttentionParams<bf16>& params, const WorkSearch& found,
        uint32_t head_tile, const Splits& splits)
        : sequence(found.sequence),
          split(found.index),
          split_count(splits.count),
          range(splits.range(found.index)) {
        uint32_t group = params.group(), tiles = divide_up(group, TILE_HEADS),
                 first_head = head_tile % tiles * TILE_HEADS;
        kv_head = head_tile / tiles;
        head = kv_head * group + first_head;
        rows = min(group - first_head, TILE_HEADS);
    }

    DEVICE void copy_queries(const AttentionParams<bf16>& params, bf16* q) const {
        const bf16* from = params.q + static_cast<size_t>(sequence) * params.q_stride + head * D;
#pragma unroll
        for (uint32_t i = lane(); i < TILE_HEADS * D / 8; i += WARP) {
            uint32_t row = i / (D / 8), chunk = i % (D / 8);
            copy_async(q + Swizzled<D>::at(row, chunk), from + row * D + chunk * 8, row < rows);
        }
    }

    DEVICE void store_result(const AttentionParams<bf16>& params, const Accumulator<D, 1>& acc,
        uint32_t half, uint32_t row) const {
        bf16* out = params.out + (static_cast<size_t>(sequence) * params.heads + head + row) * D +
                    lane() % 4 * 2;
        float by = inverse_sum(acc.row_sum[0][half * 2]);
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n++) {
            const float* pair = &acc.o[0][n][half * 2];
            store(out + n * 8,
                Vec<bf16, 2>{from_float<bf16>(pair[0] * by), from_float<bf16>(pair[1] * by)});
        }
    }

    DEVICE void store_state(const AttentionParams<bf16>& params, const Accumulator<D, 1>& acc,
        uint32_t half, uint32_t row, float* workspace, uint32_t max_splits) const {
        SplitState to(
            workspace, params.sequences, max_splits, params.heads, D, sequence, split, head + row);
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n++) {
            const float* pair = &acc.o[0][n][half * 2];
            store(to.out + n * 8 + lane() % 4 * 2, Vec<float, 2>{pair[0], pair[1]});
        }
        if (lane() % 4 == 0)
            store(to.max_and_sum, Vec<float, 2>{acc.row_max[0][half], acc.row_sum[0][half * 2]});
    }

    DEVICE void store_rows(const AttentionParams<bf16>& params, const Accumulator<D, 1>& acc,
        float* workspace, uint32_t max_splits) const {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t row = lane() / 4 + half * 8;
            if (row >= rows) continue;
            if (split_count == 1)
                store_result(params, acc, half, row);
            else
                store_state(params, acc, half, row, workspace, max_splits);
        }
    }
};

// Every row is a head of the last token.
struct LastQuery {
    uint32_t first, end;
    DEVICE uint32_t position(uint32_t) const { return first; }
};

template <uint32_t D, uint32_t SLOTS = 3>
DEVICE void decode(const AttentionParams<bf16>& params, float* workspace, uint32_t max_splits) {
    launch_dependents();
    // These tell where the keys are. Without the prefetch, following them would take one access to
    // memory after the other.
    prefetch(params.header);
    prefetch(params.seq_lens + min(lane() * 8, params.sequences - 1));
    prefetch(params.tables + min(lane() * 8, params.table_len - 1));
    wait_for_earlier_launches();
    bf16 *q = dynamic_shared<bf16>(), *ring = q + TILE_HEADS * D;
    uint32_t head_tiles = params.kv_heads * divide_up(params.group(), TILE_HEADS);
    auto splits_of = [&](uint32_t sequence) {
        return decode_splits(params.seq_lens[sequence], params.window, params.header);
    };
    auto count_of = [&](uint32_t sequence) { return splits_of(sequence).count; };
    WorkSearch search;
    for (uint32_t item = blockIdx.x; search.find(item / head_tiles, params.sequences, count_of);
        item += gridDim.x) {
        Splits splits = splits_of(search.sequence);
        ASSERT(splits.count <= max_splits);
        WorkItem<D> work(params, search, item % head_tiles, splits);
        // The queries of the item before are no longer read, nor still on their way, as they may be
        // where a sequence has no keys.
        copy_wait<0>();
        __syncwarp();
        work.copy_queries(params, q);
        KvTiles<D, WARP> tiles(params, params.table(work.sequence, splits.keys.end), work.kv_head);
        tiles.range = work.range;
        Accumulator<D, 1> acc;
        attend<D, 1, 1, SLOTS>(
            acc, params, tiles, LastQuery{splits.keys.end - 1, splits.keys.end}, q, ring);
        work.store_rows(params, acc, workspace, max_splits);
    }
}

}  // namespace

KERNEL __launch_bounds__(32)
    attention_decode_16_bf16(ATTENTION_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<16>(ATTENTION_PARAMS(bf16), workspace, max_splits);
}
EXPORT(attention_decode_16_bf16)
KERNEL __launch_bounds__(32)
    attention_decode_32_bf16(ATTENTION_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<32>(ATTENTION_PARAMS(bf16), workspace, max_splits);
}
EXPORT(attention_decode_32_bf16)
KERNEL __launch_bounds__(32, 8)
    attention_decode_64_bf16(ATTENTION_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<64>(ATTENTION_PARAMS(bf16), workspace, max_splits);
}
EXPORT(attention_decode_64_bf16)
KERNEL __launch_bounds__(32, 6)
    attention_decode_80_bf16(ATTENTION_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<80>(ATTENTION_PARAMS(bf16), workspace, max_splits);
}
EXPORT(attention_decode_80_bf16)
KERNEL __launch_bounds__(32, 5)
    attention_decode_96_bf16(ATTENTION_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<96>(ATTENTION_PARAMS(bf16), workspace, max_splits);
}
EXPORT(attention_decode_96_bf16)
KERNEL __launch_bounds__(32)
    attention_decode_128_bf16(ATTENTION_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<128>(ATTENTION_PARAMS(bf16), workspace, max_splits);
}
EXPORT(attention_decode_128_bf16)
KERNEL __launch_bounds__(32)
    attention_decode_256_bf16(ATTENTION_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<256>(ATTENTION_PARAMS(bf16), workspace, max_splits);
}
EXPORT(attention_decode_256_bf16)
// For cards whose blocks have 99 KiB of shared memory.
KERNEL __launch_bounds__(32) attention_decode_256_two_slots_bf16(
    ATTENTION_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<256, 2>(ATTENTION_PARAMS(bf16), workspace, max_splits);
}
EXPORT(attention_decode_256_two_slots_bf16)
