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
fn an_import_below_the_tests_is_seen() {
    let text = "//! Store.\n#[cfg(test)]\nmod tests;\n\nuse crate::server::Node;\n";
    broken(layout::modules, &[("src/store/mod.rs", text)], "src/store/mod.rs knows server");
    let text = "#[cfg(test)]\n#[allow(unused)]\nmod tests {\n    use crate::server::Node;\n}\n";
    kept(layout::modules, &[("src/store/mod.rs", text)]);
}

#[test]
fn imports_are_expanded() {
    let path = "src/engine/worker.rs";
    for text in [
        "use crate::{server::Node, ids::AccountId};",
        "use crate::{ids::{AccountId}, server::{self, Node as N}};",
        "pub use crate::server::*;",
        "use super::super::server::Node;",
        "mod inner {\n    use super::super::super::server::Node;\n}",
        "fn f() {\n    crate::server::run();\n}",
        "use crate as node;\nfn f() {\n    node::server::run();\n}",
    ] {
        broken(layout::modules, &[(path, text)], "src/engine/worker.rs knows server");
    }
    broken(
        layout::modules,
        &[("src/text/load.rs", "use cresset_kernels::Compute;")],
        "src/text/load.rs knows kernels",
    );
    broken(layout::modules, &[("src/attic/mod.rs", "")], "the table has no row for attic");
    for all in ["use crate::*;", "use super::super::*;", "use {super::super::{*}};"] {
        let text = format!("{all}\nfn f() {{\n    server::run();\n}}");
        broken(layout::modules, &[(path, &text)], "src/engine/worker.rs names every module");
    }
    for text in [
        "// use crate::server::Node;",
        "const A: &str = r#\"use crate::server::Node;\"#;",
        "/* a /* b */ crate::server::Node */ use crate::ids::AccountId;",
        "use super::scheduler::Scheduler;",
        "#[cfg(test)]\nuse crate::server::Node;",
        "#[cfg(all(test, unix))]\nfn f() -> Node {\n    crate::server::node()\n}",
        "struct S {\n    #[cfg(test)]\n    node: crate::server::Node,\n    id: u8,\n}",
    ] {
        kept(layout::modules, &[(path, text)]);
    }
}

#[test]
fn crates_know_only_those_below_them() {
    let record = "qualification/src/record.rs";
    broken(
        layout::crates,
        &[(record, "fn f(model: &dyn cresset_models::Model) {}")],
        "qualification/src/record.rs knows models",
    );
    let memory = ("kernels/src/memory.rs", "use {cresset_models::KvCache, candle_core::Tensor};");
    broken(layout::crates, &[memory], "kernels/src/memory.rs knows models");
    let text = "use candle_core::Tensor;\nuse cresset_kernels::Ops;\nuse cresset_models::Model;";
    kept(layout::crates, &[("models/src/cpu/mod.rs", text)]);
    kept(layout::crates, &[(record, "#[cfg(test)]\nuse cresset_models::testing;")]);
}

#[test]
fn only_a_tests_item_is_left_out() {
    let path = "src/engine/worker.rs";
    for text in [
        "#[cfg(not(test))]\nuse crate::server::Node;",
        "#[cfg(any(test, unix))]\nuse crate::server::Node;",
        "#[cfg(test)]\nconst A: [u8; 1] = [b'}'];\nuse crate::server::Node;",
        "#[cfg(test)]\nuse crate::{ids::AccountId};\nuse crate::server::Node;",
        "#[cfg(test)]\nstruct S<T: A, U>(T, U);\nuse crate::server::Node;",
        "fn f<'a>(c: char) -> bool {\n    c == '\"'\n}\nuse crate::server::Node;",
    ] {
        broken(layout::modules, &[(path, text)], "src/engine/worker.rs knows server");
    }
}

#[test]
fn parts_of_the_server_are_told_apart() {
    let wire = ("src/server/wire/mod.rs", "use super::handlers::chat;");
    let handlers = ("src/server/handlers/mod.rs", "pub mod chat;");
    let exported = ("src/server/mod.rs", "pub use handlers::chat;\nmod handlers;");
    let expected = "src/server/wire/mod.rs knows handlers";
    broken(layout::server_parts, &[wire, handlers, exported], expected);
    let wire = ("src/server/wire/mod.rs", "use crate::server::chat;");
    broken(layout::server_parts, &[wire, handlers, exported], expected);
    let wire = ("src/server/wire/mod.rs", "use self::fields::Field;\nmod fields;");
    kept(layout::server_parts, &[wire, handlers, exported]);
    let expected = "the table of the server has no row for attic";
    broken(layout::server_parts, &[("src/server/attic.rs", "")], expected);
}

#[test]
fn purity_is_judged_by_what_is_reached() {
    let hub = ("src/engine/mod.rs", "pub use sampler::RowSampling;\nmod sampler;\nmod sequence;");
    let sequence = ("src/engine/sequence.rs", "use super::RowSampling;");
    for reached in [
        "use cresset_kernels::sampling::scan;",
        "use std::time;\nfn now() -> time::Instant {\n    time::Instant::now()\n}",
        "use tokio::sync::mpsc;",
    ] {
        let named = found(layout::purity, &[hub, sequence, ("src/engine/sampler.rs", reached)]);
        let expected = "src/engine/sequence.rs → src/engine/sampler.rs:";
        assert!(named.len() == 1 && named[0].starts_with(expected), "{reached}: {named:?}");
    }
    let clean = "use std::time::Instant;\npub struct RowSampling(Instant);";
    kept(layout::purity, &[hub, sequence, ("src/engine/sampler.rs", clean)]);
    let impure = ("src/engine/sampler.rs", "use tokio::sync::mpsc;");
    for text in ["use super::*;", "use crate::engine::{*};"] {
        let named = found(layout::purity, &[hub, ("src/engine/sequence.rs", text), impure]);
        let expected =
            ["src/engine/sequence.rs → src/engine/sampler.rs:1 reaches tokio::sync::mpsc"];
        assert_eq!(named, expected, "{text}");
    }
    let text = "fn f(since: std::time::Instant) {\n    g(since.elapsed());\n}";
    let expected = "src/engine/scheduler.rs:2 calls elapsed";
    broken(layout::purity, &[("src/engine/scheduler.rs", text)], expected);
}

#[test]
fn each_thing_has_its_place() {
    let path = "src/engine/worker.rs";
    for (text, what) in [
        ("use std::env;\nfn f() {\n    env::var(\"X\");\n}", ":3 has std::env::var"),
        ("fn f() {\n    std::env::var(\"X\");\n}", ":2 has std::env::var"),
        ("use std::env::{self, var_os as get};", ":1 has std::env::var_os"),
        ("use redb::Database;", ":1 has redb"),
        ("use prometheus_client::registry::Registry;", ":1 has prometheus_client"),
        ("fn f() -> axum::Router {\n}", ":1 has axum"),
        (
            "use tokio::sync::mpsc::unbounded_channel;",
            ":1 has tokio::sync::mpsc::unbounded_channel",
        ),
        ("unsafe fn f() {}", " has unsafe"),
        ("fn f() {\n    unsafe\n    { g() }\n}", " has unsafe"),
        ("unsafe impl Send for S {}", " has unsafe"),
        ("#[cfg(test)]\nmod tests {\n    unsafe trait T {}\n}", " has unsafe"),
        ("#[cfg(feature = \"cuda\")]\nmod gpu;", " asks for the feature cuda"),
    ] {
        broken(layout::places, &[(path, text)], &format!("{path}{what}"));
    }
    kept(layout::places, &[("src/config/paths.rs", "fn f() {\n    std::env::var(\"X\");\n}")]);
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
fn a_file_that_nothing_declares_is_found() {
    let library = ("src/lib.rs", "pub mod store;");
    let store = ("src/store/mod.rs", "mod writer;");
    let writer = ("src/store/writer.rs", "");
    kept(layout::declared_files, &[library, store, writer]);
    let expected = "src/store/queue.rs: no module declares it";
    let left = ("src/store/queue.rs", "");
    broken(layout::declared_files, &[library, store, writer, left], expected);
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
    kept(shape::metrics, &[document, ("src/metrics.rs", &registered)]);
    let unknown = metrics("a: histogram(\n  &mut r,\n  \"time_seconds\",\n  \"Time\",\n  &B),");
    let expected = "`cresset_time_seconds` is not in README.md";
    broken(shape::metrics, &[document, ("src/metrics.rs", &unknown)], expected);
    let silent = metrics("ready: add(&mut r, \"ready\", \"\"),");
    let expected = "`cresset_ready` has no help text";
    broken(shape::metrics, &[document, ("src/metrics.rs", &silent)], expected);
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
