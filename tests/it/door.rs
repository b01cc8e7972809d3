//! What is served is what was proven: a model whose files, record or manifest change while a node
//! runs is not offered any more, and no request is charged for an answer of other files.

use crate::process::{Customer, Folder, Reply, Served, eventually, get};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use uuid::Uuid;

fn weights(folder: &Folder, name: &str) -> PathBuf {
    let place = folder.path().join("models").join(name);
    let files = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().path());
    files.into_iter().find(|path| path.extension().is_some_and(|ext| ext == "gguf")).unwrap()
}

/// A node that reviews its models every second, and whose steps take 10 ms.
fn watchful(folder: &Folder) -> Served {
    let mut command = folder.serve_command(&[]);
    command.env("CRESSET_QUALIFICATION__REVIEW_SECONDS", "1");
    command.env("FAILPOINTS", "engine::step=sleep(10)");
    Served::start(command)
}

fn listed(node: &Served, key: &str) -> usize {
    node.get(key, "/v1/models").json()["data"].as_array().unwrap().len()
}

fn body(model: &str, extra: &Value) -> Value {
    let messages = json!([{ "role": "user", "content": "go on" }]);
    let mut body = json!({ "model": model, "messages": messages, "ignore_eos": true });
    for (name, value) in extra.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn ask(node: &Served, key: &str, model: &str) -> Reply {
    let id = Uuid::new_v4().to_string();
    node.chat(key, &id, &body(model, &json!({ "max_tokens": 2 }))).finish()
}

fn error(reply: &Reply) -> (u16, String) {
    (reply.status, reply.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
}

fn trial(node: &Served, key: &str) -> String {
    node.get(key, "/v1/credits").json()["trialUnits"].as_str().unwrap().to_owned()
}

/// Changes one byte in the middle of a file, in place, and keeps its size and time of change.
fn spoil(path: &Path) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
    File::options().write(true).open(path).unwrap().set_modified(modified).unwrap();
}

type Attack = fn(&Path);

/// Each makes another file of a model's weights.
const ATTACKS: [(&str, Attack); 5] = [
    ("one byte, size and time kept", spoil),
    ("cut short while it is loaded", |path| {
        let bytes = fs::metadata(path).unwrap().len();
        File::options().write(true).open(path).unwrap().set_len(bytes - 1).unwrap();
    }),
    ("another file in its place", |path| {
        let other = path.with_extension("other");
        fs::copy(path, &other).unwrap();
        spoil(&other);
        fs::rename(other, path).unwrap();
    }),
    ("a symbolic link to another file", |path| {
        let other = path.parent().unwrap().join("other");
        fs::rename(path, &other).unwrap();
        spoil(&other);
        std::os::unix::fs::symlink(other, path).unwrap();
    }),
    ("a hard link to another file", |path| {
        let other = path.parent().unwrap().join("linked");
        fs::copy(path, &other).unwrap();
        spoil(&other);
        fs::remove_file(path).unwrap();
        fs::hard_link(other, path).unwrap();
    }),
];

#[test]
fn files_that_change_under_a_running_node_end_its_requests_uncharged() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1_000_000);
    let node = watchful(&folder);
    let path = weights(&folder, "tiny");
    let sound = fs::read(&path).unwrap();
    let replayed = Uuid::new_v4().to_string();
    let first = body(&node.model, &json!({ "max_tokens": 2 }));
    let answer = node.chat(&key, &replayed, &first).finish().body;
    for (attack, change) in ATTACKS {
        let before = trial(&node, &key);
        let id = Uuid::new_v4().to_string();
        let long = body(&node.model, &json!({ "max_tokens": 1500, "stream": true }));
        let mut running = node.chat(&key, &id, &long);
        running.read_until("content");
        change(&path);
        eventually("the model is not offered", || listed(&node, &key) == 0);
        assert_eq!(error(&ask(&node, &key, &node.model)), (404, "model_not_found".into()));
        let rest = running.rest();
        assert!(rest.contains("\"code\":\"generation_failed\""), "{attack}: {rest}");
        let request = node.get(&key, &format!("/v1/requests/{id}")).json();
        assert_eq!((&request["state"], &request["chargedUnits"]), (&json!("failed"), &json!("0")));
        assert_eq!(trial(&node, &key), before, "{attack}");
        let model = &folder.json(&["status"])["models"][0];
        let why = model["failure"].as_str().unwrap();
        assert_eq!((&model["name"], &model["alive"]), (&json!("tiny"), &json!(false)), "{attack}");
        assert!(why.contains(".gguf") && why.contains("again"), "{attack}: {why}");
        assert_eq!(get(&node.operator, "/readyz").status, 503);
        assert_eq!(node.chat(&key, &replayed, &first).finish().body, answer, "a replay");
        fs::remove_file(&path).unwrap();
        fs::write(&path, &sound).unwrap();
        eventually("the model is offered again", || listed(&node, &key) == 1);
        eventually("it answers", || ask(&node, &key, &node.model).status == 200);
    }
    assert!(node.log().contains("its files changed"));
    assert!(node.terminate().success());
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

/// A model that was unloaded was loaded again without any check.
#[test]
fn files_that_changed_while_a_model_was_unloaded_are_found_by_its_load() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1_000_000);
    let file = folder.path().join("second.gguf");
    cresset_models::testing::tiny_llama_gguf(&file, 8).unwrap();
    let add = ["models", "add", "--path", file.to_str().unwrap(), "--name", "second"];
    let second = folder.json(&add)["id"].as_str().unwrap().to_owned();
    folder.qualify("second");
    // Room for one of the two, and no review before the test has ended.
    let mut command = folder.serve_command(&[]);
    command.env("CRESSET_ENGINE__MEMORY_MIB", "1500");
    command.env("CRESSET_QUALIFICATION__REVIEW_SECONDS", "86400");
    let node = Served::start(command);
    let tiny = folder.json(&["models", "show", "tiny"])["id"].as_str().unwrap().to_owned();
    assert_eq!(ask(&node, &key, &tiny).status, 200);
    assert_eq!(ask(&node, &key, &second).status, 200, "it takes the place of the first");
    spoil(&weights(&folder, "tiny"));
    assert_eq!(listed(&node, &key), 2, "nobody has looked yet");
    let before = trial(&node, &key);
    assert_eq!(error(&ask(&node, &key, &tiny)), (500, "generation_failed".into()));
    assert_eq!((listed(&node, &key), trial(&node, &key)), (1, before));
    assert_eq!(error(&ask(&node, &key, &tiny)), (404, "model_not_found".into()));
    assert_eq!(ask(&node, &key, &second).status, 200, "the other one is served on");
    let models = folder.json(&["status"])["models"].clone();
    let row = models.as_array().unwrap().iter().find(|row| row["name"] == "tiny").unwrap();
    assert!(row["failure"].as_str().unwrap().contains("BLAKE3"), "{row}");
    // A reload reads the files again, and so it sees that they are right again.
    spoil(&weights(&folder, "tiny"));
    folder.json(&["reload"]);
    assert_eq!(listed(&node, &key), 2);
    assert_eq!(ask(&node, &key, &tiny).status, 200);
    assert!(node.terminate().success());
}

#[test]
fn a_record_or_a_manifest_that_changes_takes_the_model_off_the_list_and_ends_nothing() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1_000_000);
    let node = watchful(&folder);
    let records = folder.path().join("qualification/tiny");
    let files: Vec<PathBuf> =
        fs::read_dir(records).unwrap().map(|entry| entry.unwrap().path()).collect();
    let ending = |kind: &str| {
        files.iter().find(|path| path.extension().is_some_and(|ext| ext == kind)).unwrap()
    };
    let (record, acceptance) = (ending("json"), ending("acceptance"));
    let manifest = folder.path().join("models/tiny/manifest.toml");
    let edits: [(&PathBuf, &str, &str, &str); 4] = [
        (acceptance, "\"payload\": \"", "\"payload\": \"e30", "cresset models accept"),
        (record, "\"payload\": \"", "\"payload\": \"e30", "counts for nothing"),
        (&manifest, "temperature = 1.0", "temperature = 0.5", "another release terms"),
        (&manifest, "id = ", "? = ", "cannot be read"),
    ];
    for (path, from, to, reason) in edits {
        let sound = fs::read_to_string(path).unwrap();
        assert!(sound.contains(from), "{sound}");
        let long = body(&node.model, &json!({ "max_tokens": 300, "stream": true }));
        let mut running = node.chat(&key, &Uuid::new_v4().to_string(), &long);
        running.read_until("content");
        fs::write(path, sound.replacen(from, to, 1)).unwrap();
        eventually("the model is not offered", || listed(&node, &key) == 0);
        assert_eq!(error(&ask(&node, &key, &node.model)), (404, "model_not_found".into()));
        let status = folder.json(&["status"]);
        let why = status["models"][0]["failure"].as_str().unwrap();
        assert!(why.contains(reason), "{why}");
        let rest = running.rest();
        assert!(rest.contains("finish_reason\":\"length"), "what runs ends as usual: {rest}");
        fs::write(path, sound).unwrap();
        eventually("the model is offered again", || listed(&node, &key) == 1);
    }
    assert!(node.terminate().success());
}

#[test]
fn a_model_without_a_reference_is_served_when_the_operator_says_so_and_as_long() {
    let folder = Folder::initialised();
    let Customer { key, .. } = folder.customer(1_000_000);
    let file = folder.path().join("own.gguf");
    cresset_models::testing::tiny_llama_gguf(&file, 8).unwrap();
    folder.json(&["models", "add", "--path", file.to_str().unwrap(), "--name", "own"]);
    let said = folder.run(&["qualify", "own"]).stdout;
    let last = said.trim_end().lines().last().unwrap();
    assert!(last.contains("cresset models accept own --reason"), "{said}");
    assert!(said.contains("own is qualified, grade self"), "{said}");
    let refused = folder.unserved();
    assert!(refused.contains("cresset models accept own"), "{refused}");
    assert_eq!(folder.run(&["models", "accept", "own"]).code, Some(2), "it asks for a reason");
    let accepted = folder.json(&["models", "accept", "own", "--reason", "tried by hand"]);
    assert_eq!(
        (&accepted["accepted"], &accepted["reason"]),
        (&json!(true), &json!("tried by hand"))
    );
    let row = folder.json(&["models", "list"])["models"].clone();
    let row = row.as_array().unwrap().iter().find(|row| row["name"] == "own").unwrap().clone();
    assert_eq!((&row["grade"], &row["claimed_by_file"]), (&json!("self"), &json!(true)));
    assert_eq!(row["accepted_because"], "tried by hand");
    let node = folder.serve();
    let model = node.get(&key, "/v1/models").json()["data"][0].clone();
    let evidence = &model["evidence"];
    assert_eq!((&evidence["grade"], &evidence["suite"]), (&json!("self"), &json!("quick")));
    assert_eq!(evidence["record"], row["record_id"]);
    assert_eq!(evidence["key"].as_str().unwrap().len(), 64);
    assert_eq!(
        (&model["attribution"], &model["publisher"]),
        (&json!("claimed_by_file"), &json!("operator"))
    );
    assert_eq!(folder.json(&["status"])["models"][0]["grade"], "self");
    let revoked = folder.json(&["models", "accept", "own", "--revoke"]);
    assert_eq!((&revoked["accepted"], &revoked["served"]), (&json!(false), &json!(false)));
    assert_eq!(listed(&node, &key), 0);
    assert_eq!(error(&ask(&node, &key, &node.model)), (404, "model_not_found".into()));
    assert!(folder.fails(&["models", "accept", "own", "--revoke"], 1).contains("not accepted"));
    let shown = folder.run(&["models", "show", "own"]).stdout;
    assert!(shown.contains("tried by hand") && shown.contains("claimed by the file"), "{shown}");
    let again = folder.json(&["models", "accept", "own", "--reason", "once more"]);
    assert_eq!((&again["served"], listed(&node, &key)), (&json!(true), 1));
    assert!(node.terminate().success());
    let mut stricter = folder.serve_command(&[]);
    stricter.env("CRESSET_QUALIFICATION__REQUIRE", "like");
    let refused = crate::process::Served::start(stricter).unserved();
    assert!(refused.contains("qualification.require"), "{refused}");
}

#[test]
fn a_small_cache_shortens_what_is_listed_and_what_is_listed_is_served() {
    let folder = Folder::ready();
    let small = [("CRESSET_ENGINE__KV_MIB", "1"), ("CRESSET_ENGINE__MAX_BATCHED_TOKENS", "256")];
    let run = |arguments: &[&str]| {
        let mut command = folder.command(arguments);
        command.envs(small);
        crate::process::Finished::of(command.output().unwrap())
    };
    assert_eq!(run(&["qualify", "tiny"]).code, Some(0));
    let accept = ["models", "accept", "tiny", "--reason", "it is a test's"];
    assert_eq!(run(&accept).code, Some(0));
    let Customer { key, .. } = folder.customer(1_000_000);
    let mut command = folder.serve_command(&[]);
    command.envs(small);
    let node = Served::start(command);
    let limits = node.get(&key, "/v1/models").json()["data"][0]["limits"].clone();
    let context = limits["context_tokens"].as_u64().unwrap();
    assert!(context <= 2048, "{limits}");
    let prompt = ask(&node, &key, &node.model).json()["usage"]["prompt_tokens"].as_u64().unwrap();
    let whole = body(&node.model, &json!({ "max_tokens": context - prompt }));
    let answer = node.chat(&key, &Uuid::new_v4().to_string(), &whole).finish();
    assert_eq!(answer.status, 200, "{}", answer.body);
    let over = body(&node.model, &json!({ "max_tokens": context - prompt + 1 }));
    let refused = node.chat(&key, &Uuid::new_v4().to_string(), &over).finish();
    assert_eq!(error(&refused), (400, "context_length_exceeded".into()));
    assert!(node.terminate().success());
}
