//! The pool with scripted engines in place of models.

use super::*;
use crate::catalogue::testing;
use crate::engine::testing::{ScriptedRunner, small_options};
use crate::engine::{SamplingParams, SequenceEvent, StopCause};
use crate::ids::AccountId;
use cresset_models::testing::TinyLlama;
use std::path::Path;
use tokio::sync::mpsc::Receiver;

const BUDGET: u64 = 10;
const BYTES: u64 = 6;

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
    let settings =
        EngineSettings { max_waiting: 1, model_wait_seconds: 60, ..EngineSettings::default() };
    let pool = ModelPool::new(&settings, BUDGET);
    let offer = |seed| {
        let qualified = qualified(folder, seed);
        let (id, text) = (qualified.id(), TextModel::load(qualified.source()).unwrap());
        let load = Arc::new(load);
        let model = ServedModel {
            qualified,
            text: Arc::new(text),
            max_context: 64,
            keeps_formats: true,
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
    let (running, events) = pool.submit(ids[0], request(1)).unwrap();
    assert_eq!(completed(events).await, 1);
    let (_queued, events) = pool.submit(ids[1], request(2)).unwrap();
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
    let Err(Refused::Overloaded { retry_after }) = pool.submit(ids[0], request(1)) else {
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
    let (_queued, events) = pool.submit(ids[0], request(1)).unwrap();
    let refused = pool.submit(ids[0], request(1)).err();
    assert_eq!(refused, Some(Refused::Overloaded { retry_after: Duration::from_mins(1) }));
    let refused = pool.submit(ModelId(uuid::Uuid::nil()), request(1)).err();
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
    let (_running, events) = pool.submit(ids[0], request(60)).unwrap();
    let (_queued, waiting) = pool.submit(ids[1], request(1)).unwrap();
    assert!(pool.take_away(ids[1], "another file".into()));
    assert!(matches!(end(waiting).await, StopCause::Failed(_)));
    assert!(pool.take_away(ids[0], "another file".into()));
    assert!(!pool.take_away(ids[0], "another file".into()), "it is known");
    assert!(matches!(end(events).await, StopCause::Failed(EngineError::Stopped(_))));
    let changed = || Refused::Dead(EngineError::FilesChanged("another file".into()));
    assert_eq!(pool.submit(ids[0], request(1)).err(), Some(changed()));
    assert!(pool.preload(ids[0]).await.is_err() && pool.offered(ids[0]).is_none());
    assert!(pool.offer_again(ids[0]));
    // The load that this began may still have the only place of the queue.
    pool.preload(ids[0]).await.unwrap();
    let (_again, events) = pool.submit(ids[0], request(1)).unwrap();
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
