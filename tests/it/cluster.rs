//! Nodes of one ledger that pass requests on to each other. Without PostgreSQL on the machine these
//! tests are skipped.

use super::database::{place, question, same_ledger, shared, without_ledger};
use super::process::{Customer, Folder, MODEL, Reply, Served, eventually, get, request};
use super::support::{CHAT, chat_headers, http2};
use super::upgrade::upgrade;
use bytes::Bytes;
use cresset_tls::ClusterSettings;
use cresset_tls::{NodeAddress, Socket, TlsListeners};
use futures_util::future::join_all;
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use uuid::Uuid;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/cluster").join(name)
}

/// The settings of a node that shows this certificate.
fn cluster(identity: &str, more: &str) -> String {
    let [certificate, key, authority] =
        [format!("{identity}.pem"), format!("{identity}.key"), "authority.pem".into()]
            .map(|name| file(&name).display().to_string());
    format!(
        "\n[cluster]\nlisten = \"127.0.0.1:0\"\ncertificate = {certificate:?}\nkey = {key:?}\n\
         authority = {authority:?}\n{more}"
    )
}

fn configure(folder: &Folder, more: &str) {
    let path = folder.path().join("cresset.toml");
    let before = std::fs::read_to_string(&path).unwrap();
    std::fs::write(path, before + more).unwrap();
}

/// Two folders of one ledger, a customer that it knows, and a lease of two seconds.
fn two_folders() -> Option<([Folder; 2], Customer)> {
    let (server, first) = (shared()?, without_ledger());
    // One connection for reads: a request that held one while it waits for another would hang.
    let settings = "[ledger]\nlease_seconds = 2\nconnections = 1\n";
    std::fs::write(first.path().join("cresset.toml"), settings).unwrap();
    first.json(&["init", "--ledger", &place(server), "--standbys", "0"]);
    let customer = first.customer(100_000_000);
    configure(&first, &cluster("node", ""));
    let second = same_ledger(&first);
    Some(([first, second], customer))
}

/// Two slow nodes of one ledger, which know each other.
fn two_nodes() -> Option<([Folder; 2], [Served; 2], Customer)> {
    let (folders, customer) = two_folders()?;
    let nodes = folders.each_ref().map(|folder| folder.serve_failing("engine::step=sleep(5)"));
    known(&folders[0], 2);
    Some((folders, nodes, customer))
}

/// Waits until so many nodes are told of with address and models. Returns their addresses.
fn known(folder: &Folder, nodes: usize) -> Vec<String> {
    let mut told = Vec::new();
    eventually("the nodes know each other", || {
        let all = folder.json(&["nodes"])["data"].as_array().unwrap().clone();
        let is_told = |node: &&Value| {
            node["state"] == "running" && node["models"].as_object().is_some_and(|m| !m.is_empty())
        };
        let address = |node: &Value| node["cluster"].as_str().unwrap().to_owned();
        told = all.iter().filter(is_told).map(address).filter(|at| !at.is_empty()).collect();
        told.len() == nodes
    });
    told
}

fn metric(node: &Served, line: &str) -> bool {
    get(&node.operator, "/metrics").body.lines().any(|told| told == line)
}

fn forwarded(result: &str, count: u32) -> String {
    format!("cresset_forwarded_requests_total{{result=\"{result}\"}} {count}")
}

fn delete(node: &Served, key: &str, id: &str) -> Reply {
    let head = format!("DELETE /v1/requests/{id} HTTP/1.1\r\nAuthorization: Bearer {key}\r\n");
    request(&node.listen, &head, "").finish()
}

fn assert_charged_once(folder: &Folder, account: &str, ids: &[String]) {
    let mut charged = 0;
    for id in ids {
        let shown = folder.json(&["requests", "show", id]);
        assert_eq!(shown["attempts"].as_array().map(Vec::len), Some(1), "{shown}");
        charged += shown["chargedUnits"].as_str().unwrap().parse::<u64>().unwrap();
    }
    let balance = folder.json(&["credits", "show", "--account", account]);
    assert_eq!(balance["reservedUnits"], "0", "{balance}");
    assert_eq!(balance["trialUnits"], json!((100_000_000 - charged).to_string()));
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn a_repeat_at_another_node_gets_the_same_bytes_as_it_runs() {
    let Some((folders, nodes, Customer { account, key, .. })) = two_nodes() else { return };
    let [owner, other] = &nodes;
    let mut ids = Vec::new();
    for stream in [true, false] {
        let (id, question) = (Uuid::new_v4().to_string(), question(owner, stream, 300));
        let (first, second) = thread::scope(|scope| {
            let first = scope.spawn(|| owner.chat(&key, &id, &question).finish());
            let running = || folders[0].run(&["requests", "show", &id, "--json"]).code == Some(0);
            eventually("it is admitted", running);
            let second = other.chat(&key, &id, &question).finish();
            (first.join().unwrap(), second)
        });
        assert_eq!(first.status, 200, "{}", first.body);
        assert_eq!((second.status, &second.body), (200, &first.body), "{}", other.log());
        let names = |reply: &Reply| {
            let mut names: Vec<_> = reply.headers.keys().cloned().collect();
            names.retain(|name| name != "date");
            names
        };
        assert_eq!(names(&first), names(&second));
        assert_eq!(second.header("x-request-id"), Some(id.as_str()));
        if !stream {
            for node in &nodes {
                let replayed = node.chat(&key, &id, &question).finish();
                assert_eq!(
                    (&replayed.body, replayed.header("idempotent-replayed")),
                    (&first.body, Some("true"))
                );
            }
        }
        ids.push(id);
    }
    assert!(metric(other, &forwarded("answered", 2)) && metric(owner, &forwarded("received", 2)));
    assert!(metric(other, "cresset_http_responses_total{status=\"200\",code=\"forwarded\"} 2"));
    assert!(metric(owner, "cresset_idempotent_attaches_total 2"));
    assert!(other.log().contains("forwarded=\"sent\""), "{}", other.log());
    assert!(owner.log().contains("forwarded=\"received\""), "{}", owner.log());
    // The same id with another input is judged where it arrives.
    let reused = other.chat(&key, &ids[0], &question(owner, true, 301)).finish();
    assert_eq!(reused.status, 422, "{}", reused.body);
    assert_charged_once(&folders[0], &account, &ids);
}

/// Sends a chat completion over HTTP/2 and returns the text of the answer.
async fn chat_over_http2(node: &Served, key: &str, id: &str, body: &Value) -> Vec<u8> {
    let address = node.listen.strip_prefix("http://").unwrap().parse().unwrap();
    let mut request = hyper::Request::post(format!("{}{CHAT}", node.listen));
    for (name, value) in chat_headers(key, id) {
        request = request.header(name, value);
    }
    let request = request.body(Full::new(Bytes::from(body.to_string()))).unwrap();
    let answer = http2(address).await.send_request(request).await.unwrap();
    assert_eq!(answer.status(), 200, "{}", node.log());
    answer.into_body().collect().await.unwrap().to_bytes().to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_of_three_nodes_pass_on_what_arrives_over_http2() {
    let Some(([first, second], Customer { account, key, .. })) = two_folders() else { return };
    let folders = [same_ledger(&first), first, second];
    let nodes = folders.each_ref().map(|folder| folder.serve_failing("engine::step=sleep(5)"));
    known(&folders[0], 3);
    let ids: Vec<String> = (0..3).map(|_| Uuid::new_v4().to_string()).collect();
    for (id, owner) in ids.iter().zip(&nodes) {
        let question = question(owner, true, 300);
        let others = nodes.iter().filter(|node| node.listen != owner.listen);
        let asked = async |node: &Served| chat_over_http2(node, &key, id, &question).await;
        let repeats = async {
            while folders[0].run(&["requests", "show", id, "--json"]).code != Some(0) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            join_all(others.map(asked)).await
        };
        let (whole, repeats) = tokio::join!(asked(owner), repeats);
        assert!(whole.ends_with(b"data: [DONE]\n\n") && repeats.len() == 2);
        assert!(repeats.iter().all(|repeat| *repeat == whole), "{}", owner.log());
    }
    for node in &nodes {
        assert!(metric(node, &forwarded("answered", 2)) && metric(node, &forwarded("received", 2)));
    }
    assert_charged_once(&folders[0], &account, &ids);
}

#[test]
fn a_node_is_upgraded_while_the_other_goes_on() {
    let Some((folders, Customer { account, key, .. })) = two_folders() else { return };
    let plan = "\n[plans.default]\nrequests_per_minute = 1000000\nburst = 100000\n";
    for folder in &folders {
        configure(folder, plan);
    }
    let nodes = folders.each_ref().map(|folder| folder.serve_failing("engine::step=sleep(5)"));
    known(&folders[0], 2);
    let [first, other] = &nodes;
    let question = question(first, false, 8);
    let over = AtomicBool::new(false);
    let send = |node: &Served| {
        let mut ids = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let id = Uuid::new_v4().to_string();
            let reply = node.chat(&key, &id, &question).finish();
            assert_eq!(reply.status, 200, "{}", reply.body);
            ids.push(id);
        }
        ids
    };
    let (mut ids, successor) = thread::scope(|scope| {
        let clients = [first, other, first, other].map(|node| scope.spawn(|| send(node)));
        thread::sleep(Duration::from_millis(500));
        let successor = upgrade(&folders[0]);
        thread::sleep(Duration::from_millis(500));
        over.store(true, Ordering::Relaxed);
        let ids: Vec<_> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
        (ids, successor)
    });
    // Requests reach the new process at the address of the old one, also from the other node.
    known(&folders[0], 2);
    let id = Uuid::new_v4().to_string();
    let mut running = first.chat(&key, &id, &self::question(first, true, 700));
    running.read_until("\"content\":");
    assert_eq!(delete(other, &key, &id).status, 200, "{}", other.log());
    ids.push(id);
    assert_charged_once(&folders[0], &account, &ids);
    assert!(metric(other, &forwarded("answered", 1)), "{}", other.log());
    successor.terminate();
}

#[test]
fn a_cancel_at_another_node_ends_the_run_at_once() {
    let Some((folders, nodes, Customer { key, .. })) = two_nodes() else { return };
    let [owner, other] = &nodes;
    let id = Uuid::new_v4().to_string();
    let mut running = owner.chat(&key, &id, &question(owner, true, 700));
    running.read_until("\"content\":");
    let ended = delete(other, &key, &id);
    assert_eq!(
        (ended.status, &ended.json()["state"]),
        (200, &json!("cancelled")),
        "{}",
        ended.body
    );
    assert!(metric(other, &forwarded("answered", 1)), "{}", other.log());
    drop(running.rest());
    assert_eq!(delete(other, &key, &id).status, 200, "it has ended");
    assert!(metric(other, &forwarded("answered", 1)), "what has ended is nobody's");
    assert_eq!(folders[1].json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn a_client_that_goes_away_is_noticed_where_its_request_runs() {
    let Some((folders, nodes, Customer { account, key, .. })) = two_nodes() else { return };
    let [owner, other] = &nodes;
    let id = Uuid::new_v4().to_string();
    let question = question(owner, true, 700);
    let mut first = owner.chat(&key, &id, &question);
    first.read_until("\"content\":");
    // Four may listen at once, so the places of those that have gone must become free.
    let mut joined = 0;
    eventually("six have joined, one after the other", || {
        let mut next = other.chat(&key, &id, &question);
        assert!(next.header("idempotent-replayed").is_none(), "it has ended meanwhile");
        if next.status == 200 {
            next.read_until("\"content\":");
            joined += 1;
        }
        joined == 6
    });
    assert!(first.rest().contains("[DONE]"));
    assert_charged_once(&folders[0], &account, &[id]);
}

/// What another node would get for this request; empty where the connection is refused.
async fn as_peer(told: &str, identity: &str, request: &str) -> String {
    let path = |name: String| Some(file(&name));
    let settings = ClusterSettings {
        certificate: path(format!("{identity}.pem")),
        key: path(format!("{identity}.key")),
        authority: path("authority.pem".into()),
        ..ClusterSettings::default()
    };
    let tls = TlsListeners::default().with_peers(&settings).unwrap();
    match tls.peers().unwrap().address(told).unwrap().connect().await {
        Ok(socket) => exchanged(socket, request).await,
        Err(_) => String::new(),
    }
}

async fn exchanged(mut socket: Socket, request: &str) -> String {
    let mut answer = Vec::new();
    // A refusal of the certificate arrives with the first read.
    let _ = socket.write_all(request.as_bytes()).await;
    let _ = socket.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

/// A request as another node passes it on.
fn passed_on(key: &str, line: &str, more: &str, body: &str) -> String {
    format!(
        "{line} HTTP/1.1\r\nHost: node\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n\
         {more}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

const MARK: &str = "X-Cresset-Forwarded: 1\r\n";

fn headers(id: &str) -> String {
    format!(
        "{MARK}Content-Type: application/json\r\nIdempotency-Key: {id}\r\n\
         X-Service-Session-Id: 5f0f3b0a-3c0e-4c3a-9d4e-0b8f6d1c2a11\r\n"
    )
}

fn completion(key: &str, id: &str, body: &Value) -> String {
    passed_on(key, "POST /v1/chat/completions", &headers(id), &body.to_string())
}

fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or("none")
}

#[tokio::test(flavor = "multi_thread")]
async fn only_nodes_reach_the_listener_for_nodes_and_vouch_for_nobody() {
    let Some((folders, nodes, Customer { key, .. })) = two_nodes() else { return };
    let [owner, _] = &nodes;
    let me = passed_on(&key, "GET /v1/me", MARK, "");
    for told in known(&folders[0], 2) {
        assert_eq!(status(&as_peer(&told, "node", &me).await), "200");
        assert_eq!(as_peer(&told, "stranger", &me).await, "", "another authority has signed it");
        let nobody = NodeAddress::new(&format!("https://{told}"), Some(&file("authority.pem")));
        let nobody = match nobody.unwrap().connect().await {
            Ok(socket) => exchanged(socket, &me).await,
            Err(_) => String::new(),
        };
        assert_eq!(nobody, "", "it shows no certificate");
        let client = as_peer(&told, "node", &passed_on(&key, "GET /v1/me", "", "")).await;
        assert!(status(&client) == "400" && client.contains("invalid_request"), "{client}");
    }
    // The node checks the credential itself.
    let id = Uuid::new_v4().to_string();
    let mut running = owner.chat(&key, &id, &question(owner, true, 400));
    running.read_until("\"content\":");
    let stranger = folders[1].json(&["accounts", "create", "--name", "other"])["id"].clone();
    let other = folders[1].json(&["keys", "create", "--account", stranger.as_str().unwrap()]);
    let (told, line) = (known(&folders[0], 2), format!("DELETE /v1/requests/{id}"));
    for (key, expect) in [("cresset_key_wrong", 401), (other["secret"].as_str().unwrap(), 404)] {
        let directly = delete(owner, key, &id);
        assert_eq!(directly.status, expect, "{}", directly.body);
        for told in &told {
            let answer = as_peer(told, "node", &passed_on(key, &line, MARK, "")).await;
            let code = directly.json()["error"]["code"].to_string();
            assert!(status(&answer) == expect.to_string() && answer.contains(&code), "{answer}");
        }
    }
    assert!(running.rest().contains("[DONE]"), "nobody ended it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_goes_one_hop() {
    let Some((folders, nodes, Customer { account, key, .. })) = two_nodes() else { return };
    let [owner, other] = &nodes;
    let id = Uuid::new_v4().to_string();
    let asked = question(owner, true, 400);
    let mut running = owner.chat(&key, &id, &asked);
    running.read_until("\"content\":");
    let told = known(&folders[0], 2);
    let sent = completion(&key, &id, &asked);
    let answers = tokio::join!(as_peer(&told[0], "node", &sent), as_peer(&told[1], "node", &sent));
    let mut answers = <[String; 2]>::from(answers);
    answers.sort_by_key(|answer| status(answer).to_owned());
    assert_eq!(answers.iter().map(|answer| status(answer)).collect::<Vec<_>>(), ["200", "409"]);
    assert!(answers[1].contains("\"request_in_progress\""), "{}", answers[1]);
    // At the public listener the mark alone keeps it there.
    let id = Uuid::new_v4().to_string();
    let mut second = owner.chat(&key, &id, &question(owner, true, 300));
    second.read_until("\"content\":");
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n{}",
        headers(&id)
    );
    let body = question(owner, true, 300).to_string();
    let refused = request(&other.listen, &head, &body).finish();
    assert_eq!(
        (refused.status, &refused.json()["error"]["code"]),
        (409, &json!("request_in_progress"))
    );
    assert!(metric(owner, &forwarded("received", 1)) && metric(other, &forwarded("received", 1)));
    assert!(!get(&other.operator, "/metrics").body.contains("result=\"answered\""));
    drop((running.rest(), second.rest()));
    assert_eq!(folders[0].json(&["credits", "show", "--account", &account])["reservedUnits"], "0");
}

#[test]
fn what_a_dead_or_a_silent_owner_ran_is_answered_in_time() {
    let Some((folders, nodes, Customer { account, key, .. })) = two_nodes() else { return };
    let [owner, other] = nodes;
    let ids: [String; 2] = std::array::from_fn(|_| Uuid::new_v4().to_string());
    let asked = question(&owner, true, 700);
    let mut running: Vec<_> = ids.iter().map(|id| owner.chat(&key, id, &asked)).collect();
    let mut joined = other.chat(&key, &ids[0], &asked);
    for stream in &mut running {
        stream.read_until("\"content\":");
    }
    joined.read_until("\"content\":");
    owner.signal("STOP");
    // It accepts connections and says nothing.
    let refused = other.chat(&key, &ids[1], &asked).finish();
    assert_eq!(
        (refused.status, refused.header("retry-after")),
        (409, Some("1")),
        "{}",
        refused.body
    );
    let marked = delete(&other, &key, &ids[1]);
    assert!([200, 202].contains(&marked.status), "{}", marked.body);
    // What has begun ends with the lease of its node.
    assert!(!joined.rest().contains("[DONE]"));
    assert!(metric(&other, &forwarded("broken", 1)), "{}", other.log());
    let failed = |id: &str| folders[1].json(&["requests", "show", id])["state"] == "failed";
    eventually("the other node ends them", || failed(&ids[0]) && failed(&ids[1]));
    owner.kill();
    let again = other.chat(&key, &ids[0], &asked).finish();
    assert!(again.status == 200 && again.body.contains("[DONE]"), "{}", again.body);
    let shown = folders[1].json(&["requests", "show", &ids[1]]);
    assert_eq!(shown["chargedUnits"], "0", "{shown}");
    let balance = folders[1].json(&["credits", "show", "--account", &account]);
    assert_eq!(balance["reservedUnits"], "0", "{balance}");
    assert_eq!(folders[1].json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn an_owner_that_dies_breaks_the_answer_off() {
    let Some((folders, nodes, Customer { key, .. })) = two_nodes() else { return };
    let [owner, other] = nodes;
    let id = Uuid::new_v4().to_string();
    let asked = question(&owner, true, 700);
    let mut running = owner.chat(&key, &id, &asked);
    running.read_until("\"content\":");
    let mut joined = other.chat(&key, &id, &asked);
    joined.read_until("\"content\":");
    owner.kill();
    assert!(!joined.rest().contains("[DONE]"));
    // Until its lease has run out, the node that died counts as the one that runs it.
    let refused = other.chat(&key, &id, &asked).finish();
    assert_eq!((refused.status, refused.header("retry-after")), (409, Some("1")));
    eventually("the other node ends it", || {
        folders[1].json(&["requests", "show", &id])["state"] == "failed"
    });
    let again = other.chat(&key, &id, &asked).finish();
    assert!(again.status == 200 && again.body.contains("[DONE]"), "{}", again.body);
    assert_eq!(folders[1].json(&["ledger", "audit"])["ok"], true);
}

/// Replaces the folder's model by another one.
fn with_other_model(folder: &Folder) {
    folder.json(&["models", "remove", MODEL]);
    let model = folder.path().join("other.gguf");
    cresset_models::testing::tiny_llama_gguf(&model, 8).unwrap();
    folder.json(&["models", "add", "--path", model.to_str().unwrap(), "--name", "other"]);
    folder.qualify("other");
}

#[test]
fn a_model_that_only_another_node_serves_answers_and_is_charged_once() {
    let Some((folders, Customer { account, key, .. })) = two_folders() else { return };
    with_other_model(&folders[1]);
    let [serving, asked] = folders.each_ref().map(Folder::serve);
    assert_ne!(serving.model, asked.model);
    known(&folders[0], 2);
    let mut ids = Vec::new();
    for stream in [false, true] {
        let (id, question) = (Uuid::new_v4().to_string(), question(&serving, stream, 16));
        let first = asked.chat(&key, &id, &question).finish();
        assert_eq!(first.status, 200, "{}\n{}", first.body, asked.log());
        let replays = [&serving, &asked].map(|node| node.chat(&key, &id, &question).finish());
        for replayed in replays {
            assert_eq!(replayed.header("idempotent-replayed"), Some("true"));
            assert!(stream || replayed.body == first.body, "byte for byte");
        }
        ids.push(id);
    }
    assert!(
        metric(&asked, &forwarded("answered", 2)) && metric(&serving, &forwarded("received", 2))
    );
    let listed = asked.get(&key, "/v1/models").json();
    assert_eq!(listed["data"].as_array().map(Vec::len), Some(1), "the node's own: {listed}");
    assert_eq!(listed["data"][0]["id"], json!(asked.model));
    let mut nobody = question(&serving, false, 8);
    nobody["model"] = json!(Uuid::new_v4());
    let refused = asked.chat(&key, &Uuid::new_v4().to_string(), &nobody).finish();
    assert_eq!(refused.status, 404, "{}", refused.body);
    assert_charged_once(&folders[0], &account, &ids);
    // A node that has gone serves nothing.
    let question = question(&serving, false, 8);
    assert!(serving.terminate().success());
    let refused = asked.chat(&key, &Uuid::new_v4().to_string(), &question).finish();
    assert_eq!(refused.status, 404, "{}", refused.body);
}

/// What `cresset doctor` finds of the certificate that other nodes are shown.
fn examined(folder: &Folder) -> Value {
    let report = folder.run(&["doctor", "--json"]).document();
    let mut checks = report["checks"].as_array().unwrap().iter();
    checks.find(|check| check["check"] == "certificate for other nodes").unwrap().clone()
}

#[test]
fn a_certificate_that_others_would_refuse_is_named_at_the_start() {
    let Some((folders, _)) = two_folders() else { return };
    let path = folders[0].path().join("cresset.toml");
    let written = std::fs::read_to_string(&path).unwrap();
    let ledger = &written[..written.find("\n[cluster]").unwrap()];
    let serve = ["serve", "--listen", "127.0.0.1:0", "--operator", "127.0.0.1:0"];
    for (identity, more, part) in [
        ("stranger", "", "would refuse"),
        ("node", "address = \"127.0.0.2\"\n", "at 127.0.0.2:0"),
        ("missing", "", "missing.key"),
    ] {
        std::fs::write(&path, format!("{ledger}{}", cluster(identity, more))).unwrap();
        let said = folders[0].fails(&serve, 1);
        assert!(said.contains(part) && said.contains("cluster.certificate"), "{said}");
        let found = examined(&folders[0]);
        assert!(found["detail"].as_str().unwrap().contains(part), "{found}");
        assert_eq!(found["verdict"], "wrong");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_certificate_is_shown_to_other_nodes() {
    let Some((folders, Customer { key, .. })) = two_folders() else { return };
    let show = |name: &str| {
        for kind in ["pem", "key"] {
            let to = folders[0].path().join(format!("shown.{kind}"));
            std::fs::copy(file(&format!("{name}.{kind}")), to).unwrap();
        }
    };
    show("node");
    let path = folders[0].path().join("cresset.toml");
    let written = std::fs::read_to_string(&path).unwrap();
    let shown = folders[0].path().join("shown").display().to_string();
    let written = written.replace(&file("node").display().to_string(), &shown);
    std::fs::write(&path, written).unwrap();
    let nodes = folders.each_ref().map(Folder::serve);
    let line = "cresset_certificate_not_after_seconds{listener=\"cluster\"} ";
    let ends = || {
        get(&nodes[0].operator, "/metrics")
            .body
            .lines()
            .find(|told| told.starts_with(line))
            .unwrap()
            .to_owned()
    };
    let before = ends();
    assert_eq!(examined(&folders[0])["verdict"], "good");
    show("renewed");
    assert_eq!(examined(&folders[0])["remedy"], "cresset reload");
    assert_eq!(folders[0].json(&["reload"])["certificate"], true);
    assert_ne!(ends(), before);
    let me = passed_on(&key, "GET /v1/me", MARK, "");
    for told in known(&folders[1], 2) {
        assert_eq!(status(&as_peer(&told, "renewed", &me).await), "200");
    }
    // The renewed one is accepted by others, too.
    let id = Uuid::new_v4().to_string();
    let mut running = nodes[1].chat(&key, &id, &question(&nodes[1], true, 1_500));
    running.read_until("\"content\":");
    assert_eq!(delete(&nodes[0], &key, &id).status, 200, "{}", nodes[0].log());
    drop(running.rest());
}
