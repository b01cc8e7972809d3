"""LangGraph runs its agent with a tool, streamed and not."""

import subprocess
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

gateway, key, name, ask = sys.argv[1:]


@tool
def bash(command: str) -> str:
    """Run a command in the shell."""
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout


for streaming in (False, True):
    model = ChatOpenAI(model=name, base_url=f"{gateway}/v1", api_key=key, streaming=streaming)
    agent = create_agent(model, tools=[bash])
    done = agent.invoke({"messages": [{"role": "user", "content": ask}]})
    print(done["messages"][-1].content)
