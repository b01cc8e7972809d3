// Attention of up to 32 query rows a warp over keys in tiles of 64, on tensor cores: what decode
// and prefill have in common. A row's result is a chain of operations that depends on its own keys
// alone, so neither its place in a tile, nor its neighbours, nor the number of warps can change a
// bit:
//   scores of a tile     S = Q Kᵀ, sums over 16 dimensions at a time; weights              P = 2^(S
//   - m), m the largest so far, rounded to bf16; sums                 O = O 2^(m_old - m) + P V,
//   and the sum of weights likewise, as a product with ones.
// A tile that a row does not see changes nothing: m stays, and a factor of 2^0 is exactly 1.
//
// K and V tiles alternate in a ring of three slots: one is multiplied while two are on their way:
// 32 KiB for a warp of decode at 128 dimensions. Four such warps keep 128 KiB under way on a
// multiprocessor, where 4.8 TB/s for 700 ns takes 25 KiB on each. Banks: 16-byte chunks are
// permuted within their row so that the 8 rows an ldmatrix reads at once, and the chunks that 8
// lanes of a copy write, lie in different banks.
#pragma once

#include "attention/paged.cuh"

namespace {

constexpr uint32_t KEYS = 64;
constexpr uint32_t PAGE = 16;  // keys that lie side by side in every cache

// Rows of D values in shared memory. `at`: where the eight values of a chunk start.
template <uint32_t D>
struct Rows {
    static constexpr uint32_t CHUNKS = D / 8;
    static constexpr uint32_t SPREAD = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
    DEVICE static uint32_t at(uint32_t row, uint32_t chunk) {
        return row * D + (chunk ^ (row % 8 / (8 / SPREAD))) * 8;
    }
};

// MT tiles of 16 rows of a warp. Values lie as `mma` wants them: [0], [1] belong to row lane / 4,
// [2], [3] to the row 8 below.
template <uint32_t D, uint32_t MT>
struct Sums {
    float out[MT][D / 8][4];
    float weights[MT][4];
    float largest[MT][2];
};

template <uint32_t D, uint32_t MT>
DEVICE void clear(Sums<D, MT>& sums) {
#pragma unroll
    for (uint32_t m = 0; m < MT; m++) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            sums.weights[m][i] = 0.0f;
#pragma unroll
            for (uint32_t n = 0; n < D / 8; n++) sums.out[m][n][i] = 0.0f;
        }
        sums.largest[m][0] = sums.largest[m][1] = MINUS_INFINITY;
    }
}

// ---- copies

// The keys of one KV head of one sequence, for a block of THREADS threads. Keys outside `range` are
// never read: zeros stand for them, since what their slots hold may not even be a number.
template <uint32_t D, uint32_t THREADS>
struct Keys {
    const Paged<bf16>& call;
    const uint32_t* table;
    uint32_t head;  // where the head's values start in a token's
    Range range{0, 0};
    uint32_t block = 0;  // of this lane's page, lane % 4, in the tile found last

    DEVICE Keys(const Paged<bf16>& call, const uint32_t* table, uint32_t kv_head)
        : call(call), table(table), head(kv_head * D) {}

    DEVICE void find(uint32_t tile) {
        uint32_t key = tile * KEYS + lane() % (KEYS / PAGE) * PAGE;
        block = key < range.end && key + PAGE > range.begin
                    ? table[key >> (31 - __clz(call.block_size))]
                    : 0;
        ASSERT(block < call.blocks);
    }

    // Starts copying the tile found last.
    DEVICE void copy(bf16* to, const bf16* cache, uint32_t tile) const {
        uint32_t stride = call.kv_heads * D, size = range.end - range.begin;
#pragma unroll
        for (uint32_t page = 0; page < KEYS / PAGE; page++) {
            uint32_t key = tile * KEYS + page * PAGE;
            size_t slot = static_cast<size_t>(__shfl_sync(FULL, block, page)) * call.block_size +
                          (key & (call.block_size - 1));
            const bf16* from = cache + slot * stride + head;
            if constexpr (THREADS % CHUNKS == 0)
                copy_evenly(to + page * PAGE * D, from, stride, key - range.begin, size);
            else
                copy_any(to + page * PAGE * D, from, stride, key - range.begin, size);
        }
    }

  private:
    static constexpr uint32_t CHUNKS = Rows<D>::CHUNKS;

    // The rows of a page of which `first + row` is below `size`.
    DEVICE static void copy_any(
        bf16* to, const bf16* from, uint32_t stride, uint32_t first, uint32_t size) {
#pragma unroll
        for (uint32_t i = 0; i < PAGE * CHUNKS; i += THREADS) {
            uint32_t row = (i + threadIdx.x) / CHUNKS, chunk = (i + threadIdx.x) % CHUNKS;
            if (row < PAGE)
                copy_async(to + Rows<D>::at(row, chunk), from + row * stride + chunk * 8,
                    first + row < size);
        }
    }

    // The same where all chunks of a thread have one column: one address each for source and
    // target, and constant steps.
    DEVICE static void copy_evenly(
        bf16* to, const bf16* from, uint32_t stride, uint32_t first, uint32_t size) {
        uint32_t row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS,
                 spot = Rows<D>::at(row, chunk);
        from += row * stride + chunk * 8;
#pragma unroll
        for (uint32_t step = 0; step < PAGE; step += THREADS / CHUNKS) {
            if (PAGE % (THREADS / CHUNKS) != 0 && row + step >= PAGE) break;
            copy_async(to + (spot ^ Rows<D>::at(step, 0) % D) + step * D, from + step * stride,
                first + row + step < size);
        }
    }
};

template <uint32_t WARPS>
DEVICE void meet() {
    if constexpr (WARPS == 1)
        __syncwarp();
    else
        __syncthreads();
}

// ---- arithmetic

// s = Q Kᵀ for this warp's rows of `q`.
template <uint32_t D, uint32_t MT>
DEVICE void multiply_keys(float (&s)[MT][KEYS / 8][4], const bf16* q, const bf16* k) {
#pragma unroll
    for (uint32_t m = 0; m < MT; m++)
#pragma unroll
        for (uint32_t n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) s[m][n][i] = 0.0f;
    uint32_t tile = lane() / 8, row = lane() % 8;
#pragma unroll(D* MT > 128 ? 2 : 8)  // More leaves too few registers.
    for (uint32_t step = 0; step < D / 16; step++) {
        uint32_t a[MT][4];
#pragma unroll
        for (uint32_t m = 0; m < MT; m++)
            ldmatrix(a[m], q + Rows<D>::at(m * 16 + tile % 2 * 8 + row, step * 2 + tile / 2));
#pragma unroll
        for (uint32_t n = 0; n < KEYS / 8; n += 2) {
            uint32_t b[4];
            ldmatrix(b, k + Rows<D>::at(n * 8 + tile / 2 * 8 + row, step * 2 + tile % 2));
#pragma unroll
            for (uint32_t m = 0; m < MT; m++) {
                mma(s[m][n], a[m], {b[0], b[1]});
                mma(s[m][n + 1], a[m], {b[2], b[3]});
            }
        }
    }
}

// What a query does not see weighs nothing.
template <uint32_t MT, class Queries>
DEVICE void mask(
    float (&s)[MT][KEYS / 8][4], const Paged<bf16>& call, const Queries& queries, uint32_t tile) {
#pragma unroll
    for (uint32_t m = 0; m < MT; m++)
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t last = queries.position(m * 16 + half * 8 + lane() / 4),
                     first = call.lowest(last);
#pragma unroll
            for (uint32_t n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (uint32_t i = 0; i < 2; i++) {
                    uint32_t key = tile * KEYS + n * 8 + lane() % 4 * 2 + i;
                    if (key < first || key > last) s[m][n][half * 2 + i] = MINUS_INFINITY;
                }
        }
}

// tanh(s · cap_in), within 1e-6, as 1 - 2 / (e^2x + 1).
template <uint32_t MT>
DEVICE void cap(float (&s)[MT][KEYS / 8][4], float cap_in) {
    constexpr float TWO_LOG2_E = 2.8853901f;
#pragma unroll
    for (uint32_t m = 0; m < MT; m++)
#pragma unroll
        for (uint32_t n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                s[m][n][i] =
                    1.0f - __fdividef(2.0f, power(s[m][n][i] * (cap_in * TWO_LOG2_E)) + 1.0f);
}

// Scores of one row (this thread has two in every eight) to weights; brings its sums to the new
// reference.
template <uint32_t D, uint32_t MT, uint32_t M, uint32_t HALF>
DEVICE void soften(float (&s)[KEYS / 8][4], Sums<D, MT>& sums, const Paged<bf16>& call) {
    float largest = MINUS_INFINITY;
#pragma unroll
    for (uint32_t n = 0; n < KEYS / 8; n++)
        largest = fmaxf(largest, fmaxf(s[n][HALF * 2], s[n][HALF * 2 + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 2));
    float old = sums.largest[M][HALF];
    largest = fmaxf(old, __fmul_rn(largest, call.to_log2));
    sums.largest[M][HALF] = largest;
    float reference = reference_of(largest), factor = power(old - reference);
#pragma unroll
    for (uint32_t n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (uint32_t i = HALF * 2; i < HALF * 2 + 2; i++)
            s[n][i] = power(fmaf(s[n][i], call.to_log2, -reference));
    // Most tiles bring no new largest score; multiplying by one could be left out anywhere.
    if (!__any_sync(FULL, factor != 1.0f)) return;
#pragma unroll
    for (uint32_t i = HALF * 2; i < HALF * 2 + 2; i++) {
        sums.weights[M][i] *= factor;
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n++) sums.out[M][n][i] *= factor;
    }
}

// p: weights as the first operands of the product with V.
template <uint32_t D, uint32_t MT, uint32_t M = 0>
DEVICE void weigh(float (&s)[MT][KEYS / 8][4], uint32_t (&p)[MT][KEYS / 16][4], Sums<D, MT>& sums,
    const Paged<bf16>& call) {
    if constexpr (M < MT) {
        soften<D, MT, M, 0>(s[M], sums, call);
        soften<D, MT, M, 1>(s[M], sums, call);
#pragma unroll
        for (uint32_t step = 0; step < KEYS / 16; step++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const float* pair = &s[M][step * 2 + i / 2][i % 2 * 2];
                p[M][step][i] = pack(pair[0], pair[1]);
            }
        weigh<D, MT, M + 1>(s, p, sums, call);
    }
}

template <uint32_t D, uint32_t MT>
DEVICE void multiply_values(
    Sums<D, MT>& sums, const uint32_t (&p)[MT][KEYS / 16][4], const bf16* v) {
    constexpr uint32_t ONES = 0x3f803f80u;
    uint32_t tile = lane() / 8, row = lane() % 8;
#pragma unroll
    for (uint32_t step = 0; step < KEYS / 16; step++) {
#pragma unroll
        for (uint32_t m = 0; m < MT; m++) mma(sums.weights[m], p[m][step], {ONES, ONES});
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n += 2) {
            uint32_t b[4];
            ldmatrix<true>(b, v + Rows<D>::at(step * 16 + tile % 2 * 8 + row, n + tile / 2));
#pragma unroll
            for (uint32_t m = 0; m < MT; m++) {
                mma(sums.out[m][n], p[m][step], {b[0], b[1]});
                mma(sums.out[m][n + 1], p[m][step], {b[2], b[3]});
            }
        }
    }
}

// ---- a split

// Sums of this warp's rows over `keys.range`. `q`: the warp's rows; copies into it may still be
// under way. `ring`: three tiles. `queries`: positions of the warp's rows: `position(row)`, from
// `first` to below `end`; none for a warp that only helps to copy.
template <uint32_t D, uint32_t MT, uint32_t WARPS, class Queries>
DEVICE void attend(Sums<D, MT>& sums, const Paged<bf16>& call, Keys<D, WARPS * WARP>& keys,
    const Queries& queries, const bf16* q, bf16* ring) {
    clear(sums);
    uint32_t tile = keys.range.begin / KEYS,
             end = keys.range.end > keys.range.begin ? divide_up(keys.range.end, KEYS) : tile;
    uint32_t now = 0, next = KEYS * D, free = 2 * KEYS * D;
    meet<WARPS>();  // Whoever still reads the ring is done.
    if (tile < end) {
        keys.find(tile);
        keys.copy(ring + now, call.k, tile);
        copy_commit();
        keys.copy(ring + next, call.v, tile);
        keys.find(tile + 1);
    }
    copy_commit();
    for (; tile < end; tile++) {
        uint32_t p[MT][KEYS / 16][4];
        bool seen = tile * KEYS < queries.end && (tile + 1) * KEYS > call.lowest(queries.first);
        copy_wait<1>();
        meet<WARPS>();
        if (tile + 1 < end) keys.copy(ring + free, call.k, tile + 1);
        copy_commit();
        if (seen) {
            float s[MT][KEYS / 8][4];
            multiply_keys<D, MT>(s, q, ring + now);
            if (call.cap_in > 0.0f) cap<MT>(s, call.cap_in);
            if ((tile + 1) * KEYS > queries.first + 1 || tile * KEYS < call.lowest(queries.end - 1))
                mask<MT>(s, call, queries, tile);
            weigh<D, MT>(s, p, sums, call);
        }
        copy_wait<1>();
        meet<WARPS>();
        if (tile + 1 < end) {
            keys.copy(ring + now, call.v, tile + 1);
            keys.find(tile + 2);
        }
        copy_commit();
        if (seen) multiply_values<D, MT>(sums, p, ring + next);
        uint32_t copied = free;
        free = next, next = now, now = copied;
    }
}

}  // namespace
