//! How long the latest requests took, for the operator's page.

use crate::clock::UnixMillis;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::Duration;

/// Ten minutes of seven requests a second.
const KEPT: usize = 4_096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLatency {
    /// The end of the request.
    pub at: UnixMillis,
    /// From its admission to its first token; `None` if it had none.
    pub first_token: Option<Duration>,
    /// From its admission to its end.
    pub whole: Duration,
}

#[derive(Debug, Default)]
pub struct RecentLatencies(Mutex<VecDeque<RequestLatency>>);

impl RecentLatencies {
    pub fn note(&self, latency: RequestLatency) {
        let mut kept = self.0.lock();
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(latency);
    }

    /// Those that ended at `from` or later, oldest first.
    pub fn since(&self, from: UnixMillis) -> Vec<RequestLatency> {
        let kept = self.0.lock();
        kept.iter().filter(|latency| latency.at >= from).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_are_kept() {
        let latencies = RecentLatencies::default();
        let latency = |at: usize| RequestLatency {
            at: UnixMillis(at as u64),
            first_token: None,
            whole: Duration::ZERO,
        };
        (0..KEPT + 5).for_each(|at| latencies.note(latency(at)));
        assert_eq!(latencies.since(UnixMillis(0)).len(), KEPT);
        assert_eq!(latencies.since(UnixMillis(KEPT as u64 + 4)), [latency(KEPT + 4)]);
    }
}
