//! Checks the journal entry by entry: its numbers, its chains, its time, and the balances and
//! reservations that it leads to.

use super::rows::{JournalledEnd, expected_end};
use super::{Audit, Item, JournalChain, OpenReservation};
use crate::amounts::BucketAmounts;
use crate::budgets::BudgetPeriod;
use crate::journal;
use crate::records::{Balances, EntryKind, JournalEntry, RequestKey};
use crate::state::{JournalHead, StateResult};
use cresset_base::{AccountId, AttemptId};

impl Audit<'_> {
    pub(super) fn check_journal(&mut self) -> StateResult {
        self.resume()?;
        self.report.entries =
            self.each(self.source.entries(&self.from), |audit, entry| audit.check_entry(&entry))?;
        self.each(self.source.heads(), |audit, (chain, head)| {
            audit.require(audit.heads.of(chain) == head, || {
                format!("the journal ends before its recorded entry {}", head.sequence)
            });
            Ok(())
        })?;
        for ((key, attempt), open) in std::mem::take(&mut self.open) {
            self.attempt(|audit| audit.check_open(&key, attempt, open.amount))?;
        }
        Ok(())
    }

    /// Finds the entries that an earlier audit ended with as they were.
    fn resume(&mut self) -> StateResult {
        let trusted: Vec<_> = self.from.iter().filter(|(_, head)| head.sequence > 0).collect();
        trusted.into_iter().try_for_each(|(chain, head)| {
            self.attempt(|audit| audit.check_trusted_end(chain, head))
        })
    }

    fn check_trusted_end(&mut self, chain: JournalChain, head: JournalHead) -> StateResult {
        let JournalHead { sequence, hash } = head;
        let last = self.source.entry(chain, sequence)?;
        self.require(last.as_ref().is_some_and(|entry| entry.hash == hash), || {
            format!("entry {sequence} is not what it was at the audit before")
        });
        self.times.extend(last.map(|entry| (chain, entry.at)));
        Ok(())
    }

    fn check_entry(&mut self, entry: &JournalEntry) -> StateResult {
        let sequence = entry.sequence;
        let chain = self.source.chain_of(entry.account);
        let before = self.heads.advance(chain, JournalHead { sequence, hash: entry.hash });
        self.require(sequence == before.sequence + 1, || {
            format!("entry {sequence} does not follow entry {}", before.sequence)
        });
        self.require(entry.hash == journal::chain(&before, entry), || {
            format!("entry {sequence} breaks the chain of hashes")
        });
        let last = self.times.insert(chain, entry.at).unwrap_or_default();
        let back =
            entry.at < last && !self.source.set_back_after(chain)?.contains(&before.sequence);
        self.require(!back, || format!("entry {sequence} goes back in time"));
        let before = match self.replayed.get(&entry.account) {
            Some(replayed) => *replayed,
            None => self.balances_before(entry)?,
        };
        // The account goes on from the balances that the entry records, so that one wrong entry is
        // one finding.
        self.replayed.insert(entry.account, entry.after);
        let after = match &entry.kind {
            EntryKind::Grant { reference } | EntryKind::Debit { reference } => {
                self.check_adjustment(entry, reference, &before)?
            }
            EntryKind::Reserve { key, attempt } => {
                self.check_reserve(entry, key, *attempt, &before)
            }
            EntryKind::Settle { key, attempt } => {
                self.check_end(entry, key, *attempt, JournalledEnd::Settled(entry.amount), &before)?
            }
            EntryKind::Release { key, attempt } => {
                self.check_end(entry, key, *attempt, JournalledEnd::Released, &before)?
            }
        };
        self.check_statement(entry, &before);
        self.require(after == Some(entry.after), || {
            format!("entry {sequence} does not lead to the balances it records")
        });
        Ok(())
    }

    /// Checks that statements add up to the balance: each entry lies in one month by its own time,
    /// and is listed with what it changed.
    fn check_statement(&mut self, entry: &JournalEntry, before: &Balances) {
        let month = BudgetPeriod::Month;
        let in_a_month = month.first_day(month.number_at(entry.at)).is_some();
        let same = entry.change() == entry.after.owned() - before.owned();
        self.require(in_a_month && same, || {
            format!(
                "entry {} changes the balance by another sum than its statement",
                entry.sequence
            )
        });
    }

    /// The sequence up to which the chain of an account is trusted; 0 for none.
    fn trusted_until(&self, account: AccountId) -> u64 {
        self.from.of(self.source.chain_of(account)).sequence
    }

    /// The balances that the trusted part of the journal left the account with.
    fn balances_before(&self, entry: &JournalEntry) -> StateResult<Balances> {
        let trusted = self.trusted_until(entry.account);
        if trusted == 0 {
            return Ok(Balances::default());
        }
        let last = self.source.entry_of(entry.account, trusted)?;
        Ok(last.map_or_else(Balances::default, |last| last.after))
    }

    fn check_adjustment(
        &mut self,
        entry: &JournalEntry,
        reference: &str,
        before: &Balances,
    ) -> StateResult<Option<Balances>> {
        let stored = self.source.adjustment(entry.account, reference)?;
        let same = stored.is_some_and(|row| {
            row.bucket_amounts() == entry.amount && row.entry(reference.to_owned()) == entry.kind
        });
        self.require(same, || format!("entry {} and its grant or debit disagree", entry.sequence));
        if stored.is_some() {
            self.multiset_check.journalled(Item::Adjustment(entry.account, reference.to_owned()));
        }
        Ok(match entry.kind {
            EntryKind::Debit { .. } => before.resolve(BucketAmounts::ZERO, entry.amount),
            _ => before.credit(entry.amount),
        })
    }

    fn check_reserve(
        &mut self,
        entry: &JournalEntry,
        key: &RequestKey,
        attempt: AttemptId,
        before: &Balances,
    ) -> Option<Balances> {
        self.require(key.account == entry.account, || {
            format!("entry {} names another account's request", entry.sequence)
        });
        let open = OpenReservation { amount: entry.amount, at: entry.at };
        let twice = self.open.insert((*key, attempt), open).is_some();
        self.require(!twice, || format!("attempt {attempt} of {key} is reserved twice"));
        before.reserve(entry.amount)
    }

    fn check_end(
        &mut self,
        entry: &JournalEntry,
        key: &RequestKey,
        attempt: AttemptId,
        end: JournalledEnd,
        before: &Balances,
    ) -> StateResult<Option<Balances>> {
        let record = self.source.request(key)?;
        let stored = record.as_ref().and_then(|record| record.attempt(attempt));
        let opened = self.open.remove(&(*key, attempt));
        // The reservation lies in the trusted part of the journal, or nowhere.
        let trusted = || {
            let freed = before.reserved().checked_sub(entry.after.reserved());
            freed.filter(|_| self.trusted_until(entry.account) > 0)
        };
        let Some(reserved) = opened.map(|open| open.amount).or_else(trusted) else {
            self.findings
                .add(format!("attempt {attempt} of {key} ends twice, or without a reservation"));
            return Ok(None);
        };
        // A request without a row ended long ago, and retention has removed it.
        if let Some(stored) = stored {
            let agrees = stored.reserved == reserved && expected_end(stored) == Some(end);
            self.require(agrees, || format!("attempt {attempt} of {key} and its journal disagree"));
            self.multiset_check.journalled(Item::Attempt(*key, attempt));
        }
        let charged =
            if let JournalledEnd::Settled(charged) = end { charged } else { BucketAmounts::ZERO };
        if let Some(OpenReservation { at, .. }) = opened.filter(|_| !self.is_incremental) {
            self.follow_charge(entry.account, at, charged)?;
        }
        self.require(reserved.checked_sub(charged).is_some(), || {
            format!("attempt {attempt} of {key} is charged more than was reserved")
        });
        let whole = end != JournalledEnd::Released || entry.amount == reserved;
        self.require(whole && key.account == entry.account, || {
            format!("entry {} does not match its reservation", entry.sequence)
        });
        if self.is_incremental {
            record.map_or(Ok(()), |record| self.check_request(&record))?;
        }
        Ok(before.resolve(reserved, charged))
    }

    /// Checks a reservation that the journal does not end.
    fn check_open(
        &mut self,
        key: &RequestKey,
        attempt: AttemptId,
        reserved: BucketAmounts,
    ) -> StateResult {
        let record = self.source.request(key)?;
        let Some(stored) = record.as_ref().and_then(|record| record.attempt(attempt)) else {
            self.findings
                .add(format!("attempt {attempt} of {key} is reserved and its request is gone"));
            return Ok(());
        };
        let agrees = stored.reserved == reserved && expected_end(stored).is_none();
        self.require(agrees, || format!("attempt {attempt} of {key} and its journal disagree"));
        self.multiset_check.journalled(Item::Attempt(*key, attempt));
        if self.is_incremental {
            record.map_or(Ok(()), |record| self.check_request(&record))?;
        }
        Ok(())
    }
}
