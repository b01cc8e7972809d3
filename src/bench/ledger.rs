//! Measures durable admissions and settlements against a ledger of its own, and the cost of its
//! syncs.

#![expect(clippy::disallowed_methods, reason = "a benchmark measures time")]

use super::figures::{Column, Times, per_second, show, show_percentiles, table};
use crate::Arguments;
use crate::MeasureProgress;
use crate::Result;
use bytes::Bytes;
use cresset_base::{AccountId, CredentialId, RequestId, SystemClock, UnixMillis};
use cresset_commands::{AdminCommand, Operator};
use cresset_ledger::{Admit, Command, FinishReason, Microcredits, RequestKey, SettleEnd, Usage};
use cresset_node::NodeError;
use cresset_node::config::Config;
use cresset_store::{
    EmbeddedConfig, Limits, Store, StoreConfig, StoreResult, StoredBody, SyncMeter,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use uuid::Uuid;

/// Seconds that each number of clients is measured for by default.
const SECONDS: u64 = 3;
/// Syncs measured alone, each after a write of one page.
const PROBES: usize = 50;
const PAGE: [u8; 4096] = [1; 4096];

pub(super) async fn run(
    (data_dir, config): (&Path, &Config),
    arguments: &Arguments,
    progress: &mut dyn MeasureProgress,
) -> Result<Value> {
    let scratch = ScratchFolder::in_folder(arguments.folder.as_deref().unwrap_or(data_dir))?;
    let alone = probe(&scratch.0)?;
    let meter = SyncMeter::new(Duration::from_millis(arguments.simulate_fsync_ms));
    let place = StoreConfig::Embedded(EmbeddedConfig {
        settings: config.ledger.clone(),
        meter: Some(meter.clone()),
        ..EmbeddedConfig::new(&scratch.0)
    });
    Store::init(&place).map_err(NodeError::new)?;
    let store =
        Store::open(&place, Arc::new(SystemClock), Limits::default()).map_err(NodeError::new)?;
    let settings = config.operator();
    let operator = Operator::of_store(&store, &settings);
    let payers = open_accounts(&operator, arguments.accounts).await?;
    let span = Duration::from_secs(arguments.seconds.unwrap_or(SECONDS));
    let mut levels = Vec::new();
    for &clients in &arguments.clients {
        progress.begin(format!("{clients} clients"));
        let until = Instant::now() + span;
        let client = LedgerClient::new(&store, &payers, arguments.answer_bytes, until);
        levels.push(level(vec![client; clients], &meter).await.map_err(NodeError::new)?);
    }
    let stored = stored_answers(&store, &payers).await?;
    let audit = store.audit().map_err(NodeError::new)?;
    Ok(json!({ "folder": scratch.0.parent(), "one_page_fsync_ms": alone.percentiles(),
               "simulated_fsync_ms": arguments.simulate_fsync_ms, "levels": levels,
               "stored_answer_bytes": stored, "audit_ok": audit.ok }))
}

/// A folder that is removed after the measurement.
struct ScratchFolder(PathBuf);

impl ScratchFolder {
    fn in_folder(folder: &Path) -> Result<Self> {
        let path = folder.join(format!("bench-{}", Uuid::new_v4()));
        fs::create_dir_all(&path).map_err(|error| {
            NodeError::new(format!("cannot make {}: {error}", path.display()))
                .remedy("name a folder with --folder")
        })?;
        Ok(Self(path))
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn probe(folder: &Path) -> Result<Times> {
    let (mut file, mut times) = (fs::File::create(folder.join("probe"))?, Times::default());
    for _ in 0..PROBES {
        file.write_all(&PAGE)?;
        let began = Instant::now();
        file.sync_data()?;
        times.add(began.elapsed());
    }
    Ok(times)
}

/// An account that can pay for everything, and its key.
pub(super) type Payer = (AccountId, CredentialId);

pub(super) async fn open_accounts(operator: &Operator<'_>, count: u32) -> Result<Arc<[Payer]>> {
    let mut payers = Vec::new();
    for _ in 0..count {
        payers.push(open_account(operator).await?);
    }
    Ok(payers.into())
}

async fn open_account(operator: &Operator<'_>) -> Result<Payer> {
    let (name, premium) = ("bench".to_owned(), Microcredits::MAX.get());
    let create =
        AdminCommand::AccountCreate { name, plan: None, trial: 0, premium, reference: None };
    let account = id(&operator.execute(create).await.map_err(NodeError::new)?)?;
    let create = AdminCommand::KeyCreate { account, label: None, expires_at: None };
    let key = operator.execute(create).await.map_err(NodeError::new)?;
    Ok((account, id(&key)?))
}

/// Bytes that the accounts' stored answers take.
pub(super) async fn stored_answers(store: &Store, payers: &[Payer]) -> Result<u64> {
    let snapshot = store.read().await.map_err(NodeError::new)?;
    let mut bytes = 0;
    for (account, _) in payers {
        bytes += snapshot.answer_bytes(*account).await.map_err(NodeError::new)?;
    }
    Ok(bytes)
}

async fn level(clients: Vec<LedgerClient>, meter: &SyncMeter) -> StoreResult<Value> {
    let (began, (syncs_before, spent_before)) = (Instant::now(), meter.total());
    let (mut level, latency) = measure(clients).await?;
    let (wall, (syncs, spent)) = (began.elapsed(), meter.total());
    let (syncs, spent) = (syncs - syncs_before, spent.saturating_sub(spent_before));
    let sync_ms = spent.as_secs_f64() * 1_000.0 / syncs.max(1) as f64;
    let in_syncs = |name: &str| latency[name].as_f64().map(|ms| ms / sync_ms);
    level["fsyncs"] = syncs.into();
    level["fsync_ms"] = sync_ms.into();
    level["fsync_share"] = (spent.as_secs_f64() / wall.as_secs_f64()).into();
    level["pair_in_fsyncs"] =
        json!({ "p50": in_syncs("p50"), "p90": in_syncs("p90"), "p99": in_syncs("p99") });
    Ok(level)
}

/// Lets all clients work until their end. Returns what they did, and the times of their pairs.
pub(super) async fn measure(clients: Vec<LedgerClient>) -> StoreResult<(Value, Value)> {
    let (began, count) = (Instant::now(), clients.len());
    let mut workers: JoinSet<_> = clients.into_iter().map(LedgerClient::run).collect();
    let (mut pairs, mut times) = (0, Times::default());
    while let Some(done) = workers.join_next().await {
        let (count, own) = done.expect("invariant: a client does not panic")?;
        pairs += count;
        times.merge(own);
    }
    let (wall, latency) = (began.elapsed(), times.percentiles());
    let level = json!({ "clients": count, "pairs": pairs,
                        "pairs_per_second": per_second(pairs, wall), "pair_ms": latency });
    Ok((level, latency))
}

#[derive(Clone)]
pub(super) struct LedgerClient {
    store: Store,
    /// The accounts, of which each pair takes any.
    payers: Arc<[Payer]>,
    /// What each settlement stores; empty where it stores nothing.
    answer: Bytes,
    until: Instant,
}

impl LedgerClient {
    pub(super) fn new(
        store: &Store,
        payers: &Arc<[Payer]>,
        answer_bytes: u32,
        until: Instant,
    ) -> Self {
        // Random bytes, because stored answers are compressed.
        let random = std::iter::repeat_with(|| Uuid::new_v4().into_bytes()).flatten();
        let answer = random.take(answer_bytes as usize).collect();
        Self { store: store.clone(), payers: Arc::clone(payers), answer, until }
    }

    /// Admits and settles one request after the other. Returns their number and the time of each
    /// admission with its settlement.
    async fn run(self) -> StoreResult<(u64, Times)> {
        let (mut pairs, mut times) = (0, Times::default());
        while Instant::now() < self.until {
            let began = Instant::now();
            let admit = self.admit();
            let (key, attempt) = (admit.key, admit.attempt);
            self.store.submit(Command::Admit(Box::new(admit))).await?;
            let usage = Usage { prompt_tokens: 100, cached_tokens: 0, completion_tokens: 100 };
            let end = SettleEnd::Completed(FinishReason::Length);
            let settle = Command::Settle { key, attempt, usage, end };
            self.store.submit_with(settle, self.stored(key).await).await?;
            times.add(began.elapsed());
            pairs += 1;
        }
        Ok((pairs, times))
    }

    async fn stored(&self, key: RequestKey) -> Option<(RequestKey, StoredBody)> {
        let answer = Some(self.answer.clone()).filter(|answer| !answer.is_empty())?;
        Some((key, StoredBody::of(answer, UnixMillis(u64::MAX)).await))
    }

    fn admit(&self) -> Admit {
        // Clients make random ids. Ordered ones would touch fewer pages.
        let request = RequestId(Uuid::new_v4());
        let any = request.0.as_u128() % self.payers.len() as u128;
        let (account, credential) = self.payers[any as usize];
        let mut fingerprint = [0; 32];
        fingerprint[..16].copy_from_slice(request.0.as_bytes());
        let key = RequestKey { account, application: None, request };
        Admit {
            fingerprint,
            prompt_tokens: 100,
            max_output_tokens: 200,
            ..Admit::unlimited(key, credential, self.store.boot())
        }
    }
}

const COLUMNS: &[Column] = &[
    ("CLIENTS", "clients", ToString::to_string),
    ("PAIRS/S", "pairs_per_second", show),
    ("FSYNCS", "fsyncs", ToString::to_string),
    ("MS EACH", "fsync_ms", show),
    ("SHARE OF TIME", "fsync_share", show_share),
    ("PAIR MS p50 / p90 / p99", "pair_ms", show_percentiles),
    ("IN FSYNCS", "pair_in_fsyncs", show_percentiles),
];

fn show_share(share: &Value) -> String {
    format!("{:.0} %", share.as_f64().unwrap_or_default() * 100.0)
}

pub(super) fn show_levels(document: &Value) -> String {
    let alone = show_percentiles(&document["one_page_fsync_ms"]);
    let simulated = match document["simulated_fsync_ms"].as_u64() {
        Some(ms) if ms > 0 => {
            format!("; every fsync of the ledger is made to take {ms} ms at least")
        }
        _ => String::new(),
    };
    let sound = if document["audit_ok"] == true { "sound" } else { "NOT SOUND" };
    format!(
        "durable admissions and settlements; an fsync of one page takes {alone} ms (p50 / p90 / p99){simulated}\n{}the ledger is {sound} afterwards\n",
        table(&document["levels"], COLUMNS)
    )
}

fn id<T: DeserializeOwned>(document: &Value) -> Result<T> {
    serde_json::from_value(document["id"].clone()).map_err(NodeError::new)
}
