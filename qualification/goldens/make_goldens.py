"""Makes the goldens of SmolLM2-135M-Instruct (GGUF, Q4_1).

They are tokenizer and template cases, and greedy continuations with margins.

    python make_goldens.py MODEL.gguf OUT_FOLDER

Reference: Hugging Face transformers in f32 with eager attention on the CPU, over the weights of the
GGUF file dequantised to f32. Two witnesses have to agree or nothing is written: the tokenizer
against a plain byte-pair merger written here, the weights against transformers' own GGUF loader.
"""

import hashlib
import json
import pathlib
import platform
import sys

import gguf
import numpy
import regex
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import cases

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GREEDY_TOKENS = 64
FUZZED_STRINGS = 20_000
FUZZ_SEED = 1729
CONTROL = 3
GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class Source:
    """The GGUF file: metadata, and tensors in f32 under Hugging Face's names and layout."""

    def __init__(self, path):
        self.reader = gguf.GGUFReader(path)

    def __getitem__(self, key):
        return self.reader.fields[key].contents()

    def config(self):
        return transformers.LlamaConfig(
            vocab_size=self["llama.vocab_size"],
            hidden_size=self["llama.embedding_length"],
            intermediate_size=self["llama.feed_forward_length"],
            num_hidden_layers=self["llama.block_count"],
            num_attention_heads=self["llama.attention.head_count"],
            num_key_value_heads=self["llama.attention.head_count_kv"],
            max_position_embeddings=self["llama.context_length"],
            rms_norm_eps=self["llama.attention.layer_norm_rms_epsilon"],
            rope_parameters={"rope_type": "default", "rope_theta": self["llama.rope.freq_base"]},
            bos_token_id=self["tokenizer.ggml.bos_token_id"],
            eos_token_id=self["tokenizer.ggml.eos_token_id"],
            tie_word_embeddings=True,
            attn_implementation="eager",
        )

    def state(self, config):
        names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
        parts = {
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        }
        names |= {
            f"blk.{n}.{short}": f"model.layers.{n}.{long}"
            for n in range(config.num_hidden_layers)
            for short, long in parts.items()
        }
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        state = {}
        for tensor in self.reader.tensors:
            stem = tensor.name.removesuffix(".weight")
            weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
            if count := heads.get(stem.split(".")[-1]):
                weight = halves_apart(weight, count)
            state[names[stem] + ".weight"] = torch.from_numpy(weight.copy())
        return state


def halves_apart(weight, heads):
    """GGUF interleaves the two halves of every rotary pair in Q and K; Hugging Face keeps them apart."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def load_model(source, path):
    config = source.config()
    model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(source.state(config), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    model = model.eval()
    witness = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([[1, 9690, 198, 2683, 359, 253, 5356]])
    difference = (logits(model, ids)[0] - logits(witness, ids)[0]).abs().max().item()
    assert difference < 1e-4, f"transformers' GGUF loader disagrees: {difference}"
    return model, difference


def logits(model, ids, cache=None):
    with torch.inference_mode():
        return (
            model(ids, past_key_values=cache, use_cache=cache is not None).logits.float().squeeze(0)
        )


def load_tokenizer(source):
    """SmolLM2's published pipeline: single digits, then GPT-2's pattern and byte alphabet."""
    vocabulary = {token: at for at, token in enumerate(source["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in source["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(source["tokenizer.ggml.tokens"], source["tokenizer.ggml.token_type"])
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in kinds
            if kind == CONTROL
        ]
    )
    named = {
        name: source["tokenizer.ggml.tokens"][source[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in [
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        ]
    }
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=source["tokenizer.chat_template"], **named
    )


class PlainMerger:
    """Byte-pair encoding as its definition says: the lowest-ranked pair is merged until none is left."""

    def __init__(self, source):
        self.ids = {token: at for at, token in enumerate(source["tokenizer.ggml.tokens"])}
        self.ranks = {
            tuple(merge.split(" ")): rank
            for rank, merge in enumerate(source["tokenizer.ggml.merges"])
        }
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self.alphabet = {byte: chr(byte) for byte in printable} | {
            byte: chr(256 + n) for n, byte in enumerate(others)
        }

    def encode(self, text):
        words = [word for run in regex.findall(r"\p{N}|\P{N}+", text) for word in GPT2.findall(run)]
        return [
            id
            for word in words
            for id in self.merge([self.alphabet[byte] for byte in word.encode()])
        ]

    def merge(self, symbols):
        while pairs := [
            (self.ranks[pair], at)
            for at, pair in enumerate(zip(symbols, symbols[1:]))
            if pair in self.ranks
        ]:
            _, at = min(pairs)
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        # Symbols that the vocabulary lacks are left out, as in the reference.
        return [self.ids[symbol] for symbol in symbols if symbol in self.ids]


def tokenizer_cases(tokenizer, source):
    witness = PlainMerger(source)
    found = []
    for text in cases.strings():
        special = tokenizer.encode(text, add_special_tokens=False)
        plain = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert plain == witness.encode(text), f"the witness disagrees on {text!r}"
        case = {
            "text": text,
            "ids": plain,
            "decoded": tokenizer.decode(plain, clean_up_tokenization_spaces=False),
        }
        found.append(case | ({"special_ids": special} if special != plain else {}))
    return found


def fuzz(tokenizer):
    """Digest over the ids of many strings: SHA-256 of each string's number of ids and ids, as little-endian 32-bit words."""
    digest, tokens = hashlib.sha256(), 0
    for text in cases.fuzzed_strings(FUZZED_STRINGS, FUZZ_SEED):
        ids = tokenizer.encode(text, add_special_tokens=False)
        digest.update(numpy.array([len(ids), *ids], dtype="<u4").tobytes())
        tokens += len(ids)
    return {
        "strings": FUZZED_STRINGS,
        "seed": FUZZ_SEED,
        "ranges": cases.RANGES,
        "pieces": cases.PIECES,
        "tokens": tokens,
        "sha256": digest.hexdigest(),
    }


def template_cases(tokenizer):
    def case(messages, generate):
        render = lambda tokenize: tokenizer.apply_chat_template(
            messages, add_generation_prompt=generate, tokenize=tokenize, return_dict=False
        )
        return {
            "messages": messages,
            "add_generation_prompt": generate,
            "prompt": render(False),
            "ids": render(True),
        }

    return [
        case(messages, generate)
        for messages in cases.template_conversations()
        for generate in (True, False)
    ]


def greedy_case(model, tokenizer, name, messages):
    """64 greedy tokens, past the end of the answer, with the two highest logits at every step."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    cache, ids, tokens, top2 = transformers.DynamicCache(config=model.config), prompt_ids, [], []
    for _ in range(GREEDY_TOKENS):
        values, best = logits(model, torch.tensor([ids]), cache)[-1].topk(2)
        tokens.append(best[0].item())
        top2.append(
            [
                [best[0].item(), round(values[0].item(), 5)],
                [best[1].item(), round(values[1].item(), 5)],
            ]
        )
        ids = [tokens[-1]]
    eos = tokenizer.eos_token_id
    case = {
        "id": name,
        "messages": messages,
        "prompt": prompt,
        "prompt_ids": prompt_ids,
        "greedy_ids": tokens,
        "top2": top2,
    }
    print(name, len(prompt_ids), repr(tokenizer.decode(tokens))[:90], flush=True)
    return case | {
        "eos_at": tokens.index(eos) if eos in tokens else None,
        "min_margin": round(min(a[1] - b[1] for a, b in top2), 5),
    }


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(path, path.stat().st_size, "bytes")


def made_with():
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "gguf": "0.19.0",
        "numpy": numpy.__version__,
    }


def main(model_path, out):
    assert (
        hashlib.sha256(model_path.read_bytes()).hexdigest() == SHA256
    ), "not the file these goldens are about"
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    source = Source(model_path)
    tokenizer = load_tokenizer(source)
    about = {"model": "SmolLM2-135M-Instruct.Q4_1.gguf", "sha256": SHA256, "made_with": made_with()}
    write(
        out / "smollm2-135m-instruct.text.json",
        about
        | {
            "tokenizer": tokenizer_cases(tokenizer, source),
            "fuzz": fuzz(tokenizer),
            "template": template_cases(tokenizer),
        },
    )
    model, difference = load_model(source, model_path)
    greedy = [
        greedy_case(model, tokenizer, name, messages) for name, messages in cases.CONVERSATIONS
    ]
    about |= {
        "reference": "dequantised to f32, eager attention, CPU",
        "loader_witness_max_abs_difference": difference,
    }
    write(out / "smollm2-135m-instruct.greedy.json", about | {"cases": greedy})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
