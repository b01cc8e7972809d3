// Latent attention: puts together queries[n, heads, rank + 2 half] from plain[n, heads, rank] and
// rotary[n, heads, 2 half], which is rotated, and writes latent[n, rank + 2 half], whose last part
// is rotated, into its token's slot of cache[slots, rank + 2 half]. Queries are multiplied by the
// scale of their position, if there is one. Pairs are those of rope.cu. It computes in f32 and
// rounds once.
//
// Grid: a warp for each head of each token and for its latent vector, four warps a block. Bytes
// moved a token: twice its queries and its vector, 2 × 129 × 1152 bytes for 128 heads of 576 in
// bf16: a step of 512 rows is some 35 us of the memory's time, a row is bound by latency. Most of
// it is the copy of the plain part: a product that writes rows of another stride than its own would
// save that. Not measured yet.
#include "common.cuh"

namespace {

template <class T>
struct LatentParams {
    const T *plain, *rotary, *latent;
    const uint32_t *positions, *slots;
    const float *cos, *sin, *scales;
    T *queries, *cache;
    uint32_t n, heads, rank, half, max_positions, max_slots, interleaved;

    DEVICE uint32_t width() const { return rank + 2 * half; }
};

template <class T, uint32_t N>
DEVICE void copy_scaled(const T* in, T* out, uint32_t len, float scale) {
    for (uint32_t i = lane() * N; i < len; i += WARP * N) {
        Vec<T, N> x = load<T, N>(in + i);
        if (scale != 1.0f)
            for (uint32_t j = 0; j < N; j++) x.at[j] = from_float<T>(to_float(x.at[j]) * scale);
        store(out + i, x);
    }
}

template <class T>
DEVICE void rotate_scaled(
    const LatentParams<T>& params, uint32_t position, const T* in, T* out, float scale) {
    size_t angles = static_cast<size_t>(position) * params.half;
    for (uint32_t i = lane(); i < params.half; i += WARP) {
        uint32_t first = params.interleaved != 0 ? 2 * i : i,
                 second = params.interleaved != 0 ? 2 * i + 1 : i + params.half;
        float x = to_float(in[first]), y = to_float(in[second]);
        float c = params.cos[angles + i], s = params.sin[angles + i];
        out[first] = from_float<T>((x * c - y * s) * scale);
        out[second] = from_float<T>((y * c + x * s) * scale);
    }
}

template <class T>
DEVICE void rope_latent(const LatentParams<T>& params) {
    launch_dependents_and_wait();
    uint32_t item = blockIdx.x * (blockDim.x / WARP) + warp(), vectors = params.heads + 1;
    uint32_t token = item / vectors, head = item % vectors;
    if (token >= params.n) return;
    uint32_t position = params.positions[token], rank = params.rank;
    ASSERT(position < params.max_positions);
    size_t at = static_cast<size_t>(token) * params.heads + head;
    const T *plain = params.plain + at * rank, *rotary = params.rotary + at * 2 * params.half;
    T* out = params.queries + at * params.width();
    float scale = params.scales == nullptr ? 1.0f : params.scales[position];
    if (head == params.heads) {
        uint32_t slot = params.slots[token];
        ASSERT(slot < params.max_slots);
        plain = params.latent + static_cast<size_t>(token) * params.width(), rotary = plain + rank;
        out = params.cache + static_cast<size_t>(slot) * params.width();
        scale = 1.0f;
    }
    if (rank % PER_VEC<T> == 0 && params.width() % PER_VEC<T> == 0)
        copy_scaled<T, PER_VEC<T>>(plain, out, rank, scale);
    else
        copy_scaled<T, 1>(plain, out, rank, scale);
    rotate_scaled(params, position, rotary, out + rank, scale);
}

}  // namespace

#define LATENT_ROPES(type, T)                                                                    \
    KERNEL(rope_latent_##type, __launch_bounds__(128), const T* plain, const T* rotary,          \
        const T* latent, const uint32_t* positions, const uint32_t* slots, const float* cos,     \
        const float* sin, const float* scales, T* queries, T* cache, uint32_t n, uint32_t heads, \
        uint32_t rank, uint32_t half, uint32_t max_positions, uint32_t max_slots,                \
        uint32_t interleaved) {                                                                  \
        rope_latent(LatentParams<T>{plain, rotary, latent, positions, slots, cos, sin, scales,   \
            queries, cache, n, heads, rank, half, max_positions, max_slots, interleaved});       \
    }
ELEMENT_TYPES(LATENT_ROPES)
