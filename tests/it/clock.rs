//! A wrong clock is refused before it gets into the ledger, and a ledger that it got into is
//! mended.

use crate::process::{Customer, Folder, Served};
use serde_json::{Value, json};
use uuid::Uuid;

const DAYS_AHEAD: &str = "clock::hours_ahead=return(1440)";

fn serve_ahead(folder: &Folder, more: &[&str]) -> std::process::Command {
    let mut command = folder.serve_command(more);
    command.env("FAILPOINTS", DAYS_AHEAD);
    command
}

fn ask(model: &str) -> Value {
    json!({ "model": model, "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 4 })
}

fn chat(node: &Served, key: &str) -> u16 {
    node.chat(key, &Uuid::new_v4().to_string(), &ask(&node.model)).finish().status
}

#[test]
fn one_start_with_a_clock_that_is_ahead_does_no_harm() {
    let folder = Folder::ready();
    let Customer { account, .. } = folder.customer(1_000_000);
    let issue = || {
        let key = folder.json(&["keys", "create", "--account", &account, "--expires-in", "30d"]);
        key["secret"].as_str().unwrap().to_owned()
    };
    let key = issue();
    let refused = folder.run_failing(DAYS_AHEAD, &["accounts", "list"]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    for part in ["this machine's clock shows", "days after", "--accept-clock"] {
        assert!(refused.stderr.contains(part), "{refused:?}");
    }
    let output = serve_ahead(&folder, &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let node = folder.serve();
    assert_eq!((node.get(&key, "/v1/me").status, chat(&node, &key)), (200, 200));
    let status = folder.json(&["status"]);
    assert!(status["clock_ahead_seconds"].as_i64().unwrap().abs() < 300, "{status}");
}

/// An operator vouched for a clock that was wrong, or the ledger is one of a build that did not
/// look.
#[test]
fn a_ledger_with_the_time_of_a_wrong_clock_is_mended() {
    let folder = Folder::ready();
    let Customer { account, key, .. } = folder.customer(1_000_000);
    let node = Served::start(serve_ahead(&folder, &["--accept-clock"]));
    assert_eq!(chat(&node, &key), 200);
    assert!(node.terminate().success());
    let doctor = folder.run(&["doctor", "--json"]).document();
    let checks = doctor["checks"].as_array().unwrap();
    let clock = checks.iter().find(|found| found["check"] == "clock").unwrap();
    assert_eq!(clock["verdict"], "wrong", "{clock}");
    let list = ["accounts", "list"];
    assert!(folder.fails(&list, 1).contains("the ledger has a later time"));
    folder.json(&["accounts", "list", "--accept-clock"]);
    folder.json(&list);
    let short = folder.json(&["keys", "create", "--account", &account, "--expires-in", "1d"]);
    let short = short["secret"].as_str().unwrap();
    let node = folder.serve();
    for key in [&key, short] {
        assert_eq!((node.get(key, "/v1/me").status, chat(&node, key)), (200, 200));
    }
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}
