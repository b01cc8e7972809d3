//! The public surface, route by route: identity, models, credits, completions, and every refusal
//! with its code.

use super::support::{
    CHAT, World, application, bearer, chat_headers, issue, issue_until, revoke, suspend,
};
use bytes::Bytes;
use cresset_base::UnixMillis;
use hyper::Method;
use serde_json::{Value, json};
use uuid::Uuid;

const ROUTES: [(Method, &str); 8] = [
    (Method::GET, "/v1/me"),
    (Method::GET, "/v1/models"),
    (Method::GET, "/v1/models/0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b"),
    (Method::GET, "/v1/credits"),
    (Method::POST, CHAT),
    (Method::GET, "/v1/requests/0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b"),
    (Method::DELETE, "/v1/requests/0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b"),
    (Method::GET, "/no/such/path"),
];

#[tokio::test(flavor = "multi_thread")]
async fn every_path_refuses_every_bad_credential_with_the_code_alone() {
    let world = World::new().await;
    let (revoked_id, revoked) = issue(&world.node, world.account, None).await;
    revoke(&world.node, revoked_id).await;
    let (_, expired) = issue_until(&world.node, world.account, None, Some(UnixMillis(1))).await;
    let unknown =
        cresset_ledger::secret::mint("cresset", cresset_ledger::CredentialKind::ApiKey, &[9; 32]);
    let mut broken = world.key.clone();
    broken.replace_range(20..21, if &broken[20..21] == "a" { "b" } else { "a" });
    let bad: Vec<Vec<(&str, String)>> = vec![
        vec![],
        bearer(""),
        bearer("junk"),
        bearer(&unknown),
        bearer(&broken),
        bearer(&revoked),
        bearer(&expired),
        vec![("authorization", format!("Basic {}", world.key))],
        [bearer(&world.key), bearer(&world.key)].concat(),
    ];
    for headers in &bad {
        for (method, path) in &ROUTES {
            let answer = world.call(method.clone(), path, headers, Bytes::new()).await;
            assert_eq!(
                answer.text(),
                r#"{"error":{"code":"invalid_credential"}}"#,
                "{method} {path} {headers:?}"
            );
            assert_eq!((answer.status, answer.header("www-authenticate")), (401, "Bearer"));
            assert_eq!(answer.header("x-should-retry"), "false");
        }
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_response_carries_its_id_and_cache_rules() {
    let world = World::new().await;
    for (method, path) in &ROUTES {
        for headers in [bearer(&world.key), vec![]] {
            let answer = world.call(method.clone(), path, &headers, Bytes::new()).await;
            assert!(Uuid::parse_str(answer.header("x-request-id")).is_ok(), "{path}");
            assert_eq!(answer.header("cache-control"), "private, no-store", "{path}");
            assert_eq!(answer.header("x-content-type-options"), "nosniff", "{path}");
        }
    }
    let id = Uuid::new_v4();
    let answer = world.post(id, &world.ask(json!({}))).await;
    assert_eq!(answer.header("x-request-id"), id.to_string());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_names_all_that_is_missing_and_the_gateway() {
    let mut world = World::new().await;
    let name = world.node.pool.models()[0].qualified.manifest().name.clone();
    let ask = async |world: &World, host: &str, headers: &[(&'static str, String)], model: &str| {
        let mut all = bearer(&world.key);
        all.extend_from_slice(headers);
        all.extend([("content-type", "application/json".into()), ("host", host.to_owned())]);
        let body = world.ask(json!({ "model": model })).to_string();
        let answer = world.call(Method::POST, CHAT, &all, body.into()).await;
        assert_eq!(answer.error(), (400, "invalid_request".into()));
        let error = answer.json()["error"].clone();
        [&error["param"], &error["message"]].map(|it| it.as_str().unwrap().to_owned())
    };
    let named = format!("the model's id, which is {}.", world.model);
    let [param, message] = ask(&world, "node", &[], &name).await;
    assert_eq!(param, "Idempotency-Key");
    let places = ["Idempotency-Key", "X-Service-Session-Id", &named, "`cresset relay`"]
        .map(|reason| message.find(reason).unwrap_or_else(|| panic!("{reason}: {message}")));
    assert!(places.is_sorted(), "{message}");
    // A name that is none of the caller's models is not looked up anywhere.
    let [_, message] = ask(&world, "node", &[], "gpt-4o").await;
    assert!(message.contains("model must be a hyphenated UUID"), "{message}");
    let key = [("idempotency-key", Uuid::new_v4().to_string())];
    let [param, message] = ask(&world, "node", &key, &world.model).await;
    assert_eq!(param, "X-Service-Session-Id");
    assert!(!message.contains("Idempotency-Key") && !message.contains("model must"), "{message}");
    let gateway = world.open_gateway().await;
    let headers = &chat_headers(&world.key, &Uuid::new_v4().to_string())[2..];
    for (host, headers, told) in [
        ("node", &[][..], "its operator knows where".to_owned()),
        ("localhost", &[], format!("http://{gateway},")),
        ("127.0.0.1", headers, format!("http://{gateway},")),
    ] {
        let [_, message] = ask(&world, host, headers, &name).await;
        assert!(message.contains(&named) && message.contains(&told), "{message}");
        assert!(!message.contains("cresset relay"), "{message}");
    }
    let answer = world.get("/v1/completions").await;
    assert_eq!(answer.error(), (404, "not_found".into()));
    assert!(answer.text().contains("This node has a gateway"), "{}", answer.text());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_paths_and_methods() {
    let world = World::new().await;
    assert_eq!(world.get("/v1").await.error(), (404, "not_found".into()));
    assert_eq!(world.get("/v1/me/").await.error(), (404, "not_found".into()));
    assert_eq!(world.get("/metrics").await.error(), (404, "not_found".into()));
    for (method, path, allow) in [
        (Method::POST, "/v1/me", "GET,HEAD"),
        (Method::GET, CHAT, "POST"),
        (Method::PUT, "/v1/requests/0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b", "GET,HEAD,DELETE"),
    ] {
        let answer = world.call(method, path, &bearer(&world.key), Bytes::new()).await;
        assert_eq!(answer.error(), (405, "method_not_allowed".into()), "{path}");
        assert_eq!(answer.header("allow"), allow, "{path}");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_account_and_its_credential() {
    let world = World::new().await;
    let me = world.get("/v1/me").await.json();
    assert_eq!(
        me,
        json!({
            "object": "account", "id": world.account, "status": "active", "plan": "default",
            "credential": { "id": world.credential, "kind": "api_key", "expires_at": null },
            "application_connection_id": null,
        })
    );
    let app = application(&world.node, world.account).await;
    let (_, token) =
        issue_until(&world.node, world.account, Some(app), Some(UnixMillis(4_000_000_000_000)))
            .await;
    let me = world.get_as(&token, "/v1/me").await.json();
    assert_eq!(
        (&me["credential"]["kind"], &me["credential"]["expires_at"]),
        (&json!("access_token"), &json!(4_000_000_000_u64))
    );
    assert_eq!(me["application_connection_id"], app.to_string());
    suspend(&world.node, world.account).await;
    assert_eq!(world.get("/v1/me").await.status, 401);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn credits_are_exact_strings() {
    let world =
        World::with(|setup| (setup.trial, setup.premium) = (250, 9_007_199_254_740_000)).await;
    assert_eq!(
        world.get("/v1/credits").await.json(),
        json!({
            "object": "credit_balance", "unit": "microcredit", "unitsPerCredit": "1000000", "trialUnits": "250",
            "premiumUnits": "9007199254740000", "processingEligibleUnits": "9007199254740250",
            "purchaseEligibleUnits": "9007199254740000", "reservedUnits": "0",
        })
    );
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn models_page_by_page() {
    let world = World::with(|setup| setup.models = 3).await;
    let whole = world.get("/v1/models").await.json();
    let ids: Vec<&str> =
        whole["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert!(ids.len() == 3 && ids.is_sorted());
    assert_eq!(
        (&whole["object"], &whole["has_more"], &whole["next_after"]),
        (&json!("list"), &json!(false), &Value::Null)
    );
    let mut seen = Vec::new();
    let mut path = "/v1/models?limit=1".to_owned();
    loop {
        let page = world.get(&path).await.json();
        seen.extend(
            page["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap().to_owned()),
        );
        let Some(after) = page["next_after"].as_str() else {
            assert_eq!(page["has_more"], false);
            break;
        };
        assert_eq!(page["has_more"], true);
        path = format!("/v1/models?limit=1&after={after}");
    }
    assert_eq!(seen, ids);
    let past_the_end = world.get(&format!("/v1/models?after={}", ids[2])).await.json();
    assert_eq!(
        (past_the_end["data"].as_array().unwrap().len(), &past_the_end["has_more"]),
        (0, &json!(false))
    );
    for query in ["limit=0", "limit=101", "limit=x", "after=x", "cursor=1", "limit=1&limit=2"] {
        assert_eq!(
            world.get(&format!("/v1/models?{query}")).await.error(),
            (400, "invalid_request".into()),
            "{query}"
        );
    }
    assert_eq!(world.get("/v1/me?a=1").await.error(), (400, "invalid_request".into()));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_says_what_a_client_needs() {
    let world = World::with(|setup| {
        let plan = setup.config.plans.get_mut("default").unwrap();
        plan.context_tokens = Some(500);
        plan.max_output_tokens = Some(100);
    })
    .await;
    let model = world.get(&format!("/v1/models/{}", world.model)).await.json();
    assert_eq!(
        model["limits"],
        json!({
            "model_context_tokens": 2048, "qualified_context_tokens": 1024, "plan_context_tokens": 500,
            "context_tokens": 500, "max_output_tokens": 100,
        })
    );
    assert_eq!((&model["object"], &model["task"]), (&json!("model"), &json!("text_generation")));
    assert_eq!(
        (&model["input_modalities"], &model["output_modalities"]),
        (&json!(["text"]), &json!(["text"]))
    );
    let pricing = json!({ "inputUnitsPerMillion": "100000", "cachedInputUnitsPerMillion": "25000", "outputUnitsPerMillion": "400000" });
    assert_eq!(model["pricing"], pricing);
    for name in
        ["created", "owned_by", "address", "publisher", "upstream", "release_id", "release_label"]
    {
        assert!(model.get(name).is_some(), "{name}");
    }
    assert_eq!(world.get("/v1/models/tiny-0").await.error(), (400, "invalid_request".into()));
    assert_eq!(
        world.get(&format!("/v1/models/{}", Uuid::new_v4())).await.error(),
        (404, "model_not_found".into())
    );
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_may_leave_a_model_out() {
    let world = World::with(|setup| {
        setup.models = 2;
        setup.config.plans.get_mut("default").unwrap().models = Some(vec!["tiny-1".into()]);
    })
    .await;
    let models = world.node.pool.models();
    let id = |name: &str| {
        models
            .iter()
            .find(|m| m.qualified.manifest().name == name)
            .unwrap()
            .qualified
            .id()
            .to_string()
    };
    let listed = world.get("/v1/models").await.json();
    assert_eq!(
        (listed["data"].as_array().unwrap().len(), &listed["data"][0]["id"]),
        (1, &json!(id("tiny-1")))
    );
    let body = world.ask(json!({ "model": id("tiny-0") }));
    assert_eq!(world.post(Uuid::new_v4(), &body).await.error(), (404, "model_not_found".into()));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_and_its_bill() {
    let world = World::new().await;
    let id = Uuid::new_v4();
    let answer = world.post(id, &world.ask(json!({ "user": "u", "seed": 1 }))).await;
    assert_eq!(
        (answer.status, answer.header("content-type")),
        (200, "application/json"),
        "{}",
        answer.text()
    );
    assert_eq!(answer.header("x-ignored-params"), "user");
    let body = answer.json();
    assert_eq!(
        (&body["id"], &body["object"], &body["model"]),
        (&json!(id), &json!("chat.completion"), &json!(world.model))
    );
    let choice = json!([{
        "index": 0, "message": { "role": "assistant", "content": "hello world and you", "refusal": null },
        "logprobs": null, "finish_reason": "stop",
    }]);
    assert_eq!(body["choices"], choice);
    let tokens = |name: &str| body["usage"][name].as_u64().unwrap();
    let (prompt, output) = (tokens("prompt_tokens"), tokens("completion_tokens"));
    assert_eq!(tokens("total_tokens"), prompt + output);
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let cost = (prompt * 100_000 + output * 400_000).div_ceil(1_000_000);
    assert_eq!(body["credits"], json!({ "unit": "microcredit", "chargedUnits": cost.to_string() }));
    assert_eq!(world.balances().await, [1_000_000 - cost, 1_000_000, 0]);
    let request = world.request(id).await;
    assert_eq!(
        (&request["state"], &request["chargedUnits"]),
        (&json!("completed"), &json!(cost.to_string()))
    );
    assert_eq!((&request["usage"], &request["attempt_count"]), (&body["usage"], &json!(1)));
    assert_eq!((&request["cancellable"], &request["failure_code"]), (&json!(false), &Value::Null));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_of_model_and_account() {
    let world = World::new().await;
    let post = async |extra: Value| world.post(Uuid::new_v4(), &world.ask(extra)).await;
    let too_long = json!([{ "role": "user", "content": "x ".repeat(2000) }]);
    let answer = post(json!({ "messages": too_long })).await;
    assert_eq!(answer.error(), (400, "context_length_exceeded".into()));
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("This model's maximum context length is 1024 tokens"), "{message}");
    assert!(message.contains(" prompt + 0 requested output tokens = "), "{message}");
    let named = world.node.pool.models()[0].qualified.manifest().name.clone();
    let answer = post(json!({ "model": named })).await;
    assert_eq!(answer.error(), (400, "invalid_request".into()));
    assert!(answer.text().contains(&world.model), "it tells the id: {}", answer.text());
    let answer = post(json!({ "max_tokens": 1025 })).await;
    assert_eq!(
        (answer.error(), &answer.json()["error"]["param"]),
        ((400, "invalid_request".into()), &json!("max_tokens"))
    );
    assert_eq!(
        post(json!({ "max_tokens": 1020 })).await.error(),
        (400, "context_length_exceeded".into())
    );
    assert_eq!(
        post(json!({ "logit_bias": { "999999": 1 } })).await.json()["error"]["param"],
        "logit_bias"
    );
    assert_eq!(
        post(json!({ "model": Uuid::new_v4() })).await.error(),
        (404, "model_not_found".into())
    );
    assert_eq!(post(json!({ "model": "tiny-0" })).await.error(), (400, "invalid_request".into()));
    let cut = post(json!({ "max_tokens": 2 })).await.json();
    assert_eq!(
        (&cut["choices"][0]["finish_reason"], &cut["usage"]["completion_tokens"]),
        (&json!("length"), &json!(2))
    );
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_strings_end_the_answer_before_them() {
    let world = World::new().await;
    let post = async |stop: Value| {
        world.post(Uuid::new_v4(), &world.ask(json!({ "stop": stop }))).await.json()
    };
    let whole = post(json!(["never"])).await;
    assert_eq!(whole["choices"][0]["message"]["content"], "hello world and you");
    let cut = post(json!([" and", "zzz"])).await;
    assert_eq!(cut["choices"][0]["message"]["content"], "hello world");
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");
    let tokens = |answer: &Value| answer["usage"]["completion_tokens"].as_u64().unwrap();
    assert!(tokens(&cut) < tokens(&whole), "what comes after the stop string is not billed");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn logprobs_cover_the_answer() {
    let world = World::new().await;
    let body = world.ask(json!({ "logprobs": true, "top_logprobs": 1 }));
    let answer = world.post(Uuid::new_v4(), &body).await.json();
    let entries = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let text: String = entries.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!(text, "hello world and you");
    assert!(
        entries
            .iter()
            .all(|e| e["top_logprobs"].as_array().unwrap().len() == 1 && e["bytes"].is_array())
    );
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_and_headers_that_are_refused() {
    let world = World::new().await;
    let good = chat_headers(&world.key, &Uuid::new_v4().to_string());
    let body = world.ask(json!({})).to_string();
    let without = |name: &str| good.iter().filter(|(n, _)| *n != name).cloned().collect::<Vec<_>>();
    let plus =
        |name: &'static str, value: &str| [good.clone(), vec![(name, value.to_owned())]].concat();
    let named = [
        (without("idempotency-key"), "Idempotency-Key"),
        (without("x-service-session-id"), "X-Service-Session-Id"),
        (plus("idempotency-key", &Uuid::new_v4().to_string()), "Idempotency-Key"),
        (plus("x-cresset-session-id", super::support::SESSION), "X-Service-Session-Id"),
        (plus("x-cache-salt", "a"), "x-cache-salt"),
        (plus("content-encoding", "gzip"), "Content-Encoding"),
    ];
    for (headers, param) in named {
        let answer = world.call(Method::POST, CHAT, &headers, body.clone().into()).await;
        assert_eq!(answer.error(), (400, "invalid_request".into()), "{headers:?}");
        assert_eq!(answer.json()["error"]["param"], param, "{headers:?}");
    }
    let large = || Bytes::from(vec![b' '; 256 * 1024 + 1]);
    let twice = body.replace("{\"model\"", "{\"model\":\"a\",\"model\"");
    let cases = [
        (without("content-type"), body.clone().into(), 415, "unsupported_media_type"),
        (good.clone(), large(), 413, "request_too_large"),
        (without("content-type"), large(), 413, "request_too_large"),
        (good.clone(), Bytes::new(), 400, "invalid_request"),
        (good.clone(), Bytes::from_static(b"{"), 400, "invalid_request"),
        (good.clone(), format!("{body} x").into(), 400, "invalid_request"),
        (good.clone(), twice.into(), 400, "invalid_request"),
        (good.clone(), Bytes::from_static(b"{\"model\":\"\xff\"}"), 400, "invalid_request"),
        (good.clone(), "[".repeat(10_000).into(), 400, "invalid_request"),
    ];
    for (headers, body, status, code) in cases {
        let answer = world.call(Method::POST, CHAT, &headers, body).await;
        assert_eq!(answer.error(), (status, code.into()), "{headers:?}");
        assert_eq!(answer.json()["error"]["param"], Value::Null, "{headers:?}");
    }
    let at_the_limit = format!("{body}{}", " ".repeat(256 * 1024 - body.len()));
    assert_eq!(world.call(Method::POST, CHAT, &good, at_the_limit.into()).await.status, 200);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_tell_what_to_change_and_repeat_nothing() {
    let world = World::new().await;
    let id = Uuid::new_v4();
    let body = world.ask(json!({ "canary": "canary-secret-text" }));
    let answer = world.post(id, &body).await;
    let error = &answer.json()["error"];
    assert_eq!(
        (&error["code"], &error["type"]),
        (&json!("invalid_request"), &json!("invalid_request_error"))
    );
    assert_eq!((&error["param"], &error["request_id"]), (&json!("canary"), &json!(id)));
    assert!(!answer.text().contains("canary-secret-text") && !answer.text().contains(&world.key));
    assert_eq!(answer.header("x-should-retry"), "false");
    world.close().await;
}
