//! The pool with scripted engines in place of models.

use super::*;
use cresset_base::AccountId;
use cresset_catalogue::testing;
use cresset_engine::testing::{ScriptedRunner, small_options};
use cresset_engine::{GenerateRequest, SamplingParams, SequenceEvent, StopCause};
use cresset_models::testing::TinyLlama;
use std::collections::BTreeMap;
use std::path::Path;
use tokio::sync::mpsc::Receiver;
use uuid::Uuid;

const BUDGET: u64 = 10;
const BYTES: u64 = 6;
/// A session.
const ONE: Option<Uuid> = Some(Uuid::nil());

/// A tiny model with a record that says it is qualified here.
fn qualified(folder: &Path, seed: u64) -> QualifiedModel {
    let gguf = TinyLlama { seed, ..TinyLlama::default() }.gguf().to_bytes();
    testing::qualified(folder, &format!("tiny-{seed}"), &gguf, 64)
}

fn engine() -> Result<LoadedEngine, EngineError> {
    engine_with(Duration::ZERO)
}

#[expect(clippy::unnecessary_wraps, reason = "the pool asks for a function that may fail")]
fn engine_with(step: Duration) -> Result<LoadedEngine, EngineError> {
    let runner = Box::new(ScriptedRunner::repeating(vec![5]).step_time(step));
    Ok(LoadedEngine { engine: EngineHandle::start(runner, small_options()), bytes: BYTES })
}

/// A pool with models that `load` loads; each takes more than half of the budget.
fn pool(
    folder: &Path,
    models: u64,
    load: impl Fn() -> Result<LoadedEngine, EngineError> + Send + Sync + Copy + 'static,
) -> (Arc<ModelPool>, Vec<ModelId>) {
    pool_of(1, folder, models, move |_| load())
}

/// The same with so many devices.
fn pool_of(
    devices: usize,
    folder: &Path,
    models: u64,
    load: impl Fn(usize) -> Result<LoadedEngine, EngineError> + Send + Sync + Copy + 'static,
) -> (Arc<ModelPool>, Vec<ModelId>) {
    let settings =
        EngineSettings { max_waiting: 1, model_wait_seconds: 60, ..EngineSettings::default() };
    let device = |number| DeviceBudget { name: format!("cpu:{number}"), bytes: BUDGET };
    let pool = ModelPool::new(&settings, (0..devices).map(device).collect());
    let offer = |seed| {
        let qualified = qualified(folder, seed);
        let (id, text) = (qualified.id(), TextModel::load(qualified.source()).unwrap());
        let load = Arc::new(load);
        let model = ServedModel {
            qualified,
            text: Arc::new(text),
            max_context: 64,
            context_rises: false,
            load,
        };
        pool.offer(model, BYTES, false).unwrap();
        id
    };
    let ids = (0..models).map(offer).collect();
    (pool, ids)
}

fn request(max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        account: AccountId::generate(),
        application: None,
        priority: 0,
        background: false,
        prompt: Arc::new(vec![1, 2, 3]),
        sampling: SamplingParams::default(),
        max_tokens,
        min_tokens: 0,
        eos_ids: [].into(),
        grammar: None,
        deadline: None,
    }
}

/// Completion tokens of a request that runs to its end.
async fn completed(mut events: Receiver<SequenceEvent>) -> u32 {
    loop {
        if let SequenceEvent::Finished(finished) = events.recv().await.unwrap() {
            return finished.completion_tokens;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_dropped_outside_the_runtime_makes_room_for_the_next_model() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, ids) = pool(folder.path(), 2, engine);
    pool.preload(ids[0]).await.unwrap();
    let (running, events) = pool.submit(ids[0], ONE, request(1)).unwrap();
    assert_eq!(completed(events).await, 1);
    let (_queued, events) = pool.submit(ids[1], ONE, request(2)).unwrap();
    std::thread::scope(|scope| scope.spawn(move || drop(running)).join().unwrap());
    assert_eq!(completed(events).await, 2);
    assert_eq!((pool.load_counts(), pool.engines().len()), ([2, 1], 1));
}

#[tokio::test]
async fn a_model_that_failed_takes_no_requests_for_a_while() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, ids) =
        pool(folder.path(), 1, || Err(EngineError::NotLoaded("its weights are damaged".into())));
    let error = pool.preload(ids[0]).await.unwrap_err();
    assert_eq!(error.to_string(), "its weights are damaged");
    let Err(Refused::Overloaded { retry_after }) = pool.submit(ids[0], ONE, request(1)) else {
        panic!("it was submitted")
    };
    assert!(retry_after <= RELOAD_PAUSE && retry_after > RELOAD_PAUSE / 2, "{retry_after:?}");
    assert_eq!(pool.views()[0].state(), "failed");
    assert_eq!(pool.failures(), BTreeMap::from([("not_loaded", 1)]));
}

#[tokio::test]
async fn a_full_queue_and_an_unknown_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, ids) = pool(folder.path(), 1, engine);
    // The load begins on the runtime, to which this test's thread has not given way yet.
    let (_queued, events) = pool.submit(ids[0], ONE, request(1)).unwrap();
    let refused = pool.submit(ids[0], ONE, request(1)).err();
    assert_eq!(refused, Some(Refused::Overloaded { retry_after: Duration::from_mins(1) }));
    let refused = pool.submit(ModelId(Uuid::nil()), ONE, request(1)).err();
    assert_eq!(refused, Some(not_served()));
    assert_eq!(completed(events).await, 1);
}

/// The end of a request.
async fn end(mut events: Receiver<SequenceEvent>) -> StopCause {
    loop {
        if let SequenceEvent::Finished(finished) = events.recv().await.unwrap() {
            return finished.cause;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_whose_files_changed_fails_what_runs_and_what_waits() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, ids) = pool(folder.path(), 2, || engine_with(Duration::from_millis(5)));
    pool.preload(ids[0]).await.unwrap();
    let (_running, events) = pool.submit(ids[0], ONE, request(60)).unwrap();
    let (_queued, waiting) = pool.submit(ids[1], ONE, request(1)).unwrap();
    assert!(pool.take_away(ids[1], "another file".into()));
    assert!(matches!(end(waiting).await, StopCause::Failed(_)));
    assert!(pool.take_away(ids[0], "another file".into()));
    assert!(!pool.take_away(ids[0], "another file".into()), "it is known");
    assert!(matches!(end(events).await, StopCause::Failed(EngineError::Stopped(_))));
    let changed = || Refused::Dead(EngineError::FilesChanged("another file".into()));
    assert_eq!(pool.submit(ids[0], ONE, request(1)).err(), Some(changed()));
    assert!(pool.preload(ids[0]).await.is_err() && pool.offered(ids[0]).is_none());
    assert!(pool.offer_again(ids[0]));
    // The load that this began may still have the only place of the queue.
    pool.preload(ids[0]).await.unwrap();
    let (_again, events) = pool.submit(ids[0], ONE, request(1)).unwrap();
    assert_eq!(completed(events).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_that_finds_no_proof_takes_the_model_off_the_list() {
    let folder = tempfile::tempdir().unwrap();
    for error in [EngineError::FilesChanged, EngineError::Unproven] {
        let (pool, ids) = pool(folder.path(), 1, move || Err(error("why".into())));
        pool.preload(ids[0]).await.unwrap_err();
        assert!(pool.offered(ids[0]).is_none());
        assert_eq!(pool.views()[0].failure.as_deref(), Some("why"));
        assert!(pool.offer_again(ids[0]), "it was off the list");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_computes_other_tokens_waits_for_another_record() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, ids) = pool(folder.path(), 1, || Err(EngineError::WrongAnswers("why".into())));
    pool.preload(ids[0]).await.unwrap_err();
    assert!(!pool.offer_again(ids[0]) && pool.offered(ids[0]).is_none());
    pool.describe_anew(qualified(folder.path(), 0));
    assert!(pool.offer_again(ids[0]), "it was qualified again");
}

/// Tokens that each device has made.
fn tokens(pool: &Arc<ModelPool>) -> Vec<u64> {
    pool.devices().iter().map(|device| device.stats.generated_tokens).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_stays_on_its_device_and_sessions_are_spread() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, ids) = pool_of(2, folder.path(), 1, |_| engine());
    pool.preload(ids[0]).await.unwrap();
    assert_eq!(pool.load_counts(), [2, 0]);
    for _ in 0..8 {
        let (_running, events) = pool.submit(ids[0], ONE, request(3)).unwrap();
        assert_eq!(completed(events).await, 3);
    }
    let mut of_one = tokens(&pool);
    of_one.sort_unstable();
    // The last step of an engine is counted after its tokens were sent.
    assert!(of_one[0] == 0 && of_one[1] > 20, "{of_one:?}");
    for session in (0..40).map(Uuid::from_u128) {
        let (_running, events) = pool.submit(ids[0], Some(session), request(1)).unwrap();
        completed(events).await;
    }
    assert!(tokens(&pool).iter().all(|tokens| *tokens >= 10), "{:?}", tokens(&pool));
    let [view] = &pool.views()[..] else { panic!("it is one model") };
    assert_eq!((view.engines.len(), view.usage.bytes), (2, 12));
    assert_eq!(pool.unload_idle(ids[0]), Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_loaded_on_a_further_device_once_requests_wait() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, ids) = pool_of(2, folder.path(), 1, |_| engine_with(Duration::from_millis(5)));
    let mut running = Vec::new();
    // The first one waits for the load, so it is there when the next is placed.
    for _ in 0..small_options().max_rows + 2 {
        running.push(pool.submit(ids[0], ONE, request(40)).unwrap());
        while pool.views()[0].engines.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    while pool.views()[0].engines.len() < 2 {
        let (_running, events) = pool.submit(ids[0], ONE, request(1)).unwrap();
        completed(events).await;
    }
    drop(running);
    assert_eq!(pool.load_counts(), [2, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_device_takes_nothing_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, ids) = pool_of(2, folder.path(), 1, |device| match device {
        0 => Err(EngineError::DeviceLost("it fell off the bus".into())),
        _ => engine(),
    });
    pool.preload(ids[0]).await.unwrap();
    let lost: Vec<bool> = pool.devices().iter().map(|device| device.is_lost).collect();
    assert_eq!(lost, [true, false]);
    assert!(pool.is_ready() && pool.views()[0].failure.is_none());
    for session in (0..20).map(Uuid::from_u128) {
        let (_running, events) = pool.submit(ids[0], Some(session), request(1)).unwrap();
        assert_eq!(completed(events).await, 1);
    }
    assert!(at_once(pool.all_devices_lost()).await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pool_tells_when_its_last_device_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, ids) =
        pool_of(2, folder.path(), 1, |_| Err(EngineError::DeviceLost("power".into())));
    pool.preload(ids[0]).await.unwrap_err();
    pool.all_devices_lost().await;
    assert!(!pool.is_ready());
    assert!(pool.submit(ids[0], ONE, request(1)).is_err());
}

/// What a future gives without being waited for.
async fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(Duration::ZERO, future).await.ok()
}
