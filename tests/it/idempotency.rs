//! The same request id again: the request is replayed, joined, refused or run once more.

use super::support::{CHAT, World, application, chat_headers, issue, next_piece, read, statuses};
use cresset_engine::testing::ScriptedFailure;
use futures_util::future::join_all;
use hyper::Method;
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_answer_is_replayed_byte_for_byte() {
    let world = World::new().await;
    let (id, body) = (Uuid::new_v4(), world.ask(json!({})));
    let first = world.post(id, &body).await;
    let balances = world.balances().await;
    let spaced = body.to_string().replace(':', " : ");
    let upper = id.to_string().to_uppercase();
    for (key, text) in [(id.to_string(), body.to_string()), (format!("\"{upper}\""), spaced)] {
        let again =
            world.call(Method::POST, CHAT, &chat_headers(&world.key, &key), text.into()).await;
        assert_eq!((again.status, again.header("idempotent-replayed")), (200, "true"));
        assert_eq!(again.body, first.body);
    }
    assert_eq!(first.header("idempotent-replayed"), "");
    assert_eq!(world.balances().await, balances, "a replay costs nothing");
    let (_, rotated) = issue(&world.node, world.account, None).await;
    assert_eq!(
        world.post_as(&rotated, id, &body).await.body,
        first.body,
        "any key of the account finds it"
    );
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_stream_is_replayed_with_the_same_content() {
    let world = World::new().await;
    for options in [json!({ "include_usage": true }), json!({ "include_usage": false })] {
        let (id, body) =
            (Uuid::new_v4(), world.ask(json!({ "stream": true, "stream_options": options })));
        let (first, again) = (world.post(id, &body).await, world.post(id, &body).await);
        assert_eq!(again.header("idempotent-replayed"), "true");
        let parse = |events: &[String]| -> Vec<Value> {
            events
                .iter()
                .filter(|e| *e != "[DONE]")
                .map(|e| serde_json::from_str(e).unwrap())
                .collect()
        };
        let (first, again) = (parse(&first.events()), parse(&again.events()));
        let text = |chunks: &[Value]| -> String {
            chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect()
        };
        assert_eq!(text(&first), text(&again));
        assert_eq!(first.first(), again.first());
        assert_eq!(first.last(), again.last());
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_body_or_session_is_refused_and_reveals_nothing() {
    let world = World::new().await;
    let (id, body) = (Uuid::new_v4(), world.ask(json!({ "seed": 1 })));
    world.post(id, &body).await;
    let balances = world.balances().await;
    let other = world.post(id, &world.ask(json!({ "seed": 2 }))).await;
    assert_eq!(other.error(), (422, "idempotency_key_reused".into()));
    assert!(!other.text().contains("hello"));
    let literal = body.to_string().replace("\"seed\":1", "\"seed\":01").replace("01", "1e0");
    let answer = world
        .call(Method::POST, CHAT, &chat_headers(&world.key, &id.to_string()), literal.into())
        .await;
    assert_eq!(answer.status, 400, "a seed is a whole number");
    let mut headers = chat_headers(&world.key, &id.to_string());
    headers.last_mut().unwrap().1 = Uuid::new_v4().to_string();
    let moved = world.call(Method::POST, CHAT, &headers, body.to_string().into()).await;
    assert_eq!(moved.error(), (422, "idempotency_key_reused".into()));
    assert_eq!(world.balances().await, balances);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_equal_requests_at_once_are_one() {
    let world = World::with(|setup| setup.step = Duration::from_millis(5)).await;
    let (id, body) = (Uuid::new_v4(), world.ask(json!({})));
    let answers = join_all((0..64).map(|_| world.post(id, &body))).await;
    assert_eq!(statuses(&answers), [200; 64]);
    assert!(answers.iter().all(|answer| answer.body == answers[0].body));
    let charged: u64 =
        answers[0].json()["credits"]["chargedUnits"].as_str().unwrap().parse().unwrap();
    assert_eq!(world.balances().await, [1_000_000 - charged, 1_000_000, 0]);
    assert_eq!(world.request(id).await["attempt_count"], 1);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_bodies_at_once_one_wins() {
    let world = World::with(|setup| setup.step = Duration::from_millis(5)).await;
    for _ in 0..5 {
        let id = Uuid::new_v4();
        let bodies = [world.ask(json!({ "seed": 1 })), world.ask(json!({ "seed": 2 }))];
        let answers = join_all((0..32).map(|i| world.post(id, &bodies[i % 2]))).await;
        assert_eq!(statuses(&answers), [[200; 16], [422; 16]].concat());
        let winners = answers
            .iter()
            .filter(|a| a.status == 200)
            .map(|a| &a.body)
            .collect::<std::collections::HashSet<_>>();
        assert_eq!(winners.len(), 1);
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_listeners_of_a_running_stream_are_limited() {
    let world = World::with(|setup| setup.step = Duration::from_millis(30)).await;
    let (id, body) = (
        Uuid::new_v4(),
        world.ask(json!({ "stream": true, "ignore_eos": true, "max_tokens": 30 })),
    );
    let mut first = world.open(&world.key, id, &body).await;
    let mut seen = String::new();
    while !seen.contains("world") {
        seen += &next_piece(&mut first).await;
    }
    let mut others = Vec::new();
    for _ in 0..3 {
        others.push(world.open(&world.key, id, &body).await);
    }
    let fifth = world.post(id, &body).await;
    assert_eq!(
        (fifth.error(), fifth.header("retry-after")),
        ((409, "request_in_progress".into()), "1")
    );
    assert_eq!(fifth.header("x-should-retry"), "true");
    seen += &read(first).await.text();
    for other in others {
        assert_eq!(read(other).await.text(), seen, "every event from the first");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_failure_may_be_tried_three_times() {
    let world = World::with(|setup| {
        setup.failures = (0..3).map(|step| (step, ScriptedFailure::Error)).collect();
    })
    .await;
    let (id, body) = (Uuid::new_v4(), world.ask(json!({})));
    for attempt in 1..=3 {
        let answer = world.post(id, &body).await;
        assert_eq!(
            (answer.error(), answer.header("x-should-retry")),
            ((500, "generation_failed".into()), "true")
        );
        assert_eq!(world.request(id).await["attempt_count"], attempt);
    }
    let answer = world.post(id, &body).await;
    assert_eq!(
        (answer.error(), answer.header("x-should-retry")),
        ((500, "generation_failed".into()), "false")
    );
    assert_eq!(world.request(id).await["attempt_count"], 3);
    assert_eq!(world.balances().await, [1_000_000, 1_000_000, 0]);
    assert_eq!(world.post(Uuid::new_v4(), &body).await.status, 200);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_admission_leaves_the_id_free() {
    let world = World::with(|setup| (setup.trial, setup.premium) = (30, 0)).await;
    let id = Uuid::new_v4();
    let dear = world.ask(json!({ "max_tokens": 900 }));
    assert_eq!(world.post(id, &dear).await.error(), (402, "insufficient_credits".into()));
    assert_eq!(
        world.get(&format!("/v1/requests/{id}")).await.error(),
        (404, "request_not_found".into())
    );
    assert_eq!(world.post(id, &world.ask(json!({ "nonsense": 1 }))).await.status, 400);
    assert_eq!(world.post(id, &world.ask(json!({ "max_tokens": 5 }))).await.status, 200);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_account_whose_answers_fill_their_room_gets_no_new_ones() {
    let world = World::with(|setup| {
        setup.config.requests.max_stored_mib_per_account = 1;
        (setup.ends, setup.step) = (false, Duration::from_millis(5));
    })
    .await;
    let first = (Uuid::new_v4(), world.ask(json!({ "max_tokens": 5 })));
    let answer = world.post(first.0, &first.1).await;
    let scored = |stream| {
        let more = json!({ "logprobs": true, "top_logprobs": 20, "max_tokens": 900 });
        let mut body = world.ask(more);
        body["stream"] = json!(stream);
        body
    };
    // What the answers of two may take leaves no room for a third.
    let mut streams = Vec::new();
    for _ in 0..2 {
        streams.push(world.open(&world.key, Uuid::new_v4(), &scored(true)).await);
    }
    let (id, before) = (Uuid::new_v4(), world.balances().await);
    let refused = world.post(id, &scored(false)).await;
    assert_eq!(refused.error(), (429, "conversation_rate_limit".into()));
    assert!(refused.json()["error"]["message"].as_str().unwrap().contains("top_logprobs"));
    assert_eq!((refused.header("x-should-retry"), refused.header("retry-after")), ("false", "60"));
    assert_eq!(world.get(&format!("/v1/requests/{id}")).await.status, 404);
    assert_eq!(world.balances().await, before);
    // Answers that are stored are replayed, others have room of their own, small ones still fit.
    let again = world.post(first.0, &first.1).await;
    assert_eq!((again.header("idempotent-replayed"), &again.body), ("true", &answer.body));
    let stranger = super::support::account(&world.node, 1_000_000, 0).await;
    let (_, foreign) = issue(&world.node, stranger, None).await;
    let mut other = world.open(&foreign, Uuid::new_v4(), &scored(true)).await;
    assert_eq!(other.status(), 200);
    super::support::next_piece(&mut other).await;
    assert_eq!(
        world.post(Uuid::new_v4(), &world.ask(json!({ "max_tokens": 5 }))).await.status,
        200
    );
    world.node.live.cancel_account(world.account);
    world.node.live.cancel_account(stranger);
    drop((streams, other));
    while !world.node.live.is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let more = json!({ "logprobs": true, "top_logprobs": 20, "max_tokens": 9 });
    assert_eq!(world.post(id, &world.ask(more)).await.status, 200);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_request_is_gone_and_not_run_again() {
    let world = World::with(|setup| {
        setup.config.requests.body_retention_hours = 0;
        setup.step = Duration::from_millis(5);
        setup.failures = vec![(0, ScriptedFailure::Error)];
    })
    .await;
    let bodies = [json!({}), json!({}), json!({ "ignore_eos": true, "max_tokens": 900 })]
        .map(|more| world.ask(more));
    for (body, state) in bodies.iter().zip(["failed", "completed", "cancelled"]) {
        let id = Uuid::new_v4();
        let cancel = async {
            world.reaches_any(id).await;
            if state == "cancelled" {
                world.delete(id).await;
            }
        };
        tokio::join!(world.post(id, body), cancel);
        assert_eq!(world.request(id).await["state"], state);
        let balances = world.balances().await;
        assert_eq!(
            world.post(id, body).await.error(),
            (410, "request_result_expired".into()),
            "{state}"
        );
        let changed = world.ask(json!({ "seed": 1 }));
        assert_eq!(
            world.post(id, &changed).await.error(),
            (422, "idempotency_key_reused".into()),
            "{state}"
        );
        assert_eq!(
            (world.request(id).await["attempt_count"].clone(), world.balances().await),
            (json!(1), balances)
        );
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scopes_do_not_see_each_other() {
    let world = World::new().await;
    let (one, two) = (
        application(&world.node, world.account).await,
        application(&world.node, world.account).await,
    );
    let (_, token_one) = issue(&world.node, world.account, Some(one)).await;
    let (_, token_two) = issue(&world.node, world.account, Some(two)).await;
    let stranger = super::support::account(&world.node, 1_000_000, 0).await;
    let (_, foreign) = issue(&world.node, stranger, None).await;
    let (id, path) = (Uuid::new_v4(), |id: Uuid| format!("/v1/requests/{id}"));
    let body = world.ask(json!({}));
    assert_eq!(world.post_as(&token_one, id, &body).await.status, 200);
    for (key, status) in [(&token_one, 200), (&world.key, 200), (&token_two, 404), (&foreign, 404)]
    {
        assert_eq!(world.get_as(key, &path(id)).await.status, status);
        assert_eq!(world.delete_as(key, id).await.status, status);
    }
    assert_eq!(world.get_as(&foreign, &path(id)).await.error(), (404, "request_not_found".into()));
    let independent = world.post_as(&token_two, id, &world.ask(json!({ "seed": 5 }))).await;
    assert_eq!(
        (independent.status, independent.header("idempotent-replayed")),
        (200, ""),
        "the same id, another request"
    );
    let own = world.post(id, &world.ask(json!({ "seed": 6 }))).await;
    assert_eq!((own.status, own.header("idempotent-replayed")), (200, ""));
    assert_eq!(world.get("/v1/requests/not-an-id").await.error(), (400, "invalid_request".into()));
    assert_eq!(world.get(&path(Uuid::new_v4())).await.error(), (404, "request_not_found".into()));
    world.close().await;
}
