//! Remembers the key of each call for a while, so that a client's own retry reaches the node under
//! the key of the call it repeats, and is paid once.
//!
//! Two equal requests are one call if the second says that it is a retry, or if the connection that
//! brought the first broke before the whole answer had been sent. All others are calls of their
//! own, and so is what follows a stream that its client closed: that is how people stop an answer.

use super::upstream::StreamStop;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Calls remembered at most. Each takes less than 100 bytes, all of them less than half a megabyte.
const MAX_CALLS: usize = 4_096;
/// Time for which a call is remembered after its last connection. Clients wait up to ten minutes
/// for an answer and at most a minute between two tries. A person who asks the same again later
/// than this wants another answer.
const RETENTION: Duration = Duration::from_mins(15);

/// The digest of all that makes two requests equal.
pub(super) type InputDigest = [u8; 32];

#[derive(Debug, Default)]
pub(super) struct Calls(Mutex<VecDeque<Call>>);

#[derive(Debug)]
struct Call {
    /// The call's first key, which names it here.
    id: Uuid,
    input: InputDigest,
    key: Uuid,
    /// Connections that wait for the answer now.
    waiting: usize,
    /// A whole answer has been sent that says how the call ended.
    answered: bool,
    last_seen: Instant,
}

impl Call {
    fn is_cut_off(&self) -> bool {
        self.waiting == 0 && !self.answered
    }
}

impl Calls {
    /// Whether a connection waits for the answer to an equal request.
    pub(super) fn is_under_way(&self, input: &InputDigest) -> bool {
        self.0.lock().iter().any(|call| call.input == *input && call.waiting > 0)
    }

    /// Finds the call that a request repeats, or begins one with the key `fresh`.
    pub(super) fn join(
        self: &Arc<Self>,
        input: InputDigest,
        is_retry: bool,
        fresh: Uuid,
        now: Instant,
    ) -> Exchange {
        let mut calls = self.0.lock();
        calls.retain(|call| call.waiting > 0 || now.duration_since(call.last_seen) < RETENTION);
        let repeated = calls
            .iter()
            .position(|call| call.input == input && call.is_cut_off())
            .or_else(|| calls.iter().rposition(|call| is_retry && call.input == input));
        let at = repeated.unwrap_or_else(|| {
            if calls.len() >= MAX_CALLS {
                let settled = calls.iter().position(|call| call.waiting == 0 && call.answered);
                calls.remove(settled.unwrap_or(0));
            }
            let (waiting, answered) = (0, false);
            calls.push_back(Call {
                id: fresh,
                input,
                key: fresh,
                waiting,
                answered,
                last_seen: now,
            });
            calls.len() - 1
        });
        let call = &mut calls[at];
        call.waiting += 1;
        call.answered = false;
        Exchange { calls: self.clone(), id: call.id, key: call.key, answered: false, stop: None }
    }
}

/// One connection's part in a call, from the request to the end of the answer.
#[derive(Debug)]
pub(super) struct Exchange {
    calls: Arc<Calls>,
    id: Uuid,
    pub key: Uuid,
    /// Set once the whole answer has been sent.
    pub answered: bool,
    /// What ends the run behind a stream whose client leaves in the middle of it.
    pub stop: Option<StreamStop>,
}

impl Exchange {
    /// Changes the key, because the node cancelled the run under this one: to `fresh`, or to the
    /// key that another connection of the call got before.
    pub(super) fn renew(&mut self, fresh: Uuid) {
        let mut calls = self.calls.0.lock();
        let call = calls.iter_mut().find(|call| call.id == self.id);
        self.key = call.map_or(fresh, |call| {
            if call.key == self.key {
                call.key = fresh;
            }
            call.key
        });
    }

    /// The client has closed its stream. Ends and forgets the call, unless its answer has been sent
    /// or another connection waits for it.
    pub(super) fn stop(&mut self) {
        let stop = self.stop.take_if(|stop| !self.answered && stop.is_allowed());
        if let Some(stop) = stop
            && self.forget()
        {
            stop.send();
        }
    }

    /// Forgets the call, unless another connection waits for its answer. Whether it was forgotten.
    fn forget(&self) -> bool {
        let mut calls = self.calls.0.lock();
        let alone = calls.iter().position(|call| call.id == self.id && call.waiting == 1);
        alone.and_then(|at| calls.remove(at)).is_some()
    }
}

impl Drop for Exchange {
    #[expect(clippy::disallowed_methods, reason = "the age of a call counts from here")]
    fn drop(&mut self) {
        let mut calls = self.calls.0.lock();
        if let Some(call) = calls.iter_mut().find(|call| call.id == self.id) {
            call.waiting = call.waiting.saturating_sub(1);
            call.answered |= self.answered;
            call.last_seen = Instant::now();
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the age of calls is tested")]
mod tests {
    use super::*;

    const INPUT: InputDigest = [1; 32];

    /// Joins as the request with this number and returns the key's number.
    fn join(calls: &Arc<Calls>, number: u128, is_retry: bool) -> Exchange {
        calls.join(INPUT, is_retry, Uuid::from_u128(number), Instant::now())
    }

    fn answered(mut exchange: Exchange) {
        exchange.answered = true;
    }

    #[test]
    fn equal_requests_are_two_calls_unless_the_first_was_cut_off() {
        let calls = Arc::new(Calls::default());
        let first = join(&calls, 1, false);
        let second = join(&calls, 2, false);
        assert_eq!([first.key, second.key], [1, 2].map(Uuid::from_u128));
        answered(first);
        let third = join(&calls, 3, false);
        assert_eq!(third.key, Uuid::from_u128(3), "the first was answered, the second runs");
        drop(second);
        let again = join(&calls, 4, false);
        assert_eq!(again.key, Uuid::from_u128(2), "the second was cut off");
        let fifth = join(&calls, 5, false);
        assert_eq!(fifth.key, Uuid::from_u128(5), "a repeat takes up its call once");
        answered(again);
        answered(fifth);
        answered(third);
        assert_eq!(join(&calls, 6, false).key, Uuid::from_u128(6));
    }

    #[test]
    fn a_retry_keeps_the_key_whatever_became_of_the_first() {
        let calls = Arc::new(Calls::default());
        let first = join(&calls, 1, false);
        let during = join(&calls, 2, true);
        drop(first);
        answered(during);
        let after = join(&calls, 3, true);
        assert_eq!(after.key, Uuid::from_u128(1));
        drop(after);
        assert_eq!(join(&calls, 4, true).key, Uuid::from_u128(1), "cut off again");
        let other = calls.join([2; 32], true, Uuid::from_u128(5), Instant::now());
        assert_eq!(other.key, Uuid::from_u128(5), "a retry of what is not known is a call");
    }

    #[test]
    fn a_retry_takes_up_the_call_that_was_cut_off() {
        let calls = Arc::new(Calls::default());
        let (first, second) = (join(&calls, 1, false), join(&calls, 2, false));
        drop(first);
        assert_eq!(join(&calls, 3, true).key, Uuid::from_u128(1));
        drop(second);
    }

    #[test]
    fn a_call_whose_run_was_cancelled_goes_on_under_one_other_key() {
        let calls = Arc::new(Calls::default());
        let (mut first, mut second) = (join(&calls, 1, false), join(&calls, 2, true));
        first.renew(Uuid::from_u128(3));
        second.renew(Uuid::from_u128(4));
        assert_eq!([first.key, second.key], [3, 3].map(Uuid::from_u128));
        drop(first);
        answered(second);
        assert_eq!(join(&calls, 5, true).key, Uuid::from_u128(3));
    }

    #[test]
    fn a_call_that_was_stopped_is_forgotten_by_its_last_connection() {
        let calls = Arc::new(Calls::default());
        let (first, second) = (join(&calls, 1, false), join(&calls, 2, true));
        assert!(!first.forget(), "another connection waits");
        drop(first);
        assert!(second.forget());
        drop(second);
        assert_eq!(join(&calls, 3, true).key, Uuid::from_u128(3));
    }

    #[test]
    fn memory_is_bounded_in_count_and_age() {
        let calls = Arc::new(Calls::default());
        let now = Instant::now();
        drop(join(&calls, 1, false));
        let late = calls.join(INPUT, true, Uuid::from_u128(2), now + RETENTION * 2);
        assert_eq!(late.key, Uuid::from_u128(2), "the first is forgotten");
        let others: Vec<_> = (0..2 * MAX_CALLS as u128)
            .map(|n| calls.join([3; 32], false, Uuid::from_u128(10 + n), now))
            .collect();
        assert_eq!(calls.0.lock().len(), MAX_CALLS);
        drop(others);
        assert!(calls.0.lock().iter().all(|call| call.waiting == 0));
    }
}
