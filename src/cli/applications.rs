//! `cresset applications`: application connections of an account, and their tokens.

use super::support::context::Context;
use super::support::listing::{self, PrintedListing};
use super::support::output::print;
use super::support::output::{CommandResult, Render};
use super::support::values::AccountArgument;
use super::support::{text, values};
use clap::Subcommand;
use cresset_base::{AccountId, ApplicationId, CredentialId};
use cresset_commands::AdminCommand;
use serde_json::json;
use std::time::Duration;

const APPLICATION_COLUMNS: &[&str] = &["id", "account_id", "name", "created_at"];
const TOKEN_COLUMNS: &[&str] =
    &["id", "application_id", "hint", "created_at", "expires_at", "revoked_at"];

#[derive(Debug, Subcommand)]
#[command(after_help = "Example:
  cresset applications create --account acme --name phone
  cresset applications token --application ID --expires-in 12h")]
pub(super) enum ApplicationsCommand {
    /// Create an application connection of an account
    Create {
        /// The account, by id or name
        #[arg(long, value_name = "ACCOUNT", value_parser = values::account)]
        account: AccountArgument,
        /// Name of the application
        #[arg(long, allow_hyphen_values = true, value_parser = values::label)]
        name: String,
    },
    /// List applications with their tokens
    List {
        /// Only this account's
        #[arg(long, value_name = "ACCOUNT", value_parser = values::account)]
        account: Option<AccountArgument>,
    },
    /// Issue an access token; its secret is shown this once
    Token {
        /// The application
        #[arg(long, value_name = "ID")]
        application: ApplicationId,
        /// Time until the token stops working, such as 12h [default: never]
        #[arg(long, value_name = "TIME", value_parser = values::duration)]
        expires_in: Option<Duration>,
    },
    /// Refuse a token from now on and cancel what runs under it
    Revoke {
        /// The token, by the id that `applications list` shows
        token_id: CredentialId,
    },
}

pub(super) async fn run(context: &Context, command: ApplicationsCommand) -> CommandResult {
    use ApplicationsCommand as C;
    let (command, render): (_, Render) = match command {
        C::Create { account, name } => {
            let account = context.account(account).await?;
            (AdminCommand::ApplicationCreate { account, name }, text::fields)
        }
        C::List { account: Some(account) } => {
            return list(context, Some(context.account(account).await?)).await;
        }
        C::List { account: None } => return list(context, None).await,
        C::Token { application, expires_in } => {
            let expires_at = expires_in.map(values::from_now);
            (AdminCommand::ApplicationToken { application, expires_at }, text::secret)
        }
        C::Revoke { token_id } => (AdminCommand::TokenRevoke { id: token_id }, text::fields),
    };
    context.show(command, render).await
}

/// A table cannot hold another one, so people see two: the applications, then all their tokens.
async fn list(context: &Context, account: Option<AccountId>) -> CommandResult {
    let page = |after| AdminCommand::ApplicationList { account, after };
    listing::show(context, APPLICATION_COLUMNS, page).await?;
    if context.output.json {
        return Ok(());
    }
    print("\nTokens:\n")?;
    let mut tokens = PrintedListing::new(context.output, TOKEN_COLUMNS);
    let last = listing::pages(context, page, |page| {
        for application in page["data"].as_array().into_iter().flatten() {
            print(&tokens.page(&json!({ "data": application["tokens"] })))?;
        }
        Ok(true)
    });
    let last = last.await?;
    print(&tokens.end(&last))
}
