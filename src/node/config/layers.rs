//! Combines the file, the environment and the flags into one configuration, and records where each
//! value came from.

#![expect(clippy::disallowed_methods, reason = "this file alone reads the environment")]

use super::{Config, ConfigError, bounds};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// The origin of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueOrigin {
    Default,
    File(PathBuf),
    Variable(String),
    Flag,
}

impl fmt::Display for ValueOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Variable(name) => f.write_str(name),
            Self::Flag => f.write_str("flag"),
        }
    }
}

/// One setting as `config show` lists it. A secret's value is replaced by a remark.
#[derive(Clone, Debug, Serialize)]
pub struct SettingRow {
    /// Dotted, such as `engine.kv_mib`.
    pub key: String,
    pub value: serde_json::Value,
    pub origin: String,
    pub description: Option<String>,
}

/// A configuration with the origin of every value that is not a default.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    pub config: Config,
    /// By dotted key.
    pub origins: BTreeMap<String, ValueOrigin>,
}

/// The file and the flags that a configuration is read from. Beside them it is read from the
/// environment.
#[derive(Clone, Debug)]
pub struct ConfigSource {
    pub file: ConfigFile,
    pub flags: Vec<Override>,
}

#[derive(Clone, Debug)]
pub enum ConfigFile {
    /// It must be there.
    Named(PathBuf),
    /// It may be made later, and is read once it is there.
    IfThere(PathBuf),
}

impl ConfigSource {
    pub fn load(&self) -> Result<LoadedConfig, ConfigError> {
        LoadedConfig::load(self.file.path(), &self.flags)
    }
}

impl ConfigFile {
    /// The file, if it was named by a flag or the environment.
    pub fn named(&self) -> Option<&Path> {
        match self {
            Self::Named(path) => Some(path),
            Self::IfThere(_) => None,
        }
    }

    /// The file, if it is to be read now.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Named(path) => Some(path),
            Self::IfThere(path) => Some(path.as_path()).filter(|path| path.exists()),
        }
    }
}

/// A setting that differs between two configurations. A value is absent where the setting is, as
/// in a plan that was removed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SettingChange {
    pub key: String,
    pub before: Option<serde_json::Value>,
    pub now: Option<serde_json::Value>,
}

/// The settings in which `now` differs from `before`, by key.
pub fn changes(before: &Config, now: &Config) -> Vec<SettingChange> {
    let [mut before, mut now] = [before, now].map(|config| {
        let loaded = LoadedConfig { config: config.clone(), origins: BTreeMap::new() };
        let rows = loaded.rows().into_iter();
        rows.map(|row| (row.key, row.value)).collect::<BTreeMap<_, _>>()
    });
    let keys: BTreeSet<String> = before.keys().chain(now.keys()).cloned().collect();
    let changes = keys.into_iter().map(|key| SettingChange {
        before: before.remove(&key),
        now: now.remove(&key),
        key,
    });
    changes.filter(|change| change.before != change.now).collect()
}

/// One setting from outside the file: dotted key and value in TOML syntax (bare words are strings).
pub type Override = (String, String);

impl LoadedConfig {
    /// Reads `file` (a missing default file is no error), then the environment, then `flags`.
    pub fn load(file: Option<&Path>, flags: &[Override]) -> Result<Self, ConfigError> {
        // Compose files pass an unset variable on as an empty text.
        let given =
            std::env::vars().filter(|(name, value)| !(name.starts_with("HF_") && value.is_empty()));
        let variables = given.filter_map(|(name, value)| Some((variable_key(&name)?, name, value)));
        let text = file.map(read_file).transpose()?;
        Self::from_layers(file.zip(text.as_deref()), variables.collect(), flags)
    }

    /// Variables are given with the keys that they set: key, name, value.
    pub(super) fn from_layers(
        file: Option<(&Path, &str)>,
        variables: Vec<(String, String, String)>,
        flags: &[Override],
    ) -> Result<Self, ConfigError> {
        let mut layers = Layers::new();
        if let Some((path, text)) = file {
            layers.add_file(path, text)?;
        }
        for (key, name, value) in variables {
            layers.add_override(&key, &value, ValueOrigin::Variable(name))?;
        }
        for (key, value) in flags {
            layers.add_override(key, value, ValueOrigin::Flag)?;
        }
        layers.finish()
    }

    /// Every setting, sorted by key.
    pub fn rows(&self) -> Vec<SettingRow> {
        let (schema, values) = (Config::schema(), self.config.values());
        let mut rows: Vec<SettingRow> = bounds::settings(&schema, &values)
            .into_iter()
            .map(|setting| SettingRow {
                value: setting.value.clone(),
                origin: self.origins.get(&setting.key).unwrap_or(&ValueOrigin::Default).to_string(),
                description: setting.description(),
                key: setting.key,
            })
            .collect();
        rows.sort_by(|a, b| a.key.cmp(&b.key));
        rows
    }
}

/// The value that the layers added so far make, and the origin of each key.
struct Layers {
    table: Table,
    origins: BTreeMap<String, ValueOrigin>,
}

impl Layers {
    fn new() -> Self {
        let defaults = Table::try_from(Config::default());
        let table = defaults.expect("invariant: the configuration is representable as TOML");
        Self { table, origins: BTreeMap::new() }
    }

    fn add_file(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        let refuse = |error: toml::de::Error| {
            ConfigError(format!("{}: {}", path.display(), in_words(&error)))
        };
        // The file is parsed as a whole Config first, because the errors of that name the line.
        toml::from_str::<Config>(text).map_err(refuse)?;
        let table: Table = toml::from_str(text).map_err(refuse)?;
        flatten("", &Value::Table(table.clone()), &mut |key, _| {
            self.origins.insert(key.to_owned(), ValueOrigin::File(path.to_owned()));
        });
        overlay(&mut self.table, table);
        Ok(())
    }

    fn add_override(
        &mut self,
        key: &str,
        text: &str,
        origin: ValueOrigin,
    ) -> Result<(), ConfigError> {
        let mut last = None;
        for value in readings(text) {
            let mut table = self.table.clone();
            overlay(&mut table, nested(key, value));
            match table.clone().try_into::<Config>() {
                Ok(_) => {
                    self.table = table;
                    self.origins.insert(key.to_owned(), origin);
                    return Ok(());
                }
                Err(error) => last = Some(error),
            }
        }
        let source = match origin {
            ValueOrigin::Variable(name) => format!("environment variable {name}"),
            _ => format!("setting {key}"),
        };
        let error = last.map(|error| in_words(&error)).unwrap_or_default();
        // A variable that is no setting may hold a secret, so its value is not shown.
        Err(ConfigError(if error.starts_with("unknown field") {
            format!(
                "{source}: {error}\nCRESSET_ENGINE__KV_MIB, with two underscores, sets engine.kv_mib"
            )
        } else {
            format!("{source} = {text:?}: {error}")
        }))
    }

    fn finish(self) -> Result<LoadedConfig, ConfigError> {
        let config: Config =
            self.table.try_into().map_err(|error| ConfigError(error.to_string()))?;
        config.validate()?;
        Ok(LoadedConfig { config, origins: self.origins })
    }
}

/// The deserialiser's message with plain words in place of the names of Rust's types and of ours.
fn in_words(error: &toml::de::Error) -> String {
    const WORDS: [(&str, &str); 6] = [
        ("expected usize", "expected a whole number from 0 to 9223372036854775807"),
        ("expected u64", "expected a whole number from 0 to 9223372036854775807"),
        ("expected u32", "expected a whole number from 0 to 4294967295"),
        ("expected u8", "expected a whole number from 0 to 255"),
        ("expected f64", "expected a number"),
        ("invalid socket address syntax", "expected an address and a port, such as 127.0.0.1:8080"),
    ];
    let text = error.to_string();
    let text = WORDS
        .iter()
        .fold(text.trim_end().to_owned(), |text, (theirs, ours)| text.replace(theirs, ours));
    match text.split_once("expected struct ") {
        Some((before, type_and_rest)) => {
            let rest = type_and_rest.trim_start_matches(|c: char| c.is_ascii_alphanumeric());
            format!("{before}expected a table{rest}")
        }
        None => text,
    }
}

/// `CRESSET_ENGINE__KV_MIB` sets `engine.kv_mib`. `CRESSET_DATA_DIR` and `CRESSET_CONFIG` are not
/// settings, nor are those that hold secrets or name a node for commands.
fn variable_key(name: &str) -> Option<String> {
    match name {
        "HF_ENDPOINT" => return Some("hub.endpoint".into()),
        "HF_TOKEN" => return Some("hub.token".into()),
        "CRESSET_DATA_DIR"
        | "CRESSET_CONFIG"
        | "CRESSET_KEY"
        | "CRESSET_NODE"
        | "CRESSET_OPERATOR_TOKEN" => return None,
        _ => {}
    }
    let rest = name.strip_prefix("CRESSET_")?;
    Some(rest.to_ascii_lowercase().replace("__", "."))
}

fn read_file(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|error| {
        ConfigError(format!("{}: {error}; check --config and its permissions", path.display()))
    })
}

/// The values that the text of a variable or flag may stand for: first a TOML value, then the text
/// itself as a string.
fn readings(text: &str) -> impl Iterator<Item = Value> {
    let parsed = toml::from_str::<Table>(&format!("v = {text}"))
        .ok()
        .and_then(|mut table| table.remove("v"));
    parsed.into_iter().chain(std::iter::once(Value::String(text.to_owned())))
}

fn nested(key: &str, value: Value) -> Table {
    let wrap =
        |inner: Value, part: &str| Value::Table(Table::from_iter([(part.to_owned(), inner)]));
    match key.rsplit('.').fold(value, wrap) {
        Value::Table(table) => table,
        _ => unreachable!("a dotted key has at least one part"),
    }
}

fn overlay(base: &mut Table, over: Table) {
    for (key, value) in over {
        match (base.get_mut(&key), value) {
            (Some(Value::Table(inner)), Value::Table(value)) => overlay(inner, value),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

fn flatten(prefix: &str, value: &Value, visit: &mut impl FnMut(&str, &Value)) {
    let Value::Table(table) = value else { return visit(prefix, value) };
    for (key, value) in table {
        let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        flatten(&path, value, visit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_engine::DeviceSetting;

    fn load(
        file: &str,
        variables: &[(&str, &str)],
        flags: &[(&str, &str)],
    ) -> Result<LoadedConfig, ConfigError> {
        let variables = variables
            .iter()
            .map(|(n, v)| (variable_key(n).unwrap(), (*n).into(), (*v).into()))
            .collect();
        let flags: Vec<Override> = flags.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        LoadedConfig::from_layers(Some((Path::new("cresset.toml"), file)), variables, &flags)
    }

    #[test]
    fn later_layers_win_and_name_their_origin() {
        let file = "[engine]\nkv_mib = 64\nthreads = 1\n[plans.default]\nburst = 5\n";
        let loaded =
            load(file, &[("CRESSET_ENGINE__THREADS", "3")], &[("listen.public", "127.0.0.1:0")])
                .unwrap();
        assert_eq!(loaded.config.engine.kv_mib, 64);
        assert_eq!(loaded.config.engine.threads, 3);
        assert_eq!(loaded.config.plans["default"].burst, 5);
        assert_eq!(
            loaded.config.plans["default"].requests_per_minute, 120,
            "a partly given plan keeps defaults"
        );
        assert_eq!(loaded.config.listen.public.port(), 0);
        assert_eq!(loaded.origins["engine.kv_mib"], ValueOrigin::File("cresset.toml".into()));
        assert_eq!(
            loaded.origins["engine.threads"],
            ValueOrigin::Variable("CRESSET_ENGINE__THREADS".into())
        );
        assert_eq!(loaded.origins["listen.public"], ValueOrigin::Flag);
    }

    #[test]
    fn changes_name_the_settings_that_differ() {
        let before = load("[plans.old]\nburst = 5\n", &[], &[]).unwrap().config;
        let now = load("[plans.default]\nburst = 7\n[engine]\nthreads = 3\n", &[], &[]);
        let now = now.unwrap().config;
        assert_eq!(changes(&now, &now), []);
        let found = changes(&before, &now);
        let shown = |key: &str| {
            let change = found.iter().find(|change| change.key == key);
            change.map(|change| (change.before.clone(), change.now.clone()))
        };
        assert_eq!(shown("engine.threads"), Some((Some(0.into()), Some(3.into()))));
        assert_eq!(shown("plans.default.burst"), Some((Some(60.into()), Some(7.into()))));
        assert_eq!(shown("plans.old.burst"), Some((Some(5.into()), None)));
        assert_eq!(shown("engine.kv_mib"), None);
    }

    #[test]
    fn devices_are_named() {
        for (text, device) in [
            ("auto", DeviceSetting::Auto),
            ("cpu", DeviceSetting::Cpu),
            ("cuda:0", DeviceSetting::Cuda(0)),
            ("cuda:12", DeviceSetting::Cuda(12)),
        ] {
            let loaded = load("", &[("CRESSET_ENGINE__DEVICE", text)], &[]).unwrap();
            assert_eq!(loaded.config.engine.device, device);
            assert_eq!(String::from(device), text);
        }
    }

    #[test]
    fn refusals_name_key_and_line() {
        let cases = [
            ("[engine]\nkv_mibs = 1\n", vec!["line 2", "kv_mibs"]),
            ("[engine]\nkv_mib = \"lots\"\n", vec!["line 2", "kv_mib"]),
            ("[engine]\nkv_mib = -1\n", vec!["line 2", "a whole number from 0 to"]),
            ("engine = 1\n", vec!["line 1", "a table"]),
            ("[engine\n", vec!["line 1"]),
            ("service_name = \"a b\"\n", vec!["service_name", "letters, digits and dashes"]),
            ("[listen]\npublic = \"localhost:80\"\n", vec!["line 2", "such as 127.0.0.1:8080"]),
            ("[listen]\npublic = \"127.0.0.1:8081\"\n", vec!["listen.public", "a port of its own"]),
            ("[hub]\nendpoint = \"mirror\"\n", vec!["hub.endpoint", "https://"]),
            ("[qualification]\nquick_context_tokens = 0\n", vec!["quick_context_tokens", "1 to"]),
            ("[engine]\ndevice = \"gpu\"\n", vec!["line 2", "auto", "cuda:0"]),
            ("[engine]\ndevice = \"cuda:+1\"\n", vec!["line 2", "cuda:+1"]),
            ("[engine]\nblock_size = 17\n", vec!["engine.block_size", "16, 32 or 64"]),
            ("[plans.small]\nburst = 0\n", vec!["plans.small.burst"]),
            (
                "[listen]\noperator = \"0.0.0.0:8081\"\n",
                vec!["listen.operator = 0.0.0.0:8081", "operator_beyond_loopback"],
            ),
        ];
        for (file, wanted) in cases {
            let error = load(file, &[], &[]).unwrap_err().to_string();
            assert!(wanted.iter().all(|part| error.contains(part)), "{file:?}: {error}");
        }
        let open = "[listen]\noperator = \"[::]:8081\"\noperator_beyond_loopback = true\n";
        assert!(load(open, &[], &[]).is_ok(), "an operator who says so may");
        let error = load("", &[("CRESSET_ENGINE__THREADS", "many")], &[]).unwrap_err().to_string();
        assert!(error.contains("CRESSET_ENGINE__THREADS") && error.contains("many"), "{error}");
        let error = load("", &[("CRESSET_ENGIN__THREADS", "1")], &[]).unwrap_err().to_string();
        assert!(error.contains("CRESSET_ENGIN__THREADS"), "{error}");
        let error = load("", &[("CRESSET_API_KEY", "secret")], &[]).unwrap_err().to_string();
        assert!(error.contains("two underscores") && !error.contains("secret"), "{error}");
        assert_eq!(variable_key("CRESSET_KEY"), None, "the README's clients keep their key in it");
    }

    #[test]
    fn secrets_are_never_shown() {
        let loaded = load("[hub]\ntoken = \"hf_secret\"\n", &[], &[]).unwrap();
        assert_eq!(loaded.config.hub.token.as_deref(), Some("hf_secret"));
        assert!(!format!("{:?}", loaded.rows()).contains("hf_secret"));
    }

    #[test]
    fn every_default_is_valid_and_described() {
        Config::default().validate().unwrap();
        let schema = Config::schema();
        assert!(schema["properties"]["engine"].is_object());
    }
}
