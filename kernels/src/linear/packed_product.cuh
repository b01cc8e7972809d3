// The products of streams.cuh with weights in the packed form (packed.cuh). packed.cu describes
// them.
#pragma once

#include "linear/packed.cuh"
#include "linear/streams.cuh"

namespace {

constexpr uint32_t TWO_ONES = 0x3f803f80;  // a pair of ones in bf16

template <class Format>
struct PackedWeights {
    static constexpr uint32_t SEGMENTS = 16, PREFETCH_COLUMNS = 0;
    static constexpr bool LATE = true;
    static constexpr uint32_t BITS = Format::BITS, CODES = Format::CODES;
    // Scales and headers take at most 256 bytes of a tile; 192 those of 8 bits, and of 6.
    static constexpr uint32_t SLOT = CODES + (BITS == 8 ? 192 : 256), ROW_BYTES = SLOT / TILE_ROWS;
    // Whether the tensor core multiplies codes plus 128, because the minimums ask for sums of x
    // anyway: the product of 128 with these is subtracted in f32, in place of 128 from each code.
    static constexpr bool PLUS_128 = Format::MINIMUM;

    const unsigned char* w;
    uint32_t rows, cols;
    Format format;

    // The copies of a thread among THREADS, one tile of a band after the other. Whole rounds of all
    // threads copy codes; one more takes the rest of them, the scales and the header. What a thread
    // reads next is kept and not calculated again: that took a third of gemv's instructions.
    template <uint32_t COUNT, uint32_t PERIOD, uint32_t THREADS>
    struct Copies {
        static constexpr uint32_t ROUND = THREADS * 16, ROUNDS = CODES / ROUND,
                                  REST = ROUNDS * ROUND;
        static_assert(COUNT == TILE_ROWS && TILE_COLUMNS == TILE_K && SLOT - REST <= ROUND);

        const unsigned char *codes, *rest;
        // Bytes from the thread's rest to the next tile's, and to the next one's of another header.
        uint32_t step, header_step;
        uint32_t header_mask;
        bool has_rest;

        DEVICE Copies(const PackedWeights& w, uint32_t first, uint32_t k) {
            PackedBand<Format> band(w.w, first / TILE_ROWS, w.cols, w.format);
            uint32_t own = threadIdx.x % THREADS * 16, at = REST + own;
            bool in_tile = at < Format::TILE_BYTES;
            codes = band.tile(k) + own;
            rest = in_tile ? codes + REST : band.header(k) + (at - Format::TILE_BYTES);
            step = in_tile ? Format::TILE_BYTES : 0;
            header_step = in_tile ? Format::TILE_BYTES : band.header_bytes;
            header_mask = (1u << band.header_shift) - 1;
            has_rest = at < Format::TILE_BYTES + band.header_bytes;
        }
        // Without `valid` the tile becomes zeros.
        DEVICE void next(unsigned char* slot, uint32_t k, bool valid = true) {
            slot += threadIdx.x % THREADS * 16;
#pragma unroll
            for (uint32_t i = 0; i < ROUNDS; i++)
                copy_async(slot + i * ROUND, codes + i * ROUND, valid);
            if (has_rest) copy_async(slot + REST, rest, valid);
            codes += Format::TILE_BYTES;
            rest += ((k + TILE_K) & header_mask) == 0 ? header_step : step;
        }
    };

    template <uint32_t COUNT, uint32_t PERIOD, uint32_t THREADS>
    DEVICE void copy(unsigned char* slot, uint32_t first, uint32_t k) const {
        static_assert(COUNT % TILE_ROWS == 0);
#pragma unroll
        for (uint32_t i = 0; i < COUNT / TILE_ROWS; i++, first += TILE_ROWS) {
            bool valid = first < rows && k < cols;
            Copies<TILE_ROWS, PERIOD, THREADS>(*this, valid ? first : 0, valid ? k : 0)
                .next(slot + i * SLOT, k, valid);
        }
    }

    template <uint32_t SPREAD, uint32_t W_TILES, uint32_t X_TILES, class AfterReads>
    DEVICE void multiply(float (&acc)[W_TILES][X_TILES][4], const unsigned char* slot,
        const bf16* x, AfterReads after_reads) const {
        static_assert(W_TILES == 2);
        LaneCodes<Format> codes;
        codes.load_from(slot);
        // Loading all scales ahead of the products is a tenth faster where there are registers.
        constexpr bool AHEAD = X_TILES == 1 && !Format::ZEROS;
        GroupScales<Format, 4> scales[Format::GROUPS];
#pragma unroll
        for (uint32_t i = 0; AHEAD && i < Format::GROUPS; i++) load_scales(scales[i], slot, i);
        uint32_t row = lane() % 8 / SPREAD, tile = lane() / 8;
        const bf16* x_row = x + row * TILE_K;
#pragma unroll
        for (uint32_t window = 0; window < TILE_K / 32; window++) {
            uint32_t b[X_TILES][4];
#pragma unroll
            for (uint32_t j = 0; j < X_TILES; j++)
                ldmatrix(b[j], x_row + j * 8 * TILE_K + ((window * 4 + tile) ^ row) * 8);
            if (window == TILE_K / 32 - 1) after_reads();
            constexpr uint32_t STEPS = Format::GROUP_COLUMNS / 16;
#pragma unroll
            for (uint32_t s = 0; s < 2; s += STEPS) {
                uint32_t group = (window * 2 + s) / STEPS;
                if constexpr (!AHEAD) load_scales(scales[group], slot, group);
                add_group<SPREAD, STEPS>(acc, codes, b, scales[group], window * 2 + s);
            }
        }
    }

  private:
    DEVICE void load_scales(
        GroupScales<Format, 4>& scales, const unsigned char* slot, uint32_t group) const {
        scales.load_from(slot + CODES, slot + Format::TILE_BYTES, group, lane() / 4 * 4, format);
        LaneCodes<Format>::to_subtract(scales.zero);
        if constexpr (PLUS_128)
#pragma unroll
            for (uint32_t row = 0; row < 4; row++)
                scales.minimum[row] = fmaf(scales.scale[row], -128.0f, scales.minimum[row]);
    }

    // Adds the products of a group, STEPS times 16 columns from the step `first` of the tile on.
    template <uint32_t SPREAD, uint32_t STEPS, uint32_t X_TILES>
    DEVICE void add_group(float (&acc)[2][X_TILES][4], const LaneCodes<Format>& codes,
        const uint32_t (&b)[X_TILES][4], const GroupScales<Format, 4>& scales,
        uint32_t first) const {
        float sums[2][X_TILES][4] = {}, of_x[X_TILES][4] = {};
#pragma unroll
        for (uint32_t s = first; s < first + STEPS; s++) {
            uint32_t a[2][4], in_window = s % 2 * 2;
#pragma unroll
            for (uint32_t i = 0; i < 2; i++)
                if constexpr (PLUS_128)
                    codes.plus_128(a[i], s, i);
                else
                    codes.fragment(a[i], s, i, scales.zero, format);
#pragma unroll
            for (uint32_t j = 0; j < X_TILES; j++) {
                uint32_t of_step[2] = {b[j][in_window], b[j][in_window + 1]};
                mma(sums[0][j], a[0], of_step);
                mma(sums[1][j], a[1], of_step);
                if constexpr (Format::MINIMUM)
                    mma(of_x[j], {TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES}, of_step);
            }
        }
        scale_sums<SPREAD>(acc, sums, of_x, scales);
    }

    // The sums of codes by the scales, and those of x by the minimums.
    template <uint32_t SPREAD, uint32_t X_TILES>
    DEVICE void scale_sums(float (&acc)[2][X_TILES][4], const float (&sums)[2][X_TILES][4],
        const float (&of_x)[X_TILES][4], const GroupScales<Format, 4>& scales) const {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
#pragma unroll
            for (uint32_t j = 0; j < X_TILES; j++)
#pragma unroll
                for (uint32_t v = 0; v < 4; v += SPREAD) {
                    uint32_t row = 2 * i + v / 2;
                    acc[i][j][v] = fmaf(scales.scale[row], sums[i][j][v], acc[i][j][v]);
                    if constexpr (Format::MINIMUM)
                        acc[i][j][v] = fmaf(scales.minimum[row], of_x[j][v % 2], acc[i][j][v]);
                }
    }
};

template <class Format>
DEVICE PackedWeights<Format> packed_weights(
    const unsigned char* w, uint32_t rows, uint32_t cols, const Format& format) {
    return {w, rows, cols, format};
}

}  // namespace
