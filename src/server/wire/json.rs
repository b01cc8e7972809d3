//! Request bodies as strictly read JSON, and the fingerprint that tells equal requests from others.
//!
//! Two texts that differ only in white space, in the order of keys or in how a character is escaped
//! become the same tree; all other texts stay different. Numbers keep their literal token.

use crate::ids::SessionId;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;

/// Arrays and objects that may be open at once.
pub const MAX_DEPTH: usize = 32;

/// Why a body is refused. The texts never quote the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    #[error("the body is not valid UTF-8")]
    NotUtf8,
    #[error("the body is not one valid JSON value")]
    Syntax,
    #[error("an object has the same key twice")]
    DuplicateKey,
    #[error("arrays and objects are nested more than 32 deep")]
    TooDeep,
}

/// A JSON value in its canonical form: keys sorted by their UTF-8 bytes, escapes decoded, numbers
/// as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JsonTree {
    Null,
    Bool(bool),
    /// The literal token: `1`, `1.0` and `1e0` are three different numbers.
    Number(String),
    String(String),
    Array(Vec<JsonTree>),
    Object(BTreeMap<String, JsonTree>),
}

impl JsonTree {
    /// Reads one JSON value and nothing after it.
    pub fn parse(body: &[u8]) -> Result<Self, JsonError> {
        let text = std::str::from_utf8(body).map_err(|_| JsonError::NotUtf8)?;
        read(parse(text)?, 0)
    }
}

/// Two sends of a request id are the same request when method, path, session and body are the same.
/// The credential and the user agent do not count, so that a rotated key still finds its request.
///
/// SHA-256 over the parts, each preceded by its length so that two different lists of parts never
/// give the same bytes.
pub fn fingerprint(method: &str, path: &str, session: SessionId, body: &JsonTree) -> [u8; 32] {
    let body = body.to_string();
    let parts = [method.as_bytes(), path.as_bytes(), session.0.as_bytes(), body.as_bytes()];
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// `depth` is the number of containers around `raw`.
fn read(raw: &RawValue, depth: usize) -> Result<JsonTree, JsonError> {
    let text = raw.get();
    match text.as_bytes().first() {
        Some(b'{') => read_object(text, deeper(depth)?),
        Some(b'[') => read_array(text, deeper(depth)?),
        Some(b'"') => parse(text).map(JsonTree::String),
        Some(b't' | b'f') => parse(text).map(JsonTree::Bool),
        Some(b'n') => Ok(JsonTree::Null),
        _ => Ok(JsonTree::Number(text.to_owned())),
    }
}

fn deeper(depth: usize) -> Result<usize, JsonError> {
    (depth < MAX_DEPTH).then_some(depth + 1).ok_or(JsonError::TooDeep)
}

fn read_object(text: &str, depth: usize) -> Result<JsonTree, JsonError> {
    let mut object = BTreeMap::new();
    for (key, raw) in parse::<RawMembers>(text)?.0 {
        if object.insert(key, read(raw, depth)?).is_some() {
            return Err(JsonError::DuplicateKey);
        }
    }
    Ok(JsonTree::Object(object))
}

fn read_array(text: &str, depth: usize) -> Result<JsonTree, JsonError> {
    let elements = parse::<Vec<&RawValue>>(text)?.into_iter();
    let read = elements.map(|raw| read(raw, depth));
    read.collect::<Result<_, _>>().map(JsonTree::Array)
}

fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, JsonError> {
    serde_json::from_str(text).map_err(|_| JsonError::Syntax)
}

/// An object's members in their order: a map type would drop the first of two equal keys unseen.
struct RawMembers<'a>(Vec<(String, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for RawMembers<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RawMembersVisitor)
    }
}

struct RawMembersVisitor;

impl<'de> Visitor<'de> for RawMembersVisitor {
    type Value = RawMembers<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(RawMembers(members))
    }
}

/// The canonical text: no white space, the shortest escapes.
impl fmt::Display for JsonTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => value.fmt(f),
            Self::Number(literal) => f.write_str(literal),
            Self::String(text) => write_string(text, f),
            Self::Array(elements) => write_array(elements, f),
            Self::Object(members) => write_object(members, f),
        }
    }
}

fn write_string(text: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let quoted = serde_json::to_string(text).map_err(|_| fmt::Error)?;
    f.write_str(&quoted)
}

fn write_array(elements: &[JsonTree], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str("[")?;
    for (index, element) in elements.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        write!(f, "{comma}{element}")?;
    }
    f.write_str("]")
}

fn write_object(members: &BTreeMap<String, JsonTree>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str("{")?;
    for (index, (key, value)) in members.iter().enumerate() {
        f.write_str(if index == 0 { "" } else { "," })?;
        write_string(key, f)?;
        write!(f, ":{value}")?;
    }
    f.write_str("}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn check(body: &[u8], expect: Result<&str, JsonError>) {
        let text = JsonTree::parse(body).map(|value| value.to_string());
        let shown = String::from_utf8_lossy(&body[..body.len().min(80)]);
        assert_eq!(text.as_deref().map_err(|error| *error), expect, "{shown}");
    }

    #[test]
    fn one_form_per_meaning() {
        check(br#" { "b" : 1 , "a" : [ true , null ] } "#, Ok(r#"{"a":[true,null],"b":1}"#));
        check(br#"{"\u0061":"\u00e9\/"}"#, Ok(r#"{"a":"é/"}"#));
        check(br#""\ud83d\ude00""#, Ok("\"😀\""));
        check(br#""\u0000\n\"\\""#, Ok(r#""\u0000\n\"\\""#));
        check(b"{}", Ok("{}"));
        check(b"[]", Ok("[]"));
    }

    #[test]
    fn numbers_keep_their_literal() {
        for literal in ["1", "1.0", "1e0", "-0", "1e999", "123456789012345678901234567890"] {
            check(literal.as_bytes(), Ok(literal));
        }
        let long = "9".repeat(100_000);
        check(long.as_bytes(), Ok(&long));
    }

    #[test]
    fn unicode_is_not_normalised() {
        let composed = JsonTree::parse("\"\u{e9}\"".as_bytes());
        let decomposed = JsonTree::parse("\"e\u{301}\"".as_bytes());
        assert_ne!(composed, decomposed);
    }

    #[test]
    fn text_that_is_not_strict_json_is_refused() {
        let syntax = Err(JsonError::Syntax);
        for body in [
            "",
            " ",
            "nul",
            "NaN",
            "Infinity",
            "+1",
            "01",
            "1.",
            ".5",
            "'a'",
            "{a:1}",
            "[1,]",
            "{\"a\":1,}",
            "{} {}",
            "1 2",
            "[1]x",
            "\u{feff}{}",
            "\"\t\"",
            "/**/1",
            "\"\\x41\"",
        ] {
            check(body.as_bytes(), syntax);
        }
        check(br#""\ud83d""#, syntax);
        check(br#""\ude00\ud83d""#, syntax);
        check(br#"{"\ud83d":1}"#, syntax);
        check(b"\"\xff\"", Err(JsonError::NotUtf8));
        check(br#"{"a":1,"a":1}"#, Err(JsonError::DuplicateKey));
        check(br#"{"a":1,"\u0061":2}"#, Err(JsonError::DuplicateKey));
        check(br#"[{"x":{"a":1,"b":2,"a":3}}]"#, Err(JsonError::DuplicateKey));
    }

    #[test]
    fn nesting_is_bounded() {
        let nested = |depth| [vec![b'['; depth], vec![b']'; depth]].concat();
        let text = String::from_utf8(nested(MAX_DEPTH)).unwrap();
        check(&nested(MAX_DEPTH), Ok(&text));
        check(&nested(MAX_DEPTH + 1), Err(JsonError::TooDeep));
        check(&nested(100_000), Err(JsonError::TooDeep));
        check(&vec![b'['; 100_000], Err(JsonError::Syntax));
    }

    fn of(method: &str, path: &str, session: u128, body: &str) -> [u8; 32] {
        let body = JsonTree::parse(body.as_bytes()).unwrap();
        fingerprint(method, path, SessionId(Uuid::from_u128(session)), &body)
    }

    #[test]
    fn the_same_request_has_the_same_fingerprint() {
        let first = of("POST", "/v1/x", 1, r#"{"a":1,"b":"A"}"#);
        assert_eq!(first, of("POST", "/v1/x", 1, r#"{ "b":"\u0041", "a":1 }"#));
    }

    /// Ledgers hold fingerprints of earlier builds, so their values are fixed.
    #[test]
    fn a_fingerprint_never_changes() {
        let seen = of("POST", "/v1/chat/completions", 1, r#"{ "b":"\u0041", "a":1.0 }"#);
        assert_eq!(
            hex::encode(seen),
            "7794b1d2370cdf64d1cb72dd900787f5a4466a24f1e40622987472ef8a1d4c8f"
        );
    }

    #[test]
    fn every_part_counts() {
        let body = r#"{"a":1}"#;
        let first = of("POST", "/v1/x", 1, body);
        for other in [
            of("PUT", "/v1/x", 1, body),
            of("POST", "/v1/y", 1, body),
            of("POST", "/v1/x", 2, body),
            of("POST", "/v1/x", 1, r#"{"a":1.0}"#),
            of("POST", "/v1/x", 1, r#"{"a":1,"stream":false}"#),
            of("POST/", "v1/x", 1, body),
        ] {
            assert_ne!(first, other);
        }
    }
}
