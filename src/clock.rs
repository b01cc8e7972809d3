//! Wall-clock time as data. Pure code takes `UnixMillis` as an argument; only the edges ask a `Clock`.

use crate::failpoint::failpoint;
use serde::{Deserialize, Serialize};
use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnixMillis(pub u64);

impl UnixMillis {
    /// Whole seconds since the Unix epoch, as OpenAI's `created` fields count.
    pub fn seconds(self) -> u64 {
        self.0 / 1_000
    }
}

/// A source of wall-clock time; tests supply their own.
pub trait Clock: Send + Sync + 'static {
    fn now(&self) -> UnixMillis;
}

/// The operating system's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> UnixMillis {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = UnixMillis(u64::try_from(since.as_millis()).unwrap_or(u64::MAX));
        failpoint!("clock::hours_ahead", |hours| UnixMillis(
            now.0 + 3_600_000 * hours.and_then(|hours| hours.parse::<u64>().ok()).unwrap_or_default()
        ));
        now
    }
}
