//! The CUDA libraries, bound when a device is first asked for, so that one binary runs with and without them. The linker sees
//! a function of our own under each name that candle's bindings and ours use; it jumps to where a slot says. A name that the
//! linker misses belongs in the list below.

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::arch::naked_asm;
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Where toolkits put their libraries without telling the loader.
const FOLDERS: &[&str] = &["/usr/local/cuda/lib64", "/usr/local/cuda-13/lib64", "/usr/local/cuda-13.0/lib64"];

struct Bound {
    file: &'static str,
    /// Names as C strings.
    functions: &'static [(&'static str, &'static AtomicPtr<c_void>)],
}

macro_rules! libraries {
    ($($file:literal or $status:literal: $($function:ident)*;)*) => {
        $($(
            #[allow(non_snake_case)]
            mod $function {
                /// What every function of this library answers until it is bound.
                extern "C" fn missing() -> super::c_int {
                    $status
                }
                pub static SLOT: super::AtomicPtr<super::c_void> = super::AtomicPtr::new(missing as *mut super::c_void);
            }

            // SAFETY: it has the arguments and the result of whatever the slot names: the function of the same name, or
            // `missing`, which reads no argument and returns the status that callers check.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $function() {
                naked_asm!("jmp qword ptr [rip + {slot}]", slot = sym $function::SLOT)
            }
        )*)*

        static LIBRARIES: &[Bound] = &[$(Bound {
            file: $file,
            functions: &[$((concat!(stringify!($function), "\0"), &$function::SLOT)),*],
        }),*];
    };
}

// The status is the library's own for "not there": stub library, not initialised, initialisation failed.
libraries! {
    "libcuda.so.1" or 34:
        cuCtxDestroy_v2 cuCtxGetCurrent cuCtxSetCurrent cuCtxSynchronize cuDeviceGet cuDeviceGetAttribute
        cuDeviceGetCount cuDeviceGetName cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain cuDeviceTotalMem_v2
        cuDriverGetVersion cuEventCreate cuEventDestroy_v2 cuEventElapsedTime_v2 cuEventRecord cuEventSynchronize
        cuFuncGetAttribute cuFuncGetParamInfo cuFuncLoad cuFuncSetAttribute cuGetErrorString cuGraphDestroy
        cuGraphExecDestroy cuGraphInstantiateWithFlags cuGraphLaunch cuGraphUpload cuInit cuLaunchKernel
        cuMemAllocAsync cuMemAlloc_v2 cuMemFreeAsync cuMemFreeHost cuMemFree_v2 cuMemGetInfo_v2 cuMemHostAlloc
        cuMemcpyDtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2 cuMemcpyPeerAsync cuMemsetD8Async cuModuleGetFunction
        cuModuleLoad cuModuleLoadData cuModuleUnload cuStreamBeginCapture_v2 cuStreamCreate cuStreamDestroy_v2
        cuStreamEndCapture cuStreamIsCapturing cuStreamSynchronize cuStreamWaitEvent;
    "libcublas.so.13" or 1:
        cublasCreate_v2 cublasDestroy_v2 cublasDgemmStridedBatched cublasGemmStridedBatchedEx cublasSetStream_v2
        cublasSgemmStridedBatched;
    "libcublasLt.so.13" or 1:
        cublasLtCreate cublasLtDestroy cublasLtGetVersion cublasLtMatmul cublasLtMatmulAlgoCheck
        cublasLtMatmulAlgoGetHeuristic cublasLtMatmulDescCreate cublasLtMatmulDescDestroy
        cublasLtMatmulDescSetAttribute cublasLtMatmulPreferenceCreate cublasLtMatmulPreferenceDestroy
        cublasLtMatmulPreferenceSetAttribute cublasLtMatrixLayoutCreate cublasLtMatrixLayoutDestroy;
    "libcurand.so.10" or 203:
        curandCreateGenerator curandDestroyGenerator curandGenerateNormal curandGenerateNormalDouble
        curandGenerateUniform curandGenerateUniformDouble curandSetPseudoRandomGeneratorSeed curandSetStream;
}

/// Binds every function, once; otherwise what is missing, and what to do.
pub fn bind() -> Result<(), String> {
    static OUTCOME: OnceLock<Result<(), String>> = OnceLock::new();
    OUTCOME.get_or_init(bind_all).clone()
}

fn bind_all() -> Result<(), String> {
    let (found, missing): (Vec<_>, Vec<_>) =
        LIBRARIES.iter().map(|bound| (bound, load(bound.file))).partition(|(_, l)| l.is_some());
    let missing: Vec<&str> = missing.iter().map(|(bound, _)| bound.file).collect();
    explain(&missing)?;
    for (bound, library) in found {
        if let Some(library) = &library {
            fill(bound, library);
        }
        // Never unloaded: the slots point into it.
        std::mem::forget(library);
    }
    Ok(())
}

fn load(file: &str) -> Option<Library> {
    let elsewhere = FOLDERS.iter().map(|folder| format!("{folder}/{file}"));
    std::iter::once(file.to_owned()).chain(elsewhere).find_map(|path| {
        // SAFETY: the initialisers of NVIDIA's libraries ask nothing of who loads them.
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.ok()
    })
}

fn fill(bound: &Bound, library: &Library) {
    for (name, slot) in bound.functions {
        // SAFETY: only the address is taken; `libraries!` says how it is called. An older library may lack one that is never
        // called there.
        if let Ok(function) = unsafe { library.get::<*mut c_void>(name.as_bytes()) } {
            slot.store(*function, Ordering::Release);
        }
    }
}

fn explain(missing: &[&str]) -> Result<(), String> {
    match missing {
        [] => Ok(()),
        all if all.contains(&"libcuda.so.1") => {
            Err("there is no NVIDIA driver here (libcuda.so.1 cannot be loaded): install \
             driver 580 or newer, or run the container with its GPUs"
                .into())
        }
        some => Err(format!(
            "the NVIDIA driver is here, but {} cannot be loaded: install cuBLAS and cuRAND of CUDA 13, or name their folder in \
             LD_LIBRARY_PATH",
            some.join(", ")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::explain;

    #[test]
    fn what_is_missing_is_said_with_what_to_do() {
        let check = |missing: &[&str], parts: &[&str]| {
            let said = explain(missing).unwrap_err();
            assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        };
        assert_eq!(explain(&[]), Ok(()));
        check(&["libcuda.so.1", "libcublas.so.13"], &["no NVIDIA driver", "580"]);
        check(&["libcublas.so.13", "libcurand.so.10"], &["libcublas.so.13, libcurand.so.10", "LD_LIBRARY_PATH"]);
    }
}
