//! Runs existing clients of pinned versions against a node. They must work unchanged, given only
//! the two required headers.
//!
//! They are installed once under the build folder. Where that is impossible (no network, no pip or
//! npm) the test says so loudly and is skipped; clients that can be installed must pass.

use crate::process::{Folder, MODEL};
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
        let mut command = Command::new(&python);
        command.arg(scripts().join("dialects.py")).args([gateway, key]).output().unwrap()
    });
}

#[test]
fn instructor_through_the_gateway() {
    let (python, installed) = python("python", &scripts().join("requirements.txt"));
    check("instructor", installed, |_, gateway, key| {
        let mut command = Command::new(&python);
        command.arg(scripts().join("tools/python/instructor_python.py"));
        command.args([gateway, key, MODEL]).output().unwrap()
    });
}

/// The folder with the packages of `pins`, a `package.json`, and whether they could be installed.
pub fn javascript(name: &str, pins: &Path) -> (PathBuf, Result<(), String>) {
    let folder = installed_under(name);
    let installed = install(&folder, pins, || {
        std::fs::copy(pins, folder.join("package.json")).map_err(|error| error.to_string())?;
        succeeded(
            Command::new("npm")
                .args(["install", "--silent", "--no-audit", "--no-fund"])
                .current_dir(&folder),
        )
    });
    (folder, installed)
}

/// Node.js with a script. It looks for packages beside the script, so that is copied to them.
pub fn node_script(packages: &Path, script: &Path) -> Command {
    let copy = packages.join(script.file_name().unwrap());
    std::fs::copy(script, &copy).unwrap();
    let mut command = Command::new("node");
    command.arg(copy);
    command
}

#[test]
fn openai_for_javascript() {
    let (packages, installed) = javascript("javascript", &scripts().join("package.json"));
    check("openai for JavaScript", installed, |base, _, key| {
        let mut command = node_script(&packages, &scripts().join("openai_node.mjs"));
        command.args([base, key]).output().unwrap()
    });
}

#[test]
fn the_ai_sdk_through_the_gateway() {
    let (packages, installed) = javascript("javascript", &scripts().join("package.json"));
    check("the AI SDK", installed, |_, gateway, key| {
        let mut command = node_script(&packages, &scripts().join("tools/javascript/ai_sdk.mjs"));
        command.args([gateway, key, MODEL]).output().unwrap()
    });
}

/// The program in a language that README shows, for the node at `base`, with `rest` behind it.
fn of_readme(language: &str, [base, key]: [&str; 2], rest: &str) -> String {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md"));
    let readme = readme.unwrap();
    let (_, program) = readme.split_once(&format!("```{language}\n")).unwrap();
    let (program, _) = program.split_once("\n```\n").unwrap();
    let [address, secret] = ["http://127.0.0.1:8080", "cresset_key_…"];
    assert!(program.contains(address) && program.contains(secret), "{program}");
    format!("{}\n{rest}", program.replace(address, base).replace(secret, key))
}

#[test]
fn readmes_program_in_python() {
    let (python, installed) = python("python", &scripts().join("requirements.txt"));
    check("README's program in Python", installed, |base, _, key| {
        let rest = "model = client.models.list().data[0].id\n\
            answer = client.chat.completions.create(model=model, max_tokens=3,\n    \
                messages=[{\"role\": \"user\", \"content\": \"hi\"}])\n\
            assert answer.usage.completion_tokens > 0, answer\nprint(\"ok\")\n";
        let program = of_readme("python", [base, key], rest);
        Command::new(&python).args(["-c", &program]).output().unwrap()
    });
}

#[test]
fn readmes_program_in_javascript() {
    let (packages, installed) = javascript("javascript", &scripts().join("package.json"));
    check("README's program in JavaScript", installed, |base, _, key| {
        let rest = "const model = (await client.models.list()).data[0].id;\n\
            const answer = await client.chat.completions.create({ model, max_tokens: 3,\n  \
                messages: [{ role: \"user\", content: \"hi\" }] });\n\
            if (answer.usage.completion_tokens < 1) throw new Error(JSON.stringify(answer));\n\
            console.log(\"ok\");\n";
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("of_readme.mjs");
        std::fs::write(&script, of_readme("js", [base, key], rest)).unwrap();
        node_script(&packages, &script).output().unwrap()
    });
}

/// The folder where the Rust programs with the dependencies of `pins` are built.
fn rust(name: &str, pins: &Path) -> (PathBuf, Result<(), String>) {
    let folder = installed_under(name);
    let installed = install(&folder, pins, || {
        let copied = std::fs::copy(pins, folder.join("Cargo.toml"));
        copied.map(drop).map_err(|error| error.to_string())
    });
    (folder, installed)
}

fn rust_program(place: &Path, source: &Path) -> Command {
    std::fs::copy(source, place.join(source.file_name().unwrap())).unwrap();
    let mut command = Command::new("cargo");
    command.args(["run", "--quiet", "--manifest-path"]).arg(place.join("Cargo.toml"));
    command.arg("--bin").arg(source.file_stem().unwrap()).arg("--");
    command
}

/// The folders of `tools`: each has pins and one script for each client.
fn groups() -> Vec<PathBuf> {
    files(&scripts().join("tools"))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found
}

/// Every script of a group with the program that runs it. Panics where a group cannot be installed.
fn clients_of(group: &Path) -> Vec<(PathBuf, Command)> {
    let name = format!("tools-{}", group.file_name().unwrap().to_str().unwrap());
    let has = |pins: &str| group.join(pins).exists();
    let (place, installed) = if has("package.json") {
        javascript(&name, &group.join("package.json"))
    } else if has("Cargo.toml") {
        rust(&name, &group.join("Cargo.toml"))
    } else {
        python(&name, &group.join("requirements.txt"))
    };
    installed.unwrap();
    let scripts = files(group).into_iter();
    scripts
        .filter_map(|script| match script.extension()?.to_str()? {
            "mjs" => Some((script.clone(), node_script(&place, &script))),
            "rs" => Some((script.clone(), rust_program(&place, &script))),
            "py" => {
                let mut command = Command::new(&place);
                command.arg(&script);
                Some((script, command))
            }
            _ => None,
        })
        .collect()
}

#[test]
#[ignore = "installs 2 GB of Python and Node.js packages; .ci/long"]
fn clients_of_other_makers_work_unchanged_through_the_gateway() {
    const NAME: &str = "smollm2-135m-instruct";
    let folder = crate::release::with_release();
    std::fs::write(
        folder.path().join("cresset.toml"),
        "[plans.default]\nrequests_per_minute = 6000\nburst = 600\n",
    )
    .unwrap();
    assert_eq!(folder.json(&["qualify", NAME])["grade"], "reference");
    let customer = folder.customer(100_000_000);
    let node = folder.serve_with(&["--gateway", "127.0.0.1:0"]);
    let gateway = folder.json(&["status"])["gateway"].as_str().unwrap().to_owned();
    let mut failed = Vec::new();
    for (script, mut command) in groups().iter().flat_map(|group| clients_of(group)) {
        let output = command.args([&gateway, &customer.key, NAME]).output().unwrap();
        let worked = output.status.success()
            && String::from_utf8_lossy(&output.stdout).trim_end().ends_with("ok");
        println!("{} {}", if worked { "works " } else { "FAILED" }, script.display());
        if !worked {
            failed.push(format!("{}: {output:?}", script.display()));
        }
    }
    assert!(failed.is_empty(), "{}\n{}", failed.join("\n\n"), node.log());
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

/// README says which versions were tried.
#[test]
fn readme_names_the_versions_that_are_pinned() {
    let readme = include_str!("../../README.md");
    let agents = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/agents");
    for group in groups().into_iter().chain([agents]) {
        let pins = ["requirements.txt", "package.json", "Cargo.toml"].map(|name| group.join(name));
        let pins = pins.iter().find_map(|pins| std::fs::read_to_string(pins).ok()).unwrap();
        for line in pins.lines() {
            let pin = ["==", "\": \"", " = { version = \"="];
            let Some((name, version)) = pin.iter().find_map(|pin| line.split_once(pin)) else {
                continue;
            };
            let version = version.split('"').next().unwrap();
            if !version.starts_with(|first: char| first.is_ascii_digit()) {
                continue;
            }
            let name = name.trim().trim_matches('"').split('[').next().unwrap();
            let told = format!("`{name}` {version}");
            assert!(readme.contains(&told), "README.md does not say {told}");
        }
    }
}
