//! Emulators that a process shares, as its tests and nodes share GPUs.

use super::Emulator;
use super::cards::{CARDS, properties};
use crate::gpu::Gpu;
use std::sync::{Arc, OnceLock};

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
#[cfg(not(feature = "cuda"))]
const GPUS: &str = "EMULATED_GPUS";

/// The emulated GPU with this number, if the environment asks for more GPUs than that. It is made
/// once.
#[cfg(not(feature = "cuda"))]
#[expect(clippy::disallowed_methods, reason = "it is a setting of tests, and none of the node's")]
pub(in crate::gpu) fn numbered(number: usize) -> Option<Arc<dyn Gpu>> {
    static ALL: OnceLock<Vec<Arc<dyn Gpu>>> = OnceLock::new();
    let make = || {
        let count = std::env::var(GPUS).ok().and_then(|count| count.parse().ok()).unwrap_or(0);
        (0..count).map(|_| Emulator::new()).collect()
    };
    ALL.get_or_init(make).get(number).cloned()
}

/// New emulators with the limits of these GPUs, which compute one model together.
#[cfg(not(feature = "cuda"))]
pub(in crate::gpu) fn group_like(gpus: &[Arc<dyn Gpu>]) -> Vec<Arc<dyn Gpu>> {
    Emulator::group(&gpus.iter().map(|gpu| gpu.properties().clone()).collect::<Vec<_>>())
}
