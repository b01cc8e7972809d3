//! Reads the arguments of a call that are no JSON, while their text comes, and writes them as JSON.

use crate::grammar::literals::LiteralForm;
use crate::reader::reasoning::beginning_at_end;
use serde_json::Value;

/// Longest name of an argument, and longest number or word, in bytes. What is longer is none.
const LONGEST_NAME: usize = 256;
const LONGEST_WORD: usize = 64;

/// Reads from behind the bracket that opens the arguments up to the one that closes them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LiteralReader {
    form: LiteralForm,
    /// The brackets that are open, the arguments' own first.
    open: Vec<Bracket>,
    place: LiteralPlace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bracket {
    Arguments,
    Pairs,
    List,
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

/// What a step of the reader came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LiteralStep {
    Done,
    NeedsMore,
    /// The bracket that closes the arguments is next.
    Ended,
    /// The text is not in this notation.
    Lost,
}

impl LiteralReader {
    pub(crate) fn new(form: LiteralForm) -> Self {
        Self { form, open: vec![Bracket::Arguments], place: LiteralPlace::Start }
    }

    /// Takes what it can read from the front of `held` and appends it to `json`.
    pub(crate) fn advance(&mut self, held: &mut String, json: &mut String) -> LiteralStep {
        if !matches!(self.place, LiteralPlace::Text { .. }) {
            held.drain(..held.len() - held.trim_start().len());
        }
        match self.place {
            LiteralPlace::Start => {
                json.push('{');
                self.go_on(LiteralPlace::Item { first: true })
            }
            _ if held.is_empty() => LiteralStep::NeedsMore,
            LiteralPlace::Item { first } => self.item(first, held, json),
            LiteralPlace::Assigns => self.assigns(held, json),
            LiteralPlace::Value => self.value(held, json),
            LiteralPlace::Text { quote, is_name } => self.text(quote, is_name, held, json),
            LiteralPlace::After => self.after(held, json),
        }
    }

    fn go_on(&mut self, place: LiteralPlace) -> LiteralStep {
        self.place = place;
        LiteralStep::Done
    }

    fn inside(&self) -> Bracket {
        self.open.last().copied().unwrap_or(Bracket::Arguments)
    }

    fn closing(&self) -> char {
        match (self.inside(), self.form) {
            (Bracket::List, _) => ']',
            (Bracket::Arguments, LiteralForm::Python) => ')',
            (Bracket::Arguments | Bracket::Pairs, _) => '}',
        }
    }

    fn item(&mut self, first: bool, held: &mut String, json: &mut String) -> LiteralStep {
        if held.starts_with(self.closing()) {
            return self.close(held, json);
        }
        let separator = if first { "" } else { ", " };
        if self.inside() == Bracket::List {
            json.push_str(separator);
            return self.go_on(LiteralPlace::Value);
        }
        match self.quote(held) {
            Some("") => return LiteralStep::NeedsMore,
            Some(_) if self.is_bare() => {}
            Some(quote) => {
                held.drain(..quote.len());
                json.push_str(separator);
                json.push('"');
                return self.go_on(LiteralPlace::Text { quote, is_name: true });
            }
            None => {}
        }
        self.bare_name(separator, held, json)
    }

    /// Whether names stand without quotes here, and never in them.
    fn is_bare(&self) -> bool {
        self.form == LiteralForm::Python && self.inside() == Bracket::Arguments
    }

    fn bare_name(&mut self, separator: &str, held: &mut String, json: &mut String) -> LiteralStep {
        if self.form == LiteralForm::Python && !self.is_bare() {
            return LiteralStep::Lost;
        }
        let Some(end) = held.find(self.form.assigns()) else {
            let is_long = held.len() > LONGEST_NAME;
            return if is_long { LiteralStep::Lost } else { LiteralStep::NeedsMore };
        };
        let name: String = held.drain(..end).collect();
        let name = name.trim_end();
        if name.is_empty() || name.contains(|letter: char| "()[]{},\"'".contains(letter)) {
            return LiteralStep::Lost;
        }
        json.push_str(separator);
        json.push_str(&Value::from(name).to_string());
        self.go_on(LiteralPlace::Assigns)
    }

    /// The quote that begins here; an empty one where more text has to show it.
    fn quote(&self, held: &str) -> Option<&'static str> {
        match self.form {
            LiteralForm::Python => ["'", "\""].into_iter().find(|quote| held.starts_with(quote)),
            LiteralForm::Marked { quote } if held.starts_with(quote) => Some(quote),
            LiteralForm::Marked { quote } => quote.starts_with(held).then_some(""),
        }
    }

    fn assigns(&mut self, held: &mut String, json: &mut String) -> LiteralStep {
        let mark = if self.inside() == Bracket::Arguments { self.form.assigns() } else { ":" };
        if !held.starts_with(mark) {
            return LiteralStep::Lost;
        }
        held.drain(..mark.len());
        json.push_str(": ");
        self.go_on(LiteralPlace::Value)
    }

    fn value(&mut self, held: &mut String, json: &mut String) -> LiteralStep {
        for (bracket, letter) in [(Bracket::Pairs, '{'), (Bracket::List, '[')] {
            if held.starts_with(letter) {
                held.drain(..1);
                json.push(letter);
                self.open.push(bracket);
                return self.go_on(LiteralPlace::Item { first: true });
            }
        }
        match self.quote(held) {
            Some("") => LiteralStep::NeedsMore,
            Some(quote) => {
                held.drain(..quote.len());
                json.push('"');
                self.go_on(LiteralPlace::Text { quote, is_name: false })
            }
            None => self.word(held, json),
        }
    }

    /// A number, or one of the words of JSON and of Python.
    fn word(&mut self, held: &mut String, json: &mut String) -> LiteralStep {
        let ends = |letter: char| letter.is_whitespace() || ",]})".contains(letter);
        let Some(end) = held.find(ends) else {
            let is_long = held.len() > LONGEST_WORD;
            return if is_long { LiteralStep::Lost } else { LiteralStep::NeedsMore };
        };
        let word: String = held.drain(..end).collect();
        json.push_str(match word.as_str() {
            "None" | "null" => "null",
            "True" | "true" => "true",
            "False" | "false" => "false",
            number if is_number(number) => number,
            _ => return LiteralStep::Lost,
        });
        self.go_on(LiteralPlace::After)
    }

    fn text(
        &mut self,
        quote: &'static str,
        is_name: bool,
        held: &mut String,
        json: &mut String,
    ) -> LiteralStep {
        let (read, ended) = match self.form {
            LiteralForm::Python => quoted(held, quote, json),
            LiteralForm::Marked { .. } => marked(held, quote, json),
        };
        held.drain(..read);
        if !ended {
            return LiteralStep::NeedsMore;
        }
        json.push('"');
        self.go_on(if is_name { LiteralPlace::Assigns } else { LiteralPlace::After })
    }

    fn after(&mut self, held: &mut String, json: &mut String) -> LiteralStep {
        if held.starts_with(',') {
            held.drain(..1);
            return self.go_on(LiteralPlace::Item { first: false });
        }
        if held.starts_with(self.closing()) {
            return self.close(held, json);
        }
        LiteralStep::Lost
    }

    fn close(&mut self, held: &mut String, json: &mut String) -> LiteralStep {
        if self.inside() == Bracket::Arguments {
            json.push('}');
            return LiteralStep::Ended;
        }
        json.push(self.closing());
        held.drain(..1);
        self.open.pop();
        self.go_on(LiteralPlace::After)
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
    let end = held.find(mark);
    let certain = end.unwrap_or_else(|| held.len() - beginning_at_end(held, mark));
    json.push_str(&inside_quotes(&held[..certain]));
    (certain + end.map_or(0, |_| mark.len()), end.is_some())
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

/// What stands for an escape, given the text behind its backslash, and the length of its text.
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

/// The text as it stands inside a JSON string.
pub(crate) fn inside_quotes(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
