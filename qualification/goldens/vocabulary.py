"""A release's tokenizer: the publisher's tokenizer.json, or made of the GGUF file's vocabulary."""

import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from source import Refused, json_of

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDING = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + ENDING
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + ENDING
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


EACH_DIGIT = pre_tokenizers.Digits(individual_digits=True)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
# What `tokenizer.ggml.pre` stands for: cuts, whether the text is composed (NFC) first, whether a
# word of the vocabulary is one token whatever the merges say.
PRE = {
    ("gpt-2", "phi-2", "jais"): ([GPT2], False, False),
    ("mpt", "olmo"): ([GPT2], True, False),
    ("smollm", "starcoder", "refact"): ([EACH_DIGIT, GPT2], False, False),
    ("command-r",): ([EACH_DIGIT, GPT2], True, False),
    ("llama3", "llama-v3", "llama-bpe"): ([split(LLAMA3), BYTES], False, True),
    ("dbrx",): ([split(LLAMA3), BYTES], False, False),
    ("qwen2",): ([split(QWEN2), BYTES], True, False),
    ("deepseek-r1-qwen",): ([split(QWEN2), BYTES], False, False),
    ("tekken",): ([split(TEKKEN), BYTES], False, True),
}


def load_tokenizer(source):
    template = source.template()
    if source.tokenizer_folder is not None:
        return publishers(source.tokenizer_folder, template)
    kind = source.get("tokenizer.ggml.model")
    builders = {"gpt2": byte_level, "llama": sentence_piece}
    if kind not in builders:
        raise Refused(
            f"the tokenizer model {kind!r} (tokenizer.ggml.model) cannot be built from the file: "
            "give the publisher's tokenizer.json with --tokenizer FOLDER"
        )
    tokens = source.get("tokenizer.ggml.tokens")
    tokenizer = builders[kind](source, tokens)
    kinds = source.get("tokenizer.ggml.token_type", [])
    add_tokens(tokenizer, tokens, kinds)
    named = {
        name: tokens[source.get(f"tokenizer.ggml.{key}_token_id")]
        for name, key in [
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        ]
        if source.get(f"tokenizer.ggml.{key}_token_id") is not None
    }
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, **named
    )


def publishers(folder, template):
    file = folder / "tokenizer.json"
    if not file.exists():
        raise Refused(f"{folder} has no tokenizer.json: put the publisher's file there")
    config = json_of(folder / "tokenizer_config.json")
    text = lambda token: token["content"] if isinstance(token, dict) else token
    named = {
        name: text(config[name])
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if config.get(name)
    }
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), chat_template=template, **named
    )


def add_tokens(tokenizer, tokens, kinds):
    """Control tokens are parsed only where special tokens are; user-defined ones always."""
    of = lambda *wanted: [token for token, kind in zip(tokens, kinds) if kind in wanted]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in of(CONTROL, UNKNOWN)]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in of(USER_DEFINED)]
    )


def byte_level(source, tokens):
    vocabulary = {token: at for at, token in enumerate(tokens)}
    merges = source.get("tokenizer.ggml.merges")
    return byte_level_of(source.get("tokenizer.ggml.pre"), vocabulary, merges)


def byte_level_of(name, vocabulary, merges):
    found = [row for names, row in PRE.items() if name in names]
    if not found:
        raise Refused(
            f"the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known here: give the "
            "publisher's tokenizer.json with --tokenizer FOLDER"
        )
    cuts, composes, ignores_merges = found[0]
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else merge for merge in merges]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [tuple(pair) for pair in pairs], ignore_merges=ignores_merges)
    )
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(source, tokens):
    """SentencePiece joins the pair whose joined piece has the highest score."""
    vocabulary = {token: at for at, token in enumerate(tokens)}
    scores = source.get("tokenizer.ggml.scores")
    pairs = [
        (token[:cut], token[cut:], at)
        for at, token in enumerate(tokens)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    order = lambda pair: (-scores[pair[2]], vocabulary[pair[0]], vocabulary[pair[1]])
    merges = [(left, right) for left, right, _ in sorted(pairs, key=order)]
    unknown = tokens[source.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefixed = source.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
