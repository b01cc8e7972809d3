//! Binds the CUDA libraries when a device is first asked for, so that one binary runs with and
//! without them. Under each name that candle's bindings may call, the linker finds a function of
//! our own, which jumps to the address in a slot. Build profiles differ in the names that the
//! linker needs, so all are here.

use crate::gpu::nvml::NvmlFunctions;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::arch::naked_asm;
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Folders into which toolkits put their libraries without telling the loader.
const FOLDERS: &[&str] =
    &["/usr/local/cuda/lib64", "/usr/local/cuda-13/lib64", "/usr/local/cuda-13.0/lib64"];

struct Bound {
    /// The file's name; empty for a library that is never opened, as nothing here calls it.
    file: &'static str,
    /// Names as C strings.
    functions: &'static [(&'static str, &'static AtomicPtr<c_void>)],
}

macro_rules! libraries {
    ($list:ident: $($file:literal or $status:literal: $($function:ident)*;)*) => {
        $($(
            #[expect(non_snake_case, reason = "each module is named after its function")]
            mod $function {
                /// Stands for the function until it is bound.
                extern "C" fn missing() -> super::c_int {
                    $status
                }
                pub(super) static SLOT: super::AtomicPtr<super::c_void> =
                    super::AtomicPtr::new(missing as *mut super::c_void);
            }

            // SAFETY: its arguments and result are those of the function in the slot. This is the
            // library's function of the same name, or `missing`, which reads no argument and
            // returns a status that callers check.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $function() {
                naked_asm!("jmp qword ptr [rip + {slot}]", slot = sym $function::SLOT)
            }
        )*)*

        static $list: &[Bound] = &[$(Bound {
            file: $file,
            functions: &[$((concat!(stringify!($function), "\0"), &$function::SLOT)),*],
        }),*];
    };
}

// The number is the library's own status for an absent library: "stub library", "not initialised",
// "initialisation failed".
libraries! {
    LIBRARIES:
    "libcuda.so.1" or 34:
        cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy_v2 cuCtxGetCacheConfig cuCtxGetCurrent
        cuCtxGetLimit cuCtxGetStreamPriorityRange cuCtxSetCacheConfig cuCtxSetCurrent cuCtxSetFlags
        cuCtxSetLimit cuCtxSynchronize cuDestroyExternalMemory cuDeviceGet cuDeviceGetAttribute
        cuDeviceGetCount cuDeviceGetDefaultMemPool cuDeviceGetMemPool cuDeviceGetName
        cuDeviceGetUuid cuDeviceGetUuid_v2 cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain
        cuDeviceSetMemPool cuDeviceTotalMem_v2 cuDriverGetVersion cuEventCreate cuEventDestroy_v2
        cuEventElapsedTime cuEventElapsedTime_v2 cuEventQuery cuEventRecord cuEventSynchronize
        cuExternalMemoryGetMappedBuffer cuFuncGetAttribute cuFuncGetParamInfo cuFuncLoad
        cuFuncSetAttribute cuFuncSetCacheConfig cuGetErrorName cuGetErrorString cuGraphClone
        cuGraphDestroy cuGraphExecDestroy cuGraphInstantiate cuGraphInstantiateWithFlags
        cuGraphLaunch cuGraphUpload cuImportExternalMemory cuInit cuLaunchCooperativeKernel
        cuLaunchHostFunc cuLaunchKernel cuLaunchKernelEx cuMemAdvise_v2 cuMemAllocAsync
        cuMemAllocFromPoolAsync cuMemAllocManaged cuMemAlloc_v2 cuMemFreeAsync cuMemFreeHost
        cuMemFree_v2 cuMemGetInfo_v2 cuMemHostAlloc cuMemPoolCreate cuMemPoolDestroy
        cuMemPoolGetAttribute cuMemPoolSetAttribute cuMemPoolTrimTo cuMemPrefetchAsync_v2
        cuMemcpyDtoDAsync_v2 cuMemcpyDtoD_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2
        cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2 cuMemcpyPeerAsync cuMemsetD8Async cuMemsetD8_v2
        cuModuleGetFunction cuModuleGetGlobal_v2 cuModuleLoad cuModuleLoadData cuModuleUnload
        cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveBlocksPerMultiprocessor
        cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxActiveClusters
        cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags
        cuOccupancyMaxPotentialClusterSize cuProfilerStart cuProfilerStop cuStreamAttachMemAsync
        cuStreamBeginCapture_v2 cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy_v2
        cuStreamEndCapture cuStreamIsCapturing cuStreamSynchronize cuStreamWaitEvent;
    "libcublasLt.so.13" or 1:
        cublasLtCreate cublasLtDestroy cublasLtGetVersion cublasLtLoggerOpenFile
        cublasLtLoggerSetLevel cublasLtMatmul cublasLtMatmulAlgoCheck cublasLtMatmulAlgoGetHeuristic
        cublasLtMatmulDescCreate cublasLtMatmulDescDestroy cublasLtMatmulDescSetAttribute
        cublasLtMatmulPreferenceCreate cublasLtMatmulPreferenceDestroy
        cublasLtMatmulPreferenceSetAttribute cublasLtMatrixLayoutCreate cublasLtMatrixLayoutDestroy
        cublasLtMatrixLayoutSetAttribute;
    "libcublas.so.13" or 1:
        cublasCreate_v2 cublasDasum_v2 cublasDestroy_v2 cublasDgemmStridedBatched cublasDgemm_v2
        cublasDgemv_v2 cublasGemmEx cublasGemmGroupedBatchedEx cublasGemmStridedBatchedEx
        cublasGetPointerMode_v2 cublasSasum_v2 cublasSetPointerMode_v2 cublasSetStream_v2
        cublasSgemmStridedBatched cublasSgemm_v2 cublasSgemv_v2;
    "libcurand.so.10" or 203:
        curandCreateGenerator curandDestroyGenerator curandGenerate curandGenerateLogNormal
        curandGenerateLogNormalDouble curandGenerateLongLong curandGenerateNormal
        curandGenerateNormalDouble curandGeneratePoisson curandGenerateUniform
        curandGenerateUniformDouble curandSetGeneratorOffset curandSetPseudoRandomGeneratorSeed
        curandSetStream;
    "" or 1:
        nvrtcCompileProgram nvrtcCreateProgram nvrtcDestroyProgram nvrtcGetPTX nvrtcGetPTXSize
        nvrtcGetProgramLog nvrtcGetProgramLogSize;
}

// It is bound when several devices are to compute a model together. The number stands for "system
// error".
libraries! {
    NCCL:
    "libnccl.so.2" or 2:
        ncclAllGather ncclCommAbort ncclCommDestroy ncclCommGetAsyncError ncclCommInitAll
        ncclGetErrorString;
}

/// Binds the functions of NCCL, once.
///
/// # Errors
/// A text that says what to do.
pub(super) fn bind_nccl() -> Result<(), String> {
    static OUTCOME: OnceLock<Result<(), String>> = OnceLock::new();
    let bind_one = |bound: &Bound| {
        let library = load(bound.file).ok_or_else(|| {
            format!(
                "several GPUs compute a model together by NCCL, and {} cannot be loaded: install \
                 NCCL 2 for CUDA 13, name its folder in LD_LIBRARY_PATH, or set \
                 engine.tensor_parallel to 1",
                bound.file
            )
        })?;
        fill(bound, &library);
        // Never unloaded: the slots point into it.
        std::mem::forget(library);
        Ok(())
    };
    OUTCOME.get_or_init(|| NCCL.iter().try_for_each(bind_one)).clone()
}

/// Binds every function but those of NCCL, once.
///
/// # Errors
/// A text that says which library is missing, and what to do.
pub(super) fn bind() -> Result<(), String> {
    static OUTCOME: OnceLock<Result<(), String>> = OnceLock::new();
    OUTCOME.get_or_init(bind_all).clone()
}

/// The functions of the driver's management library, which comes with the driver, once.
///
/// # Errors
/// A sentence that says that there is no such library.
pub(super) fn nvml() -> Result<NvmlFunctions, String> {
    static FOUND: OnceLock<Option<NvmlFunctions>> = OnceLock::new();
    const FILE: &str = "libnvidia-ml.so.1";
    let find = || {
        let library = load(FILE)?;
        // SAFETY: only addresses are taken, of the functions of these names.
        let address = |name: &[u8]| unsafe { library.get::<*mut c_void>(name) };
        // SAFETY: the library is never unloaded.
        let found = unsafe {
            NvmlFunctions::of(|name| address(name).map_or(std::ptr::null_mut(), |found| *found))
        };
        std::mem::forget(library);
        Some(found)
    };
    FOUND.get_or_init(find).ok_or_else(|| format!("{FILE} cannot be loaded"))
}

fn bind_all() -> Result<(), String> {
    let needed = LIBRARIES.iter().filter(|bound| !bound.file.is_empty());
    let (found, missing): (Vec<_>, Vec<_>) =
        needed.map(|bound| (bound, load(bound.file))).partition(|(_, library)| library.is_some());
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
        // SAFETY: the initialisers of NVIDIA's libraries have no preconditions.
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.ok()
    })
}

fn fill(bound: &Bound, library: &Library) {
    for (name, slot) in bound.functions {
        // SAFETY: only the address is taken. An older library may lack a function that is never
        // called with it.
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
    fn missing_parts_are_named_with_a_remedy() {
        let check = |missing: &[&str], parts: &[&str]| {
            let said = explain(missing).unwrap_err();
            assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        };
        assert_eq!(explain(&[]), Ok(()));
        check(&["libcuda.so.1", "libcublasLt.so.13"], &["no NVIDIA driver", "580"]);
        check(
            &["libcublas.so.13", "libcurand.so.10"],
            &["libcublas.so.13, libcurand.so.10 cannot", "LD_LIBRARY_PATH"],
        );
    }
}
