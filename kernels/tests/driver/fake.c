// A driver and its libraries without a device. Memory is the host's. Work is done at once, or
// recorded while a graph is. Every call that matters to the tests is written down, and a test can
// let any call fail. Functions are declared as in NVIDIA's headers, with handles as plain pointers.
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void* P;
typedef uint64_t u64;

static char calls[1 << 20];
static size_t used;
static char failing[64];
static int status;

const char* fake_calls(void) { return calls; }
void fake_forget(void) { calls[used = 0] = 0; }
// The next call of `name` returns `code` and does nothing else.
void fake_fail(const char* name, int code) {
    snprintf(failing, sizeof failing, "%s", name), status = code;
}

static void note(const char* format, ...) {
    va_list rest;
    va_start(rest, format);
    used += vsnprintf(calls + used, sizeof calls - used, format, rest);
    va_end(rest);
}
static int fails(const char* name) {
    if (strcmp(name, failing)) return 0;
    failing[0] = 0;
    return status;
}
// Returns the status that a test has set for this function, if it has.
#define MAYBE_FAIL                  \
    do {                            \
        int told = fails(__func__); \
        if (told) return told;      \
    } while (0)

// ---- driver: device and context

static P current;
static int major = 9;
void fake_capability(int now) { major = now; }
int cuInit(unsigned flags) {
    MAYBE_FAIL;
    return flags;
}
int cuDriverGetVersion(int* version) {
    MAYBE_FAIL;
    *version = 13000;
    return 0;
}
int cuDeviceGetCount(int* count) {
    MAYBE_FAIL;
    *count = 1;
    return 0;
}
int cuDeviceGet(int* device, int ordinal) {
    *device = 70 + ordinal;
    return 0;
}
int cuDeviceGetName(char* name, int length, int device) {
    snprintf(name, length, "Fake %d", device);
    return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
    *bytes = (size_t)device << 30;
    return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    (void)device;
    switch (attribute) {
        case 75:
            *value = major;
            break;  // capability, major
        case 76:
            *value = 0;
            break;  // and minor
        case 16:
            *value = 132;
            break;  // multiprocessors
        case 97:
            *value = 232448;
            break;  // most shared memory of a block
        case 38:
            *value = 1 << 20;
            break;  // second-level cache
        case 115:
            *value = 1;
            break;  // memory pools
        case 33:
            *value = 0x1b;
            break;  // place on the PCI bus: bus,
        case 34:
            *value = 0;
            break;  // slot
        case 50:
            *value = 2;
            break;  // and domain
        default:
            *value = -1;
            return 1;
    }
    return 0;
}
int cuDevicePrimaryCtxRetain(P* context, int device) {
    *context = (P)(u64)device;
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    note("release context %d\n", device);
    return 0;
}
int cuCtxSetCurrent(P context) {
    current = context;
    return 0;
}
int cuCtxGetCurrent(P* context) {
    *context = current;
    return 0;
}
int cuGetErrorName(int code, const char** text) {
    (void)code;
    *text = "FAKE";
    return 0;
}
int cuGetErrorString(int code, const char** text) {
    *text = code == 700 ? "an illegal memory access was encountered" : "as the test told it";
    return 0;
}

// ---- driver: memory and copies

static int recording;
int cuMemGetInfo_v2(size_t* free, size_t* all) {
    *free = 5ull << 30, *all = 70ull << 30;
    return 0;
}
int cuMemAlloc_v2(u64* address, size_t bytes) {
    MAYBE_FAIL;
    note("allocate %zu\n", bytes);
    *address = (u64)aligned_alloc(256, (bytes + 255) / 256 * 256);
    return 0;
}
int cuMemFree_v2(u64 address) {
    note("free\n");
    free((P)address);
    return 0;
}
int cuMemAllocAsync(u64* address, size_t bytes, P stream) {
    (void)stream;
    return cuMemAlloc_v2(address, bytes);
}
int cuMemFreeAsync(u64 address, P stream) {
    (void)stream;
    return cuMemFree_v2(address);
}
int cuMemHostAlloc(P* at, size_t bytes, unsigned flags) {
    MAYBE_FAIL;
    note("pin %zu flags %u\n", bytes, flags);
    *at = malloc(bytes);
    return 0;
}
int cuMemFreeHost(P at) {
    note("unpin\n");
    free(at);
    return 0;
}

static int move(const char* what, P to, const void* from, size_t bytes) {
    note("%s%s %zu\n", recording ? "recorded " : "", what, bytes);
    if (!recording) memmove(to, from, bytes);
    return !bytes;  // refuses empty copies, though the driver may not
}
int cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, P stream) {
    (void)stream;
    MAYBE_FAIL;
    return move("upload", (P)to, from, bytes);
}
int cuMemcpyDtoHAsync_v2(P to, u64 from, size_t bytes, P stream) {
    (void)stream;
    return move("download", to, (P)from, bytes);
}
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, P stream) {
    (void)stream;
    return move("copy", (P)to, (P)from, bytes);
}
int cuMemsetD8Async(u64 at, unsigned char byte, size_t bytes, P stream) {
    (void)stream;
    note("%sfill %zu with %u\n", recording ? "recorded " : "", bytes, byte);
    if (!recording) memset((P)at, byte, bytes);
    return !bytes;
}

// ---- driver: streams, events, graphs. The time between events is that of the products.

static float now;
static int waited;
enum { MOST_RECORDED = 64 };
static int recordings;
int cuStreamCreate(P* stream, unsigned flags) {
    note("stream flags %u\n", flags);
    *stream = (P)0x51;
    return 0;
}
int cuStreamDestroy_v2(P stream) {
    (void)stream;
    return 0;
}
int cuStreamSynchronize(P stream) {
    (void)stream;
    MAYBE_FAIL;
    note("synchronise\n");
    return 0;
}
int cuCtxSynchronize(void) {
    note("synchronise context\n");
    return 0;
}
int cuEventCreate(P* event, unsigned flags) {
    note("event flags %u\n", flags);
    *event = calloc(1, sizeof(float));
    return 0;
}
int cuEventDestroy_v2(P event) {
    free(event);
    return 0;
}
int cuEventRecord(P event, P stream) {
    (void)stream;
    MAYBE_FAIL;
    *(float*)event = now;
    return 0;
}
int cuEventSynchronize(P event) {
    (void)event;
    MAYBE_FAIL;
    waited++;
    return 0;
}
int cuEventElapsedTime_v2(float* ms, P start, P end) {
    *ms = *(float*)end - *(float*)start;
    return 0;
}
int cuEventElapsedTime(float* ms, P start, P end) { return cuEventElapsedTime_v2(ms, start, end); }
int cuStreamBeginCapture_v2(P stream, int mode) {
    (void)stream;
    MAYBE_FAIL;
    note("begin capture, mode %d\n", mode);
    recording = 1, recordings = 0;
    return 0;
}
int cuStreamEndCapture(P stream, P* graph) {
    (void)stream;
    note("end capture\n");
    recording = 0;
    *graph = (P)0x61;
    return fails(__func__);
}
int cuStreamIsCapturing(P stream, int* what) {
    (void)stream;
    *what = recording;
    return 0;
}
int cuGraphInstantiateWithFlags(P* exec, P graph, u64 flags) {
    (void)graph;
    MAYBE_FAIL;
    note("instantiate, flags %d\n", (int)flags);
    *exec = (P)0x62;
    return 0;
}
int cuGraphUpload(P exec, P stream) {
    (void)exec, (void)stream;
    note("upload graph\n");
    return 0;
}
int cuGraphExecDestroy(P exec) {
    (void)exec;
    note("destroy exec\n");
    return 0;
}
int cuGraphDestroy(P graph) {
    (void)graph;
    note("destroy graph\n");
    return 0;
}

// ---- driver: modules and launches

int cuModuleLoadData(P* module, const void* image) {
    MAYBE_FAIL;
    if (*(const uint32_t*)image != 0xba55ed50) return 200;  // not a fat binary
    note("load module\n");
    *module = (P)0x71;
    return 0;
}
int cuModuleUnload(P module) {
    (void)module;
    note("unload module\n");
    return 0;
}
int cuModuleGetFunction(P* function, P module, const char* name) {
    (void)module;
    *function = strdup(name);
    return 0;
}
int cuFuncLoad(P function) {
    note("load %s\n", (char*)function);
    return 0;
}
// Attribute 1 is the kernel's own shared memory in bytes, 5 the PTX version from which it was made:
// of those in the fat binary the latest that the device can run.
int cuFuncGetAttribute(int* value, int attribute, P function) {
    (void)function;
    *value = attribute == 1 ? 1024 : attribute == 5 ? (major < 9 ? 80 : 90) : 0;
    return 0;
}
int cuFuncSetAttribute(P function, int attribute, int value) {
    note("%s attribute %d = %d\n", (char*)function, attribute, value);
    return 0;
}
// The sizes of the parameters of the norms (x, delta, weight, out, width, eps) and of
// attention_decode_f32, which has the most of all kernels. To the fake, others have none.
static const size_t norm_sizes[] = {8, 8, 8, 8, 4, 4};
static const size_t decode_sizes[] = {
    8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 8, 8, 8, 4, 4, 4, 4};
static size_t parameters(P function, const size_t** sizes) {
    int norm = !strncmp(function, "norm_", 5), decode = !strcmp(function, "attention_decode_f32");
    *sizes = norm ? norm_sizes : decode_sizes;
    return norm ? 6 : decode ? 24 : 0;
}
int cuFuncGetParamInfo(P function, size_t index, size_t* offset, size_t* bytes) {
    const size_t* sizes;
    if (index >= parameters(function, &sizes)) return 1;
    *offset = 8 * index, *bytes = sizes[index];
    return 0;
}
typedef struct {
    int id;
    char pad[4];
    int value;
    char rest[60];
} Attribute;
typedef struct {
    unsigned blocks[3], threads[3], shared;
    P stream;
    Attribute* attributes;
    unsigned count;
} Config;
int cuLaunchKernelEx(const Config* c, P f, P* args, P* extra) {
    MAYBE_FAIL;
    int overlapped = c->count == 1 && c->attributes[0].id == 6 && c->attributes[0].value == 1;
    if (c->count > 1 || (c->count && !overlapped)) return 1;
    if (overlapped && fails("overlapped launch")) return status;
    // Changes the output, as a kernel does that reads its input too early.
    if (overlapped && fails("waiting")) ((char*)*(P*)args[3])[0] += 1;
    note("%s%slaunch %s blocks %u %u %u threads %u %u %u shared %u stream %lx extra %d:",
        recording ? "recorded " : "", overlapped ? "overlapped " : "", (char*)f, c->blocks[0],
        c->blocks[1], c->blocks[2], c->threads[0], c->threads[1], c->threads[2], c->shared,
        (long)c->stream, extra != NULL);
    const size_t* sizes;
    for (size_t i = 0; i < parameters(f, &sizes); i++) {
        u64 word = 0;
        memcpy(&word, args[i], sizes[i]);
        note(" %llx", (unsigned long long)word);
    }
    note("\n");
    return 0;
}

// ---- cuBLAS and cuRAND: handles can be created and destroyed

int cublasCreate_v2(P* handle) {
    MAYBE_FAIL;
    *handle = (P)0x81;
    return 0;
}
int cublasDestroy_v2(P handle) {
    (void)handle;
    return 0;
}
int cublasSetStream_v2(P handle, P stream) {
    (void)handle, (void)stream;
    return 0;
}
int curandCreateGenerator(P* generator, int type) {
    (void)type;
    *generator = (P)0x91;
    return 0;
}
int curandDestroyGenerator(P generator) {
    (void)generator;
    return 0;
}
int curandSetStream(P generator, P stream) {
    (void)generator, (void)stream;
    return 0;
}
int curandSetPseudoRandomGeneratorSeed(P generator, unsigned long long seed) {
    (void)generator, (void)seed;
    return 0;
}

// ---- cuBLASLt: column-major products, computed for real

typedef struct {
    int type;
    u64 rows, cols;
    int64_t ld;
} Layout;
typedef struct {
    int compute, scale, transpose_a, epilogue, scale_modes[2];
    u64 bias, scales[2];  // scales of a and of b
} Matmul;
typedef struct {
    u64 workspace;
    uint32_t alignment[4];
} Wish;
typedef struct {
    u64 algo[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} Found;
enum { F32 = 0, BF16 = 14, E4M3 = 28 };
enum { SCALED_ROWS = 3, SCALED_GROUPS = 4 };

size_t cublasLtGetVersion(void) { return 130002; }
int cublasLtCreate(P* handle) {
    MAYBE_FAIL;
    *handle = (P)0xa1;
    return 0;
}
int cublasLtDestroy(P handle) {
    (void)handle;
    note("destroy handle\n");
    return 0;
}
int cublasLtMatmulDescCreate(P* made, int compute, int scale) {
    note("describe\n");
    Matmul* new = calloc(1, sizeof *new);
    new->compute = compute, new->scale = scale;
    *made = new;
    return 0;
}
int cublasLtMatmulDescDestroy(P made) {
    free(made);
    return 0;
}
int cublasLtMatmulDescSetAttribute(Matmul* d, int name, const void* value, size_t bytes) {
    if (name == 3 && bytes == 4)
        d->transpose_a = *(const int*)value;
    else if (name == 7 && bytes == 4)
        d->epilogue = *(const int*)value;
    else if (name == 8 && bytes == 8)
        d->bias = *(const u64*)value;
    else if ((name == 17 || name == 18) && bytes == 8)
        d->scales[name - 17] = *(const u64*)value;
    else if ((name == 31 || name == 32) && bytes == 4)
        d->scale_modes[name - 31] = *(const int*)value;
    else
        return 7;
    return 0;
}
int cublasLtMatrixLayoutCreate(P* made, int type, u64 rows, u64 cols, int64_t ld) {
    Layout* new = malloc(sizeof *new);
    *new = (Layout){type, rows, cols, ld};
    *made = new;
    return 0;
}
int cublasLtMatrixLayoutDestroy(P made) {
    free(made);
    return 0;
}
int cublasLtMatmulPreferenceCreate(P* made) {
    *made = calloc(1, sizeof(Wish));
    return 0;
}
int cublasLtMatmulPreferenceDestroy(P made) {
    free(made);
    return 0;
}
int cublasLtMatmulPreferenceSetAttribute(Wish* w, int name, const void* value, size_t bytes) {
    if (name == 1 && bytes == 8)
        w->workspace = *(const u64*)value;
    else if (name == 3 && bytes == 4 && *(const uint32_t*)value == 2)
        return 0;  // sums of parts in f32
    else if (name >= 5 && name <= 8 && bytes == 4)
        w->alignment[name - 5] = *(const uint32_t*)value;
    else
        return 7;
    return 0;
}
// Algorithm 2 is the fastest. Algorithm 4 is proposed with a status that excludes it.
static const float cost[] = {0, 3, 1, 2, 0};
int cublasLtMatmulAlgoGetHeuristic(
    P h, P d, P a, P b, P c, P e, Wish* w, int asked, Found* found, int* count) {
    (void)h, (void)d, (void)a, (void)b, (void)c, (void)e;
    MAYBE_FAIL;
    note("candidates, workspace %llu, alignment %u %u %u %u\n", (unsigned long long)w->workspace,
        w->alignment[0], w->alignment[1], w->alignment[2], w->alignment[3]);
    for (*count = 0; *count < 4 && *count < asked; ++*count)
        found[*count] = (Found){{*count + 1}, 0, *count == 3 ? 15 : 0, 1, {0}};
    return 0;
}
int cublasLtMatmulAlgoCheck(P h, P d, P a, P b, P c, P e, const u64* algo, Found* found) {
    (void)h, (void)d, (void)a, (void)b, (void)c, (void)e;
    MAYBE_FAIL;
    if (algo[0] < 1 || algo[0] > 3 || algo[1]) return 15;
    *found = (Found){{algo[0]}, 0, 0, 1, {0}};
    return 0;
}

static float get(P at, int type, u64 index) {
    if (type == F32) return ((float*)at)[index];
    if (type == E4M3) {
        int code = ((uint8_t*)at)[index], size = code & 127, exponent = size < 8 ? 1 : size / 8;
        float magnitude = ldexpf(size < 8 ? size : 8 + size % 8, exponent - 10);
        return code & 128 ? -magnitude : magnitude;
    }
    uint32_t bits = (uint32_t)((uint16_t*)at)[index] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static void set(P at, int type, u64 index, float value) {
    if (type == F32) {
        ((float*)at)[index] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    ((uint16_t*)at)[index] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
typedef struct {
    Matmul d;
    P a, b, out;
    Layout al, bl, ol;
} Product;
static Product recorded[MOST_RECORDED];
static float scale(const Matmul* d, int operand, u64 row, u64 rows, u64 k) {
    int mode = d->scale_modes[operand];
    u64 group = mode == SCALED_GROUPS ? k / 128 : 0;
    return mode == 0 ? 1 : ((float*)d->scales[operand])[group * rows + row];
}
static void multiply(const Product* p) {
    for (u64 column = 0; column < p->ol.cols; column++)
        for (u64 row = 0; row < p->ol.rows; row++) {
            float sum = p->d.epilogue == 4 ? get((P)p->d.bias, p->ol.type, row) : 0;
            for (u64 k = 0; k < p->al.rows; k++)
                sum += get(p->a, p->al.type, row * p->al.ld + k) *
                       get(p->b, p->bl.type, column * p->bl.ld + k) *
                       scale(&p->d, 0, row, p->al.cols, k) * scale(&p->d, 1, column, p->bl.cols, k);
            set(p->out, p->ol.type, column * p->ol.ld + row, sum);
        }
}
int cublasLtMatmul(P h, Matmul* d, const float* alpha, P a, Layout* al, P b, Layout* bl,
    const float* beta, P c, Layout* cl, P out, Layout* ol, const u64* algo, P workspace,
    size_t bytes, P stream) {
    (void)h;
    MAYBE_FAIL;
    int sound =
        d->compute == 68 && d->scale == F32 && d->transpose_a == 1 && *alpha == 1 && *beta == 0 &&
        c == out && cl == ol && workspace && (long)stream == 0x51 && al->type == bl->type &&
        al->rows == bl->rows && ol->rows == al->cols && d->scale_modes[0] == d->scale_modes[1] &&
        (d->scale_modes[0] == 0 || (al->type == E4M3 && (d->scale_modes[0] == SCALED_ROWS ||
                                                            d->scale_modes[0] == SCALED_GROUPS))) &&
        ol->cols == bl->cols && (d->epilogue == 1 || d->epilogue == 4 || d->epilogue == 0);
    if (!sound) return 7;
    note("%sproduct by %d, workspace %zu\n", recording ? "recorded " : "", (int)algo[0], bytes);
    now += cost[algo[0]];
    Product product = {*d, a, b, out, *al, *bl, *ol};
    if (recording)
        recorded[recordings++ % MOST_RECORDED] = product;
    else
        multiply(&product);
    return 0;
}
// Computes the products of the graph that was recorded last. This is all that the replay of a graph
// does here.
int cuGraphLaunch(P exec, P stream) {
    (void)exec, (void)stream;
    MAYBE_FAIL;
    note("launch graph\n");
    for (int i = 0; i < recordings; i++) multiply(&recorded[i]);
    return 0;
}

// ---- NCCL, with one rank

static int aborted;
int ncclCommInitAll(P* made, int count, const int* devices) {
    MAYBE_FAIL;
    note("open %d ranks, the first on %d\n", count, devices[0]);
    for (int rank = 0; rank < count; rank++) made[rank] = (P)(0xc0l + rank);
    aborted = 0;
    return 0;
}
int ncclCommGetAsyncError(P of, int* found) {
    *found = fails("asynchronous");
    return (long)of == 0xc0 && !aborted ? 0 : 4;
}
int ncclCommAbort(P of) {
    note("abort rank %ld\n", (long)of - 0xc0);
    aborted = 1;
    return 0;
}
int ncclCommDestroy(P of) {
    note("close rank %ld\n", (long)of - 0xc0);
    return 0;
}
int ncclAllGather(const void* from, void* to, size_t count, int kind, P of, P stream) {
    MAYBE_FAIL;
    if (kind != 1 || (long)of != 0xc0 || (long)stream != 0x51 || aborted) return 4;
    note("gather %zu\n", count);
    memcpy(to, from, count);
    return 0;
}
const char* ncclGetErrorString(int status) {
    return status == 6 ? "remote process exited" : "internal error";
}

// ---- NVML, an old one: it tells the temperature of the GPU at one place of the bus, and no more

int nvmlInit_v2(void) {
    MAYBE_FAIL;
    return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* place, P* device) {
    *device = (P)0xd1;
    return strcmp(place, "00000002:1b:00.0") ? 6 : 0;
}
int nvmlDeviceGetTemperature(P device, int kind, unsigned* celsius) {
    MAYBE_FAIL;
    if (device != (P)0xd1 || kind) return 2;
    *celsius = 41;
    return 0;
}
