//! The command line from outside: its documents, exit codes and error messages.

use crate::process::{Finished, Folder, Served, eventually, get, request, shell};
use crate::release::with_release;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

const NOBODY: &str = "0192f0c1-2a7e-7c3d-9a51-3f0e5b1c7d42";

#[test]
fn init_makes_a_folder_once() {
    let folder = Folder::empty();
    let made = folder.json(&["init"]);
    assert_eq!(made["data_dir"], folder.path().to_str().unwrap());
    let ledger = || std::fs::read(folder.path().join("ledger.redb")).unwrap();
    let before = ledger();
    let message = folder.fails(&["init"], 1);
    assert!(message.contains("has a ledger already"), "{message}");
    assert_eq!(before, ledger(), "a refused init changes nothing");
}

#[test]
fn a_folder_without_a_ledger_is_never_made_by_accident() {
    let folder = Folder::empty();
    for arguments in [&["accounts", "list"][..], &["ledger", "audit"], &["serve"]] {
        let message = folder.fails(arguments, 1);
        assert!(
            message.contains("no ledger") && message.contains("cresset init"),
            "{arguments:?}: {message}"
        );
    }
    assert!(!folder.path().join("ledger.redb").exists());
}

#[test]
fn exit_codes_tell_failure_from_wrong_usage() {
    let folder = Folder::initialised();
    let check = |arguments: &[&str], code: i32, part: &str| {
        let finished = folder.run(arguments);
        let all = format!("{}{}", finished.stdout, finished.stderr);
        assert_eq!(finished.code, Some(code), "{arguments:?}: {all}");
        assert!(all.contains(part), "{arguments:?} does not say {part:?}: {all}");
    };
    check(&["--help"], 0, "Examples:");
    check(&["credits", "grant", "--help"], 0, "--reference");
    check(&["--version"], 0, "cresset ");
    check(&[], 2, "Usage");
    check(&["acounts"], 2, "accounts");
    check(&["keys", "create"], 2, "--account");
    check(&["keys", "create", "--account", ""], 2, "expected 1 to 128 characters");
    check(&["accounts", "create", "--name", "two\nlines"], 2, "control character");
    check(&["keys", "create", "--account", NOBODY, "--expires-in", "soon"], 2, "30d");
    let negative = ["accounts", "create", "--name", "acme", "--trial", "-5_000"];
    check(&negative, 2, "`cresset credits debit` takes credits back");
    check(
        &[
            "credits",
            "grant",
            "--account",
            NOBODY,
            "--bucket",
            "gold",
            "--units",
            "1",
            "--reference",
            "r",
        ],
        2,
        "premium",
    );
    check(
        &[
            "credits",
            "grant",
            "--account",
            NOBODY,
            "--bucket",
            "trial",
            "--units",
            "1.5",
            "--reference",
            "r",
        ],
        2,
        "whole number",
    );
    check(&["accounts", "show", NOBODY], 1, "cresset accounts list");
    check(&["accounts", "show", "me"], 1, "no account is called \"me\"");
    check(&["keys", "list", "--account", NOBODY], 1, "no such account");
    check(&["keys", "revoke", NOBODY], 1, "no such credential");
    check(&["applications", "token", "--application", NOBODY], 1, "no such application");
    check(&["requests", "show", NOBODY], 1, "no such request");
    check(&["requests", "cancel", NOBODY], 1, "no such request");
    check(&["status", "--ready"], 1, "no node runs");
    check(&["status"], 0, "cresset serve");
}

#[test]
fn usage_errors_are_documents_too() {
    let folder = Folder::empty();
    let message = folder.fails(&["keys", "create"], 2);
    assert!(message.contains("--account"), "{message}");
}

#[test]
fn errors_go_to_stderr_and_stay_off_stdout() {
    let folder = Folder::initialised();
    let finished = folder.run(&["accounts", "show", NOBODY]);
    assert_eq!(finished.stdout, "");
    assert!(finished.stderr.starts_with("error: no such account"), "{}", finished.stderr);
    assert!(!finished.stderr.contains('\u{1b}'), "no colours where stderr is no terminal");
}

#[test]
fn a_closed_pipe_is_quiet() {
    let folder = Folder::initialised();
    let mut child = folder
        .command(&["config", "schema"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn configuration_is_shown_checked_and_described() {
    let folder = Folder::empty();
    let file = folder.path().join("own.toml");
    std::fs::write(&file, "[engine]\nkv_mib = 64\n").unwrap();
    let file = file.to_str().unwrap();
    let shown = folder.json(&["config", "show", "--config", file]);
    let row = |key: &str| {
        shown["data"].as_array().unwrap().iter().find(|row| row["key"] == key).unwrap().clone()
    };
    assert_eq!(
        (&row("engine.kv_mib")["value"], row("engine.kv_mib")["origin"].as_str()),
        (&json!(64), Some(file))
    );
    assert_eq!(row("engine.threads")["origin"], "default");
    for row in shown["data"].as_array().unwrap() {
        assert!(
            row["description"].as_str().is_some_and(|text| !text.is_empty()),
            "{row} is not described"
        );
    }
    assert_eq!(folder.json(&["config", "check", "--config", file])["ok"], true);
    assert_eq!(
        folder.json(&["config", "schema"])["properties"]["engine"]["$ref"],
        "#/$defs/EngineSettings"
    );
}

#[test]
fn wrong_configuration_names_key_and_line() {
    let folder = Folder::initialised();
    let file = folder.path().join("cresset.toml");
    let check = |text: &str, parts: &[&str]| {
        std::fs::write(&file, text).unwrap();
        for arguments in [&["config", "check"][..], &["accounts", "list"], &["serve"]] {
            let message = folder.fails(arguments, 1);
            assert!(parts.iter().all(|part| message.contains(part)), "{arguments:?}: {message}");
        }
    };
    check("[engine]\nkv_mibs = 64\n", &["cresset.toml", "line 2", "kv_mibs"]);
    check("[listen]\n\npublic = \"nowhere\"\n", &["line 3", "public"]);
    check("[engine]\nblock_size = 17\n", &["engine.block_size"]);
    check("[log]\nlevel = \"cresset=loud\"\n", &["log.level", "try `info`"]);
}

#[test]
fn variables_override_the_file() {
    let folder = Folder::empty();
    std::fs::write(folder.path().join("cresset.toml"), "[engine]\nkv_mib = 64\n").unwrap();
    let mut command = folder.command(&["config", "show", "--json"]);
    let output = command.env("CRESSET_ENGINE__KV_MIB", "128").output().unwrap();
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    let row =
        shown["data"].as_array().unwrap().iter().find(|row| row["key"] == "engine.kv_mib").unwrap();
    assert_eq!((&row["value"], &row["origin"]), (&json!(128), &json!("CRESSET_ENGINE__KV_MIB")));
}

#[test]
fn completions_know_every_command() {
    let folder = Folder::empty();
    for shell in ["bash", "zsh", "fish"] {
        let script = folder.run(&["completions", shell]).stdout;
        for command in ["quickstart", "serve", "accounts", "ledger", "relay"] {
            assert!(script.contains(command), "{shell} does not complete {command}");
        }
    }
}

#[test]
fn a_taken_port_is_named() {
    let folder = Folder::ready();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let message = folder.fails(&["serve", "--listen", &address, "--operator", "127.0.0.1:0"], 1);
    assert!(message.contains(&address) && message.contains("--listen"), "{message}");
    let message = folder.fails(&["serve", "--listen", "127.0.0.1:0", "--operator", &address], 1);
    assert!(message.contains(&address) && message.contains("--operator"), "{message}");
}

#[test]
fn a_second_node_on_one_folder_is_refused() {
    let folder = Folder::ready();
    let _first = folder.serve();
    let message =
        folder.fails(&["serve", "--listen", "127.0.0.1:0", "--operator", "127.0.0.1:0"], 1);
    assert!(
        message.contains("in use by another process") && message.contains("cresset status"),
        "{message}"
    );
}

#[test]
fn doctor_names_what_is_wrong_and_what_mends_it() {
    let folder = Folder::initialised();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    std::fs::write(
        folder.path().join("cresset.toml"),
        format!("[listen]\npublic = \"{address}\"\n"),
    )
    .unwrap();
    let finished = folder.run(&["doctor", "--json"]);
    let document = finished.document();
    assert_eq!((finished.code, &document["ok"]), (Some(1), &json!(false)));
    let checks = document["checks"].as_array().unwrap();
    let find = |name: &str| {
        checks.iter().find(|check| check["check"] == name).unwrap_or_else(|| panic!("no {name}"))
    };
    assert_eq!(find("port")["verdict"], "wrong");
    assert_eq!(find("ledger")["verdict"], "good");
    for check in checks {
        assert_eq!(check["verdict"] == "good", check["remedy"].is_null(), "{check}");
    }
}

#[test]
fn doctor_tells_the_instruction_set_of_the_configuration() {
    let folder = Folder::initialised();
    let config = "[engine]\ndevice = \"cpu\"\ninstruction_set = \"portable\"\n";
    std::fs::write(folder.path().join("cresset.toml"), config).unwrap();
    let document = folder.run(&["doctor", "--json"]).document();
    let checks = document["checks"].as_array().unwrap();
    assert_eq!(checks[0]["check"], "processor");
    assert!(checks[0]["detail"].as_str().unwrap().ends_with("portable"), "{}", checks[0]);
    // It would tell that the kernels run on another one.
    assert!(checks.iter().all(|check| check["check"] != "gpu"), "{document}");
}

#[test]
fn chat_takes_lines_from_a_pipe() {
    let folder = Folder::ready();
    let key = folder.customer(1_000_000).key;
    let _node = folder.serve();
    let mut child = shell("printf 'one\\n\\ntwo\\n' | \"$0\" \"$@\"")
        .args([env!("CARGO_BIN_EXE_cresset"), "--data-dir"])
        .arg(folder.path())
        .args(["chat", "--json", "--max-tokens", "4"])
        .env("CRESSET_KEY", key)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let status = child.wait().unwrap();
    let output = child.wait_with_output().unwrap();
    let answers: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(answers.len(), 2);
    let grown =
        |name: &str| answers[1]["usage"][name].as_u64() > answers[0]["usage"][name].as_u64();
    assert!(grown("prompt_tokens"), "the second question carries the first: {answers:?}");
}

#[test]
fn a_question_from_a_script_that_is_refused_fails() {
    let folder = Folder::ready();
    let key = folder.customer(1).key;
    let _node = folder.serve();
    let asked = "echo hello | \"$0\" --data-dir \"$1\" chat --key \"$2\"";
    let program = env!("CARGO_BIN_EXE_cresset");
    let output = shell(asked).arg(program).arg(folder.path()).arg(key).output().unwrap();
    let said = Finished::of(output);
    assert_eq!(said.code, Some(1), "{}", said.stderr);
    assert!(said.stderr.contains("insufficient_credits"), "{}", said.stderr);
}

#[test]
fn the_gateway_of_the_node_is_what_tools_are_told() {
    let folder = Folder::ready();
    let key = folder.customer(1).key;
    let _node = folder.serve_with(&["--gateway", "127.0.0.1:0"]);
    let gateway = folder.json(&["status"])["gateway"].as_str().unwrap().to_owned();
    let told = folder.run(&["connect", "llm", "--model", "small"]).stdout;
    assert!(told.contains(&gateway) && told.ends_with('\n'), "{told}");
    assert!(folder.run(&["status"]).stdout.contains(&format!("gateway   {gateway}\n")));
    let why = folder.fails(&["connect", "llm"], 1);
    assert!(why.contains("does not accept this one") && why.contains("--key"), "{why}");
    assert!(folder.run(&["connect", "llm", "--key", &key]).stdout.contains("tiny"));
    let missing = folder.path().join("missing");
    let why = folder.fails(&["backup", "--into", missing.to_str().unwrap()], 1);
    assert!(why.contains("is no folder"), "{why}");
}

#[test]
fn clients_of_a_node_in_use_make_no_credit() {
    let folder = Folder::ready();
    let customer = folder.customer(1_000_000);
    let commands: [&[&str]; 2] = [&["chat"], &["bench", "--concurrency", "1", "--requests", "1"]];
    let refused = || {
        for command in commands {
            let message = folder.fails(command, 1);
            assert!(message.contains("no key was given"), "{message}");
            assert!(message.contains("cresset keys create"), "{message}");
        }
    };
    // With a node of their own on a ledger in use, and with one that runs.
    refused();
    let node = folder.serve();
    refused();
    folder.json(&[commands[1], &["--output-tokens", "2", "--key", &customer.key]].concat());
    let accounts = folder.json(&["accounts", "list"]);
    assert_eq!(accounts["data"].as_array().unwrap().len(), 1, "{accounts}");
    assert!(!folder.path().join("quickstart.key").exists());
    node.kill();
}

/// Runs a command as a user who has no rights to the folder.
fn as_a_stranger(folder: &Folder, arguments: &[&str]) -> Finished {
    let command = folder.command(arguments);
    let mut stranger = Command::new("setpriv");
    stranger.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]);
    stranger.arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
    Finished::of(stranger.output().unwrap())
}

/// Only root may become another user; anybody may take rights away from himself.
#[test]
fn a_folder_without_rights_to_it_is_not_called_empty() {
    let folder = Folder::ready();
    let is_root = std::fs::read_to_string("/proc/self/status").unwrap().contains("Uid:\t0\t");
    let set = |mode| {
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    set(if is_root { 0o700 } else { 0o000 });
    for arguments in [["accounts", "list"], ["ledger", "audit"], ["status", "--json"]] {
        let found =
            if is_root { as_a_stranger(&folder, &arguments) } else { folder.run(&arguments) };
        assert_eq!(found.code, Some(1), "{arguments:?}: {found:?}");
        let said = format!("{}{}", found.stdout, found.stderr);
        assert!(said.contains("cannot be read and written by user"), "{found:?}");
        assert!(
            said.contains("run the command as the user") && !said.contains("init"),
            "{found:?}"
        );
    }
    set(0o700);
}

#[test]
fn a_second_signal_ends_at_once() {
    let folder = Folder::ready();
    let customer = folder.customer(100_000_000);
    let mut node = folder.serve();
    let endless = json!({ "model": node.model, "messages": [{ "role": "user", "content": "go on" }], "stream": true,
                          "max_tokens": 1_500, "ignore_eos": true });
    let mut stream = node.chat(&customer.key, "0b7f7a86-37a5-4d43-9d2e-5c3c6f1e0d11", &endless);
    stream.read_until("\"content\":");
    node.signal("INT");
    eventually("the node drains", || node.log().contains("draining"));
    node.signal("INT");
    assert_eq!(node.wait().code(), Some(1));
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn relay_adds_what_tools_cannot_say() {
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
    let body = json!({ "model": node.model, "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 3 });
    let head = "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json\r\n";
    let ask = || request(ready["listen"].as_str().unwrap(), head, &body.to_string()).finish();
    let (first, second) = (ask(), ask());
    relay.kill().unwrap();
    relay.wait().unwrap();
    assert_eq!((first.status, second.status), (200, 200), "{first:?}");
    assert_ne!(first.json()["id"], second.json()["id"], "each call is a request of its own");
    let requests = folder.json(&["requests", "list", "--account", &customer.account]);
    let rows = requests["data"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    assert!(rows.iter().all(|row| row["session_id"] == ready["session"]), "{rows:?}");
}

#[test]
fn a_node_has_a_gateway_of_its_own() {
    let folder = Folder::ready();
    let key = folder.customer(1_000_000).key;
    let file = folder.path().join("gateway.key");
    std::fs::write(&file, &key).unwrap();
    let mut command = folder.serve_command(&["--gateway", "127.0.0.1:0"]);
    command.env("CRESSET_GATEWAY__KEY_FILE", &file);
    let node = Served::start(command);
    let status = folder.json(&["status"]);
    let gateway = status["gateway"].as_str().unwrap();
    let models = get(gateway, "/v1/models");
    assert_eq!(models.status, 200, "it needs no credential: {models:?}");
    let name = &models.json()["data"][0]["id"];
    assert_ne!(name, node.model.as_str());
    let body = json!({ "model": name, "max_tokens": 2, "stream": true,
        "messages": [{ "role": "user", "content": "hello" }] });
    let head = "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json\r\n";
    let answer = request(gateway, head, &body.to_string()).finish();
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.body.contains("data: [DONE]"), "{answer:?}");
    assert!(node.terminate().success(), "a stop closes it too");
}

#[test]
fn ollamas_clients_load_known_models_and_change_none() {
    let folder = Folder::ready();
    let key = folder.customer(1_000_000).key;
    let _node = folder.serve_with(&["--gateway", "127.0.0.1:0"]);
    let gateway = folder.json(&["status"])["gateway"].as_str().unwrap().to_owned();
    let name = json!("tiny");
    let ask = |path: &str, key: &str, model: &Value| {
        let head = format!("POST {path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\n");
        request(&gateway, &head, &json!({ "model": model, "messages": [] }).to_string()).finish()
    };
    let loaded = ask("/api/chat", &key, &name);
    assert_eq!((loaded.status, &loaded.json()["done_reason"]), (200, &json!("load")), "{loaded:?}");
    for (path, key, model, status, words) in [
        ("/api/chat", "wrong", &name, 401, "The key is missing, wrong"),
        ("/api/generate", "wrong", &name, 401, "The key is missing, wrong"),
        ("/api/chat", &key, &json!("a name"), 404, "this key can use"),
        ("/api/pull", &key, &name, 404, "cresset models pull"),
    ] {
        let answer = ask(path, key, model);
        assert_eq!(answer.status, status, "{answer:?}");
        assert!(answer.json()["error"].as_str().unwrap().contains(words), "{answer:?}");
    }
}

#[test]
fn a_gateway_that_others_reach_has_no_key() {
    let folder = Folder::ready();
    let file = folder.path().join("gateway.key");
    std::fs::write(&file, "cresset_key_none").unwrap();
    let serve = ["serve", "--listen", "127.0.0.1:0", "--operator", "127.0.0.1:0"];
    let refused = |listen: &str, file: &Path| {
        let mut command = folder.command(&[&serve[..], &["--gateway", listen]].concat());
        let output = command.env("CRESSET_GATEWAY__KEY_FILE", file).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refused("0.0.0.0:0", &file).contains("spend the key's credits"));
    assert!(refused("127.0.0.1:0", &file.with_extension("none")).contains("gateway.key_file"));
}

#[test]
fn relay_lends_its_key_to_this_machine_alone() {
    let folder = Folder::empty();
    let key = folder.path().join("relay.key");
    std::fs::write(&key, "cresset_key_x").unwrap();
    let relay = ["relay", "--listen", "0.0.0.0:0", "--upstream", "http://127.0.0.1:1"];
    let message = folder.fails(&[&relay[..], &["--key-file", key.to_str().unwrap()]].concat(), 1);
    assert!(message.contains("listen on 127.0.0.1"), "{message}");
    let scraped = ["--metrics", "0.0.0.0:0", "--listen", "127.0.0.1:0"];
    let upstream = ["relay", "--upstream", "http://127.0.0.1:1"];
    let message = folder.fails(&[&upstream[..], &scraped].concat(), 1);
    assert!(message.contains("use 127.0.0.1"), "{message}");
}

#[test]
fn relay_knows_models_by_name() {
    let folder = Folder::ready();
    let customer = folder.customer(100_000_000);
    let node = folder.serve();
    let arguments = ["relay", "--json", "--listen", "127.0.0.1:0", "--upstream", &node.listen];
    let arguments = [&arguments[..], &["--metrics", "127.0.0.1:0"]].concat();
    let log = folder.path().join("relay.log");
    let mut relay = folder
        .command(&arguments)
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(relay.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap();
    let base = ready["listen"].as_str().unwrap();
    let head = |line: &str| {
        let key = &customer.key;
        format!("{line} HTTP/1.1\r\nContent-Type: application/json\r\nx-api-key: {key}\r\n")
    };
    let list = request(base, &head("GET /v1/models"), "").finish();
    let name = list.json()["data"][0]["id"].clone();
    let ask = |model: &Value, stream: bool| {
        let messages = json!([{ "role": "developer", "content": "hello" }]);
        let body =
            json!({ "model": model, "messages": messages, "max_tokens": 3, "stream": stream });
        request(base, &head("POST /v1/chat/completions"), &body.to_string()).finish()
    };
    let (plain, stream, unknown) =
        (ask(&name, false), ask(&name, true), ask(&json!("nobody"), false));
    let without = request(base, "GET /v1/models HTTP/1.1\r\n", "").finish();
    let show = |name: &str| request(base, &head(&format!("GET /v1/models/{name}")), "").finish();
    let escaped = name.as_str().unwrap().replace('-', "%2D");
    let (shown, by_id, nobody) = (show(&escaped), show(&node.model), show("nobody"));
    eventually("each request has its line in the log", || {
        let log = std::fs::read_to_string(&log).unwrap();
        let of_chat = log.lines().filter(|line| line.contains("route=\"/v1/chat/completions\""));
        let counted = of_chat.filter(|line| line.contains(" completion_tokens=3 "));
        counted.filter(|line| line.contains(&format!("model={name}"))).count() == 2
    });
    let scraped = ready["metrics"].as_str().unwrap().trim_end_matches("/metrics");
    let metrics = get(scraped, "/metrics").body;
    for (name, labels, value) in [
        ("cresset_gateway_requests", "route=\"/v1/chat/completions\",status=\"200\"", 2),
        ("cresset_gateway_requests", "route=\"/v1/chat/completions\",status=\"404\"", 1),
        ("cresset_gateway_tokens", "kind=\"generation\"", 6),
    ] {
        let line = format!("{name}_total{{dialect=\"openai\",{labels}}} {value}");
        assert!(metrics.lines().any(|told| told == line), "{line} is not in\n{metrics}");
    }
    assert!(metrics.contains("\nprocess_start_time_seconds 1"), "{metrics}");
    let foreign = "GET /metrics HTTP/1.1\r\nOrigin: http://page.example\r\n";
    assert_eq!(request(scraped, foreign, "").finish().status, 403);
    relay.kill().unwrap();
    relay.wait().unwrap();
    assert_ne!(name, node.model.as_str(), "{list:?}");
    assert_eq!((plain.status, &plain.json()["model"]), (200, &name), "{plain:?}");
    assert!(stream.body.contains(&format!("\"model\":{name}")), "{stream:?}");
    assert!(!stream.body.contains(node.model.as_str()), "{stream:?}");
    assert_eq!((unknown.status, without.status), (404, 401), "{unknown:?}");
    assert_eq!((shown.status, &shown.json()["id"]), (200, &name), "{shown:?}");
    assert_eq!(by_id.json()["id"], node.model.as_str(), "{by_id:?}");
    assert_eq!(nobody.status, 404, "{nobody:?}");
    let id = nobody.json()["error"]["request_id"].as_str().unwrap().to_owned();
    assert_eq!(nobody.headers["x-request-id"], id, "{nobody:?}");
    assert!(unknown.body.contains(name.as_str().unwrap()), "{unknown:?}");
}

#[test]
fn a_relay_counts_requests_and_no_tokens() {
    let folder = Folder::empty();
    let listen = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"];
    let relay = ["relay", "--json", "--upstream", "http://127.0.0.1:1"];
    let mut relay =
        folder.command(&[&relay[..], &listen].concat()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(relay.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap();
    let count = "POST /v1/messages/count_tokens HTTP/1.1\r\n";
    let count = request(ready["listen"].as_str().unwrap(), count, "{}").finish();
    let scraped = ready["metrics"].as_str().unwrap().trim_end_matches("/metrics");
    let metrics = |accept: &str| {
        let head = format!("GET /metrics HTTP/1.1\r\nAccept: {accept}\r\n");
        request(scraped, &head, "").finish().body
    };
    let (older, open) = (metrics("text/plain"), metrics("application/openmetrics-text"));
    relay.kill().unwrap();
    relay.wait().unwrap();
    let error = &count.json()["error"];
    assert_eq!((count.status, &error["type"]), (404, &json!("not_found_error")), "{count:?}");
    assert!(error["message"].as_str().unwrap().contains("gateway.listen"), "{count:?}");
    let kind = "# TYPE cresset_gateway_requests_total counter\n";
    assert!(older.contains(kind) && !older.contains("# EOF"), "{older}");
    assert!(!open.contains(kind) && open.ends_with("# EOF\n"), "{open}");
    assert!(older.contains("route=\"/v1/messages/count_tokens\",status=\"404\"} 1\n"), "{older}");
}

#[test]
fn models_are_listed_with_how_far_they_have_come() {
    let folder = Folder::ready();
    let row = || {
        let list = folder.json(&["models", "list"]);
        list["models"].as_array().unwrap().iter().find(|row| row["name"] == "tiny").unwrap().clone()
    };
    let states = |row: Value| ["pulled", "qualified", "loaded"].map(|state| row[state] == true);
    assert_eq!(states(row()), [true, true, false]);
    let node = folder.serve();
    assert_eq!(states(row()), [true, true, true]);
    node.kill();
    folder.json(&["models", "remove", "tiny"]);
    assert!(!folder.path().join("models/tiny").exists());
}

#[test]
fn a_model_that_did_not_qualify_here_is_not_served() {
    let folder = Folder::ready();
    std::fs::remove_dir_all(folder.path().join("qualification")).unwrap();
    folder.json(&[
        "models",
        "add",
        "--path",
        folder.path().join("tiny.gguf").to_str().unwrap(),
        "--name",
        "another",
    ]);
    let message = folder.unserved();
    let both = ["tiny", "another"].map(|name| message.contains(&format!("cresset qualify {name}")));
    assert_eq!(both, [true, true], "{message}");
}

/// Runs a command on a folder that has the release. Returns its document and its stderr.
fn quickstart(folder: &Folder, listen: &str) -> (Value, String) {
    let mut command = folder.command(&["quickstart", "--once", "--json"]);
    // The suite runs a short context here; `release` tests that the full length qualifies.
    command
        .env("CRESSET_QUALIFICATION__QUICK_CONTEXT_TOKENS", "256")
        .env("CRESSET_LISTEN__PUBLIC", listen);
    let output = command.env("CRESSET_LISTEN__OPERATOR", "127.0.0.1:0").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    (serde_json::from_slice(&output.stdout).unwrap(), said)
}

#[test]
fn quickstart_answers_and_does_nothing_twice() {
    let folder = with_release();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (first, said) = quickstart(&folder, &address);
    assert!(first["answer"].as_str().unwrap().contains("Paris"), "{first}");
    assert!(
        said.contains("is taken; using a free port") && said.contains("is qualified"),
        "{said}"
    );
    let key_file = std::fs::metadata(first["key_file"].as_str().unwrap()).unwrap();
    assert_eq!(key_file.permissions().mode() & 0o777, 0o600);

    let (second, said) = quickstart(&folder, "127.0.0.1:0");
    assert!(!said.contains("qualif") && !said.contains("fetch"), "{said}");
    assert_eq!(first["answer"], second["answer"], "the same question at temperature 0");
    assert_eq!(first["account_id"], second["account_id"]);
    let units = |value: &Value| value.as_str().unwrap().parse::<u64>().unwrap();
    let left = |run: &Value| units(&run["credits"]["processingEligibleUnits"]);
    assert_eq!(
        left(&second),
        left(&first) - units(&second["chargedUnits"]),
        "the balance went down by the charge"
    );
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}
