"""The release that goldens are made of: one GGUF file or one Hugging Face folder."""

import hashlib
import json
import pathlib
import re

import gguf

# Ids of these tokens end an answer.
GGUF_ENDS = ["eos", "eot", "eom"]
QUANTISATION = re.compile(r"[.-](i?q\d\w*|bf16|f16|f32|fp16|fp32)$")


class Refused(Exception):
    """No goldens can be made: one sentence that says what to change."""


def open_source(path, tokenizer):
    if not path.exists():
        raise Refused(f"{path} does not exist: give the path of a GGUF file or of a folder")
    if path.is_dir():
        return FolderSource(path, tokenizer or path)
    return GgufSource(path, tokenizer)


def sha256_of(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_of(path):
    """The content of a JSON file, empty where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise Refused(f"{path} is not JSON ({error}): fetch it again") from error


class GgufSource:
    """A GGUF file. Its tokenizer is its own vocabulary, or the publisher's in `tokenizer`."""

    is_folder = False

    def __init__(self, path, tokenizer):
        self.path, self.tokenizer_folder = path.resolve(), tokenizer
        try:
            self.reader = gguf.GGUFReader(self.path)
        except (ValueError, IndexError) as error:
            raise Refused(f"{path} is not a whole GGUF file ({error}): fetch it again") from error
        self.file, self.weights_sha256 = path.name, sha256_of(self.path)
        self.name = QUANTISATION.sub("", self.path.stem.lower())
        self.architecture = self.get("general.architecture")
        if self.architecture is None:
            raise Refused(f"{path} has no general.architecture: convert the model again")

    def get(self, key, default=None):
        field = self.reader.fields.get(key)
        return default if field is None else field.contents()

    def parameters(self):
        """The scalars of the header that decide what the model computes."""
        wanted = re.compile(
            rf"general\.architecture$|{re.escape(self.architecture)}\.|"
            r"tokenizer\.ggml\.\w+_token_id$"
        )
        found = {key: self.get(key) for key in self.reader.fields if wanted.match(key)}
        return {key: value for key, value in sorted(found.items()) if not isinstance(value, list)}

    def context(self):
        return self.get(f"{self.architecture}.context_length", 2048)

    def template(self):
        return self.get("tokenizer.chat_template")

    def declared_ends(self):
        ids = [self.get(f"tokenizer.ggml.{name}_token_id") for name in GGUF_ENDS]
        return {id for id in ids if id is not None}

    def adds_begin(self):
        return self.get("tokenizer.ggml.add_bos_token", self.get("tokenizer.ggml.model") == "llama")

    def loading(self):
        """What transformers' `from_pretrained` takes."""
        return {"pretrained_model_name_or_path": self.path.parent, "gguf_file": self.path.name}


class FolderSource:
    """A folder in Hugging Face's layout: config.json, tokenizer.json, *.safetensors."""

    is_folder = True

    def __init__(self, path, tokenizer):
        self.path, self.tokenizer_folder = path.resolve(), tokenizer
        weights = sorted(self.path.glob("*.safetensors"))
        if not weights or not (self.path / "config.json").exists():
            raise Refused(f"{path} needs config.json and *.safetensors: fetch the whole release")
        self.config = json_of(self.path / "config.json")
        self.file, self.weights_sha256 = weights[0].name, sha256_of(weights[0])
        self.name = self.path.name.lower()
        self.architecture = self.config.get("model_type", "unknown")

    def parameters(self):
        scalars = {
            f"{self.architecture}.{key}": value
            for key, value in sorted(self.config.items())
            if isinstance(value, (int, float, str)) and not key.startswith("_")
        }
        return {"general.architecture": self.architecture} | scalars

    def context(self):
        return self.config.get("max_position_embeddings", 2048)

    def template(self):
        file = self.path / "chat_template.jinja"
        if file.exists():
            return file.read_text(encoding="utf-8")
        found = json_of(self.path / "tokenizer_config.json").get("chat_template")
        if isinstance(found, list):
            found = {one["name"]: one["template"] for one in found}.get("default")
        return found

    def declared_ends(self):
        generation = json_of(self.path / "generation_config.json")
        found = [config.get("eos_token_id") for config in (self.config, generation)]
        return {id for ids in found for id in (ids if isinstance(ids, list) else [ids])} - {None}

    def adds_begin(self):
        return json_of(self.path / "tokenizer_config.json").get("add_bos_token", False)

    def loading(self):
        return {"pretrained_model_name_or_path": self.path}
