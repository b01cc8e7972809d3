// out[n, rows] = x[n, cols] · wᵀ (+ bias), w: [rows, cols]; sums in f32; out in the operands' type
// or f32.
//
// Every output of the tensor-core kernels (bf16, cols a multiple of 8) is summed in one order,
// whatever n and the kernel are, by a split-K with fixed splits: cols are cut into SEGMENTS ranges
// of whole TILE_Ks, each range is summed from zero by products of 16 columns in ascending order,
// and the ranges' sums are added in order. So a row has the same bits alone and among any other
// rows, if a tensor core computes all elements of its tile alike.
//
// Both stream tiles of w and x through slots of TILE_K columns in shared memory by asynchronous
// copies. A row of a slot is 128 bytes, all banks; its eight 16-byte chunks are permuted by the
// row's number, so that neither the copies nor `ldmatrix` conflict. Rows of w may be assigned to
// rows of a tensor core's tile in any order: here a lane's values of an x row are neighbouring rows
// of w, so they are stored as vectors.
//
// gemv (n ≤ 8, 16, 32): reads each weight once. A block takes 32 rows of w at a time, at n ≤ 8 16,
//   each of its 8 warps one range of the columns, in slots of its own without barriers; the sums
//   are added in shared memory. One block a multiprocessor goes from tile to tile with its copies
//   always under way:
//   2 of 3 slots of 4 KiB of w a warp (n ≤ 8: 3 of 4 slots of 2 KiB), 48 to 64 KiB a
//   multiprocessor, 6 to 8 MiB in all, where 4.8 TB/s × 0.6 µs ask for 3, so half of the
//   multiprocessors suffice when the last tiles are few. x comes from the second-level cache: n /
//   32 of w's bytes, n / 16 at n ≤ 8. A warp takes 128 bytes of a row of w at a time; the copies
//   hint at 256, so that the memory is asked for neighbours together (ranges of interleaved columns
//   would do more here, and harm gemm).
//   With 16 rows a matrix of 6144 rows leaves fewer multiprocessors without work in the last round,
//   and two blocks fit on a multiprocessor, so that the next launch's begins to copy while this
//   one's finishes. Cards whose blocks have 99 KiB have one slot less.
//   Before the launch waits for earlier ones it fetches the part of w that it needs first: all
//   slots but one, and 512 bytes more of each row as far as the second-level cache: 15 MiB in all,
//   3 us of the memory's time that norm, rope and attention leave idle.
//   Considered: multiply-adds in f32 (at n = 8 they bind: 8 operations a byte, and unpacking); w
//   from global memory to registers (a lane's 16 bytes are of one row, the tensor core's registers
//   of two: three moves a product in the other kernel, for the same order of sums). Left out: rows
//   of gate and up in one tile, so that SiLU or GELU and their product are computed from the sums.
//   It would save a launch a layer (about 1 us of 110 at one row of an 8B model) and 6 bytes a
//   value through the second-level cache.
//   The lines of w leave the second-level cache first, so that what is prefetched stays: on an H200
//   steps of one and of 8 rows of eight layers of an 8B model took 4 % less than without. No
//   prefetch in place of that took 2 % less; a next launch that starts only with a block's last
//   rows took 2 to 15 % more, 32 rows at a time with three slots 4 to 10 %.
//   On an H200 one row takes 14 us for 6144 by 4096, 10 for 4096 by 4096, 55 for 28672 by 4096 and
//   29 for 4096 by 14336: 4.3 TB/s of 4.5 and 2 to 3 us for each launch. 32 rows at a time and
//   three slots take 15.6, 10, 56 and 30 (two slots 17, 12, 58 and 32; 16 rows and three slots 15,
//   11, 57 and 31).
// gemm (any n): a block takes a tile of w's rows × x's rows, all columns, one barrier a slot, all
//   slots but one under way. Tiles: 128 × 128 (8 warps of 64 × 32) for many rows; 64 × 64 and 32 ×
//   64 fill the multiprocessors when there are few. A slot of the large one is 64 products of 2048
//   multiply-adds a warp in about 240 instructions, the copies' addresses among them; its 24 reads
//   of 512 bytes a warp and the copies' writes take 1024 cycles of shared memory, the products
//   about 740 of the tensor cores', so it should reach some 45 % of what warp-group instructions
//   can (warp_groups.cu, for sm_90 only); 43 % of the library's rate were measured. Warps of
//   64 × 64 would balance them, but two sets of sums do not fit into registers.
//   Tiles are walked 8 tiles of x at a time over all of w, so that a wave re-reads both from the
//   second-level cache: 512 rows read w once. Considered: cutting columns over blocks for few rows
//   (needs a workspace and a second pass).
// dot (f32, and bf16 with other sizes): a warp for each row of w and 8 rows of x, plain
// multiply-adds. Simple, not fast. Not measured yet.
//
// head_gemm, head_dot: x[n, heads, cols] by a matrix of each head, to out[n, heads, rows]: the same
//   products once for each head (blockIdx.y, blockIdx.z). Latent attention has 128 heads with 512
//   by 128 values: 1024 blocks of 64 × 64, of which shared memory (48 KiB) leaves four on a
//   multiprocessor; with few rows of x they read 16 MiB of weights and are bound by that. Not
//   measured yet.
#include "linear/dense_product.cuh"

namespace {

// ---- dot

template <class T>
DEVICE void dot(const T* x, const T* w, const T* bias, void* out, uint32_t f32_out, uint32_t n,
    uint32_t rows, uint32_t cols, uint32_t x_stride, uint32_t stride) {
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
                weight * to_float(x[static_cast<size_t>(first + min(i, count - 1)) * x_stride + k]);
    }
#pragma unroll
    for (uint32_t i = 0; i < TOKENS; i++) {
        float sum = warp_sum(sums[i]) + (bias == nullptr ? 0.0f : to_float(bias[row]));
        if (lane() != 0 || i >= count) continue;
        size_t at = static_cast<size_t>(first + i) * stride + row;
        if (f32_out != 0)
            static_cast<float*>(out)[at] = sum;
        else
            static_cast<T*>(out)[at] = from_float<T>(sum);
    }
}

// The product of a head with its own matrix, without a bias.
template <class T>
DEVICE void head_dot(const T* x, const T* w, T* out, uint32_t n, uint32_t rows, uint32_t cols) {
    size_t head = blockIdx.z;
    uint32_t heads = gridDim.z, f32_out = 0;
    dot<T>(x + head * cols, w + head * rows * cols, nullptr, out + head * rows, f32_out, n, rows,
        cols, heads * cols, heads * rows);
}

}  // namespace

#define DENSE(name, threads, ...)                                                               \
    KERNEL(name, __launch_bounds__(threads), DENSE_PARAMETERS(bf16)) {                          \
        __VA_ARGS__(AllRows{x, n, cols}, DenseWeights{w, rows, cols}, bias, out, f32_out, rows, \
            cols, stride);                                                                      \
    }
DENSE(gemv_8_bf16, 256, gemv<16, 8, 4>)
DENSE(gemv_8_three_slots_bf16, 256, gemv<16, 8, 3>)
DENSE(gemv_16_bf16, 256, gemv<32, 16, 3>)
DENSE(gemv_32_bf16, 256, gemv<32, 32, 3>)
DENSE(gemm_32x64_bf16, 128, gemm<32, 64, 2, 2, 8>)
DENSE(gemm_64x64_bf16, 128, gemm<64, 64, 2, 2, 6>)
DENSE(gemm_128x128_bf16, 256, gemm<128, 128, 2, 4, 4>)
#define DOTS(type, T)                                                                           \
    KERNEL(dot_##type, __launch_bounds__(128), DENSE_PARAMETERS(T)) {                           \
        dot(x, w, bias, out, f32_out, n, rows, cols, cols, stride);                             \
    }                                                                                           \
    KERNEL(head_dot_##type, __launch_bounds__(128), const T* x, const T* w, T* out, uint32_t n, \
        uint32_t rows, uint32_t cols) {                                                         \
        head_dot(x, w, out, n, rows, cols);                                                     \
    }
ELEMENT_TYPES(DOTS)
KERNEL(head_gemm_bf16, __launch_bounds__(128), const bf16* x, const bf16* w, bf16* out, uint32_t n,
    uint32_t rows, uint32_t cols) {
    size_t head = blockIdx.y;
    uint32_t heads = gridDim.y, f32_out = 0;
    gemm<64, 64, 2, 2, 3>(AllRows{x + head * cols, n, heads * cols},
        DenseWeights{w + head * rows * cols, rows, cols}, nullptr, out + head * rows, f32_out, rows,
        cols, heads * rows);
}
