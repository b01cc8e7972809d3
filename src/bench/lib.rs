//! Measures a node under load, or its ledger: `cresset bench`.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod completions;
mod connection;
mod database;
mod figures;
mod ledger;
mod plot;
mod reads;
mod tally;
mod target;

pub use plot::write as plot;
pub use target::client;

use clap::Args;
use cresset_base::durable_file::file_of_kind;
use cresset_client::ApiClient;
use cresset_node::NodeError;
use cresset_node::config::Config;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use target::Target;

type Result<T = (), E = NodeError> = std::result::Result<T, E>;

/// Shows a person what is being measured.
pub trait MeasureProgress: Send {
    /// Until the next call.
    fn begin(&mut self, what: String);
    /// How much of it is done.
    fn at(&mut self, done: u64, of: u64);
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cresset bench                                        completions of the folder's node or its own
  cresset bench --concurrency 1,2,4,8,16,32,64 --plot bench.svg
  cresset bench --concurrency 64 --input-tokens 512 --output-tokens 128 --requests 256
  cresset bench --url http://127.0.0.1:8080 --key KEY  any node, and most other servers like it
  cresset bench --reads                                account, credits and request look-ups
  cresset bench --ledger --simulate-fsync-ms 4         admissions and settlements on a slow disk
  cresset bench --ledger --url postgres://cresset@db/cresset --nodes 4 --accounts 1000
Completions spend the key's credits. A running node's plan limits what one key may do: 429 answers are counted as failed.
A node that the command starts for itself has no such limits.")]
pub struct Arguments {
    /// Address of the node to measure [default: the data folder's], or with --ledger of the
    /// database in which a schema is made for the fresh ledger, and removed
    #[arg(long)]
    pub url: Option<String>,
    /// Key to use [default: CRESSET_KEY or, without --url, the one that `cresset quickstart` made]
    #[arg(long)]
    pub key: Option<String>,
    /// Model, by name or id; at --url by id [default: the first, or the default release]
    #[arg(long)]
    pub model: Option<String>,
    /// Clients at a time, one measurement for each number
    #[arg(
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "1,8,64",
        value_parser = clients_parser(),
    )]
    concurrency: Vec<usize>,
    /// Length of each prompt, tokens
    #[arg(
        long,
        value_name = "N",
        default_value_t = 128,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    input_tokens: u32,
    /// Length of each answer, tokens; end-of-text is ignored
    #[arg(
        long,
        value_name = "N",
        default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    output_tokens: u32,
    /// Requests for each number of clients [default: two a client, at least 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    requests: Option<u32>,
    /// Longest time for each number of clients, seconds [default: 300; 2 for --reads, 3 for
    /// --ledger]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
    /// Draw the measurements over the number of clients into this file, which ends in .svg
    #[arg(
        long,
        value_name = "FILE",
        value_parser = svg,
        conflicts_with_all = ["ledger", "reads"],
    )]
    pub plot: Option<PathBuf>,
    /// Measure reads instead of completions
    #[arg(long, conflicts_with = "ledger")]
    pub reads: bool,
    /// Measure a fresh ledger instead of a node
    #[arg(long)]
    pub ledger: bool,
    /// Clients of the ledger at a time, at each node, one measurement for each number
    #[arg(
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "1,8,64,256",
        requires = "ledger",
        value_parser = clients_parser(),
    )]
    clients: Vec<usize>,
    /// Accounts of the ledger, over which the clients are spread
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        requires = "ledger",
        value_parser = clap::value_parser!(u32).range(1..=100_000),
    )]
    accounts: u32,
    /// Length of the answer that is stored with each settlement, bytes
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        requires = "ledger",
        value_parser = clap::value_parser!(u32).range(..=1 << 20),
    )]
    answer_bytes: u32,
    /// Nodes that use the ledger in a database at once, all in this process
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        requires_all = ["ledger", "url"],
        value_parser = clap::value_parser!(u8).range(1..=64),
    )]
    nodes: u8,
    /// Shortest time that every fsync of the ledger takes, milliseconds
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 0,
        requires = "ledger",
        conflicts_with = "url"
    )]
    simulate_fsync_ms: u64,
    /// Where to make the fresh ledger [default: the data folder, so that it is on the same disk]
    #[arg(long, value_name = "DIR", requires = "ledger", conflicts_with = "url")]
    folder: Option<PathBuf>,
}

fn clients_parser() -> impl clap::builder::TypedValueParser<Value = usize> {
    use clap::builder::TypedValueParser;
    clap::value_parser!(u16).range(1..=4096).map(usize::from)
}

/// Checks the path before the (long) run, so that a bad path does not cost the run.
fn svg(text: &str) -> Result<PathBuf, String> {
    file_of_kind(text, &["svg"])
        .ok_or("expected a file in a folder that exists, ending in .svg".to_owned())
}

/// Measures a fresh ledger, in a database where the arguments name one.
pub async fn ledger(
    (data_dir, config): (&Path, &Config),
    arguments: &Arguments,
    progress: &mut dyn MeasureProgress,
) -> Result<Value> {
    match &arguments.url {
        Some(url) => database::run((data_dir, config), url, arguments, progress).await,
        None => ledger::run((data_dir, config), arguments, progress).await,
    }
}

/// Measures completions or reads of the node that `api` asks.
pub async fn node(
    api: &ApiClient,
    arguments: &Arguments,
    progress: &mut dyn MeasureProgress,
) -> Result<Value> {
    let target = Arc::new(Target::new(api));
    if arguments.reads {
        reads::run(api, &target, arguments, progress).await
    } else {
        completions::run(target, arguments, progress).await
    }
}

/// A measurement for people.
pub fn show(document: &Value) -> String {
    if document["reads"].is_array() {
        reads::show_rows(document)
    } else if document["nodes"].is_number() {
        database::show(document)
    } else if document["audit_ok"].is_boolean() {
        ledger::show_levels(document)
    } else {
        completions::show_levels(document)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drawing_is_checked_before_the_run() {
        assert!(svg("a.svg").is_ok() && svg("a.html").is_err() && svg("/nowhere/a.svg").is_err());
    }
}
