//! Real nodes whose database stands still or fails over.

use crate::database::{place, psql, server_process::ServerProcess, three_nodes};
use crate::process::{Customer, Folder, Served, Stream, eventually, get};
use serde_json::{Value, json};
use std::thread;
use std::time::Duration;
use uuid::Uuid;

fn question(node: &Served, stream: bool, max_tokens: u32) -> Value {
    json!({ "model": node.model, "messages": [{ "role": "user", "content": "tell me" }],
            "stream": stream, "max_tokens": max_tokens, "ignore_eos": true, "seed": 1 })
}

/// The boots of the nodes that run.
fn running(folder: &Folder) -> Vec<String> {
    let nodes = folder.json(&["nodes"]);
    let running =
        nodes["data"].as_array().unwrap().iter().filter(|node| node["state"] == "running");
    running.map(|node| node["boot"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_database_that_stands_still_for_longer_than_a_lease_ends_no_node() {
    let Some(programs) = crate::database::server_process::programs() else { return };
    let server = ServerProcess::start(&programs, 5432, |_| String::new());
    let (folders, nodes, Customer { account, key, .. }) = three_nodes(&server, 1);
    let before = running(&folders[0]);
    assert_eq!(before.len(), 3);
    let ask = |node: &Served| {
        let id = Uuid::new_v4().to_string();
        let mut stream = node.chat(&key, &id, &question(node, true, 500));
        stream.read_until("\"content\":");
        stream
    };
    let streams: Vec<_> = nodes.iter().map(ask).collect();
    server.signal("STOP");
    thread::sleep(Duration::from_secs(4));
    server.signal("CONT");
    for answer in streams.into_iter().map(Stream::rest) {
        assert!(answer.contains("finish_reason\":\"length"), "it ran to its end: {answer}");
    }
    // Longer than it takes to notice a lease that has run out.
    thread::sleep(Duration::from_secs(3));
    assert_eq!(running(&folders[0]), before);
    let balance = folders[1].json(&["credits", "show", "--account", &account]);
    assert_eq!(balance["reservedUnits"], "0", "{balance}");
    assert_eq!(folders[2].json(&["ledger", "audit"])["ok"], true);
    assert!(nodes.into_iter().all(|node| node.terminate().success()));
}

#[test]
fn a_node_goes_on_with_the_standby_that_takes_the_place_of_its_database() {
    let Some(programs) = crate::database::server_process::programs() else { return };
    let primary = ServerProcess::start(&programs, 5432, |_| String::new());
    let standby = ServerProcess::standby_of(&primary.folder, &programs);
    psql(&primary, "alter system set synchronous_standby_names = '*'");
    psql(&primary, "select pg_reload_conf()");
    let folder = Folder::ready();
    for file in ["ledger.redb", "bodies.redb"] {
        std::fs::remove_file(folder.path().join(file)).unwrap();
    }
    let [first, second] = [&primary, &standby].map(|server| server.folder.display().to_string());
    let both = format!("postgres://{first},{second}").replace("/tmp", "%2Ftmp");
    let url = place(&primary).replace(&format!("&host={first}"), "");
    let url = url.replace("postgres://", &both.replace("/.", "%2F."));
    folder.json(&["init", "--ledger", &url, "--standbys", "0"]);
    let Customer { account, key, .. } = folder.customer(10_000_000);
    let node = folder.serve();
    let ask = |id: &str| node.chat(&key, id, &question(&node, false, 8)).finish();
    let ids: Vec<_> = (0..10).map(|_| Uuid::new_v4().to_string()).collect();
    let bodies: Vec<_> = ids.iter().map(|id| ask(id).body).collect();
    drop(primary);
    standby.program(&programs, "pg_ctl", &["promote", "-w", "-D", "data"]);
    eventually("the node is ready again", || get(&node.operator, "/readyz").status == 200);
    for (id, body) in ids.iter().zip(&bodies) {
        let replayed = ask(id);
        assert_eq!((replayed.status, &replayed.body), (200, body), "{}", node.log());
    }
    // The first write finds out that its connection is gone, and is repeated under its id.
    let id = Uuid::new_v4().to_string();
    eventually("new requests run", || ask(&id).status == 200);
    let balance = folder.json(&["credits", "show", "--account", &account]);
    assert_eq!(balance["reservedUnits"], "0", "{balance}");
    assert!(node.terminate().success());
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}
