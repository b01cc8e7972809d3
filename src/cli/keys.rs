//! `cresset keys`: an account's API keys.

use super::support::context::Context;
use super::support::output::CommandResult;
use super::support::{text, values};
use crate::ids::{AccountId, CredentialId};
use crate::server::operator::AdminCommand;
use clap::Subcommand;
use std::time::Duration;

const COLUMNS: &[&str] = &["id", "label", "hint", "created_at", "expires_at", "revoked_at"];

#[derive(Debug, Subcommand)]
#[command(after_help = "Example:
  cresset keys create --account ID --label laptop --expires-in 30d")]
pub enum KeysCommand {
    /// Create a key; its secret is shown this once
    Create {
        /// The account
        #[arg(long, value_name = "ID")]
        account: AccountId,
        /// A note that tells the key from others, such as the device it is for
        #[arg(long, value_parser = values::label)]
        label: Option<String>,
        /// Time until the key stops working, such as 30d [default: never]
        #[arg(long, value_name = "TIME", value_parser = values::duration)]
        expires_in: Option<Duration>,
    },
    /// List an account's keys, without their secrets
    List {
        /// The account
        #[arg(long, value_name = "ID")]
        account: AccountId,
    },
    /// Refuse a key from now on and cancel what runs under it
    Revoke {
        /// The key, by the id that `keys list` shows
        id: CredentialId,
    },
}

pub(super) async fn run(context: &Context, command: KeysCommand) -> CommandResult {
    let render = match command {
        KeysCommand::List { .. } => |list: &_| text::table(list, COLUMNS),
        KeysCommand::Create { .. } => text::secret,
        KeysCommand::Revoke { .. } => |key: &_| text::fields(key),
    };
    let document = context.admin(command.into()).await?;
    context.output.result(&document, render)
}

impl From<KeysCommand> for AdminCommand {
    fn from(command: KeysCommand) -> Self {
        match command {
            KeysCommand::Create { account, label, expires_in } => {
                Self::KeyCreate { account, label, expires_at: expires_in.map(values::from_now) }
            }
            KeysCommand::List { account } => Self::KeyList { account },
            KeysCommand::Revoke { id } => Self::KeyRevoke { id },
        }
    }
}
