// Floats of eight bits (e4m3: a sign, four bits of exponent, three of mantissa) as the cache keeps
// keys and values: those of a head of a token are codes times a scale in bf16. Within each 16
// dimensions, the code of dimension d stands at place 2 (d % 8) + d / 8, so that the even and the
// odd bytes of what `ldmatrix` reads are pairs as tensor cores take them.
#pragma once

#include "common.cuh"

namespace {

// The code of the nearest value, ties to even, and the largest one for numbers beyond it: what
// cvt.rn.satfinite.e4m3x2.f32 gives on sm_89 and later. NaN becomes the largest.
DEVICE uint8_t to_e4m3(float x) {
    uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80, rest = bits & 0x7fffffff;
    // Below 2^-6 codes count multiples of 2^-9, the unit in the last place of 2^14.
    uint32_t code = __float_as_uint(__fadd_rn(__uint_as_float(rest), 0x1p14f)) & 0xff;
    // The biases of the exponents are 127 and 7.
    if (rest >= 0x3c800000)
        code = min((rest + 0x7ffff + (rest >> 20 & 1)) / (1 << 20) - (120 << 3), 0x7eu);
    return static_cast<uint8_t>(sign | code);
}

// The scale that gives the largest of some numbers the largest code, 448. `largest` has the bits of
// its absolute value. One that is not finite makes the scale, and so all values, NaN.
DEVICE bf16 e4m3_scale(uint32_t largest) {
    constexpr float MOST = 128.0f;  // so that their factors are finite
    if (largest >= 0x7f800000) return bf16{0x7fff};
    return from_float<bf16>(fminf(__uint_as_float(largest) * (1.0f / 448.0f), MOST));
}

// The factors for `widen_e4m3` of two scales of 1, 2^120: the bias of bf16's exponents is larger
// by 120.
constexpr uint32_t E4M3_UNIT_FACTORS = 0x7b807b80u;
// Those of a pair of scales.
DEVICE uint32_t e4m3_factors(uint32_t scales) { return multiply_pairs(scales, E4M3_UNIT_FACTORS); }

// The values of the codes in the high bytes of both halves of `codes`, rounded once to bf16.
DEVICE uint32_t widen_e4m3(uint32_t codes, uint32_t factors) {
    return multiply_pairs((codes & 0x80008000u) | (codes >> 4 & 0x07f007f0u), factors);
}

}  // namespace
