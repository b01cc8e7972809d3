//! The jobs that wait for the writer. Ends of attempts go before everything that could begin one.
//!
//! A backend that can commit several batches at once has several lanes, and the accounts are in as
//! many groups. A lane holds the groups of its batch until it takes the next one, so the commands
//! of an account are in one batch at a time and keep their order.

use super::{StoreError, StoreResult, StoredBody};
use cresset_base::AttemptId;
use cresset_ledger::{Command, Outcome, RequestKey};
use parking_lot::{Condvar, Mutex};
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::time::Duration;
use tokio::sync::oneshot;

/// Jobs that may wait. Ends of attempts are accepted beyond this limit, because there are never
/// more of them than open reservations. 4 096 are sixteen full batches: where a sync takes
/// 10 ms, the last one waits about 160 ms, and a later caller is told at once to send again.
pub(super) const MAX_WAITING: usize = 4_096;

/// Jobs for which a batch beside another one pays. What a batch costs a database beside its
/// commands was measured to be as much as that of about 25 commands.
const LARGE_BATCH: usize = 64;

/// How long a small batch waits for the end of another one. Most end within a few milliseconds; one
/// that waits for an account which another node holds can take a second.
const BESIDE: Duration = Duration::from_millis(20);

/// One change for the writer.
pub struct WriteAction {
    pub command: Command,
    /// An answer to store with the settlement of its request. It is durable before the command is.
    pub body: Option<(RequestKey, StoredBody)>,
    /// Whether a batch left it for a later one, which waits for its account then.
    pub was_put_off: bool,
}

impl From<Command> for WriteAction {
    fn from(command: Command) -> Self {
        Self::new(command, None)
    }
}

impl WriteAction {
    pub fn new(command: Command, body: Option<(RequestKey, StoredBody)>) -> Self {
        Self { command, body, was_put_off: false }
    }

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

/// The jobs of a group of accounts.
#[derive(Default)]
struct WaitingJobs {
    urgent: VecDeque<WriteJob>,
    ordinary: VecDeque<WriteJob>,
    /// The lane in which a batch of the group is.
    holder: Option<usize>,
}

impl WaitingJobs {
    fn len(&self) -> usize {
        self.urgent.len() + self.ordinary.len()
    }

    /// The jobs among which this one waits.
    fn like(&mut self, job: &WriteJob) -> &mut VecDeque<WriteJob> {
        if job.action.is_urgent() { &mut self.urgent } else { &mut self.ordinary }
    }

    /// Whether a lane may take jobs of the group.
    fn is_open_to(&self, lane: usize) -> bool {
        self.holder.is_none_or(|holder| holder == lane)
    }
}

struct WaitingGroups {
    all: Vec<WaitingJobs>,
    /// A lane is about to begin a batch beside another one, however small.
    watched: bool,
    closed: bool,
}

impl WaitingGroups {
    /// The group of a job. The last bits of an account's id are random.
    fn of(&mut self, job: &WriteJob) -> &mut WaitingJobs {
        let (account, count) = (job.action.command.account(), self.all.len() as u128);
        &mut self.all[account.map_or(0, |id| (id.0.as_u128() % count) as usize)]
    }

    /// Jobs that a lane may take.
    fn open_to(&self, lane: usize) -> usize {
        let open = self.all.iter().filter(|group| group.is_open_to(lane));
        open.map(WaitingJobs::len).sum()
    }

    /// Whether a lane has something to do at once. Beside another batch only a large one pays.
    fn is_due(&self, lane: usize) -> bool {
        let others_work = !self.all.iter().all(|group| group.is_open_to(lane));
        self.open_to(lane) >= if others_work { LARGE_BATCH } else { 1 }
    }

    /// Takes up to `most` jobs of groups that then belong to the lane, urgent ones first. Groups
    /// beyond a large batch are left to other lanes.
    fn take(&mut self, lane: usize, most: usize) -> Vec<WriteJob> {
        let (mut urgent, mut ordinary) = (Vec::new(), Vec::new());
        // The fullest first; a lane without a batch looks after the others.
        let mut groups: Vec<_> =
            self.all.iter_mut().filter(|group| group.is_open_to(lane)).collect();
        groups.sort_by_key(|group| Reverse(group.len()));
        for group in groups {
            let taken = urgent.len() + ordinary.len();
            if taken >= LARGE_BATCH || group.len() == 0 {
                break;
            }
            group.holder = Some(lane);
            let first = group.urgent.len().min(most - taken);
            urgent.extend(group.urgent.drain(..first));
            let then = group.ordinary.len().min(most - taken - first);
            ordinary.extend(group.ordinary.drain(..then));
        }
        urgent.append(&mut ordinary);
        urgent
    }
}

pub(super) struct Queue {
    groups: Mutex<WaitingGroups>,
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
    pub(super) fn new(lanes: usize) -> Self {
        let all = (0..lanes).map(|_| WaitingJobs::default()).collect();
        let groups = Mutex::new(WaitingGroups { all, watched: false, closed: false });
        Self { groups, filled: Condvar::new() }
    }

    /// Queues the job, or answers it at once when too many wait.
    pub(super) fn push(&self, job: WriteJob) {
        let mut groups = self.groups.lock();
        let waiting: usize = groups.all.iter().map(WaitingJobs::len).sum();
        if !job.action.ends_attempt() && waiting >= MAX_WAITING {
            drop(groups);
            job.answer(Err(StoreError::Overloaded));
            return;
        }
        groups.of(&job).like(&job).push_back(job);
        self.wake_idle(&groups);
    }

    /// Wakes a lane that waits, if there is something to do, or to wait for, for one without a
    /// batch.
    fn wake_idle(&self, groups: &WaitingGroups) {
        let is_left = groups.open_to(usize::MAX) > 0;
        if is_left && (!groups.watched || groups.is_due(usize::MAX)) {
            self.filled.notify_one();
        }
    }

    /// Takes up to `most` jobs for a lane, urgent ones first. Waits up to `patience` for the first
    /// one. The groups of the lane's last batch are free for others from now on, unless it `keeps`
    /// them.
    pub(super) fn take(&self, lane: usize, most: usize, patience: Duration, keeps: bool) -> Taken {
        let mut groups = self.groups.lock();
        let own = |group: &&mut WaitingJobs| group.holder == Some(lane) && !keeps;
        groups.all.iter_mut().filter(own).for_each(|group| group.holder = None);
        let mut is_due = groups.is_due(lane);
        while !is_due && !groups.closed {
            let waits = groups.open_to(lane) > 0 && patience >= BESIDE;
            groups.watched |= waits;
            let longest = if waits { BESIDE } else { patience };
            let waited = self.filled.wait_for(&mut groups, longest);
            groups.watched &= !waits;
            is_due = groups.is_due(lane) || waited.timed_out() && waits;
            if waited.timed_out() {
                break;
            }
        }
        let jobs = if is_due || groups.closed { groups.take(lane, most) } else { Vec::new() };
        self.wake_idle(&groups);
        match (jobs.is_empty(), groups.closed) {
            (false, _) => Taken::Jobs(jobs),
            (true, true) => Taken::Closed,
            (true, false) => Taken::Idle,
        }
    }

    /// Takes back jobs of a batch, which come first in the next one of their groups.
    pub(super) fn put_off(&self, jobs: Vec<WriteJob>) {
        let mut groups = self.groups.lock();
        for mut job in jobs.into_iter().rev() {
            job.action.was_put_off = true;
            groups.of(&job).like(&job).push_front(job);
        }
    }

    /// Lets the writer stop once the queue is empty.
    pub(super) fn close(&self) {
        self.groups.lock().closed = true;
        self.filled.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_base::{AccountId, BootId, RequestId};
    use cresset_ledger::{SettleEnd, Usage};
    use uuid::Uuid;

    const SOON: Duration = Duration::from_millis(1);

    fn key() -> RequestKey {
        let account = AccountId(Uuid::nil());
        RequestKey { account, application: None, request: RequestId(Uuid::nil()) }
    }

    fn of_account(number: u128) -> WriteJob {
        let key = RequestKey { account: AccountId(Uuid::from_u128(number)), ..key() };
        WriteJob::new(Command::RequestCancel { key }.into(), None)
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
        let Taken::Jobs(jobs) = queue.take(0, most, SOON, false) else {
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
    fn ends_go_before_beginnings_and_each_kind_in_order() {
        let queue = Queue::new(1);
        for job in [recover(), cancel(), recover(), settle()] {
            queue.push(job);
        }
        assert_eq!(kinds(&queue, 3), ["cancel", "settle", "other"]);
        assert_eq!(kinds(&queue, 3), ["other"]);
        assert_eq!(kinds(&queue, 3), [""; 0]);
    }

    /// The accounts of the jobs that a lane gets.
    fn accounts(queue: &Queue, lane: usize, keeps: bool) -> Vec<u128> {
        let Taken::Jobs(jobs) = queue.take(lane, MAX_WAITING, SOON, keeps) else {
            return Vec::new();
        };
        let account = |job: &WriteJob| job.action.command.account().map(|id| id.0.as_u128());
        jobs.iter().filter_map(account).collect()
    }

    fn push_all(queue: &Queue, accounts: &[u128]) {
        for number in accounts {
            queue.push(of_account(*number));
        }
    }

    #[test]
    fn an_account_is_in_one_batch_at_a_time() {
        let queue = Queue::new(3);
        push_all(&queue, &[1, 2, 4, 7, 2]);
        assert_eq!(accounts(&queue, 0, false), [1, 4, 7, 2, 2], "one batch while none is large");
        push_all(&queue, &[[1, 2, 3].as_slice(), &[6; LARGE_BATCH]].concat());
        let beside = accounts(&queue, 1, false);
        assert_eq!(beside, [[3].as_slice(), &[6; LARGE_BATCH]].concat(), "of the only free group");
        assert_eq!(accounts(&queue, 2, false), [0; 0]);
        assert_eq!(accounts(&queue, 0, true), [0; 0], "two are no large batch beside another");
        assert_eq!(accounts(&queue, 1, false), [0; 0]);
        assert_eq!(accounts(&queue, 0, true), [1, 2], "what it keeps, it may take");
        push_all(&queue, &[1, 2]);
        assert_eq!(accounts(&queue, 2, false), [0; 0], "the first lane still has them");
        assert_eq!(accounts(&queue, 0, false), [1, 2]);
    }

    #[test]
    fn a_small_batch_waits_for_another_one_for_a_while() {
        let queue = Queue::new(2);
        push_all(&queue, &[1]);
        assert_eq!(accounts(&queue, 0, false), [1]);
        push_all(&queue, &[2]);
        let Taken::Jobs(jobs) = queue.take(1, 9, 10 * BESIDE, false) else { panic!("none") };
        assert_eq!(jobs.len(), 1);
    }

    #[test]
    fn groups_beyond_a_large_batch_are_left_to_other_lanes() {
        let queue = Queue::new(2);
        push_all(&queue, &[[1; LARGE_BATCH], [2; LARGE_BATCH]].concat());
        push_all(&queue, &[2]);
        assert_eq!(accounts(&queue, 0, false), [2; LARGE_BATCH + 1]);
        assert_eq!(accounts(&queue, 1, false), [1; LARGE_BATCH]);
    }

    #[test]
    fn a_full_queue_accepts_only_ends_of_attempts() {
        let queue = Queue::new(1);
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
        let queue = Queue::new(1);
        queue.push(recover());
        queue.close();
        assert!(matches!(queue.take(0, 1, SOON, false), Taken::Jobs(_)));
        assert!(matches!(queue.take(0, 1, SOON, false), Taken::Closed));
    }
}
