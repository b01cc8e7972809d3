//! Finds schemas that no finite value keeps to, such as two objects that require each other.

use super::tree::resolve;
use super::{SchemaRefused, inside};
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Refuses a schema without finite values. Parts of it that have none, and are not needed, are made
/// `false`.
pub(super) fn check(schema: &mut Value) -> Result<(), SchemaRefused> {
    let root = schema.clone();
    let mut finite = Finite { root: &root, targets: HashMap::new() };
    finite.learn();
    if schema.is_object() && !finite.has_values(schema) {
        let why = "no finite value keeps to it: make a member or an item optional";
        return Err(SchemaRefused::new(&finite.first_endless(schema, ""), why));
    }
    prune(schema, &finite);
    Ok(())
}

struct Finite<'r> {
    root: &'r Value,
    /// Whether the targets of references have finite values, as far as is known.
    targets: HashMap<String, bool>,
}

impl Finite<'_> {
    /// Finds the targets that have values, until no more are found. It goes forth and back, because
    /// definitions mostly follow each other.
    fn learn(&mut self) {
        let mut references = Vec::new();
        collect(self.root, &mut references);
        let mut open: Vec<(String, Option<&Value>)> = Vec::new();
        for reference in references {
            if self.targets.insert(reference.clone(), false).is_none() {
                let target = resolve(self.root, &reference);
                open.push((reference, target));
            }
        }
        let mut left = usize::MAX;
        while open.len() < left {
            left = open.len();
            open.reverse();
            open.retain(|(reference, target)| {
                let found = target.is_none_or(|target| self.has_values(target));
                self.targets.insert(reference.clone(), found);
                !found
            });
        }
    }

    fn has_values(&self, schema: &Value) -> bool {
        let Value::Object(members) = schema else { return schema != &Value::Bool(false) };
        let reference = members.get("$ref").and_then(Value::as_str);
        let list = |name: &str| members.get(name).and_then(Value::as_array);
        reference.is_none_or(|reference| self.targets.get(reference).copied().unwrap_or(true))
            && list("allOf").is_none_or(|all| all.iter().all(|one| self.has_values(one)))
            && ["anyOf", "oneOf"]
                .into_iter()
                .all(|name| list(name).is_none_or(|all| all.iter().any(|one| self.has_values(one))))
            && (may_be_another(members) || self.has_parts(members))
    }

    /// Whether an object can have the members that it must, and a list its items.
    fn has_parts(&self, members: &Map<String, Value>) -> bool {
        let part = |group: &str, name: &str| members.get(group).and_then(|all| all.get(name));
        let required = members.get("required").and_then(Value::as_array);
        let mut required = required.into_iter().flatten().filter_map(Value::as_str);
        let least = members.get("minItems").and_then(Value::as_u64).unwrap_or(0) as usize;
        let first =
            members.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        required.all(|name| part("properties", name).is_none_or(|one| self.has_values(one)))
            && first.iter().take(least).all(|item| self.has_values(item))
            && (least <= first.len()
                || members
                    .get("items")
                    .is_none_or(|items| items.is_array() || self.has_values(items)))
    }

    /// The innermost place that has no values.
    fn first_endless(&self, schema: &Value, place: &str) -> String {
        let Some(members) = schema.as_object() else { return place.to_owned() };
        let required = members.get("required").and_then(Value::as_array);
        for name in required.into_iter().flatten().filter_map(Value::as_str) {
            let member = members.get("properties").and_then(|all| all.get(name));
            if let Some(member) = member.filter(|member| !self.has_values(member)) {
                return self.first_endless(member, &inside(&inside(place, "properties"), name));
            }
        }
        place.to_owned()
    }
}

/// Whether values of other types than objects and lists keep to a schema.
fn may_be_another(members: &Map<String, Value>) -> bool {
    let is_other = |kind: &Value| kind != "object" && kind != "array";
    match members.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(is_other),
        Some(kind) => is_other(kind),
        None => !members.contains_key("properties"),
    }
}

fn collect(value: &Value, references: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            let reference = members.get("$ref").and_then(Value::as_str);
            references.extend(reference.map(str::to_owned));
            members.values().for_each(|inner| collect(inner, references));
        }
        Value::Array(items) => items.iter().for_each(|inner| collect(inner, references)),
        _ => {}
    }
}

/// Makes optional parts without values `false`, so that no answer begins one.
fn prune(schema: &mut Value, finite: &Finite<'_>) {
    let Value::Object(members) = schema else { return };
    for (keyword, value) in members {
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties", Value::Object(named)) => {
                for part in named.values_mut() {
                    cut(part, finite);
                }
            }
            ("items" | "additionalProperties", part @ Value::Object(_)) => cut(part, finite),
            ("anyOf" | "oneOf", Value::Array(parts)) => {
                for part in parts {
                    cut(part, finite);
                }
            }
            ("const" | "enum", _) => {}
            ("$defs" | "definitions", Value::Object(named)) => {
                named.values_mut().for_each(|part| prune(part, finite));
            }
            (_, Value::Array(parts)) => parts.iter_mut().for_each(|part| prune(part, finite)),
            (_, part) => prune(part, finite),
        }
    }
}

fn cut(part: &mut Value, finite: &Finite<'_>) {
    if finite.has_values(part) {
        prune(part, finite);
    } else {
        *part = Value::Bool(false);
    }
}
