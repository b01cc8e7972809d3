//! Clients by address, and how many connections each of them may have open.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

/// A client as limits count it: an IPv4 address, or the /64 network of one IPv6 customer.
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

/// Counts the open connections of each peer.
#[derive(Clone)]
pub struct ConnectionPermits {
    limit: usize,
    open: Arc<Mutex<HashMap<Peer, usize>>>,
}

/// The right to one open connection; returned on drop.
pub struct ConnectionPermit {
    peer: Peer,
    permits: ConnectionPermits,
}

impl ConnectionPermits {
    pub fn new(limit: usize) -> Self {
        Self { limit, open: Arc::default() }
    }

    /// `None` when the peer has as many connections as it may.
    pub fn take(&self, peer: Peer) -> Option<ConnectionPermit> {
        let mut open = self.open.lock();
        let count = open.entry(peer).or_default();
        if *count >= self.limit {
            return None;
        }
        *count += 1;
        Some(ConnectionPermit { peer, permits: self.clone() })
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut open = self.permits.open.lock();
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
    fn permits_of_a_peer_are_limited_and_returned() {
        let permits = ConnectionPermits::new(2);
        let check = |text: &str| permits.take(text.parse::<IpAddr>().unwrap().into());
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
