// What the attention kernels share: where keys lie, which of them a query sees, how work is dealt
// out, how partial results of consecutive splits of the keys are merged.
#pragma once

#include "common.cuh"

namespace {

struct Range {
    uint32_t begin, end;
};

DEVICE uint32_t divide_up(uint32_t x, uint32_t by) { return (x + by - 1) / by; }

// The first key that a query at `position` sees.
DEVICE uint32_t lowest_key(uint32_t position, uint32_t window) {
    return position >= window ? position - window + 1 : 0;
}

// A call, as `gpu.rs` describes it. Tables and lengths are read on the device.
template <class T>
struct Paged {
    const T* q;
    const T* k;
    const T* v;
    T* out;
    const uint32_t* seq_lens;
    const uint32_t* tables;
    const uint32_t* header;
    uint32_t q_stride, heads, kv_heads, sequences, blocks, block_size, table_len, window;
    float to_log2, cap_in;

    DEVICE uint32_t group() const { return heads / kv_heads; }
    DEVICE uint32_t table_stride() const { return header[0]; }
    // The blocks of a sequence that has `len` tokens.
    DEVICE const uint32_t* table(uint32_t sequence, uint32_t len) const {
        size_t start = static_cast<size_t>(sequence) * table_stride();
        uint32_t used = divide_up(len, block_size);
        ASSERT(used <= table_stride() && start + used <= table_len);
        return tables + start;
    }
    DEVICE uint32_t lowest(uint32_t position) const { return lowest_key(position, window); }
};

// Parameters of a kernel and the call they make up.
#define PAGED_PARAMETERS(T)                                                                       \
    const T *q, const T *k, const T *v, T *out, const uint32_t *seq_lens, const uint32_t *tables, \
        const uint32_t *header, uint32_t q_stride, uint32_t heads, uint32_t kv_heads,             \
        uint32_t sequences, uint32_t blocks, uint32_t block_size, uint32_t table_len,             \
        uint32_t window, float to_log2, float cap_in
#define PAGED(T)                                                                              \
    Paged<T> {                                                                                \
        q, k, v, out, seq_lens, tables, header, q_stride, heads, kv_heads, sequences, blocks, \
            block_size, table_len, window, to_log2, cap_in                                    \
    }

// Splits of the keys start at multiples of `tokens`, whatever the window. `count` is at least one:
// every query has a writer.
struct Splits {
    Range keys;
    uint32_t tokens, first, count;

    DEVICE Splits(Range keys, const uint32_t* header) : keys(keys), tokens(header[1]) {
        ASSERT(tokens > 0 && tokens % 64 == 0);
        first = keys.begin / tokens;
        uint32_t end = keys.end / tokens + (keys.end % tokens != 0);
        count = end > first ? end - first : 1;
    }
    DEVICE Range part(uint32_t index) const {
        uint32_t begin = (first + index) * tokens, left = keys.end - begin;
        return {max(begin, keys.begin), left > tokens ? begin + tokens : keys.end};
    }
};

// The splits of what the only query of a sequence of `len` tokens sees.
DEVICE Splits decode_splits(uint32_t len, uint32_t window, const uint32_t* header) {
    return Splits({len > 0 ? lowest_key(len - 1, window) : 0, len}, header);
}

// Deals a running number out to owners that have `count(i)` numbers each. A warp asks together, for
// numbers that never fall.
struct Finder {
    uint32_t base = 0, before = 0;
    uint32_t owner, offset;

    template <class Count>
    DEVICE bool find(uint32_t number, uint32_t owners, const Count& count) {
        for (; base < owners; base += WARP) {
            uint32_t mine = base + lane() < owners ? count(base + lane()) : 0, upto = mine;
#pragma unroll
            for (uint32_t step = 1; step < WARP; step *= 2) {
                uint32_t lower = __shfl_up_sync(FULL, upto, step);
                if (lane() >= step) upto += lower;
            }
            uint32_t total = __shfl_sync(FULL, upto, WARP - 1);
            if (number < before + total) {
                uint32_t at = __popc(__ballot_sync(FULL, before + upto <= number));
                owner = base + at;
                offset = number - before - __shfl_sync(FULL, upto - mine, at);
                return true;
            }
            before += total;
        }
        return false;
    }
};

// ---- running softmax. Scores are in units of log2, so weights are powers of two.

DEVICE float power(float x) { return exp2_approx(x); }

// The exponent that weights are relative to: the largest score, or 0 while there is none.
DEVICE float reference_of(float largest) { return largest == MINUS_INFINITY ? 0.0f : largest; }

// Sums over two consecutive sets of keys become those over both: each value `x` of the first and
// `y` of the second becomes `both(x, y)`. Exactly that in decode's last step and in prefill, so
// that both give the same bits; where one set is empty the other's values stay as they are.
struct Merge {
    float largest, first, second;

    DEVICE Merge(float x_largest, float y_largest)
        : largest(x_largest > y_largest ? x_largest : y_largest) {
        first = power(x_largest - reference_of(largest));
        second = power(y_largest - reference_of(largest));
    }
    DEVICE float both(float x, float y) const { return fmaf(x, first, __fmul_rn(y, second)); }
};

// What a sum is multiplied with in the end. Without keys the result is zero.
DEVICE float share(float weights) { return weights > 0.0f ? 1.0f / weights : 0.0f; }

// Where decode leaves the sums of a split for the last step, in f32: `[sequences, max_splits,
// heads, 2]`, the largest score and the sum of weights, and behind them `[sequences, max_splits,
// heads, head_dim]`.
struct Partial {
    float *state, *sums;

    DEVICE Partial(float* workspace, size_t sequences, size_t max_splits, size_t heads,
        uint32_t head_dim, size_t sequence, size_t split, size_t head) {
        size_t index = (sequence * max_splits + split) * heads + head;
        state = workspace + index * 2;
        sums = workspace + sequences * max_splits * heads * 2 + index * head_dim;
    }
};

}  // namespace
