//! Reads any bytes as canonical JSON, and compares with serde_json where both read the same
//! language.

use crate::wire::json::{JsonError, JsonTree, fingerprint};
use cresset_base::{Mutation, SessionId, mutated};
use serde_json::Value;
use uuid::Uuid;

const TEXTS: &[&[u8]] = &[
    b"",
    br#" {"b":[1,-0.5e+3,true,null],"a":{"\u0061\n":"\ud83d\ude00\/"}} "#,
    br#"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[{"a":[]}]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]"#,
    br#"{"a":1,"\u0061":2,"":"","b":{"c":{},"d":[{}]}}"#,
];

fn of(body: &JsonTree) -> [u8; 32] {
    fingerprint("POST", "/v1/chat/completions", SessionId(Uuid::nil()), body)
}

/// Whether both are the same tree; numbers are compared as serde_json reads their tokens.
fn is(canonical: &JsonTree, value: &Value) -> bool {
    match (canonical, value) {
        (JsonTree::Null, Value::Null) => true,
        (JsonTree::Bool(ours), Value::Bool(theirs)) => ours == theirs,
        (JsonTree::String(ours), Value::String(theirs)) => ours == theirs,
        (JsonTree::Number(literal), Value::Number(_)) => {
            serde_json::from_str::<Value>(literal).ok().as_ref() == Some(value)
        }
        (JsonTree::Array(ours), Value::Array(theirs)) => {
            ours.len() == theirs.len()
                && ours.iter().zip(theirs).all(|(ours, theirs)| is(ours, theirs))
        }
        (JsonTree::Object(ours), Value::Object(theirs)) => {
            ours.len() == theirs.len()
                && ours
                    .iter()
                    .all(|(key, ours)| theirs.get(key).is_some_and(|theirs| is(ours, theirs)))
        }
        _ => false,
    }
}

/// Counts the members of all objects in a JSON text: colons outside of strings.
fn members(text: &[u8]) -> usize {
    let (mut inside, mut escaped, mut count) = (false, false, 0);
    for byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => inside = !inside,
            b':' if !inside => count += 1,
            _ => {}
        }
    }
    count
}

#[test]
fn canonical_json() {
    bolero::check!().with_iterations(10_000).with_type().for_each(|mutation: &Mutation| {
        let text = mutated(TEXTS, mutation);
        match (JsonTree::parse(&text), serde_json::from_slice::<Value>(&text)) {
            (Ok(canonical), theirs) => {
                // serde_json refuses numbers beyond f64; it reads everything else as well.
                let number_too_large = |error: &serde_json::Error| {
                    error.to_string().starts_with("number out of range")
                };
                assert!(
                    theirs.as_ref().map_or_else(number_too_large, |theirs| is(&canonical, theirs))
                );
                assert_eq!(
                    members(canonical.canonical().as_bytes()),
                    members(&text),
                    "a key is there twice"
                );
                let again = JsonTree::parse(canonical.canonical().as_bytes());
                assert_eq!(again.as_ref(), Ok(&canonical));
                assert_eq!(again.map(|again| of(&again)), Ok(of(&canonical)));
            }
            (Err(refused), Ok(_)) => {
                assert!(
                    matches!(refused, JsonError::DuplicateKey | JsonError::TooDeep),
                    "{refused:?}"
                );
            }
            (Err(_), Err(_)) => {}
        }
    });
}
