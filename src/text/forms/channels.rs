//! The marks of answers in channels, which GPT-OSS writes (OpenAI's harmony format). An answer is a
//! row of messages, each of which has its channel in its header.

pub(crate) const START: &str = "<|start|>";
pub(crate) const CHANNEL: &str = "<|channel|>";
pub(crate) const MESSAGE: &str = "<|message|>";
pub(crate) const END: &str = "<|end|>";
/// Behind a call, and behind the last message of an answer.
pub(crate) const CALLED: &str = "<|call|>";
pub(crate) const RETURNED: &str = "<|return|>";

/// The tokens that divide an answer.
pub(crate) const MARKS: [&str; 7] =
    [START, CHANNEL, MESSAGE, END, "<|constrain|>", CALLED, RETURNED];

/// The header of a text in front of a call, and that of the answer itself.
pub(crate) const PREAMBLE: &str = "<|channel|>commentary<|message|>";
pub(crate) const FINAL: &str = "<|channel|>final<|message|>";
/// Between two messages.
pub(crate) const NEXT: &str = "<|end|><|start|>assistant";
