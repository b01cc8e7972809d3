//! The rules of layout that no crate's manifest states: where things may stand, and which parts of
//! the root package may name which.

use super::source::{Source, Tree};
use super::{Offence, offence};

/// The modules of the root package, and those that each of them may name.
const MODULES: [(&str, &[&str]); 5] = [
    ("config", &["gateway", "server"]),
    ("server", &["config"]),
    ("gateway", &["config", "server"]),
    ("node", &["config", "gateway", "server"]),
    ("cli", &["config", "gateway", "node", "server"]),
];

/// Checks the dependencies between the modules of the root package.
pub fn modules(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    for file in tree.product() {
        let own = file.path.split('/').nth(1).unwrap_or_default();
        let row = MODULES.iter().find(|(name, _)| *name == own);
        let Some((_, allowed)) = row.filter(|_| file.path.starts_with("src/")) else { continue };
        for (known, _) in MODULES.iter().filter(|(known, _)| *known != own) {
            if !allowed.contains(known) && names(file, &format!("crate::{known}")) {
                found.push(offence(&file.path, format!("{} knows {known}", file.path)));
            }
        }
    }
    found
}

/// Whether the production code names this path.
fn names(file: &Source, path: &str) -> bool {
    let path = path.replace("::", " :: ");
    let wanted: Vec<&str> = path.split(' ').collect();
    let mut found = file.tokens.windows(wanted.len());
    found.any(|tokens| tokens.iter().zip(&wanted).all(|(token, word)| token.is(word)))
}

/// Files of the engine that decide by their arguments alone.
const PURE: [&str; 7] =
    ["sequence", "block_manager", "scheduler", "fair_queue", "queue_limits", "rate", "error"];
/// Things that a pure file must not name: tensors, tasks, and clocks.
const IMPURE: [&str; 9] = [
    "candle_core",
    "candle_nn",
    "tokio",
    "Instant::now",
    "SystemTime",
    "thread",
    "cresset_base::clock",
    "failpoint",
    "elapsed",
];

/// Checks the engine's pure files.
pub fn purity(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    for file in tree.product() {
        let inside = file.path.strip_prefix("src/engine/");
        let part = inside.and_then(|path| path.split(['/', '.']).next());
        if !part.is_some_and(|part| PURE.contains(&part)) {
            continue;
        }
        for impure in IMPURE.iter().filter(|impure| names(file, impure)) {
            found.push(offence(&file.path, format!("{} names {impure}", file.path)));
        }
    }
    found
}

/// Crates that may be named only in files whose path begins with one of the given prefixes.
const NAMED_ONLY_IN: [(&str, &[&str]); 4] = [
    ("redb", &["src/store/embedded/"]),
    ("tokio_postgres", &["src/postgres/"]),
    ("axum", &["src/server/", "src/gateway/"]),
    ("hyper", HTTP),
];
const HTTP: &[&str] = &[
    "src/server/transport/",
    "src/server/forward.rs",
    "src/gateway/",
    "src/cli/",
    "src/tls/",
    "src/telemetry/traces/",
];

/// Places where `unsafe` may stand, also in tests.
const UNSAFE: [&str; 2] = ["kernels/", "models/src/loader/"];

/// Checks crates and words that may stand only in certain places.
pub fn places(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    for file in tree.product() {
        for (name, places) in NAMED_ONLY_IN {
            let named = file.tokens.windows(2).any(|w| w[0].is(name) && w[1].is("::"));
            if named && !begins(file, places) {
                found.push(offence(&file.path, format!("{} has {name}", file.path)));
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

/// Files where a type may have a JSON schema: the wire's own types, the document that lists them,
/// ids and amounts, and the settings, whose schema `config schema` prints.
fn may_have_schema(file: &Source) -> bool {
    let places = [
        "src/server/wire/",
        "src/server/openapi",
        "src/config",
        "src/base/ids.rs",
        "src/base/settings.rs",
        "src/ledger/schemas.rs",
    ];
    begins(file, &places) || file.path.ends_with("/settings.rs")
}

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
        if has("JsonSchema") && !may_have_schema(file) {
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
    for file in tree
        .files
        .iter()
        .filter(|file| file.path.starts_with("kernels/") && file.path.ends_with(".cu"))
    {
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
