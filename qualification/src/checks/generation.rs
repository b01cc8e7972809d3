//! Checks of generated output: tokens, text, log-probabilities, counts.

use super::{CheckFinding, CheckInput};
use crate::goldens::Case;
use crate::subject::{PositionLogprob, Request, Result, SubjectError};

pub(super) fn logprobs(input: &mut CheckInput) -> Result<CheckFinding> {
    let mut wrong = Vec::new();
    let topics = ["rain", "a small town by the sea", "integers"];
    let topics = topics.map(|topic| input.prompt(topic).map(|prompt| (topic, prompt)));
    let mut prompts = topics.into_iter().collect::<Result<Vec<_>>>()?;
    // A text that repeats itself is one whose tokens are guessed, and some of them wrongly.
    let repeated = input.subject.encode(&"red, green, blue, ".repeat(6), false)?;
    prompts.push(("a text that repeats itself", repeated));
    for (topic, prompt) in &prompts {
        let generation = input.one(Request::greedy(0, prompt, 16))?;
        let mut pairs = generation.logprobs.iter().zip(&generation.tokens);
        let bad = pairs.position(|(l, token)| !sound(l, *token));
        wrong.extend(bad.map(|at| format!("{topic}: token {at}")));
        if generation.logprobs.len() != generation.tokens.len() {
            wrong.push(format!("{topic}: {} log-probabilities", generation.logprobs.len()));
        }
    }
    Ok(CheckFinding::from_wrong(
        &wrong,
        prompts.len(),
        "finite, descending, sum ≤ 1, the greedy token first",
    ))
}

fn sound(logprob: &PositionLogprob, token: u32) -> bool {
    let finite = logprob.chosen.is_finite() && logprob.top.iter().all(|(_, p)| p.is_finite());
    let descending = logprob.top.is_sorted_by(|a, b| a.1 >= b.1);
    let mass: f64 = logprob.top.iter().map(|(_, p)| f64::from(*p).exp()).sum();
    let led = logprob
        .top
        .first()
        .is_some_and(|(id, p)| *id == token && p.to_bits() == logprob.chosen.to_bits());
    finite && descending && mass <= 1.0 + 1e-4 && led
}

pub(super) fn greedy_goldens(input: &mut CheckInput) -> Result<CheckFinding> {
    let Some(goldens) = input.goldens else { return Ok(CheckFinding::without_goldens()) };
    let longest = input.scope.golden_prompt_tokens as usize;
    let cases: Vec<&Case> =
        goldens.cases.iter().filter(|case| case.prompt_ids.len() <= longest).collect();
    let (margin, like) = (input.decisive_margin(), input.is_like());
    let mut wrong = Vec::new();
    // Each case with the number of its tokens that are given: none at first.
    let mut open: Vec<(&Case, usize)> = cases.iter().map(|&case| (case, 0)).collect();
    while !open.is_empty() {
        let requests: Vec<Request> = open.iter().map(|(case, given)| rest(case, *given)).collect();
        let generations = input.subject.generate(&requests)?;
        let mut undecided = Vec::new();
        for (&(case, given), generation) in open.iter().zip(&generations) {
            let Some(at) = difference(&case.greedy_ids[given..], &generation.tokens) else {
                continue;
            };
            let found = generation.tokens.get(at);
            let (at, lead) = (given + at, case.margin(given + at));
            // Both may be right there, and a sister may prefer any token.
            let second = like || found.copied() == case.second(at);
            if found.is_some() && second && lead <= margin {
                undecided.extend((at + 1 < case.greedy_ids.len()).then_some((case, at + 1)));
            } else {
                wrong.push(format!("{} at token {at}, lead {lead}", case.id));
            }
        }
        open = undecided;
    }
    let gate = format!("different only where the reference's second choice is ≤ {margin} behind");
    Ok(CheckFinding::from_wrong(&wrong, cases.len(), &gate))
}

/// The request for what follows the first `given` tokens of a case.
fn rest(case: &Case, given: usize) -> Request {
    let (before, after) = case.greedy_ids.split_at(given);
    let prompt = [&case.prompt_ids, before].concat();
    Request::greedy(0, &prompt, after.len() as u32)
}

/// The first place at which `found` is not what is expected.
fn difference(expected: &[u32], found: &[u32]) -> Option<usize> {
    (0..expected.len()).find(|&at| found.get(at) != expected.get(at))
}

pub(super) fn seeds(input: &mut CheckInput) -> Result<CheckFinding> {
    let prompt = input.prompt("dice")?;
    let first = input.one(Request::sampled(0, &prompt, 16, 7))?;
    let again = input.one(Request::sampled(0, &prompt, 16, 7))?;
    let crowd: Vec<Request> = (7..12).map(|seed| Request::sampled(0, &prompt, 16, seed)).collect();
    let crowd = input.subject.generate(&crowd)?;
    let lead = crowd.first().ok_or_else(|| SubjectError::Failed("no answers".into()))?;
    let (again, among) = (input.same(&first, &again), input.same(&first, lead));
    let others = crowd[1..].iter().any(|other| other.tokens != first.tokens);
    let told = format!(
        "repeated equal: {again}, among neighbours equal: {among}, other seeds differ: {others}"
    );
    Ok(CheckFinding::new(again && among && others, told, "all true"))
}
