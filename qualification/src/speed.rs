//! How fast the subject is: evidence beside the verdict, which no check judges.

#![expect(clippy::disallowed_methods, reason = "it is a measurement of time")]

use crate::subject::{Request, Result, Subject};
use std::time::Instant;

/// Tokens of the prompt, and of each answer.
const PROMPT: usize = 512;
const ANSWER: u32 = 64;
/// Answers that are computed together.
const ROWS: [u32; 2] = [1, 8];
/// The first of the tenants that no check uses: their prefix caches are cold.
const FIRST_TENANT: u32 = 1_000_100;
const TEXT: &str = "A measurement says what it measured, with what, how often and how exactly. ";

/// Tokens a second: of a prompt, and of the answers to one request and to eight.
pub fn of(subject: &mut dyn Subject) -> Result<Vec<(String, f64)>> {
    let mut prompt = subject.encode(&TEXT.repeat(PROMPT / 8), false)?;
    prompt.truncate(PROMPT.min(subject.context_tokens().saturating_sub(ANSWER) as usize).max(1));
    let mut tenant = FIRST_TENANT;
    let mut seconds = |rows: u32, tokens: u32| {
        let tenants = tenant..tenant + rows;
        tenant += rows;
        let requests: Vec<_> =
            tenants.map(|tenant| Request::greedy(tenant, &prompt, tokens)).collect();
        let began = Instant::now();
        subject.generate(&requests)?;
        Ok(began.elapsed().as_secs_f64())
    };
    let first = seconds(1, 1)?;
    let mut found =
        vec![(format!("prompt of {} tokens", prompt.len()), prompt.len() as f64 / first)];
    for rows in ROWS {
        let (short, long) = (seconds(rows, 1)?, seconds(rows, ANSWER)?);
        let tokens = f64::from(rows * (ANSWER - 1));
        found.push((format!("answers to {rows} requests"), tokens / (long - short).max(1e-9)));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake::Fake;

    #[test]
    fn prompts_and_answers_are_measured() {
        let found = of(&mut Fake::default()).unwrap();
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names,
            ["prompt of 512 tokens", "answers to 1 requests", "answers to 8 requests"]
        );
        assert!(found.iter().all(|(_, tokens)| *tokens > 0.0 && tokens.is_finite()), "{found:?}");
    }
}
