// The products with experts find the expert of a block here.
#pragma once

#include "common.cuh"

namespace {

// The expert of the block, and whether it has one: with fewer choices than experts, the first
// choice of an expert stands for it.
DEVICE bool expert_of_block(uint32_t& expert, const uint32_t* ids, const uint32_t* order,
    uint32_t choices, uint32_t experts) {
    uint32_t y = blockIdx.y;
    if (choices > experts) {
        expert = y;
        return true;
    }
    ASSERT(order[y] < choices);
    expert = ids[order[y]];
    if (y == 0) return true;
    ASSERT(order[y - 1] < choices);
    return ids[order[y - 1]] != expert;
}

}  // namespace
