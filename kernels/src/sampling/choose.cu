// The last kernel of sampling.cuh. Grid: (rows).
#include "sampling/cut.cuh"
#include "sampling/gumbel.cuh"

namespace {

// Ranks: of the list, or where it did not hold all, of the whole row.
struct Source {
    const uint64_t* list;
    const float* row;
    uint32_t count;
    float max, temperature;

    template <class F>
    DEVICE void each(uint64_t first, uint64_t last, F f) const {
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

// The last of the foremost ranks, of those up to `last`, that together reach `wanted`: counted, or
// weighed.
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
            sums.add(
                static_cast<uint32_t>((rank - low) >> shift), counts ? 1 : mass(rank_value(rank)));
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
    Source source{full ? nullptr : work.list, args.changed_logits(),
        full ? args.vocab : work.listed, max, row.temperature};
    Cut cut = row_cut(args);
    uint64_t last = descend(source, LAST_RANK, both || full ? cut.wanted : cut.rest, counts);
    if (both) {
        uint64_t total = 0;
        source.each(0, last, [&](uint64_t rank) { total += mass(rank_value(rank)); });
        total = block_combine<THREADS>(
            total, static_cast<uint64_t>(0), [](uint64_t v) { return warp_sum(v); });
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
    auto bits = [&](float raw) {
        return __float_as_uint(static_cast<float>(static_cast<double>(raw) - total));
    };
    if (threadIdx.x == 0) result[1] = bits(args.row_logits()[token]);
    uint64_t below = ALL_ONES;
    for (uint32_t n = 0; n < top; n++) {
        uint64_t best = 0;
        for (uint32_t i = threadIdx.x; i < count * top; i += THREADS) {
            uint64_t k = pieces[i / top].top[i % top];
            if (k < below && k > best) best = k;
        }
        below = block_most(best);
        // Behind the whole vocabulary: no id.
        if (threadIdx.x == 0)
            result[2 + 2 * n] = below == 0 ? FULL_MASK : key_id(below),
                           result[3 + 2 * n] = bits(key_value(below));
    }
}

DEVICE void choose(const Args& args, uint32_t* tokens, uint32_t* results) {
    launch_dependents_and_wait();
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

KERNEL __launch_bounds__(256) sampling_choose_f32(float* logits, uint32_t vocab,
    const uint32_t* params, uint32_t params_len, uint32_t rows, unsigned char* work,
    uint32_t row_bytes, uint32_t* tokens, uint32_t* results) {
    choose({logits, vocab, params, params_len, rows, work, row_bytes, blockIdx.x}, tokens, results);
}
EXPORT(sampling_choose_f32)
