//! Closes objects that name their members: what a schema neither names nor allows by a rule is not
//! written. Small models invent members without end, and a closed object keeps to the schema.

use super::tree::{LISTS, is_alone, resolve, visit};
use super::{SchemaRefused, inside};
use serde_json::{Map, Value, json};

/// Definitions that are copied into combined rules.
const MOST_COPIES: usize = 100;
/// Keywords that say which other members there may be.
const DECIDING: [&str; 2] = ["additionalProperties", "patternProperties"];

/// Brings combined rules together, and closes objects unless they may stay open.
pub(super) fn close(schema: &mut Value, open: bool) -> Result<(), SchemaRefused> {
    if open {
        return Ok(());
    }
    let root = schema.clone();
    let (mut closed, mut left) = (Vec::<String>::new(), MOST_COPIES);
    visit(schema, "", &mut |schema, place| {
        let Value::Object(members) = schema else { return Ok(()) };
        // Parts of combined rules were looked at with the whole.
        if closed.iter().any(|whole| is_part(place, whole)) {
            return Ok(());
        }
        if combines(members) {
            closed.push(place.to_owned());
            unite(members, &root, place, &mut left).map_err(|refused| {
                let outermost = closed.iter().find(|whole| refused.place.starts_with(*whole));
                let place = outermost.cloned().unwrap_or(refused.place);
                SchemaRefused { place, ..refused }
            })?;
        } else if members.contains_key("properties") && !decides(members) {
            shut(members, Vec::new());
        }
        Ok(())
    })
}

/// Bounds the members of objects that have only those that they must, and any others.
pub(super) fn bound_members(schema: &mut Value, most: usize) -> Result<(), SchemaRefused> {
    visit(schema, "", &mut |schema, _| {
        let Value::Object(members) = schema else { return Ok(()) };
        let is_object = members.get("type").is_some_and(|kind| match kind {
            Value::Array(kinds) => kinds.iter().any(|kind| kind == "object"),
            kind => kind == "object",
        });
        let named = members.get("properties").and_then(Value::as_object);
        let required = members.get("required").and_then(Value::as_array);
        let required = required.map_or(&[][..], Vec::as_slice);
        let is_required = |name: &String| required.iter().any(|one| one == name.as_str());
        let is_shut = members.get("additionalProperties") == Some(&Value::Bool(false))
            && !members.contains_key("patternProperties");
        let bounds = members.contains_key("maxProperties");
        if is_object && !is_shut && !bounds && named.is_none_or(|all| all.keys().all(is_required)) {
            let least = members.get("minProperties").and_then(Value::as_u64).unwrap_or(0) as usize;
            let most = required.len() + most.max(least);
            members.insert("maxProperties".into(), most.into());
        }
        Ok(())
    })
}

/// Whether a place is one of the schemas that the whole combines, and not a member of one.
fn is_part(place: &str, whole: &str) -> bool {
    let Some(rest) = place.strip_prefix(whole) else { return false };
    let mut steps = rest.split('/').skip(1).peekable();
    steps.peek().is_some()
        && steps.all(|step| LISTS.contains(&step) || step.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Whether rules about members of one object stand in several schemas.
fn combines(members: &Map<String, Value>) -> bool {
    let one_list = ["anyOf", "oneOf"].iter().filter(|list| members.contains_key(**list)).count();
    let others = ["properties", "allOf", "$ref", "required"];
    if one_list == 1 && !others.iter().any(|name| members.contains_key(*name)) {
        return false;
    }
    let beside = |keyword: &&str| members.contains_key(*keyword) && !is_alone(members, keyword);
    let several = members.get("allOf").and_then(Value::as_array).is_some_and(|all| all.len() > 1);
    several || ["allOf", "anyOf", "oneOf", "$ref"].iter().any(beside)
}

fn decides(members: &Map<String, Value>) -> bool {
    DECIDING.iter().any(|keyword| members.contains_key(*keyword))
}

/// Puts copies in the places of references, so that a definition stays closed where it stands
/// alone, and closes the whole.
fn unite(
    members: &mut Map<String, Value>,
    root: &Value,
    place: &str,
    left: &mut usize,
) -> Result<(), SchemaRefused> {
    if let Some(reference) = members.remove("$ref") {
        demand(members, json!({ "$ref": reference }));
    }
    let (mut names, mut is_decided) = (Vec::new(), false);
    for keyword in LISTS {
        let all = members.get_mut(keyword).and_then(Value::as_array_mut);
        for (at, part) in all.into_iter().flatten().enumerate() {
            let place = inside(&inside(place, keyword), &at.to_string());
            inline(part, root, &place, left)?;
            look(part, &mut names, &mut is_decided);
        }
    }
    if let Some(named) = members.get("properties").and_then(Value::as_object) {
        names.extend(named.keys().cloned());
    }
    if names.is_empty() || is_decided || decides(members) {
        return Ok(());
    }
    shut(members, names);
    Ok(())
}

/// Lets one more schema hold besides the others.
fn demand(members: &mut Map<String, Value>, schema: Value) {
    let all = members.entry("allOf").or_insert_with(|| json!([]));
    if let Some(all) = all.as_array_mut() {
        all.insert(0, schema);
    }
}

/// Allows these members, those that are required, and no others than are named.
fn shut(members: &mut Map<String, Value>, mut names: Vec<String>) {
    let required = members.get("required").and_then(Value::as_array);
    let required = required.into_iter().flatten().filter_map(Value::as_str);
    names.extend(required.map(str::to_owned));
    let properties = members.entry("properties").or_insert_with(|| json!({}));
    if let Some(properties) = properties.as_object_mut() {
        for name in names {
            properties.entry(name).or_insert(Value::Bool(true));
        }
    }
    members.insert("additionalProperties".into(), false.into());
}

/// Replaces the references of a part, and of its own parts, by what they mean.
fn inline(
    part: &mut Value,
    root: &Value,
    place: &str,
    left: &mut usize,
) -> Result<(), SchemaRefused> {
    let Some(members) = part.as_object_mut() else { return Ok(()) };
    if let Some(reference) = members.get("$ref").and_then(Value::as_str).map(str::to_owned) {
        let Some(meant) = resolve(root, &reference) else { return Ok(()) };
        let why = "its combined rules refer to each other: write them once, without references";
        *left = left.checked_sub(1).ok_or_else(|| SchemaRefused::new(place, why))?;
        if is_alone(members, "$ref") {
            *part = meant.clone();
            return inline(part, root, place, left);
        }
        members.remove("$ref");
        demand(members, meant.clone());
    }
    for keyword in LISTS {
        let all = members.get_mut(keyword).and_then(Value::as_array_mut);
        for part in all.into_iter().flatten() {
            inline(part, root, place, left)?;
        }
    }
    Ok(())
}

/// The members that a part names, and whether it says itself which others there may be.
fn look(part: &Value, names: &mut Vec<String>, is_decided: &mut bool) {
    let Some(members) = part.as_object() else { return };
    *is_decided |= decides(members);
    let required = members.get("required").and_then(Value::as_array);
    names.extend(required.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned));
    if let Some(named) = members.get("properties").and_then(Value::as_object) {
        names.extend(named.keys().cloned());
    }
    for keyword in LISTS {
        let all = members.get(keyword).and_then(Value::as_array);
        all.into_iter().flatten().for_each(|part| look(part, names, is_decided));
    }
}
