#!/usr/bin/env python3
"""Times other people's kernels at the shapes of Llama 3.1 8B, beside which ours are judged.

    peers.py

Products by cuBLAS (bf16, and E4M3 with a scale for each row), attention of a prompt by cuDNN and by
PyTorch's own kernel, and attention of decoding by FlashInfer where that can be imported. Prints a
table in microseconds. Launches are recorded, and each uses other weights than the one before it, as
in `cargo bench --bench gpu`. Needs torch and a GPU; exits with 3 without one.
"""
import statistics
import sys

import torch
import torch.nn.functional as F

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
# Name, rows of the matrix, columns.
MATRICES = [
    ("qkv", (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    ("o", HIDDEN, HEADS * HEAD_DIM),
    ("gate-up", 2 * FFN, HIDDEN),
    ("down", HIDDEN, FFN),
    ("head", VOCAB, HIDDEN),
]
ROWS = [1, 8, 16, 32, 64, 128, 256, 512, 8192]
# Bytes over which the weights of a series are spread, so that no cache holds them.
SPREAD = 512 << 20
LAUNCHES = 32
ROUNDS = 5
# Least seconds of a round.
ROUND_SECONDS = 0.01
# Sequences and tokens of each, for attention of decoding.
DECODES = [(1, 1000), (32, 1000), (256, 2048)]
PROMPT = 8192


def microseconds(launch):
    """The time of one call of `launch(i)`, from the median round of a recorded series."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for i in range(3):
            launch(i)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for i in range(LAUNCHES):
            launch(i)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(times):
        began.record()
        for _ in range(times):
            graph.replay()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) * 1e-3

    replay(1)
    times = max(1, int(ROUND_SECONDS / replay(1)))
    return statistics.median(replay(times) for _ in range(ROUNDS)) / (times * LAUNCHES) * 1e6


def products():
    print("| product | by | " + " | ".join(f"n = {n}" for n in ROWS) + " |")
    print("|---|---|" + "---:|" * len(ROWS))
    for name, rows, cols in MATRICES:
        weights = [
            torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
            for _ in range(1 + SPREAD // (rows * cols * 2))
        ]
        line(name, "cuBLAS bf16", lambda n: bf16_product(weights, n, cols))
        codes = [w.to(torch.float8_e4m3fn) for w in weights]
        del weights
        line(name, "cuBLAS E4M3, rows", lambda n: e4m3_product(codes, n, rows, cols))


def line(name, by, launch_of):
    cells = []
    for n in ROWS:
        try:
            cells.append(f"{microseconds(launch_of(n)):.1f}")
        except RuntimeError:
            # Some libraries refuse some numbers of rows.
            cells.append("–")
    print(f"| {name} | {by} | " + " | ".join(cells) + " |", flush=True)


def bf16_product(weights, n, cols):
    x = torch.randn(n, cols, device="cuda", dtype=torch.bfloat16)
    return lambda i: F.linear(x, weights[i % len(weights)])


def e4m3_product(codes, n, rows, cols):
    x = torch.randn(n, cols, device="cuda").to(torch.float8_e4m3fn)
    of_rows = torch.ones(n, 1, device="cuda")
    of_columns = torch.ones(1, rows, device="cuda")

    def launch(i):
        w = codes[i % len(codes)].t()
        torch._scaled_mm(x, w, of_rows, of_columns, out_dtype=torch.bfloat16)

    return launch


def prompts():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (1, HEADS, PROMPT, HEAD_DIM)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, KV_HEADS, *shape[2:], device="cuda", dtype=q.dtype) for _ in "kv")
    # Half of all pairs of a query and a key, two products, two operations each.
    flops = 2 * 2 * HEADS * HEAD_DIM * PROMPT * PROMPT / 2
    for name, backend in [
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("FlashAttention 2 in PyTorch", SDPBackend.FLASH_ATTENTION),
    ]:

        def launch(_):
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        attempt(f"attention of a prompt of {PROMPT}", name, launch, flops / 1e6, "TFLOP/s")


def decodes():
    import flashinfer

    for rows, tokens in DECODES:
        for kind in (torch.bfloat16, torch.float8_e4m3fn):
            page, pages = 16, (tokens + 15) // 16
            order = torch.randperm(rows * pages, device="cuda", dtype=torch.int32)
            shape = (rows * pages, 2, page, KV_HEADS, HEAD_DIM)
            cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(kind)
            q = torch.randn(rows, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
            starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * pages
            last = torch.full((rows,), (tokens - 1) % page + 1, device="cuda", dtype=torch.int32)
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                scratch,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=starts,
                paged_kv_indices_buffer=order,
                paged_kv_last_page_len_buffer=last,
            )
            wrapper.plan(
                starts,
                order,
                last,
                HEADS,
                KV_HEADS,
                HEAD_DIM,
                page,
                q_data_type=q.dtype,
                kv_data_type=kind,
            )
            megabytes = 2 * rows * tokens * KV_HEADS * HEAD_DIM * cache.element_size() / 1e6
            what = f"attention of {rows} rows after {tokens} tokens, {kind}"
            attempt(what, "FlashInfer", lambda _: wrapper.run(q, cache), megabytes, "TB/s")


def attempt(work, by, launch, amount, unit):
    """Prints the time, and `amount` a microsecond. What cannot run says why."""
    try:
        time = microseconds(launch)
        print(f"| {work} | {by} | {time:.1f} µs | {amount / time:.2f} {unit} |", flush=True)
    except Exception as error:
        print(f"| {work} | {by} | {str(error).splitlines()[0]} | |", flush=True)


def limits():
    side = 8192
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    attempt(f"product of {side}³", "cuBLAS bf16", lambda _: a @ b, 2 * side**3 / 1e6, "TFLOP/s")
    a8, b8 = (m.to(torch.float8_e4m3fn) for m in (a, b.t().contiguous()))
    ones = torch.ones(side, 1, device="cuda")

    def scaled(_):
        torch._scaled_mm(a8, b8.t(), ones, ones.t(), out_dtype=torch.bfloat16)

    attempt(f"product of {side}³", "cuBLAS E4M3", scaled, 2 * side**3 / 1e6, "TFLOP/s")


def main():
    if not torch.cuda.is_available():
        print("peers: there is no GPU", file=sys.stderr)
        return 3
    print("| work | by | time | rate |\n|---|---|---|---|")
    limits()
    prompts()
    try:
        decodes()
    except Exception as error:
        print(f"| attention of decoding | FlashInfer | {type(error).__name__}: {error} | |")
    products()
    return 0


if __name__ == "__main__":
    sys.exit(main())
