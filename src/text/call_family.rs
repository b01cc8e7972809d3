//! Which family's form of tool calls a release's template writes.

use super::chat_template::{ChatTemplate, PromptExtras};
use super::error::Result;
use super::forms::tool_calls::{CALL_FORMS, CHANNEL_CALL, CallForm, ToolDefinition};
use super::reader::{ReadCall, read_calls};
use super::tokenizer::SpecialTokens;
use serde_json::{Value, json};

/// What a template writes for a question, and for the call that answers it.
pub struct WrittenExchange {
    /// The question, with the prompt for an answer.
    pub prompt: String,
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
        let write = |messages: &Value, prompts| self.render_with(messages, &extras, prompts);
        let function = json!({ "name": name, "arguments": self.call_arguments(arguments) });
        let calls = json!([{ "id": "call00000", "type": "function", "function": function }]);
        let answer = |content: Value| json!({ "role": "assistant", "content": content, "tool_calls": calls });
        let answers = [answer(Value::Null), answer(json!(""))].into_iter();
        let answered = answers.filter_map(|answer| write(&json!([question, answer]), false).ok());
        let answered = answered.collect();
        Ok(WrittenExchange { prompt: write(&json!([question]), true)?, answered })
    }
}

impl WrittenExchange {
    /// The calls that were written, as answers are read.
    pub fn calls(&self, form: CallForm, tools: &[ToolDefinition]) -> Vec<ReadCall> {
        let written = self.answered.iter().filter_map(|text| self.beginning(form, text));
        let mut read = written.map(|text| read_calls(form, tools, text).0);
        read.find(|calls| !calls.is_empty()).unwrap_or_default()
    }

    /// The text from the first call on.
    fn beginning<'a>(&self, form: CallForm, answered: &'a str) -> Option<&'a str> {
        let common = self.prompt.chars().zip(answered.chars()).take_while(|(a, b)| a == b);
        let common: usize = common.map(|(letter, _)| letter.len_utf8()).sum();
        if form.in_channels {
            return Some(&answered[common..]);
        }
        let trigger = form.trigger();
        // The beginnings of both may share the first letters of a mark.
        let from = (common.saturating_sub(trigger.len())..=common)
            .find(|at| answered.is_char_boundary(*at))
            .unwrap_or(common);
        let at = answered[from..].find(trigger)?;
        Some(&answered[from + at..])
    }
}

/// The form in which a template writes calls, if it writes definitions of tools too and the
/// tokenizer knows the form's marks. The template writes a call, which has to be read back.
pub(super) fn call_form(template: &ChatTemplate, marks: &SpecialTokens) -> Option<CallForm> {
    let schema = json!({
        "type": "object",
        "properties": { "text0": { "type": "string" }, "count0": { "type": "integer" } },
        "required": ["text0", "count0"],
    });
    let function =
        json!({ "name": "function0", "description": "description0", "parameters": schema });
    let parameters = schema.to_string();
    let tools = [ToolDefinition { name: "function0".into(), parameters, strict: true }];
    let definitions = [json!({ "type": "function", "function": function })];
    let arguments = json!({ "text0": "value0", "count0": 3 });
    let call = ("function0", &arguments);
    let written = template.write_call(&definitions, "question0", call).ok()?;
    let words = ["function0", "description0", "text0", "count0"];
    if !words.into_iter().all(|word| written.prompt.contains(word)) {
        return None;
    }
    let is_read = |form: CallForm| {
        let calls = written.calls(form, &tools);
        let [ReadCall { name, arguments: text }] = &calls[..] else { return false };
        let read = serde_json::from_str::<Value>(text);
        name == "function0" && read.is_ok_and(|read| read == arguments)
    };
    // Where a call begins with a token of its own, no text of an answer is taken for one.
    let is_marked = |form: &CallForm| form.at_start || marks.at_start_of(form.trigger()).is_some();
    let mut known = CALL_FORMS.into_iter().chain([CHANNEL_CALL]);
    known.find(|form| is_marked(form) && is_read(*form))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::forms::tool_calls::MOST_CALLS;
    use crate::testing;
    use crate::{AnswerFormat, AnswerPart, CallRule, ChatMessage, TextModel};

    /// Tokens of the marks of all forms, and of thoughts.
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

    /// A template that writes tools, with `call` as its way to write one.
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
        for (form, call) in CALL_FORMS.iter().zip(CALLS) {
            assert_eq!(model(call, "", &MARKS).calls, Some(*form), "{call}");
            // Without tokens of their own, marks are text that any answer may have.
            let unmarked = model(call, "", &[]).calls;
            assert_eq!(unmarked.is_some(), form.at_start, "{call}");
            let unwritten = template(call, "").replace("{{ tool | tojson }}", "");
            let metadata = testing::with_marks(&MARKS, &unwritten);
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
            strict: true,
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
        for (form, call) in CALL_FORMS.iter().zip(CALLS) {
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
            let (calls, behind) = read_calls(*form, &tools, &weather);
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
            let message = ChatMessage {
                role: "user".into(),
                content: Some("<think>".into()),
                ..ChatMessage::default()
            };
            let prompt = text.encode_chat(&[message]).unwrap();
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
    fn schemas_that_the_form_of_calls_cannot_keep_to_are_refused_or_loosened() {
        let text = model(CALLS[1], "", &MARKS);
        let rule = CallRule { required: true, only: None, most: 1 };
        for (schema, why, place) in [
            (json!({ "type": "object", "anyOf": [{}] }), "anyOf", "/anyOf"),
            (
                json!({ "type": "object", "properties": { "a": { "type": "string", "pattern": "b" } } }),
                "(at #/properties/a/pattern)",
                "/properties/a/pattern",
            ),
            (json!({ "type": "object", "required": ["a"] }), "does not describe", "/required"),
        ] {
            let parameters = schema.to_string();
            let tool = ToolDefinition { name: "f".into(), parameters, strict: true };
            let refused =
                text.call_grammar(std::slice::from_ref(&tool), &rule, None).unwrap().unwrap_err();
            assert!(refused.0.contains(why), "{schema}: {}", refused.0);
            let loose = ToolDefinition { strict: false, ..tool };
            assert_eq!(text.rules_left_out(std::slice::from_ref(&loose)), [(0, place.to_owned())]);
            let grammar = text.call_grammar(&[loose], &rule, None).unwrap().unwrap();
            assert!(allows(
                &text,
                &grammar,
                "<tool_call>\n<function=f>\n</function>\n</tool_call>"
            ));
        }
    }
}
