//! Calls whose arguments stand each by itself between tags, as Qwen3-Coder and GLM write them.

use crate::AnswerFormat;
use crate::forms::tool_calls::ToolDefinition;
use crate::grammar::compile::FormatRefused;
use crate::grammar::lark::LarkGrammar;
use serde_json::{Map, Value};
use std::fmt::Write;

/// What a tagged argument's value is written as.
enum TaggedValue {
    Text,
    OneOf(Vec<String>),
    Json,
}

/// Rules of a text that are not kept where it is written as it is.
const TEXT_RULES: [&str; 5] = ["pattern", "format", "minLength", "maxLength", "allOf"];

impl TaggedValue {
    fn of(property: &Value) -> Result<Self, FormatRefused> {
        if !is_text(property) {
            return Ok(Self::Json);
        }
        if let Some(rule) = TEXT_RULES.into_iter().find(|rule| property.get(rule).is_some()) {
            let why = format!(
                "has a text with the rule {rule}, which this model's form of calls \
                cannot keep to: leave {rule} out"
            );
            return Err(FormatRefused(why));
        }
        let constant = property.get("const").map(std::slice::from_ref);
        let Some(values) = property["enum"].as_array().map(Vec::as_slice).or(constant) else {
            return Ok(Self::Text);
        };
        Ok(Self::OneOf(values.iter().filter_map(Value::as_str).map(str::to_owned).collect()))
    }
}

/// The texts around one argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArgumentTags {
    pub before: &'static str,
    /// Between its name and its value.
    pub middle: &'static str,
    pub after: &'static str,
}

impl ArgumentTags {
    /// The rule of the arguments of the tool at this place: the properties in the schema's order;
    /// those that are not required may be left out.
    pub(crate) fn rule(
        self,
        grammar: &mut LarkGrammar,
        at: usize,
        tool: &ToolDefinition,
    ) -> Result<String, FormatRefused> {
        let Self { before, middle, after } = self;
        let schema = ArgumentsSchema::read(&tool.parameters)?;
        let mut all = String::new();
        for (n, (name, property)) in schema.properties.iter().enumerate() {
            let head = grammar.literal(&format!("{before}{name}{middle}"));
            let value = match TaggedValue::of(property)? {
                TaggedValue::Text => {
                    // The text ends where the mark behind it begins.
                    let end = after.trim_end();
                    let text = grammar.text_until(&format!("text_{at}_{n}"), end);
                    format!("{text} {}", grammar.literal(&after[end.len()..]))
                }
                TaggedValue::OneOf(texts) => {
                    let texts: Vec<String> = texts.iter().map(|t| grammar.literal(t)).collect();
                    format!("({}) {}", texts.join(" | "), grammar.literal(after))
                }
                TaggedValue::Json => {
                    let part = grammar.part(AnswerFormat::Schema(schema.alone(property)));
                    format!("{part} {}", grammar.literal(after))
                }
            };
            let optional = if schema.required.contains(name) { "" } else { "?" };
            let _ = write!(all, "({head} {value}){optional} ");
        }
        Ok(all)
    }
}

/// Whether a tagged argument with this schema is a text, which is written as it is.
pub(crate) fn is_text(property: &Value) -> bool {
    property["type"] == "string"
}

/// The schema of a call's arguments, where each argument is written by itself.
pub(crate) struct ArgumentsSchema {
    pub properties: Map<String, Value>,
    pub required: Vec<String>,
    /// Members that properties may refer to.
    pub definitions: Map<String, Value>,
}

impl ArgumentsSchema {
    pub(crate) fn read(schema: &str) -> Result<Self, FormatRefused> {
        let refused = |why: &str| FormatRefused(why.to_owned());
        let schema: Value =
            serde_json::from_str(schema).map_err(|_| refused("must be a JSON schema"))?;
        let Value::Object(mut members) = schema else {
            return Err(refused("must be a JSON schema of an object"));
        };
        let mut found =
            Self { properties: Map::new(), required: Vec::new(), definitions: Map::new() };
        for (keyword, value) in std::mem::take(&mut members) {
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
                    let why = format!(
                        "has the rule {keyword} beside properties, which this \
                        model's form of calls cannot keep to"
                    );
                    return Err(FormatRefused(why));
                }
            }
        }
        let unknown = found.required.iter().find(|name| !found.properties.contains_key(*name));
        match unknown {
            Some(_) => Err(refused("requires a property that it does not describe")),
            None => Ok(found),
        }
    }

    /// The schema of one property with all that it may refer to.
    fn alone(&self, property: &Value) -> String {
        let mut property = property.clone();
        if let Some(members) = property.as_object_mut() {
            members.extend(self.definitions.clone());
        }
        property.to_string()
    }
}
