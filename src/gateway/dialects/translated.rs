//! The node's stream, written again in a dialect: piece by piece, or whole.

use super::node_events::{AnswerContent, NodeEvent, NodeEvents};
use super::{AnswerHead, AnswerWriter, UpstreamError};
use bytes::Bytes;
use serde_json::Value;

#[derive(Debug)]
pub(crate) struct TranslatedStream {
    events: NodeEvents,
    head: AnswerHead,
    writer: Box<dyn AnswerWriter>,
    has_begun: bool,
}

impl TranslatedStream {
    /// A stream about `model`, as the client named it.
    pub(crate) fn new(writer: Box<dyn AnswerWriter>, model: String) -> Self {
        let head = AnswerHead { model, ..AnswerHead::default() };
        Self { events: NodeEvents::default(), head, writer, has_begun: false }
    }

    /// Tells how many tokens the prompt has, before the first event does.
    pub(crate) fn with_prompt(mut self, tokens: u64) -> Self {
        self.head.prompt_tokens = tokens;
        self
    }

    pub(crate) fn content_type(&self) -> &'static str {
        self.writer.content_type()
    }

    /// What the node's next bytes are in the dialect.
    pub(crate) fn take(&mut self, data: &[u8]) -> Bytes {
        let mut out = String::new();
        for event in self.events.take(data, &mut self.head) {
            self.write(&event, &mut out);
        }
        out.into()
    }

    fn write(&mut self, event: &NodeEvent, out: &mut String) {
        let Self { head, writer, has_begun, .. } = self;
        if matches!(event, NodeEvent::KeepAlive) {
            return writer.keep_alive(out);
        }
        if !std::mem::replace(has_begun, true) {
            writer.begin(head, out);
        }
        match event {
            NodeEvent::Part(part) => writer.part(head, part, out),
            NodeEvent::End(end) => writer.end(head, end, out),
            NodeEvent::Failure(error) => writer.fail(head, error, out),
            NodeEvent::KeepAlive => {}
        }
    }
}

/// The answer in the node's whole `stream` as one object.
pub(crate) fn whole(
    mut writer: Box<dyn AnswerWriter>,
    model: String,
    stream: &[u8],
) -> Result<Value, Box<UpstreamError>> {
    let mut head = AnswerHead { model, ..AnswerHead::default() };
    let mut content = AnswerContent::default();
    for event in NodeEvents::default().take(stream, &mut head) {
        match event {
            NodeEvent::Part(part) => content.add(part),
            NodeEvent::End(end) => return Ok(writer.whole(&head, &content, &end)),
            NodeEvent::Failure(error) => return Err(error.into()),
            NodeEvent::KeepAlive => {}
        }
    }
    Err(UpstreamError::unknown().into())
}
