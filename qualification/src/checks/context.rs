//! How long a prompt really may be.

use super::{Bench, Finding};
use crate::subject::{Request, Result, SubjectError};

const LONG: u32 = 14;
const OUTPUT: u32 = 8;

pub fn edge(bench: &mut Bench) -> Result<Finding> {
    let over = bench.subject.context_tokens() as usize + 1;
    let prompt = filled(bench, over)?;
    let told = match bench.one(Request::greedy(LONG, &prompt, 1)) {
        Err(SubjectError::Refused(_)) => return Ok(Finding::new(true, "refused", "refused")),
        Err(error) => return Err(error),
        Ok(g) => format!("answered {over} prompt tokens, counting {}", g.prompt_tokens),
    };
    Ok(Finding::new(false, told, "refused"))
}

/// Prompt and output fill the scope's context to the last token.
pub fn length(bench: &mut Bench) -> Result<Finding> {
    let context = bench.scope.context_tokens;
    let prompt = filled(bench, context.saturating_sub(OUTPUT) as usize)?;
    let g = bench.one(Request::greedy(LONG, &prompt, OUTPUT))?;
    let finite = g.logprobs.iter().all(|l| l.chosen.is_finite());
    let used = g.prompt_tokens + g.tokens.len() as u32;
    Ok(Finding::new(
        used == context && finite,
        format!("{used} tokens, finite: {finite}"),
        format!("{context} tokens, finite"),
    ))
}

/// Exactly `length` tokens of varied text.
fn filled(bench: &mut Bench, length: usize) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for n in 0.. {
        if ids.len() >= length {
            break;
        }
        let sentence = format!(
            " Note {n}: the keeper of lamp {} writes down the weather at hour {}.",
            n * 7 % 101,
            n % 24
        );
        ids.extend(bench.subject.encode(&sentence, false)?);
    }
    ids.truncate(length);
    Ok(ids)
}
