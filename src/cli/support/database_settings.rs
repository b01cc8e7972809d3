//! The settings of a ledger in a database, as commands are given them and write them into the
//! configuration.

use super::context::Context;
use super::output::{CommandError, CommandResult};
use cresset_base::durable_file;
use cresset_node::config::Override;
use std::path::Path;
use toml::{Table, Value};

/// The configuration keys that flags set, with their values.
pub(crate) fn overrides(
    url: Option<&str>,
    standbys: Option<u32>,
    password_file: Option<&Path>,
) -> Vec<Override> {
    let file = password_file.and_then(Path::to_str);
    let flags = [
        ("ledger.url", url.map(str::to_owned)),
        ("ledger.standbys", standbys.map(|count| count.to_string())),
        ("ledger.password_file", file.map(str::to_owned)),
    ];
    let given = flags.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
    given.collect()
}

/// The text of the configuration file with the settings of the ledger.
pub(crate) fn with_ledger(path: &Path, context: &Context) -> CommandResult<String> {
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
    if has_all(&before, &added) {
        return Ok(before);
    }
    insert(&before, &added).ok_or_else(|| {
        let what = format!("{} has settings of the ledger that differ", path.display());
        CommandError::new(what).remedy(format!("write them there yourself:\n[ledger]\n{added}"))
    })
}

/// Writes the configuration durably: it decides which ledger a start opens.
pub(crate) fn write(path: &Path, text: &str) -> std::io::Result<()> {
    let before = std::fs::metadata(path).ok().map(|before| before.permissions());
    durable_file::replace(path, text.as_bytes(), before)
}

/// Whether the section `ledger` of a file has these keys with these values.
fn has_all(file: &str, settings: &Table) -> bool {
    let file: Table = toml::from_str(file).unwrap_or_default();
    let section = file.get("ledger").and_then(Value::as_table);
    section
        .is_some_and(|section| settings.iter().all(|(key, value)| section.get(key) == Some(value)))
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
            let config: cresset_node::config::Config = toml::from_str(&after).unwrap();
            assert_eq!(config.ledger.url.as_deref(), Some("postgres://db"), "{after}");
            assert_eq!(config.ledger.standbys, Some(1));
        }
        let written = insert("", &added).unwrap();
        assert!(has_all(&written, &added) && !has_all("[ledger]\nstandbys = 1", &added));
        for taken in ["[ledger]\nurl = \"postgres://other\"\n", "ledger.cache_mib = 9\n"] {
            assert_eq!(insert(taken, &added), None, "{taken}");
        }
    }
}
