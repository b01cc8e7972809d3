//! How families of models write calls of tools. One table serves three ends: the grammar that an
//! answer with calls keeps to, the reader of such answers, and finding a release's family.

use super::AnswerFormat;
use super::channels;
use super::grammar::FormatRefused;
use super::reasoning::ThinkingMarks;
use super::special::SpecialTokens;
use serde_json::{Map, Value};
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
    /// A member that conversations hold behind the arguments, with an id of nine characters.
    pub id_before: Option<&'static str>,
    pub after: &'static str,
    pub separator: &'static str,
    pub close: &'static str,
    pub most: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentsForm {
    /// A JSON object.
    Json,
    /// Each argument by itself: `before`, its name, `middle`, its value, `after`. Texts are written
    /// as they are, other values as JSON.
    Tagged { before: &'static str, middle: &'static str, after: &'static str },
}

pub(super) const JSON_CALL: CallFormat = CallFormat {
    family: "JSON in <tool_call> (Hermes, Qwen 2.5 and 3)",
    at_start: false,
    in_channels: false,
    open: "",
    before: "<tool_call>\n{\"name\": \"",
    middle: "\", \"arguments\": ",
    arguments: ArgumentsForm::Json,
    id_before: None,
    after: "}\n</tool_call>",
    separator: "\n",
    close: "",
    most: MOST_CALLS,
};

/// The first format that reads what a template writes is the release's.
pub const FORMATS: [CallFormat; 8] = [
    JSON_CALL,
    CallFormat {
        family: "XML in <tool_call> (Qwen3-Coder, Qwen 3.5)",
        before: "<tool_call>\n<function=",
        middle: ">\n",
        arguments: ArgumentsForm::Tagged {
            before: "<parameter=",
            middle: ">\n",
            after: "\n</parameter>\n",
        },
        after: "</function>\n</tool_call>",
        ..JSON_CALL
    },
    CallFormat {
        family: "keys and values in <tool_call> (GLM 4.5)",
        before: "<tool_call>",
        middle: "\n",
        arguments: ArgumentsForm::Tagged {
            before: "<arg_key>",
            middle: "</arg_key>\n<arg_value>",
            after: "</arg_value>\n",
        },
        after: "</tool_call>",
        ..JSON_CALL
    },
    CallFormat {
        family: "a list behind [TOOL_CALLS] (Mistral v3, Nemo)",
        open: "[TOOL_CALLS][",
        before: "{\"name\": \"",
        id_before: Some(", \"id\": \""),
        after: "}",
        separator: ", ",
        close: "]",
        ..JSON_CALL
    },
    CallFormat {
        family: "[TOOL_CALLS] and [ARGS] (Mistral v11 and later)",
        before: "[TOOL_CALLS]",
        middle: "[ARGS]",
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

    /// Whether a tokenizer with these marks writes a call's beginning as a token of its own, so
    /// that no text of an answer is taken for one.
    pub(super) fn is_marked(&self, marks: &SpecialTokens) -> bool {
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
        let mut grammar = LarkGrammar { marks, rules: String::new(), parts: Vec::new() };
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
        let head = grammar.literal(&format!("{}{}{}", self.before, tool.name, self.middle));
        let arguments = match self.arguments {
            ArgumentsForm::Json => grammar.part(AnswerFormat::Schema(tool.parameters.clone())),
            ArgumentsForm::Tagged { .. } => self.tagged_arguments(grammar, at, tool)?,
        };
        let id = self.id_before.map_or_else(String::new, |before| {
            format!("({} /[a-zA-Z0-9]{{9}}/ \"\\\"\")?", grammar.literal(before))
        });
        let after = grammar.literal(self.after);
        let _ = writeln!(grammar.rules, "call_{at}: {head} {arguments} {id} {after}");
        Ok(())
    }

    /// The properties in the schema's order; those that are not required may be left out.
    fn tagged_arguments(
        &self,
        grammar: &mut LarkGrammar,
        at: usize,
        tool: &ToolDefinition,
    ) -> Result<String, FormatRefused> {
        let ArgumentsForm::Tagged { before, middle, after } = self.arguments else {
            return Ok(String::new());
        };
        let schema = ArgumentsSchema::read(&tool.parameters)?;
        let mut all = String::new();
        for (n, (name, property)) in schema.properties.iter().enumerate() {
            let head = grammar.literal(&format!("{before}{name}{middle}"));
            let value = match TaggedValue::of(property)? {
                TaggedValue::Text => {
                    // The text ends where the mark behind it begins.
                    let end = after.trim_end();
                    let rule = format!("text_{at}_{n}");
                    let escaped = expression(end);
                    let _ = writeln!(grammar.rules, "{rule}[lazy]: /(?s:.*){escaped}/");
                    format!("{rule} {}", grammar.literal(&after[end.len()..]))
                }
                TaggedValue::OneOf(texts) => {
                    let texts: Vec<String> = texts.iter().map(|t| grammar.literal(t)).collect();
                    format!("({}) {}", texts.join(" | "), grammar.literal(after))
                }
                TaggedValue::Json => {
                    let part = grammar.part(AnswerFormat::Schema(schema.alone(property)));
                    format!("{part} {}", grammar.literal(after))
                }
            };
            let optional = if schema.required.contains(name) { "" } else { "?" };
            let _ = write!(all, "({head} {value}){optional} ");
        }
        Ok(all)
    }
}

/// What a tagged argument's value is written as.
enum TaggedValue {
    Text,
    OneOf(Vec<String>),
    Json,
}

/// Rules of a text that are not kept where it is written as it is.
const TEXT_RULES: [&str; 5] = ["pattern", "format", "minLength", "maxLength", "allOf"];

impl TaggedValue {
    fn of(property: &Value) -> Result<Self, FormatRefused> {
        if !is_text(property) {
            return Ok(Self::Json);
        }
        if let Some(rule) = TEXT_RULES.into_iter().find(|rule| property.get(rule).is_some()) {
            let why = format!(
                "has a text with the rule {rule}, which this model's form of calls \
                cannot keep to: leave {rule} out"
            );
            return Err(FormatRefused(why));
        }
        let constant = property.get("const").map(std::slice::from_ref);
        let Some(values) = property["enum"].as_array().map(Vec::as_slice).or(constant) else {
            return Ok(Self::Text);
        };
        Ok(Self::OneOf(values.iter().filter_map(Value::as_str).map(str::to_owned).collect()))
    }
}

/// The beginning of a fixed text, up to white space, a quote or another bracket.
pub(super) fn first_mark(text: &str) -> &str {
    let end = text.char_indices().skip(1).find(|(_, letter)| "\n\"{[".contains(*letter));
    &text[..end.map_or(text.len(), |(at, _)| at)]
}

/// Whether a tagged argument with this schema is a text, which is written as it is.
pub(super) fn is_text(property: &Value) -> bool {
    property["type"] == "string"
}

/// The schema of a call's arguments, where each argument is written by itself.
pub(super) struct ArgumentsSchema {
    pub properties: Map<String, Value>,
    required: Vec<String>,
    /// Members that properties may refer to.
    definitions: Map<String, Value>,
}

impl ArgumentsSchema {
    pub(super) fn read(schema: &str) -> Result<Self, FormatRefused> {
        let refused = |why: &str| FormatRefused(why.to_owned());
        let schema: Value =
            serde_json::from_str(schema).map_err(|_| refused("must be a JSON schema"))?;
        let Value::Object(mut members) = schema else {
            return Err(refused("must be a JSON schema of an object"));
        };
        let mut found =
            Self { properties: Map::new(), required: Vec::new(), definitions: Map::new() };
        for (keyword, value) in std::mem::take(&mut members) {
            match (keyword.as_str(), value) {
                ("type", kind) if kind == "object" => {}
                ("properties", Value::Object(properties)) => found.properties = properties,
                ("required", Value::Array(names)) => {
                    let names = names.iter().filter_map(Value::as_str);
                    found.required = names.map(str::to_owned).collect();
                }
                ("$defs" | "definitions", definitions) => {
                    found.definitions.insert(keyword, definitions);
                }
                ("additionalProperties" | "title" | "description" | "$schema", _) => {}
                _ => {
                    let why = format!(
                        "has the rule {keyword} beside properties, which this \
                        model's form of calls cannot keep to"
                    );
                    return Err(FormatRefused(why));
                }
            }
        }
        let unknown = found.required.iter().find(|name| !found.properties.contains_key(*name));
        match unknown {
            Some(_) => Err(refused("requires a property that it does not describe")),
            None => Ok(found),
        }
    }

    /// The schema of one property with all that it may refer to.
    fn alone(&self, property: &Value) -> String {
        let mut property = property.clone();
        if let Some(members) = property.as_object_mut() {
            members.extend(self.definitions.clone());
        }
        property.to_string()
    }
}

/// White space behind a thought: it has no end that text would show.
const SPACE: &str = r"space: /\s{0,4}/";

/// The expression of a text.
fn expression(text: &str) -> String {
    let mut expression = String::new();
    for letter in text.chars() {
        match letter {
            '\n' => expression.push_str(r"\n"),
            '<' | '>' => expression.push(letter),
            other => {
                expression.extend(other.is_ascii_punctuation().then_some('\\'));
                expression.push(other);
            }
        }
    }
    expression
}

/// A grammar in Lark's syntax while it is written.
struct LarkGrammar<'a> {
    marks: &'a SpecialTokens,
    /// All rules but the first.
    rules: String,
    /// Formats of their own inside it.
    parts: Vec<AnswerFormat>,
}

impl LarkGrammar<'_> {
    fn starting_with(self, start: &str) -> AnswerFormat {
        let grammar = format!("start: {start}\n{}", self.rules);
        AnswerFormat::Nested { grammar, parts: self.parts }
    }

    fn part(&mut self, part: AnswerFormat) -> String {
        self.parts.push(part);
        format!("@part_{}", self.parts.len() - 1)
    }

    /// A text, in which the tokenizer's marks are tokens.
    fn literal(&self, text: &str) -> String {
        let (mut written, mut plain, mut rest) = (String::new(), String::new(), text);
        let flush = |plain: &mut String, written: &mut String| {
            if !plain.is_empty() {
                let _ = write!(written, "{} ", Value::from(std::mem::take(plain)));
            }
        };
        while let Some(letter) = rest.chars().next() {
            if let Some(mark) = self.marks.at_start_of(rest) {
                flush(&mut plain, &mut written);
                let _ = write!(written, "<[{}]> ", mark.id);
                rest = &rest[mark.text.len()..];
            } else {
                plain.push(letter);
                rest = &rest[letter.len_utf8()..];
            }
        }
        flush(&mut plain, &mut written);
        written
    }

    /// The messages with these headers that may stand before the last one of an answer.
    fn messages_before(&mut self, headers: &[&str]) -> String {
        let headers: Vec<String> = headers.iter().map(|header| self.literal(header)).collect();
        let (headers, next) = (headers.join(" | "), self.literal(channels::NEXT));
        let _ = writeln!(self.rules, "words: /(?s:.+)/\nmessage: ({headers}) words? {next}");
        "message*".into()
    }

    /// What may be thought before the answer.
    fn thought(&mut self, thinking: Option<ThinkingStart>) -> String {
        let Some(ThinkingStart { marks: ThinkingMarks { open, close, .. }, opened }) = thinking
        else {
            return String::new();
        };
        let body = if self.marks.at_start_of(close).is_some() {
            format!("thought: /(?s:.+)/\nthinking: thought? {}\n", self.literal(close))
        } else {
            let close = expression(close);
            format!("thinking[lazy]: /(?s:.*){close}/\n")
        };
        self.rules.push_str(&body);
        if opened { "thinking".into() } else { format!("({} thinking)?", self.literal(open)) }
    }
}

/// The format of an answer that keeps to `format` once its model has thought.
pub(super) fn after_thinking(
    format: AnswerFormat,
    thinking: ThinkingStart,
    marks: &SpecialTokens,
) -> AnswerFormat {
    let mut grammar = LarkGrammar { marks, rules: format!("{SPACE}\n"), parts: Vec::new() };
    let thought = grammar.thought(Some(thinking));
    let part = grammar.part(format);
    grammar.starting_with(&format!("{thought} space {part}"))
}

/// The format of an answer in channels whose last message keeps to `format`. `thinks`: thoughts may
/// stand before it.
pub(super) fn in_last_message(
    format: AnswerFormat,
    thinks: bool,
    marks: &SpecialTokens,
) -> AnswerFormat {
    let mut grammar = LarkGrammar { marks, rules: String::new(), parts: Vec::new() };
    let thought = || grammar.messages_before(&[channels::THOUGHT.open]);
    let thoughts = thinks.then(thought).unwrap_or_default();
    let (last, part) = (grammar.literal(channels::FINAL), grammar.part(format));
    grammar.starting_with(&format!("{thoughts} {last} {part}"))
}
