//! What is refused or left out of a JSON schema before it is compiled: a client must not take an
//! ignored rule for a kept one.

use super::json::{JsonField, JsonTree};
use crate::error::ApiError;
use cresset_text::CheckedSchema;
use std::collections::BTreeMap;

/// Members of all `properties` of a schema together. Three times as many, all optional, were seen
/// to take half a second to compile.
const MAX_PROPERTIES: usize = 1_000;
/// Keywords that only describe, or that name the schema.
const ANNOTATIONS: [&str; 14] = [
    "$anchor",
    "$comment",
    "$id",
    "$schema",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentEncoding",
    "contentMediaType",
    "id",
];
/// Keywords whose value is a schema.
const SCHEMA: [&str; 11] = [
    "additionalProperties",
    "additionalItems",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
];
/// Keywords whose value is an array of schemas.
const SCHEMAS: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
/// Keywords whose value is an object of named schemas.
const NAMED_SCHEMAS: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];
/// All other rules that answers are kept to: their value is no schema.
const VALUES: [&str; 18] = [
    "$ref",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "pattern",
    "required",
    "type",
];
/// Rules that are written with others where formats are made.
const REWRITTEN: [&str; 2] = ["nullable", "uniqueItems"];
/// Shorter keywords are near to too many words that are none.
const SHORTEST_TYPO: usize = 6;
/// Changed, missing or added letters that still count as a misspelt keyword, and letters of the
/// keyword from which on one more counts.
const TYPO: usize = 1;
const LONG_KEYWORD: usize = 9;

/// Which rules of a schema must be kept to.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Keeping {
    /// As OpenAI defines it, every object names all its properties, requires them and allows no
    /// others.
    Strict,
    /// A rule that cannot be kept to is refused.
    Whole,
    /// A rule that cannot be kept to is left out: the schema only advises the model.
    Loosened,
}

/// A schema within its bounds. Refuses one with rules that would not be kept, and
/// appends the paths of keywords without an effect to `ignored`.
pub(super) fn read(
    field: &JsonField,
    keeping: Keeping,
    ignored: &mut Vec<String>,
) -> Result<CheckedSchema, ApiError> {
    SchemaWalk { keeping, properties: 0, ignored }.schema(field)?;
    let checked = CheckedSchema::of(&field.value.in_order(), keeping == Keeping::Loosened);
    let checked = checked.map_err(|refused| {
        let place = at(field, &refused.place);
        place.refuse(&format!("cannot be kept to: {}", refused.why))
    })?;
    let places = checked.ignored.iter().map(|place| at(field, place).path);
    ignored.extend(places);
    Ok(checked)
}

/// The part of a schema that a JSON pointer means, or the innermost one that there is.
fn at<'a>(schema: &JsonField<'a>, pointer: &str) -> JsonField<'a> {
    let mut found = schema.clone();
    for step in pointer.split('/').skip(1) {
        let name = step.replace("~1", "/").replace("~0", "~");
        let (path, value) = match found.value {
            JsonTree::Object(members) => (found.path_of(&name), members.get(&name)),
            JsonTree::Array(items) => {
                let place = name.parse::<usize>().ok();
                (format!("{}[{name}]", found.path), place.and_then(|place| items.get(place)))
            }
            _ => break,
        };
        let Some(value) = value else { break };
        found = JsonField { path, value, ..found };
    }
    found
}

struct SchemaWalk<'a> {
    keeping: Keeping,
    properties: usize,
    ignored: &'a mut Vec<String>,
}

impl SchemaWalk<'_> {
    fn schema(&mut self, field: &JsonField) -> Result<(), ApiError> {
        if let JsonTree::Bool(_) = field.value {
            return Ok(());
        }
        let members = field.all_members()?;
        tuples(&members)?;
        for (keyword, value) in members {
            self.keyword(keyword, &value)?;
        }
        if self.keeping == Keeping::Strict { strict_object(field) } else { Ok(()) }
    }

    fn keyword(&mut self, keyword: &str, value: &JsonField) -> Result<(), ApiError> {
        if SCHEMAS.contains(&keyword) && matches!(value.value, JsonTree::Array(_)) {
            return value.items(usize::MAX)?.iter().try_for_each(|item| self.schema(item));
        }
        if SCHEMA.contains(&keyword) {
            return self.schema(value);
        }
        if NAMED_SCHEMAS.contains(&keyword) {
            return self.named(keyword, value);
        }
        if [&VALUES[..], &ANNOTATIONS, CheckedSchema::NOT_KEPT, &REWRITTEN]
            .iter()
            .any(|all| all.contains(&keyword))
        {
            return Ok(());
        }
        self.unknown(keyword, value)
    }

    fn named(&mut self, keyword: &str, value: &JsonField) -> Result<(), ApiError> {
        let members = value.all_members()?;
        self.properties += if keyword == "properties" { members.len() } else { 0 };
        if self.properties > MAX_PROPERTIES {
            return Err(value.refuse(&format!("has more than {MAX_PROPERTIES} properties in all")));
        }
        members.values().try_for_each(|member| self.schema(member))
    }

    fn unknown(&mut self, keyword: &str, value: &JsonField) -> Result<(), ApiError> {
        if let Some(meant) = meant_by(keyword).filter(|_| self.keeping != Keeping::Loosened) {
            return Err(value.refuse(&format!("is no keyword of JSON Schema; {meant} is")));
        }
        self.ignored.push(value.path.clone());
        Ok(())
    }
}

/// The rule that a misspelt keyword stands for. A word that begins with no letter is meant as it
/// is: so are keywords of other tools named, or put out of use.
fn meant_by(keyword: &str) -> Option<&'static str> {
    let rules = [&VALUES[..], &SCHEMA, &SCHEMAS, &NAMED_SCHEMAS];
    let rules = [&rules[..], &[CheckedSchema::NOT_KEPT, &REWRITTEN]].concat().concat();
    let near = |rule: &&str| {
        let typo = TYPO + usize::from(rule.len() >= LONG_KEYWORD);
        rule.len() >= SHORTEST_TYPO
            && strsim::osa_distance(&rule.to_lowercase(), &keyword.to_lowercase()) <= typo
    };
    rules.into_iter().find(near).filter(|_| !keyword.starts_with(['_', '$']))
}

/// Refuses two spellings of a tuple in one schema: the compiler takes one and ignores the other.
fn tuples(members: &BTreeMap<&str, JsonField>) -> Result<(), ApiError> {
    let Some(new) = members.get("prefixItems") else { return Ok(()) };
    let items = members.get("items").map(|items| items.value);
    let mixed =
        members.contains_key("additionalItems") || matches!(items, Some(JsonTree::Array(_)));
    if mixed {
        return Err(new.refuse("goes with items that are a schema, and without additionalItems"));
    }
    Ok(())
}

fn strict_object(field: &JsonField) -> Result<(), ApiError> {
    let members = field.all_members()?;
    let Some(properties) = members.get("properties") else { return Ok(()) };
    let closed = members.get("additionalProperties").map(|field| field.value);
    if closed != Some(&JsonTree::Bool(false)) {
        return Err(field.refuse("needs additionalProperties: false, because strict is true"));
    }
    let required = members.get("required").map(|field| field.items(usize::MAX)).transpose()?;
    let required = required.unwrap_or_default();
    for name in properties.all_members()?.keys() {
        let is_required = |item: &JsonField| item.text(usize::MAX) == Ok(*name);
        if !required.iter().any(is_required) {
            let path = properties.path_of(name);
            return Err(field.refuse(&format!("must require {path}, because strict is true")));
        }
    }
    Ok(())
}
