"""smolagents: its model, asked once and streamed, and with a schema."""

import json
import sys

from smolagents import OpenAIModel

gateway, key, name = sys.argv[1:]
model = OpenAIModel(model_id=name, api_base=f"{gateway}/v1", api_key=key, max_tokens=40)
hello = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
assert model.generate(hello).token_usage.output_tokens >= 1
assert list(model.generate_stream(hello))
schema = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "green"]}},
    "required": ["name"],
    "additionalProperties": False,
}
form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema, "strict": True}}
said = model.generate(hello, response_format=form).content
assert json.loads(said)["name"] in ("red", "green"), said
print("ok")
