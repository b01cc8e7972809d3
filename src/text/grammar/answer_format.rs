//! Formats that an answer keeps to, in the terms of the crate llguidance.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Map, Value, json};

/// What an answer keeps to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerFormat {
    /// A JSON value that this schema allows; its members in the order in which the answer has them.
    Schema(String),
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of this grammar, in the Lark syntax that llguidance documents.
    Lark(String),
    /// A text of this grammar, in which `@part_0`, `@part_1` and so on are formats.
    Nested { grammar: String, parts: Vec<AnswerFormat> },
}

/// Why a format is not honoured, in words that a client may see.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FormatRefused(pub String);

/// White space between the parts of JSON. Where nothing bounds it, small models write it without
/// end.
const WHITE_SPACE: &str = r"[ \n\r\t]{1,32}";
/// The unit of numbers that have a minimum or a maximum, which are never written with an exponent.
/// Small models write decimals without end, too. The library counts a digit times ten to the number
/// of decimals in 32 bits, so that eight are the most.
const UNIT: f64 = 1e-8;
const ONE_OF: &str = "has a oneOf whose schemas may hold at once, which cannot be kept to: \
    use anyOf";

impl AnswerFormat {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Schema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
            Self::Nested { grammar, parts } => {
                grammar.len() + parts.iter().map(Self::bytes).sum::<usize>()
            }
        }
    }

    pub(super) fn grammar(&self, decimals: Decimals) -> Result<TopLevelGrammar, FormatRefused> {
        Ok(match self {
            Self::Schema(schema) => TopLevelGrammar::from_json_schema(bounded(schema, decimals)?),
            Self::Regex(expression) => TopLevelGrammar::from_regex(expression),
            Self::Choice(texts) => {
                let texts: Vec<_> = texts.iter().map(|text| json!(text).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | ")))
            }
            Self::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
            Self::Nested { grammar, parts } => nested(grammar, parts, decimals)?,
        })
    }

    /// Whether there may be numbers whose decimals were bounded.
    pub(super) fn names_numbers(&self) -> bool {
        match self {
            Self::Schema(schema) => schema.contains("number"),
            Self::Nested { parts, .. } => parts.iter().any(Self::names_numbers),
            Self::Regex(_) | Self::Choice(_) | Self::Lark(_) => false,
        }
    }

    /// The library's reason, where its words are about the format; others name its own parts.
    pub(super) fn refusal(&self, why: &str) -> FormatRefused {
        let line = why.lines().next().unwrap_or_default().trim();
        let known = ["Unimplemented", "Unknown", "Unsatisfiable", "min/maxProperties", "circular"];
        let shown = match self {
            Self::Schema(_) if line.starts_with("oneOf") => return FormatRefused(ONE_OF.into()),
            Self::Schema(_) if line.starts_with("regex") => {
                return FormatRefused("has a pattern that is no expression known here".into());
            }
            Self::Schema(_) => known.iter().any(|start| line.starts_with(start)),
            Self::Regex(_) | Self::Lark(_) => !line.is_empty() && !line.contains("panic"),
            Self::Choice(_) | Self::Nested { .. } => false,
        };
        let text = if shown { line } else { "it is too complex, or uses what is not supported" };
        FormatRefused(format!("cannot be kept to: {}", text.trim_end_matches('.')))
    }
}

fn nested(
    grammar: &str,
    parts: &[AnswerFormat],
    decimals: Decimals,
) -> Result<TopLevelGrammar, FormatRefused> {
    let mut whole = TopLevelGrammar::from_lark(grammar.to_owned());
    for (at, part) in parts.iter().enumerate() {
        let named =
            |part: GrammarWithLexer| GrammarWithLexer { name: Some(format!("part_{at}")), ..part };
        whole.grammars.extend(part.grammar(decimals)?.grammars.into_iter().map(named));
    }
    Ok(whole)
}

/// How many decimals a number with a minimum or a maximum may have.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Decimals {
    Any,
    /// Those of `UNIT`.
    Bounded,
}

/// The schema, with white space bounded. A schema that is `true` or `false` has no place for that.
fn bounded(schema: &str, decimals: Decimals) -> Result<Value, FormatRefused> {
    let schema = serde_json::from_str(schema);
    let mut schema: Value = schema.map_err(|_| FormatRefused("must be a JSON schema".into()))?;
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    // Units of the schema's own would have to be brought together with ours. They are looked for in
    // the schema as it was read, because a client may spell a keyword with escapes.
    let has_units = || schema.to_string().contains("multipleOf");
    let bounds_decimals = decimals == Decimals::Bounded && !has_units();
    change_schemas(&mut schema, &|members| {
        // The compiler ignores rules that are younger than the draft named, and reads older
        // spellings in any.
        members.retain(|name, value| name != "$schema" || !value.is_string());
        if bounds_decimals {
            bound_decimals(members);
        }
    });
    if let Some(members) = schema.as_object_mut() {
        members.insert("x-guidance".into(), json!({ "whitespace_pattern": WHITE_SPACE }));
    }
    Ok(schema)
}

/// Changes each schema in a schema. Values that are no schemas are left as they are.
fn change_schemas(schema: &mut Value, change: &dyn Fn(&mut Map<String, Value>)) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(|item| change_schemas(item, change)),
        Value::Object(members) => {
            change(members);
            for (keyword, value) in members {
                match (keyword.as_str(), value) {
                    ("const" | "enum", _) => {}
                    (
                        "properties" | "patternProperties" | "$defs" | "definitions",
                        Value::Object(named),
                    ) => named.values_mut().for_each(|value| change_schemas(value, change)),
                    (_, value) => change_schemas(value, change),
                }
            }
        }
        _ => {}
    }
}

fn bound_decimals(members: &mut Map<String, Value>) {
    let bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];
    let is_number = match members.get("type") {
        Some(Value::Array(types)) => types.iter().any(|kind| kind == "number"),
        kind => kind.is_some_and(|kind| kind == "number"),
    };
    if is_number && bounds.iter().any(|bound| members.contains_key(*bound)) {
        members.insert("multipleOf".into(), json!(UNIT));
    }
}
