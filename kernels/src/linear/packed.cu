// out[n, rows] = x[n, cols] · wᵀ (+ bias) for block-quantised w in the packed form (packed.cuh),
// and w in bf16 for the library. Activations are bf16, sums f32.
//
// A code less its zero is an integer of at most 8 bits, which bf16 holds exactly, so the tensor
// core multiplies x by the codes themselves. The sums of a group of 32 (6 bits: 16) columns are
// then multiplied by the group's scale and added to those of the groups before; its minimum is
// multiplied by the sum of x over the group, which a product with ones gives in the registers where
// it is needed. So no weight is rounded. Where there are minimums, 128 is left in the codes, and
// the sum of x takes it out with them. Codes that are floats of four or eight bits become bf16 by
// moving their bits and by a product with a power of two, four instructions a pair more than
// integers take. A zero of each group and row is subtracted where the one of the format would be.
// Sums are ordered as linear.cu orders them, but in 16 ranges of the columns, and the same in both
// kernels: a row has the same bits in any batch.
//
// Kernels are made for each number of bits, and branch once, at their beginning, to code for one
// format: deciding the form of scales for each tile took half of all instructions.
//
// gemv_4, gemv_8, gemv_16, gemv_32: those of linear.cu, with one block of 16 warps a
// multiprocessor,
//   each with a range of the columns; gemv_32, and all where shared memory has no room, 8 warps
//   with two ranges each. Matrices of 4096 rows are 128 bands of 32 rows, one for each
//   multiprocessor, where 8 warps waited for their own arithmetic: 20 us for 4096 by 14336 in Q4_K
//   and 26 in Q6_K, where 16 take 12 and 15. A tile of 32 rows by 64 columns lies in the order in
//   which the lanes of a warp need it, so a lane reads its codes in whole vectors of shared memory
//   without conflicts, and no `ldmatrix` moves them. A slot of w has 1.1 to 2.2 KiB in place of 4;
//   two or three a warp under way are 36 to 70 KiB a multiprocessor, where 4.8 TB/s × 0.6 us ask
//   for 22. For 9 to 32 rows there are 2 slots, because x takes as much room as w.
//   gemv_4 has each row of x in two columns of the tensor core's tile, so that a lane has sums of
//   one row and half as many to scale.
//   Instructions a lane and tile of Q4_K in gemv_4, by the machine code: 57 to unpack, 12 products,
//   48 for scales, 24 for sums, about 60 for copies, addresses and the loop: 205 of a tile of 1.2
//   KiB, where the memory of an H200 asks for no more than 275.
//   One block fills a multiprocessor, so the next launch starts only when the last bands have
//   begun, and what it needs is not prefetched: on an H200 steps of one row of eight layers of an
//   8B model in Q4_K_M took 6 % less than with both as in linear.cu (late alone 4 %, no prefetch
//   alone 3 %), of 32 rows 2 %.
//   Considered: two tiles a slot (addresses for both at once); scales of four tiles from one
//   reading of their header (ranges would be whole headers); three blocks of 8 warps (slower).
// gemm: 64 × 64, 4 warps of 32 × 32, 4 slots. The codes are unpacked by each of the two warps that
//   share their rows, and there is an operation in f32 for each two products of 32 columns: about a
//   third of the rate of linear.cu's kernel is expected. It takes more than 32 rows where the
//   library may not (the same bits in any batch) or there are too few rows for it.
// dequantise: w[rows, cols] in bf16, each weight rounded once. A block of 4 warps takes 4 tiles of
//   a band, and turns them in shared memory, so that 8 lanes write 128 bytes of a row at once.
//   Bytes: those of the packed form and 2 for each weight.
// Measured on an H200, with one row: 28672 by 4096 in Q4_K 23 us and in Q8_0 32, 4096 by 14336 in
// Q4_K 12 and in Q6_K 15, 6144 by 4096 in Q4_K 7: 66, 86, 61, 69 and 46 % of reading; bf16 takes
// 56, 30 and 15. With 16, 32 and 64 rows the first takes 35, 64 and 115, and 228 at 256 rows, where
// dequantise and the library multiply and bf16 takes 57, 59, 58 and 93. packed_rounded.cu takes the
// steps from 33 to 512 rows where it can.
#include "linear/packed_product.cuh"

namespace {

// ---- dequantise

constexpr uint32_t WARPS = 4, PADDED = TILE_COLUMNS + 8;  // 16 bytes between rows: no conflicts

// Puts a lane's weights of a tile in their places.
template <class Format>
DEVICE void widen_tile(
    bf16* to, const unsigned char* tile, const unsigned char* header, const Format& format) {
    LaneCodes<Format> codes;
    codes.load_from(tile);
    uint32_t row = lane() / 4 * 4;
#pragma unroll
    for (uint32_t step = 0; step < TILE_COLUMNS / 16; step++) {
        GroupScales<Format, 4> group;
        group.load_from(
            tile + Format::CODES, header, step * 16 / Format::GROUP_COLUMNS, row, format);
        codes.to_subtract(group.zero);
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t a[4];
            codes.fragment(a, step, i, group.zero, format);
#pragma unroll
            for (uint32_t r = 0; r < 4; r++) {
                uint32_t in = 2 * i + r % 2, column = step * 16 + r / 2 * 8 + lane() % 4 * 2;
                float first = group.scale[in] * __uint_as_float(a[r] << 16),
                      second = group.scale[in] * __uint_as_float(a[r] & 0xffff0000u);
                if constexpr (Format::MINIMUM)
                    first += group.minimum[in], second += group.minimum[in];
                Vec<bf16, 2> pair{{from_float<bf16>(first), from_float<bf16>(second)}};
                store(to + (row + in) * PADDED + column, pair);
            }
        }
    }
}

// `tiles` has room for those of all warps.
template <class Format>
DEVICE void dequantise(bf16* tiles, const unsigned char* w, bf16* out, uint32_t rows, uint32_t cols,
    const Format& format) {
    launch_dependents_and_wait();
    uint32_t first = blockIdx.x * TILE_ROWS, k = (blockIdx.y * WARPS + warp()) * TILE_COLUMNS;
    if (k >= cols) return;
    PackedBand<Format> band(w, blockIdx.x, cols, format);
    bf16* tile = tiles + warp() * TILE_ROWS * PADDED;
    widen_tile(tile, band.tile(k), band.header(k), format);
    __syncwarp();
    uint32_t column = lane() % 8 * 8;
    if (k + column >= cols) return;
    for (uint32_t row = lane() / 8; row < TILE_ROWS && first + row < rows; row += 4)
        store(out + static_cast<size_t>(first + row) * cols + k + column,
            load<bf16>(tile + row * PADDED + column));
}

}  // namespace

// `f32_out`: whether `out` is f32. `stride`: from a row of `out` to the next. The product follows.
#define PACKED_PRODUCT(name, threads, bits, floats, ...)                                         \
    KERNEL(name, __launch_bounds__(threads, 1), const bf16* x, const unsigned char* w,           \
        const bf16* bias, void* out, uint32_t f32_out, uint32_t n, uint32_t rows, uint32_t cols, \
        uint32_t stride, FORMAT_PARAMETERS) {                                                    \
        with_format<bits, floats>(FORMAT_NUMBERS, [&](const auto& format) {                      \
            __VA_ARGS__(AllRows{x, n, cols}, packed_weights(w, rows, cols, format), bias, out,   \
                f32_out, rows, cols, stride);                                                    \
        });                                                                                      \
    }
#define PACKED_KERNELS(form, bits, floats)                                                      \
    PACKED_PRODUCT(gemv_4_##form##_bf16, 512, bits, floats, gemv<32, 4, 4>)                     \
    PACKED_PRODUCT(gemv_8_##form##_bf16, 512, bits, floats, gemv<32, 8, 3>)                     \
    PACKED_PRODUCT(gemv_16_##form##_bf16, 512, bits, floats, gemv<32, 16, 2>)                   \
    PACKED_PRODUCT(gemv_32_##form##_bf16, 256, bits, floats, gemv<32, 32, 2>)                   \
    PACKED_PRODUCT(gemm_64x64_##form##_bf16, 128, bits, floats, gemm<64, 64, 2, 2, 4>)          \
    KERNEL(dequantise_##form##_bf16, __launch_bounds__(128), const unsigned char* w, bf16* out, \
        uint32_t rows, uint32_t cols, FORMAT_PARAMETERS) {                                      \
        SHARED(bf16, tiles, WARPS * TILE_ROWS * PADDED);                                        \
        with_format<bits, floats>(FORMAT_NUMBERS,                                               \
            [&](const auto& format) { dequantise(tiles, w, out, rows, cols, format); });        \
    }
CODE_FORMS(PACKED_KERNELS)
