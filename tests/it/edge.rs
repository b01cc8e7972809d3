//! The framing of requests: bytes that are refused before they are a request, the form of those
//! refusals, and that nothing can be read in two ways.

use super::raw::{Raw, answers, ask, completion, header_lines, talk, until_closed};
use super::support::{CHAT, World, http2};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::header::HeaderName;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uuid::Uuid;

fn refused(answer: &Raw, status: u16, what: &str) {
    answer.assert_standard_headers(what);
    assert_eq!(answer.status, status, "{what}: {answer:?}");
    assert_eq!(answer.header("x-should-retry"), Some("false"), "{what}");
    assert_eq!(answer.header("connection"), Some("close"), "{what}");
    assert_eq!(answer.code(), "invalid_request", "{what}");
    assert_eq!(
        answer.json()["error"]["request_id"].as_str(),
        answer.header("x-request-id"),
        "{what}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_no_request_get_an_answer_like_any_other() {
    let world = World::new().await;
    let many = "x-a: 1\r\n".repeat(10_000);
    let large = "a".repeat(1 << 20);
    let smuggled =
        format!("GET /v1/me HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {}\r\n\r\n", world.key);
    let chat = format!("POST {CHAT} HTTP/1.1\r\n{}", header_lines(&world.key, Uuid::new_v4()));
    for (request, status) in [
        ("GET /v1/me HTTP/1.1\r\nhost: a\r\nbroken header\r\n\r\n".to_owned(), 400),
        ("GET /v1/me\r\n\r\n".to_owned(), 400),
        ("GET /v1/me HTTP/1.1\r\n\r\n".to_owned(), 400),
        ("GET /v1/me HTTP/9.9\r\nhost: a\r\n\r\n".to_owned(), 400),
        ("GET /v1/me HTTP/1.1\nhost: a\n\n".to_owned(), 400),
        ("GET /v1/me HTTP/1.1\r\nhost: a\r\nx: a\r\n b\r\n\r\n".to_owned(), 400),
        ("GET /v1/me HTTP/1.1\r\nhost: a\r\nx: \0\r\n\r\n".to_owned(), 400),
        ("\x16\x03\x01\x02\0\x01\0\x01".to_owned(), 400),
        (format!("{chat}content-length: 5\r\ncontent-length: 6\r\n\r\n{smuggled}"), 400),
        (format!("{chat}content-length: 5\r\ncontent-length: 5\r\n\r\n{smuggled}"), 400),
        (
            format!(
                "{chat}content-length: 0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}"
            ),
            400,
        ),
        (
            format!(
                "{chat}transfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n0\r\n\r\n{smuggled}"
            ),
            400,
        ),
        (format!("{chat}transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n{smuggled}"), 400),
        (format!("{chat}transfer-encoding: xchunked\r\n\r\n0\r\n\r\n{smuggled}"), 400),
        (format!("GET /v1/me HTTP/1.1\r\nhost: a\r\n{many}\r\n"), 431),
        (format!("GET /v1/me HTTP/1.1\r\nhost: a\r\nx-a: {large}\r\n\r\n"), 431),
        (format!("GET /{large} HTTP/1.1\r\nhost: a\r\n\r\n"), 431),
    ] {
        refused(
            &ask(world.address, request.as_bytes()).await,
            status,
            &request[..request.len().min(200)],
        );
    }
    assert_eq!(world.get("/v1/me").await.status, 200);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn well_formed_requests_of_every_kind_are_routed_as_they_are() {
    let world = World::new().await;
    let credential = format!("host: a\r\nauthorization: Bearer {}\r\n", world.key);
    let long = "a".repeat(20_000);
    let mut cases = vec![
        ("GET /v1/me HTTP/1.1", "", 200),
        ("GET http://node.example/v1/me HTTP/1.1", "", 200),
        ("GET /v1/me? HTTP/1.1", "", 200),
        ("HEAD /v1/me HTTP/1.1", "", 200),
        ("GET /v1/me HTTP/1.0", "", 200),
        (
            "GET /v1/me HTTP/1.1",
            "upgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n",
            200,
        ),
        ("GET /v1/me HTTP/1.1", "upgrade: websocket\r\nx: \u{e9}\r\n", 200),
        ("GET //v1/me HTTP/1.1", "", 404),
        ("GET /v1//me HTTP/1.1", "", 404),
        ("GET /v1/../v1/me HTTP/1.1", "", 404),
        ("GET /v1/./me HTTP/1.1", "", 404),
        ("GET /v1/%6de HTTP/1.1", "", 404),
        ("GET /v1/me/ HTTP/1.1", "", 404),
        ("GET /V1/me HTTP/1.1", "", 404),
        ("OPTIONS * HTTP/1.1", "", 404),
        ("CONNECT node:80 HTTP/1.1", "", 404),
        ("OPTIONS /v1/me HTTP/1.1", "", 405),
        ("TRACE /v1/me HTTP/1.1", "", 405),
        ("BREW /v1/me HTTP/1.1", "", 405),
        ("GET /v1/requests/..%2f..%2fme HTTP/1.1", "", 400),
        ("GET /v1/me?a=b HTTP/1.1", "", 400),
    ];
    let (path, query) = (format!("GET /{long} HTTP/1.1"), format!("GET /v1/me?{long} HTTP/1.1"));
    cases.extend([(path.as_str(), "", 404), (query.as_str(), "", 400)]);
    for (line, more, status) in cases {
        let request = format!("{line}\r\n{credential}{more}connection: close\r\n\r\n");
        let text = talk(world.address, request.as_bytes()).await;
        let answer = if line.starts_with("HEAD") {
            let (head, body) = text.split_once("\r\n\r\n").unwrap();
            assert_eq!(body, "", "HEAD has no body");
            Raw { status: 200, head: head.replace("\r\n", "\n"), body: String::new() }
        } else {
            answers(&text).remove(0)
        };
        answer.assert_standard_headers(line);
        assert_eq!(answer.status, status, "{line} {more}: {answer:?}");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_in_one_go_are_answered_in_order() {
    let world = World::new().await;
    let get = |path: &str| {
        format!("GET {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {}\r\n\r\n", world.key)
    };
    let ask = completion(&world, Uuid::new_v4(), &world.ask(json!({})));
    let (me, none) = (get("/v1/me"), get("/nothing"));
    for (requests, statuses) in [
        (format!("{me}{none}\r\n{ask}\r\n\r\n{me}BAD\r\n\r\n{me}"), vec![200, 404, 200, 200, 400]),
        // No further request is looked for after a chunked body.
        (
            format!(
                "POST {CHAT} HTTP/1.1\r\n{}transfer-encoding: chunked\r\n\r\n0\r\n\r\n{me}",
                header_lines(&world.key, Uuid::new_v4())
            ),
            vec![400],
        ),
    ] {
        let found = answers(&talk(world.address, requests.as_bytes()).await);
        assert_eq!(
            found.iter().map(|answer| answer.status).collect::<Vec<_>>(),
            statuses,
            "{found:?}"
        );
        for answer in &found {
            answer.assert_standard_headers("in one go");
        }
        assert_eq!(found.last().unwrap().header("connection"), Some("close"));
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chunked_bodies_are_read_without_trailers() {
    let world = World::new().await;
    let body = world.ask(json!({})).to_string();
    let (one, two) = body.split_at(7);
    let chunks = format!("{:x}\r\n{one}\r\n{:x};ext=1\r\n{two}\r\n0\r\n", one.len(), two.len());
    for (end, status) in
        [("\r\n", 200), ("idempotency-key: x\r\n\r\n", 400), ("broken\r\n\r\n", 400)]
    {
        let headers = header_lines(&world.key, Uuid::new_v4());
        let request = format!(
            "POST {CHAT} HTTP/1.1\r\n{headers}transfer-encoding: chunked\r\n\r\n{chunks}{end}"
        );
        let answer = ask(world.address, request.as_bytes()).await;
        answer.assert_standard_headers(end);
        assert_eq!(answer.status, status, "{end:?}: {answer:?}");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_is_asked_for_only_when_it_is_wanted() {
    let world = World::new().await;
    let body = world.ask(json!({})).to_string();
    let head = |key: &str, length: usize, more: &str| {
        let headers = header_lines(key, Uuid::new_v4());
        format!(
            "POST {CHAT} HTTP/1.1\r\n{headers}expect: 100-continue\r\nconnection: close\r\n{more}content-length: {length}\r\n\r\n"
        )
    };
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(head(&world.key, body.len(), "").as_bytes()).await.unwrap();
    let mut go_on = [0; 25];
    stream.read_exact(&mut go_on).await.unwrap();
    assert_eq!(&go_on, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).await.unwrap();
    assert!(until_closed(&mut stream).await.starts_with("HTTP/1.1 200"));
    for (request, status) in [
        (head("nobody", body.len(), ""), 401),
        (head(&world.key, 256 * 1024 + 1, ""), 413),
        (head(&world.key, body.len(), "content-type: text/plain\r\n"), 415),
        (head(&world.key, body.len(), "idempotency-key: again\r\n"), 400),
    ] {
        let answer = ask(world.address, request.as_bytes()).await;
        answer.assert_standard_headers(&request);
        assert_eq!(answer.status, status, "and no 100 before it: {answer:?}");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_to_an_unwanted_body_arrives() {
    let world = World::new().await;
    let eight_mebibytes = "a".repeat(8 << 20);
    for (key, status) in [(world.key.as_str(), 413), ("nobody", 401)] {
        let headers = header_lines(key, Uuid::new_v4());
        let length = eight_mebibytes.len();
        for framing in [
            format!("content-length: {length}\r\n\r\n{eight_mebibytes}"),
            format!(
                "transfer-encoding: chunked\r\n\r\n{length:x}\r\n{eight_mebibytes}\r\n0\r\n\r\n"
            ),
        ] {
            let request = format!("POST {CHAT} HTTP/1.1\r\n{headers}{framing}");
            assert_eq!(ask(world.address, request.as_bytes()).await.status, status);
        }
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_has_the_same_bounds() {
    let world = World::new().await;
    let name = |i: usize| HeaderName::from_bytes(format!("x-{i}").as_bytes()).unwrap();
    for (headers, bytes, status) in
        [(60, 10, 200), (64, 10, 431), (4, 10_000, 431), (4, 30_000, 431)]
    {
        let mut request = Request::builder().uri("http://node/v1/me");
        request = request.header("authorization", format!("Bearer {}", world.key));
        for i in 0..headers {
            request = request.header(name(i), "a".repeat(bytes));
        }
        let mut sender = http2(world.address).await;
        let response = sender.send_request(request.body(Full::new(Bytes::new())).unwrap()).await;
        let (parts, body) = response.unwrap().into_parts();
        assert_eq!(parts.status.as_u16(), status, "{headers} of {bytes}");
        assert!(
            parts.headers.contains_key("x-request-id")
                && parts.headers["cache-control"] == "private, no-store"
        );
        let body = body.collect().await.unwrap().to_bytes();
        assert!(
            status == 200 || body.starts_with(br#"{"error":{"code":"invalid_request""#),
            "{body:?}"
        );
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_thing_wrong_is_the_one_told() {
    let plenty = World::new().await;
    let slow =
        World::with(|setup| setup.config.plans.get_mut("default").unwrap().requests_per_minute = 1)
            .await;
    let narrow =
        World::with(|setup| setup.config.plans.get_mut("default").unwrap().max_concurrent = 0)
            .await;
    let poor = World::with(|setup| (setup.trial, setup.premium) = (0, 0)).await;
    let used = Uuid::new_v4();
    assert_eq!(plenty.post(used, &plenty.ask(json!({}))).await.status, 200);
    let ledger = slow.node.store.read().await.unwrap();
    let plan = slow.node.plans.of(&ledger.account(slow.account).await.unwrap().unwrap());
    (0..plan.limits.burst).for_each(|_| plan.check_rate(slow.account).unwrap());
    let large = "x".repeat(256 * 1024 + 1);
    let unknown = json!({ "model": Uuid::new_v4(), "max_tokens": 5_000 });
    let ask = |world: &World, extra: serde_json::Value| world.ask(extra).to_string();
    // Each request is wrong in the point that the refusal names, and in all points that are checked
    // later.
    for (world, drop_header, more, id, body, expect) in [
        (&plenty, "authorization", "x: \0\r\n", used, large.clone(), (400, "invalid_request")),
        (
            &plenty,
            "authorization",
            "idempotency-key: x\r\n",
            used,
            large.clone(),
            (401, "invalid_credential"),
        ),
        (
            &slow,
            "content-type",
            "idempotency-key: x\r\n",
            used,
            large.clone(),
            (400, "invalid_request"),
        ),
        (&slow, "content-type", "", used, large.clone(), (429, "conversation_rate_limit")),
        (&plenty, "content-type", "", used, large.clone(), (413, "request_too_large")),
        (&plenty, "content-type", "", used, "{".into(), (415, "unsupported_media_type")),
        (&plenty, "none", "", used, "{".into(), (400, "invalid_request")),
        (&plenty, "none", "", used, ask(&plenty, unknown.clone()), (422, "idempotency_key_reused")),
        (&narrow, "none", "", used, ask(&narrow, unknown), (404, "model_not_found")),
        (
            &narrow,
            "none",
            "",
            used,
            ask(&narrow, json!({ "max_tokens": 5_000 })),
            (400, "invalid_request"),
        ),
        (&narrow, "none", "", used, ask(&narrow, json!({})), (429, "concurrency_limit")),
        (&poor, "none", "", used, ask(&poor, json!({})), (402, "insufficient_credits")),
    ] {
        let headers = header_lines(&world.key, id);
        let headers: String =
            headers.split_inclusive('\n').filter(|line| !line.starts_with(drop_header)).collect();
        let request = format!(
            "POST {CHAT} HTTP/1.1\r\n{headers}{more}connection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let answer = super::raw::ask(world.address, request.as_bytes()).await;
        answer.assert_standard_headers(expect.1);
        assert_eq!((answer.status, answer.code().as_str()), expect);
    }
    for world in [plenty, slow, narrow, poor] {
        world.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_that_are_doubled_or_not_ascii() {
    let world = World::new().await;
    let body = world.ask(json!({})).to_string();
    let id = Uuid::new_v4();
    for (name, line, status, param) in [
        ("none", format!("idempotency-key: {id}\r\n"), 400, json!("Idempotency-Key")),
        ("idempotency-key", "idempotency-key: \u{e9}\r\n".into(), 400, json!("Idempotency-Key")),
        ("none", format!("x-cresset-session-id: {id}\r\n"), 400, json!("X-Service-Session-Id")),
        ("none", format!("x-service-session-id: {id}\r\n"), 400, json!("X-Service-Session-Id")),
        (
            "x-service",
            "x-service-session-id: \u{e9}\r\n".into(),
            400,
            json!("X-Service-Session-Id"),
        ),
        ("none", "content-type: application/json\r\n".into(), 415, json!(null)),
        ("content-type", "content-type: application/json\u{e9}\r\n".into(), 415, json!(null)),
        ("none", "content-encoding: identity\r\n".into(), 400, json!("Content-Encoding")),
    ] {
        let headers = header_lines(&world.key, id);
        let headers: String =
            headers.split_inclusive('\n').filter(|line| !line.starts_with(name)).collect();
        let request = format!(
            "POST {CHAT} HTTP/1.1\r\n{headers}{line}connection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let answer = ask(world.address, request.as_bytes()).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (status, &param), "{line}");
    }
    world.close().await;
}

/// Sends `count` requests with a few bytes changed: every answer must be one of ours.
async fn mutants(count: u64) {
    const ODD: &[u8] = b"\r\n\t \0:;,/?#%0159GPax\x7f\xc3\xff";
    let world = World::new().await;
    let body = world.ask(json!({ "max_tokens": 1 }));
    let seeds = [
        completion(&world, Uuid::new_v4(), &body),
        format!(
            "POST {CHAT} HTTP/1.1\r\n{}transfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n",
            header_lines(&world.key, Uuid::new_v4())
        ),
        format!(
            "GET /v1/me?a=b HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {}\r\n\r\n",
            world.key
        ),
    ];
    for number in 0..count {
        let mut state = number + 1;
        let mut next = |below: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut bytes = seeds[next(seeds.len())].clone().into_bytes();
        for _ in 0..=next(3) {
            let (at, odd) = (next(bytes.len()), ODD[next(ODD.len())]);
            match next(3) {
                0 => bytes[at] = odd,
                1 => bytes.insert(at, odd),
                _ => drop(bytes.remove(at)),
            }
        }
        let mut stream = TcpStream::connect(world.address).await.unwrap();
        let _ = stream.write_all(&bytes).await;
        // Most are answered at once; the others are not waited for.
        let patience = std::time::Duration::from_millis(20);
        let mut seen = vec![0; 1 << 16];
        if let Ok(Ok(read)) = tokio::time::timeout(patience, stream.read(&mut seen)).await {
            for answer in answers(std::str::from_utf8(&seen[..read]).unwrap()) {
                answer.assert_standard_headers(&String::from_utf8_lossy(&bytes));
            }
        }
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_to_changed_bytes_is_one_of_ours() {
    mutants(300).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "minutes"]
async fn every_answer_to_many_changed_bytes_is_one_of_ours() {
    mutants(100_000).await;
}
