//! Clients that break the rules of HTTP or of patience, seen from the socket. Whatever they do, the node goes on.

use super::support::{CHAT, Setup, World, chat_headers, http2, next_piece};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use serde_json::json;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uuid::Uuid;

/// Sends bytes, then reads what comes until the node closes the connection.
async fn talk(world: &World, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    until_closed(&mut stream).await
}

fn header_lines(key: &str, id: Uuid) -> String {
    let headers = chat_headers(key, &id.to_string());
    let lines: Vec<String> = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    lines.concat()
}

async fn until_closed(stream: &mut TcpStream) -> String {
    let mut seen = Vec::new();
    // A reset is an end, too.
    let _ = tokio::time::timeout(Duration::from_secs(30), stream.read_to_end(&mut seen)).await.expect("it is closed");
    String::from_utf8_lossy(&seen).into_owned()
}

async fn impatient(choose: impl FnOnce(&mut Setup)) -> World {
    World::with(|setup| {
        let http = &mut setup.config.http;
        (http.first_byte_seconds, http.header_seconds, http.body_seconds, http.write_stall_seconds) = (1, 1, 1, 1);
        choose(setup);
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_framing_is_refused() {
    let world = impatient(|_| {}).await;
    let many = "x-a: 1\r\n".repeat(65);
    let large = "a".repeat(40 * 1024);
    for (request, status) in [
        ("GET /v1/me HTTP/1.1\r\nbroken header\r\n\r\n".to_owned(), "400"),
        (format!("GET /v1/me HTTP/1.1\r\n{many}\r\n"), "431"),
        (format!("GET /v1/me HTTP/1.1\r\nx-a: {large}\r\n\r\n"), "431"),
        (format!("POST {CHAT} HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n"), "400"),
        (format!("POST {CHAT} HTTP/1.1\r\ncontent-length: -1\r\n\r\n"), "400"),
    ] {
        let answer = talk(&world, request.as_bytes()).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{}: {answer}", &request[..40]);
    }
    assert_eq!(world.get("/v1/me").await.status, 200);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_is_not_waited_for() {
    let world = impatient(|_| {}).await;
    let headers = header_lines(&world.key, Uuid::new_v4());
    let half_body = format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\n{headers}content-length: 100\r\n\r\n{{");
    let (nothing, half_head, body) = tokio::join!(
        talk(&world, b""),
        talk(&world, b"GET /v1/me HTTP/1.1\r\nhost: a\r\n"),
        talk(&world, half_body.as_bytes()),
    );
    assert_eq!(nothing, "");
    assert!(half_head.is_empty() || half_head.starts_with("HTTP/1.1 408"), "{half_head}");
    assert!(body.starts_with("HTTP/1.1 400") && body.contains("did not arrive in time"), "{body}");
    assert_eq!(world.get("/v1/me").await.status, 200);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_never_read_stops_nobody() {
    let world = impatient(|setup| {
        setup.ends = false;
        setup.config.requests.disconnect_grace_seconds = 1;
    })
    .await;
    // Enough events to fill every buffer between the node and a client that reads none of them.
    let body =
        world.ask(json!({ "stream": true, "max_tokens": 900, "logprobs": true, "top_logprobs": 20 })).to_string();
    let mut silent = Vec::new();
    for _ in 0..20 {
        let id = Uuid::new_v4();
        let headers = header_lines(&world.key, id);
        let head = format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\n{headers}content-length: {}\r\n\r\n", body.len());
        let mut stream = TcpStream::connect(world.address).await.unwrap();
        stream.write_all((head + &body).as_bytes()).await.unwrap();
        silent.push((id, stream));
    }
    assert_eq!(world.post(Uuid::new_v4(), &world.ask(json!({ "max_tokens": 5 }))).await.status, 200);
    for (id, _) in &silent {
        world.reaches_any(*id).await;
        world.reaches(*id, &["completed", "cancelled"]).await;
    }
    drop(silent);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_vanish_at_any_moment_leave_nothing_reserved() {
    let world = World::with(|setup| {
        setup.config.requests.disconnect_grace_seconds = 0;
        setup.step = Duration::from_millis(1);
    })
    .await;
    let body = world.ask(json!({ "stream": true, "ignore_eos": true, "max_tokens": 50 }));
    for moment in 0..60_u64 {
        let request = world.open(&world.key, Uuid::new_v4(), &body);
        if let Ok(mut response) = tokio::time::timeout(Duration::from_micros(moment * 300), request).await {
            for _ in 0..moment % 5 {
                next_piece(&mut response).await;
            }
        }
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_address_gets_so_many_connections() {
    let world = World::with(|setup| setup.config.http.max_connections_per_ip = 2).await;
    let mut first = TcpStream::connect(world.address).await.unwrap();
    let second = TcpStream::connect(world.address).await.unwrap();
    // The first two are counted once they are accepted: an answer shows it.
    first.write_all(b"GET /v1/me HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    first.read_u8().await.unwrap();
    assert_eq!(talk(&world, b"").await, "", "the third is closed");
    drop((first, second));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_speaks_the_same_api() {
    let world = World::new().await;
    let mut sender = http2(world.address).await;
    let request = |path: &str| {
        let uri = format!("http://node{path}");
        let request = Request::builder().uri(uri).header("authorization", format!("Bearer {}", world.key));
        request.body(Full::new(Bytes::new())).unwrap()
    };
    let response = sender.send_request(request("/v1/me")).await.unwrap();
    assert_eq!(response.status().as_u16(), 200);
    let mut id = request(CHAT);
    *id.method_mut() = hyper::Method::POST;
    for (name, value) in chat_headers(&world.key, &Uuid::new_v4().to_string()).into_iter().skip(1) {
        id.headers_mut().insert(name, value.parse().unwrap());
    }
    *id.body_mut() = Full::new(world.ask(json!({ "stream": true })).to_string().into());
    let response = sender.send_request(id).await.unwrap();
    let text = response.into_body().collect().await.unwrap().to_bytes();
    assert!(text.ends_with(b"data: [DONE]\n\n"));
    let mut crowded = request("/v1/me");
    for i in 0..70 {
        crowded
            .headers_mut()
            .insert(hyper::header::HeaderName::from_bytes(format!("x-{i}").as_bytes()).unwrap(), 1.into());
    }
    assert_eq!(sender.send_request(crowded).await.unwrap().status().as_u16(), 400);
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
