//! What others near a node may not do: other applications of the account, holders of a revoked
//! credential, other users of the machine, web pages in a browser on it, and whoever moves its
//! files. And what a signal or a client's own retry must not cost.

use super::process::{Folder, get, request, shell};
use super::support::{World, application, issue, next_piece, revoke};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use uuid::Uuid;

#[tokio::test(flavor = "multi_thread")]
async fn an_application_learns_nothing_of_what_others_sent() {
    let world = World::new().await;
    let mut keys = vec![world.key.clone()];
    for _ in 0..2 {
        let application = application(&world.node, world.account).await;
        keys.push(issue(&world.node, world.account, Some(application)).await.1);
    }
    let secret = "the secret of one application ".repeat(9);
    let body = world.ask(json!({ "messages": [{ "role": "user", "content": secret }] }));
    let cached = async |key: &str| {
        let answer = world.post_as(key, Uuid::new_v4(), &body).await;
        answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    for key in &keys {
        assert_eq!(cached(key).await, 0, "each is the first of its own");
        assert!(cached(key).await > 0, "its own prefix is found again");
    }
    let (_, second) = issue(&world.node, world.account, None).await;
    assert!(cached(&second).await > 0, "the account's own keys share theirs");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_credential_that_had_attached_hears_no_more() {
    let world = World::with(|setup| {
        setup.ends = false;
        setup.step = Duration::from_millis(5);
    })
    .await;
    let (guest_id, guest) = issue(&world.node, world.account, None).await;
    let (id, body) = (Uuid::new_v4(), world.ask(json!({ "stream": true, "max_tokens": 900 })));
    let mut own = world.open(&world.key, id, &body).await;
    next_piece(&mut own).await;
    let mut attached = world.open(&guest, id, &body).await;
    next_piece(&mut attached).await;
    revoke(&world.node, guest_id).await;
    let mut heard = String::new();
    loop {
        match next_piece(&mut attached).await {
            piece if piece.is_empty() => break,
            piece => heard.push_str(&piece),
        }
    }
    assert!(heard.contains("invalid_credential"), "{heard}");
    assert!(!heard.contains("finish_reason\":\"length"), "it ended early: {heard}");
    // A request is answered before the record says that it runs.
    let state = world.request(id).await["state"].clone();
    assert!(state == "running" || state == "queued", "the owner's stream goes on, not {state}");
    assert!(!next_piece(&mut own).await.is_empty());
    world.delete(id).await;
    world.close().await;
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Runs a command with a mask that takes no rights away.
fn unmasked(folder: &Folder, arguments: &[&str]) {
    let command = folder.command(arguments);
    let status = shell("umask 0; exec \"$@\"")
        .arg("sh")
        .arg(command.get_program())
        .args(command.get_args())
        .stdout(Stdio::null())
        .status();
    assert!(status.unwrap().success(), "{arguments:?}");
}

#[test]
fn files_are_the_owners_alone_whatever_mask_the_process_has() {
    let folder = Folder::empty();
    set_mode(folder.path(), 0o755);
    let backup = folder.path().join("backup.redb");
    unmasked(&folder, &["init"]);
    unmasked(&folder, &["ledger", "backup", backup.to_str().unwrap()]);
    for name in ["ledger.redb", "bodies.redb", "lock", "backup.redb"] {
        assert_eq!(mode(&folder.path().join(name)), 0o600, "{name}");
    }
    set_mode(&backup, 0o644);
    unmasked(&folder, &["ledger", "restore", backup.to_str().unwrap()]);
    assert_eq!(mode(&folder.path().join("ledger.redb")), 0o600, "restored");
}

#[test]
fn files_that_others_could_open_are_closed_at_the_start() {
    let folder = Folder::ready();
    let ledger = folder.path().join("ledger.redb");
    set_mode(&ledger, 0o644);
    let finding = || {
        let document = folder.run(&["doctor", "--json"]).document();
        let checks = document["checks"].as_array().unwrap().clone();
        checks.into_iter().find(|check| check["check"] == "file rights").unwrap()
    };
    let open = finding();
    assert_eq!(open["verdict"], "warning");
    assert!(open["detail"].as_str().unwrap().contains("ledger.redb"), "{open}");
    let node = folder.serve();
    assert_eq!(mode(&ledger), 0o600);
    assert!(node.log().contains("other users could open"), "{}", node.log());
    assert_eq!(finding()["verdict"], "good");
}

#[test]
fn a_hangup_reads_again_and_ends_nothing() {
    let folder = Folder::ready();
    let customer = folder.customer(1_000_000);
    let node = folder.serve();
    let models = || node.get(&customer.key, "/v1/models").json()["data"].as_array().unwrap().len();
    assert_eq!(models(), 1);
    let second = folder.path().join("second.gguf");
    cresset_models::testing::tiny_llama_gguf(&second, 8).unwrap();
    folder.json(&["models", "add", "--path", second.to_str().unwrap(), "--name", "second"]);
    folder.qualify("second");
    until(|| models() == 2);
    std::fs::write(folder.path().join("cresset.toml"), "[plans.default]\nburst = 61\n").unwrap();
    node.signal("HUP");
    until(|| models() == 2);
    until(|| node.log().contains("plans.default.burst"));
    assert!(!node.log().contains("need a restart"), "{}", node.log());
    std::fs::write(folder.path().join("cresset.toml"), "nonsense").unwrap();
    node.signal("HUP");
    until(|| node.log().contains("the configuration cannot be read"));
    assert_eq!(models(), 2);
    assert!(node.terminate().success());
}

fn until(condition: impl Fn() -> bool) {
    while !condition() {
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_data_folder_that_is_gone_admits_nothing() {
    let folder = Folder::ready();
    let customer = folder.customer(1_000_000);
    let node = folder.serve();
    let ask = || {
        let body = json!({ "model": node.model, "messages": [{ "role": "user", "content": "a" }], "max_tokens": 2 });
        node.chat(&customer.key, &Uuid::new_v4().to_string(), &body).finish().status
    };
    assert_eq!(ask(), 200);
    let (files, aside) = (["ledger.redb", "lock"], folder.path().join("aside"));
    std::fs::create_dir(&aside).unwrap();
    for name in files {
        let (path, away) = (folder.path().join(name), aside.join(name));
        std::fs::rename(&path, &away).unwrap();
        std::fs::copy(&away, &path).unwrap();
        until(|| get(&node.operator, "/readyz").status == 503);
        let reason = get(&node.operator, "/readyz").body;
        assert!(reason.contains("removed or replaced"), "{name}: {reason}");
        until(|| ask() == 503);
        // A log is read as it comes, on a busy machine after the answer.
        until(|| node.log().contains("removed or replaced"));
        std::fs::rename(&away, &path).unwrap();
        until(|| ask() == 200);
    }
}

/// The status of a request with these header lines.
pub fn status(base: &str, lines: &str) -> String {
    let mut stream = TcpStream::connect(base.strip_prefix("http://").unwrap()).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\n{lines}Connection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().to_owned()
}

#[test]
fn the_operator_listener_answers_under_its_own_names_only() {
    let folder = Folder::ready();
    std::fs::write(
        folder.path().join("cresset.toml"),
        "[listen]\noperator_names = [\"metrics.internal\"]\n",
    )
    .unwrap();
    let node = folder.serve();
    let check = |lines: &str, expect: &str| {
        assert_eq!(status(&node.operator, lines), expect, "{lines}");
    };
    check("Host: LOCALHOST.:8081\r\n", "200");
    check("Host: metrics.internal:8081\r\n", "200");
    check("Host: evil.example:8081\r\n", "403");
    check("Host: localhost\r\nOrigin: http://evil.example\r\n", "403");
    check("Host: localhost\r\nSec-Fetch-Site: cross-site\r\n", "403");
}

#[test]
fn a_retry_through_the_relay_pays_once() {
    let folder = Folder::ready();
    let customer = folder.customer(100_000_000);
    let node = folder.serve();
    let key = folder.path().join("relay.key");
    std::fs::write(&key, &customer.key).unwrap();
    let arguments =
        ["relay", "--json", "--listen", "127.0.0.1:0", "--upstream", &node.listen, "--key-file"];
    let mut relay = folder.command(&arguments).arg(&key).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(relay.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap();
    let base = ready["listen"].as_str().unwrap();
    let body = json!({
        "model": node.model, "messages": [{ "role": "user", "content": "hello" }],
        "max_tokens": 150, "stream": true, "ignore_eos": true, "seed": 1,
    });
    let head = |count: u32| {
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json\r\n\
             x-stainless-retry-count: {count}\r\n"
        )
    };
    // Clients try again by themselves only where no answer had begun.
    let (body, address) = (body.to_string(), base.strip_prefix("http://").unwrap());
    let mut broken = TcpStream::connect(address).unwrap();
    let (head_0, length) = (head(0), body.len());
    write!(broken, "{head_0}Host: {address}\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
    drop(broken);
    let retried = request(base, &head(1), &body).finish();
    let again = request(base, &head(2), &body).finish();
    relay.kill().unwrap();
    relay.wait().unwrap();
    assert_eq!((retried.status, again.status), (200, 200), "{retried:?}");
    let requests = folder.json(&["requests", "list", "--account", &customer.account]);
    let rows = requests["data"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "one call, one request: {rows:?}");
}
