//! `LedgerState` over one open write transaction, through which a batch of commands reads and
//! writes.

use super::rows::JournalPosition;
use super::tables::{self, OrFault, ReadOnly, Writable, get, put};
use crate::backend::LedgerTxn;
use cresset_base::{AccountId, ApplicationId, BootId, CredentialId, UnixMillis};
use cresset_ledger::{
    Account, Adjustment, Application, Balances, Command, Crashes, Credential, JournalEntry,
    JournalHead, LedgerState, RequestKey, RequestRecord, Reservation, StateResult,
};
use redb::{ReadableTable, WriteTransaction};
use std::collections::BTreeMap;

pub(crate) struct WriteState<'t> {
    meta: Writable<'t>,
    accounts: Writable<'t>,
    balances: Writable<'t>,
    applications: Writable<'t>,
    credentials: Writable<'t>,
    digests: Writable<'t>,
    grants: Writable<'t>,
    requests: Writable<'t>,
    ended: Writable<'t>,
    reservations: Writable<'t>,
    crashes: Writable<'t>,
    entries: Writable<'t>,
    entries_by_account: Writable<'t>,
    archive: ReadOnly,
    position: JournalPosition,
    changed: bool,
    /// Rows that most commands of a batch change again. They are written once, at its end.
    changed_accounts: BTreeMap<AccountId, Account>,
    changed_balances: BTreeMap<AccountId, Balances>,
    changed_credentials: BTreeMap<CredentialId, Credential>,
}

impl<'t> WriteState<'t> {
    /// Opens every table. Time goes on from `now`, or from the latest stored time where that is
    /// later.
    pub(crate) fn open(
        txn: &'t WriteTransaction,
        archive: ReadOnly,
        now: UnixMillis,
    ) -> StateResult<Self> {
        let meta = txn.open_table(tables::META).or_fault()?;
        let stored = get::<JournalPosition>(&meta, tables::PROGRESS)?.unwrap_or_default();
        let position = JournalPosition { clock: stored.clock.max(now), ..stored };
        Ok(Self {
            meta,
            accounts: txn.open_table(tables::ACCOUNTS).or_fault()?,
            balances: txn.open_table(tables::BALANCES).or_fault()?,
            applications: txn.open_table(tables::APPLICATIONS).or_fault()?,
            credentials: txn.open_table(tables::CREDENTIALS).or_fault()?,
            digests: txn.open_table(tables::DIGESTS).or_fault()?,
            grants: txn.open_table(tables::GRANTS).or_fault()?,
            requests: txn.open_table(tables::REQUESTS).or_fault()?,
            ended: txn.open_table(tables::ENDED).or_fault()?,
            reservations: txn.open_table(tables::RESERVATIONS).or_fault()?,
            crashes: txn.open_table(tables::CRASHES).or_fault()?,
            entries: txn.open_table(tables::ENTRIES).or_fault()?,
            entries_by_account: txn.open_table(tables::ENTRIES_BY_ACCOUNT).or_fault()?,
            archive,
            position,
            changed: false,
            changed_accounts: BTreeMap::new(),
            changed_balances: BTreeMap::new(),
            changed_credentials: BTreeMap::new(),
        })
    }

    /// Writes the rows kept until now and the position of journal and time. False when no row was
    /// changed, so that no commit is needed.
    pub(crate) fn finish(mut self) -> StateResult<bool> {
        if self.changed {
            for (id, account) in &self.changed_accounts {
                put(&mut self.accounts, id.0.as_bytes(), account)?;
            }
            for (id, balances) in &self.changed_balances {
                put(&mut self.balances, id.0.as_bytes(), balances)?;
            }
            for (id, credential) in &self.changed_credentials {
                put(&mut self.credentials, id.0.as_bytes(), credential)?;
            }
            put(&mut self.meta, tables::PROGRESS, &self.position)?;
        }
        Ok(self.changed)
    }
}

/// All commands of a batch have one time.
impl LedgerTxn for WriteState<'_> {
    fn time_of(&self, _: &Command) -> UnixMillis {
        self.position.clock
    }

    fn admission_block(&self, _: BootId) -> Option<&'static str> {
        None
    }
}

impl LedgerState for WriteState<'_> {
    fn account(&self, id: AccountId) -> StateResult<Option<Account>> {
        match self.changed_accounts.get(&id) {
            Some(account) => Ok(Some(account.clone())),
            None => get(&self.accounts, id.0.as_bytes()),
        }
    }

    fn put_account(&mut self, account: &Account) -> StateResult {
        self.changed = true;
        self.changed_accounts.insert(account.id, account.clone());
        Ok(())
    }

    fn balances(&self, id: AccountId) -> StateResult<Balances> {
        match self.changed_balances.get(&id) {
            Some(balances) => Ok(*balances),
            None => get(&self.balances, id.0.as_bytes()).map(Option::unwrap_or_default),
        }
    }

    fn put_balances(&mut self, id: AccountId, balances: &Balances) -> StateResult {
        self.changed = true;
        self.changed_balances.insert(id, *balances);
        Ok(())
    }

    fn application(&self, id: ApplicationId) -> StateResult<Option<Application>> {
        get(&self.applications, id.0.as_bytes())
    }

    fn put_application(&mut self, application: &Application) -> StateResult {
        self.changed = true;
        let key = application.id.0.as_bytes();
        put(&mut self.applications, key, application)
    }

    fn credential(&self, id: CredentialId) -> StateResult<Option<Credential>> {
        match self.changed_credentials.get(&id) {
            Some(credential) => Ok(Some(credential.clone())),
            None => get(&self.credentials, id.0.as_bytes()),
        }
    }

    fn credential_by_digest(&self, digest: &[u8; 32]) -> StateResult<Option<Credential>> {
        match get(&self.digests, digest)? {
            Some(id) => self.credential(id),
            None => Ok(None),
        }
    }

    fn put_credential(&mut self, credential: &Credential) -> StateResult {
        self.changed = true;
        // The digest of a credential never changes.
        if self.digests.get(credential.digest.as_slice()).or_fault()?.is_none() {
            put(&mut self.digests, &credential.digest, &credential.id)?;
        }
        self.changed_credentials.insert(credential.id, credential.clone());
        Ok(())
    }

    fn adjustment(&self, account: AccountId, reference: &str) -> StateResult<Option<Adjustment>> {
        get(&self.grants, &tables::grant_key(account, reference))
    }

    fn put_adjustment(
        &mut self,
        account: AccountId,
        reference: &str,
        granted: Adjustment,
    ) -> StateResult {
        self.changed = true;
        let key = tables::grant_key(account, reference);
        put(&mut self.grants, &key, &granted)
    }

    fn request(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>> {
        get(&self.requests, &tables::request_key(key))
    }

    fn archived(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>> {
        get(&self.archive, &tables::request_key(key))
    }

    fn put_request(&mut self, record: &RequestRecord) -> StateResult {
        self.changed = true;
        let key = tables::request_key(&record.key);
        if let Some(at) = record.latest().finished_at {
            put(&mut self.ended, &tables::due_key(at, &key), &())?;
        }
        put(&mut self.requests, &key, record)
    }

    /// Earlier ends of the request stay in the index of ended ones, which a sweep clears.
    fn remove_request(&mut self, key: &RequestKey) -> StateResult {
        self.changed = true;
        self.requests.remove(tables::request_key(key).as_slice()).or_fault()?;
        Ok(())
    }

    fn reservation(&self, key: &RequestKey) -> StateResult<Option<Reservation>> {
        get(&self.reservations, &tables::request_key(key))
    }

    fn put_reservation(&mut self, reservation: &Reservation) -> StateResult {
        self.changed = true;
        let key = tables::request_key(&reservation.key);
        put(&mut self.reservations, &key, reservation)
    }

    fn remove_reservation(&mut self, key: &RequestKey) -> StateResult {
        self.changed = true;
        self.reservations.remove(tables::request_key(key).as_slice()).or_fault()?;
        Ok(())
    }

    fn foreign_reservations(&self, boot: BootId, limit: usize) -> StateResult<Vec<Reservation>> {
        let open = tables::rows::<Reservation>(&self.reservations)?;
        let open = open.map(|row| row.map(|(_, reservation)| reservation));
        let foreign = open.filter(|row| row.as_ref().map_or(true, |open| open.boot != boot));
        foreign.take(limit).collect()
    }

    fn crashes(&self, account: AccountId, fingerprint: &[u8; 32]) -> StateResult<Option<Crashes>> {
        get(&self.crashes, &tables::crash_key(account, fingerprint))
    }

    fn put_crashes(
        &mut self,
        account: AccountId,
        fingerprint: &[u8; 32],
        crashes: Crashes,
    ) -> StateResult {
        self.changed = true;
        let key = tables::crash_key(account, fingerprint);
        put(&mut self.crashes, &key, &crashes)
    }

    fn remove_crashes(&mut self, account: AccountId, fingerprint: &[u8; 32]) -> StateResult {
        self.changed = true;
        self.crashes.remove(tables::crash_key(account, fingerprint).as_slice()).or_fault()?;
        Ok(())
    }

    /// All accounts share one chain.
    fn head(&self, _: AccountId) -> StateResult<JournalHead> {
        Ok(self.position.head)
    }

    fn append(&mut self, entry: &JournalEntry) -> StateResult {
        self.changed = true;
        self.position.head = JournalHead { sequence: entry.sequence, hash: entry.hash };
        let place = tables::entry_key(entry.account, entry.sequence);
        put(&mut self.entries_by_account, &place, &())?;
        put(&mut self.entries, &entry.sequence.to_be_bytes(), entry)
    }
}
