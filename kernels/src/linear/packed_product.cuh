// The products of streams.cuh with weights in the packed form (packed.cuh). packed.cu describes
// them.
#pragma once

#include "linear/packed.cuh"
#include "linear/streams.cuh"

namespace {

constexpr uint32_t TWO_ONES = 0x3f803f80;  // a pair of ones in bf16

template <uint32_t BITS, bool FLOATS>
struct PackedWeights {
    static constexpr uint32_t GROUPS = groups_of_tile(BITS), CODES = code_bytes(BITS);
    // Scales and headers take at most 256 bytes of a tile; 192 those of 8 bits, and of 6.
    static constexpr uint32_t SLOT = CODES + (BITS == 8 ? 192 : 256), ROW_BYTES = SLOT / TILE_ROWS;

    const unsigned char* w;
    uint32_t rows, cols;
    PackedFormat format;

    template <uint32_t COUNT, uint32_t PERIOD, uint32_t THREADS>
    DEVICE void copy(unsigned char* slot, uint32_t first, uint32_t k) const {
        static_assert(COUNT % TILE_ROWS == 0 && TILE_COLUMNS == TILE_K);
#pragma unroll
        for (uint32_t i = 0; i < COUNT / TILE_ROWS; i++) {
            uint32_t row = first + i * TILE_ROWS;
            bool valid = row < rows && k < cols;
            PackedBand band(w, valid ? row / TILE_ROWS : 0, cols, BITS, format);
            copy_band<THREADS>(slot + i * SLOT, band, valid ? k : 0, valid);
        }
    }

    // The next tiles of a warp's band lie behind those that it copies.
    DEVICE void prefetch_columns(uint32_t first, uint32_t k, uint32_t end) const {
        PackedBand band(w, first / TILE_ROWS, cols, BITS, format);
        if (lane() < (end - k + TILE_K - 1) / TILE_K && lane() < 2)
            prefetch(band.tile(k + lane() * TILE_K), band.tile_bytes);
    }

    template <uint32_t W_TILES, uint32_t X_TILES, class AfterReads>
    DEVICE void multiply(float (&acc)[W_TILES][X_TILES][4], const unsigned char* slot,
        const bf16* x, AfterReads after_reads) const {
        static_assert(W_TILES == 2);
        LaneCodes<BITS, FLOATS> codes;
        codes.load_from(slot);
        GroupScales<4> scales[GROUPS];
        const unsigned char* header = slot + CODES + format.scale_bytes(GROUPS);
#pragma unroll
        for (uint32_t i = 0; i < GROUPS; i++)
            scales[i].load_from(slot + CODES, header, BITS, i, lane() / 4 * 4, format);
        uint32_t row = lane() % 8, tile = lane() / 8;
        const bf16* x_row = x + row * TILE_K;
#pragma unroll
        for (uint32_t window = 0; window < TILE_K / 32; window++) {
            uint32_t b[X_TILES][4];
#pragma unroll
            for (uint32_t j = 0; j < X_TILES; j++)
                ldmatrix(b[j], x_row + j * 8 * TILE_K + ((window * 4 + tile) ^ row) * 8);
            if (window == TILE_K / 32 - 1) after_reads();
            add_groups(acc, codes, b, scales, window);
        }
    }

  private:
    // Whole rounds of all threads copy codes; one more takes the rest of them, the scales and the
    // header. A loop over all of them took a fifth of gemv's instructions.
    template <uint32_t THREADS>
    DEVICE void copy_band(
        unsigned char* slot, const PackedBand& band, uint32_t k, bool valid) const {
        constexpr uint32_t ROUND = THREADS * 16, ROUNDS = CODES / ROUND;
        static_assert(SLOT - ROUNDS * ROUND <= ROUND);
        uint32_t at = threadIdx.x % THREADS * 16;
        const unsigned char* tile = band.tile(k);
#pragma unroll
        for (uint32_t i = 0; i < ROUNDS; i++, at += ROUND) copy_async(slot + at, tile + at, valid);
        if (at < band.tile_bytes + band.header_bytes)
            copy_async(slot + at,
                at < band.tile_bytes ? tile + at : band.header(k) + (at - band.tile_bytes), valid);
    }

    // Adds the products of the groups in a window of 32 columns.
    template <uint32_t X_TILES>
    DEVICE void add_groups(float (&acc)[2][X_TILES][4], const LaneCodes<BITS, FLOATS>& codes,
        const uint32_t (&b)[X_TILES][4], const GroupScales<4> (&scales)[GROUPS],
        uint32_t window) const {
        constexpr uint32_t STEPS = group_columns(BITS) / 16;
#pragma unroll
        for (uint32_t group = 0; group < 2 / STEPS; group++) {
            const GroupScales<4>& own = scales[window * 2 / STEPS + group];
            float sums[2][X_TILES][4] = {}, of_x[X_TILES][4] = {};
#pragma unroll
            for (uint32_t s = group * STEPS; s < (group + 1) * STEPS; s++) {
                uint32_t a[2][4];
                codes.fragment(a[0], window * 2 + s, 0, own.zero, format);
                codes.fragment(a[1], window * 2 + s, 1, own.zero, format);
#pragma unroll
                for (uint32_t j = 0; j < X_TILES; j++) {
                    mma(sums[0][j], a[0], {b[j][s * 2], b[j][s * 2 + 1]});
                    mma(sums[1][j], a[1], {b[j][s * 2], b[j][s * 2 + 1]});
                    if (format.minimum != 0)
                        mma(of_x[j], {TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES},
                            {b[j][s * 2], b[j][s * 2 + 1]});
                }
            }
            add_group(acc, sums, of_x, own);
        }
    }

    template <uint32_t X_TILES>
    DEVICE void add_group(float (&acc)[2][X_TILES][4], const float (&sums)[2][X_TILES][4],
        const float (&of_x)[X_TILES][4], const GroupScales<4>& scales) const {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
#pragma unroll
            for (uint32_t j = 0; j < X_TILES; j++)
#pragma unroll
                for (uint32_t v = 0; v < 4; v++) {
                    uint32_t row = 2 * i + v / 2;
                    acc[i][j][v] = fmaf(scales.scale[row], sums[i][j][v], acc[i][j][v]);
                    if (format.minimum != 0)
                        acc[i][j][v] = fmaf(scales.minimum[row], of_x[j][v % 2], acc[i][j][v]);
                }
    }
};

}  // namespace
