//! Reads what an answer has to keep to: `response_format`, and the spellings of the same that
//! vLLM's clients send.

use super::json::{JsonField, JsonTree, refuse_rest, required};
use super::json_schema;
use crate::error::ApiError;
use cresset_request::{AnswerFormat, AskedFormat};

/// Longest expression, grammar or schema, bytes, and all texts of a choice together.
pub(super) const MAX_FORMAT: usize = 64 * 1024;
pub(super) const MAX_CHOICES: usize = 1_000;
const MAX_SCHEMA_NAME: usize = 64;
const MAX_DESCRIPTION: usize = 4 * 1024;
/// Any JSON object.
const ANY_OBJECT: &str = r#"{"type":"object"}"#;

/// The fields that ask for a format, by the names under which older clients send them too.
pub(super) const FIELDS: [&str; 6] = [
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
];

/// The format that one of `FIELDS` asks for; `None` for plain text. Keywords of a schema that have
/// no effect go to `ignored`.
pub(super) fn parse(
    name: &str,
    field: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<Option<AskedFormat>, ApiError> {
    let format = match name {
        "response_format" => response_format(field, ignored)?,
        "structured_outputs" => Some(structured_outputs(field, ignored)?),
        _ => Some(constraint(name.trim_start_matches("guided_"), field, ignored)?),
    };
    let field = FIELDS.into_iter().find(|known| *known == name).unwrap_or("response_format");
    Ok(format.map(|format| AskedFormat { field, format }))
}

fn response_format(
    field: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<Option<AnswerFormat>, ApiError> {
    let mut members = field.members()?;
    let kind = required(field, &mut members, "type")?;
    let format = match kind.text(MAX_SCHEMA_NAME)? {
        "text" => None,
        "json_object" => Some(AnswerFormat::Schema(ANY_OBJECT.into())),
        "json_schema" => {
            let described = required(field, &mut members, "json_schema")?;
            Some(described_schema(&described, ignored)?)
        }
        _ => return Err(kind.refuse("must be text, json_object or json_schema")),
    };
    refuse_rest(&members)?;
    Ok(format)
}

/// `{"name", "description", "schema", "strict"}`.
fn described_schema(
    field: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<AnswerFormat, ApiError> {
    let mut members = field.members()?;
    if let Some(name) = members.remove("name") {
        name.text(MAX_SCHEMA_NAME)?;
    }
    if let Some(description) = members.remove("description") {
        description.text(MAX_DESCRIPTION)?;
    }
    let strict = members.remove("strict").map(|strict| strict.bool()).transpose()?;
    let schema = required(field, &mut members, "schema")?;
    refuse_rest(&members)?;
    json_schema(&schema, strict.unwrap_or_default(), ignored)
}

fn json_schema(
    field: &JsonField,
    strict: bool,
    ignored: &mut Vec<String>,
) -> Result<AnswerFormat, ApiError> {
    json_schema::check(field, strict, ignored)?;
    let text = field.value.in_order();
    if text.len() > MAX_FORMAT {
        return Err(field.refuse(&format!("must have at most {} KiB", MAX_FORMAT >> 10)));
    }
    Ok(AnswerFormat::Schema(text))
}

fn structured_outputs(
    field: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<AnswerFormat, ApiError> {
    let mut members = field.members()?.into_iter();
    match (members.next(), members.next()) {
        (Some((kind, constrained)), None) => constraint(kind, &constrained, ignored),
        _ => Err(field.refuse("must have one of json, regex, choice and grammar")),
    }
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
            json_schema(&JsonField { path: field.path.clone(), value }, false, ignored)
        }
        ("json", _) => json_schema(field, false, ignored),
        ("regex", _) => Ok(AnswerFormat::Regex(bounded(field)?.into())),
        ("choice", _) => choice(field),
        ("grammar", _) => grammar(field),
        _ => Err(field.refuse("is not supported")),
    }
}

fn bounded<'a>(field: &JsonField<'a>) -> Result<&'a str, ApiError> {
    let text = field.text(MAX_FORMAT)?;
    if text.is_empty() { Err(field.refuse("must not be empty")) } else { Ok(text) }
}

fn choice(field: &JsonField) -> Result<AnswerFormat, ApiError> {
    let items = field.items(MAX_CHOICES)?;
    let texts = items.iter().map(|item| bounded(item).map(str::to_owned));
    let texts: Vec<String> = texts.collect::<Result<_, _>>()?;
    if texts.is_empty() || texts.iter().map(String::len).sum::<usize>() > MAX_FORMAT {
        return Err(field.refuse("must have texts of 1 to 65536 characters together"));
    }
    Ok(AnswerFormat::Choice(texts))
}

/// llama.cpp's grammars begin with `root ::=`; they would be read as something else.
fn grammar(field: &JsonField) -> Result<AnswerFormat, ApiError> {
    let text = bounded(field)?;
    if text.contains("::=") {
        return Err(
            field.refuse("must be a Lark grammar (`start: …`); this one is written in GBNF")
        );
    }
    Ok(AnswerFormat::Lark(text.into()))
}
