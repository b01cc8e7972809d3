// The operands of products whose activations have eight bits (rounded_rows.cuh tells how rows are
// rounded).
//
// round_rows: out[n, cols] = rounded x[n, cols], both bf16: for the kernels that multiply bf16.
// code_rows: codes[n, cols] of x, and scales[groups, n] in f32: each row's power of two, for each
//   group of columns once more, as the library wants it.
//   Grid of both: a block of 256 threads for each row, which it reads twice, the second time from
//   the cache. Bytes moved a row: 2 cols read, 2 cols or cols written. At one row it is bound by
//   latency, as the norms are. Considered: a warp a row, which would read a long row alone in more
//   than 50 steps.
// unpack: codes[rows, cols] of w in the packed form with groups of 128 columns (packed.cuh), row by
//   row, and scales[groups, rows] in f32: those of each group of columns, or of the first alone.
//   A block of 4 warps takes 4 tiles of a band, and turns them in shared memory, so that four lanes
//   write 64 bytes of a row at once. Bytes: those of the packed form, and about as many written.
// scale_rows: out[n, rows], with `stride` from one row to the next, times scales of x[n] and of
//   w[rows], plus bias[rows], in place: for products of codes whose scales the library does not
//   apply, which is so on every card but those of sm_90. Each value is then rounded twice.
//   Grid: (n, rows / (256 threads × one 16-byte vector)). Bytes: 4 n rows. Predicted for an RTX
//   4090: 8192 rows of gate-up 1.0 ms, beside 5.8 ms of the product.
#include "linear/rounded_rows.cuh"
#include "linear/packed.cuh"

namespace {

constexpr uint32_t THREADS = 256, WARPS = 4;
constexpr uint32_t GROUP_COLUMNS = 128;
constexpr uint32_t PADDED = TILE_COLUMNS + 16;  // bytes from a row of a tile to the next

DEVICE void round_rows(const bf16* x, bf16* out, uint32_t cols) {
    launch_dependents_and_wait();
    size_t row = static_cast<size_t>(blockIdx.x) * cols;
    round_row_to<THREADS>(out + row, x + row, cols);
}

DEVICE void code_rows(
    const bf16* x, uint8_t* codes, float* scales, uint32_t cols, uint32_t groups) {
    launch_dependents_and_wait();
    size_t row = static_cast<size_t>(blockIdx.x) * cols;
    x += row, codes += row;
    round_row<THREADS>(
        x, cols, [&](uint32_t at, const Vec<bf16, 8>& values, const RowRounding& rounding) {
            Vec<uint8_t, 8> eight;
#pragma unroll
            for (uint32_t j = 0; j < 8; j++)
                eight.at[j] = static_cast<uint8_t>(rounding.code(values.at[j]));
            store(codes + at, eight);
            uint32_t group = at / GROUP_COLUMNS;
            if (at % GROUP_COLUMNS == 0 && group < groups)
                scales[static_cast<size_t>(group) * gridDim.x + blockIdx.x] = rounding.scale();
        });
}

// Puts a lane's codes of a tile in their places: a word has those of two neighbouring columns in
// two rows.
DEVICE void spread_tile(uint8_t* to, const unsigned char* tile) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(tile);
#pragma unroll
    for (uint32_t step = 0; step < TILE_COLUMNS / 16; step++) {
        Vec<uint32_t, 4> four = load<uint32_t, 4>(words + (step * WARP + lane()) * 4);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t word = four.at[i], row = lane() / 4 * 4 + i / 2 * 2,
                     column = step * 16 + i % 2 * 8 + lane() % 4 * 2;
            uint16_t* at = reinterpret_cast<uint16_t*>(to + row * PADDED + column);
            at[0] = static_cast<uint16_t>((word & 0xffu) | (word >> 8 & 0xff00u));
            at[PADDED / 2] = static_cast<uint16_t>((word >> 8 & 0xffu) | (word >> 16 & 0xff00u));
        }
    }
}

DEVICE void unpack(const unsigned char* w, uint8_t* codes, float* scales, uint32_t rows,
    uint32_t cols, uint32_t groups) {
    SHARED(uint8_t, tiles, WARPS* TILE_ROWS* PADDED);
    launch_dependents_and_wait();
    uint32_t first = blockIdx.x * TILE_ROWS, k = (blockIdx.y * WARPS + warp()) * TILE_COLUMNS;
    if (k >= cols) return;
    using Format = PackedFormat<8, true, HEADERS, false>;
    PackedBand<Format> band(w, blockIdx.x, cols, Format{GROUP_COLUMNS, 4});
    uint8_t* tile = tiles + warp() * TILE_ROWS * PADDED;
    spread_tile(tile, band.tile(k));
    uint32_t group = k / GROUP_COLUMNS;
    if (k % GROUP_COLUMNS == 0 && group < groups && first + lane() < rows) {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(band.header(k));
        scales[static_cast<size_t>(group) * rows + first + lane()] =
            half_to_float(halves[lane()]) * HEADER_UNIT;
    }
    __syncwarp();
    uint32_t column = lane() % 4 * 16;
    for (uint32_t row = lane() / 4; row < TILE_ROWS && first + row < rows; row += 8)
        store(codes + static_cast<size_t>(first + row) * cols + k + column,
            load(tile + row * PADDED + column));
}

DEVICE void scale_rows(bf16* out, const float* of_x, const float* of_w, const bf16* bias,
    uint32_t rows, uint32_t stride) {
    launch_dependents_and_wait();
    uint32_t first = (blockIdx.y * THREADS + threadIdx.x) * PER_VEC<bf16>;
    if (first >= rows) return;
    out += static_cast<size_t>(blockIdx.x) * stride + first;
    float scale = of_x[blockIdx.x];
    Vec<bf16, 8> values = load(out);
#pragma unroll
    for (uint32_t j = 0; j < 8; j++) {
        float value = to_float(values.at[j]) * scale * of_w[first + j];
        if (bias != nullptr) value += to_float(bias[first + j]);
        values.at[j] = from_float<bf16>(value);
    }
    store(out, values);
}

}  // namespace

KERNEL(round_rows_bf16, __launch_bounds__(256), const bf16* x, bf16* out, uint32_t cols) {
    round_rows(x, out, cols);
}
KERNEL(code_rows_bf16, __launch_bounds__(256), const bf16* x, uint8_t* codes, float* scales,
    uint32_t cols, uint32_t groups) {
    code_rows(x, codes, scales, cols, groups);
}
KERNEL(unpack_u8, __launch_bounds__(128), const unsigned char* w, uint8_t* codes, float* scales,
    uint32_t rows, uint32_t cols, uint32_t groups) {
    unpack(w, codes, scales, rows, cols, groups);
}
KERNEL(scale_rows_bf16, __launch_bounds__(256), bf16* out, const float* of_x, const float* of_w,
    const bf16* bias, uint32_t rows, uint32_t stride) {
    scale_rows(out, of_x, of_w, bias, rows, stride);
}
