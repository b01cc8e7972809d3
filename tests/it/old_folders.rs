//! A data folder of every released format is kept here and must open in every later build: it is
//! audited, answers from what it stored, and goes on. Each lies as `goldens/folders/NAME.tar.gz`
//! with `NAME.json` beside it, which says what was done to it.

use crate::database::{place, shared};
use crate::process::{Folder, MODEL, Reply, Served};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};
use uuid::Uuid;

const TRIAL: u64 = 50_000_000;
/// Answers of the kept folder are replayed for a year, the longest time that may be set.
const CONFIG: &str = "[requests]\nbody_retention_hours = 8_760\ntombstone_days = 3_650\n\n[plans.small]\nmax_concurrent = 2\n";
/// The shortest age at which an answer may be gone.
const REPLAYED_FOR: Duration = Duration::from_hours(8_760);

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/goldens/folders")
}

fn tar(arguments: &[&str]) {
    assert!(Command::new("tar").args(arguments).status().unwrap().success(), "{arguments:?}");
}

/// The time now, in seconds since 1970.
fn seconds_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
}

fn body(model: &str, stream: bool, max_tokens: u32, seed: u32) -> Value {
    json!({ "model": model, "messages": [{ "role": "user", "content": "what does the lamp show" }],
            "stream": stream, "max_tokens": max_tokens, "ignore_eos": true, "seed": seed })
}

/// The request that a client sent, and the answer that it got.
fn exchange(id: &str, body: &Value, reply: &Reply) -> Value {
    assert_eq!(reply.status, 200, "{}", reply.body);
    json!({ "id": id, "body": body, "answer": reply.body })
}

/// Makes the folder of this build's format. Run once, before a change of the format, with the name
/// of the build in `FOLDER`; the two files it writes are then never changed.
#[test]
#[ignore = "writes the kept folder of a new format"]
fn keep_this_folder() {
    let name = std::env::var("FOLDER").expect("FOLDER names the folder to keep");
    let folder = Folder::ready();
    std::fs::write(folder.path().join("cresset.toml"), CONFIG).unwrap();
    let used = folder.customer(TRIAL);
    let other = folder.customer(TRIAL);
    folder.json(&["accounts", "suspend", &other.account]);
    let revoked = folder.json(&["keys", "create", "--account", &used.account]);
    let application =
        folder.json(&["applications", "create", "--account", &used.account, "--name", "desk"]);
    let application = application["id"].as_str().unwrap();
    let token = folder.json(&["applications", "token", "--application", application]);

    let node = folder.serve_failing("store::segment_entries=return(4)");
    let id = || Uuid::new_v4().to_string();
    let done = [false, true].map(|stream| {
        let (id, body) = (id(), body(&node.model, stream, 12, 3));
        exchange(&id, &body, &node.chat(&used.key, &id, &body).finish())
    });
    let (token_id, token_body) = (id(), body(&node.model, false, 5, 4));
    let secret = token["secret"].as_str().unwrap();
    let by_token =
        exchange(&token_id, &token_body, &node.chat(secret, &token_id, &token_body).finish());
    folder.json(&["keys", "revoke", revoked["id"].as_str().unwrap()]);
    let copy = folder.path().join("kept.backup");
    folder.json(&["ledger", "backup", copy.to_str().unwrap()]);
    closes_a_part(folder.path());
    // This one is running when the process is killed.
    let open = id();
    let mut stream = node.chat(&used.key, &open, &body(&node.model, true, 1_500, 5));
    stream.read_until("\"content\":");
    node.kill();

    let facts = json!({
        "account": used.account, "key": used.key, "suspended_key": other.key,
        "revoked_key": revoked["secret"], "token": secret, "done": done, "by_token": by_token,
        "open": open, "trial": TRIAL, "made_at": seconds_now(),
    });
    std::fs::create_dir_all(goldens()).unwrap();
    let file = |extension: &str| goldens().join(format!("{name}.{extension}"));
    std::fs::write(file("json"), serde_json::to_string_pretty(&facts).unwrap() + "\n").unwrap();
    let (archive, root) = (file("tar.gz"), folder.path());
    // The model lies in the folder of its release too.
    let left_out = ["--exclude=./tiny.gguf", "--exclude=./*.sock"];
    let whole = ["-czf", archive.to_str().unwrap(), "-C", root.to_str().unwrap(), "."];
    tar(&[&left_out[..], &whole].concat());
}

/// Waits until the node has closed a part of its journal: it looks once a minute.
fn closes_a_part(folder: &Path) {
    let is_part = |entry: &std::fs::DirEntry| {
        let name = entry.file_name().into_string().unwrap();
        name.starts_with("journal-") && Path::new(&name).extension().is_some_and(|e| e == "redb")
    };
    let closed =
        || std::fs::read_dir(folder).unwrap().any(|entry| is_part(entry.as_ref().unwrap()));
    for _ in 0..240 {
        if closed() {
            return;
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    panic!("no part of the journal was closed");
}

/// Unpacks a kept folder.
fn unpacked(archive: &Path) -> Folder {
    let folder = Folder::empty();
    tar(&["-xzf", archive.to_str().unwrap(), "-C", folder.path().to_str().unwrap()]);
    folder
}

/// Asks again for an answer that the folder holds, and for its receipt.
fn is_replayed(node: &Served, key: &str, exchange: &Value, young: bool) {
    let id = exchange["id"].as_str().unwrap();
    let again = node.chat(key, id, &exchange["body"]).finish();
    if !young {
        assert_eq!(again.status, 410, "{}", again.body);
        return;
    }
    assert_eq!(again.status, 200, "{}", again.body);
    assert_eq!(again.headers["idempotent-replayed"], "true");
    let stream = exchange["body"]["stream"] == true;
    assert!(stream || again.body == exchange["answer"].as_str().unwrap(), "byte for byte");
    let receipt = node.get(key, &format!("/v1/requests/{id}/receipt"));
    assert_eq!(receipt.status, 200, "{}", receipt.body);
}

fn charged(exchange: &Value) -> u64 {
    let answer = exchange["answer"].as_str().unwrap();
    let (_, rest) = answer.rsplit_once("\"chargedUnits\":\"").unwrap();
    rest.split('"').next().unwrap().parse().unwrap()
}

/// The ledger is moved into a `database` before it serves, where there is one.
fn opens_and_serves(archive: &Path, facts: &Value, database: Option<&str>) {
    let text = |name: &str| facts[name].as_str().unwrap();
    let folder = unpacked(archive);
    let age = seconds_now().saturating_sub(facts["made_at"].as_u64().unwrap());
    let young = age < REPLAYED_FOR.as_secs();

    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
    // The folder stood still since it was made.
    let open = folder.json(&["requests", "show", text("open"), "--accept-clock"]);
    let end = (&open["state"], &open["failure_code"], &open["chargedUnits"]);
    assert_eq!(end, (&json!("failed"), &json!("node_restarted"), &json!("0")));
    let exchanges = [&facts["done"][0], &facts["done"][1], &facts["by_token"]];
    let spent: u64 = exchanges.into_iter().map(charged).sum();
    let left = (facts["trial"].as_u64().unwrap() - spent).to_string();
    let credits = folder.json(&["credits", "show", "--account", text("account")]);
    assert_eq!((&credits["trialUnits"], &credits["reservedUnits"]), (&json!(left), &json!("0")));

    if let Some(url) = database {
        let moved = folder.json(&["ledger", "move", "--standbys", "0", "--to", url]);
        assert!(moved["files"].to_string().contains("journal-"), "closed parts, too: {moved}");
    }
    folder.qualify(MODEL);
    let node = folder.serve();
    assert_eq!(node.get(text("revoked_key"), "/v1/me").status, 401);
    assert_eq!(node.get(text("suspended_key"), "/v1/me").status, 401);
    for exchange in facts["done"].as_array().unwrap() {
        is_replayed(&node, text("key"), exchange, young);
    }
    is_replayed(&node, text("token"), &facts["by_token"], young);
    let fresh = body(&node.model, false, 4, 9);
    let reply = node.chat(text("key"), &Uuid::new_v4().to_string(), &fresh).finish();
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(node.terminate().success());
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

/// A folder made from the backup that lies in the kept one.
fn restores(archive: &Path, facts: &Value) {
    let (old, folder) = (unpacked(archive), Folder::initialised());
    let backup = old.path().join("kept.backup");
    folder.json(&["ledger", "restore", backup.to_str().unwrap()]);
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
    let account = facts["account"].as_str().unwrap();
    let rows = folder.json(&["requests", "list", "--account", account, "--accept-clock"]);
    assert_eq!(rows["data"].as_array().unwrap().len(), 3, "{rows}");
}

/// The kept folders, and what was done to each.
fn kept() -> impl Iterator<Item = (PathBuf, Value)> {
    let files = std::fs::read_dir(goldens()).unwrap().map(|entry| entry.unwrap().path());
    let facts = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    facts.map(|path| {
        let facts = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        (path.with_extension("tar.gz"), facts)
    })
}

#[test]
fn folders_of_every_format_open_and_serve() {
    let mut folders = 0;
    for (archive, facts) in kept() {
        restores(&archive, &facts);
        opens_and_serves(&archive, &facts, None);
        folders += 1;
    }
    assert!(folders > 0, "the folder of each released format is kept");
}

#[test]
fn a_journal_with_closed_parts_moves_into_a_database() {
    let Some(server) = shared() else { return };
    let (archive, facts) = kept().next().unwrap();
    opens_and_serves(&archive, &facts, Some(&place(server)));
}
