// Recurrences over the rows of each sequence, whose states are read from one slot and written to
// another, or to the same. Everything is computed in f32 and rounded once; states are f32.
//
// short_conv: out[t] = Σ_j weight[j] in[t - taps + 1 + j] (+ bias), where `in` is x, and the result
//   goes through SiLU, or, gated, in is the product of two parts of x, and the result is multiplied
//   by the third. A block takes 128 channels of up to 64 rows of a sequence; a thread has a channel
//   and loads its inputs anew for each tap, from the first-level cache. Only the block with a
//   sequence's first rows touches its state: it reads the old one before it writes the new one,
//   which consists of the last inputs. Bytes moved: (parts + 1) n width elements, and 8 (taps - 1)
//   width for each sequence.
// delta_rule, selective_scan: a column of a head's state is a dimension of its values, and columns
//   do not depend on each other. Eight lanes share a column, in registers, from the sequence's
//   first row to its last; sums over a column are shuffles. A block has 32 columns of a head of a
//   sequence. No barrier, and the loads of the next row do not depend on the state, so that they
//   are started before a row is computed. Bytes moved for a sequence of one row: its states once
//   each way, 8 key_dim value_dim a head: 4 MiB a layer with 32 heads of 128 by 128; so decode
//   should reach most of the memory's rate from about 8 sequences on. Prompts are bound by the
//   chain of a row's operations, some 300 cycles, whatever their batch: 8192 rows take about 1.5 ms
//   a layer. Considered: the form in chunks, whose products tensor cores compute (the next step for
//   long prompts); a thread a column, which has no shuffles, a quarter of the warps, and the same
//   chain.
// gated_norm: a warp for each part that is normed if it has at most 256 values, else a block. Bytes
//   moved: 3 n width elements, the second reading from cache.
// Its tests pass on an H200, its speed was not measured.
#include "common.cuh"

namespace {

constexpr uint32_t NO_STATE = 0xffffffffu;

// Which rows each sequence has, and the slots of its states.
struct Moves {
    const uint32_t *starts, *reads, *writes;
    uint32_t rows, sequences, slots;

    DEVICE uint32_t count(uint32_t sequence) const {
        uint32_t begin = starts[sequence], end = starts[sequence + 1];
        ASSERT(begin < end && end <= rows);
        return end - begin;
    }
    DEVICE uint32_t read(uint32_t sequence) const {
        uint32_t slot = reads[sequence];
        ASSERT(slot < slots || slot == NO_STATE);
        return slot;
    }
    DEVICE uint32_t write(uint32_t sequence) const {
        ASSERT(writes[sequence] < slots);
        return writes[sequence];
    }
};

#define MOVE_PARAMETERS                                                                   \
    const uint32_t *starts, const uint32_t *reads, const uint32_t *writes, uint32_t rows, \
        uint32_t sequences, uint32_t slots
#define MOVES \
    Moves { starts, reads, writes, rows, sequences, slots }

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
// log(1 + e^x), which is x where e^x is too large.
DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// ---- short convolution

constexpr uint32_t CHANNELS = 128;   // of a block
constexpr uint32_t CHUNK_ROWS = 64;  // of a block; at least as many as a state has inputs

template <class T>
struct ConvChannel {
    const T* x;
    uint32_t width, taps, channel;
    bool gated;
    uint32_t begin;      // the sequence's first row
    const float* state;  // the oldest input of the channel, or null

    DEVICE float part(uint32_t row, uint32_t part) const {
        uint32_t parts = gated ? 3 : 1;
        return to_float(x[(static_cast<size_t>(row) * parts + part) * width + channel]);
    }
    // What is convolved at row `begin + at - (taps - 1)`: the first ones are those of the state.
    DEVICE float input(uint32_t at) const {
        if (at < taps - 1) return state == nullptr ? 0.0f : state[static_cast<size_t>(at) * width];
        uint32_t row = begin + at - (taps - 1);
        return gated ? part(row, 0) * part(row, 2) : part(row, 0);
    }
};

template <class T>
DEVICE void short_conv(const T* x, const float* weight, const float* bias, float* states, T* out,
    const Moves& moves, uint32_t width, uint32_t taps, uint32_t gated) {
    launch_dependents_and_wait();
    WorkSearch search;
    auto chunks = [&](uint32_t i) { return divide_up(moves.count(i), CHUNK_ROWS); };
    if (!search.find(blockIdx.x, moves.sequences, chunks)) return;
    uint32_t channel = blockIdx.y * CHANNELS + threadIdx.x, count = moves.count(search.sequence);
    if (channel >= width) return;
    uint32_t kept = taps - 1, read = moves.read(search.sequence);
    float* old =
        read == NO_STATE ? nullptr : states + static_cast<size_t>(read) * kept * width + channel;
    ConvChannel<T> own{x, width, taps, channel, gated != 0, moves.starts[search.sequence], old};
    uint32_t first = search.index * CHUNK_ROWS, end = min(first + CHUNK_ROWS, count);
    for (uint32_t row = first; row < end; row++) {
        float sum = bias == nullptr ? 0.0f : bias[channel];
        for (uint32_t j = 0; j < taps; j++)
            sum = fmaf(own.input(row + j), weight[static_cast<size_t>(j) * width + channel], sum);
        float result = own.gated ? sum * own.part(own.begin + row, 1) : sum * sigmoid(sum);
        out[static_cast<size_t>(own.begin + row) * width + channel] = from_float<T>(result);
    }
    if (search.index > 0) return;
    float* fresh =
        states + static_cast<size_t>(moves.write(search.sequence)) * kept * width + channel;
    // Both slots may be the same: an input is read before its place is written, because it lies
    // `count` places further on.
    for (uint32_t j = 0; j < kept; j++)
        fresh[static_cast<size_t>(j) * width] = own.input(count + j);
}

// ---- states of heads

constexpr uint32_t COLUMN_LANES = 8;              // lanes that share a column
constexpr uint32_t COLUMNS = 256 / COLUMN_LANES;  // of a block

// A column of a head's state, of which this lane has rows `first` to `first + PER`. Lanes beyond
// the last column compute the last one again and write nothing.
template <uint32_t PER>
struct Column {
    uint32_t height, width, index, first;
    bool writes;
    float values[PER];

    DEVICE Column(uint32_t height, uint32_t width)
        : height(height), width(width), first(threadIdx.x % COLUMN_LANES * PER) {
        uint32_t own = blockIdx.y * COLUMNS + threadIdx.x / COLUMN_LANES;
        index = min(own, width - 1), writes = own < width;
    }

    DEVICE void load(const float* state) {
#pragma unroll
        for (uint32_t i = 0; i < PER; i++)
            values[i] = state == nullptr || first + i >= height
                            ? 0.0f
                            : state[static_cast<size_t>(first + i) * width + index];
    }
    DEVICE void store(float* state) const {
#pragma unroll
        for (uint32_t i = 0; i < PER; i++)
            if (writes && first + i < height)
                state[static_cast<size_t>(first + i) * width + index] = values[i];
    }

    // This lane's part of a vector of `height` values, zeros beyond.
    template <class T>
    DEVICE void load_part(float (&part)[PER], const T* from) const {
        constexpr uint32_t N = PER_VEC<T> < PER ? PER_VEC<T> : PER;
        bool whole = height % N == 0 && reinterpret_cast<uintptr_t>(from) % sizeof(Vec<T, N>) == 0;
#pragma unroll
        for (uint32_t i = 0; i < PER; i += N) {
            Vec<T, N> some{};
            if (whole && first + i < height) some = ::load<T, N>(from + first + i);
#pragma unroll
            for (uint32_t j = 0; j < N; j++) {
                if (!whole && first + i + j < height) some.at[j] = from[first + i + j];
                part[i + j] = to_float(some.at[j]);
            }
        }
    }

    // The sum over all rows of the products of two vectors.
    DEVICE static float dot(const float (&x)[PER], const float (&y)[PER]) {
        float sum = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < PER; i++) sum = fmaf(x[i], y[i], sum);
#pragma unroll
        for (uint32_t step = COLUMN_LANES / 2; step > 0; step /= 2)
            sum += __shfl_xor_sync(FULL_MASK, sum, step);
        return sum;
    }
};

// Runs over the rows of the block's sequence: `rule.load(row)` for each before the row before it is
// computed, then `rule.compute(column)`.
template <uint32_t PER, class Rule>
DEVICE void scan_rows(Rule& rule, Column<PER>& column, float* states, const Moves& moves,
    uint32_t heads, uint32_t head) {
    uint32_t sequence = blockIdx.x / heads, begin = moves.starts[sequence],
             end = begin + moves.count(sequence), read = moves.read(sequence);
    size_t len = static_cast<size_t>(column.height) * column.width;
    auto place = [&](size_t slot) { return states + (slot * heads + head) * len; };
    column.load(read == NO_STATE ? nullptr : place(read));
    auto next = rule.load(column, begin);
    for (uint32_t row = begin; row < end; row++) {
        auto now = next;
        if (row + 1 < end) next = rule.load(column, row + 1);
        rule.compute(column, now, row);
    }
    column.store(place(moves.write(sequence)));
}

// ---- the gated delta rule

template <class T, uint32_t PER>
struct DeltaRule {
    const T *qkv, *gates;
    T* out;
    uint32_t key_heads, value_heads, head, key_head;
    float decay, decay_bias;

    struct Row {
        float q[PER], k[PER], v, a, b;
    };

    DEVICE Row load(const Column<PER>& column, uint32_t row) const {
        uint32_t keys = key_heads * column.height;
        const T* from = qkv + static_cast<size_t>(row) * (2 * keys + value_heads * column.width);
        Row found;
        column.load_part(found.q, from + key_head * column.height);
        column.load_part(found.k, from + keys + key_head * column.height);
        found.v = to_float(from[2 * keys + head * column.width + column.index]);
        const T* gate = gates + static_cast<size_t>(row) * 2 * value_heads + head;
        found.b = to_float(gate[0]), found.a = to_float(gate[value_heads]);
        return found;
    }

    DEVICE void compute(Column<PER>& column, Row& row, uint32_t number) const {
        constexpr float EPS = 1e-6f;
        float by_q = 1.0f / sqrtf(Column<PER>::dot(row.q, row.q) + EPS) /
                     sqrtf(static_cast<float>(column.height)),
              by_k = 1.0f / sqrtf(Column<PER>::dot(row.k, row.k) + EPS);
        float keep = expf(decay * softplus(row.a + decay_bias));
#pragma unroll
        for (uint32_t i = 0; i < PER; i++) {
            row.q[i] *= by_q, row.k[i] *= by_k;
            column.values[i] *= keep;
        }
        float delta = sigmoid(row.b) * (row.v - Column<PER>::dot(column.values, row.k));
#pragma unroll
        for (uint32_t i = 0; i < PER; i++)
            column.values[i] = fmaf(row.k[i], delta, column.values[i]);
        float read = Column<PER>::dot(column.values, row.q);
        if (column.writes && column.first == 0) {
            size_t at = static_cast<size_t>(number) * value_heads + head;
            out[at * column.width + column.index] = from_float<T>(read);
        }
    }
};

// `tiled`: value head h reads key head h % key_heads, otherwise neighbours share one.
template <class T, uint32_t PER>
DEVICE void delta_rule(const T* qkv, const T* gates, const float* decay, const float* decay_bias,
    float* states, T* out, const Moves& moves, uint32_t key_heads, uint32_t value_heads,
    uint32_t key_dim, uint32_t value_dim, uint32_t tiled) {
    launch_dependents_and_wait();
    uint32_t head = blockIdx.x % value_heads;
    uint32_t key_head = tiled != 0 ? head % key_heads : head / (value_heads / key_heads);
    Column<PER> column(key_dim, value_dim);
    DeltaRule<T, PER> rule{
        qkv, gates, out, key_heads, value_heads, head, key_head, decay[head], decay_bias[head]};
    scan_rows(rule, column, states, moves, value_heads, head);
}

// ---- the selective scan

template <class T, uint32_t PER>
struct SelectiveScan {
    const T *xbc, *steps;
    T* out;
    uint32_t heads, groups, head, group;
    float decay, step_bias, skip, least, most;

    struct Row {
        float b[PER], c[PER], x, step;
    };

    DEVICE Row load(const Column<PER>& column, uint32_t row) const {
        uint32_t values = heads * column.width, each = groups * column.height;
        const T* from = xbc + static_cast<size_t>(row) * (values + 2 * each);
        Row found;
        column.load_part(found.b, from + values + group * column.height);
        column.load_part(found.c, from + values + each + group * column.height);
        found.x = to_float(from[head * column.width + column.index]);
        found.step = to_float(steps[static_cast<size_t>(row) * heads + head]);
        return found;
    }

    DEVICE void compute(Column<PER>& column, const Row& row, uint32_t number) const {
        float step = fminf(fmaxf(softplus(row.step + step_bias), least), most);
        float keep = expf(decay * step), written = step * row.x;
#pragma unroll
        for (uint32_t i = 0; i < PER; i++)
            column.values[i] = fmaf(row.b[i], written, column.values[i] * keep);
        float read = fmaf(skip, row.x, Column<PER>::dot(column.values, row.c));
        if (column.writes && column.first == 0) {
            size_t at = static_cast<size_t>(number) * heads + head;
            out[at * column.width + column.index] = from_float<T>(read);
        }
    }
};

template <class T, uint32_t PER>
DEVICE void selective_scan(const T* xbc, const T* steps, const float* decay, const float* step_bias,
    const float* skip, float* states, T* out, const Moves& moves, uint32_t heads, uint32_t head_dim,
    uint32_t groups, uint32_t state_dim, float least, float most) {
    launch_dependents_and_wait();
    uint32_t head = blockIdx.x % heads;
    Column<PER> column(state_dim, head_dim);
    SelectiveScan<T, PER> rule{xbc, steps, out, heads, groups, head, head / (heads / groups),
        decay[head], step_bias[head], skip[head], least, most};
    scan_rows(rule, column, states, moves, heads, head);
}

// ---- norm and gate

constexpr uint32_t NORM_THREADS = 128;
constexpr uint32_t WARP_WIDTH = 256;  // values of a part that a warp norms

DEVICE float silu(float x) { return x * sigmoid(x); }

template <class T>
DEVICE void gated_norm(const T* x, const T* gate, const float* weight, T* out, uint32_t parts,
    uint32_t width, uint32_t groups, uint32_t gate_first, float eps) {
    launch_dependents_and_wait();
    bool by_warp = width <= WARP_WIDTH;
    uint32_t part = by_warp ? blockIdx.x * (NORM_THREADS / WARP) + warp() : blockIdx.x,
             first = by_warp ? lane() : threadIdx.x, step = by_warp ? WARP : NORM_THREADS;
    bool exists = part < parts;
    size_t at = static_cast<size_t>(exists ? part : 0) * width;
    auto value = [&](uint32_t i) {
        float plain = to_float(x[at + i]);
        return gate_first != 0 ? plain * silu(to_float(gate[at + i])) : plain;
    };
    float sum = 0.0f;
    for (uint32_t i = first; i < width; i += step) sum = fmaf(value(i), value(i), sum);
    sum = by_warp ? warp_sum(sum) : block_sum<NORM_THREADS>(sum);
    if (!exists) return;
    float scale = 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
    const float* weights = weight + part % groups * width;
    for (uint32_t i = first; i < width; i += step) {
        float normed = value(i) * scale * weights[i];
        if (gate_first == 0) normed *= silu(to_float(gate[at + i]));
        out[at + i] = from_float<T>(normed);
    }
}

}  // namespace

// For keys or states of up to `dim` dimensions, `values` of them in each thread.
#define STATE_KERNELS(type, T, dim, values)                                                      \
    KERNEL(delta_rule_##dim##_##type, __launch_bounds__(256), const T* qkv, const T* gates,      \
        const float* decay, const float* decay_bias, float* states, T* out, MOVE_PARAMETERS,     \
        uint32_t key_heads, uint32_t value_heads, uint32_t key_dim, uint32_t value_dim,          \
        uint32_t tiled) {                                                                        \
        delta_rule<T, values>(qkv, gates, decay, decay_bias, states, out, MOVES, key_heads,      \
            value_heads, key_dim, value_dim, tiled);                                             \
    }                                                                                            \
    KERNEL(selective_scan_##dim##_##type, __launch_bounds__(256), const T* xbc, const T* steps,  \
        const float* decay, const float* step_bias, const float* skip, float* states, T* out,    \
        MOVE_PARAMETERS, uint32_t heads, uint32_t head_dim, uint32_t groups, uint32_t state_dim, \
        float least, float most) {                                                               \
        selective_scan<T, values>(xbc, steps, decay, step_bias, skip, states, out, MOVES, heads, \
            head_dim, groups, state_dim, least, most);                                           \
    }
#define RECURRENCES(type, T)                                                                      \
    KERNEL(short_conv_##type, __launch_bounds__(128), const T* x, const float* weight,            \
        const float* bias, float* states, T* out, MOVE_PARAMETERS, uint32_t width, uint32_t taps, \
        uint32_t gated) {                                                                         \
        short_conv(x, weight, bias, states, out, MOVES, width, taps, gated);                      \
    }                                                                                             \
    KERNEL(gated_norm_##type, __launch_bounds__(128), const T* x, const T* gate,                  \
        const float* weight, T* out, uint32_t parts, uint32_t width, uint32_t groups,             \
        uint32_t gate_first, float eps) {                                                         \
        gated_norm(x, gate, weight, out, parts, width, groups, gate_first, eps);                  \
    }                                                                                             \
    STATE_KERNELS(type, T, 128, 16)                                                               \
    STATE_KERNELS(type, T, 256, 32)
ELEMENT_TYPES(RECURRENCES)
