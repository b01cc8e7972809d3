// Shared by the attention kernels: the place of keys in the paged cache, the keys that a query
// sees, and the merging of partial softmaxes over consecutive splits of the keys.
#pragma once

#include "common.cuh"

namespace {

struct Range {
    uint32_t begin, end;
};

// The first key that a query at `position` sees.
DEVICE uint32_t first_visible_key(uint32_t position, uint32_t window) {
    return position >= window ? position - window + 1 : 0;
}

// The arguments that every attention kernel takes, as `gpu.rs` describes them. Tables and lengths
// are read on the device.
template <class T>
struct AttentionParams {
    const T* q;
    const T* k;
    const T* v;
    T* out;
    const uint32_t* seq_lens;
    const uint32_t* tables;
    const uint32_t* table_starts;
    const float* sinks;  // of each head, or null
    uint32_t q_stride, heads, kv_heads, sequences, blocks, block_size, table_len, window;
    float to_log2, cap_in;

    DEVICE uint32_t group() const { return heads / kv_heads; }
    // The block table of a sequence that has `len` tokens.
    DEVICE const uint32_t* table(uint32_t sequence, uint32_t len) const {
        uint32_t start = table_starts[sequence], end = table_starts[sequence + 1];
        ASSERT(start <= end && end <= table_len && divide_up(len, block_size) <= end - start);
        return tables + start;
    }
    DEVICE uint32_t first_key(uint32_t position) const {
        return first_visible_key(position, window);
    }
};

// The parameters of a kernel, and the structs that they make up.
#define ATTENTION_PARAMETERS(T)                                                                   \
    const T *q, const T *k, const T *v, T *out, const uint32_t *seq_lens, const uint32_t *tables, \
        const uint32_t *table_starts, const float *sinks, uint32_t q_stride, uint32_t heads,      \
        uint32_t kv_heads, uint32_t sequences, uint32_t blocks, uint32_t block_size,              \
        uint32_t table_len, uint32_t window, float to_log2, float cap_in
#define ATTENTION_PARAMS(T)                                                                        \
    AttentionParams<T> {                                                                           \
        q, k, v, out, seq_lens, tables, table_starts, sinks, q_stride, heads, kv_heads, sequences, \
            blocks, block_size, table_len, window, to_log2, cap_in                                 \
    }
#define PREFILL_PARAMETERS const uint32_t *cu_seqlens, const uint32_t *split_tokens, uint32_t n
#define DECODE_PARAMETERS                                                                     \
    const uint32_t *shares, const uint32_t *pieces, const uint32_t *firsts, float *workspace, \
        uint32_t *counters, uint32_t share_count, uint32_t piece_words, uint32_t partials
#define DECODE_WORK \
    DecodeWork { shares, pieces, firsts, workspace, counters, share_count, piece_words, partials }

// Splits of the keys of a tile of prefill. They start at multiples of `tokens`, whatever the window
// is, as decode's pieces do where cuts are fixed: a query's splits do not depend on the batch.
// `count` is at least one, so that every query is written.
struct Splits {
    Range keys;
    uint32_t tokens, first, count;

    DEVICE Splits(Range keys, const uint32_t* split_tokens) : keys(keys), tokens(*split_tokens) {
        ASSERT(tokens > 0 && tokens % 64 == 0);
        first = keys.begin / tokens;
        uint32_t end = keys.end / tokens + (keys.end % tokens != 0);
        count = end > first ? end - first : 1;
    }
    DEVICE Range range(uint32_t index) const {
        uint32_t begin = (first + index) * tokens, left = keys.end - begin;
        return {max(begin, keys.begin), left > tokens ? begin + tokens : keys.end};
    }
};

// What decode computes, as `plan.rs` plans it: shares of consecutive pieces, each a range of the
// keys of one sequence. All of it is read on the device, so a recorded launch follows each step's
// plan.
//
// The pieces of a sequence leave partial results in the workspace. The block that leaves the last
// one of a tile of heads finds that by the tile's counter, and merges all of them in the order of
// the keys, so the result does not depend on which block that is.
struct DecodeWork {
    static constexpr uint32_t ONLY = 0xffffffffu;

    const uint32_t *shares, *pieces, *firsts;
    float* workspace;
    uint32_t* counters;  // of each tile of heads of each sequence; 0 between launches
    uint32_t share_count, piece_words, partials;

    // The pieces of a share.
    DEVICE Range share(uint32_t index) const {
        Range found{shares[index], shares[index + 1]};
        ASSERT(found.begin <= found.end && found.end <= piece_words / 4);
        return found;
    }
    DEVICE Vec<uint32_t, 4> piece(uint32_t index) const {
        return load<uint32_t, 4>(pieces + static_cast<size_t>(index) * 4);
    }
    // The partial results of a sequence, of which `partial` is one.
    DEVICE Range parts(uint32_t sequence, uint32_t partial) const {
        Range own{firsts[sequence], firsts[sequence + 1]};
        ASSERT(own.begin <= partial && partial < own.end && own.end <= partials);
        return own;
    }
    // Whether this block, which has written a partial result, is the last of `count`. It then sees
    // those of all. Every thread of the block calls it.
    DEVICE bool is_last(uint32_t counter, uint32_t count) const {
        __syncthreads();
        bool last = false;
        if (threadIdx.x == 0) {
            __threadfence();  // The results are visible before the count is.
            last = atomicInc(counters + counter, count - 1) == count - 1;
            if (last) __threadfence();  // No result is read before the count was.
        }
        return __syncthreads_or(last);
    }
};

// A piece of the keys that the only query of a sequence sees.
struct KeyPiece {
    uint32_t sequence, len;
    Range keys;
    uint32_t partial;  // the number of its partial result, or `ONLY` if it has none

    template <class T>
    DEVICE KeyPiece(
        const AttentionParams<T>& params, const DecodeWork& work, const Vec<uint32_t, 4>& words)
        : sequence(words.at[0]), keys{words.at[1], words.at[2]}, partial(words.at[3]) {
        ASSERT(sequence < params.sequences);
        ASSERT(partial < work.partials || partial == DecodeWork::ONLY);
        len = params.seq_lens[sequence];
        uint32_t first = len > 0 ? params.first_key(len - 1) : 0;
        ASSERT(first <= keys.begin && keys.begin <= keys.end && keys.end <= len);
        ASSERT((keys.begin == first || keys.begin % 64 == 0) &&
               (keys.end == len || keys.end % 64 == 0));
    }
};

// ---- online softmax. Scores are in units of log2, so weights are powers of two.

// tanh(score · cap_in), within 1e-6, as 1 - 2 / (e^2x + 1).
DEVICE float capped(float score, float cap_in) {
    constexpr float TWO_LOG2_E = 2.8853901f;
    return 1.0f - __fdividef(2.0f, exp2_approx(score * (cap_in * TWO_LOG2_E)) + 1.0f);
}

// The maximum that is subtracted from scores: the largest score so far, or 0 while there is none,
// because minus infinity minus itself is not a number.
DEVICE float finite_max(float row_max) { return row_max == MINUS_INFINITY ? 0.0f : row_max; }

// Merges the softmax states of two consecutive sets of keys: each value `x` of the first and `y` of
// the second becomes `merge(x, y)`. Decode's last step and prefill use exactly this, so that both
// give the same bits; if one set is empty, the other's values stay as they are.
struct StateMerge {
    float row_max, first, second;

    DEVICE StateMerge(float x_max, float y_max) : row_max(x_max > y_max ? x_max : y_max) {
        first = exp2_approx(x_max - finite_max(row_max));
        second = exp2_approx(y_max - finite_max(row_max));
    }
    DEVICE float merge(float x, float y) const { return fmaf(x, first, __fmul_rn(y, second)); }
};

// The factor that normalises the output of a row of `head`, after all of its keys. A sink takes
// part in the softmax here and nowhere else, so it counts once however keys are cut. The factor is
// zero if the query saw no keys.
DEVICE float normaliser(float row_max, float row_sum, const float* sinks, uint32_t head) {
    constexpr float LOG2_E = 1.4426950408889634f;
    if (!(row_sum > 0.0f)) return 0.0f;
    if (sinks == nullptr) return 1.0f / row_sum;
    float sink = __fmul_rn(sinks[head], LOG2_E), largest = fmaxf(row_max, sink);
    float own = exp2_approx(row_max - largest);
    return own / fmaf(row_sum, own, exp2_approx(sink - largest));
}

// The place in the workspace at which decode and prefill leave a partial result, in f32:
// `[partials, heads, stride]` holds the output that is not normalised yet, and at the end of a row
// the largest score and the sum of weights.
struct PartialState {
    float *out, *max_and_sum;

    DEVICE PartialState(
        float* workspace, size_t heads, uint32_t value_dim, size_t partial, size_t head)
        : out(workspace + (partial * heads + head) * stride(value_dim)),
          max_and_sum(out + stride(value_dim) - 2) {}

    // Rows begin at multiples of 16 bytes.
    DEVICE static constexpr uint32_t stride(uint32_t value_dim) {
        return (value_dim + 2 + 3) / 4 * 4;
    }
};

}  // namespace
