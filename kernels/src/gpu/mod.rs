//! What the GPU path needs of a device: memory, kernel launches, products, graphs. Two
//! implementations: the CUDA driver, and an emulator that runs the same kernels on the CPU, for
//! tests on machines without a GPU.
//!
//! All work goes to one stream and runs in the order of the calls. Nothing but `wait` and
//! `synchronise` waits for it.

#[cfg_attr(not(feature = "cuda"), path = "without_cuda.rs")]
mod cuda;
#[cfg(feature = "emulator")]
mod emulator;
mod memory;

pub use cuda::{BUILT, open, open_with, probe};
#[cfg(feature = "emulator")]
pub use emulator::Emulator;
pub use memory::{Buffer, Element, Kind, Staging, View};

use crate::{Error, Result};
use std::any::Any;
use std::fmt::Debug;
use std::path::PathBuf;
#[cfg(feature = "emulator")]
use std::sync::{Arc, LazyLock};

pub trait Gpu: Send + Sync {
    fn properties(&self) -> &Properties;
    /// Bytes free and in all.
    fn memory(&self) -> Result<(usize, usize)>;
    /// The address of fresh memory, aligned to 256 bytes, of unspecified content; given back by
    /// `free`.
    fn allocate(&self, bytes: usize) -> Result<u64>;
    /// Everything launched before may still use it.
    fn free(&self, address: u64);
    /// Pinned host memory.
    fn staging(&self, bytes: usize) -> Result<Staging>;
    /// Copies the first `to.bytes()` bytes of `from` at `offset`; they must not change until it is
    /// done.
    fn upload(&self, from: &Staging, offset: usize, to: View) -> Result<()>;
    /// Copies `from` into `to` at `offset`; there once a later event has been waited for.
    fn download(&self, from: View, to: &Staging, offset: usize) -> Result<()>;
    /// Copies between two views of one kind and length.
    fn copy(&self, from: View, to: View) -> Result<()>;
    /// Sets every byte.
    fn fill(&self, view: View, byte: u8) -> Result<()>;
    fn launch(&self, launch: &Launch, args: &[Arg]) -> Result<()>;
    /// `out[n, rows] = x[n, cols] · wᵀ (+ bias)`, sums in f32.
    fn gemm(&self, gemm: &Gemm) -> Result<()>;
    /// Marks the work given so far.
    fn record(&self) -> Result<Event>;
    /// Waits until the work before the event is done; a fault of that work is an error here at the
    /// latest.
    fn wait(&self, event: &Event) -> Result<()>;
    fn synchronise(&self) -> Result<()>;
    /// Records what `record` launches (`launch`, `gemm`, `copy`, `fill`; nothing else) without
    /// running it.
    fn capture(&self, record: &mut dyn FnMut() -> Result<()>) -> Result<Graph>;
    /// Runs a captured graph; the memory its work names must still be allocated.
    fn replay(&self, graph: &Graph) -> Result<()>;
}

/// How a device is opened.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where what is measured on the device is kept, so that it is not measured again. None keeps
    /// it in memory.
    pub folder: Option<PathBuf>,
    /// Let each kernel begin when the one before it has ended, as kernels for less than sm_90 do
    /// anyway. For comparisons.
    pub plain_launches: bool,
}

/// What decides how work is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    pub name: String,
    /// Major and minor, as in sm_90.
    pub capability: (u32, u32),
    pub multiprocessors: u32,
    /// Most shared memory of a block, bytes.
    pub shared_bytes: u32,
    pub memory_bytes: usize,
    /// What else a result may depend on: driver and library versions.
    pub versions: String,
}

/// A kernel by its exported name and the shape it runs in.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    pub kernel: &'static str,
    pub blocks: [u32; 3],
    /// Threads of a block, a multiple of 32.
    pub threads: u32,
    /// Shared memory beside the kernel's own arrays.
    pub shared_bytes: u32,
}

/// An argument of a kernel. A view is a pointer to its elements' type; its length is the caller's
/// to check.
#[derive(Clone, Copy, Debug)]
pub enum Arg {
    View(View),
    /// For a parameter that a kernel ignores in this call.
    Null,
    U32(u32),
    I32(i32),
    U64(u64),
    F32(f32),
}

impl From<View> for Arg {
    fn from(view: View) -> Self {
        Self::View(view)
    }
}

impl From<Option<View>> for Arg {
    fn from(view: Option<View>) -> Self {
        view.map_or(Self::Null, Self::View)
    }
}

impl From<u32> for Arg {
    fn from(value: u32) -> Self {
        Self::U32(value)
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

impl From<u64> for Arg {
    fn from(value: u64) -> Self {
        Self::U64(value)
    }
}

impl From<usize> for Arg {
    /// A size; kernels take them as `uint32_t`.
    fn from(value: usize) -> Self {
        Self::U32(u32::try_from(value).expect("invariant: sizes given to kernels are below 2^32"))
    }
}

/// `[a.into(), b.into(), …]` of type [`Arg`].
#[macro_export]
macro_rules! args {
    ($($arg:expr),* $(,)?) => { [$($crate::gpu::Arg::from($arg)),*] };
}

/// Row-major operands: `x: [n, cols]` and `w: [rows, cols]` of one kind (bf16 or f32), `out: [n,
/// rows]` of that kind or f32, `bias: [rows]` of the operands' kind. `x` and `out` may have longer
/// rows: their strides, in elements.
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    pub x: View,
    pub x_stride: usize,
    pub w: View,
    pub bias: Option<View>,
    pub out: View,
    pub out_stride: usize,
    pub n: usize,
    pub rows: usize,
    pub cols: usize,
}

impl Gemm {
    pub(crate) fn check(&self) -> Result<()> {
        let Self { x, x_stride, w, bias, out, out_stride, n, rows, cols } = *self;
        let kinds = matches!(x.kind(), Kind::F32 | Kind::Bf16)
            && w.kind() == x.kind()
            && bias.is_none_or(|bias| bias.kind() == x.kind())
            && (out.kind() == x.kind() || out.kind() == Kind::F32);
        let span = |stride: usize, width: usize| if n == 0 { 0 } else { (n - 1) * stride + width };
        let sizes = x_stride >= cols
            && out_stride >= rows
            && x.len() >= span(x_stride, cols)
            && out.len() >= span(out_stride, rows)
            && w.len() == rows * cols
            && bias.is_none_or(|bias| bias.len() == rows);
        if kinds && sizes {
            return Ok(());
        }
        Err(Error::Shape {
            op: "gemm",
            detail: format!("the operands of {self:?} do not fit each other"),
        })
    }
}

/// A point in the stream.
pub struct Event(pub(crate) Box<dyn Any + Send + Sync>);

/// Recorded work.
pub struct Graph(pub(crate) Box<dyn Any + Send + Sync>);

/// What tests run on: the machine's first device, opened once, or an emulator of its own where
/// there is none.
///
/// # Panics
/// When there is a device and it cannot be used: a test that went to the emulator then would prove
/// nothing.
#[cfg(feature = "emulator")]
pub fn device_or_emulator(memory_bytes: usize, multiprocessors: u32) -> Arc<dyn Gpu> {
    static DEVICE: LazyLock<Result<Arc<dyn Gpu>>> = LazyLock::new(|| open(0));
    match &*DEVICE {
        Ok(device) => device.clone(),
        Err(Error::NoDevice(_)) => Emulator::with(memory_bytes, multiprocessors),
        Err(error) => panic!("{error}"),
    }
}

pub(crate) fn failed(op: &'static str, detail: impl Debug) -> Error {
    Error::Device { op, detail: format!("{detail:?}") }
}

pub(crate) fn out_of_memory(op: &'static str, detail: &str) -> Error {
    Error::OutOfMemory { op, detail: format!("{detail:?}") }
}
