"""The OpenAI Agents library: one turn over responses and one over chat, streamed too."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

gateway, key, name = sys.argv[1:]
set_tracing_disabled(True)


class Colour(BaseModel):
    name: Literal["red", "green"]


async def ask():
    client = AsyncOpenAI(base_url=f"{gateway}/v1", api_key=key)
    for interface in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        agent = Agent(
            name="A",
            instructions="Be brief.",
            model=interface(model=name, openai_client=client),
            model_settings=ModelSettings(max_tokens=40),
        )
        assert isinstance((await Runner.run(agent, "Hello")).final_output, str)
        streamed = Runner.run_streamed(agent, "Hello")
        assert [event async for event in streamed.stream_events()]
        chosen = await Runner.run(agent.clone(output_type=Colour), "Which?")
        assert chosen.final_output.name in ("red", "green")


asyncio.run(ask())
print("ok")
