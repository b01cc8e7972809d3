//! Checks of answers whose keys and values are lost on the way: evicted, taken from a running
//! request, or gone with the engine. They start the engine anew, some with a small cache, so only
//! the full suite runs them.

use super::{CheckFinding, CheckInput};
use crate::subject::{EngineRoom, Generation, Request, Result, SubjectError};

/// Tenants that no other check uses.
const EVICTED: u32 = 16;
const FILLING: u32 = 17;
const RESTARTED: u32 = 19;
/// The first of the tenants of requests that run side by side, one for each.
const CROWDED: u32 = 4_000;

/// Blocks of the prompts whose answers are compared.
const PROMPT: usize = 6;
/// Blocks of the small cache in which prompts are evicted.
const SMALL: usize = 16;

/// Requests that run side by side. The last one is compared, after it has lost its blocks.
struct Crowd {
    /// Blocks of the cache.
    blocks: usize,
    /// Blocks that each prompt has, and that each answer fills.
    prompt: usize,
    answers: &'static [usize],
    /// The number of times that the last request loses its blocks.
    times: u64,
}

/// Both answers grow until the cache is full; the first one then ends, and the second goes on.
const ONCE: Crowd = Crowd { blocks: 14, prompt: 4, answers: &[6, 6], times: 1 };
/// The first one leaves room for the last, which the second one takes again.
const TWICE: Crowd = Crowd { blocks: 15, prompt: 4, answers: &[2, 8, 6], times: 2 };

pub(super) fn evicted(input: &mut CheckInput) -> Result<CheckFinding> {
    let gate = format!(
        "found again as far as it is left, and the answer of an empty cache, {}",
        input.sameness()
    );
    let block = match block_tokens(input, SMALL) {
        Ok(block) => block,
        Err(why) => return Ok(CheckFinding::not_run(why, gate)),
    };
    let text = input.varied_text(SMALL * block, "blocks")?;
    let asked = Request::greedy(EVICTED, &text[..=PROMPT * block], 4);
    // Its last token is the last of its blocks.
    let filling = |blocks: usize| Request::greedy(FILLING, &text[..blocks * block - 1], 1);
    let answers = input.with_blocks(SMALL, |input| {
        let (cold, whole) = (input.one(asked.clone())?, input.one(asked.clone())?);
        // Blocks without content are taken first, then the end of the prompt.
        input.one(filling(SMALL - PROMPT + 2))?;
        let part = input.one(asked.clone())?;
        input.one(filling(SMALL))?;
        let (none, again) = (input.one(asked.clone())?, input.one(asked)?);
        Ok([cold, whole, part, none, again])
    })?;
    let [cold, whole, part, none, again] = &answers;
    let same = answers.iter().all(|answer| input.same(cold, answer));
    let found = [whole, part, none, again].map(|answer| answer.cached_tokens);
    let as_left = found[1] > 0 && found[1] < found[0] && found[2] == 0 && found[3] == found[0];
    let told = if same { "the same answer" } else { "another answer" };
    let value = format!(
        "{told}; {} tokens found at once, {} after a part was evicted, {} after all was, {} then",
        found[0], found[1], found[2], found[3]
    );
    Ok(CheckFinding::new(same && as_left, value, gate))
}

pub(super) fn preempted(input: &mut CheckInput) -> Result<CheckFinding> {
    let gate = format!("the answer of one alone, {}", input.sameness());
    let block = match block_tokens(input, TWICE.blocks) {
        Ok(block) => block,
        Err(why) => return Ok(CheckFinding::not_run(why, gate)),
    };
    let text = input.varied_text(TWICE.prompt * block * TWICE.answers.len(), "blocks")?;
    let mut wrong = Vec::new();
    for (crowd, tenant) in [ONCE, TWICE].iter().zip((CROWDED..).step_by(10)) {
        let requests = crowd.requests(&text, block, tenant);
        let (alone, together, times) =
            input.with_blocks(crowd.blocks, |input| alone_and_together(input, &requests))?;
        let expected = crowd.times;
        if times != expected {
            wrong.push(format!("blocks were taken {times} times, not {expected}"));
        } else if !input.same(&alone, &together) {
            wrong.push(format!("another answer after {times}"));
        }
    }
    Ok(CheckFinding::from_wrong(&wrong, 2, &gate))
}

impl Crowd {
    fn requests(&self, text: &[u32], block: usize, tenant: u32) -> Vec<Request> {
        let prompts = text.chunks(self.prompt * block);
        let each = prompts.zip(self.answers).zip(tenant..);
        let request = |((prompt, answer), tenant): ((&[u32], &usize), u32)| {
            Request::greedy(tenant, prompt, (answer * block) as u32)
        };
        each.map(request).collect()
    }
}

/// The answer to the last request alone and beside the others, and how often blocks were taken
/// meanwhile.
fn alone_and_together(
    input: &mut CheckInput,
    requests: &[Request],
) -> Result<(Generation, Generation, u64)> {
    let last = requests.last().expect("invariant: a crowd has requests");
    let alone = input.one(Request { tenant: last.tenant + 5, ..last.clone() })?;
    let before = input.subject.preemptions();
    let mut together = input.subject.generate(requests)?;
    let together = together.pop().ok_or_else(|| SubjectError::Failed("no answers".into()))?;
    Ok((alone, together, input.subject.preemptions() - before))
}

pub(super) fn restarted(input: &mut CheckInput) -> Result<CheckFinding> {
    let gate = format!("the answer of before, {}, from an empty cache", input.sameness());
    let block = match block_tokens(input, PROMPT + 2) {
        Ok(block) => block,
        Err(why) => return Ok(CheckFinding::not_run(why, gate)),
    };
    let text = input.varied_text(PROMPT * block, "blocks")?;
    let requests =
        [Request::greedy(RESTARTED, &text, 8), Request::sampled(RESTARTED + 1, &text, 8, 3)];
    let before = input.subject.generate(&requests)?;
    input.subject.restart(None)?;
    let after = input.subject.generate(&requests)?;
    let same = before.iter().zip(&after).all(|(before, after)| input.same(before, after));
    let found: u32 = after.iter().map(|answer| answer.cached_tokens).sum();
    let again: u32 = input.subject.generate(&requests)?.iter().map(|one| one.cached_tokens).sum();
    let told = if same { "the same answers" } else { "another answer" };
    let value = format!("{told}; {found} tokens found at first, {again} after that");
    Ok(CheckFinding::new(same && found == 0 && again > 0, value, gate))
}

/// Tokens of a block, if the suite runs these checks and the engine has room for them.
fn block_tokens(input: &CheckInput, blocks: usize) -> Result<usize, &'static str> {
    let room = input.suite_room()?;
    let fits = room.rows >= TWICE.answers.len()
        && room.blocks >= blocks
        && input.subject.context_tokens() as usize >= blocks * room.block_tokens;
    if fits { Ok(room.block_tokens) } else { Err("the engine's context or batch is too small") }
}

impl CheckInput<'_> {
    /// The engine's room, if the suite runs what takes long.
    pub(super) fn suite_room(&self) -> Result<EngineRoom, &'static str> {
        if !self.is_full() {
            return Err("the full suite runs it");
        }
        self.subject.room().ok_or("the release is loaded elsewhere")
    }

    /// Asks an engine that was started anew with a cache of `blocks` blocks, and starts it with its
    /// whole cache afterwards.
    pub(super) fn with_blocks<T>(
        &mut self,
        blocks: usize,
        ask: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        self.subject.restart(Some(blocks))?;
        let found = ask(self);
        self.subject.restart(None)?;
        found
    }
}
