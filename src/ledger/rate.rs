//! The rate of an account's admissions where several nodes share the ledger: the generic cell rate
//! algorithm (ITU-T I.371), whose one number stands in the account's row.

use super::commands::Refusal;
use crate::clock::UnixMillis;

/// How often requests of an account may be admitted, by its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionRate {
    pub per_minute: u32,
    /// Admissions that may come at once after a pause.
    pub burst: u32,
}

impl Default for AdmissionRate {
    /// No limit.
    fn default() -> Self {
        Self { per_minute: u32::MAX, burst: u32::MAX }
    }
}

impl AdmissionRate {
    /// When the rate has recovered after one more admission at `now`, which had recovered, or will
    /// have, at `due`; both are microseconds since 1970.
    pub(super) fn admit(self, due: u64, now: UnixMillis) -> Result<u64, Refusal> {
        let now = now.0.saturating_mul(1_000);
        let interval = 60_000_000 / u64::from(self.per_minute.max(1));
        let tolerance = interval.saturating_mul(u64::from(self.burst.max(1)) - 1);
        let due = due.max(now);
        match due.saturating_sub(now.saturating_add(tolerance)) {
            0 => Ok(due.saturating_add(interval)),
            wait => Err(Refusal::RateReached { rate: self, retry_after_ms: wait.div_ceil(1_000) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_one_in_each_interval() {
        let rate = AdmissionRate { per_minute: 60, burst: 3 };
        let mut due = 0;
        for (now, wait) in [
            (10_000, None),
            (10_000, None),
            (10_000, None),
            (10_000, Some(1_000)),
            (10_600, Some(400)),
            (11_000, None),
            (11_000, Some(1_000)),
            // After a pause the burst is whole again, and no larger.
            (99_000, None),
            (99_000, None),
            (99_000, None),
            (99_000, Some(1_000)),
        ] {
            let found = rate.admit(due, UnixMillis(now));
            let refused = wait.map(|retry_after_ms| Refusal::RateReached { rate, retry_after_ms });
            assert_eq!(found.err(), refused, "at {now}");
            due = found.unwrap_or(due);
        }
        assert_eq!(AdmissionRate::default().admit(0, UnixMillis(7)), Ok(7_000));
    }
}
