"""LangChain's Ollama package for Python: chat, stream, structured output, plain completion."""

import sys
from typing import Literal

from langchain_ollama import ChatOllama, OllamaLLM
from pydantic import BaseModel

gateway, key, name = sys.argv[1:]
settings = {
    "model": name,
    "base_url": gateway,
    "client_kwargs": {"headers": {"Authorization": f"Bearer {key}"}},
    "num_predict": 40,
}


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green"]


model = ChatOllama(**settings)
assert model.invoke("Hello").usage_metadata["output_tokens"] >= 1
assert len(list(model.stream("Hello"))) >= 1
assert model.with_structured_output(Colour).invoke("Which?").name in ("red", "green")
assert isinstance(OllamaLLM(**settings).invoke("Hello"), str)
print("ok")
