//! `cresset backup` and `cresset restore`: everything of a node but its weights, in one file.

use super::ledger;
use super::support::context::{Context, Globals, config_file};
use super::support::output::{CommandError, CommandResult};
use super::support::text;
use clap::Args;
use cresset_base::{Clock, SystemClock, UnixMillis};
use cresset_commands::{AdminCommand, view};
use cresset_store::{RestoreScope, Store, StoreConfig};
use serde_json::json;
use std::path::{Path, PathBuf};
use uuid::Uuid;

const BACKUP: &str = "The file holds accounts, balances, the journal, requests, the stored answers, the configuration, \
the manifests of models, the records of their qualification and the node's key that signed them. It holds no weights, \
which `cresset models pull NAME` fetches again or you copy into models/NAME, and no client's key. Keep it as you keep \
the data folder: it has the texts of answers, the hub's token and the node's key.

Examples:
  cresset backup /var/backups/cresset-2026-01-31.node       (also while the node runs)
  cresset backup --into /var/backups/cresset --keep 14      (every day)
  cresset backup --check /var/backups/cresset-2026-01-31.node";

#[derive(Args, Debug)]
#[command(after_help = BACKUP)]
pub(super) struct BackupArguments {
    /// The file to write; a file that exists is left as it is
    #[arg(required_unless_present_any = ["into", "check"], conflicts_with = "into")]
    file: Option<PathBuf>,
    /// Folder to write a file into that is named after the time
    #[arg(long, value_name = "DIR")]
    into: Option<PathBuf>,
    /// Remove the oldest of the folder's files that were named so, down to this number, after the
    /// new one was written and checked
    #[arg(
        long,
        value_name = "COUNT",
        requires = "into",
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    keep: Option<u32>,
    /// Check a backup instead of making one: it is restored into a folder below $TMPDIR, audited,
    /// and removed again
    #[arg(long, value_name = "FILE", conflicts_with_all = ["file", "into"])]
    check: Option<PathBuf>,
}

const RESTORE: &str = "The backup is checked as a whole before anything is replaced. Every file that it replaces is \
kept beside it as *.replaced-1, the next time as *.replaced-2, and none is ever deleted. Models of the folder that the \
backup does not know stay; they are qualified again if the node's key was another. The configuration becomes \
cresset.toml of the data folder, also where it lay elsewhere. Credentials revoked and accounts suspended in the \
replaced ledger stay so; what the backup does not know is gone.

Examples:
  cresset restore /var/backups/cresset-2026-01-31.node
  cresset models pull smollm2-135m-instruct && cresset serve";

#[derive(Args, Debug)]
#[command(after_help = RESTORE)]
pub(super) struct RestoreArguments {
    /// A file that `cresset backup` wrote
    file: PathBuf,
}

pub(super) async fn backup(
    context: &Context,
    globals: &Globals,
    arguments: &BackupArguments,
) -> CommandResult {
    if let Some(file) = &arguments.check {
        return check(context, file);
    }
    if let Some(dir) = arguments.into.as_ref().filter(|dir| !dir.is_dir()) {
        let what = format!("{} is no folder", dir.display());
        return Err(CommandError::new(what).remedy("make it, or name another one with --into"));
    }
    let config = config_file(globals, &context.data_dir).map(std::path::absolute).transpose()?;
    let files = cresset_node::files::to_back_up(&context.data_dir, config.as_deref())?;
    let named = |dir: &PathBuf| dir.join(file_name(SystemClock.now()));
    let file = arguments.file.clone().or(arguments.into.as_ref().map(named)).unwrap_or_default();
    let to = std::path::absolute(file)?;
    let mut document = context.admin(AdminCommand::Backup { to, files }).await?;
    if let (Some(dir), Some(keep)) = (&arguments.into, arguments.keep) {
        document["removed"] = json!(remove_oldest(dir, keep as usize)?);
    }
    context.output.result(&document, text::fields)
}

/// Restores a backup into a folder of its own, and audits what is there then.
fn check(context: &Context, file: &Path) -> CommandResult {
    let from = std::path::absolute(file)?;
    let place = BriefFolder(std::env::temp_dir().join(format!("cresset-check-{}", Uuid::new_v4())));
    cresset_node::ledger::make_folder(&place.0)?;
    let config = StoreConfig::folder(&place.0);
    let restored = Store::restore(&config, &from, RestoreScope::Node).map_err(CommandError::new)?;
    let report = view::audit(&Store::inspect(&config).map_err(CommandError::new)?);
    let held = json!({ "answers": restored.answers, "node_files": restored.restored_files.len() });
    ledger::show_findings(context, &view::merged(report, held))
}

/// A folder that goes with the command.
struct BriefFolder(PathBuf);

impl Drop for BriefFolder {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!(%error, "{} could not be removed", self.0.display());
        }
    }
}

/// The name of a backup of this time. Names are in the order of time.
fn file_name(at: UnixMillis) -> String {
    let time: String = at.to_string().chars().filter(char::is_ascii_digit).collect();
    format!("cresset-{time}.node")
}

/// Whether [`file_name`] gave this name.
fn is_own(name: &str) -> bool {
    let time = name.strip_prefix("cresset-").and_then(|rest| rest.strip_suffix(".node"));
    time.is_some_and(|time| time.len() == 14 && time.bytes().all(|digit| digit.is_ascii_digit()))
}

/// Removes the oldest backups of a folder, and returns their names.
fn remove_oldest(dir: &Path, keep: usize) -> CommandResult<Vec<String>> {
    let mut own = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        own.extend(entry?.file_name().into_string().ok().filter(|name| is_own(name)));
    }
    own.sort();
    own.truncate(own.len().saturating_sub(keep));
    own.iter().try_for_each(|name| std::fs::remove_file(dir.join(name)))?;
    Ok(own)
}

pub(super) async fn restore(context: &Context, arguments: &RestoreArguments) -> CommandResult {
    cresset_node::ledger::make_folder(&context.data_dir)?;
    ledger::restore(context, &arguments.file, RestoreScope::Node).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_oldest_own_backups_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let own = [1_700_000_000, 1_700_000_001, 1_800_000_000]
            .map(|at| file_name(UnixMillis(at * 1_000)));
        assert_eq!(own[0], "cresset-20231114221320.node");
        let others = ["cresset-2020.node", "cresset-20231114221320.node.bak", "ledger.redb"];
        for name in own.iter().map(String::as_str).chain(others) {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(remove_oldest(dir.path(), 3).unwrap(), [""; 0]);
        assert_eq!(remove_oldest(dir.path(), 2).unwrap(), own[..1]);
        assert_eq!(remove_oldest(dir.path(), 1).unwrap(), own[1..2]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 4);
    }
}
