"""ollama for Python: list, show, chat, generate, an answer that keeps to a schema."""

import json
import sys

import ollama

gateway, key, name = sys.argv[1:]
client = ollama.Client(host=gateway, headers={"Authorization": f"Bearer {key}"})
hello = [{"role": "user", "content": "Hello"}]
assert [model.model for model in client.list().models] == [name]
shown = client.show(name).modelinfo
assert shown[f"{shown['general.architecture']}.context_length"] >= 128
assert client.chat(model=name, messages=hello, options={"num_predict": 8}).eval_count >= 1
pieces = client.generate(model=name, prompt="Hello", options={"num_predict": 8}, stream=True)
assert list(pieces)[-1].done
schema = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "green"]}},
    "required": ["name"],
    "additionalProperties": False,
}
answer = client.chat(model=name, messages=hello, format=schema, options={"num_predict": 100})
assert json.loads(answer.message.content)["name"] in ("red", "green"), answer
print("ok")
