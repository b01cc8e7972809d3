//! OpenAI's older `POST /v1/completions`: the model goes on with a bare text, without its chat
//! template, or fills in the text before a `suffix`.

use super::{
    AnswerContent, AnswerEnd, AnswerHead, AnswerWriter, EFFORT, JsonMembers, LeftOut, NodePart,
    PROMPT, Question, UpstreamError, event, gap,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// The most output tokens where a request names none, as in that interface.
const MAX_TOKENS: u32 = 16;

#[derive(Deserialize)]
#[serde(untagged)]
enum CompletionPrompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    Lists(Vec<Vec<u32>>),
}

impl CompletionPrompt {
    /// The only prompt: a text, or token ids.
    fn only(self) -> Result<Value, String> {
        let (mut all, ids): (Vec<Value>, _) = match self {
            Self::Text(text) => return Ok(text.into()),
            // An empty list is one of texts.
            Self::Tokens(ids) => return Ok(ids.into()),
            Self::Texts(texts) => (texts.into_iter().map(Value::from).collect(), ""),
            Self::Lists(lists) => (lists.into_iter().map(Value::from).collect(), " of token ids"),
        };
        match all.len() {
            1 => Ok(all.remove(0)),
            count => Err(format!(
                "prompt must have one text{ids}, and has {count}: send each prompt in a request \
                 of its own (a batch size of 1)."
            )),
        }
    }
}

pub(super) fn read(mut asked: JsonMembers) -> Result<Question, String> {
    let prompt: Option<CompletionPrompt> = asked.take(PROMPT, "a text or a list of token ids")?;
    let prompt = prompt.ok_or("prompt is required.")?.only()?;
    let suffix: String = asked.take("suffix", "a text")?.unwrap_or_default();
    if asked.take::<u32>("best_of", "a number")?.is_some_and(|count| count != 1) {
        return Err("best_of can only be 1: one answer is made.".into());
    }
    let scored = take_logprobs(&mut asked)?;
    let echo = asked.take("echo", "true or false")?.unwrap_or(false);
    let is_streamed = asked.take("stream", "true or false")?.unwrap_or(false);
    let options: Value = asked.take("stream_options", "an object")?.unwrap_or_default();
    let include_usage = options["include_usage"] == true;
    let echo = if echo { echoed(&prompt, scored)? } else { String::new() };
    let is_bare = asked.take("add_special_tokens", "true or false")? == Some(false);
    asked.add(PROMPT, &raw(prompt, &suffix, is_bare)?);
    let max_tokens: Option<Value> = asked.take("max_tokens", "a number")?;
    asked.add("max_tokens", &max_tokens.unwrap_or(MAX_TOKENS.into()));
    let writer = Box::new(CompletionsWriter { include_usage, echo, ..Default::default() });
    let left_out = LeftOut::default();
    Ok(Question { chat: asked, writer, is_streamed, left_out, effort: EFFORT })
}

/// The node's prompt; no token that begins every text comes before one that `is_bare`.
fn raw(prompt: Value, suffix: &str, is_bare: bool) -> Result<Value, String> {
    match (prompt, suffix) {
        (Value::String(text), "") if is_bare => Ok(json!({ "text": text, "add_special": false })),
        (prompt, "") => Ok(prompt),
        _ if is_bare => Err("add_special_tokens: false cannot go with suffix.".into()),
        (Value::String(prefix), suffix) => Ok(gap(&prefix, suffix, &[])),
        _ => Err("suffix needs prompt as a text, not as token ids.".into()),
    }
}

/// The number of likeliest tokens becomes the node's two members. Whether there is one.
fn take_logprobs(asked: &mut JsonMembers) -> Result<bool, String> {
    let count: Value = asked.take("logprobs", "a number")?.unwrap_or_default();
    let is_scored = !(count.is_null() || count == false);
    if is_scored {
        asked.add("logprobs", &true);
        asked.add("top_logprobs", &count);
    }
    Ok(is_scored)
}

/// The text that comes before the answer.
fn echoed(prompt: &Value, scored: bool) -> Result<String, String> {
    if scored {
        let why = "echo cannot go with logprobs: log-probabilities are told of answers, not of \
                   prompts. Leave one of them out; of evaluation tasks take those that generate.";
        return Err(why.into());
    }
    let text = prompt.as_str().map(str::to_owned);
    text.ok_or_else(|| "echo needs prompt as a text, not as token ids.".into())
}

#[derive(Debug, Default)]
struct CompletionsWriter {
    /// A chunk of its own carries the usage.
    include_usage: bool,
    /// What is told before the answer.
    echo: String,
    /// The log-probabilities of tokens whose text has not been told.
    scores: Vec<Value>,
    /// Characters told so far.
    told: usize,
}

impl CompletionsWriter {
    fn object(&mut self, head: &AnswerHead, text: &str, finish_reason: Option<&str>) -> Value {
        let logprobs = self.logprobs();
        let choice = json!({
            "index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason,
        });
        json!({
            "id": head.id, "object": "text_completion", "created": head.created,
            "model": head.model, "choices": [choice],
        })
    }

    /// The scores that came, in lists with a place for each token.
    fn logprobs(&mut self) -> Value {
        let scores = std::mem::take(&mut self.scores);
        if scores.is_empty() {
            return Value::Null;
        }
        let mut offsets = Vec::new();
        for score in &scores {
            offsets.push(self.told);
            self.told += score["token"].as_str().unwrap_or_default().chars().count();
        }
        let all = |name: &str| scores.iter().map(|one| one[name].clone()).collect::<Vec<_>>();
        let top: Vec<Value> = scores.iter().map(likeliest).collect();
        json!({
            "tokens": all("token"), "token_logprobs": all("logprob"), "top_logprobs": top,
            "text_offset": offsets,
        })
    }
}

/// The likeliest tokens at one place, by their text.
fn likeliest(score: &Value) -> Value {
    let top = score["top_logprobs"].as_array().map_or(&[][..], Vec::as_slice);
    let named = |one: &Value| Some((one["token"].as_str()?.to_owned(), one["logprob"].clone()));
    Value::Object(top.iter().filter_map(named).collect::<Map<_, _>>())
}

/// Adds what the answer cost.
fn with_cost(mut object: Value, end: &AnswerEnd) -> Value {
    object["usage"] = end.usage.clone();
    object["credits"] = end.credits.clone();
    object
}

impl AnswerWriter for CompletionsWriter {
    fn begin(&mut self, head: &AnswerHead, out: &mut String) {
        if !self.echo.is_empty() {
            let echo = std::mem::take(&mut self.echo);
            event(out, None, &self.object(head, &echo, None));
        }
    }

    fn part(&mut self, head: &AnswerHead, part: &NodePart, out: &mut String) {
        match part {
            NodePart::Scores(scores) => self.scores.extend_from_slice(scores),
            NodePart::Text(text) => event(out, None, &self.object(head, text, None)),
            // Answers to bare texts have no other parts.
            _ => {}
        }
    }

    fn end(&mut self, head: &AnswerHead, end: &AnswerEnd, out: &mut String) {
        let last = self.object(head, "", Some(&end.finish_reason));
        if self.include_usage {
            event(out, None, &last);
            let mut cost = self.object(head, "", None);
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
        self.scores.clone_from(&content.scores);
        let text = std::mem::take(&mut self.echo) + &content.text;
        with_cost(self.object(head, &text, Some(&end.finish_reason)), end)
    }
}
