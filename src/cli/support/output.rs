//! Output of the process: one document on stdout, for people or as JSON; everything else on stderr.

use super::bars::BesideBars;
use cresset_client::ClientError;
use serde_json::{Value, json};
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// The reason why a command did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    #[error("{what}")]
    Message { what: String, remedy: Option<String> },
    /// The result was printed already and reports the failure itself (an audit with violations, a
    /// node that is not ready).
    #[error("the result is negative")]
    Negative,
    /// As `Negative`, for a command whose exit codes tell more than one kind of result.
    #[error("the result is negative")]
    NegativeCode(u8),
    /// The reader of our output has closed it.
    #[error("the output was closed")]
    OutputClosed,
}

pub(crate) type CommandResult<T = ()> = Result<T, CommandError>;

/// How a result becomes text for people.
pub(crate) type Render = fn(&Value) -> String;

impl CommandError {
    pub(crate) fn new(what: impl Display) -> Self {
        Self::Message { what: what.to_string(), remedy: None }
    }

    pub(crate) fn remedy(self, remedy: impl Display) -> Self {
        match self {
            Self::Message { what, .. } => Self::Message { what, remedy: Some(remedy.to_string()) },
            other => other,
        }
    }
}

impl From<ClientError> for CommandError {
    fn from(ClientError { what, remedy }: ClientError) -> Self {
        Self::Message { what, remedy }
    }
}

impl From<io::Error> for CommandError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::new(error),
        }
    }
}

/// The form in which results are written: JSON, or text for people.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    pub json: bool,
}

impl Output {
    /// The command's one result: the document itself, or its text for people.
    pub(crate) fn result(
        self,
        document: &Value,
        text: impl FnOnce(&Value) -> String,
    ) -> CommandResult {
        if self.json {
            return print(&format!("{document:#}\n"));
        }
        print(&text(document))
    }

    /// One line of a stream of JSON events (`serve --json`), or of text.
    pub(crate) fn line(self, document: &Value, text: impl Display) -> CommandResult {
        if self.json { print(&format!("{document}\n")) } else { print(&format!("{text}\n")) }
    }

    /// Reports a failure and gives the exit code that belongs to it.
    pub(crate) fn fail(self, failure: &CommandError) -> ExitCode {
        if let CommandError::Message { what, remedy } = failure {
            self.explain(what, remedy.as_deref());
        }
        ExitCode::from(match failure {
            CommandError::OutputClosed => 0,
            CommandError::NegativeCode(code) => *code,
            CommandError::Message { .. } | CommandError::Negative => 1,
        })
    }

    fn explain(self, what: &str, remedy: Option<&str>) {
        let mut error = json!({ "message": what });
        if let Some(remedy) = remedy {
            error["remedy"] = remedy.into();
        }
        if self.json {
            let _ = print(&format!("{:#}\n", json!({ "error": error })));
        }
        if writes_json_lines() {
            return json_line("ERROR", &error);
        }
        let remedy = remedy.map(|text| format!("\n  {text}")).unwrap_or_default();
        note(&format!("{} {what}{remedy}", style(Style::Error, "error:")));
    }
}

/// Text for stdout, flushed, so that pipes see it at once.
pub(crate) fn print(text: &str) -> CommandResult {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}

/// Prints text that a model generated, without control characters that a terminal would obey.
pub(crate) fn print_generated(text: &str) -> CommandResult {
    let harmless = |character: &char| !character.is_control() || matches!(character, '\n' | '\t');
    print(&text.chars().filter(harmless).collect::<String>())
}

/// Whether every line on stderr is a JSON document, as `log.format` says.
static JSON_LINES: AtomicBool = AtomicBool::new(false);

/// Writes what follows on stderr as JSON, a document a line, in the form of the log.
pub(crate) fn write_json_lines() {
    JSON_LINES.store(true, Ordering::Relaxed);
}

pub(crate) fn writes_json_lines() -> bool {
    JSON_LINES.load(Ordering::Relaxed)
}

/// A line on stderr for the person who watches the command. A closed stderr is no failure.
pub(crate) fn note(text: &str) {
    if writes_json_lines() {
        return json_line("INFO", &json!({ "message": text.trim() }));
    }
    let _ = BesideBars.write_all(format!("{text}\n").as_bytes());
}

fn json_line(level: &str, fields: &Value) {
    let mut timestamp = String::new();
    // Writing into a text does not fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    let mut line = json!({ "timestamp": timestamp, "level": level, "target": "cresset::cli" });
    if let (Some(line), Value::Object(fields)) = (line.as_object_mut(), fields) {
        line.extend(fields.clone());
    }
    let _ = BesideBars.write_all(format!("{line}\n").as_bytes());
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Style {
    Good,
    Warning,
    Error,
    Dim,
}

/// Colours a word for stderr or stdout when both are terminals that want colours.
pub(crate) fn style(style: Style, text: &str) -> String {
    if !colours() {
        return text.to_owned();
    }
    let code = match style {
        Style::Good => "32",
        Style::Warning => "33",
        Style::Error => "1;31",
        Style::Dim => "2",
    };
    format!("\u{1b}[{code}m{text}\u{1b}[0m")
}

/// Whether colours are written: both outputs are terminals, and the environment does not forbid
/// colours.
pub(crate) fn colours() -> bool {
    !writes_json_lines()
        && cresset_node::config::colours_allowed()
        && io::stdout().is_terminal()
        && io::stderr().is_terminal()
}
