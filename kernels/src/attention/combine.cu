// Merges the partial results of each query that prefill leaves where it divides keys into `parts`
// parts. A row is a query of all heads.
//
// Grid: a warp for each query head of each row, four warps to a block. A warp reads
// (value_dim + 4) * 4 bytes a part, in whole lines, and keeps several parts' loads under way since
// none depends on the sums.
#include "attention/merge.cuh"

KERNEL(attention_combine_parts_bf16, __launch_bounds__(128), float* workspace, bf16* out,
    const float* sinks, uint32_t rows, uint32_t heads, uint32_t value_dim, uint32_t parts) {
    launch_dependents_and_wait();
    uint32_t item = blockIdx.x * (blockDim.x / WARP) + warp(), row = item / heads;
    if (row >= rows) return;
    Range own{row * parts, (row + 1) * parts};
    merge_partials<64>(workspace, out, sinks, own, row, item % heads, heads, value_dim);
}
