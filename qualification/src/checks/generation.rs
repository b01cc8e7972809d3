//! Checks of generated output: tokens, text, log-probabilities, counts.

use super::{CheckFinding, CheckInput, identical};
use crate::goldens::Case;
use crate::subject::{Finish, Generation, PositionLogprob, Request, Result, SubjectError};

/// Two logits this close may be ordered either way by a right engine. The stored precisions of the
/// CPU move the difference of two logits by up to 9.1e-3 against the f32 references (median 1.2e-3
/// over 232 positions of the default release), and three times that is left as room.
const DECISIVE_MARGIN: f32 = 0.03;
/// A bias large enough to raise any id over every other.
const FORCE: f32 = 1e4;

pub(super) fn logprobs(input: &mut CheckInput) -> Result<CheckFinding> {
    let mut wrong = Vec::new();
    let topics = ["rain", "a small town by the sea", "integers"];
    for topic in topics {
        let prompt = input.prompt(topic)?;
        let generation = input.one(Request::greedy(0, &prompt, 8))?;
        let bad = generation
            .logprobs
            .iter()
            .zip(&generation.tokens)
            .position(|(l, token)| !sound(l, *token));
        wrong.extend(bad.map(|at| format!("{topic}: token {at}")));
        if generation.logprobs.len() != generation.tokens.len() {
            wrong.push(format!("{topic}: {} log-probabilities", generation.logprobs.len()));
        }
    }
    Ok(CheckFinding::from_wrong(
        &wrong,
        topics.len(),
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
            let at = given + at;
            if case.allows(at, found.copied()) {
                undecided.push((case, at + 1));
            } else {
                let margin = case.margin(at);
                wrong.push(format!("{} at token {at}, margin {margin}", case.id));
            }
        }
        open = undecided;
    }
    let gate =
        format!("different only where the reference's second choice is ≤ {DECISIVE_MARGIN} behind");
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

impl Case {
    /// Whether a right engine may choose `found` there instead of the reference's choice.
    fn allows(&self, at: usize, found: Option<u32>) -> bool {
        let second = self.top2.get(at).map(|[_, (id, _)]| *id);
        found.is_some() && found == second && self.margin(at) <= DECISIVE_MARGIN
    }
}

pub(super) fn length_limit(input: &mut CheckInput) -> Result<CheckFinding> {
    let prompt = input.prompt("counting")?;
    let mut wrong = Vec::new();
    let limits = [1, 2, 7, 17];
    for limit in limits {
        let generation = input.one(Request::greedy(0, &prompt, limit))?;
        if generation.tokens.len() != limit as usize || generation.finish != Finish::Length {
            wrong.push(format!(
                "{limit} gave {} tokens, {:?}",
                generation.tokens.len(),
                generation.finish
            ));
        }
    }
    Ok(CheckFinding::from_wrong(
        &wrong,
        limits.len(),
        "exactly max_tokens tokens, finish_reason length",
    ))
}

pub(super) fn usage(input: &mut CheckInput) -> Result<CheckFinding> {
    let mut wrong = Vec::new();
    let topics = ["money", "a very long walk through the hills of a country that nobody knows"];
    for topic in topics {
        let prompt = input.prompt(topic)?;
        let g = input.one(Request::greedy(0, &prompt, 5))?;
        if (g.prompt_tokens as usize, g.completion_tokens as usize)
            != (prompt.len(), g.tokens.len())
        {
            wrong.push(format!(
                "{} + {} counted, {} + {} used",
                g.prompt_tokens,
                g.completion_tokens,
                prompt.len(),
                g.tokens.len()
            ));
        }
    }
    Ok(CheckFinding::from_wrong(&wrong, topics.len(), "prompt and completion counts exact"))
}

pub(super) fn end_of_text(input: &mut CheckInput) -> Result<CheckFinding> {
    let prompt = input.prompt("the end")?;
    let ids = input.subject.eos_ids();
    let mut wrong = Vec::new();
    for &id in &ids {
        let request = Request {
            ignore_eos: false,
            bias: vec![(id, FORCE)],
            ..Request::greedy(0, &prompt, 4)
        };
        let g = input.one(request)?;
        if g.tokens != [id] || g.finish != Finish::Stop || !g.text().is_empty() {
            wrong.push(format!(
                "id {id}: {} tokens, {:?}, text {:?}",
                g.tokens.len(),
                g.finish,
                g.text()
            ));
        }
    }
    Ok(CheckFinding::from_wrong(&wrong, ids.len(), "each ends the answer at once, with no text"))
}

pub(super) fn stop_string(input: &mut CheckInput) -> Result<CheckFinding> {
    let prompt = input.prompt("gardens")?;
    let free = input.one(Request::greedy(0, &prompt, 24))?;
    let text = free.text();
    let Some(stop) = stop_across_tokens(&free.deltas) else {
        return Ok(CheckFinding::new(
            false,
            format!("no usable text to stop in: {text:?}"),
            "a text of several tokens",
        ));
    };
    let before = text.split(&stop).next().unwrap_or_default().to_owned();
    let stopped =
        input.one(Request { stop: vec![stop.clone()], ..Request::greedy(0, &prompt, 24) })?;
    let right = stopped.text() == before
        && stopped.finish == Finish::Stop
        && free.tokens.starts_with(&stopped.tokens);
    Ok(CheckFinding::new(
        right,
        format!("{stop:?}: {:?}, {:?}", stopped.text(), stopped.finish),
        format!("{before:?}, Stop"),
    ))
}

/// The last character of one piece with the first of the next, from the middle of the answer on.
fn stop_across_tokens(deltas: &[String]) -> Option<String> {
    let pieces: Vec<&String> = deltas.iter().filter(|delta| !delta.is_empty()).collect();
    let pair = pieces.get(pieces.len() / 2..)?.windows(2).next()?;
    Some(pair[0].chars().last().into_iter().chain(pair[1].chars().next()).collect())
}

/// Checks a plain answer, and one that is forced into the bytes of multi-byte characters, where
/// pieces are easily cut.
pub(super) fn stream_join(input: &mut CheckInput) -> Result<CheckFinding> {
    let prompt = input.prompt("small pictures")?;
    let bias =
        input.subject.encode("😀🚀é漢字", false)?.into_iter().map(|id| (id, FORCE)).collect();
    let requests = [
        Request::greedy(0, &prompt, 16),
        Request::sampled(0, &prompt, 16, 3),
        Request { bias, ..Request::sampled(0, &prompt, 24, 5) },
    ];
    let mut wrong = Vec::new();
    for (i, g) in input.subject.generate(&requests)?.iter().enumerate() {
        let whole = input.subject.decode(&g.tokens, true)?;
        if g.text() != whole {
            wrong.push(format!("answer {i}: {:?} streamed, {whole:?} whole", g.text()));
        }
    }
    Ok(CheckFinding::from_wrong(&wrong, requests.len(), "joined pieces = decoded whole"))
}

pub(super) fn seeds(input: &mut CheckInput) -> Result<CheckFinding> {
    let prompt = input.prompt("dice")?;
    let first = input.one(Request::sampled(0, &prompt, 16, 7))?;
    let again = input.one(Request::sampled(0, &prompt, 16, 7))?;
    let crowd: Vec<Request> = (7..12).map(|seed| Request::sampled(0, &prompt, 16, seed)).collect();
    let crowd = input.subject.generate(&crowd)?;
    let lead = crowd.first().ok_or_else(|| SubjectError::Failed("no answers".into()))?;
    let different = |g: &Generation| g.tokens != first.tokens;
    let right =
        identical(&first, &again) && identical(&first, lead) && crowd[1..].iter().any(different);
    let told = format!(
        "repeated equal: {}, among neighbours equal: {}, other seeds differ: {}",
        identical(&first, &again),
        identical(&first, lead),
        crowd[1..].iter().any(different)
    );
    Ok(CheckFinding::new(right, told, "all true"))
}
