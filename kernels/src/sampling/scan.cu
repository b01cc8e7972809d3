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

// The tokens of the step's sequences, each where the cache keeps its K and V.
struct History {
    const uint32_t *tokens, *tables, *header, *seq_lens;
    uint32_t slots, table_len, sequences, block_size;

    DEVICE uint32_t len(uint32_t sequence) const {
        ASSERT(sequence < sequences);
        return seq_lens[sequence];
    }
    // f(token) for those at positions from `first` to before `end`. Blocks begin at multiples of
    // four, so four are read at once.
    template <class F>
    DEVICE void each(uint32_t sequence, uint32_t first, uint32_t end, F f) const {
        size_t table = static_cast<size_t>(sequence) * header[0];
        ASSERT((end + block_size - 1) / block_size <= header[0] && table + header[0] <= table_len);
        for (uint32_t p = first / 4 * 4 + threadIdx.x * 4; p < end; p += THREADS * 4) {
            size_t slot =
                static_cast<size_t>(tables[table + p / block_size]) * block_size + p % block_size;
            ASSERT(slot + 4 <= slots);
            auto four = load<uint32_t, 4>(tokens + slot);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                if (p + i >= first && p + i < end) f(four.at[i]);
        }
    }
};

// For each id of the piece: twice how often it stands in the row's output, and 1 more where it
// stands in the prompt.
DEVICE void count(const Row& row, const History& history, uint32_t* marks) {
    for (uint32_t i = threadIdx.x; i < PIECE; i += THREADS) marks[i] = 0;
    __syncthreads();
    if (!row.penalises()) return;
    uint32_t len = history.len(row.sequence), prompt = min(row.prompt, len);
    auto here = [](uint32_t token) { return token / PIECE == blockIdx.x; };
    if (row.repetition != 1.0f) {
        history.each(row.sequence, 0, prompt, [&](uint32_t token) {
            if (here(token)) marks[token % PIECE] = 1;
        });
        __syncthreads();
    }
    history.each(row.sequence, prompt, len, [&](uint32_t token) {
        if (here(token)) atomicAdd(&marks[token % PIECE], 2u);
    });
    __syncthreads();
}

// In the node's order, nothing fused.
DEVICE float penalised(float x, const Row& row, uint32_t count) {
    x = x > 0.0f ? __fdiv_rn(x, row.repetition) : __fmul_rn(x, row.repetition);
    x = __fadd_rn(x, -__fmul_rn(row.frequency, static_cast<float>(count)));
    return count > 0 ? __fadd_rn(x, -row.presence) : x;
}

// Writes what penalties, bias and bans make of the piece.
DEVICE void change(const Args& args, const History& history, const Share& x) {
    SHARED(uint32_t, marks, PIECE);
    const Row& row = args.row();
    count(row, history, marks);
    float* changed = args.changed_logits();
    x.each([&](uint32_t id, float x) {
        uint32_t mark = marks[id % PIECE];
        if (id < args.vocab && (mark > 0 || row.copies()))
            changed[id] = mark > 0 ? penalised(x, row, mark / 2) : x;
    });
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < row.specials; i += THREADS) {
        Special special = args.specials()[i];
        if (special.token / PIECE != blockIdx.x || special.token >= args.vocab) continue;
        float& logit = changed[special.token];
        logit = special.bias == MINUS_INFINITY ? MINUS_INFINITY : __fadd_rn(logit, special.bias);
    }
    __syncthreads();
}

DEVICE void scan(const Args& args, const History& history) {
    launch_dependents_and_wait();
    const Row& row = args.row();
    Work& work = args.work();
    Piece& piece = work.pieces()[blockIdx.x];
    Share x;
    x.load_from(args.row_logits(), args.vocab);
    uint64_t leader = block_most(x.finite(args.vocab) ? x.leader(args.vocab) : ALL_ONES);
    if (row.logprobs > 0 && leader != ALL_ONES)
        summarise(x, args.vocab, key_value(leader), row.logprobs - 1, piece);
    if (row.changes() && leader != ALL_ONES) {
        change(args, history, x);
        x.load_from(args.changed_logits(), args.vocab);
        leader = block_most(x.leader(args.vocab));
    }
    if (threadIdx.x == 0) piece.leader = leader;
    if (blockIdx.x > 0) return;
    for (uint32_t b = threadIdx.x; b < BUCKETS; b += THREADS) work.tally[b] = 0;
    if (threadIdx.x == 0) work.listed = 0;
}

}  // namespace

KERNEL __launch_bounds__(256, 4)
    sampling_scan_f32(float* logits, uint32_t vocab, const uint32_t* params, uint32_t params_len,
        uint32_t rows, unsigned char* work, uint32_t row_bytes, const uint32_t* tokens,
        const uint32_t* tables, const uint32_t* header, const uint32_t* seq_lens, uint32_t slots,
        uint32_t table_len, uint32_t sequences, uint32_t block_size) {
    scan({logits, vocab, params, params_len, rows, work, row_bytes, blockIdx.y},
        {tokens, tables, header, seq_lens, slots, table_len, sequences, block_size});
}
EXPORT(sampling_scan_f32)
