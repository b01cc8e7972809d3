// out[n, width] = activation(gate) * up, where the columns of gate_up[n, 2 width] are gate, then
// up. SiLU is x / (1 + exp(-x)); GELU's tanh form is x · sigmoid(2 √(2/π) (x + 0.044715 x³)). It
// computes in f32 and rounds once.
//
// Grid: (n, width / (128 threads × one 16-byte vector)). Bytes moved: 3 n width elements, each
// once. A thread has two vectors in flight, 64 KiB for a full multiprocessor, well over what hides
// the memory's latency; at one row of 14336 bf16 values the 14 blocks are bound by latency. About
// 15 instructions a value: half of the time that the memory takes. Division is the approximate one
// (2 ulp; 0 for quotients below 2^-126). Not measured yet.
#include "common.cuh"

namespace {

constexpr uint32_t THREADS = 128;

DEVICE float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }
DEVICE float gelu(float x) {
    constexpr float MINUS_2_SQRT_2_OVER_PI = -1.5957691216057308f;
    return __fdividef(x, 1.0f + expf(MINUS_2_SQRT_2_OVER_PI * x * (1.0f + 0.044715f * x * x)));
}

template <class T, uint32_t N, class Activate>
DEVICE void gated_values(const T* gate, const T* up, T* out, uint32_t width, Activate activate) {
    uint32_t i = (blockIdx.y * THREADS + threadIdx.x) * N;
    if (i >= width) return;
    Vec<T, N> g = load<T, N>(gate + i), u = load<T, N>(up + i), product;
#pragma unroll
    for (uint32_t j = 0; j < N; j++)
        product.at[j] = from_float<T>(activate(to_float(g.at[j])) * to_float(u.at[j]));
    store(out + i, product);
}

// The launch counts its blocks with the same vector size, so both must follow from `width` alike.
template <class T, class Activate>
DEVICE void gated(const T* gate_up, T* out, uint32_t width, Activate activate) {
    launch_dependents_and_wait();
    size_t row = static_cast<size_t>(blockIdx.x) * width;
    const T* gate = gate_up + 2 * row;
    if (width % PER_VEC<T> == 0)
        gated_values<T, PER_VEC<T>>(gate, gate + width, out + row, width, activate);
    else
        gated_values<T, 1>(gate, gate + width, out + row, width, activate);
}

}  // namespace

KERNEL __launch_bounds__(128) silu_f32(const float* gate_up, float* out, uint32_t width) {
    gated(gate_up, out, width, [](float x) { return silu(x); });
}
EXPORT(silu_f32)
KERNEL __launch_bounds__(128) silu_bf16(const bf16* gate_up, bf16* out, uint32_t width) {
    gated(gate_up, out, width, [](float x) { return silu(x); });
}
EXPORT(silu_bf16)
KERNEL __launch_bounds__(128) gelu_f32(const float* gate_up, float* out, uint32_t width) {
    gated(gate_up, out, width, [](float x) { return gelu(x); });
}
EXPORT(gelu_f32)
KERNEL __launch_bounds__(128) gelu_bf16(const bf16* gate_up, bf16* out, uint32_t width) {
    gated(gate_up, out, width, [](float x) { return gelu(x); });
}
EXPORT(gelu_bf16)
