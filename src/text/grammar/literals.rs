//! The grammar of arguments in a notation that is no JSON: what a tool's schema allows. Rules that
//! the notation cannot keep to are refused with the reason, or left out.

use super::answer_format::{AnswerFormat, FormatRefused};
use super::lark::LarkGrammar;
use super::parameters::{ToolParameters, UnkeptRules, described};
use super::schema::{odd_number, write};
use crate::forms::tool_calls::{LiteralSyntax, ToolDefinition};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fmt::Write;

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

const NUMERIC_KEYWORDS: [&str; 5] =
    ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
const LIST_KEYWORDS: [&str; 3] = ["items", "minItems", "maxItems"];
const OBJECT_KEYWORDS: [&str; 3] = ["properties", "required", "additionalProperties"];

/// The keywords that are about values of this type.
fn keywords_of(kind: &str) -> &'static [&'static str] {
    match kind {
        "integer" | "number" => &NUMERIC_KEYWORDS,
        "array" => &LIST_KEYWORDS,
        "object" => &OBJECT_KEYWORDS,
        _ => &[],
    }
}

/// The rule of the arguments of the tool at this place. Those that are not required may be left
/// out.
pub(super) fn rule(
    syntax: LiteralSyntax,
    grammar: &mut LarkGrammar,
    at: usize,
    tool: &ToolDefinition,
    unkept: &mut UnkeptRules,
) -> Result<String, FormatRefused> {
    let ToolParameters { properties, required, definitions } = ToolParameters::read(tool, unkept)?;
    let named = HashMap::new();
    let mut rules = LiteralRules { grammar, syntax, at, unkept, definitions, named, made: 0 };
    rules.members(&properties, &required, syntax.assign)
}

/// The rules of one tool's arguments while they are written.
struct LiteralRules<'g, 'm> {
    grammar: &'g mut LarkGrammar<'m>,
    syntax: LiteralSyntax,
    /// The tool's place, which is part of the names of its rules.
    at: usize,
    unkept: &'g mut UnkeptRules,
    definitions: Map<String, Value>,
    /// The rules of definitions that were referred to.
    named: HashMap<String, String>,
    made: usize,
}

impl LiteralRules<'_, '_> {
    /// Leaves out the members of a schema beyond these.
    fn only(&mut self, schema: &Map<String, Value>, known: &[&str]) -> Result<(), FormatRefused> {
        let is_known = |name: &str| known.contains(&name) || ANNOTATIONS.contains(&name);
        schema.keys().filter(|name| !is_known(name)).try_for_each(|name| self.unkept.rule(name))
    }

    /// The rule of an inner schema.
    fn inner(&mut self, steps: &[&str], schema: &Value) -> Result<String, FormatRefused> {
        let outer = self.unkept.enter(steps);
        let rule = self.value(schema)?;
        self.unkept.leave(outer);
        Ok(rule)
    }

    /// A rule with a name of its own.
    fn define(&mut self, body: &str) -> String {
        let name = format!("literal_{}_{}", self.at, self.made);
        self.made += 1;
        let _ = writeln!(self.grammar.rules, "{name}: {body}");
        name
    }

    fn separator(&self) -> String {
        LarkGrammar::plain(self.syntax.separator)
    }

    /// Members in their order, with separators between those that are written.
    fn members(
        &mut self,
        properties: &Map<String, Value>,
        required: &[String],
        assign: &str,
    ) -> Result<String, FormatRefused> {
        let mut members: Vec<(&String, &Value)> = properties.iter().collect();
        if self.syntax.is_sorted {
            members.sort_by_key(|(name, _)| name.to_lowercase());
        }
        let separator = self.separator();
        // Built from the end: what may be where a member is the first, and behind another one.
        let (mut first, mut rest, mut needed) = (Vec::new(), String::new(), false);
        for (name, schema) in members.into_iter().rev() {
            let Some(written) = self.name(name, assign)? else { continue };
            let value = self.inner(&["properties", name], schema)?;
            let member = self.define(&format!("{written} {value}"));
            let optional = if required.contains(name) { "" } else { "?" };
            if optional.is_empty() {
                first.clear();
                needed = true;
            }
            first.push(format!("{member} {rest}"));
            rest = self.define(&format!("({separator} {member}){optional} {rest}"));
        }
        Ok(match (first.join(" | "), needed) {
            (none, _) if none.is_empty() => none,
            (first, true) => format!("({first})"),
            (first, false) => format!("({first})?"),
        })
    }

    /// A name with what follows it; `None` for one that cannot be written and is left out.
    fn name(&mut self, name: &str, assign: &str) -> Result<Option<String>, FormatRefused> {
        if self.syntax.quote.is_none() && assign != self.syntax.assign {
            return Ok(Some(format!("{} {}", quoted(name), LarkGrammar::plain(assign))));
        }
        let begins = name.chars().next().is_some_and(|letter| !letter.is_ascii_digit());
        if begins && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_') {
            return Ok(Some(LarkGrammar::plain(&format!("{name}{assign}"))));
        }
        let outer = self.unkept.enter(&["properties"]);
        let there_is = format!("has a property named {name:?}");
        self.unkept.leave_out(name, &there_is, "use letters, digits and underscores")?;
        self.unkept.leave(outer);
        Ok(None)
    }

    fn value(&mut self, schema: &Value) -> Result<String, FormatRefused> {
        let Value::Object(members) = schema else {
            if schema != true {
                self.unkept.rule("false")?;
            }
            return Ok(self.any());
        };
        self.composed(members).unwrap_or_else(|| self.typed(members))
    }

    /// The rule of a schema that names other schemas or values.
    fn composed(&mut self, members: &Map<String, Value>) -> Option<Result<String, FormatRefused>> {
        const KEYWORDS: [&str; 5] = ["$ref", "const", "enum", "anyOf", "allOf"];
        let found = |keyword: &&'static str| members.contains_key(*keyword);
        let keyword = KEYWORDS.into_iter().find(found)?;
        if let Err(why) = self.only(members, &[keyword]) {
            return Some(Err(why));
        }
        Some(match (keyword, &members[keyword]) {
            ("$ref", name) => self.reference(name),
            ("const", value) if self.is_written(value) => Ok(self.constant(value)),
            ("enum", Value::Array(values)) if values.iter().all(|one| self.is_written(one)) => {
                Ok(self.constants(values))
            }
            ("anyOf", Value::Array(schemas)) if !schemas.is_empty() => self
                .alternatives(schemas, |rules, at, schema| {
                    rules.inner(&[keyword, &at.to_string()], schema)
                }),
            ("allOf", Value::Array(schemas)) if schemas.len() == 1 => {
                self.inner(&[keyword, "0"], &schemas[0])
            }
            _ => self.unkept.rule(keyword).and_then(|()| self.without(keyword, members)),
        })
    }

    /// The rule of a schema without a keyword that is left out.
    fn without(
        &mut self,
        keyword: &str,
        members: &Map<String, Value>,
    ) -> Result<String, FormatRefused> {
        let mut members = members.clone();
        members.remove(keyword);
        self.value(&members.into())
    }

    fn typed(&mut self, members: &Map<String, Value>) -> Result<String, FormatRefused> {
        let kind = match members.get("type") {
            Some(Value::Array(kinds)) if !kinds.is_empty() => {
                return self.alternatives(kinds, |rules, _, kind| {
                    let kind = kind.as_str().unwrap_or_default();
                    rules.of_kind(kind, &without_others(kind, members))
                });
            }
            Some(kind) => kind.as_str().unwrap_or_default(),
            None if members.contains_key("properties") => "object",
            None if members.contains_key("items") => "array",
            None => {
                self.only(members, &[])?;
                return Ok(self.any());
            }
        };
        self.of_kind(kind, members)
    }

    fn alternatives(
        &mut self,
        all: &[Value],
        mut rule: impl FnMut(&mut Self, usize, &Value) -> Result<String, FormatRefused>,
    ) -> Result<String, FormatRefused> {
        let rules = all.iter().enumerate().map(|(at, one)| rule(self, at, one));
        let rules: Vec<String> = rules.collect::<Result<_, _>>()?;
        Ok(self.define(&rules.join(" | ")))
    }

    fn of_kind(
        &mut self,
        kind: &str,
        schema: &Map<String, Value>,
    ) -> Result<String, FormatRefused> {
        self.only(schema, keywords_of(kind))?;
        match kind {
            "null" => Ok(self.constant(&Value::Null)),
            "string" => Ok(self.text()),
            "integer" | "number" => Ok(self.number(kind, schema)),
            "boolean" => Ok(self.constants(&[true.into(), false.into()])),
            "array" => self.list(schema),
            "object" => self.object(schema),
            _ => self.unkept.rule("type").map(|()| self.any()),
        }
    }

    fn number(&mut self, kind: &str, schema: &Map<String, Value>) -> String {
        let mut number = schema.clone();
        number.retain(|name, _| NUMERIC_KEYWORDS.contains(&name.as_str()));
        number.insert("type".into(), kind.into());
        self.grammar.part(AnswerFormat::Schema(write(&number.into()).into()))
    }

    fn list(&mut self, schema: &Map<String, Value>) -> Result<String, FormatRefused> {
        let item = self.inner(&["items"], schema.get("items").unwrap_or(&Value::Bool(true)))?;
        let item = self.define(&item);
        let bound = |name: &str| schema.get(name).and_then(Value::as_u64);
        let (least, most) = (bound("minItems").unwrap_or(0), bound("maxItems"));
        let more = match most {
            Some(0) => return Ok(LarkGrammar::plain("[]")),
            Some(1) => String::new(),
            _ => {
                let most = most.map_or(String::new(), |most| (most - 1).to_string());
                format!("({} {item}){{{},{most}}}", self.separator(), least.saturating_sub(1))
            }
        };
        let optional = if least == 0 { "?" } else { "" };
        Ok(self.define(&format!("\"[\" ({item} {more}){optional} \"]\"")))
    }

    fn object(&mut self, schema: &Map<String, Value>) -> Result<String, FormatRefused> {
        let none = Map::new();
        let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
        let required = schema.get("required").and_then(Value::as_array);
        let required = required.into_iter().flatten().filter_map(Value::as_str);
        let required: Vec<String> = required.map(str::to_owned).collect();
        described(&required, properties, self.unkept)?;
        let more = schema.get("additionalProperties");
        if properties.is_empty() && more != Some(&Value::Bool(false)) {
            let more = more.unwrap_or(&Value::Bool(true));
            let value = self.inner(&["additionalProperties"], more)?;
            return Ok(self.dictionary(&value));
        }
        let members = self.members(properties, &required, self.syntax.pair)?;
        Ok(self.define(&format!("\"{{\" {members} \"}}\"")))
    }

    /// Pairs of any name and such a value.
    fn dictionary(&mut self, value: &str) -> String {
        let name = match self.syntax.quote {
            None => self.text(),
            Some(_) => "/[A-Za-z_][A-Za-z0-9_]*/".into(),
        };
        let pair = format!("{name} {} {value}", LarkGrammar::plain(self.syntax.pair));
        let pair = self.define(&pair);
        self.define(&format!("\"{{\" ({pair} ({} {pair})*)? \"}}\"", self.separator()))
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
        let Some(schema) = found.cloned() else {
            return self.unkept.rule("$ref").map(|()| self.any());
        };
        let rule = format!("named_{}_{}", self.at, self.named.len());
        self.named.insert(name.to_owned(), rule.clone());
        let outer = self.unkept.follow(name);
        let body = self.value(&schema)?;
        self.unkept.leave(outer);
        let _ = writeln!(self.grammar.rules, "{rule}: {body}");
        Ok(rule)
    }

    /// Any text.
    fn text(&mut self) -> String {
        let Some(quote) = self.syntax.quote else { return QUOTED.into() };
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
        let mut kinds = vec![self.text(), self.number("number", &Map::new())];
        kinds.extend(words.iter().map(|word| self.constant(word)));
        kinds.push(format!("\"[\" ({rule} ({} {rule})*)? \"]\"", self.separator()));
        kinds.push(self.dictionary(&rule));
        let _ = writeln!(self.grammar.rules, "{rule}: {}", kinds.join(" | "));
        rule
    }

    fn constants(&mut self, values: &[Value]) -> String {
        let values: Vec<String> = values.iter().map(|one| self.constant(one)).collect();
        self.define(&values.join(" | "))
    }

    /// Whether the notation has this constant.
    fn is_written(&self, value: &Value) -> bool {
        match value {
            Value::String(text) => self.syntax.quote.is_none_or(|quote| !text.contains(quote)),
            Value::Array(_) | Value::Object(_) => odd_number(value).is_some(),
            _ => true,
        }
    }

    fn constant(&self, value: &Value) -> String {
        let is_python = self.syntax.quote.is_none();
        match value {
            Value::String(text) => self.text_constant(text),
            Value::Bool(true) if is_python => "(\"True\" | \"true\")".into(),
            Value::Bool(false) if is_python => "(\"False\" | \"false\")".into(),
            Value::Null if is_python => "(\"None\" | \"null\")".into(),
            other => LarkGrammar::plain(&write(other)),
        }
    }

    fn text_constant(&self, text: &str) -> String {
        let Some(quote) = self.syntax.quote else { return quoted(text) };
        let mark = self.grammar.literal(quote);
        let inner = if text.is_empty() { String::new() } else { LarkGrammar::plain(text) };
        format!("{mark} {inner} {mark}")
    }
}

/// A text in Python's quotes of either kind.
fn quoted(text: &str) -> String {
    let double = json!(text).to_string();
    let inner = double[1..double.len() - 1].replace("\\\"", "\"").replace('\'', "\\'");
    let [single, double] = [format!("'{inner}'"), double].map(|text| LarkGrammar::plain(&text));
    format!("({single} | {double})")
}

/// A schema of several types, without the keywords that are only about other types than this one.
fn without_others(kind: &str, schema: &Map<String, Value>) -> Map<String, Value> {
    let mut schema = schema.clone();
    let of_types = [&NUMERIC_KEYWORDS[..], &LIST_KEYWORDS, &OBJECT_KEYWORDS].concat();
    schema.retain(|name, _| {
        let name = name.as_str();
        !of_types.contains(&name) || keywords_of(kind).contains(&name)
    });
    schema
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call_family::tests::MARKS;
    use crate::forms::tool_calls::{CALL_FORMS, CallForm};
    use crate::grammar::CallRule;
    use crate::grammar::compile::tests::{walk, writes};
    use crate::reader::{ReadCall, read_calls};
    use crate::testing;
    use crate::{AnswerFormat, TextModel};

    fn text() -> TextModel {
        let template = format!("{{# {} #}}{}", MARKS.join(" "), testing::CHATML);
        testing::text_model(&testing::with_marks(&MARKS, &template))
    }

    fn tool(parameters: String) -> ToolDefinition {
        ToolDefinition { name: "f".into(), parameters, strict: true }
    }

    fn formats() -> impl Iterator<Item = CallForm> {
        CALL_FORMS.into_iter().filter(|format| {
            ["Gemma", "LFM", "OLMo"].iter().any(|name| format.family.contains(name))
        })
    }

    fn grammar(
        text: &TextModel,
        format: CallForm,
        schema: &Value,
    ) -> Result<AnswerFormat, FormatRefused> {
        let tool = tool(schema.to_string());
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
        let tools = [tool(schema.to_string())];
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
    fn numbers_of_any_size_are_exact_in_every_form() {
        let text = text();
        let schema = json!({ "type": "object", "required": ["id", "n"] }).to_string();
        let properties = r#","properties":{"id":{"const":9007199254740993},
            "n":{"type":"integer","minimum":18446744073709551615,"maximum":18446744073709551615}}}"#;
        let parameters = schema.trim_end_matches('}').to_owned() + properties;
        let tools = [tool(parameters)];
        let rule = CallRule { required: true, only: None, most: 1 };
        for form in CALL_FORMS {
            let format = form.format(&tools, &rule, None, &text.markup).unwrap();
            let compiled = text.compile(&format).unwrap();
            let answers: Vec<String> =
                (0..60).filter_map(|seed| walk(&text, &compiled, seed, 700)).collect();
            assert!(!answers.is_empty(), "{}", form.family);
            for answer in answers {
                for number in ["9007199254740993", "18446744073709551615"] {
                    assert!(answer.contains(number), "{}: {answer}", form.family);
                }
            }
        }
    }

    #[test]
    fn any_text_and_any_value_are_read_back() {
        let properties = json!({ "any": {}, "text": { "type": "string" } });
        let (text, schema) = (text(), of(&properties, &["any", "text"]));
        let tools = [tool(schema.to_string())];
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

    /// A strict tool is refused with the place. Of any other the rule is left out and named, and
    /// calls are written all the same.
    #[test]
    fn rules_that_the_notation_cannot_keep_to_are_refused_or_left_out() {
        let text = text();
        let list = json!({ "type": "array", "items": { "format": "date", "type": "string" } });
        for (property, place, call) in [
            (json!({ "type": "string", "pattern": "a" }), "/a/pattern", "a='b'"),
            (json!({ "type": "array", "uniqueItems": true }), "/a/uniqueItems", "a=[1, 1]"),
            (list, "/a/items/format", "a=['b']"),
            (json!({ "allOf": [{}, {}] }), "/a/allOf", "a=1"),
            (json!({ "oneOf": [{}], "type": "null" }), "/a/oneOf", "a=None"),
            (json!({ "anyOf": [{}, { "minLength": 1 }] }), "/a/anyOf/1/minLength", "a=1"),
            (json!({ "type": [] }), "/a/type", "a=1"),
            (json!({ "$ref": "#/elsewhere" }), "/a/$ref", "a=1"),
            (json!({ "enum": [{}], "type": "integer" }), "/a/enum", "a=2"),
            (json!({ "const": [], "type": "integer" }), "/a/const", "a=2"),
            (
                json!({ "type": "object", "properties": {}, "required": ["b"] }),
                "/a/required",
                "a={'c': 1}",
            ),
            (json!(false), "/a/false", "a=1"),
        ] {
            let schema = of(&json!({ "a": property }), &["a"]);
            for format in formats() {
                let refused = grammar(&text, format, &schema).unwrap_err();
                let at = format!("(at #/properties{place})");
                assert!(refused.0.contains(&at), "{property}: {}", refused.0);
                let loose = ToolDefinition { strict: false, ..tool(schema.to_string()) };
                let left_out = format.left_out(std::slice::from_ref(&loose), &text.markup);
                assert_eq!(left_out, [(0, format!("/properties{place}"))], "{property}");
                let rule = CallRule { required: true, only: None, most: 1 };
                let grammar = format.format(&[loose], &rule, None, &text.markup).unwrap();
                let compiled = text.compile(&grammar).unwrap();
                let written = format!("<function_calls>f({call})</function_calls>");
                let is_olmo = format.family.contains("OLMo");
                assert!(!is_olmo || writes(&text, &compiled, &written), "{written}");
            }
        }
    }

    #[test]
    fn a_property_with_a_name_that_cannot_be_written_is_refused_or_left_out() {
        let (text, schema) = (text(), of(&json!({ "a b": {}, "c": {} }), &["a b"]));
        for format in formats() {
            let refused = grammar(&text, format, &schema).unwrap_err();
            assert!(refused.0.contains("use letters, digits and underscores"), "{}", refused.0);
            let loose = ToolDefinition { strict: false, ..tool(schema.to_string()) };
            let left_out = format.left_out(&[loose], &text.markup);
            assert_eq!(left_out, [(0, "/properties/a b".to_owned())]);
        }
    }
}
