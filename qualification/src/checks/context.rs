//! Checks how long a prompt may really be.

use super::{CheckFinding, CheckInput};
use crate::subject::{Request, Result, SubjectError};

const LONG: u32 = 14;
const OUTPUT: u32 = 8;

pub(super) fn edge(input: &mut CheckInput) -> Result<CheckFinding> {
    let over = input.subject.context_tokens() as usize + 1;
    let prompt = input.varied_text(over, "lamp")?;
    let told = match input.one(Request::greedy(LONG, &prompt, 1)) {
        Err(SubjectError::Refused(_)) => return Ok(CheckFinding::new(true, "refused", "refused")),
        Err(error) => return Err(error),
        Ok(g) => format!("answered {over} prompt tokens, counting {}", g.prompt_tokens),
    };
    Ok(CheckFinding::new(false, told, "refused"))
}

/// Prompt and output fill the scope's context to the last token.
pub(super) fn length(input: &mut CheckInput) -> Result<CheckFinding> {
    let context = input.scope.context_tokens;
    let prompt = input.varied_text(context.saturating_sub(OUTPUT) as usize, "lamp")?;
    let g = input.one(Request::greedy(LONG, &prompt, OUTPUT))?;
    let finite = g.logprobs.iter().all(|l| l.chosen.is_finite());
    let used = g.prompt_tokens + g.tokens.len() as u32;
    Ok(CheckFinding::new(
        used == context && finite,
        format!("{used} tokens, finite: {finite}"),
        format!("{context} tokens, finite"),
    ))
}
