//! Lists of any length, printed as their pages arrive: neither the node nor the command holds more
//! than a page.

use super::context::Context;
use super::output::{CommandError, CommandResult, Output, print};
use super::text;
use cresset_commands::AdminCommand;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Asks for one page after the other and hands each to `each`, until that returns false or there is
/// no further one. `command` makes the command for the page after a key; the last page is returned.
pub(crate) async fn pages<K: DeserializeOwned>(
    context: &Context,
    command: impl Fn(Option<K>) -> AdminCommand,
    mut each: impl FnMut(&Value) -> CommandResult<bool>,
) -> CommandResult<Value> {
    let mut after = None;
    loop {
        let page = context.admin(command(after)).await?;
        after = serde_json::from_value(page["next_after"].clone()).map_err(CommandError::new)?;
        if !each(&page)? || after.is_none() {
            return Ok(page);
        }
    }
}

/// Prints all pages as one table, or as one JSON document.
pub(crate) async fn show<K: DeserializeOwned>(
    context: &Context,
    columns: &'static [&'static str],
    command: impl Fn(Option<K>) -> AdminCommand,
) -> CommandResult {
    let mut listing = PrintedListing::new(context.output, columns);
    let last = pages(context, command, |page| {
        print(&listing.page(page))?;
        Ok(true)
    });
    let last = last.await?;
    print(&listing.end(&last))
}

/// A list under way: what of it was printed decides how it goes on.
pub(crate) struct PrintedListing {
    output: Output,
    columns: &'static [&'static str],
    /// The widths of the columns so far. A wider cell of a later page moves the columns from there
    /// on.
    widths: Vec<usize>,
    /// Rows printed so far.
    rows: usize,
}

impl PrintedListing {
    pub(crate) fn new(output: Output, columns: &'static [&'static str]) -> Self {
        Self { output, columns, widths: Vec::new(), rows: 0 }
    }

    /// The text that the page adds to the output.
    pub(crate) fn page(&mut self, page: &Value) -> String {
        let rows = page["data"].as_array().map_or(&[][..], Vec::as_slice);
        if rows.is_empty() {
            return String::new();
        }
        let before = self.rows;
        self.rows += rows.len();
        if !self.output.json {
            return text::more_of_table(rows, self.columns, &mut self.widths);
        }
        let mut text = String::new();
        for (index, row) in rows.iter().enumerate() {
            text.push_str(if before + index == 0 { "{\n  \"data\": [\n    " } else { ",\n    " });
            text.push_str(&indented(row, "    "));
        }
        text
    }

    /// The text after the last page. Its other fields are the document's.
    pub(crate) fn end(&self, last: &Value) -> String {
        if !self.output.json {
            return if self.rows == 0 { "(none)\n".to_owned() } else { String::new() };
        }
        let begin = if self.rows == 0 { "{\n  \"data\": []" } else { "\n  ]" };
        let others = last.as_object().into_iter().flatten().filter(|(name, _)| *name != "data");
        let others = others.fold(String::new(), |text, (name, value)| {
            format!("{text},\n  {}: {}", Value::from(name.as_str()), indented(value, "  "))
        });
        format!("{begin}{others}\n}}\n")
    }
}

/// A JSON value over several lines, those after the first indented. A line break in a string is
/// written as an escape, so that each one here is between two fields.
fn indented(value: &Value, indent: &str) -> String {
    format!("{value:#}").replace('\n', &format!("\n{indent}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn printed(json: bool, pages: &[Value]) -> String {
        let mut listing = PrintedListing::new(Output { json }, &["id"]);
        let mut text: String = pages.iter().map(|page| listing.page(page)).collect();
        text.push_str(&listing.end(&pages[pages.len() - 1]));
        text
    }

    fn page(ids: &[&str], next: Option<u64>) -> Value {
        let rows: Vec<Value> = ids.iter().map(|id| json!({ "id": id })).collect();
        json!({ "data": rows, "object": "list", "has_more": next.is_some(), "next_after": next })
    }

    #[test]
    fn pages_are_one_table_and_one_document() {
        let none = page(&[], None);
        let pages = [page(&["a", "b\n"], Some(7)), page(&[], Some(9)), page(&["long"], None)];
        assert_eq!(printed(false, &pages), "ID\na\nb\\u000a\nlong\n");
        assert_eq!(printed(false, std::slice::from_ref(&none)), "(none)\n");
        for (pages, expect) in [
            (&pages[..], page(&["a", "b\n", "long"], None)),
            (std::slice::from_ref(&none), none.clone()),
        ] {
            let text = printed(true, pages);
            assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), expect, "{text}");
            assert_eq!(text, format!("{expect:#}\n"), "it reads like any other document");
        }
    }
}
