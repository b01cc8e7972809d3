//! `cresset launch`: the tool asks with a key of its own, within its budget, and its cost is shown.

use super::process::{Finished, Folder, shell};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;

/// Stands for the agent: it asks once as Anthropic's clients do, and leaves a file.
const AGENT: &str = r#"#!/usr/bin/env python3
import json, os, sys, urllib.error, urllib.request

body = {"model": sys.argv[sys.argv.index("--model") + 1], "max_tokens": 5,
        "messages": [{"role": "user", "content": sys.argv[-1]}]}
request = urllib.request.Request(
    os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"],
     "Content-Type": "application/json"})
open("left.txt", "w").write(os.environ["CLAUDE_CONFIG_DIR"])
try:
    urllib.request.urlopen(request).read()
except urllib.error.HTTPError as refused:
    sys.exit(refused.code - 400)
"#;

fn launch(folder: &Folder, arguments: &str) -> Finished {
    let bin = folder.path().join("bin");
    std::fs::create_dir_all(&bin).unwrap();
    std::fs::write(bin.join("claude"), AGENT).unwrap();
    std::fs::set_permissions(bin.join("claude"), PermissionsExt::from_mode(0o755)).unwrap();
    let script = format!(
        "umask 022; cd \"$1\" && PATH=\"$1/bin:$PATH\" \"$0\" --data-dir \"$1\" --json launch {arguments}"
    );
    let program = env!("CARGO_BIN_EXE_cresset");
    Finished::of(shell(&script).arg(program).arg(folder.path()).output().unwrap())
}

#[test]
fn a_tool_is_started_with_a_key_of_its_own_and_its_cost_is_shown() {
    let folder = Folder::ready();
    let customer = folder.customer(1_000_000);
    let _node = folder.serve_with(&["--gateway", "127.0.0.1:0"]);
    let done = launch(&folder, "claude -- hello");
    assert_eq!(done.code, Some(0), "{done:?}");
    let bill = done.document();
    assert!(done.stderr.contains("no model here has the capability `tools`"), "{done:?}");
    assert_eq!([&bill["requests"], &bill["receipts"]], [1, 1], "{bill}");
    let units = |value: &Value| value.as_str().unwrap().parse::<u64>().unwrap();
    let account = folder.json(&["credits", "show", "--account", &customer.account]);
    assert!(units(&bill["chargedUnits"]) > 0);
    assert_eq!(1_000_000 - units(&account["trialUnits"]), units(&bill["chargedUnits"]));
    let receipts = std::fs::read_dir(bill["receipt_folder"].as_str().unwrap()).unwrap();
    for receipt in receipts {
        let file = receipt.unwrap().path();
        assert_eq!(folder.json(&["receipts", "verify", file.to_str().unwrap()])["valid"], true);
    }
    let keys = folder.json(&["keys", "list", "--account", &customer.account]);
    let key = keys["data"].as_array().unwrap().iter().find(|key| key["label"] == "launch claude");
    assert!(key.unwrap()["revoked_at"].is_u64(), "{keys}");
    // What the tool writes has the rights that its user wants.
    let left = folder.path().join("left.txt");
    assert_eq!(left.metadata().unwrap().permissions().mode() & 0o777, 0o644);
    assert!(std::fs::read_to_string(left).unwrap().ends_with("launch/claude"));
}

#[test]
fn a_tool_ends_at_its_budget_and_its_exit_code_is_kept() {
    let folder = Folder::ready();
    folder.customer(1_000_000);
    let _node = folder.serve_with(&["--gateway", "127.0.0.1:0"]);
    let done = launch(&folder, "claude --budget 1 -- hello");
    assert!(done.code.is_some_and(|code| code > 0), "{done:?}");
    let bill = done.document();
    assert_eq!((&bill["requests"], &bill["chargedUnits"]), (&0.into(), &"0".into()), "{bill}");
    let nobody = launch(&folder, "claude --gateway http://127.0.0.1:9 -- hello");
    assert!(nobody.stdout.contains("serve --gateway"), "{nobody:?}");
    let keys = folder.json(&["keys", "list", "--account", "acme"]);
    assert_eq!(keys["data"].as_array().unwrap().len(), 2, "{keys}");
    let why = folder.fails(&["launch", "emacs"], 1);
    assert!(why.contains("claude, codex, opencode, qwen, cline, aider, open-webui"), "{why}");
    let mut bare = folder.command(&["launch", "claude", "--json"]);
    let bare = Finished::of(bare.env("PATH", folder.path()).output().unwrap());
    assert!(bare.stdout.contains("npm install --global @anthropic-ai/claude-code"), "{bare:?}");
}
