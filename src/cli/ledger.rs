//! `cresset ledger`: audits, copies and restores the ledger.

use super::support::context::Context;
use super::support::output::{CommandError, CommandResult};
use super::support::text;
use crate::node;
use crate::server::operator::{AdminCommand, view};
use crate::store::{Store, StoreConfig, StoreError};
use clap::Subcommand;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  cresset ledger audit
  cresset ledger backup /var/backups/cresset-2026-01-31.ledger       (also while the node runs)")]
pub(super) enum LedgerCommand {
    /// Check every invariant over everything stored
    Audit,
    /// Write a verified copy to a new file
    Backup {
        /// Where to write it; what exists is left as it is
        file: PathBuf,
    },
    /// Replace the ledger with a copy; the node must be stopped. The replaced files are kept as
    /// *.replaced
    Restore {
        /// A copy that `ledger backup` wrote
        file: PathBuf,
    },
}

pub(super) async fn run(context: &Context, command: LedgerCommand) -> CommandResult {
    match command {
        LedgerCommand::Audit => audit(context).await,
        LedgerCommand::Backup { file } => backup(context, &file).await,
        LedgerCommand::Restore { file } => restore(context, &file).await,
    }
}

async fn audit(context: &Context) -> CommandResult {
    let report = report(context).await?;
    context.output.result(&report, findings)?;
    if report["ok"] == true { Ok(()) } else { Err(CommandError::Negative) }
}

/// The audit report of the running node. When no node runs, the ledger is only read, so that one
/// which is too damaged to be opened for work is reported all the same.
pub(super) async fn report(context: &Context) -> CommandResult<Value> {
    node::ledger::require(&context.data_dir)?;
    let read = async || match context.ask_node(&AdminCommand::LedgerAudit).await? {
        Some(report) => Ok(Some(report)),
        None => match Store::inspect(&StoreConfig::folder(&context.data_dir)) {
            Ok(report) => Ok(Some(view::audit(&report))),
            Err(StoreError::InUse(_)) => Ok(None),
            Err(error) => Err(CommandError::new(error)),
        },
    };
    context.patiently(read).await
}

fn findings(report: &Value) -> String {
    let checked = text::fields(&report["checked"]);
    let violations = report["violations"].as_array().map_or(&[][..], Vec::as_slice);
    if violations.is_empty() {
        return format!("the ledger is sound; checked:\n{checked}");
    }
    let named: Vec<&str> = violations.iter().filter_map(Value::as_str).collect();
    format!(
        "{} violations:\n  {}\nchecked:\n{checked}restore a copy with `cresset ledger restore`\n",
        violations.len(),
        named.join("\n  ")
    )
}

async fn backup(context: &Context, file: &Path) -> CommandResult {
    let to = std::path::absolute(file)?;
    context.show(AdminCommand::LedgerBackup { to }, text::fields).await
}

async fn restore(context: &Context, file: &Path) -> CommandResult {
    if context.ask_node(&AdminCommand::Status).await?.is_some() {
        let what = "a node runs on this data folder, and its ledger cannot be replaced under it";
        return Err(CommandError::new(what).remedy("stop the node, then restore"));
    }
    let from = std::path::absolute(file)?;
    Store::restore(&StoreConfig::folder(&context.data_dir), &from).map_err(CommandError::new)?;
    let document = json!({ "data_dir": context.data_dir, "restored_from": from });
    context.output.result(&document, text::fields)
}
