//! Divides an answer into what was thought, what is said and what is called.

use crate::reader::channels::ChannelReader;
use crate::reader::reasoning::{ThoughtReader, ThoughtStep};
use crate::reader::tool_calls::{AnswerPart, CallReader};

/// Reads one answer, token by token.
#[derive(Clone, Debug, Default)]
pub struct AnswerReader {
    pub form: AnswerForm,
    /// Special tokens that are marks of its parts: their text is read, not left out.
    pub marks: Vec<u32>,
}

/// How the parts of an answer follow each other.
#[derive(Clone, Debug)]
pub enum AnswerForm {
    /// What is thought comes first, calls come last, and the text between them has no marks.
    Marked(Box<MarkedParts>),
    Channels(ChannelReader),
}

#[derive(Clone, Debug, Default)]
pub struct MarkedParts {
    pub thoughts: Option<ThoughtReader>,
    pub calls: Option<CallReader>,
}

impl Default for AnswerForm {
    fn default() -> Self {
        Self::Marked(Box::default())
    }
}

impl AnswerReader {
    /// Whether what is thought is told apart.
    pub fn tells_thoughts(&self) -> bool {
        match &self.form {
            AnswerForm::Marked(parts) => parts.thoughts.is_some(),
            AnswerForm::Channels(reader) => reader.tells_thoughts,
        }
    }

    pub fn is_thinking(&self) -> bool {
        match &self.form {
            AnswerForm::Marked(parts) => {
                parts.thoughts.as_ref().is_some_and(ThoughtReader::is_thinking)
            }
            AnswerForm::Channels(reader) => reader.is_thinking(),
        }
    }

    pub fn has_called(&self) -> bool {
        match &self.form {
            AnswerForm::Marked(parts) => parts.calls.as_ref().is_some_and(CallReader::has_called),
            AnswerForm::Channels(reader) => reader.has_called(),
        }
    }

    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        match &mut self.form {
            AnswerForm::Marked(parts) => parts.push(text),
            AnswerForm::Channels(reader) => reader.push(text),
        }
    }

    /// What was held back, once nothing follows.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        match &mut self.form {
            AnswerForm::Marked(parts) => parts.finish(),
            AnswerForm::Channels(reader) => reader.finish(),
        }
    }
}

impl MarkedParts {
    fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        let step = match &mut self.thoughts {
            Some(thoughts) => thoughts.push(text),
            None => ThoughtStep { answer: text.to_owned(), ..ThoughtStep::default() },
        };
        self.parts(step)
    }

    fn finish(&mut self) -> Vec<AnswerPart> {
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
