// gated: out[n, width] = activation(gate, up). SiLU is x / (1 + exp(-x)) of the gate, times up;
// GELU's tanh form is x · sigmoid(2 √(2/π) (x + 0.044715 x³)), times up; the clamped SwiGLU is that
// of GPT-OSS. Rows of gate and up may stand among other columns. It computes in f32 and rounds
// once.
// *_rounded: the same, with each row rounded as linear/rounded_rows.cuh tells. A block has a whole
// row, since all of its values decide how they are rounded, and enough threads for two rounds.
// gate: x[n] = x · sigmoid(gate), in place, likewise.
//
// Grid: (n, width / (128 threads × one 16-byte vector)); gate's is n / the same. Bytes moved: 3 n
// width elements, each once. A thread has two vectors in flight, 64 KiB for a full
// multiprocessor, well over what hides the memory's latency; at one row of 14336 bf16 values the 14
// blocks are bound by latency. About 15 instructions a value: half of the time that the memory
// takes. Division is the approximate one (2 ulp; 0 for quotients below 2^-126).
// On an H200 a row of 14336 values takes 0.8 us, 256 rows 4.7.
#include "linear/rounded_rows.cuh"

namespace {

constexpr uint32_t THREADS = 128, ROW_THREADS = 1024;

DEVICE float sigmoid_of(float x, float minus_z) { return __fdividef(x, 1.0f + expf(minus_z)); }

struct Silu {
    DEVICE float operator()(float gate, float up) const { return sigmoid_of(gate, -gate) * up; }
};
struct Gelu {
    DEVICE float operator()(float gate, float up) const {
        constexpr float MINUS_2_SQRT_2_OVER_PI = -1.5957691216057308f;
        float z = MINUS_2_SQRT_2_OVER_PI * gate * (1.0f + 0.044715f * gate * gate);
        return sigmoid_of(gate, z) * up;
    }
};
// The comparisons leave NaN as it is.
struct ClampedSwiglu {
    float alpha, limit;

    DEVICE float operator()(float gate, float up) const {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        return sigmoid_of(gate, -alpha * gate) * (up + 1.0f);
    }
};
struct Sigmoid {
    DEVICE float operator()(float gate, float x) const { return __fdividef(x, 1.0f + expf(-gate)); }
};

template <class T, uint32_t N, class Activate>
DEVICE void gated_vector(const T* gate, const T* up, T* out, Activate activate) {
    Vec<T, N> g = load<T, N>(gate), u = load<T, N>(up), product;
#pragma unroll
    for (uint32_t j = 0; j < N; j++)
        product.at[j] = from_float<T>(activate(to_float(g.at[j]), to_float(u.at[j])));
    store(out, product);
}

// `out` may be `up`: a thread writes only values that it alone has read.
template <class T, uint32_t N, class Activate>
DEVICE void gated_values(
    const T* gate, const T* up, T* out, uint32_t block, uint32_t width, Activate activate) {
    uint32_t i = (block * THREADS + threadIdx.x) * N;
    if (i < width) gated_vector<T, N>(gate + i, up + i, out + i, activate);
}

// `whole`: every row consists of whole vectors at multiples of their size.
template <class T, class Activate>
DEVICE void gated(const T* gate, const T* up, T* out, uint32_t gate_stride, uint32_t up_stride,
    uint32_t width, uint32_t whole, Activate activate) {
    launch_dependents_and_wait();
    size_t row = blockIdx.x;
    gate += row * gate_stride, up += row * up_stride, out += row * width;
    if (whole != 0)
        gated_values<T, PER_VEC<T>>(gate, up, out, blockIdx.y, width, activate);
    else
        gated_values<T, 1>(gate, up, out, blockIdx.y, width, activate);
}

// Rows consist of whole vectors. A thread rounds the values that it wrote.
template <class Activate>
DEVICE void gated_rounded(const bf16* gate, const bf16* up, bf16* out, uint32_t gate_stride,
    uint32_t up_stride, uint32_t width, Activate activate) {
    launch_dependents_and_wait();
    constexpr uint32_t N = PER_VEC<bf16>;
    size_t row = blockIdx.x;
    gate += row * gate_stride, up += row * up_stride, out += row * width;
    for (uint32_t i = threadIdx.x * N; i < width; i += ROW_THREADS * N)
        gated_vector<bf16, N>(gate + i, up + i, out + i, activate);
    round_row_to<ROW_THREADS>(out, out, width);
}

template <class T>
DEVICE void gate_in_place(T* x, const T* gate, uint32_t n, uint32_t whole) {
    launch_dependents_and_wait();
    if (whole != 0)
        gated_values<T, PER_VEC<T>>(gate, x, x, blockIdx.x, n, Sigmoid{});
    else
        gated_values<T, 1>(gate, x, x, blockIdx.x, n, Sigmoid{});
}

}  // namespace

#define GATED_PARAMETERS(T) \
    const T *gate, const T *up, T *out, uint32_t gate_stride, uint32_t up_stride, uint32_t width
#define ACTIVATIONS(type, T)                                                                       \
    KERNEL(silu_##type, __launch_bounds__(128), GATED_PARAMETERS(T), uint32_t whole) {             \
        gated(gate, up, out, gate_stride, up_stride, width, whole, Silu{});                        \
    }                                                                                              \
    KERNEL(gelu_##type, __launch_bounds__(128), GATED_PARAMETERS(T), uint32_t whole) {             \
        gated(gate, up, out, gate_stride, up_stride, width, whole, Gelu{});                        \
    }                                                                                              \
    KERNEL(clamped_swiglu_##type, __launch_bounds__(128), GATED_PARAMETERS(T), uint32_t whole,     \
        float alpha, float limit) {                                                                \
        gated(gate, up, out, gate_stride, up_stride, width, whole, ClampedSwiglu{alpha, limit});   \
    }                                                                                              \
    KERNEL(gate_##type, __launch_bounds__(128), T* x, const T* gate, uint32_t n, uint32_t whole) { \
        gate_in_place(x, gate, n, whole);                                                          \
    }
ELEMENT_TYPES(ACTIVATIONS)

KERNEL(silu_rounded_bf16, __launch_bounds__(1024), GATED_PARAMETERS(bf16)) {
    gated_rounded(gate, up, out, gate_stride, up_stride, width, Silu{});
}
KERNEL(gelu_rounded_bf16, __launch_bounds__(1024), GATED_PARAMETERS(bf16)) {
    gated_rounded(gate, up, out, gate_stride, up_stride, width, Gelu{});
}
KERNEL(clamped_swiglu_rounded_bf16, __launch_bounds__(1024), GATED_PARAMETERS(bf16), float alpha,
    float limit) {
    gated_rounded(gate, up, out, gate_stride, up_stride, width, ClampedSwiglu{alpha, limit});
}
