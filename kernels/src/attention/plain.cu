// Attention in f32, decode and prefill, for tests of exactness: one warp for each query head (and
// share of the keys, in decode), 32 keys at a time, a lane for a key's score and then for every
// 32nd dimension of the output. Values have up to 512 dimensions, and may be parts of keys. It
// reads each key once for every query and is not meant to be fast.
#include "attention/merge.cuh"

namespace {

constexpr uint32_t PER_LANE = 16;  // dimensions of a lane: values of up to 512

struct Query {
    const float *q, *k, *v;
    const uint32_t* table;
    size_t stride;
    uint32_t head_dim, value_dim;

    DEVICE Query(const AttentionParams<float>& params, uint32_t head_dim, uint32_t value_dim,
        size_t row, uint32_t head, const uint32_t* table)
        : q(params.q + row * params.q_stride + head * head_dim),
          k(params.k + head / params.group() * head_dim),
          v(params.v + head / params.group() * head_dim),
          table(table),
          stride(params.kv_heads * static_cast<size_t>(head_dim)),
          head_dim(head_dim),
          value_dim(value_dim) {}
};

struct RowState {
    float o[PER_LANE] = {}, row_sum = 0.0f, row_max = MINUS_INFINITY;
};

DEVICE float score(const AttentionParams<float>& params, const Query& query, size_t slot) {
    float dot = 0.0f;
    for (uint32_t d = 0; d < query.head_dim; d++)
        dot = fmaf(query.q[d], query.k[slot * query.stride + d], dot);
    return (params.cap_in > 0.0f ? tanhf(dot * params.cap_in) : dot) * params.to_log2;
}

DEVICE RowState attend(const AttentionParams<float>& params, const Query& query, Range range) {
    RowState state;
    for (uint32_t start = range.begin / WARP * WARP; start < range.end; start += WARP) {
        uint32_t key = start + lane(), slot = 0;
        bool inside = key >= range.begin && key < range.end;
        float s = MINUS_INFINITY;
        if (inside) {
            uint32_t block = query.table[key / params.block_size];
            ASSERT(block < params.blocks);
            slot = block * params.block_size + key % params.block_size;
            s = score(params, query, slot);
        }
        float row_max = fmaxf(state.row_max, warp_max(s));
        float factor = exp2f(state.row_max - finite_max(row_max)),
              weight = exp2f(s - finite_max(row_max));
        state.row_max = row_max;
        state.row_sum = fmaf(state.row_sum, factor, warp_sum(weight));
        for (uint32_t i = 0; i < PER_LANE; i++) state.o[i] *= factor;
        for (uint32_t j = 0; j < WARP; j++) {
            float w = __shfl_sync(FULL_MASK, weight, j);
            size_t at = __shfl_sync(FULL_MASK, slot, j) * query.stride;
            if (start + j < range.begin || start + j >= range.end) continue;
            for (uint32_t i = 0, d = lane(); d < query.value_dim; i++, d += WARP)
                state.o[i] = fmaf(w, query.v[at + d], state.o[i]);
        }
    }
    return state;
}

DEVICE void write(const AttentionParams<float>& params, const RowState& state, uint32_t value_dim,
    size_t row, uint32_t head) {
    float by = normaliser(state.row_max, state.row_sum, params.sinks, head);
    for (uint32_t i = 0, d = lane(); d < value_dim; i++, d += WARP)
        params.out[(row * params.heads + head) * value_dim + d] = state.o[i] * by;
}

}  // namespace

// Grid: (shares, heads).
KERNEL(attention_decode_f32, __launch_bounds__(32), ATTENTION_PARAMETERS(float), DECODE_PARAMETERS,
    uint32_t head_dim, uint32_t value_dim) {
    launch_dependents_and_wait();
    auto params = ATTENTION_PARAMS(float);
    auto work = DECODE_WORK;
    ASSERT(value_dim <= PER_LANE * WARP);
    uint32_t head = blockIdx.y;
    Range share = work.share(blockIdx.x);
    for (uint32_t at = share.begin; at < share.end; at++) {
        KeyPiece piece(params, work, work.piece(at));
        Query query(params, head_dim, value_dim, piece.sequence, head,
            params.table(piece.sequence, piece.len));
        RowState state = attend(params, query, piece.keys);
        if (piece.partial == DecodeWork::ONLY) {
            write(params, state, value_dim, piece.sequence, head);
            continue;
        }
        PartialState to(workspace, heads, value_dim, piece.partial, head);
        for (uint32_t i = 0, d = lane(); d < value_dim; i++, d += WARP) to.out[d] = state.o[i];
        if (lane() == 0) store(to.max_and_sum, Vec<float, 2>{state.row_max, state.row_sum});
        Range own = work.parts(piece.sequence, piece.partial);
        if (work.is_last(piece.sequence * heads + head, own.end - own.begin))
            merge_partials<32>(workspace, out, sinks, own, piece.sequence, head, heads, value_dim);
    }
}

// Grid: (queries, heads).
KERNEL(attention_prefill_f32, __launch_bounds__(32), ATTENTION_PARAMETERS(float),
    PREFILL_PARAMETERS, uint32_t head_dim, uint32_t value_dim) {
    launch_dependents_and_wait();
    auto params = ATTENTION_PARAMS(float);
    uint32_t row = blockIdx.x, head = blockIdx.y;
    WorkSearch search;
    auto queries = [&](uint32_t i) {
        ASSERT(cu_seqlens[i] <= cu_seqlens[i + 1] && cu_seqlens[i + 1] <= n);
        return cu_seqlens[i + 1] - cu_seqlens[i];
    };
    if (!search.find(row, sequences, queries)) return;
    uint32_t len = seq_lens[search.sequence];
    ASSERT(queries(search.sequence) <= len && value_dim <= PER_LANE * WARP);
    uint32_t position = len - queries(search.sequence) + search.index;
    Splits splits({params.first_key(position), position + 1}, split_tokens);
    Query query(params, head_dim, value_dim, row, head, params.table(search.sequence, len));
    RowState state;
    for (uint32_t split = 0; split < splits.count; split++) {
        RowState more = attend(params, query, splits.range(split));
        StateMerge both(state.row_max, more.row_max);
        state.row_max = both.row_max;
        state.row_sum = both.merge(state.row_sum, more.row_sum);
        for (uint32_t i = 0; i < PER_LANE; i++) state.o[i] = both.merge(state.o[i], more.o[i]);
    }
    write(params, state, value_dim, row, head);
}
