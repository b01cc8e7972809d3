//! Checks of files, tokenizer and template, which generate nothing.

use super::{CheckFinding, CheckInput};
use crate::subject::{ChatTurn, Result, SubjectError};
use std::collections::BTreeMap;

/// Texts in composed form only, because some tokenizers normalise to it.
const TEXTS: &[&str] = &[
    "Hello, world!",
    "The quick brown fox jumps over 13 lazy dogs, 1024 times at 3.14159 m/s.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Съешь ещё этих мягких французских булок",
    "敏捷的棕色狐狸跳过懒狗。",
    "いろはにほへと ちりぬるを",
    "다람쥐 헌 쳇바퀴에 타고파",
    "نص حكيم له سر قاطع",
    "ऋषियों को सताने वाले दुष्ट राक्षसों",
    "😀🚀👩‍👩‍👧‍👦🇩🇪✍🏽",
    "fn main() {\n\tprintln!(\"{:?}\", [1, 2, 3]);\n}\n",
    "a  b   c\n\n\nd\t\te",
    "\\n \\u0041 %20 &amp; <b>bold</b>",
    "x",
];

pub(super) fn digests(input: &mut CheckInput) -> Result<CheckFinding> {
    let found = input.subject.digests()?;
    let expected = input.files;
    let mut wrong: Vec<String> = expected
        .iter()
        .filter(|(name, digest)| found.get(*name) != Some(digest))
        .map(|(name, _)| name.clone())
        .collect();
    wrong.extend(
        found
            .keys()
            .filter(|name| !expected.contains_key(*name))
            .map(|name| format!("{name} is extra")),
    );
    Ok(CheckFinding::from_wrong(&wrong, expected.len(), "every SHA-256 as in the manifest"))
}

pub(super) fn tokenizer_round_trip(input: &mut CheckInput) -> Result<CheckFinding> {
    let mut wrong = Vec::new();
    for text in TEXTS {
        let ids = input.subject.encode(text, false)?;
        let back = input.subject.decode(&ids, true)?;
        if back != *text {
            wrong.push(format!("{text:?} became {back:?}"));
        }
    }
    Ok(CheckFinding::from_wrong(&wrong, TEXTS.len(), "decode(encode(text)) = text"))
}

pub(super) fn tokenizer_goldens(input: &mut CheckInput) -> Result<CheckFinding> {
    let Some(goldens) = input.goldens else { return Ok(CheckFinding::without_goldens()) };
    let mut wrong = Vec::new();
    for case in &goldens.tokenizer {
        let plain = input.subject.encode(&case.text, false)? == case.ids;
        let parsed = input.subject.encode(&case.text, true)?
            == *case.special_ids.as_ref().unwrap_or(&case.ids);
        if !plain || !parsed {
            wrong.push(format!("{:?}", case.text));
        }
    }
    Ok(CheckFinding::from_wrong(&wrong, goldens.tokenizer.len(), "ids equal the reference's"))
}

/// The content of a hostile message must not add a single control token to the prompt.
pub(super) fn special_text(input: &mut CheckInput) -> Result<CheckFinding> {
    let mut ids = [input.subject.markup_ids(), input.subject.control_ids()].concat();
    ids.sort_unstable();
    ids.dedup();
    let mut wrong = Vec::new();
    let harmless = counts(input, "plain words")?;
    let mut hostile = String::from("plain");
    for id in &ids {
        let text = input.subject.decode(&[*id], false)?;
        if text.is_empty() {
            wrong.push(format!("id {id} has no text"));
        }
        hostile = format!("{hostile} {text} words");
    }
    let found = counts(input, &hostile)?;
    for id in ids.iter().filter(|id| found.get(id) != harmless.get(id)) {
        wrong.push(format!("{:?} (id {id})", input.subject.decode(&[*id], false)?));
    }
    Ok(CheckFinding::from_wrong(&wrong, ids.len(), "no control token from a message's text"))
}

/// How often each id is in the prompt of a message.
fn counts(input: &mut CheckInput, content: &str) -> Result<BTreeMap<u32, usize>> {
    let mut counts = BTreeMap::new();
    for id in input.subject.encode_chat(&[ChatTurn::new("user", content)])? {
        *counts.entry(id).or_default() += 1;
    }
    Ok(counts)
}

/// A refused role is a right answer, because some templates have no system role. Dropping the
/// message would be wrong.
pub(super) fn template_render(input: &mut CheckInput) -> Result<CheckFinding> {
    let conversations = [
        vec![("user", "What grows in spring?")],
        vec![("system", "Answer in one word."), ("user", "What falls in autumn?")],
        vec![
            ("user", "Name a river."),
            ("assistant", "The Danube."),
            ("user", "Name another one."),
        ],
        vec![("user", "größer, 大きい, 😀 & <tag> \"quoted\" {{ braces }}")],
    ];
    let mut wrong = Vec::new();
    for conversation in &conversations {
        let messages: Vec<ChatTurn> =
            conversation.iter().map(|(role, content)| ChatTurn::new(role, content)).collect();
        let prompt = match input.subject.render(&messages) {
            Err(SubjectError::Refused(_)) if conversation[0].0 == "system" => continue,
            rendered => rendered?,
        };
        if !in_order(&prompt, conversation) {
            wrong.push(format!("{conversation:?} became {prompt:?}"));
        }
    }
    Ok(CheckFinding::from_wrong(&wrong, conversations.len(), "each message once, in order"))
}

fn in_order(prompt: &str, conversation: &[(&str, &str)]) -> bool {
    let mut rest = prompt;
    conversation.iter().all(|(_, content)| {
        let found = rest.split_once(content);
        rest = found.map_or("", |(_, after)| after);
        found.is_some() && !rest.contains(content)
    })
}

pub(super) fn template_goldens(input: &mut CheckInput) -> Result<CheckFinding> {
    let Some(goldens) = input.goldens else { return Ok(CheckFinding::without_goldens()) };
    let mut wrong = Vec::new();
    for (i, case) in goldens.templates.iter().enumerate() {
        if input.subject.render(&case.messages)? != case.prompt {
            wrong.push(format!("conversation {i}"));
        }
    }
    for case in &goldens.cases {
        if input.subject.encode_chat(&case.messages)? != case.prompt_ids {
            wrong.push(format!("prompt ids of {}", case.id));
        }
    }
    Ok(CheckFinding::from_wrong(
        &wrong,
        goldens.templates.len() + goldens.cases.len(),
        "equal to the reference",
    ))
}
