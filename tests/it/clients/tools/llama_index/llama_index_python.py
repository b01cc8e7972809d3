"""LlamaIndex: chat and, as it asks by default, completions; streamed and not."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

gateway, key, name = sys.argv[1:]
for is_chat_model in (True, False):
    model = OpenAILike(
        model=name,
        api_base=f"{gateway}/v1",
        api_key=key,
        max_tokens=8,
        is_chat_model=is_chat_model,
    )
    assert model.complete("Hello").raw is not None
    assert model.chat([ChatMessage(role="user", content="Hello")]).raw is not None
    assert len(list(model.stream_complete("Hello"))) >= 1
print("ok")
