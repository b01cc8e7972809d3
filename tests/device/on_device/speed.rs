//! Times of one model: start, prompts, decoding at several numbers of rows, formats, a few streams,
//! the host's part of a step.

use crate::measure::{Ceilings, ceilings};
use crate::model::{Loaded, Source, Wanted};
use crate::sequence::{Decode, WARM_UP, decode_seconds, decode_seconds_of, prompt_seconds};
use crate::targets::{self, DECODE, DECODE_SHARE, HOST, PREFILL_SHARE, predicted_row, row};
use crate::{Result, answers, formats, median, online, tokens};
use cresset_engine::EngineOptions;
use cresset_kernels::gpu::Kind;
use cresset_models::ModelConfig;

struct Sizes {
    /// Quantised weights have predictions and no targets.
    quantised: bool,
    /// Bytes of the copy, and rows of the product, that measure the device's limits.
    ceilings: (usize, usize),
    prompt: usize,
    /// Rows and tokens before the first step of the decoding that is timed, and what was predicted
    /// for it.
    decodes: &'static [(usize, usize, &'static str)],
    context: usize,
    steps: usize,
    /// Rows of the steps that are timed both with an engine and without.
    exposed_rows: usize,
    /// Answers at a time that keep to a format, and their tokens.
    formats: (usize, usize),
}

const DEVICE: Sizes = Sizes {
    quantised: false,
    ceilings: (4 << 30, 8192),
    prompt: 8192,
    decodes: &[
        (1, 1000, ""),
        (8, 1000, ""),
        (32, 1000, "5.6 ms with gemv, 6.5 with the library: 4900 to 5700 tok/s"),
        (64, 1000, ""),
        (256, 1000, "16.7 ms, 15300 tok/s"),
        (430, 1500, "34.6 ms, 12400 tok/s"),
    ],
    context: 1000,
    steps: 64,
    exposed_rows: 256,
    formats: (64, 256),
};
const EMULATED: Sizes = Sizes {
    quantised: false,
    ceilings: (1 << 20, 64),
    prompt: 64,
    decodes: &[(1, 20, ""), (3, 20, "")],
    context: 20,
    steps: 4,
    exposed_rows: 3,
    formats: (3, 6),
};
const QUANTISED: Sizes = Sizes {
    quantised: true,
    decodes: &[
        (1, 1000, "1.9 ms, 520 tok/s"),
        (8, 1000, "2.5 ms"),
        (32, 1000, "5 ms"),
        (64, 1000, ""),
        (256, 1000, ""),
    ],
    ..DEVICE
};
/// Times that a prompt is computed; the median counts.
const ROUNDS: usize = 5;

/// Tokens of the context beyond the longest prompt.
const BEYOND: usize = 64;

pub fn speed(source: &Source) -> Result<()> {
    let sizes = source.sized(if source.quantised() { QUANTISED } else { DEVICE }, EMULATED);
    targets::head();
    source.describe();
    let most_rows = sizes.decodes.iter().map(|(rows, ..)| *rows).max().unwrap_or(1);
    let loaded = source.start(Wanted {
        kind: Kind::Bf16,
        deterministic: false,
        share: 0.85,
        graphs: true,
        max_batched_tokens: sizes.prompt,
        max_rows: most_rows,
        max_context: sizes.prompt + BEYOND,
    })?;
    let (bytes, side) = sizes.ceilings;
    let ceilings = ceilings(&source.gpu, bytes, side)?;
    row(
        format!("copy of {bytes} bytes"),
        format!("{:.0} GB/s read and written", ceilings.copy / 1e9),
        "is one",
        &[],
    );
    row(
        format!("the library's product of one row with {bytes} bytes"),
        format!("{:.0} GB/s read", ceilings.read / 1e9),
        "is one",
        &[],
    );
    row(
        format!("product of {side}³"),
        format!("{:.0} TFLOP/s", ceilings.product / 1e12),
        "is one",
        &[],
    );
    decodes(&loaded, &sizes, &ceilings)?;
    prompts(&loaded, &sizes, &ceilings)?;
    if sizes.quantised {
        return Ok(());
    }
    formats::formats(&loaded, sizes.formats.0, sizes.formats.1)?;
    online::streams(source, &loaded)?;
    online::warm_prefix(source, &loaded)?;
    exposed(&loaded, &sizes)
}

fn decodes(loaded: &Loaded, sizes: &Sizes, ceilings: &Ceilings) -> Result<()> {
    let &Sizes { steps, prompt, .. } = sizes;
    let config = &loaded.info.config;
    for &(rows, context, predicted) in sizes.decodes {
        let work = Decode { rows, context, steps };
        let what = format!("decode, batch {rows} after {context} tokens");
        if work.blocks() > loaded.info.num_blocks {
            row(what, "no room in the cache", "", &[]);
            continue;
        }
        let (seconds, host) =
            decode_seconds(&mut loaded.runner.clone(), work, config.vocab_size, prompt)?;
        let (rate, ms, us) = (rows as f64 / seconds, seconds * 1e3, host * 1e6);
        let share = 100.0 * read_bytes(loaded, work.cached(), sizes.quantised) as f64
            / seconds
            / ceilings.read;
        let measured =
            format!("{rate:.1} tok/s, {ms:.3} ms a step, {us:.0} µs of the host a launch");
        let ceiling = format!("{share:.0} % of reading");
        if rows == 1 && !sizes.quantised {
            row(what, measured, ceiling, &[(DECODE, rate), (DECODE_SHARE, share)]);
        } else {
            predicted_row(what, measured, ceiling, predicted);
        }
    }
    Ok(())
}

/// The bytes that a decoding step must read: the weights, without the embedding table unless it is
/// also the head, and the keys and values of the tokens in the cache.
fn read_bytes(loaded: &Loaded, tokens: usize, quantised: bool) -> usize {
    let config = &loaded.info.config;
    let table = if config.tied_embeddings { 0 } else { config.vocab_size * config.hidden_size };
    let cached = 2 * config.layers * config.kv_heads * config.head_dim * tokens;
    // Q4_K has nine bytes for sixteen weights.
    let table_bytes = if quantised { table * 9 / 16 } else { table * Kind::Bf16.bytes() };
    loaded.info.weight_bytes - table_bytes + cached * Kind::Bf16.bytes()
}

fn prompts(loaded: &Loaded, sizes: &Sizes, ceilings: &Ceilings) -> Result<()> {
    let len = sizes.prompt;
    let prompt = tokens(1, len, loaded.info.config.vocab_size);
    let mut rounds = Vec::new();
    for _ in 0..=ROUNDS {
        rounds.push(prompt_seconds(&mut loaded.runner.clone(), &prompt)?);
    }
    let seconds = median(rounds.split_off(1));
    let share = 100.0 * prompt_flops(&loaded.info.config, len) / seconds / ceilings.product;
    let work = format!("prompt of {len} tokens");
    let measured = format!("{:.0} tok/s, {:.1} ms", len as f64 / seconds, seconds * 1e3);
    let ceiling = format!("{share:.0} % of product");
    if sizes.quantised {
        predicted_row(work, measured, ceiling, "244 ms");
    } else {
        row(work, measured, ceiling, &[(PREFILL_SHARE, share)]);
    }
    Ok(())
}

/// The multiplications and additions of a prompt: with each matrix of a layer, and in attention
/// with the keys and values that each query sees. The head computes one token.
fn prompt_flops(config: &ModelConfig, len: usize) -> f64 {
    let ModelConfig {
        hidden_size: hidden, intermediate_size: ffn, head_dim, heads, kv_heads, ..
    } = *config;
    let matrices = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * ffn;
    let attention = heads * head_dim * (len + 1);
    (2 * len * config.layers * (matrices + attention) + 2 * hidden * config.vocab_size) as f64
}

/// The time by which a step of the engine is longer than the same step without it: the host's work
/// during which the device waits.
fn exposed(loaded: &Loaded, sizes: &Sizes) -> Result<()> {
    let &Sizes { context, steps, prompt, exposed_rows: rows, .. } = sizes;
    let vocab_size = loaded.info.config.vocab_size;
    let engine = loaded.engine(EngineOptions { max_rows: rows, ..loaded.options() });
    // While prompts are computed, earlier sequences decode.
    let longest = 3 * steps + rows * context / prompt;
    loaded.runner.take_steps();
    let requests =
        (0..rows).map(|i| answers::request(tokens(2 + i, context, vocab_size), longest)).collect();
    answers::ask_all(&engine, requests)?;
    answers::end(&engine)?;
    let mut pure = loaded.runner.take_steps();
    pure.retain(|step| (step.lengths.len(), step.tokens) == (rows, rows));
    let pure: Vec<_> = pure.iter().skip(WARM_UP).take(steps + 1).collect();
    let [first, .., last] = pure[..] else {
        return Err("the engine made no steps of all rows".into());
    };
    let in_engine = (last.at - first.at).as_secs_f64() / (pure.len() - 1) as f64;
    // The same steps without the engine, with the same tokens in the cache.
    let contexts: Vec<usize> = first.lengths.iter().map(|len| *len as usize).collect();
    let (alone, _) =
        decode_seconds_of(&mut loaded.runner.clone(), &contexts, steps, vocab_size, prompt)?;
    let ms = (in_engine - alone) * 1e3;
    let least = contexts.iter().copied().min().unwrap_or(0);
    let most = contexts.iter().copied().max().unwrap_or(0);
    row(
        format!("host time exposed a step, {rows} rows after {least} to {most} tokens"),
        format!("{ms:.3} ms ({:.3} in the engine, {:.3} without)", in_engine * 1e3, alone * 1e3),
        "",
        &[(HOST, ms)],
    );
    Ok(())
}
