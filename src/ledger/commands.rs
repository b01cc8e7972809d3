//! Everything that may change money or request state, as plain data, with its possible outcomes.

use super::admission_rate::AdmissionRate;
use super::amounts::{BucketAmounts, Microcredits, Prices, Usage};
use super::budgets::{
    BudgetAlert, BudgetOwner, BudgetPeriod, LimitReached, SpendingLimit, TokenQuotas,
};
use super::records::{
    AccountStatus, Bucket, Credential, FailureCode, FinishReason, RequestKey, RequestRecord,
};
use cresset_base::{
    AccountId, ApplicationId, AttemptId, BootId, CredentialId, ModelId, SessionId, UnixMillis,
};
use uuid::Uuid;

#[derive(Clone, Debug)]
pub enum Command {
    /// Creates the account and grants its opening balances, or does neither. The same account twice
    /// is one account; another name, plan or opening balance under a used id is refused.
    CreateAccount {
        id: AccountId,
        name: String,
        plan: String,
        opening: BucketAmounts,
    },
    ChangeAccount {
        id: AccountId,
        change: AccountChange,
    },
    /// Limits what an account or a key may spend in each day or month; `None` ends the limit.
    SetBudget {
        owner: BudgetOwner,
        period: BudgetPeriod,
        limit: Option<SpendingLimit>,
    },
    SetAccountStatus {
        id: AccountId,
        status: AccountStatus,
    },
    CreateApplication {
        id: ApplicationId,
        account: AccountId,
        name: String,
    },
    /// `created_at` is overwritten with the command's time.
    IssueCredential {
        credential: Credential,
    },
    RevokeCredential {
        id: CredentialId,
    },
    /// Lets the credential end at this time, if it does not end earlier.
    ExpireCredential {
        id: CredentialId,
        at: UnixMillis,
    },
    /// Idempotent by (account, reference): the same grant twice is one grant; another amount under
    /// a used reference is refused.
    Grant {
        account: AccountId,
        bucket: Bucket,
        units: Microcredits,
        reference: String,
    },
    /// Takes from what is not reserved. Idempotent as a grant; a reference serves one of either.
    Debit {
        account: AccountId,
        bucket: Bucket,
        units: Microcredits,
        reference: String,
    },
    Admit(Box<Admit>),
    /// queued → running. The engine does not wait for it; `AlreadyResolved` when the attempt ended
    /// meanwhile.
    Start {
        key: RequestKey,
        attempt: AttemptId,
    },
    /// Ends with a charge: completed, or ended by the client, or by its format, while running.
    Settle {
        key: RequestKey,
        attempt: AttemptId,
        usage: Usage,
        end: SettleEnd,
    },
    /// Ends without a charge: failed on the node's side, or cancelled before anything ran.
    Release {
        key: RequestKey,
        attempt: AttemptId,
        cause: ReleaseCause,
    },
    /// Sets the flag; the lifecycle task stops the request. Changes nothing if the request has
    /// ended.
    RequestCancel {
        key: RequestKey,
    },
    /// Releases up to `limit` reservations of boots other than `boot` as failed/node_restarted.
    Recover {
        boot: BootId,
        limit: usize,
        crash_block_ms: u64,
    },
    /// Takes back a crash that was counted for this boot, which did not crash: other nodes only did
    /// not hear of it.
    TakeBackCrash {
        account: AccountId,
        fingerprint: [u8; 32],
        boot: BootId,
    },
    /// Forgets the crashes in which this input was running.
    ForgetCrashes {
        account: AccountId,
        fingerprint: [u8; 32],
    },
}

impl Command {
    /// The account that the command names. None of one that names a credential, or that is about
    /// all accounts.
    pub fn account(&self) -> Option<AccountId> {
        match self {
            Self::Admit(admit) => Some(admit.key.account),
            Self::Start { key, .. }
            | Self::Settle { key, .. }
            | Self::Release { key, .. }
            | Self::RequestCancel { key } => Some(key.account),
            Self::CreateAccount { id, .. }
            | Self::ChangeAccount { id, .. }
            | Self::SetAccountStatus { id, .. }
            | Self::SetBudget { owner: BudgetOwner::Account(id), .. } => Some(*id),
            Self::CreateApplication { account, .. }
            | Self::Grant { account, .. }
            | Self::Debit { account, .. }
            | Self::TakeBackCrash { account, .. }
            | Self::ForgetCrashes { account, .. } => Some(*account),
            Self::IssueCredential { credential } => Some(credential.account),
            Self::SetBudget { owner: BudgetOwner::Key(_), .. }
            | Self::RevokeCredential { .. }
            | Self::ExpireCredential { .. }
            | Self::Recover { .. } => None,
        }
    }
}

/// What an account gets; `None` leaves a part as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccountChange {
    pub name: Option<String>,
    pub plan: Option<String>,
    /// An empty note removes the one there is.
    pub note: Option<String>,
    pub stores_answers: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettleEnd {
    Completed(FinishReason),
    Cancelled,
    /// Failed by the format that the client asked for.
    FormatTooCostly,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseCause {
    Failed(FailureCode),
    /// The node refused the attempt itself, before anything of it ran: while it waited, or because
    /// its admission was never acknowledged. A request whose only attempt this is, is forgotten, as
    /// every refused admission is.
    TurnedAway(FailureCode),
    CancelledInQueue,
}

/// One admission: the decision and the reservation, in one transaction.
#[derive(Clone, Debug)]
pub struct Admit {
    pub key: RequestKey,
    pub credential: CredentialId,
    /// Id for the attempt, if one is created.
    pub attempt: AttemptId,
    pub boot: BootId,
    pub fingerprint: [u8; 32],
    pub session: SessionId,
    pub model: ModelId,
    pub stream: bool,
    pub prompt_tokens: u32,
    pub max_output_tokens: u32,
    pub prices: Prices,
    /// The number of open reservations that the account's plan allows.
    pub max_concurrent: u32,
    /// The tokens that the account's plan allows.
    pub quotas: TokenQuotas,
    /// The admissions that the account's plan allows. Only a ledger that nodes share counts them.
    pub rate: AdmissionRate,
    /// Milliseconds after its end during which a request is answered. Later only its id is known.
    pub retention_ms: u64,
    /// Milliseconds after its last crash during which an input that was running in two is refused.
    pub crash_block_ms: u64,
}

impl Admit {
    /// The first attempt of a streamed request of one prompt token and one output token, at a price
    /// of one, for an account whose plan has no limits. For measurements and tests.
    pub fn unlimited(key: RequestKey, credential: CredentialId, boot: BootId) -> Self {
        Self {
            key,
            credential,
            attempt: AttemptId::generate(),
            boot,
            fingerprint: [1; 32],
            session: SessionId(Uuid::nil()),
            model: ModelId(Uuid::nil()),
            stream: true,
            prompt_tokens: 1,
            max_output_tokens: 1,
            prices: Prices { revision: 1, input: 1, cached_input: 1, output: 1 },
            max_concurrent: u32::MAX,
            quotas: TokenQuotas::default(),
            rate: AdmissionRate::default(),
            retention_ms: u64::MAX,
            crash_block_ms: u64::MAX,
        }
    }
}

#[derive(Clone, Debug)]
pub enum Outcome {
    /// The command was done.
    Done,
    /// The same command was done before; nothing was written.
    Repeated,
    /// A new attempt holds its reservation.
    Admitted(RequestRecord),
    /// The same id and fingerprint were seen before: attach, replay or report by the record's
    /// latest attempt.
    Existing(RequestRecord),
    /// The request after the command.
    Request(RequestRecord),
    /// The request after its settlement, and the budgets that operators are told of.
    Settled {
        record: RequestRecord,
        alerts: Vec<BudgetAlert>,
    },
    /// The attempt had ended already; nothing was written.
    AlreadyResolved(RequestRecord),
    Recovered {
        released: usize,
        remaining: bool,
    },
}

/// A command that was refused and wrote nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("no such account")]
    AccountNotFound,
    #[error("no such application")]
    ApplicationNotFound,
    #[error("no such credential")]
    CredentialNotFound,
    #[error("no such request")]
    RequestNotFound,
    #[error("the id is taken")]
    IdTaken,
    #[error("the credential is revoked, expired or its account suspended")]
    CredentialInvalid,
    #[error("the request id was used with another input")]
    FingerprintMismatch,
    #[error("the request's result has expired")]
    ResultExpired,
    #[error("no further attempt is allowed for this request")]
    AttemptsExhausted,
    #[error("the request's format cost more than it may")]
    FormatTooCostly,
    #[error("{limit} requests of this account are in flight already")]
    ConcurrencyLimit { limit: u32 },
    #[error(transparent)]
    LimitReached(LimitReached),
    #[error("more requests a minute than the account's plan allows")]
    RateReached { rate: AdmissionRate, retry_after_ms: u64 },
    #[error("a balance of {available} does not cover a reservation of {needed} microcredits")]
    InsufficientCredits { needed: Microcredits, available: Microcredits },
    #[error(
        "a balance of {available} covers a reservation of {needed} microcredits only once open reservations settle"
    )]
    CreditsReserved { needed: Microcredits, available: Microcredits },
    #[error("the reference was used for another grant or debit")]
    ReferenceReused,
    #[error("{available} microcredits of this kind are not reserved, too few for {needed}")]
    DebitTooLarge { needed: Microcredits, available: Microcredits },
    #[error("the amount would pass the largest representable balance")]
    AmountOverflow,
}
