"""LangChain's Anthropic package for Python."""

import sys

from langchain_anthropic import ChatAnthropic

gateway, key, name = sys.argv[1:]
model = ChatAnthropic(model=name, base_url=gateway, api_key=key, max_tokens=8)
assert (
    model.invoke([("system", "Be brief."), ("user", "Hello")]).usage_metadata["output_tokens"] >= 1
)
assert len(list(model.stream("Hello"))) >= 1
print("ok")
