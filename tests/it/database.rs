//! A node whose ledger is in PostgreSQL: the real binary and a real server. Without PostgreSQL on
//! the machine these tests are skipped; see `database_server`.

use crate::process::{Customer, Folder, Served};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::OnceLock;
use uuid::Uuid;

#[path = "../../src/store/postgres/tests/database_server.rs"]
mod database_server;
use database_server::{DatabaseServer, programs};

/// A folder with a qualified model and no ledger, which lets go of a silent node soon.
fn folder() -> Folder {
    let folder = Folder::ready().duplicate();
    for file in ["ledger.redb", "bodies.redb"] {
        std::fs::remove_file(folder.path().join(file)).unwrap();
    }
    std::fs::write(folder.path().join("cresset.toml"), "[ledger]\nlease_seconds = 1\n").unwrap();
    folder
}

/// The address of the server's database of this name, which is made.
fn database(server: &DatabaseServer, programs: &Path, name: &str) -> String {
    let mut create = std::process::Command::new(programs.join("createdb"));
    let DatabaseServer { folder, port, .. } = server;
    create.arg("-h").arg(folder).args(["-p", &port.to_string(), "-U", "cresset", name]);
    assert!(create.status().unwrap().success());
    address(server, name)
}

fn address(server: &DatabaseServer, name: &str) -> String {
    format!("postgres:///{name}?user=cresset&host={}&port={}", server.folder.display(), server.port)
}

/// The server that these tests share, and its programs.
fn shared() -> Option<&'static (DatabaseServer, std::path::PathBuf)> {
    static SERVER: OnceLock<Option<(DatabaseServer, std::path::PathBuf)>> = OnceLock::new();
    let start = || {
        let programs = programs()?;
        Some((DatabaseServer::start(&programs, 5432, |_| String::new()), programs))
    };
    SERVER.get_or_init(start).as_ref()
}

fn ask(node: &Served, key: &str, id: &str) -> (u16, bool, Value) {
    let body = json!({ "model": node.model, "max_tokens": 8, "seed": 3,
        "messages": [{ "role": "user", "content": "hello" }] });
    let reply = node.chat(key, id, &body).finish();
    let is_replay = reply.header("idempotent-replayed") == Some("true");
    (reply.status, is_replay, reply.json())
}

#[test]
fn a_node_may_keep_its_ledger_in_a_database() {
    let Some((server, programs)) = shared() else { return };
    let url = database(server, programs, "whole");
    let (folder, elsewhere) = (folder(), folder());
    folder.json(&["init", "--ledger", &url, "--standbys", "0"]);
    assert!(folder.fails(&["init"], 1).contains("has a table"));
    let Customer { account, key, .. } = folder.customer(1_000_000);
    let (node, id) = (folder.serve(), Uuid::new_v4().to_string());
    let (status, is_replay, answer) = ask(&node, &key, &id);
    assert_eq!((status, is_replay), (200, false), "{answer}");
    let charged: u64 = answer["credits"]["chargedUnits"].as_str().unwrap().parse().unwrap();
    // From another machine: commands ask the database, and a second node is refused.
    let settings = std::fs::read_to_string(folder.path().join("cresset.toml")).unwrap();
    std::fs::write(elsewhere.path().join("cresset.toml"), settings).unwrap();
    let refused = elsewhere.fails(&["accounts", "list"], 1);
    assert!(refused.contains("another node uses the ledger in the database"), "{refused}");
    node.kill();
    // What was acknowledged is there for whoever comes next, with the same key and id.
    let node = elsewhere.serve();
    assert_eq!(ask(&node, &key, &id), (200, true, answer));
    let listed = elsewhere.json(&["requests", "list", "--account", &account]);
    assert_eq!(listed["data"][0]["state"], "completed");
    let balance = &elsewhere.json(&["accounts", "list"])["data"][0]["trialUnits"];
    assert_eq!(balance.as_str(), Some((1_000_000 - charged).to_string().as_str()));
    let status = elsewhere.run(&["status"]).stdout;
    assert!(status.contains("the ledger is in a database"), "{status}");
    assert!(node.log().contains("ledger.standbys is 0"), "{}", node.log());
    assert!(node.terminate().success());
    let audit = folder.json(&["ledger", "audit"]);
    assert_eq!(
        (&audit["ok"], &audit["checked"]["reservations"]),
        (&json!(true), &json!(0)),
        "{audit}"
    );
    let doctor = folder.run(&["doctor"]).stdout;
    assert!(doctor.contains("acknowledged may be lost"), "{doctor}");
    let copies = folder.path().join("copies");
    std::fs::create_dir(&copies).unwrap();
    for copying in [&["backup", "copy"][..], &["ledger", "backup", "copy"]] {
        let refused = folder.fails(copying, 1);
        assert!(refused.contains("pg_dump"), "{copying:?}: {refused}");
    }
}

#[test]
fn a_database_that_cannot_be_meant_is_refused_with_the_settings_name() {
    let Some((server, programs)) = shared() else { return };
    let url = database(server, programs, "refusing");
    let (folder, own) = (folder(), Folder::initialised());
    let refused = own.fails(&["init", "--ledger", &url, "--standbys", "0"], 1);
    assert!(refused.contains("ledger.url names a database"), "{refused}");
    let missing = address(server, "missing");
    for (url, standbys, part) in [
        (&*missing, "0", "check the database's name in ledger.url"),
        (&*url.replace("user=cresset", "user=nobody"), "0", "check the user in ledger.url"),
        (&*url, "1", "ledger.standbys is 1"),
        ("postgres:///x", "0", "ledger.url names no host"),
        ("redis://x", "0", "ledger.url: must be an address like"),
        ("postgres://u:secret@h/d", "0", "ledger.password_file"),
    ] {
        let refused = folder.fails(&["init", "--ledger", url, "--standbys", standbys], 1);
        assert!(refused.contains(part) && !refused.contains("secret"), "{url}: {refused}");
    }
    // Nothing was written down by a try that failed, and no tables are no ledger.
    let ledger = format!("[ledger]\nurl = {url:?}\nstandbys = 0\n");
    let file = folder.path().join("cresset.toml");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "[ledger]\nlease_seconds = 1\n");
    std::fs::write(&file, ledger).unwrap();
    let refused = folder.fails(&["accounts", "list"], 1);
    assert!(refused.contains("cresset init"), "{refused}");
}
