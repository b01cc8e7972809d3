// Runs kernels on the CPU: a fiber for every thread of a block, one block after the other.
//
// Faults become visible that a test could miss on a device: blocks and threads run in a shuffled
// order, shared memory is full of NaN at the start of each block, copied bytes are NaN until
// the kernel has waited for them, and in launches that are small enough, blocks do not see what
// another one wrote after its last fence, other than by atomic operations.
//
// These are errors: threads that wait for each other in vain; threads that return without having
// waited for earlier launches, or use global memory before that (watched in one block of a launch);
// products of warp groups without their fences, whose operands change before they were waited for,
// or that are never waited for (their sums are NaN until then); vectors that are not aligned to
// their size; two copies under way to one place; wrong arguments; and an access 256 bytes or more
// outside an allocation (nearer ones are found when they are written, or when the value that was
// read is used).
//
// Only a device can show timing, the cost of instructions, and reads that a block does too early
// for want of a fence.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <string>
#include <type_traits>

#define DEVICE inline
#define DEVICE_CALL inline
#define SHARED(type, name, count)      \
    static const char name##_site = 0; \
    type* const name = static_cast<type*>(simt::shared(&name##_site, sizeof(type) * (count)))
#define ASSERT(condition)                                              \
    do {                                                               \
        if (!(condition)) simt::fail("assertion failed: " #condition); \
    } while (0)
#define ALIGNED(pointer) simt::aligned(pointer)
// build/emulator.rs finds kernels by the functions that this defines.
#define KERNEL(name, bounds, ...)                                                 \
    static void name(__VA_ARGS__);                                                \
    extern "C" const char* simt_run_##name(const simt::Grid* grid, void** args) { \
        return simt::run(#name, *grid, [&] { simt::call(&name, args); });         \
    }                                                                             \
    extern "C" const char* simt_signature_##name() {                              \
        static const std::string text = simt::signature(&name);                   \
        return text.c_str();                                                      \
    }                                                                             \
    static void name(__VA_ARGS__)
#define __launch_bounds__(...)
#define __restrict__

struct dim3 {
    uint32_t x, y, z;
};
struct uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace simt {

struct Range {
    void* start;
    size_t bytes;
};
struct Grid {
    const Range* memory;  // the allocations that the arguments point into
    uint64_t memory_count;
    uint32_t blocks[3];
    uint32_t threads;
    uint32_t shared_bytes;
    uint64_t seed;
};

struct Thread {
    dim3 thread, block, threads, blocks;
};
extern __thread const Thread* running;
inline const Thread& self() { return *running; }

// Runs `body` on every thread of every block. Returns null, or a text that tells the error, which
// is valid until the next call of this OS thread.
const char* run_blocks(const char* name, const Grid& grid, void (*body)(void*), void* context);
template <class F>
const char* run(const char* name, const Grid& grid, F body) {
    return run_blocks(name, grid, [](void* context) { (*static_cast<F*>(context))(); }, &body);
}
[[noreturn]] void fail(const char* what);

template <class T>
T* aligned(T* pointer) {
    if (reinterpret_cast<uintptr_t>(pointer) % alignof(T) != 0)
        fail("a vector that is not aligned to its size");
    return pointer;
}

// Every thread must call this before it returns, and before it uses global memory other than by
// `copy_async`.
void wait_for_earlier_launches();
inline void check_prefetch(const void* from, uint32_t bytes) {
    if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
        fail("prefetches want whole 16 bytes");
}
void* shared(const void* site, size_t bytes);
void* dynamic_shared();
void block_barrier();
bool block_vote(bool vote);  // a barrier that tells whether any thread votes for it
// Lets other blocks of the launch see what an atomic operation wrote, or what the block wrote so
// far.
void show(const void* written, size_t bytes);
void show_all();
// Gives each lane the `bytes` (at most 64) of every lane of its warp. They are valid until the
// warp's next exchange but one.
const unsigned char (*exchange(const void* mine, size_t bytes))[64];

void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void ldmatrix(uint32_t (&out)[4], const void* row, bool transposed);
void copy_async(void* to, const void* from, bool valid);
void copy_commit();
void copy_wait(uint32_t pending);

// A place in shared memory as instructions name it: 0 is the start of `dynamic_shared`.
uint64_t shared_address(const void* place);
void group_barrier();
// What a thread multiplies for its warp group: rows of its own or matrices in shared memory.
struct GroupOperands {
    bool in_registers, transposed;
    uint64_t a, b;
    float rows[2][16];
};
void group_mma(float* sums, uint32_t columns, uint64_t a, uint64_t b, bool adds);
void group_mma(
    float* sums, uint32_t columns, const uint32_t (&a)[4], uint64_t b, bool adds, bool transposed);
void group_mma_fence();
void group_mma_commit();
void group_mma_wait(uint32_t pending);
void fence_async_proxy();

template <class T>
T shuffle(T value, uint32_t source) {
    T out;
    memcpy(&out, exchange(&value, sizeof(T))[source % 32], sizeof(T));
    return out;
}

template <class... A, size_t... I>
void call_with(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<A>*>(args[I])...);
}
template <class... A>
void call(void (*kernel)(A...), void** args) {
    call_with(kernel, args, std::index_sequence_for<A...>{});
}

// One letter for each parameter: u (uint32_t), i (int32_t), l (uint64_t), f (float), or p followed
// by the size of the type that it points to.
template <class A>
std::string letter() {
    if constexpr (std::is_pointer_v<A>) {
        using Pointee = std::remove_pointer_t<A>;
        if constexpr (std::is_void_v<Pointee>)
            return "p0";
        else
            return "p" + std::to_string(sizeof(Pointee));
    } else if constexpr (std::is_same_v<A, uint32_t>)
        return "u";
    else if constexpr (std::is_same_v<A, int32_t>)
        return "i";
    else if constexpr (std::is_same_v<A, uint64_t>)
        return "l";
    else {
        static_assert(std::is_same_v<A, float>,
            "kernel parameters are pointers, uint32_t, int32_t, uint64_t and float");
        return "f";
    }
}
template <class... A>
std::string signature(void (*)(A...)) {
    std::string text;
    ((text += letter<std::remove_const_t<A>>() + " "), ...);
    return text;
}

}  // namespace simt

#define threadIdx (simt::self().thread)
#define blockIdx (simt::self().block)
#define blockDim (simt::self().threads)
#define gridDim (simt::self().blocks)

inline void __syncthreads() { simt::block_barrier(); }
inline void __syncwarp(uint32_t = 0xffffffffu) { simt::exchange(nullptr, 0); }
inline void __threadfence() { simt::show_all(); }
inline int __syncthreads_or(int vote) { return simt::block_vote(vote != 0); }
template <class T>
T __shfl_xor_sync(uint32_t, T x, uint32_t mask) {
    return simt::shuffle(x, (simt::self().thread.x % 32) ^ mask);
}
template <class T>
T __shfl_sync(uint32_t, T x, uint32_t source) {
    return simt::shuffle(x, source);
}
template <class T>
T __shfl_down_sync(uint32_t, T x, uint32_t by) {
    uint32_t lane = simt::self().thread.x % 32;
    return simt::shuffle(x, lane + by < 32 ? lane + by : lane);
}
template <class T>
T __shfl_up_sync(uint32_t, T x, uint32_t by) {
    uint32_t lane = simt::self().thread.x % 32;
    return simt::shuffle(x, lane >= by ? lane - by : lane);
}
inline uint32_t __ballot_sync(uint32_t, bool vote) {
    auto all = simt::exchange(&vote, sizeof vote);
    uint32_t bits = 0;
    for (uint32_t i = 0; i < 32; i++) bits |= static_cast<uint32_t>(all[i][0] != 0) << i;
    return bits;
}
inline bool __any_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(uint32_t mask, bool vote) {
    return __ballot_sync(mask, vote) == 0xffffffffu;
}

inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline uint64_t __double_as_longlong(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}
inline double __longlong_as_double(uint64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
    return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clzll(uint64_t x) { return x == 0 ? 64 : __builtin_clzll(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
template <class T>
T __ldg(const T* from) {
    return *from;
}
template <class T>
T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
    return a < b ? b : a;
}

// One OS thread runs all threads of a launch, so plain updates are atomic.
template <class T, class F>
T atomic_update(T* at, F next) {
    T old = *at;
    *at = next(old);
    simt::show(at, sizeof(T));
    return old;
}
template <class T>
T atomicAdd(T* to, T by) {
    return atomic_update(to, [=](T old) { return old + by; });
}
template <class T>
T atomicMax(T* to, T other) {
    return atomic_update(to, [=](T old) { return max(old, other); });
}
template <class T>
T atomicMin(T* to, T other) {
    return atomic_update(to, [=](T old) { return min(old, other); });
}
template <class T>
T atomicExch(T* to, T value) {
    return atomic_update(to, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* to, T expected, T value) {
    return atomic_update(to, [=](T old) { return old == expected ? value : old; });
}
inline uint32_t atomicInc(uint32_t* to, uint32_t last) {
    return atomic_update(to, [=](uint32_t old) { return old >= last ? 0 : old + 1; });
}
