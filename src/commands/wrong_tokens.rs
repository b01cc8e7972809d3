//! Wrong tokens of operators: guesses, and tokens in use that were revoked or have expired.

use cresset_base::UnixMillis;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::sync::Semaphore;

/// How long the answer to a wrong token waits.
const PAUSE: Duration = Duration::from_secs(1);
/// Wrong tokens whose answers wait at the same time, at most.
const MAX_WAITING: usize = 16;
/// Milliseconds from a line of the log to the next, which counts those between.
const LINE_MS: u64 = 60_000;

/// Why a token was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenRefusal {
    /// No token is like it.
    Unknown,
    /// It was revoked, or has expired.
    Ended,
    /// So many wrong ones wait for their answers that this one was not compared further.
    TooMany,
}

impl TokenRefusal {
    /// As the metric names it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Ended => "ended",
            Self::TooMany => "too_many",
        }
    }
}

#[derive(Default)]
struct WrongTokenCounts {
    unknown: u64,
    ended: u64,
    /// When the last one came, and the name of the last one that was valid once.
    last_at: UnixMillis,
    last_name: Option<String>,
    /// When a line was logged, and how many came since.
    logged_at: Option<UnixMillis>,
    unlogged: u64,
}

pub(super) struct WrongTokens {
    counts: Mutex<WrongTokenCounts>,
    waiting: Semaphore,
}

impl Default for WrongTokens {
    fn default() -> Self {
        Self { counts: Mutex::default(), waiting: Semaphore::new(MAX_WAITING) }
    }
}

impl WrongTokens {
    /// Counts a wrong token, which had the name `ended` when it was valid, and waits.
    pub(super) async fn refuse(&self, ended: Option<String>, now: UnixMillis) -> TokenRefusal {
        let why = if ended.is_some() { TokenRefusal::Ended } else { TokenRefusal::Unknown };
        self.counts.lock().add(ended, now);
        let Ok(_place) = self.waiting.try_acquire() else { return TokenRefusal::TooMany };
        tokio::time::sleep(PAUSE).await;
        why
    }

    pub(super) fn view(&self) -> Value {
        let counts = self.counts.lock();
        if counts.unknown + counts.ended == 0 {
            return Value::Null;
        }
        json!({
            "unknown": counts.unknown,
            "ended": counts.ended,
            "last_at": counts.last_at.seconds(),
            "last_ended": counts.last_name,
        })
    }
}

impl WrongTokenCounts {
    fn add(&mut self, ended: Option<String>, now: UnixMillis) {
        *if ended.is_some() { &mut self.ended } else { &mut self.unknown } += 1;
        self.last_at = now;
        self.unlogged += 1;
        let is_new = ended.is_some() && ended != self.last_name;
        if is_new || self.logged_at.is_none_or(|at| now.0.abs_diff(at.0) >= LINE_MS) {
            let number = std::mem::take(&mut self.unlogged);
            let name = ended.as_deref().unwrap_or("unknown");
            tracing::warn!(number, name, "wrong operator tokens were refused");
            self.logged_at = Some(now);
        }
        self.last_name = ended.or_else(|| self.last_name.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::join_all;

    #[tokio::test]
    async fn wrong_tokens_wait_are_counted_and_never_queue_up() {
        let wrong = WrongTokens::default();
        assert_eq!(wrong.view(), Value::Null);
        let begun = tokio::time::Instant::now();
        assert_eq!(wrong.refuse(None, UnixMillis(1_000)).await, TokenRefusal::Unknown);
        assert_eq!(wrong.refuse(Some("ann".into()), UnixMillis(2_000)).await, TokenRefusal::Ended);
        assert!(begun.elapsed() >= 2 * PAUSE);
        let all = join_all((0..20).map(|_| wrong.refuse(None, UnixMillis(3_000)))).await;
        let at_once = all.iter().filter(|why| **why == TokenRefusal::TooMany).count();
        assert_eq!(at_once, 20 - MAX_WAITING);
        let expect = json!({ "unknown": 21, "ended": 1, "last_at": 3, "last_ended": "ann" });
        assert_eq!(wrong.view(), expect);
    }

    #[test]
    fn the_log_has_a_line_a_minute_and_one_for_each_ended_token() {
        let mut counts = WrongTokenCounts::default();
        for (at, ended, left) in [
            (0, None, 0),
            (1, None, 1),
            (2, Some("ann"), 0),
            (3, Some("ann"), 1),
            (LINE_MS + 1, None, 2),
            (LINE_MS + 2, None, 0),
        ] {
            counts.add(ended.map(str::to_owned), UnixMillis(at));
            assert_eq!(counts.unlogged, left, "at {at}");
        }
    }
}
