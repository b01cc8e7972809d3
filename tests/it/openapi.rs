//! The description of the public surface: as committed, as served, and against the node's answers
//! to a property-based client.

use crate::clients::python;
use crate::process::{Folder, get};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

const COMMITTED: &str = include_str!("openapi/openapi.json");

#[test]
fn the_committed_document_is_up_to_date() {
    let generated = Folder::empty().run(&["config", "openapi"]).stdout;
    assert!(
        generated == COMMITTED,
        "the public surface has changed: `cargo run -- config openapi > tests/it/openapi/openapi.json`, then look at the difference"
    );
}

#[test]
fn the_document_is_the_operators_and_follows_the_configuration() {
    let folder = Folder::ready();
    std::fs::write(folder.path().join("cresset.toml"), "service_name = \"Example\"\n").unwrap();
    let (customer, node) = (folder.customer(0), folder.serve());
    let served = get(&node.operator, "/openapi.json");
    assert_eq!((served.status, served.headers["content-type"].as_str()), (200, "application/json"));
    let mut expected: Value = serde_json::from_str(COMMITTED).unwrap();
    let parameters = &mut expected["components"]["parameters"];
    parameters["sessionId"]["name"] = "X-Example-Session-Id".into();
    let about = parameters["neutralSessionId"]["description"].as_str().unwrap();
    parameters["neutralSessionId"]["description"] = about.replace("Cresset", "Example").into();
    expected["servers"][0]["url"] = served.json()["servers"][0]["url"].clone();
    assert_eq!(served.json(), expected);
    assert_eq!(get(&node.listen, "/openapi.json").status, 401);
    assert_eq!(node.get(&customer.key, "/openapi.json").status, 404);
}

/// The runs: every operation by itself, and chains from completions to their requests. Chains leave
/// out lists of models, because otherwise no other link would be followed.
const RUNS: [&[&str]; 2] = [
    &["--phases", "coverage,fuzzing"],
    &["--phases", "stateful", "--exclude-path-regex", "^/v1/models"],
];

/// A run is bounded by numbers of examples, not by time, and every run sends the same requests.
#[test]
fn schemathesis_finds_the_node_as_described() {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/openapi");
    let (python, installed) = python("schemathesis", &scripts.join("requirements.txt"));
    if let Err(why) = installed {
        eprintln!("\n!!! SKIPPED: schemathesis could not be installed and was NOT run: {why}\n");
        return;
    }
    let folder = Folder::ready();
    let no_fuse = "[plans.default]\nrequests_per_minute = 1000000\nburst = 1000000\n[log]\nlevel = \"warn\"\n";
    std::fs::write(folder.path().join("cresset.toml"), no_fuse).unwrap();
    let customer = folder.customer(1_000_000_000_000);
    let node = folder.serve();
    for run in RUNS {
        let output = Command::new(python.with_file_name("schemathesis"))
            .arg("--config-file")
            .arg(scripts.join("schemathesis.toml"))
            .args([
                "run",
                &format!("{}/openapi.json", node.operator),
                "--url",
                &node.listen,
                "--no-color",
            ])
            .args(["--header", &format!("Authorization: Bearer {}", customer.key)])
            .args(run)
            .env("PYTHONPATH", &scripts)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("SCHEMATHESIS_HOOKS", "hooks")
            .env("MODEL", &node.model)
            .current_dir(folder.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let all = format!("{said}{}\n{}", String::from_utf8_lossy(&output.stderr), node.log());
        assert!(output.status.success(), "{all}");
        println!("{said}");
        for kind in ["completions:", "streams:"] {
            let line = said
                .lines()
                .find_map(|line| line.strip_prefix(kind))
                .unwrap_or_else(|| panic!("{all}"));
            assert!(
                line.trim().parse::<u32>().unwrap() >= 5,
                "{kind} {line}: too few answers were reached\n{all}"
            );
        }
    }
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}
