//! TLS of the node's listeners, and of commands that are given an https address.

use super::process::{Finished, Folder};
use cresset_tls::{NodeAddress, Socket};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::either::Either;

pub fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/tls").join(name)
}

/// A folder whose listeners all show the first certificate.
pub fn secured() -> Folder {
    let folder = Folder::ready();
    show(&folder, "first");
    let [certificate, key] = ["shown.pem", "shown.key"].map(|name| folder.path().join(name));
    let listeners = "listeners = [\"public\", \"operator\", \"gateway\"]\n";
    configure(&folder, &certificate, &key, listeners);
    folder
}

fn configure(folder: &Folder, certificate: &Path, key: &Path, more: &str) {
    let [certificate, key, trusted] =
        [certificate, key, &file("authority.pem")].map(|path| path.to_str().unwrap().to_owned());
    let settings = format!(
        "[tls]\ncertificate = {certificate:?}\nkey = {key:?}\ntrusted = {trusted:?}\n{more}"
    );
    std::fs::write(folder.path().join("cresset.toml"), settings).unwrap();
}

fn show(folder: &Folder, name: &str) {
    for kind in ["pem", "key"] {
        let to = folder.path().join("shown").with_extension(kind);
        std::fs::copy(file(&format!("{name}.{kind}")), to).unwrap();
    }
}

/// A connection to `url` that trusts the tests' authority.
async fn connect(url: &str) -> Socket {
    NodeAddress::new(url, Some(&file("authority.pem"))).unwrap().connect().await.unwrap()
}

/// The certificate that a connection was shown, in DER.
fn shown(connection: &Socket) -> Vec<u8> {
    let Either::Right(secured) = connection else { panic!("there is no TLS") };
    secured.get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

async fn get(connection: &mut Socket, path: &str, key: &str) -> String {
    let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n");
    connection.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer).await.unwrap();
    String::from_utf8(answer).unwrap()
}

fn status(folder: &Folder) -> Value {
    folder.json(&["status"])
}

#[tokio::test(flavor = "multi_thread")]
async fn every_listener_speaks_tls_and_shows_a_renewed_certificate() {
    let folder = secured();
    let customer = folder.customer(1_000_000);
    let node = folder.serve_with(&["--gateway", "127.0.0.1:0"]);
    let status = status(&folder);
    let paths = [("listen", "/v1/me"), ("operator", "/readyz"), ("gateway", "/v1/models")];
    for (listener, path) in paths {
        let url = status[listener].as_str().unwrap();
        assert!(url.starts_with("https://"), "{url}");
        let answer = get(&mut connect(url).await, path, &customer.key).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{listener}: {answer}");
        assert!(NodeAddress::new(url, None).unwrap().connect().await.is_err(), "nobody signed it");
        let mut plain = TcpStream::connect(url.strip_prefix("https://").unwrap()).await.unwrap();
        plain.write_all(b"GET /v1/me HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        let _ = plain.read_to_end(&mut answer).await;
        assert!(!answer.starts_with(b"HTTP"), "{listener} answers without TLS");
    }
    let mut open = connect(&node.listen).await;
    show(&folder, "second");
    assert_eq!(folder.json(&["reload"])["certificate"], true);
    let renewed = connect(&node.listen).await;
    assert_ne!(shown(&renewed), shown(&open));
    assert!(get(&mut open, "/v1/me", &customer.key).await.starts_with("HTTP/1.1 200"));
    std::fs::copy(file("first.key"), folder.path().join("shown.key")).unwrap();
    let answer = folder.run(&["reload"]);
    assert!(answer.code == Some(1) && answer.stdout.contains("shown.key"), "{answer:?}");
    assert_eq!(shown(&connect(&node.listen).await), shown(&renewed), "the last good one stays");
    assert!(node.terminate().success());
}

/// The end of `first.pem` and `second.pem`: 2126-10-30 17:41:47 and the second after it.
const ENDS: [u64; 2] = [4_949_055_707, 4_949_055_708];

/// What `cresset doctor` finds of the certificate.
fn examined(folder: &Folder) -> Value {
    let report = folder.run(&["doctor", "--json"]);
    let report: Value = serde_json::from_str(&report.stdout).unwrap();
    let mut checks = report["checks"].as_array().unwrap().iter();
    checks.find(|check| check["check"] == "certificate").unwrap().clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_certificate_is_told() {
    let folder = secured();
    assert_eq!(examined(&folder)["verdict"], "good", "before the node runs");
    let node = folder.serve();
    let metrics = async || get(&mut connect(&node.operator).await, "/metrics", "").await;
    let line = |listener: &str, at: u64| {
        let name = "cresset_certificate_not_after_seconds";
        format!("\n{name}{{listener=\"{listener}\"}} {at}\n")
    };
    let told = metrics().await;
    for listener in ["public", "operator"] {
        assert!(told.contains(&line(listener, ENDS[0])), "{told}");
    }
    assert!(!told.contains("listener=\"gateway\""), "there is none: {told}");
    let screen = || folder.run(&["status"]).stdout;
    assert!(!screen().contains("certificate"), "{}", screen());

    show(&folder, "second");
    let found = examined(&folder);
    assert_eq!(
        (&found["verdict"], &found["remedy"]),
        (&json!("warning"), &json!("cresset reload"))
    );
    folder.json(&["reload"]);
    assert!(metrics().await.contains(&line("public", ENDS[1])), "a renewed one");
    assert_eq!(examined(&folder)["verdict"], "good");

    show(&folder, "ended");
    folder.json(&["reload"]);
    let ended = "ended at 2026-01-31 00:00:00Z";
    assert!(screen().contains(&format!("the certificate {ended}: renew it")), "{}", screen());
    let found = examined(&folder);
    assert_eq!((&found["verdict"], &found["detail"]), (&json!("wrong"), &json!(ended)));
    assert!(node.terminate().success());
}

/// Asks a gateway by the model's name.
async fn asked_by_name(gateway: &str, key: &str) -> String {
    let mut connection = connect(gateway).await;
    let body = json!({ "model": "tiny", "max_tokens": 2,
                       "messages": [{ "role": "user", "content": "hi" }] });
    let body = body.to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\
         Content-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all((head + &body).as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer).await.unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn gateways_and_commands_speak_tls_to_a_node() {
    let folder = secured();
    let customer = folder.customer(1_000_000);
    let node = folder.serve_with(&["--gateway", "127.0.0.1:0"]);
    let gateway = status(&folder)["gateway"].as_str().unwrap().to_owned();
    let answer = asked_by_name(&gateway, &customer.key).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "the node's own: {answer}");

    let upstream = node.listen.replace("127.0.0.1", "localhost");
    let mut relay = folder
        .command(&["relay", "--json", "--listen", "127.0.0.1:0", "--upstream", &upstream])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(relay.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap();
    let answer = asked_by_name(ready["listen"].as_str().unwrap(), &customer.key).await;
    relay.kill().unwrap();
    relay.wait().unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "a relay: {answer}");

    let bench = ["bench", "--url", &node.listen, "--key", &customer.key, "--concurrency", "1"];
    let few = ["--requests", "1", "--output-tokens", "2", "--input-tokens", "8"];
    let levels = folder.json(&[&bench[..], &few].concat());
    assert_eq!(levels["levels"][0]["answered"], 1, "{levels}");
    let question = folder.path().join("question");
    std::fs::write(&question, "hi\n").unwrap();
    let mut chat = folder.command(&["chat", "--key", &customer.key, "--max-tokens", "2"]);
    let said = Finished::of(chat.stdin(File::open(question).unwrap()).output().unwrap());
    assert!(said.code == Some(0) && !said.stdout.is_empty(), "{said:?}");
    assert!(node.terminate().success());
}

#[test]
fn what_is_no_certificate_is_named() {
    let check = |certificate: &str, key: &str, expect: &str| {
        let folder = Folder::ready();
        configure(&folder, &file(certificate), &file(key), "");
        let said =
            folder.fails(&["serve", "--listen", "127.0.0.1:0", "--operator", "127.0.0.1:0"], 1);
        assert!(said.contains(expect) && said.contains("tls.certificate"), "{said}");
    };
    check("nothing.pem", "first.key", "nothing.pem");
    check("first.key", "first.key", "holds no certificate");
    check("first.pem", "first.pem", "holds no private key");
    check("first.pem", "second.key", "cannot be used together");
}
