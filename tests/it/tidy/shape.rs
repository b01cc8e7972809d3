//! The rules of shape: how long things may be, how they are named, and which documentation they
//! need.

use super::source::{Source, Token, Tree, matching, tokens};
use super::{Offence, offence};
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

/// Checks for lines that are too long and belong neither to a test nor to a literal.
pub fn long_lines(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    for file in tree.files.iter().filter(|file| !file.path.ends_with(".md")) {
        let mut production = file.production.lines();
        let mut code = file.code.lines();
        for (number, line) in file.text.lines().enumerate() {
            let (production, code) = (production.next(), code.next());
            let is_comment = line.trim_start().starts_with("//");
            let of_tests = file.path.starts_with("tests/it/")
                || (file.is_rust() && production.is_none_or(|line| line.trim().is_empty()));
            if is_long(line) && (is_comment || !of_tests && is_long(&without_literals(line, code)))
            {
                let columns = line.chars().count();
                let detail = format!("{}:{}: {columns} columns", file.path, number + 1);
                found.push(offence(&file.path, detail));
            }
        }
    }
    found
}

fn is_long(line: &str) -> bool {
    line.chars().count() > LONGEST_LINE
}

/// The line without the parts that cannot be broken: the contents of literals, and words as long as
/// a digest or an address. `code` is the same line of Rust with its literals blanked.
fn without_literals(line: &str, code: Option<&str>) -> String {
    if let Some(code) = code {
        let kept = line.bytes().zip(code.bytes()).filter(|(byte, left)| byte == left);
        return kept.map(|(_, byte)| char::from(byte)).collect();
    }
    let kept: String = line.replace("\\\"", "").split('"').step_by(2).collect();
    let kept: String = kept.replace("\\'", "").split('\'').step_by(2).collect();
    let breaks = |word: &str| word.len() <= LONGEST_WORD || word.contains(['(', ';', '{']);
    kept.split(' ').filter(|word| breaks(word)).collect::<Vec<_>>().join(" ")
}

/// Checks the share of all long lines together.
pub fn share_of_long_lines(tree: &Tree) -> Vec<Offence> {
    let lines =
        |file: &Source, long: bool| file.text.lines().filter(|line| !long || is_long(line)).count();
    let files = || tree.files.iter().filter(|file| !file.path.ends_with(".md"));
    let all: usize = files().map(|file| lines(file, false)).sum();
    let long: usize = files().map(|file| lines(file, true)).sum();
    if long * 1000 <= all * LONG_LINES_PER_MILLE {
        return Vec::new();
    }
    let share = format!("{long} of {all} lines have more than {LONGEST_LINE} columns");
    vec![offence("share", share)]
}

/// Checks for functions that should be split, those of tests too.
pub fn functions(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    for file in tree.rust() {
        for (line, length) in function_lengths(&file.code) {
            if length > LONGEST_FUNCTION {
                found.push(offence(&file.path, format!("{}:{line}: {length} lines", file.path)));
            }
        }
    }
    found
}

/// Checks that nineteen of twenty functions of the product are short.
pub fn typical_function(tree: &Tree) -> Vec<Offence> {
    let lengths = |file: &Source| function_lengths(&file.production);
    let mut lengths: Vec<usize> = tree.product().flat_map(lengths).map(|(_, l)| l).collect();
    lengths.sort_unstable();
    let last_typical = (lengths.len() * 95).div_ceil(100).saturating_sub(1);
    match lengths.get(last_typical) {
        Some(&length) if length > LONG_FUNCTION => {
            let detail = format!("the 95th percentile of function lengths is {length} lines");
            vec![offence("percentile", detail)]
        }
        _ => Vec::new(),
    }
}

/// (first line, number of lines) of each function with a body.
fn function_lengths(code: &str) -> Vec<(usize, usize)> {
    let tokens = tokens(code);
    let line = |at: usize| code[..at].matches('\n').count();
    let mut lengths = Vec::new();
    for (at, token) in tokens.iter().enumerate().filter(|(_, token)| token.is("fn")) {
        if !tokens.get(at + 1).is_some_and(Token::is_word) {
            continue;
        }
        let Some(open) = body(&tokens[at..]) else { continue };
        let lines = code[token.at..matching(code, open)].matches('\n').count() + 1;
        lengths.push((line(token.at) + 1, lines));
    }
    lengths
}

/// The place where the body of the function begins: at the first `{` outside of parentheses and
/// brackets.
fn body(tokens: &[Token]) -> Option<usize> {
    let mut depth = 0_usize;
    for token in tokens {
        match token.text.as_str() {
            "(" | "[" => depth += 1,
            ")" | "]" => depth = depth.checked_sub(1)?,
            "{" if depth == 0 => return Some(token.at),
            ";" | "}" if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

/// Checks for product files that hold more than one idea, by their size.
pub fn large_files(tree: &Tree) -> Vec<Offence> {
    let mut found = Vec::new();
    for file in tree.files.iter().filter(|file| file.is_product) {
        let text = if file.is_rust() { &file.production } else { &file.text };
        let is_code = |line: &&str| !line.is_empty() && !line.starts_with("//");
        let lines = text.lines().map(str::trim).filter(is_code).count();
        if lines > LARGEST_FILE {
            found.push(offence(&file.path, format!("{} has {lines} lines of code", file.path)));
        }
    }
    found
}

/// Checks that the first line of each file says what it is for.
pub fn heads(tree: &Tree) -> Vec<Offence> {
    let silent = tree.rust().filter(|file| !file.text.starts_with("//!"));
    silent.map(|file| offence(&file.path, format!("{} has no //! head", file.path))).collect()
}

/// Names that say nothing about the content.
const VAGUE: [&str; 7] = ["utils", "util", "helpers", "helper", "common", "misc", "stuff"];

/// Checks for files and folders with vague names.
pub fn vague_names(tree: &Tree) -> Vec<Offence> {
    let is_vague = |path: &str| path.split(['/', '.']).any(|name| VAGUE.contains(&name));
    let found = tree.rust().filter(|file| is_vague(&file.path));
    found.map(|file| offence(&file.path, format!("{} has a vague name", file.path))).collect()
}

/// Names that each file or crate may define: clap's argument structs, and the usual pair.
const OWN_NAMES: [&str; 3] = ["Arguments", "Error", "Result"];

/// Checks that a type name means one thing in the whole workspace.
pub fn type_names(tree: &Tree) -> Vec<Offence> {
    let mut places: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for file in tree.product() {
        for name in defined_types(file) {
            places.entry(name).or_default().insert(&file.path);
        }
    }
    places.retain(|name, files| files.len() > 1 && !OWN_NAMES.contains(&name.as_str()));
    let detail = |name: &str, files: &BTreeSet<&str>| {
        let files = files.iter().copied().collect::<Vec<_>>().join(" ");
        offence(name, format!("{name} is defined in {files}"))
    };
    places.iter().map(|(name, files)| detail(name, files)).collect()
}

/// Structs, enums, traits and aliases of a file; types of a trait or of an `impl` do not count.
fn defined_types(file: &Source) -> Vec<String> {
    let (mut found, mut open) = (Vec::new(), Vec::new());
    for (at, token) in file.tokens.iter().enumerate() {
        let name = || file.tokens.get(at + 1).filter(|name| name.is_word());
        match token.text.as_str() {
            "{" => open.push(has_associated_types(&file.tokens[..at])),
            "}" => drop(open.pop()),
            "type" if open.last() != Some(&true) => found.extend(name()),
            "struct" | "enum" | "trait" | "union" => found.extend(name()),
            _ => {}
        }
    }
    found
        .into_iter()
        .filter(|name| name.text.starts_with(char::is_uppercase))
        .map(|t| t.text.clone())
        .collect()
}

/// Whether the brace that follows these tokens opens a trait or an `impl`.
fn has_associated_types(before: &[Token]) -> bool {
    let begins = before.iter().rposition(|token| ["{", "}", ";"].iter().any(|end| token.is(end)));
    let head = &before[begins.map_or(0, |at| at + 1)..];
    let first = head.iter().find(|t| ["impl", "trait", "fn", "mod"].iter().any(|item| t.is(item)));
    first.is_some_and(|item| item.is("impl") || item.is("trait"))
}

/// The place where each metric is explained to people who run a node.
const METRICS: (&str, &str) = ("src/telemetry/metrics.rs", "README.md");

/// Checks that every metric has a help text and stands in the document.
pub fn metrics(tree: &Tree) -> Vec<Offence> {
    let (Some(file), Some(document)) = (tree.find(METRICS.0), tree.find(METRICS.1)) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for (name, help) in registered(file) {
        let full = format!("`{name}`");
        if help.trim().is_empty() {
            found.push(offence(&name, format!("{full} has no help text")));
        }
        if !document.text.contains(&full) {
            found.push(offence(&name, format!("{full} is not in {}", METRICS.1)));
        }
    }
    found
}

/// Full name and help of each metric: the first two literals of a call that takes the registry.
fn registered(file: &Source) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (call, prefix) in [
        ("add(", "cresset"),
        ("histogram(", "cresset"),
        ("histograms(", "cresset"),
        ("register(", "cresset"),
        ("of_process(", "process"),
    ] {
        for (at, _) in file.production.match_indices(call) {
            let open = at + call.len() - 1;
            let end = matching(&file.production, open);
            let literals: Vec<&str> = file.text[open..end].split('"').skip(1).step_by(2).collect();
            if let [name, rest @ ..] = &literals[..] {
                found.push((format!("{prefix}_{name}"), rest.first().unwrap_or(&"").to_string()));
            }
        }
    }
    found
}

/// The list of the tests that `cargo test` leaves out.
const LONG_TESTS: &str = ".ci/long";

/// Checks that every ignored test is listed there.
pub fn ignored_tests(tree: &Tree) -> Vec<Offence> {
    let Some(list) = tree.find(LONG_TESTS) else { return Vec::new() };
    let mut found = Vec::new();
    for file in tree.rust() {
        for (at, _) in file.code.match_indices("#[ignore") {
            let mut tokens = tokens(&file.code[at..]).into_iter();
            let name = tokens.by_ref().skip_while(|token| !token.is("fn")).nth(1);
            if let Some(name) = name.filter(|name| !list.text.contains(&name.text)) {
                let detail = format!("{}: {} is not in {LONG_TESTS}", file.path, name.text);
                found.push(offence(&name.text, detail));
            }
        }
    }
    found
}
