//! How families of models write tool calls. One table serves three ends: the grammar that an
//! answer with calls keeps to, the reader of such answers, and finding a release's family.

use serde_json::Value;

/// A function that a client offers for tool calling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolDefinition {
    pub name: String,
    /// The JSON schema of its arguments, as text with its members in the client's order.
    pub parameters: String,
    /// Rules of the schema that calls cannot be kept to are refused, and not left out.
    pub strict: bool,
}

/// Calls in one answer: as many as a conversation may bring back.
pub const MOST_CALLS: usize = 64;

/// How a family writes a tool call: `before`, the name, `middle`, the arguments, `after`. An
/// answer has several between `open` and `close`, with `separator` between two. Readers take any
/// white space where these texts have some, or could have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallForm {
    /// For messages to operators.
    pub family: &'static str,
    /// Whether a call can only begin the answer, because its first character is an ordinary one.
    pub at_start: bool,
    /// Whether a call is a message among others of the answer, in a channel.
    pub in_channels: bool,
    pub open: &'static str,
    pub before: &'static str,
    pub middle: &'static str,
    pub arguments: ArgumentSyntax,
    /// Where conversations hold an id of the call, of nine characters.
    pub id: CallId,
    pub after: &'static str,
    pub separator: &'static str,
    pub close: &'static str,
    pub most: usize,
}

/// The place of a call's id, with the text in front of it. Answers may leave both out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallId {
    None,
    BehindName(&'static str),
    BehindArguments(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentSyntax {
    /// A JSON object.
    Json,
    /// Each argument by itself. Texts are written as they are, other values as JSON.
    Tagged(ArgumentTags),
    /// Names and values in another notation, up to the bracket that begins `after`.
    Literals(LiteralSyntax),
}

/// The texts around one argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArgumentTags {
    pub before: &'static str,
    /// Between its name and its value.
    pub middle: &'static str,
    pub after: &'static str,
}

/// A notation of names and values that is no JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiteralSyntax {
    /// The mark on both sides of a text without escapes. `None`: Python's quotes of either kind
    /// and its escapes, for names inside values too.
    pub quote: Option<&'static str>,
    /// Between an argument's name, which has no quotes, and its value.
    pub assign: &'static str,
    /// Between a name and its value inside a value.
    pub pair: &'static str,
    pub separator: &'static str,
    /// Closes the arguments.
    pub close: char,
    /// Whether members are in the order of their letters, or else in the schema's.
    pub is_sorted: bool,
}

/// Keyword arguments. Words are those of Python or of JSON: templates write both.
const PYTHON: LiteralSyntax = LiteralSyntax {
    quote: None,
    assign: "=",
    pair: ": ",
    separator: ", ",
    close: ')',
    is_sorted: false,
};

const MARKED: LiteralSyntax = LiteralSyntax {
    quote: Some("<|\"|>"),
    assign: ":",
    pair: ":",
    separator: ",",
    close: '}',
    is_sorted: true,
};

const JSON_CALL: CallForm = CallForm {
    family: "JSON in <tool_call> (Hermes, Qwen 2.5 and 3)",
    at_start: false,
    in_channels: false,
    open: "",
    before: "<tool_call>\n{\"name\": \"",
    middle: "\", \"arguments\": ",
    arguments: ArgumentSyntax::Json,
    id: CallId::None,
    after: "}\n</tool_call>",
    separator: "\n",
    close: "",
    most: MOST_CALLS,
};

/// The first form that reads what a template writes is the release's. `CHANNEL_CALL` is the last.
pub(crate) const CALL_FORMS: [CallForm; 13] = [
    JSON_CALL,
    CallForm {
        family: "XML in <tool_call> (Qwen3-Coder, Qwen 3.5)",
        before: "<tool_call>\n<function=",
        middle: ">\n",
        arguments: ArgumentSyntax::Tagged(ArgumentTags {
            before: "<parameter=",
            middle: ">\n",
            after: "\n</parameter>\n",
        }),
        after: "</function>\n</tool_call>",
        ..JSON_CALL
    },
    CallForm {
        family: "keys and values in <tool_call> (GLM 4.5)",
        before: "<tool_call>",
        middle: "\n",
        arguments: ArgumentSyntax::Tagged(ArgumentTags {
            before: "<arg_key>",
            middle: "</arg_key>\n<arg_value>",
            after: "</arg_value>\n",
        }),
        after: "</tool_call>",
        ..JSON_CALL
    },
    CallForm {
        family: "keys and values in <tool_call> without line breaks (GLM 4.7)",
        before: "<tool_call>",
        middle: "",
        arguments: ArgumentSyntax::Tagged(ArgumentTags {
            before: "<arg_key>",
            middle: "</arg_key><arg_value>",
            after: "</arg_value>",
        }),
        after: "</tool_call>",
        separator: "",
        ..JSON_CALL
    },
    CallForm {
        family: "a list behind [TOOL_CALLS] (Mistral v3, Nemo)",
        open: "[TOOL_CALLS][",
        before: "{\"name\": \"",
        id: CallId::BehindArguments(", \"id\": \""),
        after: "}",
        separator: ", ",
        close: "]",
        ..JSON_CALL
    },
    CallForm {
        family: "[TOOL_CALLS] and [ARGS] (Mistral v13 and later)",
        before: "[TOOL_CALLS]",
        middle: "[ARGS]",
        after: "",
        separator: "",
        ..JSON_CALL
    },
    CallForm {
        family: "[TOOL_CALLS], [CALL_ID] and [ARGS] (Mistral v11)",
        before: "[TOOL_CALLS]",
        middle: "[ARGS]",
        id: CallId::BehindName("[CALL_ID]"),
        after: "",
        separator: "",
        ..JSON_CALL
    },
    CallForm {
        family: "JSON in a code block between marks (DeepSeek V3 and R1)",
        open: "<｜tool▁calls▁begin｜>",
        before: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle: "\n```json\n",
        after: "\n```<｜tool▁call▁end｜>",
        close: "<｜tool▁calls▁end｜>",
        ..JSON_CALL
    },
    CallForm {
        family: "JSON between marks (DeepSeek V3.1)",
        open: "<｜tool▁calls▁begin｜>",
        before: "<｜tool▁call▁begin｜>",
        middle: "<｜tool▁sep｜>",
        after: "<｜tool▁call▁end｜>",
        separator: "",
        close: "<｜tool▁calls▁end｜>",
        ..JSON_CALL
    },
    CallForm {
        family: "names and values between marks (Gemma 4)",
        before: "<|tool_call>call:",
        middle: "{",
        arguments: ArgumentSyntax::Literals(MARKED),
        after: "}<tool_call|>",
        separator: "",
        ..JSON_CALL
    },
    CallForm {
        family: "a list of Python calls between marks (LFM2.5)",
        open: "<|tool_call_start|>[",
        before: "",
        middle: "(",
        arguments: ArgumentSyntax::Literals(PYTHON),
        after: ")",
        separator: ", ",
        close: "]<|tool_call_end|>",
        ..JSON_CALL
    },
    CallForm {
        family: "lines of Python calls in <function_calls> (OLMo 3)",
        open: "<function_calls>",
        before: "",
        middle: "(",
        arguments: ArgumentSyntax::Literals(PYTHON),
        after: ")",
        close: "</function_calls>",
        ..JSON_CALL
    },
    CallForm {
        family: "a JSON object alone (Llama 3.1 to 3.3)",
        at_start: true,
        before: "{\"name\": \"",
        middle: "\", \"parameters\": ",
        after: "}",
        separator: "",
        most: 1,
        ..JSON_CALL
    },
];

/// A call in an answer of channels. Templates put the recipient in front of the channel.
pub(crate) const CHANNEL_CALL: CallForm = CallForm {
    family: "messages in channels (GPT-OSS)",
    in_channels: true,
    before: "<|channel|>commentary to=functions.",
    middle: " <|constrain|>json<|message|>",
    after: "",
    separator: "",
    most: 1,
    ..JSON_CALL
};

impl CallForm {
    /// The text that begins the first call.
    pub fn trigger(&self) -> &'static str {
        first_mark(if self.open.is_empty() { self.before } else { self.open })
    }

    /// Whether calls are JSON between marks. Models of such a family often leave the marks out.
    pub fn writes_json(&self) -> bool {
        self.arguments == ArgumentSyntax::Json && !self.at_start && !self.in_channels
    }

    /// The fixed texts of calls.
    pub fn texts(&self) -> [&'static str; 9] {
        let [first, second, third] = match self.arguments {
            ArgumentSyntax::Json => [""; 3],
            ArgumentSyntax::Tagged(tags) => [tags.before, tags.middle, tags.after],
            ArgumentSyntax::Literals(syntax) => [syntax.quote.unwrap_or_default(), "", ""],
        };
        let id = match self.id {
            CallId::None => "",
            CallId::BehindName(mark) | CallId::BehindArguments(mark) => mark,
        };
        let Self { open, before, middle, after, close, .. } = *self;
        [open, before, middle, after, close, id, first, second, third]
    }
}

/// The beginning of a fixed text, up to white space, a quote or another bracket.
pub(crate) fn first_mark(text: &str) -> &str {
    let end = text.char_indices().skip(1).find(|(_, letter)| "\n\"{[".contains(*letter));
    &text[..end.map_or(text.len(), |(at, _)| at)]
}

/// Characters of a function's name.
pub fn is_of_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "_-.".contains(letter)
}

/// Whether a tagged argument with this schema is a text, which is written as it is.
pub(crate) fn is_plain(property: &Value) -> bool {
    property["type"] == "string"
}
