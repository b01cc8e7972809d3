//! Reads what an answer has to keep to: `response_format`, and the spellings of the same that
//! vLLM's clients send.

use super::chat_schema::{body_members, check, only};
use super::json::{JsonField, JsonTree, refuse_rest, required};
use super::json_schema::{self, Keeping};
use crate::error::ApiError;
use cresset_request::AnswerFormat;

/// Longest expression, grammar or schema, bytes, and all texts of a choice together.
const MAX_FORMAT: usize = 64 * 1024;
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
            let strict = described.value.get("strict").is_true();
            let schema = required(&described, &mut described.members()?, "schema")?;
            Some(json_schema(&schema, strict, ignored)?)
        }
    };
    refuse_rest(&members).map(|()| format)
}

fn json_schema(
    field: &JsonField,
    strict: bool,
    ignored: &mut Vec<String>,
) -> Result<AnswerFormat, ApiError> {
    let keeping = if strict { Keeping::Strict } else { Keeping::Whole };
    let text = json_schema::read(field, keeping, ignored)?;
    if text.len() > MAX_FORMAT {
        return Err(field.refuse(&format!("must have at most {} KiB", MAX_FORMAT >> 10)));
    }
    Ok(AnswerFormat::Schema(text))
}

fn structured_outputs(
    field: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<AnswerFormat, ApiError> {
    let shape = &body_members()["structured_outputs"]["properties"];
    let mut members = field.members()?;
    let spaces = ["disable_any_whitespace", "whitespace_pattern"].map(|name| members.remove(name));
    let mut members = members.into_iter();
    let (Some((kind, constrained)), None) = (members.next(), members.next()) else {
        return Err(field.refuse("must have one of json, regex, choice and grammar"));
    };
    check(&shape[kind], &constrained, ignored)?;
    let format = constraint(kind, &constrained, ignored)?;
    let [none, pattern] = &spaces;
    for (name, space) in [("disable_any_whitespace", none), ("whitespace_pattern", pattern)] {
        let Some(space) = space else { continue };
        check(&shape[name], space, ignored)?;
        only(space, kind == "json", "goes with json")?;
    }
    Ok(match format {
        AnswerFormat::Schema(schema) if none.as_ref().is_some_and(|none| none.value.is_true()) => {
            AnswerFormat::SpacedSchema { schema, white_space: None }
        }
        AnswerFormat::Schema(schema) if pattern.is_some() => {
            let white_space = pattern.as_ref().map(|pattern| pattern.value.text().to_owned());
            AnswerFormat::SpacedSchema { schema, white_space }
        }
        format => format,
    })
}

fn constraint(
    kind: &str,
    field: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<AnswerFormat, ApiError> {
    match (kind, field.value) {
        ("json", JsonTree::String(text)) => {
            let parsed = JsonTree::parse(text.as_bytes());
            let value = &parsed.map_err(|_| field.refuse("must be a JSON schema"))?;
            json_schema(&JsonField { value, ..field.clone() }, false, ignored)
        }
        ("json", _) => json_schema(field, false, ignored),
        ("regex", _) => Ok(AnswerFormat::Regex(field.value.text().into())),
        ("choice", _) => {
            let texts = field.value.texts();
            let bytes = texts.iter().map(String::len).sum::<usize>();
            only(field, bytes <= MAX_FORMAT, "must have texts of 1 to 65536 characters together")?;
            Ok(AnswerFormat::Choice(texts))
        }
        ("grammar", JsonTree::String(text)) => {
            only(field, !text.contains("::="), GBNF).map(|()| AnswerFormat::Lark(text.clone()))
        }
        _ => Err(field.refuse("is not supported")),
    }
}

/// llama.cpp's grammars begin with `root ::=`; they would be read as something else.
const GBNF: &str = "must be a Lark grammar (`start: …`); this one is written in GBNF";
