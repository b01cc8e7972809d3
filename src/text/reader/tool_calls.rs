//! Reads calls of tools in an answer while its tokens come, by the format of the model's family.

use crate::forms::tool_calls::{ArgumentsForm, CallFormat, CallId, ToolDefinition, first_mark};
use crate::grammar::tagged::{ArgumentTags, ArgumentsSchema, is_text};
use crate::reader::literals::{LiteralReader, LiteralStep, inside_quotes};
use crate::reader::reasoning::beginning_at_end;
use serde_json::Value;
use std::collections::HashSet;
use std::sync::Arc;

/// A piece of an answer, as clients are told it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    Reasoning(String),
    Content(String),
    /// The beginning of the next call.
    Call {
        name: String,
    },
    /// More of the latest call's arguments, which together are a JSON text.
    Arguments(String),
}

/// Arguments that a family writes as they are, because they are texts: pairs of a function and a
/// parameter.
pub type PlainArguments = Arc<HashSet<(String, String)>>;

pub fn plain_arguments(tools: &[ToolDefinition]) -> PlainArguments {
    let mut found = HashSet::new();
    for tool in tools {
        let schema = ArgumentsSchema::read(&tool.parameters);
        let properties = schema.map(|schema| schema.properties).unwrap_or_default();
        let texts = properties.into_iter().filter(|(_, property)| is_text(property));
        found.extend(texts.map(|(parameter, _)| (tool.name.clone(), parameter)));
    }
    found.into()
}

/// Reads one answer. What is no call is content, byte for byte.
#[derive(Clone, Debug)]
pub struct CallReader {
    format: CallFormat,
    plain: PlainArguments,
    state: CallState,
    /// Received, and not read.
    held: String,
    /// The name of the function that is being called.
    name: String,
}

#[derive(Clone, Debug, PartialEq)]
enum CallState {
    /// No call has come. `begun`: some text that is not white space has.
    Content {
        begun: bool,
    },
    /// The rest of a fixed text, and what follows it.
    Fixed {
        rest: &'static str,
        then: AfterFixed,
    },
    Name,
    /// Between a call's name and its arguments, where an id may stand.
    IdAhead {
        mark: &'static str,
    },
    Json(JsonEnd),
    Literals(LiteralReader),
    /// Between two tagged arguments; `any`: there was one before.
    Tags {
        any: bool,
    },
    Key,
    /// The value of a tagged argument, which is a text or JSON.
    Value {
        is_text: bool,
    },
    /// Behind a call's arguments.
    Id,
    /// Behind a call.
    Next,
    /// Nothing that follows is part of a call.
    Rest,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum AfterFixed {
    Name,
    Arguments,
    Key,
    Id,
    Next,
}

/// Finds where a JSON object ends.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct JsonEnd {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl JsonEnd {
    /// Takes one more byte; whether it ends the object.
    fn is_end(&mut self, byte: u8) -> bool {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.in_string => self.escaped = true,
            b'"' => self.in_string = !self.in_string,
            b'{' | b'[' if !self.in_string => self.depth += 1,
            b'}' | b']' if !self.in_string => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

/// What one step of the reader came to.
enum Progress {
    Done,
    NeedsMore,
    /// The text is not what the format has here.
    Lost,
}

impl CallReader {
    pub fn new(format: CallFormat, plain: PlainArguments) -> Self {
        let state = CallState::Content { begun: false };
        Self { format, plain, state, held: String::new(), name: String::new() }
    }

    /// Whether a call has begun.
    pub fn has_called(&self) -> bool {
        !self.name.is_empty()
    }

    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        loop {
            match self.advance(&mut parts) {
                Progress::Done => {}
                Progress::NeedsMore => return parts,
                Progress::Lost => self.state = CallState::Rest,
            }
        }
    }

    /// What was held back, once nothing follows. Of a call that is cut off, the arguments that came
    /// are told already, and a part of a mark is not text.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let held = std::mem::take(&mut self.held);
        match self.state {
            CallState::Content { .. } | CallState::Rest if !held.is_empty() => {
                vec![AnswerPart::Content(held)]
            }
            _ => Vec::new(),
        }
    }

    fn advance(&mut self, parts: &mut Vec<AnswerPart>) -> Progress {
        match self.state.clone() {
            CallState::Content { begun } => self.content(begun, parts),
            CallState::Fixed { rest, then } => self.fixed(rest, then, parts),
            CallState::Name => self.name(parts),
            CallState::IdAhead { mark } => self.id_ahead(mark),
            CallState::Json(end) => self.json(end, parts),
            CallState::Literals(reader) => self.literals(reader, parts),
            CallState::Tags { any } => self.tags(any, parts),
            CallState::Key => self.key(parts),
            CallState::Value { is_text } => self.value(is_text, parts),
            CallState::Id => self.id(),
            CallState::Next => self.next(),
            CallState::Rest => {
                let held = std::mem::take(&mut self.held);
                parts.extend((!held.is_empty()).then_some(AnswerPart::Content(held)));
                Progress::NeedsMore
            }
        }
    }

    fn expect(&mut self, text: &'static str, then: AfterFixed) -> Progress {
        self.state = CallState::Fixed { rest: text, then };
        Progress::Done
    }

    /// Shows text until a call begins. White space before a call belongs to the call.
    fn content(&mut self, begun: bool, parts: &mut Vec<AnswerPart>) -> Progress {
        let trigger = self.format.trigger();
        let found = if self.format.at_start {
            let visible = self.held.trim_start();
            (!begun && visible.starts_with(trigger)).then(|| self.held.len() - visible.len())
        } else {
            self.held.find(trigger)
        };
        if let Some(at) = found {
            return self.begin(at, parts);
        }
        let certain = self.held.len() - beginning_at_end(&self.held, trigger);
        let certain = self.held[..certain].trim_end().len();
        if certain > 0 {
            parts.push(AnswerPart::Content(self.held.drain(..certain).collect()));
            self.state = CallState::Content { begun: true };
        }
        Progress::NeedsMore
    }

    /// Shows the text before the first call, which begins at this place.
    fn begin(&mut self, at: usize, parts: &mut Vec<AnswerPart>) -> Progress {
        let before = self.held[..at].trim_end();
        if !before.is_empty() {
            parts.push(AnswerPart::Content(before.to_owned()));
        }
        self.held.drain(..at);
        match self.format.open {
            "" => self.expect(self.format.before, AfterFixed::Name),
            open => self.expect(open, AfterFixed::Next),
        }
    }

    /// Reads the characters of a fixed text. Each may have white space of any kind before it.
    fn fixed(
        &mut self,
        rest: &'static str,
        then: AfterFixed,
        parts: &mut Vec<AnswerPart>,
    ) -> Progress {
        let mut expected = rest.trim_start();
        let mut read = 0;
        for letter in self.held.chars() {
            let Some(wanted) = expected.chars().next() else { break };
            if letter == wanted {
                expected = expected[letter.len_utf8()..].trim_start();
            } else if !letter.is_whitespace() {
                return Progress::Lost;
            }
            read += letter.len_utf8();
        }
        self.held.drain(..read);
        if !expected.is_empty() {
            self.state = CallState::Fixed { rest: expected, then };
            return Progress::NeedsMore;
        }
        self.state = match (then, self.format.arguments) {
            (AfterFixed::Name, _) => CallState::Name,
            (AfterFixed::Arguments, ArgumentsForm::Json) => CallState::Json(JsonEnd::default()),
            (AfterFixed::Arguments, ArgumentsForm::Literals(form)) => {
                CallState::Literals(LiteralReader::new(form))
            }
            (AfterFixed::Arguments, ArgumentsForm::Tagged(_)) => {
                parts.push(AnswerPart::Arguments("{".into()));
                CallState::Tags { any: false }
            }
            (AfterFixed::Key, _) => CallState::Key,
            (AfterFixed::Id, _) => CallState::Id,
            (AfterFixed::Next, _) => CallState::Next,
        };
        Progress::Done
    }

    /// Reads a function's name, which ends before any character that names do not have.
    fn name(&mut self, parts: &mut Vec<AnswerPart>) -> Progress {
        let visible = self.held.trim_start();
        let end = visible.find(|letter: char| !is_of_name(letter));
        let Some(end) = end else { return Progress::NeedsMore };
        if end == 0 {
            return Progress::Lost;
        }
        self.name = visible[..end].to_owned();
        self.held = visible[end..].to_owned();
        parts.push(AnswerPart::Call { name: self.name.clone() });
        if let CallId::BehindName(mark) = self.format.id {
            self.state = CallState::IdAhead { mark };
            return Progress::Done;
        }
        self.expect(self.format.middle, AfterFixed::Arguments)
    }

    /// Leaves out the call's id and the mark before it, where they are.
    fn id_ahead(&mut self, mark: &str) -> Progress {
        let (visible, middle) = (self.held.trim_start(), self.format.middle);
        if middle.starts_with(visible) || mark.starts_with(visible) {
            return Progress::NeedsMore;
        }
        if let Some(rest) = visible.strip_prefix(mark) {
            let Some(end) = rest.find(|letter: char| !is_of_name(letter)) else {
                return Progress::NeedsMore;
            };
            self.held = rest[end..].to_owned();
        }
        self.expect(middle, AfterFixed::Arguments)
    }

    fn literals(&mut self, mut reader: LiteralReader, parts: &mut Vec<AnswerPart>) -> Progress {
        let mut json = String::new();
        let step = loop {
            let step = reader.advance(&mut self.held, &mut json);
            if step != LiteralStep::Done {
                break step;
            }
        };
        parts.extend((!json.is_empty()).then_some(AnswerPart::Arguments(json)));
        self.state = CallState::Literals(reader);
        match step {
            LiteralStep::Done | LiteralStep::NeedsMore => Progress::NeedsMore,
            LiteralStep::Ended => self.after_arguments(),
            LiteralStep::Lost => Progress::Lost,
        }
    }

    fn json(&mut self, mut end: JsonEnd, parts: &mut Vec<AnswerPart>) -> Progress {
        if end.depth == 0 {
            self.held = self.held.trim_start().to_owned();
            if !self.held.is_empty() && !self.held.starts_with('{') {
                return Progress::Lost;
            }
        }
        let ends = self.held.bytes().position(|byte| end.is_end(byte));
        let read = ends.map_or(self.held.len(), |at| at + 1);
        let text: String = self.held.drain(..read).collect();
        if !text.is_empty() {
            parts.push(AnswerPart::Arguments(text));
        }
        if ends.is_some() {
            return self.after_arguments();
        }
        self.state = CallState::Json(end);
        Progress::NeedsMore
    }

    fn after_arguments(&mut self) -> Progress {
        match self.format.id {
            CallId::BehindArguments(_) => {
                self.state = CallState::Id;
                Progress::Done
            }
            CallId::None | CallId::BehindName(_) => {
                self.expect(self.format.after, AfterFixed::Next)
            }
        }
    }

    /// Leaves out the member with the call's id, where there is one.
    fn id(&mut self) -> Progress {
        let visible = self.held.trim_start();
        match visible.chars().next() {
            None => Progress::NeedsMore,
            Some('}') => self.expect(self.format.after, AfterFixed::Next),
            Some(',') => {
                let CallId::BehindArguments(before) = self.format.id else {
                    return Progress::Lost;
                };
                self.expect(before, AfterFixed::Id)
            }
            Some(letter) if is_of_name(letter) || letter == '"' => {
                self.held = visible[1..].to_owned();
                Progress::Done
            }
            Some(_) => Progress::Lost,
        }
    }

    /// Decides between one more argument and the end of the call.
    fn tags(&mut self, any: bool, parts: &mut Vec<AnswerPart>) -> Progress {
        let ArgumentsForm::Tagged(ArgumentTags { before, .. }) = self.format.arguments else {
            return Progress::Lost;
        };
        let visible = self.held.trim_start();
        if visible.starts_with(before) {
            parts.extend(any.then(|| AnswerPart::Arguments(", ".into())));
            return self.expect(before, AfterFixed::Key);
        }
        if before.starts_with(visible) {
            return Progress::NeedsMore;
        }
        parts.push(AnswerPart::Arguments("}".into()));
        self.expect(self.format.after, AfterFixed::Next)
    }

    fn key(&mut self, parts: &mut Vec<AnswerPart>) -> Progress {
        let ArgumentsForm::Tagged(ArgumentTags { middle, .. }) = self.format.arguments else {
            return Progress::Lost;
        };
        // White space behind the mark belongs to the value, all but one line break.
        let mark = middle.trim_end();
        let Some((key, rest)) = self.held.split_once(mark) else { return Progress::NeedsMore };
        let breaks = middle.len() > mark.len();
        if breaks && rest.is_empty() {
            return Progress::NeedsMore;
        }
        let rest = if breaks { rest.strip_prefix('\n').unwrap_or(rest) } else { rest };
        let is_text = self.plain.contains(&(self.name.clone(), key.to_owned()));
        let quote = if is_text { "\"" } else { "" };
        parts.push(AnswerPart::Arguments(format!("{}: {quote}", Value::from(key))));
        self.held = rest.to_owned();
        self.state = CallState::Value { is_text };
        Progress::Done
    }

    fn value(&mut self, is_text: bool, parts: &mut Vec<AnswerPart>) -> Progress {
        let ArgumentsForm::Tagged(ArgumentTags { after, .. }) = self.format.arguments else {
            return Progress::Lost;
        };
        let mark = after.trim_end();
        let shown = |text: &str| if is_text { inside_quotes(text) } else { text.to_owned() };
        let Some((value, rest)) = self.held.split_once(mark) else {
            let certain = self.held.len() - beginning_at_end(&self.held, mark);
            let text: String = self.held.drain(..certain).collect();
            if !text.is_empty() {
                parts.push(AnswerPart::Arguments(shown(&text)));
            }
            return Progress::NeedsMore;
        };
        let quote = if is_text { "\"" } else { "" };
        parts.push(AnswerPart::Arguments(format!("{}{quote}", shown(value))));
        self.held = rest.to_owned();
        self.state = CallState::Tags { any: true };
        Progress::Done
    }

    /// Behind a call, or behind the beginning of a list of calls.
    fn next(&mut self) -> Progress {
        let visible = self.held.trim_start();
        let visible = visible.strip_prefix(',').unwrap_or(visible).trim_start();
        let close = self.format.close;
        if !close.is_empty() && visible.starts_with(close) {
            self.held = visible[close.len()..].to_owned();
            self.state = CallState::Rest;
            return Progress::Done;
        }
        // Without a mark of its own, a call begins with its name.
        let trigger = first_mark(self.format.before);
        let begins = match trigger {
            "" => visible.starts_with(is_of_name),
            _ => visible.starts_with(trigger),
        };
        if begins && self.format.most > 1 {
            self.held = visible.to_owned();
            return self.expect(self.format.before, AfterFixed::Name);
        }
        let may_go_on = trigger.starts_with(visible) || close.starts_with(visible);
        if may_go_on { Progress::NeedsMore } else { Progress::Lost }
    }
}

/// Characters of a function's name.
pub fn is_of_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "_-.".contains(letter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forms::tool_calls::FORMATS;
    use serde_json::json;

    /// The content and the calls of an answer that came in these pieces.
    fn read(format: CallFormat, pieces: &[&str]) -> (String, Vec<[String; 2]>) {
        let schema = json!({
            "type": "object",
            "properties": { "text": { "type": "string" }, "count": { "type": "integer" } },
        });
        let tool = ToolDefinition { name: "f".into(), parameters: schema.to_string() };
        let mut reader = CallReader::new(format, plain_arguments(&[tool]));
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

    /// Reads the text cut at every place, at every two places and at all of them.
    fn check(format: usize, text: &str, content: &str, calls: &[[&str; 2]]) {
        let calls: Vec<[String; 2]> = calls.iter().map(|call| call.map(str::to_owned)).collect();
        let expect = (content.to_owned(), calls);
        let format = FORMATS[format];
        assert_eq!(read(format, &[text]), expect, "{text:?}");
        let places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        for &one in &places {
            for &two in places.iter().filter(|two| **two >= one) {
                let pieces = [&text[..one], &text[one..two], &text[two..]];
                assert_eq!(read(format, &pieces), expect, "{text:?} {one} {two}");
            }
        }
        let each: Vec<&str> = text.split_inclusive(|_| true).collect();
        assert_eq!(read(format, &each), expect, "{text:?} by character");
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
    fn names_and_values_are_told_as_json() {
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
    fn of_a_broken_call_the_arguments_before_the_fault_are_told() {
        for (format, text, content, arguments) in [
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
            check(format, text, content, &[["f", arguments]]);
        }
    }

    #[test]
    fn what_is_no_call_is_content() {
        for format in 0..FORMATS.len() {
            check(format, "plain <tool, [TOOL] text \n", "plain <tool, [TOOL] text \n", &[]);
            check(format, "", "", &[]);
            check(format, " <tool_cal", " <tool_cal", &[]);
        }
        check(ALONE, "so: {\"name\": \"f\"}", "so: {\"name\": \"f\"}", &[]);
    }

    #[test]
    fn of_a_call_that_is_cut_off_all_that_came_is_told() {
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
