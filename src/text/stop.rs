//! Finds stop strings (stop sequences), across token borders too.

/// Holds text back while it may still be the beginning of a stop string.
///
/// The stop string that is complete first wins; of several complete at the same character the
/// longest, so nothing of any is shown. Cost: a constant per byte and stop string, whatever the
/// text (Knuth, Morris, Pratt 1977).
#[derive(Debug)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    /// Received but not yet shown.
    held: String,
    stopped: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub struct StopStep {
    /// Text that can be shown now.
    pub emit: String,
    /// Whether a stop string was completed. Neither it nor anything after it is shown.
    pub stopped: bool,
}

impl StopMatcher {
    /// Empty strings among `stops` are left out: they would stop every answer before it begins.
    pub fn new(stops: Vec<String>) -> Self {
        let patterns =
            stops.into_iter().filter(|stop| !stop.is_empty()).map(Pattern::new).collect();
        Self { patterns, held: String::new(), stopped: false }
    }

    pub fn push(&mut self, text: &str) -> StopStep {
        if self.stopped {
            return StopStep { emit: String::new(), stopped: true };
        }
        for (at, byte) in text.bytes().enumerate() {
            if let Some(longest) = self.completed_by(byte) {
                self.held.push_str(&text[..=at]);
                self.held.truncate(self.held.len() - longest);
                self.stopped = true;
                return StopStep { emit: std::mem::take(&mut self.held), stopped: true };
            }
        }
        self.held.push_str(text);
        let held_back = self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - held_back);
        StopStep { emit: std::mem::replace(&mut self.held, kept), stopped: false }
    }

    /// Returns the text held back, for a generation that ended without a stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Advances every pattern by one byte. Returns the length of the longest stop string that ends
    /// here.
    fn completed_by(&mut self, byte: u8) -> Option<usize> {
        let complete = self
            .patterns
            .iter_mut()
            .filter_map(|pattern| pattern.advance(byte).then_some(pattern.stop.len()));
        complete.max()
    }
}

#[derive(Debug)]
struct Pattern {
    stop: Vec<u8>,
    /// For each prefix length minus one: the length of its longest proper suffix that is a prefix
    /// of the stop string too.
    borders: Vec<usize>,
    /// Number of bytes at the end of the text that begin the stop string.
    matched: usize,
}

impl Pattern {
    fn new(stop: String) -> Self {
        let stop = stop.into_bytes();
        let mut borders = vec![0; stop.len()];
        for at in 1..stop.len() {
            borders[at] = longer_match(&stop, &borders, borders[at - 1], stop[at]);
        }
        Self { stop, borders, matched: 0 }
    }

    /// Takes one more byte and returns whether it completes the stop string.
    fn advance(&mut self, byte: u8) -> bool {
        self.matched = longer_match(&self.stop, &self.borders, self.matched, byte);
        self.matched == self.stop.len()
    }
}

/// The matched length after one more byte; `matched` is less than the whole.
fn longer_match(stop: &[u8], borders: &[usize], mut matched: usize, byte: u8) -> usize {
    while matched > 0 && stop[matched] != byte {
        matched = borders[matched - 1];
    }
    matched + usize::from(stop[matched] == byte)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(stops.iter().map(|stop| (*stop).to_owned()).collect())
    }

    /// Pieces shown after each push, and the end: `!` for a stop, otherwise the result of `finish`.
    fn trace(stops: &[&str], pieces: &[&str]) -> String {
        let mut matcher = matcher(stops);
        let mut trace = Vec::new();
        for piece in pieces {
            let step = matcher.push(piece);
            trace.push(step.emit);
            if step.stopped {
                return trace.join("|") + "|!";
            }
        }
        trace.push(matcher.finish());
        trace.join("|")
    }

    #[test]
    fn stops_are_found_across_pieces() {
        let check = |stops: &[&str], pieces: &[&str], expect: &str| {
            assert_eq!(trace(stops, pieces), expect, "{stops:?} {pieces:?}");
        };
        check(&[], &["any", "thing"], "any|thing|");
        check(&[""], &["any"], "any|");
        check(&["END"], &["abc", "ENDdef"], "abc||!");
        check(&["END"], &["abE", "N", "D"], "ab|||!");
        check(&["END"], &["abE", "N", "Ex"], "ab||ENEx|");
        check(&["END"], &["abEN"], "ab|EN");
        check(&["\n\n"], &["a\n", "b\n", "\nc"], "a|\nb||!");
        check(&["aab"], &["aaa", "b"], "a||!");
        check(&["abab"], &["abaab", "ab"], "aba||!");
        // Of overlapping stop strings the first complete one ends the answer, of two at once the
        // longer.
        check(&["abcd", "bc"], &["xabcd"], "xa|!");
        check(&["bc", "abc"], &["xabc"], "x|!");
        check(&["abcde", "cd"], &["abc", "x"], "|abcx|");
        check(&["abcde", "cd"], &["abc", "d"], "|ab|!");
        // Characters of several bytes are never cut.
        check(&["。"], &["你好", "。再"], "你好||!");
        check(&["é!"], &["caf", "é", "?"], "caf||é?|");
        check(&["🦀🦀"], &["a🦀", "b🦀", "🦀"], "a|🦀b||!");
    }

    #[test]
    fn nothing_is_shown_after_a_stop() {
        let mut matcher = matcher(&["x"]);
        assert!(matcher.push("ax").stopped);
        assert_eq!(matcher.push("more"), StopStep { emit: String::new(), stopped: true });
        assert_eq!(matcher.finish(), "");
    }

    /// The same rule, checked character by character: the text shown, and whether it stopped.
    fn oracle(stops: &[String], text: &str) -> (String, bool) {
        for (at, c) in text.char_indices() {
            let seen = &text[..at + c.len_utf8()];
            let ended =
                stops.iter().filter(|stop| !stop.is_empty() && seen.ends_with(stop.as_str()));
            if let Some(longest) = ended.map(String::len).max() {
                return (seen[..seen.len() - longest].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    proptest! {
        #[test]
        fn agrees_with_the_oracle(
            stops in prop::collection::vec("[ab é]{0,4}", 0..8),
            pieces in prop::collection::vec("[ab é]{0,5}", 0..12),
        ) {
            let mut matcher = StopMatcher::new(stops.clone());
            let (mut shown, mut stopped) = (String::new(), false);
            for piece in &pieces {
                let step = matcher.push(piece);
                shown += &step.emit;
                stopped |= step.stopped;
            }
            shown += &matcher.finish();
            prop_assert_eq!((shown, stopped), oracle(&stops, &pieces.concat()));
        }
    }
}
