"""Writes a Hugging Face folder as a GGUF file in f32, for the second witness."""

import json
import math

import gguf
import numpy
import tokenizers
import torch
import transformers
from safetensors import safe_open

import cases
from source import Refused
from vocabulary import PRE, byte_level_of

# Family: GGUF's name, whether the rotary pairs of Q and K are interleaved, what GGUF adds to norms.
FAMILIES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, True, 0),
    "mistral": (gguf.MODEL_ARCH.LLAMA, True, 0),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, False, 0),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, False, 0),
    "gemma2": (gguf.MODEL_ARCH.GEMMA2, False, 1),
    "gemma3_text": (gguf.MODEL_ARCH.GEMMA3, False, 1),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(source, tokenizer, out):
    config = transformers.AutoConfig.from_pretrained(source.path)
    if config.model_type not in FAMILIES:
        raise Refused(
            f"a folder of the family {config.model_type!r} cannot be given to the second witness "
            f"(known: {', '.join(FAMILIES)}): convert it to a GGUF file in F32 with llama.cpp's "
            "convert_hf_to_gguf.py and give that file"
        )
    family, interleaved, shift = FAMILIES[config.model_type]
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[family])
    add_shape(writer, config)
    add_vocabulary(writer, tokenizer, config.vocab_size)
    tensors = list(tensors_of(source, config, family))
    for name, _, shape in tensors:
        size = 4 * math.prod(shape)
        writer.add_tensor_info(name, shape, numpy.dtype("float32"), size)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, read, _ in tensors:
        weight = read().float().numpy() + (shift if "norm." in name else 0)
        if interleaved and (count := heads.get(name.split(".")[-2])):
            weight = interleave(weight, count)
        writer.write_tensor_data(numpy.ascontiguousarray(weight, dtype=numpy.float32))
    if factors is not None:
        writer.write_tensor_data(factors)
    writer.close()


def interleave(weight, heads):
    """Hugging Face keeps both halves of a rotary pair in Q and K apart; GGUF interleaves them."""
    rows = weight.shape[0]
    parts = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def tensors_of(source, config, family):
    """Name in GGUF, a function that reads the tensor, and shape."""
    names = gguf.get_tensor_name_map(family, config.num_hidden_layers)
    for path in sorted(source.path.glob("*.safetensors")):
        file = safe_open(path, framework="pt")
        for name in file.keys():
            if "rotary_emb" in name or (config.tie_word_embeddings and name == "lm_head.weight"):
                continue
            found = names.get_name(name, (".weight", ".bias"))
            if found is None:
                raise Refused(f"the tensor {name} of {path.name} is not known in GGUF: remove it")
            read = lambda file=file, name=name: file.get_tensor(name)
            yield found, read, file.get_slice(name).get_shape()


def rope(config):
    found = config.rope_parameters
    return found.get("full_attention", found)


def add_shape(writer, config):
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope(config)["rope_theta"])
    kind = rope(config).get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope(config)["factor"])
    elif kind not in ("default", "llama3"):
        raise Refused(f"rope scaling of the type {kind!r} is not known here: give a GGUF file")
    if getattr(config, "sliding_window", None) and "gemma" in config.model_type:
        writer.add_sliding_window(config.sliding_window)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (value := getattr(config, key, None)) is not None:
            getattr(writer, f"add_{key}")(value)


def rope_factors(config):
    """By what llama3's scaling divides each frequency."""
    parameters = rope(config)
    if parameters.get("rope_type") != "llama3":
        return None
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = parameters["rope_theta"] ** -(torch.arange(0, head, 2).double() / head)
    return (plain / scaled.double()).numpy().astype("<f4")


def add_vocabulary(writer, tokenizer, count):
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if model["type"] != "BPE":
        raise Refused(
            f"a tokenizer of the type {model['type']} is not known here: give a GGUF file"
        )
    added = tokenizer.added_tokens_decoder
    tokens = {at: token for token, at in tokenizer.get_vocab().items()}
    kinds = [
        (CONTROL if added[at].special else USER_DEFINED) if at in added else NORMAL
        for at in range(count)
    ]
    pieces = model.get("byte_fallback", False)
    if pieces:
        is_byte = lambda at: tokens.get(at, "").startswith("<0x")
        kinds = [BYTE if is_byte(at) else kind for at, kind in enumerate(kinds)]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(at) for at in range(count)])
        prefixed = tokenizer.encode("a", add_special_tokens=False) != [tokens_id(tokens, "a")]
        writer.add_add_space_prefix(prefixed)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_of(tokenizer, model))
        join = lambda merge: merge if isinstance(merge, str) else " ".join(merge)
        writer.add_token_merges([join(merge) for merge in model["merges"]])
    writer.add_token_list([tokens.get(at, f"[unused{at}]") for at in range(count)])
    writer.add_token_types(kinds)
    for key, id in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        if id is not None:
            getattr(writer, f"add_{key}_token_id")(id)


def tokens_id(tokens, text):
    return next((at for at, token in tokens.items() if token == text), None)


def pre_of(tokenizer, model):
    """The name of the pre-tokenizer that cuts the strings of the cases as the publisher's does."""
    strings = cases.strings()
    ours = [tokenizer.encode(text, add_special_tokens=False) for text in strings]

    def agreeing(names):
        built = byte_level_of(names[0], model["vocab"], model["merges"])
        special = tokenizer.added_tokens_decoder.values()
        built.add_special_tokens(
            [tokenizers.AddedToken(str(one), special=True, normalized=False) for one in special]
        )
        found = [built.encode(text, add_special_tokens=False).ids for text in strings]
        return sum(a == b for a, b in zip(ours, found))

    return max(PRE, key=agreeing)[0]
