// Attention of one query a sequence over the paged cache, bf16; `combine.cu` merges the splits
// where there are several.
//
// Bytes moved: each visible key's K and V of each KV head once, 4 * head_dim bytes; nothing else
// counts. So the aim is enough bytes under way on every multiprocessor, with arithmetic that stays
// below the time of the copies.
// Grid: as many blocks as run at once (at 128 dimensions 52 KiB of shared memory each, 4 a
// multiprocessor, 528 on 132); each is one warp, the 16 rows of whose tile are the query heads of a
// group. Work is dealt out by the lengths on the device, so a recorded launch serves every batch up
// to its size, and splits that a sequence does not have cost nothing. At batch 1 the host chooses
// splits short enough for two warps a multiprocessor; a sequence of one split writes its result at
// once.
// At 128 dimensions a tile of 64 keys is 32 KiB, about 1300 instructions and 132 products of a
// warp: with one tile under way while one is multiplied, four warps should keep up with three times
// the 21 bytes a clock that 4.8 TB/s gives a multiprocessor. Considered: four warps a block that
// share a tile (scores by keys, sums by dimensions): shorter chains at batch 1, but two barriers
// and a passage through shared memory a tile, for time that copies cover anyway; a grid of (splits,
// heads, sequences): a long context allows 64 splits, so 512 short sequences would start a quarter
// of a million blocks that have nothing to do. Not yet measured on a device.
#include "attention/tile.cuh"

namespace {

constexpr uint32_t HEADS = 16;  // of a group in one tile of rows

// Each block is one warp with its own ring of tiles. It takes every gridDim.x-th of the pieces of
// work: (sequence, split, tile of heads), heads fastest, so that neighbours read neighbouring
// memory.
template <uint32_t D>
struct Piece {
    uint32_t sequence, kv_head, head, rows, index, count;
    Range range;

    DEVICE Piece(const Paged<bf16>& call, const Finder& found, uint32_t part, const Splits& splits)
        : sequence(found.owner),
          index(found.offset),
          count(splits.count),
          range(splits.part(found.offset)) {
        uint32_t group = call.group(), tiles = divide_up(group, HEADS),
                 skipped = part % tiles * HEADS;
        kv_head = part / tiles;
        head = kv_head * group + skipped;
        rows = min(group - skipped, HEADS);
    }

    DEVICE void copy_queries(const Paged<bf16>& call, bf16* q) const {
        const bf16* from = call.q + static_cast<size_t>(sequence) * call.q_stride + head * D;
#pragma unroll
        for (uint32_t i = lane(); i < HEADS * D / 8; i += WARP) {
            uint32_t row = i / (D / 8), chunk = i % (D / 8);
            copy_async(q + Rows<D>::at(row, chunk), from + row * D + chunk * 8, row < rows);
        }
    }

    DEVICE void store_result(
        const Paged<bf16>& call, const Sums<D, 1>& sums, uint32_t half, uint32_t row) const {
        bf16* out = call.out + (static_cast<size_t>(sequence) * call.heads + head + row) * D +
                    lane() % 4 * 2;
        float by = share(sums.weights[0][half * 2]);
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n++) {
            const float* pair = &sums.out[0][n][half * 2];
            store(out + n * 8,
                Vec<bf16, 2>{from_float<bf16>(pair[0] * by), from_float<bf16>(pair[1] * by)});
        }
    }

    DEVICE void store_partial(const Paged<bf16>& call, const Sums<D, 1>& sums, uint32_t half,
        uint32_t row, float* workspace, uint32_t max_splits) const {
        Partial to(
            workspace, call.sequences, max_splits, call.heads, D, sequence, index, head + row);
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n++) {
            const float* pair = &sums.out[0][n][half * 2];
            store(to.sums + n * 8 + lane() % 4 * 2, Vec<float, 2>{pair[0], pair[1]});
        }
        if (lane() % 4 == 0)
            store(to.state, Vec<float, 2>{sums.largest[0][half], sums.weights[0][half * 2]});
    }

    DEVICE void store_rows(const Paged<bf16>& call, const Sums<D, 1>& sums, float* workspace,
        uint32_t max_splits) const {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t row = lane() / 4 + half * 8;
            if (row >= rows) continue;
            if (count == 1)
                store_result(call, sums, half, row);
            else
                store_partial(call, sums, half, row, workspace, max_splits);
        }
    }
};

// Every row is a head of the last token.
struct LastQuery {
    uint32_t first, end;
    DEVICE uint32_t position(uint32_t) const { return first; }
};

template <uint32_t D>
DEVICE void decode(const Paged<bf16>& call, float* workspace, uint32_t max_splits) {
    start_next();
    // What says where the keys are: one reading from memory after the other if it were not in the
    // cache.
    prefetch(call.header);
    prefetch(call.seq_lens + min(lane() * 8, call.sequences - 1));
    prefetch(call.tables + min(lane() * 8, call.table_len - 1));
    wait_for_earlier();
    bf16 *q = dynamic_shared<bf16>(), *ring = q + HEADS * D;
    uint32_t parts = call.kv_heads * divide_up(call.group(), HEADS);
    auto splits_of = [&](uint32_t sequence) {
        return decode_splits(call.seq_lens[sequence], call.window, call.header);
    };
    auto count_of = [&](uint32_t sequence) { return splits_of(sequence).count; };
    Finder finder;
    for (uint32_t number = blockIdx.x; finder.find(number / parts, call.sequences, count_of);
        number += gridDim.x) {
        Splits splits = splits_of(finder.owner);
        ASSERT(splits.count <= max_splits);
        Piece<D> piece(call, finder, number % parts, splits);
        // Nobody still reads the queries before, nor are they on their way, as where a sequence has
        // no keys.
        copy_wait<0>();
        __syncwarp();
        piece.copy_queries(call, q);
        Keys<D, WARP> keys(call, call.table(piece.sequence, splits.keys.end), piece.kv_head);
        keys.range = piece.range;
        Sums<D, 1> sums;
        attend<D, 1, 1>(sums, call, keys, LastQuery{splits.keys.end - 1, splits.keys.end}, q, ring);
        piece.store_rows(call, sums, workspace, max_splits);
    }
}

}  // namespace

KERNEL __launch_bounds__(32)
    attention_decode_16_bf16(PAGED_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<16>(PAGED(bf16), workspace, max_splits);
}
EXPORT(attention_decode_16_bf16)
KERNEL __launch_bounds__(32)
    attention_decode_32_bf16(PAGED_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<32>(PAGED(bf16), workspace, max_splits);
}
EXPORT(attention_decode_32_bf16)
KERNEL __launch_bounds__(32, 8)
    attention_decode_64_bf16(PAGED_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<64>(PAGED(bf16), workspace, max_splits);
}
EXPORT(attention_decode_64_bf16)
KERNEL __launch_bounds__(32, 6)
    attention_decode_80_bf16(PAGED_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<80>(PAGED(bf16), workspace, max_splits);
}
EXPORT(attention_decode_80_bf16)
KERNEL __launch_bounds__(32, 5)
    attention_decode_96_bf16(PAGED_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<96>(PAGED(bf16), workspace, max_splits);
}
EXPORT(attention_decode_96_bf16)
KERNEL __launch_bounds__(32)
    attention_decode_128_bf16(PAGED_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<128>(PAGED(bf16), workspace, max_splits);
}
EXPORT(attention_decode_128_bf16)
KERNEL __launch_bounds__(32)
    attention_decode_256_bf16(PAGED_PARAMETERS(bf16), float* workspace, uint32_t max_splits) {
    decode<256>(PAGED(bf16), workspace, max_splits);
}
EXPORT(attention_decode_256_bf16)
