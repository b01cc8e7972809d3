//! `cresset status`: shows the state of the node once, every second, or as a health check.

use super::support::context::Context;
use super::support::output::{CommandError, CommandResult, Style, print, style};
use super::support::{shutdown, text};
use clap::Args;
use cresset_base::{Clock, SystemClock, shown_now};
use cresset_catalogue::{Catalogue, NodePublicKey};
use cresset_commands::{
    AdminCommand, certificate_to_renew, context_words, proof_to_renew, stopped,
};
use serde_json::Value;
use std::fmt::Write;
use std::io::IsTerminal;
use std::time::Duration;

const MODEL_COLUMNS: &[&str] = &[
    "name",
    "id",
    "state",
    "context",
    "running",
    "waiting",
    "kv_blocks_used",
    "kv_blocks_total",
    "kv_dtype",
    "generated_tokens",
];
/// What renews a proof before it ends.
pub(super) const RENEWAL: &str =
    "it is renewed while the model is loaded, or by `cresset qualify NAME`";
const REFRESH: Duration = Duration::from_secs(1);
/// Refreshes between two looks at the folder of models, which may hold thousands of files.
const PART_ROUNDS: u32 = 30;
const CLEAR_SCREEN: &str = "\u{1b}[H\u{1b}[2J";

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cresset status --watch
  cresset status --ready    exit code 0 when the node takes work: a health check for containers")]
pub(super) struct Arguments {
    /// Show it again every second, until Ctrl-C
    #[arg(long, conflicts_with = "ready")]
    watch: bool,
    /// Fail unless the node takes new work now
    #[arg(long)]
    ready: bool,
}

pub(super) async fn run(context: &Context, arguments: &Arguments) -> CommandResult {
    if arguments.watch {
        return watch(context).await;
    }
    let document = ask(context, &model_parts(context)).await?;
    context.output.result(&document, screen)?;
    if arguments.ready && document["ready"] != true { Err(CommandError::Negative) } else { Ok(()) }
}

/// What interrupted pulls left in the folder, if it is here.
fn model_parts(context: &Context) -> Value {
    let parts = || Catalogue::new(&context.data_dir).parts().unwrap_or_default();
    if context.remote.is_some() { Value::Null } else { parts().into_iter().collect() }
}

/// The status of the node; one that says so when no node runs or there is no data folder. The keys
/// are read from the folder, if it is here: they sign receipts and qualification records.
async fn ask(context: &Context, model_parts: &Value) -> CommandResult<Value> {
    let mut found = context.ask_node(&AdminCommand::Status).await?.unwrap_or_else(stopped);
    if context.remote.is_some() {
        return Ok(found);
    }
    found["model_parts"] = model_parts.clone();
    let keys = Catalogue::new(&context.data_dir).keys().unwrap_or_else(|error| {
        tracing::warn!("{error}");
        Vec::new()
    });
    let mut keys: Vec<String> = keys.iter().map(NodePublicKey::id).collect();
    found["key"] = keys.pop().into();
    found["earlier_keys"] = keys.into();
    Ok(found)
}

async fn watch(context: &Context) -> CommandResult {
    let shutdown = shutdown::on_signal()?;
    let (mut parts, mut rounds) = (Value::Null, (0..PART_ROUNDS).cycle());
    while !shutdown.is_cancelled() {
        if rounds.next() == Some(0) {
            parts = model_parts(context);
        }
        let document = ask(context, &parts).await?;
        if context.output.json {
            context.output.line(&document, "")?;
        } else {
            let clear = if std::io::stdout().is_terminal() { CLEAR_SCREEN } else { "" };
            print(&format!("{clear}{}", screen(&document)))?;
        }
        tokio::select! { () = tokio::time::sleep(REFRESH) => {}, () = shutdown.cancelled() => {} }
    }
    Ok(())
}

fn screen(document: &Value) -> String {
    let mut out = readiness(document);
    if let Some(key) = document["key"].as_str() {
        let _ = writeln!(out, "key       {key}");
    }
    for earlier in document["earlier_keys"].as_array().into_iter().flatten() {
        let _ = writeln!(out, "earlier   {}", earlier.as_str().unwrap_or("-"));
    }
    for (name, bytes) in document["model_parts"].as_object().into_iter().flatten() {
        let part = text::mebibytes(bytes.as_u64().unwrap_or(0));
        let free = format!("`cresset models remove {name}` frees {part} of an interrupted pull");
        let _ = writeln!(out, "parts     {}", style(Style::Warning, &free));
    }
    if document["running"] != true {
        return out + "start it with `cresset serve`\n";
    }
    let shown = |name: &str| document[name].as_str().unwrap_or("-").to_owned();
    let number = |name: &str| document[name].as_f64().unwrap_or(0.0);
    let mebibytes = |name: &str| text::mebibytes(document[name].as_u64().unwrap_or(0));
    let _ = writeln!(out, "clients   {}\noperator  {}", shown("listen"), shown("operator"));
    if let Some(gateway) = document["gateway"].as_str() {
        let _ = writeln!(out, "gateway   {gateway}");
    }
    if let Some(ends) = certificate_to_renew(document, shown_now().seconds()) {
        let ends = style(Style::Warning, &ends);
        let _ = writeln!(out, "tls       the {ends}: renew it, then `cresset reload`");
    }
    if let Some(ends) = proof_to_renew(document, SystemClock.now().seconds()) {
        let ends = style(Style::Warning, &ends);
        let _ = writeln!(out, "proof     the {ends}: {RENEWAL}");
    }
    if document["ledger_healthy"].is_null() {
        return out;
    }
    for gpu in document["gpus"].as_array().into_iter().flatten() {
        let condition = gpu["condition"].as_str().unwrap_or("-");
        let worries = gpu["concerns"].as_array().is_some_and(|all| !all.is_empty());
        let condition = if worries { style(Style::Warning, condition) } else { condition.into() };
        let _ = writeln!(out, "gpu       {}: {condition}", gpu["name"].as_str().unwrap_or("-"));
    }
    let [process, models, limit] =
        ["memory_bytes", "model_memory_bytes", "model_memory_limit_bytes"].map(mebibytes);
    let _ = writeln!(out, "memory    {process}; models {models} of {limit}");
    let _ = writeln!(
        out,
        "requests  {} running, {} waiting, {:.1} tokens/s; {} tokens since the start",
        number("requests_running"),
        number("requests_waiting"),
        number("tokens_per_second"),
        number("generated_tokens_since_start")
    );
    let ahead = document["clock_ahead_seconds"].as_i64().unwrap_or(0);
    let time = text::utc(document["ledger_time_at"].as_u64().unwrap_or(0));
    let _ = writeln!(
        out,
        "time      {time} in the ledger; this machine's clock is {}",
        text::ahead(ahead)
    );
    out += &care(document);
    let mut models = serde_json::json!({ "data": document["models"] });
    for model in models["data"].as_array_mut().into_iter().flatten() {
        model["context"] = context_words(model).into();
    }
    out + "\n" + &text::table(&models, MODEL_COLUMNS) + &troubles(document)
}

/// What the files take, and how old backups and audits are.
fn care(document: &Value) -> String {
    let now = document["ledger_time_at"].as_u64().unwrap_or(0);
    let size = |name: &str| text::mebibytes(document["file_bytes"][name].as_u64().unwrap_or(0));
    let [ledger, answers, journal] = ["ledger", "answers", "journal"].map(size);
    let free = document["disk_free_bytes"].as_u64().map_or("?".into(), text::mebibytes);
    let age = |at: &Value| text::age(at.as_u64().map(|at| now.saturating_sub(at)));
    let backups = &document["last_backups"];
    let [node, alone] = ["node", "ledger"].map(|kind| age(&backups[kind]["at"]));
    let audit = age(&document["ledger_fully_audited_at"]);
    let in_database = document["file_bytes"].as_object().is_none_or(serde_json::Map::is_empty);
    let copies = if in_database {
        format!("files     the ledger is in a database; {free} free in the data folder\n")
    } else {
        format!(
            "files     ledger {ledger}, answers {answers}, closed journal {journal}; {free} free\n\
             backups   of the node: {node}; of the ledger alone: {alone}\n"
        )
    };
    format!("{copies}audit     of everything: {audit}\n")
}

fn readiness(document: &Value) -> String {
    if document["ready"] == true {
        return format!("{}\n", style(Style::Good, "ready"));
    }
    let reason = document["reason"].as_str().unwrap_or("unknown");
    format!("{}: {reason}\n", style(Style::Warning, "not ready"))
}

/// The reasons why models are not loaded again yet, and the latest errors.
fn troubles(document: &Value) -> String {
    let rows = |name: &str| document[name].as_array().map_or(&[][..], Vec::as_slice).iter();
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let failed = rows("models").filter(|model| !model["failure"].is_null());
    let failed = failed.map(|model| {
        format!("{} is not offered: {}\n", word(&model["name"]), word(&model["failure"]))
    });
    let at = |error: &Value| text::utc(error["at"].as_u64().unwrap_or(0));
    let errors = rows("last_errors")
        .map(|e| format!("{}  {}: {}\n", at(e), word(&e["model"]), word(&e["message"])));
    let contexts = rows("models").filter(|model| !model["context_failure"].is_null());
    let contexts = contexts.map(|model| {
        format!("{}: a context of {}\n", word(&model["name"]), word(&model["context_failure"]))
    });
    let lines: String = failed.chain(contexts).chain(errors).collect();
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}
