// Histograms of scaled logits, which count ids or sum mass, and the bucket in which the running sum
// reaches the target of top-k or top-p.
#pragma once

#include "sampling/sampling.cuh"

namespace {

DEVICE bool is_present(float scaled) { return scaled >= -LARGEST_FINITE; }
// Distance below the largest logit, in buckets: its whole part is the bucket's number.
DEVICE float depth(float scaled) { return fminf(-scaled * BUCKETS_PER_UNIT, BUCKETS - 1); }
DEVICE uint64_t mass(float scaled) {
    return static_cast<uint64_t>(expf(scaled) * 1099511627776.0f);
}

// A block's sums in shared memory, the two halves of each apart: 64-bit atomics there are loops.
struct Histogram {
    uint32_t *low, *high;

    DEVICE void clear() const {
        for (uint32_t b = threadIdx.x; b < BUCKETS; b += THREADS) low[b] = high[b] = 0;
        __syncthreads();
    }
    DEVICE void add(uint32_t bucket, uint64_t amount) const {
        uint32_t part = static_cast<uint32_t>(amount);
        uint32_t carry = atomicAdd(&low[bucket], part) > ~part;
        uint32_t rest = static_cast<uint32_t>(amount >> 32) + carry;
        if (rest > 0) atomicAdd(&high[bucket], rest);
    }
    DEVICE uint64_t operator()(uint32_t bucket) const {
        return static_cast<uint64_t>(high[bucket]) << 32 | low[bucket];
    }
};
DEVICE Histogram shared_histogram() {
    SHARED(uint32_t, low, BUCKETS);
    SHARED(uint32_t, high, BUCKETS);
    return {low, high};
}

// The bucket in which the running sum reaches `wanted`, and the `rest` of `wanted` that the buckets
// before it leave.
struct Cutoff {
    uint32_t bucket;
    uint64_t rest, wanted;
};

// Sums `x` over this thread and the previous ones (`prefix`), and over all (`total`).
DEVICE void block_prefix(uint64_t x, uint64_t& prefix, uint64_t& total) {
    SHARED(uint64_t, warps, THREADS / WARP);
#pragma unroll
    for (uint32_t step = 1; step < WARP; step *= 2) {
        uint64_t other = __shfl_up_sync(FULL_MASK, x, step);
        if (lane() >= step) x += other;
    }
    if (lane() == WARP - 1) warps[warp()] = x;
    __syncthreads();
    prefix = x, total = 0;
#pragma unroll
    for (uint32_t w = 0; w < THREADS / WARP; w++) {
        if (w < warp()) prefix += warps[w];
        total += warps[w];
    }
    __syncthreads();
}

// `wanted(total)` is at least 1 and at most the total of the buckets.
template <class Sums, class Wanted>
DEVICE Cutoff find_cutoff(const Sums& sums, Wanted wanted_of) {
    SHARED(Cutoff, found, 1);
    uint64_t left = sums(2 * threadIdx.x), right = sums(2 * threadIdx.x + 1), prefix, total;
    block_prefix(left + right, prefix, total);
    uint64_t wanted = wanted_of(total), before = prefix - left - right;
    if (before < wanted && wanted <= prefix) {
        if (before + left >= wanted)
            found[0] = {2 * threadIdx.x, wanted - before, wanted};
        else
            found[0] = {2 * threadIdx.x + 1, wanted - before - left, wanted};
    }
    __syncthreads();
    Cutoff cutoff = found[0];
    __syncthreads();
    return cutoff;
}

// The mass that top-p keeps: at least one unit, so that at least one id stays.
DEVICE uint64_t nucleus_mass(float top_p, uint64_t total) {
    uint64_t wanted =
        static_cast<uint64_t>(ceil(static_cast<double>(top_p) * static_cast<double>(total)));
    wanted = wanted > 1 ? wanted : 1;
    return wanted < total ? wanted : total;
}

DEVICE Cutoff row_cutoff(const Args& args) {
    const uint64_t* sums = args.workspace().histogram;
    const RowParams& row = args.row();
    bool counts = args.has_top_k();
    return find_cutoff([&](uint32_t b) { return sums[b]; },
        [&](uint64_t total) {
            if (!counts) return nucleus_mass(row.top_p, total);
            return row.top_k < total ? row.top_k : total;
        });
}

static_assert(BUCKETS == 2 * THREADS, "find_cutoff gives each thread two buckets");

}  // namespace
