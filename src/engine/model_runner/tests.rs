//! Loading, and what one bad row does to the others.

use super::*;
use crate::engine::sampling_params::SamplingParams;
use candle_core::Tensor;
use cresset_models::testing::{tiny_llama_gguf, vocab_size};
use std::sync::Arc;

fn options(kv_bytes: usize, max_context: Option<usize>) -> RunnerOptions {
    RunnerOptions {
        gpu: None,
        threads: 1,
        dequantise: true,
        kv_bytes,
        block_size: 16,
        max_batched_tokens: 32,
        max_context,
    }
}

fn load(options: &RunnerOptions) -> Result<(ModelRunner, LoadedInfo), EngineError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_llama_gguf(&path, 1).unwrap();
    ModelRunner::load(&ModelSource::Gguf(path), options)
}

/// 2 layers, 2 heads of 16 values, 16 tokens, keys and values, f32.
const BLOCK_BYTES: usize = 2 * 2 * 16 * 16 * 2 * 4;

#[test]
fn the_cache_fills_the_memory_it_may_take() {
    let check = |kv_bytes, expect| {
        let (runner, info) = load(&options(kv_bytes, None)).unwrap();
        assert_eq!((info.num_blocks, runner.kv.num_blocks), (expect, expect));
        assert_eq!(info.config.vocab_size, vocab_size());
        assert!(info.weight_bytes > 0);
    };
    check(BLOCK_BYTES, 1);
    check(BLOCK_BYTES * 10 - 1, 9);
    let error = load(&options(BLOCK_BYTES - 1, None)).err().unwrap();
    assert!(error.to_string().contains("one block of 16 tokens takes 8192"), "{error}");
    assert_eq!(error.kind(), "out_of_memory");
}

/// Says `logits`, whatever it is asked.
struct FixedModel {
    config: ModelConfig,
    logits: Tensor,
}

impl Model for FixedModel {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(&mut self, _: &ForwardBatch, _: &mut KvCache) -> cresset_models::Result<Tensor> {
        Ok(self.logits.clone())
    }

    fn weight_bytes(&self) -> usize {
        0
    }
}

fn run(logits: Tensor, rows: usize) -> Result<Vec<RowResult>, EngineError> {
    let (runner, info) = load(&options(BLOCK_BYTES, Some(16))).unwrap();
    let model = FixedModel { config: info.config, logits };
    let row = RowSampling {
        params: Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() }),
        tokens: Arc::new(vec![0]),
        pending: None,
        prompt_len: 1,
        banned: Arc::default(),
    };
    let mut runner = ModelRunner::new(Box::new(model), runner.kv, Compute::new(2));
    runner.launch(&ForwardBatch::default(), &vec![row; rows])?;
    runner.collect()
}

#[test]
fn a_row_without_finite_logits_fails_alone() {
    let logits = [[0f32, 1.0, 0.0], [0.0, f32::NAN, 0.0], [2.0, 1.0, 0.0]];
    let results = run(Tensor::new(&logits, &Device::Cpu).unwrap(), 3).unwrap();
    let tokens: Vec<_> =
        results.iter().map(|result| result.as_ref().ok().map(|sampled| sampled.token)).collect();
    assert_eq!(tokens, [Some(1), None, Some(0)]);
    let reason = results[1].as_ref().unwrap_err();
    assert!(reason.to_string().contains("token 1"), "{reason}");
    assert_eq!(reason.kind(), "sampling");
}

#[test]
fn logits_of_another_shape_fail_the_step() {
    let check = |logits: Tensor, expect: &str| {
        let error = run(logits, 2).unwrap_err();
        assert!(error.to_string().contains(expect), "{error}");
        assert_eq!(error.kind(), "shape");
    };
    let of = |shape: (usize, usize)| {
        Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap()
    };
    check(of((3, 4)), "3 rows of logits where 2 were asked for");
    check(of((4, 2)).t().unwrap(), "not contiguous");
    assert_eq!(run(of((2, 4)), 2).unwrap().len(), 2);
}
