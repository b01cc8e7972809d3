// out[n, rows] = x[n, cols] · wᵀ (+ bias), w: [rows, cols]; sums in f32; out in the operands' type or f32.
//
// Every output of the tensor-core kernels (bf16, cols a multiple of 8) is summed in one order, whatever n and the kernel:
// cols are cut into SEGMENTS ranges of whole TILE_Ks, each range is summed from zero by products of 16 columns in ascending
// windows of 32 (`multiply`), and the ranges' sums are added in order. So a row has the same bits alone and in any company, as
// long as a tensor core computes each element of its tile alike. In `multiply` a lane takes 8 neighbouring columns of a window
// with one 16-byte load; the instruction's columns are a permutation of the window's, the same one for w and x.
//
// gemv (n ≤ 8): reads each weight once. A block takes 16 rows of w, each of its 8 warps one range of the columns, and the sums
//   meet in shared memory. w goes from global memory to the tensor cores' registers, past the first-level cache, which keeps x
//   (64 KiB for 8 rows of 4096) for all warps of the multiprocessor. A warp has 8 loads of 512 bytes in flight: 4 KiB, and at
//   4096 rows (256 blocks on 132 multiprocessors) 64 KiB a multiprocessor or 8 MiB in all; 4.8 TB/s × 0.6 µs ask for 3.
//   Tensor cores cost 2 instructions per KiB of w, whatever n is. Considered: multiply-adds in f32 (at n = 8 they bind: 8
//   operations a byte and unpacking); x in shared memory (229 KiB at 8 rows of 14336).
// gemm (any n): a block takes a tile of w's rows × x's rows, streams both through shared memory in STAGES slots of TILE_K columns
//   by asynchronous copies, one barrier a slot. A row of a slot is 128 bytes, all banks; of two rows that eight lanes read
//   together one has its halves swapped, so neither reads nor writes conflict. A lane's values of an x row are neighbouring rows of
//   w: which row of w is which of a tensor core's is free, so outputs leave in vectors of up to 16 bytes, whole lines per warp.
//   Tiles: 128 × 128 (8 warps of 64 × 32: 12 shared 512-byte reads for 32 products of 2048 multiply-adds, near the balance of
//   both) for many rows; 64 × 64, 32 × 64 and 32 × 32 fill the multiprocessors when there are few and keep up to 44 KiB of w in
//   flight. Tiles are walked 8 tiles of x at a time over all of w, so that a wave re-reads both from the second-level cache.
//   Considered: cutting columns over blocks for few rows (needs a workspace and a second pass); warp-group instructions
//   (Hopper only, half as fast again for many rows; to be tried on a device).
// dot (f32, and bf16 with other sizes): a warp for each row of w and 8 rows of x, plain multiply-adds. Simple, not fast.
// Not measured yet.
#include "common.cuh"

namespace {

constexpr uint32_t SEGMENTS = 8, TILE_K = 64;

// Columns of a range, but for the last ones.
DEVICE uint32_t segment(uint32_t cols) {
    constexpr uint32_t WHOLE = SEGMENTS * TILE_K;
    return (cols + WHOLE - 1) / WHOLE * TILE_K;
}

using Eight = Vec<uint32_t, 4>;  // neighbouring bf16 values

// d += 16 rows × 8 rows over a window of 32 columns. With g = lane / 4 and t = lane % 4: `low` and `high` hold columns 8 t.. of the
// tile's rows g and g + 8 of w, `x` those of its row g of x; d as `mma` says.
DEVICE void multiply(float (&d)[4], const Eight& low, const Eight& high, const Eight& x) {
    mma(d, {low.at[0], high.at[0], low.at[1], high.at[1]}, {x.at[0], x.at[1]});
    mma(d, {low.at[2], high.at[2], low.at[3], high.at[3]}, {x.at[2], x.at[3]});
}

DEVICE float bias_of(const bf16* bias, uint32_t row) { return bias == nullptr ? 0.0f : to_float(bias[row]); }

// ---- gemv

DEVICE void gemv(const bf16* x, const bf16* w, const bf16* bias, void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    constexpr uint32_t ROWS = 16, UNROLL = 4;
    SHARED(float, parts, SEGMENTS * ROWS * 8);
    uint32_t g = lane() / 4, t = lane() % 4, first = blockIdx.x * ROWS;
    const bf16* low_row = w + static_cast<size_t>(min(first + g, rows - 1)) * cols;
    const bf16* high_row = w + static_cast<size_t>(min(first + g + 8, rows - 1)) * cols;
    const bf16* x_row = x + static_cast<size_t>(min(g, n - 1)) * cols;
    uint32_t begin = warp() * segment(cols), end = min(begin + segment(cols), cols);
    float d[4] = {};
    for (uint32_t window = begin; window < end; window += 32 * UNROLL) {
        Eight low[UNROLL] = {}, high[UNROLL] = {}, values[UNROLL] = {};
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++) {
            uint32_t k = window + 32 * u + 8 * t;
            if (k >= end) continue;
            low[u] = load_once(low_row + k);
            high[u] = load_once(high_row + k);
            if (g < n) values[u] = load<uint32_t>(reinterpret_cast<const uint32_t*>(x_row + k));
        }
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++) multiply(d, low[u], high[u], values[u]);
    }
    for (uint32_t i = 0; i < 4; i++) parts[(warp() * 4 + i) * WARP + lane()] = d[i];
    __syncthreads();
    if (warp() >= 4) return;
    // Warp i adds the ranges' values i of `d` of each lane.
    float sum = 0.0f;
    for (uint32_t s = 0; s < SEGMENTS; s++) sum += parts[(s * 4 + warp()) * WARP + lane()];
    uint32_t row = first + g + warp() / 2 * 8, token = 2 * t + warp() % 2;
    if (row >= rows || token >= n) return;
    sum += bias_of(bias, row);
    size_t at = static_cast<size_t>(token) * rows + row;
    if (wide != 0) static_cast<float*>(out)[at] = sum;
    else static_cast<bf16*>(out)[at] = from_float<bf16>(sum);
}

// ---- gemm

// Where the 16 bytes `chunk` of row `row` stand in a slot, in bf16 values, if lanes that read together have rows `PERIOD` apart.
template <uint32_t PERIOD> DEVICE uint32_t place(uint32_t row, uint32_t chunk) {
    return row * TILE_K + (chunk ^ (row / PERIOD % 2 * 4)) * 8;
}

// Starts the copy of TILE_K columns from `k` on of COUNT rows from `first` on; zeros where there are none.
template <uint32_t COUNT, uint32_t PERIOD, uint32_t THREADS>
DEVICE void copy_tile(bf16* to, const bf16* from, uint32_t first, uint32_t rows, uint32_t cols, uint32_t k) {
    static_assert(COUNT * 8 % THREADS == 0);
    uint32_t chunk = threadIdx.x % 8, column = k + chunk * 8;
#pragma unroll
    for (uint32_t i = 0; i < COUNT * 8 / THREADS; i++) {
        uint32_t row = threadIdx.x / 8 + i * (THREADS / 8);
        bool valid = first + row < rows && column < cols;
        size_t at = valid ? static_cast<size_t>(first + row) * cols + column : 0;
        copy_async(to + place<PERIOD>(row, chunk), from + at, valid);
    }
}

// N neighbouring outputs, of which the first `count` exist.
template <class T, uint32_t N> DEVICE void put(T* out, const float (&values)[N], uint32_t count, bool aligned) {
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
template <uint32_t ROWS, uint32_t COLUMNS, uint32_t WARPS_DOWN, uint32_t WARPS_ACROSS, uint32_t STAGES> struct Tile {
    static constexpr uint32_t THREADS = WARPS_DOWN * WARPS_ACROSS * WARP, SLOT = (ROWS + COLUMNS) * TILE_K;
    static constexpr uint32_t DOWN = ROWS / WARPS_DOWN / 16, ACROSS = COLUMNS / WARPS_ACROSS / 8;  // tensor-core tiles of a warp
    static constexpr uint32_t NEIGHBOURS = 2 * DOWN;                                               // rows of w of a lane

    const bf16 *x, *w;
    uint32_t n, rows, cols, first_row, first_column;
    bf16* slots;
    float part[DOWN][ACROSS][4], total[DOWN][ACROSS][4];

    DEVICE uint32_t warp_row() const { return warp() / WARPS_ACROSS * DOWN * 16 + lane() / 4 * NEIGHBOURS; }
    DEVICE uint32_t warp_column() const { return warp() % WARPS_ACROSS * ACROSS * 8; }

    DEVICE void start(uint32_t step) {
        bf16* slot = slots + step % STAGES * SLOT;
        copy_tile<ROWS, NEIGHBOURS, THREADS>(slot, w, first_row, rows, cols, step * TILE_K);
        copy_tile<COLUMNS, 1, THREADS>(slot + ROWS * TILE_K, x, first_column, n, cols, step * TILE_K);
    }

    DEVICE void add_slot(uint32_t step) {
        const uint32_t* of_w = reinterpret_cast<const uint32_t*>(slots + step % STAGES * SLOT);
        const uint32_t* of_x = of_w + ROWS * TILE_K / 2;
#pragma unroll
        for (uint32_t window = 0; window < TILE_K / 32; window++) {
            uint32_t chunk = window * 4 + lane() % 4;
            Eight a[DOWN][2], b[ACROSS];
#pragma unroll
            for (uint32_t i = 0; i < NEIGHBOURS; i++) a[i / 2][i % 2] = load<uint32_t>(of_w + place<NEIGHBOURS>(warp_row() + i, chunk) / 2);
#pragma unroll
            for (uint32_t j = 0; j < ACROSS; j++) b[j] = load<uint32_t>(of_x + place<1>(warp_column() + j * 8 + lane() / 4, chunk) / 2);
#pragma unroll
            for (uint32_t i = 0; i < DOWN; i++)
#pragma unroll
                for (uint32_t j = 0; j < ACROSS; j++) multiply(part[i][j], a[i][0], a[i][1], b[j]);
        }
    }

    DEVICE void end_segment() {
#pragma unroll
        for (uint32_t i = 0; i < DOWN * ACROSS * 4; i++) {
            total[i / 4 / ACROSS][i / 4 % ACROSS][i % 4] += part[i / 4 / ACROSS][i / 4 % ACROSS][i % 4];
            part[i / 4 / ACROSS][i / 4 % ACROSS][i % 4] = 0.0f;
        }
    }

    template <class T> DEVICE void write(const bf16* bias, T* out) {
        uint32_t row = first_row + warp_row(), count = row < rows ? rows - row : 0;
        bool aligned = rows % NEIGHBOURS == 0;
        float added[NEIGHBOURS];
#pragma unroll
        for (uint32_t i = 0; i < NEIGHBOURS; i++) added[i] = i < count ? bias_of(bias, row + i) : 0.0f;
#pragma unroll
        for (uint32_t j = 0; j < ACROSS * 2; j++) {
            uint32_t token = first_column + warp_column() + j / 2 * 8 + lane() % 4 * 2 + j % 2;
            float values[NEIGHBOURS];
#pragma unroll
            for (uint32_t i = 0; i < NEIGHBOURS; i++) values[i] = total[i / 2][j / 2][i % 2 * 2 + j % 2] + added[i];
            if (token < n) put(out + static_cast<size_t>(token) * rows + row, values, count, aligned);
        }
    }

    // The block's tile, 8 tiles of x at a time.
    DEVICE void choose() {
        constexpr uint32_t GROUP = 8;
        uint32_t down = (rows + ROWS - 1) / ROWS, across = (n + COLUMNS - 1) / COLUMNS;
        uint32_t group = blockIdx.x / (GROUP * down) * GROUP, inside = blockIdx.x % (GROUP * down), width = min(GROUP, across - group);
        first_column = (group + inside % width) * COLUMNS;
        first_row = inside / width * ROWS;
    }

    DEVICE void run() {
        choose();
        uint32_t steps = (cols + TILE_K - 1) / TILE_K, ends = segment(cols) / TILE_K;
        for (uint32_t step = 0; step < STAGES - 1; step++) {
            if (step < steps) start(step);
            copy_commit();
        }
        for (uint32_t step = 0; step < steps; step++) {
            copy_wait<STAGES - 2>();
            // All threads' copies of this slot have landed, and the slot before it has been read.
            __syncthreads();
            if (step + STAGES - 1 < steps) start(step + STAGES - 1);
            copy_commit();
            add_slot(step);
            if ((step + 1) % ends == 0 || step + 1 == steps) end_segment();
        }
    }
};

template <uint32_t ROWS, uint32_t COLUMNS, uint32_t WARPS_DOWN, uint32_t WARPS_ACROSS, uint32_t STAGES>
DEVICE void gemm(const bf16* x, const bf16* w, const bf16* bias, void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    Tile<ROWS, COLUMNS, WARPS_DOWN, WARPS_ACROSS, STAGES> tile{x, w, n, rows, cols, 0, 0, dynamic_shared<bf16>(), {}, {}};
    tile.run();
    if (wide != 0) tile.write(bias, static_cast<float*>(out));
    else tile.write(bias, static_cast<bf16*>(out));
}

// ---- dot

template <class T>
DEVICE void dot(const T* x, const T* w, const T* bias, void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    constexpr uint32_t TOKENS = 8, WARPS = 4;
    uint32_t row = blockIdx.x * WARPS + warp(), first = blockIdx.y * TOKENS, count = min(TOKENS, n - first);
    if (row >= rows) return;
    const T* weights = w + static_cast<size_t>(row) * cols;
    float sums[TOKENS] = {};
    for (uint32_t k = lane(); k < cols; k += WARP) {
        float weight = to_float(weights[k]);
#pragma unroll
        for (uint32_t i = 0; i < TOKENS; i++) sums[i] += weight * to_float(x[static_cast<size_t>(first + min(i, count - 1)) * cols + k]);
    }
#pragma unroll
    for (uint32_t i = 0; i < TOKENS; i++) {
        float sum = warp_sum(sums[i]) + (bias == nullptr ? 0.0f : to_float(bias[row]));
        if (lane() != 0 || i >= count) continue;
        size_t at = static_cast<size_t>(first + i) * rows + row;
        if (wide != 0) static_cast<float*>(out)[at] = sum;
        else static_cast<T*>(out)[at] = from_float<T>(sum);
    }
}

}  // namespace

// `wide`: out is f32.
KERNEL __launch_bounds__(256) gemv_bf16(const bf16* x, const bf16* w, const bf16* bias, void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    gemv(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(gemv_bf16)
KERNEL __launch_bounds__(128) gemm_32x32_bf16(const bf16* x, const bf16* w, const bf16* bias, void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    gemm<32, 32, 2, 2, 12>(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(gemm_32x32_bf16)
KERNEL __launch_bounds__(128) gemm_32x64_bf16(const bf16* x, const bf16* w, const bf16* bias, void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    gemm<32, 64, 2, 2, 8>(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(gemm_32x64_bf16)
KERNEL __launch_bounds__(128) gemm_64x64_bf16(const bf16* x, const bf16* w, const bf16* bias, void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    gemm<64, 64, 2, 2, 6>(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(gemm_64x64_bf16)
KERNEL __launch_bounds__(256) gemm_128x128_bf16(const bf16* x, const bf16* w, const bf16* bias, void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    gemm<128, 128, 2, 4, 4>(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(gemm_128x128_bf16)
KERNEL __launch_bounds__(128) dot_bf16(const bf16* x, const bf16* w, const bf16* bias, void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    dot(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(dot_bf16)
KERNEL __launch_bounds__(128) dot_f32(const float* x, const float* w, const float* bias, void* out, uint32_t wide, uint32_t n, uint32_t rows, uint32_t cols) {
    dot(x, w, bias, out, wide, n, rows, cols);
}
EXPORT(dot_f32)
