//! Calls whose arguments are names and values in a notation that is no JSON: the grammar of what a
//! tool's schema allows. A schema that the notation cannot keep to is refused with the reason.

use crate::AnswerFormat;
use crate::forms::tool_calls::ToolDefinition;
use crate::grammar::compile::FormatRefused;
use crate::grammar::lark::LarkGrammar;
use crate::grammar::tagged::ArgumentsSchema;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fmt::Write;

/// How a family writes names and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LiteralForm {
    /// As Python does: `name=value`, texts in quotes of either kind, names inside values too. Words
    /// are those of Python or of JSON: templates write both.
    Python,
    /// `name:value` without quotes around names, in the order of their letters; texts as they are,
    /// between marks.
    Marked { quote: &'static str },
}

/// A text in Python's quotes. Escapes are those that Python and JSON read alike, the one that only
/// Python has for its single quotes, and no halves of a pair.
const QUOTED: &str = r#"/'([^'\\]|\\['"\\nrt]|\\u[0-9a-cefA-CEF][0-9a-fA-F]{3})*'|"([^"\\]|\\['"\\nrt]|\\u[0-9a-cefA-CEF][0-9a-fA-F]{3})*"/"#;

/// Members of schemas that allow and refuse nothing.
const ANNOTATIONS: [&str; 11] = [
    "type",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "nullable",
    "$schema",
    "$comment",
    "$defs",
    "definitions",
];

const OF_NUMBERS: [&str; 5] =
    ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];

impl LiteralForm {
    /// The rule of the arguments of the tool at this place. Those that are not required may be left
    /// out.
    pub(crate) fn rule(
        self,
        grammar: &mut LarkGrammar,
        at: usize,
        tool: &ToolDefinition,
    ) -> Result<String, FormatRefused> {
        let schema = ArgumentsSchema::read(&tool.parameters)?;
        let ArgumentsSchema { properties, required, definitions } = schema;
        let named = HashMap::new();
        let mut rules = LiteralRules { grammar, form: self, at, definitions, named, made: 0 };
        rules.members(&properties, &required, self.assigns())
    }

    /// Between an argument's name and its value.
    pub(crate) fn assigns(self) -> &'static str {
        match self {
            Self::Python => "=",
            Self::Marked { .. } => ":",
        }
    }

    /// Between a name and its value inside a value.
    fn pairs(self) -> &'static str {
        match self {
            Self::Python => ": ",
            Self::Marked { .. } => ":",
        }
    }

    /// Members in the order in which the family writes them.
    fn ordered(self, properties: &Map<String, Value>) -> Vec<(&String, &Value)> {
        let mut members: Vec<(&String, &Value)> = properties.iter().collect();
        if matches!(self, Self::Marked { .. }) {
            members.sort_by_key(|(name, _)| name.to_lowercase());
        }
        members
    }

    fn separates(self) -> &'static str {
        match self {
            Self::Python => ", ",
            Self::Marked { .. } => ",",
        }
    }
}

/// The rules of one tool's arguments while they are written.
struct LiteralRules<'g, 'm> {
    grammar: &'g mut LarkGrammar<'m>,
    form: LiteralForm,
    /// The tool's place, which is part of the names of its rules.
    at: usize,
    definitions: Map<String, Value>,
    /// The rules of definitions that were referred to.
    named: HashMap<String, String>,
    made: usize,
}

fn refused(rule: &str) -> FormatRefused {
    FormatRefused(format!(
        "has the rule {rule}, which this model's form of calls cannot keep to: leave {rule} out"
    ))
}

/// The same, of a name.
fn unwritable(name: &str) -> FormatRefused {
    FormatRefused(format!(
        "has a property named {name:?}, which this model's form of calls cannot write: use letters, \
         digits and underscores"
    ))
}

/// Refuses members of a schema beyond these.
fn only(schema: &Map<String, Value>, known: &[&str]) -> Result<(), FormatRefused> {
    let is_known = |name: &str| known.contains(&name) || ANNOTATIONS.contains(&name);
    schema.keys().find(|name| !is_known(name)).map_or(Ok(()), |name| Err(refused(name)))
}

impl LiteralRules<'_, '_> {
    fn lark(text: &str) -> String {
        Value::from(text).to_string()
    }

    /// A rule with a name of its own.
    fn define(&mut self, body: &str) -> String {
        let name = format!("literal_{}_{}", self.at, self.made);
        self.made += 1;
        let _ = writeln!(self.grammar.rules, "{name}: {body}");
        name
    }

    /// Members in their order, with separators between those that are written.
    fn members(
        &mut self,
        properties: &Map<String, Value>,
        required: &[String],
        assigns: &str,
    ) -> Result<String, FormatRefused> {
        let members = self.form.ordered(properties);
        let separator = Self::lark(self.form.separates());
        // Built from the end: what may stand where a member is the first, and behind another one.
        let (mut first, mut rest) = (Vec::new(), String::new());
        for (name, schema) in members.into_iter().rev() {
            let body = format!("{} {}", self.name(name, assigns)?, self.value(schema)?);
            let member = self.define(&body);
            let optional = if required.contains(name) { "" } else { "?" };
            if optional.is_empty() {
                first.clear();
            }
            first.push(format!("{member} {rest}"));
            rest = self.define(&format!("({separator} {member}){optional} {rest}"));
        }
        let needed = properties.keys().any(|name| required.contains(name));
        Ok(match (first.join(" | "), needed) {
            (none, _) if none.is_empty() => none,
            (first, true) => format!("({first})"),
            (first, false) => format!("({first})?"),
        })
    }

    /// A name with what follows it.
    fn name(&mut self, name: &str, assigns: &str) -> Result<String, FormatRefused> {
        let plain = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        let is_argument = assigns == self.form.assigns();
        let begins = name.chars().next().is_some_and(|letter| !letter.is_ascii_digit());
        match self.form {
            LiteralForm::Python if !is_argument => {
                Ok(format!("{} {}", self.text_constant(name)?, Self::lark(assigns)))
            }
            _ if begins && name.chars().all(plain) => Ok(Self::lark(&format!("{name}{assigns}"))),
            _ => Err(unwritable(name)),
        }
    }

    fn value(&mut self, schema: &Value) -> Result<String, FormatRefused> {
        let Value::Object(members) = schema else {
            return if schema == true { Ok(self.any()) } else { Err(refused("false")) };
        };
        self.composed(members).unwrap_or_else(|| self.typed(members))
    }

    /// The rule of a schema that names other schemas or values.
    fn composed(&mut self, members: &Map<String, Value>) -> Option<Result<String, FormatRefused>> {
        const KEYWORDS: [&str; 5] = ["$ref", "const", "enum", "anyOf", "allOf"];
        let found = |keyword: &&'static str| members.contains_key(*keyword);
        let keyword = KEYWORDS.into_iter().find(found)?;
        let rule = match (keyword, &members[keyword]) {
            ("$ref", name) => self.reference(name),
            ("const", value) => self.constant(value),
            ("enum", Value::Array(values)) => self.alternatives(values, Self::constant),
            ("anyOf", Value::Array(schemas)) => self.alternatives(schemas, Self::value),
            ("allOf", Value::Array(schemas)) if schemas.len() == 1 => self.value(&schemas[0]),
            _ => Err(refused(keyword)),
        };
        Some(only(members, &[keyword]).and(rule))
    }

    fn typed(&mut self, members: &Map<String, Value>) -> Result<String, FormatRefused> {
        match members.get("type") {
            Some(Value::Array(kinds)) => self.alternatives(kinds, |rules, kind| {
                let mut schema = members.clone();
                schema.insert("type".into(), kind.clone());
                rules.of_kind(kind.as_str().unwrap_or_default(), &for_kind(schema))
            }),
            Some(kind) => self.of_kind(kind.as_str().unwrap_or_default(), members),
            None if members.contains_key("properties") => self.of_kind("object", members),
            None if members.contains_key("items") => self.of_kind("array", members),
            None => {
                only(members, &[])?;
                Ok(self.any())
            }
        }
    }

    fn alternatives(
        &mut self,
        all: &[Value],
        mut rule: impl FnMut(&mut Self, &Value) -> Result<String, FormatRefused>,
    ) -> Result<String, FormatRefused> {
        let rules: Result<Vec<String>, _> = all.iter().map(|one| rule(self, one)).collect();
        let body = rules?.join(" | ");
        if body.is_empty() { Err(refused("enum")) } else { Ok(self.define(&body)) }
    }

    fn of_kind(
        &mut self,
        kind: &str,
        schema: &Map<String, Value>,
    ) -> Result<String, FormatRefused> {
        match kind {
            "string" => {
                only(schema, &[])?;
                Ok(self.text())
            }
            "integer" | "number" => self.number(kind, schema),
            "boolean" => {
                only(schema, &[])?;
                let both = [Value::Bool(true), Value::Bool(false)];
                self.alternatives(&both, Self::constant)
            }
            "null" => self.constant(&Value::Null),
            "array" => self.list(schema),
            "object" => self.object(schema),
            _ => Err(refused("type")),
        }
    }

    fn number(&mut self, kind: &str, schema: &Map<String, Value>) -> Result<String, FormatRefused> {
        only(schema, &OF_NUMBERS)?;
        let known = |(name, _): &(&String, &Value)| OF_NUMBERS.contains(&name.as_str());
        let rules = schema.iter().filter(known).map(|(name, rule)| (name.clone(), rule.clone()));
        let mut number: Map<String, Value> = rules.collect();
        number.insert("type".into(), kind.into());
        Ok(self.grammar.part(AnswerFormat::Schema(Value::from(number).to_string())))
    }

    fn list(&mut self, schema: &Map<String, Value>) -> Result<String, FormatRefused> {
        only(schema, &["items", "minItems", "maxItems"])?;
        let item = self.value(schema.get("items").unwrap_or(&Value::Bool(true)))?;
        let item = self.define(&item);
        let bound = |name: &str| schema.get(name).and_then(Value::as_u64);
        let (least, most) = (bound("minItems").unwrap_or(0), bound("maxItems"));
        let separator = Self::lark(self.form.separates());
        let more = match most {
            Some(0) => return Ok(Self::lark("[]")),
            Some(1) => String::new(),
            Some(most) => {
                format!("({separator} {item}){{{},{}}}", least.saturating_sub(1), most - 1)
            }
            None => format!("({separator} {item}){{{},}}", least.saturating_sub(1)),
        };
        let optional = if least == 0 { "?" } else { "" };
        Ok(self.define(&format!("\"[\" ({item} {more}){optional} \"]\"")))
    }

    fn object(&mut self, schema: &Map<String, Value>) -> Result<String, FormatRefused> {
        only(schema, &["properties", "required", "additionalProperties"])?;
        let none = Map::new();
        let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
        let required = schema.get("required").and_then(Value::as_array);
        let required = required.into_iter().flatten().filter_map(Value::as_str);
        let required: Vec<String> = required.map(str::to_owned).collect();
        if let Some(name) = required.iter().find(|name| !properties.contains_key(*name)) {
            return Err(FormatRefused(format!("requires {name:?}, which it does not describe")));
        }
        let more = schema.get("additionalProperties");
        if properties.is_empty() && more != Some(&Value::Bool(false)) {
            let value = self.value(more.unwrap_or(&Value::Bool(true)))?;
            return Ok(self.dictionary(&value));
        }
        let pairs = self.form.pairs();
        let members = self.members(properties, &required, pairs)?;
        Ok(self.define(&format!("\"{{\" {members} \"}}\"")))
    }

    /// Pairs of any name and such a value.
    fn dictionary(&mut self, value: &str) -> String {
        let name = match self.form {
            LiteralForm::Python => self.text(),
            LiteralForm::Marked { .. } => "/[A-Za-z_][A-Za-z0-9_]*/".into(),
        };
        let pair = format!("{name} {} {value}", Self::lark(self.form.pairs()));
        let pair = self.define(&pair);
        let separator = Self::lark(self.form.separates());
        self.define(&format!("\"{{\" ({pair} ({separator} {pair})*)? \"}}\""))
    }

    /// The rule of a definition, which may refer to itself.
    fn reference(&mut self, name: &Value) -> Result<String, FormatRefused> {
        let name = name.as_str().unwrap_or_default();
        if let Some(rule) = self.named.get(name) {
            return Ok(rule.clone());
        }
        let path: Vec<&str> = name.split('/').collect();
        let found = match path[..] {
            ["#", group @ ("$defs" | "definitions"), entry] => {
                self.definitions.get(group).and_then(|all| all.get(entry))
            }
            _ => None,
        };
        let schema = found.cloned().ok_or_else(|| refused("$ref"))?;
        let rule = format!("named_{}_{}", self.at, self.named.len());
        self.named.insert(name.to_owned(), rule.clone());
        let body = self.value(&schema)?;
        let _ = writeln!(self.grammar.rules, "{rule}: {body}");
        Ok(rule)
    }

    /// Any text.
    fn text(&mut self) -> String {
        let LiteralForm::Marked { quote } = self.form else { return QUOTED.into() };
        let rule = format!("text_{}_{}", self.at, self.made);
        self.made += 1;
        let rest = self.grammar.text_until(&rule, quote);
        format!("{} {rest}", self.grammar.literal(quote))
    }

    /// Any value.
    fn any(&mut self) -> String {
        const ANY: &str = "";
        if let Some(rule) = self.named.get(ANY) {
            return rule.clone();
        }
        let rule = format!("any_{}", self.at);
        self.named.insert(ANY.into(), rule.clone());
        let words = [Value::Null, Value::Bool(true), Value::Bool(false)];
        let mut kinds = vec![self.text()];
        kinds.push(self.grammar.part(AnswerFormat::Schema(r#"{"type":"number"}"#.into())));
        kinds.extend(words.iter().filter_map(|word| self.constant(word).ok()));
        let separator = Self::lark(self.form.separates());
        kinds.push(format!("\"[\" ({rule} ({separator} {rule})*)? \"]\""));
        kinds.push(self.dictionary(&rule));
        let _ = writeln!(self.grammar.rules, "{rule}: {}", kinds.join(" | "));
        rule
    }

    fn constant(&mut self, value: &Value) -> Result<String, FormatRefused> {
        let python = self.form == LiteralForm::Python;
        match value {
            Value::String(text) => self.text_constant(text),
            Value::Number(number) => Ok(Self::lark(&number.to_string())),
            Value::Bool(is_true) if python => {
                Ok(if *is_true { "(\"True\" | \"true\")" } else { "(\"False\" | \"false\")" }
                    .into())
            }
            Value::Null if python => Ok("(\"None\" | \"null\")".into()),
            Value::Bool(_) | Value::Null => Ok(Self::lark(&value.to_string())),
            Value::Array(_) | Value::Object(_) => Err(refused("enum")),
        }
    }

    fn text_constant(&mut self, text: &str) -> Result<String, FormatRefused> {
        match self.form {
            LiteralForm::Python => {
                let double = json!(text).to_string();
                let inner = double[1..double.len() - 1].replace("\\\"", "\"").replace('\'', "\\'");
                let [single, double] = [format!("'{inner}'"), double].map(|t| Self::lark(&t));
                Ok(format!("({single} | {double})"))
            }
            LiteralForm::Marked { quote } if text.contains(quote) => Err(refused("enum")),
            LiteralForm::Marked { quote } => {
                let mark = self.grammar.literal(quote);
                let inner = if text.is_empty() { String::new() } else { Self::lark(text) };
                Ok(format!("{mark} {inner} {mark}"))
            }
        }
    }
}

/// A schema of one of several kinds, without the rules of the others.
fn for_kind(mut schema: Map<String, Value>) -> Map<String, Value> {
    let of_lists = ["items", "minItems", "maxItems"];
    let of_objects = ["properties", "required", "additionalProperties"];
    let kind = schema.get("type").cloned().unwrap_or_default();
    schema.retain(|name, _| {
        let name = name.as_str();
        (!OF_NUMBERS.contains(&name) || kind == "integer" || kind == "number")
            && (!of_lists.contains(&name) || kind == "array")
            && (!of_objects.contains(&name) || kind == "object")
    });
    schema
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call_family::tests::MARKS;
    use crate::call_family::{ReadCall, read_calls};
    use crate::forms::tool_calls::{CallFormat, CallRule, FORMATS};
    use crate::grammar::compile::tests::walk;
    use crate::testing;
    use crate::{AnswerFormat, TextModel};

    fn text() -> TextModel {
        let template = format!("{{# {} #}}{}", MARKS.join(" "), testing::CHATML);
        testing::text_model(&testing::with_marks(&MARKS, &template))
    }

    fn formats() -> impl Iterator<Item = CallFormat> {
        FORMATS.into_iter().filter(|format| {
            ["Gemma", "LFM", "OLMo"].iter().any(|name| format.family.contains(name))
        })
    }

    fn grammar(
        text: &TextModel,
        format: CallFormat,
        schema: &Value,
    ) -> Result<AnswerFormat, FormatRefused> {
        let tool = ToolDefinition { name: "f".into(), parameters: schema.to_string() };
        let rule = CallRule { required: true, only: None, most: 2 };
        format.format(&[tool], &rule, None, &text.markup)
    }

    fn of(properties: &Value, required: &[&str]) -> Value {
        json!({ "type": "object", "properties": properties, "required": required,
            "$defs": { "Tree": { "type": "object", "properties": {
                "leaf": { "enum": ["it's", "<|\"tool_call|>", 2, null] },
                "tree": { "$ref": "#/$defs/Tree" } } } } })
    }

    /// Whatever the grammar allows is read, and is what the schema allows.
    #[test]
    fn random_calls_are_read_as_what_the_schema_allows() {
        let schema = of(
            &json!({
                "tree": { "$ref": "#/$defs/Tree" },
                "count": { "type": "integer", "minimum": -2, "maximum": 12 },
                "list": { "type": "array", "items": { "type": "boolean" }, "maxItems": 2 },
                "either": { "anyOf": [{ "type": "null" }, { "const": "é\n\"" }] },
                "map": { "type": "object", "additionalProperties": { "type": "number", "minimum": 0, "maximum": 1 } },
            }),
            &["count", "either"],
        );
        let text = text();
        let tools = [ToolDefinition { name: "f".into(), parameters: schema.to_string() }];
        for format in formats() {
            let compiled = text.compile(&grammar(&text, format, &schema).unwrap()).unwrap();
            let answers: Vec<String> =
                (0..60).filter_map(|seed| walk(&text, &compiled, seed, 700)).collect();
            assert!(answers.len() > 5, "{}: {} answers", format.family, answers.len());
            for answer in answers {
                let (calls, behind) = read_calls(format, &tools, &answer);
                assert!(
                    [1, 2].contains(&calls.len()) && behind.is_empty(),
                    "{answer:?} {behind:?}"
                );
                for call in calls {
                    let read: Value = serde_json::from_str(&call.arguments)
                        .unwrap_or_else(|why| panic!("{answer:?} is read as {call:?}: {why}"));
                    assert!(
                        (-2..=12).contains(&(read["count"].as_f64().unwrap() as i64)),
                        "{answer:?}"
                    );
                    assert!([json!(null), json!("é\n\"")].contains(&read["either"]), "{answer:?}");
                    let list = read["list"].as_array().map_or(0, Vec::len);
                    let leaf = &read["tree"]["leaf"];
                    let leaves = [json!("it's"), json!("<|\"tool_call|>"), json!(2), json!(null)];
                    assert!(list <= 2 && leaves.contains(leaf), "{answer:?}");
                }
            }
        }
    }

    #[test]
    fn any_text_and_any_value_are_read_back() {
        let properties = json!({ "any": {}, "text": { "type": "string" } });
        let (text, schema) = (text(), of(&properties, &["any", "text"]));
        let tools = [ToolDefinition { name: "f".into(), parameters: schema.to_string() }];
        for format in formats() {
            let compiled = text.compile(&grammar(&text, format, &schema).unwrap()).unwrap();
            let answers = (0..60).filter_map(|seed| walk(&text, &compiled, seed, 300));
            let mut ended = 0;
            for answer in answers {
                let (calls, behind) = read_calls(format, &tools, &answer);
                assert!(behind.is_empty() && !calls.is_empty(), "{answer:?}");
                #[expect(
                    clippy::zero_sized_map_values,
                    reason = "a number may be too large for a value"
                )]
                let read = |call: &ReadCall| {
                    let members = serde_json::from_str(&call.arguments);
                    members.map(|all: HashMap<String, serde::de::IgnoredAny>| all.len())
                };
                assert!(calls.iter().all(|call| matches!(read(call), Ok(2))), "{answer:?}");
                ended += 1;
            }
            assert!(ended > 0, "{}", format.family);
        }
    }

    #[test]
    fn rules_that_the_notation_cannot_keep_to_are_refused_by_name() {
        let text = text();
        for (property, why) in [
            (json!({ "type": "string", "pattern": "a" }), "pattern"),
            (json!({ "type": "array", "uniqueItems": true }), "uniqueItems"),
            (json!({ "allOf": [{}, {}] }), "allOf"),
            (json!({ "oneOf": [{}] }), "oneOf"),
            (json!({ "$ref": "#/elsewhere" }), "$ref"),
            (json!({ "enum": [{}] }), "enum"),
            (json!({ "type": "object", "properties": {}, "required": ["b"] }), "does not describe"),
            (json!(false), "false"),
        ] {
            for format in formats() {
                let refused =
                    grammar(&text, format, &of(&json!({ "a": property }), &[])).unwrap_err();
                assert!(refused.0.contains(why), "{property}: {}", refused.0);
            }
        }
        for format in formats() {
            let refused = grammar(&text, format, &of(&json!({ "a b": {} }), &[])).unwrap_err();
            assert!(refused.0.contains("use letters, digits and underscores"), "{}", refused.0);
        }
    }
}
