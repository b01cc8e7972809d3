//! What eight-bit numbers change: activations beside weights of E4M3, or keys and values in the
//! cache. Answers come first: how far log-probabilities move. Then come the times, each beside that
//! of the same model without, in one run.

use crate::model::{Loaded, Source, Wanted};
use crate::sequence::{Decode, Sequence, decode_seconds, greedy, prompt_seconds, run, step};
use crate::targets::{self, predicted_row};
use crate::{Result, median, tokens};
use cresset_kernels::gpu::Kind;
use cresset_kernels::sampling::gpu::MOST_TOP_LOGPROBS;
use std::collections::BTreeMap;
use std::iter::once;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum EightBits {
    Activations,
    Cache,
    Both,
}

struct Sizes {
    /// Tokens of the prompts behind which answers are compared.
    compared: [usize; 2],
    /// Rows of the decoding that is timed, tokens before its first step, and what was predicted.
    decodes: &'static [(usize, usize, &'static str)],
    /// Tokens of the prompts that are timed, the longest first, and what was predicted.
    prompts: &'static [(usize, &'static str)],
    steps: usize,
}

const ACTIVATIONS: Sizes = Sizes {
    compared: [33, 511],
    decodes: &[(1, 1000, "2.9 to 3.2 ms, 0.1 more than without"), (32, 1000, "")],
    prompts: &[(8192, "165 to 185 ms, where bf16 took 235"), (512, "")],
    steps: 64,
};
const CACHE: Sizes = Sizes {
    decodes: &[
        (1, 1000, "at most 0.06 ms more than without"),
        (256, 1000, "11.5 to 13.1 ms: 25 to 45 % less attention"),
    ],
    prompts: &[(8192, "255 to 270 ms: 1.3 to 1.5 times the attention")],
    ..ACTIVATIONS
};
/// The library multiplies codes of more than 64 rows.
const EMULATED: Sizes =
    Sizes { compared: [7, 72], decodes: &[(1, 20, "")], prompts: &[(72, "")], steps: 2 };
/// Times that a prompt is computed, the first of which warms up; the median of the others counts.
const ROUNDS: usize = 4;
/// Tokens that follow a prompt one by one where answers are compared.
const FOLLOWING: usize = 8;
/// How far answers may move, nats, and the share of the likeliest tokens that must stay among them.
/// A model with random weights makes more of every rounding than a trained one: in bf16 its
/// log-probabilities are off by a twentieth of their spread. The tests of the models are the exact
/// ones; these bounds find answers that have nothing to do with each other, which share 0.02 % of
/// the likeliest 20 of 128 256 tokens.
const MOST_DIVERGENCE: f64 = 1.0;
const LEAST_SHARED: f64 = 0.1;

/// The likeliest tokens of each position, with their log-probabilities.
type Answers = Vec<BTreeMap<u32, f32>>;

/// Fails when answers move too far, or not at all.
pub fn eight_bits(source: &Source, which: EightBits) -> Result<()> {
    let sizes = if which == EightBits::Cache { CACHE } else { ACTIVATIONS };
    let sizes = source.sized(sizes, EMULATED);
    targets::head();
    source.describe();
    let with = |eight_bits| measure(&Source { eight_bits, ..source.clone() }, &sizes);
    let (exact, exact_times) = with(None)?;
    let (rounded, times) = with(Some(which))?;
    let (shared, moved) = divergence(&exact, &rounded);
    predicted_row(
        "log-probabilities beside those without",
        format!(
            "{moved:.1e} nats, of at most {MOST_DIVERGENCE}, where {:.0} % of the likeliest are \
             the same, at least {:.0}",
            shared * 100.0,
            LEAST_SHARED * 100.0
        ),
        "",
        "",
    );
    for ((work, seconds, predicted), (_, before, _)) in times.into_iter().zip(exact_times) {
        let measured = format!("{:.3} ms, {:.3} without", seconds * 1e3, before * 1e3);
        predicted_row(work, measured, "", predicted);
    }
    let expected = moved > 0.0 && moved <= MOST_DIVERGENCE && shared >= LEAST_SHARED;
    if expected { Ok(()) } else { Err("answers moved too far, or not at all".into()) }
}

/// What was computed, its seconds, and what was predicted.
type Timed = (String, f64, &'static str);

fn measure(source: &Source, sizes: &Sizes) -> Result<(Answers, Vec<Timed>)> {
    let longest = sizes.prompts[0].0;
    let loaded = source.load(Wanted {
        kind: Kind::Bf16,
        deterministic: false,
        share: 0.85,
        graphs: true,
        max_batched_tokens: longest,
        max_rows: sizes.decodes.iter().map(|(rows, ..)| *rows).max().unwrap_or(1),
        max_context: longest + FOLLOWING,
    })?;
    let answers = answers(&loaded, sizes.compared)?;
    let (mut runner, vocab_size) = (loaded.runner.clone(), loaded.info.config.vocab_size);
    let mut times = Vec::new();
    for &(rows, context, predicted) in sizes.decodes {
        let work = Decode { rows, context, steps: sizes.steps };
        let (seconds, _) = decode_seconds(&mut runner, work, vocab_size, longest)?;
        times.push((format!("decode, batch {rows} after {context} tokens"), seconds, predicted));
    }
    for &(len, predicted) in sizes.prompts {
        let prompt = tokens(1, len, vocab_size);
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            rounds.push(prompt_seconds(&mut runner, &prompt)?);
        }
        times.push((format!("prompt of {len} tokens"), median(rounds.split_off(1)), predicted));
    }
    Ok((answers, times))
}

/// The answers behind prompts of these lengths and behind each of the tokens that follow, which do
/// not depend on the answers.
fn answers(loaded: &Loaded, compared: [usize; 2]) -> Result<Answers> {
    let (mut runner, rows) = (loaded.runner.clone(), greedy(1, Some(MOST_TOP_LOGPROBS as u8)));
    let mut all = Vec::new();
    for len in compared {
        let given = tokens(len, len + FOLLOWING, loaded.info.config.vocab_size);
        let mut sequences = Sequence::several(1, given.len());
        for new in once(&given[..len]).chain(given[len..].chunks(1)) {
            let batch = step(sequences.iter_mut().map(|sequence| (sequence, new)));
            let sampled = run(&mut runner, &batch, &rows)?.pop().ok_or("a step without a row")?;
            let likeliest = sampled.logprobs.ok_or("a token without log-probabilities")?.top;
            all.push(likeliest.into_iter().collect());
        }
    }
    Ok(all)
}

/// The share of the likeliest tokens that are among them both times, and about the mean KL
/// divergence, nats: half of the mean square by which the log-probabilities of these have moved.
fn divergence(exact: &Answers, rounded: &Answers) -> (f64, f64) {
    let moved = exact.iter().zip(rounded).flat_map(|(exact, rounded)| {
        exact.iter().filter_map(|(token, x)| Some(f64::from(x - rounded.get(token)?)))
    });
    let squares: Vec<f64> = moved.map(|by| by * by).collect();
    let all: usize = exact.iter().map(BTreeMap::len).sum();
    let shared = squares.len() as f64 / all as f64;
    (shared, squares.iter().sum::<f64>() / squares.len() as f64 / 2.0)
}
