//! The scripts that make goldens, as an operator's machine needs them.

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../", $name)))),*]
    };
}

/// Each file by its place in the folder from which `goldens/make_goldens.py` runs, with its text.
pub const MAKER: &[(&str, &str)] = files![
    "goldens/archive.py",
    "goldens/cases.py",
    "goldens/documents.py",
    "goldens/folder_gguf.py",
    "goldens/make_goldens.py",
    "goldens/reference.py",
    "goldens/requirements-witness.txt",
    "goldens/requirements.txt",
    "goldens/source.py",
    "goldens/stub_cuda.py",
    "goldens/text.py",
    "goldens/vocabulary.py",
    "goldens/witness.py",
    "texts/code.md",
    "texts/dialogue.md",
    "texts/german.md",
    "texts/maths.md",
    "texts/prose.md",
    "texts/table.md",
];

/// The lists of packages that pip installs, one after the other.
pub const REQUIREMENTS: [&str; 2] =
    ["goldens/requirements.txt", "goldens/requirements-witness.txt"];
