//! Logs to stderr, as text or JSON lines. A log never holds a prompt, a key or a body.

use super::bars::BesideBars;
use super::output::{CommandError, CommandResult};
use cresset_node::config::{LogFormat, LogSettings};
use std::any::Any;
use tracing_subscriber::EnvFilter;

/// The filter that decides which lines are written.
pub(crate) fn filter(log: &LogSettings) -> CommandResult<EnvFilter> {
    EnvFilter::try_new(&log.level).map_err(|error| {
        CommandError::new(format!("log.level = {:?}: {error}", log.level)).remedy("try `info`")
    })
}

/// Starts logging for the whole process.
pub(crate) fn start(log: &LogSettings) -> CommandResult {
    if log.format == LogFormat::Json {
        super::output::write_json_lines();
    }
    let base = tracing_subscriber::fmt().with_env_filter(filter(log)?).with_writer(|| BesideBars);
    let started = match log.format {
        LogFormat::Text => base.with_ansi(super::output::colours()).with_target(false).try_init(),
        LogFormat::Json => base.json().flatten_event(true).try_init(),
    };
    started.map_err(CommandError::new)?;
    std::panic::set_hook(Box::new(|panic| {
        let at = panic.location().map(ToString::to_string);
        tracing::error!(at, what = constant(panic.payload()), "a panic");
    }));
    Ok(())
}

/// The text of a panic if it is a constant. A text that was formatted may quote what a client sent.
fn constant(payload: &(dyn Any + Send)) -> Option<&'static str> {
    payload.downcast_ref().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_are_told_without_what_they_quote() {
        assert_eq!(constant(&"a queue broke"), Some("a queue broke"));
        assert_eq!(constant(&format!("index 9 is not in {:?}", "a prompt")), None);
    }
}
