//! A JSON object as the text of its members, so that one member can be changed and all others stay
//! as the client wrote them: in their order, with their digits, and twice where they came twice.

use crate::server::wire::json::RawMembers;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::value::RawValue;

pub(super) type JsonMembers = RawMembers<Box<RawValue>>;

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
