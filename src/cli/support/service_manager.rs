//! Tells a service manager (systemd) what the node is doing. Without a manager nothing is sent.

use sd_notify::NotifyState;

fn tell(states: &[NotifyState]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}

/// The node accepts clients. From now on the manager hears that it lives, where it wants to: a
/// process whose timers do not run any more is killed and started again.
pub(crate) fn ready() {
    tell(&[NotifyState::Ready]);
    let Some(patience) = sd_notify::watchdog_enabled() else { return };
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(patience / 2);
        loop {
            ticks.tick().await;
            tell(&[NotifyState::Watchdog]);
        }
    });
}

/// This process is the service from now on, in place of another one.
pub(crate) fn took_over() {
    tell(&[NotifyState::MainPid(std::process::id())]);
}

/// The node takes nothing new, and ends when what runs has ended.
pub(crate) fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// What the node is doing, as `systemctl status` shows it.
pub(crate) fn doing(what: &str) {
    tell(&[NotifyState::Status(what)]);
}
