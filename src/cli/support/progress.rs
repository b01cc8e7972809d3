//! Progress of long work on stderr: a bar on a terminal, elsewhere a line for every tenth.

use super::output::note;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

const BYTES: &str = "{msg} [{bar:30}] {percent:>3}% {bytes}/{total_bytes} {bytes_per_sec} {eta}";
const STEPS: &str = "{msg} [{bar:30}] {percent:>3}% {pos}/{len} {elapsed}";
/// Before the amount of work is known, and where it never is.
const WAITING: &str = "{spinner} {msg} {elapsed}";

/// The progress of one piece of work.
pub(crate) struct TaskProgress {
    what: String,
    /// `None` when stderr is not a terminal.
    bar: Option<ProgressBar>,
    /// The look of the bar once the amount of work is known.
    measured: &'static str,
    tenths: u64,
}

impl TaskProgress {
    pub(crate) fn bytes(what: impl Into<String>) -> Self {
        Self::styled(what.into(), BYTES)
    }

    pub(crate) fn steps(what: impl Into<String>) -> Self {
        Self::styled(what.into(), STEPS)
    }

    fn styled(what: String, measured: &'static str) -> Self {
        if !std::io::stderr().is_terminal() {
            note(&what);
            return Self { what, bar: None, measured, tenths: 0 };
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr())
            .with_message(what.clone());
        bar.set_style(style(WAITING));
        bar.enable_steady_tick(Duration::from_millis(100));
        Self { what, bar: Some(bar), measured, tenths: 0 }
    }

    pub(crate) fn at(&mut self, done: u64, total: u64) {
        if let Some(bar) = &self.bar {
            if bar.length() != Some(total) && total > 0 {
                bar.set_style(style(self.measured));
                bar.set_length(total);
            }
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

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("invariant: the template is a constant")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_each_thing_once() {
        for template in [BYTES, STEPS, WAITING] {
            style(template);
            assert_eq!(template.matches("msg").count(), 1, "{template}");
        }
        for template in [BYTES, STEPS] {
            assert!(template.contains("{bar") && template.contains("{percent"), "{template}");
        }
    }
}
