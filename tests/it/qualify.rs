//! `cresset qualify` from outside: its exit codes, and runs that are killed in the middle.

use crate::process::{Customer, Finished, Folder, MODEL, Served, eventually, request};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The suite runs this context here, tokens.
const CONTEXT: (&str, &str) = ("CRESSET_QUALIFICATION__QUICK_CONTEXT_TOKENS", "128");

/// Whether more is proven while a node serves.
const BACKGROUND: (&str, &str) = ("CRESSET_QUALIFICATION__BACKGROUND", "true");

/// A folder with a release that was never qualified.
fn unproven() -> Folder {
    let folder = Folder::ready();
    std::fs::remove_dir_all(folder.path().join("qualification")).unwrap();
    folder
}

fn qualify(folder: &Folder, more: &[&str], variables: &[(&str, &str)]) -> Finished {
    let mut command = folder.command(&[&["qualify", MODEL, "--json"], more].concat());
    command.env(CONTEXT.0, CONTEXT.1).envs(variables.iter().copied());
    Finished::of(command.output().unwrap())
}

/// Names of the release's files of this kind.
fn files(folder: &Folder, kind: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder.path().join("qualification").join(MODEL));
    let paths = entries.into_iter().flatten().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == kind)).collect()
}

/// Starts a run and kills it once it has done so many checks itself.
fn kill_after(folder: &Folder, checks: usize) {
    let size = || files(folder, "unfinished").first().and_then(|path| path.metadata().ok());
    let before = size().map(|found| found.len());
    let mut command = folder.command(&["qualify", MODEL]);
    command.env(CONTEXT.0, CONTEXT.1).env("FAILPOINTS", "qualification::ended=sleep(150)");
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let mut child = command.spawn().unwrap();
    let deadline = Instant::now() + Duration::from_mins(2);
    let mut writes = std::collections::BTreeSet::new();
    while writes.len() < checks {
        assert!(Instant::now() < deadline && child.try_wait().unwrap().is_none());
        writes.extend(size().map(|found| found.len()).filter(|now| Some(*now) != before));
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

fn taken_over(record: &Value) -> Option<usize> {
    let notes = record["notes"].as_array().unwrap().iter().filter_map(Value::as_str);
    let mut told = notes.filter(|note| note.contains("taken over"));
    told.next().map(|note| note.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn a_killed_run_goes_on_and_leaves_no_half_record() {
    let folder = unproven();
    for checks in [1, 4, 9] {
        kill_after(&folder, checks);
        assert!(files(&folder, "json").is_empty(), "no record of a run that did not end");
        assert_eq!(folder.run(&["qualify", MODEL, "--show"]).code, Some(1));
    }
    let record = qualify(&folder, &[], &[]);
    assert_eq!(record.code, Some(0), "{record:?}");
    // Each run was killed while it had results of its own beside those of the ones before.
    let from_before = taken_over(&record.document()).unwrap();
    assert!(from_before >= 14, "{from_before} of 1 + 4 + 9 results were taken over");
    assert!(files(&folder, "unfinished").is_empty());
    assert_eq!(files(&folder, "json").len(), 1);
    let again = qualify(&folder, &[], &[]);
    assert_eq!(taken_over(&again.document()), None, "a run that ended is not gone on with");
}

#[test]
fn an_interrupted_run_is_gone_on_with_only_if_nothing_changed() {
    let folder = unproven();
    kill_after(&folder, 3);
    let kept = files(&folder, "unfinished").remove(0);
    let content = std::fs::read(&kept).unwrap();
    let fresh = |more: &[&str], variables: &[(&str, &str)]| {
        std::fs::write(&kept, &content).unwrap();
        for record in files(&folder, "json") {
            std::fs::remove_file(record).unwrap();
        }
        let record = qualify(&folder, more, variables);
        assert_eq!(record.code, Some(0), "{record:?}");
        taken_over(&record.document()).is_none()
    };
    assert!(fresh(&["--no-resume"], &[]));
    assert!(fresh(&[], &[("CRESSET_ENGINE__MAX_ROWS", "3")]));
    assert!(fresh(&[], &[("CRESSET_QUALIFICATION__RESUME_HOURS", "0")]));
    assert!(fresh(&[], &[(CONTEXT.0, "160")]));
    assert!(!fresh(&["--no-resume", "--resume"], &[]), "the last one counts");
}

/// The word that `--show` prints for the standing.
fn shown(folder: &Folder, variables: &[(&str, &str)], code: i32) -> String {
    let finished = qualify(folder, &["--show"], variables);
    assert_eq!(finished.code, Some(code), "{finished:?}");
    finished.document()["standing"].as_str().unwrap().to_owned()
}

#[test]
fn the_exit_code_tells_what_a_record_is_worth() {
    let folder = Folder::ready();
    assert_eq!(shown(&folder, &[], 0), "qualified");
    assert_eq!(shown(&folder, &[("CRESSET_ENGINE__MAX_ROWS", "3")], 12), "stale");
    let path = files(&folder, "json").remove(0);
    let mut stored: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    stored["signatures"][0]["sig"] = "AAAA".into();
    std::fs::write(&path, stored.to_string()).unwrap();
    assert_eq!(shown(&folder, &[], 13), "bad_signature");
    std::fs::remove_file(&path).unwrap();
    let none = folder.fails(&["qualify", MODEL, "--show"], 1);
    assert!(none.contains("never qualified"), "{none}");
}

#[test]
fn checks_by_name_run_alone_and_make_no_record() {
    let folder = unproven();
    let one = qualify(&folder, &["--only", "digests,tokenizer_round_trip"], &[]);
    assert_eq!(one.code, Some(0), "{one:?}");
    let document = one.document();
    let ids: Vec<&str> = document["checks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|check| check["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids, ["digests", "tokenizer_round_trip"]);
    assert!(files(&folder, "json").is_empty() && files(&folder, "unfinished").is_empty());
    let without = qualify(&folder, &["--only", "tokenizer_goldens"], &[]);
    assert_eq!(without.code, Some(11), "there are no goldens: {without:?}");
    assert_eq!(qualify(&folder, &["--only", "nothing"], &[]).code, Some(2));
}

/// An engine of another kind in front of a node: it knows neither the node's headers nor its
/// extensions, and writes its streams otherwise. `template` stands before a user's words.
struct OtherEngine {
    url: String,
}

impl OtherEngine {
    fn start(node: &Served, key: &str, template: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (base, model, key) = (node.listen.clone(), node.model.clone(), key.to_owned());
        // The thread ends with the process.
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                serve_one(stream, |body| relay(&base, &model, &key, template, body));
            }
        });
        Self { url }
    }
}

/// Reads one request, and writes what `answer` makes of its body: a status and a body.
fn serve_one(stream: TcpStream, answer: impl FnOnce(Option<Value>) -> (u16, String)) {
    let mut reader = BufReader::new(stream);
    let (mut head, mut length) = (String::new(), 0);
    while !head.ends_with("\r\n\r\n") {
        let before = head.len();
        if reader.read_line(&mut head).unwrap_or(0) == 0 {
            return;
        }
        let line = head[before..].to_lowercase();
        assert!(!line.starts_with("idempotency-key"), "a header of nodes: {line}");
        length = line.strip_prefix("content-length:").map_or(length, |n| n.trim().parse().unwrap());
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let (status, body) = answer(serde_json::from_slice(&body).ok());
    let _ = write!(
        reader.get_mut(),
        "HTTP/1.1 {status} told\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
}

fn relay(base: &str, model: &str, key: &str, template: &str, body: Option<Value>) -> (u16, String) {
    let Some(mut body) = body else {
        return (200, json!({ "object": "list", "data": [{ "id": "other" }] }).to_string());
    };
    assert_eq!(body["model"], "other");
    for name in ["repetition_penalty", "repeat_penalty", "ignore_eos", "top_k"] {
        if !body[name].is_null() {
            let error = json!({ "error": { "message": format!("unknown member {name}") } });
            return (422, error.to_string());
        }
    }
    if body["logprobs"] == true {
        return (501, json!({ "error": { "message": "no log-probabilities" } }).to_string());
    }
    body["model"] = model.into();
    body["repetition_penalty"] = 1.0.into();
    for message in body["messages"].as_array_mut().unwrap() {
        if message["role"] == "user" {
            message["content"] =
                format!("{template}{}", message["content"].as_str().unwrap()).into();
        }
    }
    let (id, session) = (Uuid::new_v4(), Uuid::new_v4());
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n\
         Content-Type: application/json\r\nIdempotency-Key: {id}\r\nX-Service-Session-Id: {session}\r\n"
    );
    let answer = request(base, &head, &body.to_string()).finish();
    (answer.status, answer.body.replace("data: ", "event: chunk\r\ndata:").replace('\n', "\r\n"))
}

fn check_url(folder: &Folder, url: &str, key: &str, more: &[&str]) -> Finished {
    let arguments = [&["qualify", MODEL, "--url", url, "--json"], more].concat();
    let mut command = folder.command(&arguments);
    Finished::of(command.env("ENDPOINT_KEY", key).output().unwrap())
}

fn states(document: &Value, state: &str) -> Vec<String> {
    let checks = document["checks"].as_array().unwrap().iter();
    let found = checks.filter(|check| check["state"] == state);
    found.map(|check| check["id"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn an_endpoint_is_checked_over_http() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1 << 50);
    let node = folder.serve();
    let own = check_url(&folder, &node.listen, &key, &["--key-env", "ENDPOINT_KEY"]);
    assert_eq!(own.code, Some(0), "{own:?}");
    assert_eq!(states(&own.document(), "not_run"), ["http_goldens"]);
    let refused = check_url(&folder, &node.listen, "wrong", &["--key-env", "ENDPOINT_KEY"]);
    assert!(refused.code == Some(1) && refused.stdout.contains("401"), "{refused:?}");
    let unset = check_url(&folder, &node.listen, &key, &["--key-env", "NO_SUCH_KEY"]);
    assert!(unset.code == Some(1) && unset.stdout.contains("NO_SUCH_KEY"), "{unset:?}");

    let right = OtherEngine::start(&node, &key, "");
    let found = check_url(&folder, &right.url, "", &[]);
    assert_eq!(found.code, Some(0), "no red where nothing is wrong: {found:?}");
    let document = found.document();
    assert_eq!(states(&document, "not_run"), ["http_goldens", "http_logprobs"], "{document}");

    let wrong = OtherEngine::start(&node, &key, "[INST] ");
    let found = check_url(&folder, &wrong.url, "", &["--only", "prompt_tokens"]);
    assert_eq!(found.code, Some(10), "{found:?}");
    let check = &found.document()["checks"][0];
    assert!(check["gate"].as_str().unwrap().contains("template"), "{check}");
    assert!(node.terminate().success());
}

#[test]
fn each_instruction_set_is_qualified_for_itself() {
    let folder = Folder::ready();
    let variable = ("CRESSET_ENGINE__INSTRUCTION_SET", "portable");
    let shown = qualify(&folder, &["--show"], &[variable]);
    assert_eq!(shown.code, Some(12), "{shown:?}");
    assert!(shown.document()["why"].as_str().unwrap().contains("serving setting"), "{shown:?}");
    check_only(&folder, variable);
    let unknown = qualify(&folder, &["--show"], &[("CRESSET_ENGINE__INSTRUCTION_SET", "sse9")]);
    assert_eq!(unknown.code, Some(1), "{unknown:?}");
}

/// The checks that know numbers of a reference pass with this setting.
fn check_only(folder: &Folder, setting: (&str, &str)) {
    let checked = qualify(folder, &["--only", "kernels,witness,greedy_goldens"], &[setting]);
    let document = checked.document();
    for check in document["checks"].as_array().unwrap() {
        assert_ne!(check["state"], "failed", "{check}");
    }
}

#[test]
fn activations_of_eight_bits_are_qualified_for_themselves() {
    let folder = Folder::ready();
    let eight = ("CRESSET_ENGINE__ACTIVATIONS", "8");
    let elsewhere = ("CRESSET_ENGINE__INSTRUCTION_SET", "portable");
    let refused = qualify(&folder, &["--show"], &[eight, elsewhere]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.stderr.contains("engine.activations = 8 cannot be used"), "{refused:?}");
    let exact = qualify(&folder, &["--show"], &[eight, ("CRESSET_ENGINE__DEQUANTISE", "true")]);
    assert!(exact.stderr.contains("weights that stay quantised"), "{exact:?}");
    let nine = qualify(&folder, &["--show"], &[("CRESSET_ENGINE__ACTIVATIONS", "9")]);
    assert!(nine.stderr.contains("must be 16 or 8"), "{nine:?}");
    if !["avx512", "avx_vnni", "avx2"].contains(&cresset_node::instruction_set()) {
        return;
    }
    let shown = qualify(&folder, &["--show"], &[eight]);
    assert_eq!(shown.code, Some(12), "{shown:?}");
    assert!(shown.document()["why"].as_str().unwrap().contains("serving setting"), "{shown:?}");
    check_only(&folder, eight);
}

#[test]
fn a_cache_in_fp8_is_for_gpus_and_qualified_for_itself() {
    let folder = Folder::ready();
    let fp8 = ("CRESSET_ENGINE__KV_DTYPE", "fp8");
    let refused = qualify(&folder, &["--show"], &[fp8]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.stderr.contains("engine.kv_dtype = fp8 is for GPUs"), "{refused:?}");
    let gpu = [("EMULATED_GPUS", "1"), ("CRESSET_ENGINE__DEVICE", "cuda:0"), fp8];
    let exact = [&gpu[..], &[("CRESSET_ENGINE__DEQUANTISE", "true")]].concat();
    let refused = qualify(&folder, &["--show"], &exact);
    assert!(refused.stderr.contains("engine.dequantise computes in f32"), "{refused:?}");
    let shown = qualify(&folder, &["--show"], &gpu);
    assert_eq!(shown.code, Some(12), "{shown:?}");
}

/// The priorities of all threads of the full suites that run on a folder.
fn suites_beside(folder: &Folder) -> Vec<String> {
    let data = folder.path().to_str().unwrap();
    let mut found = Vec::new();
    for process in std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path()) {
        let command = std::fs::read_to_string(process.join("cmdline")).unwrap_or_default();
        if !(command.contains(data) && command.contains("--low-priority")) {
            continue;
        }
        for thread in std::fs::read_dir(process.join("task")).into_iter().flatten().flatten() {
            let line = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            // The name of the thread may have spaces; the priority is the 17th field after it.
            let fields = line.rsplit_once(") ").map(|(_, fields)| fields.split(' ').nth(16));
            found.extend(fields.flatten().map(str::to_owned));
        }
    }
    found
}

/// Another setting makes a record stale, as another build does.
#[test]
fn an_upgraded_node_serves_by_the_quick_suite_while_the_full_one_runs() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1_000_000);
    let upgraded = |arguments: &[&str]| {
        let mut command = folder.command(arguments);
        command.env(CONTEXT.0, CONTEXT.1).env("CRESSET_ENGINE__MAX_ROWS", "7");
        command.env(BACKGROUND.0, "false");
        command
    };
    let unserved = |arguments: &[&str]| Served::start(upgraded(arguments)).unserved();
    let serve = ["serve", "--json", "--listen", "127.0.0.1:0", "--operator", "127.0.0.1:0"];
    assert!(unserved(&serve).contains("another serving setting"));
    let requalify = [&serve[..], &["--requalify"]].concat();
    // One without reference outputs needs its operator anew.
    assert!(unserved(&requalify).contains("models accept"));
    let accept = ["models", "accept", MODEL, "--reason", "it is a test's"];
    assert!(upgraded(&accept).output().unwrap().status.success());

    let node = Served::start(upgraded(&requalify));
    let model = &node.get(&key, "/v1/models").json()["data"][0];
    let proof = (&model["evidence"]["suite"], &model["limits"]["qualified_context_tokens"]);
    assert_eq!(proof, (&json!("quick"), &json!(128)));
    eventually("the full suite has ended a check", || {
        files(&folder, "unfinished").iter().any(|path| path.ends_with("full.unfinished"))
    });
    let priorities = suites_beside(&folder);
    assert!(!priorities.is_empty() && priorities.iter().all(|nice| nice == "19"), "{priorities:?}");
    let body = json!({ "model": node.model, "max_tokens": 2,
                       "messages": [{ "role": "user", "content": "go on" }] });
    let reply = node.chat(&key, &Uuid::new_v4().to_string(), &body).finish();
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(node.terminate().success());
    assert_eq!(suites_beside(&folder), [""; 0], "it ends with the node");
}

/// A clock that is so many days ahead, and proofs that do not wait for the tests beside this one.
fn ahead(days: u64) -> String {
    format!("clock::hours_ahead=return({});prover::priority=return", days * 24)
}

/// A node with such a clock.
fn serve_ahead(folder: &Folder, days: u64, background: bool) -> Served {
    let mut command = folder.serve_command(&["--accept-clock"]);
    command
        .env("FAILPOINTS", ahead(days))
        .env(BACKGROUND.0, background.to_string())
        .env(CONTEXT.0, CONTEXT.1);
    Served::start(command)
}

#[test]
fn a_context_rises_and_a_record_is_renewed_while_a_node_serves() {
    let folder = unproven();
    let record = qualify(&folder, &[], &[]).document();
    assert_eq!(record["qualified_context_tokens"], 128, "{record}");
    folder.json(&["models", "accept", MODEL, "--reason", "it is a test's"]);
    let Customer { key, .. } = folder.customer(1_000_000_000);
    let long = |model: &str| {
        json!({ "model": model, "max_tokens": 2,
                "messages": [{ "role": "user", "content": "a".repeat(300) }] })
    };
    let ask = |node: &Served| {
        node.chat(&key, &Uuid::new_v4().to_string(), &long(&node.model)).finish().status
    };
    let node = serve_ahead(&folder, 0, false);
    let model = || node.get(&key, "/v1/models").json()["data"][0].clone();
    assert_eq!((ask(&node), &model()["evidence"]["context"]), (400, &json!("partial")));
    assert!(node.terminate().success());

    let node = serve_ahead(&folder, 0, true);
    let model = || node.get(&key, "/v1/models").json()["data"][0].clone();
    eventually("the context is proven", || model()["evidence"]["context"] == "complete");
    let limits = &model()["limits"];
    let own = &limits["model_context_tokens"];
    assert_eq!((&limits["qualified_context_tokens"], ask(&node)), (own, 200), "{limits}");
    let listed = folder.json(&["models", "list"])["models"].clone();
    let listed = listed.as_array().unwrap().iter().find(|row| row["name"] == MODEL).unwrap();
    assert_eq!(&listed["qualified_context_tokens"], own, "{listed}");
    assert!(node.terminate().success());
    assert!(!files(&folder, "context").is_empty());

    let ends = |status: &Value| status["models"][0]["proof_ends_at"].as_u64().unwrap();
    let node = serve_ahead(&folder, 80, false);
    let status = folder.json(&["status"]);
    let shown = folder.run_failing(&ahead(80), &["status"]).stdout;
    assert!(shown.contains("the proof of tiny ends at"), "{shown}");
    assert!(node.terminate().success());
    let node = serve_ahead(&folder, 80, true);
    eventually("the record is renewed", || ends(&folder.json(&["status"])) > ends(&status));
    assert_eq!(&model_of(&folder)["qualified_context_tokens"], own);
    assert!(node.terminate().success());

    // Nobody was there when it ended.
    let node = serve_ahead(&folder, 300, false);
    assert_eq!(model_of(&folder)["qualified_context_tokens"], 128);
    assert!(node.terminate().success());
}

fn model_of(folder: &Folder) -> Value {
    folder.json(&["status"])["models"][0].clone()
}
