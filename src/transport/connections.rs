//! The bounds on open connections: for each client, by its address, and in all. When all places
//! are taken, connections on which no request has arrived yet are the ones that can be closed for
//! others: nobody loses an answer.

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

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

impl Peer {
    /// Whether it is on this machine.
    pub fn is_local(self) -> bool {
        self.0.is_loopback() || self.0.is_unspecified()
    }
}

/// Counts the open connections of each peer.
#[derive(Clone)]
pub(crate) struct ConnectionPermits {
    limit: usize,
    open: Arc<Mutex<HashMap<Peer, usize>>>,
}

/// The right to one open connection; returned on drop.
pub(crate) struct ConnectionPermit {
    peer: Peer,
    permits: ConnectionPermits,
}

impl ConnectionPermits {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, open: Arc::default() }
    }

    /// `None` when the peer has as many connections as it may.
    pub(crate) fn take(&self, peer: Peer) -> Option<ConnectionPermit> {
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

/// The connections without a request, by the order in which they came.
#[derive(Clone, Default)]
pub(crate) struct UnheardConnections(Arc<Mutex<BTreeMap<u64, CancellationToken>>>);

/// A connection's place among them, until its first request or its end.
pub(crate) struct UnheardConnection {
    number: u64,
    all: UnheardConnections,
    closed: CancellationToken,
}

impl UnheardConnections {
    pub(crate) fn enter(&self) -> UnheardConnection {
        let (mut waiting, closed) = (self.0.lock(), CancellationToken::new());
        let number = waiting.last_key_value().map_or(0, |(last, _)| last + 1);
        waiting.insert(number, closed.clone());
        UnheardConnection { number, all: self.clone(), closed }
    }

    /// Has the one closed that has waited longest.
    pub(crate) fn close_oldest(&self) {
        if let Some((_, oldest)) = self.0.lock().pop_first() {
            oldest.cancel();
        }
    }
}

impl UnheardConnection {
    /// A request has arrived.
    pub(crate) fn heard(&self) {
        self.all.0.lock().remove(&self.number);
    }

    /// Whether no request has arrived yet.
    pub(crate) fn is_unheard(&self) -> bool {
        self.all.0.lock().contains_key(&self.number)
    }

    /// Returns when the connection is to be closed for another one.
    pub(crate) async fn closed(&self) {
        self.closed.cancelled().await;
    }
}

impl Drop for UnheardConnection {
    fn drop(&mut self) {
        self.heard();
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

    #[test]
    fn the_oldest_without_a_request_is_closed_first() {
        let all = UnheardConnections::default();
        let [first, second, third] = [(); 3].map(|()| all.enter());
        first.heard();
        all.close_oldest();
        let closed = [&first, &second, &third].map(|one| one.closed.is_cancelled());
        assert_eq!(closed, [false, true, false]);
        drop(third);
        all.close_oldest();
        assert!(all.0.lock().is_empty());
    }
}
