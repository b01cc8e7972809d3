// Flash attention of up to 32 query rows a warp over keys in tiles of 64, on tensor cores, with an
// online softmax: the part that decode and prefill share. A row's result is a chain of operations
// that depends on its own keys alone, so neither its place in a tile, nor its neighbours, nor the
// number of warps can change a bit:
//   scores of a tile   S = Q Kᵀ, sums over 16 dimensions at a time;
//   weights            P = 2^(S - m), where m is the row's maximum so far, rounded to bf16;
//   output             O = O 2^(m_old - m) + P V, and the sum of weights likewise, as a product
//                      with ones.
// A tile that a row does not see changes nothing: m stays, and a factor of 2^0 is exactly 1.
//
// K and V tiles alternate in a ring of three slots: one is multiplied while two are on their way:
// 32 KiB for a warp of decode at 128 dimensions. Four such warps keep 128 KiB under way on a
// multiprocessor, where 4.8 TB/s for 700 ns takes 25 KiB on each. Where shared memory has no room
// for three slots, two do with one tile on its way: a 3060's multiprocessor needs 9 KiB. The
// arithmetic, and so every bit, is the same. Banks: 16-byte chunks are
// permuted within their row so that the 8 rows an ldmatrix reads at once, and the chunks that 8
// lanes of a copy write, lie in different banks.
//
// A cache in e4m3 has half the bytes. Its tiles go through the ring as they are, with the scales of
// their keys behind them, and become bf16 between `ldmatrix` and `mma`: scores are multiplied by
// the scales of keys, values by their own, rounded to bf16. A warp does that for itself, nine
// instructions for four codes, so a tile of decode takes 1150 of them more at 128 dimensions.
#pragma once

#include "attention/paged.cuh"
#include "e4m3.cuh"

namespace {

constexpr uint32_t TILE_KEYS = 64;
constexpr uint32_t KV_BLOCK = 16;  // keys that lie side by side in every cache: the smallest block

// Rows of D values in shared memory, swizzled. `at` is the offset of a chunk of eight values.
template <uint32_t D>
struct Swizzled {
    static constexpr uint32_t CHUNKS = D / 8;
    static constexpr uint32_t BANK_GROUPS = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
    DEVICE static uint32_t at(uint32_t row, uint32_t chunk) {
        return row * D + (chunk ^ (row % 8 / (8 / BANK_GROUPS))) * 8;
    }
};

// What a tile of keys or of values takes in shared memory, in bf16, for which two codes stand.
template <uint32_t D, bool E4M3>
struct TileSize {
    static constexpr uint32_t ROW = E4M3 ? D / 2 : D;
    static constexpr uint32_t SCALES = TILE_KEYS * ROW;  // where those of codes begin
    static constexpr uint32_t ALL = SCALES + (E4M3 ? TILE_KEYS : 0);
};

// The softmax state and the output of a warp's MT tiles of 16 rows. Values lie as `mma` has them:
// [0] and [1] belong to row lane / 4, [2] and [3] to the row 8 below.
template <uint32_t D, uint32_t MT>
struct Accumulator {
    float o[MT][D / 8][4];
    float row_sum[MT][4];
    float row_max[MT][2];
};

template <uint32_t D, uint32_t MT>
DEVICE void clear(Accumulator<D, MT>& acc) {
#pragma unroll
    for (uint32_t m = 0; m < MT; m++) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            acc.row_sum[m][i] = 0.0f;
#pragma unroll
            for (uint32_t n = 0; n < D / 8; n++) acc.o[m][n][i] = 0.0f;
        }
        acc.row_max[m][0] = acc.row_max[m][1] = MINUS_INFINITY;
    }
}

// ---- copies

// Copies tiles of one KV head of one sequence, for a block of THREADS threads. Keys outside `range`
// are never read: zeros stand for them, since their slots may hold NaN.
template <uint32_t D, uint32_t THREADS, bool E4M3>
struct KvTiles {
    static constexpr uint32_t ROW = TileSize<D, E4M3>::ROW;

    const uint32_t* table;
    uint32_t head;  // offset of the head within a token's values
    Range range{0, 0};
    uint32_t block = 0;  // the cache block of page lane % 4 of the tile that was located last

    DEVICE KvTiles(const uint32_t* table, uint32_t kv_head) : table(table), head(kv_head * ROW) {}

    DEVICE void locate(const AttentionParams<bf16>& params, uint32_t tile) {
        uint32_t key = tile * TILE_KEYS + lane() % (TILE_KEYS / KV_BLOCK) * KV_BLOCK;
        block = key < range.end && key + KV_BLOCK > range.begin
                    ? table[key >> (31 - __clz(params.block_size))]
                    : 0;
        ASSERT(block < params.blocks);
    }

    // Starts copying the tile that was located last.
    DEVICE void copy(
        const AttentionParams<bf16>& params, bf16* to, const bf16* cache, uint32_t tile) const {
        uint32_t stride = params.kv_heads * ROW, size = range.end - range.begin;
#pragma unroll
        for (uint32_t page = 0; page < TILE_KEYS / KV_BLOCK; page++) {
            uint32_t key = tile * TILE_KEYS + page * KV_BLOCK;
            size_t slot =
                static_cast<size_t>(__shfl_sync(FULL_MASK, block, page)) * params.block_size +
                (key & (params.block_size - 1));
            const bf16* from = cache + slot * stride + head;
            if constexpr (THREADS % CHUNKS == 0)
                copy_page_evenly(to + page * KV_BLOCK * ROW, from, stride, key - range.begin, size);
            else
                copy_page(to + page * KV_BLOCK * ROW, from, stride, key - range.begin, size);
        }
        if constexpr (E4M3) copy_scales(params, to + TileSize<D, E4M3>::SCALES, cache, tile);
    }

    // Whether each of two neighbouring keys is one of the range, as a mask of the halves of a word.
    DEVICE uint32_t inside(uint32_t key) const {
        uint32_t size = range.end - range.begin;
        return (key - range.begin < size ? 0xffffu : 0) |
               (key + 1 - range.begin < size ? 0xffff0000u : 0);
    }

  private:
    static constexpr uint32_t CHUNKS = Swizzled<ROW>::CHUNKS;

    // Copies eight scales a lane: [blocks, kv_heads, block_size] stand behind the codes. Those of
    // keys outside of the range may be among them.
    DEVICE void copy_scales(
        const AttentionParams<bf16>& params, bf16* to, const bf16* cache, uint32_t tile) const {
        uint32_t own = __shfl_sync(FULL_MASK, block, lane() / 2);
        if (threadIdx.x >= TILE_KEYS / 8) return;
        uint32_t key = tile * TILE_KEYS + threadIdx.x * 8;
        size_t codes =
                   static_cast<size_t>(params.blocks) * params.block_size * params.kv_heads * ROW,
               row = static_cast<size_t>(own) * params.kv_heads + head / ROW;
        copy_async(to + threadIdx.x * 8,
            cache + codes + row * params.block_size + (key & (params.block_size - 1)),
            key < range.end && key + 8 > range.begin);
    }

    // Copies the rows of a page for which `first + row` is below `size`.
    DEVICE static void copy_page(
        bf16* to, const bf16* from, uint32_t stride, uint32_t first, uint32_t size) {
#pragma unroll
        for (uint32_t i = 0; i < KV_BLOCK * CHUNKS; i += THREADS) {
            uint32_t row = (i + threadIdx.x) / CHUNKS, chunk = (i + threadIdx.x) % CHUNKS;
            if (row < KV_BLOCK)
                copy_async(to + Swizzled<ROW>::at(row, chunk), from + row * stride + chunk * 8,
                    first + row < size);
        }
    }

    // Does the same where all chunks of a thread are in one column: then source and target need one
    // address each, and constant steps.
    DEVICE static void copy_page_evenly(
        bf16* to, const bf16* from, uint32_t stride, uint32_t first, uint32_t size) {
        uint32_t row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS,
                 spot = Swizzled<ROW>::at(row, chunk);
        from += row * stride + chunk * 8;
#pragma unroll
        for (uint32_t step = 0; step < KV_BLOCK; step += THREADS / CHUNKS) {
            if (KV_BLOCK % (THREADS / CHUNKS) != 0 && row + step >= KV_BLOCK) break;
            copy_async(to + (spot ^ Swizzled<ROW>::at(step, 0) % ROW) + step * ROW,
                from + step * stride, first + row + step < size);
        }
    }
};

template <uint32_t WARPS>
DEVICE void sync_warps() {
    if constexpr (WARPS == 1)
        __syncwarp();
    else
        __syncthreads();
}

// ---- arithmetic

template <uint32_t MT>
DEVICE void scale_scores(float (&s)[MT][TILE_KEYS / 8][4], const bf16* scales) {
#pragma unroll
    for (uint32_t n = 0; n < TILE_KEYS / 8; n++) {
        Vec<bf16, 2> pair = load<bf16, 2>(scales + n * 8 + lane() % 4 * 2);
#pragma unroll
        for (uint32_t m = 0; m < MT; m++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                s[m][n][i] = __fmul_rn(s[m][n][i], to_float(pair.at[i % 2]));
    }
}

// Adds the products of 16 dimensions of the queries with those of all keys of a tile.
template <uint32_t D, uint32_t MT, bool E4M3>
DEVICE void multiply_step(
    float (&s)[MT][TILE_KEYS / 8][4], const uint32_t (&a)[MT][4], const bf16* k, uint32_t step) {
    constexpr uint32_t AT_ONCE = E4M3 ? 4 : 2;
    uint32_t tile = lane() / 8, row = lane() % 8;
#pragma unroll
    for (uint32_t n = 0; n < TILE_KEYS / 8; n += AT_ONCE) {
        uint32_t b[4];
        if constexpr (E4M3)
            ldmatrix(b, k + Swizzled<D / 2>::at(n * 8 + lane(), step));
        else
            ldmatrix(b, k + Swizzled<D>::at(n * 8 + tile / 2 * 8 + row, step * 2 + tile % 2));
#pragma unroll
        for (uint32_t j = 0; j < AT_ONCE; j++) {
            uint32_t pair[2];
            if constexpr (E4M3)
                pair[0] = widen_e4m3(b[j] << 8, E4M3_UNIT_FACTORS),
                pair[1] = widen_e4m3(b[j], E4M3_UNIT_FACTORS);
            else
                pair[0] = b[j * 2], pair[1] = b[j * 2 + 1];
#pragma unroll
            for (uint32_t m = 0; m < MT; m++) mma(s[m][n + j], a[m], pair);
        }
    }
}

// s = Q Kᵀ for this warp's rows of `q`.
template <uint32_t D, uint32_t MT, bool E4M3>
DEVICE void multiply_keys(float (&s)[MT][TILE_KEYS / 8][4], const bf16* q, const bf16* k) {
#pragma unroll
    for (uint32_t m = 0; m < MT; m++)
#pragma unroll
        for (uint32_t n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) s[m][n][i] = 0.0f;
    uint32_t tile = lane() / 8, row = lane() % 8;
#pragma unroll(D* MT > 128 ? 2 : 8)  // More leaves too few registers.
    for (uint32_t step = 0; step < D / 16; step++) {
        uint32_t a[MT][4];
#pragma unroll
        for (uint32_t m = 0; m < MT; m++)
            ldmatrix(a[m], q + Swizzled<D>::at(m * 16 + tile % 2 * 8 + row, step * 2 + tile / 2));
        multiply_step<D, MT, E4M3>(s, a, k, step);
    }
    if constexpr (E4M3) scale_scores<MT>(s, k + TileSize<D, E4M3>::SCALES);
}

// Sets the scores of keys that a query does not see to minus infinity, so that they weigh nothing.
template <uint32_t MT, class Queries>
DEVICE void mask_scores(float (&s)[MT][TILE_KEYS / 8][4], const AttentionParams<bf16>& params,
    const Queries& queries, uint32_t tile) {
#pragma unroll
    for (uint32_t m = 0; m < MT; m++)
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t last = queries.position(m * 16 + half * 8 + lane() / 4),
                     first = params.first_key(last);
#pragma unroll
            for (uint32_t n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                for (uint32_t i = 0; i < 2; i++) {
                    uint32_t key = tile * TILE_KEYS + n * 8 + lane() % 4 * 2 + i;
                    if (key < first || key > last) s[m][n][half * 2 + i] = MINUS_INFINITY;
                }
        }
}

template <uint32_t MT>
DEVICE void soft_cap(float (&s)[MT][TILE_KEYS / 8][4], float cap_in) {
#pragma unroll
    for (uint32_t m = 0; m < MT; m++)
#pragma unroll
        for (uint32_t n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) s[m][n][i] = capped(s[m][n][i], cap_in);
}

// Turns the scores of one row into weights (this thread has two in every eight), and rescales the
// row's sums to the new maximum.
template <uint32_t D, uint32_t MT, uint32_t M, uint32_t HALF>
DEVICE void online_softmax(
    float (&s)[TILE_KEYS / 8][4], Accumulator<D, MT>& acc, const AttentionParams<bf16>& params) {
    float row_max = MINUS_INFINITY;
#pragma unroll
    for (uint32_t n = 0; n < TILE_KEYS / 8; n++)
        row_max = fmaxf(row_max, fmaxf(s[n][HALF * 2], s[n][HALF * 2 + 1]));
    row_max = fmaxf(row_max, __shfl_xor_sync(FULL_MASK, row_max, 1));
    row_max = fmaxf(row_max, __shfl_xor_sync(FULL_MASK, row_max, 2));
    float old_max = acc.row_max[M][HALF];
    row_max = fmaxf(old_max, __fmul_rn(row_max, params.to_log2));
    acc.row_max[M][HALF] = row_max;
    float max = finite_max(row_max), factor = exp2_approx(old_max - max);
#pragma unroll
    for (uint32_t n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
        for (uint32_t i = HALF * 2; i < HALF * 2 + 2; i++)
            s[n][i] = exp2_approx(fmaf(s[n][i], params.to_log2, -max));
    // Most tiles bring no new maximum, and leaving out a product with one changes no bit.
    if (!__any_sync(FULL_MASK, factor != 1.0f)) return;
#pragma unroll
    for (uint32_t i = HALF * 2; i < HALF * 2 + 2; i++) {
        acc.row_sum[M][i] *= factor;
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n++) acc.o[M][n][i] *= factor;
    }
}

// Sets `p` to the weights, as the first operands of the product with V.
template <uint32_t D, uint32_t MT, uint32_t M = 0>
DEVICE void softmax_weights(float (&s)[MT][TILE_KEYS / 8][4], uint32_t (&p)[MT][TILE_KEYS / 16][4],
    Accumulator<D, MT>& acc, const AttentionParams<bf16>& params) {
    if constexpr (M < MT) {
        online_softmax<D, MT, M, 0>(s[M], acc, params);
        online_softmax<D, MT, M, 1>(s[M], acc, params);
#pragma unroll
        for (uint32_t step = 0; step < TILE_KEYS / 16; step++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const float* pair = &s[M][step * 2 + i / 2][i % 2 * 2];
                p[M][step][i] = pack(pair[0], pair[1]);
            }
        softmax_weights<D, MT, M + 1>(s, p, acc, params);
    }
}

// Adds the products of weights with values of 16 keys, in the dimensions of 8 n to 8 n + 31.
template <uint32_t D, uint32_t MT>
DEVICE void multiply_codes(Accumulator<D, MT>& acc, const uint32_t (&p)[MT][TILE_KEYS / 16][4],
    const uint32_t (&codes)[4], const uint32_t (&factors)[2], uint32_t step, uint32_t n) {
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        uint32_t shift = j % 2 == 0 ? 8 : 0, first = codes[j / 2 * 2] << shift,
                 second = codes[j / 2 * 2 + 1] << shift;
        uint32_t b[2] = {widen_e4m3(first, factors[0]), widen_e4m3(second, factors[1])};
#pragma unroll
        for (uint32_t m = 0; m < MT; m++) mma(acc.o[m][n + j], p[m][step], b);
    }
}

template <uint32_t D, uint32_t MT, bool E4M3, class Tiles>
DEVICE void multiply_values(Accumulator<D, MT>& acc, const uint32_t (&p)[MT][TILE_KEYS / 16][4],
    const bf16* v, const Tiles& tiles, uint32_t tile_index) {
    constexpr uint32_t ONES = 0x3f803f80u, ROW = TileSize<D, E4M3>::ROW;
    uint32_t tile = lane() / 8, row = tile % 2 * 8 + lane() % 8;
#pragma unroll
    for (uint32_t step = 0; step < TILE_KEYS / 16; step++) {
#pragma unroll
        for (uint32_t m = 0; m < MT; m++) mma(acc.row_sum[m], p[m][step], {ONES, ONES});
        [[maybe_unused]] uint32_t factors[2];
        if constexpr (E4M3) {
#pragma unroll
            for (uint32_t i = 0; i < 2; i++) {
                uint32_t at = step * 16 + i * 8 + lane() % 4 * 2;
                auto scales = load<uint32_t, 1>(
                    reinterpret_cast<const uint32_t*>(v + TileSize<D, E4M3>::SCALES + at));
                factors[i] = e4m3_factors(scales.at[0] & tiles.inside(tile_index * TILE_KEYS + at));
            }
        }
#pragma unroll
        for (uint32_t chunk = 0; chunk < ROW / 8; chunk += 2) {
            uint32_t b[4];
            ldmatrix<true>(b, v + Swizzled<ROW>::at(step * 16 + row, chunk + tile / 2));
            if constexpr (E4M3) {
                multiply_codes(acc, p, b, factors, step, chunk * 2);
            } else {
#pragma unroll
                for (uint32_t m = 0; m < MT; m++) {
                    mma(acc.o[m][chunk], p[m][step], {b[0], b[1]});
                    mma(acc.o[m][chunk + 1], p[m][step], {b[2], b[3]});
                }
            }
        }
    }
}

// ---- a split

// Attention of this warp's rows over `tiles.range`. `q` holds the warp's rows; copies into it may
// still be under way. `ring` has room for SLOTS tiles, three or two. `queries` tells the positions
// of the warp's rows: `position(row)`, all from `first` to below `end`; `end` is 0 for a warp that
// has no rows and only helps to copy.
template <uint32_t D, uint32_t MT, uint32_t WARPS, uint32_t SLOTS, bool E4M3, class Queries>
DEVICE void attend(Accumulator<D, MT>& acc, const AttentionParams<bf16>& params,
    KvTiles<D, WARPS * WARP, E4M3>& tiles, const Queries& queries, const bf16* q, bf16* ring) {
    clear(acc);
    uint32_t tile = tiles.range.begin / TILE_KEYS;
    uint32_t end =
        tiles.range.end > tiles.range.begin ? divide_up(tiles.range.end, TILE_KEYS) : tile;
    constexpr uint32_t SIZE = TileSize<D, E4M3>::ALL;
    uint32_t now = 0, next = SIZE, free = 2 * SIZE;
    sync_warps<WARPS>();  // No warp reads the ring any more.
    static_assert(SLOTS == 2 || SLOTS == 3);
    if (tile < end) {
        tiles.locate(params, tile);
        tiles.copy(params, ring + now, params.k, tile);
        if constexpr (SLOTS == 3) {
            copy_commit();
            tiles.copy(params, ring + next, params.v, tile);
            tiles.locate(params, tile + 1);
        }
    }
    copy_commit();
    for (; tile < end; tile++) {
        uint32_t p[MT][TILE_KEYS / 16][4];
        bool seen = tile * TILE_KEYS < queries.end &&
                    (tile + 1) * TILE_KEYS > params.first_key(queries.first);
        copy_wait<SLOTS - 2>();
        sync_warps<WARPS>();
        if constexpr (SLOTS == 3) {
            if (tile + 1 < end) tiles.copy(params, ring + free, params.k, tile + 1);
        } else {
            tiles.copy(params, ring + next, params.v, tile);
            tiles.locate(params, tile + 1);
        }
        copy_commit();
        if (seen) {
            float s[MT][TILE_KEYS / 8][4];
            multiply_keys<D, MT, E4M3>(s, q, ring + now);
            if (params.cap_in > 0.0f) soft_cap<MT>(s, params.cap_in);
            if ((tile + 1) * TILE_KEYS > queries.first + 1 ||
                tile * TILE_KEYS < params.first_key(queries.end - 1))
                mask_scores<MT>(s, params, queries, tile);
            softmax_weights<D, MT>(s, p, acc, params);
        }
        copy_wait<SLOTS - 2>();
        sync_warps<WARPS>();
        // K's tile has been read, so its slot takes the tile that comes next.
        if constexpr (SLOTS == 3) {
            if (tile + 1 < end) {
                tiles.copy(params, ring + now, params.v, tile + 1);
                tiles.locate(params, tile + 2);
            }
        } else {
            if (tile + 1 < end) tiles.copy(params, ring + now, params.k, tile + 1);
        }
        copy_commit();
        if (seen) multiply_values<D, MT, E4M3>(acc, p, ring + next, tiles, tile);
        if constexpr (SLOTS == 3) {
            uint32_t copied = free;
            free = next, next = now, now = copied;
        }
    }
}

}  // namespace
