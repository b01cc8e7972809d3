// The second and third kernel of sampling.cuh. Grid: (pieces, rows).
#include "sampling/cut.cuh"
#include "sampling/gumbel.cuh"

namespace {

DEVICE void tally(const Args& args) {
    launch_dependents_and_wait();
    if (!args.sampled() || !(args.limited() || args.nucleus())) return;
    Share logits;
    logits.load_from(args.changed_logits(), args.vocab);
    uint64_t leader = row_leader(args);
    if (!usable(leader)) return;
    logits.scale(key_value(leader), args.row().temperature);
    Tally sums = shared_tally();
    sums.clear();
    uint64_t tail = 0;  // of the last bucket, where most of a cold row is
    bool counts = args.limited();
    logits.each([&](uint32_t, float scaled) {
        if (!present(scaled)) return;
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
            atomicAdd(reinterpret_cast<unsigned long long*>(&args.work().tally[b]),
                static_cast<unsigned long long>(sums(b)));
}

// Appends what lies between these depths to the row's list, in no order; nothing of a block whose
// share does not fit.
DEVICE void append(Work& work, const Share& scaled, float from, float to) {
    auto wanted = [&](float scaled) {
        return present(scaled) && depth(scaled) >= from && depth(scaled) < to;
    };
    SHARED(uint32_t, base, 2);
    if (threadIdx.x == 0) base[0] = 0;
    __syncthreads();
    uint32_t mine = 0;
    scaled.each([&](uint32_t, float scaled) { mine += wanted(scaled); });
    uint32_t at = mine > 0 ? atomicAdd(&base[0], mine) : 0;
    __syncthreads();
    if (threadIdx.x == 0 && base[0] > 0) base[1] = atomicAdd(&work.listed, base[0]);
    __syncthreads();
    if (mine == 0 || base[1] + base[0] > LIST) return;
    at += base[1];
    scaled.each([&](uint32_t id, float scaled) {
        if (wanted(scaled)) work.list[at++] = rank(scaled, id);
    });
}

DEVICE void race(const Args& args) {
    launch_dependents_and_wait();
    if (!args.sampled()) return;
    Share logits;
    logits.load_from(args.changed_logits(), args.vocab);
    uint64_t leader = row_leader(args);
    if (!usable(leader)) return;
    const Row& row = args.row();
    logits.scale(key_value(leader), row.temperature);
    float certain = BUCKETS;  // ids of less depth are in
    if (args.limited() || args.nucleus()) {
        float cut = row_cut(args).bucket;
        certain = args.limited() && args.nucleus() ? 0.0f : cut;
        append(args.work(), logits, certain, cut + 1.0f);
    }
    Race race(row, key_id(leader));
#pragma unroll
    for (uint32_t v = 0; v < VECTORS; v++) {
        float in[LANES];
#pragma unroll
        for (uint32_t i = 0; i < LANES; i++) {
            float scaled = logits.at[v][i];
            in[i] = present(scaled) && scaled >= row.least && depth(scaled) < certain
                        ? scaled
                        : MINUS_INFINITY;
        }
        race.enter_four(Share::id(v), in);
    }
    Best best = block_best(race.best);
    Piece& piece = args.work().pieces()[blockIdx.x];
    if (threadIdx.x == 0) piece.value = best.value, piece.winner = best.id;
}

}  // namespace

KERNEL __launch_bounds__(256)
    sampling_tally_f32(float* logits, uint32_t vocab, const uint32_t* params, uint32_t params_len,
        uint32_t rows, unsigned char* work, uint32_t row_bytes) {
    tally({logits, vocab, params, params_len, rows, work, row_bytes, blockIdx.y});
}
EXPORT(sampling_tally_f32)
KERNEL __launch_bounds__(256)
    sampling_race_f32(float* logits, uint32_t vocab, const uint32_t* params, uint32_t params_len,
        uint32_t rows, unsigned char* work, uint32_t row_bytes) {
    race({logits, vocab, params, params_len, rows, work, row_bytes, blockIdx.y});
}
EXPORT(sampling_race_f32)
