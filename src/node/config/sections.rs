//! The sections of the configuration. Every field carries its default here and nowhere else, and
//! every number its bounds and its unit; those of models stand beside the models' options. Most
//! upper bounds are far above any sensible value: they catch a wrong unit, such as bytes where MiB
//! are meant.

use cresset_base::section;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

section! {
/// The addresses on which the node listens.
pub struct ListenSettings {
    /// Address of the public /v1 surface. Port 0 picks a free one.
    pub public: SocketAddr = ([127, 0, 0, 1], 8080).into(),
    /// Address of the operator surface (health, readiness, metrics). It asks for no credential.
    pub operator: SocketAddr = ([127, 0, 0, 1], 8081).into(),
    /// Allows `operator` to be an address that other machines can reach. Set it only behind a
    /// firewall of your own.
    pub operator_beyond_loopback: bool = false,
    /// Names under which the operator surface may be addressed besides `localhost` and its IP
    /// address, such as the name of a container. Others are refused, because a web page can make a
    /// name of its own mean this machine.
    pub operator_names: Vec<String> = Vec::new(),
    /// Folders of this machine from which operators may add models on the page or from another
    /// machine. The node's own user adds from everywhere by `cresset models add`.
    pub operator_folders: Vec<PathBuf> = Vec::new(),
}
}

section! {
/// The qualification of releases on this hardware.
pub struct QualificationSettings {
    /// Age at which a qualification record stops counting, days.
    #[schemars(range(min = 1, max = 3_650))]
    pub max_age_days: u64 = 90,
    /// The weakest proof with which a model is served: `reference` is a comparison with its own
    /// reference outputs, `like` one with those of a sister release, `self` none, and then the
    /// operator's acceptance.
    pub require: GradeSetting = GradeSetting::SelfOnly,
    /// Lets models choose when to call tools although their qualification withheld it, because they
    /// often call needlessly or not at all. Otherwise they call only where a request demands it.
    pub any_tool_choice: bool = false,
    /// Between two looks of a running node at the records and files of the models that it serves,
    /// seconds. A model whose record has gone or is too old is not offered until there is one.
    #[schemars(range(min = 1, max = 86_400))]
    pub review_seconds: u64 = 60,
    /// Between two readings of a loaded model's files, in which their content is compared with the
    /// record, minutes. A load compares it too, and so does a review that finds a file's size,
    /// place or times changed.
    #[schemars(range(min = 1, max = 525_600))]
    pub recheck_minutes: u64 = 1_440,
    /// Rate at which files are read for these comparisons, MiB a second.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub recheck_mib_per_second: u64 = 256,
    /// Most memory that the weights of a second implementation may take in f32, MiB. It is loaded
    /// for one check beside the model that is qualified, of a model above a GiB layer by layer.
    #[schemars(range(min = 0, max = 1 << 24))]
    pub witness_memory_mib: usize = 8192,
    /// Longest context that the quick suite runs, tokens.
    #[schemars(range(min = 1, max = 1 << 24))]
    pub quick_context_tokens: u32 = 2048,
    /// Proves more while models are served, in steps of their engines in which no request runs: a
    /// longer context, by doublings up to the model's own, and each record anew from two thirds of
    /// `max_age_days` on. Otherwise `cresset qualify` does.
    pub background: bool = true,
    /// Age up to which the results of a qualification that was interrupted are taken over by the
    /// next run of the same release, build, hardware and settings, hours.
    #[schemars(range(min = 0, max = 8_760))]
    pub resume_hours: u64 = 24,
    /// Most requests that the checks send to one completions surface.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub http_max_calls: u64 = 1_000,
    /// Longest time for one answer of a completions surface, seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub http_answer_seconds: u64 = 300,
    /// Largest answer of a completions surface that the checks read, MiB.
    #[schemars(range(min = 1, max = 1 << 10))]
    pub http_max_answer_mib: u64 = 8,
}
}

/// A grade of qualification, as `qualification.require` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GradeSetting {
    Reference,
    Like,
    #[serde(rename = "self")]
    SelfOnly,
}

section! {
/// The settings of `quickstart`.
pub struct QuickstartSettings {
    /// Trial credits of the first account, microcredits.
    #[schemars(range(min = 0, max = i64::MAX))]
    pub trial_units: u64 = 100_000_000,
}
}

section! {
/// Logging to stderr.
pub struct LogSettings {
    /// How each line is written: text for people, JSON for collectors.
    pub format: LogFormat = LogFormat::Text,
    /// Filter such as `info` or `cresset=debug,warn`.
    pub level: String = "info".into(),
}
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

section! {
/// The node's own gateway: a listener for clients that send no headers of theirs, know models by
/// name, or speak in other services' spellings. `cresset relay` is the same in a process of its
/// own.
pub struct GatewaySettings {
    /// Its address. Absent: there is no gateway.
    pub listen: Option<SocketAddr> = None,
    /// File with a key that is sent in place of what clients send, which then need none. Only for
    /// an address that other machines cannot reach.
    pub key_file: Option<PathBuf> = None,
    /// Names besides `localhost` and its IP address under which clients may address it.
    pub names: Vec<String> = Vec::new(),
    /// Origins of web pages that may use it, such as `http://localhost:3000`.
    pub origins: Vec<String> = Vec::new(),
    /// Further names of models: a client that names the left one means the model on the right. A
    /// left one that ends in `*` stands for every name that begins so, such as `claude-*`.
    pub aliases: BTreeMap<String, String> = BTreeMap::new(),
    /// Open connections. Each takes up to two of the files that the system lets the process open,
    /// and further ones wait.
    #[schemars(range(min = 1, max = 65_536))]
    pub max_connections: usize = 256,
    /// Size of the body of one request to it, also when it was compressed, MiB. `/v1` has
    /// `http.max_body_bytes`.
    #[schemars(range(min = 1, max = 64))]
    pub max_body_mib: usize = 16,
    /// Messages of one request to it, and parts of a message. `/v1` takes 64.
    #[schemars(range(min = 1, max = 65_536))]
    pub max_messages: usize = 4096,
    /// Tools of one request to it, and calls of a message. `/v1` takes 64.
    #[schemars(range(min = 1, max = 4_096))]
    pub max_tools: usize = 256,
    /// Size of a tool's description, and of the schema of its parameters, KiB. `/v1` takes 4 and
    /// 16.
    #[schemars(range(min = 1, max = 1_024))]
    pub max_description_kib: usize = 64,
    /// Files that one request to it may send beside a text with a gap to fill in.
    #[schemars(range(min = 1, max = 4_096))]
    pub max_files: usize = 256,
    /// Tokens that one request to it may send as ids, and that an answer may list.
    #[schemars(range(min = 1, max = 1 << 24))]
    pub max_token_ids: usize = 1 << 20,
}
}
