//! Measures how fast the engine is. Pure: time is an argument.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The span over which a rate is measured: long enough to be steady, short enough to follow the
/// load.
const WINDOW: Duration = Duration::from_secs(5);
/// The span of one count. A window has at most 20 of them.
const BUCKET: Duration = Duration::from_millis(250);

/// Events per second over the last 5 seconds, idle time included.
#[derive(Debug, Default)]
pub(crate) struct RateMeter {
    /// Start and count of each bucket, oldest first.
    buckets: VecDeque<(Instant, u64)>,
}

impl RateMeter {
    /// Counts `count` events at `now`.
    pub(crate) fn record(&mut self, now: Instant, count: u64) {
        match self.buckets.back_mut() {
            Some((start, total)) if now.saturating_duration_since(*start) < BUCKET => {
                *total += count;
            }
            _ => self.buckets.push_back((now, count)),
        }
        while self.buckets.len() > (WINDOW.as_millis() / BUCKET.as_millis()) as usize {
            self.buckets.pop_front();
        }
    }

    /// The rate at `now`; 0 when nothing was counted in the window.
    pub(crate) fn per_second(&self, now: Instant) -> f64 {
        let age = |start: &Instant| now.saturating_duration_since(*start);
        let recent = || self.buckets.iter().filter(|(start, _)| age(start) <= WINDOW);
        let Some((first, _)) = recent().next() else {
            return 0.0;
        };
        // A first burst is not extrapolated from less than one bucket.
        let seconds = age(first).max(BUCKET).as_secs_f64();
        recent().map(|(_, count)| *count as f64).sum::<f64>() / seconds
    }
}

/// Tokens computed per second of work, idle time not included. A step's weight falls by a tenth
/// with each later step.
#[derive(Debug, Default)]
pub(crate) struct Throughput {
    tokens: f64,
    seconds: f64,
}

impl Throughput {
    const FADE: f64 = 0.9;

    /// Counts a step that computed `tokens` tokens in the time `spent`.
    pub(crate) fn record(&mut self, tokens: usize, spent: Duration) {
        self.tokens = self.tokens * Self::FADE + tokens as f64;
        self.seconds = self.seconds * Self::FADE + spent.as_secs_f64();
    }

    /// 0 before the first step.
    pub(crate) fn per_second(&self) -> f64 {
        if self.seconds > 0.0 { self.tokens / self.seconds } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_counts_the_last_seconds_only() {
        let start = Instant::now();
        let at = |millis: u64| start + Duration::from_millis(millis);
        let mut meter = RateMeter::default();
        let check = |meter: &RateMeter, millis, expect: f64| {
            let found = meter.per_second(at(millis));
            assert!((found - expect).abs() < 1e-9, "{found} at {millis} ms");
        };
        check(&meter, 0, 0.0);
        meter.record(at(0), 5);
        check(&meter, 0, 20.0);
        meter.record(at(1_000), 5);
        check(&meter, 2_000, 5.0);
        check(&meter, 6_000, 1.0);
        check(&meter, 60_000, 0.0);
    }

    #[test]
    fn throughput_follows_the_latest_steps() {
        let mut throughput = Throughput::default();
        assert!(throughput.per_second() <= 0.0);
        throughput.record(100, Duration::from_secs(1));
        assert!((throughput.per_second() - 100.0).abs() < 1e-9);
        for _ in 0..100 {
            throughput.record(10, Duration::from_secs(1));
        }
        assert!((throughput.per_second() - 10.0).abs() < 0.1);
    }
}
