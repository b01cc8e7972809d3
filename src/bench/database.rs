//! Measures durable admissions and settlements in a database, where several nodes may share the
//! ledger.

#![expect(clippy::disallowed_methods, reason = "a benchmark measures time")]

use super::figures::{Column, show as show_number, show_percentiles, table};
use super::ledger::{LedgerClient, measure, open_accounts, stored_answers};
use crate::Arguments;
use crate::MeasureProgress;
use crate::Result;
use cresset_base::SystemClock;
use cresset_commands::Operator;
use cresset_node::NodeError;
use cresset_node::config::Config;
use cresset_store::{Limits, Store, StoreConfig};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Seconds that each number of clients is measured for by default.
const SECONDS: u64 = 3;

pub(super) async fn run(
    (data_dir, config): (&Path, &Config),
    url: &str,
    arguments: &Arguments,
    progress: &mut dyn MeasureProgress,
) -> Result<Value> {
    let place = cresset_node::ledger::database(url, data_dir, config)?;
    // Without a data folder: nodes of one process cannot lock one each.
    let (own, _scratch) = place.init_scratch().map_err(NodeError::new)?;
    let nodes = open_nodes(&own, arguments.nodes)?;
    let settings = config.operator();
    let operator = Operator::of_store(&nodes[0], &settings);
    let payers = open_accounts(&operator, arguments.accounts).await?;
    let span = Duration::from_secs(arguments.seconds.unwrap_or(SECONDS));
    let mut levels = Vec::new();
    for &clients in &arguments.clients {
        progress.begin(format!("{clients} clients at each node"));
        let until = Instant::now() + span;
        let client =
            |store: &Store| LedgerClient::new(store, &payers, arguments.answer_bytes, until);
        let all = nodes.iter().flat_map(|store| vec![client(store); clients]).collect();
        levels.push(measure(all).await.map_err(NodeError::new)?.0);
    }
    let stored = stored_answers(&nodes[0], &payers).await?;
    let audit = nodes[0].audit().map_err(NodeError::new)?;
    drop(nodes);
    Ok(json!({ "nodes": arguments.nodes, "accounts": arguments.accounts, "levels": levels,
               "stored_answer_bytes": stored, "audit_ok": audit.ok }))
}

fn open_nodes(config: &StoreConfig, count: u8) -> Result<Vec<Store>> {
    let open = |_| Store::open(config, Arc::new(SystemClock), Limits::default());
    (0..count).map(open).collect::<Result<_, _>>().map_err(NodeError::new)
}

const COLUMNS: &[Column] = &[
    ("CLIENTS", "clients", ToString::to_string),
    ("PAIRS/S", "pairs_per_second", show_number),
    ("PAIR MS p50 / p90 / p99", "pair_ms", show_percentiles),
];

pub(super) fn show(document: &Value) -> String {
    let sound = if document["audit_ok"] == true { "sound" } else { "NOT SOUND" };
    format!(
        "durable admissions and settlements in a database: {} nodes, {} accounts\n{}the ledger is {sound} \
         afterwards\n",
        document["nodes"],
        document["accounts"],
        table(&document["levels"], COLUMNS)
    )
}
