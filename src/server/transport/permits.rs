//! The other ends of connections, and how many each address may have open.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// Who counts as one at the other end of a request's connection: an IPv4 address, or the /64 that
/// one IPv6 customer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer(IpAddr);

impl From<IpAddr> for Peer {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(v6) => IpAddr::V6((u128::from(v6) & !u128::from(u64::MAX)).into()),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

/// Connections per peer.
#[derive(Clone)]
pub struct Places {
    limit: usize,
    open: Arc<Mutex<HashMap<Peer, usize>>>,
}

/// One connection's place in the count; given back on drop.
pub struct Place {
    peer: Peer,
    places: Places,
}

impl Places {
    pub fn new(limit: usize) -> Self {
        Self { limit, open: Arc::default() }
    }

    /// `None` when the peer has as many connections as it may.
    pub fn enter(&self, peer: Peer) -> Option<Place> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(peer).or_default();
        if *count >= self.limit {
            return None;
        }
        *count += 1;
        Some(Place { peer, places: self.clone() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.places.open.lock().unwrap_or_else(PoisonError::into_inner);
        let left = open.get_mut(&self.peer).map_or(0, |count| {
            *count -= 1;
            *count
        });
        if left == 0 {
            open.remove(&self.peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_has_so_many_places_and_gets_them_back() {
        let places = Places::new(2);
        let check = |text: &str| places.enter(text.parse::<IpAddr>().unwrap().into());
        let first = check("10.0.0.1").unwrap();
        let _second = check("::ffff:10.0.0.1").unwrap();
        assert!(check("10.0.0.1").is_none());
        assert!(check("10.0.0.2").is_some());
        drop(first);
        assert!(check("10.0.0.1").is_some());
        let _v6 = (check("2001:db8::1").unwrap(), check("2001:db8::2").unwrap());
        assert!(check("2001:db8::3").is_none(), "one /64 is one customer");
        assert!(check("2001:db8:0:1::1").is_some());
    }
}
