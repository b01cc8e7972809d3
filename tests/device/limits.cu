// Measures what a GPU allows, beside which kernels and steps are judged: bytes read from memory and
// from the second-level cache, bytes copied from pinned host memory, and the time from one launch
// of a recorded chain to the next, with and without programmatic dependent launch.
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -o limits limits.cu && ./limits
//
// Prints a table with the columns of `on_device`. Needs compute capability 9.0. Exits with 3 when
// there is no GPU, and with 1 when a call fails or a sum is wrong.
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr int ROUNDS = 5;
constexpr int THREADS = 256;
// Bytes of a thread's access.
constexpr size_t ACCESS = sizeof(uint4);
// Accesses that a thread has in flight.
constexpr int IN_FLIGHT = 8;
// Launches of a chain.
constexpr int LAUNCHES = 100;

void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "limits: %s\n", cudaGetErrorString(error));
    std::exit(1);
}

// Sums all words, so that no access can be left out.
__global__ void __launch_bounds__(THREADS)
    read_all(const uint4* from, size_t count, unsigned* sum) {
    unsigned own = 0;
    size_t stride = size_t(gridDim.x) * THREADS;
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < count;
        i += IN_FLIGHT * stride) {
        uint4 words[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            size_t at = i + k * stride;
            words[k] = at < count ? __ldcs(from + at) : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            own += words[k].x + words[k].y + words[k].z + words[k].w;
        }
    }
    atomicAdd(sum, own);
}

// Copies a range into shared memory again and again. A block begins at another place than its
// neighbours, as blocks of a product do. Writes the cycles of each block.
__global__ void __launch_bounds__(THREADS)
    copy_to_shared(const uint4* from, size_t count, int passes, unsigned* sum, long long* cycles) {
    __shared__ uint4 slots[IN_FLIGHT][THREADS];
    size_t stride = size_t(gridDim.x) * THREADS;
    size_t at = size_t(blockIdx.x) * THREADS + threadIdx.x;
    __syncthreads();
    long long began = clock64();
    for (int i = 0; i < passes; i++) {
        __pipeline_memcpy_async(&slots[i % IN_FLIGHT][threadIdx.x], from + at, ACCESS);
        __pipeline_commit();
        __pipeline_wait_prior(IN_FLIGHT - 1);
        at += stride;
        at -= at >= count ? count : 0;
    }
    __pipeline_wait_prior(0);
    __syncthreads();
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - began;
    atomicAdd(sum, slots[0][threadIdx.x].x);
}

// Does nothing but wait for the launch before it; with `early` the next may start at once.
__global__ void wait_for_last(bool early) {
    if (early) cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
}

void row(const std::string& work, const std::string& measured, const std::string& predicted = "") {
    std::printf("| %s | %s | is one | | %s |\n", work.c_str(), measured.c_str(), predicted.c_str());
}

std::string text(const char* format, double value) {
    char out[128];
    std::snprintf(out, sizeof out, format, value);
    return out;
}

// The median of several rounds of `work`, in seconds by the device's own events.
template <typename Work>
double seconds(cudaStream_t stream, Work work) {
    cudaEvent_t began, ended;
    check(cudaEventCreate(&began));
    check(cudaEventCreate(&ended));
    std::vector<float> rounds;
    for (int i = 0; i <= ROUNDS; i++) {
        check(cudaEventRecord(began, stream));
        work();
        check(cudaEventRecord(ended, stream));
        check(cudaEventSynchronize(ended));
        float ms;
        check(cudaEventElapsedTime(&ms, began, ended));
        if (i > 0) rounds.push_back(ms);
    }
    std::sort(rounds.begin(), rounds.end());
    return rounds[ROUNDS / 2] * 1e-3;
}

// Compares with the sum of the same number of ones.
void check_sum(unsigned* sum, unsigned expected) {
    unsigned found;
    check(cudaMemcpy(&found, sum, sizeof found, cudaMemcpyDeviceToHost));
    if (found == expected) return;
    std::fprintf(stderr, "limits: a sum is %u where %u was expected\n", found, expected);
    std::exit(1);
}

void reading(cudaStream_t stream, int blocks, unsigned* sum) {
    size_t bytes = size_t(8) << 30, count = bytes / ACCESS;
    uint4* memory;
    check(cudaMalloc(&memory, bytes));
    std::vector<unsigned> ones(16 << 20, 1);
    for (size_t at = 0; at < bytes; at += ones.size() * sizeof(unsigned)) {
        check(cudaMemcpy(reinterpret_cast<char*>(memory) + at, ones.data(),
            ones.size() * sizeof(unsigned), cudaMemcpyHostToDevice));
    }
    double time = seconds(stream, [&] {
        check(cudaMemsetAsync(sum, 0, sizeof *sum, stream));
        read_all<<<8 * blocks, THREADS, 0, stream>>>(memory, count, sum);
    });
    check_sum(sum, unsigned(bytes / sizeof(unsigned)));
    row("reading of 8 GiB", text("%.0f GB/s", bytes / time / 1e9));
    check(cudaFree(memory));
}

void second_level_cache(cudaStream_t stream, int multiprocessors, unsigned* sum) {
    constexpr int PASSES = 20000;
    for (int resident : {1, 2, 4}) {
        int blocks = multiprocessors * resident;
        size_t count = (size_t(16) << 20) / ACCESS;
        uint4* memory;
        long long* cycles;
        check(cudaMalloc(&memory, count * ACCESS));
        check(cudaMemset(memory, 0, count * ACCESS));
        check(cudaMalloc(&cycles, blocks * sizeof *cycles));
        double time = seconds(stream, [&] {
            copy_to_shared<<<blocks, THREADS, 0, stream>>>(memory, count, PASSES, sum, cycles);
        });
        std::vector<long long> each(blocks);
        check(cudaMemcpy(each.data(), cycles, blocks * sizeof(long long), cudaMemcpyDeviceToHost));
        double longest = double(*std::max_element(each.begin(), each.end()));
        double bytes = double(ACCESS) * THREADS * PASSES;
        row(text("second-level cache into shared memory, blocks a multiprocessor: %.0f", resident),
            text("%.0f GB/s", bytes * blocks / time / 1e9) +
                text(", %.1f bytes a cycle and multiprocessor", bytes * resident / longest),
            "24 bytes bind products of warp groups, if the header's 64 are out of reach");
        check(cudaFree(memory));
        check(cudaFree(cycles));
    }
}

void host_to_device(cudaStream_t stream) {
    size_t bytes = size_t(1) << 30;
    void *pinned, *memory;
    check(cudaMallocHost(&pinned, bytes));
    check(cudaMalloc(&memory, bytes));
    double time = seconds(stream,
        [&] { check(cudaMemcpyAsync(memory, pinned, bytes, cudaMemcpyHostToDevice, stream)); });
    row("copy of 1 GiB from pinned memory", text("%.1f GB/s", bytes / time / 1e9));
    check(cudaFree(memory));
    check(cudaFreeHost(pinned));
}

// The time of one launch in a recorded chain of empty ones.
void launches(cudaStream_t stream, int blocks, bool overlap, bool early) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = overlap ? 1 : 0;
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < LAUNCHES; i++) check(cudaLaunchKernelEx(&config, wait_for_last, early));
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&ready, graph, 0));
    constexpr int REPLAYS = 20;
    double time = seconds(stream, [&] {
        for (int i = 0; i < REPLAYS; i++) check(cudaGraphLaunch(ready, stream));
    });
    std::string how = !overlap ? "one after the other"
                      : early  ? "overlapping, early"
                               : "overlapping";
    row("recorded empty launch of " + std::to_string(blocks) + " blocks, " + how,
        text("%.2f µs", time / (REPLAYS * LAUNCHES) * 1e6));
    check(cudaGraphExecDestroy(ready));
    check(cudaGraphDestroy(graph));
}

}  // namespace

int main() {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::fprintf(stderr, "limits: there is no GPU\n");
        return 3;
    }
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0));
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    unsigned* sum;
    check(cudaMalloc(&sum, sizeof *sum));
    std::printf(
        "| work | measured | of the ceiling | target | predicted |\n|---|---|---|---|---|\n");
    row("device", std::string(properties.name) +
                      text(", %.0f multiprocessors", properties.multiProcessorCount));
    int multiprocessors = properties.multiProcessorCount;
    reading(stream, multiprocessors, sum);
    second_level_cache(stream, multiprocessors, sum);
    host_to_device(stream);
    for (int blocks : {1, multiprocessors}) {
        launches(stream, blocks, false, false);
        launches(stream, blocks, true, false);
        launches(stream, blocks, true, true);
    }
}
