//! Checks that the same request gives the same answer however it is computed.

use super::{CheckFinding, CheckInput};
use crate::policy::policy;
use crate::subject::{Generation, PositionLogprob, Request, Result};
use crate::suite::Suite;

/// Tenants that no other check uses: their prefix caches are cold.
const ALONE: u32 = 10;
const WARM: u32 = 12;
const COLD: u32 = 13;
const LEFT: u32 = 14;
/// The first of the tenants of batches and of cuts, one for each request.
const TOGETHER: u32 = 2_000;
const CUT: u32 = 3_000;

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

/// Lengths of prompts around the sizes of blocks, pages and chunks, tokens.
const CUTS: [usize; 6] = [15, 16, 17, 63, 64, 65];
const MORE_CUTS: [usize; 9] = [127, 128, 129, 255, 256, 257, 511, 512, 513];

pub(super) fn batch(input: &mut CheckInput) -> Result<CheckFinding> {
    let prompts = TOPICS.iter().map(|topic| input.prompt(topic)).collect::<Result<Vec<_>>>()?;
    let alone = |prompt: &Vec<u32>| Request::greedy(ALONE, prompt, 12);
    let alone =
        prompts.iter().map(|prompt| input.one(alone(prompt))).collect::<Result<Vec<_>>>()?;
    let sizes: &[usize] = if input.is_full() { &[2, 7, 8, 9, 64] } else { &[8] };
    let (mut wrong, mut total, mut tenant) = (Vec::new(), 0, TOGETHER);
    for &size in sizes {
        // Each size begins with another topic, so that each stands in many rows.
        let topics: Vec<usize> = (0..size).map(|row| (row + size) % TOPICS.len()).collect();
        let requests: Vec<Request> = (tenant..)
            .zip(&topics)
            .map(|(tenant, topic)| Request::greedy(tenant, &prompts[*topic], 12))
            .collect();
        let together = input.subject.generate(&requests)?;
        for (row, (topic, found)) in topics.iter().zip(&together).enumerate() {
            if !input.same(&alone[*topic], found) {
                wrong.push(format!("row {row} of {size} ({})", TOPICS[*topic]));
            }
        }
        (total, tenant) = (total + size, tenant + size as u32);
    }
    let gate = format!("a batch of {sizes:?} = a batch of 1, {}", input.sameness());
    Ok(CheckFinding::from_wrong(&wrong, total, &gate))
}

/// Computes prompts alone, all at once so that they are cut otherwise, and once more beside each
/// other with their beginnings in the cache.
pub(super) fn cuts(input: &mut CheckInput) -> Result<CheckFinding> {
    let text = input.subject.encode(&TOPICS.join(", ").repeat(32), false)?;
    let room = (input.subject.context_tokens() as usize).saturating_sub(2);
    let more: &[usize] = if input.is_full() { &MORE_CUTS } else { &[] };
    let lengths = CUTS.iter().chain(more).copied().filter(|length| *length <= room);
    let lengths: Vec<usize> = lengths.filter(|length| *length <= text.len()).collect();
    let requests = |first: u32| -> Vec<Request> {
        let tenants = first..first + lengths.len() as u32;
        let prompts = tenants.zip(&lengths);
        prompts.map(|(tenant, length)| Request::greedy(tenant, &text[..*length], 2)).collect()
    };
    let alone = requests(CUT).into_iter().map(|request| input.one(request));
    let alone = alone.collect::<Result<Vec<_>>>()?;
    let beside = input.subject.generate(&requests(CUT + 100))?;
    // One account asks for the longest first, so that the others find parts of theirs.
    let shared = requests(CUT + 200).into_iter().rev();
    let shared: Vec<_> = shared.map(|r| Request { tenant: CUT + 200, ..r }).collect();
    input.one(shared[0].clone())?;
    let mut again = input.subject.generate(&shared)?;
    again.reverse();
    let mut wrong = Vec::new();
    for (name, found) in [("beside others", &beside), ("with a part in the cache", &again)] {
        for ((length, alone), found) in lengths.iter().zip(&alone).zip(found) {
            if !input.same(alone, found) {
                wrong.push(format!("{length} tokens {name}"));
            }
        }
    }
    let gate = format!("prompts of {lengths:?} tokens: {}", input.sameness());
    Ok(CheckFinding::from_wrong(&wrong, 2 * lengths.len(), &gate))
}

/// Compares an answer alone with the same one beside others whose askers go away.
pub(super) fn left(input: &mut CheckInput) -> Result<CheckFinding> {
    let prompts = TOPICS.iter().map(|topic| input.prompt(topic)).collect::<Result<Vec<_>>>()?;
    let kept = Request::greedy(LEFT, &prompts[1], 24);
    let alone = input.one(kept.clone())?;
    let leaves = |tokens: u32, prompt: &Vec<u32>| Request {
        leaves_after: Some(tokens),
        ..Request::greedy(LEFT, prompt, 64)
    };
    let mut requests: Vec<Request> =
        (1..).zip(&prompts[2..6]).map(|(tokens, prompt)| leaves(tokens, prompt)).collect();
    requests.push(kept);
    let found = input.subject.generate(&requests)?;
    let same = found.last().is_some_and(|found| input.same(&alone, found));
    let told = if same { "the same" } else { "another answer" };
    Ok(CheckFinding::new(same, told, format!("the answer of one alone, {}", input.sameness())))
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
    if !input.same(&cold, &warm) || !input.same(&cold, &repeated) {
        wrong.push("a reused prefix changed the answer".into());
    }
    if cold.cached_tokens != 0 {
        wrong.push(format!("{} tokens reused from another account", cold.cached_tokens));
    }
    if warm.cached_tokens == 0 || repeated.cached_tokens == 0 {
        wrong.push("a repeated prefix was computed anew".into());
    }
    let gate = format!("reused, {}; nothing shared between accounts", input.sameness());
    Ok(CheckFinding::from_wrong(&wrong, 3, &gate))
}

impl CheckInput<'_> {
    pub(super) fn is_full(&self) -> bool {
        self.scope.suite == Suite::Full
    }

    /// How equal two answers to one request must be, in words.
    pub(super) fn sameness(&self) -> &'static str {
        if self.subject.is_deterministic() {
            "equal to the last bit"
        } else {
            "within the bounds of the precision, up to a token that is not decided"
        }
    }

    /// Whether two answers to one request are as equal as the subject promises.
    pub(super) fn same(&self, a: &Generation, b: &Generation) -> bool {
        if self.subject.is_deterministic() { identical(a, b) } else { self.near(a, b) }
    }

    /// Whether two answers differ within the bounds of the precision, up to the first place where
    /// the tokens differ because neither leads decisively.
    fn near(&self, a: &Generation, b: &Generation) -> bool {
        let most = self.precision_bounds().most.value as f32;
        let margin = policy().margin.bf16.value as f32;
        let close = |a: &PositionLogprob, b: &PositionLogprob| {
            let other = |id: u32| b.top.iter().find(|(found, _)| *found == id).map(|(_, p)| *p);
            a.top.iter().take(8).all(|(id, p)| other(*id).is_none_or(|q| (p - q).abs() <= most))
        };
        let same = a.tokens.iter().zip(&b.tokens).take_while(|(a, b)| a == b).count();
        let led = a.logprobs.get(same).is_some_and(|at| match at.top[..] {
            [first, second, ..] => first.1 - second.1 > margin,
            _ => true,
        });
        let reached = (same + 1).min(a.logprobs.len());
        !led && a.logprobs[..reached].iter().zip(&b.logprobs).all(|(a, b)| close(a, b))
    }
}

/// Whether two generations are equal to the last bit, in tokens and every log-probability.
fn identical(a: &Generation, b: &Generation) -> bool {
    let bits = |g: &Generation| -> Vec<(u32, Vec<(u32, u32)>)> {
        let top = |t: &[(u32, f32)]| t.iter().map(|(id, p)| (*id, p.to_bits())).collect();
        g.logprobs.iter().map(|l| (l.chosen.to_bits(), top(&l.top))).collect()
    };
    a.tokens == b.tokens && bits(a) == bits(b)
}
