//! Checks, with `deterministic`, that requests give the same answers alone and among others that
//! are cancelled, preempted, abandoned or find no memory, and that all memory is freed.

use crate::answers::{Answer, ask, end, read, request};
use crate::model::{BLOCK_SIZE, Loaded, Source, Wanted};
use crate::targets::{self, row};
use crate::{Result, tokens};
use cresset_engine::{EngineHandle, EngineOptions, GenerateRequest, Refused, SamplingParams};
use cresset_kernels::gpu::Kind;
use std::time::{Duration, Instant};

struct Sizes {
    /// Tokens of the prompts and of the answers of the requests that must survive.
    probes: &'static [usize],
    answer: usize,
    /// The number of other requests, and the tokens of their prompts and of their longer answers.
    neighbours: usize,
    prompt: usize,
    max_batched_tokens: usize,
    max_rows: usize,
}

const DEVICE: Sizes = Sizes {
    probes: &[1, 17, 100, 333, 600, 1000],
    answer: 96,
    neighbours: 200,
    prompt: 300,
    max_batched_tokens: 1024,
    max_rows: 128,
};
const EMULATED: Sizes = Sizes {
    probes: &[1, 17, 40],
    answer: 12,
    neighbours: 14,
    prompt: 30,
    max_batched_tokens: 48,
    max_rows: 8,
};
/// Bytes of device memory that the driver may keep after a load that failed.
const SLACK: usize = 64 << 20;

pub fn survive(source: &Source) -> Result<()> {
    let sizes = source.sized(DEVICE, EMULATED);
    let wanted = Wanted {
        kind: Kind::Bf16,
        deterministic: true,
        // This share leaves no room for another model.
        share: source.sized(0.9, 1.0),
        graphs: true,
        max_batched_tokens: sizes.max_batched_tokens,
        max_rows: sizes.max_rows,
        max_context: sizes.probes.iter().max().unwrap_or(&1) + 4 * sizes.answer,
    };
    targets::head();
    let loaded = source.start(wanted)?;
    let vocab_size = loaded.info.config.vocab_size;
    let probes =
        || sizes.probes.iter().zip(0..).map(|(len, i)| probe(*len, i, vocab_size, sizes.answer));
    let engine = loaded.engine(loaded.options());
    let alone: Vec<Answer> = probes().map(|probe| ask(&engine, probe)).collect::<Result<_>>()?;
    end(&engine)?;
    run_beside_neighbours(&loaded, &sizes, probes().collect(), &alone)?;
    // Together the models need twice the share that is left.
    let (free, _) = source.gpu.memory()?;
    let Err(refusal) = source.load(wanted) else {
        return Err("two models found the memory of one".into());
    };
    let (left, _) = source.gpu.memory()?;
    if left + SLACK < free {
        return Err(format!("a model that found no memory kept {} MiB", (free - left) >> 20).into());
    }
    let engine = loaded.engine(loaded.options());
    for (probe, alone) in probes().zip(&alone) {
        same(&ask(&engine, probe)?, alone, "after a model that found no memory")?;
    }
    end(&engine)?;
    row(
        "a second model that finds no memory",
        format!("refused ({refusal}); the first one's tokens as before"),
        "",
        &[],
    );
    Ok(())
}

/// Tokens are sampled, so that a row in the wrong place is noticed.
fn probe(len: usize, seed: u64, vocab_size: usize, answer: usize) -> GenerateRequest {
    let sampling =
        SamplingParams { seed, temperature: 0.9, top_p: 0.95, ..SamplingParams::default() };
    GenerateRequest { sampling, ..request(tokens(len, len, vocab_size), answer) }
}

/// Runs the survivors among other requests, with too few blocks for all of them. A third of the
/// others is cancelled, and a third abandoned.
fn run_beside_neighbours(
    loaded: &Loaded,
    sizes: &Sizes,
    probes: Vec<GenerateRequest>,
    alone: &[Answer],
) -> Result<()> {
    let &Sizes { answer, neighbours, prompt, max_rows, .. } = sizes;
    let (options, vocab_size) = (loaded.options(), loaded.info.config.vocab_size);
    // This is a third of the blocks that all rows need at their longest.
    let num_blocks =
        (max_rows * (prompt + 4 * answer)).div_ceil(3 * BLOCK_SIZE).min(options.num_blocks);
    let engine = loaded.engine(EngineOptions { num_blocks, ..options });
    refused(&engine, loaded, num_blocks)?;
    let other =
        |i: usize| engine.submit(request(tokens(5000 + i, prompt + i % 7, vocab_size), 4 * answer));
    let mut others = (0..neighbours / 2).map(other).collect::<Result<Vec<_>, _>>()?;
    let sent =
        probes.into_iter().map(|probe| engine.submit(probe)).collect::<Result<Vec<_>, _>>()?;
    others.extend((neighbours / 2..neighbours).map(other).collect::<Result<Vec<_>, _>>()?);
    let mut patient = Vec::new();
    for (i, (id, events)) in others.into_iter().enumerate() {
        next_step(&engine);
        match i % 3 {
            0 => engine.stop(id),
            1 => drop(events),
            _ => patient.push(events),
        }
    }
    for ((_, events), alone) in sent.into_iter().zip(alone) {
        same(&read(events, Instant::now())?, alone, "beside neighbours")?;
    }
    for events in patient {
        read(events, Instant::now())?;
    }
    let stats = end(&engine)?;
    if stats.preemptions == 0 || stats.stops == 0 || stats.late_frees > 0 {
        return Err(format!(
            "nobody was preempted or cancelled, or blocks were freed late: {stats:?}"
        )
        .into());
    }
    row(
        format!("{} requests among {neighbours} others in {num_blocks} blocks", alone.len()),
        format!(
            "their tokens as alone; {} cancelled, {} preemptions, all blocks free",
            stats.stops, stats.preemptions
        ),
        "",
        &[],
    );
    Ok(())
}

/// Waits for the engine's next step, if it has work.
fn next_step(engine: &EngineHandle) {
    let before = engine.stats();
    while before.running > 0 && engine.stats().steps == before.steps {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// A request that can never fit is refused at once.
fn refused(engine: &EngineHandle, loaded: &Loaded, num_blocks: usize) -> Result<()> {
    let too_long = tokens(
        0,
        loaded.options().max_context.max(num_blocks * BLOCK_SIZE),
        loaded.info.config.vocab_size,
    );
    match engine.submit(request(too_long, 1)) {
        Err(Refused::TooLarge(_)) => Ok(()),
        other => {
            Err(format!("a request that cannot fit was not refused: {:?}", other.map(|(id, _)| id))
                .into())
        }
    }
}

fn same(found: &Answer, alone: &Answer, what: &str) -> Result<()> {
    match found.tokens.iter().zip(&alone.tokens).position(|(found, alone)| found != alone) {
        None if found.tokens.len() == alone.tokens.len() => Ok(()),
        at => {
            Err(format!("{what}, an answer of {} tokens differs at {at:?}", alone.tokens.len())
                .into())
        }
    }
}
