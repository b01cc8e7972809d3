// Common to all kernels: export macros, element types, vector access, warp and block reductions,
// the distribution of work over blocks, and the tensor-core and asynchronous-copy instructions (PTX
// ISA 9.0). Kernels include it, or headers of an op's folder that do. It is compiled by nvcc for
// devices, and as C++ against gpu/emulator/simt.h for tests without one; only these two files and
// warp_groups.cuh tell them apart.
//
// A kernel is written as
//     namespace { template <class T> DEVICE void scale(T* x, uint32_t n, float by) { ... } }
//     KERNEL(scale_bf16, __launch_bounds__(128), bf16* x, uint32_t n, float by) {
//         scale(x, n, by);
//     }
// with its name, the most threads of a block, and its parameters: pointers, uint32_t, int32_t,
// uint64_t and float. It is exported: the build finds its name behind all macros. Entry points that
// differ only in types or numbers are one table, a macro that is applied to each row (X-macro).
// Helpers stand in an anonymous namespace; exported names are unique over all files and end with
// their element type. Blocks are one-dimensional: threadIdx.x alone.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#define DEVICE __device__ __forceinline__
// Long code that seldom runs is called instead of copied to each use.
#define DEVICE_CALL __device__ __noinline__
#define KERNEL(name, bounds, ...) extern "C" __global__ void bounds name(__VA_ARGS__)
// A block's array of `count` values of a type in shared memory; uninitialised.
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
// Ends the step with an error when the condition does not hold. Kernels check each index that comes
// from the device's memory and could leave its buffer.
#define ASSERT(condition)           \
    do {                            \
        if (!(condition)) __trap(); \
    } while (0)
#define ALIGNED(pointer) (pointer)
#else
#include "gpu/emulator/simt.h"
#endif

// The bounds of a kernel that leaves them to the compiler.
#define UNBOUNDED
// Applies a macro to the name and the type of each kind of activations.
#define ELEMENT_TYPES(X) X(f32, float) X(bf16, bf16)

constexpr uint32_t WARP = 32;
constexpr uint32_t FULL_MASK = 0xffffffffu;
#define MINUS_INFINITY (-__uint_as_float(0x7f800000u))

// ---- element types

struct alignas(2) bf16 {
    uint16_t bits;
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

// Rounds to nearest, ties to even.
template <class T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) {
    return x;
}
template <>
DEVICE bf16 from_float<bf16>(float x) {
#ifdef __CUDACC__
    return bf16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
    uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{0x7fff};
    return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
#endif
}

// Two values as the register of a tensor-core instruction holds them, the first in the low half.
DEVICE uint32_t pack(float x, float y) {
    return static_cast<uint32_t>(from_float<bf16>(x).bits) |
           static_cast<uint32_t>(from_float<bf16>(y).bits) << 16;
}

// The bits of `word` under a mask, and, where these are not set, those of `others`: (word & mask) ^
// others, in one instruction.
DEVICE uint32_t masked_xor(uint32_t word, uint32_t mask, uint32_t others) {
#ifdef __CUDACC__
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(out) : "r"(word), "r"(mask), "r"(others));
    return out;
#else
    return (word & mask) ^ others;
#endif
}

// The differences of two pairs of that form, each rounded once.
DEVICE uint32_t subtract_pairs(uint32_t x, uint32_t y) {
#ifdef __CUDACC__
    uint32_t out, minus_ones = 0xbf80bf80u;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(y), "r"(minus_ones), "r"(x));
    return out;
#else
    auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
    return pack(high(x << 16) - high(y << 16), high(x) - high(y));
#endif
}

// The products of two pairs of bf16, each rounded. Subnormal numbers count.
DEVICE uint32_t multiply_pairs(uint32_t x, uint32_t y) {
#ifdef __CUDACC__
    uint32_t out, minus_zeros = 0x80008000u;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(y), "r"(minus_zeros));
    return out;
#else
    auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
    return pack(high(x << 16) * high(y << 16), high(x) * high(y));
#endif
}

// The value of the bits of an IEEE number of 16 bits.
DEVICE float half_to_float(uint16_t bits) {
#ifdef __CUDACC__
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
#else
    uint32_t sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
    // Multiplying by 2^112 changes the exponent's bias, for subnormal numbers too.
    float value = bits % 0x8000u < 0x7c00u ? __uint_as_float(rest) * 0x1p112f
                                           : __uint_as_float(rest | 0x7f800000u);
    return __uint_as_float(__float_as_uint(value) | sign);
#endif
}

// N values that one instruction loads or stores: at most 16 bytes, at an address that is a multiple
// of their size.
template <class T, uint32_t N>
struct alignas(sizeof(T) * N) Vec {
    T at[N];
};
template <class T>
constexpr uint32_t PER_VEC = 16 / sizeof(T);
template <class T, uint32_t N = PER_VEC<T>>
DEVICE Vec<T, N> load(const T* from) {
    return *ALIGNED((reinterpret_cast<const Vec<T, N>*>(from)));
}
template <class T, uint32_t N>
DEVICE void store(T* to, const Vec<T, N>& values) {
    *ALIGNED((reinterpret_cast<Vec<T, N>*>(to))) = values;
}

// ---- shared memory whose size the launch sets

template <class T>
DEVICE T* dynamic_shared() {
#ifdef __CUDACC__
    extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];
    return reinterpret_cast<T*>(dynamic_shared_bytes);
#else
    return reinterpret_cast<T*>(simt::dynamic_shared());
#endif
}

// ---- launches that follow each other
//
// A device of sm_90 or later may start a launch while the one before still runs (programmatic
// dependent launch), so that its blocks are resident, and weights are on their way, when their
// input is ready. Hence every thread of every kernel calls `launch_dependents_and_wait`, or
// `launch_dependents` and `wait_for_earlier_launches` at times of their own, the latter before it
// returns or uses global memory. A thread that has nothing to do calls it too, since a launch is
// over when its blocks are, and the next launch waits for that alone. Before the wait a thread may
// `prefetch` anything, and start `copy_async` of memory that no launch ever writes. (`const
// __restrict__` and `__ldg` would let the compiler read ahead of the wait.)

// Lets the next launch start as soon as all blocks of this one have called it or are over.
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until all earlier launches are over and their writes are visible.
DEVICE void wait_for_earlier_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#elif !defined(__CUDACC__)
    simt::wait_for_earlier_launches();
#endif
}
DEVICE void launch_dependents_and_wait() {
    launch_dependents();
    wait_for_earlier_launches();
}
// Asks for the 32 bytes around an address, so that a later access finds them in the second-level
// cache.
DEVICE void prefetch([[maybe_unused]] const void* at) {
#ifdef __CUDACC__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}
// Does the same for `bytes` bytes; both they and the address are multiples of 16. It does nothing
// before sm_90, where launches do not overlap.
DEVICE void prefetch([[maybe_unused]] const void* from, [[maybe_unused]] uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#elif !defined(__CUDACC__)
    simt::check_prefetch(from, bytes);
#endif
}

// ---- warps and blocks: every thread must call these

DEVICE uint32_t lane() { return threadIdx.x % WARP; }
DEVICE uint32_t warp() { return threadIdx.x / WARP; }

template <class T>
DEVICE T warp_sum(T x) {
#pragma unroll
    for (uint32_t step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
}
template <class T>
DEVICE T warp_max(T x) {
#pragma unroll
    for (uint32_t step = WARP / 2; step > 0; step /= 2) {
        T other = __shfl_xor_sync(FULL_MASK, x, step);
        x = other > x ? other : x;
    }
    return x;
}

// Combines a value of every thread in a fixed order; all threads get the result. `THREADS` is a
// multiple of 32. Ends with a barrier, so calls may follow each other.
template <uint32_t THREADS, class T, class Combine>
DEVICE T block_combine(T x, T neutral, Combine warp_combine) {
    static_assert(THREADS % WARP == 0 && THREADS <= 1024);
    SHARED(T, parts, THREADS / WARP);
    x = warp_combine(x);
    if (lane() == 0) parts[warp()] = x;
    __syncthreads();
    x = warp_combine(lane() < THREADS / WARP ? parts[lane()] : neutral);
    __syncthreads();
    return x;
}
template <uint32_t THREADS>
DEVICE float block_sum(float x) {
    return block_combine<THREADS>(x, 0.0f, [](float v) { return warp_sum(v); });
}
template <uint32_t THREADS>
DEVICE float block_max(float x) {
    return block_combine<THREADS>(x, MINUS_INFINITY, [](float v) { return warp_max(v); });
}

// ---- batches of sequences

// Maps the index of a work item to a sequence and the item's index within it, where sequence i has
// `count(i)` items. All lanes of a warp call it together, with indices that never decrease.
struct WorkSearch {
    uint32_t first_sequence = 0, items_before = 0;
    uint32_t sequence, index;

    template <class Count>
    DEVICE bool find(uint32_t item, uint32_t sequences, const Count& count) {
        for (; first_sequence < sequences; first_sequence += WARP) {
            uint32_t own = first_sequence + lane() < sequences ? count(first_sequence + lane()) : 0,
                     prefix = own;
#pragma unroll
            for (uint32_t step = 1; step < WARP; step *= 2) {
                uint32_t lower = __shfl_up_sync(FULL_MASK, prefix, step);
                if (lane() >= step) prefix += lower;
            }
            uint32_t total = __shfl_sync(FULL_MASK, prefix, WARP - 1);
            if (item < items_before + total) {
                uint32_t at = __popc(__ballot_sync(FULL_MASK, items_before + prefix <= item));
                sequence = first_sequence + at;
                index = item - items_before - __shfl_sync(FULL_MASK, prefix - own, at);
                return true;
            }
            items_before += total;
        }
        return false;
    }
};

// ---- arithmetic and storage of a thread

DEVICE uint32_t divide_up(uint32_t x, uint32_t by) { return (x + by - 1) / by; }

// 2^x within two units in the last place; exact at 0 and minus infinity. Results below the smallest
// normal number are 0.
DEVICE float exp2_approx(float x) {
#ifdef __CUDACC__
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
#else
    return exp2f(x);
#endif
}

// Keeps a thread's array in memory instead of registers, which suits one that is seldom touched.
template <class T>
DEVICE T* in_memory(T* array) {
#ifdef __CUDACC__
    asm volatile("" : "+l"(array)::"memory");
#endif
    return array;
}

// ---- tensor cores and copies (sm_80 and later)

// d += a · b for a 16 × 8 tile over 16 values of k, bf16 in, f32 sums: mma.sync.m16n8k16. With
// g = lane / 4 and t = lane % 4 the registers hold
//   a: (row g, k 2t..2t+1), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..)
//   b: (k 2t..2t+1, column g), (2t + 8.., g)
//   d: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef __CUDACC__
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    simt::mma(d, a, b);
#endif
}

// Four 8 × 8 tiles of 16-bit values from shared memory: lane l names row l % 8 of tile l / 8 (16
// bytes, aligned); register i of lane l gets the two values at row l / 4, columns 2 (l % 4).. of
// tile i, or with TRANSPOSED those of its transpose.
template <bool TRANSPOSED = false>
DEVICE void ldmatrix(uint32_t (&out)[4], const void* row) {
#ifdef __CUDACC__
    uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
            : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
            : "r"(from)
            : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
            : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
            : "r"(from)
            : "memory");
#else
    simt::ldmatrix(out, row, TRANSPOSED);
#endif
}

// Starts the copy of 16 bytes from global to shared memory, both aligned to 16, bypassing the
// first-level cache; writes zeros instead where `valid` is false. It hints that the rest of their
// 256 bytes is needed next. This thread sees the bytes after `copy_wait`, the block after a barrier
// that follows it.
DEVICE void copy_async(void* to, const void* from, bool valid = true) {
#ifdef __CUDACC__
    uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(target), "l"(from),
        "r"(valid ? 16 : 0)
        : "memory");
#else
    simt::copy_async(to, from, valid);
#endif
}
// The policy of the second-level cache for lines that are read once: they leave it first.
DEVICE uint64_t read_once() {
    uint64_t policy = 0;
#ifdef __CUDACC__
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}
// `copy_async` with such a policy.
DEVICE void copy_async(
    void* to, const void* from, bool valid, [[maybe_unused]] uint64_t cache_policy) {
#ifdef __CUDACC__
    uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(target),
        "l"(from), "r"(valid ? 16 : 0), "l"(cache_policy)
        : "memory");
#else
    simt::copy_async(to, from, valid);
#endif
}
// Makes the copies started since the last call one group.
DEVICE void copy_commit() {
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    simt::copy_commit();
#endif
}
// Waits until at most `PENDING` of the youngest groups are under way.
template <uint32_t PENDING>
DEVICE void copy_wait() {
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#else
    simt::copy_wait(PENDING);
#endif
}
