//! What the store promises, checked on real files and on disks that fail.

mod bench;
mod disk;
mod faults;
mod fuzz;
mod kill;
mod layout;
mod lifecycle;
mod media;
mod model;
mod refusals;
mod restore;
mod schema;
mod time;

use super::EmbeddedBackend;
use super::disk::File;
use crate::clock::{Clock, UnixMillis};
use crate::ids::{
    AccountId, ApplicationId, AttemptId, BootId, CredentialId, ModelId, RequestId, SessionId,
};
use crate::ledger::commands::{ReleaseCause, SettleEnd};
use crate::ledger::{
    Admit, Bucket, Command, Credential, CredentialKind, FailureCode, FinishReason, Microcredits,
    Outcome, Prices, Refusal, RequestKey, Usage,
};
use crate::store::{Limits, Store, StoreConfig, StoreError};
use futures_util::FutureExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tempfile::TempDir;
use uuid::Uuid;

/// The answer of a read; the embedded backend's is there at once.
trait Now: Future + Sized {
    fn now(self) -> Self::Output {
        self.now_or_never().expect("an embedded read is ready")
    }
}

impl<F: Future> Now for F {}

/// A clock that stands where it is put.
#[derive(Clone, Default)]
struct TestClock(Arc<AtomicU64>);

impl TestClock {
    fn at(now: u64) -> Self {
        Self(Arc::new(AtomicU64::new(now)))
    }

    fn set(&self, now: u64) {
        self.0.store(now, Ordering::Relaxed);
    }
}

impl Clock for TestClock {
    fn now(&self) -> UnixMillis {
        UnixMillis(self.0.load(Ordering::Relaxed))
    }
}

/// A folder with a ledger whose account 1 has one key and a premium balance.
struct Fixture {
    dir: TempDir,
    clock: TestClock,
}

impl Fixture {
    fn new(balance: u64) -> Self {
        let fixture = Self { dir: tempfile::tempdir().unwrap(), clock: TestClock::at(1_000_000) };
        Store::init(&fixture.config()).unwrap();
        let store = fixture.open();
        for command in opening(balance) {
            store.submit_blocking(command).unwrap();
        }
        fixture
    }

    fn config(&self) -> StoreConfig {
        StoreConfig::folder(self.dir.path())
    }

    fn open(&self) -> Store {
        self.try_open().unwrap()
    }

    fn try_open(&self) -> Result<Store, StoreError> {
        Store::open(&self.config(), Arc::new(self.clock.clone()), Limits::default())
    }
}

/// Account 1 with a key and `balance` premium units.
fn opening(balance: u64) -> Vec<Command> {
    let account = AccountId(id(1));
    vec![
        Command::CreateAccount { id: account, name: "one".into(), plan: "basic".into() },
        issue(1, 1, None),
        Command::Grant {
            account,
            bucket: Bucket::Premium,
            units: Microcredits::new(balance).unwrap(),
            reference: "opening".into(),
        },
    ]
}

/// What a process killed now would leave behind.
fn image(of: &Fixture) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    for file in File::ALL {
        std::fs::copy(of.dir.path().join(file.name()), dir.path().join(file.name())).unwrap();
    }
    let clock = of.clock.clone();
    Fixture { dir, clock }
}

fn id(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

fn key(request: u128) -> RequestKey {
    RequestKey { account: AccountId(id(1)), application: None, request: RequestId(id(request)) }
}

fn issue(credential: u128, account: u128, application: Option<u128>) -> Command {
    let mut digest = [0; 32];
    digest[..16].copy_from_slice(&credential.to_be_bytes());
    let kind = match application {
        Some(_) => CredentialKind::AccessToken,
        None => CredentialKind::ApiKey,
    };
    let credential = Credential {
        id: CredentialId(id(credential)),
        kind,
        account: AccountId(id(account)),
        application: application.map(|application| ApplicationId(id(application))),
        label: Some("label".into()),
        digest,
        hint: "hint".into(),
        created_at: UnixMillis(0),
        expires_at: None,
        revoked_at: None,
    };
    Command::IssueCredential { credential }
}

/// An admission of account 1 that reserves `cost` units.
fn admit(request: u128, attempt: u128, boot: BootId, cost: u32) -> Command {
    let mut fingerprint = [0; 32];
    fingerprint[..16].copy_from_slice(&request.to_be_bytes());
    Command::Admit(Box::new(Admit {
        key: key(request),
        credential: CredentialId(id(1)),
        attempt: AttemptId(id(attempt)),
        boot,
        fingerprint,
        session: SessionId(id(1)),
        model: ModelId(id(1)),
        stream: true,
        prompt_tokens: 0,
        max_output_tokens: cost,
        prices: Prices { revision: 1, input: 1_000_000, cached_input: 500_000, output: 1_000_000 },
        max_concurrent: 1_000,
        retention_ms: u64::MAX,
    }))
}

fn start(request: u128, attempt: u128) -> Command {
    Command::Start { key: key(request), attempt: AttemptId(id(attempt)) }
}

fn settle(request: u128, attempt: u128, charge: u32) -> Command {
    let usage = Usage { completion_tokens: charge, ..Usage::default() };
    Command::Settle {
        key: key(request),
        attempt: AttemptId(id(attempt)),
        usage,
        end: SettleEnd::Completed(FinishReason::Stop),
    }
}

fn release(request: u128, attempt: u128) -> Command {
    Command::Release {
        key: key(request),
        attempt: AttemptId(id(attempt)),
        cause: ReleaseCause::Failed(FailureCode::GenerationFailed),
    }
}

/// Premium units of account 1: debited, reserved.
fn spent(store: &Store) -> (u64, u64) {
    let balances = store.read().now().unwrap().balances(AccountId(id(1))).now().unwrap();
    let premium = balances.premium;
    (premium.debited.get(), premium.reserved.get())
}

fn is_admitted(outcome: &Result<Outcome, StoreError>) -> bool {
    matches!(outcome, Ok(Outcome::Admitted(_)))
}

fn assert_sound(store: &Store) {
    assert_eq!(store.audit().unwrap().violations, Vec::<String>::new());
    assert!(store.healthy());
}

fn refusal(outcome: Result<Outcome, StoreError>) -> Refusal {
    match outcome {
        Err(StoreError::Refused(refusal)) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

fn unusable<T>(result: Result<T, StoreError>) -> String {
    match result {
        Err(StoreError::Unusable(why)) => why,
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("it was used"),
    }
}
