//! A whole node in this process: real ledger, real HTTP over loopback, a tiny tokenizer, and an
//! engine that follows a script.

use bytes::Bytes;
use cresset_base::{AccountId, ApplicationId, Clock, CredentialId, SystemClock, UnixMillis};
use cresset_catalogue::{Catalogue, QualifiedModel, testing};
use cresset_engine::testing::ScriptedRunner;
use cresset_engine::{EngineError, EngineHandle, EngineOptions, ModelRunner, Runner};
use cresset_ledger::{
    AccountStatus, BucketAmounts, Budgets, CalendarUse, Command, Credential, CredentialKind,
    Microcredits, secret,
};
use cresset_models::ModelOptions;
use cresset_models::cache_kinds::CacheKinds;
use cresset_models::loader::gguf::Value as Metadata;
use cresset_models::testing::{GgufWriter, TinyLlama};
use cresset_node::RunningNode;
use cresset_node::config::Config;
use cresset_pool::{LoadedEngine, ServedModel};
use cresset_request::Services;
use cresset_store::{Limits, Store, StoreConfig, StoreError};
use cresset_text::TextModel;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Method, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use uuid::Uuid;

/// Gives the whole answer to a rendered prompt.
pub type Answerer = dyn Fn(&str) -> String + Send + Sync;

/// The properties of a node that a test may choose before the start.
pub struct Setup {
    pub config: Config,
    /// The answer to every request.
    pub reply: &'static str,
    /// What answers a prompt, in place of `reply`.
    pub answer: Option<Arc<Answerer>>,
    /// The reply ends with an end-of-text token; otherwise it repeats until `max_tokens`.
    pub ends: bool,
    pub step: Duration,
    /// Steps that fail, counted from 0, each with the way in which it fails.
    pub failures: Vec<(u64, cresset_engine::testing::ScriptedFailure)>,
    /// The error of the failures, if not one with the runner's own text.
    pub error: Option<EngineError>,
    pub trial: u64,
    pub premium: u64,
    /// Tiny models loaded, each with an id of its own.
    pub models: usize,
    pub max_rows: usize,
    pub max_waiting: usize,
    /// Tokens of one step.
    pub max_batched_tokens: usize,
    /// Blocks of 16 tokens.
    pub num_blocks: usize,
    /// A chat template that replaces the tiny model's own.
    pub template: Option<&'static str>,
    /// Longest prompt and answer together.
    pub context_tokens: u32,
    /// Texts that are tokens of their own.
    pub marks: &'static [&'static str],
    /// Checks that withhold what they prove.
    pub withheld: &'static [&'static str],
    /// Options with which the tiny model itself computes the answers, in place of a script.
    pub computed: Option<ModelOptions>,
}

impl Default for Setup {
    fn default() -> Self {
        let mut config = Config::default();
        let plan = config.plans.get_mut("default").expect("there is a default plan");
        (plan.requests_per_minute, plan.burst) = (1_000_000, 1_000_000);
        Self {
            config,
            reply: "hello world and you",
            answer: None,
            ends: true,
            step: Duration::ZERO,
            failures: Vec::new(),
            error: None,
            trial: 1_000_000,
            premium: 1_000_000,
            models: 1,
            max_rows: 64,
            max_waiting: 64,
            max_batched_tokens: 256,
            num_blocks: 4096,
            template: None,
            context_tokens: 1024,
            marks: &[],
            withheld: &[],
            computed: None,
        }
    }
}

/// A running node with one account and one key.
pub struct World {
    pub node: Arc<Services>,
    pub address: SocketAddr,
    pub account: AccountId,
    pub key: String,
    pub credential: CredentialId,
    pub model: String,
    running: RunningNode,
    pub folder: TempDir,
}

/// A response, read to its end.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).unwrap()
    }

    /// Status and error code.
    pub fn error(&self) -> (u16, String) {
        let code = self.json()["error"]["code"].as_str().unwrap_or_default().to_owned();
        (self.status, code)
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// The stream's events after `data: `, comments left out.
    pub fn events(&self) -> Vec<String> {
        let text = self.text();
        let events = text.split_terminator("\n\n").filter(|event| !event.starts_with(':'));
        events
            .map(|event| {
                event.strip_prefix("data: ").unwrap_or_else(|| panic!("{event:?}")).to_owned()
            })
            .collect()
    }
}

impl World {
    pub async fn new() -> Self {
        Self::with(|_| {}).await
    }

    pub async fn with(choose: impl FnOnce(&mut Setup)) -> Self {
        let mut setup = Setup::default();
        choose(&mut setup);
        let folder = TempDir::new().unwrap();
        let ledger = folder.path().join("ledger");
        std::fs::create_dir(&ledger).unwrap();
        Store::init(&StoreConfig::folder(&ledger)).unwrap();
        let store = open(&ledger);
        let catalogue = Catalogue::new(folder.path());
        let node = cresset_node::services(&setup.config, store, catalogue, None);
        for seed in 0..setup.models {
            load(&node, &setup, folder.path(), seed as u64).await;
        }
        let [listener, operator] =
            [TcpListener::bind("127.0.0.1:0").await, TcpListener::bind("127.0.0.1:0").await]
                .map(Result::unwrap);
        let address = listener.local_addr().unwrap();
        let mut running =
            RunningNode::open(node.clone(), setup.config.clone(), &ledger, address, Some(operator))
                .unwrap();
        running.accept_clients(listener).await.unwrap();
        let account = account(&node, setup.trial, setup.premium).await;
        let (credential, key) = issue(&node, account, None).await;
        let model = node.pool.models()[0].qualified.id().to_string();
        Self { node, address, account, key, credential, model, running, folder }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.get_as(&self.key, path).await
    }

    pub async fn get_as(&self, key: &str, path: &str) -> Answer {
        self.call(Method::GET, path, &bearer(key), Bytes::new()).await
    }

    pub async fn delete(&self, id: Uuid) -> Answer {
        self.delete_as(&self.key, id).await
    }

    pub async fn delete_as(&self, key: &str, id: Uuid) -> Answer {
        self.call(Method::DELETE, &format!("/v1/requests/{id}"), &bearer(key), Bytes::new()).await
    }

    /// A completion request in the default session.
    pub async fn post(&self, id: Uuid, body: &Value) -> Answer {
        self.post_as(&self.key, id, body).await
    }

    pub async fn post_as(&self, key: &str, id: Uuid, body: &Value) -> Answer {
        read(self.open(key, id, body).await).await
    }

    /// A completion request whose response is read by the caller.
    pub async fn open(&self, key: &str, id: Uuid, body: &Value) -> Response<Incoming> {
        let headers = chat_headers(key, &id.to_string());
        self.send(Method::POST, CHAT, &headers, body.to_string().into()).await
    }

    pub async fn call(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, String)],
        body: Bytes,
    ) -> Answer {
        read(self.send(method, path, headers, body).await).await
    }

    /// One request on a connection of its own.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, String)],
        body: Bytes,
    ) -> Response<Incoming> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let mut request = Request::builder().method(method).uri(path);
        if headers.iter().all(|(name, _)| *name != "host") {
            request = request.header("host", "node");
        }
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        sender.send_request(request.body(Full::new(body)).unwrap()).await.unwrap()
    }

    /// The smallest body that asks the loaded model, with `extra` members.
    #[expect(clippy::needless_pass_by_value, reason = "every caller has just made it")]
    pub fn ask(&self, extra: Value) -> Value {
        let mut body =
            json!({ "model": self.model, "messages": [{ "role": "user", "content": "hello" }] });
        for (name, value) in extra.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    }

    /// `[trial, premium, reserved]`.
    pub async fn balances(&self) -> [u64; 3] {
        let credits = self.get("/v1/credits").await.json();
        let units = |name: &str| credits[name].as_str().unwrap().parse().unwrap();
        [units("trialUnits"), units("premiumUnits"), units("reservedUnits")]
    }

    pub async fn request(&self, id: Uuid) -> Value {
        self.get(&format!("/v1/requests/{id}")).await.json()
    }

    /// Asks until the request's state is one of `states`.
    pub async fn reaches(&self, id: Uuid, states: &[&str]) -> Value {
        loop {
            let request = self.request(id).await;
            if states.iter().any(|state| request["state"] == *state) {
                return request;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Asks until the request exists.
    pub async fn reaches_any(&self, id: Uuid) -> Value {
        self.reaches(id, &["queued", "running", "completed", "cancelled", "failed"]).await
    }

    /// Drains the node. At the end of every test the ledger is sound and nothing is reserved.
    pub async fn close(self) {
        tokio::time::timeout(Duration::from_mins(1), self.node.drain())
            .await
            .expect("requests end");
        let report = self.node.store.audit().unwrap();
        assert!(report.ok, "{:?}", report.violations);
        assert_eq!(report.reservations, 0, "no reservation is left open");
        self.running.stop_listening();
    }

    /// Opens a gateway for clients that send their own key.
    pub async fn open_gateway(&mut self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        self.running.open_gateway(listener, None).unwrap()
    }

    /// The status document.
    pub fn status(&self) -> Value {
        self.running.status()
    }

    pub fn stop_listening(&self) {
        self.running.stop_listening();
    }
}

/// Opens the store. A process that another test is just starting inherits the lock of `init` and
/// holds it until its `exec`, so a folder in use is tried again.
fn open(ledger: &std::path::Path) -> Store {
    loop {
        match Store::open(&StoreConfig::folder(ledger), Arc::new(SystemClock), Limits::default()) {
            Err(StoreError::InUse(_)) => std::thread::sleep(Duration::from_millis(5)),
            store => return store.unwrap(),
        }
    }
}

pub const CHAT: &str = "/v1/chat/completions";
pub const SESSION: &str = "0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b";

pub fn bearer(key: &str) -> Vec<(&'static str, String)> {
    vec![("authorization", format!("Bearer {key}"))]
}

pub fn chat_headers(key: &str, id: &str) -> Vec<(&'static str, String)> {
    let mut headers = bearer(key);
    headers.push(("content-type", "application/json".into()));
    headers.push(("idempotency-key", id.to_owned()));
    headers.push(("x-service-session-id", SESSION.into()));
    headers
}

pub async fn read(response: Response<Incoming>) -> Answer {
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Answer { status: parts.status.as_u16(), headers: parts.headers, body }
}

/// The next piece of a stream; empty at its end.
pub async fn next_piece(response: &mut Response<Incoming>) -> String {
    match response.frame().await {
        Some(frame) => {
            String::from_utf8(frame.unwrap().into_data().unwrap_or_default().to_vec()).unwrap()
        }
        None => String::new(),
    }
}

pub async fn account(node: &Services, trial: u64, premium: u64) -> AccountId {
    let id = AccountId::generate();
    let [trial, premium] = [trial, premium].map(|units| Microcredits::new(units).unwrap());
    let create = Command::CreateAccount {
        id,
        name: "tester".into(),
        plan: "default".into(),
        opening: BucketAmounts { trial, premium },
    };
    node.store.submit(create).await.unwrap();
    id
}

pub async fn application(node: &Services, account: AccountId) -> ApplicationId {
    let id = ApplicationId::generate();
    node.store
        .submit(Command::CreateApplication { id, account, name: "app".into() })
        .await
        .unwrap();
    id
}

pub async fn issue(
    node: &Services,
    account: AccountId,
    application: Option<ApplicationId>,
) -> (CredentialId, String) {
    issue_until(node, account, application, None).await
}

pub async fn issue_until(
    node: &Services,
    account: AccountId,
    application: Option<ApplicationId>,
    expires_at: Option<UnixMillis>,
) -> (CredentialId, String) {
    let kind =
        if application.is_some() { CredentialKind::AccessToken } else { CredentialKind::ApiKey };
    let random = random();
    let prefix = &cresset_api::CredentialSettings::default().prefix;
    let text = secret::mint(prefix, kind, &random);
    let id = CredentialId::generate();
    let credential = Credential {
        id,
        kind,
        account,
        application,
        label: None,
        digest: secret::digest(prefix, &text).unwrap(),
        hint: secret::hint(&text).to_owned(),
        created_at: SystemClock.now(),
        expires_at,
        revoked_at: None,
        budgets: Budgets::default(),
        used: CalendarUse::default(),
    };
    node.store.submit(Command::IssueCredential { credential }).await.unwrap();
    (id, text)
}

pub async fn suspend(node: &Services, id: AccountId) {
    node.store
        .submit(Command::SetAccountStatus { id, status: AccountStatus::Suspended })
        .await
        .unwrap();
    node.live.cancel_account(id);
}

pub async fn revoke(node: &Services, id: CredentialId) {
    node.store.submit(Command::RevokeCredential { id }).await.unwrap();
    node.live.cancel_credential(id);
}

/// 32 bytes that no other call in this process returns.
fn random() -> [u8; 32] {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let mut bytes = [7; 32];
    bytes[24..].copy_from_slice(&COUNT.fetch_add(1, Ordering::Relaxed).to_be_bytes());
    bytes
}

/// Puts a model with a scripted engine into the node's pool. It stays loaded, and once its engine
/// has ended it cannot be loaded again.
async fn load(node: &Services, setup: &Setup, folder: &std::path::Path, seed: u64) {
    let mut gguf = tiny_gguf(seed, setup.template, setup.marks);
    let context = setup.context_tokens.max(2048);
    gguf.set("llama.context_length", Metadata::U32(context));
    let qualified = qualified_as(folder, seed, &gguf, setup.context_tokens, setup.withheld);
    let text = Arc::new(TextModel::load(qualified.source()).unwrap());
    let mut options = EngineOptions {
        max_batched_tokens: setup.max_batched_tokens,
        background_tokens: 16,
        max_rows: setup.max_rows,
        max_waiting: setup.max_waiting,
        block_size: 16,
        num_blocks: setup.num_blocks,
        cache: CacheKinds::default(),
        max_context: context as usize,
        speculative_tokens: 0,
    };
    let runner: Box<dyn Runner> = match &setup.computed {
        Some(computed) => {
            let (runner, info) = ModelRunner::load(qualified.source(), computed).unwrap();
            options.num_blocks = info.num_blocks;
            Box::new(runner)
        }
        None => Box::new(scripted(setup, &text)),
    };
    let (id, max_context) = (qualified.id(), options.max_context);
    let runner = Mutex::new(Some(runner));
    let load = Arc::new(move |_| {
        let runner = runner
            .lock()
            .unwrap()
            .take()
            .ok_or_else(|| EngineError::NotLoaded("it is loaded only once".into()))?;
        Ok(LoadedEngine { engine: EngineHandle::start(runner, options.clone()), bytes: 0 })
    });
    let model = ServedModel { qualified, text, max_context, context_rises: false, load };
    // A model of 0 bytes fits any budget.
    node.pool.offer(model, 0, true).unwrap();
    node.pool.preload(id).await.unwrap();
}

/// The runner that gives the reply or the answers of a setup.
fn scripted(setup: &Setup, text: &Arc<TextModel>) -> ScriptedRunner {
    let mut script = text.tokenizer.encode(setup.reply, !setup.marks.is_empty()).unwrap();
    if setup.ends {
        script.push(text.eos_ids[0]);
    }
    let runner = match setup.answer.clone() {
        Some(answer) => answering(text.clone(), answer),
        None => ScriptedRunner::repeating(script),
    };
    let runner = runner.step_time(setup.step);
    let runner = setup
        .failures
        .iter()
        .fold(runner, |runner, (step, failure)| runner.fail_at(*step, *failure));
    match setup.error.clone() {
        Some(error) => runner.fail_with(error),
        None => runner,
    }
}

/// A runner that answers each prompt once, and says where a grammar did not allow its answer.
fn answering(text: Arc<TextModel>, answer: Arc<Answerer>) -> ScriptedRunner {
    let mut answers: HashMap<Vec<u32>, Vec<u32>> = HashMap::new();
    ScriptedRunner::new(move |row| {
        let (prompt, written) = row.tokens.split_at(row.prompt_len);
        let answer = answers.entry(prompt.to_vec()).or_insert_with(|| {
            let prompt = text.tokenizer.decode(prompt, false).unwrap();
            text.tokenizer.encode(&answer(&prompt), true).unwrap()
        });
        let before = written.split_last().map_or(written, |(_, before)| before);
        if answer.starts_with(before) && !answer.starts_with(written) {
            let written = text.tokenizer.decode(written, false);
            let answer = text.tokenizer.decode(answer, false);
            println!("the grammar allowed {written:?} and not {answer:?}");
        }
        answer.get(written.len()).copied().unwrap_or(text.eos_ids[0])
    })
}

/// A tiny model with a record that says it was qualified here, without any check.
pub fn qualified(folder: &std::path::Path, seed: u64) -> QualifiedModel {
    qualified_as(folder, seed, &tiny_gguf(seed, None, &[]), 1024, &[])
}

/// Marks take the places of bytes that no test writes: those from 0x0E on.
const FIRST_MARK: usize = 3 + 0x0E;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// A tiny model with this chat template and tokens for these marks.
pub fn tiny_gguf(seed: u64, template: Option<&str>, marks: &[&str]) -> GgufWriter {
    let mut gguf = TinyLlama { seed, ..TinyLlama::default() }.gguf();
    if let Some(template) = template {
        gguf.set("tokenizer.chat_template", Metadata::String(template.into()));
    }
    assert!(marks.len() <= 18, "there are 18 such bytes");
    let mut replace = |key: &str, value: &dyn Fn(&str) -> Metadata| {
        let Some(Metadata::Array(mut entries)) = gguf.get(key).cloned() else { panic!("no {key}") };
        for (place, mark) in entries[FIRST_MARK..].iter_mut().zip(marks) {
            *place = value(mark);
        }
        gguf.set(key, Metadata::Array(entries));
    };
    replace("tokenizer.ggml.tokens", &|mark| Metadata::String(mark.into()));
    let kind = |mark: &str| if mark.starts_with("<|") { CONTROL } else { USER_DEFINED };
    replace("tokenizer.ggml.token_type", &|mark| Metadata::I32(kind(mark)));
    gguf
}

fn qualified_as(
    folder: &std::path::Path,
    seed: u64,
    gguf: &GgufWriter,
    context: u32,
    withheld: &[&str],
) -> QualifiedModel {
    testing::qualified_but(folder, &format!("tiny-{seed}"), &gguf.to_bytes(), context, withheld)
}

/// Connects an HTTP/2 client with prior knowledge.
pub async fn http2(address: SocketAddr) -> hyper::client::conn::http2::SendRequest<Full<Bytes>> {
    let stream = TcpStream::connect(address).await.unwrap();
    let io = TokioIo::new(stream);
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    sender
}

/// Statuses of answers, sorted, for races.
pub fn statuses(answers: &[Answer]) -> Vec<u16> {
    let mut all: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
    all.sort_unstable();
    all
}
