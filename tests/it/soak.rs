//! Clients of every kind come and go, at the configured limits, against two real tiny models of
//! which only one fits into memory at a time. Memory must not grow, every block must come back, and
//! the ledger must pass its audit. The store keeps pages of its files in memory, up to a limit that
//! takes long to reach, so memory may grow by as much as its files do.
//!
//! `CRESSET_SOAK_MINUTES` sets the duration (default 5).

use super::support::{World, next_piece, qualified, read};
use cresset_base::AccountId;
use cresset_engine::{
    EngineHandle, EngineOptions, GenerateRequest, ModelRunner, SamplingParams, SequenceEvent,
};
use cresset_models::ModelOptions;
use cresset_pool::{LoadedEngine, ServedModel};
use cresset_text::TextModel;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use uuid::Uuid;

const CLIENTS: u64 = 24;
/// KV blocks of each engine: enough for a few sequences only, so that preemption never stops.
const BLOCKS: usize = 24;
/// Growth of resident memory, in MiB, that counts as noise.
const NOISE_MIB: u64 = 16;

fn offer(world: &World, seed: u64) -> String {
    let qualified = qualified(world.folder.path(), seed);
    let text = Arc::new(TextModel::load(qualified.source()).unwrap());
    let (id, source) = (qualified.id().to_string(), qualified.source().clone());
    let load = move |_| {
        let options = ModelOptions {
            threads: 2,
            dequantise: false,
            kv_bytes: BLOCKS * 8192,
            block_size: 16,
            max_batched_tokens: 128,
            max_context: Some(256),
            ..ModelOptions::default()
        };
        let (runner, info) = ModelRunner::load(&source, &options)?;
        let options = EngineOptions {
            max_batched_tokens: 128,
            background_tokens: 16,
            max_rows: 16,
            max_waiting: 64,
            block_size: 16,
            num_blocks: info.num_blocks,
            cache: info.cache.clone(),
            max_context: 256,
            speculative_tokens: 8,
        };
        Ok(LoadedEngine { engine: EngineHandle::start(Box::new(runner), options), bytes: 6 << 20 })
    };
    let model = ServedModel {
        qualified,
        text,
        max_context: 256,
        context_rises: false,
        load: Arc::new(load),
    };
    world.node.pool.offer(model, 6 << 20, false).unwrap();
    id
}

/// Sends one request of a kind drawn from `draw`, which is read to its end, cancelled, or left in
/// the middle.
async fn visit(world: &World, models: &[String], draw: u64) {
    // Most requests are for one model, so that it is busy when the other one is needed.
    let model = &models[usize::from(draw.is_multiple_of(40))];
    let body = json!({
        "model": model,
        "messages": [{ "role": "user", "content": "hello world and you ".repeat(1 + (draw % 5) as usize) }],
        "max_tokens": 8 + draw % 60,
        "stream": !draw.is_multiple_of(3),
        "ignore_eos": true,
        "temperature": (draw % 2) as f64 * 0.8,
        "repetition_penalty": 1.0 + (draw % 4) as f64 * 0.1,
    });
    let id = Uuid::new_v4();
    match draw / 7 % 4 {
        0 => drop(world.post(id, &body).await),
        1 => {
            let mut stream = world.open(&world.key, id, &body).await;
            next_piece(&mut stream).await;
        }
        2 => {
            let posting = world.post(id, &body);
            let cancelling = async {
                tokio::time::sleep(Duration::from_millis(draw % 50)).await;
                world.delete(id).await
            };
            drop(tokio::join!(posting, cancelling));
        }
        _ => {
            let stream = world.open(&world.key, id, &body).await;
            drop(read(stream).await);
        }
    }
}

/// Resident memory of this process, MiB.
fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

/// Size of the ledger's files, MiB.
fn store_mib(world: &World) -> u64 {
    let files = std::fs::read_dir(world.folder.path().join("ledger")).unwrap();
    files.map(|file| file.unwrap().metadata().unwrap().len()).sum::<u64>() >> 20
}

fn median(samples: &[u64]) -> u64 {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}

fn minutes() -> Duration {
    let minutes = std::env::var("CRESSET_SOAK_MINUTES").map_or(5.0, |text| text.parse().unwrap());
    Duration::from_secs_f64(minutes * 60.0)
}

async fn small_node() -> World {
    World::with(|setup| {
        setup.config.engine.memory_mib = 10;
        setup.config.requests.disconnect_grace_seconds = 0;
        // On a busy machine the clients may be slow to begin.
        setup.config.http.first_byte_seconds = 3_600;
        setup.config.http.header_seconds = 3_600;
        setup.trial = 1_000_000_000_000;
    })
    .await
}

/// Starts the clients. Each makes a series of visits with numbers that no other client has.
async fn run_clients(until: Instant, visit: impl AsyncFn(u64)) {
    let client = async |mut draw: u64| {
        while Instant::now() < until {
            draw = draw
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            visit(draw >> 33).await;
        }
    };
    futures_util::future::join_all((0..CLIENTS).map(client)).await;
}

/// Lets one soak run at a time, because memory is measured for the whole process.
static ALONE: Mutex<()> = Mutex::const_new(());

/// Runs the clients and checks that memory does not grow and every block comes back.
async fn soak(world: &World, visit: impl AsyncFn(u64)) {
    let _alone = ALONE.lock().await;
    let until = Instant::now() + minutes();
    let sampling = async {
        let (mut resident, mut store) = (Vec::new(), Vec::new());
        while Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(500)).await;
            resident.push(resident_mib());
            store.push(store_mib(world));
        }
        (resident, store)
    };
    let ((), (resident, store)) = tokio::join!(run_clients(until, visit), sampling);
    // The pause lets the node notice the clients that left.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let quarter = resident.len() / 4;
    let [early, late] = [quarter..2 * quarter, 3 * quarter..resident.len()]
        .map(|part| (median(&resident[part.clone()]), median(&store[part])));
    let [loads, unloads] = world.node.pool.load_counts();
    println!("resident and store, MiB: {early:?}, then {late:?}; {loads} loads, {unloads} unloads");
    for view in world.node.pool.views() {
        assert_eq!((&view.failure, view.usage.active, view.usage.waiting), (&None, 0, 0));
        // An idle engine has checked its blocks: with a fault it would have ended.
        let stats = view.stats();
        assert_eq!(
            (stats.running, stats.waiting, stats.blocks_used, stats.late_frees),
            (0, 0, 0, 0)
        );
    }
    assert!(
        late.0 <= early.0 + NOISE_MIB + late.1.saturating_sub(early.1),
        "memory grew from {early:?} to {late:?}: {resident:?}"
    );
    assert!(loads > 2 && unloads > 1, "the models did not change places");
}

/// Runs one sequence without a client; it is read to its end, stopped, or left.
async fn submit(world: &World, models: &[String], draw: u64) {
    let request = GenerateRequest {
        account: AccountId(Uuid::from_u128(u128::from(draw % 3))),
        application: None,
        priority: (draw % 2) as u8,
        background: false,
        prompt: Arc::new((0..=draw as u32 % 90).map(|token| token % 30).collect()),
        sampling: SamplingParams {
            seed: draw,
            top_p: 0.9,
            frequency_penalty: 0.1,
            ..SamplingParams::default()
        },
        max_tokens: 1 + draw as u32 / 90 % 120,
        min_tokens: 0,
        eos_ids: Arc::default(),
        grammar: None,
        deadline: None,
    };
    let id = models[usize::from(draw.is_multiple_of(200))].parse().unwrap();
    let Ok((ticket, mut events)) = world.node.pool.submit(id, Some(Uuid::nil()), request) else {
        tokio::time::sleep(Duration::from_millis(1)).await;
        return;
    };
    let mut patience = if (draw / 7).is_multiple_of(4) { draw % 20 } else { u64::MAX };
    while let Some(event) = events.recv().await {
        if patience == 0 {
            if draw.is_multiple_of(2) {
                return;
            }
            ticket.stop();
        }
        patience = patience.saturating_sub(1);
        if matches!(event, SequenceEvent::Finished(_)) {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "minutes of churn"]
async fn engines_without_a_ledger_keep_their_memory() {
    let world = small_node().await;
    let models = [11, 12].map(|seed| offer(&world, seed));
    soak(&world, async |draw| submit(&world, &models, draw).await).await;
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "minutes of churn"]
async fn memory_stays_where_it_is_and_every_block_comes_back() {
    let world = small_node().await;
    let models = [11, 12].map(|seed| offer(&world, seed));
    soak(&world, async |draw| visit(&world, &models, draw).await).await;
    world.close().await;
}
