//! The real binary with its ledger in a real PostgreSQL database. Without PostgreSQL on the machine
//! these tests are skipped.

use crate::process::{Customer, Folder, MODEL, Served, Stream, eventually, get, request};
use serde_json::{Value, json};
use server_process::{ServerProcess, programs};
use std::sync::OnceLock;
use uuid::Uuid;

#[path = "../../src/postgres/tests/server_process.rs"]
pub mod server_process;

const LEASE: &str = "[ledger]\nlease_seconds = 1\n";

/// The server that these tests share; `None` where PostgreSQL is not installed.
pub fn shared() -> Option<&'static ServerProcess> {
    static SERVER: OnceLock<Option<ServerProcess>> = OnceLock::new();
    let start = || Some(ServerProcess::start(&programs()?, 5432, |_| String::new()));
    SERVER.get_or_init(start).as_ref()
}

/// Runs SQL as a person would.
pub fn psql(server: &ServerProcess, sql: &str) {
    let mut command = std::process::Command::new(programs().unwrap().join("psql"));
    command.stdout(std::process::Stdio::null());
    command.args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-U", "cresset", "-d", "postgres", "-h"]);
    assert!(command.arg(&server.folder).args(["-c", sql]).status().unwrap().success());
}

/// The address of an empty place: a schema of its own.
pub fn place(server: &ServerProcess) -> String {
    let schema = format!("s{}", Uuid::new_v4().simple());
    psql(server, &format!("create schema {schema}"));
    let host = server.folder.display();
    format!("postgres:///postgres?user=cresset&host={host}&options=-csearch_path%3D{schema}")
}

/// A copy of the ready folder without its ledger, and so with the model alone.
pub fn without_ledger() -> Folder {
    let folder = Folder::ready();
    for file in ["ledger.redb", "bodies.redb"] {
        std::fs::remove_file(folder.path().join(file)).unwrap();
    }
    std::fs::write(folder.path().join("cresset.toml"), LEASE).unwrap();
    folder
}

/// The folder of another machine with the same ledger.
pub fn same_ledger(folder: &Folder) -> Folder {
    let other = without_ledger();
    let [from, to] = [folder, &other].map(|folder| folder.path().join("cresset.toml"));
    std::fs::copy(from, to).unwrap();
    other
}

pub fn question(node: &Served, stream: bool, max_tokens: u32) -> Value {
    json!({ "model": node.model, "messages": [{ "role": "user", "content": "tell me" }],
            "stream": stream, "max_tokens": max_tokens, "ignore_eos": true, "seed": 1 })
}

#[test]
fn another_machine_goes_on_after_the_end_of_a_node() {
    let Some(server) = shared() else { return };
    let (url, first) = (place(server), without_ledger());
    first.json(&["init", "--ledger", &url, "--standbys", "0"]);
    let Customer { account, key, .. } = first.customer(100_000_000);
    let second = same_ledger(&first);
    let node = first.serve();
    let ids = [Uuid::new_v4().to_string(), Uuid::new_v4().to_string()];
    let done = node.chat(&key, &ids[0], &question(&node, false, 8)).finish();
    assert_eq!(done.status, 200, "{}", done.body);
    let mut running = node.chat(&key, &ids[1], &question(&node, true, 1_500));
    running.read_until("\"content\":");
    node.kill();
    drop(running);
    let node = second.serve();
    let replayed = node.chat(&key, &ids[0], &question(&node, false, 8)).finish();
    assert_eq!(replayed.body, done.body, "byte for byte");
    assert_eq!(replayed.headers["idempotent-replayed"], "true");
    let lost = second.json(&["requests", "show", &ids[1]]);
    assert_eq!((&lost["state"], &lost["chargedUnits"]), (&json!("failed"), &json!("0")), "{lost}");
    assert_eq!(second.json(&["credits", "show", "--account", &account])["reservedUnits"], "0");
    assert_eq!(second.json(&["ledger", "audit"])["ok"], true);
    let status = second.run(&["status"]).stdout;
    assert!(status.contains("the ledger is in a database"), "{status}");
    assert!(node.terminate().success());
    assert_eq!(second.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn commands_work_beside_a_node_and_a_data_folder_has_one() {
    let Some(server) = shared() else { return };
    let (url, folder) = (place(server), without_ledger());
    let made = folder.json(&["init", "--ledger", &url, "--standbys", "0"]);
    assert!(made["configuration"].as_str().unwrap().ends_with("cresset.toml"));
    assert!(folder.fails(&["init"], 1).contains("has a table"));
    let node = folder.serve();
    let other = same_ledger(&folder);
    let serve = ["serve", "--listen", "0", "--operator", "0"];
    let backup = ["backup", "/tmp/cresset-unwritten.node"];
    for (command, part) in [(&serve[..], "in use by another process"), (&backup, "pg_dump")] {
        let refused = folder.fails(command, 1);
        assert!(refused.contains(part), "{refused}");
    }
    let Customer { account, key, .. } = other.customer(1_000_000);
    assert_eq!(folder.json(&["accounts", "show", &account])["id"], json!(account));
    assert_eq!(node.get(&key, "/v1/models").status, 200);
    assert_eq!(other.json(&["ledger", "audit"])["ok"], true);
    let nodes = other.json(&["nodes"])["data"].as_array().unwrap().clone();
    assert_eq!((nodes.len(), &nodes[0]["state"]), (1, &json!("running")), "{nodes:?}");
    // Another plan under the same name would give an account other limits there.
    let file = other.path().join("cresset.toml");
    let settings = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, settings + "\n[plans.default]\nburst = 7\n").unwrap();
    let refused = other.fails(&serve, 1);
    assert!(refused.contains("the plan \"default\" differs"), "{refused}");
    assert!(folder.run(&["doctor"]).stdout.contains("ledger.standbys is 0"));
    assert!(node.terminate().success());
}

#[test]
fn nodes_that_charge_differently_are_told_apart() {
    let Some(server) = shared() else { return };
    let first = without_ledger();
    first.json(&["init", "--ledger", &place(server), "--standbys", "0"]);
    let second = same_ledger(&first);
    let price = |folder: &Folder, output: &str| {
        folder.run(&["models", "price", MODEL, "--output", output, "--json"]).document()
    };
    let node = first.serve();
    price(&second, "900_000");
    let refused =
        second.fails(&["serve", "--listen", "127.0.0.1:0", "--operator", "127.0.0.1:0"], 1);
    let remedy = "models price tiny --input 100000 --cached-input 25000 --output 400000` here";
    assert!(refused.contains("the prices of tiny differ") && refused.contains(remedy), "{refused}");
    // The same change at both, while both run: until the second one has it, the first says so.
    price(&second, "400_000");
    let other = second.serve();
    let changed = price(&first, "900_000");
    assert!(changed["problems"].to_string().contains("the prices of tiny differ"), "{changed}");
    let output = |node: &Served, key: &str| {
        let models = node.get(key, "/v1/models").json();
        models["data"][0]["pricing"]["outputUnitsPerMillion"].as_str().unwrap().to_owned()
    };
    let Customer { key, .. } = first.customer(1_000_000);
    assert_eq!([output(&node, &key), output(&other, &key)], ["900000", "400000"]);
    assert_eq!(price(&second, "900_000")["problems"], json!([]));
    assert_eq!(output(&other, &key), "900000");
    assert!(other.terminate().success());
    assert!(second.serve().terminate().success());
    assert!(node.terminate().success());
}

#[test]
fn a_ledger_in_a_database_is_measured_beside_what_is_there() {
    let Some(server) = shared() else { return };
    let (url, folder) = (place(server), without_ledger());
    folder.json(&["init", "--ledger", &url, "--standbys", "0"]);
    let measure = ["bench", "--ledger", "--url", &url, "--clients", "1,4", "--seconds", "1"];
    let more = ["--nodes", "2", "--accounts", "3", "--answer-bytes", "700"];
    let measured = folder.json(&[&measure[..], &more].concat());
    let clients = [0, 1].map(|level: usize| measured["levels"][level]["clients"].clone());
    assert_eq!((clients, &measured["audit_ok"]), ([json!(2), json!(8)], &json!(true)));
    assert!(measured["stored_answer_bytes"].as_u64().unwrap() > 700, "{measured}");
    let accounts = folder.json(&["accounts", "list"]);
    assert_eq!(accounts["data"], json!([]), "the ledger that was there is as it was");
}

/// Three slow nodes, and a customer that all of them know.
pub fn three_nodes(server: &ServerProcess, lease: u32) -> ([Folder; 3], [Served; 3], Customer) {
    let first = without_ledger();
    let settings = format!("[ledger]\nlease_seconds = {lease}\n");
    std::fs::write(first.path().join("cresset.toml"), settings).unwrap();
    first.json(&["init", "--ledger", &place(server), "--standbys", "0"]);
    let customer = first.customer(100_000_000);
    let folders = [same_ledger(&first), same_ledger(&first), first];
    let slowly = |folder: &Folder| folder.serve_failing("engine::step=sleep(5)");
    let nodes = folders.each_ref().map(slowly);
    (folders, nodes, customer)
}

#[test]
fn one_request_sent_to_three_nodes_runs_once() {
    let Some(server) = shared() else { return };
    let (folders, nodes, Customer { account, key, .. }) = three_nodes(server, 10);
    let ids: Vec<String> = (0..4).map(|_| Uuid::new_v4().to_string()).collect();
    let question = question(&nodes[0], false, 64);
    std::thread::scope(|scope| {
        for (id, node) in ids.iter().flat_map(|id| nodes.iter().map(move |node| (id, node))) {
            for _ in 0..4 {
                let (key, question) = (&key, &question);
                scope.spawn(move || {
                    let reply = node.chat(key, id, question).finish();
                    let is_elsewhere = reply.status == 409 && reply.body.contains("in_progress");
                    assert!(reply.status == 200 || is_elsewhere, "{}\n{}", reply.body, node.log());
                });
            }
        }
    });
    let mut charged = 0;
    for id in &ids {
        let bodies = nodes.each_ref().map(|node| node.chat(&key, id, &question).finish());
        assert!(bodies.iter().all(|reply| reply.status == 200 && reply.body == bodies[0].body));
        let shown = folders[0].json(&["requests", "show", id]);
        assert_eq!(shown["attempts"].as_array().map(Vec::len), Some(1), "{shown}");
        charged += shown["chargedUnits"].as_str().unwrap().parse::<u64>().unwrap();
    }
    let balance = folders[1].json(&["credits", "show", "--account", &account]);
    assert_eq!(balance["reservedUnits"], "0");
    let left: u64 = balance["trialUnits"].as_str().unwrap().parse().unwrap();
    assert_eq!(left, 100_000_000 - charged);
    assert_eq!(folders[2].json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn a_run_is_ended_from_any_node() {
    let Some(server) = shared() else { return };
    let (folders, nodes, Customer { account, key, key_id }) = three_nodes(server, 2);
    let ended = |how: &str, act: &dyn Fn(&str), status: &str| {
        let id = Uuid::new_v4().to_string();
        let mut running = nodes[0].chat(&key, &id, &question(&nodes[0], true, 700));
        running.read_until("\"content\":");
        act(&id);
        drop(running.rest());
        let shown = folders[1].json(&["requests", "show", &id]);
        assert_eq!(shown["state"], status, "{how}: {shown}");
    };
    let cancel = |id: &str| {
        let head = format!("DELETE /v1/requests/{id} HTTP/1.1\r\nAuthorization: Bearer {key}\r\n");
        let reply = request(&nodes[1].listen, &head, "").finish();
        assert_eq!(reply.status, 202, "{}", reply.body);
    };
    ended("cancelled at another node", &cancel, "cancelled");
    let suspend = |_: &str| drop(folders[2].json(&["accounts", "suspend", &account]));
    ended("suspended", &suspend, "cancelled");
    folders[1].json(&["accounts", "resume", &account]);
    let revoke = |_: &str| drop(folders[1].json(&["keys", "revoke", &key_id]));
    ended("revoked", &revoke, "cancelled");
    assert_eq!(folders[2].json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn the_others_go_on_when_a_node_dies_or_stands_still() {
    let Some(server) = shared() else { return };
    let (folders, nodes, Customer { account, key, .. }) = three_nodes(server, 2);
    let ids: Vec<String> = (0..3).map(|_| Uuid::new_v4().to_string()).collect();
    let running: Vec<_> = nodes
        .iter()
        .zip(&ids)
        .map(|(node, id)| {
            let mut running = node.chat(&key, id, &question(node, true, 700));
            running.read_until("\"content\":");
            running
        })
        .collect();
    let [dead, still, well] = nodes;
    dead.kill();
    still.signal("STOP");
    let state = |id: &str| folders[2].json(&["requests", "show", id])["state"].clone();
    eventually("both are ended by the third", || ids[..2].iter().all(|id| state(id) == "failed"));
    still.signal("CONT");
    let answers: Vec<_> = running.into_iter().map(Stream::rest).collect();
    let ended = |answer: &str| answer.contains("finish_reason\":\"length");
    assert!(!ended(&answers[0]) && answers[1].contains("\"error\""), "{}", answers[1]);
    assert!(ended(&answers[2]), "the third had no part in it");
    for id in &ids[..2] {
        let shown = folders[2].json(&["requests", "show", id]);
        assert_eq!(shown["chargedUnits"], "0", "{shown}");
    }
    // The one that stood still takes requests again, also the one that it lost.
    eventually("it is ready again", || get(&still.operator, "/readyz").status == 200);
    let again = still.chat(&key, &ids[1], &question(&still, true, 700)).rest();
    assert!(ended(&again), "{again}");
    let balance = folders[2].json(&["credits", "show", "--account", &account]);
    assert_eq!(balance["reservedUnits"], "0", "{balance}");
    assert_eq!(folders[2].json(&["ledger", "audit"])["ok"], true);
    assert!(still.terminate().success() && well.terminate().success());
}

#[test]
fn a_node_waits_for_its_database_and_says_so() {
    let Some(server) = shared() else { return };
    let (url, folder) = (place(server), without_ledger());
    folder.json(&["init", "--ledger", &url, "--standbys", "0"]);
    // A socket that is not there yet.
    let host = folder.path().join("db");
    let elsewhere = url.replace(server.folder.to_str().unwrap(), host.to_str().unwrap());
    let mut command = folder.serve_command(&[]);
    command.env("CRESSET_LEDGER__URL", elsewhere);
    let node = std::thread::spawn(move || Served::start(command));
    eventually("the start says what it waits for", || {
        let status = folder.run(&["status", "--json"]).stdout;
        status.contains("waiting for the database of the ledger (ledger.url)")
    });
    std::os::unix::fs::symlink(&server.folder, &host).unwrap();
    let node = node.join().unwrap();
    assert_eq!(get(&node.operator, "/readyz").status, 200);
    assert!(node.terminate().success());
}

/// What a short command says where it is given this address and these variables.
fn refused(folder: &Folder, url: &str, more: &[(&str, &str)]) -> String {
    let mut command = folder.command(&["accounts", "list"]);
    command.env("CRESSET_LEDGER__URL", url).env("CRESSET_LEDGER__STANDBYS", "0");
    let output = command.envs(more.iter().copied()).output().unwrap();
    assert!(!output.status.success(), "{url}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!said.contains("secret"), "{said}");
    said
}

#[test]
fn what_cannot_be_meant_is_refused_with_the_setting() {
    let Some(server) = shared() else { return };
    let (url, folder) = (place(server), without_ledger());
    let host = format!("host={}", server.folder.display());
    let missing = folder.path().join("none").display().to_string();
    let (standbys, password) = ("CRESSET_LEDGER__STANDBYS", "CRESSET_LEDGER__PASSWORD_FILE");
    for (url, more, part) in [
        (url.as_str(), None, "cresset init --ledger"),
        (&format!("postgres:///none?user=cresset&{host}"), None, "name in ledger.url"),
        ("postgres://u:secret@db/d", None, "ledger.password_file"),
        ("db", None, "ledger.url: must be an address like postgres://USER@HOST"),
        (url.as_str(), Some((standbys, "2")), "ledger.standbys is 2"),
        (url.as_str(), Some((password, missing.as_str())), "ledger.password_file"),
    ] {
        let said = refused(&folder, url, more.as_slice());
        assert!(said.contains(part), "{url}: {said}");
    }
    let both = Folder::initialised();
    let said = both.fails(&["init", "--ledger", &url, "--standbys", "0"], 1);
    assert!(said.contains("has a ledger of its own"), "{said}");
}

#[test]
fn a_server_that_loses_what_it_acknowledged_is_refused() {
    let Some(programs) = programs() else { return };
    let server = ServerProcess::start(&programs, 5432, |_| "-c full_page_writes=off".into());
    let said = refused(&Folder::empty(), &place(&server), &[]);
    assert!(said.contains("ledger.url has full_page_writes off"), "{said}");
}
