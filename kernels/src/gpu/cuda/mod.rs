//! A CUDA device: candle's, with one stream of its own, so that models side by side on one device
//! neither wait for each other nor appear in each other's recordings. Kernels come compiled with
//! this binary and products from cuBLASLt; a step allocates nothing, and its launches can be
//! recorded as a graph.
//!
//! After a fault of a kernel the driver refuses everything on the device until the process ends:
//! such an error comes back from every later call, `synchronise` first of all.

mod autotune;
mod bind;
mod cublaslt;
mod modules;
mod overlap;
mod probe;

use super::{
    Arg, Event, Gemm, Gpu, Graph, Launch, Options, Properties, Staging, View, failed, out_of_memory,
};
use crate::{Error, Result};
use autotune::Choices;
use candle_core::Device;
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUresult, CUstream,
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
};
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaEvent, CudaGraph, CudaStream, DriverError, result,
};
use cublaslt::Products;
use modules::Kernels;
pub use probe::probe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Whether this build can use a device.
pub const BUILT: bool = true;

/// Held while a graph is recorded, and while libraries and kernels are loaded or let go: those may
/// wait for the whole context, which is an error that ends every recording in it, another model's
/// too.
static RECORDING: Mutex<()> = Mutex::new(());

fn not_recording() -> MutexGuard<'static, ()> {
    RECORDING.lock().unwrap_or_else(PoisonError::into_inner)
}

pub struct Cuda {
    properties: Properties,
    /// Whether a kernel may begin before the one before it ends.
    overlapped: AtomicBool,
    kernels: Kernels,
    products: Products,
    stream: Arc<CudaStream>,
    /// Last, as everything above needs its context.
    _owner: Owner,
}

/// candle's device, whose libraries wait for the whole context when they are let go.
struct Owner(Option<CudaDevice>);

impl Drop for Owner {
    fn drop(&mut self) {
        let _quiet = not_recording();
        self.0.take();
    }
}

/// The device with this number.
pub fn open(ordinal: usize) -> Result<Arc<dyn Gpu>> {
    open_with(ordinal, &Options::default())
}

/// The device with this number.
pub fn open_with(ordinal: usize, options: &Options) -> Result<Arc<dyn Gpu>> {
    let gpu = Arc::new(Cuda::new(ordinal, options)?);
    if options.plain_launches || !gpu.kernels.waiting {
        return Ok(gpu);
    }
    match overlap::check(&gpu) {
        Ok(()) => {
            tracing::info!("kernels overlap: each may begin before the one ahead of it has ended");
            Ok(gpu)
        }
        Err(error) => {
            tracing::warn!(%error, "kernels run strictly one after the other, which is slower: overlapping them failed");
            // A fault may have spoiled the context: the last owner takes it down.
            drop(gpu);
            Ok(Arc::new(Cuda::new(ordinal, options)?))
        }
    }
}

impl Cuda {
    fn new(ordinal: usize, options: &Options) -> Result<Self> {
        let properties = probe(ordinal)?;
        let _quiet = not_recording();
        let Device::Cuda(device) = Device::new_cuda_with_stream(ordinal)? else {
            return Err(failed("open", "candle gave another device"));
        };
        // SAFETY: all work goes to this device's one stream.
        unsafe { device.disable_event_tracking() };
        let stream = device.cuda_stream();
        let kernels = Kernels::load(stream.context(), properties.shared_bytes)?;
        // Last: if anything failed behind it, letting it go would wait for ourselves.
        let products =
            Products::new(&stream, Choices::open(options.folder.as_deref(), &properties))?;
        Ok(Self {
            properties,
            overlapped: AtomicBool::new(false),
            kernels,
            products,
            stream,
            _owner: Owner(Some(device)),
        })
    }

    /// The stream, its context made this thread's own.
    fn stream(&self, op: &'static str) -> Result<CUstream> {
        self.context().bind_to_thread().map_err(failure(op))?;
        Ok(self.stream.cu_stream())
    }

    fn context(&self) -> &Arc<CudaContext> {
        self.stream.context()
    }
}

impl Gpu for Cuda {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn memory(&self) -> Result<(usize, usize)> {
        self.context().mem_get_info().map_err(failure("memory"))
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.stream("allocate")?;
        // SAFETY: whoever reads it first has written it, as `Gpu` asks.
        unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let free = self.memory().map_or(0, |(free, _)| free);
                out_of_memory(
                    "allocate",
                    &format!("{} MiB do not fit in {} free MiB", bytes >> 20, free >> 20),
                )
            }
            _ => failure("allocate")(error),
        })
    }

    fn free(&self, address: u64) {
        // What was launched may still use it. A failure of that work comes back from the next call.
        let _ = self.synchronise();
        // SAFETY: `allocate` gave the address, and its owner gives it back once.
        let _ = unsafe { result::free_sync(address) };
    }

    fn staging(&self, bytes: usize) -> Result<Staging> {
        // SAFETY: written below before anybody reads.
        let memory = unsafe { self.context().alloc_pinned_with_flags::<u8>(bytes.max(1), 0) };
        let mut memory = memory.map_err(failure("staging"))?;
        let start = memory.as_mut_ptr().map_err(failure("staging"))?;
        // SAFETY: so many bytes were just allocated.
        unsafe { start.write_bytes(0, bytes) };
        let stream = self.stream.clone();
        let free = move || {
            // Copies may still be under way. A failure comes back from the next call.
            let _ = stream.synchronize();
            drop(memory);
        };
        // SAFETY: the memory is zeroed and this buffer's alone until `free` is called.
        Ok(unsafe { Staging::new(start, bytes, free) })
    }

    fn upload(&self, from: &Staging, offset: usize, to: View) -> Result<()> {
        let (from, stream) = (from.address(offset, to.bytes())?, self.stream("upload")?);
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: inside the staging buffer, whose owner leaves it alone until the copy is done.
        let from = unsafe { std::slice::from_raw_parts(from, to.bytes()) };
        // SAFETY: the view is allocated, by its promise, and as long as `from`.
        unsafe { result::memcpy_htod_async(to.address(), from, stream) }.map_err(failure("upload"))
    }

    fn download(&self, from: View, to: &Staging, offset: usize) -> Result<()> {
        let (to, stream) = (to.address(offset, from.bytes())?, self.stream("download")?);
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: inside the staging buffer, which nobody reads until the copy is done.
        let to = unsafe { std::slice::from_raw_parts_mut(to, from.bytes()) };
        // SAFETY: the view is allocated, by its promise, and as long as `to`.
        unsafe { result::memcpy_dtoh_async(to, from.address(), stream) }
            .map_err(failure("download"))
    }

    fn copy(&self, from: View, to: View) -> Result<()> {
        if from.kind() != to.kind() || from.len() != to.len() {
            return Err(failed("copy", format!("{from:?} to {to:?}")));
        }
        let stream = self.stream("copy")?;
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: both views are allocated, by their promise, and equally long.
        unsafe { result::memcpy_dtod_async(to.address(), from.address(), from.bytes(), stream) }
            .map_err(failure("copy"))
    }

    fn fill(&self, view: View, byte: u8) -> Result<()> {
        let stream = self.stream("fill")?;
        if view.is_empty() {
            return Ok(());
        }
        // SAFETY: the view is allocated, by its promise.
        unsafe { result::memset_d8_async(view.address(), byte, view.bytes(), stream) }
            .map_err(failure("fill"))
    }

    fn launch(&self, launch: &Launch, args: &[Arg]) -> Result<()> {
        let stream = self.stream(launch.kernel)?;
        self.kernels.launch(launch, args, stream, self.overlapped.load(Ordering::Relaxed))
    }

    fn gemm(&self, gemm: &Gemm) -> Result<()> {
        gemm.check()?;
        self.stream("gemm")?;
        self.products.run(gemm)
    }

    fn record(&self) -> Result<Event> {
        let event = self.context().new_event(None).map_err(failure("record"))?;
        event.record(&self.stream).map_err(failure("record"))?;
        Ok(Event(Box::new(event)))
    }

    fn wait(&self, event: &Event) -> Result<()> {
        let event = event
            .0
            .downcast_ref::<CudaEvent>()
            .ok_or_else(|| failed("wait", "an event of another device"))?;
        // By polling, which takes this thread's core and saves some microseconds of each step.
        event.synchronize().map_err(failure("wait"))
    }

    fn synchronise(&self) -> Result<()> {
        self.stream.synchronize().map_err(failure("synchronise"))
    }

    fn capture(&self, record: &mut dyn FnMut() -> Result<()>) -> Result<Graph> {
        let _quiet = not_recording();
        // Other threads may go on allocating and waiting for their streams.
        self.stream
            .begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(failure("capture"))?;
        let recorded = record();
        // Ended in any case, so that the stream runs again.
        let graph = self.stream.end_capture(CUgraphInstantiate_flags(0));
        recorded?;
        let graph = graph
            .map_err(failure("capture"))?
            .ok_or_else(|| failed("capture", "nothing was recorded"))?;
        // The first replay would do it otherwise.
        graph.upload().map_err(failure("capture"))?;
        Ok(Graph(Box::new(Recorded(Mutex::new(graph)))))
    }

    fn replay(&self, graph: &Graph) -> Result<()> {
        let graph = graph
            .0
            .downcast_ref::<Recorded>()
            .ok_or_else(|| failed("replay", "a graph of another device"))?;
        graph.0.lock().unwrap_or_else(PoisonError::into_inner).launch().map_err(failure("replay"))
    }
}

/// The driver lets any thread use a graph, one at a time.
struct Recorded(Mutex<CudaGraph>);

// SAFETY: handles are not bound to a thread, and the mutex lets one thread use them at a time.
unsafe impl Send for Recorded {}
// SAFETY: as above.
unsafe impl Sync for Recorded {}

/// In the driver's own words.
fn failure(op: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| {
        let text = error
            .error_string()
            .map_or_else(|_| String::new(), |text| format!(": {}", text.to_string_lossy()));
        let detail = format!("{:?}{text}", error.0);
        if is_final(error.0) {
            Error::DeviceLost { op, detail }
        } else {
            Error::Device { op, detail }
        }
    }
}

/// Whether the driver documents that after this error the process can use the device no more: a
/// kernel's fault, a fault of the hardware, or a context that is gone.
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
    )
}
