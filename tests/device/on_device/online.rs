//! Measures the times that a few clients see: to the first token, and between tokens.

use crate::answers::{Answer, ask, end, request};
use crate::model::{BLOCK_SIZE, Loaded, Source};
use crate::targets::{BETWEEN_TOKENS, BETWEEN_TOKENS_P99, FIRST_TOKEN, WARM_FIRST_TOKEN, row};
use crate::{Result, median, percentile, tokens};

use cresset_engine::{EngineHandle, EngineOptions};

const STREAMS: usize = 4;
/// Tokens of the prompts that a stream sends one after the other, and of the answers: about as many
/// as in people's questions to a chat model.
const PROMPTS: [usize; 8] = [220, 33, 512, 120, 64, 330, 160, 240];
const ANSWERS: [usize; 5] = [128, 200, 64, 256, 150];
const ROUNDS: usize = 9;

/// Tokens of the shared prefix, and tokens after it.
const PREFIX: usize = 1008;
const TAIL: usize = 16;

/// An engine with the default configuration of a node.
fn engine(loaded: &Loaded) -> EngineHandle {
    let node = cresset_engine::EngineSettings::default();
    let options = loaded.options();
    loaded.engine(EngineOptions {
        max_batched_tokens: node.max_batched_tokens.min(options.max_batched_tokens),
        max_rows: node.max_rows.min(options.max_rows),
        ..options
    })
}

/// Streams that send their next request as soon as they have an answer.
pub fn streams(source: &Source, loaded: &Loaded) -> Result<()> {
    let engine = engine(loaded);
    let shorter = source.sized(1, 16);
    let answers = std::thread::scope(|scope| -> Result<Vec<Answer>> {
        let streams = [0, 1, 2, 3].map(|i| (i, engine.clone(), loaded.info.config.vocab_size));
        let streams = streams.map(|(i, engine, vocab)| {
            scope.spawn(move || stream(&engine, i, shorter, vocab).map_err(|e| e.to_string()))
        });
        let mut all = Vec::new();
        for stream in streams {
            all.extend(stream.join().map_err(|_| "a stream panicked")??);
        }
        Ok(all)
    })?;
    end(&engine)?;
    let first = median(answers.iter().map(|answer| answer.first * 1e3));
    let gaps: Vec<f64> =
        answers.iter().flat_map(|answer| &answer.gaps).map(|gap| gap * 1e3).collect();
    let (gap, p99) = (median(gaps.iter().copied()), percentile(gaps, 99));
    let ratio = p99 / gap;
    row(
        format!("{STREAMS} streams, prompts of 33 to 512 tokens, answers of 64 to 256"),
        format!("first token {first:.1} ms, between tokens {gap:.2} ms, 99 % within {p99:.2} ms"),
        "",
        &[(FIRST_TOKEN, first), (BETWEEN_TOKENS, gap), (BETWEEN_TOKENS_P99, ratio)],
    );
    Ok(())
}

/// Sends requests one after the other. The first of each stream is a warm-up.
fn stream(
    engine: &EngineHandle,
    number: usize,
    shorter: usize,
    vocab_size: usize,
) -> Result<Vec<Answer>> {
    let one = |i: usize| {
        let (prompt, answer) =
            (PROMPTS[(i + 2 * number) % PROMPTS.len()], ANSWERS[(i + number) % ANSWERS.len()]);
        let prompt = tokens(100 * number + i, prompt / shorter, vocab_size);
        ask(engine, request(prompt, answer / shorter))
    };
    (0..=PROMPTS.len()).map(one).skip(1).collect()
}

/// The time to the first token, for prompts that share a prefix with an earlier one and for prompts
/// that do not.
pub fn warm_prefix(source: &Source, loaded: &Loaded) -> Result<()> {
    let (prefix, vocab_size) =
        (source.sized(PREFIX, 2 * BLOCK_SIZE), loaded.info.config.vocab_size);
    let engine = engine(loaded);
    let asked = |head: usize, tail: usize| -> Result<Answer> {
        let prompt =
            [tokens(head, prefix, vocab_size), tokens(1000 + tail, TAIL, vocab_size)].concat();
        ask(&engine, request(prompt, 2))
    };
    let cold: Vec<Answer> = (0..ROUNDS).map(|i| asked(2000 + i, i)).collect::<Result<_>>()?;
    let warm: Vec<Answer> = (0..ROUNDS).map(|i| asked(2000, ROUNDS + i)).collect::<Result<_>>()?;
    end(&engine)?;
    if let Some(missed) =
        warm.iter().find(|answer| (answer.finished.cached_tokens as usize) < prefix)
    {
        return Err(format!("a prefix was not found in the cache: {:?}", missed.finished).into());
    }
    let [cold, warm] =
        [cold, warm].map(|answers| median(answers.iter().map(|answer| answer.first * 1e3)));
    row(
        format!("first token, {TAIL} tokens behind a prefix of {prefix} in the cache"),
        format!("{warm:.1} ms ({cold:.1} without the cache)"),
        "",
        &[(WARM_FIRST_TOKEN, warm)],
    );
    Ok(())
}
