"""instructor: an answer as an object."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

gateway, key, name = sys.argv[1:]


class Colour(BaseModel):
    name: Literal["red", "green"]


client = instructor.from_openai(
    openai.OpenAI(base_url=f"{gateway}/v1", api_key=key), mode=instructor.Mode.JSON_SCHEMA
)
colour = client.chat.completions.create(
    model=name,
    response_model=Colour,
    max_tokens=100,
    messages=[{"role": "user", "content": "Which?"}],
)
assert colour.name in ("red", "green"), colour
print("ok")
