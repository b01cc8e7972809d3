// out[n, width] = table[id] * scale, where id is ids[i], or previous[feedback[i]] for a token that
// only the device knows; without `feedback` every id is ids[i]. Where there is a `history`,
// history[slots[i]] becomes the id.
//
// Grid: (n, parts of a row), blocks of 256 threads; each thread copies vectors of 16 bytes where
// `width` allows, else single values. Bytes moved: 2 * n * width elements. With a part for every
// 256 vectors all of a decode step's loads are in flight at once, so it takes one access to memory
// behind that of the id. Not measured on a device yet.
// A table in the packed form gives a value to each thread, which finds its code and scale by
// itself: four lanes' vectors have a row's codes of a tile, so 128 bytes are read for 32 that are
// used, and a step of decode reads some KiB. With an `order`, column i is the value order[i].
#include "linear/packed.cuh"

namespace {

constexpr uint32_t THREADS = 256;

template <class T, uint32_t N>
DEVICE void copy_row(const T* from, T* to, uint32_t width, float scale) {
    for (uint32_t at = (blockIdx.y * THREADS + threadIdx.x) * N; at < width;
        at += gridDim.y * THREADS * N) {
        Vec<T, N> values = load<T, N>(from + at);
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            values.at[i] = from_float<T>(to_float(values.at[i]) * scale);
        store(to + at, values);
    }
}

DEVICE uint32_t token_of(const uint32_t* ids, const uint32_t* feedback, const uint32_t* previous,
    uint32_t previous_len) {
    launch_dependents_and_wait();
    uint32_t source = feedback == nullptr ? FULL_MASK : feedback[blockIdx.x];
    if (source == FULL_MASK) return ids[blockIdx.x];
    ASSERT(source < previous_len);
    return previous[source];
}

DEVICE void record_token(
    uint32_t id, const uint32_t* slots, uint32_t* history, uint32_t history_len) {
    if (history == nullptr || blockIdx.y > 0 || threadIdx.x > 0) return;
    uint32_t slot = slots[blockIdx.x];
    ASSERT(slot < history_len);
    history[slot] = id;
}

template <class T>
DEVICE void gather(
    const T* table, uint32_t rows, uint32_t id, T* out, uint32_t width, float scale) {
    ASSERT(id < rows);
    const T* from = table + static_cast<size_t>(id) * width;
    T* to = out + static_cast<size_t>(blockIdx.x) * width;
    if (width % PER_VEC<T> == 0)
        copy_row<T, PER_VEC<T>>(from, to, width, scale);
    else
        copy_row<T, 1>(from, to, width, scale);
}

}  // namespace

#define GATHERS(type, T)                                                                         \
    KERNEL(gather_##type, __launch_bounds__(256), const T* table, uint32_t rows, uint32_t width, \
        const uint32_t* ids, const uint32_t* feedback, const uint32_t* previous,                 \
        uint32_t previous_len, float scale, T* out, const uint32_t* slots, uint32_t* history,    \
        uint32_t history_len) {                                                                  \
        uint32_t id = token_of(ids, feedback, previous, previous_len);                           \
        record_token(id, slots, history, history_len);                                           \
        gather(table, rows, id, out, width, scale);                                              \
    }
ELEMENT_TYPES(GATHERS)
KERNEL(gather_packed_bf16, __launch_bounds__(256), const unsigned char* table, uint32_t rows,
    uint32_t width, const uint32_t* ids, const uint32_t* feedback, const uint32_t* previous,
    uint32_t previous_len, float scale, bf16* out, const uint32_t* slots, uint32_t* history,
    uint32_t history_len, const uint32_t* order, uint32_t bits, FORMAT_PARAMETERS) {
    uint32_t id = token_of(ids, feedback, previous, previous_len);
    record_token(id, slots, history, history_len);
    ASSERT(id < rows);
    uint32_t column = blockIdx.y * THREADS + threadIdx.x;
    if (column >= width) return;
    float value = 0.0f;
    with_any_format(bits, FORMAT_NUMBERS,
        [&](const auto& format) { value = weight_at(table, id, column, width, format); });
    if (order != nullptr) column = order[column];
    ASSERT(column < width);
    out[static_cast<size_t>(blockIdx.x) * width + column] = from_float<bf16>(value * scale);
}
