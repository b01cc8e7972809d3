"""anthropic for Python: models, messages, a stream."""

import sys

import anthropic

gateway, key, name = sys.argv[1:]
client = anthropic.Anthropic(base_url=gateway, api_key=key)
hello = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
assert client.models.list().data[0].id == name
said = client.messages.create(model=name, max_tokens=8, messages=hello, system="Be brief.")
assert said.content[0].type == "text" and said.usage.output_tokens >= 1, said
with client.messages.stream(model=name, max_tokens=8, messages=hello) as stream:
    text = "".join(stream.text_stream)
    assert stream.get_final_message().content[0].text == text
print("ok")
