//! Grammars in Lark's syntax while they are written: fixed texts in which marks are tokens, texts
//! that end at a mark, reasoning, messages, and formats inside them.

use super::answer_format::AnswerFormat;
use crate::forms::channels;
use crate::forms::reasoning::{CHANNEL_THOUGHT, ThinkingMarks, ThinkingStart};
use crate::tokenizer::SpecialTokens;
use serde_json::Value;
use std::fmt::Write;

/// White space behind a thought: it has no end that text would show.
pub(super) const SPACE: &str = r"space: /\s{0,4}/";

/// The expression that matches a text.
pub(super) fn expression(text: &str) -> String {
    let mut expression = String::new();
    for letter in text.chars() {
        match letter {
            '\n' => expression.push_str(r"\n"),
            '@' => expression.push_str(r"\x40"),
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
pub(super) struct LarkGrammar<'a> {
    marks: &'a SpecialTokens,
    /// All rules but the first.
    pub rules: String,
    /// Formats of their own inside it.
    parts: Vec<AnswerFormat>,
}

impl<'a> LarkGrammar<'a> {
    pub(super) fn new(marks: &'a SpecialTokens) -> Self {
        Self { marks, rules: String::new(), parts: Vec::new() }
    }

    pub(super) fn starting_with(self, start: &str) -> AnswerFormat {
        let grammar = format!("start: {start}\n{}", self.rules);
        AnswerFormat::Nested { grammar, parts: self.parts }
    }

    pub(super) fn part(&mut self, part: AnswerFormat) -> String {
        self.parts.push(part);
        format!("@part_{}", self.parts.len() - 1)
    }

    /// A text that has no marks. The sign that names parts stands only where one is meant.
    pub(super) fn plain(text: &str) -> String {
        Value::from(text).to_string().replace('@', "\\u0040")
    }

    /// A text, in which the tokenizer's marks are tokens.
    pub(super) fn literal(&self, text: &str) -> String {
        let (mut written, mut plain, mut rest) = (String::new(), String::new(), text);
        let flush = |plain: &mut String, written: &mut String| {
            if !plain.is_empty() {
                let _ = write!(written, "{} ", Self::plain(&std::mem::take(plain)));
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

    /// Any text, and the first `mark` behind it, as a rule with this name. Where the mark is a
    /// token, the text does not spell it either: a reader sees the same letters.
    pub(super) fn text_until(&mut self, rule: &str, mark: &str) -> String {
        let ends = expression(mark);
        if self.marks.at_start_of(mark).is_none_or(|token| token.text != mark) {
            let _ = writeln!(self.rules, "{rule}[lazy]: /(?s:.*){ends}/");
            return rule.to_owned();
        }
        let name = rule.to_ascii_uppercase();
        let _ = writeln!(self.rules, "{name}: /(?s:.+)/ & ~/(?s:.*){ends}(?s:.*)/");
        format!("{name}? {}", self.literal(mark))
    }

    /// The messages with these headers that may come before the last one of an answer.
    pub(super) fn messages_before(&mut self, headers: &[&str]) -> String {
        let headers: Vec<String> = headers.iter().map(|header| self.literal(header)).collect();
        let (headers, next) = (headers.join(" | "), self.literal(channels::NEXT));
        let _ = writeln!(self.rules, "words: /(?s:.+)/\nmessage: ({headers}) words? {next}");
        "message*".into()
    }

    /// What may be thought before the answer.
    pub(super) fn thought(&mut self, thinking: Option<ThinkingStart>) -> String {
        let Some(ThinkingStart { marks: ThinkingMarks { open, close, .. }, opened }) = thinking
        else {
            return String::new();
        };
        let thought = self.text_until("thought", close);
        let _ = writeln!(self.rules, "thinking: {thought}");
        if opened { "thinking".into() } else { format!("({} thinking)?", self.literal(open)) }
    }
}

/// The format of an answer that keeps to `format` once its model has thought.
pub(crate) fn after_thinking(
    format: AnswerFormat,
    thinking: ThinkingStart,
    marks: &SpecialTokens,
) -> AnswerFormat {
    let mut grammar = LarkGrammar::new(marks);
    let _ = writeln!(grammar.rules, "{SPACE}");
    let thought = grammar.thought(Some(thinking));
    let part = grammar.part(format);
    grammar.starting_with(&format!("{thought} space {part}"))
}

/// The format of an answer in channels whose last message keeps to `format`. `thinks`: thoughts may
/// come before it.
pub(crate) fn in_last_message(
    format: AnswerFormat,
    thinks: bool,
    marks: &SpecialTokens,
) -> AnswerFormat {
    let mut grammar = LarkGrammar::new(marks);
    let thought = || grammar.messages_before(&[CHANNEL_THOUGHT.open]);
    let thoughts = thinks.then(thought).unwrap_or_default();
    let (last, part) = (grammar.literal(channels::FINAL), grammar.part(format));
    grammar.starting_with(&format!("{thoughts} {last} {part}"))
}
