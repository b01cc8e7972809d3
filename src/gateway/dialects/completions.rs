//! OpenAI's older `POST /v1/completions`. The prompt is put to the model as a message of the user,
//! in its chat template: no model here is qualified to continue a bare text.

use super::{
    AnswerContent, AnswerEnd, AnswerHead, AnswerWriter, EFFORT, JsonMembers, LeftOut, NodePart,
    Question, UpstreamError, event, message,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// The most output tokens where a request names none, as in that interface.
const MAX_TOKENS: u32 = 16;

#[derive(Deserialize)]
#[serde(untagged)]
enum CompletionPrompt {
    One(String),
    Only([String; 1]),
}

pub(super) fn read(mut asked: JsonMembers) -> Result<Question, String> {
    let prompt = asked.take("prompt", "one text (no list of texts or of tokens)")?;
    let (CompletionPrompt::One(prompt) | CompletionPrompt::Only([prompt])) =
        prompt.ok_or_else(|| "prompt is required.".to_owned())?;
    asked.take_empty(&[
        ("echo", "is not supported: put the prompt before the answer yourself"),
        ("suffix", "is not supported: models here only continue a text"),
        ("logprobs", "is not supported here: ask /v1/chat/completions for them"),
    ])?;
    if asked.take::<u32>("best_of", "a number")?.is_some_and(|count| count != 1) {
        return Err("best_of can only be 1: one answer is made.".into());
    }
    let is_streamed = asked.take("stream", "true or false")?.unwrap_or(false);
    let options: Value = asked.take("stream_options", "an object")?.unwrap_or_default();
    let include_usage = options["include_usage"] == true;
    asked.add("messages", &[message("user", prompt)]);
    let max_tokens: Option<Value> = asked.take("max_tokens", "a number")?;
    asked.add("max_tokens", &max_tokens.unwrap_or(MAX_TOKENS.into()));
    let writer = Box::new(CompletionsWriter { include_usage });
    let left_out = LeftOut::default();
    Ok(Question { chat: asked, writer, is_streamed, left_out, effort: EFFORT })
}

#[derive(Debug)]
struct CompletionsWriter {
    /// A chunk of its own carries the usage.
    include_usage: bool,
}

impl CompletionsWriter {
    fn object(head: &AnswerHead, text: &str, finish_reason: Option<&str>) -> Value {
        let choice = json!({
            "index": 0, "text": text, "logprobs": null, "finish_reason": finish_reason,
        });
        json!({
            "id": head.id, "object": "text_completion", "created": head.created,
            "model": head.model, "choices": [choice],
        })
    }
}

/// Adds what the answer cost.
fn with_cost(mut object: Value, end: &AnswerEnd) -> Value {
    object["usage"] = end.usage.clone();
    object["credits"] = end.credits.clone();
    object
}

impl AnswerWriter for CompletionsWriter {
    /// This interface has no place for thoughts.
    fn part(&mut self, head: &AnswerHead, part: &NodePart, out: &mut String) {
        if let NodePart::Text(text) = part {
            event(out, None, &Self::object(head, text, None));
        }
    }

    fn end(&mut self, head: &AnswerHead, end: &AnswerEnd, out: &mut String) {
        let last = Self::object(head, "", Some(&end.finish_reason));
        if self.include_usage {
            event(out, None, &last);
            let mut cost = Self::object(head, "", None);
            cost["choices"] = json!([]);
            event(out, None, &with_cost(cost, end));
        } else {
            event(out, None, &with_cost(last, end));
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn fail(&mut self, _: &AnswerHead, error: &UpstreamError, out: &mut String) {
        event(out, None, &json!({ "error": error }));
        out.push_str("data: [DONE]\n\n");
    }

    fn whole(&mut self, head: &AnswerHead, content: &AnswerContent, end: &AnswerEnd) -> Value {
        with_cost(Self::object(head, &content.text, Some(&end.finish_reason)), end)
    }
}
