//! Reads the tool calls of an answer while its tokens come, by the form of the model's family.

use super::arguments::ArgumentsReader;
use super::held::{Progress, beginning_at_end};
use super::part::AnswerPart;
use super::unmarked::{self, Unmarked};
use crate::forms::tool_calls::{
    CallForm, CallId, ToolDefinition, first_mark, is_of_name, is_plain,
};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Parameters whose arguments a family writes as they are, because they are texts, by function.
type PlainParameters = HashMap<String, HashSet<String>>;

fn plain_parameters(tools: &[ToolDefinition]) -> PlainParameters {
    let mut found = PlainParameters::new();
    for tool in tools {
        let schema: Value = serde_json::from_str(&tool.parameters).unwrap_or_default();
        let properties = schema["properties"].as_object().into_iter().flatten();
        let texts = properties.filter(|(_, property)| is_plain(property));
        found.entry(tool.name.clone()).or_default().extend(texts.map(|(name, _)| name.clone()));
    }
    found
}

/// Reads one answer. What is no call is content, byte for byte.
#[derive(Clone, Debug)]
pub(super) struct CallReader {
    form: CallForm,
    plain: Arc<PlainParameters>,
    /// The rest of a fixed text, which comes before `place`.
    expected: &'static str,
    place: CallPlace,
    /// Received, and not read.
    held: String,
    /// The function of the latest call.
    name: String,
    unmarked: Unmarked,
}

#[derive(Clone, Debug)]
enum CallPlace {
    /// No call has come. `begun`: some text that is not white space has.
    Content {
        begun: bool,
    },
    Name,
    /// Between a call's name and its arguments, where an id may follow this mark.
    IdAhead(&'static str),
    Arguments(ArgumentsReader),
    /// Behind a call's arguments, where an id may follow this mark.
    Id(&'static str),
    /// Behind a call.
    Next,
    /// Nothing that follows is part of a call.
    Rest,
}

impl CallReader {
    pub(super) fn new(form: CallForm, tools: &[ToolDefinition]) -> Self {
        let (plain, place) = (plain_parameters(tools).into(), CallPlace::Content { begun: false });
        let (held, name, unmarked) = (String::new(), String::new(), Unmarked::No);
        Self { form, plain, expected: "", place, held, name, unmarked }
    }

    /// Reads calls without marks, too, where the family writes JSON.
    pub(super) fn with_unmarked(mut self) -> Self {
        if self.form.writes_json() {
            self.unmarked = Unmarked::Possible;
        }
        self
    }

    pub(super) fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        loop {
            match self.advance(&mut parts) {
                Progress::Done => {}
                Progress::NeedsMore => return parts,
                Progress::Ended => self.after_arguments(),
                Progress::Lost => self.expect("", CallPlace::Rest),
            }
        }
    }

    /// What was held back, once nothing follows. Of a call that is cut off, the arguments that came
    /// are read already, and a part of a mark is not text.
    pub(super) fn finish(&mut self) -> Vec<AnswerPart> {
        let held = std::mem::take(&mut self.held);
        if self.unmarked == Unmarked::Begun
            && let Some(calls) = unmarked::calls(&held, |name| self.plain.contains_key(name))
        {
            return calls.into_iter().flat_map(AnswerPart::of_call).collect();
        }
        match self.place {
            CallPlace::Content { .. } | CallPlace::Rest if !held.is_empty() => {
                vec![AnswerPart::Content(held)]
            }
            _ => Vec::new(),
        }
    }

    fn advance(&mut self, parts: &mut Vec<AnswerPart>) -> Progress {
        if !self.expected.is_empty() {
            return self.fixed();
        }
        match self.place {
            CallPlace::Content { begun } => {
                if self.may_be_unmarked() {
                    return Progress::NeedsMore;
                }
                self.content(begun, parts)
            }
            CallPlace::Name => self.name(parts),
            CallPlace::IdAhead(mark) => self.id_ahead(mark),
            CallPlace::Arguments(ref mut reader) => reader.advance(&mut self.held, parts),
            CallPlace::Id(mark) => self.id(mark),
            CallPlace::Next => self.next(),
            CallPlace::Rest => {
                let held = std::mem::take(&mut self.held);
                parts.extend((!held.is_empty()).then_some(AnswerPart::Content(held)));
                Progress::NeedsMore
            }
        }
    }

    fn expect(&mut self, text: &'static str, place: CallPlace) {
        self.expected = text.trim_start();
        self.place = place;
    }

    fn expect_arguments(&mut self) -> Progress {
        let plain = self.plain.get(&self.name).cloned().unwrap_or_default();
        let reader = ArgumentsReader::new(self.form.arguments, plain);
        self.expect(self.form.middle, CallPlace::Arguments(reader));
        Progress::Done
    }

    fn after_arguments(&mut self) {
        match self.form.id {
            CallId::BehindArguments(mark) => self.place = CallPlace::Id(mark),
            CallId::None | CallId::BehindName(_) => self.expect(self.form.after, CallPlace::Next),
        }
    }

    /// Reads the characters of a fixed text. Each may have white space of any kind before it.
    fn fixed(&mut self) -> Progress {
        let mut read = 0;
        for letter in self.held.chars() {
            let Some(wanted) = self.expected.chars().next() else { break };
            if letter == wanted {
                self.expected = self.expected[letter.len_utf8()..].trim_start();
            } else if !letter.is_whitespace() {
                return Progress::Lost;
            }
            read += letter.len_utf8();
        }
        self.held.drain(..read);
        if self.expected.is_empty() { Progress::Done } else { Progress::NeedsMore }
    }

    /// Whether what is held may turn out to be calls without marks.
    fn may_be_unmarked(&mut self) -> bool {
        if self.unmarked == Unmarked::Possible {
            self.unmarked = unmarked::judge(&self.held, self.plain.keys());
        }
        self.unmarked != Unmarked::No
    }

    /// Shows text until a call begins. White space before a call belongs to the call.
    fn content(&mut self, begun: bool, parts: &mut Vec<AnswerPart>) -> Progress {
        let trigger = self.form.trigger();
        let found = if self.form.at_start {
            let visible = self.held.trim_start();
            (!begun && visible.starts_with(trigger)).then(|| self.held.len() - visible.len())
        } else {
            self.held.find(trigger)
        };
        let end = found.unwrap_or_else(|| self.held.len() - beginning_at_end(&self.held, trigger));
        let shown = self.held[..end].trim_end().len();
        if shown > 0 {
            parts.push(AnswerPart::Content(self.held[..shown].to_owned()));
            self.place = CallPlace::Content { begun: true };
        }
        self.held.drain(..if found.is_some() { end } else { shown });
        if found.is_none() {
            return Progress::NeedsMore;
        }
        match self.form.open {
            "" => self.expect(self.form.before, CallPlace::Name),
            open => self.expect(open, CallPlace::Next),
        }
        Progress::Done
    }

    /// Reads a function's name, which ends before any character that names do not have.
    fn name(&mut self, parts: &mut Vec<AnswerPart>) -> Progress {
        let visible = self.held.trim_start();
        match visible.find(|letter: char| !is_of_name(letter)) {
            None => return Progress::NeedsMore,
            Some(0) => return Progress::Lost,
            Some(end) => {
                self.name = visible[..end].to_owned();
                self.held = visible[end..].to_owned();
            }
        }
        parts.push(AnswerPart::Call { name: self.name.clone() });
        let CallId::BehindName(mark) = self.form.id else { return self.expect_arguments() };
        self.place = CallPlace::IdAhead(mark);
        Progress::Done
    }

    /// Leaves out the call's id and the mark before it, where they are.
    fn id_ahead(&mut self, mark: &str) -> Progress {
        let visible = self.held.trim_start();
        if self.form.middle.starts_with(visible) || mark.starts_with(visible) {
            return Progress::NeedsMore;
        }
        if let Some(rest) = visible.strip_prefix(mark) {
            let Some(end) = rest.find(|letter: char| !is_of_name(letter)) else {
                return Progress::NeedsMore;
            };
            self.held = rest[end..].to_owned();
        }
        self.expect_arguments()
    }

    /// Leaves out the member with the call's id, where there is one.
    fn id(&mut self, mark: &'static str) -> Progress {
        let visible = self.held.trim_start();
        match visible.chars().next() {
            None => return Progress::NeedsMore,
            Some('}') => self.expect(self.form.after, CallPlace::Next),
            Some(',') => self.expect(mark, CallPlace::Id(mark)),
            Some(letter) if is_of_name(letter) || letter == '"' => {
                self.held = visible[1..].to_owned();
            }
            Some(_) => return Progress::Lost,
        }
        Progress::Done
    }

    /// Behind a call, or behind the beginning of a list of calls.
    fn next(&mut self) -> Progress {
        let visible = self.held.trim_start();
        let visible = visible.strip_prefix(',').unwrap_or(visible).trim_start();
        let CallForm { before, close, most, .. } = self.form;
        if !close.is_empty() && visible.starts_with(close) {
            self.held = visible[close.len()..].to_owned();
            self.place = CallPlace::Rest;
            return Progress::Done;
        }
        // Without a mark of its own, a call begins with its name.
        let trigger = first_mark(before);
        let begins = match trigger {
            "" => visible.starts_with(is_of_name),
            _ => visible.starts_with(trigger),
        };
        if begins && most > 1 {
            self.held = visible.to_owned();
            self.expect(before, CallPlace::Name);
            return Progress::Done;
        }
        let may_begin = trigger.starts_with(visible) || close.starts_with(visible);
        if may_begin { Progress::NeedsMore } else { Progress::Lost }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forms::tool_calls::CALL_FORMS;
    use crate::testing;
    use serde_json::json;

    /// The content and the calls of an answer that came in these pieces.
    fn read(form: CallForm, pieces: &[&str]) -> (String, Vec<[String; 2]>) {
        read_by(reader(form), pieces)
    }

    fn reader(form: CallForm) -> CallReader {
        let schema = json!({
            "type": "object",
            "properties": { "text": { "type": "string" }, "count": { "type": "integer" } },
        });
        let parameters = schema.to_string();
        let tool = ToolDefinition { name: "f".into(), parameters, strict: true };
        CallReader::new(form, &[tool])
    }

    fn read_by(mut reader: CallReader, pieces: &[&str]) -> (String, Vec<[String; 2]>) {
        let mut parts: Vec<AnswerPart> =
            pieces.iter().flat_map(|piece| reader.push(piece)).collect();
        parts.extend(reader.finish());
        let (mut content, mut calls) = (String::new(), Vec::<[String; 2]>::new());
        for part in parts {
            match part {
                AnswerPart::Content(text) => content += &text,
                AnswerPart::Call { name } => calls.push([name, String::new()]),
                AnswerPart::Arguments(text) => calls.last_mut().unwrap()[1] += &text,
                AnswerPart::Reasoning(_) => panic!("calls are no thoughts"),
            }
        }
        (content, calls)
    }

    fn check(form: usize, text: &str, content: &str, calls: &[[&str; 2]]) {
        let calls: Vec<[String; 2]> = calls.iter().map(|call| call.map(str::to_owned)).collect();
        let expect = (content.to_owned(), calls);
        let form = CALL_FORMS[form];
        for pieces in testing::cuts(text) {
            assert_eq!(read(form, &pieces), expect, "{pieces:?}");
        }
    }

    #[test]
    fn calls_without_marks_are_read_where_they_are_the_whole_answer() {
        let one = r#"{"name": "f", "arguments": {"count": 9007199254740993, "text": "é"}}"#;
        let calls = [["f", r#"{"count": 9007199254740993, "text": "é"}"#]];
        let two = [calls[0], calls[0]];
        for (text, calls) in [
            (one.to_owned(), &calls[..]),
            (format!("\n{one}\n"), &calls),
            (format!("```json\n{one}\n```"), &calls),
            (format!("```\n{one}\n```\n"), &calls),
            (format!("<tools>\n{one}\n</tools>"), &calls),
            (one.replace("arguments", "parameters"), &calls),
            (format!("[{one}, {one}]"), &two),
            (format!("```json\n{one}\n{one}\n```"), &two),
            (format!("Here it is: {one}"), &[]),
            (format!("{one} is the call"), &[]),
            (format!("```json\n{one}\n```\nThat is it."), &[]),
            (one.replace("\"f\"", "\"g\""), &[]),
            (one.replace("\"f\"", "\"f2\""), &[]),
            (one.replace("\"name\"", "\"id\": 1, \"name\""), &[]),
            (one.replace("}}", "}, \"more\": 1}"), &[]),
            (r#"{"name": "f", "arguments": "text"}"#.to_owned(), &[]),
            (r#"{"name": "f", "arguments": {"text": "cut"#.to_owned(), &[]),
            ("```python\nprint()\n```".to_owned(), &[]),
            ("<tool".to_owned(), &[]),
        ] {
            let content = if calls.is_empty() { text.as_str() } else { "" };
            let calls: Vec<_> = calls.iter().map(|call| call.map(str::to_owned)).collect();
            for pieces in testing::cuts(&text) {
                let reader = reader(CALL_FORMS[HERMES]).with_unmarked();
                assert_eq!(read_by(reader, &pieces), (content.to_owned(), calls.clone()), "{text}");
            }
        }
        let strict = reader(CALL_FORMS[HERMES]);
        assert_eq!(read_by(strict, &[one]), (one.to_owned(), Vec::new()));
    }

    const HERMES: usize = 0;
    const XML: usize = 1;
    const GLM: usize = 2;
    const GLM_IN_LINE: usize = 3;
    const LIST: usize = 4;
    const ARGS: usize = 5;
    const WITH_ID: usize = 6;
    const BLOCK: usize = 7;
    const MARKED: usize = 8;
    const VALUES: usize = 9;
    const PYTHON: usize = 10;
    const LINES: usize = 11;
    const ALONE: usize = 12;

    #[test]
    fn calls_are_the_same_wherever_tokens_are_cut() {
        let one =
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"text\": \"}\\\"{é\"}}\n</tool_call>";
        let first = ["f", "{\"text\": \"}\\\"{é\"}"];
        check(HERMES, one, "", &[first]);
        check(HERMES, &format!("Now.\n\n{one}\n"), "Now.", &[first]);
        let two = "<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>";
        check(HERMES, &format!("{one}\n{two}"), "", &[first, ["g", "{}"]]);
        check(
            XML,
            "<tool_call>\n<function=f>\n<parameter=text>\n a \"b\"\nc\n</parameter>\n\
             <parameter=count>\n3\n</parameter>\n</function>\n</tool_call>",
            "",
            &[["f", "{\"text\": \" a \\\"b\\\"\\nc\", \"count\": 3}"]],
        );
        check(XML, "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", &[["f", "{}"]]);
        check(
            GLM,
            "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a<b</arg_value>\n\
             <arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            "",
            &[["f", "{\"text\": \"a<b\", \"count\": 3}"]],
        );
        check(
            LIST,
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": [1]}, \"id\": \"abcdefghi\"}, \
             {\"name\": \"g\", \"arguments\": {}}]",
            "",
            &[["f", "{\"a\": [1]}"], ["g", "{}"]],
        );
        check(
            ARGS,
            "[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g[ARGS]{}",
            "",
            &[["f", "{\"a\": 1}"], ["g", "{}"]],
        );
        check(
            BLOCK,
            "So.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": \
             [1]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```\
             <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "So.",
            &[["f", "{\"a\": [1]}"], ["g", "{}"]],
        );
        check(
            MARKED,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>\
             <｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            &[["f", "{\"a\": 1}"], ["g", "{}"]],
        );
        check(ALONE, "{\"name\": \"f\", \"parameters\": {\"a\": {}}}", "", &[["f", "{\"a\": {}}"]]);
    }

    #[test]
    fn names_and_values_are_read_as_json() {
        check(
            VALUES,
            "So.<|tool_call>call:f{count:-3,list:[1,<|\"|>a<|\"|>,[]],none:null,\
             pair:{a b:true,<|\"|>c<|\"|>:{}},text:<|\"|>}\"<tool_call|>\\<|<|\"|>}<tool_call|>\
             <|tool_call>call:g{}<tool_call|><|tool_response>",
            "So.<|tool_response>",
            &[
                [
                    "f",
                    "{\"count\": -3, \"list\": [1, \"a\", []], \"none\": null, \
                     \"pair\": {\"a b\": true, \"c\": {}}, \
                     \"text\": \"}\\\"<tool_call|>\\\\<|\"}",
                ],
                ["g", "{}"],
            ],
        );
        check(
            PYTHON,
            "<|tool_call_start|>[f(text='it\\'s \"é\"\\n)]', count = 1.5e3), g(), \
             f.h(a=\"b\\u00e9\\x41\\\\\", b=[None, True,'c',], c={\"d\": null, 'e': [False]})]\
             <|tool_call_end|> So.",
            " So.",
            &[
                ["f", "{\"text\": \"it's \\\"é\\\"\\n)]\", \"count\": 1.5e3}"],
                ["g", "{}"],
                [
                    "f.h",
                    "{\"a\": \"béA\\\\\", \"b\": [null, true, \"c\"], \
                     \"c\": {\"d\": null, \"e\": [false]}}",
                ],
            ],
        );
        check(
            LINES,
            "Well.\n<function_calls>f(text=\"</function_calls>\", count=2)\ng()</function_calls>",
            "Well.",
            &[["f", "{\"text\": \"</function_calls>\", \"count\": 2}"], ["g", "{}"]],
        );
    }

    #[test]
    fn a_mark_inside_an_argument_ends_nothing() {
        let text = "{\"text\": \"</tool_call>[ARGS]<｜tool▁call▁end｜>]\"}";
        let call = [["f", text]];
        check(
            HERMES,
            &format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {text}}}\n</tool_call>"),
            "",
            &call,
        );
        check(ARGS, &format!("[TOOL_CALLS]f[ARGS]{text}"), "", &call);
        check(WITH_ID, &format!("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{text}"), "", &call);
        check(WITH_ID, &format!("[TOOL_CALLS]f[ARGS]{text}"), "", &call);
        check(
            MARKED,
            &format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{text}<｜tool▁call▁end｜>\
                 <｜tool▁calls▁end｜>"
            ),
            "",
            &call,
        );
        check(
            GLM_IN_LINE,
            "<tool_call>f<arg_key>text</arg_key><arg_value></tool_call></arg_value>\
             <arg_key>count</arg_key><arg_value>3</arg_value></tool_call>",
            "",
            &[["f", "{\"text\": \"</tool_call>\", \"count\": 3}"]],
        );
    }

    #[test]
    fn of_a_broken_call_the_arguments_before_the_fault_are_read() {
        for (form, text, content, arguments) in [
            (
                VALUES,
                "<|tool_call>call:f{count:1,text:so}<tool_call|>",
                "}<tool_call|>",
                "{\"count\": 1, \"text\": ",
            ),
            (VALUES, "<|tool_call>call:f{text:<|\"|>a", "", "{\"text\": \"a"),
            (VALUES, "<|tool_call>call:f[1]", "[1]", ""),
            (PYTHON, "<|tool_call_start|>[f(1)]<|tool_call_end|>", "", "{"),
            (PYTHON, "<|tool_call_start|>[f(count=2]x", "]x", "{\"count\": 2"),
            (PYTHON, "<|tool_call_start|>[f(text='a\\u00", "", "{\"text\": \"a"),
            (WITH_ID, "[TOOL_CALLS]f[CALL_ID]abc{}", "{}", ""),
        ] {
            check(form, text, content, &[["f", arguments]]);
        }
    }

    #[test]
    fn what_is_no_call_is_content() {
        for form in 0..CALL_FORMS.len() {
            check(form, "plain <tool, [TOOL] text \n", "plain <tool, [TOOL] text \n", &[]);
            check(form, "", "", &[]);
            check(form, " <tool_cal", " <tool_cal", &[]);
        }
        check(ALONE, "so: {\"name\": \"f\"}", "so: {\"name\": \"f\"}", &[]);
    }

    #[test]
    fn of_a_call_that_is_cut_off_all_that_came_is_read() {
        check(HERMES, "<tool_call>\n{\"name\": \"f", "", &[]);
        check(
            HERMES,
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"text\": \"a",
            "",
            &[["f", "{\"text\": \"a"]],
        );
        check(
            XML,
            "<tool_call>\n<function=f>\n<parameter=text>\nab",
            "",
            &[["f", "{\"text\": \"ab"]],
        );
    }
}
