//! Compares this machine's clock with the latest time stored, before anything is written. Stored
//! time never goes back by itself, so one start with a clock that is ahead would end credentials
//! early and keep every later time at that one.

use crate::settings::ClockSettings;
use cresset_base::UnixMillis;

/// What a clock may show for a ledger to be opened.
#[derive(Clone, Copy, Debug)]
pub struct ClockLimits {
    /// No right clock shows an earlier time.
    pub earliest: UnixMillis,
    /// Milliseconds that the clock may be ahead of the latest time stored.
    pub max_ahead_ms: u64,
    /// Milliseconds that it may be behind.
    pub max_behind_ms: u64,
    /// The operator vouches for the clock: the ledger goes on from what it shows.
    pub accepted: bool,
}

impl Default for ClockLimits {
    /// Any clock will do.
    fn default() -> Self {
        Self {
            earliest: UnixMillis::default(),
            max_ahead_ms: u64::MAX,
            max_behind_ms: u64::MAX,
            accepted: false,
        }
    }
}

impl ClockLimits {
    /// `earliest`: no right clock shows an earlier time.
    pub fn new(settings: &ClockSettings, earliest: UnixMillis) -> Self {
        Self {
            earliest,
            max_ahead_ms: settings.max_gap_days * 86_400_000,
            max_behind_ms: settings.max_behind_minutes * 60_000,
            accepted: settings.accepted,
        }
    }

    /// Judges what the clock shows, given the latest time stored, which is 0 in a new ledger. The
    /// error says what to do.
    pub fn judge(&self, shown: UnixMillis, stored: UnixMillis) -> Result<(), String> {
        let (ahead, behind) = (shown.0.saturating_sub(stored.0), stored.0.saturating_sub(shown.0));
        let why = if shown < self.earliest {
            format!("and this program was made later, at {}", self.earliest)
        } else if behind > self.max_behind_ms {
            format!("and the ledger has a later time, {stored}")
        } else if stored.0 > 0 && ahead > self.max_ahead_ms {
            let days = ahead / 86_400_000;
            format!("{days} days after the last time in the ledger, {stored}")
        } else {
            return Ok(());
        };
        if self.accepted {
            return Ok(());
        }
        Err(format!(
            "this machine's clock shows {shown}, {why}: set the clock; if it is right, give --accept-clock once, and \
             the ledger goes on from it"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_refused_outside_its_bounds() {
        let limits = ClockLimits {
            earliest: UnixMillis(1_000),
            max_ahead_ms: 300,
            max_behind_ms: 5,
            accepted: false,
        };
        let check = |shown, stored, expect: Option<&str>| {
            let (shown, stored) = (UnixMillis(shown), UnixMillis(stored));
            let found = limits.judge(shown, stored).err();
            let told = found.as_deref().is_some_and(|why| expect.is_some_and(|e| why.contains(e)));
            assert!(found.is_none() && expect.is_none() || told, "{shown:?} {stored:?}: {found:?}");
            assert_eq!(ClockLimits { accepted: true, ..limits }.judge(shown, stored), Ok(()));
        };
        check(1_000, 0, None);
        check(u64::MAX, 0, None);
        check(999, 0, Some("this program was made later"));
        check(2_000, 2_005, None);
        check(2_000, 2_006, Some("the ledger has a later time"));
        check(2_300, 2_000, None);
        check(2_301, 2_000, Some("after the last time in the ledger"));
    }

    #[test]
    fn the_sentence_names_both_times_and_the_flag() {
        let limits = ClockLimits { max_ahead_ms: 0, ..ClockLimits::default() };
        let day = 86_400_000;
        let why = limits.judge(UnixMillis(61 * day), UnixMillis(day)).unwrap_err();
        for part in ["1970-03-03 00:00:00Z", "1970-01-02 00:00:00Z", "60 days", "--accept-clock"] {
            assert!(why.contains(part), "{why}");
        }
    }
}
