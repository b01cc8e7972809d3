//! The charge of each way to end, and the limits that hold: those of the account, whichever of its
//! credentials is used.

use super::support::{World, application, issue, issue_until, next_piece, read, revoke, suspend};
use cresset_base::{Clock, SystemClock, UnixMillis};
use cresset_engine::testing::ScriptedFailure;
use cresset_request::Plan;
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

/// Microcredits a million tokens: fresh prompt, cached prompt, output.
const PRICES: [u64; 3] = [100_000, 25_000, 400_000];
const GRANTED: u64 = 1_000_000;

fn cost(prompt: u64, cached: u64, output: u64) -> u64 {
    let [fresh_price, cached_price, output_price] = PRICES;
    ((prompt - cached) * fresh_price + cached * cached_price + output * output_price)
        .div_ceil(1_000_000)
}

/// The cost of a request's own usage.
pub fn cost_of(request: &Value) -> u64 {
    let usage = &request["usage"];
    let tokens = |value: &Value| value.as_u64().unwrap();
    let cached = tokens(&usage["prompt_tokens_details"]["cached_tokens"]);
    cost(tokens(&usage["prompt_tokens"]), cached, tokens(&usage["completion_tokens"]))
}

pub fn units(value: &Value) -> u64 {
    value.as_str().unwrap_or_else(|| panic!("{value}")).parse().unwrap()
}

/// A world whose answers go on until `max_tokens`, one token in every `step`.
async fn endless(step: u64, choose: impl FnOnce(&mut super::support::Setup)) -> World {
    World::with(|setup| {
        setup.ends = false;
        setup.step = Duration::from_millis(step);
        choose(setup);
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn cached_prompt_tokens_cost_their_own_price() {
    let world = World::new().await;
    let words = "hello world and you ".repeat(40);
    let body = world.ask(json!({ "messages": [{ "role": "user", "content": words }] }));
    let mut left = GRANTED;
    for cached in [false, true] {
        let id = Uuid::new_v4();
        let answer = world.post(id, &body).await.json();
        let request = world.request(id).await;
        assert_eq!(request["usage"], answer["usage"]);
        assert_eq!(
            answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0,
            cached
        );
        let charged = units(&request["chargedUnits"]);
        assert_eq!(
            (charged, units(&answer["credits"]["chargedUnits"])),
            (cost_of(&request), charged)
        );
        left -= charged;
        assert_eq!(world.balances().await, [left, GRANTED, 0]);
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_is_the_exact_prompt_and_max_tokens_trial_first() {
    let world = endless(20, |setup| (setup.trial, setup.premium) = (100, 1_000)).await;
    let mut stream =
        world.open(&world.key, Uuid::new_v4(), &world.ask(json!({ "max_tokens": 1 }))).await;
    let prompt: Value = serde_json::from_str(&next_piece(&mut stream).await).unwrap();
    let prompt = prompt["usage"]["prompt_tokens"].as_u64().unwrap();
    let [trial, premium, _] = world.balances().await;
    let id = Uuid::new_v4();
    let running =
        world.open(&world.key, id, &world.ask(json!({ "max_tokens": 900, "stream": true }))).await;
    let reserved = cost(prompt, 0, 900);
    assert_eq!(units(&world.request(id).await["reservedUnits"]), reserved);
    let credits = world.get("/v1/credits").await.json();
    let expect = [
        ("trialUnits", trial),
        ("premiumUnits", premium),
        ("reservedUnits", reserved),
        ("processingEligibleUnits", trial + premium - reserved),
        // All of the trial is reserved, and of the premium what the trial does not cover.
        ("purchaseEligibleUnits", premium - (reserved - trial)),
    ];
    for (name, value) in expect {
        assert_eq!(units(&credits[name]), value, "{name} of {credits}");
    }
    let end = world.delete(id).await.json();
    assert_eq!((units(&end["chargedUnits"]), &end["reservedUnits"]), (cost_of(&end), &json!("0")));
    drop(running);
    world.close().await;
}

/// An event that ends an account's requests from outside.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Delete,
    Suspend,
    Revoke,
    Expire,
}

/// One request runs and one waits behind it; then both are cut off.
#[tokio::test(flavor = "multi_thread")]
async fn cut_off_while_running_costs_what_was_produced_and_while_queued_nothing() {
    for cut in [Cut::Delete, Cut::Suspend, Cut::Revoke, Cut::Expire] {
        let world = endless(20, |setup| setup.max_rows = 1).await;
        let soon = UnixMillis(SystemClock.now().0 + 3_000);
        let (credential, key) = issue_until(
            &world.node,
            world.account,
            None,
            matches!(cut, Cut::Expire).then_some(soon),
        )
        .await;
        let body = world.ask(json!({ "stream": true, "max_tokens": 900 }));
        let ids = [Uuid::new_v4(), Uuid::new_v4()];
        let mut running = world.open(&key, ids[0], &body).await;
        let mut seen = String::new();
        while !seen.contains("world") {
            seen += &next_piece(&mut running).await;
        }
        let waiting = world.open(&key, ids[1], &body).await;
        assert_eq!(world.request(ids[1]).await["state"], "queued", "{cut:?}");
        match cut {
            Cut::Delete => {
                for id in ids.iter().rev() {
                    assert_eq!(world.delete(*id).await.status, 200);
                }
            }
            Cut::Suspend => suspend(&world.node, world.account).await,
            Cut::Revoke => revoke(&world.node, credential).await,
            Cut::Expire => {}
        }
        for stream in [running, waiting] {
            assert_cut_off(&read(stream).await.text(), cut);
        }
        if matches!(cut, Cut::Suspend) {
            assert_eq!(world.get("/v1/me").await.error(), (401, "invalid_credential".into()));
            resume(&world).await;
        } else if !matches!(cut, Cut::Delete) {
            assert_eq!(
                world.get_as(&key, "/v1/me").await.error(),
                (401, "invalid_credential".into())
            );
        }
        let [ran, waited] = [world.request(ids[0]).await, world.request(ids[1]).await];
        assert_eq!(
            (&ran["state"], &waited["state"]),
            (&json!("cancelled"), &json!("cancelled")),
            "{cut:?}"
        );
        assert!(ran["usage"]["completion_tokens"].as_u64().unwrap() >= 2, "{cut:?}: {ran}");
        assert_eq!(units(&ran["chargedUnits"]), cost_of(&ran), "{cut:?}");
        assert_eq!(
            (&waited["chargedUnits"], &waited["started_at"], &waited["usage"]),
            (&json!("0"), &Value::Null, &Value::Null),
            "{cut:?}"
        );
        assert_eq!(world.balances().await, [GRANTED - cost_of(&ran), GRANTED, 0], "{cut:?}");
        for id in ids {
            assert_eq!(
                world.post(id, &body).await.error(),
                (409, "request_cancelled".into()),
                "{cut:?}"
            );
        }
        world.close().await;
    }
}

/// The stream ends with an error in place of a finish reason.
fn assert_cut_off(text: &str, cut: Cut) {
    let (rest, last) = text.trim_end().rsplit_once("\n\n").unwrap();
    assert_eq!(last, "data: [DONE]", "{cut:?}");
    let error: Value = serde_json::from_str(rest.rsplit_once("data: ").unwrap().1).unwrap();
    assert_eq!(error["error"]["code"], "request_cancelled", "{cut:?}");
    assert!(!text.contains("\"finish_reason\":\""), "{cut:?}: {text}");
}

async fn resume(world: &World) {
    use cresset_ledger::{AccountStatus, Command};
    let active = Command::SetAccountStatus { id: world.account, status: AccountStatus::Active };
    world.node.store.submit(active).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_takes_two_steps_at_most() {
    let world = endless(100, |_| {}).await;
    let id = Uuid::new_v4();
    let mut stream =
        world.open(&world.key, id, &world.ask(json!({ "stream": true, "max_tokens": 900 }))).await;
    let mut seen = String::new();
    while !seen.contains("world") {
        seen += &next_piece(&mut stream).await;
    }
    let end = world.delete(id).await.json();
    let shown = seen.matches("\"content\":\"").count() as u64 - 1;
    let produced = end["usage"]["completion_tokens"].as_u64().unwrap();
    assert!(produced <= shown + 2, "{shown} were shown before, {produced} were produced");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_step_charges_nothing_and_the_next_requests_run() {
    for failure in [ScriptedFailure::Error, ScriptedFailure::Panic, ScriptedFailure::Rows] {
        let world = endless(20, |setup| setup.failures = vec![(8, failure)]).await;
        let body = world.ask(json!({ "max_tokens": 30 }));
        let ids: Vec<Uuid> = (0..4).map(|_| Uuid::new_v4()).collect();
        let answers =
            futures_util::future::join_all(ids.iter().map(|id| world.post(*id, &body))).await;
        let failed = answers.iter().filter(|answer| answer.status == 500).count();
        assert!(failed > 0, "{failure:?}");
        for (id, answer) in ids.iter().zip(&answers) {
            let request = world.request(*id).await;
            let charged = units(&request["chargedUnits"]);
            assert_eq!(answer.status == 500, request["state"] == "failed", "{failure:?}");
            assert_eq!(
                charged,
                if answer.status == 500 { 0 } else { cost_of(&request) },
                "{failure:?}"
            );
        }
        assert_eq!(world.post(Uuid::new_v4(), &body).await.status, 200, "{failure:?}");
        world.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_s_limits_are_shared_by_all_credentials_of_an_account() {
    let world = endless(20, |setup| {
        let small = Plan { requests_per_minute: 1, burst: 4, max_concurrent: 2, ..Plan::default() };
        setup.config.plans.insert("default".into(), small);
    })
    .await;
    let (_, key) = issue(&world.node, world.account, None).await;
    let app = application(&world.node, world.account).await;
    let (_, token) = issue(&world.node, world.account, Some(app)).await;
    let body = world.ask(json!({ "stream": true, "max_tokens": 900 }));
    let mut open = Vec::new();
    let expect = [200, 200, 429, 429, 429];
    let codes = ["", "", "concurrency_limit", "concurrency_limit", "conversation_rate_limit"];
    for (i, caller) in [&world.key, &token, &key, &token, &world.key].into_iter().enumerate() {
        let response = world.open(caller, Uuid::new_v4(), &body).await;
        assert_eq!(response.status().as_u16(), expect[i], "{i}");
        if expect[i] == 200 {
            open.push(response);
        } else {
            assert_eq!(read(response).await.error().1, codes[i], "{i}");
        }
    }
    world.node.live.cancel_account(world.account);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_admission_leaves_no_record_and_its_id_takes_any_body() {
    let world = endless(20, |setup| {
        (setup.trial, setup.premium) = (1_000, 0);
        setup.config.plans.get_mut("default").unwrap().max_concurrent = 1;
    })
    .await;
    let id = Uuid::new_v4();
    let mut refused = vec![
        (world.ask(json!({ "temperature": 9 })), 400, "invalid_request"),
        (world.ask(json!({ "max_tokens": 1_020 })), 400, "context_length_exceeded"),
        (world.ask(json!({ "model": Uuid::new_v4() })), 404, "model_not_found"),
    ];
    let stream = world
        .open(&world.key, Uuid::new_v4(), &world.ask(json!({ "stream": true, "max_tokens": 900 })))
        .await;
    refused.push((world.ask(json!({ "max_tokens": 9 })), 429, "concurrency_limit"));
    for (body, status, code) in &refused {
        assert_eq!(world.post(id, body).await.error(), (*status, (*code).to_owned()));
        assert_eq!(
            world.get(&format!("/v1/requests/{id}")).await.error(),
            (404, "request_not_found".into()),
            "{code}"
        );
    }
    world.node.live.cancel_account(world.account);
    drop(stream);
    let poor = super::support::account(&world.node, 1, 0).await;
    let (_, key) = issue(&world.node, poor, None).await;
    assert_eq!(
        world.post_as(&key, id, &world.ask(json!({ "max_tokens": 900 }))).await.error(),
        (402, "insufficient_credits".into())
    );
    assert_eq!(world.get_as(&key, &format!("/v1/requests/{id}")).await.status, 404);
    loop {
        let answer = world.post(id, &world.ask(json!({ "max_tokens": 3 }))).await;
        if answer.status == 200 {
            break;
        }
        assert_eq!(answer.error(), (429, "concurrency_limit".into()), "until the first has ended");
    }
    assert_eq!(world.request(id).await["attempt_count"], 1);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_needs_no_credits_no_room_and_no_model() {
    let world = endless(20, |setup| {
        setup.config.plans.get_mut("default").unwrap().max_concurrent = 1;
        (setup.trial, setup.premium) = (400, 0);
    })
    .await;
    let (id, body) = (Uuid::new_v4(), world.ask(json!({ "max_tokens": 5 })));
    let first = world.post(id, &body).await;
    // The rest of the balance is reserved, and the only place is taken.
    let stream = world
        .open(&world.key, Uuid::new_v4(), &world.ask(json!({ "stream": true, "max_tokens": 900 })))
        .await;
    assert_eq!(world.post(Uuid::new_v4(), &body).await.status, 429);
    world.node.pool.engines().iter().for_each(cresset_engine::EngineHandle::shutdown);
    let again = world.post(id, &body).await;
    assert_eq!(
        (again.status, again.header("idempotent-replayed"), &again.body),
        (200, "true", &first.body)
    );
    assert_eq!(world.post(Uuid::new_v4(), &body).await.error(), (503, "overloaded".into()));
    world.node.live.cancel_account(world.account);
    drop(stream);
    world.close().await;
}
