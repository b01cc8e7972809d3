// Products of a warp group: four neighbouring warps, of which the first has a number that is a
// multiple of four, multiply matrices in shared memory while their threads go on (WGMMA, PTX ISA
// 9.0; sm_90a has it, and no other architecture). A kernel that uses it ends in an error on others.
//
// The order of calls is
//     copies of the operands have landed; fence_async_proxy(); a barrier
//     group_mma_fence(); group_mma(...), any number; group_mma_commit()
//     group_mma_wait<PENDING>(); group_mma_settle(...) before sums are read
// All threads of the group make them together. Until products were waited for, neither their sums
// nor their operands may be touched.
#pragma once

#include "common.cuh"

#if defined(__CUDACC__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool HAS_WARP_GROUPS = false;
#else
constexpr bool HAS_WARP_GROUPS = true;
#endif
constexpr uint32_t WARP_GROUP = 4 * WARP;

// A barrier for the threads of a warp group.
DEVICE void group_barrier() {
#ifdef __CUDACC__
    // Barrier 0 is that of the block.
    asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / WARP_GROUP) : "memory");
#else
    simt::group_barrier();
#endif
}

// Shared memory whose size the launch sets, aligned to the period of swizzled matrices.
DEVICE unsigned char* swizzled_shared() {
#ifdef __CUDACC__
    extern __shared__ __align__(1024) unsigned char swizzled_shared_bytes[];
    return swizzled_shared_bytes;
#else
    return static_cast<unsigned char*>(simt::dynamic_shared());
#endif
}

// Describes rows of 64 values of 16 bits, one after the other from a multiple of 1024 bytes on.
// Chunk c (16 bytes) of row r lies at place c ^ r % 8 of its row. Adding 2 i names columns 16 i and
// on. Of a transposed matrix these rows are columns: adding 128 i names columns 16 i and on, and
// its rows from 64 on lie `next` bytes further on.
DEVICE uint64_t describe_matrix(const void* rows, uint32_t next = 0) {
#ifdef __CUDACC__
    uint64_t from = __cvta_generic_to_shared(rows);
#else
    uint64_t from = simt::shared_address(rows);
#endif
    // The address, `next`, and the distance of every eighth row, in units of 16 bytes, and the kind
    // of swizzle.
    return (from & 0x3ffff) >> 4 | static_cast<uint64_t>(next >> 4) << 16 |
           static_cast<uint64_t>(8 * 128 >> 4) << 32 | 1ull << 62;
}

#ifdef __CUDACC__
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_32 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_64                                                       \
    NAMES_32                                                           \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
    ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_96                                                       \
    NAMES_64                                                           \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
    ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
// `matrices` and `flag` are the numbers of the operands behind the sums.
#define GROUP_MMA(shape, names, matrices, flag, ...)                                 \
    asm volatile("{ .reg .pred adds; setp.ne.u32 adds, " flag                        \
                 ", 0; wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 {" names \
                 "}, " matrices ", adds, 1, 1, 0, 0; }"                              \
        : __VA_ARGS__                                                                \
        : "l"(a), "l"(b), "r"(adds)                                                  \
        : "memory")
// `rows` are the numbers of the registers of a, and `transposed` is "1" or "0".
#define GROUP_MMA_OF_ROWS(shape, names, rows, matrix, flag, transposed, ...)                     \
    asm volatile("{ .reg .pred adds; setp.ne.u32 adds, " flag                                    \
                 ", 0; wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 {" names "}, {" rows \
                 "}, " matrix ", adds, 1, 1, " transposed "; }"                                  \
        : __VA_ARGS__                                                                            \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds)                          \
        : "memory")
#endif

// d = a · bᵀ, or d += a · bᵀ where `adds` is not 0, over 16 columns: a is 64 rows and b is N, each
// described by `describe_matrix`; sums in f32. With w = warp % 4, g = lane / 4 and t = lane % 4,
// value v of d[4 j + v] belongs to row 16 w + g + 8 (v / 2) of a and row 8 j + 2 t + v % 2 of b.
template <uint32_t N>
DEVICE void group_mma(float (&d)[N / 2], uint64_t a, uint64_t b, uint32_t adds) {
    static_assert(N == 32 || N == 64 || N == 128 || N == 192);
#ifndef __CUDACC__
    simt::group_mma(d, N, a, b, adds != 0);
#else
    if constexpr (N == 32) GROUP_MMA("m64n32k16", NAMES_16, "%16, %17", "%18", SUMS_16(0));
    if constexpr (N == 64) GROUP_MMA("m64n64k16", NAMES_32, "%32, %33", "%34", SUMS_32(0));
    if constexpr (N == 128)
        GROUP_MMA("m64n128k16", NAMES_64, "%64, %65", "%66", SUMS_32(0), SUMS_32(32));
    if constexpr (N == 192)
        GROUP_MMA("m64n192k16", NAMES_96, "%96, %97", "%98", SUMS_32(0), SUMS_32(32), SUMS_32(64));
#endif
}

// Does the same with rows of a in registers, as `mma` has them: the warp's 16 rows. b may be
// transposed.
template <uint32_t N, bool TRANSPOSED = false>
DEVICE void group_mma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, uint32_t adds) {
    static_assert(N == 128 || (N == 64 && !TRANSPOSED));
#ifndef __CUDACC__
    simt::group_mma(d, N, a, b, adds != 0, TRANSPOSED);
#else
    if constexpr (TRANSPOSED)
        GROUP_MMA_OF_ROWS("m64n128k16", NAMES_64, "%64, %65, %66, %67", "%68", "%69", "1",
            SUMS_32(0), SUMS_32(32));
    else if constexpr (N == 128)
        GROUP_MMA_OF_ROWS("m64n128k16", NAMES_64, "%64, %65, %66, %67", "%68", "%69", "0",
            SUMS_32(0), SUMS_32(32));
    else
        GROUP_MMA_OF_ROWS(
            "m64n64k16", NAMES_32, "%32, %33, %34, %35", "%36", "%37", "0", SUMS_32(0));
#endif
}

// Orders this thread's earlier use of sums, and of rows in registers, before the products that
// follow.
DEVICE void group_mma_fence() {
#ifdef __CUDACC__
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
    simt::group_mma_fence();
#endif
}
// Makes the products since the last call one batch.
DEVICE void group_mma_commit() {
#ifdef __CUDACC__
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
    simt::group_mma_commit();
#endif
}
// Waits until at most `PENDING` of the youngest batches are under way.
template <uint32_t PENDING>
DEVICE void group_mma_wait() {
#ifdef __CUDACC__
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#else
    simt::group_mma_wait(PENDING);
#endif
}
// Keeps the compiler from reading sums before their products were waited for.
template <uint32_t COUNT>
DEVICE void group_mma_settle([[maybe_unused]] float (&d)[COUNT]) {
#ifdef __CUDACC__
#pragma unroll
    for (uint32_t i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
#endif
}
// Orders what this thread wrote to shared memory, landed copies among it, before the reading of
// products.
DEVICE void fence_async_proxy() {
#ifdef __CUDACC__
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    simt::fence_async_proxy();
#endif
}
