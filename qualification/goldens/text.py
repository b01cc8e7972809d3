"""Cases of tokenizer and template, and what both say of a release's special tokens."""

import copy
import json

import jinja2

import cases
from source import Refused

# Share of the strings on which the two tokenizers may differ; those are left out.
MOST_DIFFERENCES = 0.02
# What a release without a template continues. The last text is longer than many windows.
TEXTS = {
    "english": "The meaning of life and the universe is",
    "code": cases.PYTHON,
    "chinese": "长城是",
    "emoji": "🦀🚀 are",
    "german": "Der Himmel ist blau, weil",
    "report": cases.report(25) + "\n\nIn short,",
}


def encode(tokenizer, text, special):
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not special)


def special_ids(tokenizer):
    return {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}


def render(tokenizer, messages, generate, tokenize=False):
    """The rendered conversation, or nothing where the template refuses it."""
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=generate, tokenize=tokenize, return_dict=False
        )
    except jinja2.TemplateError:
        return None


def tokenizer_cases(tokenizer, witness):
    """Cases on which both tokenizers agree, and the number of those on which they do not."""
    found, strings = [], cases.strings()
    for text in strings:
        plain, special = (encode(tokenizer, text, special) for special in (False, True))
        if plain == witness.encode(text, False) and special == witness.encode(text, True):
            case = {"text": text, "ids": plain}
            found.append(case | ({"special_ids": special} if special != plain else {}))
    differing = len(strings) - len(found)
    if differing > MOST_DIFFERENCES * len(strings):
        raise Refused(
            f"the tokenizer and llama.cpp's differ on {differing} of {len(strings)} strings: give "
            "the publisher's tokenizer.json with --tokenizer FOLDER, or mend tokenizer.ggml.pre"
        )
    return found, differing


def template_cases(tokenizer):
    if tokenizer.chat_template is None:
        return []
    found = [
        {
            "messages": messages,
            "add_generation_prompt": generate,
            "prompt": render(tokenizer, messages, generate),
        }
        for messages in cases.template_conversations()
        for generate in (True, False)
    ]
    found = [case for case in found if case["prompt"] is not None]
    if not found:
        raise Refused("the chat template renders no conversation: mend tokenizer.chat_template")
    return found


def request(messages, text):
    """The conversation as requests have it, or as templates take it: arguments as text or not."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", []) if text else []:
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return messages


def render_tools(tokenizer, messages, tools):
    """The prompt with calls in the first form that the template takes, or nothing."""
    for absent in (None, ""):
        for text in (False, True):
            told = request(messages, text)
            for message in told:
                message["content"] = absent if message["content"] is None else message["content"]
            try:
                return tokenizer.apply_chat_template(
                    told, tools=tools, add_generation_prompt=True, tokenize=False
                )
            except (jinja2.TemplateError, TypeError):
                continue
    return None


def tool_cases(tokenizer):
    """Conversations with tools and their prompts; none where the template tells of no tools."""
    if tokenizer.chat_template is None:
        return []
    found = [
        {
            "id": id,
            "request": {"messages": request(messages, True), "tools": tools},
            "prompt": render_tools(tokenizer, messages, tools),
        }
        for id, messages, tools in cases.tool_conversations()
    ]
    found = [case for case in found if case["prompt"] is not None]
    tells = any("The city's name" in case["prompt"] for case in found)
    return found if tells else []


def begin(source, tokenizer):
    """The token that a text of this release begins with, where it begins with one."""
    if tokenizer.chat_template is not None:
        ids = render(tokenizer, cases.user("Hello"), True, tokenize=True)
        return ids[:1] if ids and ids[0] in special_ids(tokenizer) else []
    return [tokenizer.bos_token_id] if source.adds_begin() else []


def ends(source, tokenizer):
    """Declared ends, and the token that the template puts behind an answer."""
    found = source.declared_ends()
    if tokenizer.chat_template is not None:
        turns = render(tokenizer, cases.turns("Question", "Zebra"), False)
        behind = turns.rpartition("Zebra")[2] if turns else ""
        ids = encode(tokenizer, behind.lstrip(), True) if behind else []
        found |= set(ids[:1]) & special_ids(tokenizer)
    if not found:
        raise Refused("the release declares no token that ends an answer: set eos_token_id")
    return sorted(found)


def prompts(source, tokenizer):
    """Identifier, messages and ids of what is continued greedily."""
    if tokenizer.chat_template is None:
        head = begin(source, tokenizer)
        return [(name, [], head + encode(tokenizer, text, False)) for name, text in TEXTS.items()]
    rendered = [
        (name, messages, render(tokenizer, messages, True, tokenize=True))
        for name, messages in cases.CONVERSATIONS
    ]
    return [prompt for prompt in rendered if prompt[2] is not None]
