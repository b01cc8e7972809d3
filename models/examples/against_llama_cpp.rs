//! Our side of `against_llama_cpp.py`, which writes one command per line and reads the answers from
//! standard output: `against_llama_cpp MODEL THREADS [dequantise] [bytes] [processor-time]
//! [instructions=SET] [digest=BLAKE3]`, then `prefill N`, `decode STREAMS PROMPT COUNT`,
//! `logits FILE ID…`. `bytes` rounds activations to eight bits; with `digest` loading compares the
//! file's, as a node does.

#![allow(clippy::disallowed_methods, unreachable_pub, reason = "a program that measures time")]

use cresset_models::cpu::CpuModel;
use cresset_models::{ForwardBatch, Model, ModelOptions, ModelSource};
use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

const BLOCK_SIZE: usize = 16;
/// The tokens of all streams together must fit into this many slots of the cache.
const CAPACITY: usize = 8192;
const MAX_BATCHED_TOKENS: usize = 512;

type Outcome<T> = Result<T, Box<dyn Error>>;

struct Side {
    /// Measures the seconds of processor time that this thread took instead of the seconds that
    /// passed.
    processor_time: bool,
    start: Instant,
    model: CpuModel,
}

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, threads, rest @ ..] = &args[..] else {
        return Err(
            "usage: against_llama_cpp MODEL THREADS [dequantise] [bytes] [processor-time] \
             [instructions=SET] [digest=BLAKE3]"
                .into(),
        );
    };
    let value = |name: &str| rest.iter().find_map(|word| word.strip_prefix(name));
    if let Some(set) = value("instructions=") {
        cresset_kernels::use_instruction_set(set)?;
    }
    let mut source = ModelSource::gguf(PathBuf::from(path));
    if let Some(digest) = value("digest=") {
        let name = Path::new(path).file_name().ok_or("no file")?.to_string_lossy().into_owned();
        source = source.with_digests(BTreeMap::from([(name, digest.to_owned())]));
    }
    let wants = |word: &str| rest.iter().any(|r| r == word);
    // The system gives memory to the cache only where it is written, so a large cache costs
    // nothing.
    let options = ModelOptions {
        threads: threads.parse()?,
        dequantise: wants("dequantise"),
        byte_activations: wants("bytes"),
        kv_bytes: 4 << 30,
        block_size: BLOCK_SIZE,
        max_batched_tokens: MAX_BATCHED_TOKENS,
        max_context: Some(CAPACITY),
        ..ModelOptions::default()
    };
    let start = Instant::now();
    let model = CpuModel::load(&source, &options)?;
    answer(start.elapsed().as_secs_f64());
    let mut side = Side { processor_time: wants("processor-time"), start, model };
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let seconds = match words[..] {
            ["prefill", tokens] => side.prefill(tokens.parse()?)?,
            ["decode", streams, prompt, count] => {
                side.decode(streams.parse()?, prompt.parse()?, count.parse()?)?
            }
            ["logits", file, ref ids @ ..] => side.logits(file, ids)?,
            _ => return Err(format!("unknown command {line:?}").into()),
        };
        answer(seconds);
    }
    Ok(())
}

fn answer(seconds: f64) {
    println!("{seconds}");
}

/// The token that both sides read at a position of a stream.
fn token(stream: usize, position: usize) -> u32 {
    ((stream * 131 + position * 7919 + 13) % 40_000 + 50) as u32
}

impl Side {
    fn seconds(&self) -> Outcome<f64> {
        if !self.processor_time {
            return Ok(self.start.elapsed().as_secs_f64());
        }
        let account = std::fs::read_to_string("/proc/self/schedstat")?;
        let nanoseconds: f64 =
            account.split_whitespace().next().ok_or("an empty schedstat")?.parse()?;
        Ok(nanoseconds / 1e9)
    }

    /// Computes one prompt and the logits of its last token; returns the seconds that took.
    fn prefill(&mut self, tokens: usize) -> Outcome<f64> {
        let start = self.seconds()?;
        self.step(1, 0..tokens, tokens)?;
        Ok(self.seconds()? - start)
    }

    /// Decodes `count` tokens of each stream after its prompt; returns the seconds that took.
    fn decode(&mut self, streams: usize, prompt: usize, count: usize) -> Outcome<f64> {
        let chunk = MAX_BATCHED_TOKENS / streams;
        for first in (0..prompt).step_by(chunk) {
            self.step(streams, first..prompt.min(first + chunk), prompt + count)?;
        }
        let start = self.seconds()?;
        for position in prompt..prompt + count {
            self.step(streams, position..position + 1, prompt + count)?;
        }
        Ok(self.seconds()? - start)
    }

    /// Computes the same positions of every stream; each owns the blocks for `most` tokens.
    fn step(
        &mut self,
        streams: usize,
        positions: std::ops::Range<usize>,
        most: usize,
    ) -> Outcome<()> {
        let own = most.div_ceil(BLOCK_SIZE);
        let rows = || (0..streams).flat_map(|s| positions.clone().map(move |p| (s, p)));
        let n = positions.len();
        let batch = ForwardBatch {
            input_ids: rows().map(|(s, p)| token(s, p)).collect(),
            feedback: Vec::new(),
            positions: rows().map(|(_, p)| p as u32).collect(),
            slot_mapping: rows().map(|(s, p)| (s * own * BLOCK_SIZE + p) as u32).collect(),
            cu_seqlens_q: (0..=streams).map(|s| (s * n) as u32).collect(),
            seq_lens: vec![positions.end as u32; streams],
            block_tables: (0..streams)
                .map(|s| (s * own..(s + 1) * own).map(|b| b as u32).collect())
                .collect(),
            logits_indices: (1..=streams).map(|s| (s * n - 1) as u32).collect(),
            ..ForwardBatch::default()
        };
        self.model.forward(&batch.spread(self.model.cache_kinds(), BLOCK_SIZE))?;
        Ok(())
    }

    /// Writes `[ids, vocabulary]` f32 to a file.
    fn logits(&mut self, file: &str, ids: &[&str]) -> Outcome<f64> {
        let start = self.seconds()?;
        let input_ids: Vec<u32> = ids.iter().map(|id| id.parse()).collect::<Result<_, _>>()?;
        let n = input_ids.len() as u32;
        let batch = ForwardBatch {
            input_ids,
            feedback: Vec::new(),
            positions: (0..n).collect(),
            slot_mapping: (0..n).collect(),
            cu_seqlens_q: vec![0, n],
            seq_lens: vec![n],
            block_tables: vec![(0..n.div_ceil(BLOCK_SIZE as u32)).collect()],
            logits_indices: (0..n).collect(),
            ..ForwardBatch::default()
        };
        let logits = self
            .model
            .forward(&batch.spread(self.model.cache_kinds(), BLOCK_SIZE))?
            .flatten_all()?
            .to_vec1::<f32>()?;
        let bytes: Vec<u8> = logits.iter().flat_map(|value| value.to_le_bytes()).collect();
        std::fs::File::create(file)?.write_all(&bytes)?;
        Ok(self.seconds()? - start)
    }
}
