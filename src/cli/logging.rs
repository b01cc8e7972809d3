//! Logs to stderr, as text or JSON lines. Never a prompt, a key or a body.

use super::output::{Failure, Result};
use crate::config::{Log, LogFormat};
use tracing_subscriber::EnvFilter;

/// Starts logging for the whole process.
pub fn start(log: &Log) -> Result {
    let filter = EnvFilter::try_new(&log.level)
        .map_err(|error| Failure::new(format!("log.level = {:?}: {error}", log.level)).remedy("try `info`"))?;
    let base = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match log.format {
        LogFormat::Text => base.with_ansi(super::output::colours()).with_target(false).try_init(),
        LogFormat::Json => base.json().flatten_event(true).try_init(),
    };
    started.map_err(Failure::new)
}
