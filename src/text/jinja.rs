//! A Jinja environment that behaves as Hugging Face's does: its whitespace rules, Python's methods
//! and output of values, and `tojson`, `raise_exception`, `strftime_now` and `{% generation %}`.

use super::python;
use chrono::NaiveDateTime;
use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde::Serialize;
use std::fmt::Write;

pub(super) struct Jinja(Environment<'static>);

const NAME: &str = "chat";

/// The message of a template that refused a conversation with `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl Jinja {
    /// Compiles a template. `now` gives the time to templates that ask for the date.
    pub(super) fn compile(
        source: &str,
        now: impl Fn() -> NaiveDateTime + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, _, value| Ok(out.write_str(&python::text(value)?)?));
        environment
            .add_filter("tojson", |value: &Value, options: Kwargs| python::tojson(value, &options));
        environment.add_filter("string", |value: &Value| python::text(value));
        environment.add_filter("trim", python::trim);
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
        environment.add_template_owned(NAME, without_generation(source))?;
        Ok(Self(environment))
    }

    pub(super) fn render(&self, context: impl Serialize) -> Result<String, Error> {
        self.0.get_template(NAME)?.render(context)
    }
}

/// The message of the template's own `raise_exception`, if rendering failed because of it.
pub(super) fn raised(error: &Error) -> Option<&str> {
    let chain =
        std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    chain.filter_map(|error| error.downcast_ref()).map(|Raised(message)| message.as_str()).next()
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
