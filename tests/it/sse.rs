//! Streams, to the byte: their events, the order of these, and the form of a failure.

use super::support::{World, next_piece, read, revoke};
use cresset_engine::testing::ScriptedFailure;
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

fn chunks(events: &[String]) -> Vec<Value> {
    events
        .iter()
        .map(|event| serde_json::from_str(event).unwrap_or_else(|e| panic!("{e}: {event}")))
        .collect()
}

fn text_of(chunks: &[Value]) -> String {
    chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_from_role_to_done() {
    let world = World::new().await;
    let id = Uuid::new_v4();
    let answer = world.post(id, &world.ask(json!({ "stream": true }))).await;
    assert_eq!((answer.status, answer.header("content-type")), (200, "text/event-stream"));
    assert_eq!(answer.header("cache-control"), "private, no-store, no-transform");
    assert_eq!((answer.header("x-accel-buffering"), answer.header("content-encoding")), ("no", ""));
    let text = answer.text();
    assert!(text.ends_with("\n\ndata: [DONE]\n\n") && !text.contains('\r'));
    for line in text.lines().filter(|line| !line.is_empty()) {
        assert!(line.starts_with("data: "), "only data lines: {line}");
    }
    let events = answer.events();
    let chunks = chunks(&events[..events.len() - 1]);
    for chunk in &chunks {
        assert_eq!((&chunk["id"], &chunk["model"]), (&json!(id), &json!(world.model)));
        assert_eq!(
            (&chunk["object"], &chunk["created"]),
            (&json!("chat.completion.chunk"), &chunks[0]["created"])
        );
    }
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    assert_eq!(text_of(&chunks), "hello world and you");
    let last = chunks.last().unwrap();
    assert_eq!(
        (&last["choices"][0]["delta"], &last["choices"][0]["finish_reason"]),
        (&json!({}), &json!("stop"))
    );
    assert_eq!(last["credits"]["unit"], "microcredit");
    let earlier = &chunks[..chunks.len() - 1];
    assert!(
        earlier
            .iter()
            .all(|c| c.get("usage").is_none() && c["choices"][0]["finish_reason"].is_null())
    );
    let charged = last["credits"]["chargedUnits"].as_str().unwrap().parse::<u64>().unwrap();
    assert_eq!(world.balances().await, [1_000_000 - charged, 1_000_000, 0]);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_that_was_asked_for_comes_alone() {
    let world = World::new().await;
    let body = world.ask(json!({ "stream": true, "stream_options": { "include_usage": true } }));
    let events = world.post(Uuid::new_v4(), &body).await.events();
    let chunks = chunks(&events[..events.len() - 1]);
    let (last, earlier) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert!(last["usage"]["total_tokens"].is_u64() && last["credits"]["chargedUnits"].is_string());
    assert!(earlier.iter().all(|chunk| chunk["usage"].is_null() && chunk.get("usage").is_some()));
    assert_eq!(earlier.last().unwrap()["choices"][0]["finish_reason"], "stop");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_says_what_the_whole_answer_says() {
    let world = World::with(|setup| setup.reply = "größe 日本語 👋🏽 naïve").await;
    for extra in [
        json!({}),
        json!({ "stop": ["naï"] }),
        json!({ "logprobs": true, "max_tokens": 9, "ignore_eos": true }),
    ] {
        let whole = world.post(Uuid::new_v4(), &world.ask(extra.clone())).await.json();
        let mut streamed = world.ask(extra.clone());
        streamed["stream"] = json!(true);
        let events = world.post(Uuid::new_v4(), &streamed).await.events();
        let chunks = chunks(&events[..events.len() - 1]);
        let (choice, last) = (&whole["choices"][0], &chunks.last().unwrap());
        assert_eq!(choice["message"]["content"], text_of(&chunks), "{extra}");
        assert_eq!(choice["finish_reason"], last["choices"][0]["finish_reason"], "{extra}");
        let tokens =
            |usage: &Value| [usage["prompt_tokens"].clone(), usage["completion_tokens"].clone()];
        assert_eq!(tokens(&whole["usage"]), tokens(&last["usage"]), "{extra}");
        let logprobs: Vec<Value> = chunks
            .iter()
            .filter_map(|c| c["choices"][0]["logprobs"]["content"].as_array())
            .flatten()
            .cloned()
            .collect();
        let whole_logprobs = choice["logprobs"]["content"].as_array().cloned().unwrap_or_default();
        assert_eq!(logprobs, whole_logprobs, "{extra}");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_is_filled_with_comments() {
    let world = World::with(|setup| {
        setup.config.http.keep_alive_seconds = 1;
        setup.step = Duration::from_millis(2500);
    })
    .await;
    let answer =
        world.post(Uuid::new_v4(), &world.ask(json!({ "stream": true, "max_tokens": 1 }))).await;
    let text = answer.text();
    assert!(text.contains("\n\n: keep-alive\n\n"), "{text}");
    let without_comments = text.replace(": keep-alive\n\n", "");
    assert!(
        without_comments.split_terminator("\n\n").all(|event| event.starts_with("data: ")),
        "{text}"
    );
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_settlement_is_durable_before_the_last_chunk_leaves() {
    let world = World::new().await;
    for _ in 0..20 {
        let id = Uuid::new_v4();
        let mut response = world.open(&world.key, id, &world.ask(json!({ "stream": true }))).await;
        loop {
            let piece = next_piece(&mut response).await;
            assert!(!piece.is_empty(), "the stream ended without a finish reason");
            if piece.contains("\"finish_reason\":\"stop\"") {
                assert_eq!(world.request(id).await["state"], "completed");
                break;
            }
        }
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_after_the_first_byte_is_an_event_and_costs_nothing() {
    for failure in [ScriptedFailure::Error, ScriptedFailure::Panic, ScriptedFailure::Rows] {
        let world = World::with(|setup| {
            setup.failures = vec![(2, failure)];
            setup.step = Duration::from_millis(20);
        })
        .await;
        let id = Uuid::new_v4();
        let answer = world.post(id, &world.ask(json!({ "stream": true }))).await;
        let events = answer.events();
        let (done, rest) = events.split_last().unwrap();
        let (error, earlier) = rest.split_last().unwrap();
        assert_eq!((answer.status, done.as_str()), (200, "[DONE]"));
        let error: Value = serde_json::from_str(error).unwrap();
        assert_eq!(
            (&error["error"]["code"], &error["error"]["request_id"]),
            (&json!("generation_failed"), &json!(id))
        );
        assert!(!text_of(&chunks(earlier)).is_empty(), "something was streamed before");
        assert!(
            !answer.text().contains("\"finish_reason\":\"") && !answer.text().contains("scripted")
        );
        let request = world.request(id).await;
        assert_eq!(
            (&request["state"], &request["failure_code"]),
            (&json!("failed"), &json!("generation_failed"))
        );
        assert_eq!(
            (&request["chargedUnits"], world.balances().await),
            (&json!("0"), [1_000_000, 1_000_000, 0])
        );
        let again = world.post(id, &world.ask(json!({ "stream": true }))).await;
        assert!(
            again.text().ends_with("data: [DONE]\n\n")
                && again.text().contains("\"finish_reason\":\"stop\"")
        );
        let request = world.request(id).await;
        assert_eq!(
            (&request["state"], &request["attempt_count"]),
            (&json!("completed"), &json!(2))
        );
        assert!(request["retry_of"].is_string());
        world.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_credential_ends_its_stream() {
    let world = World::with(|setup| {
        setup.ends = false;
        setup.step = Duration::from_millis(5);
    })
    .await;
    let id = Uuid::new_v4();
    let mut response =
        world.open(&world.key, id, &world.ask(json!({ "stream": true, "max_tokens": 900 }))).await;
    for _ in 0..3 {
        next_piece(&mut response).await;
    }
    revoke(&world.node, world.credential).await;
    let rest = read(response).await.text();
    assert!(
        rest.contains("\"code\":\"request_cancelled\"") && rest.ends_with("data: [DONE]\n\n"),
        "{rest}"
    );
    assert_eq!(world.get("/v1/me").await.status, 401);
    let (_, key) = super::support::issue(&world.node, world.account, None).await;
    let request = world.get_as(&key, &format!("/v1/requests/{id}")).await.json();
    assert_eq!(request["state"], "cancelled");
    assert!(request["usage"]["completion_tokens"].as_u64().unwrap() >= 1);
    assert_ne!(request["chargedUnits"], "0", "what was computed for the client is paid");
    world.close().await;
}
