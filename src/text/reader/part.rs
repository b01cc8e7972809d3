//! The parts of an answer.

/// A piece of an answer, as clients receive it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    Reasoning(String),
    Content(String),
    /// The beginning of the next tool call.
    Call {
        name: String,
    },
    /// More of the latest call's arguments, which together are a JSON text.
    Arguments(String),
}

impl AnswerPart {
    /// The parts of a whole call.
    pub(super) fn of_call(call: ReadCall) -> [Self; 2] {
        [Self::Call { name: call.name }, Self::Arguments(call.arguments)]
    }
}

/// A tool call as it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadCall {
    pub name: String,
    /// A JSON text.
    pub arguments: String,
}
