//! The kernels in this binary: a fat binary for each `.cu` file, loaded whole when the device is opened, so that no launch ever
//! waits for a load and none happens while a graph is recorded.

use super::failure;
use crate::gpu::Launch;
use crate::{Error, Result};
use candle_core::cuda_backend::cudarc::driver::sys::{self, CUfunction_attribute as Attribute};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, DriverError};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use std::collections::HashMap;
use std::sync::Arc;

struct Fatbin {
    image: &'static [u8],
    kernels: &'static [&'static str],
}

include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

pub struct Kernel {
    pub function: CudaFunction,
    /// Bytes of each parameter.
    parameters: Vec<usize>,
}

pub struct Kernels(HashMap<&'static str, Kernel>);

impl Kernels {
    /// `shared_bytes` is the most a block may have.
    pub fn load(context: &Arc<CudaContext>, shared_bytes: u32) -> Result<Self> {
        let mut all = HashMap::new();
        for fatbin in FATBINS {
            let module =
                context.load_module(Ptx::from_binary(fatbin.image.to_vec())).map_err(failure("load kernels"))?;
            for name in fatbin.kernels {
                let function = module.load_function(name).map_err(failure(name))?;
                all.insert(*name, prepare(function, shared_bytes).map_err(failure(name))?);
            }
        }
        Ok(Self(all))
    }

    /// The kernel, if arguments of these sizes are what it takes.
    pub fn get(&self, launch: &Launch, sizes: impl Iterator<Item = usize>) -> Result<&Kernel> {
        let op = launch.kernel;
        let found =
            self.0.get(op).ok_or_else(|| Error::Unsupported { op, detail: "kernel: not in this build".into() })?;
        if sizes.eq(found.parameters.iter().copied()) {
            return Ok(found);
        }
        let detail = format!("its parameters take {:?} bytes, its arguments others", found.parameters);
        Err(Error::Shape { op, detail })
    }
}

fn prepare(function: CudaFunction, shared_bytes: u32) -> Result<Kernel, DriverError> {
    let own = function.shared_size_bytes()?;
    let most = shared_bytes.cast_signed() - own;
    function.set_attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most)?;
    // SAFETY: the handle is live as long as `function`, which holds its module.
    unsafe { sys::cuFuncLoad(function.cu_function()) }.result()?;
    let parameters = (0..).map_while(|index| parameter_bytes(&function, index)).collect();
    Ok(Kernel { function, parameters })
}

/// None behind the last one.
fn parameter_bytes(function: &CudaFunction, index: usize) -> Option<usize> {
    let (mut offset, mut bytes) = (0, 0);
    // SAFETY: the handle is live; both results are written before it answers with success.
    let answer = unsafe { sys::cuFuncGetParamInfo(function.cu_function(), index, &raw mut offset, &raw mut bytes) };
    answer.result().is_ok().then_some(bytes)
}
