//! Ends or breaks the real binary at every named place between a request's admission and its end,
//! and during recovery, archiving and backups. After the next start the audit is clean, and the
//! request is in the state that the rules demand.

use crate::process::{Customer, Folder, Served, eventually};
use crate::volley::{Call, volley};
use serde_json::{Value, json};
use uuid::Uuid;

const TRIAL: u64 = 1_000_000;

/// The state of a request after the restart.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Left {
    /// The ledger has no record of it.
    Nothing,
    /// It failed because of the restart and was not charged.
    Failed,
    /// It was completed and charged, although its client may not have been told.
    Completed,
}

/// A crash while the request certainly runs: its admission and its start had time to become
/// durable.
const IN_THE_MIDDLE: &str = "engine::step=sleep(100);lifecycle::chunk=2*off->return";

/// Commits of the ledger in the life of one request that runs alone: admission, start, settlement.
const CRASHES: &[(&str, Left)] = &[
    ("lifecycle::accepted=return", Left::Nothing),
    ("store::before_commit=return", Left::Nothing),
    ("store::after_commit=return", Left::Failed),
    // If the writer itself panics, the node ends, because it cannot work without the writer.
    ("store::acknowledge=panic", Left::Failed),
    ("lifecycle::admitted=return", Left::Failed),
    ("store::before_commit=1*off->return", Left::Failed),
    ("store::after_commit=1*off->return", Left::Failed),
    ("engine::step=sleep(100);engine::crash=2*off->return", Left::Failed),
    ("lifecycle::chunk=return", Left::Failed),
    ("lifecycle::chunk=3*off->return", Left::Failed),
    ("store::body_stored=return", Left::Failed),
    ("store::before_commit=2*off->return", Left::Failed),
    ("store::after_commit=2*off->return", Left::Completed),
    ("lifecycle::settled=return", Left::Completed),
];

fn ask(model: &str, stream: bool) -> Value {
    json!({ "model": model, "messages": [{ "role": "user", "content": "tell me everything" }],
            "stream": stream, "max_tokens": 24, "ignore_eos": true, "seed": 1 })
}

#[test]
fn a_crash_anywhere_leaves_what_the_rules_say() {
    let template = Folder::ready();
    let Customer { account, key, .. } = template.customer(TRIAL);
    for (points, left) in CRASHES {
        for stream in [false, true] {
            let folder = template.duplicate();
            let what = format!("{points}, stream {stream}");
            let mut node = folder.serve_failing(points);
            let (id, body) = (Uuid::new_v4().to_string(), ask(&node.model, stream));
            assert_eq!(
                Call::chat(&node.listen, &key, &id, &body).go().map(|reply| reply.body),
                None,
                "{what}"
            );
            assert!(!node.wait().success(), "{what}");

            let node = folder.serve();
            check_left(&node, &key, &id, *left, &what);
            let again = Call::chat(&node.listen, &key, &id, &body).go().unwrap();
            assert_eq!(again.status, 200, "{what}: {}", again.body);
            let replayed = again.headers.contains_key("idempotent-replayed");
            assert_eq!(replayed, *left == Left::Completed, "{what}");
            let request = show(&node, &key, &id);
            assert_eq!(
                (&request["state"], &request["attempt_count"]),
                (&json!("completed"), &json!(1 + u8::from(*left == Left::Failed))),
                "{what}"
            );
            assert_eq!(request["retry_of"].is_null(), *left != Left::Failed, "{what}");
            check_books(&folder, &account, &[&request], &what);
            assert!(node.terminate().success(), "{what}");
        }
    }
}

fn show(node: &Served, key: &str, id: &str) -> Value {
    node.get(key, &format!("/v1/requests/{id}")).json()
}

fn check_left(node: &Served, key: &str, id: &str, left: Left, what: &str) {
    let request = show(node, key, id);
    let seen = (&request["state"], &request["failure_code"], &request["reservedUnits"]);
    match left {
        Left::Nothing => {
            assert_eq!(request["error"]["code"], "request_not_found", "{what}: {request}");
        }
        Left::Failed => {
            assert_eq!(
                seen,
                (&json!("failed"), &json!("node_restarted"), &json!("0")),
                "{what}: {request}"
            );
            assert_eq!(request["chargedUnits"], "0", "{what}");
        }
        Left::Completed => {
            assert_eq!(seen, (&json!("completed"), &Value::Null, &json!("0")), "{what}: {request}");
            assert_ne!(request["chargedUnits"], "0", "{what}");
        }
    }
}

/// The balance is lower by the cost of these requests, nothing is reserved, and the audit is clean.
fn check_books(folder: &Folder, account: &str, requests: &[&Value], what: &str) {
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true, "{what}");
    let charged: u64 = requests.iter().map(|request| units(&request["chargedUnits"])).sum();
    let credits = folder.json(&["credits", "show", "--account", account]);
    assert_eq!(
        (units(&credits["trialUnits"]), units(&credits["reservedUnits"])),
        (TRIAL - charged, 0),
        "{what}"
    );
}

fn units(value: &Value) -> u64 {
    value.as_str().unwrap_or_else(|| panic!("{value}")).parse().unwrap()
}

/// A folder whose node was killed with one request running.
fn killed_in_the_middle(template: &Folder, key: &str) -> (Folder, String) {
    let folder = template.duplicate();
    let mut node = folder.serve_failing(IN_THE_MIDDLE);
    let id = Uuid::new_v4().to_string();
    assert!(Call::chat(&node.listen, key, &id, &ask(&node.model, true)).go().is_none());
    node.wait();
    (folder, id)
}

#[test]
fn a_recovery_that_crashes_again_and_again_converges() {
    let template = Folder::ready();
    let Customer { account, key, .. } = template.customer(TRIAL);
    for point in [
        "store::opened",
        "store::claimed",
        "store::before_commit",
        "store::after_commit",
        "store::recovered",
    ] {
        let (folder, id) = killed_in_the_middle(&template, &key);
        for _ in 0..5 {
            let crashed = folder.run_failing(&format!("{point}=return"), &["accounts", "list"]);
            // Once the release is durable, a later recovery has nothing to commit.
            let converged = point == "store::after_commit" && crashed.code == Some(0);
            assert!(converged || crashed.code.is_none(), "{point}: {crashed:?}");
        }
        let request = folder.json(&["requests", "show", &id]);
        let end = (&request["state"], &request["failure_code"], &request["attempt_count"]);
        assert_eq!(end, (&json!("failed"), &json!("node_restarted"), &json!(1)), "{point}");
        check_books(&folder, &account, &[&request], point);
    }
}

#[test]
fn an_input_that_was_running_in_two_crashes_is_not_run_again() {
    let template = Folder::ready();
    let Customer { key, .. } = template.customer(TRIAL);
    let (folder, id) = killed_in_the_middle(&template, &key);
    // The id differs, because crashes are counted by input.
    let mut node = folder.serve_failing(IN_THE_MIDDLE);
    let body = ask(&node.model, true);
    assert!(Call::chat(&node.listen, &key, &Uuid::new_v4().to_string(), &body).go().is_none());
    node.wait();
    // The engine must not get the input, which would crash the node again.
    let node = folder.serve_failing("engine::crash=return");
    for id in [&id, &Uuid::new_v4().to_string()] {
        let refused = Call::chat(&node.listen, &key, id, &body).go().expect("the node lives");
        assert_eq!(
            (refused.status, refused.headers["x-should-retry"].as_str()),
            (500, "false"),
            "{}",
            refused.body
        );
    }
    node.kill();
    let shown = folder.json(&["requests", "show", &id]);
    assert_eq!(shown["input_crashes"], 2, "{shown}");
    assert!(shown["input_blocked_until_at"].is_u64(), "{shown}");
    // After a day the input is a new one, and so it is once an operator says so.
    for (hours, status) in [(23, 500), (25, 200)] {
        let later = folder.duplicate();
        let node = later.serve_failing(&format!("clock::hours_ahead=return({hours})"));
        let id = Uuid::new_v4().to_string();
        let found = Call::chat(&node.listen, &key, &id, &body).go().unwrap();
        assert_eq!(found.status, status, "{hours} h later: {}", found.body);
    }
    let node = folder.serve();
    let cleared = folder.json(&["requests", "unblock", &id]);
    assert_eq!(
        (&cleared["crashes_forgotten"], &cleared["input_crashes"]),
        (&json!(true), &json!(0))
    );
    assert_eq!(folder.json(&["requests", "unblock", &id])["crashes_forgotten"], false);
    assert_eq!(Call::chat(&node.listen, &key, &id, &body).go().unwrap().status, 200);
    let other =
        Call::chat(&node.listen, &key, &Uuid::new_v4().to_string(), &ask(&node.model, false))
            .go()
            .unwrap();
    assert_eq!(other.status, 200, "another input runs: {}", other.body);
}

#[test]
fn a_request_is_found_once_whatever_happens_to_its_archiving() {
    let template = Folder::ready();
    let Customer { account, key, .. } = template.customer(TRIAL);
    let node = template.serve();
    let (id, body) = (Uuid::new_v4().to_string(), ask(&node.model, false));
    assert_eq!(Call::chat(&node.listen, &key, &id, &body).go().unwrap().status, 200);
    let request = show(&node, &key, &id);
    assert!(node.terminate().success());
    for point in ["store::before_archive", "store::archived", "store::forgotten"] {
        let folder = template.duplicate();
        let later = "clock::hours_ahead=return(25)";
        let crashed = folder.run_failing(
            &format!("{later};{point}=return"),
            &["serve", "--listen", "127.0.0.1:0", "--operator", "127.0.0.1:0"],
        );
        assert_eq!(crashed.code, None, "{point}: {crashed:?}");
        let node = folder.serve_failing(later);
        assert_eq!(show(&node, &key, &id), request, "{point}");
        let list = folder.json(&["requests", "list", "--account", &account]);
        assert_eq!(list["data"].as_array().unwrap().len(), 1, "{point}");
        let again = Call::chat(&node.listen, &key, &id, &body).go().unwrap();
        assert_eq!(
            (again.status, &again.json()["error"]["code"]),
            (410, &json!("request_result_expired")),
            "{point}"
        );
        check_books(&folder, &account, &[&request], point);
        assert!(node.terminate().success());
        // After the days of the tombstone, the id is free.
        let mut command = folder.serve_command(&["--accept-clock"]);
        command.env("FAILPOINTS", "clock::hours_ahead=return(800)");
        let node = Served::start(command);
        eventually("the tombstone goes", || {
            node.get(&key, &format!("/v1/requests/{id}")).status == 404
        });
        let anew = Call::chat(&node.listen, &key, &id, &ask(&node.model, true)).go().unwrap();
        assert_eq!((anew.status, anew.headers.get("idempotent-replayed")), (200, None), "{point}");
        assert_eq!(folder.json(&["ledger", "audit"])["ok"], true, "{point}");
    }
}

#[test]
fn a_backup_that_crashes_leaves_nothing_under_its_name() {
    let folder = Folder::ready();
    folder.customer(TRIAL);
    let target = folder.path().join("copy.backup");
    let backup = ["ledger", "backup", target.to_str().unwrap()];
    for point in ["store::copied", "store::proven"] {
        let crashed = folder.run_failing(&format!("{point}=return"), &backup);
        assert_eq!((crashed.code, target.exists()), (None, false), "{point}: {crashed:?}");
    }
    folder.json(&backup);
    assert!(target.exists());
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn an_attempt_that_a_stop_cut_off_is_none_of_the_three() {
    let folder = Folder::ready();
    std::fs::write(folder.path().join("cresset.toml"), "[requests]\ndrain_grace_seconds = 1\n")
        .unwrap();
    let Customer { account, key, .. } = folder.customer(TRIAL);
    let id = Uuid::new_v4().to_string();
    for attempt in 1..=4 {
        let mut node = folder.serve_failing("engine::step=sleep(100)");
        let mut stream = node.chat(&key, &id, &ask(&node.model, true));
        stream.read_until("\"content\":\"");
        node.signal("TERM");
        let rest = stream.rest();
        assert!(rest.contains("\"draining\"") && rest.contains("data: [DONE]\n\n"), "{rest}");
        assert!(node.wait().success());
        let request = folder.json(&["requests", "show", &id]);
        let seen = (&request["failure_code"], &request["attempt_count"], &request["chargedUnits"]);
        assert_eq!(seen, (&json!("draining"), &json!(attempt), &json!("0")));
    }
    let node = folder.serve();
    let body = ask(&node.model, true);
    assert_eq!(Call::chat(&node.listen, &key, &id, &body).go().unwrap().status, 200);
    let request = show(&node, &key, &id);
    assert_eq!((&request["state"], &request["attempt_count"]), (&json!("completed"), &json!(5)));
    check_books(&folder, &account, &[&request], "after four stops");
}

#[test]
fn a_stop_under_load_leaves_no_reservation() {
    let folder = Folder::ready();
    std::fs::write(folder.path().join("cresset.toml"), "[requests]\ndrain_grace_seconds = 1\n")
        .unwrap();
    let Customer { account, key, .. } = folder.customer(TRIAL);
    let mut node = folder.serve_failing("engine::step=sleep(10)");
    let ids: Vec<String> = (0..48).map(|_| Uuid::new_v4().to_string()).collect();
    let calls: Vec<Call> = ids
        .iter()
        .enumerate()
        .map(|(i, id)| {
            let mut body = ask(&node.model, i % 2 == 0);
            // Of the requests, some end before the stop, some within its grace, some never.
            body["max_tokens"] = json!([4, 40, 1_500][i % 3]);
            Call::chat(&node.listen, &key, id, &body)
        })
        .collect();
    let replies = std::thread::scope(|scope| {
        let volley = scope.spawn(|| volley(calls));
        let state = |id: &str| show(&node, &key, id)["state"].clone();
        eventually("a short one has ended and a long one runs", || {
            state(&ids[0]) == "completed" && state(&ids[2]) == "running"
        });
        node.signal("TERM");
        volley.join().unwrap()
    });
    assert!(node.wait().success());
    let records = folder.json(&["requests", "list", "--account", &account]);
    let (mut charged, mut ends) = (0, std::collections::BTreeSet::new());
    for (id, reply) in ids.iter().zip(replies) {
        let reply = reply.expect("a whole answer");
        let Some(request) = records["data"].as_array().unwrap().iter().find(|row| row["id"] == *id)
        else {
            assert_eq!((reply.status, &reply.json()["error"]["code"]), (503, &json!("draining")));
            continue;
        };
        charged += units(&request["chargedUnits"]);
        ends.insert(request["state"].as_str().unwrap().to_owned());
        let completed = request["state"] == "completed";
        assert!(completed || request["failure_code"] == "draining", "{request}");
        assert_eq!(
            completed,
            reply.status == 200 && !reply.body.contains("\"error\":{"),
            "{request}: {}",
            reply.body
        );
    }
    assert_eq!(
        Vec::from_iter(ends),
        ["completed", "failed"],
        "some ended in time and some did not"
    );
    check_books(
        &folder,
        &account,
        &[&json!({ "chargedUnits": charged.to_string() })],
        "after a stop",
    );
}
