//! Traces, as a collector on loopback gets them: the spans of requests of every end, through the
//! gateway too, and what becomes of requests when no collector takes them.

use crate::process::Folder;
use crate::support::{Answer, Setup, World, bearer, chat_headers, next_piece, read};
use axum::Router;
use axum::extract::State;
use axum::routing::post;
use bytes::Bytes;
use cresset_engine::testing::ScriptedFailure;
use hyper::{Method, StatusCode};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use uuid::Uuid;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";
const CLIENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
/// What the tiny model is asked and what it answers: texts that no span may hold.
const PROMPT: &str = "hello";
const REPLY: &str = "hello world and you";

/// A collector that keeps what it is sent.
#[derive(Clone)]
struct Collector {
    endpoint: String,
    status: StatusCode,
    bodies: Arc<Mutex<Vec<Bytes>>>,
}

impl Collector {
    async fn start(status: StatusCode) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}/v1/traces", listener.local_addr().unwrap());
        let collector = Self { endpoint, status, bodies: Arc::default() };
        let take = async |State(collector): State<Self>, body: Bytes| {
            collector.bodies.lock().unwrap().push(body);
            collector.status
        };
        let routes = Router::new().route("/v1/traces", post(take)).with_state(collector.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        collector
    }

    fn choose(&self, setup: &mut Setup) {
        setup.config.traces.endpoint = Some(self.endpoint.clone());
        setup.config.traces.send_after_milliseconds = 10;
        setup.reply = REPLY;
    }

    fn spans(&self) -> Vec<Span> {
        let bodies = self.bodies.lock().unwrap();
        let sent = bodies.iter().map(|body| ExportTraceServiceRequest::decode(&**body).unwrap());
        let resources = sent.flat_map(|request| request.resource_spans);
        resources.flat_map(|one| one.scope_spans).flat_map(|scope| scope.spans).collect()
    }

    /// The spans once there are `count`. They are then forgotten.
    async fn take(&self, count: usize) -> Vec<Span> {
        while self.spans().len() < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let spans = self.spans();
        assert_eq!(spans.len(), count, "{:?}", names(&spans));
        for body in self.bodies.lock().unwrap().drain(..) {
            let text = String::from_utf8_lossy(&body);
            for secret in [PROMPT, "world", "_key_"] {
                assert!(!text.contains(secret), "a span holds {secret}");
            }
        }
        spans
    }
}

fn names(spans: &[Span]) -> Vec<&str> {
    spans.iter().map(|span| span.name.as_str()).collect()
}

fn named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{:?}", names(spans)))
}

fn shown(value: Option<&AnyValue>) -> String {
    match value.and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        Some(Value::BoolValue(flag)) => flag.to_string(),
        Some(Value::ArrayValue(all)) => {
            all.values.iter().map(|one| shown(Some(one))).collect::<Vec<_>>().join(",")
        }
        other => format!("{other:?}"),
    }
}

fn attributes(span: &Span) -> BTreeMap<&str, String> {
    let pair = |pair: &'_ KeyValue| (pair.key.clone(), shown(pair.value.as_ref()));
    let pairs: Vec<_> = span.attributes.iter().map(pair).collect();
    let keys = span.attributes.iter().map(|pair| pair.key.as_str());
    keys.zip(pairs.into_iter().map(|(_, value)| value)).collect()
}

fn has(span: &Span, expected: &[(&str, &str)]) {
    let all = attributes(span);
    for (name, value) in expected {
        assert_eq!(all.get(name).map(String::as_str), Some(*value), "{name} in {all:?}");
    }
}

/// `span` lies in `parent`, in its trace and its time.
fn is_part_of(span: &Span, parent: &Span) {
    assert_eq!(hex::encode(&span.trace_id), hex::encode(&parent.trace_id));
    assert_eq!(
        hex::encode(&span.parent_span_id),
        hex::encode(&parent.span_id),
        "{} in {}",
        span.name,
        parent.name
    );
    assert!(span.start_time_unix_nano >= parent.start_time_unix_nano, "{}", span.name);
}

async fn ask(world: &World, id: Uuid, extra: serde_json::Value) -> Answer {
    let mut headers = chat_headers(&world.key, &id.to_string());
    headers.push(("traceparent", CLIENT.into()));
    let body = world.ask(extra).to_string().into();
    read(world.send(Method::POST, crate::support::CHAT, &headers, body).await).await
}

const HTTP: &str = "POST /v1/chat/completions";
const CHAT: &str = "chat tiny-0";
const PHASES: [&str; 4] = ["queue", "prefill", "decode", "settlement"];

#[tokio::test]
async fn a_request_and_its_phases_are_one_trace() {
    let collector = Collector::start(StatusCode::OK).await;
    let world = World::with(|setup| collector.choose(setup)).await;
    for stream in [false, true] {
        let id = Uuid::new_v4();
        let extra = json!({ "stream": stream, "max_tokens": 50, "temperature": 0.5, "seed": 7 });
        let answer = ask(&world, id, extra).await;
        assert_eq!(answer.status, 200);
        let spans = collector.take(6).await;
        let (http, chat) = (named(&spans, HTTP), named(&spans, CHAT));
        assert_eq!(
            (hex::encode(&http.trace_id), hex::encode(&http.parent_span_id)),
            (TRACE.into(), PARENT.into())
        );
        is_part_of(chat, http);
        let phases = PHASES.map(|name| named(&spans, name));
        for phase in phases {
            is_part_of(phase, chat);
        }
        for pair in phases.windows(2) {
            assert!(pair[0].end_time_unix_nano <= pair[1].start_time_unix_nano);
        }
        let (account, request) = (world.account.to_string(), id.to_string());
        has(
            http,
            &[
                ("http.request.method", "POST"),
                ("http.route", "/v1/chat/completions"),
                ("http.response.status_code", "200"),
                ("cresset.account.id", &account),
                ("cresset.request.id", &request),
                ("cresset.replayed", "false"),
            ],
        );
        let used = world.request(id).await;
        let units = |name: &str| used["usage"][name].to_string();
        has(
            chat,
            &[
                ("gen_ai.operation.name", "chat"),
                ("gen_ai.provider.name", "cresset"),
                ("gen_ai.request.model", "tiny-0"),
                ("gen_ai.response.model", &world.model),
                ("gen_ai.response.id", &request),
                ("gen_ai.conversation.id", crate::support::SESSION),
                ("gen_ai.request.max_tokens", "50"),
                ("gen_ai.request.temperature", "0.5"),
                ("gen_ai.request.seed", "7"),
                ("gen_ai.request.stream", &stream.to_string()),
                ("gen_ai.response.finish_reasons", "stop"),
                ("gen_ai.usage.input_tokens", &units("prompt_tokens")),
                ("gen_ai.usage.output_tokens", &units("completion_tokens")),
                ("cresset.charged_microcredits", used["chargedUnits"].as_str().unwrap()),
                ("cresset.attempt.number", "1"),
                ("cresset.end", "completed"),
            ],
        );
        assert_eq!(attributes(chat).contains_key("gen_ai.response.time_to_first_chunk"), stream);
        assert!(chat.status.as_ref().is_none_or(|status| status.code == 0));
        // The stored answer is told without another generation.
        ask(
            &world,
            id,
            json!({ "stream": stream, "max_tokens": 50, "temperature": 0.5, "seed": 7 }),
        )
        .await;
        has(&collector.take(1).await[0], &[("cresset.replayed", "true")]);
    }
    world.close().await;
}

#[tokio::test]
async fn failures_retries_and_refusals_are_told_by_their_codes() {
    let collector = Collector::start(StatusCode::OK).await;
    let world = World::with(|setup| {
        collector.choose(setup);
        setup.failures = vec![(0, ScriptedFailure::Error)];
    })
    .await;
    let id = Uuid::new_v4();
    assert_eq!(ask(&world, id, json!({})).await.status, 500);
    // The step that failed was its prefill.
    let spans = collector.take(5).await;
    let (failed, code) = (named(&spans, CHAT), ("error.type", "generation_failed"));
    has(failed, &[code, ("cresset.end", "failed")]);
    has(named(&spans, HTTP), &[code, ("http.response.status_code", "500")]);
    assert_eq!(failed.status.as_ref().unwrap().code, 2);
    assert!(!attributes(failed).contains_key("gen_ai.usage.output_tokens"));
    let first = attributes(failed)["cresset.attempt.id"].clone();

    assert_eq!(ask(&world, id, json!({})).await.status, 200);
    let spans = collector.take(6).await;
    let again = [("cresset.attempt.number", "2"), ("cresset.attempt.retry_of", &first)];
    has(named(&spans, CHAT), &again);

    assert_eq!(ask(&world, Uuid::new_v4(), json!({ "n": 2 })).await.status, 400);
    let refused = collector.take(1).await;
    has(&refused[0], &[("error.type", "invalid_request"), ("http.response.status_code", "400")]);
    assert!(refused[0].status.as_ref().is_none_or(|status| status.code == 0), "a client's mistake");
    let unknown = world.call(Method::POST, "/v1/secret", &bearer("key"), Bytes::new()).await;
    assert_eq!(unknown.status, 401);
    let spans = collector.take(1).await;
    assert_eq!(spans[0].name, "POST other");
    has(&spans[0], &[("error.type", "invalid_credential")]);
    // Reads are traced for clients that trace them.
    world.get("/v1/me").await;
    let mut traced = bearer(&world.key);
    traced.push(("traceparent", CLIENT.into()));
    world.call(Method::GET, "/v1/me", &traced, Bytes::new()).await;
    assert_eq!(names(&collector.take(1).await), ["GET /v1/me"]);
    world.close().await;
}

#[tokio::test]
async fn a_cancelled_request_and_one_that_joined_it() {
    let collector = Collector::start(StatusCode::OK).await;
    let world = World::with(|setup| {
        collector.choose(setup);
        (setup.ends, setup.step) = (false, Duration::from_millis(5));
    })
    .await;
    let (id, body) = (Uuid::new_v4(), world.ask(json!({ "stream": true, "max_tokens": 1000 })));
    let mut first = world.open(&world.key, id, &body).await;
    let second = world.open(&world.key, id, &body).await;
    while !next_piece(&mut first).await.contains("world") {}
    assert_eq!(world.delete(id).await.status, 200);
    for answer in [first, second] {
        assert!(read(answer).await.text().contains("request_cancelled"));
    }
    let spans = collector.take(8).await;
    let chat = named(&spans, CHAT);
    has(chat, &[("cresset.end", "cancelled")]);
    assert!(
        attributes(chat).contains_key("gen_ai.usage.output_tokens"),
        "what was produced is paid"
    );
    assert!(chat.status.as_ref().is_none_or(|status| status.code == 0), "the node did not fail");
    let posts: Vec<&Span> = spans.iter().filter(|span| span.name == HTTP).collect();
    let (joined, began): (Vec<&Span>, Vec<&Span>) =
        posts.into_iter().partition(|span| !span.links.is_empty());
    is_part_of(chat, began[0]);
    let link = &joined[0].links[0];
    assert_eq!((&link.trace_id, &link.span_id), (&began[0].trace_id, &began[0].span_id));
    named(&spans, "DELETE /v1/requests/{id}");
    world.close().await;
}

#[tokio::test]
async fn a_trace_goes_through_the_gateway() {
    let collector = Collector::start(StatusCode::OK).await;
    let mut world = World::with(|setup| collector.choose(setup)).await;
    let gateway = world.open_gateway().await;
    let node = std::mem::replace(&mut world.address, gateway);
    let body = json!({
        "model": "tiny-0", "max_tokens": 50, "messages": [{ "role": "user", "content": PROMPT }],
    });
    let headers = [
        ("host", "localhost".to_owned()),
        ("x-api-key", world.key.clone()),
        ("content-type", "application/json".into()),
        ("traceparent", CLIENT.into()),
    ];
    let sent = world.send(Method::POST, "/v1/messages", &headers, body.to_string().into()).await;
    assert_eq!(read(sent).await.status, 200);
    // The gateway's own request for the list of models is a part of the trace too.
    let spans = collector.take(8).await;
    let (outer, inner) = (named(&spans, "POST /v1/messages"), named(&spans, HTTP));
    assert_eq!(
        (hex::encode(&outer.trace_id), hex::encode(&outer.parent_span_id)),
        (TRACE.into(), PARENT.into())
    );
    is_part_of(inner, outer);
    is_part_of(named(&spans, "GET /v1/models"), outer);
    is_part_of(named(&spans, CHAT), inner);
    let of_chat = attributes(named(&spans, CHAT));
    let tokens = &of_chat["gen_ai.usage.output_tokens"];
    has(outer, &[("gen_ai.request.model", "tiny-0"), ("gen_ai.usage.output_tokens", tokens)]);
    world.address = node;
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_asks_the_collector() {
    let collector = Collector::start(StatusCode::OK).await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let verdicts = tokio::task::spawn_blocking(move || {
        let folder = Folder::empty();
        let closed = format!("http://{closed}/v1/traces");
        [&collector.endpoint, &closed].map(|endpoint| {
            let mut command = folder.command(&["doctor", "--json"]);
            let output = command.env("CRESSET_TRACES__ENDPOINT", endpoint).output().unwrap();
            let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            let checks = document["checks"].as_array().unwrap().clone();
            let of_traces = checks.into_iter().find(|check| check["check"] == "traces").unwrap();
            assert!(of_traces["detail"].as_str().unwrap().contains(endpoint), "{of_traces}");
            of_traces["verdict"].clone()
        })
    });
    assert_eq!(verdicts.await.unwrap(), ["good", "warning"]);
}

#[tokio::test]
async fn requests_do_not_wait_for_a_collector() {
    // One refuses every batch, and one takes connections and never answers.
    let refusing = Collector::start(StatusCode::INTERNAL_SERVER_ERROR).await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_endpoint = format!("http://{}/v1/traces", silent.local_addr().unwrap());
    for endpoint in [refusing.endpoint.clone(), silent_endpoint] {
        let world = World::with(|setup| {
            refusing.choose(setup);
            setup.config.traces.endpoint = Some(endpoint);
            setup.config.traces.timeout_seconds = 1;
            setup.config.traces.queue_spans = 8;
        })
        .await;
        for _ in 0..10 {
            assert_eq!(ask(&world, Uuid::new_v4(), json!({})).await.status, 200);
        }
        let lost = |text: &str| {
            let lines = text.lines().filter(|line| line.starts_with("cresset_trace_spans_total{"));
            lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum::<u64>()
        };
        while lost(&world.node.metrics.text()) < 60 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(!world.node.metrics.text().contains("result=\"sent\""));
        world.close().await;
    }
}
