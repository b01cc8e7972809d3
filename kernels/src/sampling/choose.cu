// The last kernel of sampling.cuh. Grid: (rows).
#include "sampling/cutoff.cuh"
#include "sampling/gumbel_max.cuh"

namespace {

// The ranks of the row's candidates, or of the whole row if they did not all fit.
struct Ranks {
    const uint64_t* candidates;
    const float* row;
    uint32_t count;
    float max, temperature;

    template <class F>
    DEVICE void for_each(uint64_t first, uint64_t last, F f) const {
        for (uint32_t i = threadIdx.x; i < count; i += THREADS) {
            uint64_t rank = candidates == nullptr ? of_row(i) : candidates[i];
            if (first <= rank && rank <= last) f(rank);
        }
    }
    DEVICE uint64_t of_row(uint32_t id) const {
        float s = scaled(row[id], max, temperature);
        return is_present(s) ? rank(s, id) : ALL_ONES;
    }
};

// A radix select: among the ranks up to `last`, the smallest rank for which it and those below it
// together reach `wanted`, either in number (`counts`) or in mass.
DEVICE uint64_t radix_select(const Ranks& ranks, uint64_t last, uint64_t wanted, bool counts) {
    Histogram sums = shared_histogram();
    uint64_t first = 0;
    while (true) {
        uint64_t low = ALL_ONES, high = 0;
        ranks.for_each(first, last, [&](uint64_t rank) {
            low = rank < low ? rank : low;
            high = rank > high ? rank : high;
        });
        low = ~block_max_key(~low), high = block_max_key(high);
        if (low >= high) return high;
        uint32_t bits = 64 - __clzll(high - low), shift = bits > 9 ? bits - 9 : 0;
        sums.clear();
        ranks.for_each(low, high, [&](uint64_t rank) {
            sums.add(
                static_cast<uint32_t>((rank - low) >> shift), counts ? 1 : mass(rank_value(rank)));
        });
        __syncthreads();
        Cutoff cutoff = find_cutoff(sums, [&](uint64_t) { return wanted; });
        wanted = cutoff.rest;
        first = low + (static_cast<uint64_t>(cutoff.bucket) << shift);
        uint64_t end = first + ((static_cast<uint64_t>(1) << shift) - 1);
        last = end < high ? end : high;
    }
}
static_assert(BUCKETS == 1 << 9, "a digit of radix_select is nine bits");

// Considers the candidates that top-k and top-p keep.
DEVICE void consider_candidates(const Args& args, float max, GumbelMax& gumbel_max) {
    const RowParams& row = args.row();
    RowWorkspace& workspace = args.workspace();
    bool counts = args.has_top_k(), both = counts && args.has_top_p(),
         full = workspace.candidate_count > MAX_CANDIDATES;
    Ranks ranks{full ? nullptr : workspace.candidates, args.adjusted_logits(),
        full ? args.vocab : workspace.candidate_count, max, row.temperature};
    Cutoff cutoff = row_cutoff(args);
    uint64_t last =
        radix_select(ranks, LAST_RANK, both || full ? cutoff.wanted : cutoff.rest, counts);
    if (both) {
        uint64_t total = 0;
        ranks.for_each(0, last, [&](uint64_t rank) { total += mass(rank_value(rank)); });
        total = block_combine<THREADS>(
            total, static_cast<uint64_t>(0), [](uint64_t v) { return warp_sum(v); });
        last = radix_select(ranks, last, nucleus_mass(row.top_p, total), false);
    }
    ranks.for_each(0, last, [&](uint64_t rank) {
        uint32_t id = static_cast<uint32_t>(rank);
        if (row.keeps(rank_value(rank)))
            gumbel_max.consider(id, rank_value(rank), gumbel_max.word(id));
    });
}

DEVICE uint32_t draw(const Args& args, uint64_t max_key) {
    GumbelMax gumbel_max(args.row(), key_id(max_key));
    for (uint32_t p = threadIdx.x; p < args.chunks(); p += THREADS) {
        const ChunkResult& result = args.workspace().chunks()[p];
        gumbel_max.best.update({result.best_value, result.best_id});
    }
    gumbel_max.raise_threshold();
    if (args.has_top_k() || args.has_top_p())
        consider_candidates(args, key_value(max_key), gumbel_max);
    return block_arg_max(gumbel_max.best).id;
}

DEVICE void write_logprobs(const Args& args, uint32_t token, uint32_t* result) {
    const ChunkResult* chunks = args.workspace().chunks();
    uint32_t count = args.chunks(), top = args.row().logprobs - 1;
    float max = MINUS_INFINITY;
    for (uint32_t p = threadIdx.x; p < count; p += THREADS) max = fmaxf(max, chunks[p].max);
    max = block_max<THREADS>(max);
    double sum = 0.0;
    for (uint32_t p = threadIdx.x; p < count; p += THREADS)
        sum += chunks[p].sum * exp(static_cast<double>(chunks[p].max) - static_cast<double>(max));
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
            uint64_t k = chunks[i / top].top[i % top];
            if (k < below && k > best) best = k;
        }
        below = block_max_key(best);
        // The vocabulary has fewer ids than were asked for.
        if (threadIdx.x == 0)
            result[2 + 2 * n] = below == 0 ? FULL_MASK : key_id(below),
                           result[3 + 2 * n] = bits(key_value(below));
    }
}

DEVICE void choose(const Args& args, uint32_t* tokens, uint32_t* results) {
    launch_dependents_and_wait();
    uint64_t max_key = row_max_key(args);
    uint32_t* result = results + static_cast<size_t>(args.index) * RESULT_WORDS;
    if (!has_choice(max_key)) {
        if (threadIdx.x > 0) return;
        tokens[args.index] = 0;  // the next step may be under way already and read it
        result[0] = max_key == ALL_ONES ? NOT_FINITE : NOTHING_LEFT;
        return;
    }
    const RowParams& row = args.row();
    uint32_t token = args.sampled() ? draw(args, max_key) : key_id(max_key);
    if (threadIdx.x == 0) tokens[args.index] = result[0] = token;
    if (row.logprobs > 0) write_logprobs(args, token, result);
}

}  // namespace

KERNEL(sampling_choose_f32, __launch_bounds__(256), float* logits, uint32_t vocab,
    const uint32_t* params, uint32_t params_len, uint32_t rows, unsigned char* workspace,
    uint32_t row_bytes, uint32_t* tokens, uint32_t* results) {
    choose({logits, vocab, params, params_len, rows, workspace, row_bytes, blockIdx.x}, tokens,
        results);
}
