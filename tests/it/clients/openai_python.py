"""The openai package against a node: models, completions, streams, errors, retries. argv: base address, key."""

import sys
import uuid

import openai


class Node(openai.OpenAI):
    """One request id per call, kept over the client's own retries."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._idempotency_header = "Idempotency-Key"

    def _idempotency_key(self):
        return str(uuid.uuid4())


def client(base, key):
    headers = {"X-Service-Session-Id": str(uuid.uuid4())}
    return Node(base_url=f"{base}/v1", api_key=key, default_headers=headers, max_retries=1)


def refused(kind, code, call):
    try:
        call()
    except kind as error:
        assert error.code == code, (error.code, code)
    else:
        raise AssertionError(f"{code} was not raised")


base, key = sys.argv[1:]
node = client(base, key)
messages = [{"role": "user", "content": "Say hello."}]

models = node.models.list().data
assert len(models) == 1 and models[0].object == "model", models
model = models[0].id
assert node.models.retrieve(model).id == model

whole = node.chat.completions.create(
    model=model, messages=messages, max_tokens=12, seed=5, temperature=0.8
)
assert whole.choices[0].message.role == "assistant", whole
assert whole.choices[0].finish_reason in ("stop", "length"), whole
assert 1 <= whole.usage.completion_tokens <= 12, whole.usage
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
assert int(whole.credits["chargedUnits"]) >= 1, whole

stream = node.chat.completions.create(
    model=model,
    messages=messages,
    max_tokens=12,
    seed=5,
    temperature=0.8,
    stream=True,
    stream_options={"include_usage": True},
)
chunks = list(stream)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == whole.choices[0].message.content, (text, whole)
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]
assert {chunk.id for chunk in chunks} == {chunks[0].id}

# The same id and input again is a replay: same answer, no second charge.
again = {"Idempotency-Key": whole.id}
replayed = node.chat.completions.create(
    model=model, messages=messages, max_tokens=12, seed=5, temperature=0.8, extra_headers=again
)
assert replayed == whole, (replayed, whole)

refused(
    openai.AuthenticationError, "invalid_credential", lambda: client(base, "junk").models.list()
)
refused(
    openai.NotFoundError,
    "model_not_found",
    lambda: node.chat.completions.create(model=str(uuid.uuid4()), messages=messages),
)
refused(
    openai.BadRequestError,
    "invalid_request",
    lambda: node.chat.completions.create(model=model, messages=messages, n=2),
)
refused(
    openai.UnprocessableEntityError,
    "idempotency_key_reused",
    lambda: node.chat.completions.create(model=model, messages=messages, extra_headers=again),
)
print("ok")
