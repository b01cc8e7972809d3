//! The JSON schemas of tools' parameters, for families that write no JSON object.

use super::answer_format::FormatRefused;
use super::schema::{parse, write};
use serde_json::{Map, Value};

/// The schema of a function's parameters, where each argument is written by itself.
#[derive(Default)]
pub(super) struct ToolParameters {
    pub properties: Map<String, Value>,
    pub required: Vec<String>,
    /// Members that properties may refer to.
    pub definitions: Map<String, Value>,
}

impl ToolParameters {
    pub(super) fn read(schema: &str) -> Result<Self, FormatRefused> {
        let refused = |why: &str| FormatRefused(why.to_owned());
        let schema = parse(schema).ok_or_else(|| refused("must be a JSON schema"))?;
        let Value::Object(members) = schema else {
            return Err(refused("must be a JSON schema of an object"));
        };
        let mut found = Self::default();
        for (keyword, value) in members {
            match (keyword.as_str(), value) {
                ("type", kind) if kind == "object" => {}
                ("properties", Value::Object(properties)) => found.properties = properties,
                ("required", Value::Array(names)) => {
                    let names = names.iter().filter_map(Value::as_str);
                    found.required = names.map(str::to_owned).collect();
                }
                ("$defs" | "definitions", definitions) => {
                    found.definitions.insert(keyword, definitions);
                }
                ("additionalProperties" | "title" | "description" | "$schema", _) => {}
                _ => {
                    return Err(FormatRefused(format!(
                        "has the rule {keyword} beside properties, which this model's form of \
                         calls cannot keep to"
                    )));
                }
            }
        }
        if found.required.iter().all(|name| found.properties.contains_key(name)) {
            return Ok(found);
        }
        Err(refused("requires a property that it does not describe"))
    }

    /// The schema of one property with all that it may refer to.
    pub(super) fn alone(&self, property: &Value) -> String {
        let mut property = property.clone();
        if let Some(members) = property.as_object_mut() {
            members.extend(self.definitions.clone());
        }
        write(&property)
    }
}
