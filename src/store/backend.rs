//! The seam between the ledger's policy and the place where the ledger is kept.
//!
//! The policy decides which commands wait, what becomes one batch, what callers are told, what is
//! repeated after a failure, and when the ledger is audited and swept. A backend keeps the rows.
//! `embedded` are two files of this machine; a backend in a database is a crate of its own, which
//! supplies a `DatabasePlace`.
//!
//! # What every backend promises
//!
//! 1. **Changes of an account have one order.** Each command of a batch sees what every committed
//!    batch and every earlier command of its own batch left. One thread of a node calls
//!    `Backend::transact` for each lane, and all commands that name an account come through one
//!    lane. Where there are several lanes, or several nodes share a backend, it must keep two
//!    batches from changing one account at once, and it runs a batch that lost such a race again.
//! 2. **Chains have no gaps.** `LedgerState::head(account)` is the end of the journal chain that
//!    the account's entries belong to, entries of the running transaction included. A second entry
//!    with the same chain and sequence cannot be stored. The embedded backend has one chain for all
//!    accounts; another may have one for each.
//! 3. **Acknowledged means durable.** `transact` returns `Ok` only when the whole batch outlives a
//!    loss of power, and of the primary where there are replicas. Rows, journal and indexes of a
//!    batch become visible together.
//! 4. **Doubt is reported.** Where a commit may or may not have happened, `transact` returns
//!    `BatchFailure::InDoubt`. The batch is then there as a whole or not at all, and which of the
//!    two is settled when `reopen` returns: it may not become visible later. Commands are
//!    idempotent, so callers may send theirs again.
//! 5. **A body is durable before its settlement.** Bodies among the actions of a batch are durable
//!    no later than its commands. Bodies whose settlement never came are not stored, or removed by
//!    `claim`.
//! 6. **Ended requests are found in the order of their ends.** `sweep` forgets the oldest first. It
//!    may move them into an archive before: a request's copy there is durable before the original
//!    goes, and a request that lives again or ended again is not moved by its earlier end.
//! 7. **Reads see what was acknowledged.** A snapshot taken after an acknowledgement contains it.
//!    All answers of one snapshot come from one committed state. Reads and the writer never wait
//!    for each other.
//! 8. **Damage is an error.** A row that is not what was written is `StateError::Corrupt`, in reads
//!    as in transactions, and never an absent row.
//! 9. **A lost backend answers `Unavailable`,** or reads from the last committed state, until
//!    `reopen` succeeds. It never answers that a row does not exist because it could not be looked
//!    up.
//! 10. **Time does not go back.** `LedgerTxn::time_of` is never before the time that the policy
//!     gave, nor before any time stored in the chain that the command writes to. Only an operator
//!     sets it back, through `Backend::set_time`, and audits know where.
//! 11. **Only ended processes are foreign.** `LedgerState::foreign_reservations(boot)` returns
//!     reservations of processes that have ended for certain, or were declared ended and can admit
//!     nothing more. The embedded backend locks its folder, so every other boot has ended.

use super::StoreResult;
use super::cluster::{ListedNode, NodeFacts, ReleasePrices};
use super::limits::Limits;
pub(crate) use super::queue::WriteAction;
use super::scope::BackupScope;
use super::stored_body::StoredBody;
use cresset_base::{AccountId, ApplicationId, BootId, CredentialId, RequestId, UnixMillis};
use cresset_ledger::audit::{AuditPace, AuditSource, JournalHeads, RowIter};
use cresset_ledger::{
    Account, Application, Balances, Command, Crashes, Credential, JournalEntry, LedgerState,
    RequestKey, RequestRecord, StateError, StateResult,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;
use uuid::Uuid;

/// The answer to a read. The embedded backend has it ready at once.
pub type ReadFuture<'a, T> = Pin<Box<dyn Future<Output = StoreResult<T>> + Send + 'a>>;

/// One consistent reading of the ledger: all answers come from the state at which it was taken.
pub trait Snapshot: Send + Sync {
    fn account(&self, id: AccountId) -> ReadFuture<'_, Option<Account>>;
    /// Up to `limit` accounts after the id `after`, ordered by id.
    fn accounts(&self, after: Option<AccountId>, limit: usize) -> ReadFuture<'_, Vec<Account>>;
    /// The account's balances; zero for an account that never had any.
    fn balances(&self, id: AccountId) -> ReadFuture<'_, Balances>;
    fn credential(&self, id: CredentialId) -> ReadFuture<'_, Option<Credential>>;
    /// Up to `limit` credentials of both kinds and all accounts after the id `after`, ordered by
    /// id, revoked and expired ones included.
    fn credentials(
        &self,
        after: Option<CredentialId>,
        limit: usize,
    ) -> ReadFuture<'_, Vec<Credential>>;
    fn application(&self, id: ApplicationId) -> ReadFuture<'_, Option<Application>>;
    /// Up to `limit` applications of all accounts after the id `after`, ordered by id.
    fn applications(
        &self,
        after: Option<ApplicationId>,
        limit: usize,
    ) -> ReadFuture<'_, Vec<Application>>;
    /// The request, whether it is live, recent or archived.
    fn request(&self, key: &RequestKey) -> ReadFuture<'_, Option<RequestRecord>>;
    /// All of an account's requests with this id, in every scope: an account's keys may read the
    /// requests of its applications.
    fn requests_by_id(
        &self,
        account: AccountId,
        request: RequestId,
    ) -> ReadFuture<'_, Vec<RequestRecord>>;
    /// Every queued and running request.
    fn live_requests(&self) -> ReadFuture<'_, Vec<RequestRecord>>;
    /// The crashes during which an input of this account was running.
    fn crashes(
        &self,
        account: AccountId,
        fingerprint: &[u8; 32],
    ) -> ReadFuture<'_, Option<Crashes>>;
    /// Up to `limit` journal entries of an account after the sequence `after`, the oldest first.
    fn entries(
        &self,
        account: AccountId,
        after: u64,
        limit: usize,
    ) -> ReadFuture<'_, Vec<JournalEntry>>;
    /// A sequence that no entry of the account has passed yet, for lists of what comes later.
    fn last_sequence(&self, account: AccountId) -> ReadFuture<'_, u64>;
    /// Bytes that the account's stored answers take, expired ones that no sweep has removed yet
    /// included.
    fn answer_bytes(&self, account: AccountId) -> ReadFuture<'_, u64>;
}

/// The reads that every handle of the store may ask of a backend.
pub trait LedgerReader: Send + Sync + 'static {
    fn snapshot(&self) -> ReadFuture<'_, Box<dyn Snapshot>>;

    /// The credential with this digest and its account, from one state. Every request begins with
    /// this look-up, so it is one call: a backend with a network in between may answer many at
    /// once.
    fn credential_and_account(
        &self,
        digest: &[u8; 32],
    ) -> ReadFuture<'_, Option<(Credential, Account)>>;

    /// The stored answer of a request, unless it has expired at `now`.
    fn body(&self, key: &RequestKey, now: UnixMillis) -> ReadFuture<'_, Option<StoredBody>>;

    /// A consistent reading for an audit. It blocks, and so does everything read from it.
    fn audit_source(&self) -> StoreResult<Box<dyn AuditSource + '_>>;

    /// Copies an old part of the journal that the seal covers to where it never changes again; the
    /// next sweep makes it count. False when no part is due. It blocks.
    fn close_journal_part(&self, pace: AuditPace<'_>) -> StoreResult<bool>;

    /// Writes a consistent, verified copy of the ledger, and of what else `scope` names, to a new
    /// file `to`. On the ledger's own disk `keep_free` bytes stay free. It blocks.
    fn backup(&self, scope: &BackupScope, to: &Path, keep_free: u64) -> StoreResult;

    /// Removes stored answers of an account, or of its requests with one id, durably; a bounded
    /// number, which it returns. It blocks.
    fn erase_answers(&self, account: AccountId, request: Option<RequestId>) -> StoreResult<u64>;

    /// Free bytes where the ledger is kept; `None` where that cannot be told.
    fn free_bytes(&self) -> Option<u64>;

    /// Bytes that the files take, by what they hold: `ledger`, `answers`, `journal` (its closed
    /// parts).
    fn file_bytes(&self) -> BTreeMap<&'static str, u64>;

    /// How often to look for what other nodes did; `None` where there are none.
    fn look_interval(&self) -> Option<Duration> {
        None
    }

    /// The nodes that share the ledger. Of one that is no node's but this one's: none.
    fn nodes(&self) -> ReadFuture<'_, Vec<ListedNode>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    /// Changes what this node says of itself to those that share the ledger, which they see after
    /// its next renewal.
    fn tell(&self, _change: &mut dyn FnMut(&mut NodeFacts)) {}

    /// Whether another node that shares the ledger holds its lease, as the last renewal saw it.
    fn is_alive(&self, _node: Uuid) -> bool {
        false
    }

    /// Tells the nodes that share the ledger what this one charges now. Returns how their prices
    /// differ from these, one sentence for each release of each node.
    fn tell_prices(&self, _prices: BTreeMap<String, ReleasePrices>) -> ReadFuture<'_, Vec<String>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    /// Whether what was opened is still found where it was: a ledger that was removed or replaced
    /// loses all that is written from then on.
    fn is_in_place(&self) -> bool;
}

/// The rows as one transaction sees and changes them, and its time.
pub trait LedgerTxn: LedgerState {
    /// The time at which to apply `command`; see the tenth promise.
    fn time_of(&self, command: &Command) -> UnixMillis;

    /// Whether another transaction has the account of `command`, which is left for a later batch
    /// then. One that was put off before is not put off again.
    fn puts_off(&self, _command: &Command) -> bool {
        false
    }

    /// Why this transaction may admit no request of this boot, although the ledger works.
    fn admission_block(&self, boot: BootId) -> Option<&'static str>;
}

/// A place where a ledger is kept. Only the writer's threads call these methods, and all but
/// `transact` only the thread of the first lane.
pub trait Backend: LedgerReader {
    /// Whether several nodes may use it at once. A short command then only reads and writes:
    /// claims, recoveries and audits are the nodes' affair.
    const IS_SHARED: bool;

    type Txn<'t>: LedgerTxn
    where
        Self: 't;

    /// How many batches, each of other accounts, may be committed at once.
    fn lanes(&self) -> usize {
        1
    }

    /// Whether the process that used the ledger last did not `close` it.
    fn was_left_open(&self) -> StateResult<bool>;

    /// What audits had found sound when the seal was written last; `None` when there is no seal.
    fn seal(&self) -> StateResult<Option<Seal>>;

    /// Writes the seal durably, or removes it.
    fn set_seal(&self, seal: Option<&Seal>) -> StateResult;

    /// The latest time stored; 0 in a new ledger.
    fn stored_time(&self) -> StateResult<UnixMillis>;

    /// Makes `now` the latest time stored, also where that sets the time back, which is recorded
    /// for audits. No attempt may be open.
    fn set_time(&self, now: UnixMillis) -> StateResult;

    /// Records that this process uses the ledger, and removes the bodies of requests that hold a
    /// reservation of a process that ended.
    fn claim(&self, boot: BootId) -> StoreResult;

    /// Records for all nodes that a rule of the ledger was found broken.
    fn record_violation(&self, _why: &str) -> StateResult {
        Ok(())
    }

    /// What `record_violation` recorded, unless a start has found everything sound since.
    fn recorded_violation(&self) -> StateResult<Option<String>> {
        Ok(None)
    }

    /// What the other nodes of a shared ledger did since the last call.
    fn other_nodes(&self) -> OtherNodes {
        OtherNodes::default()
    }

    /// Stores the bodies among `actions` and runs `run` as one transaction, which is committed when
    /// `run` returns `Ok` and abandoned otherwise. `lane` is below `lanes()`. `now` is the policy's
    /// clock. `run` may be called again where a batch lost a race against another one; its last
    /// result counts.
    fn transact<T>(
        &self,
        lane: usize,
        actions: &[&WriteAction],
        now: UnixMillis,
        run: impl FnMut(&mut Self::Txn<'_>) -> Result<T, BatchFailure>,
    ) -> Result<T, BatchFailure>;

    /// One pass over what is past its time at `now`: expired bodies are deleted, ended requests
    /// archived, and archived ones forgotten in the end. The journal stays. True when more is due.
    fn sweep(&self, now: UnixMillis, limits: &Limits) -> StateResult<bool>;

    /// Whether opening again can succeed now. As long as it cannot, reads go on as before.
    fn can_reopen(&self) -> bool;

    /// Replaces a handle that failed by a new one, which serves reads once `check` has accepted it.
    fn reopen(&self, check: impl FnOnce(&dyn AuditSource) -> StoreResult) -> StoreResult;

    /// Ends the use of the ledger. `clean` records that nothing was left unwritten.
    fn close(&self, boot: BootId, clean: bool) -> StateResult;
}

/// Everything that a ledger holds, for a move into another backend.
pub trait MoveSource: AuditSource {
    /// The process that used the ledger last; `None` where none has.
    fn last_boot(&self) -> StateResult<Option<BootId>>;
    fn crashes(&self) -> RowIter<'_, (AccountId, [u8; 32], Crashes)>;
    /// Stored answers, also those that have expired.
    fn bodies(&self) -> RowIter<'_, (RequestKey, StoredBody)>;
}

/// What other nodes that share the ledger did.
#[derive(Debug, Default)]
pub struct OtherNodes {
    /// Some have ended and left reservations, which are to be released.
    pub left_behind: bool,
    /// One of them has declared this node ended.
    pub have_ended_this: bool,
    /// Why one of them found the ledger broken.
    pub distrust: Option<String>,
    /// One of them deletes what is past its time and audits, so that this node need not.
    pub do_the_maintenance: bool,
}

/// What audits found sound. A start trusts the journal up to these heads and reads what came after
/// them; a ledger without a seal is audited as a whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Seal {
    pub heads: JournalHeads,
    /// The time of the last audit of everything; 0 when one is owed, because the last stop was not
    /// orderly.
    pub fully_audited_at: UnixMillis,
}

/// Why a batch was not committed, or may not have been.
#[derive(Debug)]
pub enum BatchFailure {
    /// The action at this index found a damaged row, and nothing was written. Without that action
    /// the others can be applied.
    Damaged(usize, StateError),
    /// The batch may be durable or not. The backend must not be written to until it was reopened.
    InDoubt(String),
}

impl From<StateError> for BatchFailure {
    fn from(error: StateError) -> Self {
        Self::InDoubt(error.to_string())
    }
}
