//! What of a request was left out because it has no effect here, as the answer's header names it.

use hyper::header::{HeaderMap, HeaderName, HeaderValue};

/// The header in which the node and the gateway name what they left out.
pub(super) const IGNORED_PARAMS: HeaderName = HeaderName::from_static("x-ignored-params");
/// Names in one header: with this many it stays far below the 8 KiB that proxies accept.
const MOST: usize = 32;

/// Paths of members, each once, in the order in which they were met. Places in lists are not told.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct LeftOut(Vec<String>);

impl LeftOut {
    pub(super) fn add(&mut self, path: &str) {
        if self.0.len() < MOST && !self.0.iter().any(|known| known == path) {
            self.0.push(path.to_owned());
        }
    }

    /// Adds the member `name` of `place`. Names come from the client, so only plain short ones are
    /// repeated.
    pub(super) fn add_member(&mut self, place: &str, name: &str) {
        let is_plain = (1..=48).contains(&name.len())
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b));
        let name = if is_plain { name } else { "*" };
        let separator = if place.is_empty() { "" } else { "." };
        self.add(&[place, separator, name].concat());
    }

    /// All paths in one text; `None` if nothing was left out.
    pub(super) fn shown(&self) -> Option<String> {
        (!self.0.is_empty()).then(|| self.0.join(", "))
    }

    /// Names the paths in an answer, after those that the node names.
    pub(super) fn tell(&self, headers: &mut HeaderMap) {
        let told = headers.get(IGNORED_PARAMS).and_then(|told| told.to_str().ok());
        let known: Vec<&str> = told.iter().flat_map(|told| told.split(", ")).collect();
        let own = self.0.iter().map(String::as_str).filter(|path| !known.contains(path));
        let all: Vec<&str> = known.iter().copied().chain(own).take(MOST).collect();
        if let Some(names) = HeaderValue::from_str(&all.join(", ")).ok().filter(|it| !it.is_empty())
        {
            headers.insert(IGNORED_PARAMS, names);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_told_once_after_the_nodes() {
        let mut left_out = LeftOut::default();
        let mut headers = HeaderMap::new();
        left_out.tell(&mut headers);
        assert!(headers.is_empty() && left_out.shown().is_none());
        headers.insert(IGNORED_PARAMS, HeaderValue::from_static("user, tools[0].x"));
        for (place, name) in [
            ("", "user"),
            ("", "metadata"),
            ("messages[]", "timestamp"),
            ("messages[]", "timestamp"),
            ("messages[]", "a\r\nb"),
        ] {
            left_out.add_member(place, name);
        }
        left_out.tell(&mut headers);
        let expect = "user, tools[0].x, metadata, messages[].timestamp, messages[].*";
        assert_eq!(headers[IGNORED_PARAMS], expect);
        assert_eq!(left_out.shown().unwrap(), "user, metadata, messages[].timestamp, messages[].*");
    }
}
