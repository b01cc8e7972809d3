//! Reads structural tags, in the two forms that xgrammar has: `structures` with `triggers`, and a
//! `format`.

use super::answer_format::{MAX_FORMAT, json_schema};
use super::chat_schema::only;
use super::json::{JsonField, refuse_rest, required};
use crate::error::ApiError;
use cresset_request::AnswerFormat;
use cresset_text::{FormatTag, TagContent, TaggedText};
use std::collections::BTreeMap;

/// Tags, triggers or parts of one list.
const MOST_PARTS: usize = 64;
const MOST_CHARACTERS: usize = 1024;
const KINDS: &str = "must be json_schema, regex, grammar, const_string, sequence, or, tag, \
    triggered_tags as the whole, or any_text in a tag";

type TagMembers<'a> = BTreeMap<&'a str, JsonField<'a>>;

pub(super) fn read(field: &JsonField, ignored: &mut Vec<String>) -> Result<AnswerFormat, ApiError> {
    only(field, field.value.in_order().len() <= MAX_FORMAT, "must have at most 64 KiB")?;
    let mut members = field.members()?;
    if let Some(kind) = members.remove("type") {
        only(&kind, kind.value.text() == "structural_tag", "must be structural_tag")?;
    }
    if let Some(format) = members.remove("format") {
        refuse_rest(&members)?;
        return newer(&format, ignored);
    }
    let structures = items(&required(field, &mut members, "structures")?)?;
    let tags = structures.iter().map(|it| structure(it, ignored)).collect::<Result<_, _>>()?;
    tagged(field, members, TaggedText { tags, ..TaggedText::default() })
}

fn newer(format: &JsonField, ignored: &mut Vec<String>) -> Result<AnswerFormat, ApiError> {
    let mut members = format.members()?;
    if kind_of(format, &mut members)? != "triggered_tags" {
        return content(format, ignored);
    }
    let mut flag = |name| members.remove(name).as_ref().map_or(Ok(false), JsonField::bool);
    let (at_least_one, stop_after_first) = (flag("at_least_one")?, flag("stop_after_first")?);
    let tags = items(&required(format, &mut members, "tags")?)?;
    let tags = tags.iter().map(|it| tag(it, ignored)).collect::<Result<_, _>>()?;
    let text = TaggedText { tags, at_least_one, stop_after_first, ..TaggedText::default() };
    tagged(format, members, text)
}

/// The text, with its triggers.
fn tagged(
    field: &JsonField,
    mut members: TagMembers<'_>,
    text: TaggedText,
) -> Result<AnswerFormat, ApiError> {
    let triggers = required(field, &mut members, "triggers")?;
    refuse_rest(&members)?;
    let all = items(&triggers)?;
    let all = all.iter().map(|it| it.text(MOST_CHARACTERS).map(str::to_owned));
    let text = TaggedText { triggers: all.collect::<Result<_, _>>()?, ..text };
    let is_sound = text.fault().is_none() && !text.triggers.contains(&String::new());
    only(&triggers, is_sound, "must be the beginnings of tags: each of one, and one of each")?;
    Ok(AnswerFormat::Tagged(Box::new(text)))
}

fn items<'a>(field: &JsonField<'a>) -> Result<Vec<JsonField<'a>>, ApiError> {
    let items = field.items(MOST_PARTS)?;
    only(field, !items.is_empty(), "must have an item")?;
    Ok(items)
}

fn kind_of<'a>(field: &JsonField<'a>, members: &mut TagMembers<'a>) -> Result<&'a str, ApiError> {
    required(field, members, "type")?.text(MOST_CHARACTERS)
}

fn text_of<'a>(
    field: &JsonField<'a>,
    members: &mut TagMembers<'a>,
    name: &str,
) -> Result<String, ApiError> {
    required(field, members, name)?.text(MAX_FORMAT).map(str::to_owned)
}

fn structure(field: &JsonField, ignored: &mut Vec<String>) -> Result<FormatTag, ApiError> {
    let mut members = field.members()?;
    let schema = required(field, &mut members, "schema")?;
    let content = TagContent::Format(json_schema(&schema, false, ignored)?);
    finish_tag(field, members, content)
}

fn tag(field: &JsonField, ignored: &mut Vec<String>) -> Result<FormatTag, ApiError> {
    let mut members = field.members()?;
    if let Some(kind) = members.remove("type") {
        only(&kind, kind.value.text() == "tag", "must be tag")?;
    }
    let inner = required(field, &mut members, "content")?;
    let content = if inner.value.get("type").text() == "any_text" {
        TagContent::Text
    } else {
        TagContent::Format(content(&inner, ignored)?)
    };
    finish_tag(field, members, content)
}

fn finish_tag<'a>(
    field: &JsonField<'a>,
    mut members: TagMembers<'a>,
    content: TagContent,
) -> Result<FormatTag, ApiError> {
    let [begin, end] = ["begin", "end"].map(|name| text_of(field, &mut members, name));
    refuse_rest(&members)?;
    Ok(FormatTag { begin: begin?, content, end: end? })
}

fn content(field: &JsonField, ignored: &mut Vec<String>) -> Result<AnswerFormat, ApiError> {
    let mut members = field.members()?;
    let format = match kind_of(field, &mut members)? {
        "json_schema" => {
            json_schema(&required(field, &mut members, "json_schema")?, false, ignored)?
        }
        "regex" => AnswerFormat::Regex(text_of(field, &mut members, "pattern")?),
        "grammar" => AnswerFormat::of_grammar(text_of(field, &mut members, "grammar")?),
        "const_string" => AnswerFormat::Choice(vec![text_of(field, &mut members, "value")?]),
        "tag" => return Ok(tag(field, ignored)?.alone()),
        kind @ ("sequence" | "or") => {
            let parts = items(&required(field, &mut members, "elements")?)?;
            let parts =
                parts.iter().map(|part| content(part, ignored)).collect::<Result<_, _>>()?;
            if kind == "or" { AnswerFormat::either(parts) } else { AnswerFormat::sequence(parts) }
        }
        _ => return Err(field.refuse(KINDS)),
    };
    refuse_rest(&members).map(|()| format)
}
