//! The gateway between a client that speaks in bytes and a node that notes the keys it is given.

use super::*;
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::json;
use std::convert::Infallible;
use std::sync::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

const SAME: &str = r#"{"model":"00000000-0000-4000-8000-000000000001"}"#;
const COUNT: &str = "x-stainless-retry-count: 1\r\n";

type Pieces = mpsc::Receiver<Option<&'static str>>;

/// A node that answers each request with pieces of text as the test sends them; `None` breaks the
/// connection off.
struct Node {
    address: SocketAddr,
    keys: Mutex<Vec<String>>,
    /// Keys of the requests that it was asked to cancel.
    cancelled: Mutex<Vec<String>>,
    /// The answers to come, in the order of the requests.
    answers: Mutex<Vec<(Response<()>, Pieces)>>,
}

impl Node {
    async fn start() -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (keys, cancelled) = (Mutex::default(), Mutex::default());
        let node = Arc::new(Self { address, keys, cancelled, answers: Mutex::default() });
        let served = node.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let node = served.clone();
                let service = service_fn(move |request| {
                    let answer = node.answer(&request);
                    async move { Ok::<_, Infallible>(answer) }
                });
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        node
    }

    fn answer(&self, request: &Request<Incoming>) -> Response<BoxBody<Bytes, std::io::Error>> {
        if request.method() == Method::DELETE {
            let key = request.uri().path().strip_prefix("/v1/requests/").unwrap().to_owned();
            assert!(request.headers().contains_key(AUTHORIZATION));
            self.cancelled.lock().unwrap().push(key);
            return Response::new(BoxBody::new(Full::default().map_err(|never| match never {})));
        }
        let key = &request.headers()[IDEMPOTENCY_KEY];
        self.keys.lock().unwrap().push(key.to_str().unwrap().to_owned());
        let (mut head, pieces) = self.answers.lock().unwrap().remove(0);
        head.headers_mut().insert(REQUEST_ID, key.clone());
        let frames = futures_util::stream::unfold(pieces, async |mut pieces| {
            let piece = pieces.recv().await?;
            let frame = piece.map(|text| Frame::data(Bytes::from_static(text.as_bytes())));
            Some((frame.ok_or_else(|| std::io::Error::other("broken off")), pieces))
        });
        head.map(|()| BoxBody::new(StreamBody::new(frames)))
    }

    /// Prepares the next answer and returns the place where its pieces are given.
    fn will_answer(&self, status: u16, headers: &[(&'static str, &'static str)]) -> Pen {
        let (pen, pieces) = mpsc::channel(16);
        let mut head = Response::new(());
        *head.status_mut() = StatusCode::from_u16(status).unwrap();
        for (name, value) in headers {
            head.headers_mut().insert(*name, HeaderValue::from_static(value));
        }
        self.answers.lock().unwrap().push((head, pieces));
        pen
    }

    fn keys(&self) -> Vec<String> {
        self.keys.lock().unwrap().clone()
    }
}

type Pen = mpsc::Sender<Option<&'static str>>;

struct Running {
    node: Arc<Node>,
    gateway: SocketAddr,
}

impl Running {
    async fn start() -> Self {
        Self::with(HttpSettings::default(), CancellationToken::new()).await
    }

    async fn with(http: HttpSettings, shutdown: CancellationToken) -> Self {
        let node = Node::start().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let options = GatewayOptions { http, ..settings(&format!("http://{}", node.address)) };
        let gateway = Gateway::new(options, loopback()).unwrap();
        tokio::spawn(serve(listener, None, gateway, shutdown));
        Self { node, gateway: address }
    }

    /// Sends a request on a connection of its own.
    async fn send(&self, lines: &str, body: &str) -> TcpStream {
        self.send_to(CHAT, lines, body).await
    }

    async fn send_to(&self, path: &str, lines: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.gateway).await.unwrap();
        let length = body.len();
        let text = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
             {lines}Content-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(text.as_bytes()).await.unwrap();
        stream
    }

    /// Sends a request and returns the whole answer of the node, which is `ok`.
    async fn ask(&self, lines: &str, body: &str) -> String {
        let pen = self.node.will_answer(200, &[]);
        let stream = self.send(lines, body).await;
        pen.send(Some("ok")).await.unwrap();
        drop(pen);
        whole(stream).await
    }

    /// Sends a request and waits until the node has it.
    async fn begin(&self, lines: &str, body: &str) -> (TcpStream, Pen) {
        let before = self.node.keys().len();
        let pen = self.node.will_answer(200, &[]);
        let stream = self.send(lines, body).await;
        while self.node.keys().len() == before {
            tokio::task::yield_now().await;
        }
        (stream, pen)
    }

    /// Which requests went under one key: their numbers in the order of the keys' first use.
    fn calls(&self) -> Vec<usize> {
        let keys = self.node.keys();
        let mut first: Vec<&String> = Vec::new();
        for key in &keys {
            if !first.contains(&key) {
                first.push(key);
            }
        }
        keys.iter().map(|key| first.iter().position(|one| *one == key).unwrap()).collect()
    }
}

async fn whole(mut stream: TcpStream) -> String {
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text).await;
    text
}

pub(super) fn settings(upstream: &str) -> GatewayOptions {
    GatewayOptions {
        aliases: BTreeMap::new(),
        metrics: cresset_telemetry::RelayMetrics::new(0).gateway,
        traces: Traces::default(),
        upstream: GatewayUpstream::Remote {
            address: upstream.parse().unwrap(),
            tls: Box::new(cresset_tls::client(None).unwrap()),
        },
        http: HttpSettings::default(),
        key: Some("own\n".into()),
        session: Uuid::from_u128(7),
        hosts: vec!["relay.home".into()],
        origins: vec!["http://page.example".into()],
    }
}

pub(super) fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn gateway(upstream: &str) -> Gateway {
    Gateway::new(settings(upstream), loopback()).unwrap()
}

#[tokio::test]
async fn a_relay_says_where_raw_prompts_can_be_asked() {
    let running = Running::start().await;
    for (path, body, status) in [
        ("/v1/completions", r#"{"model":"m","prompt":"a"}"#, "400"),
        ("/api/generate", r#"{"model":"m","prompt":"a","raw":true}"#, "400"),
        ("/infill", r#"{"model":"m","input_prefix":"a"}"#, "400"),
        ("/tokenize", r#"{"model":"m","content":"a"}"#, "404"),
    ] {
        let text = whole(running.send_to(path, "", body).await).await;
        assert!(text.starts_with(&format!("HTTP/1.1 {status}")), "{path}: {text}");
        assert!(text.contains("gateway.listen"), "{path}: {text}");
    }
    assert!(running.node.keys().is_empty());
}

#[tokio::test]
async fn equal_requests_that_were_answered_are_calls_of_their_own() {
    let running = Running::start().await;
    assert!(running.ask("", SAME).await.ends_with("ok\r\n0\r\n\r\n"));
    running.ask("", SAME).await;
    running.ask("x-stainless-retry-count: 0\r\n", SAME).await;
    let (first, _pen) = running.begin("", SAME).await;
    let (second, _other) = running.begin("", SAME).await;
    assert_eq!(running.calls(), [0, 1, 2, 3, 4], "two at the same time, too");
    drop((first, second));
}

#[tokio::test]
async fn a_client_that_says_nothing_keeps_no_place() {
    let http = HttpSettings { max_connections: 1, header_seconds: 1, ..HttpSettings::default() };
    let running = Running::with(http, CancellationToken::new()).await;
    let silent = TcpStream::connect(running.gateway).await.unwrap();
    assert!(running.ask("", SAME).await.contains("ok"), "it waited for its place");
    assert_eq!(whole(silent).await, "", "the first was closed");
}

#[tokio::test]
async fn a_body_that_does_not_come_is_refused() {
    let http = HttpSettings { body_seconds: 1, max_body_bytes: 8, ..HttpSettings::default() };
    let running = Running::with(http, CancellationToken::new()).await;
    let slow = running.send("Content-Length: 7\r\nX-", "").await;
    assert!(whole(slow).await.starts_with("HTTP/1.1 413"));
    assert!(whole(running.send("", SAME).await).await.starts_with("HTTP/1.1 413"), "too large");
}

#[tokio::test]
async fn an_answer_that_is_being_sent_ends_before_the_gateway_does() {
    let shutdown = CancellationToken::new();
    let running = Running::with(HttpSettings::default(), shutdown.clone()).await;
    let (stream, pen) = running.begin("", SAME).await;
    shutdown.cancel();
    pen.send(Some("the end")).await.unwrap();
    drop(pen);
    assert!(whole(stream).await.contains("the end"));
}

#[tokio::test]
async fn a_client_that_gave_up_and_tries_again_stays_in_its_call() {
    let running = Running::start().await;
    let (stream, pen) = running.begin("", SAME).await;
    drop(stream);
    running.ask(COUNT, SAME).await;
    running.ask("x-stainless-retry-count: 2\r\n", SAME).await;
    assert_eq!(running.calls(), [0, 0, 0]);
    drop(pen);
    let (stream, _pen) = running.begin("", SAME).await;
    drop(stream);
    running.ask("", SAME).await;
    running.ask("", SAME).await;
    assert_eq!(running.calls(), [0, 0, 0, 1, 1, 2], "without a count, once");
}

#[tokio::test]
async fn a_retry_while_the_first_runs_attaches_to_it() {
    let running = Running::start().await;
    let (_stream, _pen) = running.begin("", SAME).await;
    running.ask(COUNT, SAME).await;
    assert_eq!(running.calls(), [0, 0]);
}

#[tokio::test]
async fn other_input_is_another_call() {
    let running = Running::start().await;
    drop(running.begin("", SAME).await);
    running.ask("", r#"{"model":"00000000-0000-4000-8000-000000000002"}"#).await;
    let session = "x-service-session-id: 11111111-1111-4111-8111-111111111111\r\n";
    running.ask(&format!("{session}{COUNT}"), SAME).await;
    assert_eq!(running.calls(), [0, 1, 2]);
}

#[tokio::test]
async fn a_stream_that_breaks_is_repeated_under_its_key() {
    const EVENT: &str = "data: {}\n\n";
    let running = Running::start().await;
    let (stream, pen) = running.begin("", SAME).await;
    pen.send(Some(EVENT)).await.unwrap();
    pen.send(None).await.unwrap();
    assert!(!whole(stream).await.ends_with("0\r\n\r\n"), "the client sees that it broke");
    let (mut stream, pen) = running.begin("", SAME).await;
    pen.send(Some(EVENT)).await.unwrap();
    let mut seen = [0; 64];
    assert!(stream.read(&mut seen).await.unwrap() > 0);
    drop(stream);
    let (mut stream, pen) = running.begin("", SAME).await;
    assert_eq!(running.calls(), [0, 0, 0], "the client left in the middle");
    for piece in ["data: [DO", "NE]\n\n"] {
        pen.send(Some(piece)).await.unwrap();
    }
    let mut text = String::new();
    while !text.contains("NE]") {
        let count = stream.read(&mut seen).await.unwrap();
        text.push_str(std::str::from_utf8(&seen[..count]).unwrap());
    }
    drop(stream);
    running.ask("", SAME).await;
    assert_eq!(running.calls(), [0, 0, 0, 1], "it left after the last event");
}

/// Begins a stream and reads this number of events.
async fn stream_of(running: &Running, lines: &str, events: usize) -> (TcpStream, Pen) {
    let before = running.node.keys().len();
    let pen = running.node.will_answer(200, &[("content-type", "text/event-stream")]);
    let mut stream = running.send(lines, SAME).await;
    for _ in 0..events {
        pen.send(Some("data: {}\n\n")).await.unwrap();
        let mut seen = Vec::new();
        while !seen.ends_with(b"data: {}\n\n\r\n") {
            seen.push(stream.read_u8().await.unwrap());
        }
    }
    assert_eq!(running.node.keys().len(), before + 1);
    (stream, pen)
}

/// Begins a stream and reads some of it.
async fn stream(running: &Running, lines: &str) -> (TcpStream, Pen) {
    stream_of(running, lines, 2).await
}

#[tokio::test]
async fn a_stream_that_its_client_closes_is_cancelled_and_forgotten() {
    let running = Running::start().await;
    let cancelled = || running.node.cancelled.lock().unwrap().clone();
    let (first, pen) = stream(&running, "").await;
    drop(first);
    while cancelled().is_empty() {
        tokio::task::yield_now().await;
    }
    assert_eq!(cancelled(), running.node.keys());
    drop(pen);
    running.ask("", SAME).await;
    running.ask(COUNT, SAME).await;
    assert_eq!(running.calls(), [0, 1, 1], "the next is a call, and has retries of its own");
    let (whole_stream, pen) = stream(&running, "").await;
    pen.send(Some("data: [DONE]\n\n")).await.unwrap();
    drop(pen);
    assert!(whole(whole_stream).await.contains("[DONE]"));
    assert_eq!(cancelled().len(), 1, "one that was read to its end is not cancelled");
}

/// A relay that asked for fewer tokens did so under another key, and that run is the one to end.
#[tokio::test]
async fn the_run_that_answers_is_the_one_that_is_cancelled() {
    const LONG: &str = "This model's maximum context length is 2048 tokens, but the prompt is too \
                        long: 1000 prompt + 1500 requested output tokens = 2500.";
    let refusal: &'static str = json!({ "error": { "code": "context_length_exceeded",
        "message": LONG } })
    .to_string()
    .leak();
    let running = Running::start().await;
    let refused = running.node.will_answer(400, &[]);
    refused.send(Some(refusal)).await.unwrap();
    drop(refused);
    let pen = running.node.will_answer(200, &[("content-type", "text/event-stream")]);
    let body = SAME.replace('}', r#","max_tokens":1500}"#);
    let mut client = running.send("", &body).await;
    for _ in 0..2 {
        pen.send(Some("data: {}\n\n")).await.unwrap();
    }
    let mut seen = String::new();
    while seen.matches("data: {}").count() < 2 {
        let mut piece = [0; 256];
        let count = client.read(&mut piece).await.unwrap();
        seen += &String::from_utf8_lossy(&piece[..count]);
    }
    drop(client);
    while running.node.cancelled.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    let keys = running.node.keys();
    assert_ne!(keys[0], keys[1]);
    assert_eq!(*running.node.cancelled.lock().unwrap(), keys[1..]);
}

#[tokio::test]
async fn a_stream_goes_on_for_those_who_may_come_back() {
    let running = Running::start().await;
    let cancelled = || running.node.cancelled.lock().unwrap().len();
    let (broken, pen) = stream(&running, "").await;
    pen.send(None).await.unwrap();
    whole(broken).await;
    let (silent, _pen) = stream_of(&running, "", 1).await;
    assert_eq!(running.calls(), [0, 0], "the node had broken it off");
    drop(silent);
    let (first, _pen) = stream(&running, COUNT).await;
    assert_eq!(running.calls(), [0, 0, 0], "its client had read no text of it");
    let (second, _pen) = stream(&running, COUNT).await;
    drop(first);
    running.ask("", SAME).await;
    assert_eq!((running.calls(), cancelled()), (vec![0, 0, 0, 0, 1], 0), "another one reads it");
    drop(second);
    while cancelled() == 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_call_whose_run_was_cancelled_runs_again() {
    let running = Running::start().await;
    let (gone, pen) = running.begin("", SAME).await;
    drop((gone, pen));
    let pen = running.node.will_answer(409, &[("x-should-retry", "false")]);
    pen.send(Some(r#"{"error":{"code":"request_cancelled"}}"#)).await.unwrap();
    drop(pen);
    assert!(running.ask("", SAME).await.contains("ok"));
    assert_eq!(running.calls(), [0, 0, 1]);
    let pen = running.node.will_answer(409, &[("x-should-retry", "false")]);
    pen.send(Some(r#"{"error":{"code":"other"}}"#)).await.unwrap();
    drop(pen);
    assert!(whole(running.send("", SAME).await).await.contains("other"), "passed on whole");
}

#[tokio::test]
async fn an_answer_in_another_form_has_a_length_of_its_own() {
    const STORED: &str = r#"data: {"id":"r","created":1,"choices":[{"delta":{"content":"Hi"}}]}

data: {"id":"r","created":1,"choices":[{"delta":{},"finish_reason":"stop"}]}

data: [DONE]

"#;
    let running = Running::start().await;
    for (path, question) in [
        ("/v1/responses", r#""input":"Say hi""#),
        ("/v1/messages", r#""max_tokens":9,"messages":[{"role":"user","content":"Say hi"}]"#),
        ("/api/generate", r#""stream":false,"prompt":"Say hi""#),
    ] {
        let length: &str = STORED.len().to_string().leak();
        // One that is being made comes in chunks.
        for framing in [&[][..], &[("content-length", length)]] {
            let pen = running.node.will_answer(200, framing);
            let body = format!("{},{question}}}", SAME.trim_end_matches('}'));
            let stream = running.send_to(path, "", &body).await;
            pen.send(Some(STORED)).await.unwrap();
            drop(pen);
            let answer = whole(stream).await;
            let (head, text) = answer.split_once("\r\n\r\n").unwrap_or_default();
            let told = format!("content-length: {}", text.len());
            assert!(head.contains(&told) && text.contains("Hi"), "{path} {framing:?}: {answer}");
            assert!(!head.contains("transfer-encoding"), "{head}");
        }
    }
}

#[tokio::test]
async fn an_error_that_leaves_the_call_open_leaves_its_key() {
    let running = Running::start().await;
    for (status, retry) in [(503, "true"), (409, "true"), (409, "false"), (200, "false")] {
        drop(running.node.will_answer(status, &[("x-should-retry", retry)]));
        whole(running.send("", SAME).await).await;
    }
    assert_eq!(running.calls(), [0, 0, 0, 1]);
}

#[tokio::test]
async fn a_node_that_breaks_off_is_not_to_be_asked_again_by_itself() {
    let closing = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let running = Running::start().await;
    let gateway = gateway(&format!("http://{}", closing.local_addr().unwrap()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let running = Running { gateway: listener.local_addr().unwrap(), ..running };
    tokio::spawn(serve(listener, None, gateway, CancellationToken::new()));
    let breaking = tokio::spawn(async move {
        for _ in 0..upstream::SENDS {
            let (mut stream, _) = closing.accept().await.unwrap();
            let _ = stream.read(&mut [0; 16]).await;
        }
    });
    let answer = whole(running.send("", SAME).await).await;
    breaking.await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 502") && answer.contains("x-should-retry: false"));
    let answer = whole(running.send("", SAME).await).await;
    assert!(answer.starts_with("HTTP/1.1 502") && answer.contains("x-should-retry: true"));
}

#[tokio::test]
async fn foreign_names_and_pages_never_reach_the_node() {
    let running = Running::start().await;
    let check = async |lines: &str, expect: &str| {
        let mut stream = TcpStream::connect(running.gateway).await.unwrap();
        let text = format!(
            "POST /v1/chat/completions HTTP/1.1\r\n{lines}Connection: close\r\n\
                            Content-Length: 0\r\n\r\n"
        );
        stream.write_all(text.as_bytes()).await.unwrap();
        let answer = whole(stream).await;
        assert!(answer.starts_with(expect), "{lines}: {answer}");
    };
    let refused = "HTTP/1.1 403";
    check("Host: evil.example:11435\r\nOrigin: http://evil.example:11435\r\n", refused).await;
    check("Host: localhost\r\nOrigin: null\r\n", refused).await;
    check("Host: localhost\r\nSec-Fetch-Site: cross-site\r\n", refused).await;
    check("", "HTTP/1.1 400").await;
    check("Host: localhost\r\nHost: evil.example\r\n", "HTTP/1.1 40").await;
    assert!(running.node.keys().is_empty());
    drop(running.node.will_answer(200, &[]));
    check("Host: relay.home:80\r\nOrigin: http://relay.home:80\r\n", "HTTP/1.1 200").await;
}

fn completed(given: &[(&'static str, &'static str)]) -> HeaderMap {
    let pair = |&(name, value): &(&'static str, &'static str)| {
        (HeaderName::from_static(name), HeaderValue::from_static(value))
    };
    let mut headers: HeaderMap = given.iter().map(pair).collect();
    gateway("http://node:1").complete(&mut headers).unwrap();
    headers
}

#[test]
fn only_what_is_missing_is_added() {
    const OWN: &str = "11111111-1111-4111-8111-111111111111";
    let check = |given: &[(&'static str, &'static str)], name: HeaderName, expect: &str| {
        assert_eq!(completed(given)[name], *expect, "{given:?}");
    };
    check(&[("x-service-session-id", OWN)], SESSION, OWN);
    check(&[("x-session-id", "mine"), ("x-openwebui-chat-id", OWN)], SESSION, OWN);
    check(&[], SESSION, "00000000-0000-0000-0000-000000000007");
    check(&[("authorization", "Bearer theirs")], AUTHORIZATION, "Bearer own");
    assert!(!completed(&[("host", "relay"), ("connection", "close")]).contains_key(HOST));
}

#[tokio::test]
async fn a_key_of_the_clients_own_is_kept() {
    const OWN: &str = "11111111-1111-4111-8111-111111111111";
    let running = Running::start().await;
    running.ask(&format!("Idempotency-Key: {OWN}\r\n"), SAME).await;
    running.ask(&format!("X-Request-Id: {OWN}\r\n"), SAME).await;
    assert_eq!(running.node.keys(), [OWN, OWN]);
}

#[test]
fn paths_and_queries_are_kept() {
    let NodeConnections::Remote(node) = gateway("http://node:1").node else { unreachable!() };
    let target = node.target(&Uri::from_static("/v1/models?limit=1")).unwrap();
    assert_eq!(target, "http://node:1/v1/models?limit=1");
}

#[test]
fn a_key_is_for_loopback_alone() {
    let check = |listen: &str, key: Option<&str>, expect: bool| {
        let key = key.map(str::to_owned);
        let settings = GatewayOptions { key, ..settings("http://node:1") };
        let made = Gateway::new(settings, listen.parse().unwrap());
        assert_eq!(made.is_ok(), expect, "{listen}");
    };
    check("0.0.0.0:80", Some("own"), false);
    check("10.0.0.7:80", Some("own"), false);
    check("10.0.0.7:80", None, true);
    check("[::ffff:127.0.0.1]:80", Some("own"), true);
    for upstream in ["ftp://node", "http://node/v1", "node:80"] {
        assert!(Gateway::new(settings(upstream), loopback()).is_err(), "{upstream}");
    }
}

#[test]
fn each_call_carries_its_own_credential() {
    let check = |given: &[(&'static str, &'static str)], expect: Option<&str>| {
        let own = GatewayOptions { key: None, ..settings("http://node:1") };
        let pair = |&(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        let mut headers: HeaderMap = given.iter().map(pair).collect();
        Gateway::new(own, loopback()).unwrap().complete(&mut headers).unwrap();
        assert_eq!(headers.get(AUTHORIZATION).map(|value| value.to_str().unwrap()), expect);
        assert!(!headers.contains_key(API_KEY));
    };
    check(&[], None);
    check(&[("x-api-key", "theirs")], Some("Bearer theirs"));
    check(&[("x-api-key", "theirs"), ("authorization", "Bearer one")], Some("Bearer one"));
}

#[tokio::test]
async fn pages_of_named_origins_may_ask_and_read() {
    let running = Running::start().await;
    let ask = async |lines: &str| {
        let mut stream = TcpStream::connect(running.gateway).await.unwrap();
        let text = format!("{lines}Connection: close\r\nContent-Length: 0\r\n\r\n");
        stream.write_all(text.as_bytes()).await.unwrap();
        whole(stream).await
    };
    let question = "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n\
                    Access-Control-Request-Method: POST\r\n\
                    Access-Control-Request-Headers: authorization\r\n";
    let answer = ask(&format!("{question}Origin: http://page.example\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
    for line in ["allow-origin: http://page.example", "allow-headers: authorization"] {
        assert!(answer.contains(&format!("access-control-{line}\r\n")), "{answer}");
    }
    let answer = ask(&format!("{question}Origin: http://page.example.evil\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 403") && !answer.contains("allow-origin"), "{answer}");
    let post = "POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: cross-site\r\n";
    let answer = ask(&format!("{post}Origin: http://page.example\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 404") && answer.contains("allow-origin"), "{answer}");
    assert!(answer.contains("text only"), "{answer}");
    let foreign = post.replace("localhost", "evil.example");
    let answer = ask(&format!("{foreign}Origin: http://page.example\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 403"), "the name is foreign: {answer}");
}
