//! What newcomers type first, among them the words of other programs: each is understood.

use super::process::{Folder, MODEL};
use serde_json::{Value, json};
use uuid::Uuid;

/// A tiny model's file beside the data folder.
fn model_file(folder: &tempfile::TempDir) -> String {
    let file = folder.path().join("tiny.gguf");
    cresset_models::testing::tiny_llama_gguf(&file, 7).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn one_command_from_a_file_to_an_answer() {
    let (place, folder) = (tempfile::tempdir().unwrap(), Folder::empty());
    let file = model_file(&place);
    let run = ["run", &file, "hello", "--max-tokens", "4"];
    let refused = folder.fails(&run, 1);
    assert!(refused.contains("no reference outputs") && refused.contains("--yes"), "{refused}");
    let first = folder.json(&[&run[..], &["--yes"]].concat());
    assert_eq!(first["usage"]["completion_tokens"], 4, "{first}");
    let again = folder.run(&["run", MODEL, "hello", "--max-tokens", "4", "--json"]);
    assert_eq!(again.document()["usage"]["completion_tokens"], 4, "{again:?}");
    assert!(!again.stderr.contains("qualif"), "{again:?}");
    // The conversation of a pipe, and a model that is given as an option.
    for command in [&["run", MODEL][..], &["chat", "--model", MODEL], &["chat", MODEL]] {
        let mut command = folder.command(&[command, &["--max-tokens", "4"]].concat());
        let mut child = command
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"hello\n").unwrap();
        let said = child.wait_with_output().unwrap();
        assert!(said.status.success() && !said.stdout.is_empty(), "{command:?}");
    }
    let quick = folder.json(&["quickstart", "--once", "--model", MODEL]);
    assert_eq!(quick["account_id"].as_str().map(str::len), Some(36), "{quick}");
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn the_words_of_other_programs_are_understood() {
    let folder = Folder::ready();
    for (word, own) in [
        (&["list"][..], &["models", "list"][..]),
        (&["ls"], &["models", "list"]),
        (&["ps"], &["status"]),
        (&["show", MODEL], &["models", "show", MODEL]),
    ] {
        assert_eq!(folder.json(word), folder.json(own), "{word:?}");
    }
    for (word, own) in [
        (&["pull", "llama3.2"][..], &["models", "pull", "llama3.2"][..]),
        (&["stop", MODEL], &["models", "unload", MODEL]),
        (&["rm", "absent"], &["models", "remove", "absent"]),
        (&["run", "llama3.2:1b"], &["models", "pull", "llama3.2:1b"]),
    ] {
        assert_eq!(folder.fails(word, 1), folder.fails(own, 1), "{word:?}");
    }
    let node = super::process::Served::start(folder.command(&[
        "serve",
        "--json",
        "--port",
        "0",
        "--operator",
        "0",
    ]));
    assert!(node.listen.starts_with("http://127.0.0.1:"), "{}", node.listen);
}

/// The second example of `cresset --help`.
#[test]
fn a_node_without_a_model_is_up_and_takes_the_first_one() {
    let (place, folder) = (tempfile::tempdir().unwrap(), Folder::initialised());
    let key = folder.customer(1_000_000).key;
    let node = folder.serve();
    let ready = || {
        let head = "GET /readyz HTTP/1.1\r\n";
        super::process::request(&node.operator, head, "").finish()
    };
    assert_eq!(node.get(&key, "/v1/models").json()["data"], json!([]));
    let reply = ready();
    assert_eq!(reply.status, 503);
    assert!(reply.body.contains("cresset run"), "{}", reply.body);
    let model = folder.run(&["status"]).stdout;
    assert!(model.contains("cresset run"), "{model}");
    let file = model_file(&place);
    folder.json(&["models", "add", "--path", &file]);
    folder.qualify(MODEL);
    let models: Value = node.get(&key, "/v1/models").json();
    let body = json!({ "model": models["data"][0]["id"], "max_tokens": 2,
                       "messages": [{ "role": "user", "content": "go on" }] });
    let reply = node.chat(&key, &Uuid::new_v4().to_string(), &body).finish();
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(ready().status, 200);
    assert!(node.terminate().success());
}
