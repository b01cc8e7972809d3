"""Speed and quality beside llama.cpp on the same GGUF file, in rounds that take turns.

Medians are reported.

    cargo build --release -p cresset-models --example against_llama_cpp
    python3 models/examples/against_llama_cpp.py MODEL.gguf [--rounds 7]
        [--types file,Q4_0,Q8_0,Q4_K_M] [--bytes]

The pinned llama-cpp-python is built for this machine into a virtual environment of its own the
first time. Other types than the file's own are converted with llama.cpp's own quantiser. Both sides
read the same token ids and compute the logits of the last row of each stream; sampling is left out.
KL is the mean over a fixed text of KL(f32 ‖ side), where f32 is our model with the file's weights
dequantised at load. On a machine that others use, `--processor-time` counts what one thread of each
side spent on the processor instead of the time that passed.
"""

import argparse
import ctypes
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

PINNED = {"llama-cpp-python": "0.3.36", "numpy": "2.4.1"}
ROOT = pathlib.Path(__file__).resolve().parents[2]
OURS = ROOT / "target/release/examples/against_llama_cpp"
# How llama.cpp is built beside each of our sets of instructions.
AVX2 = "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
BUILDS = {
    "": "-DGGML_NATIVE=ON",
    "avx_vnni": f"{AVX2} -DGGML_AVX_VNNI=ON -DGGML_AVX512=OFF",
    "avx2": f"{AVX2} -DGGML_AVX512=OFF",
}
PROMPT, COUNT, STREAM_PROMPT, STREAM_COUNT = 512, 32, 128, 16
TEXT = """A lighthouse keeper writes down the weather four times a day. In the morning the wind \
came from the north-west, and
the sea was grey and high; by noon the clouds had gone. He trims the lamp, winds the \
clock, counts the ships that pass and
enters their names. "Nothing is too small for the book," his father used to say, "because \
you never know which line somebody
will need." In 1887 a brig went down within sight of the tower. The inquiry asked for the \
book, found the entry for that
night, and learned from it that the lamp had burned since sunset and that the brig had \
carried no lights of its own.

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

Water boils at 100 degrees Celsius at sea level. At the top of a mountain of 3,000 metres \
it boils at about 90 degrees, which
is why beans take longer to cook there. Question: what would you change in a recipe for \
people who live high up? Answer: give
them more time, or a pot that keeps the pressure in."""


def in_environment(folder, instructions):
    """Restarts this script inside an environment that has the pinned packages."""
    try:
        import llama_cpp

        if llama_cpp.__version__ == PINNED["llama-cpp-python"]:
            return
    except ImportError:
        pass
    python = folder / "bin/python"
    if sys.executable == str(python):
        sys.exit(
            f"{folder} does not hold llama-cpp-python {PINNED['llama-cpp-python']}; remove it and run again"
        )
    if not python.exists():
        subprocess.check_call([sys.executable, "-m", "venv", folder])
        packages = [f"{name}=={version}" for name, version in PINNED.items()]
        build = {**os.environ, "CMAKE_ARGS": BUILDS[instructions]}
        subprocess.check_call(
            [
                *[python, "-m", "pip", "install", "--no-cache-dir"],
                *["--no-binary=llama-cpp-python", *packages],
            ],
            env=build,
        )
    os.execv(python, [python, *sys.argv])


def token(stream, position):
    return (stream * 131 + position * 7919 + 13) % 40_000 + 50


class Ours:
    def __init__(self, model, threads, *options):
        command = [OURS, model, str(threads), *options]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.load_seconds = float(self.process.stdout.readline())

    def ask(self, *words):
        print(*words, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def prefill(self, tokens):
        return self.ask("prefill", tokens)

    def decode(self, streams, prompt, count):
        return self.ask("decode", streams, prompt, count)

    def logits(self, ids, vocabulary):
        import numpy

        with tempfile.NamedTemporaryFile() as file:
            self.ask("logits", file.name, *ids)
            return numpy.fromfile(file.name, dtype="<f4").reshape(len(ids), vocabulary)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class LlamaCpp:
    """The low-level interface, without the package's own Python work between steps."""

    def __init__(self, lib, model, threads, clock):
        self.lib, self.threads, self.clock = lib, threads, clock
        start = time.perf_counter()
        self.model = lib.llama_model_load_from_file(
            str(model).encode(), lib.llama_model_default_params()
        )
        self.load_seconds = time.perf_counter() - start
        self.contexts = {}

    def context(self, streams):
        if streams not in self.contexts:
            params = self.lib.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch = 1024 * streams, PROMPT, PROMPT
            params.n_seq_max, params.n_threads, params.n_threads_batch = (
                streams,
                self.threads,
                self.threads,
            )
            self.contexts[streams] = self.lib.llama_init_from_model(self.model, params)
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.contexts[streams]), True)
        return self.contexts[streams]

    def step(self, context, streams, positions, ids=token, every=False):
        batch = self.lib.llama_batch_init(streams * len(positions), 0, streams)
        batch.n_tokens = streams * len(positions)
        for row, (s, p) in enumerate((s, p) for s in range(streams) for p in positions):
            batch.token[row], batch.pos[row], batch.logits[row] = (
                ids(s, p),
                p,
                every or p == positions[-1],
            )
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, s
        start = self.clock()
        if self.lib.llama_decode(context, batch) != 0:
            sys.exit("llama.cpp refused a batch")
        self.lib.llama_get_logits(context)
        seconds = self.clock() - start
        self.lib.llama_batch_free(batch)
        return seconds

    def prefill(self, tokens):
        return self.step(self.context(1), 1, range(tokens))

    def decode(self, streams, prompt, count):
        context, chunk = self.context(streams), PROMPT // streams
        for first in range(0, prompt, chunk):
            self.step(context, streams, range(first, min(prompt, first + chunk)))
        return sum(self.step(context, streams, [p]) for p in range(prompt, prompt + count))

    def tokens(self, text):
        room = (self.lib.llama_token * (len(text) + 8))()
        vocabulary = self.lib.llama_model_get_vocab(self.model)
        raw = text.encode()
        count = self.lib.llama_tokenize(vocabulary, raw, len(raw), room, len(room), False, False)
        return list(room)[:count]

    def vocabulary(self):
        return self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))

    def logits(self, ids, vocabulary):
        import numpy

        context = self.context(1)
        self.step(context, 1, range(len(ids)), lambda _, p: ids[p], every=True)
        found = self.lib.llama_get_logits(context)
        return numpy.ctypeslib.as_array(found, shape=(len(ids), vocabulary)).copy()

    def close(self):
        for context in self.contexts.values():
            self.lib.llama_free(context)
        self.lib.llama_model_free(self.model)


def kl(reference, side):
    """Mean KL(reference ‖ side) in nats, and the share of rows whose likeliest token is the same."""
    import numpy

    def log_softmax(logits):
        shifted = logits.astype("f8") - logits.max(axis=1, keepdims=True)
        return shifted - numpy.log(numpy.exp(shifted).sum(axis=1, keepdims=True))

    p, q = log_softmax(reference), log_softmax(side)
    same = (reference.argmax(axis=1) == side.argmax(axis=1)).mean()
    return (numpy.exp(p) * (p - q)).sum(axis=1).mean(), same


def converted(lib, model, name, folder):
    out = folder / f"{pathlib.Path(model).stem}.{name}.gguf"
    if not out.exists():
        params = lib.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{name}"), True
        if (
            lib.llama_model_quantize(str(model).encode(), str(out).encode(), ctypes.byref(params))
            != 0
        ):
            sys.exit(f"llama.cpp cannot convert {model} to {name}")
    return out


def measure(lib, model, name, options):
    words = ["processor-time"] * options.processor_time + ["bytes"] * options.bytes
    if options.instructions:
        words.append(f"instructions={options.instructions}")
    ours = Ours(model, options.threads, *words)
    theirs = LlamaCpp(
        lib,
        model,
        options.threads,
        time.process_time if options.processor_time else time.perf_counter,
    )
    cases = [(f"prefill of {PROMPT}", PROMPT, lambda side: side.prefill(PROMPT))]
    cases.append((f"decode at {PROMPT}", COUNT, lambda side: side.decode(1, PROMPT, COUNT)))
    for streams in (8, 16):
        run = lambda side, s=streams: side.decode(s, STREAM_PROMPT, STREAM_COUNT)
        cases.append((f"{streams} streams at {STREAM_PROMPT}", streams * STREAM_COUNT, run))
    rates = {what: ([], []) for what, _, _ in cases}
    for _ in range(options.rounds):
        for what, tokens, run in cases:
            for side, found in zip((ours, theirs), rates[what]):
                found.append(tokens / run(side))
    for what, found in rates.items():
        mine, peer = map(statistics.median, found)
        ratio = statistics.median(a / b for a, b in zip(*found))
        print(f"| {name} | {what} | {mine:.1f} | {peer:.1f} | {ratio:.2f} |", flush=True)
    print(f"| {name} | load, seconds | {ours.load_seconds:.2f} | {theirs.load_seconds:.2f} | |")
    if options.kl:
        quality(ours, theirs, model, name, options)
    ours.close()
    theirs.close()


def quality(ours, theirs, model, name, options):
    exact = Ours(model, options.threads, "dequantise")
    ids, vocabulary = theirs.tokens(TEXT)[:PROMPT], theirs.vocabulary()
    reference = exact.logits(ids, vocabulary)
    exact.close()
    if len(set(reference.argmax(axis=1))) == 1:
        print(
            f"| {name} | KL | | | left out: one token is best everywhere, as in no trained model |"
        )
        return
    (mine, my_same), (peer, peer_same) = (
        kl(reference, side.logits(ids, vocabulary)) for side in (ours, theirs)
    )
    print(f"| {name} | KL over {len(ids)} tokens | {mine:.2e} | {peer:.2e} | |")
    print(f"| {name} | same best token | {my_same:.4f} | {peer_same:.4f} | |", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument(
        "--types", default="file,Q4_0,Q8_0,Q4_K_M", help="'file' is the model as it is"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bytes", action="store_true", help="our activations in eight bits")
    parser.add_argument(
        "--instructions", choices=BUILDS, default="", help="of both sides; else all of the machine"
    )
    parser.add_argument("--no-kl", dest="kl", action="store_false", help="speed alone")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "target/against_llama_cpp")
    parser.add_argument("--processor-time", action="store_true", help="of one thread")
    options = parser.parse_args()
    if options.processor_time:
        options.threads = 1
    instructions = options.instructions
    in_environment(options.folder / f"venv{instructions}", instructions)
    if not OURS.exists():
        sys.exit(
            f"{OURS} is missing: cargo build --release -p cresset-models --example against_llama_cpp"
        )
    import llama_cpp as lib

    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    options.folder.mkdir(parents=True, exist_ok=True)
    print("| type | what | ours tok/s | llama.cpp tok/s | ratio |\n|---|---|---:|---:|---:|")
    for name in options.types.split(","):
        model = (
            options.model if name == "file" else converted(lib, options.model, name, options.folder)
        )
        measure(lib, model, name, options)


if __name__ == "__main__":
    main()
