//! Runs the real binary on files that are damaged, foreign or cannot grow: it says what happened,
//! why and what to do, and loses nothing.

use crate::process::{Customer, Folder};
use serde_json::json;
use std::fs;
use std::path::Path;
use uuid::Uuid;

/// Every command that needs the ledger refuses with exit code 1 and leaves the file as it is.
#[test]
fn files_that_are_no_ledger_are_refused_by_every_command() {
    type Spoil = fn(&Path);
    let cases: [(&str, Spoil); 5] = [
        ("is empty", |path| fs::write(path, b"").unwrap()),
        ("is no ledger file", |path| fs::write(path, b"PK\x03\x04 a picture of a cat").unwrap()),
        ("is damaged", |path| fs::write(path, &fs::read(path).unwrap()[..5_000]).unwrap()),
        ("cannot be read", |path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        }),
        ("is damaged", |path| {
            let mut bytes = fs::read(path).unwrap();
            bytes[4_096..].fill(0x5a);
            fs::write(path, bytes).unwrap();
        }),
    ];
    for name in ["ledger.redb", "bodies.redb"] {
        for (expect, spoil) in cases {
            let folder = Folder::initialised();
            let path = folder.path().join(name);
            spoil(&path);
            let before = fs::read(&path).ok();
            for command in [&["accounts", "list"][..], &["ledger", "audit"], &["serve"]] {
                let why = folder.fails(command, 1);
                assert!(
                    why.contains(name) && why.contains(expect),
                    "{command:?}: {expect:?} expected, but: {why}"
                );
            }
            assert!(fs::read(&path).ok() == before, "{name} was changed");
            assert!(folder.fails(&["init"], 1).contains("left as it is"));
        }
    }
}

/// The ledger's files cannot grow any more in the middle of the work. Answered requests are kept,
/// the others are refused, and once there is room again everything adds up.
#[test]
fn a_node_whose_files_cannot_grow_loses_nothing() {
    let folder = Folder::ready();
    let limits = "[plans.default]\nrequests_per_minute = 1000000\nburst = 1000000\n";
    fs::write(folder.path().join("cresset.toml"), limits).unwrap();
    let Customer { account, key, .. } = folder.customer(100_000_000);
    let largest = |name| fs::metadata(folder.path().join(name)).unwrap().len();
    let node = folder.serve_within(largest("ledger.redb").max(largest("bodies.redb")));
    let ask = json!({ "model": node.model, "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 1 });
    let mut answered = Vec::new();
    let refused = loop {
        let id = Uuid::new_v4().to_string();
        let reply = node.chat(&key, &id, &ask).finish();
        if reply.status != 200 {
            break reply;
        }
        answered.push((id, reply.body));
        assert!(answered.len() < 5_000, "the files never had to grow");
    };
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert!(matches!(node.get(&key, "/v1/credits").status, 200 | 503));
    drop(node);

    let node = folder.serve();
    for (id, body) in answered.iter().rev().take(20) {
        let again = node.chat(&key, id, &ask).finish();
        assert_eq!(&again.body, body, "{id}");
    }
    assert!(node.terminate().success());
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
    let credits = folder.json(&["credits", "show", "--account", &account]);
    assert_eq!(credits["reservedUnits"], "0");
    let completed =
        folder.json(&["requests", "list", "--account", &account, "--state", "completed"]);
    assert!(completed["data"].as_array().unwrap().len() >= answered.len());
}
