//! A Jinja environment that behaves as Hugging Face's does: its whitespace rules, Python's methods,
//! `raise_exception`, `strftime_now` and `{% generation %}`, and values as Python writes them:
//! `str()` for what a template prints, `json.dumps` for its `tojson` filter.

use super::bounded::{self, Program, Stopped, TemplateLimits, Unwanted};
use chrono::NaiveDateTime;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use std::collections::HashSet;
use std::fmt::Write;

pub(super) struct Jinja {
    environment: Environment<'static>,
    program: Program,
    written_bytes: usize,
    /// Variables that the template reads and does not set.
    reads: HashSet<String>,
}

const NAME: &str = "chat";

/// The message of a template that refused a conversation with `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl Jinja {
    /// Compiles a template. `now` gives the time to templates that write the date.
    pub(super) fn compile(
        source: &str,
        limits: TemplateLimits,
        now: impl Fn() -> NaiveDateTime + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(limits.steps));
        environment.set_unknown_method_callback(|state, value, method, arguments| {
            bounded::charge(bounded::cost(method, value, arguments)?)?;
            unknown_method_callback(state, value, method, arguments)
        });
        environment.set_formatter(|out, _, value| {
            let text = spelled(value)?;
            bounded::charge(text.len())?;
            Ok(out.write_str(&text)?)
        });
        bounded::install(&mut environment);
        environment.add_filter("tojson", |value: &Value, options: Kwargs| tojson(value, &options));
        environment.add_filter("string", |value: &Value| spelled(value));
        environment.add_filter("trim", trim);
        // minijinja treats none as iterable; Jinja2 does not.
        environment
            .add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::from(ErrorKind::InvalidOperation).with_source(Raised(message)))
        });
        environment.add_function("strftime_now", move |format: &str| {
            let mut date = String::new();
            write!(date, "{}", now().format(format))?;
            Ok::<_, Error>(date)
        });
        let source = without_generation(source);
        let reads = environment.template_from_str(&source)?.undeclared_variables(false);
        let program = Program::compile(NAME, source)?;
        Ok(Self { environment, program, written_bytes: limits.written_bytes, reads })
    }

    pub(super) fn reads(&self, name: &str) -> bool {
        self.reads.contains(name)
    }

    /// Renders the template, until it comes to a limit or nobody wants it any more.
    pub(super) fn render(
        &self,
        context: impl Serialize,
        unwanted: &Unwanted,
    ) -> Result<String, Error> {
        let root = Value::from_serialize(context);
        self.program.render(&self.environment, root, self.written_bytes, unwanted)
    }
}

/// Why a limit ended the rendering, if one did.
pub(super) fn stopped(error: &Error) -> Option<String> {
    if error.kind() == ErrorKind::OutOfFuel {
        return Some("it takes more steps than template.max_steps allows".into());
    }
    cause::<Stopped>(error).map(Stopped::to_string)
}

/// The message of the template's own `raise_exception`, if rendering failed because of it.
pub(super) fn raised(error: &Error) -> Option<&str> {
    cause(error).map(|Raised(message)| message.as_str())
}

/// The cause of this type, if the error has one.
fn cause<T: std::error::Error + 'static>(error: &Error) -> Option<&T> {
    let error: &dyn std::error::Error = error;
    std::iter::successors(Some(error), |error| error.source()).find_map(|e| e.downcast_ref())
}

/// Replaces `{% generation %}`, which minijinja does not have, by a condition that always holds:
/// the tag only marks tokens for training and prints its content.
fn without_generation(source: &str) -> String {
    let tag = |piece: &str| {
        let (tag, behind) = piece.split_once("%}")?;
        let name = tag.trim_matches(|letter: char| "+-".contains(letter) || letter.is_whitespace());
        let known = match name {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => return None,
        };
        Some(format!("{}%}}{behind}", tag.replace(name, known)))
    };
    let pieces = source.split("{%").enumerate();
    let changed =
        pieces.map(|(at, piece)| tag(piece).filter(|_| at > 0).unwrap_or_else(|| piece.to_owned()));
    changed.collect::<Vec<_>>().join("{%")
}

/// How values are written; `str()` and `json.dumps` differ in these points.
struct ValueFormat {
    /// The words for false, true and none.
    words: [&'static str; 3],
    quote: fn(&str) -> String,
    /// The text between items, and the text between a key and its value.
    separators: [String; 2],
    /// The indentation of one level of nesting. With it, every item has a line of its own.
    indent: Option<String>,
    sort_keys: bool,
}

/// Spaces of one level of indentation at most.
const WIDEST_INDENT: usize = 64;

/// `str(value)`.
fn spelled(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::String | ValueKind::Undefined => Ok(value.to_string()),
        _ => {
            let (words, separators) = (["False", "True", "None"], [", ", ": "].map(str::to_owned));
            ValueFormat { words, quote, separators, indent: None, sort_keys: false }.of(value, 0)
        }
    }
}

/// `str(value).strip(letters)`.
fn trim(value: &Value, letters: Option<&str>) -> Result<String, Error> {
    let text = spelled(value)?;
    Ok(letters
        .map_or(text.trim(), |letters| text.trim_matches(|letter| letters.contains(letter)))
        .to_owned())
}

/// `json.dumps(value, ensure_ascii, indent, separators, sort_keys)`, as Hugging Face gives it to
/// templates: non-ASCII as it is.
fn tojson(value: &Value, options: &Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = indent.map(|width| match width.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(width.as_usize().unwrap_or(0).min(WIDEST_INDENT)),
    });
    let separators: Option<Vec<String>> = options.get("separators")?;
    let separators = separators.unwrap_or_else(|| {
        [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned).into()
    });
    let separators = <[String; 2]>::try_from(separators)
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, "tojson takes two separators"))?;
    let quote =
        if options.get::<Option<bool>>("ensure_ascii")? == Some(true) { ascii_json } else { json };
    let sort_keys = options.get::<Option<bool>>("sort_keys")? == Some(true);
    options.assert_all_used()?;
    ValueFormat { words: ["false", "true", "null"], quote, separators, indent, sort_keys }
        .of(value, 0)
}

impl ValueFormat {
    fn of(&self, value: &Value, depth: usize) -> Result<String, Error> {
        let indent = self.indent.as_ref().map_or(0, String::len).saturating_mul(depth);
        let between = self.separators[0].len() + self.separators[1].len();
        let own = value.as_str().map_or(1, str::len);
        bounded::charge(own.saturating_add(indent).saturating_add(between))?;
        Ok(match value.kind() {
            ValueKind::None => self.words[2].to_owned(),
            ValueKind::Bool => self.words[usize::from(value.is_true())].to_owned(),
            ValueKind::Number if value.is_integer() => value.to_string(),
            ValueKind::Number => f64::try_from(value.clone()).map(float)?,
            ValueKind::String => (self.quote)(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| self.of(&item, depth + 1));
                self.enclosed(['[', ']'], &items.collect::<Result<Vec<_>, _>>()?, depth)
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                let pair = |key: &Value| {
                    let item = self.of(&value.get_item(key)?, depth + 1)?;
                    Ok([self.of(key, depth + 1)?, item].join(&self.separators[1]))
                };
                self.enclosed(
                    ['{', '}'],
                    &keys.iter().map(pair).collect::<Result<Vec<_>, Error>>()?,
                    depth,
                )
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("{kind} has no spelling"),
                ));
            }
        })
    }

    fn enclosed(&self, [open, close]: [char; 2], items: &[String], depth: usize) -> String {
        let line = |depth| {
            self.indent
                .as_ref()
                .map_or(String::new(), |indent| format!("\n{}", indent.repeat(depth)))
        };
        if items.is_empty() {
            return format!("{open}{close}");
        }
        let between = format!("{}{}", self.separators[0], line(depth + 1));
        format!("{open}{}{}{}{close}", line(depth + 1), items.join(&between), line(depth))
    }
}

/// The shortest digits that read back as `number`; with an exponent below 1e-4 and from 1e16 on.
fn float(number: f64) -> String {
    let size = number.abs();
    if size == 0.0 || (1e-4..1e16).contains(&size) || !number.is_finite() {
        return format!("{number:?}");
    }
    let text = format!("{number:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// `repr` of a string: in double quotes if it has single ones alone.
fn quote(text: &str) -> String {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut quoted = String::from(mark);
    for letter in text.chars() {
        match letter {
            '\n' => quoted += "\\n",
            '\r' => quoted += "\\r",
            '\t' => quoted += "\\t",
            '\\' => quoted += "\\\\",
            _ if letter == mark => quoted.extend(['\\', letter]),
            _ if is_printable(letter) => quoted.push(letter),
            _ => escape(&mut quoted, u32::from(letter)),
        }
    }
    quoted.push(mark);
    quoted
}

/// `escape_debug` escapes the same categories as Python. It escapes combining marks only where no
/// letter precedes them, which Python never does.
fn is_printable(letter: char) -> bool {
    let pair = ['x', letter].iter().collect::<String>();
    matches!(letter, '"' | '\'') || pair.escape_debug().eq(pair.chars())
}

fn escape(out: &mut String, code: u32) {
    // Writing to a string cannot fail.
    let _ = match code {
        0..=0xff => write!(out, "\\x{code:02x}"),
        0x100..=0xffff => write!(out, "\\u{code:04x}"),
        _ => write!(out, "\\U{code:08x}"),
    };
}

fn json(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn ascii_json(text: &str) -> String {
    let mut quoted = String::new();
    for letter in json(text).chars() {
        match letter {
            ' '..='~' => quoted.push(letter),
            _ => {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    let _ = write!(quoted, "\\u{unit:04x}");
                }
            }
        }
    }
    quoted
}

#[cfg(test)]
mod tests {
    use super::{Jinja, TemplateLimits, Unwanted};
    use serde_json::{Value, json};

    fn check(expression: &str, value: &Value, expect: &str) {
        let template = Jinja::compile(
            &format!("{{{{ {expression} }}}}"),
            TemplateLimits::default(),
            chrono::NaiveDateTime::default,
        )
        .unwrap();
        assert_eq!(
            template.render(json!({ "x": value }), &Unwanted::default()).unwrap(),
            expect,
            "{expression} of {value}"
        );
    }

    /// The expected values were printed by Python 3.11: `str`, `json.dumps(ensure_ascii=False)`,
    /// `json.dumps`.
    #[test]
    fn values_are_spelled_as_in_python() {
        let rows = [
            ("null", "None", "null", "null"),
            ("true", "True", "true", "true"),
            (
                r#"{"a": [null, false], "b": {}, "c": []}"#,
                "{'a': [None, False], 'b': {}, 'c': []}",
                "",
                "",
            ),
            (r#"["it's", "a \"b\"", "' \""]"#, r#"["it's", 'a "b"', '\' "']"#, "", ""),
            (
                r#"["\n\t\\\r\u0000\u007fé\u0301\u200d🦀\u00a0\ue000"]"#,
                r"['\n\t\\\r\x00\x7fé́\u200d🦀\xa0\ue000']",
                "[\"\\n\\t\\\\\\r\\u0000\u{7f}é\u{301}\u{200d}🦀\u{a0}\u{e000}\"]",
                r#"["\n\t\\\r\u0000\u007f\u00e9\u0301\u200d\ud83e\udd80\u00a0\ue000"]"#,
            ),
            ("[1, -2, 21.0, 0.5, -0.0, 0.0001]", "[1, -2, 21.0, 0.5, -0.0, 0.0001]", "", ""),
            (
                "[1e16, 123456789012345680.0, 1.5e-7, 1e-5, 1e100]",
                "[1e+16, 1.2345678901234568e+17, 1.5e-07, 1e-05, 1e+100]",
                "[1e+16, 1.2345678901234568e+17, 1.5e-07, 1e-05, 1e+100]",
                "",
            ),
            ("\"as it is\\n\"", "as it is\n", "", ""),
        ];
        for (value, text, dumped, ascii) in rows {
            let or = |expect: &'static str, otherwise: &'static str| {
                if expect.is_empty() { otherwise } else { expect }
            };
            let parsed = serde_json::from_str(value).unwrap();
            check("x", &parsed, text);
            check("x | string", &parsed, text);
            check("x | trim", &parsed, text.trim());
            check("x | tojson", &parsed, or(dumped, value));
            check("x | tojson(ensure_ascii=true)", &parsed, or(ascii, or(dumped, value)));
        }
    }

    #[test]
    fn tojson_has_the_options_of_dumps() {
        let value = json!({ "b": [null, false], "a": { "d": "é", "c": [] } });
        let check =
            |options: &str, expect: &str| check(&format!("x | tojson({options})"), &value, expect);
        check("separators=(',', ':')", r#"{"b":[null,false],"a":{"d":"é","c":[]}}"#);
        check("sort_keys=true", r#"{"a": {"c": [], "d": "é"}, "b": [null, false]}"#);
        check(
            "indent=0",
            "{\n\"b\": [\nnull,\nfalse\n],\n\"a\": {\n\"d\": \"é\",\n\"c\": []\n}\n}",
        );
        check(
            "indent='\t'",
            "{\n\t\"b\": [\n\t\tnull,\n\t\tfalse\n\t],\n\t\"a\": {\n\t\t\"d\": \"é\",\n\t\t\"c\": []\n\t}\n}",
        );
        check(
            "indent=2, separators=(', ', ':')",
            "{\n  \"b\":[\n    null, \n    false\n  ], \n  \"a\":{\n    \"d\":\"é\", \n    \"c\":[]\n  }\n}",
        );
    }
}
