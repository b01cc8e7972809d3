//! `cresset ledger move`: takes the ledger of the data folder over into a database.

use crate::support::context::{Context, Globals, config_path};
use crate::support::database_settings::{self, with_ledger};
use crate::support::output::{CommandError, CommandResult};
use crate::support::progress::TaskProgress;
use crate::support::text;
use clap::Args;
use cresset_base::SystemClock;
use cresset_commands::{AdminCommand, view};
use cresset_ledger::audit::AuditProgress;
use cresset_node::config::Override;
use cresset_store::{MoveHooks, MoveReport, Store, StoreError};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Args, Debug)]
pub(crate) struct MoveArguments {
    /// The database, which must have no tables of a ledger yet
    #[arg(long, value_name = "URL")]
    to: String,
    /// Synchronous standbys that a commit in the database waits for; with 0 a failover may lose
    /// what was acknowledged
    #[arg(long, value_name = "COUNT")]
    standbys: u32,
    /// File with the password of the database's user
    #[arg(long, value_name = "FILE")]
    password_file: Option<PathBuf>,
}

impl MoveArguments {
    /// The configuration keys that the flags set, with their values.
    pub(crate) fn overrides(&self) -> Vec<Override> {
        let file = self.password_file.as_deref();
        database_settings::overrides(Some(&self.to), Some(self.standbys), file)
    }
}

pub(super) async fn run(context: &Context, globals: &Globals) -> CommandResult {
    if context.ask_node(&AdminCommand::Status).await?.is_some() {
        let what = "a node runs on this data folder, and its ledger cannot be moved under it";
        return Err(CommandError::new(what).remedy("stop the node, then move"));
    }
    let path = config_path(globals, &context.data_dir);
    let settings = with_ledger(&path, context)?;
    let report = moved(context, &path, &settings)?;
    let places = json!({ "data_dir": context.data_dir, "configuration": path });
    let document = view::merged(places, described(&report));
    context.output.result(&document, tell)
}

fn moved(context: &Context, path: &Path, settings: &str) -> CommandResult<MoveReport> {
    let Context { data_dir, config, .. } = context;
    let (from, to) = cresset_node::ledger::move_places(data_dir, config)?;
    let shown = RefCell::new(TaskProgress::steps("opening the ledger of the folder"));
    let configure = || {
        database_settings::write(path, settings).map_err(|error| {
            StoreError::Unusable(format!("{} cannot be written: {error}", path.display()))
        })
    };
    let progress = |step: &'static str, at: AuditProgress| {
        let mut shown = shown.borrow_mut();
        shown.phase(step.to_owned());
        shown.at(at.done, at.total);
    };
    let hooks = MoveHooks { progress: &progress, configure: &configure };
    let clock = Arc::new(SystemClock);
    let report = Store::move_to(&from, &*to, clock, cresset_node::ledger::limits(config), &hooks);
    report.map_err(|error| {
        CommandError::new(error).remedy(
            "nothing is lost: the folder's files are as they were until all is in the database; give the command \
             again, or go on with the folder by taking ledger.url out of the configuration",
        )
    })
}

fn described(report: &MoveReport) -> Value {
    let rows = report.rows.as_ref().map(|rows| {
        json!({ "accounts": rows.accounts, "credentials": rows.credentials, "requests": rows.requests,
                "entries": rows.entries, "answers": report.answers })
    });
    json!({ "moved": rows, "files": report.files })
}

fn tell(document: &Value) -> String {
    let moved = match &document["moved"] {
        Value::Null => "an earlier run had moved everything\n".to_owned(),
        rows => format!("moved, and audited before and after:\n{}", text::fields(rows)),
    };
    let files = document["files"].as_array().map_or(&[][..], Vec::as_slice);
    let files: Vec<_> = files.iter().filter_map(Value::as_str).collect();
    format!(
        "{moved}the files of the folder are kept as\n  {}\nwrote ledger.url and ledger.standbys into {}\n\
         next: cresset serve\n",
        files.join("\n  "),
        document["configuration"].as_str().unwrap_or_default()
    )
}
