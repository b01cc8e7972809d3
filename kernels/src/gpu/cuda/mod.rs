//! A CUDA device. It is candle's, with one stream of its own, so that models on one device neither
//! wait for each other nor appear in each other's recordings. Kernels are compiled into this
//! binary, and cuBLASLt computes products. A step allocates nothing, and its launches can be
//! recorded as a graph.
//!
//! After a fault of a kernel the driver refuses all work on the device until the process ends:
//! every later call returns that error, `synchronise` first of all.

mod bind;
mod cublaslt;
mod failure;
mod modules;
mod nccl;
mod not_linked;
mod overlap;
mod probe;

use super::{
    Arg, DeviceOptions, Gemm, Gpu, Graph, Launch, Properties, Rank, Staging, StreamEvent, View,
    failed, out_of_memory,
};
use crate::Result;
use candle_core::Device;
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUresult, CUstream,
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
};
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaEvent, CudaGraph, CudaStream, result,
};
use cublaslt::CublasLt;
use failure::{failure, not_recording};
use modules::LoadedKernels;
use nccl::Seat;
pub use probe::{free_memory, probe, sensor};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Whether this build has support for CUDA devices.
pub const BUILT: bool = true;

pub(super) struct Cuda {
    properties: Properties,
    /// Whether a kernel may begin before the previous one ends.
    overlapped: AtomicBool,
    kernels: LoadedKernels,
    cublaslt: CublasLt,
    stream: Arc<CudaStream>,
    /// The place among the GPUs that compute a model together.
    seat: Option<Seat>,
    /// It is the last field so that it is dropped last: all fields above need its context.
    _owner: Owner,
}

/// candle's device. Its libraries wait for the whole context when they are unloaded.
struct Owner(Option<CudaDevice>);

impl Drop for Owner {
    fn drop(&mut self) {
        let _quiet = not_recording();
        self.0.take();
    }
}

/// Opens the device with this number.
///
/// # Errors
/// [`crate::Error::NoDevice`] says what is missing.
pub fn open(ordinal: usize) -> Result<Arc<dyn Gpu>> {
    open_with(ordinal, &DeviceOptions::default())
}

/// Opens the device with this number, and checks whether its launches may overlap.
///
/// # Errors
/// [`crate::Error::NoDevice`] says what is missing.
pub fn open_with(ordinal: usize, options: &DeviceOptions) -> Result<Arc<dyn Gpu>> {
    open_as(ordinal, options, None)
}

/// Opens the devices with these numbers, which compute one model together: ranks in this order.
///
/// # Errors
/// [`crate::Error::NoDevice`] says what is missing.
pub fn open_group(numbers: &[usize], options: &DeviceOptions) -> Result<Vec<Arc<dyn Gpu>>> {
    numbers.iter().try_for_each(|number| probe(*number).map(drop))?;
    let seats = Seat::of_all(numbers)?;
    numbers.iter().zip(seats).map(|(number, seat)| open_as(*number, options, Some(seat))).collect()
}

fn open_as(ordinal: usize, options: &DeviceOptions, seat: Option<Seat>) -> Result<Arc<dyn Gpu>> {
    let gpu = Arc::new(Cuda::new(ordinal, options, seat.clone())?);
    if options.plain_launches {
        return Ok(gpu);
    }
    if !gpu.kernels.can_overlap {
        tracing::info!(
            "kernels run one after the other: code for less than sm_90 does not overlap"
        );
        return Ok(gpu);
    }
    match overlap::check(&(gpu.clone() as _), &gpu.overlapped) {
        Ok(()) => {
            tracing::info!("kernels overlap: each may begin before the one ahead of it has ended");
            Ok(gpu)
        }
        Err(error) => {
            tracing::warn!(%error, "kernels run strictly one after the other, which is slower: overlapping them failed");
            // A fault may have damaged the context. Its last owner destroys it.
            drop(gpu);
            Ok(Arc::new(Cuda::new(ordinal, options, seat)?))
        }
    }
}

impl Cuda {
    fn new(ordinal: usize, options: &DeviceOptions, seat: Option<Seat>) -> Result<Self> {
        let properties = probe(ordinal)?;
        let _quiet = not_recording();
        let Device::Cuda(device) = Device::new_cuda_with_stream(ordinal)? else {
            return Err(failed("open", "candle gave another device"));
        };
        // SAFETY: all work goes to this device's one stream.
        unsafe { device.disable_event_tracking() };
        let stream = device.cuda_stream();
        let kernels = LoadedKernels::load(stream.context(), properties.shared_bytes)?;
        // This comes last: dropping it takes the lock that is held here, so a failure after it
        // would wait for ever.
        let cublaslt = CublasLt::new(&stream, options.products.clone())?;
        Ok(Self {
            properties,
            overlapped: AtomicBool::new(false),
            kernels,
            cublaslt,
            stream,
            seat,
            _owner: Owner(Some(device)),
        })
    }

    /// The stream, after making its context this thread's own.
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

    fn overlaps(&self) -> bool {
        self.overlapped.load(Ordering::Relaxed)
    }

    fn memory(&self) -> Result<(usize, usize)> {
        self.context().mem_get_info().map_err(failure("memory"))
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.stream("allocate")?;
        // SAFETY: the content is unspecified, as `Gpu` says, so callers write before they read.
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
        // Launched work may still use the memory. The next call returns a failure of that work.
        let _ = self.synchronise();
        // SAFETY: `allocate` gave the address, and its owner gives it back once.
        let _ = unsafe { result::free_sync(address) };
    }

    fn staging(&self, bytes: usize) -> Result<Staging> {
        // SAFETY: it is written below before it can be read.
        let memory = unsafe { self.context().alloc_pinned_with_flags::<u8>(bytes.max(1), 0) };
        let mut memory = memory.map_err(failure("staging"))?;
        let start = memory.as_mut_ptr().map_err(failure("staging"))?;
        // SAFETY: at least `bytes` bytes were just allocated.
        unsafe { start.write_bytes(0, bytes) };
        let stream = self.stream.clone();
        let free = move || {
            // Copies may still be under way. The next call returns a failure of them.
            let _ = stream.synchronize();
            drop(memory);
        };
        // SAFETY: the memory is zeroed, and no other code has its address until `free` is called.
        Ok(unsafe { Staging::new(start, bytes, free) })
    }

    fn upload(&self, from: &Staging, offset: usize, to: View) -> Result<()> {
        let (from, stream) = (from.address(offset, to.bytes())?, self.stream("upload")?);
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: inside the staging buffer, whose owner does not touch it until the copy is done.
        let from = unsafe { std::slice::from_raw_parts(from, to.bytes()) };
        // SAFETY: the view is allocated, by its promise, and as long as `from`.
        unsafe { result::memcpy_htod_async(to.address(), from, stream) }.map_err(failure("upload"))
    }

    fn download(&self, from: View, to: &Staging, offset: usize) -> Result<()> {
        let (to, stream) = (to.address(offset, from.bytes())?, self.stream("download")?);
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: inside the staging buffer, whose owner does not read it until the copy is done.
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
        self.cublaslt.run(gemm)
    }

    fn record(&self) -> Result<StreamEvent> {
        let event = self.context().new_event(None).map_err(failure("record"))?;
        event.record(&self.stream).map_err(failure("record"))?;
        Ok(StreamEvent(Box::new(event)))
    }

    fn wait(&self, event: &StreamEvent) -> Result<()> {
        let event = event
            .0
            .downcast_ref::<CudaEvent>()
            .ok_or_else(|| failed("wait", "an event of another device"))?;
        // This polls, which occupies this thread's core and saves some microseconds of each step.
        event.synchronize().map_err(failure("wait"))?;
        self.seat.as_ref().map_or(Ok(()), Seat::check)
    }

    fn synchronise(&self) -> Result<()> {
        self.stream.synchronize().map_err(failure("synchronise"))?;
        self.seat.as_ref().map_or(Ok(()), Seat::check)
    }

    fn capture(&self, record: &mut dyn FnMut() -> Result<()>) -> Result<Graph> {
        let _quiet = not_recording();
        // Other threads may go on allocating and waiting for their streams.
        self.stream
            .begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(failure("capture"))?;
        let recorded = record();
        // The recording is ended even after an error, so that the stream runs again.
        let graph = self.stream.end_capture(CUgraphInstantiate_flags(0));
        recorded?;
        let graph = graph
            .map_err(failure("capture"))?
            .ok_or_else(|| failed("capture", "nothing was recorded"))?;
        // Without this, the first replay would upload the graph.
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

    fn rank(&self) -> Rank {
        self.seat.as_ref().map_or(Rank::ALONE, |seat| seat.rank)
    }

    fn all_gather(&self, from: View, to: View) -> Result<()> {
        self.rank().check_gather(from, to)?;
        match &self.seat {
            _ if from.is_empty() => Ok(()),
            Some(seat) => seat.all_gather(from, to, self.stream("all_gather")?),
            None => self.copy(from, to),
        }
    }

    fn abandon(&self, why: &str) {
        if let Some(seat) = &self.seat {
            seat.abandon(why);
        }
    }
}

/// A recorded graph. The driver lets any thread use it, one at a time.
struct Recorded(Mutex<CudaGraph>);

// SAFETY: handles are not bound to a thread, and the mutex lets one thread use them at a time.
unsafe impl Send for Recorded {}
// SAFETY: as above.
unsafe impl Sync for Recorded {}
