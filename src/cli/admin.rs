//! `cresset admin`: who may give commands from other machines, and what operators did.

use super::support::context::Context;
use super::support::output::{CommandResult, Render};
use super::support::{text, values};
use clap::{Args, Subcommand};
use cresset_commands::{AdminCommand, Role};
use serde_json::{Value, json};
use std::time::Duration;

const ROLES: [&str; 3] = ["read", "operate", "money"];
const TOKEN_COLUMNS: &[&str] = &["name", "roles", "created_at", "expires_at", "revoked_at"];
const ACT_COLUMNS: &[&str] = &["at", "by", "command", "arguments", "failed"];

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  cresset admin token create --name ann --role operate --expires-in 90d
  CRESSET_OPERATOR_TOKEN=… cresset --node https://node.example:9090 accounts list
  cresset admin log --last 20")]
pub(super) enum AdminSubcommand {
    /// Create, list and revoke the tokens that commands with --node need
    #[command(subcommand)]
    Token(TokenCommand),
    /// Print an address that opens the node's page in a browser, once and within five minutes
    Link {
        /// What the page allows beside reading; give it again for a further role
        #[arg(
            long = "role",
            value_parser = values::named::<Role>(&ROLES),
            default_values = ["operate", "money"],
        )]
        roles: Vec<Role>,
    },
    /// Show what operators did: who, when, what, and whether it failed
    Log {
        /// The number of acts, the latest ones
        #[arg(long, value_name = "N", default_value_t = 50)]
        last: usize,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum TokenCommand {
    /// Create a token; it is shown this once. Every token may read
    Create(CreateTokenArguments),
    /// List the tokens, without their secrets
    List,
    /// Refuse a token from now on
    Revoke {
        /// The name that it was created with
        #[arg(value_parser = values::label)]
        name: String,
    },
}

#[derive(Args, Debug)]
pub(super) struct CreateTokenArguments {
    /// The name of its holder, which the log of acts shows
    #[arg(long, allow_hyphen_values = true, value_parser = values::label)]
    name: String,
    /// What it allows beside reading; give it again for a further role. `operate` is for accounts,
    /// keys (whoever makes a key of an account can spend its credits), requests, models, reloads
    /// and audits, `money` for grants, debits, opening balances, closing accounts and prices
    #[arg(long = "role", value_parser = values::named::<Role>(&ROLES))]
    roles: Vec<Role>,
    /// Time until it stops working, such as 90d [default: never]
    #[arg(long, value_name = "TIME", value_parser = values::duration)]
    expires_in: Option<Duration>,
}

pub(super) async fn run(context: &Context, command: AdminSubcommand) -> CommandResult {
    use TokenCommand as T;
    let (command, render): (_, Render) = match command {
        AdminSubcommand::Token(T::Create(CreateTokenArguments { name, roles, expires_in })) => {
            let expires_at = expires_in.map(values::from_now);
            let roles = roles.into_iter().collect();
            (AdminCommand::OperatorTokenCreate { name, roles, expires_at }, text::secret)
        }
        AdminSubcommand::Token(T::List) => {
            (AdminCommand::OperatorTokenList, |list| text::table(list, TOKEN_COLUMNS))
        }
        AdminSubcommand::Token(T::Revoke { name }) => {
            (AdminCommand::OperatorTokenRevoke { name }, text::fields)
        }
        AdminSubcommand::Link { roles } => {
            let roles = roles.into_iter().collect();
            (AdminCommand::OperatorLink { roles }, |link| {
                format!("{}\n", text::plain(link["url"].as_str().unwrap_or_default()))
            })
        }
        AdminSubcommand::Log { last } => (AdminCommand::OperatorActs { limit: last }, acts),
    };
    context.show(command, render).await
}

fn acts(list: &Value) -> String {
    let row = |act: &Value| {
        let mut arguments = act["did"].clone();
        let command = arguments["command"].take();
        let given = arguments.as_object().into_iter().flatten();
        // The files of a backup would make every line as long as their names.
        let is_short = |value: &Value| !value.is_null() && !value[0].is_object();
        let given = given.filter(|(name, value)| *name != "command" && is_short(value));
        let arguments: Vec<_> = given.map(|(name, value)| format!("{name}={value}")).collect();
        json!({
            "at": act["at"],
            "by": act["by"],
            "command": command,
            "arguments": shortened(&arguments.join(" ")),
            "failed": act["failed"],
        })
    };
    let rows: Vec<Value> = list["data"].as_array().into_iter().flatten().map(row).collect();
    text::table(&json!({ "data": rows }), ACT_COLUMNS)
}

/// Characters of a command's arguments that a line shows; `--json` shows all.
const SHOWN: usize = 100;

fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_act_is_one_line_that_fits_a_screen() {
        let act = |note: &str| {
            json!({ "at": 0, "by": "a user with a name", "failed": "why\nnot",
                "did": { "command": "account_change", "id": "x", "note": note, "plan": null } })
        };
        let notes = ["short".to_owned(), "é".repeat(1_000), "one\r\ntwo\u{1b}[2J".to_owned()];
        let told = acts(&json!({ "data": notes.each_ref().map(|note| act(note)) }));
        let lines: Vec<&str> = told.split('\n').collect();
        assert_eq!((lines.len(), lines[4]), (5, ""), "{told}");
        assert!(lines.iter().all(|line| line.chars().count() <= 200), "{told}");
        assert!(!told.contains(['\r', '\u{1b}']), "{told}");
        assert!(lines[1].contains(r#"id="x" note="short""#), "{told}");
        assert!(lines[2].contains("ééé…"), "{told}");
    }
}
