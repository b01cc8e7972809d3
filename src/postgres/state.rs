//! `LedgerState` over the rows of one transaction in memory. What the commands were known to need
//! was read before; anything else is read when it is asked for, in the same transaction.

use super::driver::Driver;
use super::failure::Failure;
use super::keys::{Keys, credential_named};
use super::reading;
use super::rows::{AccountRow, BatchRows, Rows};
use super::session::DatabaseSession;
use cresset_base::{AccountId, ApplicationId, BootId, CredentialId, UnixMillis};
use cresset_ledger::{
    Account, Adjustment, Application, Balances, Command, Crashes, Credential, JournalEntry,
    JournalHead, LedgerState, RequestKey, RequestRecord, Reservation, StateError, StateResult,
};
use cresset_store::LedgerTxn;
use std::cell::RefCell;
use std::hash::Hash;

pub(crate) struct BatchState<'t> {
    driver: &'t Driver,
    session: &'t DatabaseSession,
    now: UnixMillis,
    /// The boot whose row in the table of nodes this transaction holds.
    boot: Option<BootId>,
    may_admit: bool,
    rows: RefCell<BatchRows>,
    /// Why rows could not be read.
    failure: RefCell<Option<Failure>>,
}

impl<'t> BatchState<'t> {
    pub(super) fn new(
        driver: &'t Driver,
        session: &'t DatabaseSession,
        now: UnixMillis,
        boot: Option<BootId>,
        (may_admit, rows): (bool, BatchRows),
    ) -> Self {
        let (rows, failure) = (RefCell::new(rows), RefCell::default());
        Self { driver, session, now, boot, may_admit, rows, failure }
    }

    /// The rows as the commands leave them, or why some could not be read.
    pub(super) fn finish(self) -> Result<BatchRows, Failure> {
        match self.failure.into_inner() {
            Some(failure) => Err(failure),
            None => Ok(self.rows.into_inner()),
        }
    }

    fn load(&self, keys: &Keys) -> StateResult {
        let mut rows = self.rows.borrow_mut();
        let read = self.driver.wait(reading::read(self.session, keys, &mut rows));
        read.map_err(|failure| self.note(failure))
    }

    fn note(&self, failure: Failure) -> StateError {
        self.failure.borrow_mut().get_or_insert(failure).clone().into()
    }

    /// The row of a key; `need` names what to read where it is not known yet.
    fn get<K: Clone + Hash + Ord, T: Clone>(
        &self,
        table: impl Fn(&BatchRows) -> &Rows<K, T>,
        key: &K,
        need: impl FnOnce(&mut Keys),
    ) -> StateResult<Option<T>> {
        let known = table(&self.rows.borrow()).get(key);
        if let Some(row) = known {
            return row;
        }
        let mut keys = Keys::default();
        need(&mut keys);
        self.load(&keys)?;
        table(&self.rows.borrow()).get(key).unwrap_or(Ok(None))
    }

    fn account_row(&self, id: AccountId) -> StateResult<Option<AccountRow>> {
        self.get(|rows| &rows.accounts, &id, |keys| keys.accounts.extend([id]))
    }

    /// Changes the row of an account that is there.
    fn change_account(&self, id: AccountId, change: impl FnOnce(&mut AccountRow)) -> StateResult {
        let missing = || StateError::Corrupt(format!("account {id} has entries and no row"));
        let mut row = self.account_row(id)?.ok_or_else(missing)?;
        change(&mut row);
        self.rows.borrow_mut().accounts.put(id, row);
        Ok(())
    }

    /// The time of the last entry of the account that a command is about.
    fn clock_of(&self, command: &Command) -> StateResult<UnixMillis> {
        if let Command::Recover { boot, limit, .. } = command {
            self.foreign_reservations(*boot, limit.saturating_add(1))?;
            let rows = self.rows.borrow();
            return Ok(rows.accounts.all().map(|row| row.clock).max().unwrap_or_default());
        }
        let mut account = command.account();
        if let Some(id) = credential_named(command) {
            account = self.credential(id)?.map(|credential| credential.account);
        }
        let row = account.map(|id| self.account_row(id)).transpose()?;
        Ok(row.flatten().map_or(UnixMillis::default(), |row| row.clock))
    }
}

/// Each account has its own time.
impl LedgerTxn for BatchState<'_> {
    fn time_of(&self, command: &Command) -> UnixMillis {
        // What cannot be read now cannot be read by the command either, which then fails.
        self.now.max(self.clock_of(command).unwrap_or_default())
    }

    fn puts_off(&self, command: &Command) -> bool {
        let account = command.account();
        account.is_some_and(|account| self.rows.borrow().left_out.contains(&account))
    }

    fn admission_block(&self, boot: BootId) -> Option<&'static str> {
        if self.boot.is_some_and(|own| own != boot) {
            return Some("this node has begun anew: send the request again");
        }
        let why = "another node has taken the ledger over, because this one was not heard of: start it again";
        (!self.may_admit).then_some(why)
    }
}

impl LedgerState for BatchState<'_> {
    fn account(&self, id: AccountId) -> StateResult<Option<Account>> {
        Ok(self.account_row(id)?.map(|row| row.account))
    }

    fn put_account(&mut self, account: &Account) -> StateResult {
        let before = self.account_row(account.id)?;
        let row = match before {
            Some(row) => AccountRow { account: account.clone(), ..row },
            None => AccountRow::new(account.clone()),
        };
        self.rows.borrow_mut().accounts.put(account.id, row);
        Ok(())
    }

    fn balances(&self, id: AccountId) -> StateResult<Balances> {
        Ok(self.account_row(id)?.map(|row| row.balances).unwrap_or_default())
    }

    fn put_balances(&mut self, id: AccountId, balances: &Balances) -> StateResult {
        self.change_account(id, |row| row.balances = *balances)
    }

    fn application(&self, id: ApplicationId) -> StateResult<Option<Application>> {
        self.get(|rows| &rows.applications, &id, |keys| keys.applications.extend([id]))
    }

    fn put_application(&mut self, application: &Application) -> StateResult {
        self.rows.borrow_mut().applications.put(application.id, application.clone());
        Ok(())
    }

    fn credential(&self, id: CredentialId) -> StateResult<Option<Credential>> {
        self.get(|rows| &rows.credentials, &id, |keys| keys.add_owner(id))
    }

    fn credential_by_digest(&self, digest: &[u8; 32]) -> StateResult<Option<Credential>> {
        self.get(|rows| &rows.digests, digest, |keys| keys.digests.extend([*digest]))
    }

    fn put_credential(&mut self, credential: &Credential) -> StateResult {
        let mut rows = self.rows.borrow_mut();
        rows.digests.put(credential.digest, credential.clone());
        rows.credentials.put(credential.id, credential.clone());
        Ok(())
    }

    fn adjustment(&self, account: AccountId, reference: &str) -> StateResult<Option<Adjustment>> {
        let key = (account, reference.to_owned());
        self.get(|rows| &rows.adjustments, &key, |keys| keys.grants.extend([key.clone()]))
    }

    fn put_adjustment(
        &mut self,
        account: AccountId,
        reference: &str,
        granted: Adjustment,
    ) -> StateResult {
        self.rows.borrow_mut().adjustments.put((account, reference.to_owned()), granted);
        Ok(())
    }

    fn request(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>> {
        self.get(|rows| &rows.requests, key, |keys| keys.add_request(*key))
    }

    /// Old requests stay where they are until they are forgotten.
    fn archived(&self, _: &RequestKey) -> StateResult<Option<RequestRecord>> {
        Ok(None)
    }

    fn put_request(&mut self, record: &RequestRecord) -> StateResult {
        self.rows.borrow_mut().requests.put(record.key, record.clone());
        Ok(())
    }

    fn remove_request(&mut self, key: &RequestKey) -> StateResult {
        self.rows.borrow_mut().requests.remove(key);
        Ok(())
    }

    fn reservation(&self, key: &RequestKey) -> StateResult<Option<Reservation>> {
        self.get(|rows| &rows.reservations, key, |keys| keys.add_request(*key))
    }

    fn put_reservation(&mut self, reservation: &Reservation) -> StateResult {
        self.rows.borrow_mut().reservations.put(reservation.key, *reservation);
        Ok(())
    }

    fn remove_reservation(&mut self, key: &RequestKey) -> StateResult {
        self.rows.borrow_mut().reservations.remove(key);
        Ok(())
    }

    fn foreign_reservations(&self, boot: BootId, limit: usize) -> StateResult<Vec<Reservation>> {
        loop {
            let ended = self.rows.borrow().reservations.removed().len();
            let asked = limit.saturating_add(ended);
            let found = self.driver.wait(reading::foreign(self.session, boot, asked));
            let keys = found.map_err(|failure| self.note(failure))?;
            if !keys.requests.is_empty() {
                self.load(&keys)?;
            }
            let mut open = Vec::new();
            for key in in_order(&keys) {
                open.extend(self.reservation(&key)?.filter(|open| open.boot != boot));
            }
            // Where others ended some of them before the lock was had, there may be more.
            if open.len() >= limit || keys.requests.len() < asked {
                open.truncate(limit);
                return Ok(open);
            }
        }
    }

    fn crashes(&self, account: AccountId, fingerprint: &[u8; 32]) -> StateResult<Option<Crashes>> {
        let key = (account, *fingerprint);
        self.get(
            |rows| &rows.crashes,
            &key,
            |keys| {
                keys.accounts.insert(account);
                keys.inputs.insert(key);
            },
        )
    }

    fn put_crashes(
        &mut self,
        account: AccountId,
        fingerprint: &[u8; 32],
        crashes: Crashes,
    ) -> StateResult {
        self.rows.borrow_mut().crashes.put((account, *fingerprint), crashes);
        Ok(())
    }

    fn remove_crashes(&mut self, account: AccountId, fingerprint: &[u8; 32]) -> StateResult {
        self.rows.borrow_mut().crashes.remove(&(account, *fingerprint));
        Ok(())
    }

    fn rate_due(&self, account: AccountId) -> StateResult<Option<u64>> {
        self.account_row(account)?;
        Ok(Some(self.rows.borrow().rates.get(&account).copied().unwrap_or_default()))
    }

    fn put_rate_due(&mut self, account: AccountId, due: Option<u64>) -> StateResult {
        self.rows.borrow_mut().rates.extend(due.map(|due| (account, due)));
        Ok(())
    }

    /// Each account has a chain of its own.
    fn head(&self, account: AccountId) -> StateResult<JournalHead> {
        Ok(self.account_row(account)?.map(|row| row.head).unwrap_or_default())
    }

    fn append(&mut self, entry: &JournalEntry) -> StateResult {
        self.change_account(entry.account, |row| {
            row.head = JournalHead { sequence: entry.sequence, hash: entry.hash };
            row.clock = row.clock.max(entry.at);
        })?;
        self.rows.borrow_mut().entries.push(entry.clone());
        Ok(())
    }
}

/// The requests in the order in which all backends release them: all scopes of an id lie together.
fn in_order(keys: &Keys) -> Vec<RequestKey> {
    let mut requests: Vec<_> = keys.requests.iter().copied().collect();
    requests.sort_by_key(|key| (key.account, key.request, key.application));
    requests
}
