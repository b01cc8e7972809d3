//! The files of the project as the rules read them: `syn` reads Rust, and the code of tests is told
//! apart from the product's.

use proc_macro2::{Delimiter, Ident, LineColumn, Span, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;
use std::path::{Path, PathBuf};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// The files that are read: those in these folders with one of these endings, or none as scripts.
const FOLDERS: [&str; 6] = ["src", "kernels", "models", "qualification", "tests", ".ci"];
const ENDINGS: [&str; 9] = ["rs", "cu", "cuh", "cpp", "h", "c", "py", "mjs", "sh"];
const SKIPPED: [&str; 4] = ["target", "node_modules", "__pycache__", "__fuzz__"];
/// Folders of the product; everything else holds tests, benches and examples.
const PRODUCT: [&str; 5] =
    ["src/", "models/src/", "kernels/src/", "kernels/build", "qualification/src/"];
/// The words before the name of a new type, other than an alias.
const TYPES: [&str; 4] = ["struct", "enum", "trait", "union"];

/// One file. What follows `is_product` is empty unless the file is Rust.
#[derive(Default)]
pub struct Source {
    /// Path relative to the root, with `/`.
    pub path: String,
    pub text: String,
    /// Whether the file is part of the product, which means that it has code outside of tests.
    pub is_product: bool,
    /// The tokens of product code between blanks; `::` is two, and texts are without blanks.
    pub words: String,
    /// The lines where tokens of product code begin or end, by number, and the columns that the
    /// contents of literals have there.
    pub lines: BTreeMap<usize, usize>,
    /// Functions that have a body, those of tests too.
    pub functions: Vec<Function>,
    /// Types and aliases of product code; those of traits and their implementations are none.
    pub types: Vec<String>,
    /// Where the modules stand that only a test build declares, as paths without an ending.
    test_modules: Vec<String>,
    /// Begin and end of each item that only a test build has.
    tests: Vec<(LineColumn, LineColumn)>,
    /// Whether what is being visited belongs to tests.
    in_test: bool,
}

pub struct Function {
    pub name: String,
    /// Its first line.
    pub line: usize,
    /// Lines from there to the end of the body.
    pub length: usize,
    pub is_product: bool,
    pub is_ignored: bool,
}

impl Source {
    fn of(path: String, text: String, is_product: bool) -> Self {
        let mut source = Self { path, text, is_product, words: " ".into(), ..Self::default() };
        source.in_test = !is_product;
        if source.is_rust() {
            source.read().unwrap_or_else(|error| panic!("{}: {error}", source.path));
        }
        source
    }

    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    fn read(&mut self) -> syn::Result<()> {
        let tokens: TokenStream = self.text.parse()?;
        self.visit_file(&syn::parse2(tokens.clone())?);
        self.read_tokens(tokens);
        Ok(())
    }

    fn read_tokens(&mut self, tokens: TokenStream) {
        let trees: Vec<TokenTree> = tokens.into_iter().collect();
        for (at, tree) in trees.iter().enumerate() {
            let start = tree.span().start();
            let is_test = self.tests.iter().any(|(first, end)| (first..end).contains(&&start));
            let is_product = self.is_product && !is_test;
            if let [TokenTree::Ident(word), TokenTree::Ident(name), ..] = &trees[at..] {
                if word == "fn" {
                    self.functions.extend(function(&trees, at, name, is_product));
                } else if is_product && TYPES.iter().any(|known| word == known) {
                    self.types.push(name.to_string());
                }
            }
            if let TokenTree::Group(group) = tree {
                self.read_token("(", group.span_open(), is_product);
                self.read_tokens(group.stream());
                self.read_token(")", group.span_close(), is_product);
            } else {
                self.read_token(&tree.to_string(), tree.span(), is_product);
            }
        }
    }

    fn read_token(&mut self, token: &str, span: Span, is_product: bool) {
        if !is_product {
            return;
        }
        let (start, end) = (span.start(), span.end());
        self.words.extend(token.split_whitespace());
        self.words.push(' ');
        let contents = match token.contains(['"', '\'']) {
            true if start.line == end.line => (end.column - start.column).saturating_sub(2),
            true => self.text.len(),
            false => 0,
        };
        for line in BTreeSet::from([start.line, end.line]) {
            *self.lines.entry(line).or_default() += contents;
        }
    }

    /// Visits a node that may have attributes.
    fn node(&mut self, node: &impl Spanned, visit: impl FnOnce(&mut Self)) {
        let outer = self.in_test;
        visit(self);
        if self.in_test && !outer {
            self.tests.push((node.span().start(), node.span().end()));
        }
        self.in_test = outer;
    }
}

/// The function whose `fn` stands at this place, if it has a body.
fn function(trees: &[TokenTree], at: usize, name: &Ident, is_product: bool) -> Option<Function> {
    let line = trees[at].span().start().line;
    let body_end = |tree: &TokenTree| match tree {
        TokenTree::Group(own) if own.delimiter() == Delimiter::Brace => Some(own.span_close()),
        _ => None,
    };
    let is_end = |tree: &TokenTree| matches!(tree, TokenTree::Punct(p) if p.as_char() == ';');
    let body = trees[at..].iter().take_while(|tree| !is_end(tree)).find_map(body_end)?;
    let ignores = |tree: &TokenTree| tree.to_string().replace(' ', "").starts_with("[ignore");
    // Attributes stand behind the end of the item before.
    let before = trees[..at].iter().rev();
    let is_ignored =
        before.take_while(|tree| body_end(tree).is_none() && !is_end(tree)).any(ignores);
    let length = body.end().line - line + 1;
    Some(Function { name: name.to_string(), line, length, is_product, is_ignored })
}

macro_rules! nodes {
    ($($visit:ident $node:ident),+) => {
        $(fn $visit(&mut self, node: &'ast syn::$node) {
            self.node(node, |source| visit::$visit(source, node));
        })+
    };
}

impl<'ast> Visit<'ast> for Source {
    nodes! {
        visit_file File, visit_item Item, visit_impl_item ImplItem, visit_trait_item TraitItem,
        visit_field Field, visit_variant Variant, visit_field_value FieldValue, visit_arm Arm,
        visit_field_pat FieldPat, visit_fn_arg FnArg, visit_stmt Stmt, visit_expr Expr
    }

    fn visit_item_mod(&mut self, node: &'ast syn::ItemMod) {
        visit::visit_item_mod(self, node);
        if self.is_product && self.in_test && node.content.is_none() {
            let module = self.path.trim_end_matches(".rs");
            let root = ["/lib", "/main", "/mod"].iter().find_map(|own| module.strip_suffix(own));
            self.test_modules.push(format!("{}/{}", root.unwrap_or(module), node.ident));
        }
    }

    fn visit_item_type(&mut self, node: &'ast syn::ItemType) {
        visit::visit_item_type(self, node);
        self.types.extend((!self.in_test).then(|| node.ident.to_string()));
    }

    fn visit_meta_list(&mut self, node: &'ast syn::MetaList) {
        let condition = node.tokens.to_string().replace(' ', "");
        let of_tests = ["test", "any(test,feature=\"testing\")"].contains(&condition.as_str());
        let of_tests = of_tests || condition.starts_with("all(test,");
        self.in_test |= of_tests && node.path.is_ident("cfg");
    }
}

/// Every file of the project below `root`, sorted by path.
pub fn read(root: &Path) -> Vec<Source> {
    let mut paths = vec![root.join("README.md")];
    for folder in FOLDERS {
        collect(&root.join(folder), &mut paths);
    }
    tree_of(paths.iter().filter_map(|path| {
        let relative = path.strip_prefix(root).unwrap().display().to_string();
        Some((relative, std::fs::read_to_string(path).ok()?))
    }))
}

/// The files of these paths and texts.
pub fn tree_of(files: impl Iterator<Item = (String, String)>) -> Vec<Source> {
    let is_product = |path: &str| PRODUCT.iter().any(|folder| path.starts_with(folder));
    let read = |(path, text): (String, String)| Source::of(path.clone(), text, is_product(&path));
    let mut files: Vec<Source> = files.map(read).collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let tests: Vec<String> = files.iter().flat_map(|file| file.test_modules.clone()).collect();
    for file in &mut files {
        let mut below = tests.iter().filter_map(|test| file.path.strip_prefix(test.as_str()));
        if below.any(|rest| rest == ".rs" || rest.starts_with('/')) {
            *file = Source::of(take(&mut file.path), take(&mut file.text), false);
        }
    }
    files
}

fn collect(folder: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for path in entries.map(|entry| entry.unwrap().path()) {
        let is = |name: &&str| path.extension().is_none_or(|ending| ending == *name);
        if path.is_dir() && !SKIPPED.iter().any(|name| path.ends_with(name)) {
            collect(&path, found);
        } else if ENDINGS.iter().any(is) {
            found.push(path);
        }
    }
}
