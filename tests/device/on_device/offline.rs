//! Measures throughput with as many sequences at once as the cache holds. Tokens that end a text
//! are ignored.

use crate::answers::{ask_all, end, request};
use crate::eight_bits::EightBits;
use crate::model::{BLOCK_SIZE, Loaded, Source, Wanted};
use crate::targets::{self, OFFLINE, row};
use crate::{Result, tokens};
use cresset_engine::EngineOptions;
use cresset_kernels::gpu::Kind;

struct Work {
    prompt: usize,
    answer: usize,
    /// The number of requests for each row.
    waves: usize,
    /// Whether the target applies to these lengths.
    judged: bool,
}

const DEVICE: [Work; 3] = [
    Work { prompt: 1000, answer: 1000, waves: 1, judged: true },
    Work { prompt: 128, answer: 128, waves: 4, judged: false },
    Work { prompt: 2048, answer: 128, waves: 1, judged: false },
];
const EMULATED: [Work; 3] = [
    Work { prompt: 20, answer: 20, waves: 1, judged: true },
    Work { prompt: 8, answer: 8, waves: 2, judged: false },
    Work { prompt: 40, answer: 8, waves: 1, judged: false },
];

/// Measures the lengths that have a target, or the others.
pub fn offline(source: &Source, judged: bool) -> Result<()> {
    let loaded = load(source)?;
    let works = source.sized(DEVICE, EMULATED);
    let chosen = works.iter().filter(|work| work.judged == judged);
    chosen.into_iter().try_for_each(|work| throughput(&loaded, work, judged))
}

/// Measures all lengths with weights, activations and cache in E4M3. The target is that of bf16, so
/// it does not apply.
pub fn offline_fp8(source: &Source) -> Result<()> {
    let source = Source { eight_bits: Some(EightBits::Both), ..source.clone() };
    let loaded = load(&source)?;
    source.sized(DEVICE, EMULATED).iter().try_for_each(|work| throughput(&loaded, work, false))
}

fn load(source: &Source) -> Result<Loaded> {
    targets::head();
    source.start(Wanted {
        kind: Kind::Bf16,
        deterministic: false,
        share: 0.9,
        graphs: true,
        max_batched_tokens: source.sized(2048, 32),
        max_rows: source.sized(512, 8),
        max_context: source.sized(4096, 64),
    })
}

fn throughput(loaded: &Loaded, work: &Work, judged: bool) -> Result<()> {
    let &Work { prompt, answer, waves, .. } = work;
    let options = loaded.options();
    let held = options.num_blocks / (prompt + answer).div_ceil(BLOCK_SIZE);
    let rows = options.max_rows.min(held);
    let requests = rows * waves;
    let engine = loaded.engine(EngineOptions { max_rows: rows, ..options });
    let ask = |i: usize| request(tokens(i, prompt, loaded.info.config.vocab_size), answer);
    let (answers, seconds) = ask_all(&engine, (0..requests).map(ask).collect())?;
    let preemptions = end(&engine)?.preemptions;
    let produced: usize = answers.iter().map(|answer| answer.tokens.len()).sum();
    let rate = produced as f64 / seconds;
    row(
        format!("offline, {prompt} in, {answer} out, {requests} requests in {rows} rows"),
        format!(
            "{rate:.0} tok/s produced, {:.0} read and produced, in {seconds:.1} s, {preemptions} preemptions",
            (produced + requests * prompt) as f64 / seconds
        ),
        "",
        judged.then_some((OFFLINE, rate)).as_slice(),
    );
    Ok(())
}
