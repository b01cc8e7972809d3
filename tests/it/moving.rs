//! `cresset ledger move` of the real binary: what customers see stays the same, and a move that is
//! killed anywhere is begun anew or finished.

use crate::database::{place, shared};
use crate::process::{Customer, Folder, Served};
use serde_json::{Value, json};
use uuid::Uuid;

/// Places at which the command is killed, and whether the configuration names the database then.
const KILLS: &[(&str, bool)] = &[
    ("store::moved_rows=return", false),
    ("store::moved_rows=4*off->return", false),
    ("store::move_configured=return", true),
    ("store::move_committed=return", true),
    ("store::move_renamed=return", true),
];

fn ask(node: &Served, key: &str, id: &str, stream: bool) -> String {
    let body = json!({ "model": node.model, "stream": stream, "max_tokens": 12,
        "messages": [{ "role": "user", "content": "tell me" }], "ignore_eos": true, "seed": 1 });
    let reply = node.chat(key, id, &body).finish();
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body
}

/// What an operator sees of the account, but for the numbers and hashes of entries.
fn seen(folder: &Folder, account: &str) -> Vec<Value> {
    let mut statement = folder.json(&["credits", "statement", "--account", account]);
    for entry in statement["data"].as_array_mut().unwrap() {
        entry["sequence"].take();
        entry["hash"].take();
    }
    statement["next_after"].take();
    let account = ["--account", account];
    [&["credits", "show"][..], &["keys", "list"]]
        .map(|command| folder.json(&[command, &account].concat()))
        .into_iter()
        .chain([statement, folder.json(&["accounts", "list"])])
        .collect()
}

#[test]
fn a_ledger_moves_into_a_database_whatever_kills_the_command() {
    let Some(server) = shared() else { return };
    let template = Folder::ready();
    let Customer { account, key, .. } = template.customer(1_000_000);
    let ids = [(); 2].map(|()| Uuid::new_v4().to_string());
    let node = template.serve();
    let ask_both =
        |node: &Served| [ask(node, &key, &ids[0], false), ask(node, &key, &ids[1], true)];
    ask_both(&node);
    let replayed = ask_both(&node);
    let other = place(server);
    let arguments =
        |url: &str| ["ledger", "move", "--standbys", "0", "--to", url].map(str::to_owned);
    let refused = template.fails(&arguments(&other).each_ref().map(String::as_str), 1);
    assert!(refused.contains("stop the node"), "{refused}");
    assert!(node.terminate().success());
    let before = seen(&template, &account);
    for (point, is_configured) in KILLS {
        let (folder, url) = (template.duplicate(), place(server));
        let command = arguments(&url);
        let command = command.each_ref().map(String::as_str);
        let killed = folder.run_failing(point, &command);
        assert_eq!(killed.code, None, "{point}: {killed:?}");
        if *is_configured {
            let refused = folder.fails(&["serve"], 1);
            assert!(refused.contains("cresset ledger move"), "{point}: {refused}");
        } else {
            assert_eq!(seen(&folder, &account), before, "{point}: the folder's ledger is in use");
        }
        let moved = folder.json(&command);
        assert_eq!(moved["files"].as_array().map(Vec::is_empty), Some(false), "{moved}");
        assert_eq!(seen(&folder, &account), before, "{point}");
        assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
        let node = folder.serve();
        assert_eq!(ask_both(&node), replayed, "{point}: byte for byte");
        ask(&node, &key, &Uuid::new_v4().to_string(), false);
        assert!(node.terminate().success());
        assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
        let again = folder.fails(&command, 1);
        assert!(again.contains("no ledger"), "{point}: {again}");
        let fresh = Folder::initialised();
        let taken = fresh.fails(&command, 1);
        assert!(taken.contains("has a table"), "{point}: {taken}");
        assert!(fresh.json(&["accounts", "list"])["data"].as_array().unwrap().is_empty());
    }
}
