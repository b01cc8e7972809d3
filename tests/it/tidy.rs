//! The house's own rules, executable: who may know whom, and what may stand where.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Which modules of the node each module may name. Anything absent here is refused.
const MAY_KNOW: &[(&str, &[&str])] = &[
    ("ids", &[]),
    ("failpoint", &[]),
    ("clock", &["failpoint"]),
    ("config", &[]),
    ("metrics", &[]),
    ("text", &[]),
    ("ledger", &["ids", "clock"]),
    ("store", &["ledger", "ids", "clock", "failpoint"]),
    ("engine", &["ids", "failpoint"]),
    ("catalogue", &["ids", "ledger", "clock"]),
    ("pool", &["catalogue", "config", "engine", "ids", "text"]),
    (
        "server",
        &[
            "catalogue",
            "clock",
            "config",
            "engine",
            "failpoint",
            "ids",
            "ledger",
            "metrics",
            "pool",
            "store",
            "text",
        ],
    ),
    (
        "cli",
        &[
            "catalogue",
            "clock",
            "config",
            "engine",
            "failpoint",
            "ids",
            "ledger",
            "metrics",
            "pool",
            "server",
            "store",
            "text",
        ],
    ),
];

/// Text that may stand only in files whose path begins with one of the given prefixes.
const ONLY_IN: &[(&str, &[&str])] = &[
    ("redb::", &["src/store/"]),
    ("axum::", &["src/server/"]),
    (
        "std::env::var",
        &["src/config.rs", "tests/", "models/examples/", "kernels/examples/", "kernels/build"],
    ),
    ("unsafe {", &["kernels/", "models/src/loader/"]),
    ("feature = \"cuda\"", &["kernels/"]),
    ("unbounded_channel", &[]),
    ("todo!(", &[]),
    ("unimplemented!(", &[]),
];

/// Text that must not stand in the engine's pure files.
const NOT_IN_PURE_ENGINE: &[&str] = &["candle", "tokio", "Instant::now", "SystemTime"];

const LONGEST_FUNCTION: usize = 70;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file of the project as (path relative to the root, text), this file left out.
fn sources() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for folder in ["src", "kernels", "models", "qualification", "tests"] {
        collect(&root().join(folder), &mut found);
    }
    let relative = |path: &Path| path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
    let read = |path: PathBuf| (relative(&path), std::fs::read_to_string(&path).unwrap());
    found.into_iter().map(read).filter(|(path, _)| path != "tests/it/tidy.rs").collect()
}

fn collect(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            collect(&entry, found);
        } else if entry.extension().is_some_and(|ext| ext == "rs") {
            found.push(entry);
        }
    }
}

/// The part of a file that is not tests.
fn production(text: &str) -> &str {
    text.split("\n#[cfg(test)]").next().unwrap_or_default()
}

fn assert_none(what: &str, offenders: &[String]) {
    assert!(offenders.is_empty(), "{what}:\n{}", offenders.join("\n"));
}

#[test]
fn modules_know_only_what_the_table_allows() {
    let mut offenders = Vec::new();
    for (path, text) in sources() {
        let Some(rest) = path.strip_prefix("src/") else { continue };
        let module = rest.split(['/', '.']).next().unwrap();
        if ["lib", "main"].contains(&module) {
            continue;
        }
        let allowed = MAY_KNOW.iter().find(|(name, _)| *name == module).map(|(_, known)| *known);
        let allowed: BTreeSet<&str> = allowed
            .unwrap_or_else(|| panic!("{module} is not in the table"))
            .iter()
            .copied()
            .collect();
        for known in mentioned_modules(production(&text)) {
            if known != module
                && MAY_KNOW.iter().any(|(name, _)| *name == known)
                && !allowed.contains(known.as_str())
            {
                offenders.push(format!("{path} knows {known}"));
            }
        }
    }
    assert_none("arrows against the layout", &offenders);
}

fn mentioned_modules(text: &str) -> BTreeSet<String> {
    let name = |rest: &str| {
        rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>()
    };
    text.split("crate::").skip(1).map(name).collect()
}

#[test]
fn each_thing_stands_only_where_it_may() {
    let mut offenders = Vec::new();
    for (path, text) in sources() {
        for (needle, places) in ONLY_IN {
            if !places.iter().any(|place| path.starts_with(place))
                && production(&text).contains(needle)
            {
                offenders.push(format!("{path} has {needle}"));
            }
        }
    }
    assert_none("out of place", &offenders);
}

#[test]
fn the_scheduler_is_pure() {
    let mut offenders = Vec::new();
    for (path, text) in sources() {
        let pure = ["sequence", "block_manager", "scheduler"];
        if !pure.iter().any(|name| path.starts_with(&format!("src/engine/{name}"))) {
            continue;
        }
        let text = production(&text);
        offenders.extend(
            NOT_IN_PURE_ENGINE
                .iter()
                .filter(|n| text.contains(**n))
                .map(|n| format!("{path} has {n}")),
        );
    }
    assert_none("impure", &offenders);
}

#[test]
fn files_say_what_they_are_for() {
    let silent: Vec<String> = sources()
        .into_iter()
        .filter(|(_, text)| !text.starts_with("//!"))
        .map(|(path, _)| path)
        .collect();
    assert_none("files without a //! head", &silent);
}

#[test]
fn no_file_is_named_utils() {
    let vague = ["utils.rs", "util.rs", "helpers.rs", "common.rs", "misc.rs"];
    let found: Vec<String> = sources()
        .into_iter()
        .map(|(path, _)| path)
        .filter(|p| vague.iter().any(|v| p.ends_with(v)))
        .collect();
    assert_none("vague names", &found);
}

#[test]
fn functions_stay_short() {
    let mut offenders = Vec::new();
    for (path, text) in sources() {
        for (line, length) in function_lengths(&text) {
            if length > LONGEST_FUNCTION {
                offenders.push(format!("{path}:{line}: {length} lines"));
            }
        }
    }
    assert_none("functions to split by idea", &offenders);
}

/// (first line, length) of each function, by the indentation of its closing brace (the formatter
/// guarantees it).
fn function_lengths(text: &str) -> Vec<(usize, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut lengths = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let trimmed = line.trim_start();
        let is_function = trimmed.split("fn ").next().is_some_and(|before| {
            trimmed.contains("fn ")
                && before.split(' ').all(|w| {
                    ["", "pub", "pub(crate)", "pub(super)", "const", "async", "unsafe"].contains(&w)
                })
        });
        if !is_function || trimmed.ends_with(';') {
            continue;
        }
        let close = format!("{}}}", " ".repeat(line.len() - trimmed.len()));
        if let Some(end) = lines[start..].iter().position(|l| *l == close) {
            lengths.push((start + 1, end + 1));
        }
    }
    lengths
}
