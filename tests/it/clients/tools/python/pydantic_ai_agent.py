"""pydantic-ai: text and native output."""

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

gateway, key, name = sys.argv[1:]
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{gateway}/v1", api_key=key))


class Colour(BaseModel):
    name: Literal["red", "green"]


settings = {"max_tokens": 100}
assert Agent(model).run_sync("Hello", model_settings=settings).usage.output_tokens >= 1
agent = Agent(model, output_type=NativeOutput(Colour))
assert agent.run_sync("Which?", model_settings=settings).output.name in ("red", "green")
print("ok")
