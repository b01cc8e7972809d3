//! The grammar of arguments between tags, as Qwen3-Coder and GLM write them.

use super::answer_format::{AnswerFormat, FormatRefused};
use super::lark::LarkGrammar;
use super::parameters::{ToolParameters, UnkeptRules};
use crate::forms::tool_calls::{ArgumentTags, ToolDefinition, is_plain};
use serde_json::Value;
use std::fmt::Write;

/// Rules of a text that are not kept where it is written as it is.
const TEXT_RULES: [&str; 5] = ["pattern", "format", "minLength", "maxLength", "allOf"];

/// The rule of the arguments of the tool at this place: the properties in the schema's order; those
/// that are not required may be left out.
pub(super) fn rule(
    ArgumentTags { before, middle, after }: ArgumentTags,
    grammar: &mut LarkGrammar,
    at: usize,
    tool: &ToolDefinition,
    unkept: &mut UnkeptRules,
) -> Result<String, FormatRefused> {
    let parameters = ToolParameters::read(tool, unkept)?;
    let mut all = String::new();
    for (n, (name, property)) in parameters.properties.iter().enumerate() {
        let head = grammar.literal(&format!("{before}{name}{middle}"));
        let value = if !is_plain(property) {
            let part = grammar.part(AnswerFormat::Schema(parameters.alone(property).into()));
            format!("{part} {}", grammar.literal(after))
        } else if let Some(texts) = choices(name, property, unkept)? {
            let texts: Vec<String> = texts.into_iter().map(|text| grammar.literal(text)).collect();
            format!("({}) {}", texts.join(" | "), grammar.literal(after))
        } else {
            // The text ends where the mark behind it begins.
            let end = after.trim_end();
            let text = grammar.text_until(&format!("text_{at}_{n}"), end);
            format!("{text} {}", grammar.literal(&after[end.len()..]))
        };
        let optional = if parameters.required.contains(name) { "" } else { "?" };
        let _ = write!(all, "({head} {value}){optional} ");
    }
    Ok(all)
}

/// The only texts that a text may be; `None`: any. Its other rules are left out.
fn choices<'p>(
    name: &str,
    property: &'p Value,
    unkept: &mut UnkeptRules,
) -> Result<Option<Vec<&'p str>>, FormatRefused> {
    let outer = unkept.enter(&["properties", name]);
    for rule in TEXT_RULES.into_iter().filter(|rule| property.get(rule).is_some()) {
        unkept.rule(rule)?;
    }
    unkept.leave(outer);
    let constant = property.get("const").map(std::slice::from_ref);
    let values = property["enum"].as_array().map(Vec::as_slice).or(constant);
    Ok(values.map(|values| values.iter().filter_map(Value::as_str).collect()))
}
