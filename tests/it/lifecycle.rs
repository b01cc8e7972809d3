//! The events of a request's life beside its answer: cancelling, clients that go away, deadlines,
//! draining, and the limits of admission.

use super::process::request;
use super::support::{Answer, CHAT, World, chat_headers, issue, next_piece, read, statuses};
use cresset_commands::metrics;
use cresset_engine::EngineError;
use cresset_engine::testing::ScriptedFailure;
use futures_util::future::join_all;
use hyper::Method;
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

/// A world whose answers go on until `max_tokens`, a few milliseconds a token.
async fn endless(choose: impl FnOnce(&mut super::support::Setup)) -> World {
    World::with(|setup| {
        setup.ends = false;
        setup.step = Duration::from_millis(5);
        choose(setup);
    })
    .await
}

fn long(world: &World, stream: bool) -> Value {
    world.ask(json!({ "stream": stream, "max_tokens": 900 }))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_request_pays_for_what_was_computed() {
    let world = endless(|_| {}).await;
    let id = Uuid::new_v4();
    let body = long(&world, false);
    let (answer, deleted) = tokio::join!(world.post(id, &body), async {
        world.reaches(id, &["running"]).await;
        world.delete(id).await
    });
    assert_eq!(answer.error(), (409, "request_cancelled".into()));
    assert_eq!(answer.header("x-should-retry"), "false");
    let request = deleted.json();
    assert_eq!(
        (deleted.status, &request["state"], &request["cancel_requested"]),
        (200, &json!("cancelled"), &json!(true))
    );
    let usage = |name: &str| request["usage"][name].as_u64().unwrap();
    let cost = (usage("prompt_tokens") * 100_000 + usage("completion_tokens") * 400_000)
        .div_ceil(1_000_000);
    assert_eq!(request["chargedUnits"], cost.to_string());
    assert!(usage("completion_tokens") < 900);
    assert_eq!(world.balances().await, [1_000_000 - cost, 1_000_000, 0]);
    assert_eq!(world.delete(id).await.json(), request, "cancelling again changes nothing");
    assert_eq!(world.post(id, &body).await.error(), (409, "request_cancelled".into()));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_that_takes_longer_is_accepted() {
    let world = endless(|setup| {
        setup.config.requests.cancel_wait_milliseconds = 20;
        setup.step = Duration::from_millis(400);
    })
    .await;
    let (id, body) = (Uuid::new_v4(), long(&world, false));
    let (answer, ()) = tokio::join!(world.post(id, &body), async {
        world.reaches(id, &["running"]).await;
        let deleted = world.delete(id).await;
        let request = deleted.json();
        assert_eq!((deleted.status, &request["cancel_requested"]), (202, &json!(true)));
        assert_eq!((&request["state"], &request["chargedUnits"]), (&json!("running"), &json!("0")));
        assert_ne!(request["reservedUnits"], "0");
    });
    assert_eq!(answer.error(), (409, "request_cancelled".into()));
    assert_eq!(world.delete(id).await.status, 200);
    world.close().await;
}

/// Requests that race in one round.
const LANES: u64 = 64;

/// Runs `rounds` rounds of requests, each cancelled at some moment of its life or shortly after.
async fn finish_against_cancel(rounds: u64) {
    let world = endless(|setup| {
        setup.step = Duration::from_millis(2);
        setup.trial = 1_000_000_000;
    })
    .await;
    let mut completed = 0;
    for _ in 0..rounds {
        completed +=
            join_all((0..LANES).map(|lane| race(&world, lane * 3))).await.into_iter().sum::<u64>();
    }
    assert!(
        completed > 0 && completed < rounds * LANES,
        "neither side won always: {completed} of {rounds} rounds"
    );
    world.close().await;
}

/// Returns 1 if the request was completed before it was cancelled, `delay` milliseconds after its
/// admission.
async fn race(world: &World, delay: u64) -> u64 {
    let (id, body) = (Uuid::new_v4(), world.ask(json!({ "max_tokens": 50 })));
    let (answer, deleted) = tokio::join!(world.post(id, &body), async {
        world.reaches_any(id).await;
        tokio::time::sleep(Duration::from_millis(delay)).await;
        world.delete(id).await
    });
    let request = world.request(id).await;
    let expect = if answer.status == 200 { "completed" } else { "cancelled" };
    assert_eq!(request["state"], expect, "{}", answer.text());
    assert_eq!(
        (deleted.status, deleted.json()),
        (200, request.clone()),
        "what DELETE saw is the end"
    );
    assert_eq!(world.delete(id).await.json(), request, "and stays so");
    u64::from(answer.status == 200)
}

#[tokio::test(flavor = "multi_thread")]
async fn finishing_and_cancelling_race_to_one_end() {
    finish_against_cancel(2).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a minute or more: ten thousand races"]
async fn ten_thousand_races_of_finishing_and_cancelling_have_one_end_each() {
    finish_against_cancel(160).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_without_a_listener_is_cancelled_after_the_grace() {
    let world = endless(|setup| setup.config.requests.disconnect_grace_seconds = 1).await;
    let id = Uuid::new_v4();
    let mut response = world.open(&world.key, id, &long(&world, true)).await;
    next_piece(&mut response).await;
    drop(response);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(world.request(id).await["state"], "running", "the grace is not over");
    let request = world.reaches(id, &["cancelled", "completed"]).await;
    assert_eq!(request["state"], "cancelled");
    assert_ne!(request["chargedUnits"], "0");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_may_lower_the_grace() {
    let world = endless(|_| {}).await;
    let id = Uuid::new_v4();
    let body = long(&world, true);
    let open = async |seconds: &str| {
        let mut headers = chat_headers(&world.key, &id.to_string());
        headers.push(("x-disconnect-grace-seconds", seconds.to_owned()));
        world.send(Method::POST, CHAT, &headers, body.to_string().into()).await
    };
    let refused = read(open("16").await).await;
    let error = &refused.json()["error"];
    assert_eq!((refused.status, &error["code"]), (400, &json!("invalid_request")));
    assert_eq!(error["param"], "X-Disconnect-Grace-Seconds");
    let mut response = open("0").await;
    next_piece(&mut response).await;
    drop(response);
    let request = world.reaches(id, &["cancelled", "completed"]).await;
    assert_eq!(request["state"], "cancelled");
    assert!(request["usage"]["completion_tokens"].as_u64().unwrap() < 100, "{request}");
    assert_eq!(world.post(id, &body).await.error(), (409, "request_cancelled".into()));
    world.close().await;
}

/// Stop, then Regenerate: the run ends at once, what it computed is charged, and the same words are
/// asked anew.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_a_gateways_client_closes_ends_at_once() {
    let mut world = endless(|_| {}).await;
    let gateway = world.open_gateway().await;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {}\r\n\
         Content-Type: application/json\r\n",
        world.key
    );
    let body = long(&world, true).to_string();
    let mut spent = 0;
    for _ in 0..3 {
        let mut stream = request(&format!("http://{gateway}"), &head, &body);
        assert_eq!(stream.status, 200);
        (0..3).for_each(|_| stream.read_until("delta"));
        drop(stream);
        let mut balances = world.balances().await;
        while balances[2] > 0 {
            balances = world.balances().await;
        }
        let charged = 1_000_000 - balances[0] - spent;
        assert!((1..50).contains(&charged), "{charged}, where the whole answer costs 360");
        spent += charged;
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_comes_back_keeps_the_stream() {
    let world = World::with(|setup| {
        setup.step = Duration::from_millis(60);
        setup.config.requests.disconnect_grace_seconds = 1;
    })
    .await;
    let id = Uuid::new_v4();
    let body = world.ask(json!({ "stream": true, "ignore_eos": true, "max_tokens": 30 }));
    let mut response = world.open(&world.key, id, &body).await;
    let first = next_piece(&mut response).await;
    drop(response);
    let whole = world.post(id, &body).await.text();
    assert!(whole.starts_with(&first) && whole.contains("\"finish_reason\":\"length\""), "{whole}");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_in_one_piece_is_finished_although_its_client_left() {
    let world = World::with(|setup| setup.step = Duration::from_millis(30)).await;
    let (id, body) = (Uuid::new_v4(), world.ask(json!({})));
    let gone =
        tokio::time::timeout(Duration::from_millis(40), world.open(&world.key, id, &body)).await;
    assert!(gone.is_err(), "the client left before the answer");
    let request = world.reaches(id, &["completed", "cancelled", "failed"]).await;
    assert_eq!(request["state"], "completed");
    let fetched = world.post(id, &body).await;
    assert_eq!((fetched.status, fetched.header("idempotent-replayed")), (200, "true"));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_costs_nothing() {
    let world = endless(|setup| setup.config.requests.deadline_seconds = 1).await;
    let id = Uuid::new_v4();
    let answer = world.post(id, &long(&world, false)).await;
    assert_eq!(answer.error(), (504, "deadline_exceeded".into()));
    assert_eq!(world.request(id).await["failure_code"], "deadline_exceeded");
    assert_eq!(world.balances().await, [1_000_000, 1_000_000, 0]);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_refuses_what_is_new_and_ends_what_is_slow() {
    let world = endless(|setup| setup.config.requests.drain_grace_seconds = 1).await;
    let (id, finished) = (Uuid::new_v4(), Uuid::new_v4());
    let short = world.ask(json!({ "max_tokens": 2 }));
    let answered = world.post(finished, &short).await;
    let body = long(&world, false);
    let (slow, ()) = tokio::join!(world.post(id, &body), async {
        world.reaches(id, &["running"]).await;
        assert!(world.node.is_ready());
        let drained = world.node.drain();
        let meanwhile = async {
            while !world.node.is_draining() {
                tokio::task::yield_now().await;
            }
            let refused = world.post(Uuid::new_v4(), &short).await;
            assert_eq!(refused.error(), (503, "draining".into()));
            assert!(!refused.header("retry-after").is_empty() && !world.node.is_ready());
            assert_eq!(world.post(finished, &short).await.body, answered.body, "replays go on");
        };
        tokio::join!(drained, meanwhile);
    });
    assert_eq!(slow.error(), (503, "draining".into()));
    let request = world.request(id).await;
    assert_eq!(
        (&request["failure_code"], &request["chargedUnits"]),
        (&json!("draining"), &json!("0"))
    );
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_balance_admits_what_it_covers() {
    // 500 tokens of output at 0.4 units, with the prompt, cost a little more than 200 units.
    let world = endless(|setup| (setup.trial, setup.premium) = (450, 250)).await;
    let body = world.ask(json!({ "max_tokens": 500 }));
    let ids: Vec<Uuid> = (0..16).map(|_| Uuid::new_v4()).collect();
    let posts = join_all(ids.iter().map(|id| world.post(*id, &body)));
    let (answers, ()) = tokio::join!(posts, async {
        // Once all admissions are decided, the running requests are ended.
        loop {
            let [_, _, reserved] = world.balances().await;
            if reserved > 600 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        for id in &ids {
            world.delete(*id).await;
        }
    });
    let codes: Vec<_> = answers.iter().map(Answer::error).collect();
    let admitted = codes.iter().filter(|(_, code)| code == "request_cancelled").count();
    let reserved = codes.iter().filter(|(_, code)| code == "credits_reserved").count();
    assert!(admitted >= 3 && admitted + reserved == 16, "{codes:?}");
    let refused = answers.iter().find(|answer| answer.status == 402).unwrap();
    assert!(
        !refused.header("retry-after").is_empty() && refused.header("x-should-retry") == "true"
    );
    assert_eq!(world.balances().await[2], 0);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_requests_in_flight_of_an_account_are_limited_over_all_its_keys() {
    let world =
        endless(|setup| setup.config.plans.get_mut("default").unwrap().max_concurrent = 3).await;
    let (_, other) = issue(&world.node, world.account, None).await;
    let body = long(&world, true);
    let ids: Vec<Uuid> = (0..3).map(|_| Uuid::new_v4()).collect();
    let mut open = Vec::new();
    for id in &ids {
        open.push(world.open(&world.key, *id, &body).await);
    }
    let fourth = world.post_as(&other, Uuid::new_v4(), &body).await;
    assert_eq!(fourth.error(), (429, "concurrency_limit".into()));
    assert_eq!((fourth.header("retry-after"), fourth.header("x-should-retry")), ("1", "true"));
    world.delete(ids[0]).await;
    let freed = world.open(&other, Uuid::new_v4(), &body).await;
    assert_eq!(freed.status().as_u16(), 200);
    for id in &ids {
        world.delete(*id).await;
    }
    drop((open, freed));
    world.node.live.cancel_account(world.account);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rate_limit_is_the_accounts() {
    let world = World::with(|setup| {
        let plan = setup.config.plans.get_mut("default").unwrap();
        (plan.requests_per_minute, plan.burst) = (1, 5);
    })
    .await;
    let (_, other) = issue(&world.node, world.account, None).await;
    let body = world.ask(json!({ "max_tokens": 1 }));
    let keys = [&world.key, &other];
    let answers = join_all((0..8).map(|i| world.post_as(keys[i % 2], Uuid::new_v4(), &body))).await;
    assert_eq!(statuses(&answers), [200, 200, 200, 200, 200, 429, 429, 429]);
    let refused = world.post(Uuid::new_v4(), &json!("not even a request")).await;
    assert_eq!(refused.error(), (429, "conversation_rate_limit".into()));
    assert!((1..=60).contains(&refused.header("retry-after").parse::<u64>().unwrap()));
    assert_eq!(world.get("/v1/me").await.status, 200, "reading and cancelling are not fused");
    let neighbour = super::support::account(&world.node, 1_000, 0).await;
    let (_, key) = issue(&world.node, neighbour, None).await;
    assert_eq!(
        world.post_as(&key, Uuid::new_v4(), &body).await.status,
        200,
        "another account has its own"
    );
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_engine_refuses_without_a_record() {
    let world = endless(|setup| {
        (setup.max_rows, setup.max_waiting) = (2, 1);
    })
    .await;
    let body = long(&world, false);
    let ids: Vec<Uuid> = (0..12).map(|_| Uuid::new_v4()).collect();
    let (answers, ()) =
        tokio::join!(join_all(ids.iter().map(|id| world.post(*id, &body))), async {
            // All admissions are decided at once; then the running requests may end.
            tokio::time::sleep(Duration::from_millis(500)).await;
            world.node.live.cancel_account(world.account);
        });
    let refused: Vec<_> =
        ids.iter().zip(&answers).filter(|(_, answer)| answer.status == 503).collect();
    assert!(!refused.is_empty(), "{:?}", statuses(&answers));
    for (id, answer) in refused {
        assert_eq!(answer.error(), (503, "overloaded".into()));
        assert!((1..=60).contains(&answer.header("retry-after").parse::<u64>().unwrap()));
        assert_eq!(world.get(&format!("/v1/requests/{id}")).await.status, 404);
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_tell_what_happened() {
    let world = World::new().await;
    let (id, body) = (Uuid::new_v4(), world.ask(json!({})));
    world.post(id, &body).await;
    world.post(id, &body).await;
    let text = metrics::text(&world.node).await;
    for line in [
        "cresset_requests_total{end=\"completed\"} 1",
        "cresset_idempotent_replays_total 1",
        "cresset_ledger_open_reservations 0",
        "cresset_ledger_audit_ok 1",
        "cresset_ready 1",
        "cresset_time_to_first_token_seconds_count{model=\"tiny-0\"} 1",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
    }
    assert!(!text.contains(&world.key) && !text.contains("hello"));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_engine_error_reaches_the_operator_as_itself_and_clients_as_one() {
    let text = || "scripted reason".to_owned();
    for (failure, error) in [
        (ScriptedFailure::Error, EngineError::Shape(text())),
        (ScriptedFailure::Error, EngineError::OutOfMemory(text())),
        (ScriptedFailure::Launch, EngineError::DeviceLost(text())),
        (ScriptedFailure::Error, EngineError::Integrity(text())),
        (ScriptedFailure::Error, EngineError::Compute(text())),
        (ScriptedFailure::Rows, EngineError::Sampling(text())),
    ] {
        let world = World::with(|setup| {
            setup.failures = vec![(1, failure)];
            setup.error = Some(error.clone());
        })
        .await;
        let answer = world.post(Uuid::new_v4(), &world.ask(json!({}))).await;
        assert_eq!(answer.error(), (500, "generation_failed".into()), "{error:?}");
        assert!(!answer.text().contains("scripted"), "{error:?}");
        let metrics = metrics::text(&world.node).await;
        let line = format!("cresset_engine_failures_total{{kind=\"{}\"}} 1\n", error.kind());
        assert!(metrics.contains(&line), "{line} is not in\n{metrics}");
        let errors = world.node.recent_errors.all();
        assert_eq!(errors.last().unwrap().message, error.to_string());
        world.close().await;
    }
}
