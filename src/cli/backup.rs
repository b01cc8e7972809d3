//! `cresset backup` and `cresset restore`: everything of a node but its weights, in one file.

use super::ledger;
use super::support::context::{Context, Globals, config_file};
use super::support::output::CommandResult;
use super::support::text;
use crate::node;
use crate::server::operator::AdminCommand;
use crate::store::RestoreScope;
use clap::Args;
use std::path::PathBuf;

const BACKUP: &str = "The file holds accounts, balances, the journal, requests, the stored answers, the configuration, \
the manifests of models, the records of their qualification and the node's key that signed them. It holds no weights, \
which `cresset models pull NAME` fetches again or you copy into models/NAME, and no client's key. Keep it as you keep \
the data folder: it has the texts of answers, the hub's token and the node's key.

Examples:
  cresset backup /var/backups/cresset-2026-01-31.node       (also while the node runs)";

#[derive(Args, Debug)]
#[command(after_help = BACKUP)]
pub(super) struct BackupArguments {
    /// The file to write; a file that exists is left as it is
    file: PathBuf,
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
    let config = config_file(globals, &context.data_dir).map(std::path::absolute).transpose()?;
    let files = node::files::to_back_up(&context.data_dir, config.as_deref())?;
    let to = std::path::absolute(&arguments.file)?;
    context.show(AdminCommand::Backup { to, files }, text::fields).await
}

pub(super) async fn restore(context: &Context, arguments: &RestoreArguments) -> CommandResult {
    node::ledger::make_folder(&context.data_dir)?;
    ledger::restore(context, &arguments.file, RestoreScope::Node).await
}
