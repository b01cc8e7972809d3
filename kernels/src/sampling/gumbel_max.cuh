// Gumbel-max: the id with the largest scaled logit + noise, the lower id among equals, with the
// random words and the noise of gumbel.rs. Logarithms are taken in f64, and only where a bound
// without a logarithm does not rule the id out.
#pragma once

#include "sampling/sampling.cuh"

namespace {

struct ArgMax {
    double value;
    uint32_t id;
    DEVICE void update(ArgMax other) {
        if (other.value > value || (other.value == value && other.id < id)) *this = other;
    }
};
DEVICE ArgMax block_arg_max(ArgMax best) {
    return block_combine<THREADS>(
        best, ArgMax{static_cast<double>(MINUS_INFINITY), FULL_MASK}, [](ArgMax best) {
#pragma unroll
            for (uint32_t step = WARP / 2; step > 0; step /= 2)
                best.update({__shfl_xor_sync(FULL_MASK, best.value, step),
                    __shfl_xor_sync(FULL_MASK, best.id, step)});
            return best;
        });
}

DEVICE_CALL double noise(uint32_t word) {
    double v = (static_cast<double>(word) + 0.5) / 4294967296.0;
    return -log(-log1p(-v));
}

struct GumbelMax {
    uint32_t position, seed_low, seed_high;
    ArgMax best;
    float threshold;  // an id that cannot reach it needs no logarithm

    DEVICE GumbelMax(const RowParams& row, uint32_t max_key)
        : position(row.position), seed_low(row.seed_low), seed_high(row.seed_high) {
        best = {noise(word(max_key)), max_key};
        raise_threshold();
    }
    // The threshold is below the best value by more than the rounding to f32, so no id is ruled out
    // wrongly.
    DEVICE void raise_threshold() { threshold = static_cast<float>(best.value) - 1e-3f; }

    // Philox4x32-10 of (group, position, 0, 0): the words of four consecutive ids.
    DEVICE uint4 words(uint32_t group) const {
        uint4 c = make_uint4(group, position, 0, 0);
        uint32_t low = seed_low, high = seed_high;
#pragma unroll
        for (uint32_t round = 0; round < 10; round++) {
            uint32_t high0 = __umulhi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
            uint32_t high1 = __umulhi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
            c = make_uint4(high1 ^ c.y ^ low, low1, high0 ^ c.w ^ high, low0);
            low += 0x9E3779B9u, high += 0xBB67AE85u;
        }
        return c;
    }
    static DEVICE uint32_t component(const uint4& words, uint32_t i) {
        return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
    }
    DEVICE uint32_t word(uint32_t id) const { return component(words(id / 4), id % 4); }

    DEVICE void consider(uint32_t id, float scaled, uint32_t word) {
        // -ln(1 - v) >= v >= 2^-(zeros + 1) where `zeros` leading bits are 0, so the noise is at
        // most (zeros + 1) ln 2.
        if (scaled + static_cast<float>(__clz(word) + 1) * 0.6931472f < threshold) return;
        best.update({static_cast<double>(scaled) + noise(word), id});
        raise_threshold();
    }
    // Minus infinity is never chosen.
    DEVICE void consider_four(uint32_t first, const float (&scaled)[LANES]) {
        float most = fmaxf(fmaxf(scaled[0], scaled[1]), fmaxf(scaled[2], scaled[3]));
        if (most + 33 * 0.6931472f < threshold) return;
        uint4 random = words(first / 4);
#pragma unroll
        for (uint32_t i = 0; i < LANES; i++) consider(first + i, scaled[i], component(random, i));
    }
};

static_assert(LANES == 4, "words gives four at a time");

}  // namespace
