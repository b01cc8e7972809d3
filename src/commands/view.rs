//! Renders the ledger's rows for operators as JSON: times in Unix seconds, amounts in microcredits
//! as integer strings.

use super::budgets;
use cresset_base::UnixMillis;
use cresset_ledger::{
    Account, Application, Attempt, Balances, Bucket, BucketAmounts, Crashes, Credential, EntryKind,
    JournalEntry, Microcredits, RequestRecord, TokenQuotas,
};
use cresset_request::{CreditBalance, RequestObject};
use cresset_store::{AuditReport, StoreStats};
use serde_json::{Value, json};

pub fn list(data: impl IntoIterator<Item = Value>) -> Value {
    json!({ "object": "list", "data": data.into_iter().collect::<Vec<_>>() })
}

/// What the ledger's files take, and what is free beside them.
pub(super) fn files(ledger: &StoreStats) -> Value {
    json!({ "file_bytes": ledger.file_bytes, "disk_free_bytes": ledger.free_bytes })
}

/// Merges two objects into one; the second wins where both have a field.
pub fn merged(mut first: Value, second: Value) -> Value {
    if let (Value::Object(fields), Value::Object(more)) = (&mut first, second) {
        fields.extend(more);
    }
    first
}

pub fn account(account: &Account, balances: Balances, now: UnixMillis) -> Value {
    let described = json!({
        "id": account.id,
        "name": account.name,
        "plan": account.plan,
        "status": account.status,
        "created_at": account.created_at.seconds(),
        "in_flight": account.in_flight,
        "note": account.note,
        "stores_answers": account.stores_answers,
        "budget_use": budgets::budget_use(&account.budgets, &account.used, now),
    });
    merged(described, amounts(balances))
}

/// The public balance object, with the account it belongs to.
pub fn credits(account: &Account, balances: Balances) -> Value {
    merged(balance(balances), json!({ "account_id": account.id }))
}

fn balance(balances: Balances) -> Value {
    json!(CreditBalance::of(&balances))
}

/// The amounts of the public balance object alone.
fn amounts(balances: Balances) -> Value {
    let Value::Object(mut fields) = balance(balances) else { return json!({}) };
    fields.retain(|name, _| name.ends_with("Units"));
    Value::Object(fields)
}

/// Everything but the secret, which is not stored.
pub fn credential(credential: &Credential, now: UnixMillis) -> Value {
    let Credential { budgets, used, .. } = credential;
    json!({
        "id": credential.id,
        "kind": credential.kind,
        "account_id": credential.account,
        "application_id": credential.application,
        "label": credential.label,
        "hint": credential.hint,
        "created_at": credential.created_at.seconds(),
        "expires_at": credential.expires_at.map(UnixMillis::seconds),
        "revoked_at": credential.revoked_at.map(UnixMillis::seconds),
        "last_used_on": used.last_day().map(|day| day.to_string()),
        "budget_use": budgets::budget_use(budgets, used, now),
        "spending": budgets::spending(budgets, used, TokenQuotas::default(), now),
    })
}

pub fn application(application: &Application, tokens: &[Credential], now: UnixMillis) -> Value {
    json!({
        "id": application.id,
        "account_id": application.account,
        "name": application.name,
        "created_at": application.created_at.seconds(),
        "tokens": tokens.iter().map(|token| credential(token, now)).collect::<Vec<_>>(),
    })
}

/// The public request object, then what only operators may see.
pub fn request(record: &RequestRecord) -> Value {
    let operator = json!({
        "account_id": record.key.account,
        "application_id": record.key.application,
        "stream": record.stream,
        "attempts": record.attempts.iter().map(attempt).collect::<Vec<_>>(),
    });
    merged(json!(RequestObject::of(record)), operator)
}

/// The crashes that an input was running in, and until when it is refused for them.
pub fn crashes(crashes: Option<Crashes>, block_ms: u64) -> Value {
    let blocked = crashes.filter(|crashes| crashes.count >= 2);
    let until = blocked.map(|crashes| crashes.at.0.saturating_add(block_ms) / 1_000);
    let count = crashes.map_or(0, |crashes| crashes.count);
    json!({ "input_crashes": count, "input_blocked_until_at": until })
}

fn attempt(attempt: &Attempt) -> Value {
    json!({
        "id": attempt.id,
        "number": attempt.number,
        "retry_of": attempt.retry_of,
        "state": attempt.state,
        "failure_code": attempt.failure,
        "finish_reason": attempt.finish_reason,
        "credential_id": attempt.credential,
        "boot_id": attempt.boot,
        "prices": attempt.prices,
        "usage": attempt.usage,
        "reserved": split(attempt.reserved),
        "charged": split(attempt.charged),
        "created_at": attempt.created_at.seconds(),
        "started_at": attempt.started_at.map(UnixMillis::seconds),
        "finished_at": attempt.finished_at.map(UnixMillis::seconds),
    })
}

/// `request` is the one that the entry charges, if the ledger still has it.
pub fn entry(entry: &JournalEntry, request: Option<&RequestRecord>) -> Value {
    let attempt = entry.settlement().and_then(|(_, attempt)| request?.attempt(attempt));
    let usage = attempt.and_then(|attempt| attempt.usage);
    let line = json!({
        "model": request.map(|request| request.model),
        "credential_id": attempt.map(|attempt| attempt.credential),
        "prompt_tokens": usage.map(|usage| usage.prompt_tokens),
        "completion_tokens": usage.map(|usage| usage.completion_tokens),
        "sequence": entry.sequence,
        "at": entry.at.seconds(),
        "amount": split(entry.amount),
        "changeUnits": entry.change().to_string(),
        "after": amounts(entry.after),
        "hash": hex::encode(entry.hash),
    });
    merged(cause(&entry.kind), line)
}

fn cause(kind: &EntryKind) -> Value {
    let of_attempt = |kind, key: &cresset_ledger::RequestKey, attempt| {
        json!({
            "kind": kind,
            "request_id": key.request,
            "application_id": key.application,
            "attempt_id": attempt,
        })
    };
    match kind {
        EntryKind::Grant { reference } => json!({ "kind": "grant", "reference": reference }),
        EntryKind::Debit { reference } => json!({ "kind": "debit", "reference": reference }),
        EntryKind::Reserve { key, attempt } => of_attempt("reserve", key, attempt),
        EntryKind::Settle { key, attempt } => of_attempt("settle", key, attempt),
        EntryKind::Release { key, attempt } => of_attempt("release", key, attempt),
    }
}

pub fn adjustment(bucket: Bucket, units: Microcredits, reference: &str) -> Value {
    json!({ "bucket": bucket, "units": units, "reference": reference })
}

fn split(split: BucketAmounts) -> Value {
    json!({ "trialUnits": split.trial, "premiumUnits": split.premium })
}

pub fn audit(report: &AuditReport) -> Value {
    json!({
        "ok": report.ok,
        "checked": {
            "accounts": report.accounts,
            "credentials": report.credentials,
            "requests": report.requests,
            "reservations": report.reservations,
            "entries": report.entries,
        },
        "violations": report.violations,
    })
}
