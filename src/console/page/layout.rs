//! What all pages have: the frame, forms, and values as people read them.

use super::{SCRIPT, STYLE, act};
use cresset_base::{UnixMillis, escaped, is_direction_mark, is_unseen};
use cresset_commands::{Notice, SessionView};
use maud::{DOCTYPE, Markup, html};
use serde_json::Value;
use std::fmt::Display;

/// The sections, with their addresses.
const SECTIONS: [(&str, &str); 5] = [
    ("/", "Overview"),
    ("/accounts", "Accounts"),
    ("/models", "Models"),
    ("/chat", "Chat"),
    ("/acts", "Acts"),
];

/// A whole page for somebody who has no session.
pub(super) fn plain(title: &str, body: &Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " – Cresset" }
                link rel="stylesheet" href=(STYLE.path);
                link rel="icon" href="data:,";
                script src=(SCRIPT.path) defer {}
            }
            body { (body) }
        }
    }
}

/// A page of the session. `at` is the address of its section.
pub(super) fn page(
    session: &SessionView,
    notices: &[Notice],
    at: &str,
    title: &str,
    content: &Markup,
) -> Markup {
    let body = html! {
        a.skip href="#content" { "Skip to the content" }
        (top(session, at))
        main id="content" tabindex="-1" {
            h1 { (title) }
            @if session.money_lapsed {
                p.notice {
                    "Balances can be changed for 15 minutes after a session was opened. "
                    "Open another one to change them."
                }
            }
            @for notice in notices { (told(notice)) }
            (content)
        }
    };
    plain(title, &body)
}

fn told(notice: &Notice) -> Markup {
    html! {
        @let role = if notice.is_error { "alert" } else { "status" };
        div.notice.error[notice.is_error] role=(role) {
            p { (notice.text) }
            @if let Some(secret) = &notice.secret {
                p { "It is shown this once. Keep it now." }
                pre tabindex="0" { (secret) }
            }
        }
    }
}

/// The line above every page: its sections, and who looks at it.
fn top(session: &SessionView, at: &str) -> Markup {
    html! {
        header {
            span.name { "Cresset" }
            nav aria-label="Sections" {
                @for (address, name) in SECTIONS {
                    a href=(address) aria-current=[(address == at).then_some("page")] { (name) }
                }
            }
            form method="post" action="/logout" {
                input type="hidden" name="form" value=(session.form_token);
                span.who { (session.actor.name) }
                button.quiet { "Leave" }
            }
        }
    }
}

/// What is shown in place of what could not be read.
pub(super) fn failure(error: impl Display) -> Markup {
    html! { p.notice.error { (error) } }
}

/// A form that gives a command and comes back to `back`; nothing where the session has not the role
/// that it needs.
pub(super) fn command_form(
    session: &SessionView,
    command: &str,
    back: &str,
    fields: &Markup,
) -> Markup {
    if !session.actor.has(act::role(command)) {
        return html! {};
    }
    html! {
        form method="post" action="/act" {
            input type="hidden" name="form" value=(session.form_token);
            input type="hidden" name="command" value=(command);
            input type="hidden" name="back" value=(back);
            (fields)
        }
    }
}

/// Forms behind a line that opens them; nothing where there are none.
pub(super) fn folded(line: &str, forms: &Markup) -> Markup {
    html! { @if !forms.0.is_empty() { details { summary { (line) } (forms) } } }
}

/// A labelled line of text.
pub(super) fn field(label: &str, name: &str, hint: &str, required: bool) -> Markup {
    html! {
        label { span { (label) }
            input type="text" name=(name) placeholder=(hint) required[required]
                autocomplete="off";
        }
    }
}

/// A labelled line of text that holds `value` already.
pub(super) fn filled(label: &str, name: &str, value: &str) -> Markup {
    html! {
        label { span { (label) }
            input type="text" name=(name) value=(value) autocomplete="off";
        }
    }
}

pub(super) fn hidden(name: &str, value: &str) -> Markup {
    html! { input type="hidden" name=(name) value=(value); }
}

/// A table that scrolls by itself where the screen is narrow.
pub(super) fn table(caption: &str, heads: &[&str], rows: &[Vec<Markup>]) -> Markup {
    html! {
        div.scroll role="region" aria-label=(caption) tabindex="0" {
            table {
                caption { (caption) }
                thead { tr { @for head in heads { th scope="col" { (head) } } } }
                tbody {
                    @for row in rows {
                        tr { @for cell in row { td { (cell) } } }
                    }
                    @if rows.is_empty() { tr { td colspan=(heads.len()) { "None." } } }
                }
            }
        }
    }
}

/// The text of a page, or of a part of one. Names may be from before marks of direction were
/// refused, and stand in many places.
pub(super) fn written(markup: Markup) -> String {
    escaped(&markup.into_string(), is_direction_mark).into_owned()
}

/// A value of an operator's document: text with its control characters and marks of direction
/// escaped, `–` where there is none.
pub(super) fn text(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::String(text) => escaped(text, is_unseen).into_owned(),
        other => other.to_string(),
    }
}

pub(super) fn rows<'a>(document: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    document[name].as_array().into_iter().flatten()
}

/// Unix seconds as a time in UTC.
pub(super) fn time(seconds: &Value) -> Markup {
    let Some(seconds) = seconds.as_u64() else { return html! { "–" } };
    let shown = UnixMillis(seconds.saturating_mul(1_000)).to_string();
    html! { time datetime=(shown.replace(' ', "T")) { (shown) } }
}

/// Microcredits, as text of digits, as credits with every digit.
pub(super) fn credits(units: &Value) -> String {
    let text = text(units);
    let (sign, digits) = text.strip_prefix('-').map_or(("", &*text), |digits| ("−", digits));
    let Ok(units) = digits.parse::<u64>() else { return text };
    let amount = format!("{}.{:06}", units / 1_000_000, units % 1_000_000);
    format!("{sign}{}", amount.trim_end_matches('0').trim_end_matches('.'))
}

/// An account's balances, trial first.
pub(super) fn both_balances(account: &Value) -> String {
    format!("{} + {}", credits(&account["trialUnits"]), credits(&account["premiumUnits"]))
}

/// Credits that a person typed, in microcredits.
pub(super) fn microcredits(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("{text:?} is no amount of credits, such as 5 or 0.25 (at most six decimals)");
    let text = text.trim();
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if part.len() > 6 || !digits(whole) || !digits(part) || (whole.is_empty() && part.is_empty()) {
        return Err(wrong());
    }
    let number =
        |text: &str| if text.is_empty() { Ok(0) } else { text.parse::<u64>().map_err(|_| wrong()) };
    let whole = number(whole)?.checked_mul(1_000_000).ok_or_else(wrong)?;
    whole.checked_add(number(&format!("{part:0<6}"))?).ok_or_else(wrong)
}

/// A model's state, and why it is not in use.
pub(super) fn model_state(model: &Value) -> String {
    let why = model["failure"].as_str().map(|why| format!(": {why}"));
    text(&model["state"]) + &why.unwrap_or_default()
}

pub(super) fn mebibytes(bytes: &Value) -> String {
    bytes.as_u64().map_or_else(|| "–".to_owned(), |bytes| format!("{} MiB", bytes >> 20))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn amounts_are_read_as_they_are_shown() {
        for (typed, expect) in [
            ("5", Some(5_000_000)),
            (" 0.25 ", Some(250_000)),
            (".000001", Some(1)),
            ("1.", Some(1_000_000)),
            ("", None),
            (".", None),
            ("-1", None),
            ("1.0000001", None),
            ("1e3", None),
            ("1,5", None),
            ("18446744073709551616", None),
            ("99999999999999999", None),
        ] {
            assert_eq!(microcredits(typed).ok(), expect, "{typed:?}");
        }
        for (units, expect) in [("0", "0"), ("1", "0.000001"), ("-1500000", "−1.5"), ("x", "x")] {
            assert_eq!(credits(&json!(units)), expect);
        }
    }

    #[test]
    fn what_operators_wrote_stays_text() {
        let name = "<script>alert(1)</script>\u{1b}\u{202e}";
        let row = vec![html! { (text(&json!(name))) }, html! { "a\u{202e}b" }];
        let shown = written(table("t", &["a", "b"], &[row]));
        assert!(!shown.contains("<script>") && !shown.contains(is_unseen), "{shown}");
        assert!(shown.contains(r"\u001b\u202e") && shown.contains(r"a\u202eb"), "{shown}");
    }
}
