// The last step of decode: the sums of a sequence's splits, merged in their order, become its
// result. A warp for each query head, four to a block; sequences of one split were written by
// decode itself and cost a look at their length. A warp reads (head_dim + 2) * 4 bytes a split, in
// whole lines, and keeps several splits' loads under way since none depends on the sums.
#include "attention/paged.cuh"

namespace {

constexpr uint32_t PER_LANE = 8;  // head sizes up to 256

template <class T>
DEVICE void combine(float* workspace, T* out, const uint32_t* seq_lens, const uint32_t* header,
    uint32_t sequences, uint32_t heads, uint32_t head_dim, uint32_t window, uint32_t max_splits) {
    in_turn();
    uint32_t row = blockIdx.x * (blockDim.x / WARP) + warp(), sequence = row / heads;
    if (sequence >= sequences) return;
    uint32_t count = decode_splits(seq_lens[sequence], window, header).count;
    if (count == 1) return;
    float sums[PER_LANE] = {}, weights = 0.0f, largest = MINUS_INFINITY;
#pragma unroll 4
    for (uint32_t split = 0; split < count; split++) {
        Partial from(
            workspace, sequences, max_splits, heads, head_dim, sequence, split, row % heads);
        auto state = load<float, 2>(from.state);
        Merge merge(largest, state.at[0]);
        largest = merge.largest;
        weights = merge.both(weights, state.at[1]);
#pragma unroll
        for (uint32_t i = 0; i < PER_LANE; i++) {
            uint32_t d = i * WARP + lane();
            if (d < head_dim) sums[i] = merge.both(sums[i], from.sums[d]);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < PER_LANE; i++) {
        uint32_t d = i * WARP + lane();
        if (d < head_dim)
            out[static_cast<size_t>(row) * head_dim + d] = from_float<T>(sums[i] * share(weights));
    }
}

}  // namespace

KERNEL __launch_bounds__(128) attention_combine_f32(float* workspace, float* out,
    const uint32_t* seq_lens, const uint32_t* header, uint32_t sequences, uint32_t heads,
    uint32_t head_dim, uint32_t window, uint32_t max_splits) {
    combine(workspace, out, seq_lens, header, sequences, heads, head_dim, window, max_splits);
}
EXPORT(attention_combine_f32)
KERNEL __launch_bounds__(128) attention_combine_bf16(float* workspace, bf16* out,
    const uint32_t* seq_lens, const uint32_t* header, uint32_t sequences, uint32_t heads,
    uint32_t head_dim, uint32_t window, uint32_t max_splits) {
    combine(workspace, out, seq_lens, header, sequences, heads, head_dim, window, max_splits);
}
EXPORT(attention_combine_bf16)
