//! What the node does now, and the last ten minutes of it.

use super::chart::{self, Line};
use super::history::{EVERY, NodeSample, quantile};
use super::layout::{self, mebibytes, rows, text, time};
use super::{HtmlPage, Visitor, parts};
use crate::Console;
use axum::extract::State;
use axum::response::Response;
use cresset_base::UnixMillis;
use cresset_commands::{AdminCommand, certificate_to_renew, proof_to_renew};
use maud::{Markup, html};
use serde_json::Value;
use std::sync::Arc;

/// Minutes that the curves cover.
const MINUTES: u64 = 10;
/// Milliseconds of requests that one point of the latencies sums up.
const POINT_MS: u64 = 20_000;

pub(super) async fn show(State(live): State<Arc<Console>>, visitor: Visitor) -> HtmlPage {
    let live_part = fragment(&live, &visitor).await;
    let content = html! {
        noscript { p { "This is how it was when the page was loaded: load it again." } }
        div id="live" data-events="/events" { (live_part) }
    };
    visitor.page(&live, "/", "Overview", &content)
}

pub(super) async fn events(State(live): State<Arc<Console>>, visitor: Visitor) -> Response {
    parts(live, visitor, EVERY, |live, visitor| Box::pin(fragment(live, visitor)))
}

async fn fragment(live: &Console, visitor: &Visitor) -> Markup {
    let status = match visitor.ask(live, AdminCommand::Status).await {
        Ok(status) => status,
        Err(error) => return layout::failure(error),
    };
    html! {
        (state(&status))
        (certificate(&status, live.node.clock.now()))
        (proof(&status, live.node.clock.now()))
        (wrong_tokens(&status["wrong_operator_tokens"]))
        (tiles(&status))
        (curves(live))
        (models(&status))
        (budgets(&status))
        (errors(&status))
    }
}

fn state(status: &Value) -> Markup {
    match status["reason"].as_str() {
        None => {
            let at = text(&status["listen"]);
            html! {
                p.state.good {
                    "The node takes requests at " code { (at) }
                    @if let Some(at) = status["gateway"].as_str() {
                        ", and those of other tools at " code { (at) "/v1" }
                    }
                    "."
                }
            }
        }
        Some(reason) => html! { p.state.bad role="alert" { "Not ready: " (reason) } },
    }
}

/// The end of a certificate, once it is to be renewed.
fn certificate(status: &Value, now: UnixMillis) -> Markup {
    html! {
        @if let Some(ends) = certificate_to_renew(status, now.seconds()) {
            p.state.bad role="alert" {
                "The " (ends) ": renew its files, then " code { "cresset reload" } "."
            }
        }
    }
}

/// The end of a model's proof, once that is near.
fn proof(status: &Value, now: UnixMillis) -> Markup {
    html! {
        @if let Some(ends) = proof_to_renew(status, now.seconds()) {
            p.state.bad role="alert" {
                "The " (ends) ": it is renewed while the model is loaded, or by "
                code { "cresset qualify NAME" } "."
            }
        }
    }
}

/// Operator tokens that were refused since the start.
fn wrong_tokens(counts: &Value) -> Markup {
    let last = counts["last_ended"].as_str().map(|name| format!(" (the last: {name})"));
    html! {
        @if !counts.is_null() {
            p.state.bad {
                "Wrong operator tokens since the start: " (text(&counts["unknown"])) " unknown, "
                (text(&counts["ended"])) " revoked or expired" (last.unwrap_or_default())
                "; the last came " (time(&counts["last_at"])) "."
            }
        }
    }
}

fn tiles(status: &Value) -> Markup {
    let tile = |name: &str, value: String, more: String| {
        html! { div { dt { (name) } dd { strong { (value) } " " span { (more) } } } }
    };
    let number = |name: &str| status[name].as_f64().map_or_else(|| "–".into(), chart::number);
    let waiting = format!("{} waiting", number("requests_waiting"));
    let since_start = format!("{} since the start", number("generated_tokens_since_start"));
    let of_memory = format!("of {}", mebibytes(&status["model_memory_limit_bytes"]));
    let version = format!("version {}", text(&status["version"]));
    let ledger = if status["ledger_healthy"] == true { "sound" } else { "not sound" };
    html! {
        dl.tiles {
            (tile("Running", number("requests_running"), waiting))
            (tile("Tokens a second", number("tokens_per_second"), since_start))
            (tile("Models in memory", mebibytes(&status["model_memory_bytes"]), of_memory))
            (tile("Process", mebibytes(&status["memory_bytes"]), version))
            (tile("Ledger", ledger.into(), audit(&status["ledger_fully_audited_at"])))
            (tile("Last backup", backup(&status["last_backups"]["node"]), {
                format!("of the ledger alone: {}", backup(&status["last_backups"]["ledger"]))
            }))
        }
    }
}

fn audit(last: &Value) -> String {
    let Some(at) = last.as_u64() else { return "not audited yet".into() };
    format!("audited {}", UnixMillis(at * 1_000))
}

fn backup(last: &Value) -> String {
    let Some(at) = last["at"].as_u64() else { return "none known".into() };
    UnixMillis(at * 1_000).to_string()
}

/// Budgets of which operators were told since the start.
fn budgets(status: &Value) -> Markup {
    let row = |alert: &Value| {
        let (account, key) = (alert["account_id"].as_str(), text(&alert["key_id"]));
        vec![
            time(&alert["at"]),
            html! {
                @match account {
                    Some(id) => { a href={ "/accounts/" (id) } { "account " (id) } }
                    None => { "key " code { (key) } }
                }
            },
            html! { (text(&alert["period"])) },
            html! { (layout::credits(&alert["spentUnits"])) " of "
            (layout::credits(&alert["budgetUnits"])) },
        ]
    };
    let all: Vec<_> = rows(status, "budget_alerts").map(row).collect();
    html! {
        @if !all.is_empty() {
            (layout::table("Budgets nearly spent", &["Time", "Of", "Period", "Credits"], &all))
        }
    }
}

fn curves(live: &Console) -> Markup {
    let now = live.node.clock.now();
    let from = UnixMillis(now.0.saturating_sub(MINUTES * 60_000));
    let samples: Vec<NodeSample> =
        live.history.all().into_iter().filter(|sample| sample.at >= from).collect();
    let line = |name, value: fn(&NodeSample) -> f64| {
        let point = |sample: &NodeSample| (minutes(now, sample.at), value(sample));
        Line { name, points: samples.iter().map(point).collect() }
    };
    let requests = [
        line("running", |sample| sample.running as f64),
        line("waiting", |sample| sample.waiting as f64),
    ];
    let first_token = [("median", 0.5), ("95th percentile", 0.95)]
        .map(|quantile| first_tokens(live, now, from, quantile));
    html! {
        div.charts {
            (chart::lines("Output", "tokens a second", &[line("now", |now| now.tokens_per_second)]))
            (chart::lines("Requests", "", &requests))
            (chart::lines("First token", "ms", &first_token))
            (chart::lines("Key-value cache", "% in use", &[line("now", |now| 100.0 * now.kv_used)]))
        }
    }
}

/// A quantile of the times to a first token, point by point.
fn first_tokens(
    live: &Console,
    now: UnixMillis,
    from: UnixMillis,
    (name, share): (&'static str, f64),
) -> Line {
    let latencies = live.node.recent_latencies.all();
    let points = (0..MINUTES * 60_000 / POINT_MS).filter_map(|point| {
        let [begin, end] = [point, point + 1].map(|index| from.0 + index * POINT_MS);
        let ended = latencies.iter().filter(|latency| (begin..end).contains(&latency.at.0));
        let mut seconds: Vec<f64> =
            ended.filter_map(|latency| Some(latency.first_token?.as_secs_f64())).collect();
        let seconds = quantile(&mut seconds, share)?;
        Some((minutes(now, UnixMillis(end)).min(0.0), 1_000.0 * seconds))
    });
    Line { name, points: points.collect() }
}

fn minutes(now: UnixMillis, at: UnixMillis) -> f64 {
    (at.0 as f64 - now.0 as f64) / 60_000.0
}

fn models(status: &Value) -> Markup {
    let row = |model: &Value| {
        let count = |name: &str| html! { (text(&model[name])) };
        vec![
            html! { (text(&model["name"])) },
            html! { (layout::model_state(model)) },
            count("running"),
            count("waiting"),
            html! {
                (text(&model["kv_blocks_used"])) " of " (text(&model["kv_blocks_total"]))
                ", " (text(&model["kv_dtype"]))
            },
            count("generated_tokens"),
            html! { (text(&model["grade"])) ", " (text(&model["suite"])) },
        ]
    };
    let heads = ["Model", "State", "Running", "Waiting", "KV blocks", "Tokens made", "Evidence"];
    let all: Vec<_> = rows(status, "models").map(row).collect();
    layout::table("Models", &heads, &all)
}

fn errors(status: &Value) -> Markup {
    let row = |error: &Value| {
        let message = html! { (text(&error["message"])) };
        vec![time(&error["at"]), html! { (text(&error["model"])) }, message]
    };
    let all: Vec<_> = rows(status, "last_errors").map(row).collect();
    layout::table("Latest failures", &["Time", "Model", "What happened"], &all)
}
