//! The rules: how long things may be, how they are named, what stands beside them, and what the
//! engine's pure files may name.

use super::source::{Function, Source};
use std::collections::{BTreeMap, BTreeSet};

/// Columns of a line, in characters.
const LONGEST_LINE: usize = 100;
/// Longer words are digests and addresses.
const LONGEST_WORD: usize = 60;
/// Of a thousand lines, this many may be longer: rows of tables in tests, and long literals.
const LONG_LINES_PER_MILLE: usize = 5;
const LONGEST_FUNCTION: usize = 70;
const LONG_FUNCTION: usize = 25;
/// Lines of code of a product file, without comments, blanks and tests.
const LARGEST_FILE: usize = 500;

/// Every line but those of documents, with its file and number.
fn lines(tree: &[Source]) -> impl Iterator<Item = (&Source, usize, &str)> {
    let files = tree.iter().filter(|file| !file.path.ends_with(".md"));
    files.flat_map(|file| file.text.lines().zip(1..).map(move |(line, at)| (file, at, line)))
}

fn find<'a>(tree: &'a [Source], path: &str) -> Option<&'a Source> {
    tree.iter().find(|file| file.path == path)
}

fn is_long(line: &str) -> bool {
    line.chars().count() > LONGEST_LINE
}

/// Checks for lines that are too long and belong neither to a test nor to a literal.
pub fn long_lines(tree: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for (file, at, line) in lines(tree).filter(|(.., line)| is_long(line)) {
        let columns = line.chars().count();
        let is_wrong = if line.trim_start().starts_with("//") {
            true
        } else if file.is_rust() {
            file.lines.get(&at).is_some_and(|contents| columns > LONGEST_LINE + contents)
        } else {
            !file.path.starts_with("tests/it/") && is_long(&without_literals(line))
        };
        found.extend(is_wrong.then(|| format!("{}:{at}: {columns} columns", file.path)));
    }
    found
}

/// The line of a script or of device code without the parts that cannot be broken: the contents of
/// literals, and words as long as a digest or an address.
fn without_literals(line: &str) -> String {
    let kept: String = line.replace("\\\"", "").split('"').step_by(2).collect();
    let kept: String = kept.replace("\\'", "").split('\'').step_by(2).collect();
    let breaks = |word: &str| word.len() <= LONGEST_WORD || word.contains(['(', ';', '{']);
    kept.split(' ').filter(|word| breaks(word)).collect::<Vec<_>>().join(" ")
}

/// Checks the share of all long lines together.
pub fn share_of_long_lines(tree: &[Source]) -> Vec<String> {
    let (all, long) = (lines(tree).count(), lines(tree).filter(|(.., line)| is_long(line)).count());
    let is_wrong = long * 1000 > all * LONG_LINES_PER_MILLE;
    let share = || format!("{long} of {all} lines have more than {LONGEST_LINE} columns");
    is_wrong.then(share).into_iter().collect()
}

/// Checks for functions that should be split, those of tests too.
pub fn functions(tree: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for file in tree {
        for function in file.functions.iter().filter(|own| own.length > LONGEST_FUNCTION) {
            found.push(format!("{}:{}: {} lines", file.path, function.line, function.length));
        }
    }
    found
}

/// Checks that nineteen of twenty functions of the product are short.
pub fn typical_function(tree: &[Source]) -> Vec<String> {
    let functions = tree.iter().flat_map(|file| &file.functions).filter(|own| own.is_product);
    let mut lengths: Vec<usize> = functions.map(|function| function.length).collect();
    lengths.sort_unstable();
    let length = lengths.get((lengths.len() * 95).div_ceil(100).saturating_sub(1));
    let long = length.filter(|length| **length > LONG_FUNCTION).into_iter();
    long.map(|length| format!("the 95th percentile of function lengths is {length} lines"))
        .collect()
}

/// Checks for product files that hold more than one idea, by their size.
pub fn large_files(tree: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for file in tree.iter().filter(|file| file.is_product) {
        let is_code = |(line, number): &(&str, usize)| {
            let has_code = !file.is_rust() || file.lines.contains_key(number);
            has_code && !line.is_empty() && !line.starts_with("//")
        };
        let lines = file.text.lines().map(str::trim).zip(1..).filter(is_code).count();
        if lines > LARGEST_FILE {
            found.push(format!("{} has {lines} lines of code", file.path));
        }
    }
    found
}

/// Checks that the first line of each file says what it is for.
pub fn heads(tree: &[Source]) -> Vec<String> {
    let silent = tree.iter().filter(|file| file.is_rust() && !file.text.starts_with("//!"));
    silent.map(|file| format!("{} has no //! head", file.path)).collect()
}

/// Names that say nothing about the content.
const VAGUE: [&str; 7] = ["utils", "util", "helpers", "helper", "common", "misc", "stuff"];

/// Checks for files and folders with vague names.
pub fn vague_names(tree: &[Source]) -> Vec<String> {
    let is_vague = |path: &str| path.split(['/', '.']).any(|name| VAGUE.contains(&name));
    let found = tree.iter().filter(|file| file.is_rust() && is_vague(&file.path));
    found.map(|file| format!("{} has a vague name", file.path)).collect()
}

/// Names that each file or crate may define: clap's argument structs, and the usual pair.
const OWN_NAMES: [&str; 3] = ["Arguments", "Error", "Result"];

/// Checks that a type name means one thing in the whole workspace.
pub fn type_names(tree: &[Source]) -> Vec<String> {
    let mut places: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for file in tree {
        for name in file.types.iter().filter(|name| !OWN_NAMES.contains(&name.as_str())) {
            places.entry(name).or_default().insert(&file.path);
        }
    }
    let twice = places.into_iter().filter(|(_, files)| files.len() > 1);
    let join = |files: BTreeSet<&str>| files.into_iter().collect::<Vec<_>>().join(" ");
    twice.map(|(name, files)| format!("{name} is defined in {}", join(files))).collect()
}

/// The place where each metric is explained to people who run a node.
const METRICS: (&str, &str) = ("src/telemetry/metrics.rs", "README.md");
/// The functions that register a metric. The last one's begin with `process`.
const REGISTER: [&str; 5] = ["add", "histogram", "histograms", "register", "of_process"];

/// Checks that every metric has a help text and stands in the document. Both are the first texts of
/// the call that registers it.
pub fn metrics(tree: &[Source]) -> Vec<String> {
    let (Some(file), Some(document)) = (find(tree, METRICS.0), find(tree, METRICS.1)) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    let words: Vec<&str> = file.words.split(' ').collect();
    let calls = words.windows(2).zip(2..).filter(|(w, _)| REGISTER.contains(&w[0]) && w[1] == "(");
    for (call, start) in calls {
        let arguments = words[start..].iter().take_while(|word| **word != ")");
        let mut texts = arguments.filter_map(|word| word.strip_prefix('"')?.strip_suffix('"'));
        let Some(name) = texts.next() else { continue };
        let prefix = if call[0] == "of_process" { "process" } else { "cresset" };
        let full = format!("`{prefix}_{name}`");
        if texts.next().is_none_or(str::is_empty) {
            found.push(format!("{full} has no help text"));
        }
        if !document.text.contains(&full) {
            found.push(format!("{full} is not in {}", METRICS.1));
        }
    }
    found
}

/// The list of the tests that `cargo test` leaves out.
const LONG_TESTS: &str = ".ci/long";

/// Checks that every ignored test is listed there.
pub fn ignored_tests(tree: &[Source]) -> Vec<String> {
    let Some(list) = find(tree, LONG_TESTS) else { return Vec::new() };
    let mut found = Vec::new();
    for file in tree {
        let ignored = file.functions.iter().filter(|function| function.is_ignored);
        for Function { name, .. } in ignored.filter(|own| !list.text.contains(&own.name)) {
            found.push(format!("{}: {name} is not in {LONG_TESTS}", file.path));
        }
    }
    found
}

/// Files of the engine that decide by their arguments alone.
const PURE: [&str; 7] =
    ["sequence", "block_manager", "scheduler", "fair_queue", "queue_limits", "rate", "error"];
/// What a pure file must not name: tensors, tasks, and clocks.
const IMPURE: &str = "candle_core candle_nn tokio thread Instant::now SystemTime elapsed \
    cresset_base::clock failpoint";

/// Checks the engine's pure files.
pub fn purity(tree: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for file in tree {
        let part =
            file.path.strip_prefix("src/engine/").and_then(|own| own.split(['/', '.']).next());
        let is_pure = part.is_some_and(|part| PURE.contains(&part));
        for name in IMPURE.split_whitespace().filter(|_| is_pure) {
            if file.words.contains(&format!(" {} ", name.replace("::", " : : "))) {
                found.push(format!("{} names {name}", file.path));
            }
        }
    }
    found
}

/// Checks that every kernel has a specification and tests beside it.
pub fn kernels(tree: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    let is_kernel = |path: &str| path.starts_with("kernels/") && path.ends_with(".cu");
    for path in tree.iter().map(|file| &file.path).filter(|path| is_kernel(path)) {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let has = |name: &&str| find(tree, &format!("{folder}/{name}")).is_some();
        for places in [&["reference.rs"][..], &["tests.rs", "gpu/tests.rs", "cuda/tests.rs"]] {
            if !places.iter().any(has) {
                found.push(format!("{path} has no {} beside it", places[0]));
            }
        }
    }
    found
}
