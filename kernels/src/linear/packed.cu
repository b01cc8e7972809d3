// out[n, rows] = x[n, cols] · wᵀ (+ bias) for block-quantised w in the packed form (packed.cuh),
// and w in bf16 for the library. Activations are bf16, sums f32.
//
// A code less its zero is an integer of at most 8 bits, which bf16 holds exactly, so the tensor
// core multiplies x by the codes themselves. The sums of a group of 32 (6 bits: 16) columns are
// then multiplied by the group's scale and added to those of the groups before; its minimum is
// multiplied by the sum of x over the group, which a product with ones gives in the registers where
// it is needed. So no weight is rounded. Codes that are floats of four or eight bits become bf16 by
// moving their bits and by a product with a power of two, four instructions a pair more than
// integers take. A zero of each group and row is subtracted where the one of the format would be.
// The ranges of the columns and the order of the sums are
// those of linear.cu, and the same in both kernels: a row has the same bits in any batch.
//
// gemv_8, gemv_16, gemv_32: those of linear.cu. A tile of 32 rows by 64 columns lies in the order
//   in which the lanes of a warp need it, so a lane reads its codes in whole vectors of shared
//   memory without conflicts, and no `ldmatrix` moves them. A slot of w has 1.1 to 2.2 KiB in place
//   of 4; 3 of 4 slots (8 bits: 2 of 3) under way are 27 to 36 KiB a multiprocessor at n ≤ 8, where
//   4.8 TB/s × 0.6 us ask for 22. For 9 to 32 rows there are 2 slots, because x takes as much room
//   as w: at 32 rows a band of 32 rows reads four times as much of x from the second-level cache as
//   of w from memory, so that binds. Considered for it: two bands a warp (half of the reading of x,
//   64 sums a lane more); x in registers of all warps by ranges of rows in place of columns
//   (another order of sums than gemm's).
//   Instructions a lane and tile of 64 columns at n ≤ 8: about 130 to unpack, 16 products (32 with
//   minimums), 60 for scales and sums: 8 tiles of 1.2 KiB on a multiprocessor in about 4 × 250
//   cycles ask for 9 TB/s of H200's memory, so memory binds (an estimate).
// gemm: 64 × 64, 4 warps of 32 × 32, 4 slots. The codes are unpacked by each of the two warps that
//   share their rows, and there is an operation in f32 for each two products of 32 columns: about a
//   third of the rate of linear.cu's kernel is expected. It takes more than 32 rows where the
//   library may not (the same bits in any batch) or there are too few rows for it.
// dequantise: w[rows, cols] in bf16, each weight rounded once. A block of 4 warps takes 4 tiles of
//   a band, and turns them in shared memory, so that 8 lanes write 128 bytes of a row at once.
//   Bytes: those of the packed form and 2 for each weight.
// Measured on an H200, 28672 by 4096 in Q4_K: 47 us at n ≤ 8, where the memory asks for 15 and bf16
//   takes 56. About 500 instructions a tile, twice what was estimated, bind: the copies' addresses
//   and the forms of scales, which are decided for each tile, take more than half. 128 bands (4096
//   rows) leave each multiprocessor one block, which waits for itself: 46 us for 4096 by 14336 in
//   Q6_K, whether n is 1 or 32. gemm: 166 us at 64 rows, 1.15 ms at 512. dequantise and the
//   library: 228 us at 256 rows, 292 at 512, where bf16 takes 93 and 162.
#include "linear/packed_product.cuh"

namespace {

// ---- dequantise

constexpr uint32_t WARPS = 4, PADDED = TILE_COLUMNS + 8;  // 16 bytes between rows: no conflicts

// Puts a lane's weights of a tile in their places.
template <uint32_t BITS, bool FLOATS>
DEVICE void widen_tile(
    bf16* to, const unsigned char* tile, const unsigned char* header, const PackedFormat& format) {
    LaneCodes<BITS, FLOATS> codes;
    codes.load_from(tile);
    uint32_t row = lane() / 4 * 4;
#pragma unroll
    for (uint32_t step = 0; step < TILE_COLUMNS / 16; step++) {
        GroupScales<4> group;
        group.load_from(
            tile + code_bytes(BITS), header, BITS, step * 16 / group_columns(BITS), row, format);
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t a[4];
            codes.fragment(a, step, i, group.zero, format);
#pragma unroll
            for (uint32_t r = 0; r < 4; r++) {
                uint32_t in = 2 * i + r % 2, column = step * 16 + r / 2 * 8 + lane() % 4 * 2;
                float first = group.scale[in] * __uint_as_float(a[r] << 16),
                      second = group.scale[in] * __uint_as_float(a[r] & 0xffff0000u);
                if (format.minimum != 0) first += group.minimum[in], second += group.minimum[in];
                Vec<bf16, 2> pair{{from_float<bf16>(first), from_float<bf16>(second)}};
                store(to + (row + in) * PADDED + column, pair);
            }
        }
    }
}

template <uint32_t BITS, bool FLOATS>
DEVICE void dequantise(
    const unsigned char* w, bf16* out, uint32_t rows, uint32_t cols, const PackedFormat& format) {
    SHARED(bf16, tiles, WARPS * TILE_ROWS * PADDED);
    launch_dependents_and_wait();
    uint32_t first = blockIdx.x * TILE_ROWS, k = (blockIdx.y * WARPS + warp()) * TILE_COLUMNS;
    if (k >= cols) return;
    PackedBand band(w, blockIdx.x, cols, BITS, format);
    bf16* tile = tiles + warp() * TILE_ROWS * PADDED;
    widen_tile<BITS, FLOATS>(tile, band.tile(k), band.header(k), format);
    __syncwarp();
    uint32_t column = lane() % 8 * 8;
    if (k + column >= cols) return;
    for (uint32_t row = lane() / 8; row < TILE_ROWS && first + row < rows; row += 4)
        store(out + static_cast<size_t>(first + row) * cols + k + column,
            load<bf16>(tile + row * PADDED + column));
}

}  // namespace

// `f32_out`: whether `out` is f32. `stride`: from a row of `out` to the next.
#define PACKED_PRODUCT(name, threads, blocks, product, bits, floats)                               \
    KERNEL __launch_bounds__(threads, blocks)                                                      \
        name(const bf16* x, const unsigned char* w, const bf16* bias, void* out, uint32_t f32_out, \
            uint32_t n, uint32_t rows, uint32_t cols, uint32_t stride, FORMAT_NUMBERS) {           \
        PackedWeights<bits, floats> weights{w, rows, cols, FORMAT_OF_NUMBERS};                     \
        product(AllRows{x, n, cols}, weights, bias, out, f32_out, rows, cols, stride);             \
    }
#define PACKED_DEQUANTISE(name, bits, floats)                                                   \
    KERNEL __launch_bounds__(128)                                                               \
        name(const unsigned char* w, bf16* out, uint32_t rows, uint32_t cols, FORMAT_NUMBERS) { \
        dequantise<bits, floats>(w, out, rows, cols, FORMAT_OF_NUMBERS);                        \
    }

PACKED_PRODUCT(gemv_8_q4_bf16, 256, 2, (gemv<8, 4>), 4, false)
EXPORT(gemv_8_q4_bf16)
PACKED_PRODUCT(gemv_16_q4_bf16, 256, 1, (gemv<16, 2>), 4, false)
EXPORT(gemv_16_q4_bf16)
PACKED_PRODUCT(gemv_32_q4_bf16, 256, 1, (gemv<32, 2>), 4, false)
EXPORT(gemv_32_q4_bf16)
PACKED_PRODUCT(gemm_64x64_q4_bf16, 128, 1, (gemm<64, 64, 2, 2, 4>), 4, false)
EXPORT(gemm_64x64_q4_bf16)
PACKED_DEQUANTISE(dequantise_q4_bf16, 4, false)
EXPORT(dequantise_q4_bf16)
PACKED_PRODUCT(gemv_8_q5_bf16, 256, 2, (gemv<8, 4>), 5, false)
EXPORT(gemv_8_q5_bf16)
PACKED_PRODUCT(gemv_16_q5_bf16, 256, 1, (gemv<16, 2>), 5, false)
EXPORT(gemv_16_q5_bf16)
PACKED_PRODUCT(gemv_32_q5_bf16, 256, 1, (gemv<32, 2>), 5, false)
EXPORT(gemv_32_q5_bf16)
PACKED_PRODUCT(gemm_64x64_q5_bf16, 128, 1, (gemm<64, 64, 2, 2, 4>), 5, false)
EXPORT(gemm_64x64_q5_bf16)
PACKED_DEQUANTISE(dequantise_q5_bf16, 5, false)
EXPORT(dequantise_q5_bf16)
PACKED_PRODUCT(gemv_8_q6_bf16, 256, 2, (gemv<8, 4>), 6, false)
EXPORT(gemv_8_q6_bf16)
PACKED_PRODUCT(gemv_16_q6_bf16, 256, 1, (gemv<16, 2>), 6, false)
EXPORT(gemv_16_q6_bf16)
PACKED_PRODUCT(gemv_32_q6_bf16, 256, 1, (gemv<32, 2>), 6, false)
EXPORT(gemv_32_q6_bf16)
PACKED_PRODUCT(gemm_64x64_q6_bf16, 128, 1, (gemm<64, 64, 2, 2, 4>), 6, false)
EXPORT(gemm_64x64_q6_bf16)
PACKED_DEQUANTISE(dequantise_q6_bf16, 6, false)
EXPORT(dequantise_q6_bf16)
PACKED_PRODUCT(gemv_8_q8_bf16, 256, 2, (gemv<8, 3>), 8, false)
EXPORT(gemv_8_q8_bf16)
PACKED_PRODUCT(gemv_16_q8_bf16, 256, 1, (gemv<16, 2>), 8, false)
EXPORT(gemv_16_q8_bf16)
PACKED_PRODUCT(gemv_32_q8_bf16, 256, 1, (gemv<32, 2>), 8, false)
EXPORT(gemv_32_q8_bf16)
PACKED_PRODUCT(gemm_64x64_q8_bf16, 128, 1, (gemm<64, 64, 2, 2, 4>), 8, false)
EXPORT(gemm_64x64_q8_bf16)
PACKED_DEQUANTISE(dequantise_q8_bf16, 8, false)
EXPORT(dequantise_q8_bf16)
PACKED_PRODUCT(gemv_8_f4_bf16, 256, 2, (gemv<8, 4>), 4, true)
EXPORT(gemv_8_f4_bf16)
PACKED_PRODUCT(gemv_16_f4_bf16, 256, 1, (gemv<16, 2>), 4, true)
EXPORT(gemv_16_f4_bf16)
PACKED_PRODUCT(gemv_32_f4_bf16, 256, 1, (gemv<32, 2>), 4, true)
EXPORT(gemv_32_f4_bf16)
PACKED_PRODUCT(gemm_64x64_f4_bf16, 128, 1, (gemm<64, 64, 2, 2, 4>), 4, true)
EXPORT(gemm_64x64_f4_bf16)
PACKED_DEQUANTISE(dequantise_f4_bf16, 4, true)
EXPORT(dequantise_f4_bf16)
PACKED_PRODUCT(gemv_8_f8_bf16, 256, 2, (gemv<8, 3>), 8, true)
EXPORT(gemv_8_f8_bf16)
PACKED_PRODUCT(gemv_16_f8_bf16, 256, 1, (gemv<16, 2>), 8, true)
EXPORT(gemv_16_f8_bf16)
PACKED_PRODUCT(gemv_32_f8_bf16, 256, 1, (gemv<32, 2>), 8, true)
EXPORT(gemv_32_f8_bf16)
PACKED_PRODUCT(gemm_64x64_f8_bf16, 128, 1, (gemm<64, 64, 2, 2, 4>), 8, true)
EXPORT(gemm_64x64_f8_bf16)
PACKED_DEQUANTISE(dequantise_f8_bf16, 8, true)
EXPORT(dequantise_f8_bf16)
