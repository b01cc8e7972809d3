//! Another program takes the place of a running node: no request is refused for it, and what was
//! answered before is replayed after.

use super::process::{Customer, Folder, Served, eventually, get};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use uuid::Uuid;

/// A process that this test has caused and did not start itself; it ends with the test.
pub struct Successor(u64);

impl Successor {
    fn signal(&self, name: &str) -> bool {
        let pid = self.0.to_string();
        Command::new("kill").args([name, &pid]).stderr(Stdio::null()).status().unwrap().success()
    }

    /// Whether it still runs; nobody waits for it, so that its entry may be left.
    fn runs(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0)).unwrap_or_default();
        !stat.is_empty() && !stat.contains(") Z ")
    }

    pub fn terminate(self) {
        assert!(self.signal("-TERM"));
        eventually("the new node ends", || !self.runs());
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        self.signal("-KILL");
    }
}

/// Replaces the node on this folder by the same program.
pub fn upgrade(folder: &Folder) -> Successor {
    let status = folder.json(&["upgrade", "--program", env!("CARGO_BIN_EXE_cresset")]);
    assert_eq!(status["ready"], true);
    Successor(status["pid"].as_u64().unwrap())
}

fn ask(node: &Served, key: &str, id: &str, more: &Value) -> super::process::Stream {
    let mut body = json!({ "model": node.model, "max_tokens": 4,
                           "messages": [{ "role": "user", "content": "hi" }] });
    let fields = body.as_object_mut().unwrap();
    fields.extend(more.as_object().cloned().unwrap_or_default());
    node.chat(key, id, &body)
}

#[test]
fn no_request_is_refused_while_a_program_is_replaced() {
    let folder = Folder::ready();
    let plan = "[plans.default]\nrequests_per_minute = 1000000\nburst = 100000\n";
    std::fs::write(folder.path().join("cresset.toml"), plan).unwrap();
    let Customer { key, .. } = folder.customer(1_000_000_000);
    let mut node = folder.serve();
    let first = Uuid::new_v4().to_string();
    let answered = ask(&node, &key, &first, &json!({})).finish();
    assert_eq!(answered.status, 200);
    let over = AtomicBool::new(false);
    let successors = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut statuses = Vec::new();
                    while !over.load(Ordering::Relaxed) {
                        let id = Uuid::new_v4().to_string();
                        statuses.push(ask(&node, &key, &id, &json!({})).finish().status);
                    }
                    statuses
                })
            })
            .collect();
        let probe = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                assert_eq!(get(&node.operator, "/healthz").status, 200);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        std::thread::sleep(Duration::from_millis(300));
        let second = upgrade(&folder);
        let third = upgrade(&folder);
        eventually("the second process has ended", || !second.runs());
        std::thread::sleep(Duration::from_millis(300));
        over.store(true, Ordering::Relaxed);
        let statuses: Vec<u16> =
            clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
        probe.join().unwrap();
        assert!(statuses.len() > 20, "{statuses:?}");
        assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
        [second, third]
    });
    let replayed = ask(&node, &key, &first, &json!({})).finish();
    assert_eq!(replayed.headers["idempotent-replayed"], "true");
    assert_eq!(replayed.body, answered.body);
    let [_, third] = successors;
    third.terminate();
    // The later processes write to the same log, for whose end this waits.
    assert!(node.wait().success(), "the first process has ended in order");
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn a_stream_that_runs_longer_ends_and_can_be_sent_again() {
    let folder = Folder::ready();
    std::fs::write(folder.path().join("cresset.toml"), "[requests]\ndrain_grace_seconds = 1\n")
        .unwrap();
    let Customer { key, .. } = folder.customer(1_000_000_000);
    let node = folder.serve();
    let id = Uuid::new_v4().to_string();
    let long = json!({ "stream": true, "max_tokens": 1_500, "ignore_eos": true });
    let running = ask(&node, &key, &id, &long);
    assert_eq!(running.status, 200);
    let second = upgrade(&folder);
    let cut = running.rest();
    if !cut.contains("[DONE]") {
        assert!(cut.contains("draining"), "{cut}");
    }
    let again = ask(&node, &key, &id, &long).finish();
    assert!(again.status == 200 && again.body.contains("[DONE]"), "{again:?}");
    second.terminate();
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn a_program_that_cannot_take_over_changes_nothing() {
    let folder = Folder::ready();
    std::fs::write(folder.path().join("cresset.toml"), "[requests]\nupgrade_seconds = 3\n")
        .unwrap();
    let node = folder.serve();
    for (program, says) in [("/bin/false", "did not take over"), ("/nowhere", "cannot be started")]
    {
        let error = folder.fails(&["upgrade", "--program", program], 1);
        assert!(error.contains(says) && error.contains("this node goes on"), "{error}");
    }
    // One that is never ready, and upgrades that meet it.
    let waiting = folder.path().join("waiting");
    std::fs::write(&waiting, "#!/bin/sh\nexec sleep 120\n").unwrap();
    std::fs::set_permissions(&waiting, std::fs::Permissions::from_mode(0o755)).unwrap();
    let waiting = waiting.to_str().unwrap();
    let errors: Vec<String> = std::thread::scope(|scope| {
        let attempt = || folder.fails(&["upgrade", "--program", waiting], 1);
        let all: Vec<_> = (0..3).map(|_| scope.spawn(attempt)).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let count = |says: &str| errors.iter().filter(|error| error.contains(says)).count();
    let [late, second] = ["within 3 s (requests.upgrade_seconds)", "another upgrade"].map(count);
    assert_eq!((late, second), (1, 2), "{errors:?}");
    // One that can load no model, because none is proven for it.
    let records = folder.path().join("qualification");
    let aside = folder.path().join("aside");
    std::fs::rename(&records, &aside).unwrap();
    let error = folder.fails(&["upgrade", "--program", env!("CARGO_BIN_EXE_cresset")], 1);
    assert!(error.contains("this node goes on"), "{error}");
    std::fs::rename(&aside, &records).unwrap();
    assert_eq!(folder.json(&["status"])["ready"], true);
    assert!(node.terminate().success());
    assert!(folder.fails(&["upgrade"], 1).contains("no node runs"));
}
