//! The project's own rules, executable: where things may stand, how long they may be. Each rule is
//! tested too: `planted.rs` breaks it and checks that it reports that.

#![allow(
    clippy::case_sensitive_file_extension_comparisons,
    reason = "the project's own files are named in lower case"
)]

mod allowed;
mod layout;
mod planted;
mod shape;
mod source;

use source::Tree;
use std::path::Path;

/// One place that breaks a rule.
#[derive(Debug, PartialEq)]
struct Offence {
    /// The thing that an allowance names: a path, a type, a dependency.
    key: String,
    detail: String,
}

fn offence(key: &str, detail: String) -> Offence {
    Offence { key: key.to_owned(), detail }
}

struct Rule {
    name: &'static str,
    find: fn(&Tree) -> Vec<Offence>,
    /// Present exceptions. The list may only get shorter: an entry that is no longer needed breaks
    /// the rule as well.
    allowed: &'static [&'static str],
}

const RULES: &[Rule] = &[
    rule("modules depend only on what the table allows", layout::modules, &[]),
    rule("the engine's pure files name no clock, task or tensor", layout::purity, &[]),
    rule("each thing stands only where it may", layout::places, &[]),
    rule("types of the API stand in server/wire", layout::wire_types, allowed::WIRE_TYPES),
    rule("kernels have reference and tests beside them", layout::kernels, &[]),
    rule("lines have at most 100 columns", shape::long_lines, &[]),
    rule("few lines are longer", shape::share_of_long_lines, &[]),
    rule("functions have at most 70 lines", shape::functions, &[]),
    rule("of 20 functions, 19 have at most 25 lines", shape::typical_function, &[]),
    rule("product files have at most 500 lines of code", shape::large_files, &[]),
    rule("files say what they are for", shape::heads, &[]),
    rule("no name is vague", shape::vague_names, &[]),
    rule("a type name is defined once", shape::type_names, allowed::TYPE_NAMES),
    rule("every ignored test is listed", shape::ignored_tests, &[]),
    rule("every metric is explained", shape::metrics, &[]),
];

const fn rule(
    name: &'static str,
    find: fn(&Tree) -> Vec<Offence>,
    allowed: &'static [&'static str],
) -> Rule {
    Rule { name, find, allowed }
}

/// The findings: offences that no allowance names, and allowances that no offence needs.
fn judged(offences: Vec<Offence>, allowed: &[&str]) -> Vec<String> {
    let idle = allowed.iter().filter(|key| !offences.iter().any(|o| o.key == **key));
    let idle = idle.map(|key| format!("`{key}` is fixed: remove it from tidy/allowed.rs"));
    let mut wrong: Vec<String> = idle.collect();
    let new = offences.into_iter().filter(|offence| !allowed.contains(&offence.key.as_str()));
    wrong.extend(new.map(|offence| offence.detail));
    wrong
}

#[test]
fn the_project_keeps_its_rules() {
    let tree = Tree::read(Path::new(env!("CARGO_MANIFEST_DIR")));
    let mut report = String::new();
    for rule in RULES {
        let wrong = judged((rule.find)(&tree), rule.allowed);
        if !wrong.is_empty() {
            report.extend(["\n", rule.name, ":\n  ", &wrong.join("\n  "), "\n"]);
        }
    }
    assert!(report.is_empty(), "{report}");
}
