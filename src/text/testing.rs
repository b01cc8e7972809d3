//! Small vocabularies for tests: GGUF metadata written by hand.

use super::gguf::{self, GgufKeys};
use super::tokenizer::{SpecialToken, SpecialTokens};
use super::{TemplateLimits, TextModel, Tokenizer};
use cresset_models::loader::gguf::Value;
use std::collections::BTreeMap;
use std::sync::LazyLock;

pub static BYTE_LEVEL: LazyLock<Tokenizer> = LazyLock::new(|| tokenizer(&byte_level()));
pub static SENTENCE_PIECE: LazyLock<Tokenizer> = LazyLock::new(|| tokenizer(&sentence_piece()));

pub const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}\
     {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

pub type Metadata = BTreeMap<String, Value>;

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

fn strings(texts: &[String]) -> Value {
    Value::Array(texts.iter().cloned().map(Value::String).collect())
}

fn vocabulary(entries: &[(String, i32)]) -> [(String, Value); 2] {
    let tokens: Vec<String> = entries.iter().map(|(token, _)| token.clone()).collect();
    let types = entries.iter().map(|(_, kind)| Value::I32(*kind)).collect();
    [
        ("tokenizer.ggml.tokens".into(), strings(&tokens)),
        ("tokenizer.ggml.token_type".into(), Value::Array(types)),
    ]
}

fn named(fields: &[(&str, Value)]) -> impl Iterator<Item = (String, Value)> {
    fields.iter().map(|(key, value)| ((*key).to_owned(), value.clone()))
}

/// Some that begin as each other do.
pub fn special_tokens() -> SpecialTokens {
    let token = |(id, text): (u32, &str)| SpecialToken {
        id,
        text: text.into(),
        special: true,
        lstrip: false,
        rstrip: false,
    };
    SpecialTokens::new(
        [(0, "<s>"), (1, "</s>"), (2, "<|end|>"), (3, "<|end"), (4, "§")].map(token).to_vec(),
    )
}

/// GPT-2's alphabet in byte order from id 3 on, then a few merges; ids 0 to 2 are control tokens,
/// the last one is user-defined.
pub fn byte_level() -> Metadata {
    let printable = |byte: &u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = (0x100..).filter_map(char::from_u32);
    let alphabet = (0..=255u8).map(|byte| {
        if printable(&byte) { char::from(byte) } else { others.next().expect("endless") }
    });
    let merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "1 2", "Ã ©", "< |"];
    let control =
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(|token| (token.to_owned(), CONTROL));
    let letters = alphabet.map(|letter| (letter.to_string(), NORMAL));
    let merged = merges.map(|merge| (merge.replace(' ', ""), NORMAL));
    let entries: Vec<_> = control
        .into_iter()
        .chain(letters)
        .chain(merged)
        .chain([("<tool>".to_owned(), USER_DEFINED)])
        .collect();
    let fields = [
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("smollm".into())),
        ("tokenizer.ggml.merges", strings(&merges.map(str::to_owned))),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
        ("tokenizer.ggml.eos_token_id", Value::U32(0)),
        ("tokenizer.chat_template", Value::String(CHATML.into())),
    ];
    vocabulary(&entries).into_iter().chain(named(&fields)).collect()
}

/// `<unk> <s> </s>`, the 256 bytes from id 3 on, then pieces; better pieces have higher scores.
pub fn sentence_piece() -> Metadata {
    let head =
        [("<unk>".to_owned(), UNKNOWN), ("<s>".to_owned(), CONTROL), ("</s>".to_owned(), CONTROL)];
    let bytes = (0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), BYTE));
    let pieces = [
        "▁h", "▁he", "ll", "▁hell", "▁hello", "▁wo", "<s", "▁▁", "▁", "h", "e", "l", "o", "w", "<",
        "s", ">", "/",
    ];
    let pieces = pieces.map(|piece| (piece.to_owned(), NORMAL));
    let entries: Vec<_> = head.into_iter().chain(bytes).chain(pieces).collect();
    let scores = (0..entries.len())
        .map(|id| Value::F32(if id < 259 { 0.0 } else { 259.0 - id as f32 }))
        .collect();
    let fields = [
        ("tokenizer.ggml.model", Value::String("llama".into())),
        ("tokenizer.ggml.scores", Value::Array(scores)),
        ("tokenizer.ggml.eos_token_id", Value::U32(2)),
    ];
    vocabulary(&entries).into_iter().chain(named(&fields)).collect()
}

/// The byte-level vocabulary with tokens for these marks, and this template.
pub fn with_marks(marks: &[&str], template: &str) -> Metadata {
    let mut metadata = byte_level();
    let mut extend = |key: &str, value: fn(&str) -> Value| {
        let Some(Value::Array(entries)) = metadata.get_mut(key) else { panic!("no {key}") };
        entries.extend(marks.iter().map(|mark| value(mark)));
    };
    extend("tokenizer.ggml.tokens", |mark| Value::String(mark.to_owned()));
    extend("tokenizer.ggml.token_type", |_| Value::I32(USER_DEFINED));
    metadata.insert("tokenizer.chat_template".into(), Value::String(template.into()));
    metadata
}

fn tokenizer(metadata: &Metadata) -> Tokenizer {
    Tokenizer::new(gguf::tokenizer(GgufKeys(metadata)).expect("a sound vocabulary"))
        .expect("a sound tokenizer")
}

pub fn text_model(metadata: &Metadata) -> TextModel {
    TextModel::from_gguf_metadata(GgufKeys(metadata), TemplateLimits::default())
        .expect("a sound release")
}

/// The text as one piece, in three pieces cut at any two places, and as single characters.
pub fn cuts(text: &str) -> Vec<Vec<&str>> {
    let places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    let mut all = vec![vec![text], text.split_inclusive(|_| true).collect()];
    for &one in &places {
        let later = places.iter().filter(|two| **two >= one);
        all.extend(later.map(|&two| vec![&text[..one], &text[one..two], &text[two..]]));
    }
    all
}
