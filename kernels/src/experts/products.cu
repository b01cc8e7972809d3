// out[c, rows] = x[c / choices_per_row, cols] · w[expert of c, rows, cols]ᵀ, and the expert's bias
// if there are any, for w in bf16 or in the packed form (linear/packed.cuh): the matrices of all
// experts, packed ones in whole bands each. Choices are those of experts.cu. Activations are bf16,
// sums f32, in the order of linear/linear.cu: so an output has the same bits in both kernels and in
// any batch.
//
// Block y takes an expert as the block of experts.cu does, so the matrices of experts that nobody
// chose are not read. The products are those of linear/linear.cu and packed.cu with the rows of an
// expert's choices in place of neighbouring ones, and wait for earlier launches first, which tell
// what the expert is.
//
// expert_gemv: 8 choices of the expert at a time, 8 warps (for packed weights 16) that share the
// columns; blocks x go over the bands of the matrix. Up to 8 rows of a step, which can choose an
// expert once each, read each weight once: 8 of 128 experts of Qwen 3 30B in Q4_K are 21 MB a
// layer, 5 us of an H200's memory, where bf16 is 75 MB. The warps have four tiles (two) each of
// 2048 columns, so starting the copies counts, and a block goes over several bands where there are
// enough blocks. expert_gemm: 64 rows of the matrix, 64 choices at a time, for steps in which an
// expert has more than 8 on average. The second and further 64 read w from the second-level cache.
// Considered: blocks for pairs of an expert and 64 of its choices, as a list that the router
// writes, which divides the work better where few experts have most choices; the library for an
// expert's dequantised matrix, which needs its number of choices on the host. On an H200, 8 of 32
// experts of 1536 by 4096: one row takes 31 us in bf16 (72 % of the read rate) and 26 in Q4_K, 64
// rows 174 and 302, 512 rows 523 and 891 (in Q4_K before its kernels were compiled for each
// format).
#include "experts/plan.cuh"
#include "linear/dense_product.cuh"
#include "linear/packed_product.cuh"

namespace {

// Three parts of a plan: the experts of the choices; the place behind which each expert's choices
// stand in `order`, one for each expert and the end; the numbers of the choices by expert.
struct Plan {
    const uint32_t *ids, *begins, *order;
    uint32_t choices, experts, choices_per_row;
};

// Choices of an expert, and their rows of x.
struct ChosenRows {
    const bf16* values;
    uint32_t count, cols;
    const uint32_t* choices;
    const Plan& plan;

    DEVICE size_t input(uint32_t i) const {
        ASSERT(choices[i] < plan.choices);
        return static_cast<size_t>(choices[i] / plan.choices_per_row) * cols;
    }
    DEVICE uint32_t output(uint32_t i) const { return choices[i]; }
};

// The matrices of all experts, rows × cols each.
struct DenseExperts {
    const bf16* w;

    DEVICE DenseWeights of(uint32_t expert, uint32_t rows, uint32_t cols) const {
        return {w + static_cast<size_t>(expert) * rows * cols, rows, cols};
    }
};

template <class Format>
struct PackedExperts {
    const unsigned char* w;
    Format format;

    DEVICE PackedWeights<Format> of(uint32_t expert, uint32_t rows, uint32_t cols) const {
        size_t bands = static_cast<size_t>(expert) * (rows / TILE_ROWS);
        return {w + bands * format.band_bytes(cols), rows, cols, format};
    }
};
template <class Format>
DEVICE PackedExperts<Format> packed_experts(const unsigned char* w, const Format& format) {
    return {w, format};
}

// Calls `product` with the matrix of the block's expert, its bias, and at most CHOICES of its
// choices at a time.
template <uint32_t CHOICES, class Experts, class Product>
DEVICE void for_choices(const bf16* x, const Experts& all, const bf16* bias, uint32_t rows,
    uint32_t cols, const Plan& plan, Product product) {
    launch_dependents_and_wait();
    uint32_t expert = 0;
    if (!expert_of_block(expert, plan.ids, plan.order, plan.choices, plan.experts)) return;
    ASSERT(expert < plan.experts);
    auto weights = all.of(expert, rows, cols);
    if (bias != nullptr) bias += static_cast<size_t>(expert) * rows;
    uint32_t end = plan.begins[expert + 1];
    ASSERT(end <= plan.choices);
    for (uint32_t begin = plan.begins[expert]; begin < end; begin += CHOICES) {
        ChosenRows chosen{x, min(CHOICES, end - begin), cols, plan.order + begin, plan};
        product(chosen, weights, bias);
    }
}

template <uint32_t SLOTS, class Experts>
DEVICE void expert_gemv(const bf16* x, const Experts& all, const bf16* bias, bf16* out,
    uint32_t rows, uint32_t cols, const Plan& plan) {
    for_choices<8>(x, all, bias, rows, cols, plan,
        [&](const ChosenRows& chosen, const auto& weights, const bf16* own) {
            gemv<32, 8, SLOTS>(chosen, weights, own, out, 0, rows, cols, rows);
        });
}

template <class Experts>
DEVICE void expert_gemm(const bf16* x, const Experts& all, const bf16* bias, bf16* out,
    uint32_t rows, uint32_t cols, const Plan& plan) {
    for_choices<64>(x, all, bias, rows, cols, plan,
        [&](const ChosenRows& chosen, const auto& weights, const bf16* own) {
            GemmTile<decltype(all.of(0, 0, 0)), ChosenRows, 64, 64, 2, 2, 4> tile{chosen, weights,
                rows, cols, rows, blockIdx.x * 64, 0, dynamic_shared<unsigned char>(), {}, {}};
            tile.run();
            tile.write(own, out, 0);
            // All warps have read the last slots.
            __syncthreads();
        });
}

}  // namespace

// The parameters behind the others.
#define EXPERT_PARAMETERS                                                                  \
    const bf16 *bias, bf16 *out, uint32_t rows, uint32_t cols, const uint32_t *ids,        \
        const uint32_t *begins, const uint32_t *order, uint32_t choices, uint32_t experts, \
        uint32_t choices_per_row
#define EXPERT_PLAN \
    Plan { ids, begins, order, choices, experts, choices_per_row }
#define PACKED_EXPERTS(form, bits, floats)                                                    \
    KERNEL(expert_gemv_##form##_bf16, __launch_bounds__(512, 1), const bf16* x,               \
        const unsigned char* w, EXPERT_PARAMETERS, FORMAT_PARAMETERS) {                       \
        with_format<bits, floats>(FORMAT_NUMBERS, [&](const auto& format) {                   \
            expert_gemv<3>(x, packed_experts(w, format), bias, out, rows, cols, EXPERT_PLAN); \
        });                                                                                   \
    }                                                                                         \
    KERNEL(expert_gemm_##form##_bf16, __launch_bounds__(128, 2), const bf16* x,               \
        const unsigned char* w, EXPERT_PARAMETERS, FORMAT_PARAMETERS) {                       \
        with_format<bits, floats>(FORMAT_NUMBERS, [&](const auto& format) {                   \
            expert_gemm(x, packed_experts(w, format), bias, out, rows, cols, EXPERT_PLAN);    \
        });                                                                                   \
    }
CODE_FORMS(PACKED_EXPERTS)

KERNEL(
    expert_gemv_bf16, __launch_bounds__(256, 2), const bf16* x, const bf16* w, EXPERT_PARAMETERS) {
    expert_gemv<2>(x, DenseExperts{w}, bias, out, rows, cols, EXPERT_PLAN);
}
KERNEL(expert_gemm_bf16, __launch_bounds__(128), const bf16* x, const bf16* w, EXPERT_PARAMETERS) {
    expert_gemm(x, DenseExperts{w}, bias, out, rows, cols, EXPERT_PLAN);
}
