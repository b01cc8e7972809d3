// These kernels follow an exchange between the devices that compute one model together: each has
// the parts of all ranks, one behind the other, and makes the whole of them. So each gets the same
// bits, and only an exchange that copies is asked of a library.
//
// sum_parts: x[i] = parts[0][i] + parts[1][i] + … in f32, rounded once. Grid: (n / (128 threads ×
// one 16-byte vector)). Bytes moved: (ranks + 1) n elements, each once. An all-reduce of a library
// moves less between more than two devices, but its order depends on the place of a value in the
// buffer, and sums of bf16 are rounded at each device. Not measured yet.
//
// join_columns: out[row] = the columns of rank 0, those of rank 1, …. Every rank has `most` columns
// but the last ones, which may have fewer; the rows of a part lie densely at its start. Grid:
// (rows, columns / 128). Bytes moved: 8 rows columns. Not measured yet.
#include "common.cuh"

namespace {

constexpr uint32_t THREADS = 128;

template <class T, uint32_t N>
DEVICE void sum_values(const T* parts, T* x, uint32_t n, uint32_t ranks) {
    uint32_t i = (blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= n) return;
    float sums[N];
    Vec<T, N> part = load<T, N>(parts + i);
#pragma unroll
    for (uint32_t j = 0; j < N; j++) sums[j] = to_float(part.at[j]);
    for (uint32_t rank = 1; rank < ranks; rank++) {
        part = load<T, N>(parts + static_cast<size_t>(rank) * n + i);
#pragma unroll
        for (uint32_t j = 0; j < N; j++) sums[j] += to_float(part.at[j]);
    }
#pragma unroll
    for (uint32_t j = 0; j < N; j++) part.at[j] = from_float<T>(sums[j]);
    store(x + i, part);
}

// The launch counts its blocks with the same vector size, so both must follow from `n` alike.
template <class T>
DEVICE void sum_parts(const T* parts, T* x, uint32_t n, uint32_t ranks) {
    launch_dependents_and_wait();
    if (n % PER_VEC<T> == 0)
        sum_values<T, PER_VEC<T>>(parts, x, n, ranks);
    else
        sum_values<T, 1>(parts, x, n, ranks);
}

}  // namespace

#define SUMS(type, T)                                                                  \
    KERNEL(sum_parts_##type, __launch_bounds__(128), const T* parts, T* x, uint32_t n, \
        uint32_t ranks) {                                                              \
        sum_parts(parts, x, n, ranks);                                                 \
    }
ELEMENT_TYPES(SUMS)

KERNEL(join_columns_f32, __launch_bounds__(128), const float* parts, float* out, uint32_t rows,
    uint32_t columns, uint32_t most) {
    launch_dependents_and_wait();
    uint32_t row = blockIdx.x, column = blockIdx.y * THREADS + threadIdx.x;
    if (column >= columns) return;
    uint32_t rank = column / most, first = rank * most;
    uint32_t own = columns - first < most ? columns - first : most;
    size_t part = static_cast<size_t>(rank) * rows * most;
    out[static_cast<size_t>(row) * columns + column] =
        parts[part + static_cast<size_t>(row) * own + column - first];
}
