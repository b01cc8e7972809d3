//! Metrics in Prometheus text form. Each has a help text that says what it counts, its unit and
//! when it is counted. Names follow those of vLLM, which dashboards use, under our prefix.

mod samples;

use cresset_base::memory::resident_bytes;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry};
use rustix::time::{ClockId, clock_gettime};
pub use samples::{DeviceSample, GpuSample};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// One metric for each value of its labels.
type By<const LABELS: usize, M> = Family<[(&'static str, String); LABELS], M>;
type Ratio = Gauge<f64, AtomicU64>;

// Upper bounds of the histograms' buckets, seconds.
const FIRST_TOKEN: [f64; 18] = [
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0,
    80.0, 160.0,
];
const BETWEEN_TOKENS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.75, 1.0, 5.0];
const REQUEST: [f64; 18] = [
    0.001, 0.005, 0.02, 0.05, 0.1, 0.3, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0,
    240.0, 480.0,
];
/// Upper bounds of buckets of tokens in a prompt or an answer.
const TOKENS: [f64; 16] = [
    1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
    32768.0, 65536.0, 131_072.0,
];
const COMMIT: [f64; 10] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0];

/// Defines the metrics. Each has the function that registers it with its arguments: the name, the
/// help text, and the buckets of a histogram. They are told in this order.
macro_rules! metrics {
    ($($scope:vis $field:ident: $type:ty = $register:ident($($argument:expr),+);)+) => {
        /// All metrics of the node.
        #[derive(Debug)]
        pub struct Metrics {
            registry: Registry,
            /// Output tokens of settled requests of all models.
            generated: Counter,
            process: ProcessMetrics,
            /// The metrics of the node's gateway.
            pub gateway: GatewayMetrics,
            pub spans: SpanCounts,
            pub certificates: CertificateEnds,
            $($scope $field: $type,)+
        }

        impl Default for Metrics {
            fn default() -> Self {
                let mut registry = Registry::default();
                let process = ProcessMetrics::of(&mut registry);
                let own = registry.sub_registry_with_prefix("cresset");
                $(let $field = $register(own, $($argument),+);)+
                let (gateway, spans) = (GatewayMetrics::of(own), SpanCounts::of(own));
                let certificates = CertificateEnds::of(own);
                tell_version(own);
                let generated = Counter::default();
                Self { registry, generated, process, gateway, spans, certificates, $($field),+ }
            }
        }
    };
}

metrics! {
    // Times, tokens and charges of requests, by model.
    time_to_first_token: By<1, Histogram> = histograms("time_to_first_token_seconds",
        "Seconds from a request's admission to its first output token",
        || Histogram::new(FIRST_TOKEN));
    inter_token_latency: By<1, Histogram> = histograms("inter_token_latency_seconds",
        "Seconds between two output tokens of a request", || Histogram::new(BETWEEN_TOKENS));
    queue_time: By<1, Histogram> = histograms("request_queue_time_seconds",
        "Seconds from a request's admission to its first computed token",
        || Histogram::new(REQUEST));
    request_latency: By<1, Histogram> = histograms("e2e_request_latency_seconds",
        "Seconds from a request's admission to its settlement", || Histogram::new(REQUEST));
    prefill_time: By<1, Histogram> = histograms("request_prefill_time_seconds",
        "Seconds from a request's first computed token to its first output token",
        || Histogram::new(REQUEST));
    decode_time: By<1, Histogram> = histograms("request_decode_time_seconds",
        "Seconds from a request's first output token to its settlement",
        || Histogram::new(REQUEST));
    time_per_token: By<1, Histogram> = histograms("request_time_per_output_token_seconds",
        "Seconds that a request took on average for each output token behind the first",
        || Histogram::new(BETWEEN_TOKENS));
    prompt_length: By<1, Histogram> = histograms("request_prompt_tokens",
        "Prompt tokens of a settled request", || Histogram::new(TOKENS));
    answer_length: By<1, Histogram> = histograms("request_generation_tokens",
        "Output tokens of a settled request", || Histogram::new(TOKENS));
    charged_units: By<1, Counter> = add("charged_microcredits",
        "Microcredits charged at settlements");
    prompt_tokens: By<1, Counter> = add("prompt_tokens", "Prompt tokens of settled requests");
    cached_tokens: By<1, Counter> = add("prompt_tokens_cached",
        "Prompt tokens of settled requests that the prefix cache served");
    generation_tokens: By<1, Counter> = add("generation_tokens",
        "Output tokens of settled requests");

    pub commit_time: Histogram = histogram("ledger_commit_seconds",
        "Seconds until a durable ledger command was acknowledged", &COMMIT);
    pub replays: Counter = add("idempotent_replays", "Requests answered with a stored answer");
    pub attaches: Counter = add("idempotent_attaches", "Requests that joined a running one");
    pub answers_full: Counter = add("stored_answers_full",
        "Requests refused because their account's stored answers reach their limit");
    limit_refusals: By<2, Counter> = add("limit_refusals",
        "Requests refused because their account's limits or credits are used up, by plan and \
         limit: requests_per_minute, max_concurrent, credits, plan_tokens, account_budget, \
         key_budget");
    requests: By<1, Counter> = add("requests", "Requests when they end, by how they ended");
    responses: By<2, Counter> = add("http_responses", "HTTP responses by status and code");
    forwarded: By<1, Counter> = add("forwarded_requests",
        "Requests that went from one node to another, by result: answered and unreachable (sent \
         to other nodes), broken (an answer that broke off), received (from other nodes)");
    wrong_operator_tokens: By<1, Counter> = add("wrong_operator_tokens",
        "Operator tokens that were refused, by kind: unknown, ended (revoked or expired), too_many \
         (at the same time)");
    engine_failures: By<1, Counter> = add("engine_failures",
        "Requests that failed in the engine, by kind: sampling, shape, out_of_memory, \
         device_lost, integrity, compute, panic, not_loaded, files_changed, unproven, wrong_answers, shut_down");
    ready: Gauge = add("ready", "1 while the node can serve, else 0");

    // The loaded models' engines, by model.
    running: By<1, Gauge> = add("num_requests_running", "Sequences in the running batch now");
    waiting: By<1, Gauge> = add("num_requests_waiting", "Sequences that wait to start now");
    kv_usage: By<1, Ratio> = add("kv_cache_usage_ratio",
        "Share of KV blocks in use now, 0 to 1");
    throughput: By<1, Ratio> = add("generation_tokens_per_second",
        "Tokens produced per second, over the last seconds");
    kv_blocks: By<1, Gauge> = add("kv_cache_blocks", "Blocks that the KV cache has");
    pub kv_block_tokens: Gauge = add("kv_cache_block_tokens", "Positions of a block of KV");
    steps: By<1, Counter> = add("engine_steps", "Steps since the engine's start");
    step_tokens: By<1, Counter> = add("engine_step_tokens",
        "Tokens that were computed or produced in steps since the engine's start");
    prefix_queries: By<1, Counter> = add("prefix_cache_query_tokens",
        "Prompt tokens looked up in the prefix cache since the engine's start");
    prefix_hits: By<1, Counter> = add("prefix_cache_hit_tokens",
        "Prompt tokens found in the prefix cache since the engine's start");
    preemptions: By<1, Counter> = add("num_preemptions",
        "Running sequences put back to waiting because KV blocks were short");
    draft_tokens: By<1, Counter> = add("spec_decode_num_draft_tokens",
        "Tokens that were guessed and computed ahead of their turn");
    accepted_tokens: By<1, Counter> = add("spec_decode_num_accepted_tokens",
        "Guessed tokens that were the ones drawn");
    stops: By<1, Counter> = add("num_stopped",
        "Running sequences stopped by a cancel, a stop string or a disconnect");
    late_frees: By<1, Counter> = add("kv_late_frees",
        "Stopped sequences that held their KV blocks for more than two steps");

    // All loaded models' engines together, for gateways that choose among nodes: they take one
    // value of each metric, whatever its labels are.
    all_running: Gauge = add("node_requests_running",
        "Sequences in the running batches of all models now");
    all_waiting: Gauge = add("node_requests_waiting",
        "Sequences of all models that wait to start now");
    all_kv_usage: Ratio = add("node_kv_cache_usage_ratio",
        "Share of the KV blocks of all models in use now, 0 to 1");
    cache_config: By<2, Gauge> = add("cache_config_info",
        "1, with the positions of a block of KV and the blocks of all models together as labels");

    // The models in memory.
    loaded: By<1, Gauge> = add("model_loaded", "1 while the model is in memory, else 0");
    model_memory: Gauge = add("model_memory_bytes",
        "Bytes of weights and KV caches of the loaded models now");
    device_memory: By<1, Gauge> = add("device_model_memory_bytes",
        "Bytes of weights and KV caches of the models that are loaded on the device now");
    device_lost: By<1, Gauge> = add("device_lost",
        "1 once the device cannot be used any more before the process has ended, else 0");
    device_running: By<1, Gauge> = add("device_requests_running",
        "Requests that the engines of the device compute now");
    device_waiting: By<1, Gauge> = add("device_requests_waiting",
        "Requests that wait in the engines of the device now");
    // What GPUs tell of their condition, as far as their driver does.
    gpu_temperature: By<1, Gauge> = add("gpu_temperature_celsius", "Temperature of the GPU now");
    gpu_power: By<1, Ratio> = add("gpu_power_watts", "Power that the GPU takes now");
    gpu_clocks: By<2, Gauge> = add("gpu_clock_hertz", "Clocks of the GPU now: sm, memory");
    gpu_slowdowns: By<2, Gauge> = add("gpu_slowdown",
        "1 while the GPU's clocks are lowered for the reason, else 0: power_cap, hardware, \
         sync_boost, heat, hardware_heat, power_brake");
    gpu_memory_errors: By<2, Counter> = add("gpu_memory_errors",
        "Errors of the GPU's memory since its driver was loaded: corrected, uncorrected");
    gpu_remapped_rows: By<2, Gauge> = add("gpu_remapped_rows",
        "Rows of the GPU's memory that others have replaced, after corrected and uncorrected \
         errors; 1 where a row waits for that (pending) or could not be replaced (failed)");
    gpu_last_xid: By<1, Gauge> = add("gpu_last_xid",
        "NVIDIA's number of the last error that the GPU's driver reported since the node's \
         start, 0 if none");

    loads: Counter = add("model_loads", "Loads of models that were started");
    unloads: Counter = add("model_unloads", "Models unloaded to make room");
    model_failures: By<1, Counter> = add("model_failures",
        "Models that could not be loaded or whose engine ended by itself, by kind: \
         not_loaded, files_changed, unproven, wrong_answers, out_of_memory, device_lost, integrity, panic, shape, compute");

    qualification_age: By<1, Gauge> = add("qualification_age_seconds",
        "Seconds since the model's qualification");

    pub qualification_max_age: Gauge = add("qualification_max_age_seconds",
        "Age of a qualification at which its model is not served any more");

    // The ledger.
    backup_age: By<1, Gauge> = add("backup_age_seconds",
        "Seconds since the last backup that is known, by what it holds: node, ledger");
    audit_age: By<1, Gauge> = add("ledger_audit_age_seconds",
        "Seconds since the last audit of the ledger, by what it covered: everything");
    disk_free: Gauge = add("disk_free_bytes", "Bytes free where the ledger is kept");
    ledger_files: By<1, Gauge> = add("ledger_file_bytes",
        "Bytes that the ledger's files take, by what they hold: ledger, answers, journal");
    open_reservations: Gauge = add("ledger_open_reservations",
        "Requests that hold a reservation now");
    audit_ok: Gauge = add("ledger_audit_ok",
        "1 while the ledger commits and no audit has failed, else 0");
    violations: Counter = add("ledger_violations",
        "Broken rules that audits and commands have found since the node's start");
    oldest_reservation: Ratio = add("ledger_oldest_reservation_seconds",
        "Age of the oldest open reservation in seconds, 0 when there is none");
    budget_alerts: By<1, Counter> = add("budget_alerts",
        "Budgets whose charges reached the percentage at which operators are told, since the \
         node's start, by budget: account_day, account_month, key_day, key_month");
    releases: By<1, Counter> = add("ledger_releases",
        "Reservations that ended uncharged since the node's start, by cause");
}

fn add<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

/// `add` under the names that exporters of all programs use.
fn of_process<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    add(registry, name, help)
}

fn tell_version(own: &mut Registry) {
    own.register("build", "The program's version", Info::new([("version", VERSION)]));
}

/// A histogram for each value of a label.
fn histograms<const LABELS: usize>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    new: fn() -> Histogram,
) -> By<LABELS, Histogram> {
    let metric = Family::new_with_constructor(new);
    registry.register(name, help, metric.clone());
    metric
}

fn histogram(registry: &mut Registry, name: &str, help: &str, buckets: &[f64]) -> Histogram {
    let metric = Histogram::new(buckets.iter().copied());
    registry.register(name, help, metric.clone());
    metric
}

/// The metrics of one model's requests. A request finds them once, not for each of its tokens.
#[derive(Clone, Debug)]
pub struct ModelMetrics {
    pub time_to_first_token: Histogram,
    pub inter_token_latency: Histogram,
    pub queue_time: Histogram,
    pub prefill_time: Histogram,
    pub decode_time: Histogram,
    pub time_per_token: Histogram,
    prompt_length: Histogram,
    answer_length: Histogram,
    pub request_latency: Histogram,
    pub charged_units: Counter,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generation_tokens: Counter,
    generated: Counter,
}

impl ModelMetrics {
    pub fn tokens(&self, prompt: u32, cached: u32, generated: u32) {
        self.prompt_length.observe(prompt.into());
        self.answer_length.observe(generated.into());
        self.prompt_tokens.inc_by(prompt.into());
        self.cached_tokens.inc_by(cached.into());
        self.generation_tokens.inc_by(generated.into());
        self.generated.inc_by(generated.into());
    }
}

/// Requests to a gateway.
#[derive(Clone, Debug)]
pub struct GatewayMetrics {
    requests: By<3, Counter>,
    latency: By<2, Histogram>,
    tokens: By<2, Counter>,
}

impl GatewayMetrics {
    fn of(own: &mut Registry) -> Self {
        Self {
            requests: add(
                own,
                "gateway_requests",
                "Requests that the gateway answered, by dialect, route and status; the status is 0 \
                 when the client went away before there was one",
            ),
            latency: histograms(
                own,
                "gateway_request_seconds",
                "Seconds from a request to the gateway until its answer was sent, by dialect and \
                 route",
                || Histogram::new(REQUEST),
            ),
            tokens: add(
                own,
                "gateway_tokens",
                "Tokens of answers that the gateway sent, by dialect and kind: prompt, generation",
            ),
        }
    }

    /// Counts a request. Neither `dialect` nor `route` is chosen by a client.
    pub fn answered(
        &self,
        dialect: &'static str,
        route: &'static str,
        status: Option<u16>,
        took: Duration,
    ) {
        let (dialect, route) = (("dialect", dialect.to_owned()), ("route", route.to_owned()));
        let status = ("status", status.unwrap_or_default().to_string());
        self.requests.get_or_create(&[dialect.clone(), route.clone(), status]).inc();
        self.latency.get_or_create(&[dialect, route]).observe(took.as_secs_f64());
    }

    /// `kind` is `prompt` or `generation`.
    pub fn count_tokens(&self, dialect: &'static str, kind: &'static str, tokens: u64) {
        let labels = [("dialect", dialect.to_owned()), ("kind", kind.to_owned())];
        self.tokens.get_or_create(&labels).inc_by(tokens);
    }
}

/// The metrics of a gateway in a process of its own.
#[derive(Debug)]
pub struct RelayMetrics {
    registry: Registry,
    process: ProcessMetrics,
    pub gateway: GatewayMetrics,
    pub spans: SpanCounts,
    pub certificates: CertificateEnds,
}

impl RelayMetrics {
    /// `started_at` is Unix time, seconds.
    pub fn new(started_at: u64) -> Self {
        let mut registry = Registry::default();
        let process = ProcessMetrics::of(&mut registry);
        process.started.set(started_at as i64);
        let own = registry.sub_registry_with_prefix("cresset");
        let (gateway, spans) = (GatewayMetrics::of(own), SpanCounts::of(own));
        let certificates = CertificateEnds::of(own);
        tell_version(own);
        Self { registry, process, gateway, spans, certificates }
    }

    /// All metrics in OpenMetrics text form, with the `process` as it is now.
    pub fn text(&self, process: ProcessSample) -> String {
        self.process.sample(process);
        told(&self.registry)
    }
}

/// What became of the ended spans of traces.
#[derive(Clone, Debug)]
pub struct SpanCounts(By<1, Counter>);

impl SpanCounts {
    fn of(own: &mut Registry) -> Self {
        Self(add(
            own,
            "trace_spans",
            "Ended spans by what became of them: sent, failed (the collector did not take them), \
             dropped (too many waited)",
        ))
    }

    /// `result` is `sent`, `failed` or `dropped`.
    pub fn add(&self, result: &'static str, spans: u64) {
        self.0.get_or_create(&[("result", result.to_owned())]).inc_by(spans);
    }
}

/// When the certificates of listeners end.
#[derive(Clone, Debug)]
pub struct CertificateEnds(By<1, Gauge>);

impl CertificateEnds {
    fn of(own: &mut Registry) -> Self {
        Self(add(
            own,
            "certificate_not_after_seconds",
            "Unix time after which the TLS certificate of a listener is not valid, by listener: \
             public, operator, gateway, cluster",
        ))
    }

    /// `at` is Unix time, seconds.
    pub fn set(&self, listener: &'static str, at: u64) {
        self.0.get_or_create(&[("listener", listener.to_owned())]).set(at as i64);
    }
}

/// Memory, files and processor time of the process.
#[derive(Debug)]
struct ProcessMetrics {
    resident: Gauge,
    open_files: Gauge,
    processor: Counter<f64, AtomicU64>,
    started: Gauge,
}

impl ProcessMetrics {
    fn of(registry: &mut Registry) -> Self {
        let all = registry.sub_registry_with_prefix("process");
        Self {
            resident: of_process(all, "resident_memory_bytes", "Memory of the process now, bytes"),
            open_files: of_process(all, "open_fds", "Files and connections that are open now"),
            processor: of_process(all, "cpu_seconds", "Processor time used so far, seconds"),
            started: of_process(
                all,
                "start_time_seconds",
                "Unix time at which the process started",
            ),
        }
    }
}

impl ProcessMetrics {
    fn sample(&self, sample: ProcessSample) {
        self.resident.set(sample.resident_bytes as i64);
        self.open_files.set(sample.open_files as i64);
        let seconds = sample.processor.as_secs_f64();
        self.processor.inner().store(seconds.to_bits(), Ordering::Relaxed);
    }
}

/// The process at a scrape.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessSample {
    pub resident_bytes: u64,
    pub open_files: usize,
    pub processor: Duration,
}

impl ProcessSample {
    /// The figures that the system has of this process; zero where it has none.
    pub fn take() -> Self {
        Self {
            resident_bytes: resident_bytes().unwrap_or_default(),
            open_files: std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count),
            processor: Duration::try_from(clock_gettime(ClockId::ProcessCPUTime))
                .unwrap_or_default(),
        }
    }
}

impl Metrics {
    /// The metrics of requests of a model.
    pub fn of_model(&self, model: &str) -> ModelMetrics {
        let label = &[("model", model.to_owned())];
        ModelMetrics {
            time_to_first_token: self.time_to_first_token.get_or_create_owned(label),
            inter_token_latency: self.inter_token_latency.get_or_create_owned(label),
            queue_time: self.queue_time.get_or_create_owned(label),
            prefill_time: self.prefill_time.get_or_create_owned(label),
            decode_time: self.decode_time.get_or_create_owned(label),
            time_per_token: self.time_per_token.get_or_create_owned(label),
            prompt_length: self.prompt_length.get_or_create_owned(label),
            answer_length: self.answer_length.get_or_create_owned(label),
            request_latency: self.request_latency.get_or_create_owned(label),
            charged_units: self.charged_units.get_or_create_owned(label),
            prompt_tokens: self.prompt_tokens.get_or_create_owned(label),
            cached_tokens: self.cached_tokens.get_or_create_owned(label),
            generation_tokens: self.generation_tokens.get_or_create_owned(label),
            generated: self.generated.clone(),
        }
    }

    pub fn sample_process(&self, sample: ProcessSample) {
        self.process.sample(sample);
    }

    /// `at` is Unix time, seconds.
    pub fn started_at(&self, at: u64) {
        self.process.started.set(at as i64);
    }

    pub fn http_response(&self, status: u16, code: &'static str) {
        self.responses
            .get_or_create(&[("status", status.to_string()), ("code", code.to_owned())])
            .inc();
    }

    /// `result` is `answered`, `unreachable`, `broken` or `received`.
    pub fn forwarded(&self, result: &'static str) {
        self.forwarded.get_or_create(&[("result", result.to_owned())]).inc();
    }

    /// `kind` is `unknown`, `ended` or `too_many`.
    pub fn wrong_operator_token(&self, kind: &'static str) {
        self.wrong_operator_tokens.get_or_create(&[("kind", kind.to_owned())]).inc();
    }

    /// `end` is `completed`, `cancelled` or `failed`.
    pub fn request_ended(&self, end: &'static str) {
        self.requests.get_or_create(&[("end", end.to_owned())]).inc();
    }

    /// Counts a request that was refused because a limit of its account is reached. `plan` is a
    /// name of the configuration.
    pub fn limit_reached(&self, plan: &str, limit: &'static str) {
        let labels = [("plan", plan.to_owned()), ("limit", limit.to_owned())];
        self.limit_refusals.get_or_create(&labels).inc();
    }

    /// Counts a request that failed in the engine. `kind` is the name of the error's kind.
    pub fn engine_failed(&self, kind: &'static str) {
        self.engine_failures.get_or_create(&[("kind", kind.to_owned())]).inc();
    }

    /// Output tokens of requests that were settled since the start.
    pub fn generated_tokens(&self) -> u64 {
        self.generated.get()
    }

    /// All metrics in OpenMetrics text form.
    pub fn text(&self) -> String {
        told(&self.registry)
    }
}

fn told(registry: &Registry) -> String {
    let mut text = String::new();
    encode(&mut text, registry).expect("invariant: writing to a string does not fail");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_base::EngineStats;
    use cresset_store::StoreStats;
    use std::collections::BTreeMap;

    fn assert_told(text: &str, line: &str) {
        assert!(text.lines().any(|told| told == line), "{line} is not in\n{text}");
    }

    #[test]
    fn steps_limits_and_ages_are_told() {
        let metrics = Metrics::default();
        metrics.limit_reached("default", "plan_tokens");
        metrics.sample_care([("node", Some(60)), ("ledger", None)], Some(70));
        let stats = EngineStats {
            blocks_total: 4,
            steps: 5,
            prompt_tokens: 9,
            prefix_hit_tokens: 4,
            generated_tokens: 2,
            ..EngineStats::default()
        };
        metrics.sample_engine("m", false, &stats);
        metrics.kv_block_tokens.set(16);
        for blocks_used in [1, 3] {
            let busy = EngineStats { running: 2, waiting: 3, blocks_used, ..stats.clone() };
            metrics.sample_engines(&[busy, stats.clone(), EngineStats::default()]);
        }
        let text = metrics.text();
        for line in [
            "cresset_node_requests_running 2",
            "cresset_node_requests_waiting 3",
            "cresset_node_kv_cache_usage_ratio 0.375",
            "cresset_cache_config_info{block_size=\"16\",num_gpu_blocks=\"8\"} 1",
            "cresset_kv_cache_blocks{model=\"m\"} 4",
            "cresset_engine_steps_total{model=\"m\"} 5",
            "cresset_engine_step_tokens_total{model=\"m\"} 7",
            "cresset_prefix_cache_query_tokens_total{model=\"m\"} 9",
            "cresset_limit_refusals_total{plan=\"default\",limit=\"plan_tokens\"} 1",
            "cresset_backup_age_seconds{kind=\"node\"} 60",
            "cresset_ledger_audit_age_seconds{covered=\"everything\"} 70",
        ] {
            assert_told(&text, line);
        }
        assert!(!text.contains("kind=\"ledger\""), "an age that is not known is not told");
    }

    #[test]
    fn every_metric_is_documented_and_told() {
        let metrics = Metrics::default();
        metrics.http_response(200, "ok");
        metrics.request_ended("completed");
        metrics.engine_failed("device_lost");
        metrics.sample_model_failures(&BTreeMap::from([("out_of_memory", 2)]));
        let of_model = metrics.of_model("m");
        of_model.tokens(5, 2, 3);
        of_model.time_to_first_token.observe(0.02);
        let processor = Duration::from_millis(2_500);
        metrics.sample_process(ProcessSample { open_files: 9, processor, ..Default::default() });
        metrics.sample_node(3, true, false);
        metrics.sample_ledger(&StoreStats {
            oldest_reservation_ms: 1_500,
            releases: BTreeMap::from([("draining", 2)]),
            free_bytes: Some(7),
            file_bytes: BTreeMap::from([("answers", 8)]),
            budget_alerts: BTreeMap::from([("key_day", 3)]),
            ..StoreStats::default()
        });
        metrics.gateway.answered("ollama", "/api/chat", None, Duration::from_secs(1));
        metrics.gateway.count_tokens("ollama", "prompt", 7);
        metrics.sample_qualification("m", 5);
        metrics.spans.add("dropped", 2);
        let stats =
            EngineStats { running: 1, blocks_total: 4, blocks_used: 1, ..EngineStats::default() };
        metrics.sample_engine("m", false, &stats);
        let text = metrics.text();
        for line in [
            "cresset_http_responses_total{status=\"200\",code=\"ok\"} 1",
            "cresset_requests_total{end=\"completed\"} 1",
            "cresset_engine_failures_total{kind=\"device_lost\"} 1",
            "cresset_model_failures_total{kind=\"out_of_memory\"} 2",
            "cresset_prompt_tokens_total{model=\"m\"} 5",
            "cresset_generation_tokens_total{model=\"m\"} 3",
            "process_open_fds 9",
            "process_cpu_seconds_total 2.5",
            concat!("cresset_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
            "cresset_kv_cache_usage_ratio{model=\"m\"} 0.25",
            "cresset_ledger_open_reservations 3",
            "cresset_ledger_audit_ok 1",
            "cresset_ledger_violations_total 0",
            "cresset_ledger_oldest_reservation_seconds 1.5",
            "cresset_ledger_releases_total{cause=\"draining\"} 2",
            "cresset_ready 0",
            "cresset_disk_free_bytes 7",
            "cresset_ledger_file_bytes{file=\"answers\"} 8",
            "cresset_gateway_requests_total\
             {dialect=\"ollama\",route=\"/api/chat\",status=\"0\"} 1",
            "cresset_gateway_tokens_total{dialect=\"ollama\",kind=\"prompt\"} 7",
            "cresset_trace_spans_total{result=\"dropped\"} 2",
            "cresset_qualification_age_seconds{model=\"m\"} 5",
            "cresset_request_prompt_tokens_sum{model=\"m\"} 5.0",
            "cresset_time_to_first_token_seconds_count{model=\"m\"} 1",
        ] {
            assert_told(&text, line);
        }
        let helps = text.lines().filter(|l| l.starts_with("# HELP")).count();
        let types = text.lines().filter(|l| l.starts_with("# TYPE")).count();
        assert!(helps == types && helps > 15);
    }
}
