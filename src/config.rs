//! Configuration: one TOML file, overridden by `CRESSET_…` variables, overridden by flags. Every
//! limit is here, with its unit. The only module that reads environment variables.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Everything that can be set. Unknown keys are errors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Name of the service: clients may send the session header as X-NAME-Session-Id. Letters,
    /// digits and dashes.
    pub service_name: String,
    pub listen: Listen,
    pub engine: Engine,
    pub http: Http,
    pub requests: Requests,
    pub credentials: Credentials,
    pub hub: Hub,
    pub qualification: Qualification,
    pub quickstart: Quickstart,
    pub log: Log,
    /// What accounts may do, by plan name. Accounts name one; `default` must exist.
    pub plans: BTreeMap<String, Plan>,
}

/// Where the node listens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Listen {
    /// Address of the public /v1 surface. Port 0 picks a free one.
    pub public: SocketAddr,
    /// Address of the operator surface (health, readiness, metrics). It asks for no credential.
    pub operator: SocketAddr,
    /// Lets `operator` be an address that other machines can reach. Only behind a firewall of your
    /// own.
    pub operator_beyond_loopback: bool,
}

/// The inference engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Engine {
    /// Where models run: `cpu`, `cuda:0` (the first NVIDIA GPU; `cuda:1` the second), or `auto`:
    /// the first GPU where the build and the machine have one, else the CPU. A GPU needs a build
    /// with the feature `cuda`.
    pub device: Device,
    /// Compute threads on the CPU. 0 uses every core.
    pub threads: usize,
    /// Memory for the key-value cache of each loaded model, MiB. On a GPU, `gpu_memory_share` says
    /// it.
    pub kv_mib: usize,
    /// What each loaded model may take of a GPU's memory, 0.05 to 1: its key-value cache gets what
    /// weights and workspace leave of it. The rest is for recorded steps and the driver.
    pub gpu_memory_share: f64,
    /// Decoding steps of up to so many sequences are recorded once at start and replayed on a GPU.
    /// 0 records none.
    pub gpu_graph_rows: usize,
    /// On a GPU: the same tokens whatever else runs, however a prompt is cut, at some cost in
    /// speed. The CPU always does so.
    pub deterministic: bool,
    /// Memory for weights and key-value caches of all loaded models together, MiB; for the weights
    /// alone on a GPU. Idle models make room for those that are asked for. 0 takes three quarters
    /// of the machine's memory.
    pub memory_mib: usize,
    /// How long a request waits for its model to be loaded before it is turned away as overloaded,
    /// seconds.
    pub model_wait_seconds: u64,
    /// Tokens in one block of the key-value cache: 16, 32 or 64.
    pub block_size: usize,
    /// Tokens computed in one step, prompt chunks and generated tokens together.
    pub max_batched_tokens: usize,
    /// Sequences in one step.
    pub max_rows: usize,
    /// Sequences waiting to start before new ones are refused as overloaded.
    pub max_waiting: usize,
    /// Longest prompt plus output served, tokens. 0 takes the model's own limit.
    pub max_context: usize,
    /// Turn every weight into f32 at load: the exact reference, at several times the memory. On a
    /// GPU, activations and cache are f32 then too, and bf16 otherwise.
    pub dequantise: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(extend("pattern" = "^(auto|cpu|cuda:[0-9]{1,2})$"))]
pub enum Device {
    Auto,
    Cpu,
    /// By number, as the driver counts.
    Cuda(usize),
}

impl TryFrom<String> for Device {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let plain =
            |digits: &&str| digits.len() <= 2 && digits.bytes().all(|digit| digit.is_ascii_digit());
        let number = text.strip_prefix("cuda:").filter(plain);
        match (text.as_str(), number.and_then(|digits| digits.parse().ok())) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            (_, Some(number)) => Ok(Self::Cuda(number)),
            _ => Err(format!("{text:?} is no device: use \"auto\", \"cpu\" or \"cuda:0\"")),
        }
    }
}

impl From<Device> for String {
    fn from(device: Device) -> Self {
        match device {
            Device::Auto => "auto".into(),
            Device::Cpu => "cpu".into(),
            Device::Cuda(number) => format!("cuda:{number}"),
        }
    }
}

/// Limits of the HTTP surface.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Http {
    /// Time for a new connection to send its first byte, seconds.
    pub first_byte_seconds: u64,
    /// Time to read a request's line and headers, from their first byte, seconds.
    pub header_seconds: u64,
    /// Time to read a request's body, seconds.
    pub body_seconds: u64,
    /// Time a client may refuse to take bytes before it is let go, seconds.
    pub write_stall_seconds: u64,
    /// Time a connection may be kept open without a request on it, seconds. Longer than clients
    /// keep theirs for reuse.
    pub idle_seconds: u64,
    /// Time to go on taking what a client sends after its connection's last answer, so that it gets
    /// to read it, seconds.
    pub linger_seconds: u64,
    /// Silence on a stream before a keep-alive comment is sent, seconds.
    pub keep_alive_seconds: u64,
    /// Headers in one request.
    pub max_headers: usize,
    /// Line and headers of one request, bytes.
    pub max_header_bytes: usize,
    /// Body of one request, bytes.
    pub max_body_bytes: usize,
    /// Open connections in all.
    pub max_connections: usize,
    /// Open connections from one IPv4 address or IPv6 /64 network. Further ones are closed at once.
    pub max_connections_per_ip: usize,
    /// Concurrent streams on one HTTP/2 connection.
    pub max_http2_streams: u32,
    /// Streams of one HTTP/2 connection that a client may open and reset before they were served.
    pub max_http2_resets: usize,
    /// Time between two HTTP/2 pings, which find out that a client is gone, seconds.
    pub http2_ping_seconds: u64,
    /// Failed authentications from one address (IPv6: /64 network) in a minute. Each one above
    /// closes its connection. A valid credential is honoured all the same, whatever others behind
    /// the same address send.
    pub failed_auth_per_minute: u32,
}

/// Life of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Requests {
    /// How long a stream without a listener goes on before it is cancelled, seconds.
    pub disconnect_grace_seconds: u64,
    /// Longest life of a request from admission to its end, seconds.
    pub deadline_seconds: u64,
    /// How long DELETE waits for the request's end before it answers 202, milliseconds.
    pub cancel_wait_milliseconds: u64,
    /// Connections that may listen to one running request.
    pub max_subscribers: usize,
    /// How long answers are kept for replay, hours.
    pub body_retention_hours: u64,
    /// How long a finished request's id is remembered, days.
    pub tombstone_days: u64,
    /// Time running work gets to finish at shutdown, seconds.
    pub drain_grace_seconds: u64,
    /// Free space where the data folder is under which new requests are refused, so that running
    /// ones can be ended, MiB.
    pub min_free_mib: u64,
}

impl Requests {
    /// How long answers are kept for replay, milliseconds.
    pub fn replay_ms(&self) -> u64 {
        self.body_retention_hours * 3_600_000
    }

    /// How long a finished request's id is remembered, milliseconds.
    pub fn tombstone_ms(&self) -> u64 {
        self.tombstone_days * 24 * 3_600_000
    }
}

/// Client credentials.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Credentials {
    /// Beginning of every key and token: PREFIX_key_… and PREFIX_app_…. Lower-case letters and
    /// digits.
    pub prefix: String,
}

/// Where releases are fetched from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Hub {
    /// Base address of the model hub. `HF_ENDPOINT` sets it too.
    pub endpoint: Option<String>,
    /// Access token for gated repositories. `HF_TOKEN` sets it too. Never shown.
    #[serde(skip_serializing)]
    pub token: Option<String>,
    /// Python interpreter whose pip fetches package mirrors.
    pub python: PathBuf,
}

/// Proving releases on this hardware.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Qualification {
    /// Age at which a qualification record stops counting, days.
    pub max_age_days: u64,
    /// Longest context the quick suite really runs, tokens.
    pub quick_context_tokens: u32,
}

/// What `quickstart` sets up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Quickstart {
    /// Trial credits of the first account, microcredits.
    pub trial_units: u64,
}

/// Logging to stderr.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// How each line is written: text for people, JSON for collectors.
    pub format: LogFormat,
    /// Filter such as `info` or `cresset=debug,warn`.
    pub level: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

/// What an account on this plan may do; shared by all its credentials.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Plan {
    /// Completion requests a minute.
    pub requests_per_minute: u32,
    /// Requests that may come at once after a pause.
    pub burst: u32,
    /// Requests in flight.
    pub max_concurrent: u32,
    /// Ceiling on prompt plus output, tokens. Absent: the model's.
    pub context_tokens: Option<u32>,
    /// Ceiling on output, tokens. Absent: the model's.
    pub max_output_tokens: Option<u32>,
    /// Whose requests start first when there are more than can run: 0 to 9, higher ones first.
    /// Waiting raises a request, so that everybody is served in the end.
    pub priority: u8,
    /// Models (by name or id) the plan may use. Absent: all.
    pub models: Option<Vec<String>>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            service_name: "Cresset".into(),
            listen: Listen::default(),
            engine: Engine::default(),
            http: Http::default(),
            requests: Requests::default(),
            credentials: Credentials::default(),
            hub: Hub::default(),
            qualification: Qualification::default(),
            quickstart: Quickstart::default(),
            log: Log::default(),
            plans: BTreeMap::from([("default".into(), Plan::default())]),
        }
    }
}

impl Default for Listen {
    fn default() -> Self {
        Self {
            public: ([127, 0, 0, 1], 8080).into(),
            operator: ([127, 0, 0, 1], 8081).into(),
            operator_beyond_loopback: false,
        }
    }
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            device: Device::Auto,
            threads: 0,
            kv_mib: 1024,
            gpu_memory_share: 0.9,
            gpu_graph_rows: 512,
            deterministic: false,
            memory_mib: 0,
            model_wait_seconds: 60,
            block_size: 16,
            max_batched_tokens: 512,
            max_rows: 256,
            max_waiting: 1024,
            max_context: 0,
            dequantise: false,
        }
    }
}

impl Default for Http {
    fn default() -> Self {
        Self {
            first_byte_seconds: 10,
            header_seconds: 10,
            body_seconds: 30,
            write_stall_seconds: 30,
            idle_seconds: 120,
            linger_seconds: 2,
            keep_alive_seconds: 10,
            max_headers: 64,
            max_header_bytes: 32 * 1024,
            max_body_bytes: 256 * 1024,
            max_connections: 4096,
            max_connections_per_ip: 1024,
            max_http2_streams: 32,
            max_http2_resets: 64,
            http2_ping_seconds: 20,
            failed_auth_per_minute: 600,
        }
    }
}

impl Default for Requests {
    fn default() -> Self {
        Self {
            disconnect_grace_seconds: 15,
            deadline_seconds: 600,
            cancel_wait_milliseconds: 2_000,
            max_subscribers: 4,
            body_retention_hours: 24,
            tombstone_days: 30,
            drain_grace_seconds: 30,
            min_free_mib: 512,
        }
    }
}

impl Default for Credentials {
    fn default() -> Self {
        Self { prefix: "cresset".into() }
    }
}

impl Default for Hub {
    fn default() -> Self {
        Self { endpoint: None, token: None, python: "python3".into() }
    }
}

impl Default for Qualification {
    fn default() -> Self {
        Self { max_age_days: 90, quick_context_tokens: 2048 }
    }
}

impl Default for Quickstart {
    fn default() -> Self {
        Self { trial_units: 100_000_000 }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { format: LogFormat::Text, level: "info".into() }
    }
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            requests_per_minute: 120,
            burst: 60,
            max_concurrent: 64,
            context_tokens: None,
            max_output_tokens: None,
            priority: 0,
            models: None,
        }
    }
}

/// Where a value came from, for `config show`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    Default,
    File(PathBuf),
    Variable(String),
    Flag,
}

/// Why a configuration was refused: names the file, variable or flag, the key, and the line where
/// there is one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

/// A configuration with the origin of every value that is not a default.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub config: Config,
    /// By dotted key.
    pub origins: BTreeMap<String, Origin>,
}

/// One setting from outside the file: dotted key and value in TOML syntax (bare words are strings).
pub type Override = (String, String);

impl Loaded {
    /// Reads `file` (a missing default file is no error), then the environment, then `flags`.
    pub fn load(file: Option<&Path>, flags: &[Override]) -> Result<Self, ConfigError> {
        // Compose files pass on what is not set as an empty text.
        let given =
            std::env::vars().filter(|(name, value)| !(name.starts_with("HF_") && value.is_empty()));
        let variables = given.filter_map(|(name, value)| Some((variable_key(&name)?, name, value)));
        let text = file.map(read_file).transpose()?;
        Self::from_layers(file.zip(text.as_deref()), variables.collect(), flags)
    }

    fn from_layers(
        file: Option<(&Path, &str)>,
        variables: Vec<(String, String, String)>,
        flags: &[Override],
    ) -> Result<Self, ConfigError> {
        let mut layers = Layers::new();
        if let Some((path, text)) = file {
            layers.add_file(path, text)?;
        }
        for (key, name, value) in variables {
            layers.add_override(&key, &value, Origin::Variable(name))?;
        }
        for (key, value) in flags {
            layers.add_override(key, value, Origin::Flag)?;
        }
        layers.finish()
    }

    /// Every key with its value and origin, sorted by key. Secrets are left out.
    pub fn entries(&self) -> Vec<(String, Value, Origin)> {
        let mut rows = Vec::new();
        flatten("", &Value::Table(as_table(&self.config)), &mut |key, value| {
            let origin = self.origins.get(key).cloned().unwrap_or(Origin::Default);
            rows.push((key.to_owned(), value.clone(), origin));
        });
        rows
    }
}

/// The value so far, and who set what.
struct Layers {
    table: Table,
    origins: BTreeMap<String, Origin>,
}

impl Layers {
    fn new() -> Self {
        Self { table: as_table(&Config::default()), origins: BTreeMap::new() }
    }

    fn add_file(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        let refuse = |error: toml::de::Error| {
            ConfigError(format!("{}: {}", path.display(), in_words(&error)))
        };
        // Parsed as a whole Config first: its errors carry the line.
        toml::from_str::<Config>(text).map_err(refuse)?;
        let table: Table = toml::from_str(text).map_err(refuse)?;
        flatten("", &Value::Table(table.clone()), &mut |key, _| {
            self.origins.insert(key.to_owned(), Origin::File(path.to_owned()));
        });
        overlay(&mut self.table, table);
        Ok(())
    }

    fn add_override(&mut self, key: &str, text: &str, origin: Origin) -> Result<(), ConfigError> {
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
            Origin::Variable(name) => format!("environment variable {name}"),
            _ => format!("setting {key}"),
        };
        let error = last.map(|error| in_words(&error)).unwrap_or_default();
        // The value of what is no setting of ours may be a secret.
        Err(ConfigError(if error.starts_with("unknown field") {
            format!(
                "{source}: {error}\nCRESSET_ENGINE__KV_MIB, with two underscores, sets engine.kv_mib"
            )
        } else {
            format!("{source} = {text:?}: {error}")
        }))
    }

    fn finish(self) -> Result<Loaded, ConfigError> {
        let config: Config =
            self.table.try_into().map_err(|error| ConfigError(error.to_string()))?;
        config.validate()?;
        Ok(Loaded { config, origins: self.origins })
    }
}

impl Config {
    /// The JSON Schema of the file.
    pub fn schema() -> serde_json::Value {
        schemars::schema_for!(Config).to_value()
    }

    /// The plan an account names; an unknown name gets `default`, so that renaming a plan never
    /// locks accounts out.
    pub fn plan(&self, name: &str) -> &Plan {
        self.plans.get(name).unwrap_or_else(|| &self.plans["default"])
    }

    /// Compute threads, with 0 resolved to the number of cores.
    pub fn threads(&self) -> usize {
        match self.engine.threads {
            0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            n => n,
        }
    }

    /// Memory for all loaded models, bytes, with 0 resolved.
    pub fn model_bytes(&self) -> u64 {
        match self.engine.memory_mib as u64 {
            0 => machine_bytes().map_or(u64::MAX, |bytes| bytes / 4 * 3),
            mib => mib << 20,
        }
    }

    fn validate(&self) -> Result<(), ConfigError> {
        let e = &self.engine;
        let h = &self.http;
        let r = &self.requests;
        require_name("service_name", &self.service_name, "letters, digits and dashes", |c| {
            c.is_ascii_alphanumeric() || c == '-'
        })?;
        require_name(
            "credentials.prefix",
            &self.credentials.prefix,
            "lower-case letters and digits",
            |c| c.is_ascii_lowercase() || c.is_ascii_digit(),
        )?;
        if !self.listen.operator.ip().to_canonical().is_loopback()
            && !self.listen.operator_beyond_loopback
        {
            return Err(ConfigError(format!(
                "listen.operator = {}: other machines could reach this listener, which asks for no credential; use 127.0.0.1, or set listen.operator_beyond_loopback = true",
                self.listen.operator
            )));
        }
        if self.listen.public == self.listen.operator && self.listen.public.port() != 0 {
            return Err(ConfigError(format!(
                "listen.public = listen.operator = {}: give each a port of its own",
                self.listen.public
            )));
        }
        let address = |text: &&String| text.starts_with("https://") || text.starts_with("http://");
        if let Some(endpoint) = self.hub.endpoint.as_ref().filter(|text| !address(text)) {
            return Err(ConfigError(format!(
                "hub.endpoint = {endpoint:?}: must begin with https:// or http://"
            )));
        }
        require_range("engine.threads", e.threads as u64, 0, 1024)?;
        require_range("engine.kv_mib", e.kv_mib as u64, 1, 1 << 24)?;
        if !(0.05..=1.0).contains(&e.gpu_memory_share) {
            return Err(ConfigError(format!(
                "engine.gpu_memory_share = {}: must be 0.05 to 1",
                e.gpu_memory_share
            )));
        }
        require_range("engine.gpu_graph_rows", e.gpu_graph_rows as u64, 0, 1_024)?;
        require_range("engine.memory_mib", e.memory_mib as u64, 0, 1 << 24)?;
        require_range("engine.model_wait_seconds", e.model_wait_seconds, 1, 3_600)?;
        if ![16, 32, 64].contains(&e.block_size) {
            return Err(ConfigError(format!(
                "engine.block_size = {}: must be 16, 32 or 64",
                e.block_size
            )));
        }
        require_range("engine.max_batched_tokens", e.max_batched_tokens as u64, 16, 65_536)?;
        require_range("engine.max_rows", e.max_rows as u64, 1, e.max_batched_tokens as u64)?;
        require_range("engine.max_waiting", e.max_waiting as u64, 1, 1 << 20)?;
        require_range("engine.max_context", e.max_context as u64, 0, 1 << 24)?;
        require_range("http.first_byte_seconds", h.first_byte_seconds, 1, 3_600)?;
        require_range("http.header_seconds", h.header_seconds, 1, 3_600)?;
        require_range("http.body_seconds", h.body_seconds, 1, 3_600)?;
        require_range("http.write_stall_seconds", h.write_stall_seconds, 1, 3_600)?;
        require_range("http.idle_seconds", h.idle_seconds, 1, 86_400)?;
        require_range("http.linger_seconds", h.linger_seconds, 0, 60)?;
        require_range("http.keep_alive_seconds", h.keep_alive_seconds, 1, 3_600)?;
        require_range("http.max_headers", h.max_headers as u64, 8, 1_024)?;
        require_range("http.max_header_bytes", h.max_header_bytes as u64, 8_192, 1 << 20)?;
        require_range("http.max_body_bytes", h.max_body_bytes as u64, 1_024, 64 << 20)?;
        require_range("http.max_connections", h.max_connections as u64, 1, 1 << 20)?;
        require_range("http.max_connections_per_ip", h.max_connections_per_ip as u64, 1, 1 << 20)?;
        require_range("http.max_http2_streams", u64::from(h.max_http2_streams), 1, 65_536)?;
        require_range("http.max_http2_resets", h.max_http2_resets as u64, 1, 65_536)?;
        require_range("http.http2_ping_seconds", h.http2_ping_seconds, 1, 3_600)?;
        require_range(
            "http.failed_auth_per_minute",
            u64::from(h.failed_auth_per_minute),
            1,
            1 << 20,
        )?;
        require_range("requests.disconnect_grace_seconds", r.disconnect_grace_seconds, 0, 3_600)?;
        require_range("requests.deadline_seconds", r.deadline_seconds, 1, 86_400)?;
        require_range("requests.cancel_wait_milliseconds", r.cancel_wait_milliseconds, 0, 60_000)?;
        require_range("requests.max_subscribers", r.max_subscribers as u64, 1, 1_024)?;
        require_range("requests.body_retention_hours", r.body_retention_hours, 1, 24 * 365)?;
        require_range("requests.tombstone_days", r.tombstone_days, 1, 3_650)?;
        require_range("requests.drain_grace_seconds", r.drain_grace_seconds, 0, 86_400)?;
        require_range("requests.min_free_mib", r.min_free_mib, 128, 1 << 24)?;
        require_range("qualification.max_age_days", self.qualification.max_age_days, 1, 3_650)?;
        let quick = self.qualification.quick_context_tokens;
        require_range("qualification.quick_context_tokens", quick.into(), 1, 1 << 24)?;
        self.validate_plans()
    }

    fn validate_plans(&self) -> Result<(), ConfigError> {
        if !self.plans.contains_key("default") {
            return Err(ConfigError("plans: a plan named `default` is required".into()));
        }
        for (name, plan) in &self.plans {
            let rate = u64::from(plan.requests_per_minute);
            require_range(&format!("plans.{name}.requests_per_minute"), rate, 1, 1 << 24)?;
            require_range(&format!("plans.{name}.burst"), u64::from(plan.burst), 1, 1 << 24)?;
            require_range(
                &format!("plans.{name}.max_concurrent"),
                u64::from(plan.max_concurrent),
                1,
                1 << 20,
            )?;
            require_range(&format!("plans.{name}.priority"), plan.priority.into(), 0, 9)?;
        }
        Ok(())
    }
}

/// What the deserialiser wanted, without the names of its types.
fn in_words(error: &toml::de::Error) -> String {
    const WORDS: [(&str, &str); 7] = [
        ("expected usize", "expected a whole number from 0 to 9223372036854775807"),
        ("expected u64", "expected a whole number from 0 to 9223372036854775807"),
        ("expected u32", "expected a whole number from 0 to 4294967295"),
        ("expected u8", "expected a whole number from 0 to 255"),
        ("expected f64", "expected a number"),
        ("expected struct", "expected a table for"),
        ("invalid socket address syntax", "expected an address and a port, such as 127.0.0.1:8080"),
    ];
    let text = error.to_string();
    WORDS.iter().fold(text.trim_end().to_owned(), |text, (theirs, ours)| text.replace(theirs, ours))
}

fn require_range(key: &str, value: u64, low: u64, high: u64) -> Result<(), ConfigError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(ConfigError(format!("{key} = {value}: must be {low} to {high}")))
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
    Err(ConfigError(format!("{key} = {value:?}: must be 1 to 32 {what}")))
}

/// Memory of this machine, where the platform tells.
fn machine_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kibibytes = info.strip_prefix("MemTotal:")?.split_whitespace().next()?;
    Some(kibibytes.parse::<u64>().ok()? * 1024)
}

/// The data folder when none is given: the platform's convention, or `CRESSET_DATA_DIR`.
pub fn default_data_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("CRESSET_DATA_DIR") {
        return dir.into();
    }
    match directories::ProjectDirs::from("", "", "cresset") {
        Some(dirs) => dirs.data_dir().to_owned(),
        None => PathBuf::from("cresset-data"),
    }
}

/// Where what can be measured again is kept, by the platform's convention.
pub fn cache_dir() -> PathBuf {
    match directories::ProjectDirs::from("", "", "cresset") {
        Some(dirs) => dirs.cache_dir().to_owned(),
        None => std::env::temp_dir().join("cresset-cache"),
    }
}

/// The configuration file when none is given: `CRESSET_CONFIG`.
pub fn default_config_file() -> Option<PathBuf> {
    std::env::var_os("CRESSET_CONFIG").map(PathBuf::from)
}

/// False when the user asked every program for plain text: a `NO_COLOR` that is not empty, or a
/// dumb terminal.
pub fn colours_allowed() -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    !refused && !dumb
}

/// `CRESSET_ENGINE__KV_MIB` sets `engine.kv_mib`. `CRESSET_DATA_DIR` and `CRESSET_CONFIG` are not
/// settings, nor is `CRESSET_KEY`, in which clients on the same machine keep their key.
fn variable_key(name: &str) -> Option<String> {
    match name {
        "HF_ENDPOINT" => return Some("hub.endpoint".into()),
        "HF_TOKEN" => return Some("hub.token".into()),
        "CRESSET_DATA_DIR" | "CRESSET_CONFIG" | "CRESSET_KEY" => return None,
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

/// How the text of a variable or flag may be meant: as a TOML value first, else as a plain string.
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

fn as_table(config: &Config) -> Table {
    Table::try_from(config).expect("the configuration is representable as TOML")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(
        file: &str,
        variables: &[(&str, &str)],
        flags: &[(&str, &str)],
    ) -> Result<Loaded, ConfigError> {
        let variables = variables
            .iter()
            .map(|(n, v)| (variable_key(n).unwrap(), (*n).into(), (*v).into()))
            .collect();
        let flags: Vec<Override> = flags.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        Loaded::from_layers(Some((Path::new("cresset.toml"), file)), variables, &flags)
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
        assert_eq!(loaded.origins["engine.kv_mib"], Origin::File("cresset.toml".into()));
        assert_eq!(
            loaded.origins["engine.threads"],
            Origin::Variable("CRESSET_ENGINE__THREADS".into())
        );
        assert_eq!(loaded.origins["listen.public"], Origin::Flag);
    }

    #[test]
    fn devices_are_named() {
        for (text, device) in [
            ("auto", Device::Auto),
            ("cpu", Device::Cpu),
            ("cuda:0", Device::Cuda(0)),
            ("cuda:12", Device::Cuda(12)),
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
        assert!(!format!("{:?}", loaded.entries()).contains("hf_secret"));
    }

    #[test]
    fn every_default_is_valid_and_described() {
        Config::default().validate().unwrap();
        let schema = Config::schema();
        assert!(schema["properties"]["engine"].is_object());
    }
}
