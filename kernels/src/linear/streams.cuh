// The two ways of a product on tensor cores, for weights in any form: gemv for few rows of x and
// gemm for any number. linear.cu describes them, and how sums are ordered.
//
// `Weights` is the form of w. It has SEGMENTS, the ranges of the columns, ROW_BYTES, the bytes of a
// row in a slot, and
//   copy<COUNT, PERIOD, THREADS>(slot, first, k): starts the copy of COUNT rows, zeros beyond the
//     matrix
//   Copies<COUNT, PERIOD, THREADS>(w, first, k): the copies of COUNT rows inside the matrix, of one
//     slot after the other, each started by next(slot, column)
//   prefetch_columns<ROWS>(first, k, end): asks for up to PREFETCH_COLUMNS of rows, before earlier
//     launches end; not called where that number is 0
//   LATE: whether the next launch may start only when a block has begun its last rows
//   multiply<SPREAD>(acc, slot, x, after_reads): adds the products of a slot's columns: 16 W_TILES
//     rows of w by 8 X_TILES of x, of which SPREAD neighbours are the same row. With g = lane / 4
//     and t = lane % 4, value v of acc[i][j] belongs to row 2 W_TILES g + 2 i + v / 2 of w and row
//     8 j + 2 t + v % 2 of x. `after_reads` is called behind the last reading of the slot, so that
//     its instructions are scheduled among the products.
// `Rows` says which rows are multiplied: `count` of them, of which the i-th begins at input(i) of
// `values` and gives the row output(i) of the result.
#pragma once

#include "common.cuh"

namespace {

constexpr uint32_t TILE_K = 64, DENSE_SEGMENTS = 8;
constexpr uint32_t X_ROW_BYTES = TILE_K * sizeof(bf16);

// Columns of a range; the last ranges may have fewer.
template <uint32_t SEGMENTS = DENSE_SEGMENTS>
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

// How THREADS threads share the 16-byte chunks of TILE_K columns of some rows: a thread has the
// same chunk of a row in each round. The chunks of row r are permuted by r / PERIOD, since
// `ldmatrix` reads rows PERIOD apart.
template <uint32_t PERIOD, uint32_t THREADS>
struct Chunks {
    DEVICE static uint32_t row(uint32_t round) {
        return threadIdx.x % THREADS / 8 + round * (THREADS / 8);
    }
    // The first column of the chunk.
    DEVICE static uint32_t column() { return threadIdx.x % THREADS % 8 * 8; }
    DEVICE static uint32_t place(uint32_t round) {
        return row(round) * TILE_K + (column() ^ (row(round) / PERIOD % 8 * 8));
    }
};

struct InOrder {
    DEVICE uint32_t operator()(uint32_t i) const { return i; }
};

// Starts the copy of TILE_K columns from `k` on of COUNT rows from `first` on, by THREADS threads;
// rows and columns beyond the matrix become zeros. Row r of the slot is row `order(r)` of them.
// gemm copies so: it has no registers for what TileCopies keeps.
template <uint32_t COUNT, uint32_t PERIOD, uint32_t THREADS, class Rows, class Order = InOrder>
DEVICE void copy_tile(
    bf16* to, const Rows& from, uint32_t first, uint32_t cols, uint32_t k, Order order = {}) {
    static_assert(COUNT * 8 % THREADS == 0);
    using Own = Chunks<PERIOD, THREADS>;
    uint32_t column = k + Own::column();
#pragma unroll
    for (uint32_t i = 0; i < COUNT * 8 / THREADS; i++) {
        uint32_t row = first + order(Own::row(i));
        bool valid = row < from.count && column < cols;
        copy_async(to + Own::place(i), from.values + (valid ? from.input(row) + column : 0), valid);
    }
}

// The same copies of the same rows again and again. Where a thread reads in each row is kept in
// registers, in values from the first one's, and not calculated each time.
template <uint32_t COUNT, uint32_t PERIOD, uint32_t THREADS, bool READ_ONCE = false>
struct TileCopies {
    static_assert(COUNT * 8 % THREADS == 0);
    using Own = Chunks<PERIOD, THREADS>;

    const bf16* values;
    uint32_t from[COUNT * 8 / THREADS];
    uint32_t count, cols;
    uint64_t cache_policy;

    template <class Rows>
    DEVICE TileCopies(const Rows& rows, uint32_t cols_)
        : values(rows.values), count(rows.count), cols(cols_) {
        if constexpr (READ_ONCE) cache_policy = read_once();
#pragma unroll
        for (uint32_t i = 0; i < COUNT * 8 / THREADS; i++) {
            size_t at = Own::row(i) < count ? rows.input(Own::row(i)) : 0;
            from[i] = static_cast<uint32_t>(at) + Own::column();
        }
    }
    // Starts the copy of the columns from `k` on.
    DEVICE void start(bf16* to, uint32_t k) const {
        bool valid = k + Own::column() < cols;
#pragma unroll
        for (uint32_t i = 0; i < COUNT * 8 / THREADS; i++) {
            bool inside = valid && Own::row(i) < count;
            if constexpr (READ_ONCE)
                copy_async(to + Own::place(i), values + (from[i] + k), inside, cache_policy);
            else
                copy_async(to + Own::place(i), values + (from[i] + k), inside);
        }
    }
};

DEVICE float bias_of(const bf16* bias, uint32_t row) {
    return bias == nullptr ? 0.0f : to_float(bias[row]);
}

// ---- gemv

// The work of a block: ROWS of w at a time, and up to TOKENS rows of x. A warp takes some of the
// ranges of the columns, each with sums of its own.
template <class Weights, class Rows, uint32_t ROWS, uint32_t TOKENS, uint32_t STAGES>
struct Gemv {
    static constexpr uint32_t SEGMENTS = Weights::SEGMENTS, W_BYTES = ROWS * Weights::ROW_BYTES,
                              SLOT = W_BYTES + TOKENS * X_ROW_BYTES;
    // The tensor core multiplies eight rows of x at least. Four of them take two columns each, of
    // which the second ones' sums are left out.
    static constexpr uint32_t SPREAD = TOKENS < 8 ? 8 / TOKENS : 1, X_TILES = TOKENS * SPREAD / 8;
    static constexpr uint32_t TILE_VALUES = 4 / SPREAD,  // sums of a lane in a tile
        VALUES = ROWS / 16 * X_TILES * TILE_VALUES;      // and in all
    using WeightCopies = typename Weights::template Copies<ROWS, ROWS / 8, WARP>;
    using XCopies = TileCopies<TOKENS, 1, WARP>;

    Rows x;
    Weights w;
    uint32_t rows, cols, stride;

    DEVICE static uint32_t warps() { return blockDim.x / WARP; }
    DEVICE uint32_t begin_of(uint32_t segment) const {
        return min(segment * segment_columns<SEGMENTS>(cols), cols);
    }

    // A position in the warp's sequence of slots, which runs over its ranges of all tiles of the
    // block. Nothing is copied for positions beyond the last one.
    struct Position {
        uint32_t row, segment, k, end, slot;
    };
    DEVICE Position first_position() const {
        return {blockIdx.x * ROWS, warp(), begin_of(warp()), begin_of(warp() + 1), 0};
    }
    // The last ranges may be empty.
    DEVICE bool is_inside(const Position& at) const { return at.row < rows && at.k < at.end; }
    DEVICE static uint32_t next_slot(uint32_t slot) {
        return slot == (STAGES - 1) * SLOT ? 0 : slot + SLOT;
    }
    // Goes to the next slot; calls `jump` where its tile is not the next one of the same range.
    template <class Jump>
    DEVICE void advance(Position& at, Jump jump) const {
        at.slot = next_slot(at.slot), at.k += TILE_K;
        if (at.k < at.end) return;
        at.segment += warps();
        if (at.segment >= SEGMENTS || begin_of(at.segment) == cols)
            at.segment = warp(), at.row += gridDim.x * ROWS;
        at.k = begin_of(at.segment), at.end = begin_of(at.segment + 1);
        if (is_inside(at)) jump();
    }

    DEVICE static unsigned char* slot(uint32_t offset) {
        return dynamic_shared<unsigned char>() + warp() * STAGES * SLOT + offset;
    }
    DEVICE static bf16* x_of(uint32_t offset) {
        return reinterpret_cast<bf16*>(slot(offset) + W_BYTES);
    }
    DEVICE WeightCopies weight_copies(const Position& at) const {
        return {w, min(at.row, rows - 1), min(at.k, cols - 1)};
    }

    // Starts the copies of w for the first slots, before x may be read. What follows, for which the
    // slots have no room, comes as far as the second-level cache: columns of this band, and of the
    // next one if those are few.
    DEVICE void start_w(Position& at, WeightCopies& copies) const {
        if (!Weights::LATE) launch_dependents();
        uint32_t row = at.row, begin = at.k, end = at.end;
        for (uint32_t i = 0; i < STAGES - 1; i++) {
            if (is_inside(at)) copies.next(slot(at.slot), at.k);
            advance(at, [&] { copies = weight_copies(at); });
        }
        if constexpr (Weights::PREFETCH_COLUMNS > 0) prefetch_w(row, begin, end);
    }
    DEVICE void prefetch_w(uint32_t row, uint32_t begin, uint32_t end) const {
        uint32_t k = min(begin + (STAGES - 1) * TILE_K, end);
        if (row < rows && k < end) w.template prefetch_columns<ROWS>(row, k, end);
        row += gridDim.x * ROWS;
        if (row < rows && end - k < Weights::PREFETCH_COLUMNS && begin < end)
            w.template prefetch_columns<ROWS>(row, begin, end);
    }
    DEVICE void start_x(Position at, const XCopies& copies) const {
        for (uint32_t i = 0; i < STAGES - 1; i++) {
            if (is_inside(at)) copies.start(x_of(at.slot), at.k);
            copy_commit();
            advance(at, [] {});
        }
    }

    // Adds the ranges' sums and writes the outputs. Warps share the lanes' values.
    DEVICE void finish(
        uint32_t first, const float* sums, const bf16* bias, void* out, uint32_t f32_out) const {
        for (uint32_t value = warp(); value < VALUES; value += warps()) {
            float sum = 0.0f;
            for (uint32_t s = 0; s < SEGMENTS; s++)
                sum += sums[(s * VALUES + value) * WARP + lane()];
            uint32_t i = value / TILE_VALUES / X_TILES, j = value / TILE_VALUES % X_TILES,
                     v = value % TILE_VALUES * SPREAD;
            uint32_t row = first + lane() / 4 * (ROWS / 8) + i * 2 + v / 2,
                     token = (j * 8 + lane() % 4 * 2 + v % 2) / SPREAD;
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
            reinterpret_cast<float*>(dynamic_shared<unsigned char>() + warps() * STAGES * SLOT);
        Position first_slot = first_position(), next = first_slot;
        WeightCopies w_copies = weight_copies(next);
        start_w(next, w_copies);
        wait_for_earlier_launches();
        // Which rows of x these are may be the result of an earlier launch.
        XCopies x_copies(x, cols);
        start_x(first_slot, x_copies);
        uint32_t current = 0;
        for (uint32_t first = blockIdx.x * ROWS; first < rows; first += gridDim.x * ROWS) {
            if (Weights::LATE && first + gridDim.x * ROWS >= rows) launch_dependents();
            for (uint32_t segment = warp(); segment < SEGMENTS; segment += warps()) {
                float acc[ROWS / 16][X_TILES][4] = {};
                uint32_t end = begin_of(segment + 1);
                for (uint32_t k = begin_of(segment); k < end;
                    k += TILE_K, current = next_slot(current)) {
                    copy_wait<STAGES - 2>();
                    // All lanes' copies of this slot have landed, and the slot before it has been
                    // read.
                    __syncwarp();
                    if (is_inside(next)) {
                        w_copies.next(slot(next.slot), next.k);
                        x_copies.start(x_of(next.slot), next.k);
                    }
                    copy_commit();
                    advance(next, [&] { w_copies = weight_copies(next); });
                    w.template multiply<SPREAD>(acc, slot(current), x_of(current), [] {});
                }
                // The sums of the tile before have been read.
                if (segment == warp()) __syncthreads();
#pragma unroll
                for (uint32_t v = 0; v < VALUES; v++)
                    sums[(segment * VALUES + v) * WARP + lane()] =
                        acc[v / TILE_VALUES / X_TILES][v / TILE_VALUES % X_TILES]
                           [v % TILE_VALUES * SPREAD];
            }
            __syncthreads();
            finish(first, sums, bias, out, f32_out);
        }
    }
};

template <uint32_t ROWS, uint32_t TOKENS, uint32_t STAGES, class Rows, class Weights>
DEVICE void gemv(const Rows& x, const Weights& w, const bf16* bias, void* out, uint32_t f32_out,
    uint32_t rows, uint32_t cols, uint32_t stride) {
    Gemv<Weights, Rows, ROWS, TOKENS, STAGES>{x, w, rows, cols, stride}.run(bias, out, f32_out);
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
        uint32_t steps = (cols + TILE_K - 1) / TILE_K,
                 segment = segment_columns<Weights::SEGMENTS>(cols) / TILE_K, end = segment;
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
            w.template multiply<1>(acc, slot + warp_row() * Weights::ROW_BYTES, columns, [&] {
                copy_w(step + STAGES - 1);
                copy_x(step + STAGES - 1);
            });
            if (++step == end) end_segment(), end += segment;
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
