//! Compares a receipt with what the ledger says of its request: the row, the journal's entry and
//! what was stored with the answer, each as long as it is kept. The journal is kept for ever.

use super::error::AdminError;
use super::lists::{self, PAGE_ROWS};
use super::view;
use cresset_base::AccountId;
use cresset_catalogue::NodePublicKey;
use cresset_ledger::{EntryKind, JournalEntry, ReceiptFacts, RequestRecord};
use cresset_request::{ReceiptPredicate, ReceiptStatement, UsageObject};
use cresset_store::{Snapshot, Store};
use serde_json::{Value, json};

/// What the ledger keeps of a request.
struct Kept {
    row: Option<RequestRecord>,
    entry: Option<JournalEntry>,
    facts: Option<ReceiptFacts>,
}

/// Reads many entries where the account has many.
pub(super) async fn check(
    store: Store,
    receipt: Box<ReceiptStatement>,
) -> Result<Value, AdminError> {
    let request = &receipt.predicate.request;
    let rows = lists::requests_by_id(store.clone(), request.id, None).await?;
    let row = rows.into_iter().find(|row| row.attempt(request.attempt_id).is_some());
    let facts = match &row {
        Some(row) => store.stored_body(&row.key).await?.and_then(|body| body.receipt),
        None => None,
    };
    let facts = facts.map(|facts| (*facts).clone());
    let snapshot = store.read().await?;
    let account = row.as_ref().map(|row| row.key.account);
    let entry = settlement(&*snapshot, account, &receipt).await?;
    let kept = Kept { row, entry, facts };
    Ok(json!({
        "entry": kept.entry.as_ref().map(|entry| view::entry(entry, kept.row.as_ref())),
        "row_kept": kept.row.is_some(),
        "answer_kept": kept.facts.is_some(),
        "differences": differences(&receipt, &kept),
    }))
}

/// The journal's entry that charged the receipt's attempt, of one account or of any.
async fn settlement(
    snapshot: &dyn Snapshot,
    account: Option<AccountId>,
    receipt: &ReceiptStatement,
) -> Result<Option<JournalEntry>, AdminError> {
    let Some(account) = account else {
        let mut after = None;
        loop {
            let accounts = snapshot.accounts(after, PAGE_ROWS).await?;
            let Some(last) = accounts.last() else { return Ok(None) };
            after = Some(last.id);
            for account in &accounts {
                if let Some(found) = settlement_of(snapshot, account.id, receipt).await? {
                    return Ok(Some(found));
                }
            }
        }
    };
    settlement_of(snapshot, account, receipt).await
}

async fn settlement_of(
    snapshot: &dyn Snapshot,
    account: AccountId,
    receipt: &ReceiptStatement,
) -> Result<Option<JournalEntry>, AdminError> {
    let wanted = receipt.predicate.request.attempt_id;
    let settles = |entry: &JournalEntry| match entry.kind {
        EntryKind::Settle { attempt, .. } => attempt == wanted,
        _ => false,
    };
    let mut after = 0;
    loop {
        let entries = snapshot.entries(account, after, PAGE_ROWS).await?;
        let Some(last) = entries.last() else { return Ok(None) };
        after = last.sequence;
        if let Some(found) = entries.into_iter().find(settles) {
            return Ok(Some(found));
        }
    }
}

/// What the receipt says otherwise than the ledger, a sentence each.
fn differences(receipt: &ReceiptStatement, kept: &Kept) -> Vec<String> {
    let said = &receipt.predicate;
    let mut found = Vec::new();
    found.extend(difference_of_entry(said, kept.entry.as_ref()));
    if let Some(row) = &kept.row {
        found.extend(differences_of_row(said, row));
        let key = NodePublicKey::parse(&said.key.ed25519);
        let made = kept.facts.as_ref().zip(key);
        let made = made.and_then(|(facts, key)| ReceiptStatement::of(row, facts, key));
        if found.is_empty() && made.is_some_and(|made| made != *receipt) {
            found.push("the receipt is another one than that of the stored answer".to_owned());
        }
    }
    found
}

fn difference_of_entry(said: &ReceiptPredicate, entry: Option<&JournalEntry>) -> Option<String> {
    let Some(entry) = entry else {
        return Some("the journal has no charge of this attempt".into());
    };
    let (booked, charged) = (entry.amount.checked_total(), said.charge.charged_units);
    (booked != Some(charged)).then(|| {
        let booked = booked.map_or_else(|| "?".into(), |units| units.to_string());
        format!("the journal charged {booked} microcredits, and the receipt says {charged}")
    })
}

fn differences_of_row(said: &ReceiptPredicate, row: &RequestRecord) -> Vec<String> {
    let attempt = row.attempt(said.request.attempt_id);
    let usage = attempt.and_then(|attempt| attempt.usage).map(UsageObject::from);
    let fingerprint = hex::encode(row.fingerprint);
    let ids = (row.key.request, row.session, row.model);
    [
        (fingerprint != said.request.fingerprint).then(|| {
            format!(
                "the ledger has the fingerprint {fingerprint}, and the receipt says {}",
                said.request.fingerprint
            )
        }),
        (usage != Some(said.usage)).then(|| {
            let booked = usage.as_ref().map_or_else(|| "no usage".to_owned(), tokens);
            format!("the ledger has {booked}, and the receipt says {}", tokens(&said.usage))
        }),
        (ids != (said.request.id, said.request.session_id, said.request.model)).then(|| {
            "the ledger has another request id, session or model for this attempt".to_owned()
        }),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn tokens(usage: &UsageObject) -> String {
    let cached = usage.prompt_tokens_details.cached_tokens;
    format!("{} + {} tokens ({cached} cached)", usage.prompt_tokens, usage.completion_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_base::UnixMillis;
    use cresset_catalogue::{Catalogue, NodePublicKey};
    use cresset_ledger::{Balances, Microcredits};
    use cresset_request::testing::completed;

    fn key() -> NodePublicKey {
        let folder = tempfile::tempdir().unwrap();
        Catalogue::new(folder.path()).receipt_signer().unwrap().key()
    }

    fn kept() -> (ReceiptStatement, Kept) {
        let (row, facts) = completed();
        let receipt = ReceiptStatement::of(&row, &facts, key()).unwrap();
        let attempt = row.latest();
        let entry = JournalEntry {
            sequence: 2,
            at: UnixMillis(2_000),
            account: row.key.account,
            kind: EntryKind::Settle { key: row.key, attempt: attempt.id },
            amount: attempt.charged,
            after: Balances::default(),
            hash: [0; 16],
        };
        (receipt, Kept { row: Some(row), entry: Some(entry), facts: Some(facts) })
    }

    #[test]
    fn a_receipt_agrees_with_the_ledger_it_was_made_from() {
        let (receipt, mut all) = kept();
        assert_eq!(differences(&receipt, &all), [""; 0]);
        all.facts = None;
        assert_eq!(differences(&receipt, &all), [""; 0], "the answer has expired");
        all.row = None;
        assert_eq!(differences(&receipt, &all), [""; 0], "the request was forgotten");
    }

    /// Each part of the ledger that was edited is told, and so is each part of a receipt that the
    /// node's own key signed.
    #[test]
    fn what_differs_is_told() {
        type Change = fn(&mut ReceiptStatement, &mut Kept);
        let changes: &[(&str, Change)] = &[
            ("the journal charged 19", |_, kept| {
                let amount = &mut kept.entry.as_mut().unwrap().amount;
                amount.trial = Microcredits::new(19).unwrap();
            }),
            ("no charge", |_, kept| kept.entry = None),
            ("the receipt says 21", |receipt, _| {
                receipt.predicate.charge.charged_units = Microcredits::new(21).unwrap();
            }),
            ("the receipt says 10 + 6 tokens", |receipt, _| {
                receipt.predicate.usage.completion_tokens = 6;
            }),
            ("the fingerprint 0202", |_, kept| {
                kept.row.as_mut().unwrap().fingerprint = [2; 32];
            }),
            ("session", |_, kept| {
                kept.row.as_mut().unwrap().session = cresset_base::SessionId::generate();
            }),
            ("that of the stored answer", |receipt, _| {
                receipt.predicate.verdict.grade = "reference".into();
            }),
            ("that of the stored answer", |_, kept| {
                kept.facts.as_mut().unwrap().answer_tokens = [9; 32];
            }),
        ];
        for (why, change) in changes {
            let (mut receipt, mut all) = kept();
            change(&mut receipt, &mut all);
            let found = differences(&receipt, &all);
            assert!(found.iter().any(|found| found.contains(why)), "{why}: {found:?}");
        }
    }
}
