//! `cresset qualify` from outside: its exit codes, and runs that are killed in the middle.

use crate::process::{Finished, Folder, MODEL};
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The suite runs this context here, tokens.
const CONTEXT: (&str, &str) = ("CRESSET_QUALIFICATION__QUICK_CONTEXT_TOKENS", "128");

/// A folder with a release that was never qualified.
fn unproven() -> Folder {
    let folder = Folder::ready();
    std::fs::remove_dir_all(folder.path().join("qualification")).unwrap();
    folder
}

fn qualify(folder: &Folder, more: &[&str], variables: &[(&str, &str)]) -> Finished {
    let mut command = folder.command(&[&["qualify", MODEL, "--json"], more].concat());
    command.env(CONTEXT.0, CONTEXT.1).envs(variables.iter().copied());
    Finished::of(command.output().unwrap())
}

/// Names of the release's files of this kind.
fn files(folder: &Folder, kind: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder.path().join("qualification").join(MODEL));
    let paths = entries.into_iter().flatten().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == kind)).collect()
}

/// Starts a run and kills it once it has done so many checks itself.
fn kill_after(folder: &Folder, checks: usize) {
    let size = || files(folder, "unfinished").first().and_then(|path| path.metadata().ok());
    let before = size().map(|found| found.len());
    let mut command = folder.command(&["qualify", MODEL]);
    command.env(CONTEXT.0, CONTEXT.1).env("FAILPOINTS", "qualification::ended=sleep(150)");
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let mut child = command.spawn().unwrap();
    let deadline = Instant::now() + Duration::from_mins(2);
    let mut writes = std::collections::BTreeSet::new();
    while writes.len() < checks {
        assert!(Instant::now() < deadline && child.try_wait().unwrap().is_none());
        writes.extend(size().map(|found| found.len()).filter(|now| Some(*now) != before));
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

fn taken_over(record: &Value) -> Option<usize> {
    let notes = record["notes"].as_array().unwrap().iter().filter_map(Value::as_str);
    let mut told = notes.filter(|note| note.contains("taken over"));
    told.next().map(|note| note.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn a_killed_run_goes_on_and_leaves_no_half_record() {
    let folder = unproven();
    for checks in [1, 4, 9] {
        kill_after(&folder, checks);
        assert!(files(&folder, "json").is_empty(), "no record of a run that did not end");
        assert_eq!(folder.run(&["qualify", MODEL, "--show"]).code, Some(1));
    }
    let record = qualify(&folder, &[], &[]);
    assert_eq!(record.code, Some(0), "{record:?}");
    // Each run was killed while it had results of its own beside those of the ones before.
    let from_before = taken_over(&record.document()).unwrap();
    assert!(from_before >= 14, "{from_before} of 1 + 4 + 9 results were taken over");
    assert!(files(&folder, "unfinished").is_empty());
    assert_eq!(files(&folder, "json").len(), 1);
    let again = qualify(&folder, &[], &[]);
    assert_eq!(taken_over(&again.document()), None, "a run that ended is not gone on with");
}

#[test]
fn an_interrupted_run_is_gone_on_with_only_if_nothing_changed() {
    let folder = unproven();
    kill_after(&folder, 3);
    let kept = files(&folder, "unfinished").remove(0);
    let content = std::fs::read(&kept).unwrap();
    let fresh = |more: &[&str], variables: &[(&str, &str)]| {
        std::fs::write(&kept, &content).unwrap();
        for record in files(&folder, "json") {
            std::fs::remove_file(record).unwrap();
        }
        let record = qualify(&folder, more, variables);
        assert_eq!(record.code, Some(0), "{record:?}");
        taken_over(&record.document()).is_none()
    };
    assert!(fresh(&["--no-resume"], &[]));
    assert!(fresh(&[], &[("CRESSET_ENGINE__MAX_ROWS", "3")]));
    assert!(fresh(&[], &[("CRESSET_QUALIFICATION__RESUME_HOURS", "0")]));
    assert!(fresh(&[], &[(CONTEXT.0, "160")]));
    assert!(!fresh(&["--no-resume", "--resume"], &[]), "the last one counts");
}

/// The word that `--show` prints for the standing.
fn shown(folder: &Folder, variables: &[(&str, &str)], code: i32) -> String {
    let finished = qualify(folder, &["--show"], variables);
    assert_eq!(finished.code, Some(code), "{finished:?}");
    finished.document()["standing"].as_str().unwrap().to_owned()
}

#[test]
fn the_exit_code_tells_what_a_record_is_worth() {
    let folder = Folder::ready();
    assert_eq!(shown(&folder, &[], 0), "qualified");
    assert_eq!(shown(&folder, &[("CRESSET_ENGINE__MAX_ROWS", "3")], 12), "stale");
    let path = files(&folder, "json").remove(0);
    let mut stored: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    stored["signatures"][0]["sig"] = "AAAA".into();
    std::fs::write(&path, stored.to_string()).unwrap();
    assert_eq!(shown(&folder, &[], 13), "bad_signature");
    std::fs::remove_file(&path).unwrap();
    let none = folder.fails(&["qualify", MODEL, "--show"], 1);
    assert!(none.contains("never qualified"), "{none}");
}

#[test]
fn checks_by_name_run_alone_and_make_no_record() {
    let folder = unproven();
    let one = qualify(&folder, &["--only", "digests,tokenizer_round_trip"], &[]);
    assert_eq!(one.code, Some(0), "{one:?}");
    let document = one.document();
    let ids: Vec<&str> = document["checks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|check| check["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids, ["digests", "tokenizer_round_trip"]);
    assert!(files(&folder, "json").is_empty() && files(&folder, "unfinished").is_empty());
    let without = qualify(&folder, &["--only", "tokenizer_goldens"], &[]);
    assert_eq!(without.code, Some(11), "there are no goldens: {without:?}");
    assert_eq!(qualify(&folder, &["--only", "nothing"], &[]).code, Some(2));
}
