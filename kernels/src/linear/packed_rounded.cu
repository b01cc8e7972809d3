// out[n, rows] = x[n, cols] · wᵀ (+ bias) for block-quantised w in the packed form (packed.cuh),
// each weight rounded to bf16 once, as packed.cu's `dequantise` rounds it for the library.
// Activations are bf16, sums f32. For 33 to 512 rows of x where warp groups multiply (sm_90) and a
// row's bits may depend on the batch: packed.cu's products scale the sums of each group of
// columns, which for 64 rows takes more time than the products, and its gemv reads x again for
// each 32 rows of w.
//
// A warp unpacks and rounds the codes of 32 rows of w to the registers of the tensor core's first
// operand, while the products of the 16 columns before are under way; x is the second, in shared
// memory. So each weight is unpacked once for 64 or 128 rows of x. Two warp groups of a block have
// 128 rows of w each, the same ones, and a half of the columns; the sums of the second are added
// to those of the first. Where there are too few tiles for all multiprocessors, blocks have parts
// of the columns, and add_parts adds their sums, in f32, in their order.
//
// For a tile of 32 rows by 64 columns in Q4_K a lane has about 210 instructions to unpack and
// round, 60 for scales and minimums, and 50 for copies. A multiprocessor issues those of the four
// warps of 128 rows in 340 cycles at best, and its tensor cores need 256 for 64 rows of x.
// Measured on an H200, us with 64, 256 and 512 rows: 28672 by 4096 in Q4_K 53, 157 and 283, in
// Q8_0 64, 157 and 299; 4096 by 14336 in Q4_K 28, 74 and 133, in Q6_K 33, 76 and 142. So they
// multiply at 400 to 450 TFLOP/s at most, where bf16 by the library has 700. With 24 to 32 rows
// packed.cu's gemv is as fast or faster.
// Considered: the same with `mma` and `ldmatrix`, which any device has: 65, 222 and 440 us for the
// first, 65, 217 and 219 for the third.
#include "linear/packed_product.cuh"
#include "warp_groups.cuh"

namespace {

// The work of a block: 128 rows of w by TOKENS of x, over a part of the columns.
template <class Format, uint32_t TOKENS>
struct RoundedGemm {
    static constexpr uint32_t BANDS = 4, ROWS = BANDS * TILE_ROWS, GROUPS = 2, SLOTS = 4,
                              AHEAD = SLOTS - 2, VALUES = TOKENS / 2,
                              BAND = PackedWeights<Format>::SLOT;
    // Whether codes come plus 128, which an offset in f32 takes out, and not as numbers.
    static constexpr bool PLUS_128 = !Format::FLOATS && Format::BITS < 8;
    using WeightCopies = typename PackedWeights<Format>::template Copies<TILE_ROWS, 4, WARP>;
    using XCopies = TileCopies<TOKENS, 1, WARP_GROUP>;

    AllRows x;
    PackedWeights<Format> w;

    DEVICE static uint32_t group() { return threadIdx.x / WARP_GROUP; }
    // The rows of x in a slot of the warp group, and the warp's rows of w there.
    DEVICE static bf16* x_of(uint32_t slot) {
        return reinterpret_cast<bf16*>(swizzled_shared()) +
               (group() * SLOTS + slot) * TOKENS * TILE_K;
    }
    DEVICE static unsigned char* w_of(uint32_t slot) {
        return swizzled_shared() + GROUPS * SLOTS * TOKENS * X_ROW_BYTES +
               ((group() * SLOTS + slot) * BANDS + warp() % BANDS) * BAND;
    }

    // The sums over the warp group's half of the columns from `begin` to `end`.
    DEVICE void sum(
        float (&acc)[2][VALUES], uint32_t first_row, uint32_t begin, uint32_t end) const {
        launch_dependents();
        uint32_t half = divide_up(divide_up(end - begin, TILE_K), GROUPS) * TILE_K,
                 row = first_row + warp() % BANDS * TILE_ROWS;
        begin = min(begin + group() * half, end), end = min(begin + half, end);
        // Rows beyond the last one of w and of x are copies of the first, whose sums are not
        // written.
        WeightCopies w_copies(w, row < w.rows ? row : 0, min(begin, w.cols - 1));
        for (uint32_t i = 0; i < AHEAD; i++)
            if (begin + i * TILE_K < end) w_copies.next(w_of(i), begin + i * TILE_K);
        wait_for_earlier_launches();
        XCopies x_copies(x, w.cols);
        x_copies.count = TOKENS;
        for (uint32_t i = 0; i < AHEAD; i++) {
            if (begin + i * TILE_K < end) x_copies.start(x_of(i), begin + i * TILE_K);
            copy_commit();
        }
        uint32_t slot = 0;
        for (uint32_t k = begin; k < end; k += TILE_K, slot = (slot + 1) % SLOTS) {
            copy_wait<AHEAD - 1>();
            fence_async_proxy();
            // All copies of this slot have landed, and all products of the slot before the last one
            // are over.
            group_barrier();
            uint32_t next = k + AHEAD * TILE_K, to = (slot + AHEAD) % SLOTS;
            if (next < end) {
                w_copies.next(w_of(to), next);
                x_copies.start(x_of(to), next);
            }
            copy_commit();
            multiply(acc, slot);
        }
        group_mma_wait<0>();
        group_mma_settle(acc[0]);
        group_mma_settle(acc[1]);
    }

    // Weights are unpacked for a step while the tensor core multiplies those of the step before.
    DEVICE void multiply(float (&acc)[2][VALUES], uint32_t slot) const {
        const unsigned char* tile = w_of(slot);
        uint64_t b = describe_matrix(x_of(slot));
        LaneCodes<Format> codes;
        codes.load_from(tile);
        Scales scales;
#pragma unroll
        for (uint32_t step = 0; step < TILE_K / 16; step++) {
            if (step * 16 % Format::GROUP_COLUMNS == 0)
                scales.load_from(tile, step * 16 / Format::GROUP_COLUMNS, w.format);
            uint32_t a[2][4];
            round(a[0], codes, step, 0, scales);
            round(a[1], codes, step, 1, scales);
            group_mma_fence();
            group_mma<TOKENS>(acc[0], a[0], b + 2 * step, 1);
            group_mma<TOKENS>(acc[1], a[1], b + 2 * step, 1);
            group_mma_commit();
            group_mma_wait<1>();
        }
    }

    // A weight is scale × (code as it comes) + offset.
    struct Scales {
        float scale[4], offset[4];
        uint32_t zero[4];

        DEVICE void load_from(const unsigned char* tile, uint32_t group, const Format& format) {
            GroupScales<Format, 4> own;
            own.load_from(
                tile + Format::CODES, tile + Format::TILE_BYTES, group, lane() / 4 * 4, format);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                scale[i] = own.scale[i], zero[i] = own.zero[i];
                offset[i] = Format::MINIMUM ? own.minimum[i] : 0.0f;
                if constexpr (PLUS_128)
                    offset[i] = fmaf(scale[i], -static_cast<float>(128 + zero[i]), offset[i]);
            }
            if constexpr (!PLUS_128) LaneCodes<Format>::to_subtract(zero);
        }
    };

    DEVICE void round(uint32_t (&a)[4], const LaneCodes<Format>& codes, uint32_t step,
        uint32_t tile, const Scales& scales) const {
        if constexpr (PLUS_128)
            codes.plus_128(a, step, tile);
        else
            codes.fragment(a, step, tile, scales.zero, w.format);
#pragma unroll
        for (uint32_t r = 0; r < 4; r++) {
            uint32_t row = 2 * tile + r % 2;
            float scale = scales.scale[row], offset = scales.offset[row],
                  low = __uint_as_float(a[r] << 16), high = __uint_as_float(a[r] & 0xffff0000u);
            a[r] = pack(fmaf(scale, low, offset), fmaf(scale, high, offset));
        }
    }

    // Adds the second warp group's sums to those of the first.
    DEVICE static void add_groups(float (&acc)[2][VALUES]) {
        float* sums = dynamic_shared<float>() + threadIdx.x % WARP_GROUP;
        copy_wait<0>();
        // All slots have been read.
        __syncthreads();
        if (group() == 1)
#pragma unroll
            for (uint32_t v = 0; v < 2 * VALUES; v++)
                sums[v * WARP_GROUP] = acc[v / VALUES][v % VALUES];
        __syncthreads();
        if (group() == 1) return;
#pragma unroll
        for (uint32_t v = 0; v < 2 * VALUES; v++)
            acc[v / VALUES][v % VALUES] += sums[v * WARP_GROUP];
    }

    template <class T>
    DEVICE void write(const float (&acc)[2][VALUES], TilePlace first, uint32_t n, const bf16* bias,
        T* out, uint32_t stride) const {
        uint32_t row = first.w + warp() % BANDS * TILE_ROWS + lane() / 4 * 4,
                 count = row < w.rows ? w.rows - row : 0;
        bool aligned = stride % 4 == 0 && reinterpret_cast<uintptr_t>(out) % (4 * sizeof(T)) == 0;
        float added[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) added[i] = i < count ? bias_of(bias, row + i) : 0.0f;
#pragma unroll
        for (uint32_t j = 0; j < TOKENS / 4; j++) {
            uint32_t token = first.x + j / 2 * 8 + lane() % 4 * 2 + j % 2;
            float values[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                values[i] = acc[i / 2][j / 2 * 4 + i % 2 * 2 + j % 2] + added[i];
            if (token < n)
                store_outputs(
                    out + static_cast<size_t>(token) * stride + row, values, count, aligned);
        }
    }
};

// Blocks come in `parts`, each for some of the columns. If there is more than one, `out` is f32 and
// has room for n × rows sums of each.
template <uint32_t TOKENS, class Format>
DEVICE void rounded_gemm(const bf16* x, const unsigned char* w, const bf16* bias, void* out,
    uint32_t f32_out, uint32_t n, uint32_t rows, uint32_t cols, uint32_t stride, uint32_t parts,
    const Format& format) {
    using Gemm = RoundedGemm<Format, TOKENS>;
    uint32_t w_tiles = divide_up(rows, Gemm::ROWS), x_tiles = divide_up(n, TOKENS),
             tile = blockIdx.x % (w_tiles * x_tiles), part = blockIdx.x / (w_tiles * x_tiles);
    TilePlace first = place_of_tile(tile, w_tiles, x_tiles);
    first.w *= Gemm::ROWS, first.x *= TOKENS;
    // It is not needed again before all sums are there.
    TilePlace* kept = in_memory(&first);
    AllRows own{x + static_cast<size_t>(first.x) * cols, n - first.x, cols};
    Gemm gemm{own, packed_weights(w, rows, cols, format)};
    uint32_t each = divide_up(divide_up(cols, TILE_K), parts) * TILE_K,
             begin = min(part * each, cols), end = min(begin + each, cols);
    float acc[2][Gemm::VALUES] = {};
    gemm.sum(acc, first.w, begin, end);
    gemm.add_groups(acc);
    if (gemm.group() == 1) return;
    if (f32_out == 0) return gemm.write(acc, *kept, n, bias, static_cast<bf16*>(out), stride);
    float* sums = static_cast<float*>(out) + static_cast<size_t>(part) * n * stride;
    gemm.write(acc, *kept, n, bias, sums, stride);
}

// Adds parts in their order.
template <class T>
DEVICE void add_parts(const float* sums, const bf16* bias, T* out, uint32_t n, uint32_t rows,
    uint32_t stride, uint32_t parts) {
    launch_dependents_and_wait();
    uint32_t count = n * rows;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
        i += gridDim.x * blockDim.x) {
        float sum = bias_of(bias, i % rows);
        for (uint32_t part = 0; part < parts; part++)
            sum += sums[static_cast<size_t>(part) * count + i];
        out[static_cast<size_t>(i / rows) * stride + i % rows] = from_float<T>(sum);
    }
}

}  // namespace

// `f32_out`: whether `out` is f32. `stride`: from a row of `out` to the next.
#define ROUNDED_GEMM(name, tokens, blocks, bits, floats)                                         \
    KERNEL(name, __launch_bounds__(256, blocks), const bf16* x, const unsigned char* w,          \
        const bf16* bias, void* out, uint32_t f32_out, uint32_t n, uint32_t rows, uint32_t cols, \
        uint32_t stride, FORMAT_PARAMETERS, uint32_t parts) {                                    \
        if constexpr (HAS_WARP_GROUPS)                                                           \
            with_format<bits, floats>(FORMAT_NUMBERS, [&](const auto& format) {                  \
                rounded_gemm<tokens>(                                                            \
                    x, w, bias, out, f32_out, n, rows, cols, stride, parts, format);             \
            });                                                                                  \
        else                                                                                     \
            ASSERT(false);                                                                       \
    }
#define ROUNDED_KERNELS(form, bits, floats)                          \
    ROUNDED_GEMM(rounded_gemm_64_##form##_bf16, 64, 2, bits, floats) \
    ROUNDED_GEMM(rounded_gemm_128_##form##_bf16, 128, 1, bits, floats)
CODE_FORMS(ROUNDED_KERNELS)

#define ADD_PARTS(type, T)                                                                       \
    KERNEL(add_parts_##type, UNBOUNDED, const float* sums, const bf16* bias, T* out, uint32_t n, \
        uint32_t rows, uint32_t stride, uint32_t parts) {                                        \
        add_parts(sums, bias, out, n, rows, stride, parts);                                      \
    }
ELEMENT_TYPES(ADD_PARTS)
