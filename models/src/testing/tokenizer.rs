//! A small byte-level BPE: every byte, three special tokens, and merges that build a few common
//! words.

use crate::loader::gguf::Value;
use serde_json::{Map, json};

pub(super) const END_OF_TEXT: u32 = 0;
pub(super) const IM_START: u32 = 1;
pub(super) const IM_END: u32 = 2;

const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// The parts of each merge come before it. `Ġ` is the byte-level alphabet's space.
const MERGES: [(&str, &str); 40] = [
    ("Ġ", "t"),
    ("h", "e"),
    ("Ġ", "a"),
    ("i", "n"),
    ("r", "e"),
    ("o", "n"),
    ("Ġt", "he"),
    ("e", "r"),
    ("Ġ", "s"),
    ("a", "t"),
    ("Ġ", "w"),
    ("o", "r"),
    ("e", "n"),
    ("i", "s"),
    ("Ġ", "o"),
    ("Ġ", "c"),
    ("o", "u"),
    ("i", "t"),
    ("e", "s"),
    ("l", "l"),
    ("in", "g"),
    ("Ġ", "b"),
    ("e", "d"),
    ("Ġo", "f"),
    ("a", "n"),
    ("Ġa", "n"),
    ("Ġan", "d"),
    ("Ġt", "o"),
    ("Ġ", "in"),
    ("y", "ou"),
    ("u", "s"),
    ("us", "er"),
    ("Ġ", "is"),
    ("he", "ll"),
    ("hell", "o"),
    ("Ġw", "or"),
    ("Ġwor", "l"),
    ("Ġworl", "d"),
    ("a", "s"),
    ("as", "s"),
];

const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + \
    message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100
/// on.
fn byte_alphabet() -> impl Iterator<Item = char> {
    let mut next = 0x100;
    (0..=255u8).map(move |byte| {
        if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
            return char::from(byte);
        }
        next += 1;
        char::from_u32(next - 1).expect("invariant: U+0100 to U+0143 are characters")
    })
}

/// The vocabulary in id order.
pub(super) fn tokens() -> Vec<String> {
    let special = SPECIAL.into_iter().map(str::to_owned);
    let bytes = byte_alphabet().map(String::from);
    special.chain(bytes).chain(MERGES.iter().map(|(a, b)| format!("{a}{b}"))).collect()
}

fn merges() -> Vec<String> {
    MERGES.iter().map(|(a, b)| format!("{a} {b}")).collect()
}

pub(super) fn gguf_metadata() -> Vec<(String, Value)> {
    const NORMAL: i32 = 1;
    const CONTROL: i32 = 3;
    let strings =
        |values: Vec<String>| Value::Array(values.into_iter().map(Value::String).collect());
    let types =
        (0..tokens().len()).map(|id| Value::I32(if id < SPECIAL.len() { CONTROL } else { NORMAL }));
    [
        ("model", Value::String("gpt2".into())),
        ("pre", Value::String("smollm".into())),
        ("tokens", strings(tokens())),
        ("token_type", Value::Array(types.collect())),
        ("merges", strings(merges())),
        ("bos_token_id", Value::U32(IM_START)),
        ("eos_token_id", Value::U32(IM_END)),
        ("unknown_token_id", Value::U32(END_OF_TEXT)),
        ("padding_token_id", Value::U32(IM_END)),
        ("add_bos_token", Value::Bool(false)),
        ("add_space_prefix", Value::Bool(false)),
    ]
    .into_iter()
    .map(|(key, value)| (format!("tokenizer.ggml.{key}"), value))
    .chain([("tokenizer.chat_template".to_owned(), Value::String(CHAT_TEMPLATE.into()))])
    .collect()
}

pub(super) fn hf_tokenizer() -> serde_json::Value {
    let vocab: Map<String, serde_json::Value> =
        tokens().into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    let special = SPECIAL.iter().enumerate().map(|(id, token)| {
        json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": special.collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        ]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": SPECIAL[0], "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges()},
    })
}

pub(super) fn hf_tokenizer_config() -> serde_json::Value {
    json!({
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": SPECIAL[IM_START as usize],
        "eos_token": SPECIAL[IM_END as usize],
        "unk_token": SPECIAL[END_OF_TEXT as usize],
        "chat_template": CHAT_TEMPLATE,
    })
}
