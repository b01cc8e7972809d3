//! Separates what a model thinks first, its reasoning, from the answer while tokens come.

use super::held::{before_mark, skip_space};
use crate::forms::reasoning::ThinkingMarks;

/// Separates reasoning from the answer. White space around the marks belongs to the marks.
#[derive(Clone, Debug)]
pub(crate) struct ThoughtReader {
    marks: ThinkingMarks,
    state: ThoughtState,
    /// Received, and not yet known to be one or the other.
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThoughtState {
    /// Nothing but white space came, and perhaps a part of the opening mark.
    Before,
    /// No text of the thought was shown yet.
    Opened,
    Thinking,
    /// The closing mark came, and no text after it.
    Closed,
    Answering,
}

/// Text that became certain, of the thought and of what follows it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ThoughtStep {
    pub thought: String,
    pub answer: String,
}

impl ThoughtReader {
    /// The reader of an answer whose prompt ends with the opening mark, or does not.
    pub(crate) fn new(marks: ThinkingMarks, opened: bool) -> Self {
        let state = if opened { ThoughtState::Opened } else { ThoughtState::Before };
        Self { marks, state, held: String::new() }
    }

    pub(crate) fn is_thinking(&self) -> bool {
        matches!(self.state, ThoughtState::Opened | ThoughtState::Thinking)
    }

    pub(crate) fn push(&mut self, text: &str) -> ThoughtStep {
        self.held.push_str(text);
        let mut step = ThoughtStep::default();
        while self.advance(&mut step) {}
        step
    }

    /// What was held back, once nothing follows. A part of a mark is text then.
    pub(crate) fn finish(&mut self) -> ThoughtStep {
        let held = std::mem::take(&mut self.held);
        let mut step = ThoughtStep::default();
        match self.state {
            ThoughtState::Opened => held.trim().clone_into(&mut step.thought),
            ThoughtState::Thinking => held.trim_end().clone_into(&mut step.thought),
            ThoughtState::Closed => {}
            ThoughtState::Before | ThoughtState::Answering => step.answer = held,
        }
        step
    }

    /// Does one step; false when more text is needed.
    fn advance(&mut self, step: &mut ThoughtStep) -> bool {
        match self.state {
            ThoughtState::Before => self.look_for_opening(),
            ThoughtState::Opened | ThoughtState::Closed => self.skip_space(),
            ThoughtState::Thinking => self.think(&mut step.thought),
            ThoughtState::Answering => {
                step.answer.push_str(&std::mem::take(&mut self.held));
                false
            }
        }
    }

    fn look_for_opening(&mut self) -> bool {
        let open = self.marks.open.trim_end();
        let visible = self.held.trim_start();
        if let Some(rest) = visible.strip_prefix(open) {
            self.held = rest.to_owned();
            self.state = ThoughtState::Opened;
            return true;
        }
        let may_open = open.starts_with(visible);
        if !may_open {
            self.state = ThoughtState::Answering;
        }
        !may_open
    }

    fn skip_space(&mut self) -> bool {
        skip_space(&mut self.held);
        let has_text = !self.held.is_empty();
        if has_text {
            let thinks = self.state == ThoughtState::Opened;
            self.state = if thinks { ThoughtState::Thinking } else { ThoughtState::Answering };
        }
        has_text
    }

    fn think(&mut self, thought: &mut String) -> bool {
        let (certain, mark) = before_mark(&self.held, &[self.marks.close]);
        let shown = self.held[..certain].trim_end().len();
        thought.push_str(&self.held[..shown]);
        self.held.drain(..mark.map_or(shown, |mark| certain + mark.len()));
        if mark.is_some() {
            self.state = ThoughtState::Closed;
        }
        mark.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forms::reasoning::FAMILIES;
    use crate::testing;

    /// The thought and the answer of pieces, and what was held back to the end of each.
    fn read(opened: bool, pieces: &[&str]) -> (String, String) {
        let mut reader = ThoughtReader::new(FAMILIES[0], opened);
        let (mut thought, mut answer) = (String::new(), String::new());
        let steps: Vec<ThoughtStep> = pieces.iter().map(|piece| reader.push(piece)).collect();
        for step in steps.into_iter().chain([reader.finish()]) {
            thought += &step.thought;
            answer += &step.answer;
        }
        (thought, answer)
    }

    #[test]
    fn thought_and_answer_are_the_same_wherever_tokens_are_cut() {
        let check = |opened, text: &str, thought: &str, answer: &str| {
            let expect = (thought.to_owned(), answer.to_owned());
            for pieces in testing::cuts(text) {
                assert_eq!(read(opened, &pieces), expect, "{pieces:?}");
            }
        };
        check(false, "<think>\na é\n</think>\n\nb\n", "a é", "b\n");
        check(false, " \n<think>a</think>b", "a", "b");
        check(false, "plain", "", "plain");
        check(false, " <thin air", "", " <thin air");
        check(false, "<think", "", "<think");
        check(false, "a <think>b</think>", "", "a <think>b</think>");
        check(false, "<think></think>b", "", "b");
        check(false, "<think>a </thinking </think> b </think>", "a </thinking", "b </think>");
        check(true, "\na\n</think>\nb", "a", "b");
        check(true, "a", "a", "");
        check(true, "a \n</thi", "a \n</thi", "");
        check(true, "</think>b", "", "b");
        check(true, "\n\n</think>\n\n", "", "");
        check(true, "", "", "");
    }

    #[test]
    fn nothing_of_a_mark_is_shown_before_it_is_known_to_be_none() {
        let mut reader = ThoughtReader::new(FAMILIES[0], true);
        assert_eq!(reader.push("a \n</th").thought, "a");
        assert_eq!(reader.push("x").thought, " \n</thx");
        assert_eq!(reader.push("</think").thought, "");
        assert!(reader.is_thinking());
        let step = reader.push("> b");
        assert_eq!((step.thought.as_str(), step.answer.as_str()), ("", "b"));
        assert!(!reader.is_thinking());
    }
}
