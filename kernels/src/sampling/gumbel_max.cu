// The second and third kernel of sampling.cuh. Grid: (chunks, rows).
#include "sampling/cutoff.cuh"
#include "sampling/gumbel_max.cuh"

namespace {

DEVICE void histogram(const Args& args) {
    launch_dependents_and_wait();
    if (!args.sampled() || !(args.has_top_k() || args.has_top_p())) return;
    ThreadLogits logits;
    logits.load_from(args.adjusted_logits(), args.vocab);
    uint64_t max_key = row_max_key(args);
    if (!has_choice(max_key)) return;
    logits.scale(key_value(max_key), args.row().temperature);
    Histogram sums = shared_histogram();
    sums.clear();
    uint64_t tail = 0;  // amount in the last bucket, which holds most of a row at a low temperature
    bool counts = args.has_top_k();
    logits.for_each([&](uint32_t, float scaled) {
        if (!is_present(scaled)) return;
        uint64_t amount = counts ? 1 : mass(scaled);
        uint32_t b = static_cast<uint32_t>(depth(scaled));
        if (b == BUCKETS - 1)
            tail += amount;
        else
            sums.add(b, amount);
    });
    tail = block_combine<THREADS>(
        tail, static_cast<uint64_t>(0), [](uint64_t v) { return warp_sum(v); });
    if (threadIdx.x == 0) sums.add(BUCKETS - 1, tail);
    __syncthreads();
    for (uint32_t b = threadIdx.x; b < BUCKETS; b += THREADS)
        if (sums(b) > 0)
            atomicAdd(reinterpret_cast<unsigned long long*>(&args.workspace().histogram[b]),
                static_cast<unsigned long long>(sums(b)));
}

// Appends the ids between these depths to the row's candidates, in no order. A block whose ids do
// not all fit appends none; `candidate_count` then exceeds the maximum.
DEVICE void append_candidates(
    RowWorkspace& workspace, const ThreadLogits& scaled, float from, float to) {
    auto wanted = [&](float scaled) {
        return is_present(scaled) && depth(scaled) >= from && depth(scaled) < to;
    };
    SHARED(uint32_t, base, 2);
    if (threadIdx.x == 0) base[0] = 0;
    __syncthreads();
    uint32_t mine = 0;
    scaled.for_each([&](uint32_t, float scaled) { mine += wanted(scaled); });
    uint32_t at = mine > 0 ? atomicAdd(&base[0], mine) : 0;
    __syncthreads();
    if (threadIdx.x == 0 && base[0] > 0) base[1] = atomicAdd(&workspace.candidate_count, base[0]);
    __syncthreads();
    if (mine == 0 || base[1] + base[0] > MAX_CANDIDATES) return;
    at += base[1];
    scaled.for_each([&](uint32_t id, float scaled) {
        if (wanted(scaled)) workspace.candidates[at++] = rank(scaled, id);
    });
}

DEVICE void gumbel_max(const Args& args) {
    launch_dependents_and_wait();
    if (!args.sampled()) return;
    ThreadLogits logits;
    logits.load_from(args.adjusted_logits(), args.vocab);
    uint64_t max_key = row_max_key(args);
    if (!has_choice(max_key)) return;
    const RowParams& row = args.row();
    logits.scale(key_value(max_key), row.temperature);
    float certain = BUCKETS;  // ids of less depth are kept for certain
    if (args.has_top_k() || args.has_top_p()) {
        float cutoff = row_cutoff(args).bucket;
        certain = args.has_top_k() && args.has_top_p() ? 0.0f : cutoff;
        append_candidates(args.workspace(), logits, certain, cutoff + 1.0f);
    }
    GumbelMax gumbel_max(row, key_id(max_key));
#pragma unroll
    for (uint32_t v = 0; v < VECTORS; v++) {
        float in[LANES];
#pragma unroll
        for (uint32_t i = 0; i < LANES; i++) {
            float scaled = logits.at[v][i];
            in[i] = is_present(scaled) && row.keeps(scaled) && depth(scaled) < certain
                        ? scaled
                        : MINUS_INFINITY;
        }
        gumbel_max.consider_four(ThreadLogits::id(v), in);
    }
    ArgMax best = block_arg_max(gumbel_max.best);
    ChunkResult& result = args.workspace().chunks()[blockIdx.x];
    if (threadIdx.x == 0) result.best_value = best.value, result.best_id = best.id;
}

}  // namespace

KERNEL(sampling_histogram_f32, __launch_bounds__(256), float* logits, uint32_t vocab,
    const uint32_t* params, uint32_t params_len, uint32_t rows, unsigned char* workspace,
    uint32_t row_bytes) {
    histogram({logits, vocab, params, params_len, rows, workspace, row_bytes, blockIdx.y});
}
KERNEL(sampling_gumbel_max_f32, __launch_bounds__(256), float* logits, uint32_t vocab,
    const uint32_t* params, uint32_t params_len, uint32_t rows, unsigned char* workspace,
    uint32_t row_bytes) {
    gumbel_max({logits, vocab, params, params_len, rows, workspace, row_bytes, blockIdx.y});
}
