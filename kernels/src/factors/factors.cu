// scale: x[n] *= factor[0], in place; computed in f32 and rounded once. Grid: n / (128 threads ×
// one 16-byte vector). Bytes moved: 2 n elements. It follows the last norm of a Gemma 4 layer; as
// part of that norm's kernel it would save a launch and a passage through the second-level cache.
// choice_factors: weights[c] *= factors[ids[c]], f32, a thread for each choice: latency alone.
// The inputs of layers are computed by the gated activations of activation.cu. Not measured yet.
#include "common.cuh"

namespace {

constexpr uint32_t THREADS = 128;

template <class T, uint32_t N>
DEVICE void scale_values(T* x, const float* factor, uint32_t n) {
    uint32_t i = (blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= n) return;
    float by = *factor;
    Vec<T, N> values = load<T, N>(x + i);
#pragma unroll
    for (uint32_t j = 0; j < N; j++) values.at[j] = from_float<T>(to_float(values.at[j]) * by);
    store(x + i, values);
}

// `whole`: the values are whole vectors at multiples of their size.
template <class T>
DEVICE void scale(T* x, const float* factor, uint32_t n, uint32_t whole) {
    launch_dependents_and_wait();
    if (whole != 0)
        scale_values<T, PER_VEC<T>>(x, factor, n);
    else
        scale_values<T, 1>(x, factor, n);
}

}  // namespace

#define FACTORS(type, T)                                                                \
    KERNEL(scale_##type, __launch_bounds__(128), T* x, const float* factor, uint32_t n, \
        uint32_t whole) {                                                               \
        scale(x, factor, n, whole);                                                     \
    }
ELEMENT_TYPES(FACTORS)
KERNEL(choice_factors_f32, __launch_bounds__(128), float* weights, const uint32_t* ids,
    const float* factors, uint32_t choices, uint32_t experts) {
    launch_dependents_and_wait();
    uint32_t choice = blockIdx.x * THREADS + threadIdx.x;
    if (choice >= choices) return;
    ASSERT(ids[choice] < experts);
    weights[choice] *= factors[ids[choice]];
}
