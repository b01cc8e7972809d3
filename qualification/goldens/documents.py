"""The documents whose distributions an archive holds.

Six domains begin with pieces of built-in texts and go on with samples of the reference itself, so
that they look as its own answers do. One long document reaches to the end of the claimed context.
"""

import dataclasses
import pathlib

import torch

import cases
from source import Refused
from text import encode

DOMAINS = ["prose", "code", "german", "dialogue", "table", "maths"]
LONG = "long"
# Documents of each domain.
PIECES = 4
# The first row of a document is behind so many tokens; the prompt may be longer.
BEFORE = 16
MOST_PROMPT = 128
SEED = 1729
# The long document has a row at every so many positions, and at most so many tokens.
STEP = 64
LONGEST = 32_768
# Rows of the six domains where no other number is given; with fewer the long document is shorter
# in the same proportion, because it costs most.
POSITIONS = 16_384
# What the quick part holds.
QUICK_ROWS = 256
QUICK_POSITION = 2048


@dataclasses.dataclass
class Document:
    domain: str
    ids: list
    positions: range
    first_row: int = 0
    quick_rows: int = 0

    def quick(self):
        """The document cut behind the rows of the quick part."""
        positions = self.positions[: self.quick_rows]
        return dataclasses.replace(self, ids=self.ids[: positions[-1] + 2], positions=positions)


def texts():
    here = pathlib.Path(__file__).resolve().parent
    folders = [folder for folder in (here / "texts", here.parent / "texts") if folder.is_dir()]
    if not folders:
        raise Refused(f"the texts are missing: put the folder texts beside {here}")
    return {name: (folders[0] / f"{name}.md").read_text(encoding="utf-8") for name in DOMAINS}


def pieces(text):
    """The text in four pieces, each of them from the start of a line or a word."""
    cuts = [0]
    for n in range(1, PIECES):
        middle = len(text) * n // PIECES
        line = text.find("\n", middle)
        near = 0 <= line < middle + len(text) // (2 * PIECES)
        cuts.append(line + 1 if near else text.index(" ", middle) + 1)
    return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)])]


def domain_documents(reference, tokenizer, head, ends, positions, context):
    """Four documents of each domain, one row at each position behind the first few."""
    prompts = [
        (domain, head + encode(tokenizer, piece, False))
        for domain, text in texts().items()
        for piece in pieces(text)
    ]
    length = min(MOST_PROMPT, *(len(ids) for _, ids in prompts))
    rows = -(-positions // len(prompts))
    rows = min(rows, context - BEFORE - 1)
    if length <= BEFORE or rows < 1:
        raise Refused(f"a context of {context} tokens is too short for documents")
    starts = [ids[:length] for _, ids in prompts]
    full = continued(reference, starts, ends, max(0, BEFORE + rows + 1 - length))
    return [
        Document(domain, ids[: BEFORE + rows + 1], range(BEFORE, BEFORE + rows))
        for (domain, _), ids in zip(prompts, full)
    ]


def continued(reference, starts, ends, count):
    """Samples at temperature 1, in one batch; the ends of an answer are never drawn."""
    generator, cache = torch.Generator().manual_seed(SEED), reference.cache()
    found, ids = [list(start) for start in starts], torch.tensor(starts)
    for n in range(count):
        logits = reference.logits(ids, cache, 1)[:, -1]
        logits = logits.index_fill(1, torch.tensor(ends), -torch.inf)
        ids = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        for document, id in zip(found, ids[:, 0].tolist()):
            document.append(id)
        if n % 100 == 99:
            print(f"documents: {n + 1} of {count} tokens sampled", flush=True)
    return found


def long_length(context, positions):
    """Tokens of the long document: at least two rows."""
    whole = min(context, LONGEST)
    return max(whole * min(positions, POSITIONS) // POSITIONS, min(whole, 2 * STEP + 1))


def long_document(tokenizer, head, documents, length):
    """Texts, the samples behind them, and a report, of so many tokens."""
    ids, report = list(head), encode(tokenizer, cases.report(length // 16), False)
    firsts = {document.domain: document.ids for document in reversed(documents)}
    parts = [encode(tokenizer, text, False) for text in texts().values()]
    known = len(ids) + sum(map(len, parts)) + sum(map(len, firsts.values()))
    share = max(0, length - known) // len(parts) + 1
    for n, (text, sample) in enumerate(zip(parts, firsts.values())):
        ids += text + report[n * share : (n + 1) * share] + sample[len(head) :]
    ids += report[len(parts) * share :]
    return Document(LONG, ids[:length], range(STEP - 1, min(length, len(ids)) - 1, STEP))


def numbered(documents):
    """Sets where the rows of each document begin, and how many the quick part has of it."""
    row, seen = 0, set()
    for document in documents:
        document.first_row = row
        row += len(document.positions)
        if document.domain == LONG:
            wanted = sum(at <= QUICK_POSITION for at in document.positions)
        else:
            wanted = 0 if document.domain in seen else QUICK_ROWS
        document.quick_rows = min(wanted, len(document.positions))
        seen.add(document.domain)
    return documents
