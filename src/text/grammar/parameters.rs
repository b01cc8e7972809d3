//! The JSON schemas of tools' parameters, for families that write no JSON object.

use super::answer_format::FormatRefused;
use super::schema::{inside, parse, write};
use crate::forms::tool_calls::ToolDefinition;
use serde_json::{Map, Value};

/// The rules of one tool's schema that a form of calls cannot keep to. They are refused with their
/// place, or left out.
pub(super) struct UnkeptRules {
    is_strict: bool,
    /// The JSON pointer of the schema that is looked at.
    place: String,
    pub left_out: Vec<String>,
}

impl UnkeptRules {
    pub(super) fn of(tool: &ToolDefinition) -> Self {
        Self { is_strict: tool.strict, place: String::new(), left_out: Vec::new() }
    }

    /// Goes to an inner schema, and returns what `leave` takes.
    pub(super) fn enter(&mut self, steps: &[&str]) -> String {
        let inner = steps.iter().fold(self.place.clone(), |place, step| inside(&place, step));
        std::mem::replace(&mut self.place, inner)
    }

    /// Goes to where a reference leads.
    pub(super) fn follow(&mut self, reference: &str) -> String {
        std::mem::replace(&mut self.place, reference.trim_start_matches('#').to_owned())
    }

    pub(super) fn leave(&mut self, place: String) {
        self.place = place;
    }

    /// Leaves a rule out, unless the tool is strict.
    pub(super) fn rule(&mut self, keyword: &str) -> Result<(), FormatRefused> {
        self.leave_out(keyword, &format!("has the rule {keyword}"), &format!("leave {keyword} out"))
    }

    /// The same, with words of its own for what there is and the way out.
    pub(super) fn leave_out(
        &mut self,
        keyword: &str,
        there_is: &str,
        way_out: &str,
    ) -> Result<(), FormatRefused> {
        let place = inside(&self.place, keyword);
        if self.is_strict {
            return Err(FormatRefused(format!(
                "{there_is}, which this model's form of calls cannot keep to: {way_out}, or \
                 strict (at #{place})"
            )));
        }
        if !self.left_out.contains(&place) {
            self.left_out.push(place);
        }
        Ok(())
    }
}

/// The schema of a function's parameters, where each argument is written by itself.
#[derive(Default)]
pub(super) struct ToolParameters {
    pub properties: Map<String, Value>,
    pub required: Vec<String>,
    /// Members that properties may refer to.
    pub definitions: Map<String, Value>,
}

impl ToolParameters {
    pub(super) fn read(
        tool: &ToolDefinition,
        unkept: &mut UnkeptRules,
    ) -> Result<Self, FormatRefused> {
        let refused = |why: &str| FormatRefused(why.to_owned());
        let schema = parse(&tool.parameters).ok_or_else(|| refused("must be a JSON schema"))?;
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
                _ => unkept.rule(&keyword)?,
            }
        }
        described(&found.required, &found.properties, unkept)?;
        Ok(found)
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

/// Leaves out that properties are required which are not described: none can be written.
pub(super) fn described(
    required: &[String],
    properties: &Map<String, Value>,
    unkept: &mut UnkeptRules,
) -> Result<(), FormatRefused> {
    match required.iter().find(|name| !properties.contains_key(*name)) {
        Some(name) => {
            let there_is = format!("requires {name:?}, which it does not describe");
            unkept.leave_out("required", &there_is, "describe it in properties")
        }
        None => Ok(()),
    }
}
