//! Reads arguments in a notation that is no JSON while their text comes, and writes them as JSON.

use super::held::{Progress, before_mark, inside_quotes, skip_space};
use super::part::AnswerPart;
use crate::forms::tool_calls::LiteralSyntax;
use serde_json::Value;

/// Longest name of an argument, and longest number or word, in bytes. What is longer is none.
const LONGEST_NAME: usize = 256;
const LONGEST_WORD: usize = 64;

/// Reads from behind the bracket that opens the arguments up to the one that closes them.
#[derive(Clone, Debug)]
pub(super) struct LiteralReader {
    syntax: LiteralSyntax,
    /// What closes the brackets that are open, the arguments' own first.
    closing: Vec<char>,
    place: LiteralPlace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LiteralPlace {
    Start,
    /// In front of a name or a value, or of the bracket that closes. `first`: none came before.
    Item {
        first: bool,
    },
    /// Between a name and its value.
    Assigns,
    Value,
    /// In a text, which is a name or a value.
    Text {
        quote: &'static str,
        is_name: bool,
    },
    /// Behind a value.
    After,
}

impl LiteralReader {
    pub(super) fn new(syntax: LiteralSyntax) -> Self {
        Self { syntax, closing: vec![syntax.close], place: LiteralPlace::Start }
    }

    /// Takes what it can read from the front of `held`.
    pub(super) fn advance(&mut self, held: &mut String, parts: &mut Vec<AnswerPart>) -> Progress {
        let mut json = String::new();
        let mut progress = Progress::Done;
        while progress == Progress::Done {
            progress = self.step(held, &mut json);
        }
        parts.extend((!json.is_empty()).then_some(AnswerPart::Arguments(json)));
        progress
    }

    fn step(&mut self, held: &mut String, json: &mut String) -> Progress {
        if !matches!(self.place, LiteralPlace::Text { .. }) {
            skip_space(held);
        }
        match self.place {
            LiteralPlace::Start => {
                json.push('{');
                self.enter(LiteralPlace::Item { first: true })
            }
            _ if held.is_empty() => Progress::NeedsMore,
            LiteralPlace::Item { first } => self.item(first, held, json),
            LiteralPlace::Assigns => self.assigns(held, json),
            LiteralPlace::Value => self.value(held, json),
            LiteralPlace::Text { quote, is_name } => self.text(quote, is_name, held, json),
            LiteralPlace::After => self.after(held, json),
        }
    }

    fn enter(&mut self, place: LiteralPlace) -> Progress {
        self.place = place;
        Progress::Done
    }

    fn is_in_arguments(&self) -> bool {
        self.closing.len() == 1
    }

    fn is_at_close(&self, held: &str) -> bool {
        self.closing.last().is_some_and(|close| held.starts_with(*close))
    }

    fn item(&mut self, first: bool, held: &mut String, json: &mut String) -> Progress {
        if self.is_at_close(held) {
            return self.close(held, json);
        }
        let separator = if first { "" } else { ", " };
        if self.closing.last() == Some(&']') {
            json.push_str(separator);
            return self.enter(LiteralPlace::Value);
        }
        // In Python, names have no quotes in arguments, and always inside values.
        let is_python = self.syntax.quote.is_none();
        match self.quote(held) {
            Some("") => Progress::NeedsMore,
            Some(quote) if !is_python || !self.is_in_arguments() => {
                held.drain(..quote.len());
                json.push_str(separator);
                json.push('"');
                self.enter(LiteralPlace::Text { quote, is_name: true })
            }
            None if is_python && !self.is_in_arguments() => Progress::Lost,
            _ => self.bare_name(separator, held, json),
        }
    }

    fn bare_name(&mut self, separator: &str, held: &mut String, json: &mut String) -> Progress {
        let Some(end) = held.find(self.syntax.assign) else {
            let is_long = held.len() > LONGEST_NAME;
            return if is_long { Progress::Lost } else { Progress::NeedsMore };
        };
        let name: String = held.drain(..end).collect();
        let name = name.trim_end();
        if name.is_empty() || name.contains(|letter: char| "()[]{},\"'".contains(letter)) {
            return Progress::Lost;
        }
        json.push_str(separator);
        json.push_str(&Value::from(name).to_string());
        self.enter(LiteralPlace::Assigns)
    }

    /// The quote that begins here; an empty one where more text has to show it.
    fn quote(&self, held: &str) -> Option<&'static str> {
        match self.syntax.quote {
            None => ["'", "\""].into_iter().find(|quote| held.starts_with(quote)),
            Some(quote) if held.starts_with(quote) => Some(quote),
            Some(quote) => quote.starts_with(held).then_some(""),
        }
    }

    fn assigns(&mut self, held: &mut String, json: &mut String) -> Progress {
        let mark = if self.is_in_arguments() { self.syntax.assign } else { ":" };
        if !held.starts_with(mark) {
            return Progress::Lost;
        }
        held.drain(..mark.len());
        json.push_str(": ");
        self.enter(LiteralPlace::Value)
    }

    fn value(&mut self, held: &mut String, json: &mut String) -> Progress {
        for (open, close) in [('{', '}'), ('[', ']')] {
            if held.starts_with(open) {
                held.drain(..1);
                json.push(open);
                self.closing.push(close);
                return self.enter(LiteralPlace::Item { first: true });
            }
        }
        match self.quote(held) {
            Some("") => Progress::NeedsMore,
            Some(quote) => {
                held.drain(..quote.len());
                json.push('"');
                self.enter(LiteralPlace::Text { quote, is_name: false })
            }
            None => self.word(held, json),
        }
    }

    /// A number, or one of the words of JSON and of Python.
    fn word(&mut self, held: &mut String, json: &mut String) -> Progress {
        let ends = |letter: char| letter.is_whitespace() || ",]})".contains(letter);
        let Some(end) = held.find(ends) else {
            let is_long = held.len() > LONGEST_WORD;
            return if is_long { Progress::Lost } else { Progress::NeedsMore };
        };
        let word: String = held.drain(..end).collect();
        json.push_str(match word.as_str() {
            "None" | "null" => "null",
            "True" | "true" => "true",
            "False" | "false" => "false",
            number if is_number(number) => number,
            _ => return Progress::Lost,
        });
        self.enter(LiteralPlace::After)
    }

    fn text(
        &mut self,
        quote: &'static str,
        is_name: bool,
        held: &mut String,
        json: &mut String,
    ) -> Progress {
        let (read, ended) = match self.syntax.quote {
            None => quoted(held, quote, json),
            Some(mark) => marked(held, mark, json),
        };
        held.drain(..read);
        if !ended {
            return Progress::NeedsMore;
        }
        json.push('"');
        self.enter(if is_name { LiteralPlace::Assigns } else { LiteralPlace::After })
    }

    fn after(&mut self, held: &mut String, json: &mut String) -> Progress {
        if held.starts_with(',') {
            held.drain(..1);
            return self.enter(LiteralPlace::Item { first: false });
        }
        if self.is_at_close(held) { self.close(held, json) } else { Progress::Lost }
    }

    fn close(&mut self, held: &mut String, json: &mut String) -> Progress {
        if self.is_in_arguments() {
            json.push('}');
            return Progress::Ended;
        }
        json.extend(self.closing.pop());
        held.drain(..1);
        self.enter(LiteralPlace::After)
    }
}

/// Whether the word is a number as JSON writes it, however large.
fn is_number(word: &str) -> bool {
    word.starts_with(|letter: char| letter == '-' || letter.is_ascii_digit())
        && serde_json::from_str::<serde::de::IgnoredAny>(word).is_ok()
}

/// Writes a text up to its mark; what may begin the mark is left. How many bytes were read, and
/// whether the mark was among them.
fn marked(held: &str, mark: &str, json: &mut String) -> (usize, bool) {
    let (certain, found) = before_mark(held, &[mark]);
    json.push_str(&inside_quotes(&held[..certain]));
    (certain + found.map_or(0, str::len), found.is_some())
}

/// Writes a text in Python's quotes in the same way. An escape that is not complete is left.
fn quoted(held: &str, quote: &str, json: &mut String) -> (usize, bool) {
    let mut read = 0;
    while let Some(letter) = held[read..].chars().next() {
        if held[read..].starts_with(quote) {
            return (read + quote.len(), true);
        }
        if letter != '\\' {
            json.push_str(&inside_quotes(letter.encode_utf8(&mut [0; 4])));
            read += letter.len_utf8();
            continue;
        }
        let Some((text, length)) = escape(&held[read + 1..]) else { break };
        json.push_str(&inside_quotes(&text));
        read += 1 + length;
    }
    (read, false)
}

/// The character of an escape, given the text behind its backslash, and the length of its text.
/// `None`: more of it has to come.
fn escape(text: &str) -> Option<(String, usize)> {
    let letter = text.chars().next()?;
    let digits = match letter {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => 0,
    };
    if digits > 0 {
        return escaped_code(letter, text, digits);
    }
    let found = match letter {
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'b' => '\u{8}',
        'f' => '\u{c}',
        '\\' | '\'' | '"' => letter,
        _ => return Some((format!("\\{letter}"), letter.len_utf8())),
    };
    Some((found.into(), 1))
}

/// The same of a letter and a character's number in `digits` digits. A number that no character
/// has, such as one half of a surrogate pair, gives the replacement character.
fn escaped_code(letter: char, text: &str, digits: usize) -> Option<(String, usize)> {
    let code = text.get(1..=digits);
    if code.is_none() && text.is_ascii() {
        return None;
    }
    let Some(code) = code.and_then(|code| u32::from_str_radix(code, 16).ok()) else {
        return Some((format!("\\{letter}"), 1));
    };
    let found = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
    Some((found.into(), 1 + digits))
}
