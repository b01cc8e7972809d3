// The products of streams.cuh with weights in bf16.
#pragma once

#include "linear/streams.cuh"

namespace {

// A matrix of bf16, row by row.
struct DenseWeights {
    static constexpr uint32_t SEGMENTS = DENSE_SEGMENTS, ROW_BYTES = TILE_K * sizeof(bf16),
                              PREFETCH_COLUMNS = 256;
    static constexpr bool LATE = false;

    const bf16* w;
    uint32_t rows, cols;

    template <uint32_t COUNT, uint32_t PERIOD, uint32_t THREADS>
    DEVICE void copy(unsigned char* slot, uint32_t first, uint32_t k) const {
        copy_tile<COUNT, PERIOD, THREADS>(
            reinterpret_cast<bf16*>(slot), AllRows{w, rows, cols}, first, cols, k);
    }

    template <uint32_t COUNT, uint32_t PERIOD, uint32_t THREADS>
    struct Copies {
        TileCopies<COUNT, PERIOD, THREADS, true> tile;

        DEVICE Copies(const DenseWeights& w, uint32_t first, uint32_t)
            : tile(AllRows{w.w + static_cast<size_t>(first) * w.cols, w.rows - first, w.cols},
                  w.cols) {}
        DEVICE void next(unsigned char* slot, uint32_t k) const {
            tile.start(reinterpret_cast<bf16*>(slot), k);
        }
    };

    template <uint32_t ROWS>
    DEVICE void prefetch_columns(uint32_t first, uint32_t k, uint32_t end) const {
        static_assert(ROWS <= WARP);
        uint32_t row = first + lane();
        if (lane() < ROWS && row < rows)
            prefetch(w + static_cast<size_t>(row) * cols + k,
                min(end - k, PREFETCH_COLUMNS) * sizeof(bf16));
    }

    template <uint32_t SPREAD, uint32_t W_TILES, uint32_t X_TILES, class AfterReads>
    DEVICE void multiply(float (&acc)[W_TILES][X_TILES][4], const unsigned char* slot,
        const bf16* x, AfterReads after_reads) const {
        static_assert(SPREAD == 1);
        uint32_t row = lane() % 8, tile = lane() / 8;
        const bf16* w_row =
            reinterpret_cast<const bf16*>(slot) + (row * 2 * W_TILES + tile % 2) * TILE_K;
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
};

}  // namespace

// The parameters of a dense product. `f32_out`: whether `out` is f32. `stride`: from a row of `out`
// to the next.
#define DENSE_PARAMETERS(T)                                                                        \
    const T *x, const T *w, const T *bias, void *out, uint32_t f32_out, uint32_t n, uint32_t rows, \
        uint32_t cols, uint32_t stride
