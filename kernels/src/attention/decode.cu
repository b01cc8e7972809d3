// Attention of one query a sequence over the paged cache, bf16; `combine.cu` merges the splits
// where there are several.
//
// Bytes moved: each visible key's K and V of each KV head once, 4 * head_dim bytes; nothing else
// counts. So the aim is enough bytes under way on every multiprocessor, with arithmetic that stays
// below the time of the copies.
// Grid: as many blocks as run at once (at 128 dimensions 52 KiB of shared memory each, 4 a
// multiprocessor, 528 on 132). Each block is one warp, and the 16 rows of its tile are the query
// heads of a group. The host plans the work over the whole batch (`plan.rs`): shares of about
// equally many tiles of keys, of which a block computes one for a tile of heads. The plan is read
// on the device, so a recorded launch serves every batch up to its size. A sequence of one piece
// gets its result at once.
// At 128 dimensions a tile of 64 keys is 32 KiB, about 1300 instructions and 132 products of a
// warp: with one tile under way while one is multiplied, four warps should keep up with three times
// the 21 bytes a clock that 4.8 TB/s gives a multiprocessor.
// Considered: four warps a block that share a tile (scores by keys, sums by dimensions), which
// gives shorter chains at batch 1, but two barriers and a passage through shared memory a tile, for
// time that copies cover anyway; splits of one size for all sequences, whose number a workspace of
// rows times splits limits: the longest sequence of a crowd is then computed by few warps while all
// others wait; pieces that every block derives from the lengths, which takes a search over all
// sequences where the plan takes one load. On an H200 256 rows of
// 2048 tokens are read at 4.2 TB/s, of 4.5; one row takes 14 us with its merging, in which a warp
// takes 1.9 us a tile.
#include "attention/tile.cuh"

namespace {

constexpr uint32_t TILE_HEADS = 16;  // heads of a group in one tile of rows

// A work item is a (share, tile of heads). Each block is one warp with its own ring of tiles and
// takes every gridDim.x-th item, tiles of heads fastest, so that neighbours read neighbouring
// memory.
template <uint32_t D>
struct HeadTile {
    uint32_t sequence, kv_head, head, rows, partial;

    DEVICE HeadTile(const AttentionParams<bf16>& params, const KeyPiece& piece, uint32_t head_tile)
        : sequence(piece.sequence), partial(piece.partial) {
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
        float by =
            normaliser(acc.row_max[0][half], acc.row_sum[0][half * 2], params.sinks, head + row);
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n++) {
            const float* pair = &acc.o[0][n][half * 2];
            store(out + n * 8,
                Vec<bf16, 2>{from_float<bf16>(pair[0] * by), from_float<bf16>(pair[1] * by)});
        }
    }

    DEVICE void store_state(const AttentionParams<bf16>& params, const Accumulator<D, 1>& acc,
        uint32_t half, uint32_t row, float* workspace, uint32_t partials) const {
        PartialState to(workspace, partials, params.heads, D, partial, head + row);
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n++) {
            const float* pair = &acc.o[0][n][half * 2];
            store(to.out + n * 8 + lane() % 4 * 2, Vec<float, 2>{pair[0], pair[1]});
        }
        if (lane() % 4 == 0)
            store(to.max_and_sum, Vec<float, 2>{acc.row_max[0][half], acc.row_sum[0][half * 2]});
    }

    DEVICE void store_rows(const AttentionParams<bf16>& params, const Accumulator<D, 1>& acc,
        float* workspace, uint32_t partials) const {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t row = lane() / 4 + half * 8;
            if (row >= rows) continue;
            if (partial == DecodeWork::ONLY)
                store_result(params, acc, half, row);
            else
                store_state(params, acc, half, row, workspace, partials);
        }
    }
};

// Every row is a head of the last token.
struct LastQuery {
    uint32_t first, end;
    DEVICE uint32_t position(uint32_t) const { return first; }
};

template <uint32_t D, uint32_t SLOTS>
DEVICE void attend_piece(const AttentionParams<bf16>& params, const DecodeWork& work,
    const KeyPiece& piece, uint32_t head_tile, float* workspace) {
    bf16 *q = dynamic_shared<bf16>(), *ring = q + TILE_HEADS * D;
    HeadTile<D> heads(params, piece, head_tile);
    // The queries of the piece before are no longer read, nor still on their way, as they may be
    // where a sequence has no keys.
    copy_wait<0>();
    __syncwarp();
    heads.copy_queries(params, q);
    KvTiles<D, WARP> tiles(params, params.table(piece.sequence, piece.len), heads.kv_head);
    tiles.range = piece.keys;
    Accumulator<D, 1> acc;
    attend<D, 1, 1, SLOTS>(acc, params, tiles, LastQuery{piece.len - 1, piece.len}, q, ring);
    heads.store_rows(params, acc, workspace, work.partials);
}

template <uint32_t D, uint32_t SLOTS = 3>
DEVICE void decode(const AttentionParams<bf16>& params, const DecodeWork& work, float* workspace) {
    launch_dependents();
    uint32_t head_tiles = params.kv_heads * divide_up(params.group(), TILE_HEADS);
    // These tell where the keys are. Without the prefetch, following them would take one access to
    // memory after the other.
    prefetch(work.shares + min(blockIdx.x / head_tiles, work.share_count));
    prefetch(work.pieces + min(blockIdx.x / head_tiles * 4, work.piece_words - 1));
    prefetch(params.seq_lens + min(lane() * 8, params.sequences - 1));
    prefetch(params.table_starts + min(lane() * 8, params.sequences));
    prefetch(params.tables + min(lane() * 8, params.table_len - 1));
    wait_for_earlier_launches();
    for (uint32_t item = blockIdx.x; item < work.share_count * head_tiles; item += gridDim.x) {
        Range share = work.share(item / head_tiles);
#pragma unroll 1
        for (uint32_t at = share.begin; at < share.end; at++) {
            // The next piece comes closer while this one is computed; in registers it would leave
            // too few.
            prefetch(work.pieces + min(at * 4 + 4, work.piece_words - 1));
            attend_piece<D, SLOTS>(
                params, work, KeyPiece(params, work, work.piece(at)), item % head_tiles, workspace);
        }
    }
}

}  // namespace

KERNEL __launch_bounds__(32)
    attention_decode_16_bf16(ATTENTION_PARAMETERS(bf16), DECODE_PARAMETERS) {
    decode<16>(ATTENTION_PARAMS(bf16), DECODE_WORK, workspace);
}
EXPORT(attention_decode_16_bf16)
KERNEL __launch_bounds__(32)
    attention_decode_32_bf16(ATTENTION_PARAMETERS(bf16), DECODE_PARAMETERS) {
    decode<32>(ATTENTION_PARAMS(bf16), DECODE_WORK, workspace);
}
EXPORT(attention_decode_32_bf16)
KERNEL __launch_bounds__(32, 8)
    attention_decode_64_bf16(ATTENTION_PARAMETERS(bf16), DECODE_PARAMETERS) {
    decode<64>(ATTENTION_PARAMS(bf16), DECODE_WORK, workspace);
}
EXPORT(attention_decode_64_bf16)
KERNEL __launch_bounds__(32, 6)
    attention_decode_80_bf16(ATTENTION_PARAMETERS(bf16), DECODE_PARAMETERS) {
    decode<80>(ATTENTION_PARAMS(bf16), DECODE_WORK, workspace);
}
EXPORT(attention_decode_80_bf16)
KERNEL __launch_bounds__(32, 5)
    attention_decode_96_bf16(ATTENTION_PARAMETERS(bf16), DECODE_PARAMETERS) {
    decode<96>(ATTENTION_PARAMS(bf16), DECODE_WORK, workspace);
}
EXPORT(attention_decode_96_bf16)
KERNEL __launch_bounds__(32)
    attention_decode_128_bf16(ATTENTION_PARAMETERS(bf16), DECODE_PARAMETERS) {
    decode<128>(ATTENTION_PARAMS(bf16), DECODE_WORK, workspace);
}
EXPORT(attention_decode_128_bf16)
KERNEL __launch_bounds__(32)
    attention_decode_256_bf16(ATTENTION_PARAMETERS(bf16), DECODE_PARAMETERS) {
    decode<256>(ATTENTION_PARAMS(bf16), DECODE_WORK, workspace);
}
EXPORT(attention_decode_256_bf16)
// For cards whose blocks have 99 KiB of shared memory.
KERNEL __launch_bounds__(32)
    attention_decode_256_two_slots_bf16(ATTENTION_PARAMETERS(bf16), DECODE_PARAMETERS) {
    decode<256, 2>(ATTENTION_PARAMS(bf16), DECODE_WORK, workspace);
}
EXPORT(attention_decode_256_two_slots_bf16)
