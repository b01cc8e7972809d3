//! Checks that sampling parameters do what they claim.

use super::client::{question, with};
use crate::checks::{CheckFinding, CheckInput};
use crate::subject::{Result, SubjectError};
use serde_json::{Value, json};

/// An id that is text in every vocabulary with more than a thousand tokens.
const ANY_ID: u32 = 1_000;
/// Tokens of answers that are compared as they are, and of those in which words come again.
const ANSWER: u32 = 8;
const REPEATED: u32 = 64;

fn sampled(input: &CheckInput, temperature: f64, seed: u64) -> Value {
    with(input.long(ANSWER), json!({ "temperature": temperature, "seed": seed }))
}

/// A foreign engine that has the prompt in its cache may round otherwise and so, now and then, draw
/// another token: two of three repeats have to be equal there, all of them here.
pub(crate) fn seeds(input: &mut CheckInput) -> Result<CheckFinding> {
    let messages = question("dice");
    let ask = |input: &mut CheckInput, seed: u64| -> Result<String> {
        let body = sampled(input, 1.0, seed);
        Ok(input.ask_for("seed", &messages, body)?.text)
    };
    let (mut equal, mut texts) = (0, Vec::new());
    for seed in [7, 8, 9] {
        let first = ask(input, seed)?;
        equal += usize::from(ask(input, seed)? == first);
        texts.push(first);
    }
    let differ = texts.iter().any(|text| *text != texts[0]);
    let least = if input.subject.api_manner().foreign { 2 } else { 3 };
    Ok(CheckFinding::new(
        equal >= least && differ,
        format!("{equal} of 3 repeats equal, other seeds differ: {differ}"),
        format!("{least} of 3, true"),
    ))
}

/// What came of one parameter.
enum Effect {
    Right,
    Wrong(String),
    NotTaken,
}

type EffectOf = fn(&mut CheckInput) -> Result<Effect>;

const EFFECTS: [(&str, EffectOf); 5] = [
    ("temperature", temperature),
    ("top_p", top_p),
    ("logit_bias", logit_bias),
    ("presence_penalty", |input| penalty(input, "presence_penalty")),
    ("frequency_penalty", |input| penalty(input, "frequency_penalty")),
];

pub(crate) fn effects(input: &mut CheckInput) -> Result<CheckFinding> {
    let (mut wrong, mut right, mut absent) = (Vec::new(), Vec::new(), Vec::new());
    for (name, effect) in EFFECTS {
        match effect(input) {
            Ok(Effect::Right) => right.push(name),
            Ok(Effect::Wrong(why)) => wrong.push(format!("{name}: {why}")),
            Ok(Effect::NotTaken) | Err(SubjectError::Unavailable(_)) => absent.push(name),
            Err(error) => return Err(error),
        }
    }
    if right.is_empty() && wrong.is_empty() {
        return Err(SubjectError::Unavailable("the endpoint takes none of them".into()));
    }
    let gate = "each has the effect that it claims";
    let mut finding = CheckFinding::from_wrong(&wrong, EFFECTS.len() - absent.len(), gate);
    if wrong.is_empty() && !absent.is_empty() {
        finding.value = format!("{}; not taken: {}", finding.value, absent.join(", "));
    }
    Ok(finding)
}

const TOPICS: [&str; 3] = ["gardens", "the sea", "old songs and who sang them"];

/// At 0 a seed changes nothing; at 2 it changes at least one of three answers.
fn temperature(input: &mut CheckInput) -> Result<Effect> {
    let messages = question(TOPICS[0]);
    let cold = input.steady(&messages, &input.long(ANSWER))?.text;
    let body = sampled(input, 0.0, 5);
    if input.ask_for("seed", &messages, body)?.text != cold {
        return Ok(Effect::Wrong("at 0 the answer is not the greedy one".into()));
    }
    for seed in 1..=3 {
        let body = sampled(input, 2.0, seed);
        if input.ask(&messages, body)?.text != cold {
            return Ok(Effect::Right);
        }
    }
    Ok(Effect::Wrong("at 2 every answer is the greedy one".into()))
}

/// So small a nucleus holds the most likely token alone, also at a high temperature.
fn top_p(input: &mut CheckInput) -> Result<Effect> {
    let foreign = input.subject.api_manner().foreign;
    let (mut equal, mut total) = (0, 0);
    for topic in TOPICS {
        let messages = question(topic);
        let body = with(sampled(input, 2.0, 3), json!({ "top_p": 0.0001 }));
        let narrow = match input.ask(&messages, body) {
            Err(SubjectError::Refused(_)) if foreign => return Ok(Effect::NotTaken),
            reply => reply?.text,
        };
        let greedy = input.ask(&messages, input.long(ANSWER))?.text;
        total += 1;
        equal += usize::from(narrow == greedy);
    }
    if equal == total || (foreign && equal * 2 > total) {
        return Ok(Effect::Right);
    }
    Ok(Effect::Wrong(format!("{equal} of {total} answers with 0.0001 are the greedy ones")))
}

/// The largest bias repeats one token.
fn logit_bias(input: &mut CheckInput) -> Result<Effect> {
    let id = match input.subject.encode("word", false) {
        Err(SubjectError::Unavailable(_)) => None,
        ids => ids?.first().copied(),
    };
    let known = id.map(|id| input.subject.decode(&[id; 4], true)).transpose()?;
    let bias = json!({ id.unwrap_or(ANY_ID).to_string(): 100 });
    let body = with(input.long(4), json!({ "logit_bias": bias }));
    let text = input.ask_for("logit_bias", &question(TOPICS[1]), body)?.text;
    let repeats = known.map_or_else(|| is_repeated(&text, 4), |known| text.starts_with(&known));
    Ok(if repeats { Effect::Right } else { Effect::Wrong(format!("100 gave {text:?}")) })
}

/// Whether a text is the same piece `times` times, apart from a blank at its beginning.
fn is_repeated(text: &str, times: usize) -> bool {
    let exact = |text: &str| {
        let length = text.len() / times;
        length > 0 && text.get(..length).is_some_and(|piece| piece.repeat(times) == text)
    };
    exact(text) || exact(&format!(" {text}"))
}

/// A penalty of 2 keeps what was said already from being said again, in at least one of three
/// answers that are long enough to say something twice.
fn penalty(input: &mut CheckInput, name: &str) -> Result<Effect> {
    let mut unsteady = None;
    for topic in TOPICS {
        let messages = question(topic);
        let plain = match input.steady(&messages, &input.long(REPEATED)) {
            Ok(plain) => plain,
            Err(why @ SubjectError::Unavailable(_)) => {
                unsteady = Some(why);
                continue;
            }
            Err(other) => return Err(other),
        };
        let body = with(input.long(REPEATED), json!({ name: 2.0 }));
        if input.ask_for(name, &messages, body)?.text != plain.text {
            return Ok(Effect::Right);
        }
    }
    unsteady.map_or_else(|| Ok(Effect::Wrong("2 changes none of three answers".into())), Err)
}
