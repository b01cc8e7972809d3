"""Conversations for the chat templates of many releases: every shape that a request can have, and tools, which templates render."""

from cases import turns, user


def call(arguments, *, name="get_weather"):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        ],
    }


def result(content, **more):
    return {"role": "tool", "tool_call_id": "call00001", "content": content} | more


ASKED = user("What is the weather in Zürich?")
WEATHER = {"city": "Zürich", "days": 2, "detailed": True}
WEATHER_TEXT = '{"city": "Zürich", "days": 2, "detailed": true}'
SUNNY = '{"sky": "sunny", "celsius": [21, 23.5]}'
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a city; "days" ahead <b>&</b>.',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city's name"},
                "days": {"type": "integer", "enum": [1, 2, 3]},
            },
            "required": ["city"],
        },
    },
}


def case(name, messages, *, generate=True, tools=None):
    return {"id": name, "messages": messages, "add_generation_prompt": generate} | (
        {"tools": tools} if tools else {}
    )


CASES = [
    case("user", user("Hello")),
    case("user, no prompt", user("Hello"), generate=False),
    case("system", turns("Who are you?", system="You are a pirate.")),
    case("empty system", turns("Hi", system="")),
    case("turns", turns("My name is Ada.", "Nice to meet you, Ada!", "What is my name?")),
    case("system and turns", turns("One?", "Two.", "Three?", "Four.", "Five?", system="Count.")),
    case("ends with the assistant", turns("One?", "Two."), generate=False),
    case(
        "unicode",
        turns("é e\u0301 🦀 中文 <b>&amp;\"'</b> {{ x }} {% y %}", "ﬁ \u200b ok \\n", "a\\b"),
    ),
    case(
        "whitespace", turns("  two\n\n\tlines \r\n", "\n answer \n\n", "\n", system="  be brief \n")
    ),
    case("empty user", user("")),
    case("empty answer", turns("One?", "", "Three?")),
    case("thinking", turns("Why?", "<think>\nhm\n</think>\n\nBecause.", "Really?")),
    case("two users", user("One.") + user("Two.")),
    case("call with an object", ASKED + [call(WEATHER), result(SUNNY)]),
    case("call with a string", ASKED + [call(WEATHER_TEXT), result(SUNNY)]),
    case(
        "call with text",
        ASKED + [call(WEATHER) | {"content": "Let me look."}, result(SUNNY, name="get_weather")],
    ),
    case(
        "call and answer",
        ASKED + [call(WEATHER), result(SUNNY)] + turns("thanks", "It is sunny.")[::-1],
    ),
    case("call without arguments", ASKED + [call({}, name="now"), result("12:00")]),
    case("tools", turns("What is the weather in Zürich?", system="Be brief."), tools=[TOOL]),
    case("tools without system", ASKED, tools=[TOOL]),
    case("tools and call", ASKED + [call(WEATHER), result(SUNNY)], tools=[TOOL]),
    case(
        "parts",
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Part one. "},
                    {"type": "text", "text": "Part two."},
                ],
            }
        ],
    ),
    case(
        "odd order",
        turns("One?", "Two.") + [{"role": "system", "content": "Late."}] + user("Three?"),
    ),
]
