//! Checks a configuration. The ranges of numbers stand at the fields of the sections and become
//! part of the JSON Schema; the check reads them from there, and so does `config show`. Only rules
//! that no schema can express are written out here.

use super::{ClusterSettings, Config, ConfigError, TlsSettings};
use serde_json::Value;

/// One setting of a configuration.
pub(super) struct SettingInfo<'a> {
    /// Dotted, such as `engine.kv_mib`.
    pub key: String,
    pub value: &'a Value,
    /// The JSON Schema of the value.
    schema: &'a Value,
}

impl SettingInfo<'_> {
    /// The documentation of the field, followed by its bounds.
    pub(super) fn description(&self) -> Option<String> {
        let text = self.schema["description"].as_str()?;
        Some(self.bounds().map_or_else(|| text.to_owned(), |bounds| format!("{text} ({bounds})")))
    }

    /// The allowed numbers in words; `None` where the setting is no number.
    fn bounds(&self) -> Option<String> {
        if let Some([others @ .., last]) = self.schema["enum"].as_array().map(Vec::as_slice) {
            let others: Vec<String> = others.iter().map(Value::to_string).collect();
            return Some(format!("{} or {last}", others.join(", ")));
        }
        let (low, high) = (self.schema.get("minimum")?, self.schema.get("maximum")?);
        Some(format!("{low} to {high}"))
    }

    fn is_in_bounds(&self) -> bool {
        // All bounds are exact as f64 except i64::MAX, which TOML itself enforces.
        let number = |value: &Value| value.as_f64();
        let Some(value) = number(self.value) else { return true };
        let allowed = self.schema["enum"].as_array();
        allowed.is_none_or(|allowed| allowed.contains(self.value))
            && number(&self.schema["minimum"]).is_none_or(|low| value >= low)
            && number(&self.schema["maximum"]).is_none_or(|high| value <= high)
    }

    fn check(&self) -> Result<(), ConfigError> {
        match self.bounds() {
            Some(bounds) if !self.is_in_bounds() => {
                let description = self.schema["description"].as_str().unwrap_or_default();
                Err(refused(&self.key, self.value, &format!("must be {bounds}. {description}")))
            }
            _ => Ok(()),
        }
    }
}

impl Config {
    /// Refuses a value that is out of its bounds or contradicts another one.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        self.validate_names()?;
        self.validate_addresses()?;
        self.validate_ledger()?;
        self.validate_cluster()?;
        let (schema, values) = (Self::schema(), self.values());
        settings(&schema, &values).iter().try_for_each(SettingInfo::check)?;
        let (rows, tokens) = (self.engine.max_rows, self.engine.max_batched_tokens);
        if rows > tokens {
            let why = format!("must be at most engine.max_batched_tokens = {tokens}");
            return Err(refused("engine.max_rows", rows, &why));
        }
        if let Some(name) = self.plans.keys().find(|name| name.contains(cresset_base::is_unseen)) {
            let why = "has a control character or a mark of direction: leave it out";
            return Err(ConfigError(format!("plans: the name {name:?} {why}")));
        }
        if !self.plans.contains_key("default") {
            return Err(ConfigError("plans: a plan named `default` is required".into()));
        }
        Ok(())
    }

    /// Every value by section and key, as JSON. Secrets are replaced by a remark.
    pub(super) fn values(&self) -> Value {
        serde_json::to_value(self).expect("invariant: the configuration is representable as JSON")
    }

    fn validate_names(&self) -> Result<(), ConfigError> {
        require_name("service_name", &self.service_name, "letters, digits and dashes", |c| {
            c.is_ascii_alphanumeric() || c == '-'
        })?;
        let prefix = &self.credentials.prefix;
        require_name("credentials.prefix", prefix, "lower-case letters and digits", |c| {
            c.is_ascii_lowercase() || c.is_ascii_digit()
        })
    }

    fn validate_addresses(&self) -> Result<(), ConfigError> {
        let listen = &self.listen;
        let loopback = listen.operator.ip().to_canonical().is_loopback();
        if !loopback && !listen.operator_beyond_loopback {
            let why = "other machines could reach this listener, which asks for no credential; \
                       use 127.0.0.1, or set listen.operator_beyond_loopback = true";
            return Err(refused("listen.operator", listen.operator, why));
        }
        if listen.public == listen.operator && listen.public.port() != 0 {
            let key = "listen.public = listen.operator";
            return Err(refused(key, listen.public, "give each a port of its own"));
        }
        let TlsSettings { certificate, key, .. } = &self.tls;
        if certificate.is_some() != key.is_some() {
            let text = "tls.certificate and tls.key: each needs the other one";
            return Err(ConfigError(text.into()));
        }
        require_web_address("hub.endpoint", self.hub.endpoint.as_deref())?;
        require_web_address("traces.endpoint", self.traces.endpoint.as_deref())
    }
}

impl Config {
    /// A password would be shown with the address, so this error does not show it either.
    fn validate_ledger(&self) -> Result<(), ConfigError> {
        let Some(url) = self.ledger.url.as_deref() else { return Ok(()) };
        let schemes = ["postgres://", "postgresql://"];
        let Some(rest) = schemes.iter().find_map(|scheme| url.strip_prefix(scheme)) else {
            let text = "ledger.url: must be an address like postgres://USER@HOST/DATABASE";
            return Err(ConfigError(text.into()));
        };
        let (place, options) = rest.split_once('?').unwrap_or((rest, ""));
        let user = place.rsplit_once('@').map_or("", |(user, _)| user);
        if user.contains(':') || options.contains("password") {
            let text = "ledger.url: holds a password, which would be shown with it; put the \
                        password into a file and name that in ledger.password_file";
            return Err(ConfigError(text.into()));
        }
        if self.ledger.standbys.is_none() {
            let text = "ledger.standbys: must be written where ledger.url is: the number of \
                        synchronous standbys that a commit waits for, or 0, with which a failover \
                        may lose what was acknowledged";
            return Err(ConfigError(text.into()));
        }
        Ok(())
    }
}

impl Config {
    fn validate_cluster(&self) -> Result<(), ConfigError> {
        let ClusterSettings { listen, address, certificate, key, authority, .. } = &self.cluster;
        let files = [certificate, key, authority].map(Option::is_some);
        if files != [listen.is_some(); 3] || address.is_some() && listen.is_none() {
            let text = "cluster: of cluster.listen, cluster.certificate, cluster.key and \
                        cluster.authority all are needed or none, and cluster.address with them";
            return Err(ConfigError(text.into()));
        }
        let Some(listen) = listen else { return Ok(()) };
        if self.ledger.url.is_none() {
            let why = "only nodes that share a ledger in a database pass requests on: set \
                       ledger.url, or remove cluster.listen";
            return Err(refused("cluster.listen", listen, why));
        }
        match address.as_deref() {
            None if listen.ip().is_unspecified() => {
                let why = "other nodes cannot be told this address: set cluster.address to the \
                           name or IP address under which they reach it";
                Err(refused("cluster.listen", listen, why))
            }
            Some(text) if text.is_empty() || text.contains(['/', '@', '?', '#', ' ']) => {
                let why = "must be a name or an IP address, such as node1.example or 10.0.0.7:9443";
                Err(refused("cluster.address", format!("{text:?}"), why))
            }
            _ => Ok(()),
        }
    }
}

/// Every setting of `values`, in the order of the sections. `schema` is [`Config::schema`].
pub(super) fn settings<'a>(schema: &'a Value, values: &'a Value) -> Vec<SettingInfo<'a>> {
    let mut found = Vec::new();
    collect(schema, schema, "", values, &mut found);
    found
}

fn collect<'a>(
    root: &'a Value,
    schema: &'a Value,
    key: &str,
    value: &'a Value,
    found: &mut Vec<SettingInfo<'a>>,
) {
    let Value::Object(members) = value else {
        return found.push(SettingInfo { key: key.to_owned(), value, schema });
    };
    let reference = schema["$ref"].as_str().map(|text| text.trim_start_matches('#'));
    let section = reference.and_then(|pointer| root.pointer(pointer)).unwrap_or(schema);
    for (name, value) in members {
        // A map such as `plans` has no properties: all its members have one schema.
        let member = section["properties"].get(name).unwrap_or(&section["additionalProperties"]);
        let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
        collect(root, member, &key, value, found);
    }
}

fn refused(key: &str, value: impl std::fmt::Display, why: &str) -> ConfigError {
    ConfigError(format!("{key} = {value}: {why}"))
}

fn require_web_address(key: &str, value: Option<&str>) -> Result<(), ConfigError> {
    let is_address = |text: &str| text.starts_with("https://") || text.starts_with("http://");
    match value.filter(|text| !is_address(text)) {
        Some(text) => {
            let why = "must begin with https:// or http://";
            Err(refused(key, format!("{text:?}"), why))
        }
        None => Ok(()),
    }
}

fn require_name(
    key: &str,
    value: &str,
    what: &str,
    allowed: impl Fn(char) -> bool,
) -> Result<(), ConfigError> {
    if (1..=32).contains(&value.len()) && value.chars().all(allowed) {
        return Ok(());
    }
    Err(refused(key, format!("{value:?}"), &format!("must be 1 to 32 {what}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LoadedConfig;

    /// Loads the defaults with one setting changed. Rows and tokens are first set so far apart that
    /// their own rule does not interfere.
    fn load(key: &str, value: &str) -> Result<LoadedConfig, ConfigError> {
        let mut flags = vec![("engine.max_rows", "1"), ("engine.max_batched_tokens", "65536")];
        flags.retain(|(other, _)| *other != key);
        flags.push((key, value));
        let owned = flags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        LoadedConfig::from_layers(None, Vec::new(), &owned.collect::<Vec<_>>())
    }

    fn numeric(setting: &SettingInfo) -> bool {
        let types = setting.schema["type"].to_string();
        types.contains("integer") || types.contains("number")
    }

    #[test]
    fn every_number_is_held_to_the_bounds_of_the_schema() {
        let (schema, values) = (Config::schema(), Config::default().values());
        let mut checked = 0;
        for setting in settings(&schema, &values).iter().filter(|setting| numeric(setting)) {
            let SettingInfo { key, schema, .. } = setting;
            let [low, high] = match schema["enum"].as_array() {
                Some(allowed) => [&allowed[0], &allowed[allowed.len() - 1]],
                None => [&schema["minimum"], &schema["maximum"]],
            };
            let beyond = match (low.as_i64(), high.as_i64()) {
                (Some(low), Some(high)) => {
                    [i128::from(low) - 1, i128::from(high) + 1].map(|number| number.to_string())
                }
                _ => [low, high]
                    .map(|bound| bound.as_f64().expect("a bound"))
                    .map(|b| if b < 0.5 { (b - 0.01).to_string() } else { (b + 0.01).to_string() }),
            };
            for bound in [low, high] {
                load(key, &bound.to_string()).unwrap_or_else(|error| panic!("{error}"));
            }
            for value in beyond {
                let error = load(key, &value).expect_err(key).to_string();
                assert!(error.contains(&value) && error.contains(key), "{error}");
            }
            checked += 1;
        }
        assert!(checked >= 42, "{checked} numbers were found");
    }

    #[test]
    fn a_block_has_one_of_three_sizes() {
        for size in 0..=65 {
            let allowed = [16, 32, 64].contains(&size);
            assert_eq!(load("engine.block_size", &size.to_string()).is_ok(), allowed, "{size}");
        }
        let error = load("engine.block_size", "17").unwrap_err().to_string();
        assert!(error.contains("must be 16, 32 or 64"), "{error}");
    }

    #[test]
    fn a_step_has_a_token_for_every_row() {
        let flags = [("engine.max_rows", "33"), ("engine.max_batched_tokens", "32")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()));
        let error = LoadedConfig::from_layers(None, Vec::new(), &flags).unwrap_err().to_string();
        assert!(error.contains("engine.max_batched_tokens = 32"), "{error}");
    }

    #[test]
    fn every_setting_is_described_and_every_number_has_a_unit() {
        const UNITS: [&str; 27] = [
            "threads",
            "files",
            "MiB",
            "KiB",
            "messages",
            "tools",
            "bits",
            "bytes",
            "share",
            "sequences",
            "seconds",
            "milliseconds",
            "minutes",
            "hours",
            "days",
            "tokens",
            "headers",
            "connections",
            "streams",
            "authentications",
            "microcredits",
            "requests",
            "priority",
            "subscribers",
            "steps",
            "spans",
            "standbys",
        ];
        let (schema, values) = (Config::schema(), Config::default().values());
        for setting in settings(&schema, &values) {
            let text = setting.description().unwrap_or_default();
            assert!(!text.is_empty(), "{} is not described", setting.key);
            let words = format!("{} {}", setting.key, text).to_lowercase();
            let unit = UNITS.iter().any(|unit| words.contains(&unit.to_lowercase()));
            assert!(unit || !numeric(&setting), "{} has no unit: {text}", setting.key);
        }
    }

    #[test]
    fn an_address_of_a_database_has_no_password_and_comes_with_standbys() {
        let load = |url: &str, standbys: Option<&str>| {
            let flags = [("ledger.url", Some(url)), ("ledger.standbys", standbys)];
            let given = flags.iter().filter_map(|(key, value)| Some((*key, (*value)?)));
            let flags: Vec<_> = given.map(|(key, value)| (key.into(), value.into())).collect();
            LoadedConfig::from_layers(None, Vec::new(), &flags)
                .map(drop)
                .map_err(|error| error.to_string())
        };
        assert_eq!(load("postgres://cresset@one,two:5433/cresset", Some("0")), Ok(()));
        assert_eq!(load("postgresql:///cresset?host=/run", Some("1")), Ok(()));
        for (url, standbys, part) in [
            ("postgres://cresset@one/cresset", None, "ledger.standbys: must be written"),
            ("mysql://one/cresset", Some("0"), "ledger.url: must be an address like"),
            ("postgres://cresset:secret@one/db", Some("0"), "ledger.password_file"),
            ("postgres://one/db?password=secret", Some("0"), "ledger.password_file"),
        ] {
            let error = load(url, standbys).unwrap_err();
            assert!(error.contains(part) && !error.contains("secret"), "{url}: {error}");
        }
    }

    #[test]
    fn nodes_know_each_other_by_all_settings_of_the_cluster_or_none() {
        const ALL: [(&str, &str); 6] = [
            ("ledger.url", "postgres://one/cresset"),
            ("ledger.standbys", "0"),
            ("cluster.listen", "0.0.0.0:9443"),
            ("cluster.certificate", "c"),
            ("cluster.key", "k"),
            ("cluster.authority", "a"),
        ];
        let load = |without: &str, address: Option<&str>| {
            let given = ALL.into_iter().filter(|(key, _)| !without.split(' ').any(|k| k == *key));
            let given = given.chain(address.map(|text| ("cluster.address", text)));
            let flags: Vec<_> = given.map(|(key, value)| (key.into(), value.into())).collect();
            LoadedConfig::from_layers(None, Vec::new(), &flags)
                .map(drop)
                .map_err(|error| error.to_string())
        };
        assert_eq!(load("", Some("node1.example")), Ok(()));
        assert_eq!(load("", Some("[::1]:9443")), Ok(()));
        let files = "cluster.certificate cluster.key cluster.authority";
        let no_ledger = "ledger.url ledger.standbys";
        assert_eq!(load(&format!("{no_ledger} cluster.listen {files}"), None), Ok(()));
        for (without, address, part) in [
            ("cluster.key", Some("a"), "all are needed or none"),
            (files, Some("a"), "all are needed or none"),
            ("cluster.listen", None, "all are needed or none"),
            (&format!("cluster.listen {files}"), Some("a"), "all are needed or none"),
            (no_ledger, Some("a"), "set ledger.url"),
            ("", None, "set cluster.address"),
            ("", Some("https://node1"), "must be a name or an IP address"),
            ("", Some(""), "must be a name or an IP address"),
        ] {
            let error = load(without, address).unwrap_err();
            assert!(error.contains(part), "{without} {address:?}: {error}");
        }
    }

    #[test]
    fn a_value_out_of_bounds_is_refused_with_key_bounds_and_unit() {
        let error = load("engine.max_context", "99999999").unwrap_err().to_string();
        for part in ["engine.max_context = 99999999", "must be 0 to 16777216", "tokens"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
