//! Divides an answer into what was thought, what is said and what is called.

use super::call_reader::{AnswerPart, CallReader};
use super::reasoning::{ThoughtReader, ThoughtStep};

/// Reads one answer, token by token.
#[derive(Clone, Debug, Default)]
pub struct AnswerReader {
    pub thoughts: Option<ThoughtReader>,
    pub calls: Option<CallReader>,
    /// Special tokens that are marks of these parts: their text is read, not left out.
    pub marks: Vec<u32>,
}

impl AnswerReader {
    pub fn is_thinking(&self) -> bool {
        self.thoughts.as_ref().is_some_and(ThoughtReader::is_thinking)
    }

    pub fn has_called(&self) -> bool {
        self.calls.as_ref().is_some_and(CallReader::has_called)
    }

    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        let step = match &mut self.thoughts {
            Some(thoughts) => thoughts.push(text),
            None => ThoughtStep { answer: text.to_owned(), ..ThoughtStep::default() },
        };
        self.parts(step)
    }

    /// What was held back, once nothing follows.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let step = self.thoughts.as_mut().map(ThoughtReader::finish).unwrap_or_default();
        let mut parts = self.parts(step);
        parts.extend(self.calls.as_mut().map(CallReader::finish).unwrap_or_default());
        parts
    }

    fn parts(&mut self, step: ThoughtStep) -> Vec<AnswerPart> {
        let ThoughtStep { thought, answer } = step;
        let mut parts = Vec::new();
        parts.extend((!thought.is_empty()).then_some(AnswerPart::Reasoning(thought)));
        match &mut self.calls {
            Some(calls) => parts.extend(calls.push(&answer)),
            None if !answer.is_empty() => parts.push(AnswerPart::Content(answer)),
            None => {}
        }
        parts
    }
}
