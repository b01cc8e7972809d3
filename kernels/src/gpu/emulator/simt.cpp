// The fibers of simt.h, and the instructions that work on a whole warp.
#include "simt.h"

#include "shown.h"
#include "stacks.h"

#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

using simt::Grid;
using simt::Thread;

constexpr size_t STACK_BYTES = 128 * 1024;
constexpr size_t SHARED_LIMIT = 227 * 1024;  // the most that a block may have on sm_90
constexpr size_t SHARED_ALIGNMENT = 1024;    // the period of swizzled matrices
constexpr unsigned char POISON = 0xff;       // NaN in every float type

struct PendingCopy {
    void* to;
    const void* from;  // null once it was read
    unsigned char bytes[16];
    uint32_t group;
};

// A thread's share of a product of its warp group.
struct GroupProduct {
    float* sums;
    uint32_t columns;
    simt::GroupOperands operands;
    std::vector<float> products, results;
    uint32_t batch;
};

struct Fiber {
    void* stack_pointer = nullptr;
    unsigned char* stack = nullptr;
    Thread place{};
    bool done = false, waited = false;
    const uint64_t* watched = nullptr;  // it runs on when this no longer has the value `seen`
    uint64_t seen = 0;
    std::vector<PendingCopy> copies;
    uint32_t group = 0;  // the group of the next copy
    std::vector<GroupProduct> products;
    uint32_t batch = 0;                            // the batch of the next product
    bool landed_unfenced = false, fenced = false;  // copies for products, and their sums
};

// There are two buffers, because lanes may be one exchange apart.
struct Warp {
    unsigned char slots[2][32][64];
    uint32_t arrived = 0;
    uint64_t round = 0;
};

// The barrier of a warp group.
struct GroupBarrier {
    uint32_t arrived = 0;
    uint64_t round = 0;
};

struct Machine {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<GroupBarrier> groups;
    std::vector<unsigned char> shared;
    std::unordered_map<const void*, size_t> sites;
    size_t shared_used = 0, dynamic_bytes = 0;
    uint32_t threads = 0, at_barrier = 0, live = 0;
    uint64_t barriers = 0, progress = 0;
    bool votes[2] = {};  // of this barrier and of the one before
    Shown shown;
    const Grid* grid = nullptr;
    // 1 while global memory is inaccessible: until all threads of the launch's first block have
    // waited for earlier launches.
    uint64_t closed = 0;
    uint32_t waited = 0;
    void* scheduler = nullptr;
    Fiber* current = nullptr;
    void (*body)(void*) = nullptr;
    void* context = nullptr;
    std::string error;
    bool failed = false;
};
// A plain pointer, since an object with a constructor would be looked for at every use.
__thread Machine* machine;

void yield() { simt_switch(&machine->current->stack_pointer, machine->scheduler); }

void wait_while(const uint64_t& counter, uint64_t value) {
    if (counter != value) return;
    machine->current->watched = &counter;
    machine->current->seen = value;
    yield();
    machine->current->watched = nullptr;
}

void release_barrier() {
    if (machine->at_barrier > 0 && machine->at_barrier == machine->live) {
        machine->at_barrier = 0;
        machine->barriers++;
        machine->progress++;
    }
}

extern "C" void simt_enter() {
    machine->body(machine->context);
    if (!machine->current->waited) simt::fail("returns without having waited for earlier launches");
    if (!machine->current->products.empty()) simt::fail("returns with products under way");
    machine->current->done = true;
    machine->live--;
    machine->progress++;
    release_barrier();
    yield();
    __builtin_unreachable();
}

void prepare(Fiber& fiber) {
    if (fiber.stack == nullptr) {
        void* stack =
            mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED) abort();
        fiber.stack = static_cast<unsigned char*>(stack);
    }
    void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES) - FRAME_WORDS;
    std::fill_n(top, FRAME_WORDS, nullptr);
    top[RETURN_WORD] = reinterpret_cast<void*>(&simt_enter);
    fiber.stack_pointer = top;
    fiber.done = fiber.waited = false;
    fiber.watched = nullptr;
    fiber.copies.clear();
    fiber.products.clear();
    fiber.group = fiber.batch = 0;
    fiber.landed_unfenced = fiber.fenced = false;
}

// SplitMix64, http://dx.doi.org/10.1145/2714064.2660195: orders need no better numbers.
struct Random {
    using result_type = uint64_t;
    static constexpr uint64_t min() { return 0; }
    static constexpr uint64_t max() { return UINT64_MAX; }
    uint64_t operator()() {
        uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }
    uint64_t state;
};

// Runs every fiber that need not wait until it waits, again and again until all are done, in a new
// order each time.
void run_block(Random& random, std::vector<uint32_t>& order) {
    for (uint32_t i = 0; i < machine->threads; i++) prepare(machine->fibers[i]);
    for (auto& warp : machine->warps) warp.arrived = 0, warp.round = 0;
    machine->groups.assign((machine->threads + 127) / 128, {});
    machine->live = machine->threads;
    machine->at_barrier = machine->waited = 0;
    while (machine->live > 0 && !machine->failed) {
        uint64_t before = machine->progress;
        std::shuffle(order.begin(), order.end(), random);
        for (uint32_t index : order) {
            Fiber& fiber = machine->fibers[index];
            bool waits = fiber.watched != nullptr && *fiber.watched == fiber.seen;
            if (fiber.done || waits || machine->failed) continue;
            machine->current = &fiber;
            simt::running = &fiber.place;
            simt_switch(&machine->scheduler, fiber.stack_pointer);
            machine->current = nullptr;
        }
        if (machine->progress == before && machine->live > 0 && !machine->failed) {
            machine->failed = true;
            machine->error =
                "threads wait for others that never come: a barrier or warp instruction inside a "
                "branch";
        }
    }
}

// A kernel that accesses memory outside of its allocations ends the launch. Any other fault goes to
// the previous handler.
struct sigaction before;
void on_fault(int, siginfo_t*, void*) {
    bool runs = machine != nullptr && machine->current != nullptr;
    if (runs && machine->closed) simt::fail("memory used before earlier launches were waited for");
    if (runs) simt::fail("memory outside every allocation");
    sigaction(SIGSEGV, &before, nullptr);
}
void watch_faults() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action{};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_NODEFER;  // the handler is left by a switch of stacks
        sigaction(SIGSEGV, &action, &before);
    });
}

constexpr size_t PAGE = 4096;
size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// Makes the memory that a launch was given inaccessible, or accessible again.
void close_memory(bool closed) {
    for (size_t i = 0; i < machine->grid->memory_count; i++) {
        const auto& [start, bytes] = machine->grid->memory[i];
        unsigned char* first = static_cast<unsigned char*>(start) + bytes - whole_pages(bytes);
        if (mprotect(first, whole_pages(bytes), closed ? PROT_NONE : PROT_READ | PROT_WRITE) != 0)
            abort();
    }
    machine->closed = closed;
}

void read_source(PendingCopy& copy) {
    if (copy.from != nullptr) memcpy(copy.bytes, copy.from, 16);
    copy.from = nullptr;
}

uint32_t lane() { return machine->current->place.thread.x % 32; }

float half_of(uint32_t pair, uint32_t which) {
    return __uint_as_float(which == 0 ? pair << 16 : pair & 0xffff0000u);
}

float shared_value(uint64_t at) {
    at ^= (at >> 7 & 7) << 4;
    if (at + 2 > SHARED_LIMIT) simt::fail("a product's operand beyond shared memory");
    uint16_t bits;
    memcpy(&bits, static_cast<unsigned char*>(simt::dynamic_shared()) + at, 2);
    return half_of(bits, 0);
}

// The value of a row and column of a matrix that `describe_matrix` describes.
float value_of(uint64_t matrix, uint32_t row, uint32_t column, bool transposed) {
    auto field = [&](uint32_t bit) { return (matrix >> bit & 0x3fff) << 4; };
    uint64_t from = field(0), halves = field(16), stride = field(32);
    if (transposed)
        return shared_value(
            from + row / 64 * halves + row % 64 * 2 + column / 8 * stride + column % 8 * 128);
    return shared_value(from + row / 8 * stride + row % 8 * 128 + column * 2);
}

// The calling thread's values of a · bᵀ over 16 columns, summed in the order of `mma`.
std::vector<float> group_products(const simt::GroupOperands& operands, uint32_t columns) {
    uint32_t lane = machine->current->place.thread.x % 128;
    uint32_t first = lane / 32 * 16 + lane % 32 / 4, pair = lane % 4 * 2;
    float rows[2][16];
    for (uint32_t half = 0; half < 2; half++)
        for (uint32_t k = 0; k < 16; k++)
            rows[half][k] = operands.in_registers
                                ? operands.rows[half][k]
                                : value_of(operands.a, first + half * 8, k, false);
    std::vector<float> products(columns / 2);
    for (uint32_t i = 0; i < columns / 4; i++) {
        uint32_t column = i / 2 * 8 + pair + i % 2;
        float sums[2] = {};
        for (uint32_t k = 0; k < 16; k++) {
            float y = value_of(operands.b, column, k, operands.transposed);
            for (uint32_t half = 0; half < 2; half++) sums[half] += rows[half][k] * y;
        }
        for (uint32_t half = 0; half < 2; half++)
            products[i / 2 * 4 + half * 2 + i % 2] = sums[half];
    }
    return products;
}

}  // namespace

namespace simt {

// Device memory ends at the end of a page. The pages before and after it are inaccessible.
extern "C" void* simt_allocate(size_t bytes) {
    size_t inside = whole_pages(bytes), all = inside + 2 * PAGE;
    void* start = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    unsigned char* first = static_cast<unsigned char*>(start) + PAGE;
    if (mprotect(first, inside, PROT_READ | PROT_WRITE) != 0) return nullptr;
    return first + inside - bytes;
}
extern "C" void simt_free(void* start, size_t bytes) {
    size_t inside = whole_pages(bytes);
    munmap(static_cast<unsigned char*>(start) + bytes - inside - PAGE, inside + 2 * PAGE);
}

__thread const Thread* running;

const char* run_blocks(const char* name, const Grid& grid, void (*body)(void*), void* context) {
    watch_faults();
    static thread_local Machine own;
    Machine& m = *(machine = &own);
    m.threads = grid.threads;
    m.fibers.resize(std::max<size_t>(m.fibers.size(), grid.threads));
    m.warps.resize((grid.threads + 31) / 32);
    m.shared.resize(SHARED_LIMIT + SHARED_ALIGNMENT);
    m.body = body;
    m.context = context;
    m.failed = false;
    m.dynamic_bytes = grid.shared_bytes;
    m.grid = &grid;
    uint64_t count = static_cast<uint64_t>(grid.blocks[0]) * grid.blocks[1] * grid.blocks[2];
    m.shown.begin(grid, count);
    close_memory(true);
    Random random{grid.seed};
    std::vector<uint32_t> order(grid.threads);
    for (uint32_t i = 0; i < grid.threads; i++) order[i] = i;
    std::vector<uint64_t> blocks(count);
    for (uint64_t i = 0; i < count; i++) blocks[i] = i;
    std::shuffle(blocks.begin(), blocks.end(), random);
    dim3 shape{grid.blocks[0], grid.blocks[1], grid.blocks[2]};
    for (uint64_t block : blocks) {
        dim3 at{static_cast<uint32_t>(block % shape.x),
            static_cast<uint32_t>(block / shape.x % shape.y),
            static_cast<uint32_t>(block / shape.x / shape.y)};
        for (uint32_t i = 0; i < grid.threads; i++)
            m.fibers[i].place = Thread{{i, 0, 0}, at, {grid.threads, 1, 1}, shape};
        m.sites.clear();
        m.shared_used = (grid.shared_bytes + 127) / 128 * 128;
        std::fill_n(m.shared.begin(), std::min(m.shared_used + 49 * 1024, m.shared.size()), POISON);
        if (m.shared_used > SHARED_LIMIT) {
            m.failed = true;
            m.error = "more shared memory than a block may have";
        } else {
            run_block(random, order);
        }
        if (m.closed) close_memory(false);
        if (m.failed) {
            m.error = std::string(name) + ": block (" + std::to_string(at.x) + ", " +
                      std::to_string(at.y) + ", " + std::to_string(at.z) + "): " + m.error;
            return m.error.c_str();
        }
        m.shown.hide_rest();
    }
    m.shown.end();
    return nullptr;
}

void fail(const char* what) {
    machine->failed = true;
    machine->error = "thread " + std::to_string(machine->current->place.thread.x) + ": " + what;
    yield();
    __builtin_unreachable();
}

void* dynamic_shared() {
    uintptr_t start = reinterpret_cast<uintptr_t>(machine->shared.data());
    return reinterpret_cast<void*>(
        (start + SHARED_ALIGNMENT - 1) / SHARED_ALIGNMENT * SHARED_ALIGNMENT);
}

void* shared(const void* site, size_t bytes) {
    auto [found, fresh] = machine->sites.try_emplace(site, machine->shared_used);
    if (fresh) {
        machine->shared_used += (bytes + 15) / 16 * 16;
        if (machine->shared_used - (machine->dynamic_bytes + 127) / 128 * 128 > 48 * 1024)
            fail("more than 48 KiB of shared arrays: ask for the memory at launch");
        if (machine->shared_used > SHARED_LIMIT) fail("more shared memory than a block may have");
    }
    return static_cast<unsigned char*>(dynamic_shared()) + found->second;
}

void wait_for_earlier_launches() {
    Machine& m = *machine;
    m.current->waited = true;
    m.waited++;
    m.progress++;
    if (m.closed && m.waited == m.threads) {
        close_memory(false);
        for (uint32_t i = 0; i < m.threads; i++)
            for (auto& copy : m.fibers[i].copies) read_source(copy);
    }
    wait_while(m.closed, 1);
}

void block_barrier() {
    uint64_t round = machine->barriers;
    machine->at_barrier++;
    machine->progress++;
    release_barrier();
    wait_while(machine->barriers, round);
}

bool block_vote(bool vote) {
    bool& any = machine->votes[machine->barriers % 2];
    any = vote || (machine->at_barrier > 0 && any);
    block_barrier();
    return any;
}

void show(const void* written, size_t bytes) { machine->shown.show(written, bytes); }
void show_all() { machine->shown.show_all(); }

const unsigned char (*exchange(const void* mine, size_t bytes))[64] {
    Warp& warp = machine->warps[machine->current->place.thread.x / 32];
    uint64_t round = warp.round;
    auto& slots = warp.slots[round % 2];
    if (bytes > 0) memcpy(slots[lane()], mine, bytes);
    machine->progress++;
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        warp.round++;
    }
    wait_while(warp.round, round);
    return slots;
}

void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    uint32_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    auto all = exchange(mine, sizeof mine);
    auto word = [&](uint32_t from, uint32_t index) {
        uint32_t bits;
        memcpy(&bits, all[from] + 4 * index, 4);
        return bits;
    };
    uint32_t group = lane() / 4, pair = lane() % 4;
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t row = group + 8 * (i / 2), column = 2 * pair + i % 2;
        float sum = 0.0f;
        for (uint32_t k = 0; k < 16; k++) {
            float x = half_of(word(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2), k % 2);
            float y = half_of(word(column * 4 + k % 8 / 2, 4 + k / 8), k % 2);
            sum += x * y;
        }
        d[i] += sum;
    }
}

void ldmatrix(uint32_t (&out)[4], const void* row, bool transposed) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail("ldmatrix wants rows aligned to 16 bytes");
    auto all = exchange(&row, sizeof row);
    auto value = [&](uint32_t tile, uint32_t r, uint32_t column) {
        const unsigned char* from;
        memcpy(&from, all[tile * 8 + r], sizeof from);
        uint16_t bits;
        memcpy(&bits, from + 2 * column, 2);
        return static_cast<uint32_t>(bits);
    };
    uint32_t r = lane() / 4, c = lane() % 4 * 2;
    for (uint32_t tile = 0; tile < 4; tile++) {
        uint32_t low = transposed ? value(tile, c, r) : value(tile, r, c);
        uint32_t high = transposed ? value(tile, c + 1, r) : value(tile, r, c + 1);
        out[tile] = low | high << 16;
    }
    // The rows may be overwritten after the instruction, so no lane returns before all have read.
    exchange(nullptr, 0);
}

void copy_async(void* to, const void* from, bool valid) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0 ||
        (valid && reinterpret_cast<uintptr_t>(from) % 16 != 0))
        fail("asynchronous copies want addresses aligned to 16 bytes");
    for (const auto& other : machine->current->copies)
        if (other.to == to) fail("an asynchronous copy to where another one is still under way");
    PendingCopy copy{to, valid ? from : nullptr, {}, machine->current->group};
    if (!machine->closed) read_source(copy);
    memset(to, POISON, 16);
    machine->current->copies.push_back(copy);
}

void copy_commit() { machine->current->group++; }

void copy_wait(uint32_t pending) {
    Fiber& fiber = *machine->current;
    std::vector<PendingCopy> left;
    for (const auto& copy : fiber.copies) {
        if (copy.group + pending < fiber.group) {
            memcpy(copy.to, copy.bytes, 16);
            fiber.landed_unfenced = true;
        } else
            left.push_back(copy);
    }
    fiber.copies = std::move(left);
}

uint64_t shared_address(const void* place) {
    return static_cast<const unsigned char*>(place) - static_cast<unsigned char*>(dynamic_shared());
}

void group_barrier() {
    GroupBarrier& group = machine->groups[machine->current->place.thread.x / 128];
    uint64_t round = group.round;
    machine->progress++;
    if (++group.arrived == 128) group.arrived = 0, group.round++;
    wait_while(group.round, round);
}

void fence_async_proxy() { machine->current->landed_unfenced = false; }

void group_mma_fence() {
    exchange(nullptr, 0);
    machine->current->fenced = true;
}

void group_mma_commit() { machine->current->batch++; }

void group_mma(float* sums, uint32_t columns, const GroupOperands& operands, bool adds) {
    Fiber& fiber = *machine->current;
    if (!fiber.fenced) fail("a product of a warp group without a fence behind the last waiting");
    for (uint32_t i = 0; i < machine->threads; i++)
        if (machine->fibers[i].landed_unfenced) fail("copies without a fence before a product");
    if ((!operands.in_registers && operands.a >> 62 != 1) || operands.b >> 62 != 1)
        fail("a product of matrices without the swizzle of 128 bytes");
    GroupProduct next{sums, columns, operands, group_products(operands, columns), {}, fiber.batch};
    next.results.assign(sums, sums + columns / 2);
    for (const auto& earlier : fiber.products)
        if (earlier.sums == sums) next.results = earlier.results;
    for (uint32_t i = 0; i < columns / 2; i++)
        next.results[i] = (adds ? next.results[i] : 0.0f) + next.products[i];
    memset(sums, POISON, columns / 2 * sizeof(float));
    fiber.products.push_back(std::move(next));
}

void group_mma(float* sums, uint32_t columns, uint64_t a, uint64_t b, bool adds) {
    group_mma(sums, columns, GroupOperands{false, false, a, b, {}}, adds);
}

void group_mma(
    float* sums, uint32_t columns, const uint32_t (&a)[4], uint64_t b, bool adds, bool transposed) {
    GroupOperands operands{true, transposed, 0, b, {}};
    auto all = exchange(a, sizeof a);
    for (uint32_t half = 0; half < 2; half++)
        for (uint32_t k = 0; k < 16; k++) {
            uint32_t pair;
            memcpy(&pair, all[lane() / 4 * 4 + k % 8 / 2] + 4 * (half + k / 8 * 2), 4);
            operands.rows[half][k] = half_of(pair, k % 2);
        }
    group_mma(sums, columns, operands, adds);
}

void group_mma_wait(uint32_t pending) {
    Fiber& fiber = *machine->current;
    fiber.fenced = false;
    std::vector<GroupProduct> left;
    for (auto& product : fiber.products) {
        if (product.batch + pending >= fiber.batch) {
            left.push_back(std::move(product));
            continue;
        }
        size_t bytes = product.results.size() * sizeof(float);
        auto again = group_products(product.operands, product.columns);
        if (memcmp(again.data(), product.products.data(), bytes) != 0)
            fail("an operand changed before its product was waited for");
        memcpy(product.sums, product.results.data(), bytes);
    }
    fiber.products = std::move(left);
}

}  // namespace simt
