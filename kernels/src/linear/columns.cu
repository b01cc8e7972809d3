// out[i, c] = x[i, inputs[c]]: the inputs of a product in the order in which a matrix has its
// columns.
//
// Grid: (n, cols / (256 threads × 8 columns)). A thread reads 8 numbers of the order in whole
// vectors, 8 values wherever they are, and writes 16 bytes. Bytes: 4 cols of the order, from a
// cache behind the first row, and 2 n cols read and written. In decode that is a launch of about 2
// us before each product. Considered: gathering while a product copies its rows of x, which
// `cp.async` cannot do, as it moves 4 bytes at least; and rows of the matrix before in this order,
// which serves the second matrix of an MLP only. Not measured yet.
#include "common.cuh"

namespace {

constexpr uint32_t COLUMNS = 8;  // of a thread

}  // namespace

KERNEL(gather_columns_bf16, __launch_bounds__(256), const bf16* x, const uint32_t* inputs,
    bf16* out, uint32_t cols) {
    launch_dependents_and_wait();
    uint32_t column = (blockIdx.y * blockDim.x + threadIdx.x) * COLUMNS;
    if (column >= cols) return;
    size_t row = static_cast<size_t>(blockIdx.x) * cols;
    Vec<bf16, COLUMNS> values;
#pragma unroll
    for (uint32_t i = 0; i < COLUMNS; i += 4) {
        Vec<uint32_t, 4> from = load<uint32_t, 4>(inputs + column + i);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            ASSERT(from.at[j] < cols);
            values.at[i + j] = x[row + from.at[j]];
        }
    }
    store(out + row + column, values);
}
