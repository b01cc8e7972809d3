//! Limits the failed credentials that a client address may send per minute.

use super::connections::Peer;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Counts failed credentials by peer (the generic cell rate algorithm). Its memory is bounded.
pub struct AuthFailures {
    /// Time after which one failure is forgotten.
    cost: Duration,
    /// The time by which all failures of a peer are forgotten.
    forgotten_at: Mutex<HashMap<Peer, Instant>>,
}

/// Peers remembered at once: about 1 MB. Further ones count as over their limit until some of these
/// are forgotten.
const REMEMBERED_PEERS: usize = 10_000;
const MINUTE: Duration = Duration::from_mins(1);

impl AuthFailures {
    pub fn new(per_minute: u32) -> Self {
        Self { cost: MINUTE / per_minute.max(1), forgotten_at: Mutex::default() }
    }

    /// Counts one failure; false once the peer has used up its minute.
    pub fn allow(&self, peer: Peer, now: Instant) -> bool {
        let mut peers = self.forgotten_at.lock();
        if peers.len() >= REMEMBERED_PEERS && !peers.contains_key(&peer) {
            peers.retain(|_, at| *at > now);
            if peers.len() >= REMEMBERED_PEERS {
                return false;
            }
        }
        let forgotten_at = peers.entry(peer).or_insert(now);
        let later = (*forgotten_at).max(now) + self.cost;
        let within = later <= now + MINUTE;
        if within {
            *forgotten_at = later;
        }
        within
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u32) -> Peer {
        std::net::IpAddr::from(number.to_be_bytes()).into()
    }

    #[test]
    fn guesses_run_out_by_peer_and_come_back() {
        let (failures, start) = (AuthFailures::new(2), Instant::now());
        let allow =
            |number, seconds| failures.allow(peer(number), start + Duration::from_secs(seconds));
        assert_eq!([allow(1, 0), allow(1, 0), allow(1, 0)], [true, true, false]);
        assert!(allow(2, 0));
        assert_eq!([allow(1, 29), allow(1, 31), allow(1, 31)], [false, true, false]);
    }

    #[test]
    fn the_peers_remembered_are_bounded() {
        let (failures, start) = (AuthFailures::new(60), Instant::now());
        let most = REMEMBERED_PEERS as u32;
        assert!((0..most).all(|number| failures.allow(peer(number), start)));
        assert!(!failures.allow(peer(most), start), "there is no room for another");
        assert!(failures.allow(peer(0), start), "those that are known go on");
        assert!(
            failures.allow(peer(most), start + Duration::from_secs(3)),
            "the others have been forgotten"
        );
        assert_eq!(failures.forgotten_at.lock().len(), 1);
    }
}
