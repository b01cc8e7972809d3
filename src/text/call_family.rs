//! Calls of tools by a release: which family's format its template writes, and how answers of its
//! model are constrained and read.

use super::chat_template::{ChatTemplate, PromptExtras};
use super::tokenizer::SpecialTokens;
use super::{AnswerFormat, FormatRefused, Result, TextModel};
use crate::forms::tool_calls::{CallFormat, CallRule, FORMATS, ThinkingStart, ToolDefinition};
use crate::grammar::lark::{after_thinking, in_last_message};
use crate::reader::answer::{AnswerForm, AnswerReader, MarkedParts};
use crate::reader::channels::{self, ChannelReader};
use crate::reader::reasoning::ThoughtReader;
use crate::reader::tool_calls::{AnswerPart, CallReader, plain_arguments};
use serde_json::{Value, json};
use std::borrow::Cow;

/// A call as it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadCall {
    pub name: String,
    /// A JSON text.
    pub arguments: String,
}

impl TextModel {
    /// How the answer to this prompt begins, if the model thinks: templates may write the opening
    /// mark themselves.
    pub fn thinking_start(&self, prompt: &[u32]) -> Option<ThinkingStart> {
        let marks = self.thinking?;
        let open = marks.open.trim_end();
        let visible = |id: &u32| !self.tokenizer.token_bytes(*id, false).trim_ascii().is_empty();
        let last = prompt.iter().rposition(visible)?;
        let mark = self.markup.at_start_of(open).filter(|mark| mark.text == open);
        let opened = if let Some(mark) = mark {
            // The text of the mark in a client's message is other tokens.
            prompt[last] == mark.id
        } else {
            let tail = &prompt[last.saturating_sub(open.len())..=last];
            self.tokenizer.decode(tail, false).is_ok_and(|tail| tail.trim_end().ends_with(open))
        };
        Some(ThinkingStart { marks, opened })
    }

    /// The reader of an answer that may think, and may call these tools.
    pub fn reader(
        &self,
        thinking: Option<ThinkingStart>,
        tools: Option<&[ToolDefinition]>,
    ) -> AnswerReader {
        if self.has_channels() {
            let form = ChannelReader::new(thinking.is_some(), tools.is_some());
            let marks = self.specials_where(|text| channels::MARKS.contains(&text));
            return AnswerReader { form: AnswerForm::Channels(form), marks };
        }
        let calls = self.calls.filter(|_| tools.is_some());
        let reader = |format| CallReader::new(format, plain_arguments(tools.unwrap_or_default()));
        let mut texts: Vec<&str> = Vec::new();
        texts.extend(thinking.iter().flat_map(|start| [start.marks.open, start.marks.close]));
        texts.extend(calls.iter().flat_map(CallFormat::texts));
        let is_mark = |text: &str| texts.iter().any(|written| written.contains(text));
        let parts = MarkedParts {
            thoughts: thinking.map(|start| ThoughtReader::new(start.marks, start.opened)),
            calls: calls.map(reader),
        };
        AnswerReader { form: AnswerForm::Marked(parts.into()), marks: self.specials_where(is_mark) }
    }

    /// Whether the model's answers are messages in channels.
    fn has_channels(&self) -> bool {
        self.thinking == Some(channels::THOUGHT)
    }

    /// The ids of the special tokens with such a text.
    fn specials_where(&self, is_wanted: impl Fn(&str) -> bool) -> Vec<u32> {
        let found = self.markup.iter().filter(|token| token.special && is_wanted(&token.text));
        found.map(|token| token.id).collect()
    }

    /// The format of an answer that calls `tools` by the rule. `None` for a model whose calls have
    /// no known form.
    pub fn call_grammar(
        &self,
        tools: &[ToolDefinition],
        rule: &CallRule,
        thinking: Option<ThinkingStart>,
    ) -> Option<Result<AnswerFormat, FormatRefused>> {
        Some(self.calls?.format(tools, rule, thinking, &self.markup))
    }

    /// The format of an answer that keeps to `format` once its model has thought, if it thinks.
    pub fn format_after<'a>(
        &self,
        format: &'a AnswerFormat,
        thinking: Option<ThinkingStart>,
    ) -> Cow<'a, AnswerFormat> {
        match thinking {
            _ if self.has_channels() => {
                Cow::Owned(in_last_message(format.clone(), thinking.is_some(), &self.markup))
            }
            Some(start) => Cow::Owned(after_thinking(format.clone(), start, &self.markup)),
            None => Cow::Borrowed(format),
        }
    }
}

/// What a template writes for a question, and for the call that answers it.
pub struct WrittenExchange {
    /// The question, with the prompt for an answer.
    pub asked: String,
    /// Both messages. Some templates add to the content, others want none beside calls.
    answered: Vec<String>,
}

impl ChatTemplate {
    /// Writes a question with tools in OpenAI's form, and the call that answers it.
    pub fn write_call(
        &self,
        tools: &[Value],
        question: &str,
        (name, arguments): (&str, &Value),
    ) -> Result<WrittenExchange> {
        let tools = Some(Value::from(tools));
        let extras = PromptExtras { tools, ..PromptExtras::default() };
        let question = json!({ "role": "user", "content": question });
        let write = |messages: &Value, asks| self.render_with(messages, &extras, asks);
        let function = json!({ "name": name, "arguments": self.call_arguments(arguments) });
        let calls = json!([{ "id": "call00000", "type": "function", "function": function }]);
        let answer = |content: Value| json!({ "role": "assistant", "content": content, "tool_calls": calls });
        let answers = [answer(Value::Null), answer(json!(""))].into_iter();
        let answered = answers.filter_map(|answer| write(&json!([question, answer]), false).ok());
        let answered = answered.collect();
        Ok(WrittenExchange { asked: write(&json!([question]), true)?, answered })
    }
}

impl WrittenExchange {
    /// The calls that were written, as answers are read.
    pub fn calls(&self, format: CallFormat, tools: &[ToolDefinition]) -> Vec<ReadCall> {
        let written = self.answered.iter().filter_map(|text| self.beginning(format, text));
        let mut read = written.map(|text| read_calls(format, tools, text).0);
        read.find(|calls| !calls.is_empty()).unwrap_or_default()
    }

    /// The text from the first call on.
    fn beginning<'a>(&self, format: CallFormat, answered: &'a str) -> Option<&'a str> {
        let common = self.asked.chars().zip(answered.chars()).take_while(|(a, b)| a == b);
        let common: usize = common.map(|(letter, _)| letter.len_utf8()).sum();
        if format.in_channels {
            return Some(&answered[common..]);
        }
        let trigger = format.trigger();
        // The beginnings of both may share the first letters of a mark.
        let from = (common.saturating_sub(trigger.len())..=common)
            .find(|at| answered.is_char_boundary(*at))
            .unwrap_or(common);
        let at = answered[from..].find(trigger)?;
        Some(&answered[from + at..])
    }
}

/// The calls in a text that begins with one, and what is behind them.
pub fn read_calls(
    format: CallFormat,
    tools: &[ToolDefinition],
    text: &str,
) -> (Vec<ReadCall>, String) {
    let form = if format.in_channels {
        AnswerForm::Channels(ChannelReader::new(true, true))
    } else {
        let calls = Some(CallReader::new(format, plain_arguments(tools)));
        AnswerForm::Marked(MarkedParts { thoughts: None, calls }.into())
    };
    let mut reader = AnswerReader { form, marks: Vec::new() };
    let (mut calls, mut behind) = (Vec::<ReadCall>::new(), String::new());
    let parts = reader.push(text);
    for part in parts.into_iter().chain(reader.finish()) {
        match (part, calls.last_mut()) {
            (AnswerPart::Call { name }, _) => {
                calls.push(ReadCall { name, arguments: String::new() });
            }
            (AnswerPart::Arguments(more), Some(call)) => call.arguments.push_str(&more),
            (AnswerPart::Content(more), _) => behind.push_str(&more),
            _ => {}
        }
    }
    (calls, behind)
}

/// The format in which a template writes calls, if it writes definitions of tools too and the
/// tokenizer knows the format's marks. The template is asked to write a call, which has to be read
/// back.
pub(super) fn call_format(template: &ChatTemplate, marks: &SpecialTokens) -> Option<CallFormat> {
    let schema = json!({
        "type": "object",
        "properties": { "text0": { "type": "string" }, "count0": { "type": "integer" } },
        "required": ["text0", "count0"],
    });
    let function =
        json!({ "name": "function0", "description": "description0", "parameters": schema });
    let tools = [ToolDefinition { name: "function0".into(), parameters: schema.to_string() }];
    let definitions = [json!({ "type": "function", "function": function })];
    let arguments = json!({ "text0": "value0", "count0": 3 });
    let call = ("function0", &arguments);
    let written = template.write_call(&definitions, "question0", call).ok()?;
    let told = ["function0", "description0", "text0", "count0"];
    if !told.into_iter().all(|word| written.asked.contains(word)) {
        return None;
    }
    let is_read = |format: CallFormat| {
        let calls = written.calls(format, &tools);
        let [ReadCall { name, arguments: text }] = &calls[..] else { return false };
        let read = serde_json::from_str::<Value>(text);
        name == "function0" && read.is_ok_and(|read| read == arguments)
    };
    let mut known = FORMATS.into_iter().chain([channels::CALLS]);
    known.find(|format| format.is_marked(marks) && is_read(*format))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::testing;
    use super::*;
    use crate::forms::tool_calls::MOST_CALLS;

    /// Tokens of the marks of all formats, and of thoughts.
    pub const MARKS: [&str; 23] = [
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|tool_call>",
        "<tool_call|>",
        "<|\"|>",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<function_calls>",
        "</function_calls>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<think>",
        "</think>",
    ];

    /// A template that tells of tools, with `call` as its way to write one.
    fn template(call: &str, opens: &str) -> String {
        format!(
            "{{% for tool in tools or [] %}}{{{{ tool | tojson }}}}{{% endfor %}}\
             {{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content or '' }}}}\
             {{% for call in m.tool_calls or [] %}}{{% set f = call.function %}}{call}{{% endfor %}}\
             <|im_end|>\n{{% endfor %}}\
             {{% if add_generation_prompt %}}<|im_start|>assistant\n{opens}{{% endif %}}"
        )
    }

    const CALLS: [&str; 13] = [
        "<tool_call>\n{\"name\": \"{{ f.name }}\", \"arguments\": {{ f.arguments | tojson }}}\n</tool_call>",
        "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
        "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>",
        "[TOOL_CALLS][{\"name\": \"{{ f.name }}\", \"arguments\": {{ f.arguments | tojson }}, \"id\": \"{{ call.id }}\"}]",
        "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
        "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | dictsort %}{{ k }}:{% if v is string %}<|\"|>{{ v }}<|\"|>{% else %}{{ v }}{% endif %}{% if not loop.last %},{% endif %}{% endfor %}}<tool_call|>",
        "<|tool_call_start|>[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}{% if not loop.last %}, {% endif %}{% endfor %})]<|tool_call_end|>",
        "<function_calls>{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})</function_calls>",
        "{\"name\": \"{{ f.name }}\", \"parameters\": {{ f.arguments | tojson }}}",
    ];

    fn model(call: &str, opens: &str, marks: &[&str]) -> TextModel {
        testing::text_model(&testing::with_marks(marks, &template(call, opens)))
    }

    #[test]
    fn the_family_is_the_one_whose_calls_the_template_writes() {
        for (format, call) in FORMATS.iter().zip(CALLS) {
            assert_eq!(model(call, "", &MARKS).calls, Some(*format), "{call}");
            // Without tokens of their own, marks are text that any answer may have.
            let unmarked = model(call, "", &[]).calls;
            assert_eq!(unmarked.is_some(), format.at_start, "{call}");
            let untold = template(call, "").replace("{{ tool | tojson }}", "");
            let metadata = testing::with_marks(&MARKS, &untold);
            assert_eq!(testing::text_model(&metadata).calls, None, "{call}");
        }
        assert_eq!(model("{{ f.name }}({{ f.arguments }})", "", &MARKS).calls, None);
    }

    fn tools() -> Vec<ToolDefinition> {
        let schema = |properties: Value| json!({ "type": "object", "properties": properties, "required": ["city", "days"], "additionalProperties": false });
        let city = json!({ "type": "string" });
        let tool = |name: &str, days: Value| ToolDefinition {
            name: name.into(),
            parameters: schema(json!({ "city": city, "days": days })).to_string(),
        };
        vec![
            tool("weather", json!({ "type": "integer", "minimum": 1, "maximum": 9 })),
            tool("trains", json!({ "enum": [1, 2] })),
        ]
    }

    /// Whether the grammar allows every token of an answer, and its end behind it.
    fn allows(text: &TextModel, format: &AnswerFormat, answer: &str) -> bool {
        let place = text.compile(format).unwrap().start();
        let mut tokens = text.tokenizer.encode(answer, true).unwrap();
        tokens.push(text.eos_ids[0]);
        (0..tokens.len()).all(|at| {
            let mask = place.allowed_after(&tokens[..at]).unwrap();
            let id = tokens[at];
            mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
        })
    }

    /// What each family writes for a call of `weather`.
    fn written(text: &TextModel, name: &str, days: u32) -> String {
        let messages = |arguments: Value| {
            let function =
                json!({ "name": name, "arguments": text.template.call_arguments(&arguments) });
            json!([{ "role": "assistant", "content": null,
                "tool_calls": [{ "id": "abcdefghi", "type": "function", "function": function }] }])
        };
        let arguments = json!({ "city": "Oslo", "days": days });
        let all = text.template.render_raw(&messages(arguments), None, false).unwrap();
        let (_, call) = all.split_once("assistant\n").unwrap();
        call.split_once("<|im_end|>").unwrap().0.to_owned()
    }

    #[test]
    fn grammars_hold_exactly_what_the_rule_lets_the_template_write() {
        for (format, call) in FORMATS.iter().zip(CALLS) {
            let text = model(call, "", &MARKS);
            let tools = tools();
            let allows = |required: bool, only: Option<&str>, answer: &str| {
                let rule = CallRule { required, only: only.map(str::to_owned), most: MOST_CALLS };
                let grammar = text.call_grammar(&tools, &rule, None).unwrap().unwrap();
                allows(&text, &grammar, answer)
            };
            let (weather, trains) = (written(&text, "weather", 3), written(&text, "trains", 2));
            for (answer, required, auto, named) in [
                (weather.as_str(), true, true, true),
                (&trains, true, true, false),
                (&written(&text, "weather", 10), false, false, false),
                (&written(&text, "trains", 3), false, false, false),
                (&written(&text, "planes", 3), false, false, false),
                ("It rains.", false, true, false),
                ("", false, true, false),
            ] {
                assert_eq!(allows(true, None, answer), required, "{answer:?} required");
                assert_eq!(allows(false, None, answer), auto, "{answer:?} auto");
                assert_eq!(allows(true, Some("weather"), answer), named, "{answer:?} named");
            }
            let (calls, behind) = read_calls(*format, &tools, &weather);
            assert_eq!((calls.len(), behind.as_str()), (1, ""), "{weather:?}");
            let arguments: Value = serde_json::from_str(&calls[0].arguments).unwrap();
            assert_eq!(arguments, json!({ "city": "Oslo", "days": 3 }));
        }
    }

    #[test]
    fn one_call_only_where_several_are_not_wanted() {
        let text = model(CALLS[0], "", &MARKS);
        let (one, tools) = (written(&text, "weather", 3), tools());
        let two = format!("{one}\n{}", written(&text, "trains", 1));
        for (most, answer, expect) in [(1, &one, true), (1, &two, false), (2, &two, true)] {
            let rule = CallRule { required: true, only: None, most };
            let grammar = text.call_grammar(&tools, &rule, None).unwrap().unwrap();
            assert_eq!(allows(&text, &grammar, answer), expect, "{most}: {answer}");
        }
    }

    #[test]
    fn a_call_may_follow_a_thought() {
        let silent = "{% if false %}<think></think>{% endif %}";
        for (opens, begins) in [(silent, "<think>\n"), ("<think>\n{# </think> #}", "")] {
            let text = model(CALLS[0], opens, &MARKS);
            let asked = super::super::ChatMessage {
                role: "user".into(),
                content: Some("<think>".into()),
                name: None,
                tool_call_id: None,
                tool_calls: None,
                reasoning_content: None,
            };
            let prompt = text.encode_chat(&[asked]).unwrap();
            let thinking = text.thinking_start(&prompt);
            assert_eq!(thinking.map(|start| start.opened), Some(begins.is_empty()));
            let rule = CallRule { required: true, only: None, most: 1 };
            let grammar = text.call_grammar(&tools(), &rule, thinking).unwrap().unwrap();
            let call = written(&text, "weather", 3);
            assert!(allows(&text, &grammar, &format!("{begins}hm\n</think>\n\n{call}")));
            assert!(!allows(&text, &grammar, &format!("{begins}hm\n</think>\n\nIt rains.")));
            assert_eq!(allows(&text, &grammar, &call), !begins.is_empty());
            let mut reader = text.reader(thinking, Some(&tools()));
            let mut parts = reader.push(&format!("{begins}hm\n</think>\n\n{call}"));
            parts.extend(reader.finish());
            assert_eq!(parts[0], AnswerPart::Reasoning("hm".into()));
            assert_eq!(parts[1], AnswerPart::Call { name: "weather".into() });
        }
    }

    #[test]
    fn schemas_that_the_form_of_calls_cannot_keep_to_are_refused() {
        let text = model(CALLS[1], "", &MARKS);
        let rule = CallRule { required: true, only: None, most: 1 };
        for (schema, why) in [
            (json!({ "type": "object", "anyOf": [{}] }), "anyOf"),
            (
                json!({ "type": "object", "properties": { "a": { "type": "string", "pattern": "b" } } }),
                "pattern",
            ),
            (json!({ "type": "object", "required": ["a"] }), "does not describe"),
        ] {
            let tool = ToolDefinition { name: "f".into(), parameters: schema.to_string() };
            let refused = text.call_grammar(&[tool], &rule, None).unwrap().unwrap_err();
            assert!(refused.0.contains(why), "{schema}: {}", refused.0);
        }
    }
}
