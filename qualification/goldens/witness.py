"""The second witness: llama.cpp in f32, which shares nothing with the reference but the file."""

import ctypes
import os

import gguf
import llama_cpp as lib
import numpy
import torch

import folder_gguf
from source import Refused

BATCH = 512
ROWS = 64
ALL_F32 = 0


@lib.llama_log_callback
def silent(*_):
    pass


def widened(source, tokenizer, out):
    """A GGUF file of the release with every weight in f32, made by llama.cpp's own dequantiser."""
    lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    if source.is_folder:
        folder_gguf.write(source, tokenizer, out)
        return out
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.pure = ALL_F32, True, True
    params.nthread = os.cpu_count()
    paths = [str(path).encode() for path in (source.path, out)]
    if lib.llama_model_quantize(*paths, ctypes.byref(params)) != 0:
        raise Refused(f"llama.cpp cannot widen {source.path} to f32: it may not know the family")
    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(out).tensors}
    if kinds != {gguf.GGMLQuantizationType.F32}:
        raise Refused("llama.cpp left quantised tensors in the widened file: use another version")
    return out


class Witness:
    """llama.cpp over a file in f32: cache in f32, no flash attention, on the CPU."""

    def __init__(self, path):
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise Refused(f"llama.cpp cannot load the release in f32 ({path})")
        self.vocabulary = lib.llama_model_get_vocab(self.model)
        self.tokens = lib.llama_vocab_n_tokens(self.vocabulary)

    def encode(self, text, special):
        raw = text.encode()
        room = (lib.llama_token * (len(raw) + 16))()
        count = lib.llama_tokenize(self.vocabulary, raw, len(raw), room, len(room), False, special)
        return room[: max(0, count)]

    def context(self, tokens):
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = tokens, BATCH, BATCH
        params.n_threads = params.n_threads_batch = os.cpu_count()
        params.type_k = params.type_v = lib.GGML_TYPE_F32
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.offload_kqv = params.op_offload = False
        found = lib.llama_init_from_model(self.model, params)
        if not found:
            raise Refused(f"llama.cpp has no memory for a context of {tokens} tokens")
        return found

    def scored(self, ids, positions):
        """Yields the logits at the positions (ascending), some rows at a time."""
        context = self.context(-(-len(ids) // 256) * 256)
        try:
            for first in range(0, len(ids), BATCH):
                part = ids[first : first + BATCH]
                wanted = [at - first for at in positions if first <= at < first + len(part)]
                self.decode(context, part, first, set(wanted))
                for at in range(0, len(wanted), ROWS):
                    rows = [self.row(context, n) for n in wanted[at : at + ROWS]]
                    yield torch.from_numpy(numpy.stack(rows))
        finally:
            lib.llama_free(context)

    def row(self, context, at):
        found = lib.llama_get_logits_ith(context, at)
        return numpy.ctypeslib.as_array(found, shape=(self.tokens,)).copy()

    def decode(self, context, ids, first, wanted):
        batch = lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for at, id in enumerate(ids):
            batch.token[at], batch.pos[at], batch.logits[at] = id, first + at, at in wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        failed = lib.llama_decode(context, batch)
        lib.llama_batch_free(batch)
        if failed:
            raise Refused(f"llama.cpp cannot compute {len(ids)} tokens at position {first}")

    def close(self):
        lib.llama_model_free(self.model)
