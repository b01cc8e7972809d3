//! Progress of long work on stderr: a bar on a terminal, elsewhere a line for every tenth.

use super::output::note;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

const BYTES: &str = "{msg} [{bar:30}] {percent:>3}% {bytes}/{total_bytes} {bytes_per_sec} {eta}";
const STEPS: &str = "{spinner} {msg} {wide_msg}";

/// The progress of one piece of work.
pub(crate) struct TaskProgress {
    what: String,
    /// `None` when stderr is not a terminal.
    bar: Option<ProgressBar>,
    tenths: u64,
}

impl TaskProgress {
    pub(crate) fn bytes(what: impl Into<String>) -> Self {
        Self::styled(what.into(), BYTES)
    }

    pub(crate) fn steps(what: impl Into<String>) -> Self {
        Self::styled(what.into(), STEPS)
    }

    fn styled(what: String, template: &str) -> Self {
        if !std::io::stderr().is_terminal() {
            note(&what);
            return Self { what, bar: None, tenths: 0 };
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr())
            .with_message(what.clone());
        bar.set_style(
            ProgressStyle::with_template(template).expect("invariant: the template is a constant"),
        );
        bar.enable_steady_tick(Duration::from_millis(100));
        Self { what, bar: Some(bar), tenths: 0 }
    }

    pub(crate) fn at(&mut self, done: u64, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            return bar.set_position(done);
        }
        let tenths = done.saturating_mul(10).checked_div(total).unwrap_or(0);
        if tenths > self.tenths {
            self.tenths = tenths;
            note(&format!("{} {}%", self.what, tenths * 10));
        }
    }

    /// Removes the bar from the terminal.
    pub(crate) fn clear(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
