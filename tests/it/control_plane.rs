//! While the ledger cannot be written, no request is admitted. A read is answered as before or
//! refused with 503, and never answered wrongly.

use crate::process::{Customer, Folder, Served, eventually, request};
use serde_json::json;
use std::process::Command;
use uuid::Uuid;

const ID: &str = "0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b";

/// Lets no file of the node grow beyond `bytes`, as a full disk would.
fn limit_files(node: &Served, bytes: &str) {
    let arguments = ["--pid", &node.id().to_string(), &format!("--fsize={bytes}:unlimited")];
    assert!(Command::new("prlimit").args(arguments).status().unwrap().success());
}

fn send(node: &Served, key: &str, method: &str, path: &str) -> (u16, String) {
    let head = format!("{method} {path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\n");
    let reply = request(&node.listen, &head, "").finish();
    let code = reply.json()["error"]["code"].as_str().unwrap_or_default().to_owned();
    assert_eq!(reply.status == 503, reply.headers.contains_key("retry-after"), "{reply:?}");
    (reply.status, code)
}

#[test]
fn a_ledger_that_cannot_be_written_admits_nothing_and_denies_no_credential() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1_000_000);
    let node = folder.serve_within(1 << 40);
    let ask = json!({ "model": node.model, "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 2 });
    let paths = [
        ("GET", "/v1/me".to_owned()),
        ("GET", "/v1/models".to_owned()),
        ("GET", format!("/v1/models/{}", node.model)),
        ("GET", "/v1/credits".to_owned()),
        ("GET", format!("/v1/requests/{ID}")),
        ("DELETE", format!("/v1/requests/{ID}")),
        ("GET", "/no/such/path".to_owned()),
    ];
    let usual = paths.each_ref().map(|(method, path)| send(&node, &key, method, path));
    limit_files(&node, "4096");
    let lost = Uuid::new_v4().to_string();
    assert_eq!(node.chat(&key, &lost, &ask).finish().status, 503, "its reservation cannot be made");
    for ((method, path), usual) in paths.iter().zip(&usual) {
        let unavailable = (503, "control_plane_unavailable".to_owned());
        let found = send(&node, &key, method, path);
        assert!(found == unavailable || found == *usual, "{method} {path}: {found:?}");
        assert_eq!(send(&node, "junk", method, path).0, 401, "what no ledger has to confirm");
    }
    limit_files(&node, "unlimited");
    eventually("the same request is answered", || {
        node.chat(&key, &lost, &ask).finish().status == 200
    });
    assert!(node.terminate().success());
    let audit = folder.json(&["ledger", "audit"]);
    assert_eq!((&audit["ok"], &audit["checked"]["reservations"]), (&json!(true), &json!(0)));
}
