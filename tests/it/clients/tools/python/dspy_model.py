"""DSPy: its model, asked with a prompt and with messages."""

import sys

import dspy

gateway, key, name = sys.argv[1:]
model = dspy.LM(f"openai/{name}", api_base=f"{gateway}/v1", api_key=key, max_tokens=8, cache=False)
assert isinstance(model("Hello")[0], str)
assert isinstance(model(messages=[{"role": "user", "content": "Hello"}])[0], str)
print("ok")
