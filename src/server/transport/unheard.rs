//! Connections on which no request has arrived yet. They are the ones that can be closed for others
//! when all places are taken: nobody loses an answer.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// The connections without a request, by the order in which they came.
#[derive(Clone, Default)]
pub struct UnheardConnections(Arc<Mutex<BTreeMap<u64, CancellationToken>>>);

/// A connection's place among them, until its first request or its end.
pub struct UnheardConnection {
    number: u64,
    all: UnheardConnections,
    closed: CancellationToken,
}

impl UnheardConnections {
    pub fn enter(&self) -> UnheardConnection {
        let (mut waiting, closed) = (self.0.lock(), CancellationToken::new());
        let number = waiting.last_key_value().map_or(0, |(last, _)| last + 1);
        waiting.insert(number, closed.clone());
        UnheardConnection { number, all: self.clone(), closed }
    }

    /// Has the one closed that has waited longest.
    pub fn close_oldest(&self) {
        if let Some((_, oldest)) = self.0.lock().pop_first() {
            oldest.cancel();
        }
    }
}

impl UnheardConnection {
    /// A request has arrived.
    pub fn heard(&self) {
        self.all.0.lock().remove(&self.number);
    }

    /// Whether no request has arrived yet.
    pub fn is_unheard(&self) -> bool {
        self.all.0.lock().contains_key(&self.number)
    }

    /// Returns when the connection is to be closed for another one.
    pub async fn closed(&self) {
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
