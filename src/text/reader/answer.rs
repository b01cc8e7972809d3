//! Divides an answer into what was thought, what is said and what is called.

use super::channels::ChannelReader;
use super::part::{AnswerPart, ReadCall};
use super::reasoning::{ThoughtReader, ThoughtStep};
use super::tool_calls::CallReader;
use crate::forms::reasoning::ThinkingStart;
use crate::forms::tool_calls::{CallForm, ToolDefinition};

/// Reads one answer, token by token.
#[derive(Clone, Debug, Default)]
pub struct AnswerReader {
    /// Reads an answer that is messages in channels, all of it.
    channels: Option<ChannelReader>,
    /// What is thought comes first, calls come last, and the text between them has no marks.
    thoughts: Option<ThoughtReader>,
    calls: Option<CallReader>,
    /// Special tokens that are marks of its parts: their text is read, not left out.
    pub marks: Vec<u32>,
    /// The answer goes on with a text of the prompt, so a space before it is a part of it.
    pub continues: bool,
}

impl AnswerReader {
    /// The reader of an answer with `marks`, which may think and may have calls of these tools.
    pub(crate) fn of_marks(
        thinking: Option<ThinkingStart>,
        calls: Option<(CallForm, &[ToolDefinition])>,
        marks: Vec<u32>,
    ) -> Self {
        let thoughts = thinking.map(|start| ThoughtReader::new(start.marks, start.opened));
        let calls = calls.map(|(form, tools)| CallReader::new(form, tools));
        Self { thoughts, calls, marks, ..Self::default() }
    }

    /// Reads calls without the family's marks, too, where they are the whole answer.
    pub(crate) fn with_unmarked_calls(mut self) -> Self {
        self.calls = self.calls.map(CallReader::with_unmarked);
        self
    }

    /// The reader of an answer in channels.
    pub(crate) fn of_channels(separates_thoughts: bool, may_call: bool, marks: Vec<u32>) -> Self {
        let channels = Some(ChannelReader::new(separates_thoughts, may_call));
        Self { channels, marks, ..Self::default() }
    }

    /// Whether what is thought is a part of its own.
    pub fn separates_thoughts(&self) -> bool {
        match &self.channels {
            Some(channels) => channels.separates_thoughts,
            None => self.thoughts.is_some(),
        }
    }

    pub fn is_thinking(&self) -> bool {
        match &self.channels {
            Some(channels) => channels.is_thinking(),
            None => self.thoughts.as_ref().is_some_and(ThoughtReader::is_thinking),
        }
    }

    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        if let Some(channels) = &mut self.channels {
            return channels.push(text);
        }
        let step = match &mut self.thoughts {
            Some(thoughts) => thoughts.push(text),
            None => ThoughtStep { answer: text.to_owned(), ..ThoughtStep::default() },
        };
        self.parts(step)
    }

    /// What was held back, once nothing follows.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        if let Some(channels) = &mut self.channels {
            return channels.finish();
        }
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

/// The calls in a text that begins with one, and what is behind them.
pub(crate) fn read_calls(
    form: CallForm,
    tools: &[ToolDefinition],
    text: &str,
) -> (Vec<ReadCall>, String) {
    let mut reader = if form.in_channels {
        AnswerReader::of_channels(true, true, Vec::new())
    } else {
        AnswerReader::of_marks(None, Some((form, tools)), Vec::new())
    };
    let (mut calls, mut behind) = (Vec::<ReadCall>::new(), String::new());
    let parts = reader.push(text);
    for part in parts.into_iter().chain(reader.finish()) {
        match (part, calls.last_mut()) {
            (AnswerPart::Call { name }, _) => {
                calls.push(ReadCall { name, arguments: String::new() });
            }
            (AnswerPart::Arguments(more), Some(call)) => call.arguments.push_str(&more),
            (AnswerPart::Content(more), _) => behind.push_str(&more),
            _ => {}
        }
    }
    (calls, behind)
}
