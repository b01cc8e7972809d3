"""Other services' clients through the gateway, each in its own dialect. argv: gateway, key."""

import sys

import anthropic
import ollama
import openai

gateway, key = sys.argv[1:]
hello = [{"role": "user", "content": "Say hello."}]


def refused(kind, status, call):
    try:
        call()
    except kind as error:
        assert error.status_code == status, (error.status_code, status)
    else:
        raise AssertionError(f"{status} was not raised")


node = openai.OpenAI(base_url=f"{gateway}/v1", api_key=key, max_retries=0)
name = node.models.list().data[0].id

# OpenAI's older completions.
one = node.completions.create(model=name, prompt="Say hello.", max_tokens=9, seed=5)
assert one.choices[0].finish_reason in ("stop", "length") and one.model == name, one
assert 1 <= one.usage.completion_tokens <= 9, one.usage
pieces = list(
    node.completions.create(
        model=name,
        prompt="Say hello.",
        max_tokens=9,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
    )
)
text = "".join(piece.choices[0].text for piece in pieces if piece.choices)
assert text == one.choices[0].text and pieces[-1].usage.completion_tokens >= 1, pieces
refused(openai.APIStatusError, 404, lambda: node.completions.create(model="no", prompt="x"))
refused(openai.APIStatusError, 400, lambda: node.completions.create(model=name, prompt=["a", "b"]))

# OpenAI's responses.
said = dict(model=name, input="Say hello.", max_output_tokens=9)
answer = node.responses.create(**said)
assert answer.status in ("completed", "incomplete"), answer
assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
with node.responses.stream(**said) as stream:
    kinds = [event.type for event in stream]
    last = stream.get_final_response() if kinds[-1] == "response.completed" else None
assert kinds[0] == "response.created", kinds
assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
assert "response.output_text.delta" in kinds or last is not None, kinds
refused(
    openai.APIStatusError,
    400,
    lambda: node.responses.create(model=name, input="x", previous_response_id="r"),
)

# Anthropic's messages, with the key in its own header.
claude = anthropic.Anthropic(base_url=gateway, api_key=key, max_retries=0)
assert [model.id for model in claude.models.list().data] == [name]
whole = claude.messages.create(model=name, max_tokens=9, messages=hello, system="Be brief.")
assert whole.role == "assistant" and whole.stop_reason in ("end_turn", "max_tokens"), whole
assert whole.usage.output_tokens >= 1 and whole.usage.input_tokens >= 1, whole.usage
counted = claude.messages.count_tokens(model=name, messages=hello, system="Be brief.")
of_prompt = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
assert counted.input_tokens == of_prompt, (counted, whole.usage)
with claude.messages.stream(model=name, max_tokens=9, messages=hello) as stream:
    text = "".join(stream.text_stream)
    last = stream.get_final_message()
assert last.content[0].text == text and last.usage.input_tokens >= 1, last
stranger = anthropic.Anthropic(base_url=gateway, api_key="wrong", max_retries=0)
refused(
    anthropic.AuthenticationError,
    401,
    lambda: stranger.messages.create(model=name, max_tokens=9, messages=hello),
)
refused(
    anthropic.AuthenticationError,
    401,
    lambda: stranger.messages.count_tokens(model=name, messages=hello),
)
refused(
    anthropic.NotFoundError,
    404,
    lambda: claude.messages.create(model="no", max_tokens=9, messages=hello),
)

# Ollama's chat and generate.
local = ollama.Client(host=gateway, headers={"Authorization": f"Bearer {key}"})
assert [model.model for model in local.list().models] == [name]
assert "completion" in local.show(name).capabilities
options = {"num_predict": 9, "seed": 5, "num_ctx": 512}
chat = local.chat(model=f"{name}:latest", messages=hello, options=options)
assert chat.done and chat.eval_count >= 1 and chat.message.role == "assistant", chat
pieces = list(local.chat(model=name, messages=hello, options=options, stream=True))
assert "".join(piece.message.content for piece in pieces) == chat.message.content, pieces
generated = local.generate(model=name, prompt="Say hello.", options=options)
assert generated.done_reason in ("stop", "length"), generated
assert local.generate(model=name).done_reason == "load"
refused(ollama.ResponseError, 404, lambda: local.chat(model="no", messages=hello))
refused(ollama.ResponseError, 400, lambda: local.generate(model=name, prompt="x", raw=True))

print("ok")
