//! How families of models write calls of tools. One table serves three ends: the grammar that an
//! answer with calls keeps to, the reader of such answers, and finding a release's family.

use crate::AnswerFormat;
use crate::grammar::compile::FormatRefused;
use crate::grammar::lark::{LarkGrammar, SPACE};
use crate::grammar::literals::LiteralForm;
use crate::grammar::tagged::ArgumentTags;
use crate::reader::channels;
use crate::reader::reasoning::ThinkingMarks;
use crate::tokenizer::SpecialTokens;
use std::fmt::Write;

/// A function that a client offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolDefinition {
    pub name: String,
    /// The JSON schema of its arguments, as text with its members in the client's order.
    pub parameters: String,
}

/// Which calls an answer may or must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRule {
    /// An answer without a call is none.
    pub required: bool,
    /// The only function that may be called.
    pub only: Option<String>,
    /// Most calls in one answer.
    pub most: usize,
}

/// Calls in one answer: as many as a conversation may bring back.
pub const MOST_CALLS: usize = 64;

/// How a family writes a call: `before`, the name, `middle`, the arguments, `after`. Several stand
/// between `open` and `close`, with `separator` between two. Readers take any white space where
/// these texts have some, or could have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallFormat {
    /// For messages to operators.
    pub family: &'static str,
    /// Whether a call can only begin the answer, because its first character is an ordinary one.
    pub at_start: bool,
    /// Whether a call is a message among others of the answer, as `channels` says.
    pub in_channels: bool,
    pub open: &'static str,
    pub before: &'static str,
    pub middle: &'static str,
    pub arguments: ArgumentsForm,
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

impl CallId {
    /// The rules of what may stand behind the name, and behind the arguments.
    fn rules(self, grammar: &LarkGrammar) -> [String; 2] {
        const ID: &str = "/[a-zA-Z0-9]{9}/";
        match self {
            Self::None => [const { String::new() }; 2],
            Self::BehindName(mark) => [format!("({} {ID})?", grammar.literal(mark)), String::new()],
            Self::BehindArguments(mark) => {
                [String::new(), format!("({} {ID} \"\\\"\")?", grammar.literal(mark))]
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentsForm {
    /// A JSON object.
    Json,
    /// Each argument by itself. Texts are written as they are, other values as JSON.
    Tagged(ArgumentTags),
    /// Names and values in a notation of the family's own, up to the bracket that begins `after`.
    Literals(LiteralForm),
}

pub(crate) const JSON_CALL: CallFormat = CallFormat {
    family: "JSON in <tool_call> (Hermes, Qwen 2.5 and 3)",
    at_start: false,
    in_channels: false,
    open: "",
    before: "<tool_call>\n{\"name\": \"",
    middle: "\", \"arguments\": ",
    arguments: ArgumentsForm::Json,
    id: CallId::None,
    after: "}\n</tool_call>",
    separator: "\n",
    close: "",
    most: MOST_CALLS,
};

/// The first format that reads what a template writes is the release's.
pub const FORMATS: [CallFormat; 13] = [
    JSON_CALL,
    CallFormat {
        family: "XML in <tool_call> (Qwen3-Coder, Qwen 3.5)",
        before: "<tool_call>\n<function=",
        middle: ">\n",
        arguments: ArgumentsForm::Tagged(ArgumentTags {
            before: "<parameter=",
            middle: ">\n",
            after: "\n</parameter>\n",
        }),
        after: "</function>\n</tool_call>",
        ..JSON_CALL
    },
    CallFormat {
        family: "keys and values in <tool_call> (GLM 4.5)",
        before: "<tool_call>",
        middle: "\n",
        arguments: ArgumentsForm::Tagged(ArgumentTags {
            before: "<arg_key>",
            middle: "</arg_key>\n<arg_value>",
            after: "</arg_value>\n",
        }),
        after: "</tool_call>",
        ..JSON_CALL
    },
    CallFormat {
        family: "keys and values in <tool_call> without line breaks (GLM 4.7)",
        before: "<tool_call>",
        middle: "",
        arguments: ArgumentsForm::Tagged(ArgumentTags {
            before: "<arg_key>",
            middle: "</arg_key><arg_value>",
            after: "</arg_value>",
        }),
        after: "</tool_call>",
        separator: "",
        ..JSON_CALL
    },
    CallFormat {
        family: "a list behind [TOOL_CALLS] (Mistral v3, Nemo)",
        open: "[TOOL_CALLS][",
        before: "{\"name\": \"",
        id: CallId::BehindArguments(", \"id\": \""),
        after: "}",
        separator: ", ",
        close: "]",
        ..JSON_CALL
    },
    CallFormat {
        family: "[TOOL_CALLS] and [ARGS] (Mistral v13 and later)",
        before: "[TOOL_CALLS]",
        middle: "[ARGS]",
        after: "",
        separator: "",
        ..JSON_CALL
    },
    CallFormat {
        family: "[TOOL_CALLS], [CALL_ID] and [ARGS] (Mistral v11)",
        before: "[TOOL_CALLS]",
        middle: "[ARGS]",
        id: CallId::BehindName("[CALL_ID]"),
        after: "",
        separator: "",
        ..JSON_CALL
    },
    CallFormat {
        family: "JSON in a code block between marks (DeepSeek V3 and R1)",
        open: "<｜tool▁calls▁begin｜>",
        before: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle: "\n```json\n",
        after: "\n```<｜tool▁call▁end｜>",
        close: "<｜tool▁calls▁end｜>",
        ..JSON_CALL
    },
    CallFormat {
        family: "JSON between marks (DeepSeek V3.1)",
        open: "<｜tool▁calls▁begin｜>",
        before: "<｜tool▁call▁begin｜>",
        middle: "<｜tool▁sep｜>",
        after: "<｜tool▁call▁end｜>",
        separator: "",
        close: "<｜tool▁calls▁end｜>",
        ..JSON_CALL
    },
    CallFormat {
        family: "names and values between marks (Gemma 4)",
        before: "<|tool_call>call:",
        middle: "{",
        arguments: ArgumentsForm::Literals(LiteralForm::Marked { quote: "<|\"|>" }),
        after: "}<tool_call|>",
        separator: "",
        ..JSON_CALL
    },
    CallFormat {
        family: "a list of Python calls between marks (LFM2.5)",
        open: "<|tool_call_start|>[",
        before: "",
        middle: "(",
        arguments: ArgumentsForm::Literals(LiteralForm::Python),
        after: ")",
        separator: ", ",
        close: "]<|tool_call_end|>",
        ..JSON_CALL
    },
    CallFormat {
        family: "lines of Python calls in <function_calls> (OLMo 3)",
        open: "<function_calls>",
        before: "",
        middle: "(",
        arguments: ArgumentsForm::Literals(LiteralForm::Python),
        after: ")",
        close: "</function_calls>",
        ..JSON_CALL
    },
    CallFormat {
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

/// What an answer begins with where its model thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinkingStart {
    pub marks: ThinkingMarks,
    /// The prompt ends with the opening mark.
    pub opened: bool,
}

impl CallFormat {
    /// The text that begins the first call.
    pub fn trigger(&self) -> &'static str {
        first_mark(if self.open.is_empty() { self.before } else { self.open })
    }

    /// The fixed texts of calls.
    pub(crate) fn texts(&self) -> [&'static str; 9] {
        let [first, second, third] = match self.arguments {
            ArgumentsForm::Json | ArgumentsForm::Literals(LiteralForm::Python) => [""; 3],
            ArgumentsForm::Tagged(tags) => [tags.before, tags.middle, tags.after],
            ArgumentsForm::Literals(LiteralForm::Marked { quote }) => [quote, "", ""],
        };
        let id = match self.id {
            CallId::None => "",
            CallId::BehindName(mark) | CallId::BehindArguments(mark) => mark,
        };
        let Self { open, before, middle, after, close, .. } = *self;
        [open, before, middle, after, close, id, first, second, third]
    }

    /// Whether a tokenizer with these marks writes a call's beginning as a token of its own, so
    /// that no text of an answer is taken for one.
    pub(crate) fn is_marked(&self, marks: &SpecialTokens) -> bool {
        self.at_start || marks.at_start_of(self.trigger()).is_some()
    }

    /// The format of an answer that calls `tools` by the rule.
    pub fn format(
        &self,
        tools: &[ToolDefinition],
        rule: &CallRule,
        thinking: Option<ThinkingStart>,
        marks: &SpecialTokens,
    ) -> Result<AnswerFormat, FormatRefused> {
        let mut grammar = LarkGrammar::new(marks);
        let called = |tool: &&ToolDefinition| rule.only.as_ref().is_none_or(|n| *n == tool.name);
        let mut names = Vec::new();
        for (at, tool) in tools.iter().enumerate().filter(|(_, tool)| called(tool)) {
            self.add_tool(&mut grammar, at, tool)?;
            names.push(format!("call_{at}"));
        }
        let thought = if self.in_channels {
            grammar.messages_before(&[channels::THOUGHT.open, channels::PREAMBLE])
        } else {
            grammar.thought(thinking)
        };
        let text = if self.at_start { r"/(?s:\s*[^\s{].*)/" } else { "/(?s:.+)/" };
        let _ = writeln!(grammar.rules, "call: {}\ntext: {text}", names.join(" | "));
        let [open, separator, close] =
            [self.open, self.separator, self.close].map(|text| grammar.literal(text));
        let more = match rule.most.min(self.most) {
            0 | 1 => String::new(),
            most => format!("({separator} call){{0,{}}}", most - 1),
        };
        let _ = writeln!(grammar.rules, "calls: {open} call {more} {close}\n{SPACE}");
        let answer = match (rule.required, self.at_start) {
            (true, _) if self.in_channels => "calls",
            (false, _) if self.in_channels => {
                let last = grammar.literal(channels::FINAL);
                let _ = writeln!(grammar.rules, "last: {last} text?");
                "(calls | last)"
            }
            (true, _) if thinking.is_some() => "space calls",
            (true, _) => "calls",
            (false, true) => "(space calls | text)?",
            (false, false) => "text? calls?",
        };
        Ok(grammar.starting_with(&format!("{thought} {answer}")))
    }

    fn add_tool(
        &self,
        grammar: &mut LarkGrammar,
        at: usize,
        tool: &ToolDefinition,
    ) -> Result<(), FormatRefused> {
        let name = grammar.literal(&format!("{}{}", self.before, tool.name));
        let [middle, after] = [self.middle, self.after].map(|text| grammar.literal(text));
        let arguments = match self.arguments {
            ArgumentsForm::Json => grammar.part(AnswerFormat::Schema(tool.parameters.clone())),
            ArgumentsForm::Tagged(tags) => tags.rule(grammar, at, tool)?,
            ArgumentsForm::Literals(form) => form.rule(grammar, at, tool)?,
        };
        let [ahead, behind] = self.id.rules(grammar);
        let call = [&name, &ahead, &middle, &arguments, &behind, &after].map(String::as_str);
        let _ = writeln!(grammar.rules, "call_{at}: {}", call.join(" "));
        Ok(())
    }
}

/// The beginning of a fixed text, up to white space, a quote or another bracket.
pub(crate) fn first_mark(text: &str) -> &str {
    let end = text.char_indices().skip(1).find(|(_, letter)| "\n\"{[".contains(*letter));
    &text[..end.map_or(text.len(), |(at, _)| at)]
}
