//! Faults planted between the checks and a completions surface.

use super::planted_faults::PlantedFault;
use crate::subject::ApiAnswer;
use serde_json::Value;

/// Characters of a message that [`PlantedFault::PromptCut`] leaves.
const MOST_CHARACTERS: usize = 1_000;

/// Spoils a request on its way.
pub fn spoil_call(fault: PlantedFault, calls: u64, body: &mut Value) {
    match fault {
        PlantedFault::OneTokenMore => {
            body["max_tokens"] = (body["max_tokens"].as_u64().unwrap_or(0) + 1).into();
        }
        PlantedFault::EndIgnored => body["ignore_eos"] = true.into(),
        PlantedFault::StopDropped => drop_member(body, "stop"),
        PlantedFault::ApiSeedIgnored => body["seed"] = calls.into(),
        PlantedFault::HighTemperatureIgnored if body["temperature"].as_f64() > Some(1.0) => {
            body["temperature"] = 0.0.into();
        }
        PlantedFault::TopPIgnored => drop_member(body, "top_p"),
        PlantedFault::BiasIgnored => drop_member(body, "logit_bias"),
        PlantedFault::PenaltyIgnored => drop_member(body, "presence_penalty"),
        PlantedFault::PromptCut => cut(body),
        PlantedFault::ToolChoiceIgnored => drop_member(body, "tool_choice"),
        PlantedFault::NeverCalls => drop_member(body, "tools"),
        PlantedFault::AlwaysCalls if body["tools"].is_array() => {
            body["tool_choice"] = "required".into();
        }
        _ => {}
    }
}

fn drop_member(body: &mut Value, name: &str) {
    if let Some(body) = body.as_object_mut() {
        body.remove(name);
    }
}

/// Cuts messages, as a proxy with a bound of its own does.
fn cut(body: &mut Value) {
    for message in body["messages"].as_array_mut().into_iter().flatten() {
        let text = message["content"].as_str().unwrap_or_default();
        message["content"] = text.chars().take(MOST_CHARACTERS).collect::<String>().into();
    }
}

/// Spoils an answer to `body`.
pub fn spoil_answer(fault: PlantedFault, body: &Value, answer: &mut ApiAnswer) {
    let hot = body["temperature"].as_f64().is_some_and(|temperature| temperature > 0.0);
    let stops = !body["stop"].is_null();
    let marked = body["messages"].to_string().contains("<|");
    edit(answer, |document, streamed| match fault {
        PlantedFault::UsageOffByOne => {
            add(document, "completion_tokens", 1);
            add(document, "total_tokens", 1);
        }
        PlantedFault::PromptMiscounted => {
            add(document, "prompt_tokens", 2);
            add(document, "total_tokens", 2);
        }
        PlantedFault::ApiSpecialParsed if marked => add(document, "prompt_tokens", -3),
        PlantedFault::HalfCharacter if streamed && !stops => halve(document),
        PlantedFault::WrongText if !streamed => change_late(document),
        PlantedFault::ApiLogitsShifted => shift(document, |value| value + 10.0),
        PlantedFault::LogprobsAfterTemperature if hot => shift(document, |value| value * 0.5),
        _ => {}
    });
}

/// Changes the answer's document, or each of its events.
fn edit(answer: &mut ApiAnswer, change: impl Fn(&mut Value, bool)) {
    if let Ok(mut document) = serde_json::from_slice(&answer.body) {
        change(&mut document, false);
        answer.body = document.to_string().into_bytes();
        return;
    }
    let text = String::from_utf8_lossy(&answer.body).into_owned();
    let lines = text.lines().map(|line| {
        let chunk = line.strip_prefix("data:").and_then(|data| serde_json::from_str(data).ok());
        let Some(mut chunk) = chunk else { return format!("{line}\n") };
        change(&mut chunk, true);
        format!("data: {chunk}\n")
    });
    answer.body = lines.collect::<String>().into_bytes();
}

fn add(document: &mut Value, name: &str, by: i64) {
    let Some(count) = document.pointer_mut(&format!("/usage/{name}")) else { return };
    if let Some(value) = count.as_i64() {
        *count = (value + by).into();
    }
}

/// Each byte of a character outside ASCII is decoded by itself.
fn halve(document: &mut Value) {
    let Some(content) = document.pointer_mut("/choices/0/delta/content") else { return };
    if let Some(text) = content.as_str() {
        let bytes = text.bytes().map(|b| if b.is_ascii() { char::from(b) } else { '\u{fffd}' });
        *content = bytes.collect::<String>().into();
    }
}

fn change_late(document: &mut Value) {
    let Some(content) = document.pointer_mut("/choices/0/message/content") else { return };
    if let Some(text) = content.as_str() {
        let half = text.chars().count() / 2;
        let late = |(at, c): (usize, char)| if at < half { c } else { c.to_ascii_uppercase() };
        *content = text.chars().enumerate().map(late).collect::<String>().into();
    }
}

fn shift(document: &mut Value, change: impl Fn(f64) -> f64) {
    let apply = |value: &mut Value| {
        if let Some(number) = value.as_f64() {
            *value = change(number).into();
        }
    };
    let content = document.pointer_mut("/choices/0/logprobs/content");
    for token in content.and_then(Value::as_array_mut).into_iter().flatten() {
        apply(&mut token["logprob"]);
        for candidate in token["top_logprobs"].as_array_mut().into_iter().flatten() {
            apply(&mut candidate["logprob"]);
        }
    }
}
