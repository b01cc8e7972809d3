//! Checks of text as it comes in pieces: streams, stop strings.

use super::client::{Reply, question, with};
use crate::checks::{CheckFinding, CheckInput};
use crate::subject::{Result, SubjectError};
use serde_json::{Value, json};

fn streamed(body: &Value) -> Value {
    with(body.clone(), json!({ "stream": true }))
}

pub(crate) fn stop_string(input: &mut CheckInput) -> Result<CheckFinding> {
    let messages = question("gardens");
    let long = input.long(24);
    let Reply { text, finish, .. } = input.steady(&messages, &long)?;
    let pieces = input.ask_for("stream", &messages, streamed(&long))?.pieces;
    let Some(stop) = across_pieces(&pieces) else {
        const GATE: &str = "a text of several tokens";
        let why = format!("no usable text to stop in: {text:?}");
        // A short answer that ended by itself is no fault of the endpoint.
        return Ok(match finish.as_deref() {
            Some("stop") => CheckFinding::not_run(why, GATE),
            _ => CheckFinding::new(false, why, GATE),
        });
    };
    let before = text.split(&stop).next().unwrap_or_default().to_owned();
    let body = with(long, json!({ "stop": [stop] }));
    let plain = input.ask_for("stop strings", &messages, body.clone())?;
    let live = input.ask(&messages, streamed(&body))?;
    let right = |reply: &Reply| reply.text == before && reply.finish.as_deref() == Some("stop");
    Ok(CheckFinding::new(
        right(&plain) && right(&live),
        format!("{stop:?}: {:?} {:?}, streamed {:?}", plain.text, plain.finish, live.text),
        format!("{before:?}, stop"),
    ))
}

/// The last character of one piece with the first of the next, from the middle of the answer on.
fn across_pieces(pieces: &[String]) -> Option<String> {
    let whole = |pair: &&[String]| pair.iter().all(|text| !text.contains('\u{fffd}'));
    let pair = pieces.get(pieces.len() / 2..)?.windows(2).find(whole)?;
    Some(pair[0].chars().last().into_iter().chain(pair[1].chars().next()).collect())
}

/// Compares a plain answer, and where tokens can be forced also answers of multi-byte characters,
/// where pieces are easily cut.
pub(crate) fn join(input: &mut CheckInput) -> Result<CheckFinding> {
    let long = input.long(24);
    let mut bodies = vec![long.clone()];
    for text in ["é", "😀🚀é漢字"] {
        match input.subject.encode(text, false) {
            Err(SubjectError::Unavailable(_)) => {}
            ids => {
                let bias = ids?.into_iter().map(|id| (id.to_string(), 100.0.into()));
                let bias: serde_json::Map<String, Value> = bias.collect();
                bodies.push(with(long.clone(), json!({ "logit_bias": bias })));
            }
        }
    }
    let messages = question("small pictures");
    let (mut wrong, mut total) = (Vec::new(), 0);
    for (at, body) in bodies.iter().enumerate() {
        let plain = match input.steady(&messages, body) {
            // The first body asks for nothing that an endpoint may lack.
            Err(SubjectError::Refused(_)) if at > 0 && input.subject.api_manner().foreign => {
                continue;
            }
            plain => plain?,
        };
        let live = input.ask_for("stream", &messages, streamed(body))?;
        total += 1;
        if live.text != plain.text || live.finish != plain.finish {
            wrong.push(format!("{:?} streamed, {:?} plain", live.text, plain.text));
        }
    }
    Ok(CheckFinding::from_wrong(&wrong, total, "joined pieces = the plain answer"))
}
