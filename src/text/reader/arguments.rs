//! Reads the arguments of a tool call, in the syntax of the model's family, as a JSON text.

use super::held::{Progress, before_mark, inside_quotes, skip_space};
use super::literals::LiteralReader;
use super::part::AnswerPart;
use crate::forms::tool_calls::{ArgumentSyntax, ArgumentTags};
use serde_json::Value;
use std::collections::HashSet;

#[derive(Clone, Debug)]
pub(super) enum ArgumentsReader {
    Json(JsonReader),
    Tagged(TaggedReader),
    Literals(LiteralReader),
}

impl ArgumentsReader {
    /// `plain`: the parameters that are texts.
    pub(super) fn new(syntax: ArgumentSyntax, plain: HashSet<String>) -> Self {
        match syntax {
            ArgumentSyntax::Json => Self::Json(JsonReader::default()),
            ArgumentSyntax::Tagged(tags) => {
                Self::Tagged(TaggedReader { tags, plain, place: TaggedPlace::Start })
            }
            ArgumentSyntax::Literals(syntax) => Self::Literals(LiteralReader::new(syntax)),
        }
    }

    /// Takes what it can read from the front of `held`.
    pub(super) fn advance(&mut self, held: &mut String, parts: &mut Vec<AnswerPart>) -> Progress {
        match self {
            Self::Json(reader) => reader.advance(held, parts),
            Self::Tagged(reader) => reader.advance(held, parts),
            Self::Literals(reader) => reader.advance(held, parts),
        }
    }
}

/// Finds where a JSON object ends.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonReader {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl JsonReader {
    fn advance(&mut self, held: &mut String, parts: &mut Vec<AnswerPart>) -> Progress {
        if self.depth == 0 {
            skip_space(held);
            if !held.is_empty() && !held.starts_with('{') {
                return Progress::Lost;
            }
        }
        let end = held.bytes().position(|byte| self.is_end(byte));
        let text: String = held.drain(..end.map_or(held.len(), |at| at + 1)).collect();
        parts.extend((!text.is_empty()).then_some(AnswerPart::Arguments(text)));
        if end.is_some() { Progress::Ended } else { Progress::NeedsMore }
    }

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

/// Reads arguments between tags.
#[derive(Clone, Debug)]
pub(super) struct TaggedReader {
    tags: ArgumentTags,
    plain: HashSet<String>,
    place: TaggedPlace,
}

#[derive(Clone, Copy, Debug)]
enum TaggedPlace {
    Start,
    /// Between two arguments; `any`: there was one before.
    Between {
        any: bool,
    },
    Name,
    /// In a value, which is a text or JSON.
    Value {
        is_text: bool,
    },
}

impl TaggedReader {
    fn advance(&mut self, held: &mut String, parts: &mut Vec<AnswerPart>) -> Progress {
        let mut show = |json: String| parts.push(AnswerPart::Arguments(json));
        match self.place {
            TaggedPlace::Start => {
                show("{".into());
                self.place = TaggedPlace::Between { any: false };
                Progress::Done
            }
            TaggedPlace::Between { any } => self.between(any, held, show),
            TaggedPlace::Name => self.name(held, show),
            TaggedPlace::Value { is_text } => self.value(is_text, held, show),
        }
    }

    /// Decides between one more argument and the end of the call.
    fn between(&mut self, any: bool, held: &mut String, mut show: impl FnMut(String)) -> Progress {
        let (visible, before) = (held.trim_start(), self.tags.before);
        if let Some(rest) = visible.strip_prefix(before) {
            *held = rest.to_owned();
            if any {
                show(", ".into());
            }
            self.place = TaggedPlace::Name;
            return Progress::Done;
        }
        if before.starts_with(visible) {
            return Progress::NeedsMore;
        }
        show("}".into());
        Progress::Ended
    }

    fn name(&mut self, held: &mut String, mut show: impl FnMut(String)) -> Progress {
        // White space behind the mark belongs to the value, all but one line break.
        let mark = self.tags.middle.trim_end();
        let Some((name, rest)) = held.split_once(mark) else { return Progress::NeedsMore };
        let breaks = self.tags.middle.len() > mark.len();
        if breaks && rest.is_empty() {
            return Progress::NeedsMore;
        }
        let rest = if breaks { rest.strip_prefix('\n').unwrap_or(rest) } else { rest };
        let is_text = self.plain.contains(name);
        show(format!("{}: {}", Value::from(name), if is_text { "\"" } else { "" }));
        *held = rest.to_owned();
        self.place = TaggedPlace::Value { is_text };
        Progress::Done
    }

    fn value(
        &mut self,
        is_text: bool,
        held: &mut String,
        mut show: impl FnMut(String),
    ) -> Progress {
        let (certain, mark) = before_mark(held, &[self.tags.after.trim_end()]);
        let text: String = held.drain(..certain).collect();
        let json = if is_text { inside_quotes(&text) } else { text };
        let Some(mark) = mark else {
            if !json.is_empty() {
                show(json);
            }
            return Progress::NeedsMore;
        };
        show(json + if is_text { "\"" } else { "" });
        held.drain(..mark.len());
        self.place = TaggedPlace::Between { any: true };
        Progress::Done
    }
}
