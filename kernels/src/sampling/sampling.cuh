// A token for each row of logits[rows, vocab_size] (f32), whatever mix of parameters the rows have;
// the log-probabilities asked for.
//
// A vocabulary is cut into pieces of 4096 ids whatever the batch is, so a row's result never
//   depends on other rows. Four kernels: scan    finite?, largest raw logit, sum of exponentials
//   and foremost of the piece; then penalties, bias and bans, and the
//           largest of what they leave. Grid (pieces, rows).
//   tally   rows with top-k or top-p: how many ids, or how much mass, each 1/16 below the largest
//   scaled logit holds. As scan. race    Gumbel-max over what is certainly in; what shares the
//   bucket of the cut goes to the row's list. As scan. choose  the exact cut within the list, the
//   race of what it leaves, the merge of all. Grid (rows).
// Greedy rows leave tally and race at once, rows without top-k and top-p leave tally. Nothing is
// sorted: a cut is found by descending into the bucket where the running sum reaches the target.
// With top-k and top-p both, the list takes all of the k, of whom choose finds the nucleus. A list
// that is full (k over 2048, or as many logits within 1/16) is passed over: choose then goes over
// the whole row, which is slow (some ten passes by one block) and right.
//
// Penalties count a sequence's tokens anew from the cache's history in each step, each block of
// scan those of its own piece: the host neither counts nor uploads them, and a token that only the
// device knows is among them. What changes a logit changes it in place; where log-probabilities of
// the raw ones are wanted too, all of the row is copied into its workspace first.
//
// Masses are 64-bit integers in units of 2^-40 of the most likely id's, so their sums do not depend
// on the order of atomics. An id's mass is its exponential within 2 ulp of f32, rounded down to a
// unit; what weighs less than a unit is in no nucleus.
//
// Bytes moved: the row once (greedy), twice (sampled), thrice (top-k, top-p). Penalties read the
// row twice in scan, the second time from L2, and 4 bytes a token of the sequence for each piece,
// from L2 too: 66 MB for 256 rows of 2000 tokens, 12 us at its rate; two dependent loads for every
// 1024 tokens should hide behind the 32 warps of a multiprocessor.
// By arithmetic for an H200, not measured yet: 256 rows of 128 256 ids are 131 MB, 27 us a pass at
// 4.8 TB/s. A thread has four loads of 16 bytes in flight and at most 64 registers, so 64 KB a
// multiprocessor, more than latency times bandwidth (25 KB); with tails some 35 us a kernel. Race
// issues about 45 instructions an id where bounds rule nothing out (14 of them divide, 18 are
// Philox), 51 us; after a cut most ids are out and it waits for memory. So greedy 40 us, sampled
// 90, top-p 120. One row: 32 blocks; a kernel is a launch and three or four trips to L2, about 3
// us, or 1 where it leaves: 8 us greedy, 12 top-p. Variants, by thought: one block a row (8 us a
// pass at one row); clusters with a histogram in distributed memory (sm_90 alone, and 64 pieces do
// not fit one); sorting keys (passes more). 64-bit atomics in shared memory are loops on sm_90,
// hence halves.
#pragma once

#include "common.cuh"

namespace {

constexpr uint32_t THREADS = 256, LANES = 4, VECTORS = 4, PIECE = THREADS * LANES * VECTORS;
constexpr uint32_t BUCKETS = 2 * THREADS, LIST = 2048, TOP = 20, RESULT = 2 + 2 * TOP;
constexpr uint32_t NOT_FINITE = FULL_MASK,
                   NOTHING_LEFT = FULL_MASK - 1;  // in place of a result's token
constexpr float STEPS = 16.0f;                    // buckets for each 1 of a scaled logit
constexpr float LARGEST = 3.402823466e38f;

// As `encode` writes them.
struct Row {
    float temperature, top_p;
    uint32_t top_k;
    float least;  // of a scaled logit: ln(min_p)
    float frequency, presence, repetition;
    uint32_t position, seed_low, seed_high;
    uint32_t logprobs;  // 0, or 1 + how many of the most likely
    uint32_t sequence, prompt;
    uint32_t first, specials, unused;

    DEVICE bool penalises() const {
        return frequency != 0.0f || presence != 0.0f || repetition != 1.0f;
    }
    DEVICE bool changes() const { return specials > 0 || penalises(); }
    DEVICE bool copies() const { return logprobs > 0 && changes(); }
};
struct Special {
    uint32_t token;
    float bias;
};

struct Piece {
    uint64_t leader;  // key of the largest logit after bans, or ALL_ONES: one was not finite
    double sum;       // of e^(x - max) over raw logits
    double value;     // of the winner
    uint32_t winner;
    float max;  // raw
    uint64_t top[TOP];
};
struct Work {
    uint64_t tally[BUCKETS];
    uint64_t list[LIST];
    uint32_t listed, unused[3];
    // Behind them the row's logits, where they are not changed in place.
    DEVICE Piece* pieces() { return reinterpret_cast<Piece*>(this + 1); }
};

struct Args {
    float* logits;
    uint32_t vocab;
    const uint32_t* params;
    uint32_t params_len, rows;
    unsigned char* work_bytes;
    uint32_t row_bytes, index;

    // Raw ones, unless they were changed in place.
    DEVICE float* row_logits() const { return logits + static_cast<size_t>(index) * vocab; }
    // With penalties, bias and bans, once scan is done.
    DEVICE float* changed_logits() const {
        size_t at = static_cast<size_t>(index) * row_bytes + row_bytes - (vocab + 3) / 4 * 16;
        return row().copies() ? reinterpret_cast<float*>(work_bytes + at) : row_logits();
    }
    DEVICE const Row& row() const { return reinterpret_cast<const Row*>(params)[index]; }
    DEVICE const Special* specials() const {
        uint64_t from = static_cast<uint64_t>(rows) * sizeof(Row) + row().first * sizeof(Special);
        ASSERT(from + row().specials * sizeof(Special) <= static_cast<uint64_t>(params_len) * 4);
        return reinterpret_cast<const Special*>(params + from / 4);
    }
    DEVICE uint32_t pieces() const { return (vocab + PIECE - 1) / PIECE; }
    DEVICE Work& work() const {
        ASSERT(row_bytes == sizeof(Work) + pieces() * sizeof(Piece) + (vocab + 3) / 4 * 16);
        return *reinterpret_cast<Work*>(work_bytes + static_cast<size_t>(index) * row_bytes);
    }
    DEVICE bool sampled() const { return row().temperature > 0.0f; }
    DEVICE bool limited() const { return row().top_k > 0 && row().top_k < vocab; }
    DEVICE bool nucleus() const { return row().top_p < 1.0f; }
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
DEVICE uint64_t block_most(uint64_t x) {
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

// Relative to the maximum, so that a tiny temperature cannot overflow.
DEVICE float scaled(float x, float max, float temperature) {
    return __fdiv_rn(__fadd_rn(x, -max), temperature);
}

// ---- a thread's share of a piece: VECTORS of consecutive ids

struct Share {
    float at[VECTORS][LANES];

    static DEVICE uint32_t id(uint32_t vector) {
        return blockIdx.x * PIECE + (vector * THREADS + threadIdx.x) * LANES;
    }

    // Minus infinity behind the vocabulary.
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
    DEVICE void each(F f) const {
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
    // Both zeros are equal here.
    DEVICE uint64_t leader(uint32_t vocab) const {
        float most = MINUS_INFINITY;
        uint32_t most_id = id(0);
        each([&](uint32_t id, float x) {
            if (x > most) most = x, most_id = id;
        });
        return id(0) < vocab ? key(most + 0.0f, most_id) : 0;
    }
    DEVICE bool finite(uint32_t vocab) const {
        bool all = true;
        each([&](uint32_t id, float x) { all = all && (id >= vocab || fabsf(x) <= LARGEST); });
        return all;
    }
};

// ---- what scan found

// The key of the row's leader.
DEVICE uint64_t row_leader(const Args& args) {
    uint64_t most = 0;
    for (uint32_t p = threadIdx.x; p < args.pieces(); p += THREADS) {
        uint64_t leader = args.work().pieces()[p].leader;
        most = leader > most ? leader : most;
    }
    return block_most(most);
}
DEVICE bool usable(uint64_t leader) {
    return leader != ALL_ONES && key_value(leader) > MINUS_INFINITY;
}

}  // namespace
