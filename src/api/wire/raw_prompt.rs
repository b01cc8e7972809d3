//! Reads `prompt`, which the node's own gateway may send in place of `messages`, and nobody else:
//! a text, token ids, or an object. The object has `text` with `add_special` and `parse_special`,
//! or `prefix` and `suffix` with `files`, each of which has a `name` and a `text`.

use super::json::{JsonField, JsonTree, refuse_rest, required};
use crate::error::ApiError;
use crate::settings::ChatBounds;
use cresset_request::GenerationInput;
use cresset_text::{ProjectFile, RawPrompt};
use std::collections::BTreeMap;

pub(super) const NAME: &str = "prompt";
/// The bound of a gateway's files. `/v1` has none, and takes no such prompts.
const FILES: &str = "files";

/// The bound of token ids that are sent, or told.
pub const TOKEN_IDS: &str = "token_ids";

pub fn bound(bounds: &ChatBounds, name: &str) -> usize {
    bounds.get(name).copied().unwrap_or_default()
}

pub(super) fn is_taken(bounds: &ChatBounds) -> bool {
    bounds.contains_key(FILES)
}

pub(super) fn parse(field: &JsonField) -> Result<RawPrompt, ApiError> {
    match field.value {
        JsonTree::String(text) => Ok(whole(text, true, true)),
        JsonTree::Array(_) => {
            let ids = field.items(bound(field.bounds, TOKEN_IDS))?;
            ids.iter().map(id).collect::<Result<_, _>>().map(RawPrompt::Tokens)
        }
        JsonTree::Object(_) => parts(field),
        _ => Err(field.refuse("must be a text or a list of token ids")),
    }
}

fn whole(text: &str, add_special: bool, parse_special: bool) -> RawPrompt {
    RawPrompt::Text { text: text.to_owned(), add_special, parse_special }
}

fn id(field: &JsonField) -> Result<u32, ApiError> {
    field.integer(0..=u32::MAX.into()).map(|id| id as u32)
}

fn parts(field: &JsonField) -> Result<RawPrompt, ApiError> {
    let mut members = field.members()?;
    let prompt = if let Some(text) = members.remove("text") {
        let mut flag = |name| members.remove(name).map_or(Ok(true), |flag| flag.bool());
        whole(text.text(usize::MAX)?, flag("add_special")?, flag("parse_special")?)
    } else {
        let prefix = text(field, &mut members, "prefix")?;
        let suffix = text(field, &mut members, "suffix")?;
        let most = bound(field.bounds, FILES);
        let files = members.remove(FILES).map_or(Ok(Vec::new()), |files| files.items(most))?;
        let files = files.iter().map(file).collect::<Result<_, _>>()?;
        RawPrompt::FillIn { prefix, suffix, files }
    };
    refuse_rest(&members).map(|()| prompt)
}

fn file(field: &JsonField) -> Result<ProjectFile, ApiError> {
    let mut members = field.members()?;
    let (name, text) = (text(field, &mut members, "name")?, text(field, &mut members, "text")?);
    refuse_rest(&members).map(|()| ProjectFile { name, text })
}

/// A text within the bound of the body.
fn text<'a>(
    of: &JsonField,
    members: &mut BTreeMap<&'a str, JsonField<'a>>,
    name: &str,
) -> Result<String, ApiError> {
    required(of, members, name)?.text(usize::MAX).map(str::to_owned)
}

/// Refuses what asks for a conversation beside a raw prompt. What is meant for a template alone has
/// no effect.
pub(super) fn check(
    input: &mut GenerationInput,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    let refuse =
        |name: &str| Err(ApiError::invalid(name, format!("{name} cannot go with {NAME}.")));
    if !input.messages.is_empty() {
        return refuse("messages");
    }
    if input.tools.is_some() {
        return refuse("tools");
    }
    if input.effort.take().is_some() {
        ignored.push("reasoning_effort".into());
    }
    if !std::mem::take(&mut input.template_variables).is_empty() {
        ignored.push("chat_template_kwargs".into());
    }
    Ok(())
}
