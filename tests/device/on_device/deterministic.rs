//! Measures the cost of `deterministic`: the same work with and without it, in turns.

use crate::answers::{ask_all, end, request};
use crate::model::{Loaded, Source, Wanted};
use crate::sequence::{Decode, decode_seconds, prompt_seconds};
use crate::targets::{self, DETERMINISTIC_COST, Target, row};
use crate::{Result, median, tokens};
use cresset_kernels::gpu::Kind;

struct Sizes {
    requests: usize,
    prompt: usize,
    answer: usize,
    /// Rows and tokens that are decoded without the engine.
    rows: &'static [usize],
    steps: usize,
    /// Tokens of the prompt that is computed alone.
    long: usize,
}

const DEVICE: Sizes =
    Sizes { requests: 128, prompt: 512, answer: 128, rows: &[1, 16, 128], steps: 32, long: 8192 };
const EMULATED: Sizes =
    Sizes { requests: 6, prompt: 20, answer: 6, rows: &[1, 3], steps: 4, long: 64 };
const ROUNDS: usize = 3;

pub fn deterministic(source: &Source) -> Result<()> {
    let sizes = source.sized(DEVICE, EMULATED);
    targets::head();
    let wanted = |deterministic| Wanted {
        kind: Kind::Bf16,
        deterministic,
        // Both models are in memory at once.
        share: 0.45,
        graphs: true,
        max_batched_tokens: sizes.long,
        max_rows: sizes.requests,
        max_context: sizes.long + 1,
    };
    let models = [source.start(wanted(false))?, source.load(wanted(true))?];
    let Sizes { requests, prompt, answer, rows, steps, long } = sizes;
    let what = format!("{requests} requests, {prompt} in, {answer} out");
    compare(&what, &models, Some(DETERMINISTIC_COST), |loaded, round| work(loaded, &sizes, round))?;
    for &rows in rows {
        let decode = Decode { rows, context: prompt, steps };
        compare(
            &format!("decoding step, batch {rows} after {prompt} tokens"),
            &models,
            None,
            |loaded, _| {
                let vocab_size = loaded.info.config.vocab_size;
                Ok(decode_seconds(&mut loaded.runner.clone(), decode, vocab_size, long)?.0)
            },
        )?;
    }
    compare(&format!("prompt of {long} tokens"), &models, None, |loaded, round| {
        prompt_seconds(
            &mut loaded.runner.clone(),
            &tokens(round, long, loaded.info.config.vocab_size),
        )
    })
}

/// The seconds that requests to an engine take.
fn work(loaded: &Loaded, sizes: &Sizes, round: usize) -> Result<f64> {
    let engine = loaded.engine(loaded.options());
    let vocab_size = loaded.info.config.vocab_size;
    let ask = |i: usize| {
        request(tokens(round * sizes.requests + i, sizes.prompt, vocab_size), sizes.answer)
    };
    let (_, seconds) = ask_all(&engine, (0..sizes.requests).map(ask).collect())?;
    end(&engine)?;
    Ok(seconds)
}

/// The medians over the rounds; the first round is a warm-up.
fn compare(
    what: &str,
    models: &[Loaded; 2],
    target: Option<Target>,
    seconds: impl Fn(&Loaded, usize) -> Result<f64>,
) -> Result<()> {
    let mut rounds = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        for (loaded, rounds) in models.iter().zip(&mut rounds) {
            rounds.push(seconds(loaded, round)?);
        }
    }
    let [fast, deterministic] = rounds.map(|mut rounds| median(rounds.split_off(1)));
    let cost = 100.0 * (deterministic / fast - 1.0);
    let measured = format!(
        "{:.3} ms deterministic, {:.3} fast: {cost:.1} % more",
        deterministic * 1e3,
        fast * 1e3
    );
    row(what, measured, "", target.map(|target| (target, cost)).as_slice());
    Ok(())
}
