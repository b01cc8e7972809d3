//! Text that clients send appears in no log, no metric and no error.

use super::process::{Customer, Folder, Served, eventually, get, request};
use super::support::{CHAT, World, chat_headers};
use cresset_commands::metrics;
use cresset_engine::testing::ScriptedFailure;
use hyper::Method;
use serde_json::json;
use std::io::Write;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

const CANARY: &str = "canary-7d1f";

/// Collects everything that is logged while it exists.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

// The test has one thread, so that the log holds its own events alone.
#[tokio::test]
async fn prompts_and_keys_appear_nowhere() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    // With a single subscriber, tracing lets the thread on which an event first occurs decide
    // whether the event is wanted, and that thread may be another test's; with two it asks both.
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    let _guard = tracing::subscriber::set_default(subscriber);
    let world = World::with(|setup| setup.failures = vec![(1, ScriptedFailure::Error)]).await;
    let prompt = json!({ "messages": [{ "role": "user", "content": CANARY }], "user": CANARY, "metadata": { "a": CANARY } });
    let mut seen = String::new();
    for body in [
        world.ask(prompt.clone()).to_string(),
        world.ask(prompt).to_string(),
        world.ask(json!({ "unknown": CANARY })).to_string(),
        world.ask(json!({ "messages": [{ "role": CANARY, "content": CANARY }] })).to_string(),
        format!("{{{CANARY}"),
    ] {
        let headers = chat_headers(&world.key, &Uuid::new_v4().to_string());
        let answer = world.call(Method::POST, CHAT, &headers, body.into()).await;
        seen += &answer.text();
    }
    let bad = format!("{}x", world.key);
    seen += &world.get_as(&bad, &format!("/v1/{CANARY}")).await.text();
    seen += &world.get(&format!("/v1/requests/{CANARY}")).await.text();
    seen += &world.get(&format!("/v1/models?after={CANARY}")).await.text();
    seen += &metrics::text(&world.node).await;
    let secret = world.key.clone();
    world.close().await;
    let logged = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    assert!(
        logged.contains("answered") && logged.contains("a generation failed"),
        "the log is really read:\n{logged}"
    );
    for (place, text) in [("responses", &seen), ("log", &logged)] {
        assert!(!text.contains(CANARY) && !text.contains(&secret), "{place}:\n{text}");
    }
}

const PROMPT: &str = "prompt-canary-5b0c";

/// All fields and headers in which a client may send text of its own, well-formed or not.
fn indiscreet(node: &Served, key: &str) -> Vec<(String, String)> {
    let chat = |key: &str, more: &str| {
        format!(
            "POST {CHAT} HTTP/1.1\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\nIdempotency-Key: {}\r\n\
             X-Service-Session-Id: {}\r\nUser-Agent: {PROMPT}\r\nX-Note: {PROMPT}\r\n{more}",
            Uuid::new_v4(),
            Uuid::new_v4()
        )
    };
    let message = json!([{ "role": "user", "content": PROMPT, "name": PROMPT }]);
    let ask = |extra: serde_json::Value| {
        let mut body =
            json!({ "model": node.model, "messages": message, "max_tokens": 3, "user": PROMPT });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body.to_string()
    };
    let bad = format!("{}x", &key[..key.len() - 1]);
    let me = format!("GET /v1/me HTTP/1.1\r\nAuthorization: Bearer {key}\r\n");
    let mut requests = vec![
        (chat(key, ""), ask(json!({}))),
        (
            chat(key, ""),
            ask(json!({ "stream": true, "stop": [PROMPT], "metadata": { "a": PROMPT } })),
        ),
        (chat(key, ""), ask(json!({ "max_tokens": 1_000_000 }))),
        (chat(key, ""), ask(json!({ "unknown": PROMPT }))),
        (chat(key, ""), ask(json!({ "model": PROMPT }))),
        (chat(key, ""), format!("{{\"model\": {PROMPT}")),
        (chat(key, ""), format!("{{\"a\":\"{PROMPT}\",\"a\":\"{PROMPT}\"}}")),
        (chat(&bad, ""), ask(json!({}))),
        (chat(key, &format!("Cookie: {key}\r\n broken {PROMPT}\r\n")), String::new()),
        (chat(key, &format!("Content-Length: {PROMPT}\r\n")), String::new()),
        (chat(key, &format!("X-Large: {}\r\n", PROMPT.repeat(3_000))), String::new()),
        (chat(key, &format!("X-Cache-Salt: {PROMPT}\r\n")), ask(json!({}))),
        (me.clone(), String::new()),
        (me.replace("GET", PROMPT), String::new()),
        (me.replace(key, &format!("{key} {key}")), String::new()),
    ];
    for path in [
        "/{}",
        "/v1/requests/{}",
        "/v1/models/{}",
        "/v1/models?after={}",
        "/v1/me?{}",
        "http://{}/v1/me",
    ] {
        requests.push((me.replace("/v1/me", &path.replace("{}", PROMPT)), String::new()));
    }
    requests
}

#[test]
fn the_real_node_logs_no_client_text_at_any_level() {
    let folder = Folder::ready();
    let Customer { account, key, key_id } = folder.customer(100_000_000);
    let mut command = folder.serve_command(&[]);
    command.env("CRESSET_LOG__LEVEL", "trace");
    let node = Served::start(command);
    let mut told = Vec::new();
    for (head, body) in indiscreet(&node, &key) {
        let reply = request(&node.listen, &head, &body).finish();
        // The model may repeat the client's text in its own; the rest of an answer may not.
        if reply.status != 200 {
            told.push(("an answer", format!("{} {:?}", reply.body, reply.headers)));
        }
    }
    two(&node, &key);
    let ids = folder.json(&["requests", "list", "--account", &account]);
    let one = ids["data"][0]["id"].as_str().unwrap().to_owned();
    for arguments in [
        &["status"][..],
        &["accounts", "list"],
        &["accounts", "show", &account],
        &["keys", "list", "--account", &account],
        &["credits", "show", "--account", &account],
        &["credits", "statement", "--account", &account],
        &["requests", "list", "--account", &account],
        &["requests", "show", &one],
        &["ledger", "audit"],
        &["keys", "revoke", &key_id],
    ] {
        told.push(("an operator's command", folder.json(arguments).to_string()));
    }
    for path in ["/healthz", "/readyz", "/metrics"] {
        told.push(("the operator's listener", get(&node.operator, path).body));
    }
    eventually("the log arrives", || node.log().contains("answered"));
    let traced = node.log();
    assert!(traced.contains("TRACE"), "the log is really this chatty");
    told.push(("the log", traced));
    assert!(node.terminate().success());
    for file in std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
    {
        told.push((
            "the data folder",
            String::from_utf8_lossy(&std::fs::read(file).unwrap()).into_owned(),
        ));
    }
    let random = &key["cresset_key_".len()..];
    for (place, text) in told {
        for (what, canary) in [("the prompt", PROMPT), ("the key", random)] {
            let found = text
                .find(canary)
                .map(|at| text[..at].lines().last().unwrap_or_default().to_owned());
            assert_eq!(found, None, "{what} in {place}");
        }
    }
}

/// The same check over HTTP/2.
fn two(node: &Served, key: &str) {
    let address = node.listen.strip_prefix("http://").unwrap().parse().unwrap();
    let request = hyper::Request::builder()
        .uri(format!("http://node/v1/{PROMPT}"))
        .header("authorization", format!("Bearer {key}"))
        .header("x-note", PROMPT)
        .body(http_body_util::Full::default())
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let answer = runtime
        .block_on(async { super::support::http2(address).await.send_request(request).await });
    assert_eq!(answer.unwrap().status().as_u16(), 404);
}
