//! A bound on pattern properties. The library compares each pattern with each other, in each schema
//! that it merges, and copies all of them for each pair.

use super::SchemaRefused;
use serde_json::{Map, Value};

/// Patterns to the third power, for each merged schema. This many take two tenths of a second.
const MOST_WORK: usize = 1_000_000;

/// The reason why a format of any kind is refused for its cost.
pub(in crate::grammar) const TOO_COSTLY: &str = "following it costs too much. Make it smaller: \
    fewer optional members and alternatives, at most 100 pattern properties and fewer where \
    schemas are combined, shorter repetitions, and rules that are read in one way only";

#[derive(Default)]
struct Counts {
    patterns: usize,
    /// Schemas in `allOf`, and references that other rules stand beside.
    merged: usize,
}

/// Refuses a schema whose patterns would take too long to compare.
pub(super) fn check(schema: &Value) -> Result<(), SchemaRefused> {
    let mut counts = Counts::default();
    counts.add(schema);
    let Counts { patterns, merged } = counts;
    if patterns.saturating_pow(3).saturating_mul(merged + 1) <= MOST_WORK {
        return Ok(());
    }
    Err(SchemaRefused::new("", TOO_COSTLY))
}

impl Counts {
    fn add(&mut self, schema: &Value) {
        match schema {
            Value::Object(members) => {
                let patterns = members.get("patternProperties").and_then(Value::as_object);
                self.patterns += patterns.map_or(0, Map::len);
                self.merged += members.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
                self.merged += usize::from(members.contains_key("$ref") && members.len() > 1);
                members.values().for_each(|inner| self.add(inner));
            }
            Value::Array(items) => items.iter().for_each(|inner| self.add(inner)),
            _ => {}
        }
    }
}
