//! `cresset init`: a data folder with an empty ledger, in it or in a database.

use super::support::context::{Context, Globals, config_path};
use super::support::output::{CommandError, CommandResult};
use crate::config::Override;
use crate::node::ledger;
use clap::Args;
use serde_json::json;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

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
        let file = self.password_file.as_deref().and_then(Path::to_str);
        let flags = [
            ("ledger.url", self.ledger.clone()),
            ("ledger.standbys", self.standbys.map(|count| count.to_string())),
            ("ledger.password_file", file.map(str::to_owned)),
        ];
        let given = flags.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        given.collect()
    }
}

pub(super) fn run(context: &Context, globals: &Globals, arguments: &Arguments) -> CommandResult {
    let path = config_path(globals, &context.data_dir);
    let written = arguments.ledger.as_ref().map(|_| with_ledger(&path, context)).transpose()?;
    ledger::create(&context.data_dir, &context.config)?;
    if let Some(text) = &written {
        std::fs::write(&path, text).map_err(|error| {
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

/// The text of the configuration file with the settings of the ledger.
fn with_ledger(path: &Path, context: &Context) -> CommandResult<String> {
    let before = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(CommandError::new(format!("{}: {error}", path.display()))),
    };
    let settings = &context.config.ledger;
    let mut added = Table::new();
    let text = |text: &str| Value::String(text.to_owned());
    added.extend(settings.url.as_deref().map(|url| ("url".to_owned(), text(url))));
    added.extend(settings.standbys.map(|count| ("standbys".to_owned(), i64::from(count).into())));
    let file = settings.password_file.as_deref().map(std::path::absolute).transpose()?;
    let file = file.as_deref().and_then(Path::to_str);
    added.extend(file.map(|file| ("password_file".to_owned(), text(file))));
    insert(&before, &added).ok_or_else(|| {
        let what = format!("{} has settings of the ledger that differ", path.display());
        CommandError::new(what).remedy(format!("write them there yourself:\n[ledger]\n{added}"))
    })
}

/// A file with these keys in its section `ledger`; `None` where that has one of them.
fn insert(file: &str, added: &Table) -> Option<String> {
    const SECTION: &str = "[ledger]";
    let mut lines: Vec<&str> = file.lines().collect();
    let added = added.to_string();
    let place = lines.iter().position(|line| line.trim() == SECTION);
    if let Some(place) = place {
        lines.splice(place + 1..=place, added.lines());
    } else {
        lines.push(SECTION);
        lines.extend(added.lines());
    }
    let text = format!("{}\n", lines.join("\n"));
    toml::from_str::<Table>(&text).is_ok().then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_written_beside_those_that_are_there() {
        let added: Table = toml::from_str("url = \"postgres://db\"\nstandbys = 1").unwrap();
        for (before, kept) in [
            ("", ""),
            ("# mine\n[engine]\nthreads = 1", "threads = 1"),
            ("[ledger]\ncache_mib = 9\n\n[log]\nlevel = \"info\"\n", "cache_mib = 9"),
        ] {
            let after = insert(before, &added).unwrap();
            assert!(after.contains(kept), "{after}");
            let config: crate::config::Config = toml::from_str(&after).unwrap();
            assert_eq!(config.ledger.url.as_deref(), Some("postgres://db"), "{after}");
            assert_eq!(config.ledger.standbys, Some(1));
        }
        for taken in ["[ledger]\nurl = \"postgres://other\"\n", "ledger.cache_mib = 9\n"] {
            assert_eq!(insert(taken, &added), None, "{taken}");
        }
    }
}
