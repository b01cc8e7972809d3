//! Commands from other machines: tokens, roles, and the log of what operators did.

use super::process::{Finished, Folder, request};
use super::tls::secured;
use serde_json::{Value, json};

/// Runs a command against the node at `url` from a folder that has no node.
fn remote(away: &Folder, url: &str, token: &str, arguments: &[&str]) -> Finished {
    let mut command = away.command(&[&["--json", "--node", url][..], arguments].concat());
    command.env("CRESSET_OPERATOR_TOKEN", token);
    command.env("CRESSET_TLS__TRUSTED", super::tls::file("authority.pem"));
    Finished::of(command.output().unwrap())
}

fn token(folder: &Folder, arguments: &str) -> String {
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let made = folder.json(&[&["admin", "token", "create"][..], &arguments].concat());
    made["secret"].as_str().unwrap().to_owned()
}

fn operator_url(folder: &Folder) -> String {
    folder.json(&["status"])["operator"].as_str().unwrap().to_owned()
}

#[test]
fn a_token_allows_what_its_roles_allow() {
    let folder = secured();
    let before_start = token(&folder, "--name reader");
    let node = folder.serve();
    let operate = token(&folder, "--name ann --role operate");
    let money = token(&folder, "--name bob --role money --expires-in 1h");
    let (away, url) = (Folder::empty(), operator_url(&folder));
    assert!(url.starts_with("https://"), "{url}");
    let account = folder.customer(1_000).account;
    let grant = [
        "credits",
        "grant",
        "--account",
        &account,
        "--bucket",
        "trial",
        "--units",
        "5",
        "--reference",
        "r",
    ];
    let check = |arguments: &[&str], allowed: [bool; 3]| {
        for (token, allowed) in [&before_start, &operate, &money].into_iter().zip(allowed) {
            let done = remote(&away, &url, token, arguments);
            let told = format!("{arguments:?}: {done:?}");
            assert_eq!(done.code, Some(i32::from(!allowed)), "{told}");
            assert!(allowed || done.stderr.contains("this needs the role"), "{told}");
        }
    };
    check(&["status"], [true; 3]);
    check(&["accounts", "list"], [true; 3]);
    check(&["credits", "statement", "--account", &account], [true; 3]);
    check(&["admin", "token", "list"], [true; 3]);
    check(&["accounts", "create", "--name", "new"], [false, true, false]);
    check(&["accounts", "create", "--name", "rich", "--trial", "1"], [false, false, true]);
    check(&["keys", "create", "--account", &account], [false, true, false]);
    check(&["models", "unload", "tiny"], [false, true, false]);
    check(&["models", "load", "tiny"], [false, true, false]);
    check(&["reload"], [false, true, false]);
    check(&["ledger", "audit"], [false, true, false]);
    check(&grant, [false, false, true]);
    check(&["accounts", "change", &account, "--note", "n"], [false, true, false]);
    check(&["accounts", "erase-answers", &account], [false, true, false]);
    let budget = ["accounts", "budget", &account, "--period", "day", "--units", "5"];
    check(&budget, [false, false, true]);
    check(&["models", "price", "tiny", "--history"], [true; 3]);
    for local in [
        &["admin", "token", "create", "--name", "more"][..],
        &["admin", "token", "revoke", "ann"],
        &["ledger", "backup", "/tmp/never"],
        &["backup", "/tmp/never"],
        &["serve"],
        &["models", "list"],
    ] {
        let done = remote(&away, &url, &money, local);
        assert!(done.code == Some(1) && done.stderr.contains("node's machine"), "{done:?}");
    }
    folder.json(&["admin", "token", "revoke", "ann"]);
    for wrong in [operate.as_str(), "cresset_operator_", "x"] {
        let done = remote(&away, &url, wrong, &["status"]);
        assert!(done.code == Some(1) && done.stderr.contains("valid operator token"), "{done:?}");
    }
    assert!(remote(&away, &url, &money, &["status"]).code == Some(0), "the other one stays");
    assert!(node.terminate().success());
}

#[test]
fn what_operators_did_is_logged_with_their_names() {
    let folder = Folder::ready();
    let account = folder.customer(1_000).account;
    let node = folder.serve();
    let ann = token(&folder, "--name ann --role operate");
    let (away, url) = (Folder::empty(), operator_url(&folder));
    let key = remote(&away, &url, &ann, &["keys", "create", "--account", &account]).document();
    remote(&away, &url, &ann, &["keys", "revoke", &account]);
    remote(&away, &url, &ann, &["ledger", "audit"]);
    assert!(node.terminate().success());
    folder.json(&["accounts", "suspend", &account]);
    let log = folder.json(&["admin", "log"]);
    let acts: Vec<&Value> = log["data"].as_array().unwrap().iter().collect();
    let told = |index: usize| {
        let act = acts[acts.len() - index];
        (act["by"].as_str().unwrap(), act["did"]["command"].as_str().unwrap(), &act["failed"])
    };
    assert_eq!(told(4), ("ann", "key_create", &Value::Null));
    let (by, did, failed) = told(3);
    assert_eq!((by, did), ("ann", "key_revoke"));
    assert!(failed.as_str().unwrap().contains("keys list"), "{failed}");
    assert_eq!(told(2), ("ann", "ledger_audit", &Value::Null));
    assert_eq!(told(1), ("the node's user", "account_suspend", &Value::Null));
    let kept = std::fs::read_to_string(folder.path().join("operator-acts.jsonl")).unwrap();
    let secrets = [&ann, key["secret"].as_str().unwrap()];
    assert!(secrets.iter().all(|secret| !kept.contains(secret)), "no secret is logged");
    assert_eq!(kept.lines().filter(|line| line.contains("account_suspend")).count(), 1);
    let last = folder.json(&["admin", "log", "--last", "1"]);
    assert_eq!(last["data"].as_array().unwrap().len(), 1);
}

#[test]
fn no_token_is_sent_where_others_can_read_it() {
    let away = Folder::empty();
    for url in ["http://node.example:9090", "http://10.0.0.7:9090", "node.example", "ftp://x"] {
        let done = remote(&away, url, "t", &["status"]);
        assert!(done.code == Some(1) && done.stderr.contains("https://"), "{url}: {done:?}");
    }
    let done =
        Finished::of(away.command(&["--node", "http://localhost:1", "status"]).output().unwrap());
    assert!(done.stderr.contains("CRESSET_OPERATOR_TOKEN"), "{done:?}");
}

#[test]
fn web_pages_of_other_sites_give_no_commands() {
    let folder = Folder::ready();
    let node = folder.serve();
    let token = token(&folder, "--name ann --role operate");
    let url = operator_url(&folder);
    let ask = |head: &str| {
        let body = json!({ "command": "reload" }).to_string();
        let head = format!("POST /command HTTP/1.1\r\nAuthorization: Bearer {token}\r\n{head}");
        request(&url, &head, &body).finish().status
    };
    assert_eq!(ask(""), 200);
    assert_eq!(ask("Origin: https://evil.example\r\n"), 403);
    assert_eq!(ask("Sec-Fetch-Site: cross-site\r\n"), 403);
    assert!(node.terminate().success());
}
