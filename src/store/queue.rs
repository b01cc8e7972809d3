//! What waits for the writer, in two lanes: ends of attempts before everything that could begin
//! one.

use super::rows::Body;
use super::{Result, StoreError};
use crate::ids::AttemptId;
use crate::ledger::{Command, Outcome, RequestKey};
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// Commands that may wait, besides those owed to open reservations, of which there are never more
/// than reservations.
pub(super) const MAX_WAITING: usize = 4_096;

pub(super) enum Work {
    Apply(Command),
    PutBody { key: RequestKey, body: Body },
}

impl Work {
    /// Part of ending an attempt that holds a reservation: accepted always, and never lost when
    /// nobody waits for it.
    pub fn ends_attempt(&self) -> bool {
        matches!(
            self,
            Self::PutBody { .. }
                | Self::Apply(
                    Command::Start { .. } | Command::Settle { .. } | Command::Release { .. }
                )
        )
    }

    /// Goes before admissions, so that what it frees, stops or forbids is seen by them.
    fn is_urgent(&self) -> bool {
        self.ends_attempt()
            || matches!(
                self,
                Self::Apply(
                    Command::RequestCancel { .. }
                        | Command::RevokeCredential { .. }
                        | Command::SetAccountStatus { .. }
                )
            )
    }

    /// What an admission would make.
    pub fn admit_ids(&self) -> Option<(RequestKey, AttemptId)> {
        match self {
            Self::Apply(Command::Admit(admit)) => Some((admit.key, admit.attempt)),
            _ => None,
        }
    }
}

pub(super) type Reply = oneshot::Sender<Result<Outcome>>;

pub(super) struct Job {
    pub work: Work,
    reply: Option<Reply>,
}

impl Job {
    pub fn new(work: Work, reply: Option<Reply>) -> Self {
        Self { work, reply }
    }

    /// Whether nobody waits for the answer.
    pub fn is_detached(&self) -> bool {
        self.reply.is_none()
    }

    /// False when nobody was there to hear it.
    pub fn answer(self, result: Result<Outcome>) -> bool {
        self.reply.is_some_and(|reply| reply.send(result).is_ok())
    }
}

#[derive(Default)]
struct Lanes {
    urgent: VecDeque<Job>,
    ordinary: VecDeque<Job>,
    closed: bool,
}

#[derive(Default)]
pub(super) struct Queue {
    lanes: Mutex<Lanes>,
    filled: Condvar,
}

pub(super) enum Taken {
    Jobs(Vec<Job>),
    /// Nothing came in time.
    Idle,
    /// Nothing is left and nothing will come.
    Closed,
}

impl Queue {
    /// Queues the job, or answers it at once when too many wait.
    pub fn push(&self, job: Job) {
        let mut lanes = self.lanes();
        if !job.work.ends_attempt() && lanes.urgent.len() + lanes.ordinary.len() >= MAX_WAITING {
            drop(lanes);
            job.answer(Err(StoreError::Overloaded));
            return;
        }
        let lane = if job.work.is_urgent() { &mut lanes.urgent } else { &mut lanes.ordinary };
        lane.push_back(job);
        self.filled.notify_one();
    }

    /// Up to `most` jobs, urgent ones first; waits up to `patience` for the first.
    pub fn take(&self, most: usize, patience: Duration) -> Taken {
        let empty = |lanes: &mut Lanes| {
            lanes.urgent.is_empty() && lanes.ordinary.is_empty() && !lanes.closed
        };
        let (mut lanes, _) = self
            .filled
            .wait_timeout_while(self.lanes(), patience, empty)
            .unwrap_or_else(PoisonError::into_inner);
        let Lanes { urgent, ordinary, .. } = &mut *lanes;
        let first = urgent.len().min(most);
        let then = ordinary.len().min(most - first);
        let jobs: Vec<Job> = urgent.drain(..first).chain(ordinary.drain(..then)).collect();
        match (jobs.is_empty(), lanes.closed) {
            (false, _) => Taken::Jobs(jobs),
            (true, true) => Taken::Closed,
            (true, false) => Taken::Idle,
        }
    }

    /// Lets the writer stop once nothing is left.
    pub fn close(&self) {
        self.lanes().closed = true;
        self.filled.notify_one();
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        // Nothing that runs under the lock panics halfway through a change.
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::UnixMillis;
    use crate::ids::{AccountId, BootId, RequestId};
    use uuid::Uuid;

    const SOON: Duration = Duration::from_millis(1);

    fn key() -> RequestKey {
        let account = AccountId(Uuid::nil());
        RequestKey { account, application: None, request: RequestId(Uuid::nil()) }
    }

    fn recover() -> Job {
        let boot = BootId(Uuid::nil());
        Job::new(Work::Apply(Command::Recover { boot, limit: 1 }), None)
    }

    fn cancel() -> Job {
        Job::new(Work::Apply(Command::RequestCancel { key: key() }), None)
    }

    fn body() -> Job {
        let body = Body { expires_at: UnixMillis(1), content: bytes::Bytes::new() };
        Job::new(Work::PutBody { key: key(), body }, None)
    }

    fn kinds(queue: &Queue, most: usize) -> Vec<&'static str> {
        let Taken::Jobs(jobs) = queue.take(most, SOON) else {
            return Vec::new();
        };
        let kind = |job: &Job| match &job.work {
            Work::PutBody { .. } => "body",
            Work::Apply(Command::RequestCancel { .. }) => "cancel",
            Work::Apply(_) => "other",
        };
        jobs.iter().map(kind).collect()
    }

    #[test]
    fn ends_go_before_beginnings_and_each_lane_in_order() {
        let queue = Queue::default();
        for job in [recover(), cancel(), recover(), body()] {
            queue.push(job);
        }
        assert_eq!(kinds(&queue, 3), ["cancel", "body", "other"]);
        assert_eq!(kinds(&queue, 3), ["other"]);
        assert_eq!(kinds(&queue, 3), [""; 0]);
    }

    #[test]
    fn a_full_queue_refuses_all_but_what_is_owed() {
        let queue = Queue::default();
        (0..MAX_WAITING).for_each(|_| queue.push(recover()));
        for (job, refused) in [(recover(), true), (cancel(), true), (body(), false)] {
            let (reply, mut answer) = oneshot::channel();
            queue.push(Job { reply: Some(reply), ..job });
            let answered = matches!(answer.try_recv(), Ok(Err(StoreError::Overloaded)));
            assert_eq!(answered, refused);
        }
        assert_eq!(kinds(&queue, 1), ["body"]);
    }

    #[test]
    fn a_closed_queue_is_emptied_first() {
        let queue = Queue::default();
        queue.push(recover());
        queue.close();
        assert!(matches!(queue.take(1, SOON), Taken::Jobs(_)));
        assert!(matches!(queue.take(1, SOON), Taken::Closed));
    }
}
