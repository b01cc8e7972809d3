//! Tests the rules themselves: each must report a small tree that breaks it, and none may object to
//! a clean one.

use super::source::Tree;
use super::{RULES, judged, layout, offence, shape};

type Find = fn(&Tree) -> Vec<super::Offence>;
type Files<'a> = &'a [(&'a str, &'a str)];

fn found(find: Find, files: Files) -> Vec<String> {
    find(&Tree::of(files.iter().copied())).into_iter().map(|offence| offence.detail).collect()
}

#[track_caller]
fn broken(find: Find, files: Files, expected: &str) {
    assert_eq!(found(find, files), [expected], "{files:?}");
}

#[track_caller]
fn kept(find: Find, files: Files) {
    assert_eq!(found(find, files), [""; 0], "{files:?}");
}

#[test]
fn modules_of_the_root_package_know_only_those_below_them() {
    let path = "src/server/auth.rs";
    for text in [
        "use crate::node::Assembly;",
        "fn f() {\n    crate::node::run();\n}",
        "#[cfg(not(test))]\nuse crate::node::Assembly;",
        "#[cfg(any(test, unix))]\nuse crate::node::Assembly;",
        "#[cfg(test)]\nconst A: [u8; 1] = [b'}'];\nuse crate::node::Assembly;",
        "#[cfg(test)]\nstruct S<T: A, U>(T, U);\nuse crate::node::Assembly;",
        "fn f<'a>(c: char) -> bool {\n    c == '\"'\n}\nuse crate::node::Assembly;",
    ] {
        broken(layout::modules, &[(path, text)], "src/server/auth.rs knows node");
    }
    for text in [
        "// use crate::node::Assembly;",
        "const A: &str = r#\"use crate::node::Assembly;\"#;",
        "/* a /* b */ crate::node::Assembly */ use crate::config::Config;",
        "use super::wire::json::JsonTree;",
        "#[cfg(test)]\nuse crate::node::Assembly;",
        "#[cfg(all(test, unix))]\nfn f() -> Node {\n    crate::node::node()\n}",
        "struct S {\n    #[cfg(test)]\n    node: crate::node::Assembly,\n    id: u8,\n}",
    ] {
        kept(layout::modules, &[(path, text)]);
    }
}

#[test]
fn pure_files_name_no_clock_task_or_tensor() {
    for (text, what) in [
        ("use tokio::sync::mpsc;", "tokio"),
        ("fn f() -> Instant {\n    Instant::now()\n}", "Instant::now"),
        ("fn f(since: Instant) {\n    g(since.elapsed());\n}", "elapsed"),
        ("use candle_core::Tensor;", "candle_core"),
    ] {
        let expected = format!("src/engine/sequence.rs names {what}");
        broken(layout::purity, &[("src/engine/sequence.rs", text)], &expected);
        kept(layout::purity, &[("src/engine/worker.rs", text)]);
    }
    let time = "use std::time::Instant;\npub struct Since(Instant);";
    kept(layout::purity, &[("src/engine/block_manager/pool.rs", time)]);
}

#[test]
fn each_thing_has_its_place() {
    let path = "src/engine/worker.rs";
    for (text, what) in [
        ("use redb::Database;", " has redb"),
        ("fn f() -> axum::Router {\n}", " has axum"),
        ("unsafe fn f() {}", " has unsafe"),
        ("fn f() {\n    unsafe\n    { g() }\n}", " has unsafe"),
        ("unsafe impl Send for S {}", " has unsafe"),
        ("#[cfg(test)]\nmod tests {\n    unsafe trait T {}\n}", " has unsafe"),
        ("#[cfg(feature = \"cuda\")]\nmod gpu;", " asks for the feature cuda"),
    ] {
        broken(layout::places, &[(path, text)], &format!("{path}{what}"));
    }
    kept(layout::places, &[("src/store/embedded/disk.rs", "use redb::Database;")]);
    kept(layout::places, &[("kernels/src/simd/avx2.rs", "unsafe fn f() {}")]);
    kept(
        layout::places,
        &[(path, "#![deny(unsafe_code)]\n// unsafe\nconst A: &str = \"unsafe\";")],
    );
}

#[test]
fn the_api_has_its_shapes_in_one_place() {
    let derives = "use schemars::JsonSchema;\n#[derive(JsonSchema)]\nstruct S;";
    broken(
        layout::wire_types,
        &[("src/ledger/records.rs", derives)],
        "src/ledger/records.rs has JsonSchema",
    );
    let serialised = "#[derive(serde::Serialize)]\nstruct S;";
    broken(
        layout::wire_types,
        &[("src/request/live.rs", serialised)],
        "src/request/live.rs has Serialize",
    );
    let written = "fn f() -> Value {\n    serde_json::json!({ \"id\": 1 })\n}";
    broken(
        layout::wire_types,
        &[("src/server/handlers/me.rs", written)],
        "src/server/handlers/me.rs has json!",
    );
    kept(layout::wire_types, &[("src/server/error.rs", written)]);
    kept(layout::wire_types, &[("src/server/wire/objects.rs", derives)]);
    kept(layout::wire_types, &[("src/catalogue/manifest.rs", serialised)]);
}

#[test]
fn kernels_have_reference_and_tests_beside_them() {
    let kernel = ("kernels/src/norm/norm.cu", "// Norms.");
    let reference = ("kernels/src/norm/reference.rs", "//! Plain.");
    let expected = "kernels/src/norm/norm.cu has no tests.rs beside it";
    broken(layout::kernels, &[kernel, reference], expected);
    let tests = ("kernels/src/norm/gpu/tests.rs", "//! Tests.");
    let expected = "kernels/src/norm/norm.cu has no reference.rs beside it";
    broken(layout::kernels, &[kernel, tests], expected);
    kept(layout::kernels, &[kernel, reference, tests]);
}

#[test]
fn long_lines_are_found() {
    let code = format!("fn f() {{\n    {}\n}}\n", "g(1);".repeat(30));
    let expected = ": 154 columns";
    for path in ["src/a.rs", "kernels/src/a.cu", "models/examples/a.py", ".ci/run"] {
        let named = found(shape::long_lines, &[(path, &code)]);
        assert!(named.len() == 1 && named[0].ends_with(expected), "{path}: {named:?}");
    }
    kept(shape::long_lines, &[("tests/it/a.rs", &code)]);
    kept(shape::long_lines, &[("src/a.rs", &format!("#[cfg(test)]\nmod tests {{\n{code}}}\n"))]);
    kept(shape::long_lines, &[("src/a.rs", &format!("const A: &str = \"{}\";", "a".repeat(99)))]);
    kept(shape::long_lines, &[("src/a.rs", &format!("// {}\n", "é".repeat(97)))]);
    let text = format!("const A: &str = \"a\n{}\n\";", "a".repeat(101));
    kept(shape::long_lines, &[("src/a.rs", &text)]);
    let digest = format!(
        "pin='name==1.0.0 --hash=sha256:{0}\nname==1.0.0 --hash=sha256:{0}'",
        "a1".repeat(40)
    );
    kept(shape::long_lines, &[("kernels/setup-cuda", &digest)]);
    let comment = format!("// {}\n", "a".repeat(99));
    broken(shape::long_lines, &[("tests/it/a.rs", &comment)], "tests/it/a.rs:1: 102 columns");
    let expected = "1 of 100 lines have more than 100 columns";
    let text = format!("{comment}{}", "//\n".repeat(99));
    broken(shape::share_of_long_lines, &[("src/a.rs", &text)], expected);
    kept(shape::share_of_long_lines, &[("src/a.rs", &format!("{text}{}", "//\n".repeat(100)))]);
}

/// A function of this many lines.
fn function(name: &str, lines: usize) -> String {
    format!("fn {name}(a: [u8; {{ 1 }}]) {{\n{}}}\n", "    g();\n".repeat(lines - 2))
}

#[test]
fn long_functions_are_found() {
    let files = |length| [("tests/it/a.rs".to_owned(), function("f", length))];
    let tree = Tree::of(files(71));
    assert_eq!(shape::functions(&tree)[0].detail, "tests/it/a.rs:1: 71 lines");
    assert_eq!(shape::functions(&Tree::of(files(70))), []);
    let many = |long: usize| {
        let text = |n: usize| function("f", if n < long { 26 } else { 10 });
        Tree::of([("src/a.rs", (0..100).map(text).collect::<String>())])
    };
    assert_eq!(shape::typical_function(&many(5)), []);
    let expected = "the 95th percentile of function lengths is 26 lines";
    assert_eq!(shape::typical_function(&many(6))[0].detail, expected);
}

#[test]
fn large_files_are_found() {
    let large = "//! Head.\n\nuse std::fs;\n// Why.\n".repeat(501);
    broken(shape::large_files, &[("src/a.rs", &large)], "src/a.rs has 501 lines of code");
    let cuda = "int a;\n".repeat(501);
    let expected = "kernels/src/a.cu has 501 lines of code";
    broken(shape::large_files, &[("kernels/src/a.cu", &cuda)], expected);
    kept(shape::large_files, &[("tests/it/a.rs", &large)]);
    let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}", "fn f() {}\n".repeat(501));
    kept(shape::large_files, &[("src/a.rs", &tests)]);
    let declared = [("src/a/mod.rs", "#[cfg(test)]\nmod tests;"), ("src/a/tests/b.rs", &large)];
    kept(shape::large_files, &declared);
}

#[test]
fn heads_and_names_are_looked_at() {
    broken(shape::heads, &[("tests/it/a.rs", "use std::fs;")], "tests/it/a.rs has no //! head");
    kept(shape::heads, &[("tests/it/a.rs", "//! A.\n")]);
    let expected = "src/store/utils.rs has a vague name";
    broken(shape::vague_names, &[("src/store/utils.rs", "")], expected);
    let expected = "src/common/a.rs has a vague name";
    broken(shape::vague_names, &[("src/common/a.rs", "")], expected);
    kept(shape::vague_names, &[("src/store/rows.rs", "")]);
}

#[test]
fn a_type_name_means_one_thing() {
    let one = ("src/a.rs", "struct Job<T>(T);\ntrait T {\n    type Out;\n}");
    for text in [
        "pub enum Job {}",
        "mod a {\n    type Job = u8;\n}",
        "fn f() {\n    trait Job {}\n}",
        "impl A {\n    fn f(g: impl Fn()) {\n        type Job = u8;\n    }\n}",
    ] {
        let expected = "Job is defined in kernels/src/b.rs src/a.rs";
        broken(shape::type_names, &[one, ("kernels/src/b.rs", text)], expected);
    }
    for text in [
        "#[cfg(test)]\nstruct Job;",
        "impl T for Work {\n    type Job = u8;\n}",
        "pub unsafe trait U<A>: V {\n    fn f() {}\n    type Job;\n}",
        "use a::Job;",
        "// struct Job;",
    ] {
        kept(shape::type_names, &[one, ("src/b.rs", text)]);
    }
    let own = "struct Arguments;\nenum Error {}\ntype Result<T> = std::result::Result<T, Error>;";
    kept(shape::type_names, &[("src/a.rs", own), ("src/b.rs", own)]);
}

#[test]
fn metrics_are_explained() {
    let document = ("README.md", "| `cresset_ready` | Whether |");
    let metrics = |text: &str| format!("fn f() {{\n    Self {{ {text} }}\n}}");
    let registered = metrics("ready: add(&mut r, \"ready\", \"1 while ready\"),");
    kept(shape::metrics, &[document, ("src/telemetry/metrics.rs", &registered)]);
    let unknown = metrics("a: histogram(\n  &mut r,\n  \"time_seconds\",\n  \"Time\",\n  &B),");
    let expected = "`cresset_time_seconds` is not in README.md";
    broken(shape::metrics, &[document, ("src/telemetry/metrics.rs", &unknown)], expected);
    let silent = metrics("ready: add(&mut r, \"ready\", \"\"),");
    let expected = "`cresset_ready` has no help text";
    broken(shape::metrics, &[document, ("src/telemetry/metrics.rs", &silent)], expected);
}

#[test]
fn ignored_tests_are_listed() {
    let list = (".ci/long", "counts kills lib many_kills");
    let text = "#[test]\n#[ignore = \"minutes\"]\nasync fn many_kills() {}\n#[test]\nfn kills() {}";
    kept(shape::ignored_tests, &[list, ("src/store/tests.rs", text)]);
    let text = "#[test]\n#[ignore = \"minutes\"]\nfn more_kills() {}";
    let expected = "src/store/tests.rs: more_kills is not in .ci/long";
    broken(shape::ignored_tests, &[list, ("src/store/tests.rs", text)], expected);
}

#[test]
fn allowances_only_fall() {
    let offences = || vec![offence("a", "a is wrong".into()), offence("b", "b is wrong".into())];
    assert_eq!(judged(offences(), &["a", "b"]), [""; 0]);
    assert_eq!(judged(offences(), &["a"]), ["b is wrong"]);
    let expected = ["`c` is fixed: remove it from tidy/allowed.rs"];
    assert_eq!(judged(offences(), &["a", "b", "c"]), expected);
}

#[test]
fn a_tree_is_read_from_disk() {
    let folder = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("src/store/mod.rs", "//! Store.\n#[cfg(test)]\nmod tests;\n");
    write("src/store/tests/mod.rs", "//! Tests.\n");
    write("src/target/a.rs", "");
    write("tests/device/prove", "#!/bin/bash\n");
    write("README.md", "# Cresset\n");
    let tree = Tree::read(folder.path());
    let paths: Vec<&str> = tree.files.iter().map(|file| file.path.as_str()).collect();
    let expected =
        ["README.md", "src/store/mod.rs", "src/store/tests/mod.rs", "tests/device/prove"];
    assert_eq!(paths, expected);
    let product: Vec<&str> = tree.product().map(|file| file.path.as_str()).collect();
    assert_eq!(product, ["src/store/mod.rs"]);
}

#[test]
fn a_clean_tree_breaks_nothing() {
    let tree = Tree::of([
        ("src/lib.rs", "//! Node.\npub mod store;\n"),
        ("src/store/mod.rs", "//! Store.\nuse crate::ledger::Ledger;\npub struct Store(Ledger);\n"),
        ("README.md", "# Node\n"),
    ]);
    for rule in RULES {
        assert_eq!((rule.find)(&tree), [], "{}", rule.name);
    }
}
