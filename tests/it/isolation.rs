//! Tables of access: every route with every bad credential, and every credential with the requests
//! of all others.

use super::raw::{Raw, ask};
use super::support::{
    CHAT, SESSION, World, account, application, issue, issue_until, revoke, suspend,
};
use cresset_base::UnixMillis;
use cresset_ledger::{CredentialKind, secret};
use serde_json::json;
use std::time::Duration;
use uuid::Uuid;

/// The routes from the sixteenth on do not exist on this surface: paths of the operator's listener
/// and invented ones are among them.
const ROUTES: [(&str, &str); 23] = [
    ("GET", "/v1/me"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models?limit=0"),
    ("GET", "/v1/models/0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b"),
    ("GET", "/v1/models/x"),
    ("GET", "/v1/credits"),
    ("GET", "/v1/credits?a=b"),
    ("POST", CHAT),
    ("GET", "/v1/requests/0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b"),
    ("DELETE", "/v1/requests/0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b"),
    ("GET", "/v1/requests/x"),
    ("GET", "/v1/requests/0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b/receipt"),
    ("PATCH", "/v1/me"),
    ("OPTIONS", "/v1/me"),
    ("TRACE", CHAT),
    ("GET", "/v1"),
    ("GET", "/"),
    ("GET", "/metrics"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/openapi.json"),
    ("GET", "/dashboard"),
    ("POST", "/command"),
];

async fn send(world: &World, method: &str, path: &str, credential: &[u8]) -> Raw {
    let body = if method == "POST" { world.ask(json!({})).to_string() } else { String::new() };
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n\
         x-service-session-id: {SESSION}\r\nidempotency-key: {}\r\ncontent-length: {}\r\n",
        Uuid::new_v4(),
        body.len()
    );
    let bytes = [head.as_bytes(), credential, b"\r\n", body.as_bytes()].concat();
    ask(world.address, &bytes).await
}

fn bearer(token: &str) -> String {
    format!("authorization: Bearer {token}\r\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn every_bad_credential_gets_the_same_bytes_everywhere() {
    let world = World::new().await;
    let (id, revoked) = issue(&world.node, world.account, None).await;
    revoke(&world.node, id).await;
    let (_, expired) = issue_until(&world.node, world.account, None, Some(UnixMillis(1))).await;
    let sleeper = account(&world.node, 1, 1).await;
    let (_, suspended) = issue(&world.node, sleeper, None).await;
    suspend(&world.node, sleeper).await;
    let unknown = secret::mint("cresset", CredentialKind::ApiKey, &[9; 32]);
    let mut wrong_check = world.key.clone();
    let last = if wrong_check.pop() == Some('0') { '1' } else { '0' };
    wrong_check.push(last);
    let key = world.key.as_str();
    let credentials: Vec<(&str, Vec<u8>)> = vec![
        ("missing", Vec::new()),
        ("empty", b"authorization: \r\n".into()),
        ("no token", b"authorization: Bearer\r\n".into()),
        ("blank token", b"authorization: Bearer \r\n".into()),
        ("two spaces", format!("authorization: bearer  {key}\r\n").into()),
        ("tab", format!("authorization: Bearer\t{key}\r\n").into()),
        ("no scheme", format!("authorization: {key}\r\n").into()),
        ("another scheme", format!("authorization: Basic {key}\r\n").into()),
        ("trailing text", bearer(&format!("{key} x")).into()),
        ("a list", bearer(&format!("{key}, {key}")).into()),
        ("two headers", bearer(key).repeat(2).into()),
        ("another header", format!("x-api-key: {key}\r\n").into()),
        ("a proxy's header", format!("proxy-authorization: Bearer {key}\r\n").into()),
        ("a cookie", format!("cookie: authorization=Bearer {key}\r\n").into()),
        ("wrong check", bearer(&wrong_check).into()),
        ("upper case", bearer(&key.to_uppercase()).into()),
        ("unknown", bearer(&unknown).into()),
        ("revoked", bearer(&revoked).into()),
        ("expired", bearer(&expired).into()),
        ("suspended account", bearer(&suspended).into()),
        ("8 KiB", bearer(&"a".repeat(8 << 10)).into()),
        ("not ASCII", [b"authorization: Bearer \xe9\xff", key.as_bytes(), b"\r\n"].concat()),
    ];
    let mut expected = None;
    for (name, credential) in &credentials {
        for (method, path) in ROUTES {
            let answer = send(&world, method, path, credential).await;
            answer.assert_standard_headers(name);
            assert_eq!(
                answer.body, r#"{"error":{"code":"invalid_credential"}}"#,
                "{method} {path} {name}"
            );
            let expected = expected.get_or_insert_with(|| answer.steady());
            assert_eq!(&answer.steady(), expected, "{method} {path} {name}");
        }
    }
    let nul = format!("authorization: Bearer {key}\0\r\n");
    for (method, path) in ROUTES {
        assert_eq!(
            send(&world, method, path, nul.as_bytes()).await.status,
            400,
            "no framing, no credential"
        );
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_operators_paths_do_not_exist_in_public() {
    let world = World::new().await;
    let credential = bearer(&world.key);
    let nothing = send(&world, "GET", "/no/such/path", credential.as_bytes()).await;
    assert_eq!((nothing.status, nothing.code().as_str()), (404, "not_found"));
    for (method, path) in &ROUTES[15..] {
        let answer = send(&world, method, path, credential.as_bytes()).await;
        assert_eq!(answer.steady(), nothing.steady(), "{method} {path}");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_request_is_a_missing_one() {
    let world = World::with(|setup| {
        (setup.ends, setup.step) = (false, Duration::from_millis(20));
        setup.trial = 100_000_000;
    })
    .await;
    let stranger = account(&world.node, 100_000_000, 0).await;
    let mut credentials = vec![world.key.clone(), issue(&world.node, stranger, None).await.1];
    for owner in [world.account, world.account, stranger] {
        let app = application(&world.node, owner).await;
        credentials.push(issue(&world.node, owner, Some(app)).await.1);
    }
    let names = [
        "account",
        "stranger",
        "one application",
        "another application",
        "a stranger's application",
    ];
    // The owners whose requests each of them sees.
    let sees = [vec![0, 2, 3], vec![1, 4], vec![2], vec![3], vec![4]];
    let ids: Vec<Uuid> = credentials.iter().map(|_| Uuid::new_v4()).collect();
    let body = world.ask(json!({ "max_tokens": 900, "stream": true }));
    let mut running = Vec::new();
    for (key, id) in credentials.iter().zip(&ids) {
        let response = world.open(key, *id, &body).await;
        assert_eq!(response.status().as_u16(), 200);
        running.push(response);
    }
    for method in ["GET", "DELETE"] {
        for (viewer, key) in credentials.iter().enumerate() {
            let missing = send(
                &world,
                method,
                &format!("/v1/requests/{}", Uuid::new_v4()),
                bearer(key).as_bytes(),
            )
            .await;
            assert_eq!((missing.status, missing.code().as_str()), (404, "request_not_found"));
            for (owner, id) in
                ids.iter().enumerate().filter(|(owner, _)| !sees[viewer].contains(owner))
            {
                let answer =
                    send(&world, method, &format!("/v1/requests/{id}"), bearer(key).as_bytes())
                        .await;
                assert_eq!(
                    answer.steady(),
                    missing.steady(),
                    "{method}: {} of {}",
                    names[viewer],
                    names[owner]
                );
            }
        }
    }
    for (viewer, key) in credentials.iter().enumerate() {
        for owner in &sees[viewer] {
            let seen = world.get_as(key, &format!("/v1/requests/{}", ids[*owner])).await;
            let alive = (seen.status, seen.json()["cancellable"].clone());
            assert_eq!(alive, (200, json!(true)), "no foreign DELETE ended it: {}", names[*owner]);
        }
    }
    for (viewer, owner) in [(0, 0), (0, 2), (3, 3), (1, 1), (4, 4)] {
        let ended = world.delete_as(&credentials[viewer], ids[owner]).await;
        assert_eq!((ended.status, &ended.json()["state"]), (200, &json!("cancelled")));
    }
    drop(running);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_id_in_two_scopes_is_two_requests() {
    let world = World::new().await;
    let stranger = account(&world.node, 1_000_000, 0).await;
    let app = application(&world.node, world.account).await;
    let other = issue(&world.node, stranger, None).await.1;
    let token = issue(&world.node, world.account, Some(app)).await.1;
    let id = Uuid::new_v4();
    let mut charges = Vec::new();
    for (key, words) in [(&world.key, 1), (&token, 50), (&other, 100)] {
        let body = world
            .ask(json!({ "messages": [{ "role": "user", "content": "hello ".repeat(words) }] }));
        let answer = world.post_as(key, id, &body).await;
        assert_eq!(
            (answer.status, answer.header("idempotent-replayed")),
            (200, ""),
            "{}",
            answer.text()
        );
        assert_eq!(world.post_as(key, id, &body).await.header("idempotent-replayed"), "true");
        let seen = world.get_as(key, &format!("/v1/requests/{id}")).await.json();
        charges.push(seen["chargedUnits"].clone());
        assert_eq!(seen["usage"], answer.json()["usage"], "each sees its own");
    }
    assert!(charges[0] != charges[1] && charges[1] != charges[2], "{charges:?}");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_account_is_told_only_about_itself() {
    let world = World::new().await;
    let stranger = account(&world.node, 77, 0).await;
    let other = issue(&world.node, stranger, None).await.1;
    world.post(Uuid::new_v4(), &world.ask(json!({}))).await;
    let credits = world.get_as(&other, "/v1/credits").await.json();
    assert_eq!((&credits["trialUnits"], &credits["reservedUnits"]), (&json!("77"), &json!("0")));
    assert_eq!(world.get_as(&other, "/v1/me").await.json()["id"], stranger.to_string());
    assert_eq!(world.get_as(&other, "/v1/models").await.body, world.get("/v1/models").await.body);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn guessing_from_an_address_locks_nobody_out_of_it() {
    let world = World::with(|setup| setup.config.http.failed_auth_per_minute = 3).await;
    let guess = format!(
        "GET /v1/me HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {}\r\n\r\n",
        "x".repeat(40)
    );
    let valid = format!("GET /v1/me HTTP/1.1\r\nhost: a\r\n{}\r\n", bearer(&world.key));
    // Three failures are allowed on one connection; the fourth closes it, and so does every further
    // one.
    for expected in [vec![401; 4], vec![401], vec![200, 401]] {
        let first = if expected[0] == 200 { valid.as_str() } else { "" };
        let found = super::raw::answers(
            &super::raw::talk(world.address, (first.to_owned() + &guess.repeat(6)).as_bytes())
                .await,
        );
        let statuses: Vec<u16> = found.iter().map(|answer| answer.status).collect();
        assert_eq!(statuses, expected);
        let last = found.last().unwrap();
        assert_eq!(
            (last.body.as_str(), last.header("connection")),
            (r#"{"error":{"code":"invalid_credential"}}"#, Some("close"))
        );
    }
    assert_eq!(world.get("/v1/me").await.status, 200);
    world.close().await;
}
