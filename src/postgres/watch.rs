//! Judges which other nodes are silent. A node may declare another one ended only after it could
//! itself ask without a gap for a whole lease, and saw no renewal in that time: after an outage of
//! the database every lease has run out, and healthy nodes would otherwise end each other.

#![expect(clippy::disallowed_methods, reason = "silence is measured on this machine's own clock")]

use std::collections::HashMap;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The lease of another node, as the database shows it.
pub(super) struct OtherLease {
    pub boot: Uuid,
    /// Its end, microseconds since 1970 by the database's clock.
    pub until: i64,
    /// Whether that time has come, by the same clock.
    pub has_run_out: bool,
}

pub(super) struct Watch {
    lease: Duration,
    last_look: Option<Instant>,
    seen: HashMap<Uuid, SeenLease>,
}

struct SeenLease {
    until: i64,
    /// Since when it has not been renewed, as far as that is known without a gap.
    unchanged_since: Instant,
    was_renewed: bool,
}

impl Watch {
    pub(super) fn new(lease: Duration) -> Self {
        Self { lease, last_look: None, seen: HashMap::new() }
    }

    /// Takes note of the other nodes' leases, and returns the nodes that have ended.
    pub(super) fn look(&mut self, others: &[OtherLease]) -> Vec<Uuid> {
        self.look_at(others, Instant::now())
    }

    fn look_at(&mut self, others: &[OtherLease], now: Instant) -> Vec<Uuid> {
        let has_gap = self.last_look.is_none_or(|last| now.duration_since(last) > self.lease / 2);
        self.last_look = Some(now);
        self.seen.retain(|boot, _| others.iter().any(|other| other.boot == *boot));
        let mut silent = Vec::new();
        for OtherLease { boot, until, has_run_out } in others {
            let first = SeenLease { until: *until, unchanged_since: now, was_renewed: false };
            let seen = self.seen.entry(*boot).or_insert(first);
            let was_renewed = seen.until != *until;
            if was_renewed || has_gap {
                *seen = SeenLease {
                    until: *until,
                    unchanged_since: now,
                    was_renewed: seen.was_renewed || was_renewed,
                };
            }
            if *has_run_out && now.duration_since(seen.unchanged_since) >= self.lease {
                silent.push(*boot);
            }
        }
        silent
    }

    /// Whether each of these nodes has renewed its lease since it was seen first. One renewal that
    /// was on its way when its node ended looks the same; such a node is found silent later.
    pub(super) fn has_heard_of_all(&self, others: &[OtherLease]) -> bool {
        others.iter().all(|other| self.seen.get(&other.boot).is_some_and(|seen| seen.was_renewed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks of a watch with a lease of ten seconds: at which second, the other node's lease, and
    /// whether it is found to have ended.
    fn check(looks: &[(u64, i64, bool)]) {
        let (began, boot) = (Instant::now(), Uuid::from_u128(1));
        let mut watch = Watch::new(Duration::from_secs(10));
        for (at, until, ended) in looks {
            let other = OtherLease { boot, until: *until, has_run_out: *until <= *at as i64 };
            let found = watch.look_at(&[other], began + Duration::from_secs(*at));
            assert_eq!(
                found,
                if *ended { vec![boot] } else { vec![] },
                "after {at} s in {looks:?}"
            );
        }
    }

    #[test]
    fn a_node_is_ended_after_a_lease_of_silence_seen_without_a_gap() {
        // It was silent for long before this node came, which saw nothing of that.
        check(&[(100, 1, false), (104, 1, false), (108, 1, false), (110, 1, true)]);
        // A renewal in between begins the time anew.
        check(&[(0, 2, false), (4, 2, false), (8, 18, false), (12, 18, false), (17, 18, false)]);
        check(&[(8, 12, false), (12, 12, false), (16, 12, false), (18, 12, true)]);
        // A lease that is longer than this node's own is waited for.
        check(&[(0, 30, false), (5, 30, false), (10, 30, false), (14, 30, false)]);
        // Nobody could ask for a minute: all that is known of the other node is from afterwards.
        check(&[(0, 10, false), (4, 10, false), (64, 10, false), (68, 10, false), (73, 10, false)]);
        check(&[(0, 10, false), (64, 10, false), (68, 74, false), (72, 74, false)]);
    }

    #[test]
    fn a_node_counts_as_heard_of_once_it_renews() {
        let began = Instant::now();
        let mut watch = Watch::new(Duration::from_secs(10));
        let other =
            |number, until| OtherLease { boot: Uuid::from_u128(number), until, has_run_out: false };
        watch.look_at(&[other(1, 5), other(2, 5)], began);
        assert!(!watch.has_heard_of_all(&[other(1, 5)]));
        assert!(watch.has_heard_of_all(&[]));
        watch.look_at(&[other(1, 6), other(2, 5)], began + Duration::from_secs(1));
        assert!(watch.has_heard_of_all(&[other(1, 6)]));
        assert!(!watch.has_heard_of_all(&[other(1, 6), other(2, 5)]));
    }
}
