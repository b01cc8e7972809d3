// Activations rounded to the numbers of E4M3, which have four bits of exponent and three of
// mantissa and are at most 448, times a power of two that a row has for itself.
//
// The power is the smallest for which no value of the row is beyond 448. So bf16 holds every
// rounded value exactly, and whatever multiplies bf16 multiplies rounded rows as they are; a factor
// of largest / 448 would have to be applied to the sums of every product, and is not more exact:
// the error of a float does not depend on its factor but near zero, where values are 2^-15 of the
// largest and less. Rounding a rounded row changes nothing.
#pragma once

#include "e4m3.cuh"

namespace {

// The exponent's field of a row's power of two in f32; `largest` has the bits of the largest
// magnitude in bf16. 448 is 1.75 × 2^8. Powers below 2^-117 are not used, so that every rounded
// value is a normal number of bf16 or zero.
DEVICE uint32_t power_of_row(uint32_t largest) {
    uint32_t exponent = (largest + 31) >> 7;
    return (exponent < 18 ? 18 : exponent) - 8;
}

// The code of a number of at most 448. That of infinity and NaN is NaN, so that these are seen.
DEVICE uint32_t e4m3_code(float x) {
    uint32_t bits = __float_as_uint(x);
    return (bits & 0x7fffffffu) < 0x7f800000u ? to_e4m3(x) : (bits >> 24 & 0x80u) | 0x7fu;
}

// The number of a code.
DEVICE float e4m3_value(uint32_t code) {
    uint32_t magnitude = code & 0x7fu;
    float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f
                                : __uint_as_float((magnitude + (120u << 3)) << 20);
    if (magnitude == 0x7f) value = __uint_as_float(0x7fc00000u);
    return (code & 0x80u) != 0 ? -value : value;
}

DEVICE uint32_t magnitude_bits(bf16 x) { return x.bits & 0x7fffu; }

// The larger magnitude of a row, found by all threads of a block.
template <uint32_t THREADS>
DEVICE uint32_t block_largest(uint32_t own) {
    return block_combine<THREADS>(own, 0u, [](uint32_t x) { return warp_max(x); });
}

// Rounds values of a row to codes, with the power of the row, and to bf16.
struct RowRounding {
    uint32_t power;

    DEVICE explicit RowRounding(uint32_t largest) : power(power_of_row(largest)) {}

    DEVICE float scale() const { return __uint_as_float(power << 23); }
    DEVICE uint32_t code(bf16 x) const {
        return e4m3_code(to_float(x) * __uint_as_float((254 - power) << 23));
    }
    DEVICE bf16 rounded(bf16 x) const { return from_float<bf16>(e4m3_value(code(x)) * scale()); }
};

// Rounds a row of whole vectors, by all threads of a block. Calls `write` with the place of each
// vector, its values and the row's rounding. A thread reads vectors THREADS apart.
template <uint32_t THREADS, class Write>
DEVICE void round_row(const bf16* row, uint32_t cols, Write write) {
    constexpr uint32_t N = PER_VEC<bf16>;
    uint32_t largest = 0;
    for (uint32_t i = threadIdx.x * N; i < cols; i += THREADS * N) {
        Vec<bf16, N> values = load(row + i);
#pragma unroll
        for (uint32_t j = 0; j < N; j++) {
            uint32_t own = magnitude_bits(values.at[j]);
            largest = own > largest ? own : largest;
        }
    }
    RowRounding rounding(block_largest<THREADS>(largest));
    for (uint32_t i = threadIdx.x * N; i < cols; i += THREADS * N)
        write(i, load(row + i), rounding);
}

// Writes the rounded row in bf16. `out` may be `row`.
template <uint32_t THREADS>
DEVICE void round_row_to(bf16* out, const bf16* row, uint32_t cols) {
    round_row<THREADS>(
        row, cols, [&](uint32_t at, Vec<bf16, 8> values, const RowRounding& rounding) {
#pragma unroll
            for (uint32_t j = 0; j < 8; j++) values.at[j] = rounding.rounded(values.at[j]);
            store(out + at, values);
        });
}

}  // namespace
