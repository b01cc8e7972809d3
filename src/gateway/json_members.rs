//! A JSON object as the text of its members, so that one member can be changed and all others stay
//! as the client wrote them: in their order, with their digits, and twice where they came twice.

use super::left_out::LeftOut;
use cresset_transport::RawMembers;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

#[derive(Debug, Default, Deserialize)]
#[serde(from = "RawMembers<Box<RawValue>>")]
pub(super) struct JsonMembers(pub Vec<(String, Box<RawValue>)>);

impl From<RawMembers<Box<RawValue>>> for JsonMembers {
    fn from(members: RawMembers<Box<RawValue>>) -> Self {
        Self(members.0)
    }
}

impl JsonMembers {
    /// The value of the member `name` if it is of this type.
    pub(super) fn read<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        let (_, value) = self.0.iter().find(|(own, _)| own == name)?;
        serde_json::from_str(value.get()).ok()
    }

    /// The value of the member `name` if it is a string.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        self.read(name)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(own, _)| own == name)
    }

    pub(super) fn set(&mut self, name: &str, value: &(impl Serialize + ?Sized)) {
        for (_, old) in self.0.iter_mut().filter(|(own, _)| own == name) {
            *old = raw(value);
        }
    }

    pub(super) fn add(&mut self, name: &str, value: &(impl Serialize + ?Sized)) {
        self.0.push((name.to_owned(), raw(value)));
    }

    pub(super) fn rename(&mut self, from: &str, to: &str) {
        for (name, _) in self.0.iter_mut().filter(|(own, _)| own == from) {
            to.clone_into(name);
        }
    }

    /// Leaves out the members that do not stay, and notes those of them that say something.
    pub(super) fn retain(
        &mut self,
        place: &str,
        left_out: &mut LeftOut,
        stays: impl Fn(&str, &RawValue) -> bool,
    ) {
        self.0.retain(|(name, value)| {
            let stays = stays(name, value);
            if !stays && !EMPTY.contains(&value.get()) {
                left_out.add_member(place, name);
            }
            stays
        });
    }

    pub(super) fn leave_out(&mut self, names: &[&str], left_out: &mut LeftOut) {
        self.retain("", left_out, |name, _| !names.contains(&name));
    }

    /// Changes each object in the list `name`. Any other value stays, and the node refuses it.
    pub(super) fn change_each(&mut self, name: &str, mut change: impl FnMut(&mut Self)) {
        for (_, list) in self.0.iter_mut().filter(|(own, _)| own == name) {
            if let Ok(mut all) = serde_json::from_str::<Vec<Self>>(list.get()) {
                all.iter_mut().for_each(&mut change);
                *list = raw(&all);
            }
        }
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

    /// Takes members out, and refuses any value but those that say nothing, all in one sentence.
    pub(super) fn take_empty(&mut self, names: &[(&str, &str)]) -> Result<(), String> {
        let mut refusals = Vec::new();
        for (name, why) in names {
            if self.take::<Value>(name, "JSON")?.is_some_and(|value| !is_empty(&value)) {
                refusals.push(format!("{name} {why}."));
            }
        }
        if refusals.is_empty() { Ok(()) } else { Err(refusals.join(" ")) }
    }
}

/// Texts of values that say nothing.
pub(super) const EMPTY: [&str; 4] = ["null", "[]", "{}", "\"\""];

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
pub(super) fn raw(value: &(impl Serialize + ?Sized)) -> Box<RawValue> {
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
