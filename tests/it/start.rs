//! What a node answers while it starts, and that it stops at once when it is told to.

use crate::neighbours::status;
use crate::process::{Finished, Folder, get};
use serde_json::Value;
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

/// A place where a start waits, and what operators are told of it.
const PLACES: [(&str, &str); 4] = [
    ("store::opened", "checking the pages of the ledger"),
    ("store::claimed", "ending the requests of earlier starts"),
    ("node::reading", "reading the models"),
    ("node::loading", "loading tiny"),
];

/// The status of a node that waits at the named place.
fn status_at(folder: &Folder, doing: &str) -> Value {
    for _ in 0..600 {
        let status = folder.json(&["status"]);
        if status["starting"] == doing {
            return status;
        }
        sleep(Duration::from_millis(50));
    }
    panic!("the node never was {doing}");
}

#[test]
fn operators_are_answered_and_obeyed_in_every_phase_of_a_start() {
    let template = Folder::ready();
    for (place, doing) in PLACES {
        let folder = template.duplicate();
        let mut command = folder.serve_command(&[]);
        command.env("FAILPOINTS", format!("{place}=sleep(600000)"));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stated = status_at(&folder, doing);
        let why = format!("the node is starting: {doing}");
        assert_eq!((&stated["running"], &stated["ready"]), (&true.into(), &false.into()));
        assert_eq!(stated["reason"], why);
        let operator = stated["operator"].as_str().unwrap();
        assert_eq!(get(operator, "/healthz").status, 200, "{place}");
        let ready = get(operator, "/readyz");
        assert_eq!((ready.status, &ready.json()["message"]), (503, &why.clone().into()));
        assert_eq!(folder.run(&["status", "--ready"]).code, Some(1), "{place}");
        let shown = folder.run(&["status"]).stdout;
        assert!(shown.contains(&why) && shown.contains(operator), "{shown}");
        if place.starts_with("store") {
            let refused = folder.fails(&["accounts", "list"], 1);
            assert!(refused.contains("still starting"), "{refused}");
        }
        if place == "node::loading" {
            // Loading may take minutes, and the ledger is open.
            folder.json(&["accounts", "list"]);
        }
        let told = std::process::Command::new("kill").arg(child.id().to_string()).status();
        assert!(told.unwrap().success());
        let ended = Finished::of(child.wait_with_output().unwrap());
        assert_eq!(ended.code, Some(0), "{place}: {ended:?}");
        assert!(ended.stderr.contains("stopped before it was ready"), "{place}: {ended:?}");
        // Nothing half-made is left.
        assert_eq!(folder.json(&["ledger", "audit"])["ok"], true, "{place}");
        assert!(folder.serve().terminate().success(), "{place}");
    }
}

#[test]
fn a_start_that_fails_leaves_the_ledger_in_order() {
    let folder = Folder::initialised();
    folder.fails(&["serve", "--model", "absent"], 1);
    let next = folder.run(&["accounts", "list"]);
    assert!(!next.stderr.contains("not orderly"), "{}", next.stderr);
}

#[test]
fn web_pages_are_kept_away_while_a_node_starts() {
    let folder = Folder::ready();
    let mut command = folder.serve_command(&[]);
    command.env("FAILPOINTS", "store::opened=sleep(600000)");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let stated = status_at(&folder, PLACES[0].1);
    let refused = status(stated["operator"].as_str().unwrap(), "Host: evil.example:8081\r\n");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(refused, "403");
}
