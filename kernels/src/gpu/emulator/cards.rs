//! Cards whose limits the emulator can take, so that kernels and grids are rehearsed in the shapes
//! that they have there.

use crate::gpu::Properties;

/// Name, capability, multiprocessors, and the most shared memory that a block may have, KiB.
pub(super) const CARDS: [(&str, (u32, u32), u32, u32); 5] = [
    ("a100", (8, 0), 108, 163),
    ("rtx-3060", (8, 6), 28, 99),
    ("rtx-4090", (8, 9), 128, 99),
    ("h200", (9, 0), 132, 227),
    ("rtx-5090", (12, 0), 170, 99),
];

pub(super) fn properties(name: &str, memory_bytes: usize) -> Option<Properties> {
    let (name, capability, multiprocessors, shared_kib) =
        CARDS.into_iter().find(|(card, ..)| *card == name)?;
    Some(Properties {
        name: "emulator".into(),
        capability,
        multiprocessors,
        shared_bytes: shared_kib << 10,
        memory_bytes,
        versions: format!("with the limits of {name}"),
        warp_groups: capability == (9, 0),
    })
}
