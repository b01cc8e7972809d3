//! The operations that the GPU path needs from a device: memory, kernel launches, matrix products,
//! graphs. There are two implementations: the CUDA driver, and an emulator that runs the same
//! kernels on the CPU, for tests on machines without a GPU.
//!
//! All work goes to one stream and runs in the order of the calls. Only `wait`, `synchronise` and
//! `free` wait for it.

mod buffer;
#[cfg_attr(not(feature = "cuda"), path = "without_cuda.rs")]
mod cuda;
#[cfg(feature = "emulator")]
mod emulator;
#[cfg(any(feature = "cuda", feature = "emulator"))]
mod gemm_shape;
mod health;
mod memory;
#[cfg(any(feature = "cuda", test))]
mod nvml;
mod products;
mod rank;
#[cfg(test)]
mod tests;

pub use buffer::Buffer;
pub use cuda::{BUILT, free_memory, open, open_group, open_with, probe, sensor};
#[cfg(feature = "emulator")]
pub use emulator::Emulator;
pub use health::{GpuHealth, GpuSensor, RemappedRows, Slowdown};
pub use memory::{DeviceElement, Kind, Staging, View};
pub use products::ProductChoices;
pub use rank::Rank;

use crate::error::ensure;
use crate::{Error, Result};
use std::any::Any;
use std::fmt::Debug;
#[cfg(feature = "emulator")]
use std::sync::{Arc, LazyLock};

/// A device with one stream. Views that are given to it must stay allocated until the work that
/// uses them is done.
pub trait Gpu: Send + Sync {
    /// The device's limits and versions.
    fn properties(&self) -> &Properties;
    /// Whether a kernel may begin before the one launched ahead of it has ended.
    fn overlaps(&self) -> bool;
    /// Bytes that are free, and bytes in all.
    fn memory(&self) -> Result<(usize, usize)>;
    /// Allocates memory of unspecified content and returns its address, a multiple of 256. The
    /// caller must free it with `free`, once.
    fn allocate(&self, bytes: usize) -> Result<u64>;
    /// Frees memory that `allocate` returned. Work that was launched before may still use it.
    fn free(&self, address: u64);
    /// Allocates pinned host memory, zeroed.
    fn staging(&self, bytes: usize) -> Result<Staging>;
    /// Copies `to.bytes()` bytes of `from`, starting at byte `offset`. They must not change until
    /// the copy is done.
    fn upload(&self, from: &Staging, offset: usize, to: View) -> Result<()>;
    /// Copies `from` into `to`, starting at byte `offset`. The bytes are there once a later event
    /// has been waited for.
    fn download(&self, from: View, to: &Staging, offset: usize) -> Result<()>;
    /// Copies between two views of the same kind and length.
    fn copy(&self, from: View, to: View) -> Result<()>;
    /// Sets every byte of the view.
    fn fill(&self, view: View, byte: u8) -> Result<()>;
    /// Runs a kernel. The number and sizes of the arguments are checked; that views are long enough
    /// is the caller's promise.
    fn launch(&self, launch: &Launch, args: &[Arg]) -> Result<()>;
    /// `out[n, rows] = x[n, cols] · wᵀ (+ bias)`, sums in f32, and times their scales if the
    /// operands are codes.
    fn gemm(&self, gemm: &Gemm) -> Result<()>;
    /// Marks the point in the stream after all work given so far.
    fn record(&self) -> Result<StreamEvent>;
    /// Waits until the work before the event is done. A fault of that work is returned here at the
    /// latest.
    fn wait(&self, event: &StreamEvent) -> Result<()>;
    /// Waits until all work given so far is done.
    fn synchronise(&self) -> Result<()>;
    /// Records the work that `record` launches, without running it. `record` may call `launch`,
    /// `gemm`, `copy`, `fill` and `all_gather`, and nothing else of the device.
    fn capture(&self, record: &mut dyn FnMut() -> Result<()>) -> Result<Graph>;
    /// Runs a captured graph. The views that its work uses must still be allocated.
    fn replay(&self, graph: &Graph) -> Result<()>;
    /// The device's place among those that compute one model together.
    fn rank(&self) -> Rank;
    /// Copies `from` of every rank to every rank's `to`, `[ranks, from.len()]` of the same kind,
    /// which does not overlap `from`. Every rank gives the same exchanges in the same order, and
    /// has a thread of its own that waits for them.
    fn all_gather(&self, from: View, to: View) -> Result<()>;
    /// Ends all exchanges between the ranks, present and future, because this rank takes no
    /// further part: whoever waits for them gets [`Error::GroupLost`] with the first reason given.
    fn abandon(&self, why: &str);
}

/// Options for opening a device.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// The algorithms of matrix products. Those of other shapes are measured and added.
    pub products: ProductChoices,
    /// Starts each kernel only when the previous one has ended, as kernels for less than sm_90 do
    /// anyway. It is meant for comparisons.
    pub plain_launches: bool,
}

/// The properties of a device by which work is cut into blocks, and on which results may depend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    pub name: String,
    /// Major and minor, as in sm_90.
    pub capability: (u32, u32),
    pub multiprocessors: u32,
    /// The most shared memory that a block may have, bytes.
    pub shared_bytes: u32,
    pub memory_bytes: usize,
    /// Versions of driver and libraries, on which results may depend.
    pub versions: String,
    /// Whether kernels of `warp_groups.cuh` are used: only sm_90 has their instructions, for which
    /// the build must have compiled them.
    pub warp_groups: bool,
}

/// The first architecture that has the instructions of the kernels: asynchronous copies, and
/// products of bf16 on tensor cores.
const OLDEST: (u32, u32) = (8, 0);

impl Properties {
    /// The number of blocks, each with `shared_bytes` of shared memory, that one multiprocessor can
    /// run at once.
    pub(crate) fn resident(&self, shared_bytes: u32) -> usize {
        /// Bytes that a multiprocessor reserves for each block.
        const RESERVED: u32 = 1024;
        ((self.shared_bytes + RESERVED) / (shared_bytes + RESERVED)) as usize
    }

    /// Whether the library multiplies codes of E4M3: sm_89 is the first with such instructions.
    pub fn multiplies_codes(&self) -> bool {
        self.capability >= (8, 9)
    }

    /// Whether it also applies scales of rows, and of groups of columns.
    pub(crate) fn scales_codes(&self) -> bool {
        self.capability == (9, 0)
    }

    /// Refuses a device that is too old for the kernels.
    pub fn check_architecture(&self) -> Result<()> {
        if self.capability >= OLDEST {
            return Ok(());
        }
        let (Self { name, capability: (major, minor), .. }, (least, _)) = (self, OLDEST);
        Err(Error::NoDevice(format!(
            "{name} is too old: it is sm_{major}{minor}, and the kernels need sm_{least}0 or later"
        )))
    }
}

/// A kernel, by its exported name, and the grid in which it runs.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    pub kernel: &'static str,
    pub blocks: [u32; 3],
    /// Threads in a block, a multiple of 32.
    pub threads: u32,
    /// Bytes of shared memory in addition to the kernel's own arrays.
    pub shared_bytes: u32,
}

/// The most parameters that a kernel may have. Decode in f32 has the most, 28.
pub(crate) const MAX_PARAMETERS: usize = 32;

/// An argument of a kernel. A view becomes a pointer to its elements; the caller checks its length.
#[derive(Clone, Copy, Debug)]
pub enum Arg {
    View(View),
    /// For a parameter that a kernel ignores in this call.
    Null,
    U32(u32),
    U64(u64),
    F32(f32),
}

impl From<Option<View>> for Arg {
    fn from(view: Option<View>) -> Self {
        view.map_or(Self::Null, Self::View)
    }
}

macro_rules! arguments {
    ($($type:ty => $variant:ident),*) => { $(
        impl From<$type> for Arg {
            fn from(value: $type) -> Self {
                Self::$variant(value)
            }
        }
    )* };
}

arguments!(View => View, u32 => U32, u64 => U64, f32 => F32);

impl From<usize> for Arg {
    /// Kernels take sizes as `uint32_t`.
    fn from(value: usize) -> Self {
        Self::U32(u32::try_from(value).expect("invariant: sizes given to kernels are below 2^32"))
    }
}

/// `[a.into(), b.into(), …]` of type [`Arg`].
#[macro_export]
macro_rules! args {
    ($($arg:expr),* $(,)?) => { [$($crate::gpu::Arg::from($arg)),*] };
}

/// The operands of a matrix product, row-major: `x: [n, cols]` and `w: [rows, cols]` of one kind
/// (bf16, f32 or codes of E4M3), `out: [n, rows]` of that kind or f32, `bias: [rows]` of the
/// operands' kind; bf16 stands for that kind where the operands are codes. Rows of `x` and `out`
/// may be further apart than they are long: strides are in elements.
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
    /// Those of codes. Without them the product is that of the codes' own values.
    pub scales: Option<GemmScales>,
}

/// The scales of operands that are codes of E4M3. In f32: one for each row, or for each
/// [`SCALED_COLUMNS`] columns of each row, those of the first columns in all rows before the next.
#[derive(Clone, Copy, Debug)]
pub struct GemmScales {
    pub x: View,
    pub w: View,
}

/// Columns that share a scale where a row has several.
pub const SCALED_COLUMNS: usize = 128;

impl Gemm {
    /// Operands whose rows follow each other, without a bias: `x: [n, cols]`, `w: [rows, cols]`,
    /// `out: [n, rows]`.
    pub const fn contiguous(x: View, w: View, out: View, [n, rows, cols]: [usize; 3]) -> Self {
        let (bias, scales) = (None, None);
        Self { x, x_stride: cols, w, bias, out, out_stride: rows, n, rows, cols, scales }
    }

    /// Whether the library computes it. It adds no bias to an output of another kind. It multiplies
    /// codes in rows of whole multiples of 16 bytes, and takes their scales by groups of columns
    /// for whole multiples of four rows.
    pub(crate) fn library_takes(&self) -> bool {
        let whole = |view: View, stride: usize| {
            view.address().is_multiple_of(16) && (stride * view.kind().bytes()).is_multiple_of(16)
        };
        let takes_scales = |scales: GemmScales| {
            let in_fours = [self.n, self.rows].iter().all(|rows| rows.is_multiple_of(4));
            [scales.x, scales.w].iter().all(|scales| scales.address().is_multiple_of(16))
                && (self.scaled_by_rows() || in_fours)
        };
        let takes_codes = || {
            whole(self.x, self.x_stride)
                && whole(self.w, self.cols)
                && whole(self.out, self.out_stride)
                && self.scales.is_none_or(takes_scales)
        };
        (self.bias.is_none() || self.out.kind() == self.kind())
            && (self.x.kind() != Kind::U8 || takes_codes())
    }

    pub(crate) fn check_library(&self) -> Result<()> {
        let detail = "bias where the output's kind is not the operands', or codes that are not \
                      aligned"
            .into();
        let refused = Err(Error::Unsupported { op: "gemm", detail });
        if self.library_takes() { Ok(()) } else { refused }
    }

    /// The kind of a result that is as exact as the operands.
    fn kind(&self) -> Kind {
        if self.x.kind() == Kind::U8 { Kind::Bf16 } else { self.x.kind() }
    }

    /// Whether the operands have one scale for each row.
    pub(crate) fn scaled_by_rows(&self) -> bool {
        self.scales.is_some_and(|scales| scales.x.len() == self.n && scales.w.len() == self.rows)
    }

    /// Columns that share a scale; all, if there are no scales.
    pub(crate) fn scaled_columns(&self) -> usize {
        if self.scales.is_none() || self.scaled_by_rows() { self.cols } else { SCALED_COLUMNS }
    }

    /// Checks kinds and lengths, so that the product stays inside the views.
    pub(crate) fn check(&self) -> Result<()> {
        let Self { x, x_stride, w, bias, out, out_stride, n, rows, cols, scales } = *self;
        let kind = self.kind();
        let kinds = [Kind::F32, Kind::Bf16, Kind::U8].contains(&x.kind())
            && w.kind() == x.kind()
            && (scales.is_none() || x.kind() == Kind::U8)
            && bias.is_none_or(|bias| bias.kind() == kind)
            && (out.kind() == kind || out.kind() == Kind::F32)
            && scales.is_none_or(|own| [own.x, own.w].iter().all(|own| own.kind() == Kind::F32));
        let groups = cols.div_ceil(self.scaled_columns().max(1));
        let scaled =
            scales.is_none_or(|own| own.x.len() == groups * n && own.w.len() == groups * rows);
        let span = |stride: usize, width: usize| if n == 0 { 0 } else { (n - 1) * stride + width };
        let sizes = x_stride >= cols
            && out_stride >= rows
            && x.len() >= span(x_stride, cols)
            && out.len() >= span(out_stride, rows)
            && w.len() == rows * cols
            && bias.is_none_or(|bias| bias.len() == rows)
            && scaled;
        ensure("gemm", kinds && sizes, || format!("the operands of {self:?} do not fit each other"))
    }
}

/// A point in the stream, for [`Gpu::wait`].
pub struct StreamEvent(pub(crate) Box<dyn Any + Send + Sync>);

/// Work that [`Gpu::capture`] recorded, for [`Gpu::replay`].
pub struct Graph(pub Box<dyn Any + Send + Sync>);

/// The device on which tests run: the machine's first one, opened once. If there is none, it is one
/// emulator for the whole process where `CRESSET_EMULATED_CARD` names its card, and else a new one.
///
/// # Panics
/// When there is a device and it cannot be used: a test that fell back to the emulator would prove
/// nothing about the device. When there is no card of that name.
#[cfg(feature = "emulator")]
pub fn device_or_emulator(memory_bytes: usize, multiprocessors: u32) -> Arc<dyn Gpu> {
    static DEVICE: LazyLock<Result<Arc<dyn Gpu>>> =
        LazyLock::new(|| open_with(0, &DeviceOptions::default()));
    match &*DEVICE {
        Ok(device) => device.clone(),
        Err(Error::NoDevice(_)) => emulator::shared_by_the_process(memory_bytes)
            .unwrap_or_else(|| Emulator::with(memory_bytes, multiprocessors)),
        Err(error) => panic!("{error}"),
    }
}

pub(crate) fn failed(op: &'static str, detail: impl Debug) -> Error {
    Error::Device { op, detail: format!("{detail:?}") }
}

pub(crate) fn out_of_memory(op: &'static str, detail: &str) -> Error {
    Error::OutOfMemory { op, detail: format!("{detail:?}") }
}
