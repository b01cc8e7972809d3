//! `cresset init`: a data folder with an empty ledger, in it or in a database.

use super::support::context::{Context, Globals, config_path};
use super::support::database_settings::{self, with_ledger};
use super::support::output::{CommandError, CommandResult};
use clap::Args;
use cresset_node::config::Override;
use cresset_node::ledger;
use serde_json::json;
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cresset init
  cresset init --ledger postgres://cresset@db1,db2/cresset --standbys 1")]
pub(super) struct Arguments {
    /// Keep the ledger in this PostgreSQL database, which must have no tables of one yet. What is
    /// given here is written into the configuration
    #[arg(long, value_name = "URL", requires = "standbys")]
    ledger: Option<String>,
    /// Synchronous standbys that a commit in the database waits for; with 0 a failover may lose
    /// what was acknowledged
    #[arg(long, value_name = "COUNT", requires = "ledger")]
    standbys: Option<u32>,
    /// File with the password of the database's user
    #[arg(long, value_name = "FILE", requires = "ledger")]
    password_file: Option<PathBuf>,
}

impl Arguments {
    /// The configuration keys that the flags set, with their values.
    pub(super) fn overrides(&self) -> Vec<Override> {
        let url = self.ledger.as_deref();
        database_settings::overrides(url, self.standbys, self.password_file.as_deref())
    }
}

pub(super) fn run(context: &Context, globals: &Globals, arguments: &Arguments) -> CommandResult {
    let path = config_path(globals, &context.data_dir);
    let written = arguments.ledger.as_ref().map(|_| with_ledger(&path, context)).transpose()?;
    ledger::create(&context.data_dir, &context.config)?;
    if let Some(text) = &written {
        database_settings::write(&path, text).map_err(|error| {
            CommandError::new(format!("the tables are made, but {}: {error}", path.display()))
                .remedy("write ledger.url and ledger.standbys into the configuration yourself")
        })?;
    }
    let written = written.map(|_| &path);
    let document = json!({ "data_dir": context.data_dir, "configuration": written });
    context.output.result(&document, |_| {
        let place = match written {
            Some(path) => format!("made the tables, and wrote them into {}", path.display()),
            None => format!("made {}", context.data_dir.display()),
        };
        format!("{place}\nnext: cresset accounts create --name NAME --trial 5_000_000\n")
    })
}
