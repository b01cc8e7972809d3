// The first kernel of sampling.cuh. Grid: (chunks, rows).
#include "sampling/sampling.cuh"

namespace {

DEVICE void write_statistics(
    const ThreadLogits& x, uint32_t vocab, float max, uint32_t top, ChunkResult& result) {
    double sum = 0.0;
    x.for_each([&](uint32_t, float x) { sum += static_cast<double>(expf(x - max)); });
    sum = block_combine<THREADS>(sum, 0.0, [](double v) { return warp_sum(v); });
    if (threadIdx.x == 0) result.max = max, result.sum = sum;
    uint64_t below = ALL_ONES;
    for (uint32_t n = 0; n < top; n++) {
        uint64_t best = 0;
        x.for_each([&](uint32_t id, float x) {
            uint64_t k = id < vocab ? key(x, id) : 0;
            if (k < below && k > best) best = k;
        });
        below = block_max_key(best);
        if (threadIdx.x == 0) result.top[n] = below;
    }
}

// The tokens of the step's sequences. Each is in the slot in which the cache keeps its K and V.
struct History {
    const uint32_t *tokens, *tables, *starts, *seq_lens;
    uint32_t slots, table_len, sequences, block_size;

    DEVICE uint32_t len(uint32_t sequence) const {
        ASSERT(sequence < sequences);
        return seq_lens[sequence];
    }
    // Calls f(token) for the tokens at positions from `first` to before `end`. Blocks begin at
    // multiples of four tokens, so four are read at once.
    template <class F>
    DEVICE void for_each(uint32_t sequence, uint32_t first, uint32_t end, F f) const {
        uint32_t table = starts[sequence], last = starts[sequence + 1];
        ASSERT(table <= last && last <= table_len);
        ASSERT((end + block_size - 1) / block_size <= last - table);
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

// Sets the mark of each id of the chunk: twice the number of times that it occurs in the row's
// output, plus 1 if it occurs in the prompt.
DEVICE void mark_history(const RowParams& row, const History& history, uint32_t* marks) {
    for (uint32_t i = threadIdx.x; i < CHUNK; i += THREADS) marks[i] = 0;
    __syncthreads();
    if (!row.has_penalties()) return;
    uint32_t len = history.len(row.sequence), prompt = min(row.prompt, len);
    auto here = [](uint32_t token) { return token / CHUNK == blockIdx.x; };
    if (row.repetition != 1.0f) {
        history.for_each(row.sequence, 0, prompt, [&](uint32_t token) {
            if (here(token)) marks[token % CHUNK] = 1;
        });
        __syncthreads();
    }
    history.for_each(row.sequence, prompt, len, [&](uint32_t token) {
        if (here(token)) atomicAdd(&marks[token % CHUNK], 2u);
    });
    __syncthreads();
}

// The order of the node's sampler; no operation is fused, so that the bits are the CPU's.
DEVICE float penalised(float x, const RowParams& row, uint32_t count) {
    x = x > 0.0f ? __fdiv_rn(x, row.repetition) : __fmul_rn(x, row.repetition);
    x = __fadd_rn(x, -__fmul_rn(row.frequency, static_cast<float>(count)));
    return count > 0 ? __fadd_rn(x, -row.presence) : x;
}

// The ids that may be drawn in the rows that keep to a format: a bit for each id.
struct Masks {
    const uint32_t* words;
    uint32_t len;

    // The bits of four ids of which the first is a multiple of four.
    DEVICE uint32_t four(const Args& args, uint32_t first) const {
        uint32_t mask = args.row().mask, row_words = (args.vocab + 31) / 32;
        if (mask == 0 || first >= args.vocab) return FULL_MASK;
        ASSERT(static_cast<uint64_t>(mask) * row_words <= len);
        return words[static_cast<size_t>(mask - 1) * row_words + first / 32] >> first % 32;
    }
};

// Writes the chunk's logits after penalties, mask, bias and bans.
DEVICE void adjust(
    const Args& args, const Masks& masks, const History& history, const ThreadLogits& x) {
    SHARED(uint32_t, marks, CHUNK);
    const RowParams& row = args.row();
    mark_history(row, history, marks);
    float* changed = args.adjusted_logits();
#pragma unroll
    for (uint32_t v = 0; v < VECTORS; v++) {
        uint32_t allowed = masks.four(args, ThreadLogits::id(v));
#pragma unroll
        for (uint32_t i = 0; i < LANES; i++) {
            uint32_t id = ThreadLogits::id(v) + i, mark = marks[id % CHUNK];
            bool out = (allowed >> i & 1) == 0;
            if (id >= args.vocab || !(out || mark > 0 || row.keeps_raw())) continue;
            float kept = mark > 0 ? penalised(x.at[v][i], row, mark / 2) : x.at[v][i];
            changed[id] = out ? MINUS_INFINITY : kept;
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < row.specials; i += THREADS) {
        Special special = args.specials()[i];
        if (special.token / CHUNK != blockIdx.x || special.token >= args.vocab) continue;
        float& logit = changed[special.token];
        logit = special.bias == MINUS_INFINITY ? MINUS_INFINITY : __fadd_rn(logit, special.bias);
    }
    __syncthreads();
}

DEVICE void scan(const Args& args, const Masks& masks, const History& history) {
    launch_dependents_and_wait();
    const RowParams& row = args.row();
    RowWorkspace& workspace = args.workspace();
    ChunkResult& result = workspace.chunks()[blockIdx.x];
    ThreadLogits x;
    x.load_from(args.row_logits(), args.vocab);
    uint64_t max_key = block_max_key(x.finite(args.vocab) ? x.max_key(args.vocab) : ALL_ONES);
    if (row.logprobs > 0 && max_key != ALL_ONES)
        write_statistics(x, args.vocab, key_value(max_key), row.logprobs - 1, result);
    if (row.adjusts() && max_key != ALL_ONES) {
        adjust(args, masks, history, x);
        x.load_from(args.adjusted_logits(), args.vocab);
        max_key = block_max_key(x.max_key(args.vocab));
    }
    if (threadIdx.x == 0) result.max_key = max_key;
    if (blockIdx.x > 0) return;
    for (uint32_t b = threadIdx.x; b < BUCKETS; b += THREADS) workspace.histogram[b] = 0;
    if (threadIdx.x == 0) workspace.candidate_count = 0;
}

}  // namespace

KERNEL(sampling_scan_f32, __launch_bounds__(256, 4), float* logits, uint32_t vocab,
    const uint32_t* params, uint32_t params_len, uint32_t rows, unsigned char* workspace,
    uint32_t row_bytes, const uint32_t* masks, uint32_t masks_len, const uint32_t* tokens,
    const uint32_t* tables, const uint32_t* starts, const uint32_t* seq_lens, uint32_t slots,
    uint32_t table_len, uint32_t sequences, uint32_t block_size) {
    scan({logits, vocab, params, params_len, rows, workspace, row_bytes, blockIdx.y},
        {masks, masks_len},
        {tokens, tables, starts, seq_lens, slots, table_len, sequences, block_size});
}
