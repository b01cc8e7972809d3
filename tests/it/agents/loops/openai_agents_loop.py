"""The OpenAI Agents library runs its loop with a tool, over responses and over chat."""

import asyncio
import subprocess
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

gateway, key, name, ask = sys.argv[1:]
set_tracing_disabled(True)


@function_tool
def bash(command: str) -> str:
    """Run a command in the shell."""
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout


async def work():
    client = AsyncOpenAI(base_url=f"{gateway}/v1", api_key=key)
    for interface in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = interface(model=name, openai_client=client)
        agent = Agent(name="A", instructions="Use the shell.", model=model, tools=[bash])
        print((await Runner.run(agent, ask)).final_output)
        streamed = Runner.run_streamed(agent, ask)
        assert [event async for event in streamed.stream_events()]
        print(streamed.final_output)


asyncio.run(work())
