//! The scripts of a release: what they say of known faults of dependencies, and the list of what a
//! program is built of.

use chrono::{Days, Utc};
use serde_json::{Deserializer, Value};
use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// Exit code and output of a script of `.ci`, errors last, with advisories in this folder.
fn run(script: &str, arguments: &[&str], advisories: Option<&Path>) -> (i32, String) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(root.join(".ci").join(script));
    command.args(arguments).env_remove("CRESSET_ADVISORIES");
    if let Some(folder) = advisories {
        command.env("CRESSET_ADVISORIES", folder);
    }
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8(said).unwrap());
    (output.status.code().unwrap(), said.concat())
}

/// A folder with one advisory of this age.
fn advised(package: &str, patched: &str, days: u64) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let of_package = folder.path().join("crates").join(package);
    fs::create_dir_all(&of_package).unwrap();
    let date = Utc::now().date_naive() - Days::new(days);
    let text = format!(
        "```toml\n[advisory]\nid = \"RUSTSEC-2026-9999\"\npackage = \"{package}\"\n\
         date = \"{date}\"\n\n[versions]\npatched = [{patched}]\n```\n\n\
         # A planted fault\n\nIt is none.\n"
    );
    fs::write(of_package.join("RUSTSEC-2026-9999.md"), text).unwrap();
    folder
}

#[test]
fn a_release_needs_advisories_that_are_new_and_name_no_dependency() {
    let nothing = tempfile::tempdir().unwrap();
    let to = nothing.path().join("release");
    let to = to.to_str().unwrap();
    let (code, said) = run("advisories", &[], None);
    assert!(code == 3 && said.contains("advisories: not checked"), "{said}");
    let (code, said) = run("release", &[to], None);
    assert!(code == 1 && said.contains("--unchecked-advisories"), "{said}");
    let (code, said) = run("release", &[to, "--unchecked"], None);
    assert!(code == 64 && said.contains(".ci/release TO"), "{said}");
    let (code, said) = run("advisories", &[], Some(nothing.path()));
    assert!(code == 1 && said.contains("has no folder crates"), "{said}");
    let tools = ["XDG_CACHE_HOME", "HOME"].map(|name| std::env::var_os(name).unwrap_or_default());
    let [cache, home] = tools.map(|folder| Path::new(&folder).to_owned());
    let cache = if cache.as_os_str().is_empty() { home.join(".cache") } else { cache };
    if !cache.join("cresset/tools/cargo-deny-0.20.2").exists() {
        println!("skipped: `.ci/run` has not built cargo-deny here yet");
        return;
    }
    for (package, patched, days, expect) in [
        ("serde", "", 1, (1, "A planted fault")),
        ("serde", "", 20, (1, "A planted fault")),
        ("serde", "\">=1.0.0\"", 1, (0, "nothing found; the latest is of")),
        ("no-such-crate", "", 14, (0, "14 days old")),
        ("no-such-crate", "", 15, (3, "older than 14 days")),
    ] {
        let folder = advised(package, patched, days);
        let (code, said) = run("advisories", &[], Some(folder.path()));
        assert!(code == expect.0 && said.contains(expect.1), "{package} {days}: {code} {said}");
        if expect.0 > 0 {
            let (code, _) = run("release", &[to], Some(folder.path()));
            assert_eq!(code, 1, "{package} {days}");
        }
    }
    assert!(!Path::new(to).exists());
}

#[test]
fn the_list_of_what_is_built_in_says_whether_advisories_were_checked() {
    let (code, said) = run("sbom", &["not checked"], None);
    assert_eq!(code, 0, "{said}");
    let list = Deserializer::from_str(&said).into_iter::<Value>().next().unwrap().unwrap();
    let names = |name: &str| {
        let all = list["components"].as_array().unwrap().iter();
        all.filter(|one| one["name"] == name).count()
    };
    assert_eq!([names("redb"), names("cresset-ledger"), names("proptest")], [1, 1, 0]);
    let stated = &list["metadata"]["properties"][1];
    assert_eq!(stated["name"], "cresset:advisories");
    assert_eq!(stated["value"], "not checked");
    let of_redb = list["components"].as_array().unwrap().iter().find(|one| one["name"] == "redb");
    assert_eq!(of_redb.unwrap()["hashes"][0]["content"].as_str().unwrap().len(), 64);
}
