// The last step of attention whose keys were cut: a warp merges the partial results of one head of
// a row in the order of its keys. `decode.cu` has a way of its own for all heads of a tile.
#pragma once

#include "attention/paged.cuh"

namespace {

// Merges values `first` to `first` + 32 PER_LANE of the partial results in `own`. As many as
// fit IN_REGISTERS are read before the first is merged: reading one after the other took 0.3 us for
// each on an H200.
template <uint32_t PER_LANE, uint32_t IN_REGISTERS, class T>
DEVICE void merge_values(float* workspace, T* out, const float* sinks, Range own, uint32_t first,
    uint32_t head, uint32_t heads, uint32_t value_dim) {
    constexpr uint32_t AT_ONCE = IN_REGISTERS / PER_LANE;
    float o[PER_LANE] = {}, row_sum = 0.0f, row_max = MINUS_INFINITY;
    for (uint32_t begin = own.begin; begin < own.end; begin += AT_ONCE) {
        Vec<float, 2> states[AT_ONCE];
        float values[AT_ONCE][PER_LANE];
#pragma unroll
        for (uint32_t p = 0; p < AT_ONCE; p++) {
            PartialState from(workspace, heads, value_dim, min(begin + p, own.end - 1), head);
            states[p] = load<float, 2>(from.max_and_sum);
#pragma unroll
            for (uint32_t i = 0; i < PER_LANE; i++) {
                uint32_t d = first + i * WARP + lane();
                values[p][i] = d < value_dim ? from.out[d] : 0.0f;
            }
        }
#pragma unroll
        for (uint32_t p = 0; p < AT_ONCE; p++) {
            if (begin + p >= own.end) break;
            StateMerge both(row_max, states[p].at[0]);
            row_max = both.row_max;
            row_sum = both.merge(row_sum, states[p].at[1]);
#pragma unroll
            for (uint32_t i = 0; i < PER_LANE; i++) o[i] = both.merge(o[i], values[p][i]);
        }
    }
    float by = normaliser(row_max, row_sum, sinks, head);
#pragma unroll
    for (uint32_t i = 0; i < PER_LANE; i++) {
        uint32_t d = first + i * WARP + lane();
        if (d < value_dim) out[d] = from_float<T>(o[i] * by);
    }
}

// Merges the partial results in `own` of a head of a row, and writes the normalised result. Every
// lane of a warp calls it.
template <uint32_t IN_REGISTERS, class T>
DEVICE_CALL void merge_partials(float* workspace, T* out, const float* sinks, Range own, size_t row,
    uint32_t head, uint32_t heads, uint32_t value_dim) {
    out += (row * heads + head) * value_dim;
    if (value_dim <= 4 * WARP)
        return merge_values<4, IN_REGISTERS>(workspace, out, sinks, own, 0, head, heads, value_dim);
    for (uint32_t first = 0; first < value_dim; first += 8 * WARP)
        merge_values<8, IN_REGISTERS>(workspace, out, sinks, own, first, head, heads, value_dim);
}

}  // namespace
