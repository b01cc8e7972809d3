"""Tells schemathesis which requests can succeed, and what the events of a stream are."""

import atexit
import itertools
import json
import os
import uuid

import jsonschema_rs
import schemathesis

COMPLETIONS = "/v1/chat/completions"
WHOLE = {"max_tokens", "max_completion_tokens", "min_tokens", "n", "seed", "top_k", "top_logprobs"}
# Which texts are formats is more than JSON Schema can say: the first that is asked for becomes a sound one.
FORMATS = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["yes", "no"]},
    "guided_json": {"type": "integer"},
    "guided_regex": "[a-z]+",
    "guided_choice": ["left", "right"],
    "guided_grammar": 'start: "x"+',
    "json_schema": {"type": "integer"},
    "regex": "[a-z]+",
    "grammar": 'root ::= "x"+',
    "ebnf": 'root ::= "x"+',
    "structural_tag": {
        "structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}],
        "triggers": ["<a"],
    },
}
# What the small model, which has neither tools nor thoughts, refuses in all or most of its forms.
ABILITIES = ["tools", "tool_choice", "chat_template_kwargs", "reasoning_effort"]
MOST_TOKENS = 6
MOST_CHARACTERS = 300

counts = {"completions": 0, "streams": 0}
atexit.register(lambda: [print(f"{name}: {count}") for name, count in counts.items()])

chunks = None
streaming = itertools.cycle([False, True])
sessions = itertools.cycle(["X-Cresset-Session-Id", "X-Service-Session-Id"])


@schemathesis.hook
def before_load_schema(context, raw_schema):
    """Responses may hold nothing that is not described, and a stream is checked event by event, below."""
    global chunks
    components = raw_schema["components"]
    for schema in components["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    answers = raw_schema["paths"][COMPLETIONS]["post"]["responses"]["200"]["content"]
    del answers["text/event-stream"]["schema"]
    chunk = {"$ref": "#/components/schemas/ChatCompletionChunk", "components": components}
    chunks = jsonschema_rs.Draft202012Validator(chunk)


@schemathesis.hook
def before_call(context, case, kwargs):
    """A sound request gets a fresh id, a model that exists and an answer that takes no time; every other one is a stream."""
    if case.operation.path == COMPLETIONS and case.meta and case.meta.generation.mode.is_positive:
        case.headers["Idempotency-Key"] = str(uuid.uuid4())
        for name in ["X-Cresset-Session-Id", "X-Service-Session-Id"]:
            case.headers.pop(name, None)
        case.headers[next(sessions)] = str(uuid.uuid4())
        soften(case.body)
        case.body["stream"] = next(streaming)


def soften(body):
    body["model"] = os.environ["MODEL"]
    for name in WHOLE & body.keys():
        # To JSON Schema 5.0 is a whole number, but the node refuses it.
        body[name] = None if body[name] is None else int(body[name])
    limit = 1 + (body.get("max_tokens") or body.get("max_completion_tokens") or 0) % MOST_TOKENS
    body["max_tokens"] = limit
    if body.get("max_completion_tokens") is not None:
        body["max_completion_tokens"] = limit
    if body.get("min_tokens") is not None:
        body["min_tokens"] = min(body["min_tokens"], limit)
    if body.get("logit_bias"):
        body["logit_bias"] = {
            str(int(token) % 100): bias for token, bias in body["logit_bias"].items()
        }
    # Only a text of the assistant can be continued, and not beside a format.
    continues = body.get("continue_final_message")
    for name in FORMATS if continues else []:
        body.pop(name, None)
    asked = [name for name in FORMATS if body.pop(name, None) is not None]
    if asked:
        body[asked[0]] = FORMATS[asked[0]]
        body["ignore_eos"] = body["min_tokens"] = None
    # White space goes with a schema alone.
    for name in [*ABILITIES, "guided_whitespace_pattern"]:
        body.pop(name, None)
    room = [MOST_CHARACTERS]
    for message in body["messages"]:
        message.pop("reasoning_content", None)
        message.pop("prefix", None)
        # The template of the small model cannot render tool calls.
        if message.pop("tool_calls", None):
            message["content"] = "called"
        content = message.get("content")
        if isinstance(content, str):
            message["content"] = cut(content, room)
        for part in content if isinstance(content, list) else []:
            part["text"] = cut(part["text"], room)
    if continues:
        body["messages"][-1] = {"role": "assistant", "content": "So"}


def cut(text, room):
    text = text[: room[0]]
    room[0] -= len(text)
    return text


@schemathesis.check
def stream_conformance(context, response, case):
    """`data:` lines only, each a chunk, one end, and `[DONE]`."""
    if response.status_code != 200 or case.operation.path != COMPLETIONS:
        return
    if response.headers["content-type"] != ["text/event-stream"]:
        counts["completions"] += 1
        return
    counts["streams"] += 1
    events = [event for event in response.text.split("\n\n") if not event.startswith(":")]
    assert events[-2:] == ["data: [DONE]", ""], f"the stream ends with {events[-2:]}"
    assert all(event.startswith("data: ") and "\n" not in event for event in events[:-1]), events
    told = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    for chunk in told:
        chunks.validate(chunk)
    ends = [chunk for chunk in told if any(choice["finish_reason"] for choice in chunk["choices"])]
    assert len(ends) == 1, f"{len(ends)} ends"
    assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}, told[0]
