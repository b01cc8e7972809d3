//! The rows of the ledger, as plain data. The store decides how they are laid out on disk.

use super::amounts::{BucketAmounts, Microcredits, Prices, Usage};
use super::budgets::{Budgets, CalendarUse, Consumption};
use cresset_base::{
    AccountId, ApplicationId, AttemptId, BootId, CredentialId, ModelId, RequestId, SessionId,
    UnixMillis,
};
use serde::{Deserialize, Serialize};
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccountStatus {
    Active,
    Suspended,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    pub id: AccountId,
    pub name: String,
    /// Name of a plan in the configuration.
    pub plan: String,
    pub status: AccountStatus,
    pub created_at: UnixMillis,
    /// Number of open reservations; equals the number of queued and running attempts.
    pub in_flight: u32,
    /// What operators note about the account.
    pub note: Option<String>,
    /// Whether answers are stored for replay. Without it nothing of an answer is kept once its
    /// request has ended.
    pub stores_answers: bool,
    pub budgets: Budgets,
    /// The use of all the account's credentials together.
    pub used: CalendarUse,
}

impl Account {
    /// An active account, of which nothing else is known.
    pub fn new(id: AccountId, name: String, plan: String, created_at: UnixMillis) -> Self {
        Self {
            id,
            name,
            plan,
            status: AccountStatus::Active,
            created_at,
            in_flight: 0,
            note: None,
            stores_answers: true,
            budgets: Budgets::default(),
            used: CalendarUse::default(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bucket {
    Trial,
    Premium,
}

/// One bucket: `credited ≥ debited + reserved` always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balance {
    pub credited: Microcredits,
    pub debited: Microcredits,
    pub reserved: Microcredits,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balances {
    pub trial: Balance,
    pub premium: Balance,
}

impl Balance {
    /// The amount that may still be reserved. `None` when the bucket is overdrawn, which no rule
    /// allows.
    pub fn available(&self) -> Option<Microcredits> {
        self.unspent()?.checked_sub(self.reserved)
    }

    /// The amount that would be available if every reservation were released.
    pub fn unspent(&self) -> Option<Microcredits> {
        self.credited.checked_sub(self.debited)
    }
}

impl Balances {
    /// The amount that may still be reserved, per bucket; an overdrawn bucket offers nothing.
    pub fn available(&self) -> BucketAmounts {
        self.both(|bucket| bucket.available().unwrap_or_default())
    }

    /// The amount that would be available if every reservation were released, per bucket.
    pub fn unspent(&self) -> BucketAmounts {
        self.both(|bucket| bucket.unspent().unwrap_or_default())
    }

    pub fn reserved(&self) -> BucketAmounts {
        self.both(|bucket| bucket.reserved)
    }

    pub fn debited(&self) -> BucketAmounts {
        self.both(|bucket| bucket.debited)
    }

    pub fn credited(&self) -> BucketAmounts {
        self.both(|bucket| bucket.credited)
    }

    /// Returns the balances after a grant. `None` when both buckets together would pass
    /// `Microcredits::MAX`.
    pub fn credit(&self, amount: BucketAmounts) -> Option<Self> {
        let credited = self.credited().checked_add(amount)?;
        credited.checked_total()?;
        Some(Self::of(credited, self.debited(), self.reserved()))
    }

    /// Returns the balances after a reservation. `None` when the amounts overflow.
    pub fn reserve(&self, amount: BucketAmounts) -> Option<Self> {
        let reserved = self.reserved().checked_add(amount)?;
        Some(Self::of(self.credited(), self.debited(), reserved))
    }

    /// Returns the balances after a reservation's end: all of `reserved` is freed and `charged`
    /// debited. `None` when less was reserved.
    pub fn resolve(&self, reserved: BucketAmounts, charged: BucketAmounts) -> Option<Self> {
        let open = self.reserved().checked_sub(reserved)?;
        let debited = self.debited().checked_add(charged)?;
        Some(Self::of(self.credited(), debited, open))
    }

    /// What the account owns, microcredits; negative where it is overdrawn, which no rule allows.
    pub fn owned(&self) -> i128 {
        let sum =
            |units: BucketAmounts| i128::from(units.trial.get()) + i128::from(units.premium.get());
        sum(self.credited()) - sum(self.debited())
    }

    fn both(&self, part: impl Fn(&Balance) -> Microcredits) -> BucketAmounts {
        BucketAmounts { trial: part(&self.trial), premium: part(&self.premium) }
    }

    fn of(credited: BucketAmounts, debited: BucketAmounts, reserved: BucketAmounts) -> Self {
        Self {
            trial: Balance {
                credited: credited.trial,
                debited: debited.trial,
                reserved: reserved.trial,
            },
            premium: Balance {
                credited: credited.premium,
                debited: debited.premium,
                reserved: reserved.premium,
            },
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Application {
    pub id: ApplicationId,
    pub account: AccountId,
    pub name: String,
    pub created_at: UnixMillis,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CredentialKind {
    ApiKey,
    AccessToken,
}

#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    pub id: CredentialId,
    pub kind: CredentialKind,
    pub account: AccountId,
    /// Set exactly for access tokens.
    pub application: Option<ApplicationId>,
    pub label: Option<String>,
    /// SHA-256 of the whole secret.
    pub digest: [u8; 32],
    /// The secret's last four characters before its checksum, for listings.
    pub hint: String,
    pub created_at: UnixMillis,
    pub expires_at: Option<UnixMillis>,
    pub revoked_at: Option<UnixMillis>,
    pub budgets: Budgets,
    pub used: CalendarUse,
}

impl Credential {
    /// Whether the credential is valid for this account at `now`: it is the account's own, neither
    /// revoked nor expired, and the account is active.
    pub fn authorizes(&self, account: &Account, now: UnixMillis) -> bool {
        self.account == account.id
            && self.revoked_at.is_none()
            && self.expires_at.is_none_or(|end| now < end)
            && account.status == AccountStatus::Active
    }
}

/// Omits the digest, which must not reach a log either.
impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential")
            .field("id", &self.id)
            .field("kind", &self.kind)
            .field("account", &self.account)
            .field("application", &self.application)
            .finish_non_exhaustive()
    }
}

/// Attempts that a request may have, the first included.
const MAX_ATTEMPTS: usize = 3;

/// The key of a request: the same id under another account or application is another request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestKey {
    pub account: AccountId,
    /// `None` for requests made with an account API key.
    pub application: Option<ApplicationId>,
    pub request: RequestId,
}

impl fmt::Display for RequestKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {} of account {}", self.request, self.account)?;
        match self.application {
            Some(application) => write!(f, " and application {application}"),
            None => Ok(()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttemptState {
    Queued,
    Running,
    Completed,
    Cancelled,
    Failed,
}

impl AttemptState {
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Cancelled | Self::Failed)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    Stop,
    Length,
    ToolCalls,
}

/// Why an attempt failed, as clients may see it. All but `FormatTooCostly` are on the node's side,
/// and charge nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCode {
    GenerationFailed,
    NodeRestarted,
    DeadlineExceeded,
    Overloaded,
    Draining,
    ControlPlaneUnavailable,
    /// The format that the client asked for came to cost more than it may. What was computed is
    /// charged, and the request runs no more.
    FormatTooCostly,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    pub id: AttemptId,
    /// 1 for the first.
    pub number: u32,
    pub retry_of: Option<AttemptId>,
    pub credential: CredentialId,
    pub boot: BootId,
    pub state: AttemptState,
    pub failure: Option<FailureCode>,
    pub finish_reason: Option<FinishReason>,
    pub cancel_requested: bool,
    pub prices: Prices,
    /// The amount reserved at admission; it stays in the row after settlement.
    pub reserved: BucketAmounts,
    pub charged: BucketAmounts,
    pub usage: Option<Usage>,
    pub created_at: UnixMillis,
    pub started_at: Option<UnixMillis>,
    pub finished_at: Option<UnixMillis>,
}

impl Attempt {
    /// What was charged, and for how many tokens.
    pub fn consumption(&self) -> Consumption {
        let tokens = self
            .usage
            .map_or(0, |usage| u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens));
        Consumption { units: self.charged.total(), tokens }
    }

    /// Whether it failed for a reason that a client is not charged for.
    pub fn failed_on_the_node(&self) -> bool {
        self.state == AttemptState::Failed && self.failure != Some(FailureCode::FormatTooCostly)
    }

    /// Whether the node turned the attempt away after admission: it had no room, no time before a
    /// stop, or could not tell the ledger of the start.
    pub fn was_turned_away(&self) -> bool {
        match self.failure {
            Some(FailureCode::Overloaded | FailureCode::Draining) => true,
            Some(FailureCode::ControlPlaneUnavailable) => self.started_at.is_none(),
            _ => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestRecord {
    pub key: RequestKey,
    pub fingerprint: [u8; 32],
    pub session: SessionId,
    pub model: ModelId,
    pub stream: bool,
    /// Ordered by number; never empty. The last one gives the request's state.
    pub attempts: Vec<Attempt>,
}

impl RequestRecord {
    pub fn latest(&self) -> &Attempt {
        self.attempts.last().expect("invariant: a request has at least one attempt")
    }

    pub(super) fn latest_mut(&mut self) -> &mut Attempt {
        self.attempts.last_mut().expect("invariant: a request has at least one attempt")
    }

    /// Whether the node failed as often as a request may be tried. Refusals do not count as tries.
    pub fn is_exhausted(&self) -> bool {
        self.attempts.iter().filter(|attempt| !attempt.was_turned_away()).count() >= MAX_ATTEMPTS
    }

    pub fn attempt(&self, id: AttemptId) -> Option<&Attempt> {
        self.attempts.iter().find(|attempt| attempt.id == id)
    }
}

/// An entry of the journal: hash-chained, gap-free, never changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalEntry {
    pub sequence: u64,
    pub at: UnixMillis,
    pub account: AccountId,
    pub kind: EntryKind,
    pub amount: BucketAmounts,
    /// Balances after this entry.
    pub after: Balances,
    /// First 16 bytes of SHA-256 over the previous entry's hash and this entry's content.
    pub hash: [u8; 16],
}

impl JournalEntry {
    /// The request and the attempt for which this entry reserves; `None` for other entries.
    pub fn reservation(&self) -> Option<(RequestKey, AttemptId)> {
        match self.kind {
            EntryKind::Reserve { key, attempt } => Some((key, attempt)),
            _ => None,
        }
    }

    /// By how much the entry changed what the account owns, microcredits. What is reserved is its
    /// own. Statements add these up.
    pub fn change(&self) -> i128 {
        let amount = i128::from(self.amount.trial.get()) + i128::from(self.amount.premium.get());
        match self.kind {
            EntryKind::Grant { .. } => amount,
            EntryKind::Debit { .. } | EntryKind::Settle { .. } => -amount,
            EntryKind::Reserve { .. } | EntryKind::Release { .. } => 0,
        }
    }

    /// The request and the attempt that this entry charges; `None` for other entries.
    pub fn settlement(&self) -> Option<(RequestKey, AttemptId)> {
        match self.kind {
            EntryKind::Settle { key, attempt } => Some((key, attempt)),
            _ => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryKind {
    Grant {
        reference: String,
    },
    /// An operator took `amount`.
    Debit {
        reference: String,
    },
    Reserve {
        key: RequestKey,
        attempt: AttemptId,
    },
    /// Charges `amount` and frees the whole reservation.
    Settle {
        key: RequestKey,
        attempt: AttemptId,
    },
    /// Frees the whole reservation (`amount`) and charges nothing.
    Release {
        key: RequestKey,
        attempt: AttemptId,
    },
}
