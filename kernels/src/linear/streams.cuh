// The two ways of a product on tensor cores, for weights in any form: gemv for few rows of x and
// gemm for any number. linear.cu describes them, and how sums are ordered.
//
// `Weights` is the form of w. It has ROW_BYTES, the bytes of a row in a slot, and
//   copy<COUNT, PERIOD, THREADS>(slot, first, k): starts the copy of COUNT rows, zeros beyond the
//     matrix
//   prefetch_columns(first, k, end): asks for what follows in 32 rows, before earlier launches end
//   multiply(acc, slot, x, after_reads): adds the products of a slot's columns: 16 W_TILES rows of
//     w by 8 X_TILES of x. With g = lane / 4 and t = lane % 4, value v of acc[i][j] belongs to row
//     2 W_TILES g + 2 i + v / 2 of w and row 8 j + 2 t + v % 2 of x. `after_reads` is called behind
//     the last reading of the slot, so that its instructions are scheduled among the products.
// `Rows` says which rows are multiplied: `count` of them, of which the i-th begins at input(i) of
// `values` and gives the row output(i) of the result.
#pragma once

#include "common.cuh"

namespace {

constexpr uint32_t SEGMENTS = 8, TILE_K = 64;
constexpr uint32_t X_ROW_BYTES = TILE_K * sizeof(bf16);

// Columns of a range; the last ranges may have fewer.
DEVICE uint32_t segment_columns(uint32_t cols) {
    constexpr uint32_t WHOLE = SEGMENTS * TILE_K;
    return (cols + WHOLE - 1) / WHOLE * TILE_K;
}

// Rows at equal distances.
struct AllRows {
    const bf16* values;
    uint32_t count, stride;

    DEVICE size_t input(uint32_t i) const { return static_cast<size_t>(i) * stride; }
    DEVICE uint32_t output(uint32_t i) const { return i; }
};

struct InOrder {
    DEVICE uint32_t operator()(uint32_t i) const { return i; }
};

// Starts the copy of TILE_K columns from `k` on of COUNT rows from `first` on, by THREADS threads;
// rows and columns beyond the matrix become zeros. Row r of the slot is row `order(r)` of them. Its
// chunks are permuted by r / PERIOD, since `ldmatrix` reads rows PERIOD apart.
template <uint32_t COUNT, uint32_t PERIOD, uint32_t THREADS, class Rows, class Order = InOrder>
DEVICE void copy_tile(
    bf16* to, const Rows& from, uint32_t first, uint32_t cols, uint32_t k, Order order = {}) {
    static_assert(COUNT * 8 % THREADS == 0);
    uint32_t thread = threadIdx.x % THREADS, chunk = thread % 8, column = k + chunk * 8;
#pragma unroll
    for (uint32_t i = 0; i < COUNT * 8 / THREADS; i++) {
        uint32_t row = thread / 8 + i * (THREADS / 8);
        uint32_t source = first + order(row);
        bool valid = source < from.count && column < cols;
        size_t at = valid ? from.input(source) + column : 0;
        copy_async(to + row * TILE_K + (chunk ^ (row / PERIOD % 8)) * 8, from.values + at, valid);
    }
}

DEVICE float bias_of(const bf16* bias, uint32_t row) {
    return bias == nullptr ? 0.0f : to_float(bias[row]);
}

// ---- gemv

// The work of a warp: ROWS of w at a time, its range of the columns, and up to TOKENS rows of x.
template <class Weights, class Rows, uint32_t TOKENS, uint32_t STAGES>
struct Gemv {
    static constexpr uint32_t ROWS = 32, W_BYTES = ROWS * Weights::ROW_BYTES,
                              SLOT = W_BYTES + TOKENS * X_ROW_BYTES;
    static constexpr uint32_t VALUES = ROWS * TOKENS / WARP;  // sums of a lane

    Rows x;
    Weights w;
    uint32_t rows, cols, stride, begin, end;  // begin and end of the warp's columns

    DEVICE unsigned char* slot(uint32_t count) const {
        return dynamic_shared<unsigned char>() + (warp() * STAGES + count % STAGES) * SLOT;
    }
    DEVICE bf16* x_of(uint32_t count) const {
        return reinterpret_cast<bf16*>(slot(count) + W_BYTES);
    }

    // A position in the warp's sequence of slots, which runs over all tiles of the block. Nothing
    // is copied for positions beyond the last one.
    struct Position {
        uint32_t count, row, k;
    };
    DEVICE bool is_inside(const Position& at) const { return at.row < rows && begin < end; }
    DEVICE void copy_w(const Position& at) const {
        if (is_inside(at)) w.template copy<ROWS, 4, WARP>(slot(at.count), at.row, at.k);
    }
    DEVICE void copy_x(const Position& at) const {
        if (is_inside(at)) copy_tile<TOKENS, 1, WARP>(x_of(at.count), x, 0, cols, at.k);
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
        uint32_t k = begin + (STAGES - 1) * TILE_K;
        if (next.row < rows && k < end) w.prefetch_columns(next.row, k, end);
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
            if (row >= rows || token >= x.count) continue;
            sum += bias_of(bias, row);
            size_t at = static_cast<size_t>(x.output(token)) * stride + row;
            if (f32_out != 0)
                static_cast<float*>(out)[at] = sum;
            else
                static_cast<bf16*>(out)[at] = from_float<bf16>(sum);
        }
    }

    DEVICE void run(const bf16* bias, void* out, uint32_t f32_out) {
        float* sums =
            reinterpret_cast<float*>(dynamic_shared<unsigned char>() + SEGMENTS * STAGES * SLOT);
        Position next = start();
        uint32_t count = 0;
        for (uint32_t first = blockIdx.x * ROWS; first < rows; first += gridDim.x * ROWS) {
            float acc[ROWS / 16][TOKENS / 8][4] = {};
            for (uint32_t k = begin; k < end; k += TILE_K, count++) {
                copy_wait<STAGES - 2>();
                // All lanes' copies of this slot have landed, and the slot before it has been read.
                __syncwarp();
                copy_w(next), copy_x(next), advance(next);
                w.multiply(acc, slot(count), x_of(count), [] {});
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

template <uint32_t TOKENS, uint32_t STAGES, class Rows, class Weights>
DEVICE void gemv(const Rows& x, const Weights& w, const bf16* bias, void* out, uint32_t f32_out,
    uint32_t rows, uint32_t cols, uint32_t stride) {
    uint32_t begin = min(warp() * segment_columns(cols), cols),
             end = min(begin + segment_columns(cols), cols);
    Gemv<Weights, Rows, TOKENS, STAGES>{x, w, rows, cols, stride, begin, end}.run(
        bias, out, f32_out);
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

// Where tiles of w and of x meet.
struct TilePlace {
    uint32_t w, x;
};

// The place of the tile with this number. They go over all of w for 8 tiles of x at a time.
DEVICE TilePlace place_of_tile(uint32_t number, uint32_t w_tiles, uint32_t x_tiles) {
    constexpr uint32_t GROUP = 8;
    uint32_t group = number / (GROUP * w_tiles) * GROUP, inside = number % (GROUP * w_tiles),
             width = min(GROUP, x_tiles - group);
    return {inside / width, group + inside % width};
}

// A block's tile of ROWS rows of w by COLUMNS rows of x, cut into W_WARPS × X_WARPS warps.
template <class Weights, class Rows, uint32_t ROWS, uint32_t COLUMNS, uint32_t W_WARPS,
    uint32_t X_WARPS, uint32_t STAGES>
struct GemmTile {
    static constexpr uint32_t THREADS = W_WARPS * X_WARPS * WARP,
                              W_BYTES = ROWS * Weights::ROW_BYTES,
                              SLOT = W_BYTES + COLUMNS * X_ROW_BYTES;
    static constexpr uint32_t W_TILES = ROWS / W_WARPS / 16,
                              X_TILES = COLUMNS / X_WARPS / 8;  // MMA tiles of a warp
    static constexpr uint32_t LANE_ROWS = 2 * W_TILES;          // rows of w that a lane has

    Rows x;
    Weights w;
    uint32_t rows, cols, stride, first_row, first_column;
    unsigned char* slots;
    float acc[W_TILES][X_TILES][4], total[W_TILES][X_TILES][4];

    DEVICE uint32_t warp_row() const { return warp() / X_WARPS * W_TILES * 16; }
    DEVICE uint32_t warp_column() const { return warp() % X_WARPS * X_TILES * 8; }

    DEVICE void assign_tile() {
        TilePlace at =
            place_of_tile(blockIdx.x, divide_up(rows, ROWS), divide_up(x.count, COLUMNS));
        first_row = at.w * ROWS, first_column = at.x * COLUMNS;
    }

    // There is no branch for steps beyond the last one: their copies read nothing.
    DEVICE void copy_w(uint32_t step) const {
        w.template copy<ROWS, LANE_ROWS, THREADS>(
            slots + step % STAGES * SLOT, first_row, step * TILE_K);
    }
    DEVICE void copy_x(uint32_t step) const {
        bf16* to = reinterpret_cast<bf16*>(slots + (step % STAGES * SLOT + W_BYTES));
        copy_tile<COLUMNS, 1, THREADS>(to, x, first_column, cols, step * TILE_K);
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
        uint32_t steps = (cols + TILE_K - 1) / TILE_K, end = segment_columns(cols) / TILE_K;
        for (uint32_t step = 0; step < STAGES - 1; step++) copy_w(step);
        wait_for_earlier_launches();
        for (uint32_t step = 0; step < STAGES - 1; step++) copy_x(step);
        for (uint32_t step = 0; step < steps;) {
            copy_wait<STAGES - 2>();
            // All threads' copies of this slot have landed, and the slot before it has been read.
            __syncthreads();
            const unsigned char* slot = slots + step % STAGES * SLOT;
            const bf16* columns =
                reinterpret_cast<const bf16*>(slot + W_BYTES + warp_column() * X_ROW_BYTES);
            w.multiply(acc, slot + warp_row() * Weights::ROW_BYTES, columns, [&] {
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

    DEVICE void write(const bf16* bias, void* out, uint32_t f32_out) {
        if (f32_out != 0)
            write_as(bias, static_cast<float*>(out));
        else
            write_as(bias, static_cast<bf16*>(out));
    }

  private:
    template <class T>
    DEVICE void write_as(const bf16* bias, T* out) {
        uint32_t row = first_row + warp_row() + lane() / 4 * LANE_ROWS,
                 count = row < rows ? rows - row : 0;
        bool aligned = stride % LANE_ROWS == 0 &&
                       reinterpret_cast<uintptr_t>(out) % (LANE_ROWS * sizeof(T)) == 0;
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
            if (token < x.count)
                store_outputs(out + static_cast<size_t>(x.output(token)) * stride + row, values,
                    count, aligned);
        }
    }
};

template <uint32_t ROWS, uint32_t COLUMNS, uint32_t W_WARPS, uint32_t X_WARPS, uint32_t STAGES,
    class Rows, class Weights>
DEVICE void gemm(const Rows& x, const Weights& w, const bf16* bias, void* out, uint32_t f32_out,
    uint32_t rows, uint32_t cols, uint32_t stride) {
    GemmTile<Weights, Rows, ROWS, COLUMNS, W_WARPS, X_WARPS, STAGES> tile{
        x, w, rows, cols, stride, 0, 0, dynamic_shared<unsigned char>(), {}, {}};
    tile.assign_tile();
    tile.run();
    tile.write(bias, out, f32_out);
}

}  // namespace
