//! Tests of loading: the size of the cache.

use super::*;
use cresset_models::testing::{tiny_llama_gguf, vocab_size};

mod device;

fn options(kv_bytes: usize, max_context: Option<usize>) -> ModelOptions {
    ModelOptions {
        threads: 1,
        dequantise: true,
        kv_bytes,
        block_size: 16,
        max_batched_tokens: 32,
        max_context,
        ..ModelOptions::default()
    }
}

fn load(options: &ModelOptions) -> Result<(ModelRunner, LoadedInfo), EngineError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_llama_gguf(&path, 1).unwrap();
    ModelRunner::load(&ModelSource::gguf(path), options)
}

/// 2 layers, 2 heads of 16 values, 16 tokens, keys and values, f32.
const BLOCK_BYTES: usize = 2 * 2 * 16 * 16 * 2 * 4;

#[test]
fn the_cache_fills_the_memory_it_may_take() {
    let check = |kv_bytes, expect| {
        let (runner, info) = load(&options(kv_bytes, None)).unwrap();
        assert_eq!((info.num_blocks, runner.model.num_blocks()), (expect, expect));
        assert_eq!(info.config.vocab_size, vocab_size());
        assert!(info.weight_bytes > 0);
    };
    check(BLOCK_BYTES, 1);
    check(BLOCK_BYTES * 10 - 1, 9);
    let error = load(&options(BLOCK_BYTES - 1, None)).err().unwrap();
    assert!(error.to_string().contains("one block of 16 tokens takes 8192"), "{error}");
    assert_eq!(error.kind(), "out_of_memory");
}
