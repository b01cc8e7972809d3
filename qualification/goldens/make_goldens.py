"""Makes the goldens of a dense release: NAME.goldens and, as its quick part, NAME.quick.goldens.

    python make_goldens.py MODEL.gguf|HF_FOLDER OUT_FOLDER [--name NAME] [--tokenizer FOLDER]
        [--positions 16384] [--by TEXT] [--tools-only]

Reference: Hugging Face transformers in f32 with eager attention on the CPU, over the weights of the
file dequantised to f32. A second witness, llama.cpp in f32, has to agree with its tokenizer and its
numbers, or nothing is written. README.md says what an archive holds.
"""

import argparse
import datetime
import gc
import importlib.metadata
import os
import pathlib
import sys
import tempfile
import time

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import numpy
import torch
import transformers

import archive
import documents as texts
import text
from reference import Reference, check_weights, greedy_case, likelihoods, most_likely
from source import Refused, open_source
from vocabulary import load_tokenizer
from witness import Witness, widened

GREEDY_TOKENS = 64
# Mean divergence of the second witness from the reference, in nat.
MOST_KL = 1e-6
WHOLE_BYTES, QUICK_BYTES = 15_000_000, 1_000_000
PACKAGES = ["torch", "transformers", "tokenizers", "gguf", "numpy", "llama-cpp-python"]


class Steps:
    """Progress: one line for each step, with the seconds that it took."""

    def __init__(self):
        self.begin = self.last = time.monotonic()

    def done(self, step, what):
        now = time.monotonic()
        print(f"{step}: {what} ({now - self.last:.0f} s)", flush=True)
        self.last = now


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=pathlib.Path, help="a GGUF file, or a folder")
    parser.add_argument("out", type=pathlib.Path, help="the folder of the archives")
    parser.add_argument("--name", help="of the archives; without it that of the file")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="folder of a tokenizer.json")
    parser.add_argument(
        "--positions", type=int, default=texts.POSITIONS, help="rows of the domains"
    )
    parser.add_argument("--by", default="unnamed", help="who makes them")
    parser.add_argument(
        "--tools-only", action="store_true", help="replace the conversations with tools in OUT"
    )
    return parser.parse_args()


def rows_of(model, documents, ids=None):
    """The most likely tokens of every row, or the log-probabilities of given ids."""
    found = []
    for n, document in enumerate(documents):
        scored = model.scored(document.ids, document.positions)
        if ids is None:
            found.append(most_likely(scored))
        else:
            here = slice(document.first_row, document.first_row + len(document.positions))
            found.append(likelihoods(scored, ids[here]))
        print(f"rows: document {n + 1} of {len(documents)}", flush=True)
    if ids is None:
        return [numpy.concatenate(part) for part in zip(*found)]
    return numpy.concatenate(found)


def written_documents(reference, source, tokenizer, ends, positions):
    head, context = text.begin(source, tokenizer), source.context()
    found = texts.domain_documents(reference, tokenizer, head, ends, positions, context)
    length = texts.long_length(context, positions)
    found.append(texts.long_document(tokenizer, head, found, length))
    return texts.numbered(found)


def second(witness, documents, top_ids, top_logprobs):
    """How far the second witness is over every row; too far is a refusal."""
    theirs = rows_of(witness, documents, top_ids)
    kl, deltas = archive.distances(top_logprobs, theirs)
    if not kl.mean() <= MOST_KL:
        worst = {}
        for document in documents:
            here = slice(document.first_row, document.first_row + len(document.positions))
            worst.setdefault(document.domain, []).append(kl[here].mean())
        parts = ", ".join(f"{name} {numpy.mean(part):.1e}" for name, part in worst.items())
        raise Refused(
            f"transformers and llama.cpp disagree: mean KL {kl.mean():.1e} over {len(kl)} "
            f"positions, {MOST_KL:.0e} is allowed ({parts}): one of them reads this release "
            "wrongly, so use versions that agree on it"
        )
    return {"second_mean_kl": float(kl.mean()), "second_most": float(deltas.max())}


def quick_noise(source, documents, top_ids, top_logprobs):
    """How far transformers in bf16 is from the reference over the rows of the quick part."""
    quick = [document.quick() for document in documents if document.quick_rows]
    rows = archive.described(quick)[1]
    model, theirs = Reference(source, torch.bfloat16), []
    for document in quick:
        here = slice(document.first_row, document.first_row + document.quick_rows)
        theirs.append(likelihoods(model.scored(document.ids, document.positions), top_ids[here]))
    return archive.noise(top_logprobs[rows], numpy.concatenate(theirs))


def made(options):
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "by": options.by,
        "at": datetime.date.today().isoformat(),
        "reference": f"transformers {versions['transformers']}, f32, eager attention, CPU",
        "second": f"llama.cpp of llama-cpp-python {versions['llama-cpp-python']}, f32",
        "packages": versions,
    }


def texts_of(source, tokenizer, wide, steps):
    """Everything that needs no numbers: ends, tokenizer cases, template cases."""
    witness = Witness(wide)
    strings, differing = text.tokenizer_cases(tokenizer, witness)
    witness.close()
    steps.done("tokenizer", f"{len(strings)} strings, {differing} left out")
    templates = text.template_cases(tokenizer)
    tools = text.tool_cases(tokenizer)
    steps.done("template", f"{len(templates)} renderings, {len(tools)} with tools")
    ends = text.ends(source, tokenizer)
    return {"ends": ends, "tokenizer": strings, "template": templates, "tools": tools}


def numbers_of(source, tokenizer, wide, ends, options, steps):
    """Greedy cases and documents with their rows, noise and second witness."""
    reference = Reference(source)
    tensors = check_weights(source, reference.model)
    steps.done("reference", f"loaded, {tensors} tensors compared")
    documents = written_documents(reference, source, tokenizer, ends, options.positions)
    steps.done("documents", f"{len(documents)}, {sum(len(d.ids) for d in documents)} tokens")
    top_ids, top_logprobs = rows_of(reference, documents)
    steps.done("distributions", f"{len(top_ids)} positions")
    prompts = text.prompts(source, tokenizer)
    greedy = []
    for prompt in prompts:
        greedy.append(greedy_case(reference, prompt, GREEDY_TOKENS))
        print(f"greedy: case {len(greedy)} of {len(prompts)}", flush=True)
    steps.done("greedy", f"{len(greedy)} cases of {GREEDY_TOKENS} tokens")
    del reference
    gc.collect()
    witness = Witness(wide)
    agreement = second(witness, documents, top_ids, top_logprobs)
    witness.close()
    steps.done("second witness", f"mean KL {agreement['second_mean_kl']:.1e} over {len(top_ids)}")
    noise = quick_noise(source, documents, top_ids, top_logprobs)
    steps.done("noise of bf16", f"mean KL {noise['mean_kl']:.1e} over {noise['positions']}")
    about = {"noise": {"bf16": noise}, "cases": greedy}
    return about, agreement, (documents, top_ids, top_logprobs)


def replace_tools(source, name, folder, steps):
    """Makes the conversations with tools anew in archives that exist, and leaves the rest."""
    tools = text.tool_cases(load_tokenizer(source))
    for suffix in (".quick.goldens", ".goldens"):
        path = folder / f"{name}{suffix}"
        if path.exists():
            size = archive.replace(path, source.weights_sha256, {"tools": tools})
            steps.done("written", f"{path}, {size} bytes, {len(tools)} conversations with tools")


def make(options):
    steps = Steps()
    source = open_source(options.model, options.tokenizer)
    name = options.name or source.name
    steps.done("source", f"{source.file}, {source.architecture}, SHA-256 {source.weights_sha256}")
    if options.tools_only:
        replace_tools(source, name, options.out, steps)
        return
    tokenizer = load_tokenizer(source)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        wide = widened(source, tokenizer, pathlib.Path(folder) / "f32.gguf")
        steps.done("f32 file", f"{wide.stat().st_size} bytes")
        spoken = texts_of(source, tokenizer, wide, steps)
        found, agreement, (documents, *top) = numbers_of(
            source, tokenizer, wide, spoken["ends"], options, steps
        )
    release = {
        "name": name,
        "file": source.file,
        "weights_sha256": source.weights_sha256,
        "parameters": source.parameters(),
    }
    about = {"release": release, "made": made(options) | agreement} | spoken | found
    quick = [document.quick() for document in documents if document.quick_rows]
    for suffix, listed, most in (
        (".quick.goldens", quick, QUICK_BYTES),
        (".goldens", documents, WHOLE_BYTES),
    ):
        path = options.out / f"{name}{suffix}"
        size, rows = archive.write(path, about, listed, *top, most)
        steps.done("written", f"{path}, {size} bytes, {rows} positions")
    print(f"done in {steps.last - steps.begin:.0f} s", flush=True)


def main():
    options = arguments()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    try:
        make(options)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error}: make room there, or name another folder", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error).lower() + type(error).__name__.lower():
            raise
        print("there is not enough memory: use a larger machine", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
