//! JSON schemas as clients and their generators write them, made into what the library compiles
//! exactly. A rule is kept to, or named as one that only describes, or refused with its place.

mod close;
mod conditions;
mod exact;
mod finite;
mod formats;
mod numbers;
mod patterns;
mod ranges;
mod rules;
mod tree;

pub(super) use exact::{odd_number, parse, write};
pub(super) use numbers::Terminals;
pub(super) use patterns::TOO_COSTLY;

use super::answer_format::SchemaFormat;
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;

/// White space between the parts of JSON. Where nothing bounds it, small models write it without
/// end.
const WHITE_SPACE: &str = "\\x20|\\n\\x20{0,20}";

/// What of a schema answers are not kept to, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot be kept to: {why}{}", at(.place))]
pub struct SchemaRefused {
    /// A JSON pointer into the schema.
    pub place: String,
    /// The reason, and a way out where there is one.
    pub why: String,
}

impl SchemaRefused {
    fn new(place: &str, why: impl Into<String>) -> Self {
        Self { place: place.to_owned(), why: why.into() }
    }
}

fn at(place: &str) -> String {
    if place.is_empty() { String::new() } else { format!(" (at #{place})") }
}

/// A schema that was looked through before a model is known.
#[derive(Clone, Debug)]
pub struct CheckedSchema {
    /// The schema without the rules that were left out.
    pub text: String,
    /// The schema as it is written for the library, where no rule was left out.
    simplified: Option<Arc<Value>>,
    /// JSON pointers of keywords that no answer is kept to.
    pub ignored: Vec<String>,
}

impl CheckedSchema {
    /// Rules of any draft that no answer is kept to. They are refused, or left out.
    pub const NOT_KEPT: &[&str] = &rules::NOT_KEPT;

    /// Looks through a schema. `loosened`: rules that cannot be kept to are left out and named, in
    /// place of a refusal.
    pub fn of(text: &str, loosened: bool) -> Result<Self, SchemaRefused> {
        let mut schema = read(text)?;
        let ignored = rules::simplify(&mut schema, loosened)?;
        finite::check(&mut schema)?;
        let text = if loosened { write(&schema) } else { text.to_owned() };
        let simplified = (!loosened).then(|| Arc::new(schema));
        Ok(Self { text, simplified, ignored })
    }
}

impl From<CheckedSchema> for SchemaFormat {
    fn from(checked: CheckedSchema) -> Self {
        Self { simplified: checked.simplified, ..checked.text.into() }
    }
}

/// How the library is to write what a schema leaves open.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writing {
    pub bounds: Bounds,
    /// Objects may have members that their schema does not name, unless it forbids them.
    pub open_objects: bool,
    /// The most members of objects that name none.
    pub max_members: usize,
}

/// Whether what a schema leaves open is bounded: the decimals of a number with a minimum or a
/// maximum, and the members of an object that names none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Bounds {
    AsWritten,
    Added,
}

/// The schema for the library. Numbers that it would round are terminals in it.
pub(super) fn prepare(
    format: &SchemaFormat,
    writing: Writing,
    terminals: &mut Terminals,
) -> Result<Value, SchemaRefused> {
    let white_space = format.white_space.as_deref().unwrap_or(WHITE_SPACE);
    if let Some(why) = fault_of_expression(white_space) {
        let why = format!("its white space is no expression: {why}");
        return Err(SchemaRefused::new("", why));
    }
    let mut schema = match &format.simplified {
        Some(simplified) => Value::clone(simplified),
        None => simplified(&format.text)?,
    };
    patterns::check(&schema)?;
    close::close(&mut schema, writing.open_objects && !format.closed)?;
    if writing.bounds == Bounds::Added {
        close::bound_members(&mut schema, writing.max_members)?;
    }
    numbers::bound(&mut schema, writing.bounds, terminals)?;
    set_white_space(&mut schema, white_space);
    Ok(schema)
}

fn simplified(text: &str) -> Result<Value, SchemaRefused> {
    let mut schema = read(text)?;
    rules::simplify(&mut schema, false)?;
    finite::check(&mut schema)?;
    Ok(schema)
}

/// Tells the library what may be between the parts of JSON.
fn set_white_space(schema: &mut Value, expression: &str) {
    let options = match expression {
        "" => json!({ "whitespace_flexible": false }),
        expression => json!({ "whitespace_pattern": expression }),
    };
    if let Some(members) = schema.as_object_mut() {
        members.insert("x-guidance".into(), options);
    }
}

/// The schemas directly inside a schema, each with its place and with what it may refer to.
pub(super) fn parts_of(text: &str) -> Vec<(String, String)> {
    let Some(whole) = parse(text) else { return Vec::new() };
    let Value::Object(members) = &whole else { return Vec::new() };
    let definitions = ["$defs", "definitions", "components"];
    let shared: Vec<_> =
        members.iter().filter(|(name, _)| definitions.contains(&name.as_str())).collect();
    let mut parts = Vec::new();
    let mut add = |place: String, part: &Value| {
        let Value::Object(part) = part else { return };
        let mut part = part.clone();
        for (name, value) in &shared {
            part.entry((*name).clone()).or_insert((*value).clone());
        }
        parts.push((place, write(&part.into())));
    };
    for (keyword, value) in members {
        let place = inside("", keyword);
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties", Value::Object(named)) => {
                named.iter().for_each(|(name, part)| add(inside(&place, name), part));
            }
            ("allOf" | "anyOf" | "oneOf" | "prefixItems", Value::Array(all)) => {
                let numbered = all.iter().enumerate();
                numbered.for_each(|(at, part)| add(inside(&place, &at.to_string()), part));
            }
            ("items" | "additionalProperties", part) => add(place, part),
            ("$ref", Value::String(reference)) => {
                if let Some(meant) = tree::resolve(&whole, reference) {
                    add(String::new(), meant);
                }
            }
            _ => {}
        }
    }
    parts
}

/// A schema that is `true` has no place for options.
fn read(text: &str) -> Result<Value, SchemaRefused> {
    let schema = parse(text).ok_or_else(|| SchemaRefused::new("", "it is no JSON schema"))?;
    Ok(if schema == Value::Bool(true) { json!({}) } else { schema })
}

/// The place of a member.
pub(super) fn inside(place: &str, name: &str) -> String {
    let mut inner = place.to_owned();
    let _ = write!(inner, "/{}", name.replace('~', "~0").replace('/', "~1"));
    inner
}

/// The reason why an expression is none that the library knows.
pub(super) fn fault_of_expression(expression: &str) -> Option<String> {
    use llguidance::derivre::RegexBuilder;
    let known = llguidance::regex_to_lark(expression, "dws");
    let refused = RegexBuilder::new().mk_regex_for_serach(&known).err()?.to_string();
    Some(reason_in(&refused))
}

/// The reason in the library's words, which may stand behind a drawing of its place.
pub(super) fn reason_in(refused: &str) -> String {
    let told = refused.lines().find_map(|line| line.trim().strip_prefix("error: "));
    let line = told.or_else(|| refused.lines().next()).unwrap_or_default();
    let boundary = line.contains("lookarounds");
    let line = if boundary { "word borders and inner anchors are not supported" } else { line };
    line.trim().trim_end_matches('.').to_owned()
}
