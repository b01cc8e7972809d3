//! Coding agents of pinned versions, unchanged, at small tasks through the gateway. The model is a
//! script that always makes the right call, so that what fails is the interface and not the model.

mod script;

use super::capabilities::{CALLER, node};
use super::clients::{install, installed_under, node_script, python, succeeded};
use super::support::World;
use script::{TASKS, Task};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest time for one task; the slowest agent needs some 20 seconds to start on a busy machine.
const TASK_TIME: Duration = Duration::from_mins(5);
const AGENTS: &[&str] = &["claude", "codex", "opencode", "qwen", "cline", "aider"];

fn packages() -> PathBuf {
    let folder = installed_under("agents");
    let pins = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/agents/package.json");
    let installed = install(&folder, &pins, || {
        std::fs::copy(&pins, folder.join("package.json")).map_err(|error| error.to_string())?;
        let npm = ["install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"];
        succeeded(Command::new("npm").args(npm).current_dir(&folder))?;
        // Two of them are programs for this processor, which a script of theirs puts in place.
        for (package, script) in
            [("@anthropic-ai/claude-code", "install.cjs"), ("opencode-ai", "postinstall.mjs")]
        {
            let package = folder.join("node_modules").join(package);
            succeeded(Command::new("node").arg(script).current_dir(package))?;
        }
        Ok(())
    });
    installed.unwrap();
    folder.join("node_modules/.bin")
}

/// The installed program of an agent.
fn program(agent: &str) -> PathBuf {
    if agent != "aider" {
        return packages().join(agent);
    }
    let pins = "tests/it/clients/tools/aider/requirements.txt";
    let pins = Path::new(env!("CARGO_MANIFEST_DIR")).join(pins);
    let (python, installed) = python("tools-aider", &pins);
    installed.unwrap();
    python.with_file_name(agent)
}

/// How `cresset launch` starts each tool.
fn launches() -> toml::Table {
    let tools: toml::Table = include_str!("../../src/cli/connect/tools.toml").parse().unwrap();
    let tools = tools["tool"].as_array().unwrap().iter();
    tools
        .filter_map(|tool| Some((tool["name"].as_str()?.to_owned(), tool.get("launch")?.clone())))
        .collect()
}

/// What lets each agent work at a task alone, without a person who allows its steps.
fn alone<'a>(agent: &str, task: &'a Task) -> Vec<&'a str> {
    let ask = task.ask;
    match agent {
        "claude" => vec!["--allowedTools", "Bash,Edit,Read,Write", "-p", ask],
        "codex" => {
            let free = "--dangerously-bypass-approvals-and-sandbox";
            vec!["exec", "--skip-git-repo-check", free, ask]
        }
        "opencode" => vec!["run", ask],
        "cline" => vec![ask],
        "aider" => {
            let switches = "--edit-format diff --no-git --yes-always --no-check-update \
                --no-show-model-warnings --analytics-disable --message";
            let tests = task.last_command().map(|last| ["--auto-test", "--test-cmd", last]);
            let files = task.files.iter().map(|(name, _)| *name);
            let switches = switches.split_whitespace().chain([ask]);
            switches.chain(tests.into_iter().flatten()).chain(files).collect()
        }
        _ => vec!["--approval-mode", "yolo", "-p", ask],
    }
}

/// The agent's command line for a task, as `cresset launch` makes it, in a home of its own.
fn command(agent: &str, home: &Path, task: &Task, [root, key, model]: [&str; 3]) -> Command {
    let launch = &launches()[agent];
    let base = format!("{root}/v1");
    let filled = |text: &toml::Value| {
        let places = [("BASE", base.as_str()), ("ROOT", root), ("MODEL", model)];
        let folder = ("FOLDER", home.to_str().unwrap());
        // The variable that holds the key keeps its name.
        let text = text.as_str().unwrap().replace("KEY", key);
        let text = text.replace(&format!("CRESSET_{key}"), "CRESSET_KEY");
        places.iter().chain([&folder]).fold(text, |text, (place, value)| text.replace(place, value))
    };
    let table = |name: &str| launch.get(name).and_then(toml::Value::as_table).into_iter().flatten();
    for (name, text) in table("files") {
        std::fs::create_dir_all(home.join(name).parent().unwrap()).unwrap();
        std::fs::write(home.join(name), filled(text)).unwrap();
    }
    let mut command = Command::new(program(agent));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("HOME", home);
    command.envs(table("environment").map(|(name, text)| (name, filled(text))));
    let arguments = launch.get("arguments").and_then(toml::Value::as_array).into_iter().flatten();
    command.args(arguments.map(filled)).args(alone(agent, task));
    command
}

/// Runs an agent at a task. An error is what it wrote, with the reason.
fn run(agent: &str, task: &Task, folder: &Path, node: [&str; 3]) -> Result<Duration, String> {
    let [home, work] = ["home", "work"].map(|name| folder.join(name));
    std::fs::create_dir_all(&home).unwrap();
    for (name, text) in task.files {
        std::fs::write(work.join(name), text).unwrap();
    }
    let said = work.join("said.txt");
    let output = std::fs::File::create(&said).unwrap();
    let began = Instant::now();
    let mut child = command(agent, &home, task, node)
        .current_dir(&work)
        .stdin(Stdio::null())
        .stderr(output.try_clone().unwrap())
        .stdout(output)
        .spawn()
        .unwrap();
    let ended = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status.success(),
            None if began.elapsed() > TASK_TIME => {
                child.kill().unwrap();
                child.wait().unwrap();
                break false;
            }
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    let text = std::fs::read_to_string(&said).unwrap();
    let done = Command::new("sh").args(["-c", task.check]).current_dir(&work).status().unwrap();
    let told = text.contains(task.end.split("{}").next().unwrap());
    if ended && told && done.success() {
        return Ok(began.elapsed());
    }
    Err(format!("ended well {ended}, told {told}, done {}: {text}", done.success()))
}

/// A node whose model is the script, for agents that work in the folder `work` below the place.
async fn scripted(place: &Arc<Mutex<PathBuf>>) -> (World, String) {
    let place = place.clone();
    let mut world = node(CALLER, "", |setup| {
        setup.answer = Some(Arc::new(move |prompt| {
            script::answer(prompt, &place.lock().unwrap().join("work"))
        }));
        // The tiny model has a token for each byte.
        (setup.context_tokens, setup.num_blocks) = (400_000, 100_000);
        (setup.trial, setup.max_batched_tokens) = (1_000_000_000, 8192);
    })
    .await;
    let gateway = world.open_gateway().await;
    (world, format!("http://{gateway}"))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs 1.5 GB of coding agents; .ci/long"]
async fn coding_agents_end_their_tasks_well() {
    let folder = Arc::default();
    let (world, root) = scripted(&folder).await;
    let chosen = std::env::var("CRESSET_AGENT").ok();
    let mut failed = Vec::new();
    for agent in AGENTS.iter().filter(|agent| chosen.as_ref().is_none_or(|name| name == **agent)) {
        // Alone, aider runs no command that a model asks for.
        for task in TASKS.iter().filter(|task| (*agent, task.name) != ("aider", "run")) {
            let place = tempfile::tempdir().unwrap();
            std::fs::create_dir_all(place.path().join("work")).unwrap();
            *folder.lock().unwrap() = place.path().canonicalize().unwrap();
            match run(agent, task, place.path(), [&root, &world.key, "tiny-0"]) {
                Ok(time) => println!("{agent:<8} {:<8} {:.1} s", task.name, time.as_secs_f64()),
                Err(why) => {
                    println!("{agent:<8} {:<8} FAILED {why}", task.name);
                    failed.push(format!("{agent} {}", task.name));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs 1.5 GB of coding agents and libraries; .ci/long"]
async fn loops_of_agent_libraries_end_well() {
    let loops = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/agents/loops");
    let (python, installed) = python("agents-python", &loops.join("requirements.txt"));
    installed.unwrap();
    let (world, root) = scripted(&Arc::default()).await;
    let task = TASKS.iter().find(|task| task.name == "run").unwrap();
    let place = tempfile::tempdir().unwrap();
    let [(name, text)] = task.files else { panic!("one file") };
    std::fs::write(place.path().join(name), text).unwrap();
    for (script, answers) in
        [("openai_agents_loop.py", 4), ("langgraph_loop.py", 2), ("ai_sdk_loop.mjs", 2)]
    {
        let script = loops.join(script);
        let mut command = if script.extension().is_some_and(|kind| kind == "mjs") {
            node_script(packages().parent().unwrap().parent().unwrap(), &script)
        } else {
            let mut command = Command::new(&python);
            command.arg(&script);
            command
        };
        command.args([&root, &world.key, "tiny-0", task.ask]).current_dir(place.path());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said.matches("The script prints 1337.").count(), answers, "{output:?}");
        println!("{}: {answers} answers", script.display());
    }
    world.close().await;
}
