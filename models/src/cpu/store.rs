//! Weights in the machine's memory: quantised weights stay quantised.

use crate::Result;
use crate::loader::store::{Raw, WeightStore};
use candle_core::{Device, Tensor};
use cresset_kernels::Compute;
use cresset_kernels::linear::Weight;

pub(super) struct CpuStore {
    pub compute: Compute,
    /// Turn every matrix into f32: the exact reference mode.
    pub dequantise: bool,
    /// Bytes of all matrices stored.
    pub bytes: usize,
}

impl WeightStore<Compute> for CpuStore {
    fn matrix(&mut self, parts: &[Raw]) -> Result<Weight> {
        let part = |raw: &Raw| {
            let weight = raw.weight(&self.compute)?;
            if self.dequantise { Ok(weight.to_f32()?) } else { Ok(weight) }
        };
        let whole = Weight::stack(parts.iter().map(part).collect::<Result<_>>()?)?;
        self.bytes += whole.bytes();
        Ok(whole)
    }

    fn norm(&mut self, values: Vec<f32>) -> Result<Tensor> {
        let len = values.len();
        Ok(Tensor::from_vec(values, len, &Device::Cpu)?)
    }

    fn bias(&mut self, values: Vec<f32>) -> Result<Tensor> {
        self.norm(values)
    }
}
