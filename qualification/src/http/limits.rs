//! Checks of ends and counts: limits of length, end-of-text, usage.

use super::client::{ApiUsage, Reply, question, with};
use crate::checks::{CheckFinding, CheckInput};
use crate::subject::{ChatTurn, Result, SubjectError};
use serde_json::json;

/// Largest bias of the dialect. It raises any token over every other.
const FORCE: f64 = 100.0;

pub(crate) fn length(input: &mut CheckInput) -> Result<CheckFinding> {
    let mut wrong = Vec::new();
    let (limits, mut at_limit) = ([1, 2, 7, 17], 0);
    for limit in limits {
        let reply = scored(input, "counting", limit)?;
        let count = tokens(input, &reply)?;
        at_limit += usize::from(reply.at_limit());
        let exact = count == u64::from(limit) && reply.at_limit();
        // An answer may end by itself where the endpoint cannot be told to go on.
        let ended = !input.subject.api_manner().ignore_eos
            && !reply.at_limit()
            && count <= u64::from(limit);
        if !exact && !ended {
            wrong.push(format!("{limit} gave {count} tokens, {:?}", reply.finish));
        }
    }
    if at_limit == 0 && wrong.is_empty() {
        return Err(SubjectError::Unavailable("every answer ended before its limit".into()));
    }
    let gate = "exactly max_tokens tokens, finish_reason length";
    Ok(CheckFinding::from_wrong(&wrong, limits.len(), gate))
}

/// An answer with log-probabilities, whose number is that of its tokens; without them where the
/// endpoint has none.
fn scored(input: &mut CheckInput, topic: &str, limit: u32) -> Result<Reply> {
    let plain = input.long(limit);
    let more = with(plain.clone(), json!({ "logprobs": true, "top_logprobs": 1 }));
    match input.ask_for("log-probabilities", &question(topic), more) {
        Err(SubjectError::Unavailable(_)) => input.ask(&question(topic), plain),
        reply => reply,
    }
}

/// The number of the answer's tokens. This node's log-probabilities have an entry for each; others
/// may leave parts of characters out, so their usage is asked first.
fn tokens(input: &CheckInput, reply: &Reply) -> Result<u64> {
    let listed = reply.tokens.as_ref().map(|tokens| tokens.len() as u64);
    let used = reply.usage.map(|usage| usage.completion);
    let known = if input.subject.api_manner().foreign { used.or(listed) } else { listed.or(used) };
    let neither = "its answers have neither usage nor log-probabilities";
    known.ok_or_else(|| SubjectError::Unavailable(neither.into()))
}

pub(crate) fn usage(input: &mut CheckInput) -> Result<CheckFinding> {
    let mut wrong = Vec::new();
    let topics = ["money", "a very long walk through the hills of a country that nobody knows"];
    for topic in topics {
        let reply = scored(input, topic, 5)?;
        let plain = reply.counted()?;
        let used = tokens(input, &reply)?;
        if plain.completion != used || plain.total != plain.prompt + plain.completion {
            wrong.push(format!("{topic}: {plain:?}, and {used} tokens came"));
        }
        let streamed = streamed_usage(input, topic)?;
        if streamed.is_some_and(|streamed| streamed != plain) {
            wrong.push(format!("{topic}: {plain:?}, in a stream {streamed:?}"));
        }
        if streamed.is_none() && !input.subject.api_manner().foreign {
            wrong.push(format!("{topic}: a stream has no usage"));
        }
    }
    let gate = "completion counts exact, totals their sum, streams the same";
    Ok(CheckFinding::from_wrong(&wrong, topics.len(), gate))
}

/// `None` where the endpoint's streams have none.
fn streamed_usage(input: &mut CheckInput, topic: &str) -> Result<Option<ApiUsage>> {
    let more = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let body = with(input.long(5), more);
    match input.ask_for("usage in streams", &question(topic), body) {
        Err(SubjectError::Unavailable(_)) => Ok(None),
        reply => Ok(reply?.usage),
    }
}

pub(crate) fn end_of_text(input: &mut CheckInput) -> Result<CheckFinding> {
    let ids = input.subject.eos_ids();
    if ids.is_empty() {
        return Err(SubjectError::Unavailable("the ids that end a text are not known here".into()));
    }
    bias_works(input)?;
    let mut wrong = Vec::new();
    for id in &ids {
        let more = json!({ "max_tokens": 4, "logit_bias": { id.to_string(): FORCE } });
        let reply = input.ask(&question("the end"), more)?;
        if reply.finish.as_deref() != Some("stop") || !reply.text.is_empty() {
            wrong.push(format!("id {id}: {:?}, text {:?}", reply.finish, reply.text));
        }
    }
    Ok(CheckFinding::from_wrong(&wrong, ids.len(), "each ends the answer at once, with no text"))
}

/// Fails as unavailable unless a bias forces a token of text.
fn bias_works(input: &mut CheckInput) -> Result<()> {
    let Some(id) = input.subject.encode("word", false)?.first().copied() else { return Ok(()) };
    let forced = input.subject.decode(&[id, id, id], true)?;
    let more = with(input.long(3), json!({ "logit_bias": { id.to_string(): FORCE } }));
    let reply = input.ask_for("logit_bias", &question("words"), more)?;
    if reply.text == forced || !input.subject.api_manner().foreign {
        return Ok(());
    }
    Err(SubjectError::Unavailable("logit_bias forces no token there".into()))
}

/// Words that have at least a token each.
fn words(count: usize) -> String {
    "word ".repeat(count)
}

pub(crate) fn prompt_too_long(input: &mut CheckInput) -> Result<CheckFinding> {
    let context = input.subject.context_tokens() as usize;
    let messages = [ChatTurn::new("user", words(context + 1).trim_end())];
    let gate = "refused";
    let told = match input.ask(&messages, json!({ "max_tokens": 1 })) {
        Err(SubjectError::Refused(why)) => return Ok(CheckFinding::new(true, why, gate)),
        Err(error) => return Err(error),
        Ok(reply) => reply.counted()?.prompt as usize,
    };
    let value = format!("answered a prompt of over {context} tokens, counting {told}");
    // Another endpoint may serve a longer context than this node does.
    let whole = told > context && input.subject.api_manner().foreign;
    Ok(CheckFinding::new(whole, value, gate))
}
