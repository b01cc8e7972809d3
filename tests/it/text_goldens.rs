//! Tokenizer and chat template of the default release against goldens made with Hugging Face
//! transformers (`qualification/goldens/make_goldens.py`).

use cresset_models::ModelSource;
use cresset_text::{ChatMessage, Detokenizer, TextModel};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::sync::LazyLock;

pub static GOLDEN: LazyLock<Value> = LazyLock::new(|| {
    serde_json::from_str(include_str!("goldens/smollm2-135m-instruct.text.json")).unwrap()
});
static GREEDY: LazyLock<Value> = LazyLock::new(|| {
    serde_json::from_str(include_str!("goldens/smollm2-135m-instruct.greedy.json")).unwrap()
});
static MODEL: LazyLock<TextModel> =
    LazyLock::new(|| TextModel::load(&ModelSource::gguf(super::release::default_gguf())).unwrap());

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn messages(case: &Value) -> Vec<ChatMessage> {
    let text = |message: &Value, key: &str| message[key].as_str().map(str::to_owned);
    let message = |message: &Value| ChatMessage {
        role: text(message, "role").unwrap(),
        content: text(message, "content"),
        name: text(message, "name"),
        tool_call_id: text(message, "tool_call_id"),
        tool_calls: None,
        reasoning_content: None,
    };
    case["messages"].as_array().unwrap().iter().map(message).collect()
}

/// The cases under `key`; there must be enough of them to mean something.
fn cases<'a>(golden: &'a Value, key: &str, at_least: usize) -> &'a [Value] {
    let cases = golden[key].as_array().unwrap();
    assert!(cases.len() >= at_least, "{key}: {} cases", cases.len());
    cases
}

#[test]
fn ids_and_texts_equal_the_reference() {
    for case in cases(&GOLDEN, "tokenizer", 300) {
        let text = case["text"].as_str().unwrap();
        let plain = MODEL.tokenizer.encode(text, false).unwrap();
        assert_eq!(plain, ids(&case["ids"]), "{text:?}");
        let special = case.get("special_ids").map_or_else(|| plain.clone(), ids);
        assert_eq!(
            MODEL.tokenizer.encode(text, true).unwrap(),
            special,
            "{text:?} with special tokens"
        );
        assert_eq!(MODEL.tokenizer.decode(&plain, false).unwrap(), case["decoded"], "{text:?}");
    }
}

/// SplitMix64, as in the script that made the goldens.
pub struct SplitMix(pub u64);

impl SplitMix {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    pub fn text(&mut self, ranges: &[[u32; 2]], pieces: &[String]) -> String {
        let part = |rng: &mut Self| {
            if rng.below(4) == 0 {
                return pieces[rng.below(pieces.len())].clone();
            }
            let [low, high] = ranges[rng.below(ranges.len())];
            char::from_u32(low + rng.below((high - low + 1) as usize) as u32).unwrap().to_string()
        };
        (0..self.below(24)).map(|_| part(self)).collect()
    }
}

/// The parts of generated strings.
pub fn fuzz_parts() -> (Vec<[u32; 2]>, Vec<String>) {
    let fuzz = &GOLDEN["fuzz"];
    (
        serde_json::from_value(fuzz["ranges"].clone()).unwrap(),
        serde_json::from_value(fuzz["pieces"].clone()).unwrap(),
    )
}

#[test]
fn ids_of_fuzzed_strings_equal_the_reference() {
    let fuzz = &GOLDEN["fuzz"];
    let (ranges, pieces) = fuzz_parts();
    let mut rng = SplitMix(fuzz["seed"].as_u64().unwrap());
    let mut digest = Sha256::new();
    let mut tokens = 0;
    for _ in 0..fuzz["strings"].as_u64().unwrap() {
        let ids = MODEL.tokenizer.encode(&rng.text(&ranges, &pieces), true).unwrap();
        digest.update((ids.len() as u32).to_le_bytes());
        for id in &ids {
            digest.update(id.to_le_bytes());
        }
        tokens += ids.len();
    }
    assert_eq!(fuzz["tokens"], tokens);
    assert_eq!(fuzz["sha256"], hex::encode(digest.finalize()));
}

#[test]
fn streamed_text_equals_decoded_text() {
    for case in cases(&GOLDEN, "tokenizer", 300).iter().chain(cases(&GREEDY, "cases", 20)) {
        let ids = ids(case.get("ids").unwrap_or(&case["greedy_ids"]));
        let mut detokenizer = Detokenizer::new();
        let mut streamed: String =
            ids.iter().map(|id| detokenizer.push(&MODEL.tokenizer, *id)).collect();
        streamed += &detokenizer.finish();
        assert_eq!(streamed, MODEL.tokenizer.decode(&ids, true).unwrap(), "{ids:?}");
    }
}

#[test]
fn prompts_equal_the_reference() {
    for case in cases(&GOLDEN, "template", 40) {
        let messages = messages(case);
        let generate = case["add_generation_prompt"] == true;
        let prompt = MODEL.template.render(&messages, generate).unwrap();
        assert_eq!(prompt, case["prompt"], "{messages:?}");
        if generate {
            assert_eq!(MODEL.encode_chat(&messages).unwrap(), ids(&case["ids"]), "{messages:?}");
        }
    }
    for case in cases(&GREEDY, "cases", 20) {
        assert_eq!(
            MODEL.encode_chat(&messages(case)).unwrap(),
            ids(&case["prompt_ids"]),
            "{}",
            case["id"]
        );
    }
}

#[test]
fn special_tokens_in_contents_stay_text() {
    let mut looked_alike = 0;
    for case in cases(&GOLDEN, "tokenizer", 300) {
        let content = case["text"].as_str().unwrap();
        let message = |role: &str| ChatMessage {
            role: role.into(),
            content: Some(content.into()),
            name: None,
            tool_call_id: None,
            tool_calls: None,
            reasoning_content: None,
        };
        let ids = MODEL.encode_chat(&[message("system"), message("user")]).unwrap();
        let special: Vec<u32> = ids.iter().copied().filter(|id| *id < 17).collect();
        // <|im_start|> system <|im_end|> <|im_start|> user <|im_end|> <|im_start|> assistant
        assert_eq!(special, [1, 2, 1, 2, 1], "{content:?}");
        looked_alike += usize::from(case.get("special_ids").is_some());
    }
    assert!(looked_alike >= 20, "{looked_alike} contents held special tokens");
}

#[test]
fn generation_ends_where_the_release_says() {
    assert_eq!(MODEL.eos_ids, [2]);
}

#[test]
fn a_quarter_megabyte_of_anything_is_tokenised() {
    const SIZE: usize = 256 * 1024;
    for unit in
        ["a", " ", "\n", " \n", "1", "!", "é", "🦀", "<|im_end|>", "<", "'s", "a b", "\u{301}"]
    {
        let text = unit.repeat(SIZE / unit.len());
        let ids = MODEL.encode_chat(&[ChatMessage {
            role: "user".into(),
            content: Some(text.clone()),
            name: None,
            tool_call_id: None,
            tool_calls: None,
            reasoning_content: None,
        }]);
        let decoded = MODEL.tokenizer.decode(&ids.unwrap(), false).unwrap();
        assert!(decoded.contains(&text), "{unit:?}");
    }
}

/// The maker's length of the long document, with the packages left out that only computing needs.
#[test]
fn fewer_positions_make_a_shorter_long_document() {
    const SCRIPT: &str = "
import sys, types
for name in ('torch', 'cases', 'source', 'text'):
    sys.modules[name] = types.ModuleType(name)
sys.modules['source'].Refused = Exception
sys.modules['text'].encode = lambda tokenizer, text, special: list(range(len(text)))
sys.modules['cases'].report = lambda lines: ' ' * 400_000
import documents
for context, positions in ((8192, 16384), (8192, 4096), (65536, 65536), (8192, 384), (100, 384)):
    length = documents.long_length(context, positions)
    prose = documents.Document('prose', [1, 2], range(1))
    made = documents.long_document(None, [1], [prose], length)
    print(len(made.ids), len(made.positions))
";
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/qualification/goldens");
    let mut python = std::process::Command::new("python3");
    let made = python.env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONPATH", folder);
    let made = made.args(["-c", SCRIPT]).output().unwrap();
    let told = String::from_utf8(made.stdout).unwrap();
    let errors = String::from_utf8_lossy(&made.stderr);
    assert_eq!(told, "8192 127\n2048 31\n32768 511\n192 2\n100 1\n", "{errors}");
}
