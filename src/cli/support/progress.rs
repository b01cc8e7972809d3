//! Progress of long work on stderr: a bar on a terminal, elsewhere a line for every tenth.

use super::bars::BARS;
use super::output::{note, writes_json_lines};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

const BYTES: &str = "{msg} [{bar:30}] {percent:>3}% {bytes}/{total_bytes} {bytes_per_sec} {eta}";
const STEPS: &str = "{msg} [{bar:30}] {percent:>3}% {pos}/{len} {elapsed}";
/// Before the amount of work is known, and where it never is.
const WAITING: &str = "{spinner} {msg} {elapsed}";

/// The progress of one piece of work, shown until it is dropped.
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
        if !std::io::stderr().is_terminal() || writes_json_lines() {
            note(&what);
            return Self { what, bar: None, measured, tenths: 0 };
        }
        let bar = BARS.add(ProgressBar::no_length().with_message(what.clone()));
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

    /// Goes on with another part of the work, under another name and from its beginning.
    pub(crate) fn phase(&mut self, what: String) {
        if self.what == what {
            return;
        }
        match &self.bar {
            Some(bar) => bar.set_message(what.clone()),
            None => note(&what),
        }
        (self.what, self.tenths) = (what, 0);
    }
}

/// Removes the bar from the terminal.
impl Drop for TaskProgress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            BARS.remove(bar);
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
    fn another_part_of_the_work_begins_again() {
        let mut progress = TaskProgress::bytes("fetching");
        progress.at(10, 10);
        progress.phase("fetching".to_owned());
        assert!(progress.bar.is_some() || progress.tenths == 10);
        progress.phase("checking".to_owned());
        assert_eq!((progress.what.as_str(), progress.tenths), ("checking", 0));
    }

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
