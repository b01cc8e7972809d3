"""openai for Python, unchanged: chat by name, a stream, an answer that keeps to a schema."""

import sys
from typing import Literal

import openai
from pydantic import BaseModel

gateway, key, name = sys.argv[1:]
client = openai.OpenAI(base_url=f"{gateway}/v1", api_key=key)
hello = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


class Colour(BaseModel):
    name: Literal["red", "green"]
    dark: bool


said = client.chat.completions.create(model=name, messages=hello, max_tokens=8)
assert said.model == name and said.usage.completion_tokens >= 1, said
stream = client.chat.completions.create(model=name, messages=hello, max_tokens=8, stream=True)
assert [chunk for chunk in stream][-1].choices[0].finish_reason in ("stop", "length")
parsed = client.chat.completions.parse(
    model=name, messages=hello, max_tokens=200, response_format=Colour
)
assert parsed.choices[0].message.parsed.name in ("red", "green"), parsed
answer = client.responses.parse(
    model=name, input="Hello", max_output_tokens=200, text_format=Colour
)
assert answer.output_parsed.name in ("red", "green"), answer
print("ok")
