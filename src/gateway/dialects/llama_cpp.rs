//! llama.cpp's own `POST /completion` and `/infill`, by which editors complete code.

#![expect(clippy::disallowed_methods, reason = "answers tell how long they took")]

use super::{
    AnswerContent, AnswerEnd, AnswerHead, AnswerWriter, Asked, EFFORT, JsonMembers, LeftOut,
    NodePart, PROMPT, Question, UpstreamError, event, gap,
};
use chrono::Utc;
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::Instant;

/// Members about how long a server may take, in which order it samples, and what it tells.
const HARMLESS: [&str; 6] =
    ["lora", "n_indent", "response_fields", "samplers", "t_max_predict_ms", "t_max_prompt_ms"];

#[derive(Deserialize)]
struct ExtraFile {
    #[serde(default)]
    filename: String,
    text: String,
}

pub(super) fn read_completion(mut asked: JsonMembers) -> Result<Asked, String> {
    let prompt: Option<Value> = asked.take(PROMPT, "a text or a list of token ids")?;
    asked.add(PROMPT, &prompt.ok_or("prompt is required.")?);
    question(asked)
}

/// What is typed in the line of the gap comes as a text of its own.
pub(super) fn read_infill(mut asked: JsonMembers) -> Result<Asked, String> {
    let mut text = |name| asked.take::<String>(name, "a text").map(Option::unwrap_or_default);
    let [before, behind, line] = [text("input_prefix")?, text("input_suffix")?, text(PROMPT)?];
    let files: Option<Vec<ExtraFile>> =
        asked.take("input_extra", "a list of files with filename and text")?;
    let files: Vec<Value> = files.unwrap_or_default().into_iter().map(file).collect();
    asked.add(PROMPT, &gap(&(before + &line), &behind, &files));
    question(asked)
}

fn file(ExtraFile { filename, text }: ExtraFile) -> Value {
    let name = if filename.is_empty() { "snippet" } else { &filename };
    json!({ "name": name, "text": text })
}

fn question(mut asked: JsonMembers) -> Result<Asked, String> {
    let mut left_out = LeftOut::default();
    asked.leave_out(&HARMLESS, &mut left_out);
    // A negative number leaves the choice to the server.
    for name in ["n_predict", "seed"] {
        if asked.read::<f64>(name).is_some_and(|number| number < 0.0) {
            asked.leave_out(&[name], &mut left_out);
        }
    }
    let is_streamed = asked.take("stream", "true or false")?.unwrap_or(false);
    let writer = LlamaCppWriter::new(&asked.read::<Value>("stop").unwrap_or_default());
    // Editors let a server read a text ahead so.
    if asked.read::<f64>("n_predict") == Some(0.0) {
        let model = asked.text("model").unwrap_or_default();
        let head = AnswerHead { model, created: Utc::now().timestamp(), ..AnswerHead::default() };
        let mut nothing = object(&head, "");
        nothing["stop"] = true.into();
        return Ok(Asked::Echo(nothing));
    }
    asked.rename("n_predict", "max_tokens");
    asked.rename("repeat_penalty", "repetition_penalty");
    let writer = Box::new(writer);
    Ok(Asked::Question(Question { chat: asked, writer, is_streamed, left_out, effort: EFFORT }))
}

#[derive(Debug)]
struct LlamaCppWriter {
    began: Instant,
    first_text: Option<Instant>,
    /// The node does not tell which stop string ended an answer, so none is told where some were
    /// sent.
    has_stops: bool,
}

impl LlamaCppWriter {
    fn new(stop: &Value) -> Self {
        let has_stops = !stop.is_null() && *stop != json!([]);
        Self { began: Instant::now(), first_text: None, has_stops }
    }

    /// The last object. Times are in milliseconds.
    fn last(&self, head: &AnswerHead, text: &str, end: &AnswerEnd) -> Value {
        let mut last = object(head, text);
        last["stop"] = true.into();
        match (end.is_cut_off(), self.has_stops) {
            (true, _) => last["stop_type"] = "limit".into(),
            (false, false) => last["stop_type"] = "eos".into(),
            (false, true) => {}
        }
        last["tokens_predicted"] = end.completion_tokens.into();
        last["tokens_evaluated"] = end.prompt_tokens.into();
        last["tokens_cached"] = end.cached_tokens.into();
        last["truncated"] = false.into();
        let first_text = self.first_text.unwrap_or(self.began);
        let milliseconds = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
        last["timings"] = json!({
            "cache_n": end.cached_tokens,
            "prompt_n": end.prompt_tokens.saturating_sub(end.cached_tokens),
            "prompt_ms": milliseconds(self.began, first_text),
            "predicted_n": end.completion_tokens,
            "predicted_ms": milliseconds(first_text, Instant::now()),
        });
        last["credits"] = end.credits.clone();
        last
    }
}

fn object(head: &AnswerHead, text: &str) -> Value {
    json!({
        "index": 0, "content": text, "tokens": [], "stop": false, "model": head.model,
        "tokens_predicted": 0, "tokens_evaluated": head.prompt_tokens,
    })
}

impl AnswerWriter for LlamaCppWriter {
    fn part(&mut self, head: &AnswerHead, part: &NodePart, out: &mut String) {
        self.first_text.get_or_insert_with(Instant::now);
        if let NodePart::Text(text) = part {
            event(out, None, &object(head, text));
        }
    }

    fn end(&mut self, head: &AnswerHead, end: &AnswerEnd, out: &mut String) {
        event(out, None, &self.last(head, "", end));
    }

    fn fail(&mut self, _: &AnswerHead, error: &UpstreamError, out: &mut String) {
        event(out, None, &json!({ "error": error }));
    }

    fn whole(&mut self, head: &AnswerHead, content: &AnswerContent, end: &AnswerEnd) -> Value {
        self.last(head, &content.text, end)
    }
}
