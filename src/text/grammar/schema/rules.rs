//! Rules that the library does not know, written with those that it does.

use super::conditions::{conditional, not};
use super::tree::{LISTS, NAMED, is_alone, name_places, resolve};
use super::{SchemaRefused, fault_of_expression, formats, inside};
use serde_json::{Map, Value, json};

/// Rules that cannot be written with others.
pub(super) const NOT_KEPT: [&str; 15] = [
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
    "$vocabulary",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "disallow",
    "divisibleBy",
    "extends",
    "maxContains",
    "minContains",
    "x-guidance",
];
/// Keywords whose value is one schema.
const SCHEMAS: [&str; 3] = ["additionalProperties", "additionalItems", "items"];
/// Most lists that a list of distinct items is written as.
const MOST_LISTS: usize = 256;
/// References that are followed from one to the next.
const MOST_REFERENCES: usize = 8;
/// Schemas of one oneOf that are compared with each other.
const MOST_COMPARED: usize = 64;
/// What marks a schema that forbids every value, until all of it was looked at.
pub(super) const NEVER: &str = "\u{0}never";
pub(super) const LEAVE_OUT: &str = "it is a rule that answers cannot be kept to: leave it out";

/// Rewrites a schema; the places of keywords that only describe are returned. `loosened`: rules
/// that cannot be kept to are left out and among them.
pub(super) fn simplify(schema: &mut Value, loosened: bool) -> Result<Vec<String>, SchemaRefused> {
    let has_ids = has_member(schema, "$id");
    if !has_ids {
        name_places(schema)?;
    }
    let root = schema.clone();
    let mut rules = Rules { root: &root, loosened, has_ids, ignored: Vec::new() };
    rules.schema(schema, "")?;
    Ok(rules.ignored)
}

/// Whether any object of a value has this member.
fn has_member(value: &Value, name: &str) -> bool {
    match value {
        Value::Object(members) => {
            members.contains_key(name) || members.values().any(|inner| has_member(inner, name))
        }
        Value::Array(items) => items.iter().any(|inner| has_member(inner, name)),
        _ => false,
    }
}

pub(super) struct Rules<'r> {
    /// The document as it was given, for references.
    root: &'r Value,
    loosened: bool,
    /// Whether references may mean what is named by an id.
    has_ids: bool,
    ignored: Vec<String>,
}

pub(super) type Members = Map<String, Value>;
type Step = fn(&mut Rules<'_>, &mut Members) -> Result<(), String>;

/// Each step with the keyword that it rewrites.
const STEPS: [(&str, Step); 9] = [
    ("propertyNames", property_names),
    ("not", not),
    ("uniqueItems", unique_items),
    ("if", conditional),
    ("unevaluatedProperties", |_, members| unevaluated(members, "unevaluatedProperties")),
    ("unevaluatedItems", |_, members| unevaluated(members, "unevaluatedItems")),
    ("$ref", reference),
    ("pattern", pattern),
    ("patternProperties", pattern_properties),
];

impl Rules<'_> {
    fn schema(&mut self, schema: &mut Value, place: &str) -> Result<(), SchemaRefused> {
        let Value::Object(members) = schema else {
            return match schema {
                Value::Bool(_) => Ok(()),
                _ => Err(SchemaRefused::new(place, "a schema is an object, true or false")),
            };
        };
        for keyword in NOT_KEPT {
            if members.contains_key(keyword) {
                self.leave_out(members, place, keyword, LEAVE_OUT.to_owned())?;
            }
        }
        for (keyword, step) in STEPS {
            if !members.contains_key(keyword) {
                continue;
            }
            if let Err(why) = step(self, members) {
                self.leave_out(members, place, keyword, why)?;
            }
        }
        for without_if in ["then", "else"] {
            members.remove(without_if);
        }
        self.format(members, place);
        self.either(members, place);
        self.inner(members, place)?;
        if members.remove("nullable") == Some(Value::Bool(true)) {
            nullable(members);
        }
        if members.contains_key(NEVER) {
            if place.is_empty() {
                return Err(SchemaRefused::new("/not", "it forbids every value"));
            }
            *schema = Value::Bool(false);
        }
        Ok(())
    }

    fn leave_out(
        &mut self,
        members: &mut Members,
        place: &str,
        keyword: &str,
        why: String,
    ) -> Result<(), SchemaRefused> {
        // Names of references are no part of a path that clients read.
        let at = if keyword == "$ref" { place.to_owned() } else { inside(place, keyword) };
        if !self.loosened {
            return Err(SchemaRefused { place: at, why });
        }
        members.remove(keyword);
        self.ignored.push(inside(place, keyword));
        Ok(())
    }

    /// A format that is not known only describes.
    fn format(&mut self, members: &mut Members, place: &str) {
        let Some(format) = members.get("format") else { return };
        let format = format.as_str().unwrap_or_default().to_owned();
        if !formats::is_kept(&format) || !may_be_text(members) {
            members.remove("format");
            self.ignored.push(inside(place, "format"));
            return;
        }
        let Some(expression) = formats::expression(&format) else { return };
        if self.loosened {
            return;
        }
        members.remove("format");
        if members.contains_key("pattern") {
            require(members, json!({ "type": "string", "pattern": expression }));
        } else {
            members.insert("pattern".into(), expression.into());
        }
    }

    /// Of schemas that exclude each other, one holds where any does. Others may hold at once, which
    /// only a loosened rule passes over.
    fn either(&mut self, members: &mut Members, place: &str) {
        let Some(Value::Array(all)) = members.get("oneOf") else { return };
        let meant: Vec<&Value> = all.iter().map(|one| self.meant(one)).collect();
        let excludes = |at: usize| meant[at + 1..].iter().all(|other| excludes(meant[at], other));
        if meant.len() > MOST_COMPARED || !(0..meant.len()).all(excludes) {
            if !self.loosened {
                return;
            }
            self.ignored.push(inside(place, "oneOf"));
        }
        let Some(all) = members.remove("oneOf") else { return };
        if members.contains_key("anyOf") {
            require(members, json!({ "anyOf": all }));
        } else {
            members.insert("anyOf".into(), all);
        }
    }

    /// What a schema that is only a reference means.
    fn meant<'v>(&'v self, schema: &'v Value) -> &'v Value {
        let mut meant = schema;
        for _ in 0..MOST_REFERENCES {
            let reference = meant.get("$ref").and_then(Value::as_str);
            match reference.and_then(|reference| resolve(self.root, reference)) {
                Some(next) => meant = next,
                None => break,
            }
        }
        meant
    }

    fn inner(&mut self, members: &mut Members, place: &str) -> Result<(), SchemaRefused> {
        for (keyword, value) in members {
            let place = inside(place, keyword);
            match (keyword.as_str(), value) {
                (list, Value::Array(items))
                    if LISTS.contains(&list) || ["items", "prefixItems"].contains(&list) =>
                {
                    for (at, item) in items.iter_mut().enumerate() {
                        self.schema(item, &inside(&place, &at.to_string()))?;
                    }
                }
                (one, value) if SCHEMAS.contains(&one) => self.schema(value, &place)?,
                (named, Value::Object(schemas)) if NAMED.contains(&named) => {
                    for (name, schema) in schemas {
                        self.schema(schema, &inside(&place, name))?;
                    }
                }
                // OpenAPI's place for schemas that are referred to.
                ("components", Value::Object(parts)) => {
                    let schemas = parts.get_mut("schemas").and_then(Value::as_object_mut);
                    for (name, schema) in schemas.into_iter().flatten() {
                        self.schema(schema, &inside(&inside(&place, "schemas"), name))?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Whether two schemas exclude each other: by their types, by lists of values, or by those of a
/// member that must be there.
fn excludes(one: &Value, other: &Value) -> bool {
    let kinds = |schema: &Value| {
        let kinds = match schema.get("type") {
            Some(Value::Array(kinds)) => kinds.clone(),
            kind => kind.cloned().into_iter().collect(),
        };
        let family = |kind: Value| if kind == "integer" { "number".into() } else { kind };
        kinds.into_iter().map(family).collect::<Vec<Value>>()
    };
    let values = |schema: &Value| match (schema.get("const"), schema.get("enum")) {
        (Some(one), _) => vec![one.clone()],
        (None, Some(Value::Array(values))) => values.clone(),
        _ => Vec::new(),
    };
    let differ = |one: Vec<Value>, other: Vec<Value>| {
        let are_told = [&one, &other].iter().all(|all| !all.is_empty());
        are_told
            && one.iter().chain(&other).all(is_told_apart)
            && !one.iter().any(|v| other.contains(v))
    };
    let requires = |schema: &Value, name: &str| {
        let required = schema.get("required").and_then(Value::as_array);
        required.is_some_and(|all| all.iter().any(|one| one == name))
    };
    let member = |schema: &Value, name: &str| {
        schema.get("properties").and_then(|all| all.get(name)).map(values).unwrap_or_default()
    };
    let names = one.get("properties").and_then(Value::as_object);
    differ(kinds(one), kinds(other))
        || differ(values(one), values(other))
        || names.into_iter().flat_map(Map::keys).any(|name| {
            (requires(one, name) || requires(other, name))
                && differ(member(one, name), member(other, name))
        })
}

fn may_be_text(members: &Members) -> bool {
    match members.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        _ => true,
    }
}

/// Adds a rule to those that hold together.
pub(super) fn require(members: &mut Members, rule: Value) {
    if let Some(all) = members.entry("allOf").or_insert_with(|| json!([])).as_array_mut() {
        all.push(rule);
    }
}

/// OpenAPI 3.0: the value may also be null.
fn nullable(members: &mut Members) {
    let keeps = ["$defs", "definitions", "$schema", "$id", "components", "title", "description"];
    let (mut kept, mut inner) = (Map::new(), Map::new());
    for (name, value) in std::mem::take(members) {
        let to = if keeps.contains(&name.as_str()) { &mut kept } else { &mut inner };
        to.insert(name, value);
    }
    kept.insert("anyOf".into(), json!([inner, { "type": "null" }]));
    *members = kept;
}

/// A schema that every value keeps to.
pub(super) fn is_everything(schema: &Value) -> bool {
    schema == &Value::Bool(true)
        || schema
            .as_object()
            .is_some_and(|members| members.keys().all(|keyword| !super::tree::is_rule(keyword)))
}

/// Names of members, which are texts anyway.
fn property_names(rules: &mut Rules<'_>, members: &mut Members) -> Result<(), String> {
    let names = rules.meant(members.get("propertyNames").unwrap_or(&Value::Null)).clone();
    let holds = |names: &Members| is_alone(names, "type") && names["type"] == "string";
    let is_held = is_everything(&names) || names.as_object().is_some_and(holds);
    if !is_held {
        let open = members.get("additionalProperties").cloned().unwrap_or(Value::Bool(true));
        let listed = names.get("enum").and_then(Value::as_array).cloned();
        let listed = listed.or_else(|| names.get("const").map(|one| vec![one.clone()]));
        if members.contains_key("patternProperties") {
            return Err("it cannot be kept to beside patternProperties".into());
        }
        if let Some(listed) = listed {
            let mut properties = Map::new();
            let named = members.get("properties").and_then(Value::as_object);
            for name in listed.iter().filter_map(Value::as_str) {
                let own = named.and_then(|named| named.get(name));
                properties.insert(name.to_owned(), own.unwrap_or(&open).clone());
            }
            members.insert("properties".into(), properties.into());
        } else if members.contains_key("properties") {
            return Err("it cannot be kept to beside properties: leave it out".into());
        } else {
            let pattern = expression_of(&names).ok_or("it cannot be kept to: use a pattern")?;
            members.insert("patternProperties".into(), json!({ pattern: open }));
        }
        members.insert("additionalProperties".into(), false.into());
    }
    members.remove("propertyNames");
    Ok(())
}

/// The expression of the texts that a schema allows.
fn expression_of(schema: &Value) -> Option<String> {
    let members = schema.as_object()?;
    let length = |name| members.get(name).and_then(Value::as_u64);
    let known = ["type", "pattern", "minLength", "maxLength", "format"];
    if super::tree::has_rules_beside(members, &known) {
        return None;
    }
    let (least, most) = (length("minLength"), length("maxLength"));
    let pattern = members.get("pattern").and_then(Value::as_str).map(str::to_owned);
    let format = members.get("format").and_then(Value::as_str).filter(|it| formats::is_kept(it));
    let expression = format.map(|format| formats::expression(format).ok_or(())).transpose().ok()?;
    if pattern.is_some() && expression.is_some() {
        return None;
    }
    match (pattern.or(expression), least, most) {
        (Some(pattern), None, None) => Some(pattern),
        (None, None, None) => Some(String::new()),
        (None, least, most) => {
            let most = most.map_or(String::new(), |most| most.to_string());
            Some(format!(r"^[\s\S]{{{},{most}}}$", least.unwrap_or(0)))
        }
        _ => None,
    }
}

/// Whether equal values are equal texts, which those of floats need not be.
pub(super) fn is_told_apart(value: &Value) -> bool {
    !value.is_f64() && !value.is_object() && !value.is_array()
}

/// Items that differ: of a short list of values, in the order of that list.
fn unique_items(rules: &mut Rules<'_>, members: &mut Members) -> Result<(), String> {
    let count = |name: &str| members.get(name).and_then(Value::as_u64).map(|count| count as usize);
    let (least, most) = (count("minItems").unwrap_or(0), count("maxItems"));
    let is_needed = members["uniqueItems"] == true && most.is_none_or(|most| most > 1);
    if is_needed {
        let items = rules.meant(members.get("items").unwrap_or(&Value::Null));
        let mut values = match (items.get("enum"), items.get("const"), items.get("type")) {
            (Some(Value::Array(values)), ..) => values.clone(),
            (_, Some(one), _) => vec![one.clone()],
            (.., Some(kind)) if kind == "boolean" => vec![false.into(), true.into()],
            _ => Vec::new(),
        };
        let mut seen = Vec::new();
        values.retain(|value| {
            let is_new = !seen.contains(value);
            seen.push(value.clone());
            is_new
        });
        let short = !values.is_empty() && values.len() <= MOST_LISTS.ilog2() as usize;
        if !short || !values.iter().all(is_told_apart) || members.contains_key("enum") {
            return Err("items that differ are only kept to where they are one of at most eight \
                        values: leave it out"
                .into());
        }
        let lists = (0..1_usize << values.len()).filter_map(|chosen| {
            let is_chosen = |at: &usize| chosen >> at & 1 == 1;
            let list: Vec<&Value> =
                (0..values.len()).filter(is_chosen).map(|at| &values[at]).collect();
            (list.len() >= least && most.is_none_or(|most| list.len() <= most)).then(|| json!(list))
        });
        let lists: Vec<Value> = lists.collect();
        // Where the schema is written again, its lists would fill it.
        if rules.loosened {
            return Ok(());
        }
        members.insert("enum".into(), lists.into());
    }
    members.remove("uniqueItems");
    Ok(())
}

/// What no other keyword looked at: beside none that could, this is what is additional.
fn unevaluated(members: &mut Members, keyword: &str) -> Result<(), String> {
    let plain = if keyword == "unevaluatedItems" { "items" } else { "additionalProperties" };
    let beside = ["allOf", "anyOf", "oneOf", "$ref", "if"];
    let looks = beside.iter().any(|name| members.contains_key(*name));
    match members.get(keyword) {
        Some(rule) if is_everything(rule) => {
            let rule = rule.clone();
            members.entry(plain).or_insert(rule);
        }
        Some(_) if members.contains_key(plain) => {}
        Some(rule) if !looks => {
            let rule = rule.clone();
            members.insert(plain.to_owned(), rule);
        }
        _ => {
            return Err(format!("it cannot be kept to beside combined rules: use {plain}"));
        }
    }
    members.remove(keyword);
    Ok(())
}

fn reference(rules: &mut Rules<'_>, members: &mut Members) -> Result<(), String> {
    let reference = members["$ref"].as_str().ok_or("a reference is a text")?;
    if resolve(rules.root, reference).is_some() || rules.has_ids {
        return Ok(());
    }
    Err(if reference.starts_with('#') {
        "its reference leads to nothing in this schema".into()
    } else {
        "its reference leads to another document: copy that schema into $defs".into()
    })
}

fn pattern(_: &mut Rules<'_>, members: &mut Members) -> Result<(), String> {
    let pattern = members["pattern"].as_str().ok_or("a pattern is a text")?;
    let equal = formats::without_assertions(pattern);
    // The library takes the blanks of every script for white space; other patterns are ASCII.
    let known = llguidance::regex_to_lark(equal.as_deref().unwrap_or(pattern), "s");
    if let Some(why) = fault_of_expression(&known) {
        return Err(format!("its expression is not kept to: {why}"));
    }
    members.insert("pattern".into(), known.into());
    Ok(())
}

fn pattern_properties(_: &mut Rules<'_>, members: &mut Members) -> Result<(), String> {
    let mut patterns = members["patternProperties"].as_object().into_iter().flat_map(Map::keys);
    match patterns.find_map(|pattern| fault_of_expression(pattern)) {
        Some(why) => Err(format!("its expression is not kept to: {why}")),
        None => Ok(()),
    }
}
