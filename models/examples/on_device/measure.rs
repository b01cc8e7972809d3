//! Times and rates of a model: start, prompts, decoding at several numbers of rows with steps launched two deep.

use crate::sequence::{Sequence, greedy, step};
use crate::{Result, Sizes, Source};
use cresset_kernels::gpu::Kind;
use cresset_models::gpu::{DEPTH, GpuModel};
use std::time::{Duration, Instant};

struct Work {
    /// Tokens of the prompt that is timed.
    prompt: usize,
    /// Tokens before those that are decoded.
    context: usize,
    rows: &'static [usize],
    /// Decoding steps timed.
    steps: usize,
}

const FULL: Work = Work { prompt: 8192, context: 1000, rows: &[1, 8, 64, 256], steps: 64 };
const EMULATED: Work = Work { prompt: 64, context: 20, rows: &[1, 3], steps: 4 };
/// Of the prompt; the median counts.
const ROUNDS: usize = 5;
/// Steps before those that are timed.
const WARM_UP: usize = 4;

pub fn measure(source: &Source) -> Result<()> {
    let properties = source.gpu.properties();
    let work = if properties.name == "emulator" { EMULATED } else { FULL };
    let most = work.rows.iter().copied().max().unwrap_or(1);
    let sizes = Sizes {
        deterministic: false,
        max_batched_tokens: work.prompt,
        max_rows: most,
        max_context: work.prompt,
        graphs: true,
    };
    let (mut model, ready) = source.load(sizes)?;
    println!("{} ({}), {:?}, context {}\n", properties.name, properties.versions, source.kind, work.context);
    println!(
        "| work | tok/s | ms a step | µs of the host a launch | GB/s of weights and KV |\n|---|---:|---:|---:|---:|"
    );
    println!("| start: {ready:.1} s | | | | |");
    let seconds = prompt_seconds(&mut model, &work)?;
    println!("| prompt of {} | {:.0} | {:.1} | | |", work.prompt, work.prompt as f64 / seconds, seconds * 1e3);
    for &rows in work.rows {
        let room = work.context + WARM_UP + work.steps;
        let most = model.num_blocks() / room.div_ceil(crate::BLOCK_SIZE);
        if rows > most {
            println!("| {rows} rows: the cache has room for {most} | | | | |");
            continue;
        }
        let (seconds, host) = decode_seconds(&mut model, &work, rows, room)?;
        let read = read_bytes(&model, source.kind, rows * (work.context + WARM_UP + work.steps / 2));
        println!(
            "| decode, {rows} rows | {:.0} | {:.3} | {:.0} | {:.0} |",
            rows as f64 / seconds,
            seconds * 1e3,
            host * 1e6,
            read as f64 / seconds / 1e9
        );
    }
    Ok(())
}

/// Bytes that a decoding step cannot but read: the weights, without the embeddings' table unless the head is the same, and keys
/// and values of so many tokens.
fn read_bytes(model: &GpuModel, kind: Kind, tokens: usize) -> usize {
    let config = model.config();
    let table = if config.tied_embeddings { 0 } else { config.vocab_size * config.hidden_size };
    let cached = 2 * config.layers * config.kv_heads * config.head_dim * tokens;
    model.weight_bytes() - table * kind.bytes() + cached * kind.bytes()
}

/// Made-up tokens.
fn tokens(count: usize, vocab_size: usize) -> Vec<u32> {
    (0..count).map(|i| (i * 7919 % vocab_size) as u32).collect()
}

fn prompt_seconds(model: &mut GpuModel, work: &Work) -> Result<f64> {
    let prompt = tokens(work.prompt, model.config().vocab_size);
    let mut rounds = Vec::new();
    for _ in 0..=ROUNDS {
        let batch = step(Sequence::several(1, work.prompt).iter_mut().map(|sequence| (sequence, &prompt[..])));
        let start = Instant::now();
        model.launch(&batch, &greedy(1, None))?;
        model.collect()?;
        rounds.push(start.elapsed().as_secs_f64());
    }
    rounds.remove(0);
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[ROUNDS / 2])
}

/// Of a step, and of its launch.
fn decode_seconds(model: &mut GpuModel, work: &Work, rows: usize, room: usize) -> Result<(f64, f64)> {
    let mut sequences = Sequence::several(rows, room);
    let prompt = tokens(work.context, model.config().vocab_size);
    for some in sequences.chunks_mut(work.prompt / work.context) {
        let batch = step(some.iter_mut().map(|sequence| (sequence, &prompt[..])));
        model.launch(&batch, &greedy(some.len(), None))?;
        model.collect()?;
    }
    run(model, &mut sequences, WARM_UP)?;
    let start = Instant::now();
    let host = run(model, &mut sequences, work.steps)?;
    let each = |time: Duration| time.as_secs_f64() / work.steps as f64;
    Ok((each(start.elapsed()), each(host)))
}

/// Steps that take their tokens from the ones before them, which the host need not have seen. How long it took to launch them.
fn run(model: &mut GpuModel, sequences: &mut [Sequence], steps: usize) -> Result<Duration> {
    let (rows, mut host) = (greedy(sequences.len(), None), Duration::ZERO);
    for i in 0..steps {
        if i >= DEPTH {
            model.collect()?;
        }
        let start = Instant::now();
        let mut batch = step(sequences.iter_mut().map(|sequence| (sequence, &[0][..])));
        if i > 0 {
            batch.feedback = (0..rows.len() as u32).map(Some).collect();
        }
        model.launch(&batch, &rows)?;
        host += start.elapsed();
    }
    for _ in 0..steps.min(DEPTH) {
        model.collect()?;
    }
    Ok(host)
}
