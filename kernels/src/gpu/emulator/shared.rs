//! Emulators that a process shares, as its tests and nodes share GPUs.

use super::Emulator;
use super::cards::{CARDS, properties};
#[cfg(not(feature = "cuda"))]
use crate::gpu::DeviceOptions;
use crate::gpu::Gpu;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

/// The environment variable with the name of the card that all tests of a process share.
const CARD: &str = "CRESSET_EMULATED_CARD";

/// One emulator for the whole process, as a GPU is, if the environment names its card. The first
/// caller decides its memory.
#[expect(clippy::disallowed_methods, reason = "it is a setting of tests, and none of the node's")]
pub(in crate::gpu) fn shared_by_the_process(memory_bytes: usize) -> Option<Arc<dyn Gpu>> {
    static SHARED: OnceLock<Option<Arc<dyn Gpu>>> = OnceLock::new();
    let make = || {
        let name = std::env::var(CARD).ok()?;
        let known = CARDS.map(|(card, ..)| card);
        let found = properties(&name, memory_bytes);
        Some(Emulator::of(found.unwrap_or_else(|| panic!("{CARD} is {name}, none of {known:?}"))))
    };
    SHARED.get_or_init(make).clone()
}

/// The environment variable with the number of GPUs that a process emulates for a whole node.
const GPUS: &str = "EMULATED_GPUS";

/// The GPUs that a process emulates for whole nodes, by number. Each is made once.
#[expect(clippy::disallowed_methods, reason = "it is a setting of tests, and none of the node's")]
fn all() -> MutexGuard<'static, BTreeMap<usize, Emulator>> {
    static ALL: LazyLock<Mutex<BTreeMap<usize, Emulator>>> = LazyLock::new(|| {
        let count = std::env::var(GPUS).ok().and_then(|count| count.parse().ok()).unwrap_or(0);
        Mutex::new((0..count).map(|number| (number, Emulator::alone())).collect())
    });
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The emulated GPU with this number, if there is one.
#[cfg(not(feature = "cuda"))]
pub(in crate::gpu) fn numbered(number: usize, options: &DeviceOptions) -> Option<Arc<dyn Gpu>> {
    let products = options.products.clone();
    all().get(&number).map(|found| Arc::new(Emulator { products, ..found.clone() }) as _)
}

impl Emulator {
    /// Has the process emulate a GPU with this number, beside those that the environment asks for.
    pub fn add_numbered(number: usize) {
        all().entry(number).or_insert_with(Self::alone);
    }
}

/// New emulators with the limits of these GPUs, which compute one model together.
#[cfg(not(feature = "cuda"))]
pub(in crate::gpu) fn group_like(
    gpus: &[Arc<dyn Gpu>],
    options: &DeviceOptions,
) -> Vec<Arc<dyn Gpu>> {
    let properties: Vec<_> = gpus.iter().map(|gpu| gpu.properties().clone()).collect();
    let ranks = Emulator::ranks(&properties, &options.products).into_iter();
    ranks.map(|rank| Arc::new(rank) as _).collect()
}
