//! Matrix products by cuBLASLt. It takes column-major operands only, so row-major ones are given to
//! it as their transposes. All products share one workspace. The algorithm for each shape is
//! measured where the shape is first used.

use super::failure::{failure, not_recording};
use crate::gpu::gemm_shape::GemmShape;
use crate::gpu::products::MatmulAlgorithm;
use crate::gpu::{Gemm, Kind, ProductChoices};
use crate::{Error, Result};
use candle_core::cuda_backend::cudarc::cublaslt::result::{self as lt, CublasError};
use candle_core::cuda_backend::cudarc::cublaslt::sys::{
    self, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulPreferenceAttributes_t as Preference,
};
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUdevice_attribute, CUevent_flags, CUstreamCaptureStatus,
};
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DriverError, result};
use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of workspace: NVIDIA's recommendation for sm_90. Less would save nothing that matters at
/// these memory sizes.
const WORKSPACE: usize = 32 << 20;
/// The most algorithms that are asked for and measured. The library lists its favourites first.
const CANDIDATES: usize = 8;
/// Timings of each algorithm, the first of which is a warm-up and is dropped.
const TIMING_ROUNDS: usize = 6;
/// The most plans that are kept, some hundred bytes each.
const MAX_PLANS: usize = 8192;

/// Partial sums are added in f32 and in a fixed order; no other reduction scheme is allowed. The
/// library's own choice may round each partial sum to the output's kind.
const F32_REDUCTION: u32 =
    sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
/// The value of `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

pub(super) struct CublasLt {
    stream: Arc<CudaStream>,
    handle: sys::cublasLtHandle_t,
    workspace: DeviceMemory,
    plans: Mutex<MatmulPlans>,
}

// SAFETY: the handle may be used by any thread, as the library documents; the rest is safe to
// share.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

struct MatmulPlans {
    products: ProductChoices,
    /// Plans by shape, and by the exact number of rows and both strides.
    ready: HashMap<(GemmShape, [usize; 3]), MatmulPlan>,
}

/// Descriptors, and an algorithm that was checked for exactly these.
struct MatmulPlan {
    descriptors: MatmulDescriptors,
    algorithm: MatmulAlgorithm,
}

impl CublasLt {
    pub(super) fn new(stream: &Arc<CudaStream>, products: ProductChoices) -> Result<Self> {
        let workspace = DeviceMemory::new(WORKSPACE).map_err(failure("gemm"))?;
        let handle = lt::create_handle().map_err(refusal)?;
        let plans = Mutex::new(MatmulPlans { products, ready: HashMap::new() });
        Ok(Self { stream: stream.clone(), handle, workspace, plans })
    }

    pub(super) fn run(&self, gemm: &Gemm) -> Result<()> {
        gemm.check_library()?;
        if gemm.n == 0 || gemm.rows == 0 {
            return Ok(());
        }
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let shape = GemmShape::of(gemm);
        let exact = (shape, [gemm.n, gemm.x_stride, gemm.out_stride]);
        if let Some(plan) = plans.ready.get(&exact) {
            return self.multiply(&plan.descriptors, gemm, plan.algorithm);
        }
        let descriptors = MatmulDescriptors::new(gemm).map_err(refusal)?;
        let (algorithm, lasting) = self.algorithm(&descriptors, gemm, &shape, &plans.products)?;
        self.multiply(&descriptors, gemm, algorithm)?;
        if lasting {
            if plans.ready.len() >= MAX_PLANS {
                plans.ready.clear();
            }
            plans.ready.insert(exact, MatmulPlan { descriptors, algorithm });
        }
        Ok(())
    }

    /// The algorithm for the shape, and whether it may be kept in a plan. If none is known yet,
    /// candidates are measured, which writes the product several times; while a graph is recorded,
    /// the library's first candidate is used for this call only. If the shape's algorithm cannot
    /// compute exactly this number of rows, the first candidate is used and kept, so that nothing
    /// is measured any more once each power of two has been run.
    fn algorithm(
        &self,
        descriptors: &MatmulDescriptors,
        gemm: &Gemm,
        shape: &GemmShape,
        products: &ProductChoices,
    ) -> Result<(MatmulAlgorithm, bool)> {
        let chosen = products.get(shape);
        if let Some(chosen) = chosen.filter(|chosen| self.fits(descriptors, chosen)) {
            return Ok((chosen, true));
        }
        let candidates = self.candidates(descriptors, shape)?;
        if self.recording()? || (chosen.is_some() && !gemm.n.is_power_of_two()) {
            return Ok((candidates[0], chosen.is_some()));
        }
        let best = self.fastest(descriptors, gemm, &candidates)?;
        Ok((products.keep(shape, chosen, best), true))
    }

    fn recording(&self) -> Result<bool> {
        let status = self.stream.capture_status().map_err(failure("gemm"))?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    fn fits(&self, descriptors: &MatmulDescriptors, algorithm: &MatmulAlgorithm) -> bool {
        let algorithm = sys::cublasLtMatmulAlgo_t { data: *algorithm };
        let MatmulDescriptors { description, w, x, out } = *descriptors;
        let mut found = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: all descriptors are live, and `found` is read only after success.
        unsafe {
            sys::cublasLtMatmulAlgoCheck(
                self.handle,
                description,
                w,
                x,
                out,
                out,
                &raw const algorithm,
                found.as_mut_ptr(),
            )
            .result()
            .is_ok_and(|()| found.assume_init().workspaceSize <= WORKSPACE)
        }
    }

    /// The algorithms that the library proposes: at least one, its favourite first.
    fn candidates(
        &self,
        descriptors: &MatmulDescriptors,
        shape: &GemmShape,
    ) -> Result<Vec<MatmulAlgorithm>> {
        let preference = MatmulPreference::new(shape).map_err(refusal)?;
        let MatmulDescriptors { description, w, x, out } = *descriptors;
        let mut found =
            [const { MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed() }; CANDIDATES];
        let mut count = 0;
        // SAFETY: all descriptors are live; there is room for as many results as are asked for.
        unsafe {
            let (asked, first) = (CANDIDATES as i32, found.as_mut_ptr().cast());
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description,
                w,
                x,
                out,
                out,
                preference.0,
                asked,
                first,
                &raw mut count,
            )
        }
        .result()
        .map_err(refusal)?;
        // SAFETY: the library wrote the first `count`.
        let found = found[..count as usize].iter().map(|found| unsafe { found.assume_init() });
        let good: Vec<_> = found
            .filter(|found| found.state.result().is_ok())
            .map(|found| found.algo.data)
            .collect();
        if good.is_empty() {
            return Err(Error::Unsupported {
                op: "gemm",
                detail: format!("product: cuBLASLt has no algorithm for {shape:?}"),
            });
        }
        Ok(good)
    }

    /// The candidate with the smallest median time. Timings are interleaved, and before each one
    /// the second-level cache is overwritten, since in a model it holds no operands either.
    fn fastest(
        &self,
        descriptors: &MatmulDescriptors,
        gemm: &Gemm,
        candidates: &[MatmulAlgorithm],
    ) -> Result<MatmulAlgorithm> {
        let context = self.stream.context();
        let cache = context
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
            .map_err(failure("gemm"))?;
        let bytes = 2 * cache.max(0) as usize;
        let Ok(scratch) = DeviceMemory::new(bytes) else { return Ok(candidates[0]) };
        let mut timings: Vec<Vec<_>> = candidates.iter().map(|_| Vec::new()).collect();
        for _ in 0..TIMING_ROUNDS {
            for (timings, candidate) in timings.iter_mut().zip(candidates) {
                // SAFETY: just allocated with this size.
                unsafe { result::memset_d8_async(scratch.0, 0, bytes, self.stream.cu_stream()) }
                    .map_err(failure("gemm"))?;
                let start = self.mark()?;
                let ran = self.multiply(descriptors, gemm, *candidate);
                let end = self.mark()?;
                if ran.is_ok() {
                    timings.push((start, end));
                }
            }
        }
        let mut best = (f32::INFINITY, candidates[0]);
        for (timings, candidate) in timings.iter().zip(candidates) {
            let median = median(timings.iter().skip(1))?;
            if median < best.0 {
                best = (median, *candidate);
            }
        }
        Ok(best.1)
    }

    fn mark(&self) -> Result<CudaEvent> {
        let event = self
            .stream
            .context()
            .new_event(Some(CUevent_flags::CU_EVENT_DEFAULT))
            .map_err(failure("gemm"))?;
        event.record(&self.stream).map_err(failure("gemm"))?;
        Ok(event)
    }

    fn multiply(
        &self,
        descriptors: &MatmulDescriptors,
        gemm: &Gemm,
        algorithm: MatmulAlgorithm,
    ) -> Result<()> {
        descriptors.set_addresses(gemm).map_err(refusal)?;
        let algorithm = sys::cublasLtMatmulAlgo_t { data: algorithm };
        let pointer = |address: u64| address as *mut c_void;
        let out = pointer(gemm.out.address());
        let (one, zero) = (1f32, 0f32);
        // SAFETY: descriptors and handle are live; the layouts stay inside the views, as
        // `Gemm::check` found, which by the promise of `View` are allocated; the output is never
        // read, its factor being zero; the factors are read at once.
        unsafe {
            lt::matmul(
                self.handle,
                descriptors.description,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                pointer(gemm.w.address()),
                descriptors.w,
                pointer(gemm.x.address()),
                descriptors.x,
                out,
                descriptors.out,
                out,
                descriptors.out,
                &raw const algorithm,
                pointer(self.workspace.0),
                WORKSPACE,
                self.stream.cu_stream().cast(),
            )
        }
        .map_err(refusal)
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        let _quiet = not_recording();
        // The workspace needs the context as well. A failure here leaves nothing to do.
        let _ = self.stream.context().bind_to_thread();
        // SAFETY: made by `new`, destroyed here alone.
        let _ = unsafe { lt::destroy_handle(self.handle) };
    }
}

/// Device memory that is not taken from a pool, since a pool would keep it from other models after
/// it is given back. Callers have made the context this thread's own.
struct DeviceMemory(u64);

impl DeviceMemory {
    fn new(bytes: usize) -> Result<Self, DriverError> {
        // SAFETY: its users write it before they read it.
        unsafe { result::malloc_sync(bytes) }.map(Self)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed only here; the driver waits for work that still uses
        // it.
        let _ = unsafe { result::free_sync(self.0) };
    }
}

/// The median time in milliseconds; infinite where there are no timings.
fn median<'a>(timings: impl Iterator<Item = &'a (CudaEvent, CudaEvent)>) -> Result<f32> {
    let times: Result<Vec<f32>, _> = timings.map(|(start, end)| start.elapsed_ms(end)).collect();
    let mut times = times.map_err(failure("gemm"))?;
    times.sort_by(f32::total_cmp);
    Ok(times.get(times.len() / 2).copied().unwrap_or(f32::INFINITY))
}

/// The library's descriptors of a product. It computes out (rows × n) = transposed w (cols × rows)
/// · x (cols × n), all column-major.
struct MatmulDescriptors {
    description: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
}

impl MatmulDescriptors {
    fn new(gemm: &Gemm) -> Result<Self, CublasError> {
        let (n, rows, cols) = (gemm.n as u64, gemm.rows as u64, gemm.cols as u64);
        let (operands, out) = (data_type(gemm.x.kind()), data_type(gemm.out.kind()));
        let mut new =
            Self { description: null_mut(), w: null_mut(), x: null_mut(), out: null_mut() };
        let f32_sums = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        new.description = lt::create_matmul_desc(f32_sums, sys::cudaDataType::CUDA_R_32F)?;
        new.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, TRANSPOSED)?;
        if gemm.bias.is_some() {
            let adds_bias = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            new.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, adds_bias)?;
        }
        if gemm.scales.is_some() {
            let mode = scale_mode(gemm.scaled_by_rows());
            new.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode)?;
            new.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode)?;
        }
        // They must be set before algorithms are asked for, which depend on their alignment.
        new.set_addresses(gemm)?;
        new.w = lt::create_matrix_layout(operands, cols, rows, cols as i64)?;
        new.x = lt::create_matrix_layout(operands, cols, n, gemm.x_stride as i64)?;
        new.out = lt::create_matrix_layout(out, rows, n, gemm.out_stride as i64)?;
        Ok(new)
    }

    /// Sets the bias and the scales, the operands that belong to the description: products that
    /// share descriptors may differ in them.
    fn set_addresses(&self, gemm: &Gemm) -> Result<(), CublasError> {
        if let Some(bias) = gemm.bias {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.address())?;
        }
        if let Some(scales) = gemm.scales {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scales.w.address())?;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales.x.address())?;
        }
        Ok(())
    }

    /// `value` has the type that the library documents for the attribute.
    fn set<T: Copy>(&self, attribute: Attribute, value: T) -> Result<(), CublasError> {
        // SAFETY: the description is live; the library copies the value.
        unsafe {
            lt::set_matmul_desc_attribute(
                self.description,
                attribute,
                (&raw const value).cast(),
                size_of::<T>(),
            )
        }
    }
}

impl Drop for MatmulDescriptors {
    fn drop(&mut self) {
        for layout in [self.w, self.x, self.out] {
            if !layout.is_null() {
                // SAFETY: made by `new`, destroyed here alone. A failure leaves nothing to do.
                let _ = unsafe { lt::destroy_matrix_layout(layout) };
            }
        }
        if !self.description.is_null() {
            // SAFETY: as above.
            let _ = unsafe { lt::destroy_matmul_desc(self.description) };
        }
    }
}

/// Limits that algorithms must keep: workspace, reduction scheme and alignment.
struct MatmulPreference(sys::cublasLtMatmulPreference_t);

impl MatmulPreference {
    fn new(shape: &GemmShape) -> Result<Self, CublasError> {
        let new = Self(lt::create_matmul_pref()?);
        new.set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE as u64)?;
        new.set(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, F32_REDUCTION)?;
        for operand in [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            new.set(operand, shape.alignment as u32)?;
        }
        Ok(new)
    }

    /// `value` has the type that the library documents for the attribute.
    fn set<T: Copy>(&self, attribute: Preference, value: T) -> Result<(), CublasError> {
        // SAFETY: the preference is live; the library copies the value.
        unsafe {
            lt::set_matmul_pref_attribute(
                self.0,
                attribute,
                (&raw const value).cast(),
                size_of::<T>(),
            )
        }
    }
}

impl Drop for MatmulPreference {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed here alone. A failure leaves nothing to do.
        let _ = unsafe { lt::destroy_matmul_pref(self.0) };
    }
}

/// The library's name for the scales of codes.
fn scale_mode(by_rows: bool) -> sys::cublasLtMatmulMatrixScale_t {
    use sys::cublasLtMatmulMatrixScale_t as Mode;
    if by_rows {
        Mode::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
    } else {
        Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
    }
}

/// The library's name for a kind. `Gemm::check` allows only these three.
fn data_type(kind: Kind) -> sys::cudaDataType {
    match kind {
        Kind::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        Kind::U8 => sys::cudaDataType::CUDA_R_8F_E4M3,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

fn refusal(error: CublasError) -> Error {
    Error::Device { op: "gemm", detail: format!("cuBLASLt: {:?}", error.0) }
}
