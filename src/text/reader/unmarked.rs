//! Calls without the marks of the family: the whole answer is JSON that names a tool, alone or in a
//! block. Small models write most of their calls so.

use super::part::ReadCall;
use crate::forms::tool_calls::MOST_CALLS;
use serde::Deserialize;
use serde_json::value::RawValue;

/// Around such an answer: its beginning and its end.
const BLOCKS: [[&str; 2]; 4] =
    [["```json", "```"], ["```", "```"], ["<tools>", "</tools>"], ["", ""]];

/// How far an answer is such calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unmarked {
    /// What came may be their beginning.
    Possible,
    /// A listed tool is named. Only the end of the answer shows whether it is nothing else.
    Begun,
    No,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UnmarkedCall<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: &'a RawValue,
}

/// What `text`, the beginning of an answer, is for tools with these names.
pub(super) fn judge<'a>(text: &str, names: impl Iterator<Item = &'a String> + Clone) -> Unmarked {
    let came: String = text.chars().filter(|letter| !letter.is_whitespace()).collect();
    let mut judged = Unmarked::No;
    for name in names {
        for (open, list) in BLOCKS.iter().flat_map(|[open, _]| [(open, ""), (open, "[")]) {
            let head = format!("{open}{list}{{\"name\":\"{name}\"");
            if came.starts_with(&head) {
                return Unmarked::Begun;
            }
            if head.starts_with(&came) {
                judged = Unmarked::Possible;
            }
        }
    }
    judged
}

/// The calls, if the whole text is nothing else.
pub(super) fn calls(text: &str, is_tool: impl Fn(&str) -> bool) -> Option<Vec<ReadCall>> {
    let text = text.trim();
    let inside = BLOCKS
        .iter()
        .find_map(|[open, close]| text.strip_prefix(open)?.strip_suffix(close).map(str::trim))?;
    let read: Vec<UnmarkedCall> = if inside.starts_with('[') {
        serde_json::from_str(inside).ok()?
    } else {
        let objects = serde_json::Deserializer::from_str(inside).into_iter();
        objects.collect::<Result<_, _>>().ok()?
    };
    let sound = |call: &UnmarkedCall| is_tool(&call.name) && call.arguments.get().starts_with('{');
    if read.is_empty() || read.len() > MOST_CALLS || !read.iter().all(sound) {
        return None;
    }
    let called = |call: UnmarkedCall| ReadCall {
        name: call.name,
        arguments: call.arguments.get().to_owned(),
    };
    Some(read.into_iter().map(called).collect())
}
