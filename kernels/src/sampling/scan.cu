// The first kernel of sampling.cuh. Grid: (pieces, rows).
#include "sampling/sampling.cuh"

namespace {

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
    in_turn();
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

}  // namespace

KERNEL __launch_bounds__(256) sampling_scan_f32(float* logits, uint32_t vocab, uint32_t* params, uint32_t params_len,
    uint32_t rows, unsigned char* work, uint32_t row_bytes, const uint32_t* previous, uint32_t previous_len) {
    scan({logits, vocab, params, params_len, rows, work, row_bytes, blockIdx.y}, previous, previous_len);
}
EXPORT(sampling_scan_f32)
