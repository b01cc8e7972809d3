//! The kernels in this binary: a fat binary for each `.cu` file. All are loaded when the device is
//! opened, so that no launch ever waits for a load and no load happens while a graph is recorded.

use super::failure::failure;
use crate::gpu::{Arg, Launch, MAX_PARAMETERS};
use crate::{Error, Result};
use candle_core::cuda_backend::cudarc::driver::sys::{
    self, CUfunction_attribute as Attribute, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue, CUlaunchConfig, CUstream,
};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, DriverError};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::Arc;

/// Percent of a multiprocessor's first-level memory that is shared memory. It is the same for all
/// kernels, since a multiprocessor must be empty before its split changes, and our kernels either
/// need most of it or make no use of the rest. Not yet measured.
const SHARED_MEMORY_PERCENT: i32 = 100;

struct Fatbin {
    image: &'static [u8],
    kernels: &'static [&'static str],
}

include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

struct Kernel {
    function: CudaFunction,
    /// Size of each parameter in bytes.
    parameters: Vec<usize>,
}

pub(super) struct LoadedKernels {
    by_name: HashMap<&'static str, Kernel>,
    /// Whether each kernel waits by itself for the one before it, so that launches may overlap.
    /// Only code for sm_90 and later does; PTX of an earlier architecture does not, whatever device
    /// it runs on.
    pub can_overlap: bool,
}

/// The first architecture whose code waits by itself: sm_90, as major times ten plus minor.
const OVERLAP_SINCE: i32 = 90;

impl LoadedKernels {
    /// Loads every kernel; `shared_bytes` is the most shared memory that a block may have.
    pub(super) fn load(context: &Arc<CudaContext>, shared_bytes: u32) -> Result<Self> {
        let mut all = Self { by_name: HashMap::new(), can_overlap: true };
        for fatbin in FATBINS {
            let module = context
                .load_module(Ptx::from_binary(fatbin.image.to_vec()))
                .map_err(failure("load kernels"))?;
            for name in fatbin.kernels {
                let function = module.load_function(name).map_err(failure(name))?;
                all.can_overlap &= function.ptx_version().map_err(failure(name))? >= OVERLAP_SINCE;
                all.by_name
                    .insert(*name, load_kernel(function, shared_bytes).map_err(failure(name))?);
            }
        }
        Ok(all)
    }

    /// Puts the kernel into the stream. If `overlapped`, its blocks may begin while the previous
    /// kernel still runs; this needs `can_overlap`.
    pub(super) fn launch(
        &self,
        launch: &Launch,
        args: &[Arg],
        stream: CUstream,
        overlapped: bool,
    ) -> Result<()> {
        let kernel = self.get(launch, args)?;
        let mut words = [0u64; MAX_PARAMETERS];
        let mut pointers = [null_mut(); MAX_PARAMETERS];
        for ((word, pointer), arg) in words.iter_mut().zip(&mut pointers).zip(args) {
            *word = argument_bits(arg).0;
            *pointer = (&raw mut *word).cast();
        }
        let mut attribute = overlap_attribute();
        let [x, y, z] = launch.blocks;
        let config = CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: stream,
            attrs: &raw mut attribute,
            numAttrs: u32::from(overlapped),
        };
        // SAFETY: each pointer points to an argument of its parameter's size, as `get` checked. The
        // driver copies arguments and configuration before it returns. The caller of `launch` makes
        // sure that the kernel stays inside its views.
        unsafe {
            let function = kernel.function.cu_function();
            sys::cuLaunchKernelEx(&raw const config, function, pointers.as_mut_ptr(), null_mut())
        }
        .result()
        .map_err(failure(launch.kernel))
    }

    /// The kernel of this name, if the arguments have the sizes of its parameters.
    fn get(&self, launch: &Launch, args: &[Arg]) -> Result<&Kernel> {
        let op = launch.kernel;
        let found = self
            .by_name
            .get(op)
            .ok_or_else(|| Error::Unsupported { op, detail: "kernel: not in this build".into() })?;
        let sizes = args.iter().map(|arg| argument_bits(arg).1);
        if args.len() <= MAX_PARAMETERS && sizes.eq(found.parameters.iter().copied()) {
            return Ok(found);
        }
        let detail =
            format!("its parameters take {:?} bytes, its arguments others", found.parameters);
        Err(Error::Shape { op, detail })
    }
}

fn overlap_attribute() -> CUlaunchAttribute {
    let mut value = CUlaunchAttributeValue { pad: [0; 64] };
    value.programmaticStreamSerializationAllowed = 1;
    let id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    CUlaunchAttribute { id, pad: [0; 4], value }
}

/// The bits of an argument, in the low bytes of a word, and its size in bytes.
fn argument_bits(arg: &Arg) -> (u64, usize) {
    match *arg {
        Arg::View(view) => (view.address(), 8),
        Arg::Null => (0, 8),
        Arg::U64(value) => (value, 8),
        Arg::U32(value) => (u64::from(value), 4),
        Arg::F32(value) => (u64::from(value.to_bits()), 4),
    }
}

fn load_kernel(function: CudaFunction, shared_bytes: u32) -> Result<Kernel, DriverError> {
    let own = function.shared_size_bytes()?;
    let most = shared_bytes.cast_signed() - own;
    function.set_attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most)?;
    function.set_attribute(
        Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
        SHARED_MEMORY_PERCENT,
    )?;
    // SAFETY: the handle is live as long as `function`, which holds its module.
    unsafe { sys::cuFuncLoad(function.cu_function()) }.result()?;
    let parameters = (0..).map_while(|index| parameter_bytes(&function, index)).collect();
    Ok(Kernel { function, parameters })
}

/// The size of a parameter in bytes; `None` after the last one.
fn parameter_bytes(function: &CudaFunction, index: usize) -> Option<usize> {
    let (mut offset, mut bytes) = (0, 0);
    // SAFETY: the handle is live; both results are written before it answers with success.
    let answer = unsafe {
        sys::cuFuncGetParamInfo(function.cu_function(), index, &raw mut offset, &raw mut bytes)
    };
    answer.result().is_ok().then_some(bytes)
}
