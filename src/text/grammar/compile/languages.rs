//! Grammars in GBNF, in Lark, and text with tags: each is accepted and tells its texts from others,
//! or is refused with a reason.

use super::tests::{walk, writes};
use crate::grammar::{FormatTag, TagContent, TaggedText};
use crate::testing::{byte_level, text_model};
use crate::{AnswerFormat, TextModel};

const NESTED: &str = "root ::= \"(\" root \")\" | \"x\"";
/// Any JSON value, as a person writes it in this language.
const JSON: &str = r#"
    # values
    root   ::= object
    object ::= "{" ws ( member ("," ws member)* )? "}" ws
    member ::= string ":" ws value
    value  ::= object | array | string | number | ("true" | "false" | "null") ws
    array  ::= "[" ws ( value ("," ws value)* )? "]" ws
    string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" ( ["\\/bfnrt] | "u" [0-9a-fA-F]{4} ) )* "\"" ws
    number ::= "-"? ( "0" | [1-9] [0-9]{0,15} ) ( "." [0-9]{1,8} )? ( [eE] [-+]? [0-9]{1,3} )? ws
    ws     ::= ( [ \t\n] ws )?
"#;
/// White space may end a number, and a line break a line.
const SUMS: &str = "root ::= (expr \"=\" ws term \"\\n\")+\nexpr ::= term ([-+*/] term)*\n\
    term ::= ident | num | \"(\" ws expr \")\" ws\nident ::= [a-z] [a-z0-9_]* ws\n\
    num ::= [0-9]+ ws\nws ::= [ \\t\\n]*";
/// A greedy terminal would swallow what follows it.
const SWALLOWED: &str = "root ::= \"<\" root \">\" | [a-z]* \"abc\" \"!\"?";
const WITH_PREFIX: &str = "root ::= \"[\" root \"]\" | \"a\" \"b\" | \"ab\" \"c\" | \"abd\"";

/// A grammar, a text of it, and one that is none.
const GRAMMARS: [(&str, &str, &str); 25] = [
    (NESTED, "((x))", "((x)"),
    (JSON, r#"{"a":[1,-2.5e3,{"b":"c\n\u00e9"}],"d":null }"#, r#"{"a":01}"#),
    (JSON, "{ \"ä\" : { } }", r#"{"a":"b}"#),
    (SUMS, "a1 +2*( b -3) =\n 7\n\nc=d \n", "a+=1\n"),
    (SWALLOWED, "<abcabc>", "<ab>"),
    (SWALLOWED, "abc!", "abd"),
    (WITH_PREFIX, "[ab]", "[abe]"),
    (WITH_PREFIX, "[abc]", "[a]"),
    (WITH_PREFIX, "[abd]", "[abcd]"),
    (r#"root ::= "yes" | "no""#, "no", "maybe"),
    ("root ::= (\"a\" | \"b\" root)", "bba", "bb"),
    ("root ::= \"a\"{2}", "aa", "aaa"),
    ("root ::= \"a\"{2,}", "aaaa", "a"),
    ("root ::= \"a\"{1,3} \"b\"?", "aaab", "aaaab"),
    ("root ::= \"a\"{0} \"b\"+", "bb", "ab"),
    ("root ::= [0-9a-f]*", "1f", "1g"),
    ("root ::= [^a-c\\]\\-^]{1,2}", "d\n", "]"),
    ("root ::= [-+] .", "+é", "+"),
    (r#"root ::= "\x41\u00e9\U0001F642\t\"\\\[/""#, "Aé🙂\t\"\\[/", "A"),
    ("root ::=\n  # a list\n  item-1+\nitem-1 ::= \"- \" [^\\n]+ \"\\n\"\n", "- a\n- b\n", "- a"),
    ("root ::= a\n  | b # or\na ::= \"1\"\nb ::= \"2\"", "2", "3"),
    ("root ::= a_b \"\" \"!\"\na_b ::= \"1\" |", "!", "1"),
    ("start: \"a\" start | \"b\"", "aab", "aa"),
    ("start: /[0-9]{2}/ // root ::= x", "12", "1"),
    ("start: \"root ::= x\"", "root ::= x", "x"),
];

fn format(grammar: &str) -> AnswerFormat {
    AnswerFormat::of_grammar(grammar.into())
}

#[test]
fn grammars_tell_their_texts_from_others() {
    let text = text_model(&byte_level());
    for (grammar, good, bad) in GRAMMARS {
        let is_lark = grammar.starts_with("start");
        assert_eq!(matches!(format(grammar), AnswerFormat::Lark(_)), is_lark, "{grammar}");
        let compiled =
            text.compile(&format(grammar)).unwrap_or_else(|why| panic!("{grammar}: {why}"));
        assert!(writes(&text, &compiled, good), "{grammar}: {good}");
        assert!(!writes(&text, &compiled, bad), "{grammar}: {bad}");
        for seed in 0..10 {
            walk(&text, &compiled, seed, 60);
        }
    }
}

#[test]
fn random_answers_of_a_json_grammar_are_json() {
    let text = text_model(&byte_level());
    let compiled = text.compile(&format(JSON)).unwrap();
    let answers: Vec<String> =
        (0..60).filter_map(|seed| walk(&text, &compiled, seed, 400)).collect();
    assert!(answers.len() > 5, "{} answers", answers.len());
    for answer in answers {
        serde_json::from_str::<serde_json::Value>(&answer).unwrap();
    }
}

fn refused(text: &TextModel, format: &AnswerFormat) -> String {
    text.compile(format).err().map_or_else(|| "accepted".to_owned(), |why| why.0)
}

#[test]
fn a_grammar_that_is_none_is_refused_with_its_line() {
    let text = text_model(&byte_level());
    let chain: Vec<String> = (0..150).map(|at| format!("\nr{at} ::= r{}", at + 1)).collect();
    let chain = chain.concat();
    for (grammar, why) in [
        ("root ::= \"a\" (", "line 1: a ( has no )"),
        ("root ::= \"a\"\n\nb ::= \"x\" c", "line 3: there is no rule named c"),
        ("start ::= \"a\"", "no rule named root"),
        ("root ::= \"a", "line 1: a text or a class has no end"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2: the rule root is there twice"),
        ("root ::= \"\\q\"", "line 1: \\q is no escape"),
        ("root ::= \"\\uD800\"", "line 1: an escape needs 4 digits"),
        ("root ::= []", "line 1: a class has no characters"),
        ("root ::= [z-a]", "line 1: a range ends before it begins"),
        ("root ::= \"a\"{3,2}", "line 1: a repetition is"),
        ("root ::= \"a\"{99999}", "line 1: a repetition is"),
        ("root ::= \"a\" )", "line 1: there is a ) without a ("),
        ("root ::=\n \"a\" & \"b\"", "line 2: '&' is nothing that begins"),
        ("root ::= <token>", "line 1: '<' is nothing that begins"),
        ("root ::= \"a\"\n\"b\" ::= c", "line 2:"),
        (&format!("root ::= r0{chain}\nr150 ::= \"a\""), "more than 100 of its rules"),
        ("root ::= \"a\" root", "leads back to itself"),
        ("start: \"a\" start", "the rule start leads back to itself"),
        ("start: \"x\" | \"a\" b\nb: \"b\" c\nc: b | \"c\" b", "leads back to itself"),
        ("start: start \"x\"", "cannot be kept to"),
    ] {
        let found = refused(&text, &format(grammar));
        assert!(
            found.starts_with("cannot be kept to") && found.contains(why),
            "{grammar}: {found}"
        );
    }
}

/// What doubles with each rule is looked at once.
#[test]
fn rules_that_double_are_read_in_no_time() {
    let text = text_model(&byte_level());
    let doubled: Vec<String> = (0..40).map(|at| format!("\nr{at} ::= r{0} r{0}", at + 1)).collect();
    let doubled = doubled.concat();
    let grammar = format!("root ::= \"(\" root \")\" | r0{doubled}\nr40 ::= \"a\"?");
    let began = std::time::Instant::now();
    let _ = text.compile(&format(&grammar));
    assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
}

fn tag(begin: &str, schema: &str, end: &str) -> FormatTag {
    let content = TagContent::Format(AnswerFormat::Schema(schema.into()));
    FormatTag { begin: begin.into(), content, end: end.into() }
}

fn calls() -> TaggedText {
    let number = r#"{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}"#;
    let tags = vec![
        tag("<f=add>", number, "</f>"),
        tag("<f=say@part_0>", r#"{"type":"null"}"#, "</f>"),
        FormatTag { begin: "{{".into(), content: TagContent::Text, end: "}}".into() },
    ];
    let triggers = vec!["<f=".to_owned(), "{{".to_owned()];
    TaggedText { triggers, tags, ..TaggedText::default() }
}

#[test]
fn parts_of_a_text_keep_to_the_formats_of_their_tags() {
    let text = text_model(&byte_level());
    let once = TaggedText { at_least_one: true, stop_after_first: true, ..calls() };
    let one = TaggedText { at_least_one: true, ..calls() };
    let first = TaggedText { stop_after_first: true, ..calls() };
    for (written, any, at_least_one, stops) in [
        ("", true, false, true),
        ("plain < text {", true, false, true),
        ("so: <f=add>{\"n\": 1}</f>", true, true, true),
        ("so: <f=add>{\"n\": 1}</f> done", true, true, false),
        ("<f=say@part_0>null</f><f=add>{\"n\":2}</f>", true, true, false),
        ("a {{any <f= text}} b", true, true, false),
        ("<f=add>{\"n\": \"1\"}</f>", false, false, false),
        ("<f=other>1</f>", false, false, false),
        ("<f=add>{\"n\": 1}", false, false, false),
        ("so <f=", false, false, false),
    ] {
        for (format, expect) in
            [(&calls(), any), (&one, at_least_one), (&first, stops), (&once, stops && at_least_one)]
        {
            let format = AnswerFormat::Tagged(Box::new(format.clone()));
            let compiled = text.compile(&format).unwrap();
            assert_eq!(writes(&text, &compiled, written), expect, "{written:?} {format:?}");
        }
    }
}

#[test]
fn formats_inside_formats_keep_their_parts() {
    let text = text_model(&byte_level());
    let tagged = AnswerFormat::Tagged(Box::new(calls()));
    let schema = |schema: &str| AnswerFormat::Schema(schema.into());
    let both = AnswerFormat::either(vec![
        AnswerFormat::sequence(vec![schema("{\"const\":1}"), AnswerFormat::Regex("[a-c]+".into())]),
        tag("<x>", "{\"const\":2}", "</x>").alone(),
        AnswerFormat::sequence(vec![AnswerFormat::Choice(vec!["T ".into()]), tagged]),
    ]);
    let compiled = text.compile(&both).unwrap();
    for (written, expect) in [
        ("1ab", true),
        ("1", false),
        ("<x>2</x>", true),
        ("<x>1</x>", false),
        ("T <f=add>{\"n\": 1}</f> a", true),
        ("T <f=add>{\"n\": \"1\"}</f>", false),
    ] {
        assert_eq!(writes(&text, &compiled, written), expect, "{written}");
    }
}

#[test]
fn every_tag_begins_with_a_trigger_and_every_trigger_a_tag() {
    assert_eq!(calls().fault(), None);
    let lost = TaggedText { triggers: vec!["{{".into()], ..calls() };
    assert_eq!(lost.fault(), Some("<f=add>"));
    let idle = TaggedText { triggers: ["<f=", "{{", "[["].map(str::to_owned).into(), ..calls() };
    assert_eq!(idle.fault(), Some("[["));
}

/// The library follows them one inside the other.
#[test]
fn rules_that_lead_to_each_other_end_no_process() {
    let text = text_model(&byte_level());
    for letter in ["r", "R"] {
        let rule = |at: usize| format!("{letter}{at}: {letter}{}\n", at + 1);
        let rules = (0..4_500).map(rule).collect::<Vec<String>>().concat();
        let grammar = format!("start: {letter}0\n{rules}{letter}4500: \"a\"\n");
        let _ = text.compile(&AnswerFormat::Lark(grammar));
    }
}
