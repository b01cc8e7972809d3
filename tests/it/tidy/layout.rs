//! The rules of layout: which parts may depend on which, and where things may stand.

use super::paths::{Mention, defining, module_of};
use super::source::{Source, Tree};
use super::{Offence, offence};
use std::collections::BTreeSet;

/// The parts that each part may name: modules of the node, and the crates below it.
type Rows = &'static [(&'static str, &'static [&'static str])];

/// The node's modules. A module that is absent here is refused.
const MODULES: Rows = &[
    ("ids", &[]),
    ("failpoint", &[]),
    ("file_lock", &[]),
    ("durable_file", &[]),
    ("recent", &[]),
    ("clock", &["failpoint"]),
    ("config", &["models"]),
    ("tls", &["clock", "config"]),
    ("metrics", &["engine", "store"]),
    ("traces", &["config", "metrics"]),
    ("text", &["models"]),
    ("ledger", &["ids", "clock"]),
    (
        "store",
        &["config", "ledger", "ids", "clock", "failpoint", "file_lock", "durable_file", "recent"],
    ),
    ("engine", &["config", "ids", "failpoint", "models", "kernels"]),
    (
        "catalogue",
        &[
            "ids",
            "ledger",
            "clock",
            "file_lock",
            "durable_file",
            "models",
            "kernels",
            "qualification",
        ],
    ),
    ("pool", &["catalogue", "config", "engine", "ids", "text"]),
    (
        "request",
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
            "recent",
            "store",
            "text",
            "traces",
        ],
    ),
    (
        "server",
        &[
            "catalogue",
            "clock",
            "config",
            "durable_file",
            "engine",
            "ids",
            "ledger",
            "metrics",
            "pool",
            "recent",
            "request",
            "store",
            "text",
            "tls",
            "traces",
        ],
    ),
    ("gateway", &["config", "metrics", "server", "traces"]),
    (
        "node",
        &[
            "catalogue",
            "clock",
            "config",
            "engine",
            "failpoint",
            "gateway",
            "ids",
            "kernels",
            "models",
            "pool",
            "qualification",
            "request",
            "server",
            "store",
            "text",
            "tls",
        ],
    ),
    (
        "cli",
        &[
            "catalogue",
            "clock",
            "config",
            "durable_file",
            "failpoint",
            "gateway",
            "ids",
            "ledger",
            "metrics",
            "node",
            "qualification",
            "server",
            "store",
            "tls",
            "traces",
        ],
    ),
];

/// The parts of the server.
const SERVER: Rows = &[
    ("error", &[]),
    ("headers", &["error"]),
    ("wire", &["error"]),
    ("access_log", &[]),
    ("sse", &["access_log", "error", "wire"]),
    ("openapi", &["error", "headers", "wire"]),
    ("transport", &["error", "finish_response"]),
    ("forward", &["access_log"]),
    ("finish_response", &["access_log", "error", "forward", "headers", "transport"]),
    ("auth", &["access_log", "error", "transport"]),
    ("handlers", &["access_log", "error", "forward", "headers", "sse", "wire"]),
    ("own_names", &[]),
    ("operator", &["openapi", "own_names", "wire"]),
];

/// The crates below the node, and those that each of them may name.
const CRATES_BELOW: Rows =
    &[("kernels", &["candle"]), ("models", &["candle", "kernels"]), ("qualification", &[])];

/// Crates that the rows name by a shorter word.
const CRATES: [(&str, &str); 6] = [
    ("cresset_models", "models"),
    ("cresset_kernels", "kernels"),
    ("cresset_qualification", "qualification"),
    ("candle_core", "candle"),
    ("candle_nn", "candle"),
    ("candle_transformers", "candle"),
];

/// The build script: a program of its own that `Cargo.toml` names, and no module of the node.
const BUILD_SCRIPT: &str = "src/build.rs";

/// Checks the dependencies between the modules of the node.
pub fn modules(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    let product = tree.product().filter(|file| file.path != BUILD_SCRIPT);
    for file in product.filter(|file| file.path.starts_with("src/")) {
        let module = part(&file.path, "src/");
        if ["lib", "main"].contains(&module) {
            continue;
        }
        let Some((_, allowed)) = MODULES.iter().find(|(name, _)| *name == module) else {
            found.push(offence(&file.path, format!("the table has no row for {module}")));
            continue;
        };
        // A glob of the whole crate would bring modules in without naming them.
        if file.mentions.iter().any(|mention| mention.text() == "crate::*") {
            found.push(offence(&file.path, format!("{} names every module", file.path)));
        }
        found.extend(unexpected(file, module, allowed, module_named));
    }
    found
}

/// Checks the dependencies of the crates below the node.
pub fn crates(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    for (name, allowed) in CRATES_BELOW {
        let own = tree.product().filter(|file| part(&file.path, "") == *name);
        found.extend(own.flat_map(|file| unexpected(file, name, allowed, crate_named)));
    }
    found
}

/// The parts that a file of `own` names and that its row does not allow.
fn unexpected(
    file: &Source,
    own: &str,
    allowed: &[&str],
    named: fn(&Mention) -> Option<&'static str>,
) -> Vec<Offence> {
    let known = file.mentions.iter().filter_map(named).collect::<BTreeSet<_>>();
    let known = known.into_iter().filter(|known| *known != own && !allowed.contains(known));
    let told =
        |known| offence(&format!("{own} knows {known}"), format!("{} knows {known}", file.path));
    known.map(told).collect()
}

/// The part of `folder` that a file below it belongs to.
fn part<'a>(path: &'a str, folder: &str) -> &'a str {
    path[folder.len()..].split(['/', '.']).next().unwrap_or_default()
}

/// The module of the node, or the crate below it, that is mentioned.
fn module_named(mention: &Mention) -> Option<&'static str> {
    let second = mention.path.get(1).filter(|_| mention.path[0] == "crate");
    let module = second.and_then(|name| MODULES.iter().find(|(known, _)| known == name));
    module.map(|(name, _)| *name).or_else(|| crate_named(mention))
}

fn crate_named(mention: &Mention) -> Option<&'static str> {
    let found = CRATES.iter().find(|(known, _)| *known == mention.path[0]);
    found.map(|(_, name)| *name)
}

/// Checks the dependencies between the parts of the server.
pub fn server_parts(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    for file in tree.product().filter(|file| file.path.starts_with("src/server/")) {
        let own = part(&file.path, "src/server/");
        if own == "mod" {
            continue;
        }
        let Some((_, allowed)) = SERVER.iter().find(|(name, _)| *name == own) else {
            found
                .push(offence(&file.path, format!("the table of the server has no row for {own}")));
            continue;
        };
        let named = file.mentions.iter().filter(|m| m.starts_with("crate::server"));
        let named = named.filter_map(|mention| defining(tree, "src/", &mention.path));
        let known = named.filter(|file| file.path.starts_with("src/server/"));
        for known in known.map(|file| part(&file.path, "src/server/")).collect::<BTreeSet<_>>() {
            if known != own && !allowed.contains(&known) {
                let key = format!("{own} knows {known}");
                found.push(offence(&key, format!("{} knows {known}", file.path)));
            }
        }
    }
    found
}

/// Files of the engine that decide by their arguments alone.
const PURE: [&str; 7] =
    ["sequence", "block_manager", "scheduler", "fair_queue", "queue_limits", "rate", "error"];

/// Things that a pure file must not reach: tensors, tasks, and clocks.
const IMPURE: [&str; 10] = [
    "candle_core",
    "candle_nn",
    "cresset_kernels",
    "cresset_models",
    "tokio",
    "std::time::Instant::now",
    "std::time::SystemTime",
    "std::thread",
    "crate::clock",
    "crate::failpoint",
];

/// Follows the names in the engine's pure files, file by file, inside the crate.
pub fn purity(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    for file in tree.product() {
        let inside = file.path.strip_prefix("src/engine/");
        if !inside.is_some_and(|_| PURE.contains(&part(&file.path, "src/engine/"))) {
            continue;
        }
        let (mut reached, mut open) = (BTreeSet::new(), vec![(file, file.path.clone())]);
        while let Some((next, way)) = open.pop() {
            if !reached.insert(next.path.as_str()) {
                continue;
            }
            let counted = || next.mentions.iter().filter(|mention| counts(next, mention));
            if let Some(mention) = counted().find(|mention| is_impure(mention)) {
                let detail = format!("{way}:{} reaches {}", mention.line, mention.text());
                found.push(offence(&file.path, detail));
                continue;
            }
            if let Some(line) = reads_clock(next) {
                found.push(offence(&file.path, format!("{way}:{line} calls elapsed")));
                continue;
            }
            for to in counted().flat_map(|mention| followed(tree, mention)) {
                open.push((to, format!("{way} → {}", to.path)));
            }
        }
    }
    found
}

/// How a row is sampled is defined once for the engine and the samplers, and how layers share
/// blocks once for the engine and the models, in files without tensors. The macro is a list of
/// settings.
const PURE_ELSEWHERE: [&str; 3] = [
    "cresset_kernels::sampling::params",
    "cresset_models::cache_kinds",
    "cresset_models::model_settings",
];

fn is_impure(mention: &Mention) -> bool {
    !PURE_ELSEWHERE.iter().any(|pure| mention.starts_with(pure))
        && IMPURE.iter().any(|impure| mention.starts_with(impure))
}

/// A module's own re-exports do not make the code beside them depend on anything.
fn counts(file: &Source, mention: &Mention) -> bool {
    !(file.path.ends_with("mod.rs") && mention.public)
}

/// The files that a mention leads to: a glob leads to all that its module exports.
fn followed<'a>(tree: &'a Tree, mention: &Mention) -> Vec<&'a Source> {
    let inside = |mention: &&Mention| mention.path[0] == "crate" && mention.path.len() > 1;
    let file = |mention: &Mention| defining(tree, "src/", &mention.path);
    let Some(named) = Some(mention).filter(inside).and_then(file) else { return Vec::new() };
    let is_glob = mention.path.last().is_some_and(|last| last == "*");
    let exported = named.mentions.iter().filter(|export| is_glob && export.public);
    std::iter::once(named).chain(exported.filter(inside).filter_map(file)).collect()
}

/// The line on which a file asks how long ago a moment was, which reads the clock.
fn reads_clock(file: &Source) -> Option<usize> {
    let mut called = file.tokens.windows(3);
    let called = called.find(|w| w[0].is(".") && w[1].is("elapsed") && w[2].is("("))?;
    Some(file.line(called[1].at))
}

/// Paths that may be named only in files whose path begins with one of the given prefixes.
const NAMED_ONLY_IN: [(&str, &[&str]); 10] = [
    ("redb", &["src/store/embedded/"]),
    // Whether a metric is explained is looked for there alone.
    ("prometheus_client", &["src/metrics"]),
    ("tokio_postgres", &["src/store/postgres/"]),
    ("axum", &["src/server/", "src/gateway/"]),
    ("hyper", HTTP),
    ("std::env::var", ENVIRONMENT),
    ("std::env::vars", ENVIRONMENT),
    ("std::env::var_os", ENVIRONMENT),
    ("std::env::vars_os", ENVIRONMENT),
    ("tokio::sync::mpsc::unbounded_channel", &[]),
];
const HTTP: &[&str] = &[
    "src/server/transport/",
    "src/server/forward.rs",
    "src/gateway/",
    "src/cli/",
    "src/tls.rs",
    "src/traces/",
];
const ENVIRONMENT: &[&str] =
    &["src/config/", "kernels/build", "kernels/src/gpu/emulator/", BUILD_SCRIPT];

/// Places where `unsafe` may stand, also in tests.
const UNSAFE: [&str; 2] = ["kernels/", "models/src/loader/"];

/// Checks crates, functions and words that may stand only in certain places.
pub fn places(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    for file in tree.product() {
        for (name, places) in NAMED_ONLY_IN {
            let mention = file.mentions.iter().find(|mention| mention.starts_with(name));
            if let Some(mention) = mention.filter(|_| !begins(file, places)) {
                let key = format!("{} has {name}", file.path);
                found.push(offence(&key, format!("{}:{} has {name}", file.path, mention.line)));
            }
        }
    }
    for file in tree.rust() {
        let has = |words: &[&str]| words.iter().all(|word| file.text.contains(word));
        let mut words = file.code.split(|c: char| !c.is_alphanumeric() && c != '_');
        if !begins(file, &UNSAFE) && words.any(|word| word == "unsafe") {
            found.push(offence(&file.path, format!("{} has unsafe", file.path)));
        }
        if !begins(file, &["kernels/", "tests/it/tidy/"]) && has(&["feature = \"cuda\""]) {
            found.push(offence(&file.path, format!("{} asks for the feature cuda", file.path)));
        }
    }
    found
}

fn begins(file: &Source, places: &[&str]) -> bool {
    places.iter().any(|place| file.path.starts_with(place))
}

/// Places where a type may have a JSON schema: the wire's own types, the document that lists them,
/// and the settings, whose schema `config schema` prints.
const SCHEMAS: [&str; 4] = ["src/server/wire/", "src/server/openapi", "src/config", "src/ids.rs"];
/// Further places in the server where JSON may be written: the operator's own surface.
const SERIALISED: [&str; 3] = ["src/server/wire/", "src/server/openapi", "src/server/operator/"];
/// The one shape that all errors have.
const ERRORS: &str = "src/server/error.rs";

/// Checks that the shapes of the public API stand in `server/wire` alone.
pub fn wire_types(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    for file in tree.product().filter(|file| file.path.starts_with("src/")) {
        let has = |name: &str| file.tokens.iter().any(|token| token.is(name));
        let serves = begins(file, &["src/server/", "src/request/", "src/pool/"]);
        if has("JsonSchema") && !begins(file, &SCHEMAS) {
            found.push(offence(&file.path, format!("{} has JsonSchema", file.path)));
        } else if serves && has("Serialize") && !begins(file, &SERIALISED) {
            found.push(offence(&file.path, format!("{} has Serialize", file.path)));
        }
        let makes_json = file.tokens.windows(2).any(|w| w[0].is("json") && w[1].is("!"));
        if serves && makes_json && !begins(file, &SERIALISED) && file.path != ERRORS {
            found.push(offence(&file.path, format!("{} has json!", file.path)));
        }
    }
    found
}

/// Checks that every kernel has a specification and tests beside it.
pub fn kernels(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    for file in tree.files.iter().filter(|file| file.path.ends_with(".cu")) {
        let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let has = |name: &str| tree.find(&format!("{folder}/{name}")).is_some();
        for (what, present) in [
            ("reference.rs", has("reference.rs")),
            ("tests.rs", has("tests.rs") || has("gpu/tests.rs") || has("cuda/tests.rs")),
        ] {
            if !present {
                found.push(offence(folder, format!("{} has no {what} beside it", file.path)));
            }
        }
    }
    found
}

/// Checks that every file of a crate is one of its modules; a file that no module declares is dead.
pub fn declared_files(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    let rust = tree.rust().filter(|file| file.path != BUILD_SCRIPT);
    for file in rust.filter(|file| file.path.contains("src/")) {
        let module = module_of(&file.path);
        let Some((name, parents)) = module.path.split_last().filter(|(_, rest)| !rest.is_empty())
        else {
            continue;
        };
        let parent = format!("{}{}", module.root, parents[1..].join("/"));
        let parent = parent.trim_end_matches('/');
        let texts = ["lib.rs", "main.rs", "mod.rs"].map(|own| format!("{parent}/{own}"));
        let texts = texts.iter().chain([&format!("{parent}.rs")]).cloned().collect::<Vec<_>>();
        let last = file.path.rsplit('/').next().unwrap_or_default();
        let is_declared = texts.iter().filter_map(|path| tree.find(path)).any(|parent| {
            super::source::declared(&parent.code).contains(name)
                || parent.text.contains(&format!("path = \"{last}\""))
        });
        if !is_declared {
            found.push(offence(&file.path, format!("{}: no module declares it", file.path)));
        }
    }
    found
}
