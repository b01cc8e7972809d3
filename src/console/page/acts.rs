//! What operators did.

use super::layout::{self, rows, text, time};
use super::{HtmlPage, Visitor};
use crate::Console;
use axum::extract::State;
use cresset_commands::AdminCommand;
use maud::{Markup, html};
use serde_json::Value;
use std::sync::Arc;

/// Acts on the page, the latest ones.
const SHOWN: usize = 200;

pub(super) async fn show(State(live): State<Arc<Console>>, visitor: Visitor) -> HtmlPage {
    let content = match visitor.ask(&live, AdminCommand::OperatorActs { limit: SHOWN }).await {
        Err(error) => layout::failure(error),
        Ok(acts) => {
            let mut all: Vec<_> = rows(&acts, "data").map(row).collect();
            all.reverse();
            let heads = ["Time", "By", "Command", "With", "Failed"];
            layout::table("Acts of operators, the latest first", &heads, &all)
        }
    };
    visitor.page(&live, "/acts", "Acts", &content)
}

fn row(act: &Value) -> Vec<Markup> {
    let given = act["did"].as_object().into_iter().flatten();
    let given = given.filter(|(name, value)| *name != "command" && !value.is_null());
    let given: Vec<_> = given.map(|(name, value)| format!("{name}={}", text(value))).collect();
    let failed = act["failed"].as_str().unwrap_or_default();
    vec![
        time(&act["at"]),
        html! { (text(&act["by"])) },
        html! { (text(&act["did"]["command"])) },
        html! { (given.join(" ")) },
        html! { (failed) },
    ]
}
