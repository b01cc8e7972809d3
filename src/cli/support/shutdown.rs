//! SIGINT and SIGTERM: the first asks for a clean end, the second ends at once. A command whose
//! terminal is closed ends cleanly, too.

use super::output::{CommandError, CommandResult};
use std::future::Future;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Exit code of a process that got a second signal.
const ENDED_BY_FORCE: i32 = 1;

/// A token that is cancelled by the first signal or when the terminal is closed.
pub(crate) fn on_signal_or_hangup() -> CommandResult<CancellationToken> {
    let (token, mut hangup) = (on_signal()?, signal(SignalKind::hangup())?);
    let ended = token.clone();
    tokio::spawn(async move {
        hangup.recv().await;
        ended.cancel();
    });
    Ok(token)
}

/// A token that is cancelled by the first signal. The second ends the process.
pub(crate) fn on_signal() -> CommandResult<CancellationToken> {
    let (mut interrupt, mut terminate) =
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let token = CancellationToken::new();
    let first = token.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
            if first.is_cancelled() {
                std::process::exit(ENDED_BY_FORCE);
            }
            first.cancel();
        }
    });
    Ok(token)
}

/// Runs `work` unless a signal comes first.
pub(crate) async fn unless_interrupted<T>(
    shutdown: &CancellationToken,
    work: impl Future<Output = CommandResult<T>>,
) -> CommandResult<T> {
    tokio::select! {
        done = work => done,
        () = shutdown.cancelled() => Err(CommandError::new("interrupted before it was done; nothing half-made is left")),
    }
}
