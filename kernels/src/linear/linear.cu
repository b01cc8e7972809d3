// out[n, rows] = x[n, cols] · wᵀ (+ bias), w: [rows, cols]; sums in f32; out in the operands' type
// or f32.
//
// Every output of the tensor-core kernels (bf16, cols a multiple of 8) is summed in one order,
// whatever n and the kernel are: cols are cut into SEGMENTS ranges of whole TILE_Ks, each range is
// summed from zero by products of 16 columns in ascending order, and the ranges' sums are added in
// order. So a row has the same bits alone and among any other rows, if a tensor core computes all
// elements of its tile alike.
//
// Both stream tiles of w and x through slots of TILE_K columns in shared memory by asynchronous
// copies. A row of a slot is 128 bytes, all banks; its eight 16-byte chunks are permuted by the
// row's number, so that neither the copies nor `ldmatrix` conflict. Rows of w may be assigned to
// rows of a tensor core's tile in any order: here a lane's values of an x row are neighbouring rows
// of w, so they are stored as vectors.
//
// gemv (n ≤ 8, 16, 32): reads each weight once. A block takes 32 rows of w at a time, each of its 8
//   warps one range of the columns, in slots of its own without barriers; the sums are added in
//   shared memory. One block a multiprocessor goes from tile to tile with its copies always under
//   way:
//   2 of 3 slots of 4 KiB of w a warp, 64 KiB a multiprocessor, 8 MiB in all, where 4.8 TB/s × 0.6
//   µs ask for 3, so half of the multiprocessors suffice when the last tiles are few. x comes from
//   the second-level cache: n / 32 of w's bytes. A warp takes 128 bytes of a row of w at a time;
//   the copies hint at 256, so that the memory is asked for neighbours together (ranges of
//   interleaved columns would do more here, and harm gemm).
//   Three slots a warp take 128 KiB. Cards whose blocks have 99 KiB use two slots for n ≤ 8: 32 KiB
//   under way on each multiprocessor, where the fastest of them need 8.
//   Before the launch waits for earlier ones it fetches the part of w that it needs first: 2 slots
//   a warp, and 512 bytes more of each row as far as the second-level cache: 24 MiB in all, 5 us of
//   the memory's time that norm, rope and attention leave idle. At n ≤ 8 about 180 instructions a
//   warp and 4 KiB of w: a quarter of the issue slots. Considered: multiply-adds in f32 (at n = 8
//   they bind: 8 operations a byte, and unpacking); w from global memory to registers (a lane's 16
//   bytes are of one row, the tensor core's registers of two: three moves a product in the other
//   kernel, for the same order of sums); 16 rows a warp (twice the reading of x). Left out: rows of
//   gate and up in one tile, so that SiLU or GELU and their product are computed from the sums. It
//   would save a launch a layer (about 1 us of 110 at one row of an 8B model) and 6 bytes a value
//   through the second-level cache. To be tried on a device: other values of PREFETCH_COLUMNS, 0
//   among them; w marked to leave the second-level cache first, so that small tensors stay there
//   from layer to layer (at the risk that its own lines push each other out before both halves were
//   used).
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

// Columns of a range; the last ranges may have fewer.
DEVICE uint32_t segment_columns(uint32_t cols) {
    constexpr uint32_t WHOLE = SEGMENTS * TILE_K;
    return (cols + WHOLE - 1) / WHOLE * TILE_K;
}

// Starts the copy of TILE_K columns from `k` on of COUNT rows from `first` on, by THREADS threads;
// rows and columns beyond the matrix become zeros. The chunks of row r are permuted by r / PERIOD,
// since `ldmatrix` reads rows PERIOD apart.
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

// Adds the products of a slot's columns: 16 W_TILES rows of w by 8 X_TILES of x. With g = lane / 4
// and t = lane % 4, value v of acc[i][j] belongs to row 2 W_TILES g + 2 i + v / 2 of w and row 8 j
// + 2 t + v % 2 of x. `after_reads` is called behind the last reading of the slot, so that its
// instructions are scheduled among the products.
template <uint32_t W_TILES, uint32_t X_TILES, class AfterReads>
DEVICE void multiply(
    float (&acc)[W_TILES][X_TILES][4], const bf16* w, const bf16* x, AfterReads after_reads) {
    uint32_t row = lane() % 8, tile = lane() / 8;
    const bf16* w_row = w + (row * 2 * W_TILES + tile % 2) * TILE_K;
    const bf16* x_row = x + row * TILE_K;
#pragma unroll
    for (uint32_t window = 0; window < TILE_K / 32; window++) {
        uint32_t a[2][W_TILES][4], b[X_TILES][4];
#pragma unroll
        for (uint32_t j = 0; j < X_TILES; j++)
            ldmatrix(b[j], x_row + j * 8 * TILE_K + ((window * 4 + tile) ^ row) * 8);
#pragma unroll
        for (uint32_t half = 0; half < 2; half++)
#pragma unroll
            for (uint32_t i = 0; i < W_TILES; i++)
                ldmatrix(a[half][i],
                    w_row + i * 2 * TILE_K + ((window * 4 + half * 2 + tile / 2) ^ row) * 8);
        if (window == TILE_K / 32 - 1) after_reads();
#pragma unroll
        for (uint32_t half = 0; half < 2; half++)
#pragma unroll
            for (uint32_t i = 0; i < W_TILES; i++)
#pragma unroll
                for (uint32_t j = 0; j < X_TILES; j++)
                    mma(acc[i][j], a[half][i], {b[j][half * 2], b[j][half * 2 + 1]});
    }
}

DEVICE float bias_of(const bf16* bias, uint32_t row) {
    return bias == nullptr ? 0.0f : to_float(bias[row]);
}

// ---- gemv

// The work of a warp: ROWS of w at a time, its range of the columns, and up to TOKENS rows of x.
template <uint32_t TOKENS, uint32_t STAGES>
struct Gemv {
    static constexpr uint32_t ROWS = 32, SLOT = (ROWS + TOKENS) * TILE_K;
    static constexpr uint32_t VALUES = ROWS * TOKENS / WARP;  // sums of a lane
    static constexpr uint32_t PREFETCH_COLUMNS = 256;

    const bf16 *x, *w;
    uint32_t n, rows, cols, begin, end;  // begin and end of the warp's columns

    DEVICE bf16* slot(uint32_t count) const {
        return dynamic_shared<bf16>() + (warp() * STAGES + count % STAGES) * SLOT;
    }

    // A position in the warp's sequence of slots, which runs over all tiles of the block. Nothing
    // is copied for positions beyond the last one.
    struct Position {
        uint32_t count, row, k;
    };
    DEVICE bool is_inside(const Position& at) const { return at.row < rows && begin < end; }
    DEVICE void copy_w(const Position& at) const {
        if (is_inside(at)) copy_tile<ROWS, 4, WARP>(slot(at.count), w, at.row, rows, cols, at.k);
    }
    DEVICE void copy_x(const Position& at) const {
        if (is_inside(at))
            copy_tile<TOKENS, 1, WARP>(slot(at.count) + ROWS * TILE_K, x, 0, n, cols, at.k);
        copy_commit();
    }
    DEVICE void advance(Position& at) const {
        at.count++, at.k += TILE_K;
        if (at.k >= end) at.k = begin, at.row += gridDim.x * ROWS;
    }
    // Starts the copies for the first slots, those of w before those of x are allowed to. The part
    // of w for which the slots have no room comes as far as the second-level cache.
    DEVICE Position start() const {
        launch_dependents();
        Position next{0, blockIdx.x * ROWS, begin}, ahead = next;
        for (; ahead.count < STAGES - 1; advance(ahead)) copy_w(ahead);
        uint32_t row = next.row + lane(), k = begin + (STAGES - 1) * TILE_K;
        if (row < rows && k < end)
            prefetch(w + static_cast<size_t>(row) * cols + k,
                min(end - k, PREFETCH_COLUMNS) * sizeof(bf16));
        wait_for_earlier_launches();
        for (; next.count < STAGES - 1; advance(next)) copy_x(next);
        return next;
    }

    // Adds the ranges' sums and writes the outputs: a warp takes every eighth of the lanes' values.
    DEVICE void finish(
        uint32_t first, const float* sums, const bf16* bias, void* out, uint32_t f32_out) const {
        for (uint32_t value = warp(); value < VALUES; value += SEGMENTS) {
            float sum = 0.0f;
            for (uint32_t s = 0; s < SEGMENTS; s++)
                sum += sums[(s * VALUES + value) * WARP + lane()];
            uint32_t i = value / (TOKENS / 2), j = value / 4 % (TOKENS / 8), v = value % 4;
            uint32_t row = first + lane() / 4 * 4 + i * 2 + v / 2,
                     token = j * 8 + lane() % 4 * 2 + v % 2;
            if (row >= rows || token >= n) continue;
            sum += bias_of(bias, row);
            size_t at = static_cast<size_t>(token) * rows + row;
            if (f32_out != 0)
                static_cast<float*>(out)[at] = sum;
            else
                static_cast<bf16*>(out)[at] = from_float<bf16>(sum);
        }
    }

    DEVICE void run(const bf16* bias, void* out, uint32_t f32_out) {
        float* sums = reinterpret_cast<float*>(dynamic_shared<bf16>() + SEGMENTS * STAGES * SLOT);
        Position next = start();
        uint32_t count = 0;
        for (uint32_t first = blockIdx.x * ROWS; first < rows; first += gridDim.x * ROWS) {
            float acc[ROWS / 16][TOKENS / 8][4] = {};
            for (uint32_t k = begin; k < end; k += TILE_K, count++) {
                copy_wait<STAGES - 2>();
                // All lanes' copies of this slot have landed, and the slot before it has been read.
                __syncwarp();
                copy_w(next), copy_x(next), advance(next);
                multiply(acc, slot(count), slot(count) + ROWS * TILE_K, [] {});
            }
            // The sums of the tile before have been read.
            __syncthreads();
#pragma unroll
            for (uint32_t v = 0; v < VALUES; v++)
                sums[(warp() * VALUES + v) * WARP + lane()] =
                    acc[v / (TOKENS / 2)][v / 4 % (TOKENS / 8)][v % 4];
            __syncthreads();
            finish(first, sums, bias, out, f32_out);
        }
    }
};

template <uint32_t TOKENS, uint32_t STAGES = 3>
DEVICE void gemv(const bf16* x, const bf16* w, const bf16* bias, void* out, uint32_t f32_out,
    uint32_t n, uint32_t rows, uint32_t cols) {
    uint32_t begin = min(warp() * segment_columns(cols), cols),
             end = min(begin + segment_columns(cols), cols);
    Gemv<TOKENS, STAGES>{x, w, n, rows, cols, begin, end}.run(bias, out, f32_out);
}

// ---- gemm

// Stores N neighbouring outputs, of which the first `count` are inside the matrix.
template <class T, uint32_t N>
DEVICE void store_outputs(T* out, const float (&values)[N], uint32_t count, bool aligned) {
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

// A block's tile of ROWS rows of w by COLUMNS rows of x, cut into W_WARPS × X_WARPS warps.
template <uint32_t ROWS, uint32_t COLUMNS, uint32_t W_WARPS, uint32_t X_WARPS, uint32_t STAGES>
struct GemmTile {
    static constexpr uint32_t THREADS = W_WARPS * X_WARPS * WARP, SLOT = (ROWS + COLUMNS) * TILE_K;
    static constexpr uint32_t W_TILES = ROWS / W_WARPS / 16,
                              X_TILES = COLUMNS / X_WARPS / 8;  // MMA tiles of a warp
    static constexpr uint32_t LANE_ROWS = 2 * W_TILES;          // rows of w that a lane has

    const bf16 *x, *w;
    uint32_t n, rows, cols, first_row, first_column;
    bf16* slots;
    float acc[W_TILES][X_TILES][4], total[W_TILES][X_TILES][4];

    DEVICE uint32_t warp_row() const { return warp() / X_WARPS * W_TILES * 16; }
    DEVICE uint32_t warp_column() const { return warp() % X_WARPS * X_TILES * 8; }

    // Assigns the block its tile, so that blocks go over w for 8 tiles of x at a time.
    DEVICE void assign_tile() {
        constexpr uint32_t GROUP = 8;
        uint32_t w_tiles = (rows + ROWS - 1) / ROWS, x_tiles = (n + COLUMNS - 1) / COLUMNS;
        uint32_t group = blockIdx.x / (GROUP * w_tiles) * GROUP,
                 inside = blockIdx.x % (GROUP * w_tiles), width = min(GROUP, x_tiles - group);
        first_column = (group + inside % width) * COLUMNS;
        first_row = inside / width * ROWS;
    }

    // There is no branch for steps beyond the last one: their copies read nothing.
    DEVICE void copy_w(uint32_t step) const {
        copy_tile<ROWS, LANE_ROWS, THREADS>(
            slots + step % STAGES * SLOT, w, first_row, rows, cols, step * TILE_K);
    }
    DEVICE void copy_x(uint32_t step) const {
        copy_tile<COLUMNS, 1, THREADS>(slots + (step % STAGES * SLOT + ROWS * TILE_K), x,
            first_column, n, cols, step * TILE_K);
        copy_commit();
    }

    DEVICE void end_segment() {
#pragma unroll
        for (uint32_t i = 0; i < W_TILES; i++)
#pragma unroll
            for (uint32_t j = 0; j < X_TILES; j++)
#pragma unroll
                for (uint32_t v = 0; v < 4; v++)
                    total[i][j][v] += acc[i][j][v], acc[i][j][v] = 0.0f;
    }

    DEVICE void run() {
        launch_dependents();
        assign_tile();
        uint32_t steps = (cols + TILE_K - 1) / TILE_K, end = segment_columns(cols) / TILE_K;
        for (uint32_t step = 0; step < STAGES - 1; step++) copy_w(step);
        wait_for_earlier_launches();
        for (uint32_t step = 0; step < STAGES - 1; step++) copy_x(step);
        for (uint32_t step = 0; step < steps;) {
            copy_wait<STAGES - 2>();
            // All threads' copies of this slot have landed, and the slot before it has been read.
            __syncthreads();
            const bf16* slot = slots + step % STAGES * SLOT;
            multiply(acc, slot + warp_row() * TILE_K, slot + (ROWS + warp_column()) * TILE_K, [&] {
                copy_w(step + STAGES - 1);
                copy_x(step + STAGES - 1);
            });
            if (++step == end) end_segment(), end += segment_columns(cols) / TILE_K;
        }
        // Adds the rest of the last range, or zeros.
        end_segment();
        // A block may not end with copies under way, not even of zeros.
        copy_wait<0>();
    }

    template <class T>
    DEVICE void write(const bf16* bias, T* out) {
        uint32_t row = first_row + warp_row() + lane() / 4 * LANE_ROWS,
                 count = row < rows ? rows - row : 0;
        float added[LANE_ROWS];
#pragma unroll
        for (uint32_t i = 0; i < LANE_ROWS; i++)
            added[i] = i < count ? bias_of(bias, row + i) : 0.0f;
#pragma unroll
        for (uint32_t j = 0; j < X_TILES * 2; j++) {
            uint32_t token = first_column + warp_column() + j / 2 * 8 + lane() % 4 * 2 + j % 2;
            float values[LANE_ROWS];
#pragma unroll
            for (uint32_t i = 0; i < LANE_ROWS; i++)
                values[i] = total[i / 2][j / 2][i % 2 * 2 + j % 2] + added[i];
            if (token < n)
                store_outputs(out + static_cast<size_t>(token) * rows + row, values, count,
                    rows % LANE_ROWS == 0);
        }
    }
};

template <uint32_t ROWS, uint32_t COLUMNS, uint32_t W_WARPS, uint32_t X_WARPS, uint32_t STAGES>
DEVICE void gemm(const bf16* x, const bf16* w, const bf16* bias, void* out, uint32_t f32_out,
    uint32_t n, uint32_t rows, uint32_t cols) {
    GemmTile<ROWS, COLUMNS, W_WARPS, X_WARPS, STAGES> tile{
        x, w, n, rows, cols, 0, 0, dynamic_shared<bf16>(), {}, {}};
    tile.run();
    if (f32_out != 0)
        tile.write(bias, static_cast<float*>(out));
    else
        tile.write(bias, static_cast<bf16*>(out));
}

// ---- dot

template <class T>
DEVICE void dot(const T* x, const T* w, const T* bias, void* out, uint32_t f32_out, uint32_t n,
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
        if (f32_out != 0)
            static_cast<float*>(out)[at] = sum;
        else
            static_cast<T*>(out)[at] = from_float<T>(sum);
    }
}

}  // namespace

// `f32_out`: whether `out` is f32.
KERNEL __launch_bounds__(256) gemv_8_bf16(const bf16* x, const bf16* w, const bf16* bias, void* out,
    uint32_t f32_out, uint32_t n, uint32_t rows, uint32_t cols) {
    gemv<8>(x, w, bias, out, f32_out, n, rows, cols);
}
EXPORT(gemv_8_bf16)
KERNEL __launch_bounds__(256) gemv_8_two_slots_bf16(const bf16* x, const bf16* w, const bf16* bias,
    void* out, uint32_t f32_out, uint32_t n, uint32_t rows, uint32_t cols) {
    gemv<8, 2>(x, w, bias, out, f32_out, n, rows, cols);
}
EXPORT(gemv_8_two_slots_bf16)
KERNEL __launch_bounds__(256) gemv_16_bf16(const bf16* x, const bf16* w, const bf16* bias,
    void* out, uint32_t f32_out, uint32_t n, uint32_t rows, uint32_t cols) {
    gemv<16>(x, w, bias, out, f32_out, n, rows, cols);
}
EXPORT(gemv_16_bf16)
KERNEL __launch_bounds__(256) gemv_32_bf16(const bf16* x, const bf16* w, const bf16* bias,
    void* out, uint32_t f32_out, uint32_t n, uint32_t rows, uint32_t cols) {
    gemv<32>(x, w, bias, out, f32_out, n, rows, cols);
}
EXPORT(gemv_32_bf16)
KERNEL __launch_bounds__(128) gemm_32x64_bf16(const bf16* x, const bf16* w, const bf16* bias,
    void* out, uint32_t f32_out, uint32_t n, uint32_t rows, uint32_t cols) {
    gemm<32, 64, 2, 2, 8>(x, w, bias, out, f32_out, n, rows, cols);
}
EXPORT(gemm_32x64_bf16)
KERNEL __launch_bounds__(128) gemm_64x64_bf16(const bf16* x, const bf16* w, const bf16* bias,
    void* out, uint32_t f32_out, uint32_t n, uint32_t rows, uint32_t cols) {
    gemm<64, 64, 2, 2, 6>(x, w, bias, out, f32_out, n, rows, cols);
}
EXPORT(gemm_64x64_bf16)
KERNEL __launch_bounds__(256) gemm_128x128_bf16(const bf16* x, const bf16* w, const bf16* bias,
    void* out, uint32_t f32_out, uint32_t n, uint32_t rows, uint32_t cols) {
    gemm<128, 128, 2, 4, 4>(x, w, bias, out, f32_out, n, rows, cols);
}
EXPORT(gemm_128x128_bf16)
KERNEL __launch_bounds__(128) dot_bf16(const bf16* x, const bf16* w, const bf16* bias, void* out,
    uint32_t f32_out, uint32_t n, uint32_t rows, uint32_t cols) {
    dot(x, w, bias, out, f32_out, n, rows, cols);
}
EXPORT(dot_bf16)
KERNEL __launch_bounds__(128) dot_f32(const float* x, const float* w, const float* bias, void* out,
    uint32_t f32_out, uint32_t n, uint32_t rows, uint32_t cols) {
    dot(x, w, bias, out, f32_out, n, rows, cols);
}
EXPORT(dot_f32)
