"""LangChain for Python: invoke, stream, batch, structured output."""

import sys
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel

gateway, key, name = sys.argv[1:]
model = ChatOpenAI(model=name, base_url=f"{gateway}/v1", api_key=key, max_tokens=40)


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green"]


assert model.invoke("Hello").usage_metadata["output_tokens"] >= 1
assert len(list(model.stream("Hello"))) >= 1
assert len(model.batch(["One", "Two", "Three"])) == 3
structured = model.with_structured_output(Colour, method="json_schema")
assert structured.invoke("Which?").name in ("red", "green")
print("ok")
