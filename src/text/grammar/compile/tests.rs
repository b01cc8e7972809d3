//! Random walks through grammars: whatever is allowed leads to an answer that the format's own
//! validator accepts, or to one that can still become it.

use super::*;
use crate::testing::{byte_level, text_model};
use crate::{SchemaFormat, TextModel};
use serde_json::{Value, json};

const SCHEMA: &str = r#"{"type":"object","properties":{"b":{"type":"integer","minimum":-5,"maximum":12},
    "a":{"enum":["x","<tool>"]},"c":{"type":"array","items":{"type":"boolean"},"maxItems":2}},
    "required":["b","a"],"additionalProperties":false}"#;

/// Two objects that require each other.
const ENDLESS: &str = r##"{"$ref":"#/$defs/a","$defs":{
    "a":{"type":"object","properties":{"x":{"$ref":"#/$defs/b"}},"required":["x"]},
    "b":{"type":"object","properties":{"y":{"$ref":"#/$defs/a"}},"required":["y"]}}}"##;

const CONDITION_ON_TWO: &str = r#"{"type":"object","properties":{"k":{"enum":[1,2]}},"required":["k"],
    "if":{"properties":{"k":{"const":1}},"required":["k","x"]},"then":{"required":["y"]}}"#;
const FAULT_INSIDE: &str = r##"{"type":"object","properties":{"a":{"items":{"$ref":"#/$defs/d"},"minItems":1}},
    "required":["a"],"$defs":{"d":{"type":"object","properties":{"b":{"type":"string","minLength":2,"maxLength":1}},
    "required":["b"]}}}"##;

fn allowed(mask: &[u32]) -> Vec<u32> {
    (0..mask.len() as u32 * 32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

/// A sequence of numbers that looks random.
struct Dice(u64);

impl Dice {
    fn below(&mut self, count: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % count
    }
}

/// Walks until the answer ends, at most `most` tokens. `None`: it was cut off.
pub fn walk(text: &TextModel, grammar: &CompiledGrammar, seed: u64, most: usize) -> Option<String> {
    let (place, mut ids) = (grammar.start(), Vec::new());
    let mut dice = Dice(seed);
    for _ in 0..most {
        let allowed = allowed(&place.allowed_after(&ids).unwrap());
        assert!(!allowed.is_empty(), "nothing may follow {:?}", text.tokenizer.decode(&ids, false));
        // Long texts are cut short: half of the time an end is taken where it is allowed.
        let end = allowed.iter().find(|id| text.eos_ids.contains(id));
        if end.is_some() && dice.below(2) == 0 || allowed.iter().all(|id| text.eos_ids.contains(id))
        {
            return Some(text.tokenizer.decode(&ids, false).unwrap());
        }
        let others: Vec<u32> =
            allowed.into_iter().filter(|id| !text.eos_ids.contains(id)).collect();
        let id = others[dice.below(others.len())];
        ids.push(id);
    }
    None
}

/// Whether an answer can be this text, to its end.
pub fn writes(text: &TextModel, grammar: &CompiledGrammar, written: &str) -> bool {
    let (place, ids) = (grammar.start(), text.tokenizer.encode(written, false).unwrap());
    ids.iter().chain(&text.eos_ids[..1]).enumerate().all(|(at, next)| {
        place.allowed_after(&ids[..at]).is_ok_and(|mask| allowed(&mask).contains(next))
    })
}

fn answers(format: &AnswerFormat, most: usize) -> Vec<String> {
    let text = text_model(&byte_level());
    let grammar = text.compile(format).unwrap();
    let answers: Vec<String> =
        (0..60).filter_map(|seed| walk(&text, &grammar, seed, most)).collect();
    assert!(answers.len() > 5, "only {} answers of {format:?} came to an end", answers.len());
    answers
}

#[test]
fn answers_are_what_the_schema_allows() {
    for answer in answers(&AnswerFormat::Schema(SCHEMA.into()), 400) {
        let value: Value = serde_json::from_str(&answer).unwrap();
        let members: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert!(["b", "a"] == members[..2], "members keep the schema's order: {answer}");
        assert!((-5..=12).contains(&(value["b"].as_f64().unwrap() as i64)), "{answer}");
        assert!(["x", "<tool>"].contains(&value["a"].as_str().unwrap()), "{answer}");
        let items = value.get("c").map_or(0, |items| items.as_array().unwrap().len());
        assert!(items <= 2 && members.len() <= 3, "{answer}");
    }
}

#[test]
fn numbers_with_bounds_have_no_endless_decimals() {
    let number = r#"{"type":["number","null"],"minimum":0,"exclusiveMaximum":37}"#;
    let text = text_model(&byte_level());
    for schema in [number, r#"{"enum":[{"type":"number","minimum":1}]}"#] {
        let grammar = text.compile(&AnswerFormat::Schema(schema.into())).unwrap();
        for seed in 0..60 {
            let answer = walk(&text, &grammar, seed, 400).unwrap();
            let value: Value = serde_json::from_str(&answer).unwrap();
            let decimals = answer
                .split_once('.')
                .map_or(0, |(_, after)| after.trim_end().trim_end_matches('0').len());
            assert!(decimals <= 8, "{answer}");
            let is_allowed = value.as_f64().is_none_or(|number| (0.0..37.0).contains(&number));
            assert!(is_allowed && !answer.contains("multipleOf"), "{answer}");
        }
    }
    let grammar = text.compile(&AnswerFormat::Schema(number.into())).unwrap();
    let ids = |written: &str| text.tokenizer.encode(written, false).unwrap();
    let after = |written| allowed(&grammar.start().allowed_after(&ids(written)).unwrap());
    let nine = ids("9")[0];
    assert!(after("0.1234567").contains(&nine) && !after("0.12345678").contains(&nine));
    // Bounds that only smaller units can meet, and units of the schema's own.
    let escaped = r#","multiple\u004ff":0.25"#;
    for (least, most, unit) in
        [("1e-12", "2e-12", ""), ("0", "1", r#","multipleOf":0.25"#), ("0", "1", escaped)]
    {
        let schema = format!(r#"{{"type":"number","minimum":{least},"maximum":{most}{unit}}}"#);
        let grammar = text.compile(&AnswerFormat::Schema(schema.as_str().into())).unwrap();
        let answers = (0..60).filter_map(|seed| walk(&text, &grammar, seed, 400));
        let values: Vec<f64> = answers.map(|answer| answer.trim().parse().unwrap()).collect();
        let bounds = least.parse().unwrap()..=most.parse().unwrap();
        assert!(!values.is_empty() && values.iter().all(|value| bounds.contains(value)));
        let is_multiple = |value: &f64| (value * 4.0).fract() == 0.0;
        assert!(unit.is_empty() || values.iter().all(is_multiple), "{schema}: {values:?}");
    }
}

#[test]
fn white_space_and_classes_are_bounded() {
    let text = text_model(&byte_level());
    let writes = |format: AnswerFormat, written: &str| {
        writes(&text, &text.compile(&format).unwrap(), written)
    };
    let blanks = |count: usize| " ".repeat(count);
    for (gap, expect) in [
        (String::new(), true),
        (blanks(1), true),
        (blanks(2), false),
        ("\n".into(), true),
        (format!("\n{}", blanks(20)), true),
        (format!("\n{}", blanks(21)), false),
        ("\n\n".into(), false),
        ("\t".into(), false),
    ] {
        let written = format!("{{\"b\":{gap}1,{gap}\"a\":\"x\"{gap}}}");
        assert_eq!(writes(AnswerFormat::Schema(SCHEMA.into()), &written), expect, "{written:?}");
    }
    for (white_space, written, expect) in [
        (None, "[1,2]", true),
        (None, "[1, 2]", false),
        (Some("\t"), "[1,\t2]", true),
        (Some("\t"), "[1, 2]", false),
    ] {
        let schema = r#"{"items":{"type":"integer"},"type":"array"}"#;
        let white_space = Some(white_space.unwrap_or_default().to_owned());
        let schema = SchemaFormat { white_space, ..schema.into() };
        let format = AnswerFormat::Schema(schema);
        assert_eq!(writes(format, written), expect, "{written:?}");
    }
    for (expression, written, expect) in [
        (r"\d+", "12", true),
        (r"\d+", "🯸", false),
        (r"[\d\s]{3}", "1 2", true),
        (r"[\d\s]{3}", "1\u{3000}2", false),
        (r"\w", "é", false),
        (r"[^\d]", "é", true),
        (r"a/b", "a/b", true),
    ] {
        let format = AnswerFormat::Regex(expression.into());
        assert_eq!(writes(format, written), expect, "{expression} {written}");
    }
}

#[test]
fn objects_that_name_members_are_closed_unless_a_setting_opens_them() {
    let named = r#"{"properties":{"a":{"properties":{"b":true}}},"required":["a","c"]}"#;
    let both =
        r#"{"allOf":[{"properties":{"a":true}},{"properties":{"b":true},"required":["c"]}]}"#;
    for (schema, written, is_always) in [
        (named, r#"{"a":{"b":1},"c":2}"#, true),
        (named, r#"{"a":{"b":1},"c":2,"d":3}"#, false),
        (named, r#"{"a":{"c":1},"c":2}"#, false),
        (both, r#"{"a":1,"b":2,"c":3}"#, true),
        (both, r#"{"c":1,"d":2}"#, false),
        (r#"{"type":"object"}"#, r#"{"d":3}"#, true),
        (r#"{"additionalProperties":{"type":"null"},"properties":{}}"#, r#"{"d":null}"#, true),
    ] {
        for open in [false, true] {
            let mut text = text_model(&byte_level());
            text.formats.open_objects = open;
            let grammar = text.compile(&AnswerFormat::Schema(schema.into())).unwrap();
            let expect = is_always || open;
            assert_eq!(writes(&text, &grammar, written), expect, "{open} {schema}: {written}");
        }
    }
}

/// Small models add members until max_tokens. What names a number of members, or members that may
/// be left out, is as it was written.
#[test]
fn objects_that_name_no_members_have_a_bound() {
    let object = |count: usize| {
        let members: Vec<String> = (0..count).map(|at| format!("\"{at}\":1")).collect();
        format!("{{{}}}", members.join(","))
    };
    let mut text = text_model(&byte_level());
    text.formats.max_members = 3;
    for (schema, most) in [
        (r#"{"type":"object"}"#, 3),
        (r#"{"type":["object","null"],"additionalProperties":{"type":"integer"}}"#, 3),
        (
            r#"{"type":"object","patternProperties":{"^[0-9]+$":{}},"additionalProperties":false}"#,
            3,
        ),
        (r#"{"anyOf":[{"type":"object","additionalProperties":{}},{"type":"null"}]}"#, 3),
        (
            r#"{"type":"object","required":["0"],"properties":{"0":{}},"additionalProperties":{}}"#,
            4,
        ),
        (r#"{"type":"object","minProperties":5}"#, 5),
        (r#"{"type":"object","maxProperties":7}"#, 7),
        (r#"{"type":"object","properties":{"0":{}},"additionalProperties":{}}"#, 20),
        (r#"{"allOf":[{"type":"object"},{"properties":{"0":{}},"additionalProperties":{}}]}"#, 20),
    ] {
        let grammar = text.compile(&AnswerFormat::Schema(schema.into())).unwrap();
        assert!(writes(&text, &grammar, &object(most)), "{schema}");
        assert_eq!(writes(&text, &grammar, &object(most + 1)), most == 20, "{schema}");
    }
}

#[test]
fn a_rule_younger_than_the_draft_is_kept() {
    let old = r#""$schema":"http://json-schema.org/draft-04/schema#""#;
    let answers = |schema: String| answers(&AnswerFormat::Schema(schema.into()), 60);
    for answer in answers(format!(r#"{{{old},"const":5}}"#)) {
        assert_eq!(answer, "5");
    }
    let pair = format!(
        r#"{{"type":"array","prefixItems":[{{{old},"const":1}}],"minItems":1,"items":false}}"#
    );
    for answer in answers(pair) {
        assert_eq!(serde_json::from_str::<Value>(&answer).unwrap(), json!([1]));
    }
}

#[test]
fn other_formats_are_kept_to() {
    let texts = ["yes", "no \"way\"", "yes, but"].map(String::from);
    for answer in answers(&AnswerFormat::Choice(texts.to_vec()), 40) {
        assert!(texts.contains(&answer), "{answer}");
    }
    for answer in answers(&AnswerFormat::Regex("[0-9]{3}-(a|b)+".into()), 40) {
        let (number, letters) = answer.split_once('-').unwrap();
        assert!(number.len() == 3 && number.bytes().all(|b| b.is_ascii_digit()), "{answer}");
        assert!(!letters.is_empty() && letters.bytes().all(|b| b == b'a' || b == b'b'), "{answer}");
    }
    for answer in answers(&AnswerFormat::Lark("start: \"(\" start \")\" | \"x\"".into()), 60) {
        let depth = answer.find('x').unwrap();
        assert_eq!(answer, format!("{}x{}", "(".repeat(depth), ")".repeat(depth)));
    }
    for answer in answers(&AnswerFormat::Schema(r#"{"type":"object"}"#.into()), 400) {
        assert!(serde_json::from_str::<Value>(&answer).unwrap().is_object(), "{answer}");
    }
}

/// The mark `<tool>` is one token. As text of an answer it comes from others, and the answer ends
/// with a token that ends answers, not in the middle.
#[test]
fn marks_are_never_text() {
    let text = text_model(&byte_level());
    let tool = text.tokenizer.token_to_id("<tool>").unwrap();
    let grammar = text.compile(&AnswerFormat::Choice(vec!["<tool>".into()])).unwrap();
    let (place, mut ids) = (grammar.start(), Vec::new());
    loop {
        let may = allowed(&place.allowed_after(&ids).unwrap());
        if may.iter().all(|id| text.eos_ids.contains(id)) {
            break;
        }
        assert!(!may.contains(&tool) && !may.iter().any(|id| text.eos_ids.contains(id)), "{may:?}");
        ids.push(may[0]);
    }
    assert_eq!(text.tokenizer.decode(&ids, false).unwrap(), "<tool>");
}

#[test]
fn what_cannot_be_kept_to_is_refused() {
    let text = text_model(&byte_level());
    let refused = |format: AnswerFormat| match text.compile(&format) {
        Ok(_) => "accepted".to_owned(),
        Err(why) => why.0,
    };
    let schema = |schema: &str| refused(AnswerFormat::Schema(schema.into()));
    for (given, expect) in [
        (r##"{"$ref":"#"}"##, "cannot be kept to"),
        (r#"{"$ref":"http://localhost/schema"}"#, "cannot be kept to"),
        (r#"{"type":"array","uniqueItems":true}"#, "uniqueItems"),
        (r#"{"if":{},"then":false}"#, "cannot be kept to"),
        (r#"{"type":"string","pattern":"a(?=b)"}"#, "look"),
        (r#"{"type":"string","pattern":"a\\bb"}"#, "word borders"),
        (r#"{"items":{"contains":{}}}"#, "(at #/items/contains)"),
        (r##"{"properties":{"a/b":{"$ref":"#/$defs/a"}}}"##, "(at #/properties/a~1b)"),
        (r#"{"properties":{"a":{"uniqueItems":true}}}"#, "(at #/properties/a/uniqueItems)"),
        (r#"{"type":"number","multipleOf":0.07}"#, "(at #/multipleOf)"),
        (r#"{"type":"number","minimum":9007199254740993.5}"#, "(at #/minimum)"),
        (r#"{"allOf":[{"type":"integer"},{"const":9007199254740993}]}"#, "(at #/allOf/1/const)"),
        (r#"{"enum":[9007199254740993],"multipleOf":2}"#, "(at #/enum)"),
        (r#"{"not":{"pattern":"a"}}"#, "(at #/not)"),
        (r#"{"not":{}}"#, "(at #/not)"),
        (r#"{"if":{"minimum":1},"then":{"maximum":3}}"#, "(at #/if)"),
        (CONDITION_ON_TWO, "(at #/if)"),
        (r#"{"enum":[1,2],"not":{"const":1.0}}"#, "(at #/not)"),
        (r#"{"type":"array","items":{"enum":[1,1.0]},"uniqueItems":true}"#, "(at #/uniqueItems)"),
        (r#"{"propertyNames":{"format":"uuid"}}"#, "(at #/propertyNames)"),
        (ENDLESS, "no finite value"),
        (FAULT_INSIDE, "greater than maxLength (1) (at #/properties/a/items/properties/b)"),
        (r#"{"oneOf":[{"minimum":1},{"maximum":9}]}"#, "use anyOf"),
        (r#"{"type":"integer","minimum":2,"maximum":1}"#, "cannot be kept to"),
        (r#"{"properties":{"a":{"items":{"type":"text"}}}}"#, "(at #/properties/a/items)"),
        ("false", "cannot be kept to"),
    ] {
        let why = schema(given);
        assert!(why.contains(expect), "{given}: {why}");
    }
    for (given, expect) in [("(", "unclosed group"), ("a(?!b)", "look"), (r"a\b", "word borders")] {
        let why = refused(AnswerFormat::Regex(given.into()));
        assert!(why.starts_with("cannot be kept to") && why.contains(expect), "{given}: {why}");
    }
    assert!(refused(AnswerFormat::Lark("begin: \"x\"".into())).contains("cannot be kept to"));
}

/// An expression of 56 bytes whose lexer grows without end. The answer fails, and nothing else.
#[test]
fn a_grammar_that_grows_fails_alone() {
    let text = text_model(&byte_level());
    let hostile = AnswerFormat::Regex("(.*a.{200}){5}.*b.{300}c".into());
    let Ok(grammar) = text.compile(&hostile) else { return };
    let (place, mut dice, mut ids) = (grammar.start(), Dice(1), Vec::new());
    let letters = ["a", "b", "c"].map(|letter| text.tokenizer.token_to_id(letter).unwrap());
    let failed = (0..20_000).find_map(|_| {
        ids.push(letters[dice.below(3)]);
        place.allowed_after(&ids).err()
    });
    assert!(failed.is_some(), "the grammar never failed");
    let sound = text.compile(&hostile).unwrap();
    assert!(walk(&text, &sound, 1, 5).is_none());
}

#[test]
fn a_compiled_format_is_kept() {
    let text = text_model(&byte_level());
    let choice = |number: usize| AnswerFormat::Choice(vec![number.to_string()]);
    let first = text.compile(&choice(0)).unwrap();
    assert!(Arc::ptr_eq(&first, &text.compile(&choice(0)).unwrap()));
    for number in 1..=MAX_KEPT {
        text.compile(&choice(number)).unwrap();
    }
    assert!(!Arc::ptr_eq(&first, &text.compile(&choice(0)).unwrap()));
}
