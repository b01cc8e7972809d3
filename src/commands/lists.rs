//! Lists of rows, a page at a time: an account may have millions of requests, and neither their
//! number nor their size may decide how much memory the node needs.

use super::error::AdminError;
use super::view;
use cresset_base::{AccountId, ApplicationId, CredentialId, RequestId, UnixMillis};
use cresset_ledger::{
    Account, AttemptState, Credential, CredentialKind, JournalEntry, Refusal, RequestRecord,
};
use cresset_store::{Snapshot, Store};
use serde::Serialize;
use serde_json::{Value, json};
use std::ops::Range;

/// Stored rows that are looked at for one page. A page of requests takes about 2.5 MB while it is
/// made, and a few milliseconds. Each thread that made or sent one keeps about as much for the
/// next.
pub(super) const PAGE_ROWS: usize = 250;

type Result<T = Value, E = AdminError> = std::result::Result<T, E>;

/// Some rows in the order of their keys, and the key after which the next ones begin.
struct ListPage<T, K> {
    rows: Vec<T>,
    next_after: Option<K>,
}

impl<T, K: Serialize> ListPage<T, K> {
    /// `rows` were asked for with one more than `limit`, which shows whether there are more.
    fn of(mut rows: Vec<T>, limit: usize, key: impl Fn(&T) -> K) -> Self {
        let has_more = rows.len() > limit;
        rows.truncate(limit);
        let next_after = rows.last().filter(|_| has_more).map(key);
        Self { rows, next_after }
    }

    fn view(&self, data: impl IntoIterator<Item = Value>) -> Value {
        let more = json!({ "has_more": self.next_after.is_some(), "next_after": self.next_after });
        view::merged(view::list(data), more)
    }
}

pub(super) async fn find_account(snapshot: &dyn Snapshot, id: AccountId) -> Result<Account> {
    Ok(snapshot.account(id).await?.ok_or(Refusal::AccountNotFound)?)
}

pub(super) async fn accounts(
    store: Store,
    after: Option<AccountId>,
    matching: Option<String>,
) -> Result {
    let (snapshot, now) = (store.read().await?, store.now());
    let found = match matching {
        None => snapshot.accounts(after, PAGE_ROWS + 1).await?,
        Some(text) => matching_accounts(&*snapshot, after, &text.to_lowercase()).await?,
    };
    let page = ListPage::of(found, PAGE_ROWS, |row| row.id);
    let mut rows = Vec::new();
    for account in &page.rows {
        rows.push(view::account(account, snapshot.balances(account.id).await?, now));
    }
    Ok(page.view(rows))
}

/// One more account than a page has whose lower-case name contains `text`, or as many as there are.
async fn matching_accounts(
    snapshot: &dyn Snapshot,
    mut after: Option<AccountId>,
    text: &str,
) -> Result<Vec<Account>> {
    let mut found = Vec::new();
    while found.len() <= PAGE_ROWS {
        let rows = snapshot.accounts(after, PAGE_ROWS).await?;
        let Some(last) = rows.last() else { break };
        after = Some(last.id);
        found.extend(rows.into_iter().filter(|row| row.name.to_lowercase().contains(text)));
    }
    found.truncate(PAGE_ROWS + 1);
    Ok(found)
}

/// The accounts with this name, oldest first.
pub(super) async fn accounts_named(store: Store, name: String) -> Result<Vec<AccountId>> {
    let (snapshot, mut found, mut after) = (store.read().await?, Vec::new(), None);
    loop {
        let rows = snapshot.accounts(after, PAGE_ROWS).await?;
        let Some(last) = rows.last() else { return Ok(found) };
        after = Some(last.id);
        found.extend(rows.iter().filter(|row| row.name == name).map(|row| row.id));
    }
}

pub(super) async fn keys(store: Store, of: AccountId, after: Option<CredentialId>) -> Result {
    let snapshot = store.read().await?;
    find_account(&*snapshot, of).await?;
    let rows = snapshot.credentials(after, PAGE_ROWS + 1).await?;
    let page = ListPage::of(rows, PAGE_ROWS, |row| row.id);
    let wanted = |row: &&Credential| row.account == of && row.kind == CredentialKind::ApiKey;
    let now = store.now();
    Ok(page.view(page.rows.iter().filter(wanted).map(|row| view::credential(row, now))))
}

pub(super) async fn applications(
    store: Store,
    of: Option<AccountId>,
    after: Option<ApplicationId>,
) -> Result {
    let snapshot = store.read().await?;
    if let Some(id) = of {
        find_account(&*snapshot, id).await?;
    }
    let rows = snapshot.applications(after, PAGE_ROWS + 1).await?;
    let mut page = ListPage::of(rows, PAGE_ROWS, |row| row.id);
    page.rows.retain(|row| of.is_none_or(|account| row.account == account));
    let ids = page.rows.iter().map(|row| row.id).collect::<Vec<_>>();
    let wanted =
        |row: &Credential| row.application.is_some_and(|id| ids.binary_search(&id).is_ok());
    let tokens = if ids.is_empty() { Vec::new() } else { credentials(&*snapshot, wanted).await? };
    let tokens_of = |id: ApplicationId| -> Vec<Credential> {
        tokens.iter().filter(|token| token.application == Some(id)).cloned().collect()
    };
    let now = store.now();
    Ok(page.view(page.rows.iter().map(|row| view::application(row, &tokens_of(row.id), now))))
}

/// The credentials of all accounts that are `wanted`. All of them are looked at, because nothing
/// finds them by what they belong to.
pub(super) async fn credentials(
    snapshot: &dyn Snapshot,
    wanted: impl Fn(&Credential) -> bool,
) -> Result<Vec<Credential>> {
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let rows = snapshot.credentials(after, PAGE_ROWS).await?;
        let Some(last) = rows.last() else { return Ok(found) };
        after = Some(last.id);
        found.extend(rows.into_iter().filter(&wanted));
    }
}

pub(super) async fn statement(
    store: Store,
    of: AccountId,
    after: u64,
    limit: usize,
    period: Range<UnixMillis>,
) -> Result {
    let limit = limit.min(PAGE_ROWS);
    let snapshot = store.read().await?;
    let account = find_account(&*snapshot, of).await?;
    // All entries are looked at: after a step of the clock an earlier time follows a later one.
    let entries = snapshot.entries(of, after, limit + 1).await?;
    let page = ListPage::of(entries, limit, |entry| entry.sequence);
    let mut rows = Vec::new();
    for entry in page.rows.iter().filter(|entry| period.contains(&entry.at)) {
        let request = match entry.settlement() {
            Some((key, _)) => snapshot.request(&key).await?,
            None => None,
        };
        rows.push(view::entry(entry, request.as_ref()));
    }
    let lines = page.view(rows);
    Ok(view::merged(view::credits(&account, snapshot.balances(of).await?), lines))
}

/// Which requests of an account are listed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RequestFilter {
    pub state: Option<AttemptState>,
    /// Those that came at this time or later.
    pub since: Option<UnixMillis>,
}

/// The requests whose first reservations are among the account's next entries, in the order of
/// time. Requests that the ledger has forgotten since are left out.
pub(super) async fn requests(
    store: Store,
    of: AccountId,
    filter: RequestFilter,
    after: u64,
) -> Result {
    let snapshot = store.read().await?;
    find_account(&*snapshot, of).await?;
    let entries = snapshot.entries(of, after, PAGE_ROWS + 1).await?;
    let page = ListPage::of(entries, PAGE_ROWS, |entry| entry.sequence);
    let mut rows = Vec::new();
    let is_late = |entry: &&JournalEntry| filter.since.is_none_or(|since| entry.at >= since);
    for entry in page.rows.iter().filter(is_late) {
        let Some((key, attempt)) = entry.reservation() else { continue };
        let begun_here = |record: &RequestRecord| record.attempts[0].id == attempt;
        let wanted =
            |record: &RequestRecord| filter.state.is_none_or(|s| record.latest().state == s);
        let found = snapshot.request(&key).await?;
        rows.extend(found.filter(begun_here).filter(wanted).as_ref().map(view::request));
    }
    Ok(page.view(rows))
}

/// An account's requests with this id in every scope; those of all accounts if none is named.
pub(super) async fn requests_by_id(
    store: Store,
    request: RequestId,
    account: Option<AccountId>,
) -> Result<Vec<RequestRecord>> {
    let snapshot = store.read().await?;
    if let Some(account) = account {
        return Ok(snapshot.requests_by_id(account, request).await?);
    }
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let accounts = snapshot.accounts(after, PAGE_ROWS).await?;
        let Some(last) = accounts.last() else { return Ok(found) };
        after = Some(last.id);
        for account in accounts {
            found.extend(snapshot.requests_by_id(account.id, request).await?);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AdminCommand, Operator};
    use cresset_base::{AttemptId, Clock, SystemClock};
    use cresset_ledger::{Admit, Bucket, Command, FailureCode, ReleaseCause, RequestKey};
    use cresset_store::{ClockLimits, Limits, RequestSettings, StoreConfig};
    use futures_util::future::join_all;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    async fn opened(store: &Store) -> (AccountId, CredentialId) {
        let settings = crate::test_settings();
        let operator = Operator::of_store(store, &settings);
        let (name, premium) = ("a".to_owned(), 1 << 40);
        let create =
            AdminCommand::AccountCreate { name, plan: None, trial: 0, premium, reference: None };
        let account = serde_json::from_value(operator.execute(create).await.unwrap()["id"].take());
        let account = account.unwrap();
        let create = AdminCommand::KeyCreate { account, label: None, expires_at: None };
        let key = serde_json::from_value(operator.execute(create).await.unwrap()["id"].take());
        (account, key.unwrap())
    }

    fn admit(store: &Store, (account, credential): (AccountId, CredentialId)) -> Admit {
        let key = RequestKey { account, application: None, request: RequestId::generate() };
        Admit::unlimited(key, credential, store.boot())
    }

    /// Fails each request once; all of them then have a second attempt.
    async fn fail_once(store: &Store, requests: &[Admit]) {
        for admits in requests.chunks(400) {
            let tried = admits.iter().map(async |admit| {
                store.submit(Command::Admit(Box::new(admit.clone()))).await.unwrap();
                let (key, attempt) = (admit.key, admit.attempt);
                let cause = ReleaseCause::Failed(FailureCode::Overloaded);
                store.submit(Command::Release { key, attempt, cause }).await.unwrap();
                let again = Admit { attempt: AttemptId::generate(), ..admit.clone() };
                store.submit(Command::Admit(Box::new(again))).await.unwrap();
            });
            join_all(tried).await;
        }
    }

    /// The clock of a machine that somebody sets.
    struct SteppedClock(AtomicU64);

    impl Clock for SteppedClock {
        fn now(&self) -> UnixMillis {
            UnixMillis(self.0.load(Ordering::Relaxed))
        }
    }

    #[tokio::test]
    async fn months_add_up_to_the_balance_whatever_the_clock_did() {
        const DAY: u64 = 24 * 3_600_000;
        let [november, december, january] =
            [1_793_491_200_000, 1_796_083_200_000, 1_798_761_600_000];
        let folder = tempfile::tempdir().unwrap();
        let config = StoreConfig::folder(folder.path());
        Store::init(&config).unwrap();
        let mut account = None;
        let (mut expect, mut found) = ([0_i64; 2], [0_i64; 2]);
        for (units, at, month) in [
            (1, november + 20 * DAY, 0),
            (10, december + 2 * DAY, 1),
            (100, november + 27 * DAY, 0),
            (1_000, december + 3 * DAY, 1),
            (10_000, november + 28 * DAY, 0),
        ] {
            let requests = RequestSettings { min_free_mib: 0, ..RequestSettings::default() };
            let clock = ClockLimits { accepted: true, ..ClockLimits::default() };
            let limits = Limits { requests, clock, ..Limits::default() };
            let clock = Arc::new(SteppedClock(AtomicU64::new(at)));
            let store = Store::open_briefly(&config, clock, limits).unwrap();
            let id = match account {
                None => opened(&store).await.0,
                Some(id) => id,
            };
            account = Some(id);
            let (bucket, reference) = (Bucket::Premium, format!("order {units}"));
            let debit = AdminCommand::CreditDebit { account: id, bucket, units, reference };
            let settings = crate::test_settings();
            Operator::of_store(&store, &settings).execute(debit).await.unwrap();
            expect[month] -= i64::try_from(units).unwrap();
            if units < 10_000 {
                continue;
            }
            expect[0] += 1 << 40;
            for (month, period) in [november..december, december..january].into_iter().enumerate() {
                let period = UnixMillis(period.start)..UnixMillis(period.end);
                let page = statement(store.clone(), id, 0, usize::MAX, period).await.unwrap();
                let rows = page["data"].as_array().unwrap().iter();
                let change = |row: &Value| row["changeUnits"].as_str().unwrap().parse::<i64>();
                found[month] = rows.map(|row| change(row).unwrap()).sum();
                let balance = &page["processingEligibleUnits"];
                assert_eq!(*balance, expect.iter().sum::<i64>().to_string());
            }
        }
        assert_eq!(found, expect);
    }

    #[tokio::test]
    async fn pages_are_bounded_and_hold_every_request_once() {
        let folder = tempfile::tempdir().unwrap();
        let config = StoreConfig::folder(folder.path());
        Store::init(&config).unwrap();
        let settings = RequestSettings { min_free_mib: 0, ..RequestSettings::default() };
        let limits = Limits { requests: settings, ..Limits::default() };
        let store = Store::open_briefly(&config, Arc::new(SystemClock), limits).unwrap();
        let owner = opened(&store).await;
        let sent: Vec<Admit> = (0..PAGE_ROWS).map(|_| admit(&store, owner)).collect();
        fail_once(&store, &sent).await;
        let (mut listed, mut after, mut pages) = (Vec::new(), 0, 0);
        let more = loop {
            let page =
                requests(store.clone(), owner.0, RequestFilter::default(), after).await.unwrap();
            let rows = page["data"].as_array().unwrap();
            assert!(rows.len() <= PAGE_ROWS, "a page is bounded");
            listed.extend(rows.iter().map(|row| row["id"].as_str().unwrap().to_owned()));
            pages += 1;
            match page["next_after"].as_u64() {
                Some(next) => after = next,
                None => break page["has_more"].clone(),
            }
        };
        assert_eq!((pages, more), (4, json!(false)), "three entries a request and one grant");
        let mut expect: Vec<_> = sent.iter().map(|admit| admit.key.request.to_string()).collect();
        listed.sort();
        expect.sort();
        assert_eq!(listed, expect);
        let listed = async |state, since| {
            let filter = RequestFilter { state, since };
            requests(store.clone(), owner.0, filter, 0).await.unwrap()["data"].take()
        };
        let now = store.now();
        assert_ne!(listed(None, Some(UnixMillis(now.0 - 3_600_000))).await, json!([]));
        assert_eq!(listed(None, Some(UnixMillis(now.0 + 3_600_000))).await, json!([]));
        let none = listed(Some(AttemptState::Failed), None).await;
        assert_eq!(none, json!([]), "all of them run again");
        let first =
            statement(store.clone(), owner.0, 0, usize::MAX, UnixMillis(0)..UnixMillis(u64::MAX))
                .await
                .unwrap();
        assert_eq!(first["data"].as_array().unwrap().len(), PAGE_ROWS);
        let found = requests_by_id(store, sent[7].key.request, None).await.unwrap();
        assert_eq!(found.len(), 1);
    }
}
