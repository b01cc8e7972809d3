//! Reads what an answer has to keep to: `response_format`, and the spellings of the same that the
//! clients of vLLM, SGLang and llama.cpp send.

use super::chat_schema::{body_members, check, only};
use super::json::{JsonField, JsonTree, refuse_rest, required};
use super::json_schema::{self, Keeping};
use super::structural_tag;
use crate::error::ApiError;
use cresset_request::AnswerFormat;
use cresset_text::SchemaFormat;
use std::collections::BTreeMap;

/// Longest expression, grammar or schema, bytes, and all texts of a choice together.
pub(super) const MAX_FORMAT: usize = 64 * 1024;
/// Any JSON object.
const ANY_OBJECT: &str = r#"{"type":"object"}"#;

/// The format that a field asks for; `None` for plain text. Keywords of a schema that have no
/// effect go to `ignored`.
pub(super) fn parse(
    name: &str,
    field: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<Option<AnswerFormat>, ApiError> {
    match name {
        "response_format" => response_format(field, ignored),
        "structured_outputs" => structured_outputs(field, ignored).map(Some),
        _ => constraint(name.trim_start_matches("guided_"), field, ignored).map(Some),
    }
}

fn response_format(
    field: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<Option<AnswerFormat>, ApiError> {
    let shape = &body_members()["response_format"]["properties"];
    let mut members = field.members()?;
    let kind = required(field, &mut members, "type")?;
    check(&shape["type"], &kind, ignored)?;
    if kind.value.text() == "structural_tag" {
        return structural_tag::read(field, ignored).map(Some);
    }
    let format = match kind.value.text() {
        "text" => None,
        // llama.cpp's clients send the schema of the object beside it.
        "json_object" => Some(match members.remove("schema") {
            Some(schema) => json_schema(&schema, false, ignored)?,
            None => AnswerFormat::Schema(ANY_OBJECT.into()),
        }),
        _ => {
            let described = required(field, &mut members, "json_schema")?;
            check(&shape["json_schema"], &described, ignored)?;
            Some(described_schema(&described, ignored)?)
        }
    };
    refuse_rest(&members).map(|()| format)
}

/// A schema with its name.
fn described_schema(
    described: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<AnswerFormat, ApiError> {
    let strict = described.value.get("strict").is_true();
    let schema = required(described, &mut described.members()?, "schema")?;
    json_schema(&schema, strict, ignored)
}

pub(super) fn json_schema(
    field: &JsonField,
    strict: bool,
    ignored: &mut Vec<String>,
) -> Result<AnswerFormat, ApiError> {
    let keeping = if strict { Keeping::Strict } else { Keeping::Whole };
    let checked = json_schema::read(field, keeping, ignored)?;
    only(field, checked.text.len() <= MAX_FORMAT, "must have at most 64 KiB")?;
    Ok(AnswerFormat::Schema(checked.into()))
}

fn structured_outputs(
    field: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<AnswerFormat, ApiError> {
    let shape = &body_members()["structured_outputs"]["properties"];
    let mut members = field.members()?;
    let writing: BTreeMap<&str, JsonField> =
        WRITING.iter().filter_map(|name| members.remove_entry(*name)).collect();
    let mut members = members.into_iter();
    let (Some((kind, constrained)), None) = (members.next(), members.next()) else {
        return Err(field.refuse("must have one of json, regex, choice, grammar, structural_tag"));
    };
    check(&shape[kind], &constrained, ignored)?;
    let mut format = constraint(kind, &constrained, ignored)?;
    for (name, member) in &writing {
        check(&shape[name], member, ignored)?;
        write(&mut format, name, member)?;
    }
    Ok(format)
}

/// How JSON is written, by members of `structured_outputs`.
const WRITING: [&str; 3] =
    ["disable_additional_properties", "disable_any_whitespace", "whitespace_pattern"];

/// Lets a schema be written as a member says.
fn write(format: &mut AnswerFormat, name: &str, member: &JsonField) -> Result<(), ApiError> {
    let AnswerFormat::Schema(schema) = format else {
        return Err(member.refuse("goes with json"));
    };
    match name {
        "disable_additional_properties" => schema.closed = member.value.is_true(),
        "disable_any_whitespace" if member.value.is_true() => {
            schema.white_space = Some(String::new());
        }
        "disable_any_whitespace" => {}
        _ => {
            schema.white_space.get_or_insert_with(|| member.value.text().to_owned());
        }
    }
    Ok(())
}

/// Lets a schema have this between its parts; whether the format is one.
pub(super) fn with_white_space(format: &mut AnswerFormat, pattern: &str) -> bool {
    let AnswerFormat::Schema(SchemaFormat { white_space, .. }) = format else { return false };
    white_space.get_or_insert_with(|| pattern.to_owned());
    true
}

fn constraint(
    kind: &str,
    field: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<AnswerFormat, ApiError> {
    match (kind, field.value) {
        ("json" | "json_schema" | "structural_tag", JsonTree::String(text)) => {
            let parsed = JsonTree::parse(text.as_bytes());
            let value = &parsed.map_err(|_| field.refuse("must be JSON, or its text"))?;
            constraint(kind, &JsonField { value, ..field.clone() }, ignored)
        }
        ("json" | "json_schema", _) => json_schema(field, false, ignored),
        ("structural_tag", _) => structural_tag::read(field, ignored),
        ("regex", _) => Ok(AnswerFormat::Regex(field.value.text().into())),
        ("choice", _) => {
            let texts = field.value.texts();
            let bytes = texts.iter().map(String::len).sum::<usize>();
            only(field, bytes <= MAX_FORMAT, "must have texts of 1 to 65536 characters together")?;
            Ok(AnswerFormat::Choice(texts))
        }
        ("ebnf", _) => Ok(AnswerFormat::Gbnf(field.value.text().into())),
        ("grammar", _) => Ok(AnswerFormat::of_grammar(field.value.text().into())),
        _ => Err(field.refuse("is not supported")),
    }
}
