// Samples a token for each row of logits[rows, vocab_size] (f32), whatever mix of parameters the
// rows have, and computes the log-probabilities that were asked for.
//
// A vocabulary is cut into chunks of 4096 ids whatever the batch is, so a row's result never
// depends on other rows. There are four kernels:
//   scan        checks that the chunk's logits are finite, and takes its largest raw logit, sum of
//               exponentials and most likely ids; then applies penalties, the row's mask, bias and
//               bans, and takes the largest of the adjusted logits. Grid (chunks, rows).
//   histogram   for rows with top-k or top-p: counts the ids, or sums the mass, in each bucket of
//               1/16 below the largest scaled logit. Grid as scan.
//   gumbel_max  takes the Gumbel-max over the ids that are certainly kept, and appends those in the
//               bucket of the cutoff to the row's candidates. Grid as scan.
//   choose      finds the exact cutoff within the candidates, considers those that it keeps, and
//               merges the chunks' results. Grid (rows).
// Greedy rows leave histogram and gumbel_max at once, rows without top-k and top-p leave histogram.
// Nothing is sorted: a cutoff is found by descending into the bucket where the running sum reaches
// the target. With top-k and top-p both, the candidates are all of the k, among which choose finds
// the nucleus. Where the candidates do not fit (k over 2048, or as many logits within 1/16), they
// are passed over: choose then goes over the whole row, which is slow (some ten passes by one
// block) and right.
//
// Penalties count a sequence's tokens anew from the cache's history in each step, each block of
// scan those of its own chunk: the host neither counts nor uploads them, and a token that only the
// device knows is among them. Logits are adjusted in place; where log-probabilities of the raw ones
// are wanted too, all of the row is copied into its workspace first.
//
// A row that keeps to a format has a mask of one bit an id, uploaded between the logits and scan.
// scan writes minus infinity for the ids that it leaves out, as for bans, so the other kernels know
// nothing of it. Rows without one read no mask. Not measured; predicted for an H200 and Llama 3.1
// 8B: 64 rows with a schema produce at least 0.97 of the tokens/s of 64 without, one row 0.95. A
// mask of 128 256 ids has 16 KB, so 64 rows upload 1 MB, 20 to 40 us, behind logits of 4.9 ms. scan
// writes 33 MB more and reads them again from L2, 12 us. The grammars take tens of us a row, on the
// host's threads, while the logits are computed. What is left is the gap between two graphs, 3 to
// 8 us, which steps without formats have too. Considered, not tried: the mask as additions to the
// logits, which is 32 times as large; a list of allowed ids, which is short at few places of a
// schema.
//
// Masses are 64-bit integers in units of 2^-40 of the most likely id's, so their sums do not depend
// on the order of atomics. An id's mass is its exponential within 2 ulp of f32, rounded down to a
// unit; an id that weighs less than a unit is in no nucleus.
//
// Bytes moved: the row once (greedy), twice (sampled), three times (top-k, top-p). Penalties read
// the row twice in scan, the second time from L2, and 4 bytes a token of the sequence for each
// chunk, from L2 too: 66 MB for 256 rows of 2000 tokens, 12 us at its rate; two dependent loads for
// every 1024 tokens should hide behind the 32 warps of a multiprocessor.
// An H200 takes 68 us for 256 greedy rows of 128 256 ids and 4.6 for one; the rest is not measured.
// By arithmetic for it: 256 rows of 128 256 ids are 131 MB, 27 us a pass at
// 4.8 TB/s. A thread has four loads of 16 bytes in flight and at most 64 registers, so 64 KB a
// multiprocessor, more than latency times bandwidth (25 KB); with tails some 35 us a kernel.
// gumbel_max issues about 45 instructions an id where bounds rule nothing out (14 of them divide,
// 18 are Philox), 51 us; after a cutoff most ids are out and it waits for memory. So greedy takes
// 40 us, sampled 90, top-p 120. One row: 32 blocks; a kernel is a launch and three or four trips to
// L2, about 3 us, or 1 where it leaves at once: 8 us greedy, 12 top-p. Considered, not tried: one
// block a row (8 us a pass at one row); clusters with a histogram in distributed memory (sm_90
// alone, and 64 chunks do not fit one); sorting keys (more passes). 64-bit atomics in shared memory
// are loops on sm_90, hence the histogram's sums are in two halves.
#pragma once

#include "common.cuh"

namespace {

constexpr uint32_t THREADS = 256, LANES = 4, VECTORS = 4, CHUNK = THREADS * LANES * VECTORS;
constexpr uint32_t BUCKETS = 2 * THREADS, MAX_CANDIDATES = 2048, MAX_TOP = 20,
                   RESULT_WORDS = 2 + 2 * MAX_TOP;
constexpr uint32_t NOT_FINITE = FULL_MASK,
                   NOTHING_LEFT = FULL_MASK - 1;  // these replace the token in a result
constexpr float BUCKETS_PER_UNIT = 16.0f;         // buckets for each 1 of a scaled logit
constexpr float LARGEST_FINITE = 3.402823466e38f;

// The parameters of a row, as `encode` in gpu.rs writes them.
struct RowParams {
    float temperature, top_p;
    uint32_t top_k;
    float min_scaled;  // ids with a smaller scaled logit are out: ln(min_p)
    float frequency, presence, repetition;
    uint32_t position, seed_low, seed_high;
    uint32_t logprobs;  // 0, or 1 + the number of most likely ids to report
    uint32_t sequence, prompt;
    uint32_t first, specials;
    uint32_t mask;  // 0, or 1 + the number of the row's mask

    DEVICE bool keeps(float scaled) const { return scaled >= min_scaled; }
    DEVICE bool has_penalties() const {
        return frequency != 0.0f || presence != 0.0f || repetition != 1.0f;
    }
    DEVICE bool adjusts() const { return specials > 0 || mask > 0 || has_penalties(); }
    DEVICE bool keeps_raw() const { return logprobs > 0 && adjusts(); }
};
struct Special {
    uint32_t token;
    float bias;
};

struct ChunkResult {
    uint64_t max_key;   // key of the largest adjusted logit, or ALL_ONES if a logit is not finite
    double sum;         // of e^(x - max) over raw logits
    double best_value;  // the largest scaled logit + noise
    uint32_t best_id;
    float max;  // raw
    uint64_t top[MAX_TOP];
};
struct RowWorkspace {
    uint64_t histogram[BUCKETS];
    uint64_t candidates[MAX_CANDIDATES];
    uint32_t candidate_count, unused[3];
    // The chunks' results follow, and then the row's adjusted logits where the raw ones are kept.
    DEVICE ChunkResult* chunks() { return reinterpret_cast<ChunkResult*>(this + 1); }
};

struct Args {
    float* logits;
    uint32_t vocab;
    const uint32_t* params;
    uint32_t params_len, rows;
    unsigned char* workspaces;
    uint32_t row_bytes, index;

    // The raw logits, unless they were adjusted in place.
    DEVICE float* row_logits() const { return logits + static_cast<size_t>(index) * vocab; }
    // The logits with penalties, bias and bans, once scan is done.
    DEVICE float* adjusted_logits() const {
        size_t at = static_cast<size_t>(index) * row_bytes + row_bytes - (vocab + 3) / 4 * 16;
        return row().keeps_raw() ? reinterpret_cast<float*>(workspaces + at) : row_logits();
    }
    DEVICE const RowParams& row() const {
        return reinterpret_cast<const RowParams*>(params)[index];
    }
    DEVICE const Special* specials() const {
        uint64_t from =
            static_cast<uint64_t>(rows) * sizeof(RowParams) + row().first * sizeof(Special);
        ASSERT(from + row().specials * sizeof(Special) <= static_cast<uint64_t>(params_len) * 4);
        return reinterpret_cast<const Special*>(params + from / 4);
    }
    DEVICE uint32_t chunks() const { return (vocab + CHUNK - 1) / CHUNK; }
    DEVICE RowWorkspace& workspace() const {
        ASSERT(row_bytes ==
               sizeof(RowWorkspace) + chunks() * sizeof(ChunkResult) + (vocab + 3) / 4 * 16);
        return *reinterpret_cast<RowWorkspace*>(
            workspaces + static_cast<size_t>(index) * row_bytes);
    }
    DEVICE bool sampled() const { return row().temperature > 0.0f; }
    DEVICE bool has_top_k() const { return row().top_k > 0 && row().top_k < vocab; }
    DEVICE bool has_top_p() const { return row().top_p < 1.0f; }
};

// ---- keys: larger for larger logits, the lower id first among equals

constexpr uint64_t ALL_ONES = ~0ull;

DEVICE uint64_t key(float x, uint32_t id) {
    uint32_t bits = __float_as_uint(x);
    uint32_t ordered = bits ^ (bits >> 31 ? FULL_MASK : 0x80000000u);
    return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~id);
}
DEVICE uint32_t key_id(uint64_t key) { return ~static_cast<uint32_t>(key); }
DEVICE float key_value(uint64_t key) {
    uint32_t ordered = static_cast<uint32_t>(key >> 32);
    return __uint_as_float(ordered ^ (ordered >> 31 ? 0x80000000u : FULL_MASK));
}
DEVICE uint64_t block_max_key(uint64_t x) {
    return block_combine<THREADS>(
        x, static_cast<uint64_t>(0), [](uint64_t v) { return warp_max(v); });
}

// ---- ranks: smaller for larger scaled logits (which are at most 0), the lower id first among
// equals

constexpr uint64_t LAST_RANK = ALL_ONES >> 1;

DEVICE uint64_t rank(float scaled, uint32_t id) {
    return static_cast<uint64_t>(__float_as_uint(scaled) & 0x7fffffffu) << 32 | id;
}
DEVICE float rank_value(uint64_t rank) {
    return -__uint_as_float(static_cast<uint32_t>(rank >> 32));
}

// Logits are scaled relative to the maximum, so that a tiny temperature cannot overflow.
DEVICE float scaled(float x, float max, float temperature) {
    return __fdiv_rn(__fadd_rn(x, -max), temperature);
}

// ---- a thread's logits of a chunk: VECTORS of consecutive ids

struct ThreadLogits {
    float at[VECTORS][LANES];

    static DEVICE uint32_t id(uint32_t vector) {
        return blockIdx.x * CHUNK + (vector * THREADS + threadIdx.x) * LANES;
    }

    // Ids beyond the vocabulary get minus infinity.
    DEVICE void load_from(const float* row, uint32_t vocab) {
        bool whole = vocab % LANES == 0 && reinterpret_cast<uintptr_t>(row) % 16 == 0;
#pragma unroll
        for (uint32_t v = 0; v < VECTORS; v++) {
            Vec<float, LANES> values;
#pragma unroll
            for (uint32_t i = 0; i < LANES; i++) values.at[i] = MINUS_INFINITY;
            if (whole) {
                if (id(v) < vocab) values = load(row + id(v));
            } else {
#pragma unroll
                for (uint32_t i = 0; i < LANES; i++)
                    if (id(v) + i < vocab) values.at[i] = row[id(v) + i];
            }
#pragma unroll
            for (uint32_t i = 0; i < LANES; i++) at[v][i] = values.at[i];
        }
    }
    template <class F>
    DEVICE void for_each(F f) const {
#pragma unroll
        for (uint32_t v = 0; v < VECTORS; v++)
#pragma unroll
            for (uint32_t i = 0; i < LANES; i++) f(id(v) + i, at[v][i]);
    }
    DEVICE void scale(float max, float temperature) {
#pragma unroll
        for (uint32_t v = 0; v < VECTORS; v++)
#pragma unroll
            for (uint32_t i = 0; i < LANES; i++) at[v][i] = scaled(at[v][i], max, temperature);
    }
    // Adding zero makes both zeros equal.
    DEVICE uint64_t max_key(uint32_t vocab) const {
        float most = MINUS_INFINITY;
        uint32_t most_id = id(0);
        for_each([&](uint32_t id, float x) {
            if (x > most) most = x, most_id = id;
        });
        return id(0) < vocab ? key(most + 0.0f, most_id) : 0;
    }
    DEVICE bool finite(uint32_t vocab) const {
        bool all = true;
        for_each([&](uint32_t id, float x) {
            all = all && (id >= vocab || fabsf(x) <= LARGEST_FINITE);
        });
        return all;
    }
};

// ---- the results of scan

// The key of the row's largest adjusted logit.
DEVICE uint64_t row_max_key(const Args& args) {
    uint64_t most = 0;
    for (uint32_t p = threadIdx.x; p < args.chunks(); p += THREADS) {
        uint64_t max_key = args.workspace().chunks()[p].max_key;
        most = max_key > most ? max_key : most;
    }
    return block_max_key(most);
}
DEVICE bool has_choice(uint64_t max_key) {
    return max_key != ALL_ONES && key_value(max_key) > MINUS_INFINITY;
}

}  // namespace
