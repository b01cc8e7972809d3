//! The time of the database, which counts for every node that uses the ledger: their own clocks may
//! differ. It is asked at the start and with each renewal of the lease, and in between it goes on
//! with this machine's clock.

use super::failure::Failure;
use super::session::{Ask, DatabaseSession};
use cresset_base::{Clock, UnixMillis};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// Milliseconds by which the clocks may differ without a word to the operator.
const TOLERATED_MS: u64 = 1_000;

const NOW: &str = "select (extract(epoch from clock_timestamp()) * 1000)::bigint";

pub(super) struct DatabaseClock {
    own: Arc<dyn Clock>,
    /// Milliseconds that the database's clock is ahead of this machine's.
    ahead: AtomicI64,
}

impl Clock for DatabaseClock {
    fn now(&self) -> UnixMillis {
        let ahead = self.ahead.load(Ordering::Relaxed);
        UnixMillis(self.own.now().0.saturating_add_signed(ahead))
    }
}

impl DatabaseClock {
    pub(super) fn new(own: Arc<dyn Clock>) -> Self {
        Self { own, ahead: AtomicI64::new(0) }
    }

    /// Asks the database, and warns where this machine's clock has come to differ from it. What is
    /// known is changed only as far as the answer contradicts it, so it does not follow the lengths
    /// of round trips.
    pub(super) async fn set(&self, session: &DatabaseSession) -> Result<(), Failure> {
        let asked = self.own.now();
        let answer = session.ask(Ask::new(NOW)).await?;
        let Some(told) = answer.rows.first().map(|row| row.get(0)) else { return Ok(()) };
        let known = self.ahead.load(Ordering::Relaxed);
        let ahead = corrected(known, told, asked, self.own.now());
        self.ahead.store(ahead, Ordering::Relaxed);
        if ahead.abs_diff(known) > TOLERATED_MS {
            let text = "this machine's clock differs from the database's, whose time counts for the ledger";
            tracing::warn!(ahead_milliseconds = -ahead, "{text}");
        }
        Ok(())
    }
}

/// How far the database is ahead, nearest to what is known, if it showed `told` at some moment
/// between two moments of this machine's clock.
fn corrected(known: i64, told: i64, asked: UnixMillis, answered: UnixMillis) -> i64 {
    let [least, most] = [answered, asked].map(|at| told.saturating_sub_unsigned(at.0));
    known.clamp(least.min(most), most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_difference_changes_only_where_an_answer_contradicts_it() {
        for (known, told, asked, answered, expect) in [
            (0, 1_000, 1_000, 1_000, 0),
            (0, 1_005, 1_000, 1_010, 0),
            (0, 5_000, 1_000, 1_010, 3_990),
            (3_990, 5_000, 1_000, 1_000, 4_000),
            (4_000, 9_000, 5_000, 5_100, 4_000),
            (4_000, 5_000, 5_000, 5_100, 0),
            (0, 1_000, 5_000, 5_100, -4_000),
        ] {
            let [asked, answered] = [asked, answered].map(UnixMillis);
            let found = corrected(known, told, asked, answered);
            assert_eq!(found, expect, "{known} {told} {asked:?} {answered:?}");
        }
    }
}
