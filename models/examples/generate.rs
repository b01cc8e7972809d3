//! Continues token ids greedily: `generate MODEL.gguf COUNT ID…` (a folder in Hugging Face layout
//! works too).

use cresset_models::cpu::CpuModel;
use cresset_models::{ForwardBatch, Model, ModelOptions, ModelSource};
use std::error::Error;
use std::path::PathBuf;

const BLOCK_SIZE: usize = 16;
const MAX_BATCHED_TOKENS: usize = 512;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(path), Some(count)) = (args.next(), args.next()) else {
        return Err("usage: generate MODEL COUNT ID…".into());
    };
    let (path, count) = (PathBuf::from(path), count.parse::<usize>()?);
    let prompt = args.map(|id| id.parse::<u32>()).collect::<Result<Vec<_>, _>>()?;
    let options = ModelOptions {
        threads: std::thread::available_parallelism()?.get(),
        block_size: BLOCK_SIZE,
        max_batched_tokens: MAX_BATCHED_TOKENS,
        max_context: Some(prompt.len() + count),
        ..ModelOptions::default()
    };
    let source = if path.is_dir() { ModelSource::hf_folder(path) } else { ModelSource::gguf(path) };
    let mut model = CpuModel::load(&source, &options)?;
    for token in generate(&mut model, &prompt, count)? {
        print!("{token} ");
    }
    println!();
    Ok(())
}

fn generate(
    model: &mut CpuModel,
    prompt: &[u32],
    count: usize,
) -> cresset_models::Result<Vec<u32>> {
    let (mut tokens, mut computed) = (prompt.to_vec(), 0);
    while tokens.len() < prompt.len() + count {
        let new = &tokens[computed..tokens.len().min(computed + MAX_BATCHED_TOKENS)];
        let logits = model.forward(&step(new, computed).spread(model.cache_kinds(), BLOCK_SIZE))?;
        computed += new.len();
        if computed == tokens.len() {
            tokens.push(logits.argmax(1)?.to_vec1::<u32>()?[0]);
        }
    }
    Ok(tokens.split_off(prompt.len()))
}

/// One sequence in the cache's first blocks; only its last row has logits.
fn step(new: &[u32], computed: usize) -> ForwardBatch {
    let len = computed + new.len();
    let positions: Vec<u32> = (computed as u32..len as u32).collect();
    ForwardBatch {
        input_ids: new.to_vec(),
        feedback: Vec::new(),
        slot_mapping: positions.clone(),
        positions,
        cu_seqlens_q: vec![0, new.len() as u32],
        seq_lens: vec![len as u32],
        block_tables: vec![(0..len.div_ceil(BLOCK_SIZE) as u32).collect()],
        logits_indices: vec![new.len() as u32 - 1],
        ..ForwardBatch::default()
    }
}
