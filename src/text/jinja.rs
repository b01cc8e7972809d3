//! A Jinja environment that behaves as Hugging Face's does: its whitespace rules, Python's methods
//! and output of values, and `tojson`, `raise_exception`, `strftime_now` and `{% generation %}`.

use super::bounded::{self, Program, Stopped, TemplateLimits, Unwanted};
use super::python;
use chrono::NaiveDateTime;
use minijinja::value::Kwargs;
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
    /// Compiles a template. `now` gives the time to templates that ask for the date.
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
            let text = python::text(value)?;
            bounded::charge(text.len())?;
            Ok(out.write_str(&text)?)
        });
        bounded::install(&mut environment);
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
    let chain =
        std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    chain.filter_map(|error| error.downcast_ref::<Stopped>()).map(Stopped::to_string).next()
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
