//! Receipts: what a client gets for a completed request, who gets it, what `cresset receipts
//! verify` finds wrong with one that was edited or made up, and that an answer can be computed
//! again from it.

use crate::capabilities::{MARKS, THINKER, template};
use crate::process::{Customer, Folder, MODEL, Served};
use crate::support::{World, account, application, issue, tiny_gguf};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use cresset_catalogue::Catalogue;
use cresset_engine::testing::ScriptedFailure;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;
use uuid::Uuid;

const PROMPT: &str = "what does the lamp show";

fn body(model: &str, extra: &Value) -> Value {
    let messages = json!([{ "role": "user", "content": PROMPT }]);
    let mut body = json!({ "model": model, "messages": messages, "max_tokens": 24 });
    for (name, value) in extra.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The statement in an envelope.
fn statement(receipt: &str) -> Value {
    let envelope: Value = serde_json::from_str(receipt).unwrap();
    let payload = BASE64.decode(envelope["payload"].as_str().unwrap()).unwrap();
    serde_json::from_slice(&payload).unwrap()
}

/// A completed request of a node, and its receipt.
struct Receipted {
    id: String,
    body: Value,
    answer: String,
    receipt: String,
}

impl Receipted {
    fn new(node: &Served, key: &str, body: Value) -> Self {
        let id = Uuid::new_v4().to_string();
        let reply = node.chat(key, &id, &body).finish();
        assert_eq!(reply.status, 200, "{}", reply.body);
        let receipt = node.get(key, &format!("/v1/requests/{id}/receipt"));
        assert_eq!(receipt.status, 200, "{}", receipt.body);
        assert_eq!(receipt.headers["content-type"], "application/json");
        assert!(receipt.headers["cache-control"].contains("no-store"));
        Self { id, body, answer: reply.body, receipt: receipt.body }
    }

    /// The receipt as a file of the folder.
    fn file(&self, folder: &Folder) -> String {
        written(folder, &format!("{}.receipt", self.id), &self.receipt)
    }

    fn body_file(&self, folder: &Folder) -> String {
        written(folder, &format!("{}.body", self.id), &self.body.to_string())
    }
}

fn written(folder: &Folder, name: &str, content: &str) -> String {
    let path: PathBuf = folder.path().join(name);
    fs::write(&path, content).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Another statement signed with the key of a folder.
fn signed(folder: &Folder, statement: &Value) -> String {
    let signer = Catalogue::new(folder.path()).receipt_signer().unwrap();
    String::from_utf8(signer.seal(statement)).unwrap()
}

fn verify(folder: &Folder, file: &str, more: &[&str]) -> Value {
    folder.json(&[&["receipts", "verify", file], more].concat())
}

fn refusal(folder: &Folder, file: &str, more: &[&str]) -> String {
    folder.fails(&[&["receipts", "verify", file], more].concat(), 1)
}

#[test]
fn answers_with_calls_of_tools_are_computed_again() {
    let folder = Folder::initialised();
    let model = folder.path().join("caller.gguf");
    fs::write(&model, tiny_gguf(7, Some(&template(THINKER)), MARKS).to_bytes()).unwrap();
    folder.json(&["models", "add", "--path", model.to_str().unwrap(), "--name", MODEL]);
    folder.qualify(MODEL);
    let Customer { key, .. } = folder.customer(1_000_000);
    let states = json!({ "state": { "type": "string", "enum": ["on", "off"] } });
    let parameters = json!({ "type": "object", "properties": states, "required": ["state"],
        "additionalProperties": false });
    let tool = json!({ "type": "function", "function": { "name": "lamp",
        "parameters": parameters } });
    for (reasoning, choice) in
        [(true, "auto"), (true, "none"), (false, "required"), (true, "required")]
    {
        // A random model chooses its calls badly.
        let settings = format!(
            "[plans.default]\nreasoning = {reasoning}\n[qualification]\nany_tool_choice = true\n"
        );
        fs::write(folder.path().join("cresset.toml"), settings).unwrap();
        let node = folder.serve();
        let more = json!({ "tools": [tool], "tool_choice": choice, "seed": 3, "max_tokens": 240,
            "parallel_tool_calls": false });
        let done = Receipted::new(&node, &key, body(&node.model, &more));
        assert!(node.terminate().success());
        let said = &statement(&done.receipt)["predicate"];
        let called = said["answer"]["finish_reason"] == "tool_calls";
        assert!(called || reasoning, "no thought delays a call: {}", done.answer);
        let files = [done.file(&folder), done.body_file(&folder)];
        let again = verify(&folder, &files[0], &["--rerun", "--request", &files[1]]);
        assert_eq!(again["rerun"]["tokens"], said["usage"]["completion_tokens"], "{choice}");
    }
}

#[test]
fn a_receipt_tells_by_digests_what_was_answered_and_charged() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1_000_000);
    let node = folder.serve();
    let more = json!({ "temperature": 0.7, "top_p": 0.9, "seed": -3, "ignore_eos": true });
    let done = Receipted::new(&node, &key, body(&node.model, &more));
    let path = format!("/v1/requests/{}/receipt", done.id);
    assert_eq!(node.get(&key, &path).body, done.receipt, "it is the same each time");
    node.chat(&key, &done.id, &done.body).finish();
    assert_eq!(node.get(&key, &path).body, done.receipt, "and after a replay");

    let (whole, answer) = (statement(&done.receipt), serde_json::from_str::<Value>(&done.answer));
    let (said, answer) = (&whole["predicate"], answer.unwrap());
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let digest = json!(hex::encode(Sha256::digest(text)));
    assert_eq!(
        (&whole["subject"][0]["digest"]["sha256"], &said["usage"]),
        (&digest, &answer["usage"])
    );
    assert_eq!(said["answer"]["text_sha256"], digest);
    assert_eq!(said["answer"]["finish_reason"], "length");
    assert_eq!(said["charge"]["chargedUnits"], answer["credits"]["chargedUnits"]);
    let asked = &said["sampling"];
    let sampling = ["seed", "temperature", "top_p", "max_tokens"].map(|name| &asked[name]);
    assert_eq!(sampling, [&json!("-3"), &json!(0.7), &json!(0.9), &json!(24)]);
    let model = &node.get(&key, "/v1/models").json()["data"][0];
    assert_eq!(
        (&said["request"]["model"], &said["release"]["id"]),
        (&model["id"], &model["release_id"])
    );
    assert_eq!(said["verdict"]["record"], model["evidence"]["record"]);
    assert_eq!(
        (&said["verdict"]["grade"], &said["key"]["id"]),
        (&json!("self"), &model["evidence"]["key"])
    );
    let weights = fs::read(folder.path().join("tiny.gguf")).unwrap();
    assert_eq!(said["release"]["files_sha256"], json!([hex::encode(Sha256::digest(weights))]));
    let status = folder.json(&["status"]);
    assert_eq!((&status["key"], &status["earlier_keys"]), (&said["key"]["id"], &json!([])));

    // The record, which stays on the node, tells of the machine; the receipt does not.
    let record = folder.json(&["qualify", MODEL, "--show"]);
    let told = whole.to_string();
    let hardware = record["identity"]["host"]["hardware"]["model"].as_str().unwrap_or("hardware");
    for private in [PROMPT, text, "hardware", hardware, "settings", "threads", "tiny", "127.0.0.1"]
    {
        assert!(!told.contains(private), "{private}: {told}");
    }
}

#[test]
fn a_receipt_is_checked_on_its_node_and_anywhere_and_its_answer_computed_again() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1_000_000);
    let node = folder.serve();
    let cases = [
        ("greedy", json!({ "temperature": 0, "ignore_eos": true })),
        ("with a seed", json!({ "temperature": 1.3, "seed": 11, "ignore_eos": true })),
        ("with a seed of the node's", json!({ "temperature": 1.1, "stream": true })),
        (
            "penalties and bias",
            json!({ "temperature": 0.9, "frequency_penalty": 0.5, "logit_bias": { "7": 3 } }),
        ),
        ("scores", json!({ "seed": 5, "logprobs": true, "top_logprobs": 3 })),
    ];
    let all =
        cases.map(|(name, more)| (name, Receipted::new(&node, &key, body(&node.model, &more))));
    // A stop string that the answer is sure to have: a part of what the greedy one says.
    let greedy: Value = serde_json::from_str(&all[0].1.answer).unwrap();
    let text: Vec<char> =
        greedy["choices"][0]["message"]["content"].as_str().unwrap().chars().collect();
    let stop: String = text[text.len() / 2..].iter().take(3).collect();
    let stopped = json!({ "temperature": 0, "ignore_eos": true, "stop": stop });
    let stopped = Receipted::new(&node, &key, body(&node.model, &stopped));
    assert_eq!(statement(&stopped.receipt)["predicate"]["answer"]["finish_reason"], "stop");

    let first = &all[0].1;
    let running = verify(&folder, &first.file(&folder), &[]);
    assert_eq!((&running["valid"], &running["key_of"]), (&json!(true), &json!("this node")));
    assert_eq!(running["journal"]["entry"]["request_id"], json!(first.id));
    assert_eq!(running["journal"]["answer_kept"], true);
    assert!(node.terminate().success());
    let alone = verify(&folder, &first.file(&folder), &[]);
    assert_eq!(alone["journal"], running["journal"], "the node has stopped");
    let text = folder.run(&["receipts", "verify", &first.file(&folder)]).stdout;
    assert!(text.contains("genuine") && text.contains("agree"), "{text}");

    for (name, done) in all.iter().chain([&("stopped", stopped)]) {
        let again = verify(
            &folder,
            &done.file(&folder),
            &["--rerun", "--request", &done.body_file(&folder)],
        );
        let usage = &again["statement"]["predicate"]["usage"];
        assert_eq!(again["rerun"]["tokens"], usage["completion_tokens"], "{name}");
        assert_eq!(
            (&again["rerun"]["release"], &again["rerun"]["differs"]),
            (&json!(MODEL), &json!([])),
            "{name}"
        );
    }
    let other = all[1].1.body_file(&folder);
    let why = refusal(&folder, &first.file(&folder), &["--rerun", "--request", &other]);
    assert!(why.contains("not the one") && why.contains("fingerprint"), "{why}");

    // Another machine, which knows the node's key alone.
    let elsewhere = Folder::empty();
    let file = first.file(&elsewhere);
    let why = refusal(&elsewhere, &file, &[]);
    assert!(why.contains("not trusted") && why.contains("evidence.key"), "{why}");
    let key = alone["key"].as_str().unwrap();
    let there = verify(&elsewhere, &file, &["--key", key]);
    assert_eq!((&there["key_of"], &there["journal"]), (&json!("another node"), &Value::Null));
    let why = refusal(&elsewhere, &file, &["--key", &"0".repeat(64)]);
    assert!(why.contains("not trusted"), "{why}");
}

type Change = fn(&mut Value);

/// Statements that the node's own key signed, so that only the ledger contradicts them.
const LIES: [(&str, Change); 5] = [
    ("the journal charged", |said| {
        // A consistent one: the same usage at ten times the prices.
        let units =
            |value: &Value| (value.as_str().unwrap().parse::<u64>().unwrap() * 10).to_string();
        for name in ["inputUnitsPerMillion", "cachedInputUnitsPerMillion", "outputUnitsPerMillion"]
        {
            said["charge"]["prices"][name] = units(&said["charge"]["prices"][name]).into();
        }
        let number =
            |name: &str| said["charge"]["prices"][name].as_str().unwrap().parse::<u64>().unwrap();
        let tokens = |name: &str| said["usage"][name].as_u64().unwrap();
        let cost = tokens("prompt_tokens") * number("inputUnitsPerMillion")
            + tokens("completion_tokens") * number("outputUnitsPerMillion");
        said["charge"]["chargedUnits"] = cost.div_ceil(1_000_000).to_string().into();
    }),
    ("its usage costs", |said| said["charge"]["chargedUnits"] = "0".into()),
    ("the ledger has the fingerprint", |said| {
        said["request"]["fingerprint"] = "00".repeat(32).into();
    }),
    ("no charge of this attempt", |said| {
        said["request"]["attempt_id"] = Uuid::new_v4().to_string().into();
    }),
    ("that of the stored answer", |said| {
        said["answer"]["tokens_sha256"] = "00".repeat(32).into();
    }),
];

#[test]
fn a_receipt_that_was_edited_or_made_up_is_refused_with_a_sentence() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1_000_000);
    let node = folder.serve();
    let done = Receipted::new(&node, &key, body(&node.model, &json!({ "temperature": 0 })));
    let name = "changed.receipt";

    let mut edited: Value = serde_json::from_str(&done.receipt).unwrap();
    let mut said = statement(&done.receipt);
    said["predicate"]["charge"]["chargedUnits"] = "1".into();
    edited["payload"] = BASE64.encode(said.to_string()).into();
    let why = refusal(&folder, &written(&folder, name, &edited.to_string()), &[]);
    assert!(why.contains("changed after it was signed"), "{why}");

    // A foreign key's, also one that claims to be this node's.
    let other = Folder::empty();
    let foreign = signed(&other, &statement(&done.receipt));
    let why = refusal(&folder, &written(&folder, name, &foreign), &[]);
    assert!(why.contains("another key"), "{why}");
    let signer = Catalogue::new(other.path()).receipt_signer().unwrap().key();
    let mut own = statement(&done.receipt);
    own["predicate"]["key"] = json!({ "id": signer.id(), "ed25519": signer.bytes() });
    let why = refusal(&folder, &written(&folder, name, &signed(&other, &own)), &[]);
    assert!(why.contains("not trusted here"), "{why}");

    for (expect, change) in LIES {
        let mut lie = statement(&done.receipt);
        change(&mut lie["predicate"]);
        let why = refusal(&folder, &written(&folder, name, &signed(&folder, &lie)), &[]);
        assert!(why.contains(expect), "{expect}: {why}");
    }
    let why = refusal(&folder, &written(&folder, name, "{}"), &[]);
    assert!(why.contains("no receipt") && why.contains("/v1/requests/ID/receipt"), "{why}");
    verify(&folder, &done.file(&folder), &[]);

    // The true receipt against another history: the ledger from before the request.
    let before = Folder::ready();
    let copy = before.path().join("before.backup");
    before.json(&["ledger", "backup", copy.to_str().unwrap()]);
    assert!(node.terminate().success());
    folder.json(&["ledger", "restore", copy.to_str().unwrap()]);
    let why = refusal(&folder, &done.file(&folder), &[]);
    assert!(why.contains("no charge of this attempt"), "{why}");
}

#[test]
fn a_key_that_was_replaced_stays_listed() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1_000_000);
    let node = folder.serve();
    let old = Receipted::new(&node, &key, body(&node.model, &json!({ "seed": 1 })));
    assert!(node.terminate().success());
    let first = folder.json(&["status"])["key"].clone();
    fs::remove_file(folder.path().join("node.key")).unwrap();
    folder.qualify(MODEL);
    let status = folder.json(&["status"]);
    assert_eq!(status["earlier_keys"], json!([first]));
    assert_ne!(status["key"], first);
    let node = folder.serve();
    let checked = verify(&folder, &old.file(&folder), &[]);
    assert_eq!((&checked["key"], &checked["key_of"]), (&first, &json!("this node, earlier")));
    let again = node.get(&key, &format!("/v1/requests/{}/receipt", old.id)).body;
    let (mut before, mut after) = (statement(&old.receipt), statement(&again));
    assert_eq!(after["predicate"]["key"]["id"], status["key"], "the present key signs");
    for statement in [&mut before, &mut after] {
        statement["predicate"]["key"].take();
    }
    assert_eq!(before, after, "it tells of the record that was in force then");
}

fn receipt_path(id: Uuid) -> String {
    format!("/v1/requests/{id}/receipt")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receipt_is_for_those_who_may_see_its_request() {
    let world = World::new().await;
    let stranger = account(&world.node, 1_000_000, 0).await;
    let (_, strange) = issue(&world.node, stranger, None).await;
    let mut tokens = Vec::new();
    for _ in 0..2 {
        let app = application(&world.node, world.account).await;
        tokens.push(issue(&world.node, world.account, Some(app)).await.1);
    }
    let (by_key, by_app) = (Uuid::new_v4(), Uuid::new_v4());
    assert_eq!(world.post(by_key, &world.ask(json!({}))).await.status, 200);
    assert_eq!(world.post_as(&tokens[0], by_app, &world.ask(json!({}))).await.status, 200);
    let access = [
        (by_key, [true, false, false, false]),
        (by_app, [true, true, false, false]),
        (Uuid::new_v4(), [false; 4]),
    ];
    let credentials = [&world.key, &tokens[0], &tokens[1], &strange];
    for (id, allowed) in access {
        for (credential, allowed) in credentials.into_iter().zip(allowed) {
            let answer = world.get_as(credential, &receipt_path(id)).await;
            if allowed {
                assert_eq!(answer.status, 200, "{}", answer.text());
                assert_eq!(answer.header("cache-control"), "private, no-store");
            } else {
                assert_eq!(answer.error(), (404, "request_not_found".into()));
            }
        }
    }
    let path = receipt_path(by_key);
    assert_eq!(world.get("/v1/requests/x/receipt").await.error().0, 400);
    assert_eq!(world.get(&format!("{path}?a=b")).await.error().0, 400);
    let headers = crate::support::bearer(&world.key);
    let deleted = world.call(hyper::Method::DELETE, &path, &headers, bytes::Bytes::new()).await;
    assert_eq!(deleted.error(), (405, "method_not_allowed".into()));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_completed_request_has_a_receipt_and_as_long_as_its_answer() {
    let world = World::with(|setup| {
        setup.step = Duration::from_millis(5);
        setup.failures = vec![(0, ScriptedFailure::Error)];
    })
    .await;
    let [failed, cancelled] = [Uuid::new_v4(), Uuid::new_v4()];
    assert_eq!(world.post(failed, &world.ask(json!({}))).await.status, 500);
    let answer = world.get(&receipt_path(failed)).await;
    assert_eq!(answer.error(), (404, "receipt_not_found".into()));
    assert!(answer.text().contains("did not complete"), "{}", answer.text());
    let long = world.ask(json!({ "ignore_eos": true, "max_tokens": 900 }));
    tokio::join!(world.post(cancelled, &long), async {
        world.reaches(cancelled, &["running"]).await;
        let answer = world.get(&receipt_path(cancelled)).await;
        assert_eq!(answer.error(), (409, "request_in_progress".into()));
        assert_eq!(answer.header("retry-after"), "1");
        world.delete(cancelled).await;
    });
    let answer = world.get(&receipt_path(cancelled)).await;
    assert_eq!(answer.error(), (404, "receipt_not_found".into()));
    // A new attempt of the failed one completes.
    assert_eq!(world.post(failed, &world.ask(json!({}))).await.status, 200);
    let receipt = world.get(&receipt_path(failed)).await;
    let attempt = world.request(failed).await["attempt_id"].clone();
    assert_eq!(statement(&receipt.text())["predicate"]["request"]["attempt_id"], attempt);
    world.close().await;

    let world = World::with(|setup| setup.config.requests.body_retention_hours = 0).await;
    let id = Uuid::new_v4();
    assert_eq!(world.post(id, &world.ask(json!({}))).await.status, 200);
    let answer = world.get(&receipt_path(id)).await;
    assert_eq!(answer.error(), (410, "request_result_expired".into()));
    world.close().await;
}
