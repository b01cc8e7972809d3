//! The JSON of request bodies: read strictly, told apart by fingerprints, and taken member by
//! member into typed values within bounds. Every refusal of a value names it by its path.
//!
//! Two texts that differ only in white space, in the order of keys or in how a character is escaped
//! become equal trees; all other texts stay different. Numbers keep their literal token.

use crate::error::ApiError;
use crate::settings::ChatBounds;
use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::{Bytes, BytesMut};
use cresset_base::{SessionId, hyphenated};
use cresset_transport::{HttpSettings, RawMembers};
use http_body_util::BodyExt;
use indexmap::IndexMap;
use serde::ser::Error as _;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;
use uuid::Uuid;

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

/// A JSON value: escapes decoded, numbers as written. It is serialised in its canonical form, with
/// keys sorted by their UTF-8 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum JsonTree {
    Null,
    Bool(bool),
    /// The literal token: `1`, `1.0` and `1e0` are three different numbers.
    #[serde(serialize_with = "literal")]
    Number(String),
    String(String),
    Array(Vec<JsonTree>),
    #[serde(serialize_with = "sorted")]
    Object(IndexMap<String, JsonTree>),
}

impl JsonTree {
    /// Reads the body of a request with these headers, within its bounds of size and time. Returns
    /// its bytes, too.
    pub async fn read(
        limits: &HttpSettings,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<(Self, Bytes), ApiError> {
        let bytes = read_body(limits, headers, body).await?;
        let tree = Self::parse(&bytes).map_err(|error| {
            ApiError::malformed(format!("The body was not accepted as JSON: {error}."))
        })?;
        Ok((tree, bytes))
    }

    /// Reads one JSON value and nothing after it.
    pub fn parse(body: &[u8]) -> Result<Self, JsonError> {
        let text = std::str::from_utf8(body).map_err(|_| JsonError::NotUtf8)?;
        read(parse(text)?, 0)
    }

    /// The canonical text: no white space, the shortest escapes.
    pub fn canonical(&self) -> String {
        serde_json::to_string(self).expect("invariant: a tree has only string keys")
    }

    pub fn is_true(&self) -> bool {
        *self == Self::Bool(true)
    }

    /// The string; empty of any other value.
    pub fn text(&self) -> &str {
        if let Self::String(text) = self { text } else { "" }
    }

    /// The strings of an array, or this one.
    pub fn texts(&self) -> Vec<String> {
        self.items().iter().map(|item| item.text().to_owned()).collect()
    }

    /// The items of an array, or this one; none of null.
    pub fn items(&self) -> &[Self] {
        match self {
            Self::Array(items) => items,
            Self::Null => &[],
            one => std::slice::from_ref(one),
        }
    }

    /// A number that was checked before; 0 of any other value.
    pub fn number<T: FromStr + Default>(&self) -> T {
        self.parsed().unwrap_or_default()
    }

    fn parsed<T: FromStr>(&self) -> Option<T> {
        if let Self::Number(literal) = self { literal.parse().ok() } else { None }
    }

    /// A member of an object; null of any other value.
    pub fn get(&self, name: &str) -> &Self {
        let found = if let Self::Object(members) = self { members.get(name) } else { None };
        found.unwrap_or(&Self::Null)
    }

    /// The text with the members of objects in the order in which they came.
    pub fn in_order(&self) -> String {
        let joined = |parts: Vec<String>| parts.join(",");
        match self {
            Self::Array(items) => {
                format!("[{}]", joined(items.iter().map(Self::in_order).collect()))
            }
            Self::Object(members) => {
                let member = |(key, value): (&String, &Self)| {
                    format!("{}:{}", serde_json::Value::from(key.as_str()), value.in_order())
                };
                format!("{{{}}}", joined(members.iter().map(member).collect()))
            }
            leaf => leaf.canonical(),
        }
    }
}

async fn read_body(
    limits: &HttpSettings,
    headers: &HeaderMap,
    body: Body,
) -> Result<Bytes, ApiError> {
    let limit = limits.max_body_bytes;
    let length = headers.get(header::CONTENT_LENGTH);
    let declared = length.and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    // Such a body is refused before a byte of it is asked for.
    if declared.is_some_and(|length| length > limit) {
        return Err(ApiError::RequestTooLarge { limit });
    }
    check_media_type(headers)?;
    let time = Duration::from_secs(limits.body_seconds);
    let read = tokio::time::timeout(time, collect(body, limit)).await;
    read.unwrap_or_else(|_| Err(ApiError::malformed("The body did not arrive in time.")))
}

async fn collect(mut body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::malformed("The body could not be read."))?;
        let data = frame
            .into_data()
            .map_err(|_| ApiError::malformed("Send the body without trailers."))?;
        if bytes.len() + data.len() > limit {
            return Err(ApiError::RequestTooLarge { limit });
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.freeze())
}

/// Refuses bodies that are not JSON or are compressed.
fn check_media_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let mut values = headers.get_all(header::CONTENT_TYPE).iter();
    let value = values.next().filter(|_| values.next().is_none());
    let value = value.and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = value.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::UnsupportedMediaType);
    }
    if headers.contains_key(header::CONTENT_ENCODING) {
        return Err(ApiError::invalid(
            "Content-Encoding",
            "Send the body without a Content-Encoding.",
        ));
    }
    Ok(())
}

/// Two sends of a request id are the same request when method, path, session and body are the same.
/// The credential and the user agent do not count, so that a rotated key still finds its request.
///
/// SHA-256 over the parts, each preceded by its length so that two different lists of parts never
/// give the same bytes.
pub fn fingerprint(method: &str, path: &str, session: SessionId, body: &JsonTree) -> [u8; 32] {
    let body = body.canonical();
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
    let mut object = IndexMap::new();
    for (key, raw) in parse::<RawMembers<&RawValue>>(text)?.0 {
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

fn sorted<S: Serializer>(
    members: &IndexMap<String, JsonTree>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    members.iter().collect::<BTreeMap<_, _>>().serialize(serializer)
}

/// Writes a number as its literal token.
fn literal<S: Serializer>(token: &str, serializer: S) -> Result<S::Ok, S::Error> {
    RawValue::from_string(token.to_owned()).map_err(S::Error::custom)?.serialize(serializer)
}

/// A value and its place, such as `messages[2].content[0].type`.
#[derive(Clone, Debug)]
pub struct JsonField<'a> {
    pub path: String,
    pub value: &'a JsonTree,
    /// In place of bounds of `chat_request.json`.
    pub bounds: &'a ChatBounds,
}

impl<'a> JsonField<'a> {
    pub fn refuse(&self, must: &str) -> ApiError {
        ApiError::invalid(self.path.clone(), format!("{} {must}.", self.path))
    }

    pub fn bool(&self) -> Result<bool, ApiError> {
        match self.value {
            JsonTree::Bool(value) => Ok(*value),
            _ => Err(self.refuse("must be true or false")),
        }
    }

    /// A string of at most `max` characters.
    pub fn text(&self, max: usize) -> Result<&'a str, ApiError> {
        match self.value {
            JsonTree::String(text) if text.len() <= max || text.chars().count() <= max => Ok(text),
            JsonTree::String(_) => Err(self.refuse(&format!("must have at most {max} characters"))),
            _ => Err(self.refuse("must be a string")),
        }
    }

    pub fn uuid(&self) -> Result<Uuid, ApiError> {
        hyphenated(self.value.text())
            .ok_or_else(|| self.refuse("must be a hyphenated UUID, as GET /v1/models lists it"))
    }

    /// A whole number written without fraction or exponent.
    pub fn integer(&self, range: RangeInclusive<i64>) -> Result<i64, ApiError> {
        let must = || match (range.start(), range.end()) {
            (least, most) if least == most => self.refuse(&format!("must be {least}")),
            (least, most) => self.refuse(&format!("must be a whole number from {least} to {most}")),
        };
        self.value.parsed().filter(|n| range.contains(n)).ok_or_else(must)
    }

    pub fn number(&self, range: RangeInclusive<f64>) -> Result<f64, ApiError> {
        let must =
            || self.refuse(&format!("must be a number from {} to {}", range.start(), range.end()));
        self.value.parsed().filter(|n| range.contains(n)).ok_or_else(must)
    }

    /// The items of an array of at most `max`.
    pub fn items(&self, max: usize) -> Result<Vec<JsonField<'a>>, ApiError> {
        let JsonTree::Array(items) = self.value else {
            return Err(self.refuse("must be an array"));
        };
        if items.len() > max {
            return Err(self.refuse(&format!("must have at most {max} items")));
        }
        let bounds = self.bounds;
        let path = |index| format!("{}[{index}]", self.path);
        let item = |(index, value)| JsonField { path: path(index), value, bounds };
        Ok(items.iter().enumerate().map(item).collect())
    }

    /// The members of an object that are not null: null means absent.
    pub fn members(&self) -> Result<BTreeMap<&'a str, JsonField<'a>>, ApiError> {
        let all = self.all_members()?;
        Ok(all.into_iter().filter(|(_, field)| !field.is_null()).collect())
    }

    pub fn all_members(&self) -> Result<BTreeMap<&'a str, JsonField<'a>>, ApiError> {
        let JsonTree::Object(members) = self.value else {
            return Err(self.refuse("must be an object"));
        };
        let bounds = self.bounds;
        let member = |(name, value): (&'a String, &'a JsonTree)| {
            (name.as_str(), JsonField { path: self.path_of(name), value, bounds })
        };
        Ok(members.iter().map(member).collect())
    }

    pub fn is_null(&self) -> bool {
        matches!(self.value, JsonTree::Null)
    }

    /// The path of a member. Names come from the client, so only plain short ones are repeated.
    pub fn path_of(&self, name: &str) -> String {
        let plain = (1..=64).contains(&name.len())
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b));
        let name = if plain { name } else { "*" };
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }
}

/// Takes a member that must be there.
pub fn required<'a>(
    of: &JsonField<'_>,
    members: &mut BTreeMap<&'a str, JsonField<'a>>,
    name: &str,
) -> Result<JsonField<'a>, ApiError> {
    members.remove(name).ok_or_else(|| missing(of, name))
}

pub fn missing(of: &JsonField<'_>, name: &str) -> ApiError {
    let path = of.path_of(name);
    ApiError::invalid(path.clone(), format!("{path} is required."))
}

/// Refuses members that were not taken.
pub fn refuse_rest(members: &BTreeMap<&str, JsonField<'_>>) -> Result<(), ApiError> {
    match members.values().next() {
        Some(field) => Err(field.refuse("is not supported")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{HeaderName, HeaderValue};

    fn check(body: &[u8], expect: Result<&str, JsonError>) {
        let text = JsonTree::parse(body).map(|value| value.canonical());
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

    #[test]
    fn media_types() {
        let check = |pairs: &[(HeaderName, &'static str)], status: Option<u16>| {
            let parsed = pairs.iter().map(|(n, v)| (n.clone(), HeaderValue::from_static(v)));
            let refused = check_media_type(&parsed.collect());
            let refused = refused.err().map(|error| error.status().as_u16());
            assert_eq!(refused, status, "{pairs:?}");
        };
        check(&[(header::CONTENT_TYPE, "application/json")], None);
        check(&[(header::CONTENT_TYPE, "Application/JSON; charset=utf-8")], None);
        check(&[(header::CONTENT_TYPE, "text/plain")], Some(415));
        check(&[(header::CONTENT_TYPE, "application/jsonp")], Some(415));
        check(&[], Some(415));
        check(
            &[
                (header::CONTENT_TYPE, "application/json"),
                (header::CONTENT_TYPE, "application/json"),
            ],
            Some(415),
        );
        check(
            &[(header::CONTENT_TYPE, "application/json"), (header::CONTENT_ENCODING, "gzip")],
            Some(400),
        );
    }
}
