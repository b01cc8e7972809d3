//! Checks what accounts and keys are said to have spent and reserved in days and months: against
//! the journal, against the open reservations, and the keys against their account.
//!
//! An entry belongs to the periods of its attempt's admission, wherever it stands in the journal,
//! because an operator may have set the time back before it.

use super::multiset_check::MultisetCheck;
use super::{Audit, Item};
use crate::amounts::{BucketAmounts, Microcredits};
use crate::budgets::{BudgetPeriod, CalendarUse, Consumption};
use crate::records::{Account, Credential};
use crate::state::{Reservation, StateError, StateResult};
use cresset_base::{AccountId, CredentialId, UnixMillis};
use std::collections::HashMap;

/// What an open reservation holds, and when it was made.
type OpenUse = (UnixMillis, Consumption);

/// What an audit has found out about uses so far.
#[derive(Default)]
pub(super) struct UseCheck {
    /// The periods of each account up to which uses may be missing, as `BudgetPeriod::ALL` orders
    /// them.
    forgotten: HashMap<AccountId, [u32; 2]>,
    open: HashMap<CredentialId, Vec<OpenUse>>,
    /// What accounts have spent against what their keys have.
    shares: MultisetCheck,
}

/// Parts that are too large together are damaged, and then no sum is right.
fn money(amount: BucketAmounts) -> Consumption {
    Consumption { units: amount.checked_total().unwrap_or(Microcredits::MAX), tokens: 0 }
}

impl Audit<'_> {
    /// Up to which periods uses of this account may be missing.
    fn forgotten(&mut self, id: AccountId) -> StateResult<[u32; 2]> {
        if let Some(known) = self.uses.forgotten.get(&id) {
            return Ok(*known);
        }
        let account = match self.source.account(id) {
            // A damaged row is a finding of the accounts' check.
            Err(StateError::Corrupt(_)) => None,
            found => found?,
        };
        let until = match account {
            Some(account) if !self.source.misses_uses(id)? => {
                BudgetPeriod::ALL.map(|period| account.used.of(period).forgotten)
            }
            _ => [u32::MAX; 2],
        };
        self.uses.forgotten.insert(id, until);
        Ok(until)
    }

    /// Follows a charge of the journal to an attempt that was admitted at `at`.
    pub(super) fn follow_charge(
        &mut self,
        account: AccountId,
        at: UnixMillis,
        charged: BucketAmounts,
    ) -> StateResult {
        for (period, forgotten) in BudgetPeriod::ALL.into_iter().zip(self.forgotten(account)?) {
            let number = period.number_at(at);
            if number > forgotten {
                let item = Item::Spent(account, period, number);
                self.multiset_check.add(item, i128::from(money(charged).units.get()));
            }
        }
        Ok(())
    }

    /// Each period of an account's use, or of a key's, in which nothing is missing of the account.
    fn each_whole_use(
        &mut self,
        account: AccountId,
        used: &CalendarUse,
        mut each: impl FnMut(&mut Self, (BudgetPeriod, u32), Consumption),
    ) -> StateResult {
        for (period, forgotten) in BudgetPeriod::ALL.into_iter().zip(self.forgotten(account)?) {
            for used in used.of(period).uses.iter().filter(|used| used.number > forgotten) {
                each(self, (period, used.number), used.spent);
            }
        }
        Ok(())
    }

    /// Checks an account's use against its reservations, and takes it off what its journal spent.
    pub(super) fn check_account_use(
        &mut self,
        account: &Account,
        reservations: &[Reservation],
    ) -> StateResult {
        let mut open = Vec::new();
        for reservation in reservations {
            let record = self.source.request(&reservation.key)?;
            let attempt = record.as_ref().and_then(|record| record.attempt(reservation.attempt));
            // A reservation without its attempt is another finding.
            let Some(attempt) = attempt else { continue };
            let held = Consumption { tokens: reservation.tokens, ..money(reservation.amount) };
            open.push((attempt.created_at, held));
            self.uses.open.entry(attempt.credential).or_default().push((attempt.created_at, held));
        }
        let id = account.id;
        self.check_reserved_use(&format!("account {id}"), &account.used, &open);
        self.each_whole_use(id, &account.used, |audit, (period, number), spent| {
            let item = Item::Spent(id, period, number);
            audit.multiset_check.add(item, -i128::from(spent.units.get()));
        })?;
        self.share(id, &account.used, 1)
    }

    /// Checks a credential's use against its reservations, and takes it off its account's.
    pub(super) fn check_credential_use(&mut self, credential: &Credential) -> StateResult {
        let open = self.uses.open.remove(&credential.id).unwrap_or_default();
        self.check_reserved_use(&format!("credential {}", credential.id), &credential.used, &open);
        self.share(credential.account, &credential.used, -1)
    }

    fn share(&mut self, id: AccountId, used: &CalendarUse, times: i128) -> StateResult {
        self.each_whole_use(id, used, |audit, (period, number), spent| {
            let shares = &mut audit.uses.shares;
            shares.add(Item::Spent(id, period, number), times * i128::from(spent.units.get()));
            shares.add(Item::Used(id, period, number), times * i128::from(spent.tokens));
        })
    }

    /// Checks that the credentials of each account have spent what it has. Accounts and credentials
    /// are read again only to name what differs.
    pub(super) fn check_shares(&mut self) -> StateResult {
        let Some(again) = std::mem::take(&mut self.uses.shares).second_reading() else {
            return Ok(());
        };
        self.uses.shares = again;
        let source = self.source;
        self.each(source.accounts(), |audit, row| audit.share(row.id, &row.used, 1))?;
        self.each(source.credentials(), |audit, row| audit.share(row.account, &row.used, -1))?;
        for (item, surplus) in std::mem::take(&mut self.uses.shares).surpluses() {
            let more = if surplus > 0 { "more" } else { "less" };
            self.findings.add(format!("{item} {more} than its credentials together"));
        }
        Ok(())
    }

    fn check_reserved_use(&mut self, who: &str, used: &CalendarUse, open: &[OpenUse]) {
        for period in BudgetPeriod::ALL {
            let used = used.of(period);
            let sum = |number: u32| {
                let counts = |(at, _): &&OpenUse| period.number_at(*at) == number;
                let mut held = open.iter().filter(counts).map(|(_, held)| *held);
                held.try_fold(Consumption::default(), Consumption::checked_add)
            };
            let same = used.uses.iter().all(|used| sum(used.number) == Some(used.reserved));
            let is_known = |number: u32| {
                number <= used.forgotten || used.uses.iter().any(|used| used.number == number)
            };
            let known = open.iter().all(|(at, _)| is_known(period.number_at(*at)));
            self.require(same && known, || {
                format!("{who} reserves another sum in its {} than its reservations", period.name())
            });
        }
    }
}
