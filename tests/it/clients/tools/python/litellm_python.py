"""LiteLLM's package: one call by each of the interfaces it can ask with."""

import sys

import litellm

gateway, key, name = sys.argv[1:]
hello = [{"role": "user", "content": "Hello"}]
litellm.drop_params = True
for model, base in [
    (f"openai/{name}", f"{gateway}/v1"),
    (f"hosted_vllm/{name}", f"{gateway}/v1"),
    (f"anthropic/{name}", gateway),
    (f"ollama_chat/{name}", gateway),
    (f"ollama/{name}", gateway),
]:
    asked = dict(model=model, messages=hello, api_base=base, api_key=key, max_tokens=8)
    said = litellm.completion(**asked)
    assert said.usage.completion_tokens >= 1, (model, said)
    assert len(list(litellm.completion(**asked, stream=True))) >= 1, model
said = litellm.text_completion(
    model=f"text-completion-openai/{name}",
    prompt="Hello",
    api_base=f"{gateway}/v1",
    api_key=key,
    max_tokens=8,
)
assert said.choices[0].finish_reason in ("stop", "length"), said
print("ok")
