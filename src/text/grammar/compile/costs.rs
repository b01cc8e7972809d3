//! Formats whose cost is out of proportion are refused, and large ones that cost little are not.

use super::tests::walk;
use super::*;
use crate::testing::{byte_level, text_model};
use serde_json::{Map, Value, json};

const JSON_IN_GBNF: &str = r#"root ::= v
v ::= o | a | s | n
o ::= "{" (s ":" v ("," s ":" v)*)? "}"
a ::= "[" (v ("," v)*)? "]"
s ::= "\"" [a-z ]* "\""
n ::= [0-9]+
"#;

fn schema(schema: &Value) -> AnswerFormat {
    AnswerFormat::Schema(schema.to_string().into())
}

fn members(count: usize, name: impl Fn(usize) -> String, member: &Value) -> Value {
    (1..=count).map(|at| (name(at), member.clone())).collect::<Map<_, _>>().into()
}

fn optional(count: usize) -> AnswerFormat {
    let properties = members(count, |at| format!("p{at}"), &json!({ "type": "string" }));
    schema(&json!({ "type": "object", "properties": properties }))
}

/// Patterns that exclude each other.
fn patterns(count: usize) -> Value {
    let named = members(count, |at| format!("^(a|b){{{at}}}c*$"), &json!({ "type": "string" }));
    json!({ "type": "object", "patternProperties": named })
}

/// A schema with patterns, merged with each of many others.
fn merged_patterns(count: usize, alternatives: usize) -> AnswerFormat {
    let other = |at| json!({ "properties": { "k": { "const": at } }, "required": ["k"] });
    let either = |at| json!({ "allOf": [{ "$ref": "#/$defs/a" }, other(at)] });
    let all: Vec<Value> = (0..alternatives).map(either).collect();
    schema(&json!({ "$defs": { "a": patterns(count) }, "anyOf": all }))
}

fn terminals(count: usize) -> AnswerFormat {
    let names: Vec<String> = (0..count).map(|at| format!("T{at}")).collect();
    let rules = (0..count).map(|at| format!("T{at}: /[a-z]{{1,{}}}x{at}/\n", at + 1));
    AnswerFormat::Lark(format!("start: {}\n{}", names.join(" | "), rules.collect::<String>()))
}

/// A terminal or rule of this many times two parts.
fn doubling(name: &str, count: usize) -> AnswerFormat {
    let next = |at| format!("{name}{at}: {name}{} {name}{}\n", at + 1, at + 1);
    let rules: String = (0..count).map(next).collect();
    AnswerFormat::Lark(format!("start: {name}0\n{rules}{name}{count}: \"a\"\n"))
}

/// Rules that are read in many ways cost the more, the longer the answer is. Tokens of several
/// letters come there within a trial.
#[test]
fn formats_that_cost_too_much_are_refused() {
    let text = text_model(&byte_level());
    let regex = |expression: &str| AnswerFormat::Regex(expression.into());
    let lark = |rules: &str| AnswerFormat::Lark(rules.into());
    for (name, format) in [
        ("three repetitions", regex("((a{1,1000}){1,1000}){1,1000}")),
        ("two repetitions", regex("(a{1,1000}){1,1000}")),
        ("small repetitions", regex("((a{1,100}){1,100}){1,100}")),
        ("990 optional members", optional(990)),
        ("600 optional members", optional(600)),
        ("200 patterns", schema(&patterns(200))),
        ("merged patterns", merged_patterns(50, 100)),
        ("patterns inside", schema(&json!({ "items": { "items": patterns(101) } }))),
        ("1 500 terminals", terminals(1500)),
        ("500 terminals", terminals(500)),
        ("doubling terminals", doubling("T", 40)),
        ("ambiguous", lark("start: s\ns: s s | s s s | /[helo]/ | \"\"\n")),
        ("left recursion", lark("start: a\na: a b | b a |\nb: a | b | /[helo]/\n")),
    ] {
        let refused = text.compile(&format).map(drop);
        assert_eq!(refused, Err(FormatRefused::costly()), "{name}");
    }
}

#[test]
fn large_formats_that_cost_little_are_not_refused() {
    let text = text_model(&byte_level());
    let regex = |expression: &str| AnswerFormat::Regex(expression.into());
    let texts = |count: usize| (0..count).map(|at| format!("value number {at}"));
    let branch =
        |at| json!({ "properties": { "k": { "const": at }, "v": true }, "required": ["k", "v"] });
    for (name, format) in [
        ("100 optional members", optional(100)),
        ("400 optional members", optional(400)),
        ("900 dates", schema(&json!({ "items": { "format": "date-time" }, "minItems": 900 }))),
        ("500 values", schema(&json!({ "enum": texts(500).collect::<Vec<_>>() }))),
        ("500 branches", schema(&json!({ "anyOf": (0..500).map(branch).collect::<Vec<_>>() }))),
        ("50 patterns", schema(&patterns(50))),
        ("merged patterns", merged_patterns(10, 40)),
        ("long text", schema(&json!({ "type": "string", "maxLength": 10_000 }))),
        ("a long repetition", regex("[^x]{20000}")),
        ("words", regex("([A-Z][a-z]+ ){1,20}[A-Z][a-z]+")),
        ("1 000 choices", AnswerFormat::Choice(texts(1000).collect())),
        ("50 terminals", terminals(50)),
        ("doubling rules", doubling("r", 60)),
        ("JSON in GBNF", AnswerFormat::Gbnf(JSON_IN_GBNF.into())),
    ] {
        let grammar = text.compile(&format).unwrap_or_else(|why| panic!("{name}: {why}"));
        walk(&text, &grammar, 1, 40);
    }
}

/// A refusal costs what a compilation does.
#[test]
fn a_refusal_is_kept() {
    let text = text_model(&byte_level());
    let grammars =
        Grammars::new(&text.tokenizer, &text.eos_ids, FormatSettings::default()).unwrap();
    let costly = optional(990);
    assert!(grammars.compile(&costly).is_err());
    assert!(grammars.find(&costly).is_some_and(|kept| kept.is_err()));
}
