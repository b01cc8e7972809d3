"""The archive of goldens, format 1: a gzip stream of one safetensors file."""

import gzip
import json

import numpy
from safetensors.numpy import load, save

from source import Refused

FORMAT = 1
# What the tail of a distribution holds at least, so that rounding does not count.
LEAST_MASS = 1e-6
# Tokens of a row whose log-probabilities are compared.
COMPARED = 20


def distances(ours, theirs):
    """The divergence of theirs from ours in every row, and the differences of the top 20.

    The tokens that are not stored count as one.
    """
    left = [numpy.maximum(1 - numpy.exp(side).sum(axis=1), LEAST_MASS) for side in (ours, theirs)]
    kl = (numpy.exp(ours) * (ours - theirs)).sum(axis=1) + left[0] * numpy.log(left[0] / left[1])
    return kl, numpy.abs(ours - theirs)[:, :COMPARED]


def noise(ours, theirs):
    kl, deltas = distances(ours, theirs)
    ordered = numpy.sort(deltas, axis=None)
    return {
        "mean_kl": float(kl.mean()),
        "p999": float(ordered[min(int(len(ordered) * 0.999), len(ordered) - 1)]),
        "most": float(ordered[-1]),
        "positions": len(kl),
    }


def described(documents):
    """The documents as the archive lists them, and the rows of the whole that they have."""
    found, rows, begin = [], [], 0
    for document in documents:
        found.append(
            {
                "domain": document.domain,
                "begin": begin,
                "tokens": len(document.ids),
                "first_row": len(rows),
                "first_position": document.positions[0],
                "step": document.positions.step,
                "rows": len(document.positions),
            }
        )
        begin += len(document.ids)
        rows += range(document.first_row, document.first_row + len(document.positions))
    return found, rows


def write(path, about, documents, top_ids, top_logprobs, most_bytes):
    listed, rows = described(documents)
    tensors = {
        "ids": numpy.array([id for document in documents for id in document.ids], dtype="<u4"),
        "top_ids": top_ids[rows].astype("<u4"),
        "top_logprobs": top_logprobs[rows].astype("<f4"),
    }
    packed = pack({"format": FORMAT} | about | {"documents": listed}, tensors)
    if len(packed) > most_bytes:
        raise Refused(
            f"{path.name} would have {len(packed)} bytes, and {most_bytes} are allowed: ask for "
            "fewer --positions"
        )
    put(path, packed)
    return len(packed), len(rows)


def pack(about, tensors):
    text = json.dumps(about, ensure_ascii=False, separators=(",", ":"))
    return gzip.compress(save(tensors, metadata={"goldens": text}), 9, mtime=0)


def put(path, packed):
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(packed)
    partial.replace(path)


def replace(path, weights_sha256, sections):
    """Writes an archive of these weights again, with other sections of text."""
    plain = gzip.decompress(path.read_bytes())
    header = json.loads(plain[8 : 8 + int.from_bytes(plain[:8], "little")])
    about = json.loads(header["__metadata__"]["goldens"])
    if about["release"]["weights_sha256"] != weights_sha256:
        raise Refused(f"{path} is about other weights: name the folder of this release's archives")
    packed = pack(about | sections, load(plain))
    put(path, packed)
    return len(packed)
