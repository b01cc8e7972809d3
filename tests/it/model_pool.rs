//! The model pool: models are loaded when a request names them, within a budget of memory.

use super::process::{Folder, MODEL, Served, get};
use super::support::{World, next_piece, qualified, read};
use cresset_commands::metrics;
use cresset_engine::testing::{ScriptedFailure, ScriptedRunner};
use cresset_engine::{EngineError, EngineHandle, EngineOptions};
use cresset_models::cache_kinds::CacheKinds;
use cresset_pool::{LoadedEngine, ServedModel};
use cresset_text::TextModel;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

const MIB: u64 = 1 << 20;

/// A node whose models may take 10 MiB. It has one pinned model of 0 bytes.
async fn small_node() -> World {
    World::with(|setup| {
        setup.config.engine.memory_mib = 10;
        setup.config.engine.model_wait_seconds = 20;
        setup.config.http.keep_alive_seconds = 1;
    })
    .await
}

/// The behaviour of an on-demand model.
#[derive(Clone, Copy)]
struct Kind {
    mib: u64,
    step: Duration,
    load_time: Duration,
    loads: bool,
    /// The step in which its engine ends.
    dies_at: Option<u64>,
    /// The number of its first steps whose rows fail.
    bad_steps: u64,
}

const QUICK: Kind = Kind {
    mib: 6,
    step: Duration::ZERO,
    load_time: Duration::ZERO,
    loads: true,
    dies_at: None,
    bad_steps: 0,
};

/// Offers a model and returns its id.
fn offer(world: &World, seed: u64, kind: Kind) -> String {
    let qualified = qualified(world.folder.path(), seed);
    let text = Arc::new(TextModel::load(qualified.source()).unwrap());
    let id = qualified.id().to_string();
    let script = text.tokenizer.encode("hello world", false).unwrap();
    let load = move |_| {
        std::thread::sleep(kind.load_time);
        if !kind.loads {
            return Err(EngineError::NotLoaded("its weights are damaged".into()));
        }
        let runner = ScriptedRunner::repeating(script.clone()).step_time(kind.step);
        let runner = kind
            .dies_at
            .into_iter()
            .fold(runner, |runner, step| runner.fail_at(step, ScriptedFailure::Fatal));
        let runner = (0..kind.bad_steps)
            .fold(runner, |runner, step| runner.fail_at(step, ScriptedFailure::Rows));
        let options = EngineOptions {
            max_batched_tokens: 256,
            background_tokens: 16,
            max_rows: 16,
            max_waiting: 16,
            block_size: 16,
            num_blocks: 512,
            cache: CacheKinds::default(),
            max_context: 1024,
            speculative_tokens: 0,
        };
        Ok(LoadedEngine {
            engine: EngineHandle::start(Box::new(runner), options),
            bytes: kind.mib * MIB,
        })
    };
    let model = ServedModel {
        qualified,
        text,
        max_context: 1024,
        context_rises: false,
        load: Arc::new(load),
    };
    world.node.pool.offer(model, kind.mib * MIB, false).unwrap();
    id
}

fn ask(world: &World, model: &str, extra: Value) -> Value {
    let mut body = world.ask(extra);
    body["model"] = model.into();
    body
}

/// State of a model in the status document.
fn state(world: &World, model: &str) -> Value {
    let document = world.status();
    let models = document["models"].as_array().unwrap();
    models.iter().find(|row| row["id"] == model).unwrap()["state"].clone()
}

async fn listed(world: &World) -> usize {
    world.get("/v1/models").await.json()["data"].as_array().unwrap().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_loaded_for_the_first_request_and_makes_room_when_idle() {
    let world = small_node().await;
    let [first, second] = [11, 12].map(|seed| offer(&world, seed, QUICK));
    assert_eq!((listed(&world).await, state(&world, &first)), (3, json!("unloaded")));
    for (model, other) in [(&first, &second), (&second, &first), (&first, &second)] {
        let answer =
            world.post(Uuid::new_v4(), &ask(&world, model, json!({ "max_tokens": 3 }))).await;
        assert_eq!((answer.status, &answer.json()["usage"]["completion_tokens"]), (200, &json!(3)));
        assert_eq!(
            (state(&world, model), state(&world, other)),
            (json!("loaded"), json!("unloaded"))
        );
    }
    assert_eq!((listed(&world).await, world.node.pool.load_counts()), (3, [4, 2]));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_model_finishes_first_and_waiting_streams_are_kept_alive() {
    let world = small_node().await;
    let slow = Kind { step: Duration::from_millis(30), ..QUICK };
    let (busy, wanted) = (offer(&world, 11, slow), offer(&world, 12, QUICK));
    let body = ask(&world, &busy, json!({ "max_tokens": 80, "stream": true }));
    let mut running = world.open(&world.key, Uuid::new_v4(), &body).await;
    next_piece(&mut running).await;
    let body = ask(&world, &wanted, json!({ "max_tokens": 2, "stream": true }));
    let waiting = read(world.open(&world.key, Uuid::new_v4(), &body).await);
    let (waited, ran) = tokio::join!(waiting, read(running));
    assert!(waited.text().contains(": keep-alive\n\n"), "{}", waited.text());
    for (answer, tokens) in [(waited, 2), (ran, 80)] {
        let text = answer.text();
        assert!(
            text.contains(&format!("\"completion_tokens\":{tokens}"))
                && text.ends_with("[DONE]\n\n"),
            "{text}"
        );
    }
    assert_eq!(
        (state(&world, &wanted), state(&world, &busy)),
        (json!("loaded"), json!("unloaded"))
    );
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_for_its_model_only_so_long_and_may_be_cancelled() {
    let world = World::with(|setup| {
        setup.config.engine.memory_mib = 10;
        setup.config.engine.model_wait_seconds = 1;
    })
    .await;
    let model = offer(&world, 11, Kind { load_time: Duration::from_secs(3), ..QUICK });
    let before = world.balances().await;
    let turned_away = Uuid::new_v4();
    let refused = world.post(turned_away, &ask(&world, &model, json!({ "max_tokens": 2 }))).await;
    assert_eq!(refused.error(), (503, "overloaded".into()));
    assert!((1..=60).contains(&refused.header("retry-after").parse::<u64>().unwrap()));
    assert_eq!(world.get(&format!("/v1/requests/{turned_away}")).await.status, 404);
    let id = Uuid::new_v4();
    let body = ask(&world, &model, json!({ "max_tokens": 2 }));
    let (answer, cancelled) = tokio::join!(world.post(id, &body), async {
        world.reaches_any(id).await;
        world.delete(id).await
    });
    assert_eq!((answer.status, cancelled.json()["state"].clone()), (409, json!("cancelled")));
    assert_eq!(world.balances().await, before, "nobody pays for waiting");
    while state(&world, &model) != "loaded" {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // The id that was turned away is free, also for another body.
    let other = ask(&world, &model, json!({ "max_tokens": 3 }));
    assert_eq!(world.post(turned_away, &other).await.status, 200);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_fails_is_left_alone_and_the_others_go_on() {
    let world = small_node().await;
    let broken = offer(&world, 11, Kind { loads: false, ..QUICK });
    let mortal = offer(&world, 12, Kind { dies_at: Some(1), mib: 1, ..QUICK });
    let before = world.balances().await;
    for model in [&broken, &mortal] {
        let post = || async {
            world.post(Uuid::new_v4(), &ask(&world, model, json!({ "max_tokens": 9 }))).await
        };
        assert_eq!(post().await.error(), (500, "generation_failed".into()));
        while state(&world, model) != "failed" {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let refused = post().await;
        assert_eq!(refused.error(), (503, "overloaded".into()));
        assert!(refused.header("retry-after").parse::<u64>().unwrap() > 20);
    }
    assert_eq!((listed(&world).await, world.node.is_ready()), (1, true));
    assert_eq!(world.balances().await, before);
    let errors = world.node.recent_errors.all();
    assert!(errors.iter().any(|fault| fault.message.contains("scripted")), "{errors:?}");
    let metrics = metrics::text(&world.node).await;
    assert!(metrics.contains("cresset_model_loaded{model=\"tiny-0\"} 1"), "{metrics}");
    assert!(metrics.contains("cresset_model_loaded{model=\"tiny-11\"} 0"), "{metrics}");
    for kind in ["not_loaded", "integrity"] {
        let line = format!("cresset_model_failures_total{{kind=\"{kind}\"}} 1\n");
        assert!(metrics.contains(&line), "{line} is not in\n{metrics}");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_can_never_fit_is_not_offered() {
    let world = small_node().await;
    let qualified = qualified(world.folder.path(), 11);
    let text = Arc::new(TextModel::load(qualified.source()).unwrap());
    let load = Arc::new(|_| Err(EngineError::NotLoaded("it is never loaded".into())));
    let model = ServedModel { qualified, text, max_context: 1024, context_rises: false, load };
    let why = world.node.pool.offer(model, 11 * MIB, false).unwrap_err();
    assert_eq!(why.kind(), "out_of_memory");
    let why = why.to_string();
    assert!(why.contains("11 MiB") && why.contains("engine.memory_mib"), "{why}");
    assert_eq!(listed(&world).await, 1);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_whose_requests_all_fail_is_withdrawn_until_a_canary_passes() {
    let world = World::with(|setup| {
        setup.config.engine.memory_mib = 10;
        setup.config.engine.canary_pause_seconds = 1;
    })
    .await;
    // Five requests and the first canary fail, the second canary passes.
    let model = offer(&world, 11, Kind { bad_steps: 6, ..QUICK });
    let post = || async {
        world.post(Uuid::new_v4(), &ask(&world, &model, json!({ "max_tokens": 2 }))).await
    };
    let before = world.balances().await;
    for _ in 0..4 {
        assert_eq!(post().await.error(), (500, "generation_failed".into()));
        assert_eq!(listed(&world).await, 2, "fewer failures may have their cause in a request");
    }
    assert_eq!(post().await.error(), (500, "generation_failed".into()));
    assert_eq!((state(&world, &model), listed(&world).await), (json!("failed"), 1));
    let refused = post().await;
    assert_eq!(refused.error(), (503, "overloaded".into()));
    assert_eq!(refused.header("retry-after"), "1");
    while listed(&world).await == 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(world.balances().await, before, "canaries are nobody's");
    assert_eq!(post().await.status, 200);
    world.close().await;
}

/// Two engines of one model: each session stays on one of them, what is computed does not depend on
/// which, formats are kept to, and the ledger is exact.
#[test]
fn two_devices_give_the_answers_of_one() {
    compare_devices(&Folder::ready(), "cpu");
}

/// The same with the device path of every layer above the driver.
#[test]
#[ignore = "minutes: the model qualifies over the emulator"]
fn two_emulated_gpus_give_the_answers_of_one() {
    let folder = Folder::ready();
    // The one that qualifies has another cache folder than the one that serves: neither is used.
    let cache = folder.path().join("cache");
    for command in [&["qualify", MODEL][..], &["models", "accept", MODEL, "--reason", "a test's"]] {
        let mut command = folder.command(command);
        command.envs(on_gpus(r#"["cuda:0"]"#)).env("XDG_CACHE_HOME", &cache);
        let finished = command.output().unwrap();
        assert!(finished.status.success(), "{finished:?}");
    }
    assert!(!cache.exists(), "all that a proof rests on is in the data folder");
    compare_devices(&folder, "cuda");
}

fn on_gpus(devices: &str) -> [(&'static str, &str); 2] {
    [("EMULATED_GPUS", "2"), ("CRESSET_ENGINE__DEVICES", devices)]
}

/// Compares the answers of two devices of one kind with those of one.
fn compare_devices(folder: &Folder, kind: &str) {
    let customer = folder.customer(100_000_000);
    let name = |number: usize| format!("{kind}:{number}");
    let named = |number| if kind == "cpu" { kind.to_owned() } else { name(number) };
    let answers = |devices: &[String]| {
        let devices = json!(devices).to_string();
        let mut command = folder.serve_command(&[]);
        command.envs(on_gpus(&devices));
        let node = Served::start(command);
        let answers: Vec<String> = (0..12)
            .map(|seed| {
                let mut body = json!({
                    "model": node.model, "seed": seed, "max_tokens": 12, "temperature": 1.0,
                    "messages": [{ "role": "user", "content": format!("hello {seed}") }],
                });
                if seed % 2 == 1 {
                    body["guided_regex"] = json!("[a-z]{4} [a-z]{2}");
                }
                let [session, id] = [(); 2].map(|()| Uuid::new_v4().to_string());
                let reply = node.chat_in(&session, &customer.key, &id, &body).finish();
                assert_eq!(reply.status, 200, "{}", reply.body);
                let choice = &reply.json()["choices"][0];
                let keeps = choice["message"]["content"].as_str().map(str::len) == Some(7);
                assert!(seed % 2 == 0 || keeps, "{choice}");
                choice["message"].to_string()
            })
            .collect();
        let status = folder.json(&["status"]);
        let metrics = get(&node.operator, "/metrics").body;
        assert!(node.terminate().success());
        (answers, status, metrics)
    };
    let (expected, _, _) = answers(&[named(0)]);
    let (found, status, metrics) = answers(&[named(0), named(1)]);
    assert_eq!(found, expected);
    let devices = status["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    for (number, device) in devices.iter().enumerate() {
        assert_eq!(device["name"], name(number));
        for figure in ["model_memory_bytes", "generated_tokens"] {
            assert!(device[figure].as_u64().unwrap() > 0, "{status}");
        }
        assert!(metrics.contains(&format!("cresset_device_lost{{device=\"{}\"}} 0", name(number))));
    }
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}
