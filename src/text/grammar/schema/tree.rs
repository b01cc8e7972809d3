//! Walks through the schemas of a schema.

use super::{SchemaRefused, inside};
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Keywords whose value is a list of schemas.
pub(super) const LISTS: [&str; 3] = ["allOf", "anyOf", "oneOf"];
/// Keywords whose members are schemas.
pub(super) const NAMED: [&str; 5] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Keywords whose value is data.
const DATA: [&str; 7] =
    ["const", "enum", "default", "examples", "example", "required", "discriminator"];
/// Keywords that allow and refuse nothing.
const DESCRIPTIONS: [&str; 22] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "id",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "externalDocs",
    "readOnly",
    "title",
    "writeOnly",
    "xml",
    "x-guidance",
    "components",
];

/// Calls `change` for each schema, the outer ones first.
pub(super) fn visit(
    schema: &mut Value,
    place: &str,
    change: &mut dyn FnMut(&mut Value, &str) -> Result<(), SchemaRefused>,
) -> Result<(), SchemaRefused> {
    change(schema, place)?;
    let Value::Object(members) = schema else { return Ok(()) };
    for (keyword, value) in members {
        let inner = inside(place, keyword);
        match (keyword.as_str(), value) {
            (data, _) if DATA.contains(&data) => {}
            (named, Value::Object(schemas)) if NAMED.contains(&named) => {
                for (name, schema) in schemas {
                    visit(schema, &inside(&inner, name), change)?;
                }
            }
            (_, Value::Array(items)) => {
                for (at, item) in items.iter_mut().enumerate() {
                    visit(item, &inside(&inner, &at.to_string()), change)?;
                }
            }
            // Schemas may also be where only a reference finds them.
            (_, value @ Value::Object(_)) => visit(value, &inner, change)?,
            _ => {}
        }
    }
    Ok(())
}

/// Whether a keyword allows or refuses something.
pub(super) fn is_rule(keyword: &str) -> bool {
    !DESCRIPTIONS.contains(&keyword)
}

pub(super) fn has_rules_beside(members: &Map<String, Value>, keywords: &[&str]) -> bool {
    members.keys().any(|name| is_rule(name) && !keywords.contains(&name.as_str()))
}

/// Whether the only rule of a schema is this one.
pub(super) fn is_alone(members: &Map<String, Value>, keyword: &str) -> bool {
    members.contains_key(keyword) && !has_rules_beside(members, &[keyword])
}

/// The schema that a reference inside the document means.
pub(super) fn resolve<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    root.pointer(&decoded(reference.strip_prefix('#')?))
}

/// Replaces the names of places in references by pointers.
pub(super) fn name_places(schema: &mut Value) -> Result<(), SchemaRefused> {
    let mut places = HashMap::new();
    visit(schema, "", &mut |schema, place| {
        let name = schema.get("$anchor").and_then(Value::as_str);
        places.extend(name.map(|name| (format!("#{name}"), format!("#{place}"))));
        Ok(())
    })?;
    visit(schema, "", &mut |schema, _| {
        let place = schema.get("$ref").and_then(|name| places.get(name.as_str()?)).cloned();
        if let (Some(place), Some(members)) = (place, schema.as_object_mut()) {
            members.insert("$ref".into(), place.into());
        }
        Ok(())
    })
}

/// The text without percent signs for letters.
fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, behind)) = rest.split_first() {
        let code = behind.get(..2).filter(|_| *first == b'%');
        let code = code.and_then(|code| std::str::from_utf8(code).ok());
        let code = code.and_then(|code| u8::from_str_radix(code, 16).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &behind[2..] } else { behind };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
