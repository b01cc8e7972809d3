//! Checks that the cache really holds what it promises, and that memory stays where it is. They
//! take minutes, so only the full suite runs them.

#![expect(clippy::disallowed_methods, reason = "a soak lasts for a time")]

use super::{CheckFinding, CheckInput};
use crate::policy::{SoakBounds, policy};
use crate::record::Series;
use crate::subject::{ChatTurn, Request, Result, SubjectError};
use serde_json::json;
use std::time::{Duration, Instant};

/// The first of the tenants that no other check uses, one for each sequence.
const FULL: u32 = 5_000;
const SOAKED: u32 = 6_000;
/// Tokens of each answer at full context.
const OUTPUT: u32 = 8;
/// Most tokens of a cache that are filled, unless one context has more: it takes minutes on a small
/// machine.
const MOST_TOKENS: usize = 65_536;

/// As many sequences of the whole context as the cache holds, and one more, ask the same.
pub(super) fn full_cache(input: &mut CheckInput) -> Result<CheckFinding> {
    let gate = format!("no refusal, every token counted, equal answers, {}", input.sameness());
    let room = match input.suite_room() {
        Ok(room) => room,
        Err(why) => return Ok(CheckFinding::not_run(why, gate)),
    };
    let context = input.scope.context_tokens as usize;
    let used = room.blocks.min(MOST_TOKENS.max(context).div_ceil(room.block_tokens));
    let held = (used * room.block_tokens / context).clamp(1, room.rows);
    let (wrong, preempted) = if used < room.blocks {
        input.with_blocks(used, |input| filled(input, held + 1))?
    } else {
        filled(input, held + 1)?
    };
    let finding = CheckFinding::from_wrong(&wrong, held + 1, &gate);
    let value = format!(
        "{} sequences of {context} tokens, {held} at the same time in {} of {} tokens of the \
         cache; {preempted} preemptions",
        finding.value,
        used * room.block_tokens,
        room.blocks * room.block_tokens
    );
    Ok(CheckFinding { value, ..finding })
}

/// Sends `count` equal requests, each as long as the context. Returns which of them got a wrong
/// answer, and how often blocks were taken meanwhile.
fn filled(input: &mut CheckInput, count: usize) -> Result<(Vec<String>, u64)> {
    let context = input.scope.context_tokens;
    let prompt = input.varied_text(context.saturating_sub(OUTPUT) as usize, "harbour")?;
    let tenants = (FULL..).take(count);
    let requests: Vec<Request> = tenants.map(|t| Request::greedy(t, &prompt, OUTPUT)).collect();
    let before = input.subject.preemptions();
    let answers = input.subject.generate(&requests)?;
    let wrong = answers.iter().enumerate().filter(|(_, answer)| {
        let counted = answer.prompt_tokens + answer.tokens.len() as u32 == context;
        let finite = answer.logprobs.iter().all(|one| one.chosen.is_finite());
        !(counted && finite && input.same(&answers[0], answer))
    });
    let wrong = wrong.map(|(row, _)| format!("sequence {row}")).collect();
    Ok((wrong, input.subject.preemptions() - before))
}

/// Blocks of the cache in which the soak runs, so that it is full soon and requests take blocks
/// from each other.
const SOAK_BLOCKS: usize = 40;
/// Requests of a round.
const REQUESTS: u32 = 8;
/// The rounds of a short soak.
const LEAST_ROUNDS: usize = 24;
/// Stretches of the soak whose medians are compared. What comes before them fills caches.
const STRETCHES: usize = 8;
/// Student's t for two parameters of eight values, two-sided, α = 1e-4.
const STUDENT: f64 = 9.08;

pub(super) fn soak(input: &mut CheckInput) -> Result<CheckFinding> {
    let SoakBounds { leak, width } = &policy().soak;
    let (leak, width) = (leak.value, width.value);
    let gate = format!(
        "a slope that may be ≤ {leak} bytes a request, known to {width}, and every block comes back"
    );
    let room = match input.suite_room() {
        Ok(room) => room,
        Err(why) => return Ok(CheckFinding::not_run(why, gate)),
    };
    if room.blocks < SOAK_BLOCKS {
        return Ok(CheckFinding::not_run("the cache is too small", gate));
    }
    let text = input.varied_text(SOAK_BLOCKS * room.block_tokens, "market")?;
    let soaked = input.with_blocks(SOAK_BLOCKS, |input| soaked(input, &text, room.block_tokens))?;
    let Some([low, high]) = soaked.interval() else {
        return Ok(CheckFinding::not_run("this platform does not tell its memory", gate));
    };
    let value = format!(
        "{} requests, {low:.0} to {high:.0} bytes a request; {} blocks in use at the end",
        soaked.requests, soaked.blocks_used
    );
    let passed = low <= leak && soaked.blocks_used == 0;
    if passed && high - low > width {
        let why = format!("the memory of the process moves too much: {value}");
        return Ok(CheckFinding::not_run(why, gate));
    }
    Ok(CheckFinding { series: vec![soaked.curve()], ..CheckFinding::new(passed, value, gate) })
}

/// The figures that a soak measured.
#[derive(Default)]
struct Soaked {
    requests: u32,
    /// After each round: requests so far, and resident bytes.
    memory: Vec<(f64, f64)>,
    blocks_used: usize,
}

/// Runs rounds of mixed requests until the time is over, and as long again while the slope is not
/// known well enough.
fn soaked(input: &mut CheckInput, text: &[u32], block: usize) -> Result<Soaked> {
    let (began, lasts) = (Instant::now(), Duration::from_secs(input.scope.soak_seconds.into()));
    let mut soaked = Soaked::default();
    for round in 0.. {
        let is_over = |times: u32| began.elapsed() >= times * lasts && round >= LEAST_ROUNDS;
        if is_over(2) || (is_over(1) && soaked.is_known()) {
            break;
        }
        let requests = mixed(text, block, round as u32);
        input.subject.generate(&requests)?;
        soaked.requests += REQUESTS;
        if round.is_multiple_of(8) {
            soaked.requests += over_http(input, round)?;
        }
        soaked.blocks_used = input.subject.blocks_used();
        let resident = input.subject.resident_bytes();
        soaked.memory.extend(resident.map(|now| (f64::from(soaked.requests), now as f64)));
    }
    Ok(soaked)
}

/// Prompts of one to six blocks, sampled or not; of some the asker goes away.
fn mixed(text: &[u32], block: usize, round: u32) -> Vec<Request> {
    let request = |n: u32| {
        let draw = (round * 31 + n * 17) as usize;
        let begin = draw * 7 % (text.len() / 2);
        let prompt = &text[begin..begin + block * (1 + draw % 6) - draw % 3];
        let (tenant, tokens) = (SOAKED + n % 5, (block * (1 + draw % 2)) as u32);
        let leaves_after = draw.is_multiple_of(3).then_some(3);
        Request { leaves_after, ..Request::sampled(tenant, prompt, tokens, draw as u64) }
    };
    (0..REQUESTS).map(request).collect()
}

/// One request as a client sends it; what it is refused for is not the soak's concern.
fn over_http(input: &mut CheckInput, round: usize) -> Result<u32> {
    let turn = ChatTurn::new("user", &format!("Say the number {round}."));
    match input.subject.call_api(&json!({ "messages": [turn], "max_tokens": 8 })) {
        Ok(_) => Ok(1),
        Err(SubjectError::Unavailable(_)) => Ok(0),
        Err(error) => Err(error),
    }
}

impl Soaked {
    /// Bytes a request, with what they may be off by. The first third is left out.
    /// `None` without figures.
    fn slope(&self) -> Option<(f64, f64)> {
        let late = &self.memory[self.memory.len() / 3..];
        let stretch =
            |n: usize| &late[n * late.len() / STRETCHES..(n + 1) * late.len() / STRETCHES];
        let points: Vec<(f64, f64)> =
            (0..STRETCHES).map(stretch).filter(|part| !part.is_empty()).map(middle).collect();
        (points.len() == STRETCHES).then(|| fitted(&points))
    }

    fn interval(&self) -> Option<[f64; 2]> {
        self.slope().map(|(slope, error)| [slope - error, slope + error])
    }

    /// Without figures there is nothing to wait for.
    fn is_known(&self) -> bool {
        self.interval().is_none_or(|[low, high]| high - low <= policy().soak.width.value)
    }

    fn curve(&self) -> Series {
        Series {
            name: "memory of the process during the soak".into(),
            axes: ["requests".into(), "resident memory, bytes".into()],
            points: self.memory.clone(),
        }
    }
}

/// The medians of both numbers.
fn middle(points: &[(f64, f64)]) -> (f64, f64) {
    let median = |of: fn(&(f64, f64)) -> f64| {
        let mut all: Vec<f64> = points.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    (median(|point| point.0), median(|point| point.1))
}

/// The slope of the line through the points, and half the width of its interval.
fn fitted(points: &[(f64, f64)]) -> (f64, f64) {
    let n = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let slope = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum::<f64>() / spread;
    let rest = |point: &(f64, f64)| (point.1 - y - slope * (point.0 - x)).powi(2);
    let error = (points.iter().map(rest).sum::<f64>() / (n - 2.0) / spread).sqrt();
    (slope, STUDENT * error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leak_is_told_from_noise_and_from_a_single_step() {
        let noise = |n: usize| ((n * 7919) % 101) as f64 * 1e3;
        let soaked = |bytes: fn(usize) -> f64| {
            let points = (0..90).map(|n| (8.0 * n as f64, 1e8 + noise(n) + bytes(n)));
            Soaked { memory: points.collect(), ..Soaked::default() }
        };
        let slope = |bytes| soaked(bytes).interval().unwrap()[0];
        assert!(slope(|_| 0.0) <= 0.0);
        assert!(slope(|n| if n > 60 { 1e6 } else { 0.0 }) <= 0.0, "an arena grew once");
        assert!(slope(|n| n as f64 * 8.0 * 4096.0) > 1024.0);
        assert!(soaked(|_| 0.0).is_known());
        let restless = soaked(|n| ((n * 37) % 83) as f64 * 1e5);
        assert!(!restless.is_known(), "memory that comes and goes proves nothing");
    }

    #[test]
    fn the_fewest_rounds_have_a_slope() {
        for rounds in LEAST_ROUNDS..200 {
            let memory = (0..rounds).map(|n| (n as f64, 1e8)).collect();
            assert!(Soaked { memory, ..Soaked::default() }.slope().is_some(), "{rounds}");
        }
    }

    #[test]
    fn a_platform_without_figures_has_no_slope() {
        assert_eq!(Soaked::default().slope(), None);
    }
}
