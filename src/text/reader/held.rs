//! Steps of a reader over the text that it has received and not yet read.

use serde_json::Value;

/// What one step of a reader came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    NeedsMore,
    /// The part of the answer that is read ends here.
    Ended,
    /// The text is not what the form has here.
    Lost,
}

/// The length of the text in front of the first of `marks`, and that mark. Without any, the length
/// of the text that begins none of them.
pub(super) fn before_mark<'m>(held: &str, marks: &[&'m str]) -> (usize, Option<&'m str>) {
    let found = marks.iter().filter_map(|mark| Some((held.find(mark)?, *mark))).min();
    found.map_or_else(
        || {
            let beginnings = marks.iter().map(|mark| beginning_at_end(held, mark));
            (held.len() - beginnings.max().unwrap_or_default(), None)
        },
        |(at, mark)| (at, Some(mark)),
    )
}

/// The length of the longest end of `text` that is a beginning of `mark`.
pub(super) fn beginning_at_end(text: &str, mark: &str) -> usize {
    let ends = mark.char_indices().map(|(at, _)| at).rev();
    ends.into_iter().find(|length| text.ends_with(&mark[..*length])).unwrap_or_default()
}

pub(super) fn skip_space(held: &mut String) {
    held.drain(..held.len() - held.trim_start().len());
}

/// The text as it is inside a JSON string.
pub(super) fn inside_quotes(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
