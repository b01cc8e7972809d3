//! Clients that are too slow, flood the node or vanish, seen from the socket. The node goes on with
//! other clients.

use super::raw::{answers, ask, completion, header_lines, talk, until_closed};
use super::support::{CHAT, Setup, World, bearer, http2, next_piece};
use bytes::Bytes;
use cresset_ledger::{AttemptState, JournalEntry};
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::Request;
use hyper::body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use std::convert::Infallible;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use uuid::Uuid;

async fn impatient(choose: impl FnOnce(&mut Setup)) -> World {
    World::with(|setup| {
        let http = &mut setup.config.http;
        (
            http.first_byte_seconds,
            http.header_seconds,
            http.body_seconds,
            http.write_stall_seconds,
        ) = (1, 1, 1, 1);
        (http.idle_seconds, http.linger_seconds) = (2, 1);
        choose(setup);
    })
    .await
}

/// A connection with buffers too small for a longer answer.
async fn narrow(world: &World) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(world.address).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_is_not_waited_for() {
    let world = impatient(|_| {}).await;
    let headers = header_lines(&world.key, Uuid::new_v4());
    let half_body = format!("POST {CHAT} HTTP/1.1\r\n{headers}content-length: 100\r\n\r\n{{");
    let half_chunk =
        format!("POST {CHAT} HTTP/1.1\r\n{headers}transfer-encoding: chunked\r\n\r\n5\r\n{{");
    let me =
        format!("GET /v1/me HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {}\r\n\r\n", world.key);
    let after_one = me.clone() + "GET /v1";
    let (nothing, blank, half_head, half_next, idle, body, chunk, half_preface, no_stream) = tokio::join!(
        talk(world.address, b""),
        talk(world.address, b"\r\n"),
        ask(world.address, b"GET /v1/me HTTP/1.1\r\nhost: a\r\n"),
        talk(world.address, after_one.as_bytes()),
        talk(world.address, me.as_bytes()),
        ask(world.address, half_body.as_bytes()),
        ask(world.address, half_chunk.as_bytes()),
        talk(world.address, b"PRI * HTTP/2.0\r\n\r\nSM"),
        talk(world.address, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"),
    );
    assert_eq!([nothing, blank], ["", ""]);
    let half_next = answers(&half_next).pop().unwrap();
    for late in [&half_head, &half_next] {
        late.assert_standard_headers("late");
        assert_eq!((late.status, late.code().as_str()), (408, "invalid_request"), "{late:?}");
    }
    assert_eq!(answers(&idle).len(), 1);
    for late in [body, chunk] {
        assert!(late.status == 400 && late.body.contains("did not arrive in time"), "{late:?}");
    }
    assert_eq!(half_preface, "");
    assert!(!no_stream.contains("HTTP/1"), "a connection without streams ends: {no_stream:?}");
    assert_eq!(world.get("/v1/me").await.status, 200);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_byte_now_and_then_does_not_stretch_the_time() {
    let world = impatient(|_| {}).await;
    let headers = header_lines(&world.key, Uuid::new_v4());
    let body = format!("POST {CHAT} HTTP/1.1\r\n{headers}content-length: 1000\r\n\r\n");
    for (whole, then, status) in
        [("", "GET /v1/me HTTP/1.1\r\nhost: aaaaaaaaaaaaaaaaaaaa", 408), (&body, "{ ", 400)]
    {
        let mut stream = TcpStream::connect(world.address).await.unwrap();
        stream.write_all(whole.as_bytes()).await.unwrap();
        let mut drops = then.bytes().cycle();
        let mut answer = [0; 12];
        // These are far more bytes than the time allows: without the limit this would go on for
        // minutes.
        let heard = loop {
            let drop = [drops.next().unwrap()];
            if stream.write_all(&drop).await.is_err() {
                break stream.read(&mut answer).await.unwrap_or(0);
            }
            let next =
                tokio::time::timeout(Duration::from_millis(100), stream.read(&mut answer)).await;
            if let Ok(read) = next {
                break read.unwrap();
            }
        };
        assert_eq!(String::from_utf8_lossy(&answer[..heard]), format!("HTTP/1.1 {status}"));
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_never_read_stops_no_other() {
    let world = impatient(|setup| {
        setup.ends = false;
        setup.config.requests.disconnect_grace_seconds = 1;
    })
    .await;
    // The events fill every buffer between the node and a client that reads none of them.
    let body = world
        .ask(json!({ "stream": true, "max_tokens": 900, "logprobs": true, "top_logprobs": 20 }));
    let mut silent = Vec::new();
    for _ in 0..20 {
        let id = Uuid::new_v4();
        let mut stream = narrow(&world).await;
        stream.write_all(completion(&world, id, &body).as_bytes()).await.unwrap();
        silent.push((id, stream));
    }
    assert_eq!(
        world.post(Uuid::new_v4(), &world.ask(json!({ "max_tokens": 5 }))).await.status,
        200
    );
    for (id, _) in &silent {
        world.reaches_any(*id).await;
        world.reaches(*id, &["completed", "cancelled"]).await;
    }
    drop(silent);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_never_read_is_dropped() {
    let world = impatient(|setup| setup.ends = false).await;
    let body = world.ask(json!({ "max_tokens": 900, "logprobs": true, "top_logprobs": 20 }));
    let id = Uuid::new_v4();
    let size = world.post(id, &body).await.body.len();
    // The same answer again and again, far more than any buffer holds.
    let copies = (64 << 20) / size;
    let mut stream = narrow(&world).await;
    stream.write_all(completion(&world, id, &body).repeat(copies).as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    let mut seen = Vec::new();
    let _ = stream.read_to_end(&mut seen).await;
    assert!(
        seen.len() < size * copies,
        "the connection was closed with bytes left: {} of {}",
        seen.len(),
        size * copies
    );
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_connections_of_one_address_are_limited() {
    let world = World::with(|setup| setup.config.http.max_connections_per_ip = 2).await;
    let mut first = TcpStream::connect(world.address).await.unwrap();
    let second = TcpStream::connect(world.address).await.unwrap();
    // The first two count once they are accepted: an answer shows that.
    first.write_all(b"GET /v1/me HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    first.read_u8().await.unwrap();
    assert_eq!(talk(world.address, b"").await, "", "the third is closed");
    drop((first, second));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_good_client_gets_the_place_of_one_that_asks_nothing() {
    let world = World::with(|setup| {
        setup.config.http.max_connections = 3;
        (setup.config.http.first_byte_seconds, setup.config.http.header_seconds) = (600, 600);
    })
    .await;
    let mut heard = TcpStream::connect(world.address).await.unwrap();
    heard.write_all(b"GET /v1/me HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    heard.read_u8().await.unwrap();
    let silent = TcpStream::connect(world.address).await.unwrap();
    let mut slow = TcpStream::connect(world.address).await.unwrap();
    slow.write_all(b"GET /v1/me HTTP/1.1\r\n").await.unwrap();
    let mut later = Vec::new();
    for mut oldest in [silent, slow] {
        assert_eq!(world.get("/v1/me").await.status, 200);
        assert_eq!(oldest.read(&mut [0]).await.unwrap_or(0), 0, "closed without an answer");
        later.push(TcpStream::connect(world.address).await.unwrap());
    }
    heard.write_all(b"GET /v1/me HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    assert!(heard.read_u8().await.is_ok(), "what has asked before keeps its place");
    drop(later);
    world.close().await;
}

fn get_me(world: &World) -> Request<Full<Bytes>> {
    let (name, value) = bearer(&world.key).remove(0);
    Request::builder().uri("http://node/v1/me").header(name, value).body(Full::default()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_has_the_same_api() {
    let world = World::new().await;
    let mut sender = http2(world.address).await;
    assert_eq!(sender.send_request(get_me(&world)).await.unwrap().status().as_u16(), 200);
    let mut chat = get_me(&world);
    (*chat.method_mut(), *chat.uri_mut()) =
        (hyper::Method::POST, format!("http://node{CHAT}").parse().unwrap());
    for (name, value) in
        super::support::chat_headers(&world.key, &Uuid::new_v4().to_string()).into_iter().skip(1)
    {
        chat.headers_mut().insert(name, value.parse().unwrap());
    }
    *chat.body_mut() = Full::new(world.ask(json!({ "stream": true })).to_string().into());
    let response = sender.send_request(chat).await.unwrap();
    let text = response.into_body().collect().await.unwrap().to_bytes();
    assert!(text.ends_with(b"data: [DONE]\n\n"));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_stream_whose_window_is_shut_is_reset() {
    let world = impatient(|setup| setup.config.http.idle_seconds = 60).await;
    let io = TokioIo::new(TcpStream::connect(world.address).await.unwrap());
    let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let (mut sender, connection) =
        builder.initial_stream_window_size(0).handshake(io).await.unwrap();
    tokio::spawn(connection);
    let response = sender.send_request(get_me(&world)).await.unwrap();
    assert_eq!(response.status().as_u16(), 200);
    let error = response.into_body().collect().await.unwrap_err();
    assert!(format!("{error:?}").contains("CANCEL"), "{error:?}");
    world.close().await;
}

/// An HTTP/2 frame.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// `GET /`, as the shortest header block.
const GET: &[u8] = &[0x82, 0x84, 0x86, 0x41, 1, b'a'];
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;

fn greeting() -> Vec<u8> {
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(SETTINGS, 0, 0, &[])].concat()
}

/// A client that still sends its body must be able to read why it was refused. A stream that is
/// reset before the answer has ended takes it away, in a race that was lost for some in a hundred.
#[tokio::test(flavor = "multi_thread")]
async fn an_early_refusal_over_http2_is_read_to_its_end() {
    let world =
        World::with(|setup| setup.config.plans.get_mut("default").unwrap().requests_per_minute = 1)
            .await;
    let ledger = world.node.store.read().await.unwrap();
    let account = ledger.account(world.account).await.unwrap().unwrap();
    let plan = world.node.plans.of(&account);
    (0..plan.limits.burst).for_each(|_| plan.check_rate(account.id).unwrap());
    let io = TokioIo::new(TcpStream::connect(world.address).await.unwrap());
    let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let (mut sender, connection) = builder.handshake(io).await.unwrap();
    tokio::spawn(connection);
    let mut statuses = Vec::new();
    for _ in 0..40 {
        let asked = (0..25).map(|_| {
            let mut request = Request::post(format!("http://node{CHAT}"));
            let id = Uuid::new_v4().to_string();
            for (name, value) in super::support::chat_headers(&world.key, &id) {
                request = request.header(name, value);
            }
            // A body whose second piece comes after the answer.
            let piece =
                |text: &'static [u8]| Ok::<_, Infallible>(Frame::data(Bytes::from_static(text)));
            let later = Box::pin(async move {
                tokio::time::sleep(Duration::from_millis(20)).await;
                piece(b"}")
            });
            let body = stream::iter([piece(b"{")]).chain(stream::once(later));
            let answer = sender.send_request(request.body(StreamBody::new(body)).unwrap());
            async {
                let response = answer.await.map_err(|error| format!("{error:?}"))?;
                let status = response.status().as_u16();
                let body = response.into_body().collect().await.map_err(|e| format!("{e:?}"))?;
                assert!(!body.to_bytes().is_empty());
                Ok::<_, String>(status)
            }
        });
        statuses.extend(futures_util::future::join_all(asked).await);
    }
    let wrong: Vec<_> = statuses.iter().filter(|status| **status != Ok(429)).collect();
    assert!(wrong.is_empty(), "{} of {}: {:?}", wrong.len(), statuses.len(), wrong[0]);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_floods_end_their_connection_alone() {
    let world = impatient(|_| {}).await;
    let streams = (0..5_000).map(|n| n * 2 + 1);
    let open = |stream| frame(HEADERS, 0b101, stream, GET);
    let floods: [(&str, Vec<u8>); 4] = [
        (
            "rapid reset",
            streams
                .clone()
                .flat_map(|n| [open(n), frame(RESET, 0, n, &[0, 0, 0, 8])].concat())
                .collect(),
        ),
        ("streams", streams.clone().flat_map(open).collect()),
        (
            "continuation",
            [frame(HEADERS, 0, 1, GET), frame(CONTINUATION, 0, 1, &[0x0f; 9_000]).repeat(200)]
                .concat(),
        ),
        ("pings", frame(PING, 0, 0, &[0; 8]).repeat(50_000)),
    ];
    for (name, flood) in floods {
        let mut stream = TcpStream::connect(world.address).await.unwrap();
        let (mut reading, mut writing) = stream.split();
        let mut thrown = vec![0; 1 << 16];
        let bytes = [greeting(), flood].concat();
        let flooding = async { while writing.write_all(&bytes).await.is_ok() {} };
        let listening =
            async { while reading.read(&mut thrown).await.is_ok_and(|count| count > 0) {} };
        if name == "pings" {
            // Only the number of pings is wrong: they are answered, and delay no other work.
            let _ = tokio::time::timeout(Duration::from_millis(200), async {
                tokio::join!(flooding, listening)
            })
            .await;
        } else {
            let ended = tokio::time::timeout(Duration::from_secs(30), async {
                tokio::join!(flooding, listening)
            })
            .await;
            assert!(ended.is_ok(), "{name} goes on for ever");
        }
        assert_eq!(world.get("/v1/me").await.status, 200, "{name}");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_finish_when_the_listener_stops() {
    let world = World::with(|setup| setup.step = Duration::from_millis(20)).await;
    let body = world.ask(json!({ "stream": true, "ignore_eos": true, "max_tokens": 20 }));
    let mut response = world.open(&world.key, Uuid::new_v4(), &body).await;
    next_piece(&mut response).await;
    world.stop_listening();
    let rest = super::support::read(response).await.text();
    assert!(rest.ends_with("data: [DONE]\n\n"));
    while TcpStream::connect(world.address).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_whose_head_has_begun_when_the_listener_stops_is_answered() {
    let world = World::new().await;
    let head = format!("GET /v1/me HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {}\r\n", world.key);
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    // The node has read the first part before it stops.
    assert_eq!(world.get("/v1/me").await.status, 200);
    world.stop_listening();
    tokio::time::sleep(Duration::from_millis(600)).await;
    stream.write_all(b"\r\n").await.unwrap();
    let answer = until_closed(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
    world.close().await;
}

/// The stage at which a client vanishes.
#[derive(Clone, Copy, Debug)]
enum Stage {
    BeforeHead,
    MidHead,
    BeforeBody,
    MidBody,
    Sent,
    MidStream,
    AfterDone,
    Silent,
    NeverRead,
}

const STAGES: [Stage; 9] = [
    Stage::BeforeHead,
    Stage::MidHead,
    Stage::BeforeBody,
    Stage::MidBody,
    Stage::Sent,
    Stage::MidStream,
    Stage::AfterDone,
    Stage::Silent,
    Stage::NeverRead,
];

/// Gets as far as `stage`, then resets the connection.
async fn vanish(world: &World, stage: Stage) {
    let max_tokens = if matches!(stage, Stage::AfterDone) { 2 } else { 200 };
    let body = world.ask(json!({ "stream": true, "ignore_eos": true, "max_tokens": max_tokens }));
    let request = completion(world, Uuid::new_v4(), &body);
    let head = request.find("\r\n\r\n").unwrap() + 4;
    let sent = match stage {
        Stage::BeforeHead | Stage::Silent => 0,
        Stage::MidHead => head / 2,
        Stage::BeforeBody => head,
        Stage::MidBody => usize::midpoint(head, request.len()),
        _ => request.len(),
    };
    let mut stream = narrow(world).await;
    stream.write_all(&request.as_bytes()[..sent]).await.unwrap();
    match stage {
        Stage::MidStream => drop(stream.read(&mut [0; 600]).await),
        Stage::AfterDone => {
            let mut seen = Vec::new();
            while !seen.ends_with(b"data: [DONE]\n\n\r\n0\r\n\r\n") {
                seen.push(stream.read_u8().await.unwrap());
            }
        }
        Stage::Silent | Stage::NeverRead => {
            // The connection is reset only once the node has given it up, or nearly.
            tokio::time::sleep(Duration::from_millis(900)).await;
        }
        _ => tokio::task::yield_now().await,
    }
    stream.set_zero_linger().unwrap();
}

/// Does everything at once, `rounds` times, with a well-behaved client beside it.
async fn storm(rounds: usize) {
    let world = impatient(|setup| {
        setup.step = Duration::from_micros(200);
        setup.max_rows = 4;
        setup.config.requests.disconnect_grace_seconds = 0;
        setup.config.plans.get_mut("default").unwrap().max_concurrent = 1_000;
        setup.max_waiting = 1_000;
        setup.trial = 1 << 40;
    })
    .await;
    for _ in 0..rounds {
        let clients = STAGES.iter().map(|stage| vanish(&world, *stage));
        let ask = world.ask(json!({ "max_tokens": 2 }));
        let (_, answer) =
            tokio::join!(futures_util::future::join_all(clients), world.post(Uuid::new_v4(), &ask));
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    tokio::time::timeout(Duration::from_mins(1), world.node.drain()).await.expect("requests end");
    let ledger = world.node.store.read().await.unwrap();
    let entries = ledger.entries(world.account, 0, usize::MAX).await.unwrap();
    let attempts = entries.iter().filter_map(JournalEntry::reservation).collect::<Vec<_>>();
    assert!(attempts.len() >= 4 * rounds, "they got as far as that: {}", attempts.len());
    for (key, _) in attempts {
        let request = ledger.request(&key).await.unwrap().unwrap();
        let state = request.latest().state;
        assert!(!matches!(state, AttemptState::Queued | AttemptState::Running), "{request:?}");
    }
    drop(ledger);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_vanish_at_any_stage_leave_nothing_open() {
    storm(8).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a quarter of an hour"]
async fn thousands_of_clients_that_vanish_leave_nothing_open() {
    storm(1_000).await;
}
