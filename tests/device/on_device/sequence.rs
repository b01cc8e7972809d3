//! Runs steps without an engine, over sequences that each have a part of the cache to themselves.

use crate::model::{BLOCK_SIZE, Shared};
use crate::{Result, tokens};
use cresset_engine::{RowSampling, Runner, SamplingParams};
use cresset_kernels::sampling::Sampled;
use cresset_models::ForwardBatch;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps that run before the timed ones.
pub const WARM_UP: usize = 4;

pub struct Sequence {
    /// Tokens in the cache.
    pub computed: usize,
    blocks: Vec<u32>,
}

impl Sequence {
    /// `count` sequences, each with room in the cache for `tokens` tokens.
    pub fn several(count: usize, tokens: usize) -> Vec<Self> {
        let each = tokens.div_ceil(BLOCK_SIZE) as u32;
        let blocks = |i: u32| (i * each..(i + 1) * each).collect();
        (0..count as u32).map(|i| Self { computed: 0, blocks: blocks(i) }).collect()
    }
}

/// The batch that computes new tokens of each sequence and the logits of the last one. The
/// sequences are left as they are after the step.
pub fn step<'a>(parts: impl IntoIterator<Item = (&'a mut Sequence, &'a [u32])>) -> ForwardBatch {
    let mut batch = ForwardBatch { cu_seqlens_q: vec![0], ..ForwardBatch::default() };
    for (sequence, new) in parts {
        let positions = sequence.computed..sequence.computed + new.len();
        let slot = |i: usize| {
            sequence.blocks[i / BLOCK_SIZE] * BLOCK_SIZE as u32 + (i % BLOCK_SIZE) as u32
        };
        batch.input_ids.extend_from_slice(new);
        batch.slot_mapping.extend(positions.clone().map(slot));
        batch.positions.extend(positions.clone().map(|position| position as u32));
        batch.cu_seqlens_q.push(batch.input_ids.len() as u32);
        batch.seq_lens.push(positions.end as u32);
        batch.block_tables.push(sequence.blocks[..positions.end.div_ceil(BLOCK_SIZE)].to_vec());
        batch.logits_indices.push(batch.input_ids.len() as u32 - 1);
        sequence.computed = positions.end;
    }
    batch
}

/// Greedy sampling for each row.
pub fn greedy(rows: usize, logprobs: Option<u8>) -> Vec<RowSampling> {
    let params =
        Arc::new(SamplingParams { temperature: 0.0, logprobs, ..SamplingParams::default() });
    let row = RowSampling {
        params,
        tokens: Arc::default(),
        pending: None,
        prompt_len: 0,
        banned: Arc::default(),
        grammar: None,
    };
    vec![row; rows]
}

/// Runs a step alone: the next one is not launched before its results have been collected.
pub fn run(
    runner: &mut Shared,
    batch: &ForwardBatch,
    rows: &[RowSampling],
) -> Result<Vec<Sampled>> {
    runner.launch(batch, rows)?;
    Ok(runner.collect()?.into_iter().collect::<Result<_, _>>()?)
}

/// The seconds of a step that computes a prompt.
pub fn prompt_seconds(runner: &mut Shared, prompt: &[u32]) -> Result<f64> {
    let batch =
        step(Sequence::several(1, prompt.len()).iter_mut().map(|sequence| (sequence, prompt)));
    let start = Instant::now();
    run(runner, &batch, &greedy(1, None))?;
    Ok(start.elapsed().as_secs_f64())
}

/// The decoding that is timed: rows, tokens in the cache before the first timed step, and timed
/// steps.
#[derive(Clone, Copy)]
pub struct Decode {
    pub rows: usize,
    pub context: usize,
    pub steps: usize,
}

impl Decode {
    /// Blocks of the cache that it needs.
    pub fn blocks(&self) -> usize {
        self.rows * (self.context + self.steps).div_ceil(BLOCK_SIZE)
    }

    /// Tokens in the cache in the middle of the timed steps.
    pub fn cached(&self) -> usize {
        self.rows * (self.context + self.steps / 2)
    }
}

/// The seconds of a decoding step, and of its launch on the host. `most` is the largest number of
/// tokens that a step may have.
pub fn decode_seconds(
    runner: &mut Shared,
    work: Decode,
    vocab_size: usize,
    most: usize,
) -> Result<(f64, f64)> {
    decode_seconds_of(runner, &vec![work.context; work.rows], work.steps, vocab_size, most)
}

/// The same for sequences that have these numbers of tokens before the first timed step.
pub fn decode_seconds_of(
    runner: &mut Shared,
    contexts: &[usize],
    steps: usize,
    vocab_size: usize,
    most: usize,
) -> Result<(f64, f64)> {
    let longest = contexts.iter().copied().max().unwrap_or(0);
    let mut sequences = Sequence::several(contexts.len(), longest + steps);
    let prompt = tokens(0, longest - WARM_UP, vocab_size);
    let at_once = most / prompt.len();
    for (some, contexts) in sequences.chunks_mut(at_once).zip(contexts.chunks(at_once)) {
        let rows = greedy(some.len(), None);
        let parts = some.iter_mut().zip(contexts);
        let batch = step(parts.map(|(sequence, len)| (sequence, &prompt[..len - WARM_UP])));
        run(runner, &batch, &rows)?;
    }
    decode(runner, &mut sequences, WARM_UP)?;
    let start = Instant::now();
    let host = decode(runner, &mut sequences, steps)?;
    let each = |time: Duration| time.as_secs_f64() / steps as f64;
    Ok((each(start.elapsed()), each(host)))
}

/// Runs steps that take their tokens from earlier steps, whose results the host need not have read,
/// and returns the time that launching them took.
fn decode(runner: &mut Shared, sequences: &mut [Sequence], steps: usize) -> Result<Duration> {
    let (rows, mut host, depth) = (greedy(sequences.len(), None), Duration::ZERO, runner.depth());
    for i in 0..steps {
        if i >= depth {
            runner.collect()?;
        }
        let start = Instant::now();
        let mut batch = step(sequences.iter_mut().map(|sequence| (sequence, &[0][..])));
        if i > 0 {
            batch.feedback = (0..rows.len() as u32).map(Some).collect();
        }
        runner.launch(&batch, &rows)?;
        host += start.elapsed();
    }
    for _ in 0..steps.min(depth) {
        runner.collect()?;
    }
    Ok(host)
}
