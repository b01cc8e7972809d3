// The last step of attention whose keys were cut: merges the partial results of a row in the order
// of its keys and writes the normalised result. A row is a query of all heads.
//
// Grid: a warp for each query head of each row, four warps to a block. Rows of one piece were
// written by decode itself, and here cost a look at their number. A warp reads (value_dim + 2) * 4
// bytes a piece, in whole lines, and keeps several pieces' loads under way since none depends on
// the sums.
#include "attention/paged.cuh"

namespace {

// Merges values `first` to `first` + 32 PER_LANE of the partial results in `own`, of all `partials`
// that the workspace has. As many as registers can hold are read before the first is merged:
// reading one after the other took 0.3 us for each on an H200.
template <uint32_t PER_LANE, class T>
DEVICE void merge_values(float* workspace, T* out, const float* sinks, Range own, uint32_t first,
    uint32_t head, uint32_t heads, uint32_t value_dim, size_t partials) {
    constexpr uint32_t AT_ONCE = 64 / PER_LANE;
    float o[PER_LANE] = {}, row_sum = 0.0f, row_max = MINUS_INFINITY;
    for (uint32_t begin = own.begin; begin < own.end; begin += AT_ONCE) {
        Vec<float, 2> states[AT_ONCE];
        float values[AT_ONCE][PER_LANE];
#pragma unroll
        for (uint32_t p = 0; p < AT_ONCE; p++) {
            PartialState from(
                workspace, partials, heads, value_dim, min(begin + p, own.end - 1), head);
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

template <class T>
DEVICE void merge_partials(float* workspace, T* out, const float* sinks, Range own, size_t row,
    uint32_t head, uint32_t heads, uint32_t value_dim, size_t partials) {
    out += (row * heads + head) * value_dim;
    if (value_dim <= 4 * WARP)
        return merge_values<4>(workspace, out, sinks, own, 0, head, heads, value_dim, partials);
    for (uint32_t first = 0; first < value_dim; first += 8 * WARP)
        merge_values<8>(workspace, out, sinks, own, first, head, heads, value_dim, partials);
}

// `firsts` tells which partial results belong to each row: see `DecodePlan`.
template <class T>
DEVICE void combine(float* workspace, T* out, const float* sinks, const uint32_t* firsts,
    uint32_t rows, uint32_t heads, uint32_t value_dim, uint32_t partials) {
    launch_dependents_and_wait();
    uint32_t item = blockIdx.x * (blockDim.x / WARP) + warp(), row = item / heads;
    if (row >= rows) return;
    Range own{firsts[row], firsts[row + 1]};
    ASSERT(own.begin <= own.end && own.end <= partials);
    if (own.begin == own.end) return;
    merge_partials(workspace, out, sinks, own, row, item % heads, heads, value_dim, partials);
}

}  // namespace

KERNEL __launch_bounds__(128)
    attention_combine_f32(float* workspace, float* out, const float* sinks, const uint32_t* firsts,
        uint32_t rows, uint32_t heads, uint32_t value_dim, uint32_t partials) {
    combine(workspace, out, sinks, firsts, rows, heads, value_dim, partials);
}
EXPORT(attention_combine_f32)
KERNEL __launch_bounds__(128)
    attention_combine_bf16(float* workspace, bf16* out, const float* sinks, const uint32_t* firsts,
        uint32_t rows, uint32_t heads, uint32_t value_dim, uint32_t partials) {
    combine(workspace, out, sinks, firsts, rows, heads, value_dim, partials);
}
EXPORT(attention_combine_bf16)
// Every row has `parts` partial results.
KERNEL __launch_bounds__(128) attention_combine_parts_bf16(float* workspace, bf16* out,
    const float* sinks, uint32_t rows, uint32_t heads, uint32_t value_dim, uint32_t parts) {
    launch_dependents_and_wait();
    uint32_t item = blockIdx.x * (blockDim.x / WARP) + warp(), row = item / heads;
    if (row >= rows) return;
    Range own{row * parts, (row + 1) * parts};
    merge_partials(workspace, out, sinks, own, row, item % heads, heads, value_dim,
        static_cast<size_t>(rows) * parts);
}
EXPORT(attention_combine_parts_bf16)
