"""anthropic for Python: models, messages, a count of tokens, a stream."""

import sys

import anthropic

gateway, key, name = sys.argv[1:]
client = anthropic.Anthropic(base_url=gateway, api_key=key)
hello = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
assert client.models.list().data[0].id == name
said = client.messages.create(model=name, max_tokens=8, messages=hello, system="Be brief.")
assert said.content[0].type == "text" and said.usage.output_tokens >= 1, said
counted = client.messages.count_tokens(model=name, messages=hello, system="Be brief.")
of_prompt = said.usage.input_tokens + said.usage.cache_read_input_tokens
assert counted.input_tokens == of_prompt, (counted, said.usage)
with client.messages.stream(model=name, max_tokens=8, messages=hello) as stream:
    text = "".join(stream.text_stream)
    assert stream.get_final_message().content[0].text == text
print("ok")
