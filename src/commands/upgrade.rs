//! Replacing the running program by another one. The new process loads its models while this one
//! serves, and then asks for the listeners.

use super::Live;
use super::error::AdminError;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;
use tokio::process::Command;

/// The flag with which the new process is started.
const TAKE_OVER: &str = "--take-over";

/// Starts `program` as this process was started, and waits until it takes the listeners. It begins
/// here, so that it is where a service manager looks for it.
pub(super) async fn upgrade(live: &Live, program: &Path) -> Result<Value, AdminError> {
    let given = std::env::args_os().skip(1).filter(|argument| argument != TAKE_OVER);
    let arguments: Vec<OsString> = given.collect();
    if !arguments.iter().any(|argument| argument == "serve") {
        let text = "this node was not started by `cresset serve`: stop it and start the new one";
        return Err(AdminError::Refused(text.into()));
    }
    let shown = program.display();
    let started = Command::new(program)
        .args(arguments)
        .arg(TAKE_OVER)
        // It names the process that the manager expects to hear from, which will be another.
        .env_remove("WATCHDOG_PID")
        .stdin(Stdio::null())
        .spawn();
    let mut child = started.map_err(|error| {
        AdminError::Refused(format!("{shown} cannot be started: {error}; this node goes on"))
    })?;
    let pid = child.id();
    tokio::select! {
        ended = child.wait() => {
            let how = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
            Err(AdminError::Refused(format!(
                "{shown} did not take over ({how}): this node goes on; its log says why"
            )))
        }
        () = live.handed_over.cancelled() => Ok(json!({ "pid": pid })),
    }
}
