//! Failures of the driver, and the calls that must not meet a recording.

use crate::Error;
use candle_core::cuda_backend::cudarc::driver::DriverError;
use candle_core::cuda_backend::cudarc::driver::sys::CUresult;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held while a graph is recorded, and while libraries and kernels are loaded or unloaded. Those
/// may wait for the whole context, and such a wait is an error that ends every recording in the
/// context, another model's too.
static RECORDING: Mutex<()> = Mutex::new(());

pub(super) fn not_recording() -> MutexGuard<'static, ()> {
    RECORDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Turns a driver error into ours, with the driver's own text.
pub(super) fn failure(op: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| {
        let text = error
            .error_string()
            .map_or_else(|_| String::new(), |text| format!(": {}", text.to_string_lossy()));
        let detail = format!("{:?}{text}", error.0);
        match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::OutOfMemory { op, detail },
            code if is_final(code) => Error::DeviceLost { op, detail },
            _ => Error::Device { op, detail },
        }
    }
}

/// Whether the driver documents that after this error the process can use the device no more: a
/// kernel's fault, a fault of the hardware, of another device or of an unknown kind, or a context
/// that is gone.
fn is_final(error: CUresult) -> bool {
    matches!(
        error,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}
