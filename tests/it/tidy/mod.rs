//! The project's own rules, executable: how long things may be, how they are named, and what stands
//! beside them. Each rule is tested too: `planted.rs` breaks it and checks that it reports that.

#![allow(clippy::case_sensitive_file_extension_comparisons, reason = "names are in lower case")]

mod planted;
mod shape;
mod source;

use source::{Source, read};
use std::path::Path;

/// Finds the places that break a rule.
type Find = fn(&[Source]) -> Vec<String>;

const RULES: [(&str, Find); 12] = [
    ("the engine's pure files name no clock, task or tensor", shape::purity),
    ("kernels have reference and tests beside them", shape::kernels),
    ("lines have at most 100 columns", shape::long_lines),
    ("few lines are longer", shape::share_of_long_lines),
    ("functions have at most 70 lines", shape::functions),
    ("of 20 functions, 19 have at most 25 lines", shape::typical_function),
    ("product files have at most 500 lines of code", shape::large_files),
    ("files say what they are for", shape::heads),
    ("no name is vague", shape::vague_names),
    ("a type name is defined once", shape::type_names),
    ("every ignored test is listed", shape::ignored_tests),
    ("every metric is explained", shape::metrics),
];

#[test]
fn the_project_keeps_its_rules() {
    let tree = read(Path::new(env!("CARGO_MANIFEST_DIR")));
    let mut report = String::new();
    for (name, find) in RULES {
        let wrong = find(&tree);
        if !wrong.is_empty() {
            report.extend(["\n", name, ":\n  ", &wrong.join("\n  "), "\n"]);
        }
    }
    assert!(report.is_empty(), "{report}");
}
