// A mixture of experts. Choice c = row * chosen + j is a row with the j-th of its experts, by
// ascending number. All sums are in f32 and in an order that the op's sizes determine.
//
// route: a warp for each row of scores[n, experts], 4 rows a block. In `chosen` rounds it looks for
//   the best score behind the one found last (of equal scores that of the smaller number), so no
//   list of what is taken is needed; the scores come from the first-level cache after the first
//   round. Lane j keeps the j-th choice; the lanes then exchange places to ascend by expert. A row
//   with a score that is not finite gets the first experts, and weights that are NaN. With biases,
//   weights are sigmoids, computed anew in each round. With groups, lane g first ranks the g-th.
//   Bytes: 4 n experts read. 8 of 128 experts are 9 rounds of 4 scores a lane and a warp's
//   reduction: latency, about 2 us.
// group_choices: a warp for each expert. Its choices begin behind those of smaller experts, so it
//   counts both in one pass over all choices and writes its own in a second. No atomics: the order
//   is the same each time. Bytes: 4 n chosen a block, from the second-level cache; 2048 rows with 8
//   choices are 2 × 512 steps a warp, some 15 us.
// expert_linear: out[c, rows] = x[c / choices_per_row, cols] · w[expert of c, rows, cols]ᵀ (+
//   bias[expert of c, rows]), in f32 and for sizes that products.cu does not take. A warp takes a
//   row of an expert's matrix and all choices of this expert, up to 8 at a time. Grid: rows / 4 by
//   the smaller of the numbers of choices and experts. With few choices, block y takes the expert
//   of the y-th choice in the order of experts, if it is the expert's first; so the matrices of
//   experts that nobody chose are not read, and the launch depends on sizes alone. Plain
//   multiply-adds: simple, not fast.
// combine: out[i] = Σ_j weights[i, j] x[i chosen + j], j ascending, then sigmoid(gate[i]), or 1
//   without gates, of the shared expert's row. Grid: (n, width / (128 threads × one 16-byte
//   vector)). Bytes: (chosen + 1 + 1 if shared) n width elements, each once.
#include "experts/plan.cuh"

namespace {

constexpr uint32_t WARPS = 4;  // rows of scores, or of a matrix, of a block
constexpr uint32_t COMBINE_THREADS = 128;

// A score and its expert. Of equal scores the smaller expert is better.
struct Score {
    float score;
    uint32_t expert;

    DEVICE bool is_better_than(const Score& other) const {
        return score > other.score || (score == other.score && expert < other.expert);
    }
};

DEVICE Score warp_best(Score best) {
#pragma unroll
    for (uint32_t step = WARP / 2; step > 0; step /= 2) {
        Score other{__shfl_xor_sync(FULL_MASK, best.score, step),
            __shfl_xor_sync(FULL_MASK, best.expert, step)};
        if (other.is_better_than(best)) best = other;
    }
    return best;
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// By what an expert is chosen: its score, or with biases the sum of its sigmoid and its bias, among
// the groups that are kept.
struct Ranks {
    const float *scores, *bias;
    uint32_t size;    // experts of a group
    uint32_t groups;  // a bit for each group, set if it is kept

    DEVICE Score at(uint32_t expert) const {
        if (groups != FULL_MASK && (groups >> expert / size & 1) == 0)
            return {MINUS_INFINITY, expert};
        float score = scores[expert];
        return {bias == nullptr ? score : sigmoid(score) + bias[expert], expert};
    }
};

// The bits of the `kept` best of `count` groups. A lane finds the largest score of a group or, with
// biases, adds up its two largest sums.
DEVICE uint32_t best_groups(const Ranks& all, uint32_t count, uint32_t kept) {
    float first = MINUS_INFINITY, second = MINUS_INFINITY;
    for (uint32_t i = 0; lane() < count && i < all.size; i++) {
        float rank = all.at(lane() * all.size + i).score;
        second = fmaxf(second, fminf(first, rank));
        first = fmaxf(first, rank);
    }
    bool adds = all.bias != nullptr && all.size > 1;
    Score mine{adds ? first + second : first, lane()};
    uint32_t better = 0;
    for (uint32_t j = 0; j < count; j++) {
        Score other{__shfl_sync(FULL_MASK, mine.score, j), j};
        better += other.is_better_than(mine) ? 1 : 0;
    }
    return __ballot_sync(FULL_MASK, lane() < count && better < kept);
}

// The best score that is worse than `last`, or any if `is_first`.
DEVICE Score next_best(const Ranks& ranks, uint32_t experts, const Score& last, bool is_first) {
    Score best{MINUS_INFINITY, FULL_MASK};
    for (uint32_t i = lane(); i < experts; i += WARP) {
        Score one = ranks.at(i);
        if ((is_first || last.is_better_than(one)) && one.is_better_than(best)) best = one;
    }
    return warp_best(best);
}

DEVICE bool all_finite(const float* scores, uint32_t experts) {
    bool finite = true;
    for (uint32_t i = lane(); i < experts; i += WARP)
        finite = finite && scores[i] - scores[i] == 0.0f;
    return __all_sync(FULL_MASK, finite);
}

// The sum of the exponentials of all scores.
DEVICE float sum_of_all(const float* scores, uint32_t experts, float largest) {
    float sum = 0.0f;
    for (uint32_t i = lane(); i < experts; i += WARP) sum += expf(scores[i] - largest);
    return warp_sum(sum);
}

// Chooses a row's experts: lane j < chosen returns the j-th, in no order of experts.
DEVICE Score choose(const Ranks& ranks, uint32_t experts, uint32_t chosen, float& largest) {
    Score mine{0.0f, FULL_MASK}, last{0.0f, 0};
    for (uint32_t j = 0; j < chosen; j++) {
        last = next_best(ranks, experts, last, j == 0);
        if (j == 0) largest = last.score;
        if (lane() == j) mine = last;
    }
    return mine;
}

struct Rule {
    const float* bias;
    uint32_t groups, kept, normalise;
    float scale;
};

DEVICE void route_row(const float* scores, uint32_t experts, uint32_t chosen, const Rule& rule,
    uint32_t* ids, float* weights) {
    if (!all_finite(scores, experts)) {
        if (lane() < chosen) ids[lane()] = lane(), weights[lane()] = __uint_as_float(0x7fc00000u);
        return;
    }
    float largest = 0.0f;
    Ranks ranks{scores, rule.bias, experts / rule.groups, FULL_MASK};
    bool sigmoids = rule.bias != nullptr;
    if (rule.kept < rule.groups) ranks.groups = best_groups(ranks, rule.groups, rule.kept);
    Score mine = choose(ranks, experts, chosen, largest);
    float weight = 0.0f;
    if (lane() < chosen)
        weight = sigmoids ? sigmoid(scores[mine.expert]) : expf(mine.score - largest);
    float sum = warp_sum(weight) + (sigmoids ? 1e-20f : 0.0f);
    if (rule.normalise == 0) sum = sigmoids ? 1.0f : sum_of_all(scores, experts, largest);
    uint32_t place = 0;
    for (uint32_t j = 0; j < chosen; j++)
        place += __shfl_sync(FULL_MASK, mine.expert, j) < mine.expert ? 1 : 0;
    if (lane() < chosen) ids[place] = mine.expert, weights[place] = weight / sum * rule.scale;
}

template <class T, uint32_t N, uint32_t TOKENS>
DEVICE void multiply_choices(const T* x, const T* weights, float bias, T* out, uint32_t row,
    uint32_t rows, uint32_t cols, const uint32_t* choices, uint32_t count, uint32_t limit,
    uint32_t choices_per_row) {
    const T* from[TOKENS];
    float sums[TOKENS] = {};
#pragma unroll
    for (uint32_t i = 0; i < TOKENS; i++) {
        uint32_t choice = choices[min(i, count - 1)];
        ASSERT(choice < limit);
        from[i] = x + static_cast<size_t>(choice / choices_per_row) * cols;
    }
    for (uint32_t k = lane() * N; k < cols; k += WARP * N) {
        Vec<T, N> w = load<T, N>(weights + k);
#pragma unroll
        for (uint32_t i = 0; i < TOKENS; i++) {
            Vec<T, N> values = load<T, N>(from[i] + k);
#pragma unroll
            for (uint32_t j = 0; j < N; j++) sums[i] += to_float(w.at[j]) * to_float(values.at[j]);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < TOKENS; i++) {
        float sum = warp_sum(sums[i]) + bias;
        if (lane() == 0 && i < count)
            out[static_cast<size_t>(choices[i]) * rows + row] = from_float<T>(sum);
    }
}

template <class T, uint32_t N>
DEVICE void expert_rows(const T* x, const T* w, const T* bias, T* out, uint32_t rows, uint32_t cols,
    const uint32_t* ids, const uint32_t* begins, const uint32_t* order, uint32_t choices,
    uint32_t experts, uint32_t choices_per_row) {
    constexpr uint32_t TOKENS = 8;
    uint32_t row = blockIdx.x * WARPS + warp(), expert = 0;
    if (row >= rows || !expert_of_block(expert, ids, order, choices, experts)) return;
    ASSERT(expert < experts);
    uint32_t begin = begins[expert], end = begins[expert + 1];
    ASSERT(end <= choices);
    size_t place = static_cast<size_t>(expert) * rows + row;
    const T* weights = w + place * cols;
    float added = bias == nullptr ? 0.0f : to_float(bias[place]);
    for (; begin < end; begin += TOKENS) {
        uint32_t count = min(TOKENS, end - begin);
        if (count == 1)
            multiply_choices<T, N, 1>(x, weights, added, out, row, rows, cols, order + begin, count,
                choices, choices_per_row);
        else
            multiply_choices<T, N, TOKENS>(x, weights, added, out, row, rows, cols, order + begin,
                count, choices, choices_per_row);
    }
}

template <class T>
DEVICE void expert_linear(const T* x, const T* w, const T* bias, T* out, uint32_t rows,
    uint32_t cols, const uint32_t* ids, const uint32_t* begins, const uint32_t* order,
    uint32_t choices, uint32_t experts, uint32_t choices_per_row) {
    launch_dependents_and_wait();
    if (cols % PER_VEC<T> == 0)
        expert_rows<T, PER_VEC<T>>(
            x, w, bias, out, rows, cols, ids, begins, order, choices, experts, choices_per_row);
    else
        expert_rows<T, 1>(
            x, w, bias, out, rows, cols, ids, begins, order, choices, experts, choices_per_row);
}

template <class T, uint32_t N>
DEVICE void combine_values(const T* x, const float* weights, const T* shared, const float* gate,
    T* out, uint32_t chosen, uint32_t width) {
    uint32_t i = (blockIdx.y * COMBINE_THREADS + threadIdx.x) * N;
    if (i >= width) return;
    size_t row = blockIdx.x;
    float sums[N] = {};
    for (uint32_t j = 0; j < chosen; j++) {
        float weight = weights[row * chosen + j];
        Vec<T, N> values = load<T, N>(x + (row * chosen + j) * width + i);
        for (uint32_t v = 0; v < N; v++) sums[v] += weight * to_float(values.at[v]);
    }
    if (shared != nullptr) {
        float weight = gate == nullptr ? 1.0f : sigmoid(gate[row]);
        Vec<T, N> values = load<T, N>(shared + row * width + i);
        for (uint32_t v = 0; v < N; v++) sums[v] += weight * to_float(values.at[v]);
    }
    Vec<T, N> rounded;
    for (uint32_t v = 0; v < N; v++) rounded.at[v] = from_float<T>(sums[v]);
    store(out + row * width + i, rounded);
}

// The launch counts its blocks with the same vector size, so both must follow from `width` alike.
template <class T>
DEVICE void combine(const T* x, const float* weights, const T* shared, const float* gate, T* out,
    uint32_t chosen, uint32_t width) {
    launch_dependents_and_wait();
    if (width % PER_VEC<T> == 0)
        combine_values<T, PER_VEC<T>>(x, weights, shared, gate, out, chosen, width);
    else
        combine_values<T, 1>(x, weights, shared, gate, out, chosen, width);
}

}  // namespace

KERNEL(route_f32, __launch_bounds__(128), const float* scores, uint32_t n, uint32_t experts,
    uint32_t chosen, const float* bias, uint32_t groups, uint32_t kept, uint32_t normalise,
    float scale, uint32_t* ids, float* weights) {
    launch_dependents_and_wait();
    size_t row = blockIdx.x * WARPS + warp();
    if (row >= n) return;
    route_row(scores + row * experts, experts, chosen, Rule{bias, groups, kept, normalise, scale},
        ids + row * chosen, weights + row * chosen);
}
KERNEL(group_choices_u32, __launch_bounds__(32), const uint32_t* ids, uint32_t choices,
    uint32_t* begins, uint32_t* order) {
    launch_dependents_and_wait();
    uint32_t expert = blockIdx.x, before = 0, own = 0;
    for (uint32_t i = lane(); i < choices; i += WARP) {
        uint32_t id = ids[i];
        before += id < expert ? 1 : 0;
        own += id == expert ? 1 : 0;
    }
    before = warp_sum(before), own = warp_sum(own);
    if (lane() == 0) {
        begins[expert] = before;
        if (expert + 1 == gridDim.x) begins[expert + 1] = before + own;
    }
    for (uint32_t first = 0; first < choices; first += WARP) {
        uint32_t i = first + lane();
        bool is_own = i < choices && ids[i] == expert;
        uint32_t all = __ballot_sync(FULL_MASK, is_own);
        if (is_own) order[before + __popc(all & ((1u << lane()) - 1))] = i;
        before += __popc(all);
    }
}
#define EXPERTS(type, T)                                                                         \
    KERNEL(expert_linear_##type, __launch_bounds__(128), const T* x, const T* w, const T* bias,  \
        T* out, uint32_t rows, uint32_t cols, const uint32_t* ids, const uint32_t* begins,       \
        const uint32_t* order, uint32_t choices, uint32_t experts, uint32_t choices_per_row) {   \
        expert_linear(                                                                           \
            x, w, bias, out, rows, cols, ids, begins, order, choices, experts, choices_per_row); \
    }                                                                                            \
    KERNEL(combine_##type, __launch_bounds__(128), const T* x, const float* weights,             \
        const T* shared, const float* gate, T* out, uint32_t chosen, uint32_t width) {           \
        combine(x, weights, shared, gate, out, chosen, width);                                   \
    }
ELEMENT_TYPES(EXPERTS)
