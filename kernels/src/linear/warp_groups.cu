// out[n, rows] = x[n, cols] · wᵀ (+ bias) in bf16 by the products of warp groups (WGMMA), which
// only sm_90 has. Sums have the order that linear.cu describes; 64 rows of x by 16 columns are a
// product here, and one output of it has the bits of linear.cu's products of 16 columns: a test
// compares the kernels bit by bit, also on an H200.
//
// The rows of x are those of the tensor cores' first operand, 64 a warp group, and rows of w the
// second's. Both come in slots of 64 columns by asynchronous copies of all threads. A slot's rows
// of 128 bytes, permuted as in streams.cuh, are what the hardware calls its swizzle of 128 bytes.
// Blocks stay and go from tile to tile, so copies of the next tile are under way while one ends.
// Tiles are walked 8 tiles of x at a time over all of w, as in gemm.
//
// Tiles of rows of w × rows of x, and what a slot costs a multiprocessor, in cycles:
//   tile       tensor cores  shared memory  second-level cache
//   192 × 128           768            832                 640
//   128 × 128           512            640                 512
//   128 × 64            256            384                 384
//    64 × 64            128            256                 256
//    32 × 64             64            160                 192
// Shared memory has 128 bytes a cycle for the products' reading (64 rows and those of w for each
// product) and the copies' writing, the second-level cache 64 bytes at most. Sums and totals of 192
// rows take 192 registers of a thread, so no tile can be larger, unless totals leave the registers.
// There the tensor cores wait at the end of a range, until its sums are added to the totals: about
// 350 cycles of 8 slots at 4096 columns. With 128 rows a second set of sums has room, with which
// the next range begins before. The second-level cache would do less with TMA and clusters, which
// copy a tile once for two blocks; maps of each operand would be needed for that.
//   192 × 128, 128 × 128: two warp groups, each with its products of one slot under way while it
//     starts those of the next: one barrier a slot.
//   128 × 64: one warp group, two blocks on a multiprocessor.
//   64 × 64, 32 × 64: for few rows, where a slot takes the time of a barrier, of waiting and of
//     starting copies one after the other, some 350 cycles. So four warp groups take two ranges of
//     the columns each, in slots and at barriers of their own. The ranges' sums are added through
//     shared memory, one warp group after the other, which keeps their order.
//
// Predicted for an H200: 550 to 640 TFLOP/s with 8192 rows; 165 to 190 us for 28672 by 4096 with
// 512 rows, 58 to 66 with 64. Measured there: 459 TFLOP/s with 8192 rows, where the library has
// 743; 258 us with 512 rows (160) and 64 with 64 (58). The second-level cache is at 46 %; warps
// wait for the dispatcher.
#include "warp_groups.cuh"

#include "linear/dense_product.cuh"

namespace {

// The row of w at row `i` of a slot. A lane has columns 2 t and 2 t + 1 of every eight columns of a
// warp group's product; in this order, those of 32 are eight neighbours.
struct LaneNeighbours {
    DEVICE uint32_t operator()(uint32_t i) const {
        return i / 32 * 32 + i % 8 / 2 * 8 + i % 32 / 8 * 2 + i % 2;
    }
};

// The work of a block: tiles of ROWS rows of w by COLUMNS rows of x, of which each warp group
// multiplies 64. If there are SPLITS, each of them is a warp group that takes its share of the
// ranges of columns, in slots of its own.
template <uint32_t ROWS, uint32_t COLUMNS, uint32_t SLOTS, uint32_t SPLITS>
struct GroupGemm {
    static_assert(SPLITS == 1 || COLUMNS == 64, "a split is one warp group");
    static constexpr uint32_t THREADS = COLUMNS / 64 * WARP_GROUP,  // of a split
        W_VALUES = ROWS * TILE_K, SLOT = (ROWS + COLUMNS) * TILE_K,
                              RANGES = DENSE_SEGMENTS / SPLITS;
    // Products under way while their group goes on. Splits keep the tensor cores busy without.
    static constexpr uint32_t UNDER_WAY = SPLITS == 1 ? 1 : 0, AHEAD = SLOTS - 1 - UNDER_WAY;

    AllRows x, w;
    const bf16* bias;
    uint32_t stride, cols;

    DEVICE uint32_t split() const { return threadIdx.x / THREADS; }
    // Columns of the split: `range` for each of its ranges, as far as there are any.
    DEVICE uint32_t range() const { return segment_columns(cols); }
    DEVICE uint32_t begin() const { return min(split() * RANGES * range(), cols); }
    DEVICE uint32_t end() const { return min(begin() + RANGES * range(), cols); }

    DEVICE bf16* slot(uint32_t count) const {
        return reinterpret_cast<bf16*>(swizzled_shared()) +
               (split() * SLOTS + count % SLOTS) * SLOT;
    }
    DEVICE uint32_t tiles() const { return divide_up(w.count, ROWS) * divide_up(x.count, COLUMNS); }
    DEVICE TilePlace place(uint32_t tile) const {
        TilePlace at = place_of_tile(tile, divide_up(w.count, ROWS), divide_up(x.count, COLUMNS));
        return {at.w * ROWS, at.x * COLUMNS};
    }

    // A position in the split's sequence of slots, which runs over all tiles of the block. Nothing
    // is copied for positions beyond the last one.
    struct Position {
        uint32_t count, tile, k;
        TilePlace first;
    };
    DEVICE bool is_inside(const Position& at) const { return at.tile < tiles() && at.k < end(); }
    DEVICE void copy_w(const Position& at) const {
        if (is_inside(at))
            copy_tile<ROWS, 1, THREADS>(
                slot(at.count), w, at.first.w, cols, at.k, LaneNeighbours{});
    }
    DEVICE void copy_x(const Position& at) const {
        if (is_inside(at))
            copy_tile<COLUMNS, 1, THREADS>(slot(at.count) + W_VALUES, x, at.first.x, cols, at.k);
        copy_commit();
    }
    DEVICE void advance(Position& at) const {
        at.count++, at.k += TILE_K;
        if (at.k < end()) return;
        at.k = begin(), at.tile += gridDim.x;
        if (at.tile < tiles()) at.first = place(at.tile);
    }
    DEVICE Position start() const {
        launch_dependents();
        Position next{0, blockIdx.x, begin(), place(blockIdx.x)}, ahead = next;
        for (; ahead.count < AHEAD; advance(ahead)) copy_w(ahead);
        wait_for_earlier_launches();
        for (; next.count < AHEAD; advance(next)) copy_x(next);
        return next;
    }

    DEVICE void multiply(float (&sums)[ROWS / 2], uint32_t count, bool adds) const {
        const bf16* rows = slot(count);
        uint64_t b = describe_matrix(rows),
                 a = describe_matrix(
                     rows + W_VALUES + threadIdx.x % THREADS / WARP_GROUP * 64 * TILE_K);
        group_mma_fence();
#pragma unroll
        for (uint32_t part = 0; part < TILE_K / 16; part++)
            group_mma<ROWS>(sums, a + 2 * part, b + 2 * part, adds || part > 0);
        group_mma_commit();
    }

    // Multiplies what lies in slot `next.count - AHEAD`, and starts the copies for another one.
    DEVICE void step(float (&sums)[ROWS / 2], bool adds, Position& next) const {
        copy_wait<AHEAD - 1>();
        fence_async_proxy();
        // All threads' copies of this slot have landed, and what lies in the next slot to be filled
        // has been multiplied.
        if constexpr (SPLITS == 1)
            __syncthreads();
        else
            group_barrier();
        multiply(sums, next.count - AHEAD, adds);
        copy_w(next), copy_x(next), advance(next);
        group_mma_wait<UNDER_WAY>();
    }

    // Sums the products of range `r`; some of them are still under way at the end.
    DEVICE void sum_range(float (&sums)[ROWS / 2], uint32_t r, Position& next) const {
        uint32_t k = r * range(), last = min(k + range(), cols);
        for (bool adds = false; k < last; k += TILE_K, adds = true) step(sums, adds, next);
    }

    // Does the same, and adds those of the range before to the total while its first are under way.
    DEVICE void sum_range_and_add(float (&sums)[ROWS / 2], float (&before)[ROWS / 2],
        float (&total)[ROWS / 2], uint32_t r, Position& next) const {
        uint32_t k = r * range(), last = min(k + range(), cols);
        step(sums, false, next);
        add_settled(total, before);
        for (k += TILE_K; k < last; k += TILE_K) step(sums, true, next);
    }

    // Adds sums of which no product is under way.
    DEVICE static void add_settled(float (&total)[ROWS / 2], float (&sums)[ROWS / 2]) {
        group_mma_settle(sums);
#pragma unroll
        for (uint32_t i = 0; i < ROWS / 2; i++) total[i] += sums[i];
    }
    DEVICE static void add_last(float (&total)[ROWS / 2], float (&sums)[ROWS / 2]) {
        group_mma_wait<0>();
        add_settled(total, sums);
    }

    // The sums of all ranges in order. The tensor cores wait while those of a range are added.
    DEVICE void sum_ranges(float (&total)[ROWS / 2], Position& next) const {
        float sums[ROWS / 2];
        for (uint32_t r = 0; r * range() < cols; r++) {
            sum_range(sums, r, next);
            add_last(total, sums);
        }
    }

    // Does the same with two sets of sums, where they find registers, so that they do not wait.
    DEVICE void sum_ranges_in_turns(float (&total)[ROWS / 2], Position& next) const {
        float even[ROWS / 2], odd[ROWS / 2] = {};
        uint32_t ranges = divide_up(cols, range());
        for (uint32_t r = 0;; r += 2) {
            sum_range_and_add(even, odd, total, r, next);
            if (r + 1 == ranges) return add_last(total, even);
            sum_range_and_add(odd, even, total, r + 1, next);
            if (r + 2 == ranges) return add_last(total, odd);
        }
    }

    template <class T>
    DEVICE void write_as(const float (&total)[ROWS / 2], TilePlace first, T* out) const {
        uint32_t token = first.x + threadIdx.x % THREADS / WARP * 16 + lane() / 4;
        bool aligned = stride % 8 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
#pragma unroll
        for (uint32_t window = 0; window < ROWS / 32; window++) {
            uint32_t row = first.w + window * 32 + lane() % 4 * 8,
                     count = row < w.count ? w.count - row : 0;
            float added[8];
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) added[i] = i < count ? bias_of(bias, row + i) : 0.0f;
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                float values[8];
#pragma unroll
                for (uint32_t i = 0; i < 8; i++)
                    values[i] = total[window * 16 + i / 2 * 4 + half * 2 + i % 2] + added[i];
                if (token + half * 8 < x.count)
                    store_outputs(out + static_cast<size_t>(token + half * 8) * stride + row,
                        values, count, aligned);
            }
        }
    }

    DEVICE void write(
        const float (&total)[ROWS / 2], TilePlace first, void* out, uint32_t f32_out) const {
        if (f32_out != 0)
            write_as(total, first, static_cast<float*>(out));
        else
            write_as(total, first, static_cast<bf16*>(out));
    }

    // A tile of a block in which one split has all ranges.
    DEVICE void run_whole(Position& next, TilePlace first, void* out, uint32_t f32_out) const {
        float total[ROWS / 2] = {};
        if constexpr (ROWS <= 128)
            sum_ranges_in_turns(total, next);
        else
            sum_ranges(total, next);
        write(total, first, out, f32_out);
    }

    // A tile to whose sums one split after the other adds its ranges.
    DEVICE void run_split(Position& next, TilePlace first, void* out, uint32_t f32_out) const {
        float sums[RANGES][ROWS / 2] = {};
#pragma unroll
        for (uint32_t r = 0; r < RANGES; r++) sum_range(sums[r], split() * RANGES + r, next);
        float* total = reinterpret_cast<float*>(swizzled_shared() + SPLITS * SLOTS * SLOT * 2) +
                       threadIdx.x % THREADS;
        for (uint32_t turn = 0; turn < SPLITS; turn++) {
            if (turn == split()) {
#pragma unroll
                for (uint32_t i = 0; i < ROWS / 2; i++) {
                    float sum = turn == 0 ? 0.0f : total[i * THREADS];
#pragma unroll
                    for (uint32_t r = 0; r < RANGES; r++) sum += sums[r][i];
                    total[i * THREADS] = sums[0][i] = sum;
                }
                if (turn == SPLITS - 1) write(sums[0], first, out, f32_out);
            }
            __syncthreads();
        }
    }

    DEVICE void run(void* out, uint32_t f32_out) const {
        Position next = start();
        for (uint32_t tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
            if constexpr (SPLITS == 1)
                run_whole(next, place(tile), out, f32_out);
            else
                run_split(next, place(tile), out, f32_out);
        }
        copy_wait<0>();
    }
};

template <uint32_t ROWS, uint32_t COLUMNS, uint32_t SLOTS, uint32_t SPLITS>
DEVICE void group_gemm(const bf16* x, const bf16* w, const bf16* bias, void* out, uint32_t f32_out,
    uint32_t n, uint32_t rows, uint32_t cols, uint32_t stride) {
    if constexpr (HAS_WARP_GROUPS)
        GroupGemm<ROWS, COLUMNS, SLOTS, SPLITS>{{x, n, cols}, {w, rows, cols}, bias, stride, cols}
            .run(out, f32_out);
    else
        ASSERT(false);
}

}  // namespace

#define GROUP_GEMM(name, threads, ...)                                            \
    KERNEL(name, __launch_bounds__(threads), DENSE_PARAMETERS(bf16)) {            \
        group_gemm<__VA_ARGS__>(x, w, bias, out, f32_out, n, rows, cols, stride); \
    }
GROUP_GEMM(gemm_group_192x128_bf16, 256, 192, 128, 5, 1)
GROUP_GEMM(gemm_group_128x128_bf16, 256, 128, 128, 6, 1)
GROUP_GEMM(gemm_group_128x64_bf16, 128, 128, 64, 4, 1)
GROUP_GEMM(gemm_group_64x64_bf16, 512, 64, 64, 3, 4)
GROUP_GEMM(gemm_group_32x64_bf16, 512, 32, 64, 4, 4)
