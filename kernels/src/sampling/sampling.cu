// A token for each row of logits[rows, vocab_size] (f32), whatever mix of parameters the rows have; the log-probabilities asked for.
//
// A vocabulary is cut into pieces of 4096 ids whatever the batch is, so a row's result never depends on other rows. Four kernels:
//   scan    finite?, largest raw logit, sum of exponentials and foremost of the piece; then penalties, bias and bans in place,
//           and the largest of what they leave. Grid (pieces, rows).
//   tally   rows with top-k or top-p: how many ids, or how much mass, each 1/16 below the largest scaled logit holds. As scan.
//   race    Gumbel-max over what is certainly in; what shares the bucket of the cut goes to the row's list. As scan.
//   choose  the exact cut within the list, the race of what it leaves, the merge of all. Grid (rows).
// Greedy rows leave tally and race at once, rows without top-k and top-p leave tally. Nothing is sorted: a cut is found by
// descending into the bucket where the running sum reaches the target. With top-k and top-p both, the list takes all of the k, of
// whom choose finds the nucleus. A list that is full (k over 2048, or as many logits within 1/16) is passed over: choose then
// goes over the whole row, which is slow (some ten passes by one block) and right.
//
// Masses are 64-bit integers in units of 2^-40 of the most likely id's, so their sums do not depend on the order of atomics. What
// weighs less than a unit is outside every nucleus of top_p < 1; a nucleus ends within 2^-40 of an id's weight, and 2 ulp of
// f32 for its exponential, of where exact arithmetic ends it.
//
// Bytes moved: the row once (greedy), twice (sampled), thrice (top-k, top-p); penalties read changed rows twice in scan, from L2.
// By arithmetic, H200, not measured yet: 256 rows of 128 256 are 131 MB, 27 us a pass at 4.8 TB/s, 8192 blocks of 4 x 16 bytes
// a thread in flight, so some 35 us a kernel with tails: 110 us for top-p, 75 us sampled, 40 us greedy. Philox is 18 instructions
// an id, 21 us of all multiprocessors at 256 rows, and passed over for vectors too far below the leader. One row: 32
// blocks, each kernel about one launch and three trips to L2: 3 us, 12 us in all.
// Variants: one block a row (5 us a pass at 64 bytes a clock); clusters with a histogram in distributed memory (sm_90 alone, and
// rows of 64 pieces do not fit one); sorting keys (three passes more). 64-bit atomics in shared memory are loops, hence two halves.
#include "common.cuh"

namespace {

constexpr uint32_t THREADS = 256, LANES = 4, VECTORS = 4, PIECE = THREADS * LANES * VECTORS;
constexpr uint32_t BUCKETS = 2 * THREADS, LIST = 2048, TOP = 20, RESULT = 2 + 2 * TOP;
constexpr uint32_t NOT_FINITE = FULL, NOTHING_LEFT = FULL - 1;  // in place of a result's token
constexpr float STEPS = 16.0f;                                 // buckets for each 1 of a scaled logit
constexpr float LARGEST = 3.402823466e38f;

// As `encode` writes them.
struct Row {
    float temperature, top_p;
    uint32_t top_k;
    float least;  // of a scaled logit: ln(min_p)
    float frequency, presence, repetition;
    uint32_t position, seed_low, seed_high;
    uint32_t logprobs;  // 0, or 1 + how many of the most likely
    uint32_t pending;   // into `previous`, or FULL
    uint32_t first, specials, unused[2];
};
struct Special {
    uint32_t token;
    float bias;
    uint32_t marks;  // twice its count in the output, and 1 if seen
    float raw;       // written by scan
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
    uint32_t listed;
    uint32_t pending;   // token, or FULL
    float pending_raw;  // its logit, where it is not among the specials
    uint32_t unused;
    DEVICE Piece* pieces() { return reinterpret_cast<Piece*>(this + 1); }
};

struct Args {
    float* logits;
    uint32_t vocab;
    uint32_t* params;
    uint32_t params_len, rows;
    unsigned char* work_bytes;
    uint32_t row_bytes, index;

    DEVICE float* row_logits() const { return logits + static_cast<size_t>(index) * vocab; }
    DEVICE const Row& row() const { return reinterpret_cast<const Row*>(params)[index]; }
    DEVICE Special* specials() const {
        uint64_t from = static_cast<uint64_t>(rows) * sizeof(Row) + row().first * sizeof(Special);
        ASSERT(from + row().specials * sizeof(Special) <= static_cast<uint64_t>(params_len) * 4);
        return reinterpret_cast<Special*>(params + from / 4);
    }
    DEVICE uint32_t pieces() const { return (vocab + PIECE - 1) / PIECE; }
    DEVICE Work& work() const {
        ASSERT(row_bytes == sizeof(Work) + pieces() * sizeof(Piece));
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
    uint32_t ordered = bits ^ (bits >> 31 ? FULL : 0x80000000u);
    return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~id);
}
DEVICE uint32_t key_id(uint64_t key) { return ~static_cast<uint32_t>(key); }
DEVICE float key_value(uint64_t key) {
    uint32_t ordered = static_cast<uint32_t>(key >> 32);
    return __uint_as_float(ordered ^ (ordered >> 31 ? 0x80000000u : FULL));
}
DEVICE uint64_t block_most(uint64_t x) {
    return block_combine<THREADS>(x, static_cast<uint64_t>(0), [](uint64_t v) { return warp_max(v); });
}

// ---- ranks: smaller for larger scaled logits (which are at most 0), the lower id first among equals

constexpr uint64_t LAST_RANK = ALL_ONES >> 1;

DEVICE uint64_t rank(float scaled, uint32_t id) {
    return static_cast<uint64_t>(__float_as_uint(scaled) & 0x7fffffffu) << 32 | id;
}
DEVICE float rank_value(uint64_t rank) { return -__uint_as_float(static_cast<uint32_t>(rank >> 32)); }

// ---- a thread's share of a piece: VECTORS of consecutive ids

struct Share {
    float at[VECTORS][LANES];

    static DEVICE uint32_t id(uint32_t vector) { return blockIdx.x * PIECE + (vector * THREADS + threadIdx.x) * LANES; }

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
    template <class F> DEVICE void each(F f) const {
#pragma unroll
        for (uint32_t v = 0; v < VECTORS; v++)
#pragma unroll
            for (uint32_t i = 0; i < LANES; i++) f(id(v) + i, at[v][i]);
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

// ---- scan

DEVICE void summarise(const Share& x, uint32_t vocab, float max, uint32_t top, Piece& piece) {
    double sum = 0.0;
    x.each([&](uint32_t, float x) { sum += static_cast<double>(expf(x - max)); });
    sum = block_combine<THREADS>(sum, 0.0, [](double v) { return warp_sum(v); });
    if (threadIdx.x == 0) piece.max = max, piece.sum = sum;
    uint64_t below = ALL_ONES;
    for (uint32_t n = 0; n < top; n++) {
        uint64_t best = 0;
        x.each([&](uint32_t id, float x) {
            uint64_t k = id < vocab ? key(x, id) : 0;
            if (k < below && k > best) best = k;
        });
        below = block_most(best);
        if (threadIdx.x == 0) piece.top[n] = below;
    }
}

// In the node's order, nothing fused.
DEVICE float adjusted(float x, const Row& row, float bias, uint32_t count, bool seen) {
    if (bias == MINUS_INFINITY) return bias;
    if (seen) {
        x = x > 0.0f ? __fdiv_rn(x, row.repetition) : __fmul_rn(x, row.repetition);
        x = __fadd_rn(x, -__fmul_rn(row.frequency, static_cast<float>(count)));
        if (count > 0) x = __fadd_rn(x, -row.presence);
    }
    return __fadd_rn(x, bias);
}

// Changes the logits of the piece's specials and of the pending token.
DEVICE void adjust(const Args& args, uint32_t pending) {
    SHARED(uint32_t, listed, 1);
    if (threadIdx.x == 0) listed[0] = 0;
    __syncthreads();
    float* logits = args.row_logits();
    auto here = [&](uint32_t token) { return token / PIECE == blockIdx.x && token < args.vocab; };
    Special* specials = args.specials();
    for (uint32_t i = threadIdx.x; i < args.row().specials; i += THREADS) {
        Special& special = specials[i];
        if (!here(special.token)) continue;
        uint32_t again = special.token == pending;
        if (again) listed[0] = 1;
        special.raw = logits[special.token];
        uint32_t count = special.marks / 2 + again;
        logits[special.token] = adjusted(special.raw, args.row(), special.bias, count, special.marks % 2 + again > 0);
    }
    __syncthreads();
    if (threadIdx.x == 0 && here(pending) && listed[0] == 0) {
        float raw = logits[pending];
        args.work().pending_raw = raw;
        logits[pending] = adjusted(raw, args.row(), 0.0f, 1, true);
    }
    __syncthreads();
}

DEVICE void scan(const Args& args, const uint32_t* previous, uint32_t previous_len) {
    const Row& row = args.row();
    Work& work = args.work();
    Piece& piece = work.pieces()[blockIdx.x];
    Share x;
    x.load_from(args.row_logits(), args.vocab);
    uint64_t leader = block_most(x.finite(args.vocab) ? x.leader(args.vocab) : ALL_ONES);
    if (row.logprobs > 0 && leader != ALL_ONES) summarise(x, args.vocab, key_value(leader), row.logprobs - 1, piece);
    ASSERT(row.pending == FULL || row.pending < previous_len);
    uint32_t pending = row.pending == FULL ? FULL : previous[row.pending];
    if ((row.specials > 0 || pending != FULL) && leader != ALL_ONES) {
        adjust(args, pending);
        x.load_from(args.row_logits(), args.vocab);
        leader = block_most(x.leader(args.vocab));
    }
    if (threadIdx.x == 0) piece.leader = leader;
    if (blockIdx.x > 0) return;
    for (uint32_t b = threadIdx.x; b < BUCKETS; b += THREADS) work.tally[b] = 0;
    if (threadIdx.x == 0) work.listed = 0, work.pending = pending;
}

// The key of the row's leader.
DEVICE uint64_t row_leader(const Args& args) {
    uint64_t most = 0;
    for (uint32_t p = threadIdx.x; p < args.pieces(); p += THREADS) {
        uint64_t leader = args.work().pieces()[p].leader;
        most = leader > most ? leader : most;
    }
    return block_most(most);
}
DEVICE bool usable(uint64_t leader) { return leader != ALL_ONES && key_value(leader) > MINUS_INFINITY; }

// ---- tallies

// Relative to the maximum, so that a tiny temperature cannot overflow.
DEVICE float scaled(float x, float max, float temperature) { return __fdiv_rn(__fadd_rn(x, -max), temperature); }
DEVICE bool present(float scaled) { return scaled >= -LARGEST; }
DEVICE uint32_t bucket(float scaled) { return static_cast<uint32_t>(fminf(-scaled * STEPS, BUCKETS - 1)); }
DEVICE uint64_t mass(float scaled) { return static_cast<uint64_t>(expf(scaled) * 1099511627776.0f); }

// A block's sums in shared memory.
struct Tally {
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
    DEVICE uint64_t operator()(uint32_t bucket) const { return static_cast<uint64_t>(high[bucket]) << 32 | low[bucket]; }
};
DEVICE Tally shared_tally() {
    SHARED(uint32_t, low, BUCKETS);
    SHARED(uint32_t, high, BUCKETS);
    return {low, high};
}

DEVICE void tally(const Args& args) {
    if (!args.sampled() || !(args.limited() || args.nucleus())) return;
    uint64_t leader = row_leader(args);
    if (!usable(leader)) return;
    Share x;
    x.load_from(args.row_logits(), args.vocab);
    Tally sums = shared_tally();
    sums.clear();
    uint64_t tail = 0;  // of the last bucket, where most of a cold row is
    bool counts = args.limited();
    float max = key_value(leader), temperature = args.row().temperature;
    x.each([&](uint32_t, float x) {
        float s = scaled(x, max, temperature);
        if (!present(s)) return;
        uint64_t amount = counts ? 1 : mass(s);
        uint32_t b = bucket(s);
        if (b == BUCKETS - 1) tail += amount;
        else sums.add(b, amount);
    });
    tail = block_combine<THREADS>(tail, static_cast<uint64_t>(0), [](uint64_t v) { return warp_sum(v); });
    if (threadIdx.x == 0) sums.add(BUCKETS - 1, tail);
    __syncthreads();
    for (uint32_t b = threadIdx.x; b < BUCKETS; b += THREADS)
        if (sums(b) > 0)
            atomicAdd(reinterpret_cast<unsigned long long*>(&args.work().tally[b]), static_cast<unsigned long long>(sums(b)));
}

// ---- cuts

// The bucket in which the running sum reaches `wanted`, and what the buckets before leave of that.
struct Cut {
    uint32_t bucket;
    uint64_t rest, wanted;
};

// `x` summed over this thread and those before it, and over all.
DEVICE void block_prefix(uint64_t x, uint64_t& upto, uint64_t& total) {
    SHARED(uint64_t, warps, THREADS / WARP);
#pragma unroll
    for (uint32_t step = 1; step < WARP; step *= 2) {
        uint64_t other = __shfl_up_sync(FULL, x, step);
        if (lane() >= step) x += other;
    }
    if (lane() == WARP - 1) warps[warp()] = x;
    __syncthreads();
    upto = x, total = 0;
#pragma unroll
    for (uint32_t w = 0; w < THREADS / WARP; w++) {
        if (w < warp()) upto += warps[w];
        total += warps[w];
    }
    __syncthreads();
}

// `wanted(total)` is at least 1 and at most the total of the buckets.
template <class Sums, class Wanted> DEVICE Cut find_cut(const Sums& sums, Wanted wanted_of) {
    SHARED(Cut, found, 1);
    uint64_t left = sums(2 * threadIdx.x), right = sums(2 * threadIdx.x + 1), upto, total;
    block_prefix(left + right, upto, total);
    uint64_t wanted = wanted_of(total), before = upto - left - right;
    if (before < wanted && wanted <= upto) {
        if (before + left >= wanted) found[0] = {2 * threadIdx.x, wanted - before, wanted};
        else found[0] = {2 * threadIdx.x + 1, wanted - before - left, wanted};
    }
    __syncthreads();
    Cut cut = found[0];
    __syncthreads();
    return cut;
}

// At least one id stays.
DEVICE uint64_t nucleus_of(float top_p, uint64_t total) {
    uint64_t wanted = static_cast<uint64_t>(ceil(static_cast<double>(top_p) * static_cast<double>(total)));
    wanted = wanted > 1 ? wanted : 1;
    return wanted < total ? wanted : total;
}

DEVICE Cut row_cut(const Args& args) {
    const uint64_t* sums = args.work().tally;
    const Row& row = args.row();
    bool counts = args.limited();
    return find_cut([&](uint32_t b) { return sums[b]; }, [&](uint64_t total) {
        if (!counts) return nucleus_of(row.top_p, total);
        return row.top_k < total ? row.top_k : total;
    });
}

// ---- Gumbel-max: the largest of scaled logit + noise, the lower id among equals

struct Best {
    double value;
    uint32_t id;
    DEVICE void take(Best other) {
        if (other.value > value || (other.value == value && other.id < id)) *this = other;
    }
};
DEVICE Best block_best(Best best) {
    return block_combine<THREADS>(best, Best{static_cast<double>(MINUS_INFINITY), FULL}, [](Best best) {
#pragma unroll
        for (uint32_t step = WARP / 2; step > 0; step /= 2)
            best.take({__shfl_xor_sync(FULL, best.value, step), __shfl_xor_sync(FULL, best.id, step)});
        return best;
    });
}

DEVICE double noise(uint32_t word) {
    double v = (static_cast<double>(word) + 0.5) / 4294967296.0;
    return -log(-log1p(-v));
}

struct Race {
    uint32_t position, seed_low, seed_high;
    Best best;
    float bar;  // what cannot reach it needs no logarithm

    DEVICE Race(const Row& row, uint32_t leader) : position(row.position), seed_low(row.seed_low), seed_high(row.seed_high) {
        best = {noise(word(leader)), leader};
        raise();
    }
    // Below the best by more than f32 rounds.
    DEVICE void raise() { bar = static_cast<float>(best.value) - 1e-3f; }

    // Philox4x32-10 of (group, position, 0, 0): the words of four consecutive ids.
    DEVICE uint4 words(uint32_t group) const {
        uint4 c = make_uint4(group, position, 0, 0);
        uint32_t low = seed_low, high = seed_high;
#pragma unroll
        for (uint32_t round = 0; round < 10; round++) {
            uint32_t high0 = __umulhi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
            uint32_t high1 = __umulhi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
            c = make_uint4(high1 ^ c.y ^ low, low1, high0 ^ c.w ^ high, low0);
            low += 0x9E3779B9u, high += 0xBB67AE85u;
        }
        return c;
    }
    static DEVICE uint32_t pick(const uint4& words, uint32_t i) {
        return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
    }
    DEVICE uint32_t word(uint32_t id) const { return pick(words(id / 4), id % 4); }

    DEVICE void enter(uint32_t id, float scaled, uint32_t word) {
        // -ln(1 - v) >= v >= 2^-(zeros + 1) where `zeros` leading bits are 0, so the noise is at most (zeros + 1) ln 2.
        if (scaled + static_cast<float>(__clz(word) + 1) * 0.6931472f < bar) return;
        best.take({static_cast<double>(scaled) + noise(word), id});
        raise();
    }
    // Minus infinity does not take part.
    DEVICE void enter_four(uint32_t first, const float (&scaled)[LANES]) {
        float most = fmaxf(fmaxf(scaled[0], scaled[1]), fmaxf(scaled[2], scaled[3]));
        if (most + 33 * 0.6931472f < bar) return;
        uint4 random = words(first / 4);
#pragma unroll
        for (uint32_t i = 0; i < LANES; i++) enter(first + i, scaled[i], pick(random, i));
    }
};
static_assert(LANES == 4 && BUCKETS == 2 * THREADS, "as words and find_cut take them");

// Appends what `wanted` says to the row's list, in no order; nothing of a block whose share does not fit.
template <class Wanted> DEVICE void append(const Args& args, const Share& x, float max, Wanted wanted) {
    SHARED(uint32_t, base, 2);
    if (threadIdx.x == 0) base[0] = 0;
    __syncthreads();
    float temperature = args.row().temperature;
    uint32_t mine = 0;
    x.each([&](uint32_t, float x) { mine += wanted(scaled(x, max, temperature)); });
    uint32_t at = mine > 0 ? atomicAdd(&base[0], mine) : 0;
    __syncthreads();
    Work& work = args.work();
    if (threadIdx.x == 0 && base[0] > 0) base[1] = atomicAdd(&work.listed, base[0]);
    __syncthreads();
    if (mine == 0 || base[1] + base[0] > LIST) return;
    at += base[1];
    x.each([&](uint32_t id, float x) {
        float s = scaled(x, max, temperature);
        if (wanted(s)) work.list[at++] = rank(s, id);
    });
}

DEVICE void race(const Args& args) {
    if (!args.sampled()) return;
    uint64_t leader = row_leader(args);
    if (!usable(leader)) return;
    Share x;
    x.load_from(args.row_logits(), args.vocab);
    const Row& row = args.row();
    float max = key_value(leader), temperature = row.temperature, least = row.least;
    uint32_t certain = BUCKETS;  // ids of buckets before it are in
    if (args.limited() || args.nucleus()) {
        uint32_t cut = row_cut(args).bucket;
        bool both = args.limited() && args.nucleus();
        certain = both ? 0 : cut;
        append(args, x, max, [&](float s) { return present(s) && (both ? bucket(s) <= cut : bucket(s) == cut); });
    }
    Race race(row, key_id(leader));
#pragma unroll
    for (uint32_t v = 0; v < VECTORS; v++) {
        float in[LANES];
#pragma unroll
        for (uint32_t i = 0; i < LANES; i++) {
            float s = scaled(x.at[v][i], max, temperature);
            in[i] = present(s) && s >= least && bucket(s) < certain ? s : MINUS_INFINITY;
        }
        race.enter_four(Share::id(v), in);
    }
    Best best = block_best(race.best);
    Piece& piece = args.work().pieces()[blockIdx.x];
    if (threadIdx.x == 0) piece.value = best.value, piece.winner = best.id;
}

// ---- choose

// Ranks: of the list, or where it did not hold all, of the whole row.
struct Source {
    const uint64_t* list;
    const float* row;
    uint32_t count;
    float max, temperature;

    template <class F> DEVICE void each(uint64_t first, uint64_t last, F f) const {
        for (uint32_t i = threadIdx.x; i < count; i += THREADS) {
            uint64_t rank = list == nullptr ? of_row(i) : list[i];
            if (first <= rank && rank <= last) f(rank);
        }
    }
    DEVICE uint64_t of_row(uint32_t id) const {
        float s = scaled(row[id], max, temperature);
        return present(s) ? rank(s, id) : ALL_ONES;
    }
};

// The last of the foremost ranks, of those up to `last`, that together reach `wanted`: counted, or weighed.
DEVICE uint64_t descend(const Source& source, uint64_t last, uint64_t wanted, bool counts) {
    Tally sums = shared_tally();
    uint64_t first = 0;
    while (true) {
        uint64_t low = ALL_ONES, high = 0;
        source.each(first, last, [&](uint64_t rank) {
            low = rank < low ? rank : low;
            high = rank > high ? rank : high;
        });
        low = ~block_most(~low), high = block_most(high);
        if (low >= high) return high;
        uint32_t bits = 64 - __clzll(high - low), shift = bits > 9 ? bits - 9 : 0;
        sums.clear();
        source.each(low, high, [&](uint64_t rank) {
            sums.add(static_cast<uint32_t>((rank - low) >> shift), counts ? 1 : mass(rank_value(rank)));
        });
        __syncthreads();
        Cut cut = find_cut(sums, [&](uint64_t) { return wanted; });
        wanted = cut.rest;
        first = low + (static_cast<uint64_t>(cut.bucket) << shift);
        uint64_t end = first + ((static_cast<uint64_t>(1) << shift) - 1);
        last = end < high ? end : high;
    }
}
static_assert(BUCKETS == 1 << 9, "as descend takes digits");

// What top-k and top-p leave of the list runs too.
DEVICE void settle(const Args& args, float max, Race& race) {
    const Row& row = args.row();
    Work& work = args.work();
    bool counts = args.limited(), both = counts && args.nucleus(), full = work.listed > LIST;
    Source source{full ? nullptr : work.list, args.row_logits(), full ? args.vocab : work.listed, max, row.temperature};
    Cut cut = row_cut(args);
    uint64_t last = descend(source, LAST_RANK, both || full ? cut.wanted : cut.rest, counts);
    if (both) {
        uint64_t total = 0;
        source.each(0, last, [&](uint64_t rank) { total += mass(rank_value(rank)); });
        total = block_combine<THREADS>(total, static_cast<uint64_t>(0), [](uint64_t v) { return warp_sum(v); });
        last = descend(source, last, nucleus_of(row.top_p, total), false);
    }
    source.each(0, last, [&](uint64_t rank) {
        uint32_t id = static_cast<uint32_t>(rank);
        if (rank_value(rank) >= row.least) race.enter(id, rank_value(rank), race.word(id));
    });
}

DEVICE uint32_t draw(const Args& args, uint64_t leader) {
    Race race(args.row(), key_id(leader));
    for (uint32_t p = threadIdx.x; p < args.pieces(); p += THREADS) {
        const Piece& piece = args.work().pieces()[p];
        race.best.take({piece.value, piece.winner});
    }
    race.raise();
    if (args.limited() || args.nucleus()) settle(args, key_value(leader), race);
    return block_best(race.best).id;
}

// The raw logit of any id.
DEVICE float raw_logit(const Args& args, uint32_t id) {
    SHARED(float, raw, 1);
    const Work& work = args.work();
    if (threadIdx.x == 0) raw[0] = id == work.pending ? work.pending_raw : args.row_logits()[id];
    __syncthreads();
    const Special* specials = args.specials();
    for (uint32_t i = threadIdx.x; i < args.row().specials; i += THREADS)
        if (specials[i].token == id) raw[0] = specials[i].raw;
    __syncthreads();
    return raw[0];
}

DEVICE void report(const Args& args, uint32_t token, uint32_t* result) {
    const Piece* pieces = args.work().pieces();
    uint32_t count = args.pieces(), top = args.row().logprobs - 1;
    float max = MINUS_INFINITY;
    for (uint32_t p = threadIdx.x; p < count; p += THREADS) max = fmaxf(max, pieces[p].max);
    max = block_max<THREADS>(max);
    double sum = 0.0;
    for (uint32_t p = threadIdx.x; p < count; p += THREADS)
        sum += pieces[p].sum * exp(static_cast<double>(pieces[p].max) - static_cast<double>(max));
    sum = block_combine<THREADS>(sum, 0.0, [](double v) { return warp_sum(v); });
    double total = static_cast<double>(max) + log(sum);
    auto bits = [&](float raw) { return __float_as_uint(static_cast<float>(static_cast<double>(raw) - total)); };
    float raw = raw_logit(args, token);
    if (threadIdx.x == 0) result[1] = bits(raw);
    uint64_t below = ALL_ONES;
    for (uint32_t n = 0; n < top; n++) {
        uint64_t best = 0;
        for (uint32_t i = threadIdx.x; i < count * top; i += THREADS) {
            uint64_t k = pieces[i / top].top[i % top];
            if (k < below && k > best) best = k;
        }
        below = block_most(best);
        // Behind the whole vocabulary: no id.
        if (threadIdx.x == 0) result[2 + 2 * n] = below == 0 ? FULL : key_id(below), result[3 + 2 * n] = bits(key_value(below));
    }
}

DEVICE void choose(const Args& args, uint32_t* tokens, uint32_t* results) {
    uint64_t leader = row_leader(args);
    uint32_t* result = results + static_cast<size_t>(args.index) * RESULT;
    if (!usable(leader)) {
        if (threadIdx.x > 0) return;
        tokens[args.index] = 0;  // for the step that may be under way behind this one
        result[0] = leader == ALL_ONES ? NOT_FINITE : NOTHING_LEFT;
        return;
    }
    const Row& row = args.row();
    uint32_t token = args.sampled() ? draw(args, leader) : key_id(leader);
    if (threadIdx.x == 0) tokens[args.index] = result[0] = token;
    if (row.logprobs > 0) report(args, token, result);
}

}  // namespace

KERNEL __launch_bounds__(256) sampling_scan_f32(float* logits, uint32_t vocab, uint32_t* params, uint32_t params_len,
    uint32_t rows, unsigned char* work, uint32_t row_bytes, const uint32_t* previous, uint32_t previous_len) {
    scan({logits, vocab, params, params_len, rows, work, row_bytes, blockIdx.y}, previous, previous_len);
}
EXPORT(sampling_scan_f32)
KERNEL __launch_bounds__(256) sampling_tally_f32(float* logits, uint32_t vocab, uint32_t* params, uint32_t params_len,
    uint32_t rows, unsigned char* work, uint32_t row_bytes) {
    tally({logits, vocab, params, params_len, rows, work, row_bytes, blockIdx.y});
}
EXPORT(sampling_tally_f32)
KERNEL __launch_bounds__(256) sampling_race_f32(float* logits, uint32_t vocab, uint32_t* params, uint32_t params_len,
    uint32_t rows, unsigned char* work, uint32_t row_bytes) {
    race({logits, vocab, params, params_len, rows, work, row_bytes, blockIdx.y});
}
EXPORT(sampling_race_f32)
KERNEL __launch_bounds__(256) sampling_choose_f32(float* logits, uint32_t vocab, uint32_t* params, uint32_t params_len,
    uint32_t rows, unsigned char* work, uint32_t row_bytes, uint32_t* tokens, uint32_t* results) {
    choose({logits, vocab, params, params_len, rows, work, row_bytes, blockIdx.x}, tokens, results);
}
EXPORT(sampling_choose_f32)
