//! Speed beside candle-transformers on the same GGUF file, interleaved in one process after their
//! greedy tokens agree: `RAYON_NUM_THREADS=2 cargo run --release -p cresset-models --example
//! against_candle -- MODEL.gguf [THREADS]`.

#![allow(clippy::disallowed_methods, unreachable_pub, reason = "a program that measures time")]

use candle_core::quantized::gguf_file;
use candle_core::{Device, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;
use cresset_models::cpu::CpuModel;
use cresset_models::{ForwardBatch, Model, ModelOptions, ModelSource};
use std::error::Error;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

const BLOCK_SIZE: usize = 16;
const PROMPT: usize = 512;
const ROUNDS: usize = 5;
const DECODED: usize = 48;
const AGREEING: usize = 24;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// One of the two sides: logits of the last of `tokens`, which follow `position` cached ones.
trait Side {
    fn step(&mut self, tokens: &[u32], position: usize) -> Outcome<Tensor>;
}

struct Ours {
    model: CpuModel,
}

impl Ours {
    fn load(path: &Path, threads: usize) -> Outcome<Self> {
        let options = ModelOptions {
            threads,
            block_size: BLOCK_SIZE,
            max_batched_tokens: PROMPT,
            max_context: Some(2 * PROMPT),
            ..ModelOptions::default()
        };
        let model = CpuModel::load(&ModelSource::gguf(path.to_owned()), &options)?;
        Ok(Self { model })
    }
}

impl Side for Ours {
    fn step(&mut self, tokens: &[u32], position: usize) -> Outcome<Tensor> {
        let (n, len) = (tokens.len() as u32, position + tokens.len());
        let positions: Vec<u32> = (position as u32..len as u32).collect();
        let batch = ForwardBatch {
            input_ids: tokens.to_vec(),
            feedback: Vec::new(),
            slot_mapping: positions.clone(),
            positions,
            cu_seqlens_q: vec![0, n],
            seq_lens: vec![len as u32],
            block_tables: vec![(0..len.div_ceil(BLOCK_SIZE) as u32).collect()],
            logits_indices: vec![n - 1],
            ..ForwardBatch::default()
        };
        Ok(self.model.forward(&batch.spread(self.model.cache_kinds(), BLOCK_SIZE))?)
    }
}

struct Candle(ModelWeights);

impl Candle {
    fn load(path: &Path) -> Outcome<Self> {
        let mut file = File::open(path)?;
        let content = gguf_file::Content::read(&mut file)?;
        Ok(Self(ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?))
    }
}

impl Side for Candle {
    fn step(&mut self, tokens: &[u32], position: usize) -> Outcome<Tensor> {
        let input = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        Ok(self.0.forward(&input, position)?)
    }
}

fn greedy(logits: &Tensor) -> Outcome<u32> {
    Ok(logits.flatten_all()?.argmax(0)?.to_scalar()?)
}

/// Returns `count` greedy tokens after the prompt, and the tokens per second of prefill and of
/// decode.
fn measure(side: &mut dyn Side, prompt: &[u32], count: usize) -> Outcome<(Vec<u32>, f64, f64)> {
    let start = Instant::now();
    let mut tokens = vec![greedy(&side.step(prompt, 0)?)?];
    let prefill = prompt.len() as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    while tokens.len() < count {
        let position = prompt.len() + tokens.len() - 1;
        tokens.push(greedy(&side.step(&tokens[tokens.len() - 1..], position)?)?);
    }
    Ok((tokens, prefill, (count - 1) as f64 / start.elapsed().as_secs_f64()))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Outcome<()> {
    let mut args = std::env::args().skip(1);
    let path = PathBuf::from(args.next().ok_or("usage: against_candle MODEL.gguf [THREADS]")?);
    let threads = args.next().map_or(Ok(2), |n| n.parse())?;
    let (mut ours, mut candle) = (Ours::load(&path, threads)?, Candle::load(&path)?);
    let vocab_size = ours.model.config().vocab_size;
    let prompt: Vec<u32> =
        (0..PROMPT).map(|i| ((i * 7919 + 13) % (vocab_size - 100) + 50) as u32).collect();
    // candle's model rounds activations to 8 bits, so the two may differ on near ties of random
    // prompts: a difference is counted and shown, and only the first tokens must agree.
    let (short, _, _) = measure(&mut ours, &prompt[..64], AGREEING)?;
    let (theirs, _, _) = measure(&mut candle, &prompt[..64], AGREEING)?;
    let agreed = short.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
    println!("greedy tokens: the first {agreed} of {AGREEING} agree");
    if agreed == 0 {
        return Err(format!("ours {short:?}\ncandle {theirs:?}").into());
    }
    let mut rates = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        let (_, prefill, decode) = measure(&mut ours, &prompt, DECODED)?;
        let (_, candle_prefill, candle_decode) = measure(&mut candle, &prompt, DECODED)?;
        println!(
            "prefill {prefill:.1} against {candle_prefill:.1}, decode {decode:.1} against {candle_decode:.1}"
        );
        for (to, rate) in rates.iter_mut().zip([prefill, candle_prefill, decode, candle_decode]) {
            to.push(rate);
        }
    }
    let [prefill, candle_prefill, decode, candle_decode] = rates.map(median);
    println!("medians of {ROUNDS} interleaved rounds, {threads} threads, tokens per second");
    println!(
        "prefill of {PROMPT}   ours {prefill:8.1}   candle {candle_prefill:8.1}   ratio {:.2}",
        prefill / candle_prefill
    );
    println!(
        "decode at {PROMPT}    ours {decode:8.1}   candle {candle_decode:8.1}   ratio {:.2}",
        decode / candle_decode
    );
    Ok(())
}
