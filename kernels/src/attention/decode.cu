// Decode: attention of one query a sequence over the paged cache, bf16. The keys of a sequence are
// cut into pieces for several blocks (Flash-Decoding; Dao et al. 2023).
//
// Bytes moved: each visible key's K and V of each KV head once, 4 * head_dim bytes; nothing else
// counts. So the aim is enough bytes under way on every multiprocessor, with arithmetic that stays
// below the time of the copies.
// Grid: as many blocks as run at once (at 128 dimensions 52 KiB of shared memory each, 4 a
// multiprocessor, 528 on 132). Each block is one warp, and the 16 rows of its tile are the query
// heads of a group. The host plans the work over the whole batch (`plan.rs`): shares of about
// equally many tiles of keys, of which a block computes one for a tile of heads. The plan is read
// on the device, so a recorded launch serves every batch up to its size. A sequence of one piece
// gets its result at once. The pieces of another one leave partial results, and the block that
// leaves the last of a tile of heads merges them.
// At 128 dimensions a tile of 64 keys is 32 KiB, about 1300 instructions and 132 products of a
// warp: with one tile under way while one is multiplied, four warps should keep up with three times
// the 21 bytes a clock that 4.8 TB/s gives a multiprocessor.
// Considered: four warps a block that share a tile (scores by keys, sums by dimensions), which
// gives shorter chains at batch 1, but two barriers and a passage through shared memory a tile, for
// time that copies cover anyway; splits of one size for all sequences, whose number a workspace of
// rows times splits limits: the longest sequence of a crowd is then computed by few warps while all
// others wait; pieces that every block derives from the lengths, which takes a search over all
// sequences where the plan takes one load; merging in a launch of its own, which took 7.5 us a
// layer in a step on an H200. There 256 rows of 2048 tokens are read at 4.2 TB/s, of 4.5. One row
// of them takes 16.5 us in 32 pieces, 12.6 in 16, 13.7 in 8, 19.4 in 4 and 56 in one: 8 us for a
// launch, its plan and its result, 1.5 for each tile, and 2 to merge 16 parts of 4 heads or 7 to
// merge 32. The exponentials are not what takes that: computing those of all parts and heads ahead,
// a lane for each head, changed nothing.
#include "attention/tile.cuh"

namespace {

constexpr uint32_t TILE_HEADS = 16;  // heads of a group in one tile of rows

// A work item is a (share, tile of heads). Each block is one warp with its own ring of tiles and
// takes every gridDim.x-th item, tiles of heads fastest, so that neighbours read neighbouring
// memory.
template <uint32_t D>
struct HeadTile {
    uint32_t sequence, kv_head, head, rows, partial, counter;

    DEVICE HeadTile(const AttentionParams<bf16>& params, const KeyPiece& piece, uint32_t head_tile)
        : sequence(piece.sequence), partial(piece.partial) {
        uint32_t group = params.group(), tiles = divide_up(group, TILE_HEADS),
                 first_head = head_tile % tiles * TILE_HEADS;
        kv_head = head_tile / tiles;
        counter = sequence * params.kv_heads * tiles + head_tile;
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

    // Leaves the row's part of the result in the workspace.
    DEVICE void store_state(const AttentionParams<bf16>& params, const Accumulator<D, 1>& acc,
        uint32_t half, uint32_t row, float* workspace) const {
        PartialState to(workspace, params.heads, D, partial, head + row);
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n++) {
            const float* pair = &acc.o[0][n][half * 2];
            store(to.out + n * 8 + lane() % 4 * 2, Vec<float, 2>{pair[0], pair[1]});
        }
        if (lane() % 4 == 0)
            store(to.max_and_sum, Vec<float, 2>{acc.row_max[0][half], acc.row_sum[0][half * 2]});
    }

    DEVICE void store_rows(
        const AttentionParams<bf16>& params, const Accumulator<D, 1>& acc, float* workspace) const {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t row = lane() / 4 + half * 8;
            if (row >= rows) continue;
            if (partial == DecodeWork::ONLY)
                store_result(params, acc, half, row);
            else
                store_state(params, acc, half, row, workspace);
        }
    }
};

// Merges the partial results of a tile's heads in the order of their keys, through shared memory:
// `states` has room for `room` rows, two for each head at least. All parts that fit are copied at
// once; what they merge to stands before those of the next copy.
template <uint32_t D>
struct PartMerge {
    static constexpr uint32_t STRIDE = PartialState::stride(D);

    // These belong to the tile's first head.
    const float* workspace;
    const float* sinks;
    bf16* out;
    uint32_t rows;
    size_t next_part;  // from a part to the next one in the workspace
    float* states;
    uint32_t room;

    DEVICE PartMerge(const AttentionParams<bf16>& params, const HeadTile<D>& tile,
        const DecodeWork& work, void* shared, uint32_t bytes)
        : workspace(work.workspace + tile.head * STRIDE),
          sinks(params.sinks == nullptr ? nullptr : params.sinks + tile.head),
          out(params.out + (static_cast<size_t>(tile.sequence) * params.heads + tile.head) * D),
          rows(tile.rows),
          next_part(static_cast<size_t>(params.heads) * STRIDE),
          states(static_cast<float*>(shared)),
          room(bytes / (STRIDE * sizeof(float))) {}

    DEVICE_CALL static void merge(PartMerge all, Range own) {
        uint32_t most = all.room / all.rows;
        for (uint32_t begin = own.begin, merged = 0; begin < own.end; merged = 1) {
            uint32_t parts = min(most - merged, own.end - begin);
            all.copy({begin, begin + parts}, merged);
            begin += parts;
            for (uint32_t row = 0; row < all.rows; row++)
                all.merge_row(row, merged + parts, begin == own.end);
            __syncwarp();
        }
    }

  private:
    DEVICE float* state(uint32_t part, uint32_t row) const {
        return states + (part * rows + row) * STRIDE;
    }

    // Copies parts to the places from `to` on. The rows of a part lie side by side.
    DEVICE void copy(Range parts, uint32_t to) const {
        for (uint32_t part = parts.begin; part < parts.end; part++, to++)
            for (uint32_t i = lane() * 4; i < rows * STRIDE; i += WARP * 4)
                copy_async(state(to, 0) + i, workspace + part * next_part + i);
        copy_commit();
        copy_wait<0>();
        __syncwarp();
    }

    // Merges the first parts of a row, to its result or to a state in place of the first.
    DEVICE void merge_row(uint32_t row, uint32_t parts, bool is_result) const {
        constexpr uint32_t PAIRS = (D + 2 * WARP - 1) / (2 * WARP);
        Vec<float, 2> o[PAIRS] = {}, sums{MINUS_INFINITY, 0.0f};
#pragma unroll 4
        for (uint32_t part = 0; part < parts; part++) {
            const float* from = state(part, row);
            auto [part_max, part_sum] = load<float, 2>(from + STRIDE - 2).at;
            StateMerge both(sums.at[0], part_max);
            sums = {both.row_max, both.merge(sums.at[1], part_sum)};
            each_pair(o, [&](Vec<float, 2>& pair, uint32_t d) {
                Vec<float, 2> next = load<float, 2>(from + d);
                pair = {both.merge(pair.at[0], next.at[0]), both.merge(pair.at[1], next.at[1])};
            });
        }
        float by = normaliser(sums.at[0], sums.at[1], sinks, row);
        each_pair(o, [&](const Vec<float, 2>& pair, uint32_t d) {
            if (is_result)
                store(out + row * D + d, Vec<bf16, 2>{from_float<bf16>(pair.at[0] * by),
                                             from_float<bf16>(pair.at[1] * by)});
            else
                store(state(0, row) + d, pair);
        });
        __syncwarp();  // All lanes have read the first part's sums.
        if (!is_result && lane() == 0) store(state(0, row) + STRIDE - 2, sums);
    }

    // Calls `use(pair, d)` for each pair of values of this lane, which are those from `d` on.
    template <uint32_t N, class Use>
    DEVICE static void each_pair(Vec<float, 2> (&pairs)[N], const Use& use) {
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            uint32_t d = (i * WARP + lane()) * 2;
            if (D % (2 * WARP) == 0 || d < D) use(pairs[i], d);
        }
    }
};

// Every row is a head of the last token.
struct LastQuery {
    uint32_t first, end;
    DEVICE uint32_t position(uint32_t) const { return first; }
};

template <uint32_t D, uint32_t SLOTS, bool E4M3>
DEVICE void attend_piece(const AttentionParams<bf16>& params, const DecodeWork& work,
    const KeyPiece& piece, uint32_t head_tile) {
    bf16 *q = dynamic_shared<bf16>(), *ring = q + TILE_HEADS * D;
    HeadTile<D> found(params, piece, head_tile);
    const HeadTile<D>& heads = *in_memory(&found);  // Registers are needed for tiles.
    // The queries of the piece before are no longer read, nor still on their way, as they may be
    // where a sequence has no keys.
    copy_wait<0>();
    __syncwarp();
    heads.copy_queries(params, q);
    KvTiles<D, WARP, E4M3> tiles(params.table(piece.sequence, piece.len), heads.kv_head);
    tiles.range = piece.keys;
    Accumulator<D, 1> acc;
    attend<D, 1, 1, SLOTS, E4M3>(acc, params, tiles, LastQuery{piece.len - 1, piece.len}, q, ring);
    heads.store_rows(params, acc, work.workspace);
    if (heads.partial == DecodeWork::ONLY) return;
    Range own = work.parts(heads.sequence, heads.partial);
    if (!work.is_last(heads.counter, own.end - own.begin)) return;
    PartMerge<D> parts(params, heads, work, ring, SLOTS * TileSize<D, E4M3>::ALL * sizeof(bf16));
    PartMerge<D>::merge(parts, own);
}

template <uint32_t D, uint32_t SLOTS = 3, bool E4M3 = false>
DEVICE void decode(const AttentionParams<bf16>& params, const DecodeWork& work) {
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
            attend_piece<D, SLOTS, E4M3>(
                params, work, KeyPiece(params, work, work.piece(at)), item % head_tiles);
        }
    }
}

}  // namespace

// The dimensions of a head follow, then, where not the usual ones, the slots and whether the cache
// has codes.
#define DECODE(name, bounds, ...)                                         \
    KERNEL(name, bounds, ATTENTION_PARAMETERS(bf16), DECODE_PARAMETERS) { \
        decode<__VA_ARGS__>(ATTENTION_PARAMS(bf16), DECODE_WORK);         \
    }

DECODE(attention_decode_16_bf16, __launch_bounds__(32), 16)
DECODE(attention_decode_32_bf16, __launch_bounds__(32), 32)
DECODE(attention_decode_64_bf16, __launch_bounds__(32, 8), 64)
DECODE(attention_decode_80_bf16, __launch_bounds__(32, 6), 80)
DECODE(attention_decode_96_bf16, __launch_bounds__(32, 5), 96)
// Without a number of blocks nvcc allows 168 registers and spills for sm_80. With it there are 216
// on sm_90, which cost nothing: shared memory has room for four blocks only.
DECODE(attention_decode_128_bf16, __launch_bounds__(32, 8), 128)
DECODE(attention_decode_256_bf16, __launch_bounds__(32), 256)
// For cards whose blocks have 99 KiB of shared memory.
DECODE(attention_decode_256_two_slots_bf16, __launch_bounds__(32), 256, 2)
DECODE(attention_decode_64_e4m3, __launch_bounds__(32, 14), 64, 3, true)
DECODE(attention_decode_128_e4m3, __launch_bounds__(32, 8), 128, 3, true)
DECODE(attention_decode_256_e4m3, __launch_bounds__(32), 256, 3, true)
