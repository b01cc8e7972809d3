// x[n] = cap * tanh(x / cap), in place. Grid: blocks of 256 threads, 4 values a thread, loaded as
// one vector except at the end. Bytes moved: 8 * n. Not measured on a device yet.
#include "common.cuh"

namespace {

constexpr uint32_t THREADS = 256, LANES = PER_VEC<float>;

DEVICE float capped(float x, float cap) { return cap * tanhf(x / cap); }

}  // namespace

KERNEL(soft_cap_f32, __launch_bounds__(256), float* x, uint64_t n, float cap) {
    launch_dependents_and_wait();
    uint64_t at = (static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x) * LANES;
    if (at + LANES <= n) {
        Vec<float, LANES> values = load(x + at);
#pragma unroll
        for (uint32_t i = 0; i < LANES; i++) values.at[i] = capped(values.at[i], cap);
        store(x + at, values);
    } else {
        for (; at < n; at++) x[at] = capped(x[at], cap);
    }
}
