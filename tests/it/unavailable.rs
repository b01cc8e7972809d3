//! Runs the real binary while its ledger cannot be reached: no client is let in, none is told that
//! its credential is invalid, nothing is lost, and the same request id later runs exactly once.

use crate::process::{Customer, Folder, Reply, Served, eventually};
use crate::volley::Call;
use serde_json::{Value, json};
use uuid::Uuid;

const TRIAL: u64 = 1_000_000;

fn ask(node: &Served) -> Value {
    json!({ "model": node.model, "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 8, "ignore_eos": true })
}

fn assert_unavailable(reply: &Reply, what: &str) {
    assert_eq!(
        (reply.status, &reply.json()["error"]["code"]),
        (503, &json!("control_plane_unavailable")),
        "{what}"
    );
    let wait: u64 = reply.headers["retry-after"].parse().unwrap();
    assert!(
        (1..=60).contains(&wait) && reply.headers["x-should-retry"] == "true",
        "{what}: {:?}",
        reply.headers
    );
}

fn units(value: &Value) -> u64 {
    value.as_str().unwrap_or_else(|| panic!("{value}")).parse().unwrap()
}

#[test]
fn no_route_answers_when_the_ledger_cannot_be_read() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(TRIAL);
    let unknown = format!("cresset_key_{}", "a".repeat(38));
    let id = Uuid::new_v4().to_string();
    // Either its first commit fails and it stays closed, or every read fails.
    for points in ["store::commit_lost=return;store::reopen=return", "store::read=return"] {
        let node = folder.serve_failing(points);
        let base = node.listen.as_str();
        let refused = Call::chat(base, &key, &id, &ask(&node)).go().unwrap();
        assert_unavailable(&refused, points);
        eventually("the ledger is closed", || {
            Call::plain(base, "GET", "/v1/me", &key).go().unwrap().status == 503
        });
        let request = format!("/v1/requests/{id}");
        let routes = ["/v1/me", "/v1/models", "/v1/credits", request.as_str(), "/v1/nothing"]
            .map(|path| ("GET", path));
        for (method, path) in routes.into_iter().chain([("DELETE", request.as_str())]) {
            let reply = Call::plain(base, method, path, &key).go().unwrap();
            assert_unavailable(&reply, &format!("{points}: {method} {path}"));
        }
        assert_unavailable(&Call::chat(base, &key, &id, &ask(&node)).go().unwrap(), points);
        // A credential that this node never issued is refused without the ledger.
        assert_eq!(
            Call::plain(base, "GET", "/v1/me", &unknown).go().unwrap().status,
            401,
            "{points}"
        );
        let ready = crate::process::get(&node.operator, "/readyz").status;
        assert_eq!(ready == 503, points.contains("commit"), "{points}");
        node.kill();
        assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
    }
}

#[test]
fn a_ledger_that_failed_its_checks_confirms_nobody() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(TRIAL);
    let node = folder.serve();
    let (done, body) = (Uuid::new_v4().to_string(), ask(&node));
    let first = Call::chat(&node.listen, &key, &done, &body).go().unwrap();
    assert!(node.terminate().success());
    let node = folder.serve_failing("store::distrusted=return");
    let id = Uuid::new_v4().to_string();
    for id in [&id, &done] {
        assert_unavailable(&Call::chat(&node.listen, &key, id, &body).go().unwrap(), "a request");
        let path = format!("/v1/requests/{id}");
        for (method, path) in
            [("GET", path.as_str()), ("DELETE", &path), ("GET", "/v1/me"), ("GET", "/v1/credits")]
        {
            let reply = Call::plain(&node.listen, method, path, &key).go().unwrap();
            assert_unavailable(&reply, &format!("{method} {path}"));
        }
    }
    assert_eq!(crate::process::get(&node.operator, "/readyz").status, 503);
    node.kill();
    let node = folder.serve();
    assert_eq!(
        node.get(&key, &format!("/v1/requests/{id}")).status,
        404,
        "a refused one leaves no record"
    );
    assert_eq!(
        Call::chat(&node.listen, &key, &done, &body).go().unwrap().body,
        first.body,
        "what is done is done"
    );
}

/// At each commit in a request's life one of three things happens once: the commit is lost, it
/// becomes durable but is reported as failed, or the database panics.
#[test]
fn a_failed_commit_is_one_run_in_the_end() {
    let template = Folder::ready();
    let Customer { account, key, .. } = template.customer(TRIAL);
    for (point, action) in [
        ("store::commit_lost", "return"),
        ("store::commit_unknown", "return"),
        ("store::before_commit", "panic"),
    ] {
        for place in 0..3 {
            let folder = template.duplicate();
            let what = format!("{point}={place}*off->1*{action}");
            let node = folder.serve_failing(&what);
            let (id, body) = (Uuid::new_v4().to_string(), ask(&node));
            let mut reply = Call::chat(&node.listen, &key, &id, &body).go().unwrap();
            if place == 0 {
                assert_unavailable(&reply, &what);
            }
            eventually("the same request is answered in the end", || {
                let waits = [409, 503].contains(&reply.status);
                if waits {
                    reply = Call::chat(&node.listen, &key, &id, &body).go().unwrap();
                }
                !waits
            });
            assert_eq!(reply.status, 200, "{what}: {}", reply.body);
            let charged = units(&reply.json()["credits"]["chargedUnits"]);
            let request = node.get(&key, &format!("/v1/requests/{id}")).json();
            assert_eq!(
                (&request["state"], units(&request["chargedUnits"])),
                (&json!("completed"), charged),
                "{what}"
            );
            let again = Call::chat(&node.listen, &key, &id, &body).go().unwrap();
            assert_eq!(
                (again.headers["idempotent-replayed"].as_str(), &again.body),
                ("true", &reply.body),
                "{what}"
            );
            let credits = folder.json(&["credits", "show", "--account", &account]);
            assert_eq!(
                (units(&credits["trialUnits"]), units(&credits["reservedUnits"])),
                (TRIAL - charged, 0),
                "{what}"
            );
            assert_eq!(folder.json(&["ledger", "audit"])["ok"], true, "{what}");
            assert!(node.terminate().success(), "{what}");
        }
    }
}

#[test]
fn slow_commits_delay_and_charge_nothing_more() {
    let folder = Folder::ready();
    let Customer { account, key, .. } = folder.customer(TRIAL);
    let node = folder.serve_failing("store::before_commit=sleep(400)");
    let calls: Vec<Call> = (0..32)
        .map(|_| Call::chat(&node.listen, &key, &Uuid::new_v4().to_string(), &ask(&node)))
        .collect();
    let replies = crate::volley::volley(calls);
    let charged: u64 = replies
        .iter()
        .flatten()
        .map(|reply| {
            assert_eq!(reply.status, 200, "{}", reply.body);
            units(&reply.json()["credits"]["chargedUnits"])
        })
        .sum();
    assert_eq!(replies.iter().flatten().count(), 32);
    let credits = folder.json(&["credits", "show", "--account", &account]);
    assert_eq!(
        (units(&credits["trialUnits"]), units(&credits["reservedUnits"])),
        (TRIAL - charged, 0)
    );
    assert!(node.terminate().success());
}

#[test]
fn a_step_that_fails_fails_its_requests_uncharged_and_the_node_goes_on() {
    let folder = Folder::ready();
    let Customer { account, key, .. } = folder.customer(TRIAL);
    for action in ["return", "panic"] {
        let node = folder.serve_failing(&format!("engine::step=3*off->1*{action}"));
        let id = Uuid::new_v4().to_string();
        let failed = Call::chat(&node.listen, &key, &id, &ask(&node)).go().unwrap();
        assert_eq!(
            (failed.status, &failed.json()["error"]["code"]),
            (500, &json!("generation_failed")),
            "{action}"
        );
        let request = node.get(&key, &format!("/v1/requests/{id}")).json();
        assert_eq!(
            (&request["failure_code"], &request["chargedUnits"]),
            (&json!("generation_failed"), &json!("0"))
        );
        let again = Call::chat(&node.listen, &key, &id, &ask(&node)).go().unwrap();
        assert_eq!(
            (again.status, &node.get(&key, &format!("/v1/requests/{id}")).json()["attempt_count"]),
            (200, &json!(2))
        );
        assert!(node.terminate().success());
    }
    let credits = folder.json(&["credits", "show", "--account", &account]);
    assert_eq!(credits["reservedUnits"], "0");
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn a_lost_gpu_ends_the_process_once_everything_is_settled() {
    let folder = Folder::ready();
    let Customer { account, key, .. } = folder.customer(TRIAL);
    let mut node = folder.serve_failing("engine::device=3*off->1*return->off");
    let (id, body) = (Uuid::new_v4().to_string(), ask(&node));
    let failed = Call::chat(&node.listen, &key, &id, &body).go().unwrap();
    assert_eq!(
        (failed.status, &failed.json()["error"]["code"]),
        (500, &json!("generation_failed"))
    );
    assert_eq!(node.wait().code(), Some(1), "a service manager starts it again:\n{}", node.log());
    let log = node.log();
    for part in ["draining", "the GPU is lost"] {
        assert!(log.contains(part), "{part}: {log}");
    }
    // A request that only the next start finds unfinished would have failed as `node_restarted`.
    let request = folder.json(&["requests", "show", &id]);
    assert_eq!(
        (&request["failure_code"], &request["chargedUnits"]),
        (&json!("generation_failed"), &json!("0"))
    );
    let node = folder.serve();
    assert_eq!(Call::chat(&node.listen, &key, &id, &body).go().unwrap().status, 200);
    assert!(node.terminate().success());
    let credits = folder.json(&["credits", "show", "--account", &account]);
    assert_eq!(credits["reservedUnits"], "0");
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}
