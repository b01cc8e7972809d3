"""Haystack: its chat generator, streamed and not."""

import sys

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

gateway, key, name = sys.argv[1:]
parts = []
for callback in (None, parts.append):
    generator = OpenAIChatGenerator(
        model=name,
        api_base_url=f"{gateway}/v1",
        api_key=Secret.from_token(key),
        generation_kwargs={"max_tokens": 8},
        streaming_callback=callback,
    )
    said = generator.run([ChatMessage.from_user("Hello")])["replies"][0]
    assert said.meta["finish_reason"] in ("stop", "length"), said
assert parts
print("ok")
