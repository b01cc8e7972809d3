//! Checks that the same request gives the same bits however it is computed.

use super::{CheckFinding, CheckInput, identical};
use crate::subject::{Request, Result};

/// Tenants that no other check uses: their prefix caches are cold.
const ALONE: u32 = 10;
const TOGETHER: u32 = 11;
const WARM: u32 = 12;
const COLD: u32 = 13;

const TOPICS: [&str; 8] = [
    "bees",
    "old bridges in the north of the country, and who built them",
    "tea",
    "why the sky is blue in the day and red in the evening, with all the steps of the explanation",
    "chess openings",
    "a train",
    "the number seven",
    "how bread is made from flour, water, salt and time, and what can go wrong on the way",
];

pub(super) fn batch(input: &mut CheckInput) -> Result<CheckFinding> {
    let prompts = TOPICS.iter().map(|topic| input.prompt(topic)).collect::<Result<Vec<_>>>()?;
    let requests =
        |tenant| prompts.iter().map(|p| Request::greedy(tenant, p, 12)).collect::<Vec<_>>();
    let alone = requests(ALONE).into_iter().map(|r| input.one(r)).collect::<Result<Vec<_>>>()?;
    let together = input.subject.generate(&requests(TOGETHER))?;
    let differs = alone.iter().zip(&together).enumerate().filter(|(_, (a, b))| !identical(a, b));
    let wrong: Vec<String> = differs.map(|(i, _)| format!("row {i} ({})", TOPICS[i])).collect();
    Ok(CheckFinding::from_wrong(&wrong, TOPICS.len(), "batch of 8 = batch of 1, bitwise"))
}

/// Compares a warm prompt, which shares a long beginning with an earlier one, with the same prompt
/// in an account whose prefix cache is cold.
pub(super) fn prefix(input: &mut CheckInput) -> Result<CheckFinding> {
    let shared = TOPICS.join(", ");
    let first = input.prompt(&format!("{shared} and rivers"))?;
    let second = input.prompt(&format!("{shared} and lakes"))?;
    input.one(Request::greedy(WARM, &first, 4))?;
    let warm = input.one(Request::greedy(WARM, &second, 12))?;
    let repeated = input.one(Request::greedy(WARM, &second, 12))?;
    let cold = input.one(Request::greedy(COLD, &second, 12))?;
    let mut wrong = Vec::new();
    if !identical(&warm, &cold) || !identical(&repeated, &cold) {
        wrong.push("a reused prefix changed the answer".into());
    }
    if cold.cached_tokens != 0 {
        wrong.push(format!("{} tokens reused from another account", cold.cached_tokens));
    }
    if warm.cached_tokens == 0 || repeated.cached_tokens == 0 {
        wrong.push("a repeated prefix was computed anew".into());
    }
    let gate = "reused, bitwise equal; nothing shared between accounts";
    Ok(CheckFinding::from_wrong(&wrong, 3, gate))
}
