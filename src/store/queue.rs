//! The jobs that wait for the writer, in two lanes: ends of attempts go before everything that
//! could begin one.

use super::{StoreError, StoreResult, StoredBody};
use crate::ids::AttemptId;
use crate::ledger::{Command, Outcome, RequestKey};
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// Jobs that may wait. Ends of attempts are accepted beyond this limit, because there are never
/// more of them than open reservations. 4 096 are sixteen full batches: where a sync takes
/// 10 ms, the last one waits about 160 ms, and a later caller is told at once to send again.
pub(super) const MAX_WAITING: usize = 4_096;

/// One change for the writer.
pub(super) struct WriteAction {
    pub command: Command,
    /// An answer to store with the settlement of its request. It is durable before the command is.
    pub body: Option<(RequestKey, StoredBody)>,
}

impl From<Command> for WriteAction {
    fn from(command: Command) -> Self {
        Self { command, body: None }
    }
}

impl WriteAction {
    /// Whether the action belongs to an attempt that holds a reservation. Such an action is always
    /// accepted, and it is kept through a failure of the storage even if no caller waits for it.
    pub(super) fn ends_attempt(&self) -> bool {
        matches!(
            self.command,
            Command::Start { .. } | Command::Settle { .. } | Command::Release { .. }
        )
    }

    /// Whether the action goes before admissions, so that they see what it frees, stops or forbids.
    fn is_urgent(&self) -> bool {
        self.ends_attempt()
            || matches!(
                self.command,
                Command::RequestCancel { .. }
                    | Command::RevokeCredential { .. }
                    | Command::SetAccountStatus { .. }
            )
    }

    /// Request and attempt of an admission, which is released if no caller waits for it any more.
    pub(super) fn admit_ids(&self) -> Option<(RequestKey, AttemptId)> {
        match &self.command {
            Command::Admit(admit) => Some((admit.key, admit.attempt)),
            _ => None,
        }
    }
}

pub(super) type WriteReply = oneshot::Sender<StoreResult<Outcome>>;

pub(super) struct WriteJob {
    pub action: WriteAction,
    reply: Option<WriteReply>,
}

impl WriteJob {
    pub(super) fn new(action: WriteAction, reply: Option<WriteReply>) -> Self {
        Self { action, reply }
    }

    /// Whether the job was sent without a caller that waits for its answer.
    pub(super) fn is_detached(&self) -> bool {
        self.reply.is_none()
    }

    /// Answers the caller; false when there is none, or none any more.
    pub(super) fn answer(self, result: StoreResult<Outcome>) -> bool {
        self.reply.is_some_and(|reply| reply.send(result).is_ok())
    }
}

#[derive(Default)]
struct WriteLanes {
    urgent: VecDeque<WriteJob>,
    ordinary: VecDeque<WriteJob>,
    closed: bool,
}

#[derive(Default)]
pub(super) struct Queue {
    lanes: Mutex<WriteLanes>,
    filled: Condvar,
}

pub(super) enum Taken {
    Jobs(Vec<WriteJob>),
    /// No job came in time.
    Idle,
    /// The queue is empty and closed.
    Closed,
}

impl Queue {
    /// Queues the job, or answers it at once when too many wait.
    pub(super) fn push(&self, job: WriteJob) {
        let mut lanes = self.lanes();
        if !job.action.ends_attempt() && lanes.urgent.len() + lanes.ordinary.len() >= MAX_WAITING {
            drop(lanes);
            job.answer(Err(StoreError::Overloaded));
            return;
        }
        let lane = if job.action.is_urgent() { &mut lanes.urgent } else { &mut lanes.ordinary };
        lane.push_back(job);
        self.filled.notify_one();
    }

    /// Takes up to `most` jobs, urgent ones first. Waits up to `patience` for the first one.
    pub(super) fn take(&self, most: usize, patience: Duration) -> Taken {
        let empty = |lanes: &mut WriteLanes| {
            lanes.urgent.is_empty() && lanes.ordinary.is_empty() && !lanes.closed
        };
        let (mut lanes, _) = self
            .filled
            .wait_timeout_while(self.lanes(), patience, empty)
            .unwrap_or_else(PoisonError::into_inner);
        let WriteLanes { urgent, ordinary, .. } = &mut *lanes;
        let first = urgent.len().min(most);
        let then = ordinary.len().min(most - first);
        let jobs: Vec<WriteJob> = urgent.drain(..first).chain(ordinary.drain(..then)).collect();
        match (jobs.is_empty(), lanes.closed) {
            (false, _) => Taken::Jobs(jobs),
            (true, true) => Taken::Closed,
            (true, false) => Taken::Idle,
        }
    }

    /// Lets the writer stop once the queue is empty.
    pub(super) fn close(&self) {
        self.lanes().closed = true;
        self.filled.notify_one();
    }

    fn lanes(&self) -> MutexGuard<'_, WriteLanes> {
        // No code under this lock panics halfway through a change, so a poisoned lock is sound.
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{AccountId, BootId, RequestId};
    use crate::ledger::Usage;
    use crate::ledger::commands::SettleEnd;
    use uuid::Uuid;

    const SOON: Duration = Duration::from_millis(1);

    fn key() -> RequestKey {
        let account = AccountId(Uuid::nil());
        RequestKey { account, application: None, request: RequestId(Uuid::nil()) }
    }

    fn recover() -> WriteJob {
        let boot = BootId(Uuid::nil());
        WriteJob::new(Command::Recover { boot, limit: 1, crash_block_ms: 1 }.into(), None)
    }

    fn cancel() -> WriteJob {
        WriteJob::new(Command::RequestCancel { key: key() }.into(), None)
    }

    fn settle() -> WriteJob {
        let (attempt, usage) = (AttemptId::generate(), Usage::default());
        let command = Command::Settle { key: key(), attempt, usage, end: SettleEnd::Cancelled };
        WriteJob::new(command.into(), None)
    }

    fn kinds(queue: &Queue, most: usize) -> Vec<&'static str> {
        let Taken::Jobs(jobs) = queue.take(most, SOON) else {
            return Vec::new();
        };
        let kind = |job: &WriteJob| match &job.action.command {
            Command::Settle { .. } => "settle",
            Command::RequestCancel { .. } => "cancel",
            _ => "other",
        };
        jobs.iter().map(kind).collect()
    }

    #[test]
    fn ends_go_before_beginnings_and_each_lane_in_order() {
        let queue = Queue::default();
        for job in [recover(), cancel(), recover(), settle()] {
            queue.push(job);
        }
        assert_eq!(kinds(&queue, 3), ["cancel", "settle", "other"]);
        assert_eq!(kinds(&queue, 3), ["other"]);
        assert_eq!(kinds(&queue, 3), [""; 0]);
    }

    #[test]
    fn a_full_queue_accepts_only_ends_of_attempts() {
        let queue = Queue::default();
        (0..MAX_WAITING).for_each(|_| queue.push(recover()));
        for (job, refused) in [(recover(), true), (cancel(), true), (settle(), false)] {
            let (reply, mut answer) = oneshot::channel();
            queue.push(WriteJob { reply: Some(reply), ..job });
            let answered = matches!(answer.try_recv(), Ok(Err(StoreError::Overloaded)));
            assert_eq!(answered, refused);
        }
        assert_eq!(kinds(&queue, 1), ["settle"]);
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
