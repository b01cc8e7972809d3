//! Greedy continuation of token ids: `generate MODEL.gguf COUNT ID…` (a folder in Hugging Face
//! layout works too).

use candle_core::Device;
use cresset_kernels::Compute;
use cresset_models::{ForwardBatch, KvCache, LoadOptions, Model, ModelSource, load};
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
    let options = LoadOptions {
        device: Device::Cpu,
        compute: Compute::new(std::thread::available_parallelism()?.get()),
        dequantise: false,
        max_batched_tokens: MAX_BATCHED_TOKENS,
        max_context: prompt.len() + count,
    };
    let source = if path.is_dir() { ModelSource::HfFolder(path) } else { ModelSource::Gguf(path) };
    let mut model = load(&source, &options)?;
    let blocks = (prompt.len() + count).div_ceil(BLOCK_SIZE);
    let mut kv = KvCache::new(&model.config().kv_layout(), blocks, BLOCK_SIZE, &Device::Cpu)?;
    for token in generate(&mut *model, &mut kv, &prompt, count)? {
        print!("{token} ");
    }
    println!();
    Ok(())
}

fn generate(
    model: &mut dyn Model,
    kv: &mut KvCache,
    prompt: &[u32],
    count: usize,
) -> cresset_models::Result<Vec<u32>> {
    let (mut tokens, mut computed) = (prompt.to_vec(), 0);
    while tokens.len() < prompt.len() + count {
        let new = &tokens[computed..tokens.len().min(computed + MAX_BATCHED_TOKENS)];
        let logits = model.forward(&step(new, computed, kv.block_size), kv)?;
        computed += new.len();
        if computed == tokens.len() {
            tokens.push(logits.argmax(1)?.to_vec1::<u32>()?[0]);
        }
    }
    Ok(tokens.split_off(prompt.len()))
}

/// One sequence in the cache's first blocks; logits of its last row.
fn step(new: &[u32], computed: usize, block_size: usize) -> ForwardBatch {
    let len = computed + new.len();
    let positions: Vec<u32> = (computed as u32..len as u32).collect();
    ForwardBatch {
        input_ids: new.to_vec(),
        feedback: Vec::new(),
        slot_mapping: positions.clone(),
        positions,
        cu_seqlens_q: vec![0, new.len() as u32],
        seq_lens: vec![len as u32],
        block_tables: vec![(0..len.div_ceil(block_size) as u32).collect()],
        logits_indices: vec![new.len() as u32 - 1],
    }
}
