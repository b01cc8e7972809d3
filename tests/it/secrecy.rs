//! What clients send stays between them and the model: not in logs, not in metrics, not in errors.

use super::support::{CHAT, World, chat_headers};
use cresset::engine::runner::Failure;
use hyper::Method;
use serde_json::json;
use std::io::Write;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

const CANARY: &str = "canary-7d1f";

/// Everything that is logged while it lives.
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

// One thread: the log is that of this test alone.
#[tokio::test]
async fn prompts_and_keys_appear_nowhere() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber =
        tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(move || writer.clone()).finish();
    // With a single one, tracing asks the thread that meets an event first, which may be another test's; with two it asks both.
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    let _guard = tracing::subscriber::set_default(subscriber);
    let world = World::with(|setup| setup.failures = vec![(1, Failure::Error)]).await;
    let prompt =
        json!({ "messages": [{ "role": "user", "content": CANARY }], "user": CANARY, "metadata": { "a": CANARY } });
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
    seen += &world.node.metrics_text();
    let secret = world.key.clone();
    world.close().await;
    let logged = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    assert!(logged.contains("answered") && logged.contains("a generation failed"), "the log is really read:\n{logged}");
    for (place, text) in [("responses", &seen), ("log", &logged)] {
        assert!(!text.contains(CANARY) && !text.contains(&secret), "{place}:\n{text}");
    }
}
