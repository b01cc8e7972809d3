//! `cresset ledger`: audits, copies, restores and moves the ledger.

mod moving;

use super::support::context::{Context, Globals};
use super::support::output::{CommandError, CommandResult};
use super::support::text;
use clap::Subcommand;
use cresset_base::{Clock, DiskReserve, SystemClock};
use cresset_commands::{AdminCommand, view};
use cresset_ledger::{Account, Credential};
use cresset_store::{ReplacedState, RestoreReport, RestoreScope, Store};
pub(super) use moving::MoveArguments;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  cresset ledger audit
  cresset ledger backup /var/backups/cresset-2026-01-31.ledger       (also while the node runs)
  cresset ledger move --to postgres://cresset@db1,db2/cresset --standbys 1")]
pub(super) enum LedgerCommand {
    /// Check every invariant over everything stored
    Audit,
    /// Write a verified copy to a new file. It holds no answers: `cresset backup` does
    Backup {
        /// Where to write it; what exists is left as it is
        file: PathBuf,
    },
    /// Replace the ledger with a copy; the node must be stopped. The replaced files are kept as
    /// *.replaced-1, the next ones as *.replaced-2, and none is ever deleted. Credentials revoked
    /// and accounts suspended in the replaced ledger stay so; what the copy does not know is gone
    Restore {
        /// A copy that `ledger backup` or `backup` wrote; answers of the latter come with it
        file: PathBuf,
    },
    /// Take the data folder's ledger over into a PostgreSQL database that has none; the node must
    /// be stopped. It is audited before and after, and the files are kept as *.moved. What is given
    /// here is written into the configuration. A move that was interrupted is given again
    Move(MoveArguments),
}

pub(super) async fn run(
    context: &Context,
    globals: &Globals,
    command: LedgerCommand,
) -> CommandResult {
    match command {
        LedgerCommand::Audit => audit(context).await,
        LedgerCommand::Backup { file } => backup(context, &file).await,
        LedgerCommand::Restore { file } => restore(context, &file, RestoreScope::Ledger).await,
        LedgerCommand::Move(_) => moving::run(context, globals).await,
    }
}

async fn audit(context: &Context) -> CommandResult {
    show_findings(context, &report(context).await?)
}

/// Shows the report of an audit. The command fails when something is wrong.
pub(super) fn show_findings(context: &Context, report: &Value) -> CommandResult {
    context.output.result(report, findings)?;
    if report["ok"] == true { Ok(()) } else { Err(CommandError::Negative) }
}

/// The audit report of the running node. When no node runs, the ledger is only read, so that one
/// which is too damaged to be opened for work is reported all the same.
pub(super) async fn report(context: &Context) -> CommandResult<Value> {
    if context.remote.is_some() {
        return context.admin(AdminCommand::LedgerAudit).await;
    }
    cresset_node::ledger::require(&context.data_dir, &context.config)?;
    let place = cresset_node::ledger::place(&context.data_dir, &context.config)?;
    let read = async || match context.ask_node(&AdminCommand::LedgerAudit).await? {
        Some(report) => Ok(Some(report)),
        None => match Store::inspect(&place) {
            Ok(report) => Ok(Some(view::audit(&report))),
            Err(error) => Ok(cresset_node::ledger::not_opened(&context.config, error)?),
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

/// Replaces the ledger and, with the scope of a node, the files that the copy has.
pub(super) async fn restore(context: &Context, file: &Path, scope: RestoreScope) -> CommandResult {
    if context.ask_node(&AdminCommand::Status).await?.is_some() {
        let what = "a node runs on this data folder, and its ledger cannot be replaced under it";
        return Err(CommandError::new(what).remedy("stop the node, then restore"));
    }
    let from = std::path::absolute(file)?;
    let reserve = DiskReserve::new(&context.data_dir, context.config.requests.min_free_mib << 20);
    let bytes = from.metadata().map_or(0, |found| found.len());
    reserve.check(&context.data_dir, bytes).map_err(CommandError::new)?;
    let place = cresset_node::ledger::place(&context.data_dir, &context.config)?;
    let report = Store::restore(&place, &from, scope);
    let report = report.map_err(CommandError::new)?;
    let places = json!({ "data_dir": context.data_dir, "restored_from": from });
    context.output.result(&view::merged(places, restored(&report)), tell_restored)
}

/// A credential that has expired is not valid again.
fn restored(report: &RestoreReport) -> Value {
    let now = SystemClock.now();
    let lives = |credential: &&Credential| credential.expires_at.is_none_or(|end| now < end);
    let all = |found: &[Credential]| {
        let now = SystemClock.now();
        found.iter().map(|row| view::credential(row, now)).collect::<Vec<_>>()
    };
    let valid_again: Vec<_> = report.valid_again.iter().filter(lives).cloned().collect();
    let account = |account: &Account| json!({ "id": account.id, "name": account.name });
    let (state, why) = match &report.replaced {
        ReplacedState::Absent => ("absent", None),
        ReplacedState::Read => ("read", None),
        ReplacedState::Unreadable(why) => ("unreadable", Some(why)),
    };
    let lost = report.lost.map(|lost| {
        json!({ "accounts": lost.accounts, "credentials": lost.credentials, "requests": lost.requests })
    });
    json!({
        "replaced_files": report.replaced_files,
        "restored_files": report.restored_files,
        "answers": report.answers,
        "replaced_ledger": state,
        "unreadable_because": why,
        "kept_revoked": all(&report.kept_revoked),
        "kept_suspended": report.kept_suspended.iter().map(account).collect::<Vec<_>>(),
        "valid_again": all(&valid_again),
        "gone": lost,
    })
}

fn tell_restored(document: &Value) -> String {
    let rows = |name: &str| document[name].as_array().map_or(&[][..], Vec::as_slice);
    let list = |name: &str, head: &str, columns: &[&str]| match rows(name) {
        [] => String::new(),
        found => format!("{head}:\n{}", text::table(&json!({ "data": found }), columns)),
    };
    let files: Vec<_> = rows("replaced_files").iter().filter_map(Value::as_str).collect();
    let kept = match files.as_slice() {
        [] => "nothing was replaced\n".to_owned(),
        files => format!("the replaced files are kept as\n  {}\n", files.join("\n  ")),
    };
    let placed: Vec<_> = rows("restored_files").iter().filter_map(Value::as_str).collect();
    let placed = match placed.as_slice() {
        [] => String::new(),
        files => format!("put in place beside the ledger\n  {}\n", files.join("\n  ")),
    };
    let gone = &document["gone"];
    let gone = match document["replaced_ledger"].as_str() {
        Some("unreadable") => format!(
            "the replaced ledger could not be read whole ({}): what was revoked in it may be valid again\n",
            text::plain(document["unreadable_because"].as_str().unwrap_or_default())
        ),
        _ if gone.is_null() => String::new(),
        _ => format!(
            "made after the copy and gone: {} accounts, {} credentials, {} requests\n",
            gone["accounts"], gone["credentials"], gone["requests"]
        ),
    };
    let columns = &["id", "kind", "account_id", "label", "hint", "expires_at"];
    [
        text::fields(document),
        placed,
        kept,
        gone,
        list("kept_revoked", "kept revoked, as in the replaced ledger", columns),
        list("kept_suspended", "kept suspended, as in the replaced ledger", &["id", "name"]),
        list(
            "valid_again",
            "valid again, because the replaced ledger does not tell of them; revoke those that were revoked",
            columns,
        ),
    ]
    .concat()
}
