//! A device for tests on machines without a GPU: kernels compiled as C++ and run one thread at a
//! time (`simt.h` lists the errors it finds). Memory is the host's. Commands run only when a caller
//! waits for them, so that a staging buffer that is changed too early is noticed.

mod cards;
mod meeting;
mod shared;
#[cfg(test)]
mod tests;

pub(super) use shared::shared_by_the_process;
#[cfg(not(feature = "cuda"))]
pub(super) use shared::{group_like, numbered};

use super::gemm_shape::GemmShape;
use super::{
    Arg, Gemm, Gpu, Graph, Kind, Launch, MAX_PARAMETERS, ProductChoices, Properties, Rank, Staging,
    StreamEvent, View, failed, out_of_memory,
};
use crate::error::ensure;
use crate::simd::{E4M3_UNIT, e4m3};
use crate::{Error, Result};
use half::bf16;
use meeting::Meeting;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Declared in `simt.h` too.
#[repr(C)]
struct Range {
    start: u64,
    bytes: usize,
}

/// Declared in `simt.h` too.
#[repr(C)]
struct Grid {
    memory: *const Range,
    memory_count: usize,
    blocks: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    seed: u64,
}

type RunKernel = unsafe extern "C" fn(*const Grid, *const *const c_void) -> *const c_char;
type Signature = unsafe extern "C" fn() -> *const c_char;

include!(concat!(env!("OUT_DIR"), "/emulated.rs"));

unsafe extern "C" {
    /// Whole pages between two pages that may not be touched; null when the host has none left.
    /// `bytes` is a multiple of 256.
    fn simt_allocate(bytes: usize) -> *mut u8;
    fn simt_free(start: *mut u8, bytes: usize);
}

const ALIGNMENT: usize = 256;
/// Fills the rest of each allocation up to the alignment, and is compared when it is freed, so that
/// a write there is found. It is huge in every float type, so that a value read there is noticed as
/// well.
const GUARD_BYTE: u8 = 0xfe;
/// NaN in every float type.
const POISON: u8 = 0xff;

static MEASURED: AtomicU64 = AtomicU64::new(0);

/// Clones are streams of one device.
#[derive(Clone)]
pub struct Emulator {
    properties: Properties,
    rank: Rank,
    meeting: Arc<Meeting>,
    products: ProductChoices,
    state: Arc<Mutex<QueueState>>,
}

struct QueueState {
    rank: Rank,
    meeting: Arc<Meeting>,
    /// Address and bytes of each allocation.
    live: BTreeMap<u64, usize>,
    used: usize,
    queue: VecDeque<QueuedWork>,
    /// Number of commands that were ever queued, and of those that ever ran.
    queued: u64,
    run: u64,
    recording: Option<Vec<QueuedWork>>,
    /// Seed of the order in which the next launch runs its blocks and threads.
    seed: u64,
    /// The first fault. As on a real device, every later call fails with it.
    fault: Option<Fault>,
}

#[derive(Clone, Debug)]
enum Fault {
    Own(String),
    /// Another rank of the group failed, for this reason.
    OfGroup(String),
}

impl From<String> for Fault {
    fn from(text: String) -> Self {
        Self::Own(text)
    }
}

#[derive(Clone)]
enum QueuedWork {
    Launch(Launch, Vec<Arg>),
    Gemm(Gemm),
    Copy { from: usize, to: usize, bytes: usize },
    AllGather { from: View, to: View },
    Fill { to: usize, bytes: usize, byte: u8 },
    Free(u64),
}

impl Emulator {
    #[expect(clippy::new_ret_no_self, reason = "it is used as a device only")]
    pub fn new() -> Arc<dyn Gpu> {
        Self::with(1 << 30, 4)
    }

    /// An emulator with `memory_bytes` of memory and the limits of sm_90.
    pub fn with(memory_bytes: usize, multiprocessors: u32) -> Arc<dyn Gpu> {
        Self::of(Properties { multiprocessors, memory_bytes, ..Self::limits() })
    }

    fn limits() -> Properties {
        Properties {
            name: "emulator".into(),
            capability: (9, 0),
            multiprocessors: 4,
            shared_bytes: 227 * 1024,
            memory_bytes: 1 << 30,
            versions: String::new(),
            warp_groups: true,
        }
    }

    /// An emulator with these limits.
    pub fn of(properties: Properties) -> Arc<dyn Gpu> {
        Self::group(&[properties]).remove(0)
    }

    /// Emulators with these limits, which compute one model together: ranks in this order.
    pub fn group(all: &[Properties]) -> Vec<Arc<dyn Gpu>> {
        let ranks = Self::ranks(all, &ProductChoices::default()).into_iter();
        ranks.map(|rank| Arc::new(rank) as _).collect()
    }

    fn ranks(all: &[Properties], products: &ProductChoices) -> Vec<Self> {
        let (count, meeting) = (all.len(), Arc::new(Meeting::new(all.len())));
        let one = |(number, properties): (usize, &Properties)| {
            let (rank, meeting) = (Rank { number, count }, Arc::clone(&meeting));
            let state = QueueState::new(rank, Arc::clone(&meeting));
            let (properties, products) = (properties.clone(), products.clone());
            Self { properties, rank, meeting, products, state: Arc::new(Mutex::new(state)) }
        };
        all.iter().enumerate().map(one).collect()
    }

    fn alone() -> Self {
        Self::ranks(&[Self::limits()], &ProductChoices::default()).remove(0)
    }

    /// The limits of a card that people own or rent, but for its memory: `None` where the emulator
    /// does not know its name.
    pub fn card(name: &str, memory_bytes: usize) -> Option<Properties> {
        cards::properties(name, memory_bytes)
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enqueue(&self, command: QueuedWork) -> Result<()> {
        let mut state = self.state();
        state.usable()?;
        if let Some(recorded) = &mut state.recording {
            recorded.push(command);
        } else {
            state.queued += 1;
            state.queue.push_back(command);
        }
        Ok(())
    }

    /// Shapes of products that the emulators of this process have measured.
    pub fn measured() -> u64 {
        MEASURED.load(Ordering::Relaxed)
    }

    /// Chooses an algorithm for a shape that has none, as a device does outside of recordings.
    /// All compute the same here; no two choices are equal.
    fn measure(&self, shape: &GemmShape) {
        if self.products.get(shape).is_none() && self.state().recording.is_none() {
            let number = MEASURED.fetch_add(1, Ordering::Relaxed);
            let algorithm = [std::process::id().into(), number, 0, 0, 0, 0, 0, 0];
            self.products.keep(shape, None, algorithm);
        }
    }

    fn outside_capture(&self, op: &'static str) -> Result<MutexGuard<'_, QueueState>> {
        let state = self.state();
        state.usable()?;
        match state.recording {
            None => Ok(state),
            Some(_) => Err(failed(op, "not possible while a graph is recorded")),
        }
    }
}

impl Gpu for Emulator {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    /// As on a device of this capability. A kernel that does not wait for earlier ones is a fault.
    fn overlaps(&self) -> bool {
        self.properties.capability >= (9, 0)
    }

    fn memory(&self) -> Result<(usize, usize)> {
        Ok((self.properties.memory_bytes - self.state().used, self.properties.memory_bytes))
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let mut state = self.outside_capture("allocate")?;
        if state.used + bytes > self.properties.memory_bytes {
            return Err(out_of_memory(
                "allocate",
                &format!("out of memory: {bytes} bytes with {} in use", state.used),
            ));
        }
        // SAFETY: the size is a multiple of 256.
        let start = unsafe { simt_allocate(padded(bytes)) };
        assert!(!start.is_null(), "the host has no memory left");
        // SAFETY: just allocated with this size.
        unsafe {
            start.write_bytes(POISON, bytes);
            start.add(bytes).write_bytes(GUARD_BYTE, padded(bytes) - bytes);
        }
        state.used += bytes;
        state.live.insert(start as u64, bytes);
        Ok(start as u64)
    }

    fn free(&self, address: u64) {
        let mut state = self.state();
        state.queued += 1;
        state.queue.push_back(QueuedWork::Free(address));
    }

    fn staging(&self, bytes: usize) -> Result<Staging> {
        let memory = Box::leak(vec![0; bytes].into_boxed_slice());
        let (start, len) = (memory.as_mut_ptr(), memory.len());
        let address = start as usize;
        let free = move || {
            let leaked = std::ptr::slice_from_raw_parts_mut(address as *mut u8, len);
            // SAFETY: the box that was leaked above; `Staging` calls this once.
            drop(unsafe { Box::from_raw(leaked) });
        };
        // SAFETY: leaked above, so no other code has a reference to it.
        Ok(unsafe { Staging::new(start, len, free) })
    }

    fn upload(&self, from: &Staging, offset: usize, to: View) -> Result<()> {
        drop(self.outside_capture("upload")?);
        let from = from.address(offset, to.bytes())? as usize;
        self.enqueue(QueuedWork::Copy { from, to: to.address() as usize, bytes: to.bytes() })
    }

    fn download(&self, from: View, to: &Staging, offset: usize) -> Result<()> {
        drop(self.outside_capture("download")?);
        let to = to.address(offset, from.bytes())? as usize;
        self.enqueue(QueuedWork::Copy { from: from.address() as usize, to, bytes: from.bytes() })
    }

    fn copy(&self, from: View, to: View) -> Result<()> {
        if from.kind() != to.kind() || from.len() != to.len() {
            return Err(failed("copy", format!("{from:?} to {to:?}")));
        }
        self.enqueue(QueuedWork::Copy {
            from: from.address() as usize,
            to: to.address() as usize,
            bytes: from.bytes(),
        })
    }

    fn fill(&self, view: View, byte: u8) -> Result<()> {
        self.enqueue(QueuedWork::Fill { to: view.address() as usize, bytes: view.bytes(), byte })
    }

    fn launch(&self, launch: &Launch, args: &[Arg]) -> Result<()> {
        check_launch(launch, args, &self.properties)?;
        self.enqueue(QueuedWork::Launch(*launch, args.to_vec()))
    }

    fn gemm(&self, gemm: &Gemm) -> Result<()> {
        gemm.check()?;
        gemm.check_library()?;
        let own = &self.properties;
        let taken = (gemm.x.kind() != Kind::U8 || own.multiplies_codes())
            && (gemm.scales.is_none() || own.scales_codes());
        ensure("gemm", taken, || format!("no such product of codes on {:?}", own.capability))?;
        self.measure(&GemmShape::of(gemm));
        self.enqueue(QueuedWork::Gemm(*gemm))
    }

    fn record(&self) -> Result<StreamEvent> {
        Ok(StreamEvent(Box::new(self.outside_capture("record")?.queued)))
    }

    fn wait(&self, event: &StreamEvent) -> Result<()> {
        let until = *event
            .0
            .downcast_ref::<u64>()
            .ok_or_else(|| failed("wait", "an event of another device"))?;
        self.outside_capture("wait")?.run_until(until)
    }

    fn synchronise(&self) -> Result<()> {
        let mut state = self.outside_capture("synchronise")?;
        let all = state.queued;
        state.run_until(all)
    }

    fn capture(&self, record: &mut dyn FnMut() -> Result<()>) -> Result<Graph> {
        self.outside_capture("capture")?.recording = Some(Vec::new());
        let outcome = record();
        let recorded = self.state().recording.take().unwrap_or_default();
        outcome?;
        Ok(Graph(Box::new(recorded)))
    }

    fn replay(&self, graph: &Graph) -> Result<()> {
        let recorded = graph.0.downcast_ref::<Vec<QueuedWork>>();
        let recorded = recorded.ok_or_else(|| failed("replay", "a graph of another device"))?;
        drop(self.outside_capture("replay")?);
        recorded.iter().try_for_each(|command| self.enqueue(command.clone()))
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn all_gather(&self, from: View, to: View) -> Result<()> {
        self.rank.check_gather(from, to)?;
        self.enqueue(QueuedWork::AllGather { from, to })
    }

    fn abandon(&self, why: &str) {
        self.meeting.end(why);
    }
}

impl Drop for QueueState {
    fn drop(&mut self) {
        self.meeting.end(&format!("{} was closed", self.rank));
        for command in std::mem::take(&mut self.queue) {
            if let QueuedWork::Free(address) = command {
                let outcome = self.release(address);
                assert!(outcome.is_ok() || std::thread::panicking(), "{outcome:?}");
            }
        }
    }
}

impl QueueState {
    fn new(rank: Rank, meeting: Arc<Meeting>) -> Self {
        Self {
            rank,
            meeting,
            live: BTreeMap::new(),
            used: 0,
            queue: VecDeque::new(),
            queued: 0,
            run: 0,
            recording: None,
            seed: 0,
            fault: None,
        }
    }

    fn usable(&self) -> Result<()> {
        match &self.fault {
            None => Ok(()),
            Some(Fault::Own(text)) => {
                Err(Error::DeviceLost { op: "device", detail: format!("{text:?}") })
            }
            Some(Fault::OfGroup(why)) => {
                Err(Error::GroupLost { op: "all_gather", detail: why.clone() })
            }
        }
    }

    fn run_until(&mut self, count: u64) -> Result<()> {
        while self.run < count
            && let Some(command) = self.queue.pop_front()
        {
            self.run += 1;
            if let Err(fault) = self.perform(&command) {
                self.fault = Some(fault);
                return self.usable();
            }
        }
        Ok(())
    }

    fn perform(&mut self, command: &QueuedWork) -> Result<(), Fault> {
        match command {
            QueuedWork::Launch(launch, args) => Ok(self.perform_launch(launch, args)?),
            QueuedWork::Gemm(gemm) => {
                let scales = gemm.scales.map(|scales| [scales.x, scales.w]);
                let views = [gemm.x, gemm.w, gemm.out].into_iter().chain(gemm.bias);
                for view in views.chain(scales.into_iter().flatten()) {
                    self.check(view.address(), view.bytes())?;
                }
                // SAFETY: every view was just found inside a live allocation.
                unsafe { multiply(gemm) };
                Ok(())
            }
            &QueuedWork::Copy { from, to, bytes } => {
                // SAFETY: by the promises of `View` and `upload`, device ranges lie in live
                // allocations, and staging ranges in buffers that the caller keeps.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
                Ok(())
            }
            &QueuedWork::Fill { to, bytes, byte } => {
                self.check(to as u64, bytes)?;
                // SAFETY: just found inside a live allocation.
                unsafe { (to as *mut u8).write_bytes(byte, bytes) };
                Ok(())
            }
            QueuedWork::AllGather { from, to } => self.perform_gather(*from, *to),
            QueuedWork::Free(address) => Ok(self.release(*address)?),
        }
    }

    /// Waits for the other ranks.
    fn perform_gather(&self, from: View, to: View) -> Result<(), Fault> {
        self.check(from.address(), from.bytes())?;
        self.check(to.address(), to.bytes())?;
        let from = std::ptr::slice_from_raw_parts(from.address() as *const u8, from.bytes());
        // SAFETY: just found inside a live allocation, which this thread alone uses.
        let part = unsafe { &*from };
        let all = self.meeting.exchange(self.rank.number, part).map_err(Fault::OfGroup)?;
        // SAFETY: inside a live allocation, and as long as the parts of all ranks.
        unsafe { (to.address() as *mut u8).copy_from(all.as_ptr(), all.len()) };
        Ok(())
    }

    fn perform_launch(&mut self, launch: &Launch, args: &[Arg]) -> Result<(), String> {
        let mut memory = Vec::new();
        for arg in args {
            if let Arg::View(view) = arg {
                let found = self.check(view.address(), view.bytes());
                memory.push(found.map_err(|fault| format!("{}: {fault}", launch.kernel))?);
            }
        }
        self.seed += 1;
        let &Launch { blocks, threads, shared_bytes, .. } = launch;
        let (memory, memory_count) = (memory.as_ptr(), memory.len());
        let grid = Grid { memory, memory_count, blocks, threads, shared_bytes, seed: self.seed };
        let values: Vec<u64> = args.iter().map(parameter_word).collect();
        let pointers: Vec<*const c_void> =
            values.iter().map(|value| std::ptr::from_ref(value).cast()).collect();
        let (run, _) = kernels()[launch.kernel];
        // SAFETY: `check_launch` compared the arguments with the kernel's parameters. Accesses
        // outside of its memory end in a fault that the emulator reports.
        let error = unsafe { run(&raw const grid, pointers.as_ptr()) };
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: not null, so it is a string that stays valid until this thread's next launch.
        Err(unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned())
    }

    /// The live allocation in which a range lies, including its guard bytes.
    fn check(&self, address: u64, bytes: usize) -> Result<Range, String> {
        let found = self.live.range(..=address).next_back();
        match found {
            Some((&start, &size)) if address + bytes as u64 <= start + size as u64 => {
                Ok(Range { start, bytes: padded(size) })
            }
            _ => Err(format!("{bytes} bytes at {address:#x} are outside every allocation")),
        }
    }

    fn release(&mut self, address: u64) -> Result<(), String> {
        let bytes = self.live.remove(&address).ok_or("memory that is not allocated is freed")?;
        self.used -= bytes;
        let start = address as *mut u8;
        // SAFETY: allocated with this size in `allocate`, and taken out of `live` just now.
        unsafe {
            let guard = std::slice::from_raw_parts(start.add(bytes), padded(bytes) - bytes);
            let whole = guard.iter().all(|byte| *byte == GUARD_BYTE);
            simt_free(start, padded(bytes));
            if whole {
                Ok(())
            } else {
                Err(format!("something was written behind an allocation of {bytes} bytes"))
            }
        }
    }
}

/// The size of an allocation with its guard bytes, of which there is at least one.
fn padded(bytes: usize) -> usize {
    (bytes + 1).next_multiple_of(ALIGNMENT)
}

type KernelTable = HashMap<&'static str, (RunKernel, Vec<String>)>;

/// Each kernel by its name, with a letter for the type of each parameter, as `simt.h` writes them.
fn kernels() -> &'static KernelTable {
    static FOUND: OnceLock<KernelTable> = OnceLock::new();
    FOUND.get_or_init(|| {
        let read = |signature: Signature| {
            // SAFETY: returns a static string.
            let text = unsafe { CStr::from_ptr(signature()) };
            text.to_string_lossy().split_whitespace().map(str::to_owned).collect()
        };
        KERNELS.iter().map(|&(name, run, signature)| (name, (run, read(signature)))).collect()
    })
}

fn check_launch(launch: &Launch, args: &[Arg], properties: &Properties) -> Result<()> {
    let refuse = |detail: String| Err(Error::Device { op: launch.kernel, detail });
    let Some((_, letters)) = kernels().get(launch.kernel) else {
        return refuse("there is no kernel of this name".into());
    };
    let fits = letters.len() == args.len()
        && args.len() <= MAX_PARAMETERS
        && letters.iter().zip(args).all(|(letter, arg)| accepts(letter, arg));
    if !fits {
        return refuse(format!("parameters {letters:?} do not take {args:?}"));
    }
    let threads = launch.threads;
    let shape = threads.is_multiple_of(32)
        && (32..=1024).contains(&threads)
        && launch.blocks.iter().all(|b| *b > 0);
    if !shape
        || launch.blocks[1].max(launch.blocks[2]) > 65_535
        || launch.shared_bytes > properties.shared_bytes
    {
        return refuse(format!("{launch:?} cannot be launched"));
    }
    Ok(())
}

fn accepts(letter: &str, arg: &Arg) -> bool {
    match arg {
        Arg::View(view) => letter == "p0" || letter == format!("p{}", view.kind().bytes()),
        Arg::Null => letter.starts_with('p'),
        Arg::U32(_) => letter == "u",
        Arg::U64(_) => letter == "l",
        Arg::F32(_) => letter == "f",
    }
}

fn parameter_word(arg: &Arg) -> u64 {
    match *arg {
        Arg::View(view) => view.address(),
        Arg::Null => 0,
        Arg::U32(value) => u64::from(value),
        Arg::U64(value) => value,
        Arg::F32(value) => u64::from(value.to_bits()),
    }
}

/// # Safety
/// Every view is readable, and `out` writable.
unsafe fn multiply(g: &Gemm) {
    // SAFETY: by the caller's promise; indices stay inside the views, as `Gemm::check` found.
    let value = |view: View, index: usize| unsafe { get(view, index) };
    for i in 0..g.n {
        let x: Vec<f32> = (0..g.cols).map(|c| value(g.x, i * g.x_stride + c)).collect();
        for row in 0..g.rows {
            let mut sum = g.bias.map_or(0.0, |bias| value(bias, row));
            for (group, x) in x.chunks(g.scaled_columns().max(1)).enumerate() {
                let first = row * g.cols + group * g.scaled_columns();
                let dot: f32 = x.iter().enumerate().map(|(c, x)| x * value(g.w, first + c)).sum();
                let scale = g.scales.map_or(1.0, |scales| {
                    value(scales.x, group * g.n + i) * value(scales.w, group * g.rows + row)
                });
                sum += scale * dot;
            }
            // SAFETY: as above.
            unsafe { set(g.out, i * g.out_stride + row, sum) };
        }
    }
}

/// # Safety
/// The element is readable.
unsafe fn get(view: View, index: usize) -> f32 {
    let at = view.address() as usize + index * view.kind().bytes();
    // SAFETY: by the caller's promise.
    unsafe {
        match view.kind() {
            Kind::Bf16 => (at as *const bf16).read().to_f32(),
            Kind::U8 => e4m3((at as *const u8).read()) * E4M3_UNIT,
            _ => (at as *const f32).read(),
        }
    }
}

/// # Safety
/// The element is writable.
unsafe fn set(view: View, index: usize, value: f32) {
    let at = view.address() as usize + index * view.kind().bytes();
    // SAFETY: by the caller's promise.
    unsafe {
        match view.kind() {
            Kind::Bf16 => (at as *mut bf16).write(bf16::from_f32(value)),
            _ => (at as *mut f32).write(value),
        }
    }
}
