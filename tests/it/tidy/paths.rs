//! The paths that a file names: every path in its code, whole and absolute, with `use` declarations
//! expanded and their names followed.

use super::source::{Source, Tree, declared};
use std::collections::{BTreeMap, BTreeSet};

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

/// A path that a file names.
#[derive(Clone, Debug, PartialEq)]
pub struct Mention {
    /// From the crate (`crate::store::Store`) or another one (`std::env::var`); a glob ends in `*`.
    pub path: Vec<String>,
    /// The name that it gets in this file, if a `use` brings it in.
    pub name: Option<String>,
    /// Whether the `use` is `pub`.
    pub public: bool,
    pub line: usize,
}

impl Mention {
    pub fn starts_with(&self, path: &str) -> bool {
        let mut found = self.path.iter();
        path.split("::").all(|part| found.next().is_some_and(|name| name == part || name == "*"))
    }

    pub fn text(&self) -> String {
        self.path.join("::")
    }
}

/// The place of a file in its crate.
pub struct Module {
    /// The folder of the crate's root, with a `/` at the end: `models/src/`.
    pub root: String,
    /// `crate`, then the names of the modules.
    pub path: Vec<String>,
    /// The folder that holds the files of the module's children.
    pub folder: String,
}

pub fn module_of(path: &str) -> Module {
    let root = match path.find("src/") {
        Some(at) => &path[..at + "src/".len()],
        None => path.rsplit_once('/').map_or("", |(folder, _)| &path[..=folder.len()]),
    };
    let inside = path[root.len()..].trim_end_matches(".rs");
    let own = ["lib", "main", "mod"];
    let mut names: Vec<String> = inside.split('/').map(str::to_owned).collect();
    if names.last().is_some_and(|last| own.contains(&last.as_str())) {
        names.pop();
    }
    let folder = format!("{root}{}", names.join("/")).trim_end_matches('/').to_owned();
    names.insert(0, "crate".to_owned());
    Module { root: root.to_owned(), path: names, folder }
}

/// Reads the paths out of a file's production code.
pub fn mentions(file: &Source) -> Vec<Mention> {
    let children = declared(&file.production);
    let mut reader = Reader {
        file,
        tokens: &file.tokens,
        module: module_of(&file.path).path,
        children,
        names: BTreeMap::new(),
        found: Vec::new(),
    };
    reader.read(true);
    reader.read(false);
    reader.found
}

struct Reader<'a> {
    file: &'a Source,
    tokens: &'a [Token],
    /// The module of the code that is being read: modules in line count.
    module: Vec<String>,
    children: BTreeSet<String>,
    /// The paths that `use` declarations bring in, by name.
    names: BTreeMap<String, Vec<String>>,
    found: Vec<Mention>,
}

impl Reader<'_> {
    /// Reads all `use` declarations, or all other paths.
    fn read(&mut self, uses: bool) {
        let (mut at, mut depth, mut inline) = (0, 0_usize, Vec::new());
        while at < self.tokens.len() {
            let token = &self.tokens[at];
            if token.is("use") && self.is_declaration(at) {
                let public = at > 0 && (self.word(at - 1) == "pub" || self.word(at - 1) == ")");
                at = self.tree(at + 1, &[], public, uses);
                continue;
            }
            match token.text.as_str() {
                "{" => {
                    if at >= 2 && self.word(at - 2) == "mod" {
                        self.module.push(self.word(at - 1).to_owned());
                        inline.push(depth);
                    }
                    depth += 1;
                }
                "}" => {
                    depth = depth.saturating_sub(1);
                    if inline.last() == Some(&depth) {
                        inline.pop();
                        self.module.pop();
                    }
                }
                _ if !uses && token.is_word() => {
                    at = self.expression(at);
                    continue;
                }
                _ => {}
            }
            at += 1;
        }
    }

    fn word(&self, at: usize) -> &str {
        self.tokens.get(at).map_or("", |token| &token.text)
    }

    /// Whether this `use` is a declaration, and not the `use<..>` of a captured lifetime.
    fn is_declaration(&self, at: usize) -> bool {
        self.word(at + 1) != "<"
    }

    /// Reads one branch of a `use` tree below `prefix`, and returns where it ends.
    fn tree(&mut self, start: usize, prefix: &[String], public: bool, record: bool) -> usize {
        let (mut at, mut path) = (start, prefix.to_vec());
        loop {
            match self.word(at) {
                "::" => {}
                "{" => return self.group(at + 1, &path, public, record),
                "," | "}" | ";" | "" => break,
                "as" => {
                    let name = self.word(at + 1).to_owned();
                    self.record(&path, Some(name), public, at, record);
                    return at + 2;
                }
                part => path.push(part.to_owned()),
            }
            at += 1;
        }
        if path.len() > prefix.len() {
            if path.last().is_some_and(|last| last == "self") && path.len() > 1 {
                path.pop();
            }
            let name = path.last().cloned();
            self.record(&path, name, public, at - 1, record);
        }
        at
    }

    fn group(&mut self, start: usize, path: &[String], public: bool, record: bool) -> usize {
        let mut at = start;
        loop {
            at = self.tree(at, path, public, record);
            match self.word(at) {
                "," => at += 1,
                "}" => return at + 1,
                _ => return at,
            }
        }
    }

    fn record(&mut self, path: &[String], name: Option<String>, public: bool, at: usize, on: bool) {
        if !on || path.is_empty() {
            return;
        }
        let path = self.absolute(path);
        if let Some(name) = name.clone().filter(|name| name != "*" && name != "_") {
            self.names.insert(name, path.clone());
        }
        let line = self.file.line(self.tokens[at].at);
        self.found.push(Mention { path, name, public, line });
    }

    /// Reads the path of an expression, type or macro that begins at `start`.
    fn expression(&mut self, start: usize) -> usize {
        let (mut at, mut path) = (start, vec![self.word(start).to_owned()]);
        while self.word(at + 1) == "::" && self.tokens.get(at + 2).is_some_and(Token::is_word) {
            at += 2;
            path.push(self.word(at).to_owned());
        }
        let is_member = start > 0 && self.word(start - 1) == ".";
        if path.len() > 1 || (!is_member && self.names.contains_key(&path[0])) {
            let path = self.absolute(&path);
            let line = self.file.line(self.tokens[start].at);
            self.found.push(Mention { path, name: None, public: false, line });
        }
        at + 1
    }

    /// The path from its crate's root on.
    fn absolute(&self, path: &[String]) -> Vec<String> {
        let mut module = self.module.clone();
        let mut rest = path;
        match rest[0].as_str() {
            "crate" => return path.to_vec(),
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|part| part == "super") {
                    rest = &rest[1..];
                    if module.len() > 1 {
                        module.pop();
                    }
                }
            }
            first => {
                if let Some(known) = self.names.get(first).filter(|known| known[..] != path[..1]) {
                    return known.iter().chain(&path[1..]).cloned().collect();
                }
                if !self.children.contains(first) {
                    return path.to_vec();
                }
            }
        }
        module.extend(rest.iter().cloned());
        module
    }
}

/// The file that defines what `path` names in the crate of `root`: the deepest module on the way
/// or, where a `pub use` leads elsewhere, the module it leads to.
pub fn defining<'a>(tree: &'a Tree, root: &str, path: &[String]) -> Option<&'a Source> {
    let mut path = path.to_vec();
    // A chain of re-exports is short; the bound only ends a circle.
    for _ in 0..8 {
        let (file, depth) = (1..=path.len())
            .rev()
            .find_map(|depth| Some((module_file(tree, root, &path[1..depth])?, depth)))?;
        let Some(name) = path.get(depth) else { return Some(file) };
        let exported = file
            .mentions
            .iter()
            .find(|m| m.public && m.name.as_ref() == Some(name) && m.path[0] == "crate");
        let Some(exported) = exported else { return Some(file) };
        path = exported.path.iter().chain(&path[depth + 1..]).cloned().collect();
    }
    None
}

fn module_file<'a>(tree: &'a Tree, root: &str, names: &[String]) -> Option<&'a Source> {
    if names.is_empty() {
        return tree.find(&format!("{root}lib.rs"));
    }
    let path = format!("{root}{}", names.join("/"));
    tree.find(&format!("{path}.rs")).or_else(|| tree.find(&format!("{path}/mod.rs")))
}
