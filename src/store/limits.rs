//! The limits that the operator sets for the store.

const HOUR_MS: u64 = 3_600_000;

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time after its end, milliseconds, during which a completed request can be replayed and a
    /// failed one tried again.
    pub replay_ms: u64,
    /// Time after its end, milliseconds, during which a request's id stays known; then it is free.
    pub tombstone_ms: u64,
    /// Free bytes on the disk below which no request is admitted, so that running ones can still be
    /// settled.
    pub min_free_bytes: u64,
}

impl Limits {
    pub fn of(replay_hours: u64, tombstone_days: u64, min_free_mib: u64) -> Self {
        Self {
            replay_ms: replay_hours * HOUR_MS,
            tombstone_ms: tombstone_days * 24 * HOUR_MS,
            min_free_bytes: min_free_mib << 20,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self::of(24, 30, 512)
    }
}
