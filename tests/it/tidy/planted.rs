//! Tests the rules: each reports a small tree that breaks it, and none that keeps it.

use super::source::{read, tree_of};
use super::{Find, RULES, shape};

/// Checks that the rule finds just this in a tree of these paths and texts.
#[track_caller]
fn finds(find: Find, files: &[(&str, &str)], expected: &str) {
    let tree = tree_of(files.iter().map(|(path, text)| ((*path).into(), (*text).into())));
    assert_eq!(find(&tree).join("\n"), expected, "{files:?}");
}

#[test]
fn pure_files_name_no_clock_task_or_tensor() {
    let path = "src/engine/sequence.rs";
    for (text, what) in [
        ("use tokio::sync::mpsc;", "tokio"),
        ("fn f() -> Instant { Instant::now() }", "Instant::now"),
        ("#[cfg(test)]\nstruct S<T: A, U>(T, U);\nuse candle_core::Tensor;", "candle_core"),
        ("#[cfg(any(test, unix))]\nfn f(since: Instant) { since.elapsed(); }", "elapsed"),
    ] {
        finds(shape::purity, &[(path, text)], &format!("{path} names {what}"));
        finds(shape::purity, &[("src/engine/worker.rs", text)], "");
    }
    for text in [
        "use std::time::Instant;",
        "/// A tokio\nconst A: &str = r#\" tokio \"#;",
        "#[cfg(all(test, unix))]\nfn f() { tokio::spawn(g()); }",
        "struct S {\n    #[cfg(test)]\n    thread: tokio::Task,\n    id: u8,\n}",
        "fn f() {\n    #[cfg(any(test, feature = \"testing\"))]\n    tokio::spawn(g());\n}",
    ] {
        finds(shape::purity, &[(path, text)], "");
    }
}

#[test]
fn kernels_have_reference_and_tests_beside_them() {
    let (kernel, tests) = (("kernels/src/a/a.cu", ""), ("kernels/src/a/gpu/tests.rs", ""));
    let reference = ("kernels/src/a/reference.rs", "");
    let without = |name| format!("kernels/src/a/a.cu has no {name} beside it");
    finds(shape::kernels, &[kernel, reference], &without("tests.rs"));
    finds(shape::kernels, &[kernel, tests], &without("reference.rs"));
    finds(shape::kernels, &[kernel, reference, tests], "");
}

#[test]
fn long_lines_are_found() {
    let code = format!("fn f() {{\n    {}\n}}\n", "g(1);".repeat(30));
    for path in ["src/a.rs", "kernels/src/a.cu", "models/examples/a.py", ".ci/run"] {
        finds(shape::long_lines, &[(path, &code)], &format!("{path}:2: 154 columns"));
    }
    let long = "a".repeat(101);
    for (path, text) in [
        ("tests/it/a.rs", code.clone()),
        ("src/a.rs", format!("#[cfg(test)]\nmod tests {{\n{code}}}\n")),
        ("src/a.rs", format!("const A: &str = r\"{long}\";")),
        ("src/a.rs", format!("const A: &str = \"a\n{long}\n\";")),
        ("src/a.rs", format!("// {}\n", "é".repeat(97))),
        ("kernels/setup-cuda", format!("pin='a==1 --hash={long}\na --hash={long}'\n")),
    ] {
        finds(shape::long_lines, &[(path, &text)], "");
    }
    let comment = format!("// {long}\n");
    finds(shape::long_lines, &[("tests/it/a.rs", &comment)], "tests/it/a.rs:1: 104 columns");
    let text = |lines| format!("{comment}{}", "//\n".repeat(lines));
    let expected = "1 of 199 lines have more than 100 columns";
    finds(shape::share_of_long_lines, &[("src/a.rs", &text(198))], expected);
    finds(shape::share_of_long_lines, &[("src/a.rs", &text(199))], "");
}

#[test]
fn long_functions_are_found() {
    let function =
        |lines: usize| format!("fn f(a: [u8; {{ 1 }}]) {{{}}}\n", "\n".repeat(lines - 1));
    finds(shape::functions, &[("tests/a.rs", &function(71))], "tests/a.rs:1: 71 lines");
    finds(shape::functions, &[("tests/a.rs", &function(70))], "");
    let many = |long| function(26).repeat(long) + &function(10).repeat(100 - long);
    let expected = "the 95th percentile of function lengths is 26 lines";
    finds(shape::typical_function, &[("src/a.rs", &many(6))], expected);
    finds(shape::typical_function, &[("src/a.rs", &many(5))], "");
}

#[test]
fn large_files_are_found() {
    let large = "\nuse std::fs;\n// Why.\n".repeat(501);
    for path in ["src/a.rs", "kernels/src/a.cu"] {
        finds(shape::large_files, &[(path, &large)], &format!("{path} has 501 lines of code"));
    }
    finds(shape::large_files, &[("tests/it/a.rs", &large)], "");
    finds(shape::large_files, &[("src/a.rs", &format!("#[cfg(test)]\nmod t {{\n{large}}}"))], "");
    let declared = [("src/a/mod.rs", "#[cfg(test)]\nmod tests;"), ("src/a/tests/b.rs", &large)];
    finds(shape::large_files, &declared, "");
}

#[test]
fn heads_and_names_are_looked_at() {
    finds(shape::heads, &[("tests/a.rs", "use std::fs;")], "tests/a.rs has no //! head");
    finds(shape::heads, &[("tests/a.rs", "//! A.\n")], "");
    finds(shape::vague_names, &[("src/util/a.rs", "")], "src/util/a.rs has a vague name");
    finds(shape::vague_names, &[("src/store/rows.rs", "")], "");
}

#[test]
fn a_type_name_means_one_thing() {
    let one = ("src/a.rs", "struct Job<T>(T);\ntrait T { type Out; }\nstruct Error;");
    for text in ["pub enum Job {}", "mod a { type Job = u8; }", "make! { trait Job {} }"] {
        let expected = "Job is defined in kernels/src/b.rs src/a.rs";
        finds(shape::type_names, &[one, ("kernels/src/b.rs", text)], expected);
    }
    for text in [
        "#[cfg(test)]\nstruct Job;",
        "impl T for Work { type Job = u8; }",
        "trait U { type Job; }\nuse a::Job;\nenum Error {}",
    ] {
        finds(shape::type_names, &[one, ("src/b.rs", text)], "");
    }
}

#[test]
fn ignored_tests_are_listed() {
    let list = (".ci/long", "counts kills lib many_kills");
    let text = "#[ignore = \"minutes\"]\nasync fn many_kills() {}\n#[test]\nfn kills() {}";
    finds(shape::ignored_tests, &[list, ("src/a.rs", text)], "");
    let text = "#[test]\n#[ignore = \"minutes\"]\nfn more_kills() {}";
    let expected = "src/a.rs: more_kills is not in .ci/long";
    finds(shape::ignored_tests, &[list, ("src/a.rs", text)], expected);
}

#[test]
fn metrics_are_explained() {
    for (metric, expected) in [
        ("add(\"ready\", \"1 while ready\")", ""),
        ("add(\"ready\", \"\")", "`cresset_ready` has no help text"),
        ("of_process(\"time\", \"Time\", &B)", "`process_time` is not in README.md"),
    ] {
        let code = format!("metrics! {{ field: By<1> = {metric}; }}");
        let files = [("README.md", "`cresset_ready`"), ("src/telemetry/metrics.rs", &code)];
        finds(shape::metrics, &files, expected);
    }
}

#[test]
fn a_tree_is_read_from_disk() {
    let folder = tempfile::tempdir().unwrap();
    for (path, text) in [
        ("src/a/mod.rs", "//! A.\n#[cfg(test)]\nmod tests;\npub struct A;\n"),
        ("src/a/tests/mod.rs", "//! Tests.\n"),
        ("src/target/a.rs", ""),
        ("tests/device/prove", "#!/bin/bash\n"),
        ("README.md", "# Cresset\n"),
    ] {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let tree = read(folder.path());
    let paths: Vec<&str> = tree.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(paths, ["README.md", "src/a/mod.rs", "src/a/tests/mod.rs", "tests/device/prove"]);
    assert!(tree.iter().all(|file| file.is_product == (file.path == "src/a/mod.rs")));
    for (name, find) in RULES {
        assert_eq!(find(&tree), [""; 0], "{name}");
    }
}
