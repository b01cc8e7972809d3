//! Wall-clock time as data. Pure code takes `UnixMillis` as an argument; only the outermost code
//! asks a `Clock`.

use crate::failpoint;
use chrono::DateTime;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Milliseconds since the Unix epoch.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct UnixMillis(pub u64);

impl UnixMillis {
    /// Whole seconds since the Unix epoch, as in OpenAI's `created` fields.
    pub fn seconds(self) -> u64 {
        self.0 / 1_000
    }
}

/// As `2026-01-31 12:00:00Z`.
impl fmt::Display for UnixMillis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = i64::try_from(self.0).ok();
        match milliseconds.and_then(DateTime::from_timestamp_millis) {
            Some(at) => at.format("%Y-%m-%d %H:%M:%SZ").fmt(f),
            None => self.seconds().fmt(f),
        }
    }
}

/// The date of the executable: no right clock shows an earlier time to it.
pub fn built_at() -> UnixMillis {
    let seconds: u64 = env!("BUILT_AT_SECONDS").parse().unwrap_or(0);
    UnixMillis(seconds.saturating_mul(1_000))
}

/// A source of wall-clock time; tests supply their own.
pub trait Clock: Send + Sync + 'static {
    fn now(&self) -> UnixMillis;
}

/// The operating system's clock as it stood when the process first asked, plus the time that has
/// passed since. Setting the clock back or ahead therefore expires, reorders and releases nothing
/// in a running process.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

static FIRST_ASKED: OnceLock<(Duration, Duration)> = OnceLock::new();

impl Clock for SystemClock {
    fn now(&self) -> UnixMillis {
        let (wall, steady) = *FIRST_ASKED.get_or_init(|| (wall(), steady()));
        let now = wall + self::steady().saturating_sub(steady);
        let now = UnixMillis(u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
        failpoint!("clock::hours_ahead", |hours| UnixMillis(
            now.0
                + 3_600_000 * hours.and_then(|hours| hours.parse::<u64>().ok()).unwrap_or_default()
        ));
        now
    }
}

/// What the operating system's clock shows now, whatever it showed when the process began.
pub fn shown_now() -> UnixMillis {
    UnixMillis(u64::try_from(wall().as_millis()).unwrap_or(u64::MAX))
}

fn wall() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Time since boot, which cannot be set. It includes the machine's sleep where the system counts
/// it.
fn steady() -> Duration {
    #[cfg(target_os = "linux")]
    let clock = ClockId::Boottime;
    #[cfg(not(target_os = "linux"))]
    let clock = ClockId::Monotonic;
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_clock_starts_as_the_wall_clock_and_never_goes_back() {
        let before = wall();
        let times: Vec<_> = (0..1_000).map(|_| SystemClock.now()).collect();
        assert!(times.is_sorted());
        // The first caller in this process asked not long ago.
        assert!(before.as_secs().abs_diff(times[0].seconds()) < 3_600);
    }
}
