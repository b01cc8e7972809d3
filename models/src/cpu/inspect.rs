//! Tells from a release's headers whether this build can load it: the decoder is built as for
//! serving, from names and shapes, without reading a weight.

use crate::decoder::{Decoder, DecoderOptions};
use crate::loader::store::{Raw, WeightStore};
use crate::loader::tensors::Reading;
use crate::{ModelConfig, ModelSource, Result};
use candle_core::quantized::GgmlDType;
use candle_core::{Device, Tensor};
use cresset_kernels::Compute;
use cresset_kernels::gpu::Kind;
use cresset_kernels::linear::{Mode, Weight};

/// A store that keeps nothing.
struct NoWeights;

impl WeightStore<Compute> for NoWeights {
    fn matrix(&mut self, _parts: &[Raw]) -> Result<Weight> {
        Ok(Weight::from_ggml(GgmlDType::F32, &[0; size_of::<f32>()], 1, 1)?)
    }

    fn norm(&mut self, _values: Vec<f32>) -> Result<Tensor> {
        Ok(Tensor::from_vec(vec![0f32], 1, &Device::Cpu)?)
    }

    fn bias(&mut self, values: Vec<f32>) -> Result<Tensor> {
        self.norm(values)
    }
}

/// The release's configuration, if its files can be loaded. It takes milliseconds and reads headers
/// only: weights may still be damaged.
pub fn inspect(source: &ModelSource) -> Result<ModelConfig> {
    let sizes = DecoderOptions {
        kind: Kind::F32,
        mode: Mode::Invariant,
        max_tokens: 1,
        max_logits_rows: 1,
        max_context: 1,
    };
    let decoder = Decoder::load(Compute::new(1), source, &mut NoWeights, Reading::Headers, &sizes)?;
    Ok(decoder.config)
}
