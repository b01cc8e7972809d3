//! The layout of the rows that every backend stores, and of their keys. A change of a row is a new
//! row version with a reader for the old one. A row's checksum covers its key. Numbers in keys are
//! big-endian, so the order of the keys is the order of what they name.

use super::codec::{Malformed, Reader, StoredField, codes, wrapper};
use crate::row;
use crate::stored_body::{StoredBody, StoredContent};
use cresset_base::{
    AccountId, ApplicationId, AttemptId, BootId, CredentialId, ModelId, RequestId, SessionId,
    UnixMillis,
};
use cresset_ledger::{
    Account, AccountStatus, Adjustment, Application, AskedGeneration, Attempt, AttemptState,
    Balance, Balances, Bucket, BucketAmounts, Budgets, CalendarUse, Consumption, Crashes,
    Credential, CredentialKind, EntryKind, FailureCode, FinishReason, JournalEntry, JournalHead,
    Microcredits, PeriodUse, PeriodUses, Prices, ReceiptFacts, ReceiptProof, RequestKey,
    RequestRecord, Reservation, SamplingValue, SpendingLimit, Usage,
};
use std::sync::Arc;
use uuid::Uuid;

wrapper!(
    AccountId,
    ApplicationId,
    AttemptId,
    BootId,
    CredentialId,
    ModelId,
    RequestId,
    SessionId,
    UnixMillis,
);

impl StoredField for Microcredits {
    fn write(&self, out: &mut Vec<u8>) {
        self.get().write(out);
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        Self::new(u64::read(input)?).ok_or(Malformed("amount out of range"))
    }
}

row!(JournalHead { sequence, hash });

codes!(AccountStatus { 0 => Active, 1 => Suspended });
codes!(Bucket { 0 => Trial, 1 => Premium });
codes!(CredentialKind { 0 => ApiKey, 1 => AccessToken });
codes!(AttemptState { 0 => Queued, 1 => Running, 2 => Completed, 3 => Cancelled, 4 => Failed });
codes!(FinishReason { 0 => Stop, 1 => Length, 2 => ToolCalls });
codes!(FailureCode {
    0 => GenerationFailed,
    1 => NodeRestarted,
    2 => DeadlineExceeded,
    3 => Overloaded,
    4 => Draining,
    5 => ControlPlaneUnavailable,
    6 => FormatTooCostly,
});

row!(BucketAmounts { trial, premium });
row!(Prices { revision, input, cached_input, output });
row!(Usage { prompt_tokens, cached_tokens, completion_tokens });
row!(SpendingLimit { units, alert_percent });
row!(Budgets { day, month });
row!(Consumption { units, tokens });
row!(PeriodUse { number, reserved, spent });
row!(PeriodUses { latest, forgotten, uses });
row!(Account {
    id,
    name,
    plan,
    status,
    created_at,
    in_flight,
    note,
    stores_answers,
    budgets,
    used
} version 2);
row!(Balance { credited, debited, reserved });
row!(Balances { trial, premium });
row!(Application { id, account, name, created_at });
row!(Credential {
    id,
    kind,
    account,
    application,
    label,
    digest,
    hint,
    created_at,
    expires_at,
    revoked_at,
    budgets,
    used
} version 2);
row!(Adjustment { bucket, units, is_debit });
row!(RequestKey { account, application, request });
row!(Attempt {
    id,
    number,
    retry_of,
    credential,
    boot,
    state,
    failure,
    finish_reason,
    cancel_requested,
    prices,
    reserved,
    charged,
    usage,
    created_at,
    started_at,
    finished_at
});
row!(Reservation { key, attempt, boot, amount, tokens });
row!(Crashes { count, boot, at });
row!(JournalEntry { sequence, at, account, kind, amount, after, hash });

row!(ReceiptProof { record, grade, like, release, files, version, executable, lockfile });
row!(SamplingValue { name, bits });
row!(AskedGeneration { prompt, seed, sampling, max_tokens, min_tokens, ignore_eos });
row!(ReceiptFacts { proof, asked, answer_tokens, answer_text });

impl StoredField for CalendarUse {
    fn write(&self, out: &mut Vec<u8>) {
        self.day.write(out);
        self.month.write(out);
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        let read = if input.row_version() == 1 { first_uses } else { PeriodUses::read };
        Ok(Self { day: read(input)?, month: read(input)? })
    }
}

/// Rows of version 1 have the use of the last admission's period alone.
fn first_uses(input: &mut Reader<'_>) -> Result<PeriodUses, Malformed> {
    let used = PeriodUse::read(input)?;
    let uses = Some(used).filter(|used| used.number > 0).into_iter().collect();
    Ok(PeriodUses { latest: used.number, forgotten: used.number, uses })
}

impl StoredField for StoredBody {
    fn write(&self, out: &mut Vec<u8>) {
        let (plain_bytes, bytes) = match &self.content {
            StoredContent::Plain(bytes) => (None, bytes),
            StoredContent::Deflated { plain_bytes, bytes } => (Some(*plain_bytes), bytes),
        };
        self.expires_at.write(out);
        plain_bytes.write(out);
        bytes.write(out);
        self.receipt.write(out);
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        let expires_at = StoredField::read(input)?;
        let plain_bytes = StoredField::read(input)?;
        let bytes = StoredField::read(input)?;
        let content = match plain_bytes {
            None => StoredContent::Plain(bytes),
            Some(plain_bytes) => StoredContent::Deflated { plain_bytes, bytes },
        };
        Ok(Self { expires_at, content, receipt: StoredField::read(input)? })
    }
}

impl<T: StoredField> StoredField for Arc<T> {
    fn write(&self, out: &mut Vec<u8>) {
        self.as_ref().write(out);
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        T::read(input).map(Self::new)
    }
}

impl StoredField for RequestRecord {
    fn write(&self, out: &mut Vec<u8>) {
        self.key.write(out);
        self.fingerprint.write(out);
        self.session.write(out);
        self.model.write(out);
        self.stream.write(out);
        self.attempts.write(out);
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        let record = Self {
            key: StoredField::read(input)?,
            fingerprint: StoredField::read(input)?,
            session: StoredField::read(input)?,
            model: StoredField::read(input)?,
            stream: StoredField::read(input)?,
            attempts: StoredField::read(input)?,
        };
        let started = !record.attempts.is_empty();
        started.then_some(record).ok_or(Malformed("request without attempts"))
    }
}

impl StoredField for EntryKind {
    fn write(&self, out: &mut Vec<u8>) {
        let (code, key, attempt) = match self {
            Self::Grant { reference } => {
                out.push(0);
                return reference.write(out);
            }
            Self::Debit { reference } => {
                out.push(4);
                return reference.write(out);
            }
            Self::Reserve { key, attempt } => (1, key, attempt),
            Self::Settle { key, attempt } => (2, key, attempt),
            Self::Release { key, attempt } => (3, key, attempt),
        };
        out.push(code);
        key.write(out);
        attempt.write(out);
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        let code = u8::read(input)?;
        if code == 0 || code == 4 {
            let reference = StoredField::read(input)?;
            return Ok(if code == 0 {
                Self::Grant { reference }
            } else {
                Self::Debit { reference }
            });
        }
        let (key, attempt) = (StoredField::read(input)?, StoredField::read(input)?);
        match code {
            1 => Ok(Self::Reserve { key, attempt }),
            2 => Ok(Self::Settle { key, attempt }),
            3 => Ok(Self::Release { key, attempt }),
            _ => Err(Malformed("unknown entry kind")),
        }
    }
}

/// Account, request, then scope: all scopes of an id lie together.
pub fn request_key(key: &RequestKey) -> Vec<u8> {
    let mut bytes = request_prefix(key.account, key.request);
    key.application.write(&mut bytes);
    bytes
}

/// The request whose key this is.
pub(super) fn request_of(key: &[u8]) -> Option<RequestKey> {
    let (account, rest) = key.split_first_chunk()?;
    let (request, scope) = rest.split_first_chunk()?;
    let application = match scope {
        [0] => None,
        [1, id @ ..] => Some(ApplicationId(Uuid::from_slice(id).ok()?)),
        _ => return None,
    };
    let [account, request] = [account, request].map(|id| Uuid::from_bytes(*id));
    Some(RequestKey { account: AccountId(account), application, request: RequestId(request) })
}

pub(super) fn request_prefix(account: AccountId, request: RequestId) -> Vec<u8> {
    [account.0.into_bytes(), request.0.into_bytes()].concat()
}

pub fn grant_key(account: AccountId, reference: &str) -> Vec<u8> {
    [account.0.as_bytes(), reference.as_bytes()].concat()
}

pub fn crash_key(account: AccountId, fingerprint: &[u8; 32]) -> Vec<u8> {
    [account.0.as_bytes().as_slice(), fingerprint].concat()
}

/// The account and the fingerprint of which this is the key.
pub(super) fn input_of(key: &[u8]) -> Option<(AccountId, [u8; 32])> {
    let (account, fingerprint) = key.split_first_chunk()?;
    Some((AccountId(Uuid::from_bytes(*account)), fingerprint.try_into().ok()?))
}

pub fn entry_key(account: AccountId, sequence: u64) -> Vec<u8> {
    [account.0.as_bytes().as_slice(), &sequence.to_be_bytes()].concat()
}
