//! The limits that the operator sets for the store.

use super::clock_check::ClockLimits;

const HOUR_MS: u64 = 3_600_000;

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time after its end, milliseconds, during which a completed request can be replayed and a
    /// failed one tried again.
    pub replay_ms: u64,
    /// Time after its end, milliseconds, during which a request's id stays known; then it is free.
    pub tombstone_ms: u64,
    /// Time after its last crash, milliseconds, during which an input that was running in two
    /// crashes of the node is refused.
    pub crash_block_ms: u64,
    /// Free bytes on the disk below which no request is admitted, so that running ones can still be
    /// settled.
    pub min_free_bytes: u64,
    /// Rows that the background audit of everything reads in a second.
    pub audit_rows_per_second: u64,
    pub clock: ClockLimits,
}

impl Default for Limits {
    /// A day for replays and crashes, 30 days for ids, 512 MiB of free space, 50 000 rows a second,
    /// any clock.
    fn default() -> Self {
        Self {
            replay_ms: 24 * HOUR_MS,
            tombstone_ms: 30 * 24 * HOUR_MS,
            crash_block_ms: 24 * HOUR_MS,
            min_free_bytes: 512 << 20,
            audit_rows_per_second: 50_000,
            clock: ClockLimits::default(),
        }
    }
}
