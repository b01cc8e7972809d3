//! A model that always makes the right call. It reads the rendered prompt as a model would: the
//! tools that are offered, the task, and how many results there are.

use serde_json::{Map, Value, json};
use std::path::Path;

/// What one turn of the work does, in no agent's own words.
pub enum Step {
    Read(&'static str),
    /// File, text, text in its place.
    Edit(&'static str, &'static str, &'static str),
    Write(&'static str, &'static str),
    Run(&'static str),
}

use Step::{Edit, Read, Run, Write};

/// A small piece of work in a folder.
pub struct Task {
    pub name: &'static str,
    /// The words that the agent is given.
    pub ask: &'static str,
    pub files: &'static [(&'static str, &'static str)],
    steps: &'static [Step],
    /// The last answer; `{}` stands for the digits behind `code: ` in the last result.
    pub end: &'static str,
    /// A command that succeeds in the folder once the work is done.
    pub check: &'static str,
}

pub const TASKS: &[Task] = &[
    Task {
        name: "fix",
        ask: "Fix the bug in calc.py: add must return the sum.",
        files: &[("calc.py", "def add(a, b):\n    return a - b\n")],
        steps: &[Read("calc.py"), Edit("calc.py", "return a - b", "return a + b")],
        end: "The function add returns the sum now.",
        check: "python3 -c 'import calc; assert calc.add(2, 3) == 5'",
    },
    Task {
        name: "add",
        ask: "Add a function triple to numbers.py, and a test of it in check_triple.py.",
        files: &[("numbers.py", "def double(x):\n    return 2 * x\n")],
        steps: &[
            Read("numbers.py"),
            Edit("numbers.py", "def double(x):", "triple = lambda x: 3 * x\\n\\ndef double(x):"),
            Write("check_triple.py", "import numbers_here\n\nassert numbers_here.triple(2) == 6\n"),
            Run("cp numbers.py numbers_here.py && python3 check_triple.py && echo passed"),
        ],
        end: "There is a function triple, and its test passes.",
        check: "python3 check_triple.py",
    },
    Task {
        name: "rename",
        ask: "Rename the function greet to welcome in both files.",
        files: &[
            ("hello.py", "def greet(name):\n    return 'hello ' + name\n"),
            ("main.py", "import hello\n\nprint(hello.greet('Ada'))\n"),
        ],
        steps: &[
            Run("grep -n greet hello.py main.py"),
            Read("hello.py"),
            Edit("hello.py", "def greet", "def welcome"),
            Read("main.py"),
            Edit("main.py", "hello.greet", "hello.welcome"),
            Run("python3 main.py"),
        ],
        end: "The function is called welcome in both files.",
        check: "test \"$(python3 main.py)\" = 'hello Ada' && ! grep -q greet hello.py main.py",
    },
    Task {
        name: "answer",
        ask: "Which code stands in notes.txt?",
        files: &[("notes.txt", "A few notes.\ncode: 471108\nNothing else.\n")],
        steps: &[Read("notes.txt")],
        end: "The file gives the number {}.",
        check: "grep -q 471108 said.txt",
    },
    Task {
        name: "run",
        ask: "Run make_code.sh with sh and report the code that it prints.",
        files: &[("make_code.sh", "echo \"code: $((1300 + 37))\"\n")],
        steps: &[Run("sh make_code.sh")],
        end: "The script prints {}.",
        check: "grep -q 1337 said.txt",
    },
];

impl Task {
    /// The command that the work ends with, if any.
    pub fn last_command(&self) -> Option<&'static str> {
        self.steps
            .iter()
            .rev()
            .find_map(|step| if let Run(command) = step { Some(*command) } else { None })
    }

    /// The last answer, once `seen` has the code that it tells of.
    fn told(&self, seen: &str) -> String {
        let digits = seen.rsplit_once("code: ").map_or("", |(_, rest)| {
            rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default()
        });
        self.end.replace("{}", digits)
    }
}

/// The answer to a prompt in the form of Qwen 2.5, for agents that work in `folder`.
pub fn answer(prompt: &str, folder: &Path) -> String {
    let tools = offered(prompt);
    let found = TASKS.iter().filter_map(|task| Some((prompt.rfind(task.ask)?, task)));
    let Some((place, task)) = found.max_by_key(|(place, _)| *place) else {
        return "Ready.".into();
    };
    if prompt.contains("*SEARCH/REPLACE block*") {
        return blocks(task, folder) + &task.told(prompt);
    }
    // Agents also ask for a title of the conversation, without tools.
    if tools.is_empty() {
        return "A small task".into();
    }
    let results: Vec<&str> = prompt[place..].split("<tool_response>").skip(1).collect();
    let Some(step) = task.steps.get(results.len()) else {
        return task.told(results.last().unwrap_or(&""));
    };
    let (name, arguments) = call(&tools, step, folder);
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
}

/// The edits of a task as aider reads them, which tells the model of files and not of tools. A
/// block has whole lines.
fn blocks(task: &Task, folder: &Path) -> String {
    let block = |file: &str, old: &str, new: &str| {
        format!("{file}\n```\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```\n\n")
    };
    let edit = |step: &Step| match step {
        Edit(file, old, new) => {
            let text = std::fs::read_to_string(folder.join(file)).unwrap();
            let line = text.lines().find(|line| line.contains(old))?;
            let changed = line.replace(old, &new.replace("\\n", "\n"));
            Some(block(file, &format!("{line}\n"), &format!("{changed}\n")))
        }
        Write(file, text) => Some(block(file, "", text)),
        Read(_) | Run(_) => None,
    };
    task.steps.iter().filter_map(edit).collect()
}

/// Names and parameters of the tools in the prompt.
fn offered(prompt: &str) -> Vec<(String, Value)> {
    let listed = prompt.split_once("<tools>\n").and_then(|(_, rest)| rest.split_once("\n</tools>"));
    let lines = listed.map_or("", |(lines, _)| lines).lines();
    lines
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .map(|mut tool| {
            let name = tool["function"]["name"].as_str().unwrap().to_owned();
            (name, tool["function"]["parameters"].take())
        })
        .collect()
}

/// The call of a listed tool that does the step; of the shell where there is none for it.
fn call(tools: &[(String, Value)], step: &Step, folder: &Path) -> (String, Value) {
    let at = |file: &str| json!(folder.join(file));
    let (names, values): (&[&str], Vec<(&str, Value)>) = match step {
        Read(file) => (&["Read", "read", "read_file"], vec![("path", at(file))]),
        Edit(file, old, new) => (
            &["Edit", "edit"],
            vec![("path", at(file)), ("old", json!(old)), ("new", json!(new.replace("\\n", "\n")))],
        ),
        Write(file, text) => {
            (&["Write", "write", "write_file"], vec![("path", at(file)), ("content", json!(text))])
        }
        Run(command) => (&["Bash", "bash", "run_shell_command"], vec![("command", json!(command))]),
    };
    let tool = tools.iter().find(|(name, _)| names.contains(&name.as_str()));
    if let Some((name, parameters)) = tool {
        return (name.clone(), filled(parameters, &values));
    }
    let shell = ["exec_command", "shell_command", "shell", "run_commands", "bash"];
    let tool = tools.iter().find(|(name, _)| shell.contains(&name.as_str()));
    let (name, parameters) = tool.unwrap_or_else(|| {
        panic!("no tool for it: {:?}", tools.iter().map(|(name, _)| name).collect::<Vec<_>>())
    });
    (name.clone(), filled(parameters, &[("command", json!(in_shell(step)))]))
}

fn in_shell(step: &Step) -> String {
    match step {
        Read(file) => format!("cat {file}"),
        Edit(file, old, new) => format!("sed -i 's|{old}|{new}|' {file}"),
        Write(file, text) => format!("cat > {file} <<'END'\n{text}END"),
        Run(command) => (*command).into(),
    }
}

/// Arguments for these parameters, in their order: each value under the name that is meant by it,
/// and something of the right type for what is required besides.
fn filled(parameters: &Value, values: &[(&str, Value)]) -> Value {
    let properties = parameters["properties"].as_object().unwrap();
    let is_meant = |name: &str, meaning: &str| {
        let name = name.to_lowercase();
        name.starts_with(meaning)
            || name.ends_with(meaning)
            || (meaning, name.as_str()) == ("command", "cmd")
    };
    let required = |name: &String| {
        parameters["required"].as_array().is_some_and(|all| all.contains(&json!(name)))
    };
    let mut arguments = Map::new();
    for (name, schema) in properties {
        let kind = schema["type"].as_str();
        let value = match values.iter().find(|(meaning, _)| is_meant(name, meaning)) {
            Some((_, command)) if name == "commands" => json!([command]),
            Some((_, command)) if kind == Some("array") => json!(["bash", "-lc", command]),
            Some((_, value)) => value.clone(),
            None if !required(name) => continue,
            None => match kind {
                Some("boolean") => json!(false),
                Some("integer" | "number") => json!(1000),
                Some("array") => json!([]),
                _ => json!("as the task wants it"),
            },
        };
        arguments.insert(name.clone(), value);
    }
    assert!(arguments.len() >= values.len(), "{values:?} have no place in {parameters}");
    Value::Object(arguments)
}
