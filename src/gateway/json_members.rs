//! A JSON object as the text of its members, so that one member can be changed and all others stay
//! as the client wrote them: in their order, with their digits, and twice where they came twice.

use cresset_transport::RawMembers;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

#[derive(Debug, Deserialize)]
#[serde(from = "RawMembers<Box<RawValue>>")]
pub(super) struct JsonMembers(pub Vec<(String, Box<RawValue>)>);

impl From<RawMembers<Box<RawValue>>> for JsonMembers {
    fn from(members: RawMembers<Box<RawValue>>) -> Self {
        Self(members.0)
    }
}

impl JsonMembers {
    /// The value of the member `name` if it is a string.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        let (_, value) = self.0.iter().find(|(own, _)| own == name)?;
        serde_json::from_str(value.get()).ok()
    }

    pub(super) fn set(&mut self, name: &str, value: &str) {
        for (_, old) in self.0.iter_mut().filter(|(own, _)| own == name) {
            *old = raw(&value);
        }
    }

    pub(super) fn add(&mut self, name: &str, value: &impl Serialize) {
        self.0.push((name.to_owned(), raw(value)));
    }

    pub(super) fn rename(&mut self, from: &str, to: &str) {
        for (name, _) in self.0.iter_mut().filter(|(own, _)| own == from) {
            to.clone_into(name);
        }
    }

    pub(super) fn leave_out(&mut self, names: &[&str]) {
        self.0.retain(|(name, _)| !names.contains(&name.as_str()));
    }

    /// Takes the member `name` out. `null` means absent. The error is a sentence for the client,
    /// with what the member `must` be.
    pub(super) fn take<T: DeserializeOwned>(
        &mut self,
        name: &str,
        must: &str,
    ) -> Result<Option<T>, String> {
        let Some(at) = self.0.iter().position(|(own, _)| own == name) else { return Ok(None) };
        let (_, value) = self.0.remove(at);
        if self.0.iter().any(|(own, _)| own == name) {
            return Err(format!("{name} is given twice."));
        }
        serde_json::from_str(value.get()).map_err(|_| format!("{name} must be {must}."))
    }

    /// Takes the member `name` out, and refuses any value but those that say nothing.
    pub(super) fn take_empty(&mut self, name: &str, why: &str) -> Result<(), String> {
        match self.take::<Value>(name, "JSON")? {
            Some(value) if !is_empty(&value) => Err(format!("{name} {why}.")),
            _ => Ok(()),
        }
    }
}

/// Whether a member with this value says nothing.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.is_empty(),
        _ => false,
    }
}

/// `value` as JSON text.
pub(super) fn raw(value: &impl Serialize) -> Box<RawValue> {
    serde_json::value::to_raw_value(value).expect("invariant: strings and members are JSON")
}

impl Serialize for JsonMembers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}
