//! The files of the project as the rules read them: without comments, and with the code of tests
//! told apart from production code.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

/// The files that are read: those in these folders at the root, and those with one of these endings
/// (scripts without an ending are listed one by one).
const FOLDERS: [&str; 6] = ["src", "kernels", "models", "qualification", "tests", ".ci"];
const ENDINGS: [&str; 9] = ["rs", "cu", "cuh", "cpp", "h", "c", "py", "mjs", "sh"];
const SCRIPTS: [&str; 5] =
    [".ci/run", ".ci/long", "kernels/setup-cuda", "tests/aarch64", "tests/device/prove"];
const DOCUMENTS: [&str; 2] = ["README.md", "src/ARCHITECTURE.md"];
/// Folders of the product; everything else holds tests, benches and examples.
const PRODUCT: [&str; 5] =
    ["src/", "models/src/", "kernels/src/", "kernels/build", "qualification/src/"];
/// Features that exist for tests alone: an item whose `cfg` asks for a test or one of them belongs
/// to the tests.
const TEST_FEATURES: [&str; 3] = ["testing", "emulator", "failpoints"];

/// A word or a single other character.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    pub text: String,
    /// Its first byte.
    pub at: usize,
}

impl Token {
    pub fn is(&self, text: &str) -> bool {
        self.text == text
    }

    pub fn is_word(&self) -> bool {
        self.text.starts_with(|c: char| c.is_alphabetic() || c == '_')
    }
}

/// The tokens of blanked code; `::` is one.
pub fn tokens(code: &str) -> Vec<Token> {
    let mut found = Vec::new();
    let mut chars = code.char_indices().peekable();
    while let Some((at, first)) = chars.next() {
        let mut text = String::from(first);
        let in_word = |c: char| c.is_alphanumeric() || c == '_';
        if in_word(first) {
            while let Some((_, next)) = chars.next_if(|(_, c)| in_word(*c)) {
                text.push(next);
            }
        } else if first == ':' {
            text.extend(chars.next_if(|(_, c)| *c == ':').map(|(_, c)| c));
        } else if first.is_whitespace() {
            continue;
        }
        found.push(Token { text, at });
    }
    found
}

/// One file.
pub struct Source {
    /// Path relative to the root, with `/`.
    pub path: String,
    pub text: String,
    /// Rust only: the text with comments and the contents of literals blanked, line by line.
    pub code: String,
    /// Rust only: `code` with the items of tests blanked too; empty in a file of tests.
    pub production: String,
    /// Whether the file is part of the product, which means that it has code outside of tests.
    pub is_product: bool,
    /// The tokens of `production`.
    pub tokens: Vec<Token>,
}

impl Source {
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }
}

fn in_product(path: &str) -> bool {
    PRODUCT.iter().any(|folder| path.starts_with(folder))
}

/// Every file of the project, sorted by path.
pub struct Tree {
    pub files: Vec<Source>,
}

impl Tree {
    /// Reads the tree below `root`.
    pub fn read(root: &Path) -> Self {
        let mut paths = Vec::new();
        for folder in FOLDERS {
            collect(&root.join(folder), &mut paths);
        }
        paths.extend(DOCUMENTS.map(|name| root.join(name)));
        // A document may stand in one of the folders.
        paths.sort();
        paths.dedup();
        let mut files = Vec::new();
        for path in paths {
            let Ok(text) = std::fs::read_to_string(&path) else { continue };
            let relative = path.strip_prefix(root).unwrap().to_string_lossy().replace('\\', "/");
            let ending = relative.rsplit_once('.').map_or("", |(_, ending)| ending);
            let is_listed = |list: &[&str]| list.contains(&relative.as_str());
            if ENDINGS.contains(&ending) || is_listed(&SCRIPTS) || is_listed(&DOCUMENTS) {
                files.push((relative, text));
            }
        }
        Self::of(files)
    }

    /// A tree of these paths and texts.
    pub fn of(files: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>) -> Self {
        let mut files: Vec<Source> =
            files.into_iter().map(|(path, text)| blanked(path.into(), text.into())).collect();
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let tests = test_modules(&files);
        for file in &mut files {
            let is_test = tests.iter().any(|test| is_below(&file.path, test));
            file.is_product = in_product(&file.path) && !is_test;
            if !file.is_product {
                file.production.clear();
            }
            file.tokens = tokens(&file.production);
        }
        Self { files }
    }

    pub fn rust(&self) -> impl Iterator<Item = &Source> {
        self.files.iter().filter(|file| file.is_rust())
    }

    /// The Rust files of the product.
    pub fn product(&self) -> impl Iterator<Item = &Source> {
        self.rust().filter(|file| file.is_product)
    }

    pub fn find(&self, path: &str) -> Option<&Source> {
        let at = self.files.binary_search_by(|file| file.path.as_str().cmp(path)).ok()?;
        Some(&self.files[at])
    }
}

fn collect(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.map(|entry| entry.unwrap().path()) {
        let skipped = ["target", "node_modules", "__pycache__", "__fuzz__"];
        if !entry.is_dir() {
            found.push(entry);
        } else if !skipped.iter().any(|name| entry.ends_with(name)) {
            collect(&entry, found);
        }
    }
}

fn blanked(path: String, text: String) -> Source {
    let (mut code, mut production) = (String::new(), String::new());
    if path.ends_with(".rs") {
        code = blank(&text, &literals_and_comments(&text));
        production = blank(&code, &test_items(&code, &text));
    }
    Source { path, text, code, production, is_product: false, tokens: Vec::new() }
}

/// `text` with spaces in place of everything in `ranges` but line ends.
fn blank(text: &str, ranges: &[Range<usize>]) -> String {
    let mut bytes = text.as_bytes().to_vec();
    for byte in ranges.iter().cloned().flatten() {
        if bytes[byte] != b'\n' {
            bytes[byte] = b' ';
        }
    }
    String::from_utf8(bytes).unwrap()
}

/// Comments, and the text between the quotes of literals.
fn literals_and_comments(text: &str) -> Vec<Range<usize>> {
    let bytes = text.as_bytes();
    let (mut found, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => line_end(text, at),
            b'/' if bytes[at..].starts_with(b"/*") => comment_end(bytes, at),
            b'"' => string_end(bytes, at),
            b'\'' => char_end(text, at),
            b'r' if !is_word(bytes, at) => raw_string_end(text, at),
            _ => at + 1,
        };
        if end > at + 1 {
            let quoted = bytes[at] != b'/';
            found.push(if quoted { at + 1..end - 1 } else { at..end });
        }
        at = end;
    }
    found
}

/// Whether the byte before `at` belongs to the same word, other than the `b` of a byte string.
fn is_word(bytes: &[u8], at: usize) -> bool {
    let word = |at: usize| bytes[at].is_ascii_alphanumeric() || bytes[at] == b'_';
    let prefix = at > 0 && matches!(bytes[at - 1], b'b' | b'c') && (at < 2 || !word(at - 2));
    at > 0 && word(at - 1) && !prefix
}

fn line_end(text: &str, at: usize) -> usize {
    text[at..].find('\n').map_or(text.len(), |end| at + end)
}

fn comment_end(bytes: &[u8], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            (at, depth) = (at + 2, depth + 1);
        } else if bytes[at..].starts_with(b"*/") {
            (at, depth) = (at + 2, depth - 1);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    bytes.len()
}

fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

/// The end of a character literal, or the next byte if the quote begins a lifetime.
fn char_end(text: &str, start: usize) -> usize {
    let mut chars = text[start + 1..].char_indices();
    let Some((_, first)) = chars.next() else { return start + 1 };
    if first == '\\' {
        chars.next();
        let end = chars.find(|(_, c)| *c == '\'');
        return end.map_or(start + 1, |(end, _)| start + 1 + end + 1);
    }
    match chars.next() {
        Some((end, '\'')) => start + 1 + end + 1,
        _ => start + 1,
    }
}

fn raw_string_end(text: &str, start: usize) -> usize {
    let hashes = text[start + 1..].bytes().take_while(|b| *b == b'#').count();
    let open = start + 1 + hashes;
    if text.as_bytes().get(open) != Some(&b'"') {
        return start + 1;
    }
    let close = format!("\"{}", "#".repeat(hashes));
    text[open + 1..].find(&close).map_or(text.len(), |end| open + 1 + end + close.len())
}

/// The items that only a test build has, with their attributes. `code` is the blanked text.
fn test_items(code: &str, text: &str) -> Vec<Range<usize>> {
    if code.starts_with("#![cfg(test)]") || code.contains("\n#![cfg(test)]") {
        return std::iter::once(0..code.len()).collect();
    }
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(start) = code[at..].find("#[cfg(").map(|found| at + found) {
        let open = start + "#[cfg".len();
        let close = matching(code, open);
        at = close;
        if asks_for_tests(&text[open + 1..close - 1]) {
            at = item_end(code, after_attribute(code, close));
            found.push(start..at);
        }
    }
    found
}

/// Whether only a test build satisfies the condition of a `cfg`.
fn asks_for_tests(condition: &str) -> bool {
    let condition = condition.trim();
    let parts = |name: &str| {
        let inner = condition.strip_prefix(name)?.trim_start().strip_prefix('(')?;
        Some(split(inner.strip_suffix(')')?))
    };
    if let Some(all) = parts("all") {
        return all.into_iter().any(asks_for_tests);
    }
    if let Some(any) = parts("any") {
        let is_tests = |part: &str| {
            let feature =
                part.trim().strip_prefix("feature").map(|rest| rest.trim_matches(is_quote));
            asks_for_tests(part) || feature.is_some_and(|name| TEST_FEATURES.contains(&name))
        };
        return any.iter().any(|part| asks_for_tests(part))
            && any.iter().all(|part| is_tests(part));
    }
    condition == "test"
}

fn is_quote(c: char) -> bool {
    matches!(c, ' ' | '=' | '"')
}

/// The parts between commas that are in no inner parentheses.
fn split(list: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, c) in list.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    parts.retain(|part| !part.trim().is_empty());
    parts
}

/// The byte after the bracket that closes the one at `open`.
pub fn matching(code: &str, open: usize) -> usize {
    let mut depth = 0_usize;
    for (at, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
    }
    code.len()
}

/// Skips the `]` of an attribute whose inner parenthesis closes before `at`, and any further
/// attributes. Returns where the item begins.
fn after_attribute(code: &str, at: usize) -> usize {
    let mut at = at + code[at..].find(']').map_or(0, |end| end + 1);
    loop {
        at += code[at..].len() - code[at..].trim_start().len();
        if !code[at..].starts_with("#[") {
            return at;
        }
        at = matching(code, at + 1);
    }
}

/// The end of the item, statement, field or match arm that begins at `start`.
fn item_end(code: &str, start: usize) -> usize {
    let first = |skipped: &[&str]| {
        let words = code[start..].split(|c: char| !c.is_alphanumeric() && c != '_');
        words.filter(|word| !word.is_empty()).find(|word| !skipped.contains(word)).unwrap_or("")
    };
    let visible = ["pub", "crate", "super", "in", "self"];
    let plain = ["async", "unsafe", "extern"].iter().chain(&visible).copied().collect::<Vec<_>>();
    let (keyword, constant) = (first(&plain), first(&visible));
    let to_semicolon = ["use", "let", "static", "type"].contains(&keyword)
        || (constant == "const" && first(&[&plain[..], &["const"]].concat()) != "fn");
    let item = ["fn", "impl", "mod", "struct", "enum", "trait", "union", "const", "macro_rules"];
    let body_ends = !to_semicolon;
    let comma_ends = !to_semicolon && !item.contains(&keyword);
    let mut depth = 0_usize;
    for (at, byte) in code.bytes().enumerate().skip(start) {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' if depth == 0 => return at,
            b')' | b']' => depth -= 1,
            b'}' => {
                depth -= 1;
                if depth == 0 && body_ends {
                    let comma = comma_ends && code[at + 1..].starts_with(',');
                    return at + 1 + usize::from(comma);
                }
            }
            b';' if depth == 0 => return at + 1,
            b',' if depth == 0 && comma_ends => return at + 1,
            _ => {}
        }
    }
    code.len()
}

/// The files of modules that only a test build declares, as module paths without an ending
/// (`src/store/tests`); files below them belong to them.
fn test_modules(files: &[Source]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for file in files.iter().filter(|file| file.is_rust() && in_product(&file.path)) {
        for name in declared(&file.code).difference(&declared(&file.production)) {
            found.insert(format!("{}/{name}", folder_of(&file.path)));
        }
    }
    found
}

/// The folder that holds the files of a module's children.
fn folder_of(path: &str) -> &str {
    let module = path.trim_end_matches(".rs");
    let own = ["/lib", "/main", "/mod"].iter().find_map(|own| module.strip_suffix(own));
    own.unwrap_or(module)
}

/// The names in `mod name;`.
fn declared(code: &str) -> BTreeSet<String> {
    let tokens = tokens(code);
    let found = tokens.windows(3).filter(|w| w[0].is("mod") && w[2].is(";"));
    found.map(|w| w[1].text.clone()).collect()
}

fn is_below(path: &str, module: &str) -> bool {
    path.strip_prefix(module).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}
