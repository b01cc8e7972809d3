//! `cresset nodes`: the nodes that share the ledger.

use super::support::context::Context;
use super::support::listing;
use super::support::output::CommandResult;
use cresset_commands::AdminCommand;

const COLUMNS: &[&str] = &[
    "boot",
    "state",
    "machine",
    "address",
    "cluster",
    "models",
    "open_reservations",
    "build",
    "lease_seconds",
];

pub(super) async fn run(context: &Context) -> CommandResult {
    listing::show(context, COLUMNS, |_: Option<()>| AdminCommand::NodeList).await
}
