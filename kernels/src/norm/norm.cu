// norm: out[n, width] = x / rms(x) * weight, optionally after x += delta (in place).
// add_normed: x += delta / rms(delta) * weight. norm_columns: x = x / rms(x) * weight, of the
// columns from `first` on of rows that are `stride` apart. Sums and weights are f32. norm_rounded
// also writes out as linear/rounded_rows.cuh rounds rows.
//
// Grid: a block of 256 threads for each row. Bytes moved a row: (2 + 2 if delta) * width elements
// read and written, the second reading of x from cache. One block a row keeps a decode step's rows
// on different multiprocessors; at one row it is bound by latency, so whole 16-byte vectors are
// loaded where `width` allows.
#include "linear/rounded_rows.cuh"

namespace {

constexpr uint32_t THREADS = 256;

template <class T, uint32_t N>
DEVICE float add_and_square(T* x, const T* delta, uint32_t width) {
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x * N; i < width; i += THREADS * N) {
        Vec<T, N> values = load<T, N>(x + i);
        if (delta != nullptr) {
            Vec<T, N> added = load<T, N>(delta + i);
            for (uint32_t j = 0; j < N; j++)
                values.at[j] = from_float<T>(to_float(values.at[j]) + to_float(added.at[j]));
            store(x + i, values);
        }
        for (uint32_t j = 0; j < N; j++) sum += to_float(values.at[j]) * to_float(values.at[j]);
    }
    return sum;
}

template <class T, uint32_t N>
DEVICE void norm_row(T* x, const T* delta, const float* weight, T* out, uint32_t width, float eps) {
    float sum = block_sum<THREADS>(add_and_square<T, N>(x, delta, width));
    float scale = 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
    constexpr uint32_t W = N < PER_VEC<float> ? N : PER_VEC<float>;
    for (uint32_t i = threadIdx.x * N; i < width; i += THREADS * N) {
        Vec<T, N> values = load<T, N>(x + i);
        for (uint32_t j = 0; j < N; j += W) {
            Vec<float, W> weights = load<float, W>(weight + i + j);
            for (uint32_t k = 0; k < W; k++)
                values.at[j + k] =
                    from_float<T>(to_float(values.at[j + k]) * scale * weights.at[k]);
        }
        store(out + i, values);
    }
}

// The same for delta, whose normed row is added to x. A value is rounded before it is added, as the
// reference rounds it.
template <class T, uint32_t N>
DEVICE void add_normed_row(T* x, const T* delta, const float* weight, uint32_t width, float eps) {
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x * N; i < width; i += THREADS * N) {
        Vec<T, N> values = load<T, N>(delta + i);
        for (uint32_t j = 0; j < N; j++) sum += to_float(values.at[j]) * to_float(values.at[j]);
    }
    sum = block_sum<THREADS>(sum);
    float scale = 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
    for (uint32_t i = threadIdx.x * N; i < width; i += THREADS * N) {
        Vec<T, N> added = load<T, N>(delta + i), values = load<T, N>(x + i);
        for (uint32_t j = 0; j < N; j++) {
            T normed = from_float<T>(to_float(added.at[j]) * scale * weight[i + j]);
            values.at[j] = from_float<T>(to_float(values.at[j]) + to_float(normed));
        }
        store(x + i, values);
    }
}

template <class T>
DEVICE void add_normed(T* x, const T* delta, const float* weight, uint32_t width, float eps) {
    launch_dependents_and_wait();
    size_t row = static_cast<size_t>(blockIdx.x) * width;
    if (width % PER_VEC<T> == 0)
        add_normed_row<T, PER_VEC<T>>(x + row, delta + row, weight, width, eps);
    else
        add_normed_row<T, 1>(x + row, delta + row, weight, width, eps);
}

// A row is normed in place: a thread writes only values that it alone reads behind the sum.
template <class T>
DEVICE void norm_columns(
    T* x, const float* weight, uint32_t stride, uint32_t first, uint32_t width, float eps) {
    launch_dependents_and_wait();
    T* part = x + static_cast<size_t>(blockIdx.x) * stride + first;
    constexpr uint32_t N = PER_VEC<T>;
    if (stride % N == 0 && first % N == 0 && width % N == 0)
        norm_row<T, N>(part, nullptr, weight, part, width, eps);
    else
        norm_row<T, 1>(part, nullptr, weight, part, width, eps);
}

template <class T>
DEVICE void norm(T* x, const T* delta, const float* weight, T* out, uint32_t width, float eps) {
    launch_dependents();
    // The weights are fetched early: all weights of the layers have gone through the cache since
    // they were last read, so the cache no longer holds them.
    constexpr uint32_t SECTOR = 8;  // floats that one fetch brings: 32 bytes
    if (blockIdx.x == 0)
        for (uint32_t i = threadIdx.x * SECTOR; i < width; i += THREADS * SECTOR)
            prefetch(weight + i);
    wait_for_earlier_launches();
    size_t row = static_cast<size_t>(blockIdx.x) * width;
    const T* added = delta == nullptr ? nullptr : delta + row;
    if (width % PER_VEC<T> == 0)
        norm_row<T, PER_VEC<T>>(x + row, added, weight, out + row, width, eps);
    else
        norm_row<T, 1>(x + row, added, weight, out + row, width, eps);
}

}  // namespace

#define NORMS(type, T)                                                                             \
    KERNEL(norm_##type, __launch_bounds__(256), T* x, const T* delta, const float* weight, T* out, \
        uint32_t width, float eps) {                                                               \
        norm(x, delta, weight, out, width, eps);                                                   \
    }                                                                                              \
    KERNEL(add_normed_##type, __launch_bounds__(256), T* x, const T* delta, const float* weight,   \
        uint32_t width, float eps) {                                                               \
        add_normed(x, delta, weight, width, eps);                                                  \
    }                                                                                              \
    KERNEL(norm_columns_##type, __launch_bounds__(256), T* x, const float* weight,                 \
        uint32_t stride, uint32_t first, uint32_t width, float eps) {                              \
        norm_columns(x, weight, stride, first, width, eps);                                        \
    }
ELEMENT_TYPES(NORMS)
// `width` is a multiple of 8. A thread rounds the values that it wrote to `out`.
KERNEL(norm_rounded_bf16, __launch_bounds__(256), bf16* x, const bf16* delta, const float* weight,
    bf16* out, bf16* rounded, uint32_t width, float eps) {
    norm(x, delta, weight, out, width, eps);
    size_t row = static_cast<size_t>(blockIdx.x) * width;
    round_row_to<THREADS>(rounded + row, out + row, width);
}
