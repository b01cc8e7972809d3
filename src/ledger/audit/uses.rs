//! Checks what accounts and keys are said to have spent and reserved of their day and their month:
//! against the journal, against the open reservations, and the keys against their account.

use super::Audit;
use crate::amounts::{BucketAmounts, Microcredits};
use crate::budgets::{BudgetPeriod, CalendarUse, Consumption};
use crate::records::{Account, Credential, JournalEntry};
use crate::state::{Reservation, StateResult};
use cresset_base::{AccountId, CredentialId, UnixMillis};
use std::collections::HashMap;

/// What an open reservation holds, and when it was made.
type OpenUse = (UnixMillis, Consumption);

/// What an audit has found out about uses so far.
#[derive(Default)]
pub(super) struct UseCheck {
    /// The use of each account by the journal, which tells of money alone.
    journalled: HashMap<AccountId, CalendarUse>,
    open: HashMap<CredentialId, Vec<OpenUse>>,
    /// What each account has spent and none of its credentials that were read yet.
    unassigned: HashMap<AccountId, [Consumption; 2]>,
}

/// Parts that are too large together are damaged, and then no sum is right.
fn money(amount: BucketAmounts) -> Consumption {
    Consumption { units: amount.checked_total().unwrap_or(Microcredits::MAX), tokens: 0 }
}

impl Audit<'_> {
    /// Follows a reservation of the journal. A journal that is read from a trusted end does not
    /// lead to whole sums.
    pub(super) fn follow_reserve(&mut self, entry: &JournalEntry) {
        self.follow(entry, |used| used.reserve(money(entry.amount), entry.at));
    }

    /// Follows the end of a reservation, which was made at `at`.
    pub(super) fn follow_end(
        &mut self,
        entry: &JournalEntry,
        at: UnixMillis,
        [reserved, charged]: [BucketAmounts; 2],
    ) {
        self.follow(entry, |used| used.settle(at, money(reserved), money(charged)));
    }

    fn follow(
        &mut self,
        entry: &JournalEntry,
        change: impl FnOnce(&CalendarUse) -> Option<CalendarUse>,
    ) {
        if self.is_incremental {
            return;
        }
        let before = self.uses.journalled.entry(entry.account).or_default();
        let after = change(before);
        *before = after.unwrap_or(*before);
        self.require(after.is_some(), || {
            format!("entry {} frees more than its period reserves", entry.sequence)
        });
    }

    /// Checks an account's use against its reservations and, where all of the journal was read,
    /// against that.
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
        let who = format!("account {}", account.id);
        self.check_reserved_use(&who, &account.used, &open);
        let spent = [BudgetPeriod::Month, BudgetPeriod::Day].map(|of| account.used.of(of).spent);
        self.uses.unassigned.insert(account.id, spent);
        if !self.is_incremental {
            self.check_journalled_use(account);
        }
        Ok(())
    }

    fn check_journalled_use(&mut self, account: &Account) {
        let journalled = self.uses.journalled.remove(&account.id).unwrap_or_default();
        for period in BudgetPeriod::ALL {
            let [stored, expect] = [&account.used, &journalled].map(|used| used.of(period));
            let same = stored.number == expect.number && stored.spent.units == expect.spent.units;
            self.require(same, || {
                let (id, name) = (account.id, period.name());
                format!("account {id} has spent another sum in its {name} than its journal")
            });
        }
    }

    /// Checks a credential's use against its reservations, and takes it off its account's.
    pub(super) fn check_credential_use(&mut self, credential: &Credential, account: &Account) {
        let open = self.uses.open.remove(&credential.id).unwrap_or_default();
        let who = format!("credential {}", credential.id);
        self.check_reserved_use(&who, &credential.used, &open);
        let Some(unassigned) = self.uses.unassigned.get_mut(&account.id) else { return };
        let mut fits = true;
        for (period, left) in BudgetPeriod::ALL.into_iter().zip(unassigned) {
            let [used, of_account] = [&credential.used, &account.used].map(|used| used.of(period));
            if used.number == of_account.number {
                let after = left.checked_sub(used.spent);
                fits &= after.is_some();
                *left = after.unwrap_or_default();
            }
        }
        let sound = fits || self.has_been_set_back(account.id);
        self.require(sound, || format!("{who} has spent more than its account"));
    }

    /// Checks that the credentials of each account have spent what it has.
    pub(super) fn check_unassigned_use(&mut self) {
        for (account, left) in std::mem::take(&mut self.uses.unassigned) {
            let sound = left == [Consumption::default(); 2] || self.has_been_set_back(account);
            self.require(sound, || {
                format!("account {account} has spent more than its credentials together")
            });
        }
    }

    /// Whether the time was set back: then a key may have been used in a period that its account
    /// began anew.
    fn has_been_set_back(&self, account: AccountId) -> bool {
        let chain = self.source.chain_of(account);
        self.source.set_back_after(chain).is_ok_and(|steps| !steps.is_empty())
    }

    fn check_reserved_use(&mut self, who: &str, used: &CalendarUse, open: &[OpenUse]) {
        for period in BudgetPeriod::ALL {
            let used = used.of(period);
            let counts = |(at, _): &&OpenUse| period.number_at(*at) == used.number;
            let sum = open
                .iter()
                .filter(counts)
                .try_fold(Consumption::default(), |sum, (_, held)| sum.checked_add(*held));
            self.require(sum == Some(used.reserved), || {
                format!("{who} reserves another sum in its {} than its reservations", period.name())
            });
        }
    }
}
