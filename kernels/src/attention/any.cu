// Attention for all head sizes that decode.cu and prefill.cu have no kernels for, and for values
// that are the first dimensions of their keys (latent attention: 576 and 512), bf16. Keys may have
// as many dimensions as shared memory has room for, values up to 512.
//
// A block of eight warps computes up to R = 16 or 64 rows, each a head of a query, of those that
// read one KV head. For each tile of 64 keys it copies K's rows to shared memory; each warp
// multiplies all rows with eight of the keys; the scores go through shared memory, where 256 / R
// threads compute a row's weights; and each warp multiplies the weights with 64 dimensions of the
// values. These are the tile's own where values are parts of keys, so a token's vector is read once
// for all rows; otherwise V's rows take the place of K's. The chain of operations of a row is that
// of tile.cuh: it depends on its own keys alone, and not on R or on where the row stands.
//
// Grid: decode as in decode.cu, over the same plans; prefill a block for each (R rows of a
// sequence, KV head).
// Bytes moved: 1152 a token at 576 dimensions, for all of a block's rows. With R = 16, 98 KiB of
// shared memory leave two blocks on a multiprocessor of 227 KiB, where one's copies run beside the
// other's products. Predicted for decode with 16 heads: a tile's copy takes 72 KiB / 36 GB/s = 2 us
// of a multiprocessor's part of 4.8 TB/s, and its products 1.3 us, for which the warps read 290 KiB
// of shared memory: some 60 % of the memory's rate. With 128 heads and R = 64 (173 KiB, one block)
// two blocks read each vector; a tile's products read 650 KiB of shared memory, 3 us, and its copy
// waits for them: a quarter of the tensor cores' rate.
// Considered: a second slot for the next tile (leaves one block of 16 rows on a multiprocessor, and
// none on cards with 99 KiB); warps that share rows, so that each reads fewer queries (the next
// step); two blocks of a cluster that share a tile (sm_90 only). Prefill divides no keys into
// parts. Its tests pass on an H200, its speed was not
// measured.
#include "attention/merge.cuh"

namespace {

constexpr uint32_t WARPS = 8, THREADS = WARPS * WARP, TILE_KEYS = 64;
constexpr uint32_t WARP_KEYS = TILE_KEYS / WARPS;  // keys whose scores a warp computes
constexpr uint32_t PAIRS = 4;                      // 16 values each, of a warp: 512 of a block
constexpr uint32_t SCORE_STRIDE = TILE_KEYS + 4;   // from row to row of scores, in floats
constexpr uint32_t WEIGHT_STRIDE = TILE_KEYS + 8;  // of weights, in bf16
constexpr uint32_t STEP = 32;                      // dimensions of two products

// The sizes of heads. Rows in shared memory are filled up with zeros to whole steps, and are an odd
// number of 16 bytes apart, so that the eight rows that an ldmatrix reads lie in different banks.
struct HeadSizes {
    uint32_t dim, value_dim;

    DEVICE uint32_t width() const { return divide_up(dim, STEP) * STEP; }
    DEVICE uint32_t stride() const { return width() + 8; }
};

// A block's shared memory, as `gpu/any.rs` counts it.
template <uint32_t R>
struct Shared {
    bf16 *q, *tile;
    float *scores, *row_max, *factor;
    bf16* weights;

    DEVICE Shared(const HeadSizes& sizes) {
        q = dynamic_shared<bf16>(), tile = q + R * sizes.stride();
        scores = reinterpret_cast<float*>(tile + TILE_KEYS * sizes.stride());
        row_max = scores + R * SCORE_STRIDE, factor = row_max + R;
        weights = reinterpret_cast<bf16*>(factor + R);
    }
};

// The rows of a block: those of the sequence's rows for one KV head from `first` on. Row r is head
// r % group of the query r / group of those that the sequence has.
struct BlockRows {
    uint32_t sequence = 0, kv_head = 0, group = 0, len = 0, first = 0, count = 0;
    uint32_t query = 0;     // the sequence's first query, as a row of q and out
    uint32_t position = 0;  // its position

    DEVICE uint32_t query_of(uint32_t row) const { return (first + min(row, count - 1)) / group; }
    // Rows beyond the last one have the position of the last one.
    DEVICE uint32_t position_of(uint32_t row) const { return position + query_of(row); }
    DEVICE uint32_t head_of(uint32_t row) const {
        return kv_head * group + (first + min(row, count - 1)) % group;
    }
};

// Starts the copy of eight values of a row from `d` on, zeros in place of those that it lacks.
DEVICE void copy_chunk(bf16* to, const bf16* from, uint32_t d, uint32_t dim, bool valid) {
    if (dim % 8 == 0) {
        bool inside = valid && d < dim;
        copy_async(to + d, inside ? from + d : from, inside);
        return;
    }
    for (uint32_t i = d; i < d + 8; i++) to[i] = valid && i < dim ? from[i] : bf16{0};
}

template <uint32_t R>
DEVICE void copy_queries(const AttentionParams<bf16>& params, const HeadSizes& sizes,
    const BlockRows& rows, const Shared<R>& shared) {
    for (uint32_t row = warp(); row < R; row += WARPS) {
        size_t query = rows.query + rows.query_of(row);
        const bf16* from = params.q + query * params.q_stride + rows.head_of(row) * sizes.dim;
        for (uint32_t d = lane() * 8; d < sizes.width(); d += WARP * 8)
            copy_chunk(shared.q + row * sizes.stride(), from, d, sizes.dim, row < rows.count);
    }
}

// Copies the rows of a tile that are in `keys`; zeros stand for others, whose slots may hold NaN.
template <uint32_t R>
DEVICE void copy_tile(const AttentionParams<bf16>& params, const bf16* cache,
    const HeadSizes& sizes, const BlockRows& rows, const uint32_t* table, Range keys, uint32_t tile,
    const Shared<R>& shared) {
    for (uint32_t i = warp(); i < TILE_KEYS; i += WARPS) {
        uint32_t key = tile * TILE_KEYS + i;
        bool inside = key >= keys.begin && key < keys.end;
        uint32_t block = inside ? table[key / params.block_size] : 0;
        ASSERT(block < params.blocks);
        size_t slot =
            static_cast<size_t>(block) * params.block_size + (key & (params.block_size - 1));
        const bf16* from = cache + (slot * params.kv_heads + rows.kv_head) * sizes.dim;
        for (uint32_t d = lane() * 8; d < sizes.width(); d += WARP * 8)
            copy_chunk(shared.tile + i * sizes.stride(), from, d, sizes.dim, inside);
    }
}

// Computes the scores of all rows for this warp's keys.
template <uint32_t R>
DEVICE void multiply_keys(const AttentionParams<bf16>& params, const HeadSizes& sizes,
    const BlockRows& rows, uint32_t tile, const Shared<R>& shared) {
    constexpr uint32_t MT = R / 16;
    float s[MT][4] = {};
    uint32_t part = lane() / 8, line = lane() % 8, own = warp() * WARP_KEYS;
    const bf16* k = shared.tile + (own + line) * sizes.stride() + part * 8;
    const bf16* q = shared.q + (part % 2 * 8 + line) * sizes.stride() + part / 2 * 8;
#pragma unroll 2
    for (uint32_t d = 0; d < sizes.width(); d += STEP) {
        uint32_t b[4];
        ldmatrix(b, k + d);
#pragma unroll
        for (uint32_t m = 0; m < MT; m++)
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                uint32_t a[4];
                ldmatrix(a, q + m * 16 * sizes.stride() + d + half * 16);
                mma(s[m], a, {b[half * 2], b[half * 2 + 1]});
            }
    }
#pragma unroll
    for (uint32_t m = 0; m < MT; m++)
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t row = m * 16 + half * 8 + lane() / 4, at = own + lane() % 4 * 2;
            uint32_t last = rows.position_of(row), first = params.first_key(last);
            Vec<float, 2> pair;
#pragma unroll
            for (uint32_t i = 0; i < 2; i++) {
                uint32_t key = tile * TILE_KEYS + at + i;
                float score = s[m][half * 2 + i];
                if (params.cap_in > 0.0f) score = capped(score, params.cap_in);
                pair.at[i] = key < first || key > last ? MINUS_INFINITY : score;
            }
            store(shared.scores + row * SCORE_STRIDE + at, pair);
        }
}

// Turns the scores of a tile into weights, and notes each row's new maximum and the factor of what
// was summed before.
template <uint32_t R>
DEVICE void softmax(const AttentionParams<bf16>& params, const Shared<R>& shared) {
    constexpr uint32_t SHARERS = THREADS / R, KEYS = TILE_KEYS / SHARERS;
    uint32_t row = threadIdx.x / SHARERS, first = threadIdx.x % SHARERS;
    const float* scores = shared.scores + row * SCORE_STRIDE + first;
    float s[KEYS], row_max = MINUS_INFINITY;
#pragma unroll
    for (uint32_t i = 0; i < KEYS; i++) {
        s[i] = scores[i * SHARERS];
        row_max = fmaxf(row_max, s[i]);
    }
#pragma unroll
    for (uint32_t step = SHARERS / 2; step > 0; step /= 2)
        row_max = fmaxf(row_max, __shfl_xor_sync(FULL_MASK, row_max, step));
    float old_max = shared.row_max[row];
    row_max = fmaxf(old_max, __fmul_rn(row_max, params.to_log2));
    float max = finite_max(row_max);
    bf16* weights = shared.weights + row * WEIGHT_STRIDE + first;
#pragma unroll
    for (uint32_t i = 0; i < KEYS; i++)
        weights[i * SHARERS] = from_float<bf16>(exp2_approx(fmaf(s[i], params.to_log2, -max)));
    __syncwarp();  // All sharers have read the old maximum.
    if (first == 0) shared.row_max[row] = row_max, shared.factor[row] = exp2_approx(old_max - max);
}

// What a warp has of its rows' results: of pair p of values those from (p * WARPS + warp) * 16 on.
// Values lie as `mma` has them: [0] and [1] belong to row lane / 4, [2] and [3] to the row 8 below.
template <uint32_t R>
struct WarpSums {
    static constexpr uint32_t MT = R / 16;
    float o[MT][PAIRS][2][4];
    float row_sum[MT][4];
    float row_max[MT][2];
};

template <uint32_t R>
DEVICE void multiply_values(WarpSums<R>& sums, const HeadSizes& sizes, const Shared<R>& shared) {
    constexpr uint32_t MT = R / 16, ONES = 0x3f803f80u;
#pragma unroll
    for (uint32_t m = 0; m < MT; m++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            float factor = shared.factor[m * 16 + i / 2 * 8 + lane() / 4];
            sums.row_sum[m][i] *= factor;
#pragma unroll
            for (uint32_t p = 0; p < PAIRS; p++)
                sums.o[m][p][0][i] *= factor, sums.o[m][p][1][i] *= factor;
        }
    uint32_t part = lane() / 8, line = part % 2 * 8 + lane() % 8;
#pragma unroll
    for (uint32_t step = 0; step < TILE_KEYS / 16; step++) {
        uint32_t a[MT][4];
#pragma unroll
        for (uint32_t m = 0; m < MT; m++) {
            ldmatrix(
                a[m], shared.weights + (m * 16 + line) * WEIGHT_STRIDE + step * 16 + part / 2 * 8);
            mma(sums.row_sum[m], a[m], {ONES, ONES});
        }
#pragma unroll
        for (uint32_t p = 0; p < PAIRS; p++) {
            uint32_t d = (p * WARPS + warp()) * 16, b[4];
            if (d >= sizes.value_dim) break;
            ldmatrix<true>(b, shared.tile + (step * 16 + line) * sizes.stride() + d + part / 2 * 8);
#pragma unroll
            for (uint32_t m = 0; m < MT; m++) {
                mma(sums.o[m][p][0], a[m], {b[0], b[1]});
                mma(sums.o[m][p][1], a[m], {b[2], b[3]});
            }
        }
    }
}

// Attention of the block's rows over `keys`. Copies of queries may still be under way. It ends with
// a barrier, after which nothing of shared memory is read any more.
template <uint32_t R>
DEVICE void attend(WarpSums<R>& sums, const AttentionParams<bf16>& params, const HeadSizes& sizes,
    const BlockRows& rows, Range keys, const Shared<R>& shared) {
    const uint32_t* table = params.table(rows.sequence, rows.len);
    sums = {};
    if (threadIdx.x < R) shared.row_max[threadIdx.x] = MINUS_INFINITY;
    __syncthreads();
    uint32_t tile = keys.begin / TILE_KEYS;
    uint32_t end = keys.end > keys.begin ? divide_up(keys.end, TILE_KEYS) : tile;
    for (; tile < end; tile++) {
        copy_tile(params, params.k, sizes, rows, table, keys, tile, shared);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        multiply_keys(params, sizes, rows, tile, shared);
        __syncthreads();
        if (params.v != params.k) {
            copy_tile(params, params.v, sizes, rows, table, keys, tile, shared);
            copy_commit();
        }
        softmax(params, shared);
        copy_wait<0>();
        __syncthreads();
        multiply_values(sums, sizes, shared);
        __syncthreads();
    }
#pragma unroll
    for (uint32_t m = 0; m < R / 16; m++)
#pragma unroll
        for (uint32_t half = 0; half < 2; half++)
            sums.row_max[m][half] = shared.row_max[m * 16 + half * 8 + lane() / 4];
    __syncthreads();
}

// Merges the sums over the keys before into those over the keys that follow.
template <uint32_t R>
DEVICE void merge_before(const WarpSums<R>& before, WarpSums<R>& sums) {
#pragma unroll
    for (uint32_t m = 0; m < R / 16; m++)
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            StateMerge both(before.row_max[m][half], sums.row_max[m][half]);
            sums.row_max[m][half] = both.row_max;
#pragma unroll
            for (uint32_t i = half * 2; i < half * 2 + 2; i++) {
                sums.row_sum[m][i] = both.merge(before.row_sum[m][i], sums.row_sum[m][i]);
#pragma unroll
                for (uint32_t p = 0; p < PAIRS; p++)
#pragma unroll
                    for (uint32_t n = 0; n < 2; n++)
                        sums.o[m][p][n][i] = both.merge(before.o[m][p][n][i], sums.o[m][p][n][i]);
            }
        }
}

// Calls `write(row, d, value)` for each value that this thread has of a row's result, multiplied by
// `factor(row, row_max, row_sum)`.
template <uint32_t R, class Factor, class Write>
DEVICE void write_values(const WarpSums<R>& sums, const HeadSizes& sizes, const BlockRows& rows,
    const Factor& factor, const Write& write) {
#pragma unroll
    for (uint32_t m = 0; m < R / 16; m++)
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t row = m * 16 + half * 8 + lane() / 4;
            if (row >= rows.count) continue;
            float by = factor(row, sums.row_max[m][half], sums.row_sum[m][half * 2]);
#pragma unroll
            for (uint32_t p = 0; p < PAIRS; p++)
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) {
                    uint32_t d = (p * WARPS + warp()) * 16 + i / 2 * 8 + lane() % 4 * 2 + i % 2;
                    if (d < sizes.value_dim)
                        write(row, d, sums.o[m][p][i / 2][half * 2 + i % 2] * by);
                }
        }
}

template <uint32_t R>
DEVICE void store_results(const WarpSums<R>& sums, const AttentionParams<bf16>& params,
    const HeadSizes& sizes, const BlockRows& rows) {
    auto factor = [&](uint32_t row, float row_max, float row_sum) {
        return normaliser(row_max, row_sum, params.sinks, rows.head_of(row));
    };
    auto write = [&](uint32_t row, uint32_t d, float value) {
        size_t at = static_cast<size_t>(rows.query + rows.query_of(row)) * params.heads;
        params.out[(at + rows.head_of(row)) * sizes.value_dim + d] = from_float<bf16>(value);
    };
    write_values(sums, sizes, rows, factor, write);
}

// Leaves what the rows' results have of a piece of keys in the workspace.
template <uint32_t R>
DEVICE void store_states(const WarpSums<R>& sums, const AttentionParams<bf16>& params,
    const HeadSizes& sizes, const BlockRows& rows, float* workspace, uint32_t partial) {
    auto state = [&](uint32_t row) {
        return PartialState(workspace, params.heads, sizes.value_dim, partial, rows.head_of(row));
    };
    auto factor = [&](uint32_t row, float row_max, float row_sum) {
        if (warp() == 0 && lane() % 4 == 0)
            store(state(row).max_and_sum, Vec<float, 2>{row_max, row_sum});
        return 1.0f;
    };
    auto write = [&](uint32_t row, uint32_t d, float value) { state(row).out[d] = value; };
    write_values(sums, sizes, rows, factor, write);
}

// Leaves a partial result of a piece of keys, and merges those of all if it is the last one.
template <uint32_t R>
DEVICE void store_part(const WarpSums<R>& sums, const AttentionParams<bf16>& params,
    const HeadSizes& sizes, const BlockRows& rows, const DecodeWork& work, uint32_t partial) {
    store_states(sums, params, sizes, rows, work.workspace, partial);
    Range own = work.parts(rows.sequence, partial);
    uint32_t tiles = divide_up(rows.group, R),
             tile = (rows.sequence * params.kv_heads + rows.kv_head) * tiles + rows.first / R;
    if (!work.is_last(tile, own.end - own.begin)) return;
    for (uint32_t row = warp(); row < rows.count; row += WARPS)
        merge_partials<32>(work.workspace, params.out, params.sinks, own, rows.sequence,
            rows.head_of(0) + row, params.heads, sizes.value_dim);
}

template <uint32_t R>
DEVICE void decode(
    const AttentionParams<bf16>& params, const DecodeWork& work, const HeadSizes& sizes) {
    launch_dependents_and_wait();
    ASSERT(sizes.value_dim <= PAIRS * WARPS * 16);
    Shared<R> shared(sizes);
    uint32_t group = params.group(), tiles = divide_up(group, R),
             head_tiles = params.kv_heads * tiles;
    for (uint32_t item = blockIdx.x; item < work.share_count * head_tiles; item += gridDim.x) {
        Range share = work.share(item / head_tiles);
        for (uint32_t at = share.begin; at < share.end; at++) {
            KeyPiece piece(params, work, work.piece(at));
            BlockRows found;
            BlockRows& rows = *in_memory(&found);  // Registers are needed for sums.
            rows.sequence = rows.query = piece.sequence, rows.len = piece.len;
            rows.position = piece.len - 1, rows.group = group;
            rows.kv_head = item % head_tiles / tiles, rows.first = item % tiles * R;
            rows.count = min(group - rows.first, R);
            copy_queries(params, sizes, rows, shared);
            WarpSums<R> sums;
            attend(sums, params, sizes, rows, piece.keys, shared);
            copy_wait<0>();  // Of queries that no key met.
            if (piece.partial == DecodeWork::ONLY)
                store_results(sums, params, sizes, rows);
            else
                store_part(sums, params, sizes, rows, work, piece.partial);
        }
    }
}

// The rows of a block of prefill; false for one without work: the grid has room for the most tiles
// that a batch can make.
template <uint32_t R>
DEVICE bool find_rows(
    BlockRows& rows, const AttentionParams<bf16>& params, const uint32_t* cu_seqlens, uint32_t n) {
    rows.group = params.group(), rows.kv_head = blockIdx.x % params.kv_heads;
    auto queries = [&](uint32_t i) {
        ASSERT(cu_seqlens[i] <= cu_seqlens[i + 1] && cu_seqlens[i + 1] <= n);
        return cu_seqlens[i + 1] - cu_seqlens[i];
    };
    auto tiles = [&](uint32_t i) { return divide_up(queries(i) * rows.group, R); };
    WorkSearch search;
    bool found = search.find(blockIdx.x / params.kv_heads, params.sequences, tiles);
    if (found) {
        rows.sequence = search.sequence, rows.len = params.seq_lens[rows.sequence];
        uint32_t own = queries(rows.sequence);
        ASSERT(own <= rows.len);
        // The last tile of a prompt sees the most keys: started first, it does not finish alone.
        rows.first = (tiles(rows.sequence) - 1 - search.index) * R;
        rows.count = min(own * rows.group - rows.first, R);
        rows.query = cu_seqlens[rows.sequence], rows.position = rows.len - own;
    }
    if (blockIdx.x == gridDim.x - 1)
        ASSERT(!search.find(gridDim.x / params.kv_heads, params.sequences, tiles));
    return found;
}

template <uint32_t R>
DEVICE void prefill(const AttentionParams<bf16>& params, const uint32_t* cu_seqlens,
    const uint32_t* split_tokens, uint32_t n, const HeadSizes& sizes) {
    launch_dependents_and_wait();
    ASSERT(sizes.value_dim <= PAIRS * WARPS * 16);
    BlockRows rows;
    if (!find_rows<R>(rows, params, cu_seqlens, n)) return;
    Shared<R> shared(sizes);
    copy_queries(params, sizes, rows, shared);
    Splits splits(
        {params.first_key(rows.position_of(0)), rows.position_of(R - 1) + 1}, split_tokens);
    WarpSums<R> sums, before;
    for (uint32_t split = 0; split < splits.count; split++) {
        attend(sums, params, sizes, rows, splits.range(split), shared);
        if (split > 0) merge_before(*in_memory(&before), sums);
        if (split + 1 < splits.count) *in_memory(&before) = sums;
    }
    store_results(sums, params, sizes, rows);
}

}  // namespace

// Decode and prefill with tiles of so many rows.
#define ANY(rows, blocks)                                                                         \
    KERNEL(attention_decode_any_##rows##_bf16, __launch_bounds__(256, blocks),                    \
        ATTENTION_PARAMETERS(bf16), DECODE_PARAMETERS, uint32_t head_dim, uint32_t value_dim) {   \
        decode<rows>(ATTENTION_PARAMS(bf16), DECODE_WORK, HeadSizes{head_dim, value_dim});        \
    }                                                                                             \
    KERNEL(attention_prefill_any_##rows##_bf16, __launch_bounds__(256, blocks),                   \
        ATTENTION_PARAMETERS(bf16), PREFILL_PARAMETERS, uint32_t head_dim, uint32_t value_dim) {  \
        prefill<rows>(                                                                            \
            ATTENTION_PARAMS(bf16), cu_seqlens, split_tokens, n, HeadSizes{head_dim, value_dim}); \
    }

ANY(16, 2)
ANY(64, 1)
