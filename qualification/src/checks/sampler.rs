//! The law of the sampler: tokens are drawn with the probabilities that the parameters promise.
//!
//! A bias gives eight tokens probabilities of our choice; each set of parameters then has an exact
//! support and known probabilities, which a G-test compares with the counts.

use super::{CheckFinding, CheckInput};
use crate::subject::{Request, Result, SubjectError};
use std::collections::BTreeMap;

/// A tenant that no other check uses.
const DRAWS: u32 = 17;
/// Draws of each set of parameters in the full suite.
const EACH: usize = 2_000;
/// Requests that run at the same time.
const TOGETHER: usize = 64;
/// Added to the designed tokens' logits, so that no other one is ever drawn.
const ABOVE: f32 = 60.0;
/// Probabilities of the designed tokens at temperature 1.
const DESIGN: [f64; 8] = [0.30, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.02];
/// The statistic that a right sampler exceeds once in 10 000 runs, for 1 to 7 degrees of freedom.
const LIMITS: [f64; 7] = [15.14, 18.42, 21.11, 23.51, 25.74, 27.86, 29.88];

struct SamplingLaw {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
}

const PLAIN: SamplingLaw = SamplingLaw { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
/// In the last three, another order of temperature and truncation has another support.
const LAWS: [SamplingLaw; 8] = [
    PLAIN,
    SamplingLaw { temperature: 0.6, ..PLAIN },
    SamplingLaw { temperature: 1.6, ..PLAIN },
    SamplingLaw { top_k: 3, ..PLAIN },
    SamplingLaw { top_p: 0.6, ..PLAIN },
    SamplingLaw { min_p: 0.35, ..PLAIN },
    SamplingLaw { temperature: 1.6, top_p: 0.6, ..PLAIN },
    SamplingLaw { temperature: 1.6, min_p: 0.35, ..PLAIN },
];

pub(super) fn sampler_law(input: &mut CheckInput) -> Result<CheckFinding> {
    const GATE: &str = "no token outside the support; G below what a right sampler exceeds once in \
                        10 000 runs";
    if !input.is_full() {
        return Ok(CheckFinding::not_run("the full suite draws", GATE));
    }
    let prompt = input.prompt("dice")?;
    let bias = design(input, &prompt)?;
    let mut wrong = Vec::new();
    for (index, law) in LAWS.iter().enumerate() {
        let counts = draw(input, &prompt, &bias, law, (index * EACH) as u64)?;
        let expected = law.probabilities();
        let (support, g) =
            (expected.iter().filter(|p| **p > 0.0).count(), statistic(&counts, &expected));
        if g.is_none_or(|g| g > LIMITS[support - 2]) {
            wrong.push(format!("{law}: {counts:?} of {EACH}, G {g:?}"));
        }
    }
    Ok(CheckFinding::from_wrong(&wrong, LAWS.len(), GATE))
}

/// A bias under which the eight most likely tokens have the designed probabilities.
fn design(input: &mut CheckInput, prompt: &[u32]) -> Result<Vec<(u32, f32)>> {
    let answer = input.one(Request::greedy(DRAWS, prompt, 1))?;
    let top = answer.logprobs.first().map(|first| first.top.clone()).unwrap_or_default();
    if top.len() < DESIGN.len() {
        return Err(SubjectError::Unavailable("the vocabulary is too small".into()));
    }
    let designed = DESIGN.iter().zip(top);
    Ok(designed.map(|(p, (id, logprob))| (id, p.ln() as f32 - logprob + ABOVE)).collect())
}

/// How often each designed token was drawn, and at the end how often another one.
fn draw(
    input: &mut CheckInput,
    prompt: &[u32],
    bias: &[(u32, f32)],
    law: &SamplingLaw,
    first_seed: u64,
) -> Result<Vec<usize>> {
    let place: BTreeMap<u32, usize> =
        bias.iter().enumerate().map(|(place, (id, _))| (*id, place)).collect();
    let mut counts = vec![0; bias.len() + 1];
    let seeds: Vec<u64> = (first_seed..first_seed + EACH as u64).collect();
    for seeds in seeds.chunks(TOGETHER) {
        let request = |seed: &u64| Request {
            bias: bias.to_vec(),
            temperature: law.temperature,
            top_k: law.top_k,
            top_p: law.top_p,
            min_p: law.min_p,
            ..Request::sampled(DRAWS, prompt, 1, *seed)
        };
        let requests: Vec<Request> = seeds.iter().map(request).collect();
        for answer in input.subject.generate(&requests)? {
            let drawn = answer.tokens.first().and_then(|id| place.get(id));
            counts[drawn.copied().unwrap_or(bias.len())] += 1;
        }
    }
    Ok(counts)
}

/// The G statistic of counts; `None` when one lies outside the support.
fn statistic(counts: &[usize], expected: &[f64]) -> Option<f64> {
    let total: usize = counts.iter().sum();
    let mut g = 0.0;
    for (at, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let expected = expected.get(at).copied().filter(|p| *p > 0.0)?;
        g += 2.0 * count as f64 * (count as f64 / (expected * total as f64)).ln();
    }
    Some(g)
}

impl SamplingLaw {
    /// The probability of each designed token: the temperature is applied first, then `top_k`,
    /// `top_p` and `min_p` take away.
    fn probabilities(&self) -> Vec<f64> {
        let power = 1.0 / f64::from(self.temperature);
        let mut all = normalised(DESIGN.iter().map(|p| p.powf(power)).collect());
        if self.top_k > 0 {
            all.iter_mut().skip(self.top_k as usize).for_each(|p| *p = 0.0);
        }
        let mut before = 0.0;
        for p in &mut all {
            let reached = before >= f64::from(self.top_p);
            before += *p;
            *p = if reached { 0.0 } else { *p };
        }
        let least = f64::from(self.min_p) * all[0];
        all.iter_mut().filter(|p| **p < least).for_each(|p| *p = 0.0);
        normalised(all)
    }
}

fn normalised(all: Vec<f64>) -> Vec<f64> {
    let sum: f64 = all.iter().sum();
    all.into_iter().map(|p| p / sum).collect()
}

impl std::fmt::Display for SamplingLaw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { temperature, top_k, top_p, min_p } = self;
        write!(f, "temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p {min_p}")
    }
}
