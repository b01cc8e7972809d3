//! Negations and conditions, written as rules of types and of lists of values.

use super::rules::{LEAVE_OUT, Members, NEVER, Rules, is_everything, is_told_apart, require};
use super::tree::{has_rules_beside, is_alone};
use serde_json::{Value, json};

const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

/// The few negations that types and lists of values can say.
pub(super) fn not(_: &mut Rules<'_>, members: &mut Members) -> Result<(), String> {
    let refused = || Err(LEAVE_OUT.to_owned());
    let Some(mut negated) = members.get("not").cloned() else { return Ok(()) };
    if is_everything(&negated) {
        members.insert(NEVER.into(), Value::Null);
        return Ok(());
    }
    if negated == Value::Bool(false) {
        members.remove("not");
        return Ok(());
    }
    let Some(negated) = negated.as_object_mut() else { return refused() };
    let list = |value: &Value| match value {
        Value::Array(all) => all.clone(),
        one => vec![one.clone()],
    };
    if is_alone(negated, "type") {
        let without = list(&negated["type"]);
        if without.iter().any(|kind| kind == "integer") {
            return refused();
        }
        let all = members.get("type").map_or_else(|| TYPES.map(Value::from).to_vec(), list);
        let is_kept = |kind: &Value| {
            let family = if kind == "integer" { &Value::from("number") } else { kind };
            !without.contains(kind) && !without.contains(family)
        };
        let kept: Vec<Value> = all.into_iter().filter(is_kept).collect();
        members.insert("type".into(), kept.into());
    } else if is_alone(negated, "const") || is_alone(negated, "enum") {
        let without = negated.get("const").map(|one| vec![one.clone()]);
        let without = without.unwrap_or_else(|| list(&negated["enum"]));
        let Some(Value::Array(all)) = members.get_mut("enum") else { return refused() };
        if !without.iter().chain(all.iter()).all(is_told_apart) {
            return refused();
        }
        all.retain(|value| !without.contains(value));
    } else if is_alone(negated, "required") {
        let [Value::String(name)] = &list(&negated["required"])[..] else { return refused() };
        if !is_object(members) {
            return refused();
        }
        let properties = members.entry("properties").or_insert_with(|| json!({}));
        let Some(properties) = properties.as_object_mut() else { return refused() };
        properties.insert(name.clone(), false.into());
    } else {
        return refused();
    }
    members.remove("not");
    Ok(())
}

/// Whether only objects keep to a schema. One without a type becomes one of objects.
fn is_object(members: &mut Members) -> bool {
    members.entry("type").or_insert_with(|| "object".into()) == "object"
}

/// A condition on the value of one member, whose other values a list or a type names.
pub(super) fn conditional(_: &mut Rules<'_>, members: &mut Members) -> Result<(), String> {
    let branch = |name: &str| members.get(name).cloned().unwrap_or(Value::Bool(true));
    let (condition, then, otherwise) = (branch("if"), branch("then"), branch("else"));
    let always = match &condition {
        condition if is_everything(condition) => Some(then.clone()),
        Value::Bool(false) => Some(otherwise.clone()),
        _ if is_everything(&then) && is_everything(&otherwise) => Some(Value::Bool(true)),
        _ => None,
    };
    let rule = if let Some(rule) = always {
        rule
    } else {
        let refused = "a condition is only kept to on a required member that lists its values: \
                           use anyOf";
        let (name, values, others) = cases(&condition, members).ok_or(refused)?;
        if !is_object(members) {
            return Err(refused.into());
        }
        let case = |values: Vec<Value>, rule: Value| {
            let is_case = json!({ "properties": { name.clone(): { "enum": values } } });
            json!({ "allOf": [is_case, rule] })
        };
        json!({ "anyOf": [case(values, then), case(others, otherwise)] })
    };
    for keyword in ["if", "then", "else"] {
        members.remove(keyword);
    }
    if !is_everything(&rule) {
        require(members, rule);
    }
    Ok(())
}

/// The values that a schema lists.
fn listed(schema: &Value) -> Option<Vec<Value>> {
    match (schema.get("enum"), schema.get("const")) {
        (Some(Value::Array(values)), _) => Some(values.clone()),
        (_, Some(one)) => Some(vec![one.clone()]),
        _ if schema.get("type")? == "boolean" => Some(vec![true.into(), false.into()]),
        _ => None,
    }
}

/// The member of a condition, the values for which it holds, and the others.
fn cases(condition: &Value, members: &Members) -> Option<(String, Vec<Value>, Vec<Value>)> {
    let condition = condition.as_object()?;
    let is_known = |name: &String| ["properties", "required", "type"].contains(&name.as_str());
    let properties = condition.get("properties")?.as_object()?;
    let (name, tested) = properties.iter().next()?;
    let list = |value: Option<&Value>| value.and_then(Value::as_array).cloned().unwrap_or_default();
    let required = list(members.get("required"));
    let is_there = |name: &Value| required.contains(name);
    // What the condition says beside the values must hold anyway.
    let holds = condition.keys().all(is_known)
        && condition.get("type").is_none_or(|kind| kind == "object")
        && list(condition.get("required")).iter().all(is_there)
        && !has_rules_beside(tested.as_object()?, &["const", "enum", "type"]);
    if !holds || properties.len() > 1 || !is_there(&Value::from(name.as_str())) {
        return None;
    }
    let all = listed(members.get("properties")?.get(name)?)?;
    let tested = listed(tested)?;
    if !all.iter().chain(&tested).all(is_told_apart) {
        return None;
    }
    let (values, others) = all.into_iter().partition(|value| tested.contains(value));
    Some((name.clone(), values, others))
}
