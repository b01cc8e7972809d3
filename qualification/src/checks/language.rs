//! How well the model reads ordinary text. It finds what ruins a model, whatever the cause; a model
//! of average strength for its size is far inside the bounds.

use super::texts::PLAIN_TEXTS;
use super::{CheckFinding, CheckInput};
use crate::policy::policy;
use crate::subject::{ChatTurn, Result, ScorePath};

/// The first of the tenants that no other check uses, one for each text.
const READING: u32 = 20;
/// Tokens at the beginning that are not counted, because nothing leads to them.
const LEAD: usize = 8;

pub(super) fn plain_text(input: &mut CheckInput) -> Result<CheckFinding> {
    let bounds = &policy().language;
    let gate = format!(
        "at most {} nat above a model of average strength for its size: it finds what costs \
         perplexity times {:.0} or more",
        bounds.room.value,
        bounds.room.value.exp()
    );
    if let Some(why) = input.has_learned_nothing() {
        return Ok(CheckFinding::not_run(why, &gate));
    }
    let decades = (input.subject.parameters() as f64 / 1e8).log10();
    let begin = beginning(input)?;
    let (mut passed, mut told) = (true, Vec::new());
    for (tenant, plain) in (READING..).zip(PLAIN_TEXTS) {
        let loss = loss(input, tenant, &begin, plain.text)?;
        let average = (plain.average)(bounds).value - bounds.decade.value * decades;
        let bound = average + bounds.room.value;
        // A loss that is not a number is none within the bound.
        passed &= loss <= bound;
        told.push(format!("{} {loss:.2} of {bound:.2}", plain.name));
    }
    Ok(CheckFinding::new(passed, format!("nat per token: {}", told.join(", ")), gate))
}

/// Mean loss over a text that follows `begin`, nat per token.
fn loss(input: &mut CheckInput, tenant: u32, begin: &[u32], text: &str) -> Result<f64> {
    let mut ids = [begin, &input.subject.encode(text, false)?].concat();
    let longest_prompt = input.subject.context_tokens().saturating_sub(1) as usize;
    ids.truncate(longest_prompt.min(begin.len() + input.scope.text_tokens as usize));
    let scores = input.subject.score(tenant, &ids, ScorePath::Prefill)?;
    let counted = scores.iter().skip(begin.len() + LEAD).flatten();
    let counted: Vec<f64> = counted.map(|score| -f64::from(score.chosen)).collect();
    Ok(counted.iter().sum::<f64>() / counted.len() as f64)
}

/// The token that begins every prompt, if the template begins with a control token.
fn beginning(input: &mut CheckInput) -> Result<Vec<u32>> {
    let prompt = input.subject.encode_chat(&[ChatTurn::new("user", "hello")])?;
    let control = input.subject.control_ids();
    Ok(prompt.first().copied().filter(|id| control.contains(id)).into_iter().collect())
}
