//! What the body of a completion request may have. `chat_request.json` states it once, as JSON
//! Schema: the parser reads it here, and so does the public document.
//!
//! `null` means absent, under any name: every optional member may be null, and so may unknown
//! members. The file leaves that out, and the members that `SAMPLING_NUMBERS` lists.
//!
//! Keywords with `x-` before them are for the parser alone, and go before the plain ones. Besides:
//! `x-must`, `x-few`: what is said of other values, and of too few items; `x-members`: what the
//! members of a map are called; `x-form`: what a text is, where a pattern says it to clients;
//! `x-bound`: under which name `ChatBounds` may have another number of items or characters;
//! `x-by-hand`: shapes that no table tells apart, or that depend on other members. Their readers
//! check them.

use super::json::{JsonField, JsonTree, missing, refuse_rest};
use crate::error::ApiError;
use cresset_engine::{NumberField, SAMPLING_NUMBERS, SamplingNumber};
use cresset_text::is_of_name;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// The only form of a UUID that is read.
pub const UUID: &str = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$";
pub const BODY: &str = "ChatCompletionRequest";
/// The description of members that are checked and ignored.
const IGNORED: &str = "Has no effect.";

static SCHEMAS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let read = serde_json::from_str(include_str!("chat_request.json"));
    let mut schemas: Map<String, Value> = read.expect("invariant: the file has schemas by name");
    if let Some(members) = schemas[BODY]["properties"].as_object_mut() {
        let place = members.keys().position(|name| name == "seed").unwrap_or_default();
        for number in SAMPLING_NUMBERS.iter().rev() {
            members.shift_insert(place, number.name.to_owned(), sampling_member(number));
        }
    }
    schemas
});

fn sampling_member(number: &SamplingNumber) -> Value {
    let whole = |bound: f64| match bound as i64 {
        whole if (whole as f64 - bound).abs() <= 0.0 => json!(whole),
        _ => json!(bound),
    };
    let (kind, format) = match number.field {
        NumberField::Count(_) => ("integer", "int64"),
        NumberField::Real(_) | NumberField::RealAbove(_) => ("number", "double"),
    };
    let mut member = json!({ "type": kind, "format": format });
    if let Some(about) = number.about {
        member["description"] = json!(about);
    }
    let bounds = match number.field {
        NumberField::RealAbove(_) => [("maximum", number.most), ("exclusiveMinimum", number.least)],
        _ => [("minimum", number.least), ("maximum", number.most)],
    };
    for (name, bound) in bounds {
        member[name] = whole(bound);
    }
    member
}

/// A schema by its name in the document.
pub(super) fn schema(name: &str) -> &'static Value {
    &SCHEMAS[name]
}

/// The members of the body.
pub(super) fn body_members() -> &'static Value {
    &schema(BODY)["properties"]
}

/// All schemas as the public document has them.
pub fn published() -> Map<String, Value> {
    SCHEMAS.iter().map(|(name, schema)| (name.clone(), without_marks(schema))).collect()
}

/// The schema without the marks for the parser, and with the rule of nulls.
fn without_marks(schema: &Value) -> Value {
    let keywords = match schema {
        Value::Object(keywords) => keywords,
        Value::Array(items) => return items.iter().map(without_marks).collect(),
        _ => return schema.clone(),
    };
    let plain = keywords.iter().filter(|(keyword, _)| !keyword.starts_with("x-"));
    let mut all: Map<_, _> = plain.map(|(name, it)| (name.clone(), without_marks(it))).collect();
    if let (true, Some(Value::Object(members))) =
        (schema["type"] == "object", all.get_mut("properties"))
    {
        let optional = members.iter_mut().filter(|(name, _)| !names(&schema["required"], name));
        optional.for_each(|(_, member)| *member = or_null(member.take()));
        all.insert("additionalProperties".into(), json!({ "type": "null" }));
    }
    Value::Object(all)
}

fn or_null(mut member: Value) -> Value {
    if let Some(kind) = member.get_mut("type") {
        *kind = json!([kind, "null"]);
        if let Some(Value::Array(words)) = member.get_mut("enum") {
            words.push(Value::Null);
        }
    } else if let Value::Object(keywords) = &mut member
        && (keywords.contains_key("$ref") || keywords.contains_key("anyOf"))
    {
        let about = keywords.shift_remove("description");
        member = json!({ "anyOf": [member, { "type": "null" }] });
        if let Some(about) = about {
            member["description"] = about;
        }
    }
    member
}

/// A keyword of a schema, as the parser reads it.
fn rule<'a>(schema: &'a Value, keyword: &str) -> &'a Value {
    schema.get(format!("x-{keyword}")).unwrap_or(&schema[keyword])
}

fn must(schema: &Value) -> &str {
    schema["x-must"].as_str().unwrap_or_default()
}

fn names(list: &Value, name: &str) -> bool {
    list.as_array().is_some_and(|all| all.iter().any(|one| one == name))
}

/// A bound of lengths, items or members.
pub(super) fn count(schema: &Value, keyword: &str) -> Option<usize> {
    rule(schema, keyword).as_u64().map(|count| count as usize)
}

/// The most items or characters that a field may have.
pub(super) fn most(schema: &Value, keyword: &str, field: &JsonField) -> Option<usize> {
    let other = schema["x-bound"].as_str().and_then(|name| field.bounds.get(name).copied());
    other.or_else(|| count(schema, keyword))
}

pub(super) fn only(field: &JsonField, holds: bool, must: &str) -> Result<(), ApiError> {
    if holds { Ok(()) } else { Err(field.refuse(must)) }
}

/// Refuses a value that the schema does not allow. Paths of members that have no effect go to
/// `ignored`.
pub(super) fn check(
    schema: &Value,
    field: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    let schema = resolved(schema);
    if schema["x-by-hand"] == true {
        return Ok(());
    }
    if schema["description"] == IGNORED {
        ignored.push(field.path.clone());
    }
    if let Some(shapes) = rule(schema, "anyOf").as_array() {
        let found = shapes.iter().find(|shape| shape["type"] == type_of(field.value));
        return check(found.ok_or_else(|| field.refuse(must(schema)))?, field, ignored);
    }
    match schema["type"].as_str().unwrap_or_default() {
        "boolean" => drop(field.bool()?),
        "integer" => {
            let bound = |keyword: &str| schema[keyword].as_i64().unwrap_or_default();
            field.integer(bound("minimum")..=bound("maximum"))?;
        }
        "number" => check_number(schema, field)?,
        "string" => check_text(schema, field)?,
        "array" => check_items(schema, field, ignored)?,
        "object" if schema["properties"].is_object() => {
            check_members(schema, field, field.members()?, ignored)?;
        }
        "object" => check_map(schema, field, ignored)?,
        _ => {}
    }
    only(field, words(schema).is_empty() || is_word(schema, field.value), must(schema))
}

fn resolved(schema: &Value) -> &Value {
    let name = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next());
    name.map_or(schema, |name| self::schema(name))
}

fn type_of(value: &JsonTree) -> &'static str {
    match value {
        JsonTree::Null => "null",
        JsonTree::Bool(_) => "boolean",
        JsonTree::Number(_) => "integer",
        JsonTree::String(_) => "string",
        JsonTree::Array(_) => "array",
        JsonTree::Object(_) => "object",
    }
}

fn check_number(schema: &Value, field: &JsonField) -> Result<(), ApiError> {
    let bound = |keyword: &str| schema[keyword].as_f64().unwrap_or_default();
    let (least, most) = (bound("minimum"), bound("maximum"));
    let Some(least) = schema["exclusiveMinimum"].as_f64() else {
        return field.number(least..=most).map(drop);
    };
    let holds = field.number(least..=most).is_ok_and(|number| number > least);
    only(field, holds, &format!("must be above {least} and at most {most}"))
}

fn check_text(schema: &Value, field: &JsonField) -> Result<(), ApiError> {
    if schema["format"] == "uuid" {
        return field.uuid().map(drop);
    }
    let most = self::most(schema, "maxLength", field);
    // Of words, a length tells that other texts and values are refused as such.
    if most.is_none() && !words(schema).is_empty() {
        return Ok(());
    }
    let text = field.text(most.unwrap_or(usize::MAX))?;
    only(field, text.len() >= count(schema, "minLength").unwrap_or(0), "must not be empty")?;
    only(field, has_form(schema, text), must(schema))
}

/// Whether a text is what its pattern says.
fn has_form(schema: &Value, text: &str) -> bool {
    match schema["x-form"].as_str().unwrap_or_default() {
        "function name" => !text.is_empty() && text.chars().all(is_of_name),
        // An id has one spelling: `5`, `05` and `+5` would be one token with three biases.
        "token id" => text.parse().is_ok_and(|id: u32| id.to_string() == text),
        "variable" => text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'),
        _ => true,
    }
}

/// The words that a schema lists, if it lists any.
fn words(schema: &Value) -> Vec<&Value> {
    let all = schema["enum"].as_array().into_iter().flatten();
    all.chain(schema.get("const")).collect()
}

/// Whether a value is one of the schema's words.
pub(super) fn is_word(schema: &Value, value: &JsonTree) -> bool {
    words(schema).iter().any(|word| match value {
        JsonTree::Bool(flag) => *word == flag,
        _ => *word == value.text(),
    })
}

fn check_items(
    schema: &Value,
    field: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    let items = field.items(most(schema, "maxItems", field).unwrap_or(usize::MAX))?;
    let enough = items.len() >= count(schema, "minItems").unwrap_or(0);
    only(field, enough, schema["x-few"].as_str().unwrap_or_default())?;
    let mut checked = items.iter().map(|item| check(&schema["items"], item, ignored));
    match must(schema) {
        "" => checked.collect(),
        must => only(field, checked.all(|item| item.is_ok()), must),
    }
}

fn check_map(schema: &Value, field: &JsonField, ignored: &mut Vec<String>) -> Result<(), ApiError> {
    let members = field.members()?;
    let most = count(schema, "maxProperties").unwrap_or(usize::MAX);
    let called = schema["x-members"].as_str().unwrap_or("entries");
    only(field, members.len() <= most, &format!("must have at most {most} {called}"))?;
    let names = &schema["propertyNames"];
    let longest = count(names, "maxLength").unwrap_or(usize::MAX);
    members.into_iter().try_for_each(|(name, value)| {
        let holds = name.chars().count() <= longest && has_form(names, name);
        only(field, holds, must(schema))?;
        check(&schema["additionalProperties"], &value, ignored)
    })
}

/// Checks the members of an object in the order of its schema, then that there are no others, then
/// what is in objects.
pub(super) fn check_members(
    schema: &Value,
    of: &JsonField,
    mut members: BTreeMap<&str, JsonField>,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    let is_deep = |member: &Value| {
        member["type"] == "object" || member["type"].is_null() && words(member).is_empty()
    };
    let all = schema["properties"].as_object().into_iter().flatten();
    let (deep, flat): (Vec<_>, Vec<_>) = all.partition(|(_, member)| is_deep(member));
    let mut later = Vec::new();
    for (name, member) in flat.into_iter().chain(deep) {
        match members.remove(name.as_str()) {
            Some(found) if is_deep(member) => later.push((member, found)),
            Some(found) => check(member, &found, ignored)?,
            None if names(rule(schema, "required"), name) => return Err(missing(of, name)),
            None => {}
        }
    }
    refuse_rest(&members)?;
    later.iter().try_for_each(|(member, found)| check(member, found, ignored))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::chat_request::ChatRequest;
    use uuid::Uuid;

    fn parsed(name: &str, value: &Value) -> Result<ChatRequest, ApiError> {
        let mut body = json!({ "model": Uuid::nil(), "messages": [{ "role": "user", "content": "hi" }], "logprobs": true });
        body[name] = value.clone();
        ChatRequest::parse(&JsonTree::parse(body.to_string().as_bytes()).unwrap())
    }

    /// Whether the parser takes a body with this member.
    fn accepts(name: &str, value: &Value) -> bool {
        parsed(name, value).is_ok()
    }

    /// Values at each bound of a schema and just beyond it, and whether they are inside.
    fn probes(schema: &Value) -> Vec<(Value, bool)> {
        let mut all: Vec<(Value, bool)> =
            schema["anyOf"].as_array().into_iter().flatten().flat_map(probes).collect();
        let is = |kind: &str| {
            schema["type"] == kind
                || schema["type"].as_array().is_some_and(|all| all.contains(&json!(kind)))
        };
        let mut put = |value: Value, inside: bool| all.push((value, inside));
        for (bound, step) in [("minimum", -1), ("maximum", 1)] {
            if let Some(bound) = schema[bound].as_i64().filter(|_| is("integer")) {
                put(json!(bound), true);
                bound.checked_add(step).into_iter().for_each(|beyond| put(json!(beyond), false));
            } else if let Some(bound) = schema[bound].as_f64() {
                put(json!(bound), true);
                put(json!(bound + step as f64 / 256.0), false);
            }
        }
        if let Some(bound) = schema["exclusiveMinimum"].as_f64() {
            put(json!(bound), false);
            put(json!(f64::from_bits(1)), true);
        }
        if let Some(most) = schema["maxLength"].as_u64() {
            put(json!("é".repeat(most as usize)), true);
            put(json!("é".repeat(most as usize + 1)), false);
            put(json!(""), schema["minLength"].is_null());
        }
        if let Some(most) = schema["maxItems"].as_u64() {
            let item = schema["items"].get("const").cloned().unwrap_or(json!("x"));
            put(json!(vec![item.clone(); most as usize]), true);
            put(json!(vec![item; most as usize + 1]), false);
        }
        if let Some(words) = schema["enum"].as_array() {
            for word in words {
                put(word.clone(), true);
            }
            put(json!("no such word"), false);
        } else if is("boolean") {
            put(json!(true), true);
            put(json!(false), true);
            put(json!(0), false);
        }
        if is("null") {
            put(Value::Null, true);
        }
        all
    }

    #[test]
    fn the_parser_keeps_every_bound() {
        let schema = &published()[BODY];
        let mut probed = 0;
        for (name, property) in schema["properties"].as_object().unwrap() {
            let others = [
                "messages",
                "tools",
                "tool_choice",
                "continue_final_message",
                "guided_whitespace_pattern",
            ];
            let by_itself = others.contains(&name.as_str());
            for (value, inside) in probes(property).into_iter().filter(|_| !by_itself) {
                assert_eq!(accepts(name, &value), inside, "{name}: {value}");
                probed += 1;
            }
        }
        assert!(probed > 100, "{probed}");
        assert!(accepts("no_such_member", &Value::Null) && !accepts("no_such_member", &json!(1)));
    }

    /// A misspelt keyword would be a bound that nobody keeps.
    #[test]
    fn the_parser_knows_every_keyword() {
        const KNOWN: &str = "$ref type format description pattern properties required title if then \
            const enum items minItems maxItems minLength maxLength minimum maximum \
            exclusiveMinimum anyOf additionalProperties maxProperties propertyNames x-must x-few \
            x-members x-form x-bound x-by-hand x-required x-anyOf x-minLength x-maxLength";
        fn look(schema: &Value) {
            for (keyword, value) in schema.as_object().into_iter().flatten() {
                assert!(KNOWN.split_whitespace().any(|known| known == keyword), "{keyword}");
                match value {
                    Value::Object(members) if keyword == "properties" => {
                        members.values().for_each(look);
                    }
                    Value::Array(items) => items.iter().for_each(look),
                    one => look(one),
                }
            }
        }
        SCHEMAS.values().for_each(look);
    }

    /// Each member changes the request, or is named as one that does not.
    #[test]
    fn every_member_has_an_effect() {
        let shown = |name: &str, value: &Value| Some(format!("{:?}", parsed(name, value).ok()?));
        let plain = shown("user", &Value::Null);
        let more = json!(["x", {}, { "5": 1 }, { "5": "x" }, { "include_usage": true }]);
        for (name, member) in body_members().as_object().unwrap() {
            let mut values: Vec<Value> =
                probes(member).into_iter().map(|(value, _)| value).collect();
            values.extend(more.as_array().unwrap().clone());
            let changes = |value: &Value| shown(name, value).is_some_and(|it| Some(it) != plain);
            let others =
                ["model", "messages", "n", "continue_final_message", "guided_whitespace_pattern"];
            let by_itself = others.contains(&name.as_str());
            assert!(
                values.iter().any(changes) || by_itself || member["x-by-hand"] == true,
                "{name}"
            );
        }
    }
}
