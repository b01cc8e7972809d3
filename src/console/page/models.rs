//! Releases: what is served and why, and the work on them.

use super::layout::{self, command_form, field, folded, hidden, mebibytes, rows, text, time};
use super::{HtmlPage, Visitor, parts};
use crate::Console;
use axum::extract::State;
use axum::response::Response;
use cresset_catalogue::Manifest;
use cresset_commands::{AdminCommand, context_words};
use maud::{Markup, html};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

const BACK: &str = "/models";
/// Between two looks at the jobs.
const EVERY: Duration = Duration::from_secs(1);

pub(super) async fn show(State(live): State<Arc<Console>>, visitor: Visitor) -> HtmlPage {
    let status = visitor.ask(&live, AdminCommand::Status).await;
    let content = match &status {
        Err(error) => layout::failure(error),
        Ok(status) => html! {
            (served(&live, &visitor, status))
            (others(&live, &visitor, status))
            h2 { "Add a model" }
            (additions(&visitor))
            h2 { "Jobs" }
            div id="live" data-events="/models/events" { (jobs(&live, &visitor).await) }
        },
    };
    visitor.page(&live, BACK, "Models", &content)
}

/// The jobs as they go on.
pub(super) async fn events(State(live): State<Arc<Console>>, visitor: Visitor) -> Response {
    parts(live, visitor, EVERY, |live, visitor| Box::pin(jobs(live, visitor)))
}

fn act(visitor: &Visitor, command: &str, release: &str, word: &str) -> Markup {
    let button = html! { (hidden("release", release)) button.quiet { (word) } };
    command_form(&visitor.session, command, BACK, &button)
}

/// Deleting is two steps away.
fn removal(visitor: &Visitor, release: &str) -> Markup {
    folded("Remove", &act(visitor, "model_remove", release, "Delete its files and records"))
}

fn served(live: &Console, visitor: &Visitor, status: &Value) -> Markup {
    let row = |model: &Value| {
        let name = text(&model["name"]);
        let loaded = model["state"] == "loaded";
        vec![
            html! { strong { (name) } br; code { (text(&model["id"])) } },
            html! { (layout::model_state(model)) },
            html! {
                (context_words(model))
                @if let Some(why) = model["context_failure"].as_str() { br; (why) }
            },
            html! { @if !loaded { "about " } (mebibytes(&model["bytes"])) },
            prices(live, visitor, &name),
            evidence(model),
            html! { div.acts {
                @if loaded { (act(visitor, "model_unload", &name, "Unload")) }
                @else { (act(visitor, "model_load", &name, "Load")) }
                (act(visitor, "qualify_quick", &name, "Qualify"))
                (act(visitor, "qualify_full", &name, "Qualify in full"))
                (removal(visitor, &name))
            } },
        ]
    };
    let heads = ["Model", "State", "Context tokens", "Memory", "Prices", "Evidence", "Acts"];
    let all: Vec<_> = rows(status, "models").map(row).collect();
    html! { (memory(status)) (layout::table("Served models", &heads, &all)) }
}

/// What is left for the models that are not in memory.
fn memory(status: &Value) -> Markup {
    let [limit, used] = ["model_memory_limit_bytes", "model_memory_bytes"];
    html! {
        p {
            "Loaded models take " (mebibytes(&status[used])) " of " (mebibytes(&status[limit]))
            ". A load that needs more than is left unloads models without requests first."
        }
    }
}

fn evidence(model: &Value) -> Markup {
    html! {
        (text(&model["grade"])) ", suite " (text(&model["suite"])) br;
        (time(&model["qualified_at"]))
        @if let Some(why) = model["accepted_because"].as_str() { br; "accepted: " (why) }
    }
}

/// A model's prices in credits a million tokens, and a form that changes them.
fn prices(live: &Console, visitor: &Visitor, name: &str) -> Markup {
    let models = live.node.pool.models();
    let found = models.iter().find(|model| model.qualified.manifest().name == name);
    let Some(prices) = found.map(|model| model.qualified.prices()) else { return html! { "–" } };
    let rows = [
        ("Prompt", "input", prices.input),
        ("Cached", "cached_input", prices.cached_input),
        ("Answer", "output", prices.output),
    ];
    let shown = |units: u64| layout::credits(&Value::from(units.to_string()));
    let fields = html! {
        (hidden("release", name))
        @for (label, field_name, units) in rows {
            (field(label, field_name, &shown(units), false))
        }
        button.quiet { "Change" }
    };
    html! {
        @for (label, _, units) in rows { (label) " " (shown(units)) br; }
        (folded("Change", &command_form(&visitor.session, "model_price", BACK, &fields)))
    }
}

/// Releases of the data folder that are not served, and built-in ones that were not fetched.
fn others(live: &Console, visitor: &Visitor, status: &Value) -> Markup {
    let manifests = match live.node.catalogue.manifests() {
        Ok(manifests) => manifests,
        Err(error) => return layout::failure(error),
    };
    let is_served = |name: &str| rows(status, "models").any(|model| model["name"] == name);
    let others = manifests.iter().filter(|manifest| !is_served(&manifest.name));
    let all: Vec<_> = others.map(|manifest| release(live, visitor, manifest)).collect();
    layout::table("Other releases", &["Release", "State", "Acts"], &all)
}

fn release(live: &Console, visitor: &Visitor, manifest: &Manifest) -> Vec<Markup> {
    let name = &manifest.name;
    let is_here = live.node.catalogue.is_pulled(manifest);
    vec![
        html! { (name) },
        html! { (if is_here { "here, not served" } else { "not fetched" }) },
        html! { div.acts {
            @if is_here {
                (act(visitor, "qualify_quick", name, "Qualify"))
                (act(visitor, "qualify_full", name, "Qualify in full"))
                (command_form(&visitor.session, "model_accept", BACK, &html! {
                    (hidden("release", name))
                    (field("Why to serve it without reference", "reason", "", true))
                    button.quiet { "Accept" }
                }))
                (removal(visitor, name))
            } @else {
                (act(visitor, "model_pull", name, "Fetch"))
            }
        } },
    ]
}

fn additions(visitor: &Visitor) -> Markup {
    let pull = html! {
        (field("Release, or repository of the hub", "release", "OWNER/REPOSITORY:Q4_K_M", true))
        button { "Fetch" }
    };
    let add = html! {
        (field("File or folder on the node's machine", "path", "/srv/model.gguf", true))
        (field("Name", "name", "from the file's name", false))
        button { "Add" }
    };
    html! {
        (command_form(&visitor.session, "model_pull", BACK, &pull))
        (command_form(&visitor.session, "model_add", BACK, &add))
    }
}

async fn jobs(live: &Console, visitor: &Visitor) -> Markup {
    let jobs = match visitor.ask(live, AdminCommand::ModelJobList).await {
        Ok(jobs) => jobs,
        Err(error) => return layout::failure(error),
    };
    html! {
        @for job in rows(&jobs, "data") {
            section aria-label={ "Job " (text(&job["number"])) } {
                h3 {
                    "Job " (text(&job["number"])) ": " (described(&job["job"])) ", " (outcome(job))
                }
                p { "Begun " (time(&job["began_at"])) }
                @if job["running"] == true {
                    (command_form(&visitor.session, "job_stop", BACK, &html! {
                        (hidden("number", &text(&job["number"]))) button.quiet { "Stop" }
                    }))
                }
                pre tabindex="0" { @for line in rows(job, "lines") { (text(line)) "\n" } }
            }
        }
        @if rows(&jobs, "data").next().is_none() { p { "None since the node was started." } }
    }
}

fn described(job: &Value) -> String {
    let of = text(job.get("release").unwrap_or(&job["path"]));
    format!("{} {of}", text(&job["job"]))
}

fn outcome(job: &Value) -> String {
    match job["exit_code"].as_i64() {
        None => "running".into(),
        Some(0) => "done".into(),
        Some(-1) => "stopped".into(),
        Some(code) => format!("failed with exit code {code}"),
    }
}
