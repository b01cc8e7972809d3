//! Runs existing clients of pinned versions against a node. They must work unchanged, given only
//! the two required headers.
//!
//! They are installed once under the build folder. Where that is impossible (no network, no pip or
//! npm) the test says so loudly and is skipped; clients that can be installed must pass.

use crate::process::Folder;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;

/// Held while installing, because all tests share one folder.
static INSTALLING: Mutex<()> = Mutex::new(());

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/clients")
}

/// The folder `target/clients/NAME`, which is kept between runs.
pub fn installed_under(name: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    target.join("clients").join(name)
}

pub fn succeeded(command: &mut Command) -> Result<(), String> {
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))),
        Err(error) => Err(format!("{command:?}: {error}")),
    }
}

/// Runs `install` unless the pinned versions are there already.
pub fn install(
    folder: &Path,
    pins: &Path,
    install: impl FnOnce() -> Result<(), String>,
) -> Result<(), String> {
    let _one = INSTALLING.lock().unwrap();
    let (wanted, stamp) = (std::fs::read_to_string(pins).unwrap(), folder.join("installed"));
    if std::fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(folder).unwrap();
    install()?;
    std::fs::write(stamp, wanted).unwrap();
    Ok(())
}

/// The path of the Python in `target/clients/NAME`, and whether `pins` could be installed for it.
pub fn python(name: &str, pins: &Path) -> (PathBuf, Result<(), String>) {
    let folder = installed_under(name);
    let python = folder.join("venv/bin/python");
    let installed = install(&folder, pins, || {
        succeeded(Command::new("python3").args(["-m", "venv"]).arg(folder.join("venv")))?;
        succeeded(Command::new(&python).args(["-m", "pip", "install", "--quiet", "-r"]).arg(pins))
    });
    (python, installed)
}

/// Runs the client as a customer of a ready node. It is given the node's address, its gateway's,
/// and its key.
fn check(
    what: &str,
    installed: Result<(), String>,
    client: impl FnOnce(&str, &str, &str) -> Output,
) {
    if let Err(why) = installed {
        eprintln!("\n!!! SKIPPED: {what} could not be installed and was NOT tested: {why}\n");
        return;
    }
    let folder = Folder::ready();
    let customer = folder.customer(100_000_000);
    let node = folder.serve_with(&["--gateway", "127.0.0.1:0"]);
    let gateway = folder.json(&["status"])["gateway"].as_str().unwrap().to_owned();
    let output = client(&node.listen, &gateway, &customer.key);
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success() && said.contains("ok"), "{what}: {said}\n{}", node.log());
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn openai_for_python() {
    let (python, installed) = python("python", &scripts().join("requirements.txt"));
    check("openai for Python", installed, |base, _, key| {
        Command::new(&python)
            .arg(scripts().join("openai_python.py"))
            .args([base, key])
            .output()
            .unwrap()
    });
}

#[test]
fn other_services_clients_through_the_gateway() {
    let (python, installed) = python("python", &scripts().join("requirements.txt"));
    check("Python clients of other services", installed, |_, gateway, key| {
        Command::new(&python)
            .arg(scripts().join("dialects.py"))
            .args([gateway, key])
            .output()
            .unwrap()
    });
}

#[test]
fn openai_for_javascript() {
    let folder = installed_under("javascript");
    let installed = install(&folder, &scripts().join("package.json"), || {
        std::fs::copy(scripts().join("package.json"), folder.join("package.json"))
            .map_err(|error| error.to_string())?;
        succeeded(
            Command::new("npm")
                .args(["install", "--silent", "--no-audit", "--no-fund"])
                .current_dir(&folder),
        )
    });
    check("openai for JavaScript", installed, |base, _, key| {
        // Node.js looks for packages beside the script, so the script is copied to them.
        let script = folder.join("openai_node.mjs");
        std::fs::copy(scripts().join("openai_node.mjs"), &script).unwrap();
        Command::new("node").arg(script).args([base, key]).output().unwrap()
    });
}
