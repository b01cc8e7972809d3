//! Standard error, shared by the bars of long work and by lines.

use cresset_base::{escaped, is_direction_mark};
use indicatif::MultiProgress;
use std::io::{self, Write};
use std::sync::LazyLock;

/// The bars on the terminal. Other lines must not be written while one is drawn.
pub(super) static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Standard error for lines that may come while a bar is drawn: the bar goes, the line is written,
/// the bar comes back below it.
pub(crate) struct BesideBars;

impl Write for BesideBars {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Colours stay, and in JSON the escapes mean the same.
        let text = String::from_utf8_lossy(bytes);
        let shown = escaped(&text, is_direction_mark);
        BARS.suspend(|| io::stderr().lock().write_all(shown.as_bytes()).map(|()| bytes.len()))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().lock().flush()
    }
}
