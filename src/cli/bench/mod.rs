//! `cresset bench`: measures a node under load, or its ledger.

mod completions;
mod connection;
mod database;
mod figures;
mod ledger;
mod plot;
mod reads;
mod tally;
mod target;

use super::support::context::Context;
use super::support::local_key::KeyChoice;
use super::support::output::{CommandError, CommandResult};
use super::support::{node_client, shutdown, values};
use clap::Args;
use cresset_client::ApiClient;
use cresset_node::config::client_key;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use target::Target;

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
pub(super) struct Arguments {
    /// Address of the node to measure [default: the data folder's], or with --ledger of the
    /// database in which a schema is made for the fresh ledger, and removed
    #[arg(long)]
    url: Option<String>,
    /// Key to use [default: CRESSET_KEY or, without --url, the one that `cresset quickstart` made]
    #[arg(long)]
    key: Option<String>,
    /// Model, by name or id; at --url by id [default: the first, or the default release]
    #[arg(long)]
    model: Option<String>,
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
        value_parser = values::svg,
        conflicts_with_all = ["ledger", "reads"],
    )]
    plot: Option<PathBuf>,
    /// Measure reads instead of completions
    #[arg(long, conflicts_with = "ledger")]
    reads: bool,
    /// Measure a fresh ledger instead of a node
    #[arg(long)]
    ledger: bool,
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

pub(super) async fn run(mut context: Context, arguments: Arguments) -> CommandResult {
    let shutdown = shutdown::on_signal()?;
    if arguments.ledger {
        let measuring = async {
            match &arguments.url {
                Some(url) => database::run(&context, url, &arguments).await,
                None => ledger::run(&context, &arguments).await,
            }
        };
        let document = shutdown::unless_interrupted(&shutdown, measuring).await?;
        let show = if arguments.url.is_some() { database::show } else { ledger::show_levels };
        context.output.result(&document, show)?;
        return verdict(document["audit_ok"] == true);
    }
    let key = arguments.key.clone().or_else(client_key);
    if let Some(url) = &arguments.url {
        let key = key.ok_or_else(|| {
            CommandError::new("--url needs a key").remedy("give one with --key or in CRESSET_KEY")
        })?;
        let node = context.node_address(url.trim_end_matches('/').trim_end_matches("/v1"))?;
        let measuring = async {
            measure(&target::client(node, &key, arguments.model.as_deref()).await?, &arguments)
                .await
        };
        let document = shutdown::unless_interrupted(&shutdown, measuring).await?;
        return show(&context, &arguments, &document);
    }
    lift_limits(&mut context);
    let key = KeyChoice::Given(key);
    let opening = node_client::open(&context, arguments.model.as_deref(), &key);
    let client = shutdown::unless_interrupted(&shutdown, opening).await?;
    let measured = shutdown::unless_interrupted(&shutdown, measure(&client.api, &arguments)).await;
    client.close().await;
    show(&context, &arguments, &measured?)
}

/// Lifts the plans' limits for a node of our own: the node is measured, not the plan.
fn lift_limits(context: &mut Context) {
    for plan in context.config.plans.values_mut() {
        (plan.requests_per_minute, plan.burst, plan.max_concurrent) = (1 << 24, 1 << 24, 1 << 20);
    }
}

async fn measure(api: &ApiClient, arguments: &Arguments) -> CommandResult<Value> {
    let target = Arc::new(Target::new(api));
    if arguments.reads {
        reads::run(api, &target, arguments).await
    } else {
        completions::run(target, arguments).await
    }
}

fn show(context: &Context, arguments: &Arguments, document: &Value) -> CommandResult {
    if document["reads"].is_array() {
        return context.output.result(document, reads::show_rows);
    }
    context.output.result(document, completions::show_levels)?;
    arguments.plot.as_ref().map_or(Ok(()), |file| plot::write(file, document))?;
    let levels = document["levels"].as_array().map_or(&[][..], Vec::as_slice);
    verdict(levels.iter().all(|level| level["answered"] != 0))
}

/// Fails when nothing was measured.
fn verdict(good: bool) -> CommandResult {
    if good { Ok(()) } else { Err(CommandError::Negative) }
}
