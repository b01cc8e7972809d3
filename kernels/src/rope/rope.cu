// Rotates a step's qkv[n, (heads + 2 kv_heads) head_dim] in one launch: Q heads are normed
// (optionally) and rotated in place, K heads likewise into their token's slot of k_cache[slots,
// kv_heads, head_dim], V heads copied into v_cache. It computes in f32 and rounds once. Pair i of a
// head is rotated by the angle (cos, sin)[position, i]: values (i, i + half), or (2i, 2i + 1) when
// interleaved; values from 2 half on are only normed. Q is multiplied by the scale of its position,
// if there are scales.
//
// Grid: half a warp for each head of each token, 8 heads a block. A lane takes four pairs, so a
// head of 128 is one step of two 8-byte loads of bf16 (16 of f32) beside 16 bytes each of cos and
// sin.
// Bytes moved a token: twice its qkv, with the norm's second reading from cache: 24 KiB for 32 + 2
// × 8 heads of 128 in bf16, so a step of 512 rows is about 3 µs of the memory's time and few rows
// are bound by latency (6 blocks at one row).
// Considered: a block a token with its qkv in shared memory (more latency: a barrier; idle
// multiprocessors at one row); 16-byte loads with a quarter warp a head (the cos and sin of a lane
// then take four loads). On an H200: 1.7 us for a row of an 8B model, 6.8 for 512.
//
// A cache in e4m3 gets codes and scales, laid out as `args.rs` says. A scale follows from the
// largest value of a head, so heads are rounded to bf16 in place and read again: predicted is 1 us
// more for a row.
#include "e4m3.cuh"

namespace {

constexpr uint32_t THREADS = 128;  // threads of a block
constexpr uint32_t LANES = 16;     // threads that share a head

template <class T>
struct RopeParams {
    T* qkv;
    const uint32_t *positions, *slots;
    const float *cos, *sin, *scales, *q_norm, *k_norm;
    float eps;
    T *k_cache, *v_cache;
    uint32_t n, heads, kv_heads, dim, half, max_positions, max_slots;
    uint32_t block_size;  // of a cache in e4m3; 0 for one of T
};

// Loads N values from `first` and N from `second`, multiplied by `scale` and, if there is a `norm`,
// its weights.
template <class T, uint32_t N>
DEVICE void load_pairs(float (&x)[2 * N], const T* in, uint32_t first, uint32_t second,
    const float* norm, float scale) {
    Vec<T, N> a = load<T, N>(in + first), b = load<T, N>(in + second);
    for (uint32_t j = 0; j < N; j++) x[j] = to_float(a.at[j]), x[j + N] = to_float(b.at[j]);
    if (norm == nullptr) {
        for (uint32_t j = 0; j < 2 * N; j++) x[j] *= scale;
        return;
    }
    Vec<float, N> v = load<float, N>(norm + first), w = load<float, N>(norm + second);
    for (uint32_t j = 0; j < N; j++) x[j] *= scale * v.at[j], x[j + N] *= scale * w.at[j];
}

// `out` may be `in`, since a lane writes only values that it alone has read.
template <class T, uint32_t N, bool INTERLEAVED>
DEVICE void rotate(const T* in, T* out, const float* cos, const float* sin, uint32_t half,
    const float* norm, float scale) {
    for (uint32_t i = threadIdx.x % LANES * N; i < half; i += LANES * N) {
        uint32_t first = INTERLEAVED ? 2 * i : i, second = INTERLEAVED ? 2 * i + N : i + half;
        float x[2 * N];
        load_pairs<T, N>(x, in, first, second, norm, scale);
        Vec<float, N> c = load<float, N>(cos + i), s = load<float, N>(sin + i);
        Vec<T, N> rotated[2];
        for (uint32_t j = 0; j < N; j++) {
            uint32_t a = INTERLEAVED ? 2 * j : j, b = INTERLEAVED ? 2 * j + 1 : j + N;
            rotated[a / N].at[a % N] = from_float<T>(x[a] * c.at[j] - x[b] * s.at[j]);
            rotated[b / N].at[b % N] = from_float<T>(x[b] * c.at[j] + x[a] * s.at[j]);
        }
        store(out + first, rotated[0]);
        store(out + second, rotated[1]);
    }
}

template <class T, uint32_t N>
DEVICE void copy_values(
    const T* in, T* out, uint32_t begin, uint32_t end, const float* norm, float scale) {
    for (uint32_t i = begin + threadIdx.x % LANES * N; i < end; i += LANES * N) {
        Vec<T, N> x = load<T, N>(in + i);
        for (uint32_t j = 0; j < N; j++) {
            float value = to_float(x.at[j]) * scale;
            x.at[j] = from_float<T>(norm == nullptr ? value : value * norm[i + j]);
        }
        store(out + i, x);
    }
}

// 1 / rms of a head, for its half of the warp; every thread must call it.
template <class T, uint32_t N>
DEVICE float inverse_rms(const T* in, uint32_t dim, float eps) {
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x % LANES * N; i < dim; i += LANES * N) {
        Vec<T, N> x = load<T, N>(in + i);
        for (uint32_t j = 0; j < N; j++) sum += to_float(x.at[j]) * to_float(x.at[j]);
    }
    for (uint32_t step = LANES / 2; step > 0; step /= 2)
        sum += __shfl_xor_sync(FULL_MASK, sum, step);
    return 1.0f / sqrtf(sum / static_cast<float>(dim) + eps);
}

// Writes a head as codes and a scale, for its half of the warp; every thread must call it, also
// where the half has no head to write.
DEVICE void write_codes(const RopeParams<bf16>& params, const bf16* in, bf16* cache, uint32_t slot,
    uint32_t head, bool exists) {
    uint32_t largest = 0, own = threadIdx.x % LANES * 8, end = exists ? params.dim : 0;
    for (uint32_t i = own; i < end; i += LANES * 8) {
        Vec<bf16, 8> x = load<bf16, 8>(in + i);
        for (uint32_t j = 0; j < 8; j++) largest = max(largest, x.at[j].bits & 0x7fffu);
    }
    for (uint32_t step = LANES / 2; step > 0; step /= 2)
        largest = max(largest, __shfl_xor_sync(FULL_MASK, largest, step));
    if (!exists) return;
    ASSERT(slot < params.max_slots);
    bf16 scale = e4m3_scale(largest << 16);
    float by = to_float(scale) > 0.0f ? 1.0f / to_float(scale) : 0.0f;
    size_t vectors = static_cast<size_t>(params.max_slots) * params.kv_heads * params.dim;
    uint8_t* codes = reinterpret_cast<uint8_t*>(cache) +
                     (static_cast<size_t>(slot) * params.kv_heads + head) * params.dim;
    for (uint32_t i = own; i < end; i += LANES * 8) {
        const bf16* first = in + i / 16 * 16 + i % 16 / 2;
        Vec<bf16, 4> low = load<bf16, 4>(first), high = load<bf16, 4>(first + 8);
        Vec<uint8_t, 8> out;
        for (uint32_t j = 0; j < 4; j++) {
            out.at[2 * j] = to_e4m3(__fmul_rn(to_float(low.at[j]), by));
            out.at[2 * j + 1] = to_e4m3(__fmul_rn(to_float(high.at[j]), by));
        }
        store(codes + i, out);
    }
    size_t row = static_cast<size_t>(slot / params.block_size) * params.kv_heads + head;
    if (threadIdx.x % LANES == 0)
        cache[vectors / 2 + row * params.block_size + slot % params.block_size] = scale;
}

template <class T, uint32_t N, bool INTERLEAVED>
DEVICE void rope_head(const RopeParams<T>& params) {
    uint32_t dim = params.dim, per_token = params.heads + 2 * params.kv_heads;
    uint32_t head_index = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    bool exists = head_index < params.n * per_token;
    uint32_t token = exists ? head_index / per_token : 0,
             head = exists ? head_index % per_token : 0;
    T* in = params.qkv + (static_cast<size_t>(token) * per_token + head) * dim;
    launch_dependents();
    prefetch(params.positions + token), prefetch(params.slots + token);
    wait_for_earlier_launches();
    bool is_q = head < params.heads, is_v = head >= params.heads + params.kv_heads;
    const float* norm = is_q ? params.q_norm : is_v ? nullptr : params.k_norm;
    float scale = inverse_rms<T, N>(in, norm == nullptr ? 0 : dim, params.eps);
    if (norm == nullptr) scale = 1.0f;
    uint32_t slot = is_q ? 0 : params.slots[token],
             kv_head = is_q ? 0 : (head - params.heads) % params.kv_heads;
    T *cache = is_v ? params.v_cache : params.k_cache, *out = in;
    if (!is_q && params.block_size == 0) {
        ASSERT(slot < params.max_slots);
        out = cache + (static_cast<size_t>(slot) * params.kv_heads + kv_head) * dim;
    }
    uint32_t rotated = 0;
    if (exists && !is_v) {
        ASSERT(params.positions[token] < params.max_positions);
        uint32_t position = params.positions[token];
        if (is_q && params.scales != nullptr) scale *= params.scales[position];
        size_t angles = static_cast<size_t>(position) * params.half;
        rotate<T, N, INTERLEAVED>(
            in, out, params.cos + angles, params.sin + angles, params.half, norm, scale);
        rotated = 2 * params.half;
    }
    if (exists && (norm != nullptr || out != in || scale != 1.0f))
        copy_values<T, N>(in, out, rotated, dim, norm, scale);
    if constexpr (sizeof(T) == sizeof(bf16)) {
        if (params.block_size == 0) return;
        __syncwarp();  // The head's values are written.
        write_codes(params, in, cache, slot, kv_head, exists && !is_q);
    }
}

template <class T>
DEVICE void rope(const RopeParams<T>& params, bool interleaved) {
    constexpr uint32_t N = 4;
    bool whole = params.dim % N == 0 && params.half % N == 0;
    if (whole && interleaved)
        rope_head<T, N, true>(params);
    else if (whole)
        rope_head<T, N, false>(params);
    else if (interleaved)
        rope_head<T, 1, true>(params);
    else
        rope_head<T, 1, false>(params);
}

}  // namespace

#define ROPES(type, T)                                                                            \
    KERNEL(rope_##type, __launch_bounds__(128), T* qkv, const uint32_t* positions,                \
        const uint32_t* slots, const float* cos, const float* sin, const float* scales,           \
        const float* q_norm, const float* k_norm, float eps, T* k_cache, T* v_cache, uint32_t n,  \
        uint32_t heads, uint32_t kv_heads, uint32_t dim, uint32_t half, uint32_t max_positions,   \
        uint32_t max_slots, uint32_t block_size, uint32_t interleaved) {                          \
        rope(RopeParams<T>{qkv, positions, slots, cos, sin, scales, q_norm, k_norm, eps, k_cache, \
                 v_cache, n, heads, kv_heads, dim, half, max_positions, max_slots, block_size},   \
            interleaved != 0);                                                                    \
    }
ELEMENT_TYPES(ROPES)
