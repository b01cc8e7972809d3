//! Replacing the running program by another one. The new process loads its models while this one
//! serves, and then asks for the listeners.

use super::Live;
use super::error::AdminError;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::{Child, Command};

/// The flag with which the new process is started.
const TAKE_OVER: &str = "--take-over";

/// A program that is to take over. It is ended with this, unless it has the listeners.
struct Successor<'a> {
    child: Child,
    live: &'a Live,
}

impl Drop for Successor<'_> {
    fn drop(&mut self) {
        if !self.live.handed_over.is_cancelled() {
            // It may have ended by itself.
            let _ = self.child.start_kill();
        }
    }
}

/// Starts `program` as this process was started, and waits until it takes the listeners, for
/// `requests.upgrade_seconds` at most. It begins here, so that it is where a service manager looks
/// for it.
pub(super) async fn upgrade(live: &Live, program: &Path) -> Result<Value, AdminError> {
    let Ok(_turn) = live.upgrading.try_lock() else {
        let text = "another upgrade of this node has begun: wait for its end";
        return Err(AdminError::Refused(text.into()));
    };
    let shown = program.display();
    let refused = |why: String| Err(AdminError::Refused(format!("{shown} {why}")));
    let mut new = match start(live, program)? {
        Ok(new) => new,
        Err(error) => return refused(format!("cannot be started: {error}; this node goes on")),
    };
    let pid = new.child.id();
    let seconds = live.settings.requests.upgrade_seconds;
    tokio::select! {
        ended = new.child.wait() => {
            let how = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
            refused(format!("did not take over ({how}): this node goes on; its log says why"))
        }
        () = live.handed_over.cancelled() => Ok(json!({ "pid": pid })),
        () = tokio::time::sleep(Duration::from_secs(seconds)) => refused(format!(
            "did not take over within {seconds} s (requests.upgrade_seconds) and was ended: this \
             node goes on"
        )),
    }
}

fn start<'a>(live: &'a Live, program: &Path) -> Result<io::Result<Successor<'a>>, AdminError> {
    let given = std::env::args_os().skip(1).filter(|argument| argument != TAKE_OVER);
    let arguments: Vec<OsString> = given.collect();
    if !arguments.iter().any(|argument| argument == "serve") {
        let text = "this node was not started by `cresset serve`: stop it and start the new one";
        return Err(AdminError::Refused(text.into()));
    }
    let started = Command::new(program)
        .args(arguments)
        .arg(TAKE_OVER)
        // It names the process that the manager expects to hear from, which will be another.
        .env_remove("WATCHDOG_PID")
        .stdin(Stdio::null())
        .spawn();
    Ok(started.map(|child| Successor { child, live }))
}
