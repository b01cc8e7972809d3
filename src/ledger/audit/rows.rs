//! Checks each row against its owner, against itself, and against the journal.

use super::{Audit, Item, has_no_row};
use crate::amounts::{BucketAmounts, Microcredits};
use crate::records::{
    Account, Attempt, AttemptState, Balances, Credential, CredentialKind, RequestKey, RequestRecord,
};
use crate::state::{Reservation, StateResult};
use cresset_base::{AccountId, ApplicationId};

/// How the journal ends an attempt.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum JournalledEnd {
    Settled(BucketAmounts),
    Released,
}

impl Audit<'_> {
    /// Checks all rows. The journal must have been read from its beginning before.
    pub(super) fn check_rows(&mut self) -> StateResult {
        let source = self.source;
        self.check_owners()?;
        self.report.requests = self.each(source.requests(), |audit, record| {
            for attempt in &record.attempts {
                audit.multiset_check.stored(Item::Attempt(record.key, attempt.id));
            }
            audit.check_request(&record)
        })?;
        self.each(source.grants(), |audit, (account, reference, _)| {
            audit.multiset_check.stored(Item::Adjustment(account, reference));
            Ok(())
        })?;
        self.each(source.index_rows(), |_, ()| Ok(()))?;
        self.each(source.answers(), |_, ()| Ok(()))?;
        Ok(())
    }

    /// Checks accounts and what they own except requests and grants, whose number grows with
    /// history. The journal must have been read before, from its beginning or from a trusted end.
    pub(super) fn check_owners(&mut self) -> StateResult {
        let source = self.source;
        self.report.accounts = self.each(source.accounts(), |audit, account| {
            let replayed = match audit.replayed.remove(&account.id) {
                None if audit.is_incremental => source.recent_balances(account.id)?,
                replayed => Some(replayed.unwrap_or_default()),
            };
            audit.check_account(&account, replayed)
        })?;
        for account in std::mem::take(&mut self.replayed).into_keys() {
            self.findings.add(has_no_row(account));
        }
        self.each(source.all_balances(), |audit, (account, _)| {
            let owned = audit.source.account(account)?.is_some();
            audit.require(owned, || format!("balances of {account} belong to no account"));
            Ok(())
        })?;
        self.each(source.applications(), |audit, application| {
            let owned = audit.source.account(application.account)?.is_some();
            audit
                .require(owned, || format!("application {} belongs to no account", application.id));
            Ok(())
        })?;
        self.report.credentials = self
            .each(source.credentials(), |audit, credential| audit.check_credential(&credential))?;
        self.check_shares()?;
        self.report.reservations = self.each(source.reservations(), |audit, reservation| {
            audit.check_reservation(&reservation)
        })?;
        Ok(())
    }

    /// Checks an account against itself, its reservations and, where they are known, the balances
    /// that the journal leads to.
    pub(super) fn check_account(
        &mut self,
        account: &Account,
        replayed: Option<Balances>,
    ) -> StateResult {
        let id = account.id;
        let balances = self.source.balances(id)?;
        let open: Vec<Reservation> =
            self.source.reservations_of(id)?.collect::<StateResult<_>>()?;
        let reserved = open
            .iter()
            .try_fold(BucketAmounts::ZERO, |sum, reservation| sum.checked_add(reservation.amount));
        let count = open.len();
        self.require(replayed.is_none_or(|replayed| balances == replayed), || {
            format!("account {id} has other balances than its journal")
        });
        for (bucket, name) in [(balances.trial, "trial"), (balances.premium, "premium")] {
            self.require(bucket.available().is_some(), || {
                format!("account {id} has overdrawn its {name} bucket")
            });
        }
        self.require(reserved == Some(balances.reserved()), || {
            format!("account {id} has reserved another sum than its reservations")
        });
        self.require(account.in_flight as usize == count, || {
            format!(
                "account {id} counts {} in flight and has {count} reservations",
                account.in_flight
            )
        });
        self.check_account_use(account, &open)
    }

    fn check_credential(&mut self, credential: &Credential) -> StateResult {
        let id = credential.id;
        let found = self.source.credential_by_digest(&credential.digest)?;
        self.require(found.as_ref() == Some(credential), || {
            format!("credential {id} is not found by its digest")
        });
        let owner = self.source.account(credential.account)?;
        self.require(owner.is_some(), || format!("credential {id} belongs to no account"));
        self.check_credential_use(credential)?;
        let scope = match (credential.kind, credential.application) {
            (CredentialKind::ApiKey, None) => true,
            (CredentialKind::AccessToken, Some(_)) => {
                self.is_scope(credential.account, credential.application)?
            }
            _ => false,
        };
        self.require(scope, || format!("credential {id} belongs to no application of its account"));
        Ok(())
    }

    fn is_scope(
        &self,
        account: AccountId,
        application: Option<ApplicationId>,
    ) -> StateResult<bool> {
        match application {
            None => Ok(true),
            Some(id) => {
                Ok(self.source.application(id)?.is_some_and(|found| found.account == account))
            }
        }
    }

    pub(super) fn check_request(&mut self, record: &RequestRecord) -> StateResult {
        let key = record.key;
        let owned = self.source.account(key.account)?.is_some()
            && self.is_scope(key.account, key.application)?;
        self.require(owned, || format!("{key} has no owner"));
        let reservation = self.source.reservation(&key)?;
        let mut before: Option<&Attempt> = None;
        for (index, attempt) in record.attempts.iter().enumerate() {
            let follows = attempt.number as usize == index + 1
                && attempt.retry_of == before.map(|attempt| attempt.id)
                && before.is_none_or(|attempt| attempt.state == AttemptState::Failed);
            self.require(follows, || {
                format!("attempt {} of {key} does not follow a failed one", attempt.id)
            });
            self.require(is_consistent(attempt), || {
                format!("attempt {} of {key} contradicts itself", attempt.id)
            });
            self.check_reserved(attempt, reservation, &key);
            before = Some(attempt);
        }
        Ok(())
    }

    /// Checks that the attempt is reserved exactly while it is live.
    fn check_reserved(
        &mut self,
        attempt: &Attempt,
        reservation: Option<Reservation>,
        key: &RequestKey,
    ) {
        let own = reservation.filter(|reservation| reservation.attempt == attempt.id);
        let found = own.map(|own| (own.amount, own.boot));
        let expect = (!attempt.state.is_terminal()).then_some((attempt.reserved, attempt.boot));
        self.require(found == expect, || {
            format!(
                "attempt {} of {key} is {:?} and its reservation says otherwise",
                attempt.id, attempt.state
            )
        });
    }

    fn check_reservation(&mut self, reservation: &Reservation) -> StateResult {
        let Reservation { key, attempt, .. } = reservation;
        let record = self.source.request(key)?;
        let there = record.is_some_and(|record| record.attempt(*attempt).is_some());
        self.require(there, || {
            format!("reservation of {key} names attempt {attempt}, which is not there")
        });
        Ok(())
    }
}

/// The end that the journal must record for an attempt; `None` while it is live.
pub(super) fn expected_end(attempt: &Attempt) -> Option<JournalledEnd> {
    match (attempt.state, attempt.usage) {
        (AttemptState::Queued | AttemptState::Running, _) => None,
        (_, Some(_)) => Some(JournalledEnd::Settled(attempt.charged)),
        (_, None) => Some(JournalledEnd::Released),
    }
}

/// Whether state, times, usage, charge and reasons of one attempt fit together.
fn is_consistent(attempt: &Attempt) -> bool {
    let terminal = attempt.state.is_terminal();
    let cost = attempt.usage.map_or(Some(Microcredits::ZERO), |usage| attempt.prices.cost(&usage));
    let charged = cost.and_then(|cost| BucketAmounts::take(cost, attempt.reserved));
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
        AttemptState::Failed => attempt.usage.is_none() == attempt.failed_on_the_node(),
        AttemptState::Queued => attempt.usage.is_none() && attempt.started_at.is_none(),
        AttemptState::Running => attempt.usage.is_none() && attempt.started_at.is_some(),
    }
}
