//! Copies of a whole node: they bring back paid answers, models and configuration on another
//! machine, and a restore that stops anywhere is completed by the next one.

use crate::process::{Finished, Folder, MODEL, Served};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use uuid::Uuid;

const TRIAL: u64 = 1_000_000;
const CONFIG: &str = "[requests]\nbody_retention_hours = 48\n";

/// A node that answered a request in one piece and one as a stream, and its backup.
struct Answered {
    folder: Folder,
    backup: PathBuf,
    account: String,
    key: String,
    /// Id, body and answer.
    requests: [(String, Value, String); 2],
}

fn body(model: &str, stream: bool) -> Value {
    json!({ "model": model, "messages": [{ "role": "user", "content": "what does the lamp show" }],
            "stream": stream, "max_tokens": 40, "ignore_eos": true, "seed": 3,
            "logprobs": true, "top_logprobs": 5 })
}

#[test]
fn a_backup_can_be_checked_without_a_restore() {
    let answered = Answered::new();
    let away = Folder::empty();
    let temporary = away.path().join("temporary");
    fs::create_dir(&temporary).unwrap();
    let check = |file: &Path| {
        let mut command = away.command(&["--json", "backup", "--check", file.to_str().unwrap()]);
        let finished = Finished::of(command.env("TMPDIR", &temporary).output().unwrap());
        assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0, "nothing is left");
        finished
    };
    let sound = check(&answered.backup);
    assert_eq!(sound.code, Some(0), "{sound:?}");
    let report: Value = serde_json::from_str(&sound.stdout).unwrap();
    assert_eq!((&report["ok"], &report["answers"]), (&json!(true), &json!(2)));
    let mut bytes = fs::read(&answered.backup).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    let changed = answered.folder.path().join("changed.node");
    fs::write(&changed, bytes).unwrap();
    let found = check(&changed);
    assert_eq!(found.code, Some(1), "{found:?}");
}

impl Answered {
    fn new() -> Self {
        let folder = Folder::ready();
        fs::write(folder.path().join("cresset.toml"), CONFIG).unwrap();
        let customer = folder.customer(TRIAL);
        let node = folder.serve();
        let requests = [false, true].map(|stream| {
            let (id, body) = (Uuid::new_v4().to_string(), body(&node.model, stream));
            let reply = node.chat(&customer.key, &id, &body).finish();
            assert_eq!(reply.status, 200, "{}", reply.body);
            (id, body, reply.body)
        });
        // While the node runs.
        let backup = folder.path().join("copy.node");
        let written = folder.json(&["backup", backup.to_str().unwrap()]);
        assert!(written["bytes"].as_u64().unwrap() > 100_000, "{written}");
        assert_eq!(fs::metadata(&backup).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(node.terminate().success());
        Self { folder, backup, account: customer.account, key: customer.key, requests }
    }

    fn restore(&self) -> [&str; 2] {
        ["restore", self.backup.to_str().unwrap()]
    }

    /// The weights, which no backup holds.
    fn copy_weights(&self, to: &Path) {
        let release = Path::new("models").join(MODEL);
        fs::create_dir_all(to.join(&release)).unwrap();
        for entry in fs::read_dir(self.folder.path().join(&release)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() && path.file_name().unwrap() != "manifest.toml" {
                fs::copy(&path, to.join(&release).join(path.file_name().unwrap())).unwrap();
            }
        }
    }

    /// Asserts that the node has the answers, and charges nothing for them.
    fn is_replayed(&self, folder: &Folder, node: &Served) {
        let spent = || folder.json(&["credits", "show", "--account", &self.account]);
        let before = spent();
        for (id, body, answer) in &self.requests {
            let again = node.chat(&self.key, id, body).finish();
            assert_eq!(again.status, 200, "{}", again.body);
            assert_eq!(again.headers["idempotent-replayed"], "true");
            let stream = body["stream"] == true;
            assert!(stream || again.body == *answer, "byte for byte");
            let state = node.get(&self.key, &format!("/v1/requests/{id}")).json();
            assert_eq!(state["attempt_count"], 1, "{state}");
        }
        assert_eq!(spent(), before);
        assert_ne!(before["trialUnits"], TRIAL.to_string());
    }
}

#[test]
fn a_node_goes_on_from_its_backup_on_another_machine() {
    let answered = Answered::new();
    // The folder does not exist yet.
    let folder = Folder::empty();
    let place = folder.path();
    fs::remove_dir(place).unwrap();
    let restored = folder.json(&answered.restore());
    assert_eq!(restored["answers"], 2, "{restored}");
    assert_eq!(restored["replaced_files"], json!([]));
    assert_eq!(fs::read_to_string(place.join("cresset.toml")).unwrap(), CONFIG);
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
    answered.copy_weights(place);
    let node = folder.serve();
    answered.is_replayed(&folder, &node);
    let (_, body, _) = &answered.requests[0];
    let fresh = node.chat(&answered.key, &Uuid::new_v4().to_string(), body).finish();
    assert_eq!(fresh.status, 200, "{}", fresh.body);
    assert!(node.terminate().success());
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn a_restore_that_stops_at_any_rename_is_completed_by_the_next_one() {
    let answered = Answered::new();
    let template = answered.folder.duplicate();
    // What the restore is to replace.
    fs::write(template.path().join("cresset.toml"), "[requests]\nbody_retention_hours = 7\n")
        .unwrap();
    let manifest = format!("models/{MODEL}/manifest.toml");
    let changed = fs::read_to_string(template.path().join(&manifest)).unwrap() + "# changed\n";
    fs::write(template.path().join(&manifest), &changed).unwrap();
    let other = template.customer(5);
    let mut stops = 0;
    loop {
        let folder = template.duplicate();
        let points = format!("store::rename={stops}*off->return");
        let stopped = folder.run_failing(&points, &answered.restore());
        if stopped.code == Some(0) {
            break;
        }
        assert_eq!(stopped.code, None, "{stopped:?}");
        stops += 1;
        folder.json(&answered.restore());
        let kept = |name: &str| {
            let path = |number: u32| folder.path().join(format!("{name}.replaced-{number}"));
            assert!(!path(2).exists(), "{name} is kept twice after {stops} renames");
            fs::read(path(1)).unwrap()
        };
        assert!(kept("cresset.toml").ends_with(b"= 7\n"));
        assert_eq!(kept(&manifest), changed.as_bytes());
        let ledger = fs::read(template.path().join("ledger.redb")).unwrap();
        assert!(kept("ledger.redb").len() == ledger.len());
        assert_eq!(fs::read_to_string(folder.path().join("cresset.toml")).unwrap(), CONFIG);
        let node = folder.serve();
        answered.is_replayed(&folder, &node);
        assert_eq!(node.get(&other.key, "/v1/me").status, 401, "it is gone with the old ledger");
        assert!(node.terminate().success());
    }
    assert_eq!(stops, 4, "configuration, manifest, answers, ledger");
}

#[test]
fn the_ledger_alone_comes_back_with_its_answers_from_either_kind_of_backup() {
    let answered = Answered::new();
    let folder = &answered.folder;
    let ledger = folder.path().join("copy.ledger");
    folder.json(&["ledger", "backup", ledger.to_str().unwrap()]);
    fs::write(folder.path().join("cresset.toml"), "").unwrap();
    let backup = answered.backup.to_str().unwrap();
    assert_eq!(folder.json(&["ledger", "restore", backup])["answers"], 2);
    assert_eq!(fs::read(folder.path().join("cresset.toml")).unwrap(), b"", "no file was touched");
    let node = folder.serve();
    answered.is_replayed(folder, &node);
    assert!(node.terminate().success());
    // A copy of the ledger alone has no answers, which are then gone and not made anew.
    let restored = folder.json(&["restore", ledger.to_str().unwrap()]);
    assert_eq!((&restored["answers"], &restored["restored_files"]), (&json!(0), &json!([])));
    let node = folder.serve();
    let (id, body, _) = &answered.requests[0];
    assert_eq!(node.chat(&answered.key, id, body).finish().status, 410);
}

#[test]
fn a_node_s_backup_is_not_restored_under_a_node() {
    let answered = Answered::new();
    let _node = answered.folder.serve();
    assert!(answered.folder.fails(&answered.restore(), 1).contains("stop the node"));
}
