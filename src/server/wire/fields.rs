//! Typed, bounded reading of a JSON tree. Every refusal names the field by its path.

use super::json::JsonTree;
use crate::ids::hyphenated;
use crate::server::error::ApiError;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use uuid::Uuid;

/// A value and its place, such as `messages[2].content[0].type`.
#[derive(Clone, Debug)]
pub struct JsonField<'a> {
    pub path: String,
    pub value: &'a JsonTree,
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
        let text = match self.value {
            JsonTree::String(text) => text.as_str(),
            _ => "",
        };
        hyphenated(text)
            .ok_or_else(|| self.refuse("must be a hyphenated UUID, as GET /v1/models lists it"))
    }

    /// A whole number written without fraction or exponent.
    pub fn integer(&self, range: RangeInclusive<i64>) -> Result<i64, ApiError> {
        let number = match self.value {
            JsonTree::Number(literal) => literal.parse().ok(),
            _ => None,
        };
        let must = || match (range.start(), range.end()) {
            (least, most) if least == most => self.refuse(&format!("must be {least}")),
            (least, most) => self.refuse(&format!("must be a whole number from {least} to {most}")),
        };
        number.filter(|n| range.contains(n)).ok_or_else(must)
    }

    pub fn number(&self, range: RangeInclusive<f64>) -> Result<f64, ApiError> {
        let number: Option<f64> = match self.value {
            JsonTree::Number(literal) => literal.parse().ok(),
            _ => None,
        };
        let must =
            || self.refuse(&format!("must be a number from {} to {}", range.start(), range.end()));
        number.filter(|n| range.contains(n)).ok_or_else(must)
    }

    /// The items of an array of at most `max`.
    pub fn items(&self, max: usize) -> Result<Vec<JsonField<'a>>, ApiError> {
        let JsonTree::Array(items) = self.value else {
            return Err(self.refuse("must be an array"));
        };
        if items.len() > max {
            return Err(self.refuse(&format!("must have at most {max} items")));
        }
        let item = |(index, value)| JsonField { path: format!("{}[{index}]", self.path), value };
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
        let member = |(name, value): (&'a String, &'a JsonTree)| {
            (name.as_str(), JsonField { path: self.path_of(name), value })
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
    name: &'static str,
) -> Result<JsonField<'a>, ApiError> {
    members.remove(name).ok_or_else(|| missing(of, name))
}

pub fn missing(of: &JsonField<'_>, name: &'static str) -> ApiError {
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
