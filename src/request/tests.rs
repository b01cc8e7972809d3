//! Requests that are found, joined, replayed and undone, over a ledger of their own and no model.

use super::guard::ReservationGuard;
use super::live::{Admission, LiveRequest};
use super::*;
use bytes::Bytes;
use cresset_base::{
    AccountId, AttemptId, CredentialId, ModelId, RequestId, SessionId, SystemClock, UnixMillis,
};
use cresset_catalogue::{Catalogue, testing};
use cresset_engine::{EngineError, EngineSettings};
use cresset_ledger::{
    Account, AdmissionRate, Admit, Attempt, AttemptState, BucketAmounts, Budgets, CalendarUse,
    Command, Credential, CredentialKind, FailureCode, FinishReason, Prices, Refusal, ReleaseCause,
    SettleEnd, TokenQuotas, Usage,
};
use cresset_models::testing::TinyLlama;
use cresset_pool::{DeviceBudget, ModelPool, ServedModel};
use cresset_store::{Limits, RequestSettings, Store, StoreConfig};
use cresset_telemetry::traces::TraceSettings;
use cresset_telemetry::traces::TraceSpan;
use cresset_text::TextModel;
use std::collections::BTreeMap;
use std::sync::Arc;
use tempfile::TempDir;

const INPUT: [u8; 32] = [1; 32];

/// A node without models, with one account and its key.
pub(super) struct Setup {
    pub services: Arc<Services>,
    caller: Arc<Caller>,
    folder: TempDir,
}

impl Setup {
    pub(super) async fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let config = StoreConfig::folder(folder.path());
        Store::init(&config).unwrap();
        let store = Store::open(&config, Arc::new(SystemClock), Limits::default()).unwrap();
        let catalogue = Catalogue::new(folder.path());
        let services = Services::new(ServiceParts {
            requests: RequestSettings::default(),
            plans: BTreeMap::from([("default".into(), Plan::default())]),
            traces: TraceSettings::default(),
            store,
            clock: Arc::new(SystemClock),
            catalogue,
            pool: ModelPool::new(&EngineSettings::default(), DeviceBudget::cpu(1 << 30)),
        });
        let (account, now) = (AccountId::generate(), UnixMillis(0));
        let credential = Credential {
            id: CredentialId::generate(),
            kind: CredentialKind::ApiKey,
            account,
            application: None,
            label: None,
            digest: [7; 32],
            hint: "hint".into(),
            created_at: now,
            expires_at: None,
            revoked_at: None,
            budgets: Budgets::default(),
            used: CalendarUse::default(),
        };
        let (name, plan) = ("a".to_owned(), "default".to_owned());
        let create = Command::CreateAccount {
            id: account,
            name: name.clone(),
            plan: plan.clone(),
            opening: BucketAmounts::ZERO,
        };
        services.store.submit(create).await.unwrap();
        let issue = Command::IssueCredential { credential: credential.clone() };
        services.store.submit(issue).await.unwrap();
        let account = Account::new(account, name, plan, now);
        Self { services, caller: Arc::new(Caller { account, credential }), folder }
    }

    pub(super) fn incoming(&self) -> IncomingRequest {
        IncomingRequest {
            disconnect_grace: None,
            caller: self.caller.clone(),
            plan: self.services.plans.of(&self.caller.account),
            key: self.caller.key(RequestId::generate()),
            session: SessionId::generate(),
            fingerprint: INPUT,
            input: GenerationInput { model: Some(ModelId::generate()), ..Default::default() },
            render: |_| Bytes::new(),
            trace: TraceSpan::default(),
            may_go_elsewhere: false,
        }
    }

    /// A model that is never loaded.
    pub(super) fn model(&self) -> Arc<ServedModel> {
        let gguf = TinyLlama::default().gguf().to_bytes();
        let qualified = testing::qualified(self.folder.path(), "tiny", &gguf, 64);
        let text = Arc::new(TextModel::load(qualified.source()).unwrap());
        let load = Arc::new(|_| Err(EngineError::NotLoaded("it is never loaded".into())));
        Arc::new(ServedModel { qualified, text, max_context: 64, context_rises: false, load })
    }

    /// Makes the request live, without a lifecycle.
    pub(super) fn live(&self, request: &IncomingRequest) -> Arc<LiveRequest> {
        let credential = self.caller.credential.id;
        let live = Arc::new(LiveRequest::new(request.key, INPUT, credential, false, 0));
        assert!(self.services.live.insert(&live));
        live
    }

    /// Reserves nothing for the request, which costs nothing.
    pub(super) async fn admit(&self, request: &IncomingRequest) -> AttemptId {
        let admit = Admit {
            key: request.key,
            credential: self.caller.credential.id,
            attempt: AttemptId::generate(),
            boot: self.services.store.boot(),
            fingerprint: INPUT,
            session: request.session,
            model: ModelId::generate(),
            stream: false,
            prompt_tokens: 1,
            max_output_tokens: 1,
            prices: Prices::default(),
            max_concurrent: 9,
            quotas: TokenQuotas::default(),
            rate: AdmissionRate::default(),
            retention_ms: u64::MAX,
            crash_block_ms: u64::MAX,
        };
        let attempt = admit.attempt;
        self.services.store.submit(Command::Admit(Box::new(admit))).await.unwrap();
        attempt
    }

    pub(super) async fn latest(&self, request: &IncomingRequest) -> Attempt {
        let ledger = self.services.store.read().await.unwrap();
        ledger.request(&request.key).await.unwrap().unwrap().latest().clone()
    }

    /// The latest attempt, once it has ended.
    async fn ended(&self, request: &IncomingRequest) -> Attempt {
        loop {
            let attempt = self.latest(request).await;
            if attempt.state.is_terminal() {
                return attempt;
            }
            tokio::task::yield_now().await;
        }
    }

    async fn find(&self, request: &IncomingRequest) -> Result<AnswerSource, RequestError> {
        find_or_start(&self.services, request).await
    }
}

#[tokio::test]
async fn a_live_request_is_joined_by_its_own_input_alone() {
    let setup = Setup::new().await;
    let request = setup.incoming();
    let live = setup.live(&request);
    live.decide(Admission::Admitted { created_at: UnixMillis(0) });
    live.end(Ok("body".into()));
    let found = setup.find(&request).await;
    assert!(matches!(found, Ok(AnswerSource::Body { body, .. }) if body == "body"));
    let other = IncomingRequest { fingerprint: [2; 32], ..request };
    let refused = setup.find(&other).await.err();
    assert_eq!(refused, Some(Refusal::FingerprintMismatch.into()));
}

#[tokio::test]
async fn a_request_that_was_refused_is_tried_anew() {
    let setup = Setup::new().await;
    let request = setup.incoming();
    let live = setup.live(&request);
    let guard = ReservationGuard::new(&setup.services, &live, AttemptId::generate());
    guard.not_admitted(Admission::Refused(RequestError::Draining));
    // The request gets as far as its model, which is not served here.
    assert_eq!(setup.find(&request).await.err(), Some(RequestError::ModelNotFound));
}

#[tokio::test]
async fn requests_in_the_ledger_are_answered_from_it() {
    let setup = Setup::new().await;
    let store = &setup.services.store;

    let request = setup.incoming();
    let (key, attempt) = (request.key, setup.admit(&request).await);
    assert_eq!(setup.find(&request).await.err(), Some(RequestError::InProgress));
    store.put_body(key, "body".into(), UnixMillis(u64::MAX)).await.unwrap();
    let (usage, end) = (Usage::default(), SettleEnd::Completed(FinishReason::Stop));
    store.submit(Command::Settle { key, attempt, usage, end }).await.unwrap();
    let found = setup.find(&request).await;
    assert!(matches!(found, Ok(AnswerSource::Stored { body, stream: false }) if body == "body"));

    let request = setup.incoming();
    let (key, attempt) = (request.key, setup.admit(&request).await);
    let end = SettleEnd::FormatTooCostly;
    store.submit(Command::Settle { key, attempt, usage, end }).await.unwrap();
    let costly = RequestError::Ledger(Refusal::FormatTooCostly);
    assert_eq!(setup.find(&request).await.err(), Some(costly));

    for (cause, expect) in [
        (ReleaseCause::CancelledInQueue, RequestError::Cancelled),
        (ReleaseCause::Failed(FailureCode::GenerationFailed), RequestError::ModelNotFound),
    ] {
        let request = setup.incoming();
        let (key, attempt) = (request.key, setup.admit(&request).await);
        store.submit(Command::Release { key, attempt, cause }).await.unwrap();
        assert_eq!(setup.find(&request).await.err(), Some(expect), "{cause:?}");
    }
}

#[tokio::test]
async fn a_dropped_guard_releases_the_reservation() {
    let setup = Setup::new().await;
    let request = setup.incoming();
    let (live, attempt) = (setup.live(&request), setup.admit(&request).await);
    let mut guard = ReservationGuard::new(&setup.services, &live, attempt);
    guard.arm();
    drop(guard);
    assert_eq!(setup.ended(&request).await.failure, Some(FailureCode::GenerationFailed));
    assert_eq!(live.ended().await, Err(RequestError::GenerationFailed));
    assert!(setup.services.live.is_empty());
}

#[tokio::test]
async fn a_reservation_in_doubt_is_released_and_forgotten() {
    let setup = Setup::new().await;
    let request = setup.incoming();
    let (live, attempt) = (setup.live(&request), setup.admit(&request).await);
    let mut guard = ReservationGuard::new(&setup.services, &live, attempt);
    guard.arm();
    guard.in_doubt();
    let admission = live.admission().await;
    assert_eq!(admission, Admission::Refused(RequestError::LedgerUnavailable));
    // Commands are applied in order: the release has been when this one is.
    let again = setup.services.store.submit(Command::RequestCancel { key: request.key }).await;
    assert_eq!(again.err().unwrap().to_string(), Refusal::RequestNotFound.to_string());
}

#[tokio::test]
async fn a_guard_leaves_what_is_resolved_or_not_its_own() {
    let setup = Setup::new().await;
    let request = setup.incoming();
    let (live, attempt) = (setup.live(&request), setup.admit(&request).await);
    let mut guard = ReservationGuard::new(&setup.services, &live, attempt);
    guard.arm();
    guard.resolved();
    drop(guard);
    let mut guard = ReservationGuard::new(&setup.services, &live, attempt);
    guard.arm();
    guard.not_admitted(Admission::Superseded);
    // Commands are applied in order: after this one a release would have been applied.
    let key = request.key;
    setup.services.store.submit(Command::Start { key, attempt }).await.unwrap();
    assert_eq!(setup.latest(&request).await.state, AttemptState::Running);
    assert_eq!(live.admission().await, Admission::Superseded);
}
