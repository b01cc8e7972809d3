// Attention in f32, decode and prefill, for tests of exactness: one warp for each query head (and
// split, in decode), 32 keys at a time, a lane for a key's score and then for every 32nd dimension
// of the sums. Head sizes up to 256. Reads each key once for every query: nothing here is meant to
// be fast.
#include "attention/paged.cuh"

namespace {

constexpr uint32_t PER_LANE = 8;

struct Query {
    const float *q, *k, *v;
    const uint32_t* table;
    size_t stride;
    uint32_t head_dim;

    DEVICE Query(const Paged<float>& call, uint32_t head_dim, size_t row, uint32_t head,
        const uint32_t* table)
        : q(call.q + row * call.q_stride + head * head_dim),
          k(call.k + head / call.group() * head_dim),
          v(call.v + head / call.group() * head_dim),
          table(table),
          stride(call.kv_heads * static_cast<size_t>(head_dim)),
          head_dim(head_dim) {}
};

struct PlainSums {
    float out[PER_LANE] = {}, weights = 0.0f, largest = MINUS_INFINITY;
};

DEVICE float score(const Paged<float>& call, const Query& query, size_t slot) {
    float dot = 0.0f;
    for (uint32_t d = 0; d < query.head_dim; d++)
        dot = fmaf(query.q[d], query.k[slot * query.stride + d], dot);
    return (call.cap_in > 0.0f ? tanhf(dot * call.cap_in) : dot) * call.to_log2;
}

DEVICE PlainSums attend(const Paged<float>& call, const Query& query, Range range) {
    PlainSums sums;
    for (uint32_t start = range.begin / WARP * WARP; start < range.end; start += WARP) {
        uint32_t key = start + lane(), slot = 0;
        bool inside = key >= range.begin && key < range.end;
        float s = MINUS_INFINITY;
        if (inside) {
            uint32_t block = query.table[key / call.block_size];
            ASSERT(block < call.blocks);
            slot = block * call.block_size + key % call.block_size;
            s = score(call, query, slot);
        }
        float largest = fmaxf(sums.largest, warp_max(s));
        float factor = exp2f(sums.largest - reference_of(largest)),
              weight = exp2f(s - reference_of(largest));
        sums.largest = largest;
        sums.weights = fmaf(sums.weights, factor, warp_sum(weight));
        for (uint32_t i = 0; i < PER_LANE; i++) sums.out[i] *= factor;
        for (uint32_t j = 0; j < WARP; j++) {
            float w = __shfl_sync(FULL, weight, j);
            size_t at = __shfl_sync(FULL, slot, j) * query.stride;
            if (start + j < range.begin || start + j >= range.end) continue;
            for (uint32_t i = 0, d = lane(); i < PER_LANE; i++, d += WARP)
                if (d < query.head_dim) sums.out[i] = fmaf(w, query.v[at + d], sums.out[i]);
        }
    }
    return sums;
}

DEVICE void write(
    const Paged<float>& call, const PlainSums& sums, uint32_t head_dim, size_t row, uint32_t head) {
    for (uint32_t i = 0, d = lane(); i < PER_LANE; i++, d += WARP)
        if (d < head_dim)
            call.out[(row * call.heads + head) * head_dim + d] = sums.out[i] * share(sums.weights);
}

}  // namespace

// Grid: (max_splits, heads, sequences).
KERNEL __launch_bounds__(32) attention_decode_f32(
    PAGED_PARAMETERS(float), float* workspace, uint32_t max_splits, uint32_t head_dim) {
    in_turn();
    auto call = PAGED(float);
    uint32_t split = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z, len = seq_lens[sequence];
    Splits splits = decode_splits(len, window, header);
    ASSERT(splits.count <= max_splits && head_dim <= PER_LANE * WARP);
    if (split >= splits.count) return;
    Query query(call, head_dim, sequence, head, call.table(sequence, len));
    PlainSums sums = attend(call, query, splits.part(split));
    if (splits.count == 1) return write(call, sums, head_dim, sequence, head);
    Partial to(workspace, sequences, max_splits, heads, head_dim, sequence, split, head);
    for (uint32_t i = 0, d = lane(); i < PER_LANE; i++, d += WARP)
        if (d < head_dim) to.sums[d] = sums.out[i];
    if (lane() == 0) store(to.state, Vec<float, 2>{sums.largest, sums.weights});
}
EXPORT(attention_decode_f32)

// Grid: (queries, heads).
KERNEL __launch_bounds__(32) attention_prefill_f32(
    PAGED_PARAMETERS(float), const uint32_t* cu_seqlens, uint32_t n, uint32_t head_dim) {
    in_turn();
    auto call = PAGED(float);
    uint32_t row = blockIdx.x, head = blockIdx.y;
    Finder finder;
    auto queries = [&](uint32_t i) {
        ASSERT(cu_seqlens[i] <= cu_seqlens[i + 1] && cu_seqlens[i + 1] <= n);
        return cu_seqlens[i + 1] - cu_seqlens[i];
    };
    if (!finder.find(row, sequences, queries)) return;
    uint32_t len = seq_lens[finder.owner];
    ASSERT(queries(finder.owner) <= len && head_dim <= PER_LANE * WARP);
    uint32_t position = len - queries(finder.owner) + finder.offset;
    Splits splits({call.lowest(position), position + 1}, header);
    Query query(call, head_dim, row, head, call.table(finder.owner, len));
    PlainSums sums;
    for (uint32_t part = 0; part < splits.count; part++) {
        PlainSums more = attend(call, query, splits.part(part));
        Merge merge(sums.largest, more.largest);
        sums.largest = merge.largest;
        sums.weights = merge.both(sums.weights, more.weights);
        for (uint32_t i = 0; i < PER_LANE; i++) sums.out[i] = merge.both(sums.out[i], more.out[i]);
    }
    write(call, sums, head_dim, row, head);
}
EXPORT(attention_prefill_f32)
