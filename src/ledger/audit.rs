//! The audit: every invariant over everything stored, computed again from the journal and independently of `apply`.
//! Rows are fed in any order within their kind; entries in the order of their sequence.

use super::amounts::{Split, Units};
use super::journal;
use super::records::{
    Account, Application, Attempt, AttemptState, Balances, Credential, CredentialKind, Entry, EntryKind, RequestKey,
    RequestRecord,
};
use super::state::{Granted, Head, Reservation};
use crate::clock::UnixMillis;
use crate::ids::{AccountId, ApplicationId, AttemptId};
use std::collections::HashMap;

/// Violations named before the rest is only counted.
const MAX_NAMED: usize = 100;

#[derive(Default)]
pub struct Audit {
    accounts: HashMap<AccountId, Account>,
    balances: HashMap<AccountId, Balances>,
    applications: HashMap<ApplicationId, AccountId>,
    granted: HashMap<(AccountId, String), Granted>,
    requests: HashMap<RequestKey, RequestRecord>,
    reservations: HashMap<RequestKey, Reservation>,
    /// What the journal says, replayed from its beginning.
    replayed: HashMap<AccountId, Balances>,
    journalled: HashMap<(RequestKey, AttemptId), Journalled>,
    head: Head,
    last: UnixMillis,
    violations: Vec<String>,
    unnamed: u64,
}

/// What the journal says of one attempt.
struct Journalled {
    reserved: Split,
    end: Option<End>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Settled(Split),
    Released,
}

impl Audit {
    pub fn account(&mut self, account: Account) {
        self.accounts.insert(account.id, account);
    }

    pub fn balances(&mut self, id: AccountId, balances: Balances) {
        self.balances.insert(id, balances);
    }

    pub fn application(&mut self, application: &Application) {
        self.applications.insert(application.id, application.account);
    }

    /// Call after the accounts and applications. `by_digest` is what the index answers for the credential's digest.
    pub fn credential(&mut self, credential: &Credential, by_digest: Option<&Credential>) {
        let id = credential.id;
        self.require(by_digest == Some(credential), || format!("credential {id} is not found by its digest"));
        let owned = self.accounts.contains_key(&credential.account);
        self.require(owned, || format!("credential {id} belongs to no account"));
        let scope = match (credential.kind, credential.application) {
            (CredentialKind::ApiKey, None) => true,
            (CredentialKind::AccessToken, Some(application)) => {
                self.applications.get(&application) == Some(&credential.account)
            }
            _ => false,
        };
        self.require(scope, || format!("credential {id} belongs to no application of its account"));
    }

    pub fn granted(&mut self, account: AccountId, reference: String, granted: Granted) {
        self.granted.insert((account, reference), granted);
    }

    /// The same request may come from both the ledger and the archive while it is being moved.
    pub fn request(&mut self, record: RequestRecord) {
        let key = record.key;
        self.check_attempts(&record);
        if let Some(twin) = self.requests.insert(key, record) {
            let same = self.requests.get(&key) == Some(&twin);
            self.require(same, || format!("{key} is archived with other content"));
        }
    }

    pub fn reservation(&mut self, reservation: Reservation) {
        self.reservations.insert(reservation.key, reservation);
    }

    /// Entries must come in the order of their sequence.
    pub fn entry(&mut self, entry: &Entry) {
        let sequence = entry.sequence;
        let before = self.head;
        self.require(sequence == before.sequence + 1, || {
            format!("entry {sequence} does not follow entry {}", before.sequence)
        });
        self.require(entry.hash == journal::chain(&before, entry), || {
            format!("entry {sequence} breaks the chain of hashes")
        });
        self.require(entry.at >= self.last, || format!("entry {sequence} goes back in time"));
        self.head = Head { sequence, hash: entry.hash };
        self.last = entry.at;
        self.replay(entry);
    }

    /// A row that could not be read.
    pub fn damaged(&mut self, what: String) {
        self.require(false, || what);
    }

    /// Compares everything fed with everything else. `head` is the stored end of the journal.
    pub fn finish(mut self, head: Head) -> Vec<String> {
        self.require(self.head == head, || format!("the journal ends before its recorded entry {}", head.sequence));
        self.check_accounts();
        self.check_grants();
        self.check_requests();
        self.check_reservations();
        self.check_journalled();
        if self.unnamed > 0 {
            self.violations.push(format!("and {} more violations", self.unnamed));
        }
        self.violations
    }

    /// Whether a row lies where its content says.
    pub fn place(&mut self, right: bool, what: &str) {
        self.require(right, || format!("{what} is not where it belongs"));
    }

    /// Requests fed so far.
    pub fn requests(&self) -> u64 {
        self.requests.len() as u64
    }

    fn require(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if holds {
            return;
        }
        if self.violations.len() < MAX_NAMED {
            self.violations.push(what());
        } else {
            self.unnamed += 1;
        }
    }

    /// Moves the replayed balances by one entry and compares them with what the entry says comes after it.
    fn replay(&mut self, entry: &Entry) {
        let sequence = entry.sequence;
        let before = self.replayed.get(&entry.account).copied();
        let before = before.unwrap_or_default();
        let after = match &entry.kind {
            EntryKind::Grant { reference } => self.replay_grant(entry, reference, &before),
            EntryKind::Reserve { key, attempt } => self.replay_reserve(entry, key, *attempt, &before),
            EntryKind::Settle { key, attempt } => {
                self.replay_end(entry, key, *attempt, End::Settled(entry.amount), &before)
            }
            EntryKind::Release { key, attempt } => self.replay_end(entry, key, *attempt, End::Released, &before),
        };
        self.require(after == Some(entry.after), || {
            format!("entry {sequence} does not lead to the balances it records")
        });
        self.replayed.insert(entry.account, entry.after);
    }

    fn replay_grant(&mut self, entry: &Entry, reference: &str, before: &Balances) -> Option<Balances> {
        let granted = self.granted.remove(&(entry.account, reference.to_owned()));
        let same = granted.is_some_and(|granted| granted.split() == entry.amount);
        self.require(same, || format!("entry {} and its grant disagree", entry.sequence));
        before.credit(entry.amount)
    }

    fn replay_reserve(
        &mut self,
        entry: &Entry,
        key: &RequestKey,
        attempt: AttemptId,
        before: &Balances,
    ) -> Option<Balances> {
        self.require(key.account == entry.account, || {
            format!("entry {} names another account's request", entry.sequence)
        });
        let journalled = Journalled { reserved: entry.amount, end: None };
        let twice = self.journalled.insert((*key, attempt), journalled).is_some();
        self.require(!twice, || format!("attempt {attempt} is reserved twice"));
        before.reserve(entry.amount)
    }

    fn replay_end(
        &mut self,
        entry: &Entry,
        key: &RequestKey,
        attempt: AttemptId,
        end: End,
        before: &Balances,
    ) -> Option<Balances> {
        let Some(known) = self.journalled.get_mut(&(*key, attempt)) else {
            self.damaged(format!("attempt {attempt} ends without a reservation"));
            return None;
        };
        let reserved = known.reserved;
        let first = known.end.replace(end).is_none();
        let whole = end != End::Released || entry.amount == reserved;
        self.require(first, || format!("attempt {attempt} ends twice"));
        self.require(whole && key.account == entry.account, || {
            format!("entry {} does not match its reservation", entry.sequence)
        });
        let charged = match end {
            End::Settled(charged) => charged,
            End::Released => Split::ZERO,
        };
        self.require(reserved.checked_sub(charged).is_some(), || {
            format!("attempt {attempt} is charged more than was reserved")
        });
        before.resolve(reserved, charged)
    }

    fn check_accounts(&mut self) {
        let mut open: HashMap<AccountId, (u32, Option<Split>)> = HashMap::new();
        for reservation in self.reservations.values() {
            let (count, sum) = open.entry(reservation.key.account).or_insert((0, Some(Split::ZERO)));
            *count += 1;
            *sum = sum.and_then(|sum| sum.checked_add(reservation.amount));
        }
        for (id, account) in std::mem::take(&mut self.accounts) {
            let balances = self.balances.remove(&id).unwrap_or_default();
            let replayed = self.replayed.remove(&id).unwrap_or_default();
            let (count, reserved) = open.remove(&id).unwrap_or((0, Some(Split::ZERO)));
            self.require(balances == replayed, || format!("account {id} has other balances than its journal"));
            self.require(balances.trial.available().is_some(), || {
                format!("account {id} has overdrawn its trial bucket")
            });
            self.require(balances.premium.available().is_some(), || {
                format!("account {id} has overdrawn its premium bucket")
            });
            self.require(reserved == Some(balances.reserved()), || {
                format!("account {id} has reserved another sum than its reservations")
            });
            self.require(account.in_flight == count, || {
                format!("account {id} counts {} in flight and has {count} reservations", account.in_flight)
            });
        }
        let strays = self.balances.len() + self.replayed.len() + open.len();
        self.require(strays == 0, || {
            format!("{strays} rows of balances, entries or reservations belong to no account")
        });
    }

    fn check_grants(&mut self) {
        for (account, reference) in std::mem::take(&mut self.granted).into_keys() {
            self.damaged(format!("grant {reference:?} of account {account} is not in the journal"));
        }
    }

    fn check_attempts(&mut self, record: &RequestRecord) {
        let key = record.key;
        let owned = self.accounts.contains_key(&key.account)
            && key.application.is_none_or(|id| self.applications.get(&id) == Some(&key.account));
        self.require(owned, || format!("{key} has no owner"));
        let mut before: Option<&Attempt> = None;
        for (index, attempt) in record.attempts.iter().enumerate() {
            let follows = attempt.number as usize == index + 1
                && attempt.retry_of == before.map(|attempt| attempt.id)
                && before.is_none_or(|attempt| attempt.state == AttemptState::Failed);
            self.require(follows, || format!("attempt {} of {key} does not follow a failed one", attempt.id));
            self.require(is_consistent(attempt), || format!("attempt {} of {key} contradicts itself", attempt.id));
            before = Some(attempt);
        }
    }

    /// Every attempt has its reservation entry, and an end in the journal exactly when it is terminal.
    fn check_requests(&mut self) {
        for record in std::mem::take(&mut self.requests).into_values() {
            for attempt in &record.attempts {
                let journalled = self.journalled.remove(&(record.key, attempt.id));
                let agrees = journalled.is_some_and(|journalled| {
                    journalled.reserved == attempt.reserved && journalled.end == expected_end(attempt)
                });
                self.require(agrees, || format!("attempt {} and its journal disagree", attempt.id));
                let open = !attempt.state.is_terminal();
                let reserved =
                    self.reservations.get(&record.key).filter(|reservation| reservation.attempt == attempt.id).copied();
                let same = reserved.map(|reservation| (reservation.amount, reservation.boot));
                let expect = open.then_some((attempt.reserved, attempt.boot));
                self.require(same == expect, || {
                    format!("attempt {} is {:?} and its reservation says otherwise", attempt.id, attempt.state)
                });
                if reserved.is_some() {
                    self.reservations.remove(&record.key);
                }
            }
        }
    }

    fn check_reservations(&mut self) {
        for (key, reservation) in std::mem::take(&mut self.reservations) {
            self.damaged(format!("reservation of {key} names attempt {}, which is not there", reservation.attempt));
        }
    }

    /// What is left belongs to requests whose tombstones were purged: long ended.
    fn check_journalled(&mut self) {
        for ((_, attempt), journalled) in std::mem::take(&mut self.journalled) {
            self.require(journalled.end.is_some(), || format!("attempt {attempt} is reserved and its request is gone"));
        }
    }
}

/// What the journal must say of an attempt's end.
fn expected_end(attempt: &Attempt) -> Option<End> {
    match (attempt.state, attempt.usage) {
        (AttemptState::Queued | AttemptState::Running, _) => None,
        (_, Some(_)) => Some(End::Settled(attempt.charged)),
        (_, None) => Some(End::Released),
    }
}

/// State, times, usage, charge and reasons of one attempt fit together.
fn is_consistent(attempt: &Attempt) -> bool {
    let terminal = attempt.state.is_terminal();
    let cost = attempt.usage.map_or(Some(Units::ZERO), |usage| attempt.prices.cost(&usage));
    let charged = cost.and_then(|cost| Split::take(cost, attempt.reserved));
    attempt.finished_at.is_some() == terminal
        && attempt.failure.is_some() == (attempt.state == AttemptState::Failed)
        && attempt.finish_reason.is_some() == (attempt.state == AttemptState::Completed)
        && has_right_usage(attempt)
        && charged == Some(attempt.charged)
}

fn has_right_usage(attempt: &Attempt) -> bool {
    match attempt.state {
        AttemptState::Completed => attempt.usage.is_some() && attempt.started_at.is_some(),
        AttemptState::Cancelled => attempt.usage.is_none() || attempt.started_at.is_some(),
        AttemptState::Failed => attempt.usage.is_none(),
        AttemptState::Queued => attempt.usage.is_none() && attempt.started_at.is_none(),
        AttemptState::Running => attempt.usage.is_none() && attempt.started_at.is_some(),
    }
}
