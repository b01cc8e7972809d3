// out[n, rows] = x[n, cols] · wᵀ (+ bias), w: [rows, cols]; sums in f32; out in the operands' type
// or f32.
//
// Every output of the tensor-core kernels (bf16, cols a multiple of 8) is summed in one order,
// whatever n and the kernel: cols are cut into SEGMENTS ranges of whole TILE_Ks, each range is
// summed from zero by products of 16 columns in ascending order, and the ranges' sums are added in
// order. So a row has the same bits alone and in any company, if a tensor core computes all
// elements of its tile alike.
//
// Both stream tiles of w and x through slots of TILE_K columns in shared memory by asynchronous
// copies. A row of a slot is 128 bytes, all banks; its eight 16-byte chunks are permuted by the
// row's number, so that neither the copies nor `ldmatrix` conflict. Which row of w is which of a
// tensor core's is free: a lane's values of an x row are neighbouring rows of w and leave as
// vectors.
//
// gemv (n ≤ 8, 16, 32): reads each weight once. A block takes 32 rows of w at a time, each of its 8
//   warps one range of the columns, in slots of its own without barriers; the sums meet in shared
//   memory. One block a multiprocessor goes on from tile to tile with its copies always under way:
//   2 of 3 slots of 4 KiB of w a warp, 64 KiB a multiprocessor, 8 MiB in all, where 4.8 TB/s × 0.6
//   µs ask for 3, so half of the multiprocessors suffice when the last tiles are few. x comes from
//   the second-level cache: n / 32 of w's bytes. A warp takes 128 bytes of a row of w at a time;
//   the copies hint at 256, so that the memory is asked for neighbours together (ranges of
//   interleaved columns would do more here, and harm gemm).
//   Before the launch waits for earlier ones it asks for what it needs of w first: 2 slots a warp,
//   and 512 bytes of each row more as far as the second-level cache: 24 MiB in all, 5 us of the
//   memory's time that norm, rope and attention leave idle. At n ≤ 8 about 180 instructions a warp
//   and 4 KiB of w: a quarter of the issue slots.
//   Considered: multiply-adds in f32 (at n = 8 they bind: 8 operations a byte, and unpacking); w
//   from global memory to registers (a lane's 16 bytes are of one row, the tensor core's registers
//   of two: three moves a product in the other kernel, for the same order of sums); 16 rows a warp
//   (twice the reading of x).
//   Left out: rows of gate and up in one tile, so that SiLU or GELU and the product are taken of
//   the sums. It would save a launch a layer (about 1 us of 110 at one row of an 8B model) and 6
//   bytes a value through the second-level cache.
//   To be tried on a device: other values of AHEAD, 0 among them; w marked to leave the
//   second-level cache first, so that what is small stays there from layer to layer (or else its
//   own lines push each other out before both halves were used).
// gemm (any n): a block takes a tile of w's rows × x's rows, all columns, one barrier a slot, all
//   slots but one under way. Tiles: 128 × 128 (8 warps of 64 × 32) for many rows; 64 × 64 and 32 ×
//   64 fill the multiprocessors when there are few. A slot of the large one is 64 products of 2048
//   multiply-adds a warp in about 240 instructions, the copies' addresses among them; its 24 reads
//   of 512 bytes a warp and the copies' writes take 1024 cycles of shared memory, the products
//   about 740 of the tensor cores', so it should reach some 45 % of what warp-group instructions
//   (Hopper only; to be tried on a device) could. Warps of 64 × 64 would balance them, but two sets
//   of sums do not fit into registers.
//   Tiles are walked 8 tiles of x at a time over all of w, so that a wave re-reads both from the
//   second-level cache: 512 rows read w once. Considered: cutting columns over blocks for few rows
//   (needs a workspace and a second pass).
// dot (f32, and bf16 with other sizes): a warp for each row of w and 8 rows of x, plain
// multiply-adds. Simple, not fast. Not measured yet.
#include "common.cuh"

namespace {

constexpr uint32_t SEGMENTS = 8, TILE_K = 64;

// Columns of a range, but for the last ones.
DEVICE uint32_t segment(uint32_t cols) {
    constexpr uint32_t WHOLE = SEGMENTS * TILE_K;
    return (cols + WHOLE - 1) / WHOLE * TILE_K;
}

// Starts the copy of TILE_K columns from `k` on of COUNT rows from `first` on, by THREADS threads;
// zeros where there are none. The chunks of row r are permuted by r / PERIOD: `ldmatrix` reads rows
// PERIOD apart.
template <uint32_t COUNT, uint32_t PERIOD, uint32_t THREADS>
DEVICE void copy_tile(
    bf16* to, const bf16* from, uint32_t first, uint32_t rows, uint32_t cols, uint32_t k) {
    static_assert(COUNT * 8 % THREADS == 0);
    uint32_t thread = threadIdx.x % THREADS, chunk = thread % 8, column = k + chunk * 8;
#pragma unroll
    for (uint32_t i = 0; i < COUNT * 8 / THREADS; i++) {
        uint32_t row = thread / 8 + i * (THREADS / 8);
        bool valid = first + row < rows && column < cols;
        size_t at = valid ? static_cast<size_t>(first + row) * cols + column : 0;
        copy_async(to + row * TILE_K + (chunk ^ (row / PERIOD % 8)) * 8, from + at, valid);
    }
}

// Adds the products of a slot's columns: 16 DOWN rows of w by 8 ACROSS of x. With g = lane / 4 and
// t = lane % 4, value h of part[i][j] belongs to row 2 DOWN g + 2 i + h / 2 of w and row 8 j + 2 t
// + h % 2 of x. What `meanwhile` does stands behind the last reading of the slot, so that it is
// scheduled among the products.
template <uint32_t DOWN, uint32_t ACROSS, class Meanwhile>
DEVICE void multiply(
    float (&part)[DOWN][ACROSS][4], const bf16* w, const bf16* x, Meanwhile meanwhile) {
    uint32_t row = lane() % 8, tile = lane() / 8;
    const bf16* w_row = w + (row * 2 * DOWN + tile % 2) * TILE_K;
    const bf16* x_row = x + row * TILE_K;
#pragma unroll
    for (uint32_t window = 0; window < TILE_K / 32; window++) {
        uint32_t a[2][DOWN][4], b[ACROSS][4];
#pragma unroll
        for (uint32_t j = 0; j < ACROSS; j++)
            ldmatrix(b[j], x_row + j * 8 * TILE_K + ((window * 4 + tile) ^ row) * 8);
#pragma unroll
        for (uint32_t half = 0; half < 2; half++)
#pragma unroll
            for (uint32_t i = 0; i < DOWN; i++)
                ldmatrix(a[half][i],
                    w_row + i * 2 * TILE_K + ((window * 4 + half * 2 + tile / 2) ^ row) * 8);
        if (window == TILE_K / 32 - 1) meanwhile();
#pragma unroll
        for (uint32_t half = 0; half < 2; half++)
#pragma unroll
            for (uint32_t i = 0; i < DOWN; i++)
#pragma unroll
                for (uint32_t j = 0; j < ACROSS; j++)
                    mma(part[i][j], a[half][i], {b[j][half * 2], b[j][half * 2 + 1]});
    }
}

DEVICE float bias_of(const bf16* bias, uint32_t row) {
    return bias == nullptr ? 0.0f : to_float(bias[row]);
}

// ---- gemv

// What a warp does for ROWS of w at a time, its range of the columns, and up to TOKENS rows of x.
template <uint32_t TOKENS>
struct Gemv {
    static constexpr uint32_t ROWS = 32, STAGES = 3, SLOT = (ROWS + TOKENS) * TILE_K;
    static constexpr uint32_t VALUES = ROWS * TOKENS / WARP;  // of a lane
    static constexpr uint32_t AHEAD = 256;                    // columns

    const bf16 *x, *w;
    uint32_t n, rows, cols, begin, end;  // of the warp's columns

    DEVICE bf16* slot(uint32_t count) const {
        return dynamic_shared<bf16>() + (warp() * STAGES + count % STAGES) * SLOT;
    }

    // A step of the warp, counted over all tiles of the block. Nothing is copied behind the last
    // one.
    struct Step {
        uint32_t count, row, k;
    };
    DEVICE bool exists(const Step& step) const { return step.row < rows && begin < end; }
    DEVICE void copy_w(const Step& step) const {
        if (exists(step))
            copy_tile<ROWS, 4, WARP>(slot(step.count), w, step.row, rows, cols, step.k);
    }
    DEVICE void copy_x(const Step& step) const {
        if (exists(step))
            copy_tile<TOKENS, 1, WARP>(slot(step.count) + ROWS * TILE_K, x, 0, n, cols, step.k);
        copy_commit();
    }
    DEVICE void advance(Step& step) const {
        step.count++, step.k += TILE_K;
        if (step.k >= end) step.k = begin, step.row += gridDim.x * ROWS;
    }
    // Starts the copies for the first steps, of w before those of x may start. What of w the slots
    // have no room for comes as far as the second-level cache.
    DEVICE Step start() const {
        launch_dependents();
        Step next{0, blockIdx.x * ROWS, begin}, ahead = next;
        for (; ahead.count < STAGES - 1; advance(ahead)) copy_w(ahead);
        uint32_t row = next.row + lane(), k = begin + (STAGES - 1) * TILE_K;
        if (row < rows && k < end)
            prefetch(w + static_cast<size_t>(row) * cols + k, min(end - k, AHEAD) * sizeof(bf16));
        wait_for_earlier_launches();
        for (; next.count < STAGES - 1; advance(next)) copy_x(next);
        return next;
    }

    // Adds the ranges' sums: a warp takes every eighth of the lanes' values.
    DEVICE void finish(
        uint32_t first, const float* sums, const bf16* bias, void* out, uint32_t wide) const {
        for (uint32_t value = warp(); value < VALUES; value += SEGMENTS) {
            float sum = 0.0f;
            for (uint32_t s = 0; s < SEGMENTS; s++)
                sum += sums[(s * VALUES + value) * WARP + lane()];
            uint32_t i = value / (TOKENS / 2), j = value / 4 % (TOKENS / 8), h = value % 4;
            uint32_t row = first + lane() / 4 * 4 + i * 2 + h / 2,
                     token = j * 8 + lane() % 4 * 2 + h % 2;
            if (row >= rows || token >= n) continue;
            sum += bias_of(bias, row);
            size_t at = static_cast<size_t>(token) * rows + row;
            if (wide != 0)
                static_cast<float*>(out)[at] = sum;
            else
                static_cast<bf16*>(out)[at] = from_float<bf16>(sum);
        }
    }

    DEVICE void run(const bf16* bias, void* out, uint32_t wide) {
        float* sums = reinterpret_cast<float*>(dynamic_shared<bf16>() + SEGMENTS * STAGES * SLOT);
        Step next = start();
        uint32_t count = 0;
        for (uint32_t first = blockIdx.x * ROWS; first < rows; first += gridDim.x * ROWS) {
            float part[ROWS / 16][TOKENS / 8][4] = {};
            for (uint32_t k = begin; k < end; k += TILE_K, count++) {
                copy_wait<STAGES - 2>();
                // All lanes' copies of this slot have landed, and the slot before it has been read.
                __syncwarp();
                copy_w(next), copy_x(next), advance(next);
                multiply(part, slot(count), slot(count) + ROWS * TILE_K, [] {});
            }
            // Until the sums of the tile before have been read.
            __syncthreads();
#pragma unroll
            for (uint32_t v = 0; v < VALUES; v++)
                sums[(warp() * VALUES + v) * WARP + lane()] =
                    part[v / (TOKENS / 2)][v / 4 % (TOKENS / 8)][v % 4];
            __syncthreads();
            finish(first, sums, bias, out, wide);
        }
    }
};

template <uint32_t TOKENS>
DEVICE void gemv(const bf16* x, const bf16* w, const bf16* bias, void* out, uint32_t wide,
    uint32_t n, uint32_t rows, uint32_t cols) {
    uint32_t begin = min(warp() * segment(cols), cols), end = min(begin + segment(cols), cols);
    Gemv<TOKENS>{x, w, n, rows, cols, begin, end}.run(bias, out, wide);
}

// ---- gemm

// N neighbouring outputs, of which the first `count` exist.
template <class T, uint32_t N>
DEVICE void put(T* out, const float (&values)[N], uint32_t count, bool aligned) {
    constexpr uint32_t STEP = N < PER_VEC<T> ? N : PER_VEC<T>;
    Vec<T, STEP> rounded[N / STEP];
#pragma unroll
    for (uint32_t i = 0; i < N; i++) rounded[i / STEP].at[i % STEP] = from_float<T>(values[i]);
    if (aligned && count >= N) {
#pragma unroll
        for (uint32_t i = 0; i < N / STEP; i++) store(out + i * STEP, rounded[i]);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            if (i < count) out[i] = rounded[i / STEP].at[i % STEP];
    }
}

// A block's tile of ROWS of w by COLUMNS of x, cut into WARPS_DOWN × WARPS_ACROSS.
template <uint32_t ROWS, uint32_t COLUMNS, uint32_t WARPS_DOWN, uint32_t WARPS_ACROSS,
    uint32_t STAGES>
struct Tile {
    static constexpr uint32_t THREADS = WARPS_DOWN * WARPS_ACROSS * WARP,
                              SLOT = (ROWS + COLUMNS) * TILE_K;
    static constexpr uint32_t DOWN = ROWS / WARPS_DOWN / 16,
                              ACROSS = COLUMNS / WARPS_ACROSS / 8;  // a warp's part of the tile
    static constexpr uint32_t NEIGHBOURS = 2 * DOWN;                // rows of w of a lane

    const bf16 *x, *w;
    uint32_t n, rows, cols, first_row, first_column;
    bf16* slots;
    float part[DOWN][ACROSS][4], total[DOWN][ACROSS][4];

    DEVICE uint32_t warp_row() const { return warp() / WARPS_ACROSS * DOWN * 16; }
    DEVICE uint32_t warp_column() const { return warp() % WARPS_ACROSS * ACROSS * 8; }

    // The block's tile, 8 tiles of x at a time.
    DEVICE void choose() {
        constexpr uint32_t GROUP = 8;
        uint32_t down = (rows + ROWS - 1) / ROWS, across = (n + COLUMNS - 1) / COLUMNS;
        uint32_t group = blockIdx.x / (GROUP * down) * GROUP, inside = blockIdx.x % (GROUP * down),
                 width = min(GROUP, across - group);
        first_column = (group + inside % width) * COLUMNS;
        first_row = inside / width * ROWS;
    }

    // Without a branch for the steps behind the last one: their copies read nothing.
    DEVICE void copy_w(uint32_t step) const {
        copy_tile<ROWS, NEIGHBOURS, THREADS>(
            slots + step % STAGES * SLOT, w, first_row, rows, cols, step * TILE_K);
    }
    DEVICE void copy_x(uint32_t step) const {
        copy_tile<COLUMNS, 1, THREADS>(slots + (step % STAGES * SLOT + ROWS * TILE_K), x,
            first_column, n, cols, step * TILE_K);
        copy_commit();
    }

    DEVICE void end_segment() {
#pragma unroll
        for (uint32_t i = 0; i < DOWN; i++)
#pragma unroll
            for (uint32_t j = 0; j < ACROSS; j++)
#pragma unroll
                for (uint32_t h = 0; h < 4; h++)
                    total[i][j][h] += part[i][j][h], part[i][j][h] = 0.0f;
    }

    DEVICE void run() {
        launch_dependents();
        choose();
        uint32_t steps = (cols + TILE_K - 1) / TILE_K, end = segment(cols) / TILE_K;
        for (uint32_t step = 0; step < STAGES - 1; step++) copy_w(step);
        wait_for_earlier_launches();
        for (uint32_t step = 0; step < STAGES - 1; step++) copy_x(step);
        for (uint32_t step = 0; step < steps;) {
            copy_wait<STAGES - 2>();
            // All threads' copies of this slot have landed, and the slot before it has been read.
            __syncthreads();
            const bf16* slot = slots + step % STAGES * SLOT;
            multiply(part, slot + warp_row() * TILE_K, slot + (ROWS + warp_column()) * TILE_K, [&] {
                copy_w(step + STAGES - 1);
                copy_x(step + STAGES - 1);
            });
            if (++step == end) end_segment(), end += segment(cols) / TILE_K;
        }
        // The rest of the last range, or zeros.
        end_segment();
        // A block leaves no copies behind, be it of zeros.
        copy_wait<0>();
    }

    template <class T>
    DEVICE void write(const bf16* bias, T* out) {
        uint32_t row = first_row + warp_row() + lane() / 4 * NEIGHBOURS,
                 count = row < rows ? rows - row : 0;
        float added[NEIGHBOURS];
#pragma unroll
        for (uint32_t i = 0; i < NEIGHBOURS; i++)
            added[i] = i < count ? bias_of(bias, row + i) : 0.0f;
#pragma unroll
        for (uint32_t j = 0; j < ACROSS * 2; j++) {
            uint32_t token = first_column + warp_column() + j / 2 * 8 + lane() % 4 * 2 + j % 2;
            float values[NEIGHBOURS];
#pragma unroll
            for (uint32_t i = 0; i < NEIGHBOURS; i++)
                values[i] = total[i / 2][j / 2][i % 2 * 2 + j % 2] + added[i];
            if (token < n)
                put(out + static_cast<size_t>(token) * rows + row, values, count,
                    rows % NEIGHBOURS == 0);
        }
    }
};

template <uint32_t ROWS, uint32_t COLUMNS, uint32_t WARPS_DOWN, uint32_t WARPS_ACROSS,
    uint32_t STAGES>
DEVICE void gemm(const bf16* x, const bf16* w, const bf16* bias, void* out, uint32_t wide,
    uint32_t n, uint32_t rows, uint32_t cols) {
    Tile<ROWS, COLUMNS, WARPS_DOWN, WARPS_ACROSS, STAGES> tile{
        x, w, n, rows, cols, 0, 0, dynamic_shared<bf16>(), {}, {}};
    tile.run();
    if (wide != 0)
        tile.write(bias, static_cast<float*>(out));
    else
        tile.write(bias, static_cast<bf16*>(out));
}

// ---- dot

template <class T>
DEVICE void dot(const T* x, const T* w, const T* bias, void* out, uint32_t wide, uint32_t n,
    uint32_t rows, uint32_t cols) {
    launch_dependents_and_wait();
    constexpr uint32_t TOKENS = 8, WARPS = 4;
    uint32_t row = blockIdx.x * WARPS + warp(), first = blockIdx.y * TOKENS,
             count = min(TOKENS, n - first);
    if (row >= rows) return;
    const T* weights = w + static_cast<size_t>(row) * cols;
    float sums[TOKENS] = {};
    for (uint32_t k = lane(); k < cols; k += WARP) {
        float weight = to_float(weights[k]);
#pragma unroll
        for (uint32_t i = 0; i < TOKENS; i++)
            sums[i] +=
                weight * to_float(x[static_cast<size_t>(first + min(i, count - 1)) * cols + k]);
    }
#pragma unroll
    for (uint32_t i = 0; i < TOKENS; i++) {
        float sum = warp_sum(sums[i]) + (bias == nullptr ? 0.0f : to_float(bias[row]));
        if (lane() != 0 || i >= count) continue;
        size_t at = static_cast<size_t>(first + i) * rows + row;
        if (wide != 0)
            static_cast<float*>(out)[at] = sum;
        else
            static_cast<T*>(out)[at] = from_float<T>(sum);
    }
}

}  // namespace

// `wide`: out is f32.
KERNEL __launch_bounds__(256) gemv_8_bf16(const bf16* x, const bf16* w, const bf16* bias, void* out,
    uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    gemv<8>(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(gemv_8_bf16)
KERNEL __launch_bounds__(256) gemv_16_bf16(const bf16* x, const bf16* w, const bf16* bias,
    void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    gemv<16>(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(gemv_16_bf16)
KERNEL __launch_bounds__(256) gemv_32_bf16(const bf16* x, const bf16* w, const bf16* bias,
    void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    gemv<32>(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(gemv_32_bf16)
KERNEL __launch_bounds__(128) gemm_32x64_bf16(const bf16* x, const bf16* w, const bf16* bias,
    void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    gemm<32, 64, 2, 2, 8>(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(gemm_32x64_bf16)
KERNEL __launch_bounds__(128) gemm_64x64_bf16(const bf16* x, const bf16* w, const bf16* bias,
    void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    gemm<64, 64, 2, 2, 6>(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(gemm_64x64_bf16)
KERNEL __launch_bounds__(256) gemm_128x128_bf16(const bf16* x, const bf16* w, const bf16* bias,
    void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    gemm<128, 128, 2, 4, 4>(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(gemm_128x128_bf16)
KERNEL __launch_bounds__(128) dot_bf16(const bf16* x, const bf16* w, const bf16* bias, void* out,
    uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    dot(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(dot_bf16)
KERNEL __launch_bounds__(128) dot_f32(const float* x, const float* w, const float* bias, void* out,
    uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    dot(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(dot_f32)
