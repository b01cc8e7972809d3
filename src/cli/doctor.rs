//! `cresset doctor`: finds problems on this machine, and names the commands that mend them.

use super::status::RENEWAL;
use super::support::context::{Context, Globals, data_dir, load_config};
use super::support::output::{CommandError, CommandResult, Output, Style, note, style};
use super::support::text;
use cresset_base::memory::memory_bytes;
use cresset_base::{Clock, SystemClock, UnixMillis, shown_now};
use cresset_catalogue::{Catalogue, QualifiedModel};
use cresset_commands::AdminCommand;
use cresset_node::config::Config;
use cresset_node::{ComputeDevice, GpuSensor, NodeError, cluster, instruction_set, private_files};
use cresset_store::Store;
use cresset_telemetry::traces;
use cresset_tls::{TlsListeners, ends_soon};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;

/// Free memory, bytes, below which there is a warning: even the default release may then run short
/// of it.
const LOW_MEMORY: u64 = 1 << 30;
/// Free disk space, bytes, below which there is a warning: four times the space below which the
/// ledger admits no work by default (`requests.min_free_mib`).
const LOW_DISK: u64 = 2 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Severity {
    Good,
    Warning,
    Wrong,
}

/// The result of one check. A result that is not good comes with a remedy.
#[derive(Debug, Serialize)]
struct Finding {
    check: &'static str,
    verdict: Severity,
    detail: String,
    remedy: Option<String>,
}

impl Finding {
    fn good(check: &'static str, detail: impl Into<String>) -> Self {
        Self { check, verdict: Severity::Good, detail: detail.into(), remedy: None }
    }

    fn warning(check: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        let remedy = Some(remedy.into());
        Self { verdict: Severity::Warning, remedy, ..Self::good(check, detail) }
    }

    fn wrong(check: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { verdict: Severity::Wrong, ..Self::warning(check, detail, remedy) }
    }
}

/// Fails when something is wrong; warnings alone do not.
pub(super) async fn run(globals: &Globals) -> CommandResult {
    let findings = examine(globals).await?;
    let ok = findings.iter().all(|finding| finding.verdict != Severity::Wrong);
    let document = json!({ "ok": ok, "checks": findings });
    Output { json: globals.json }.result(&document, report)?;
    if ok { Ok(()) } else { Err(CommandError::Negative) }
}

async fn examine(globals: &Globals) -> CommandResult<Vec<Finding>> {
    let dir = data_dir(globals)?;
    let mut findings = vec![memory(), disk(&dir)];
    match load_config(globals, &dir, &[]) {
        Err(failure) => {
            findings.push(Finding::wrong(
                "configuration",
                failure.to_string(),
                "correct it; see `cresset config schema`",
            ));
        }
        Ok(loaded) => {
            findings
                .push(Finding::good("configuration", format!("{} keys set", loaded.origins.len())));
            let context = Context::new(dir, loaded.config, Output { json: globals.json });
            findings.extend(gpu(&context));
            findings.extend(gpu_conditions(&context));
            findings.push(fetching(&context.config));
            findings.extend(collector(&context.config));
            findings.extend(folder(&context).await);
        }
    }
    // The configuration may have chosen the instruction set.
    findings.insert(0, processor());
    Ok(findings)
}

fn processor() -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let instructions = instruction_set();
    let detail = format!("{} with {cores} cores, {instructions}", std::env::consts::ARCH);
    if instructions == "portable" {
        return Finding::warning(
            "processor",
            detail,
            "models run, but slowly: set engine.instruction_set to auto, or use a machine with \
             AVX2 or AVX-512",
        );
    }
    Finding::good("processor", detail)
}

fn memory() -> Finding {
    let Some(available) = memory_bytes("MemAvailable") else {
        return Finding::warning("memory", "cannot be read here", "see that 1 GiB or more is free");
    };
    let detail = format!("{} available", text::mebibytes(available));
    if available < LOW_MEMORY {
        return Finding::warning(
            "memory",
            detail,
            "free some, or lower engine.kv_mib in the configuration",
        );
    }
    Finding::good("memory", detail)
}

fn disk(data_dir: &Path) -> Finding {
    let existing = data_dir.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match rustix::fs::statvfs(existing) {
        Err(error) => Finding::warning(
            "disk",
            format!("{}: {error}", existing.display()),
            "check the file system",
        ),
        Ok(found) => {
            let free = found.f_bavail * found.f_frsize;
            let detail = format!("{} free at {}", text::mebibytes(free), existing.display());
            if free < LOW_DISK {
                return Finding::warning("disk", detail, more_space(data_dir));
            }
            Finding::good("disk", detail)
        }
    }
}

/// What frees space: a part of a pull comes first, which nobody uses.
fn more_space(data_dir: &Path) -> String {
    let parts = Catalogue::new(data_dir).parts().unwrap_or_default();
    let freed = parts.iter().map(|(name, bytes)| {
        format!("`cresset models remove {name}` frees {}, ", text::mebibytes(*bytes))
    });
    freed.collect::<String>() + "free some space, or move the data folder with --data-dir"
}

/// Whether models run on a GPU; `None` when none is expected.
fn gpu(context: &Context) -> Option<Finding> {
    let device = match context.assembly() {
        Ok(assembly) => &assembly.device,
        Err(CommandError::Message { what, remedy }) => {
            return Some(Finding::wrong("gpu", what, remedy.unwrap_or_default()));
        }
        Err(_) => return None,
    };
    let detail = format!("models run {}", device.sentence()?);
    Some(match device {
        ComputeDevice::Gpu { .. } => Finding::good("gpu", detail),
        ComputeDevice::Cpu { .. } => Finding::warning(
            "gpu",
            detail,
            "do what it says, or set engine.device to \"cpu\" if no GPU is to be used",
        ),
    })
}

/// The condition of each GPU that models run on.
fn gpu_conditions(context: &Context) -> Vec<Finding> {
    let Ok(assembly) = context.assembly() else { return Vec::new() };
    let sensors = assembly.devices().flat_map(ComputeDevice::sensors);
    sensors.map(|(name, sensor)| gpu_condition(&name, sensor)).collect()
}

fn gpu_condition(name: &str, sensor: Result<GpuSensor, String>) -> Finding {
    const CHECK: &str = "gpu condition";
    let health = match sensor {
        Ok(sensor) => sensor.read(),
        Err(why) => return Finding::good(CHECK, format!("{name}: not known, as {why}")),
    };
    let concerns = health.concerns();
    if concerns.is_empty() {
        return Finding::good(CHECK, format!("{name}: {health}"));
    }
    let detail = format!("{name}: {health}; {}", concerns.join(", and "));
    let remedy = "see `nvidia-smi -q`: cool it, or reset it (`nvidia-smi -r`) and have it replaced \
                  if that repeats";
    Finding::warning(CHECK, detail, remedy)
}

/// Whether pip is here: `models pull` and `quickstart` need it if they cannot reach the model hub.
fn fetching(config: &Config) -> Finding {
    let python = config.hub.python.display().to_string();
    let found =
        std::process::Command::new(&config.hub.python).args(["-m", "pip", "--version"]).output();
    match found {
        Ok(output) if output.status.success() => {
            Finding::good("fetching", format!("{python} with pip"))
        }
        _ => Finding::warning(
            "fetching",
            format!("{python} has no pip: releases come from the model hub only"),
            "install python3-pip, or set hub.python",
        ),
    }
}

/// Whether the collector of traces answers; `None` when there is none.
fn collector(config: &Config) -> Option<Finding> {
    let endpoint = config.traces.endpoint.as_deref()?;
    Some(match traces::probe(&config.traces)? {
        Ok(()) => Finding::good("traces", format!("the collector at {endpoint} answers")),
        Err(why) => Finding::warning(
            "traces",
            why,
            "start a collector that takes OTLP over HTTP there, or correct traces.endpoint",
        ),
    })
}

/// The certificate, the ledger, the node and its models, or the ports that a node would take.
async fn folder(context: &Context) -> Vec<Finding> {
    let status = context.ask_node(&AdminCommand::Status).await.ok().flatten();
    let certificates = certificates(&context.config, status.as_ref());
    certificates.into_iter().chain(data_folder(context, status).await).collect()
}

/// The certificates that the listeners of clients and operators, and that of other nodes show.
fn certificates(config: &Config, status: Option<&Value>) -> Vec<Finding> {
    const OWN: &str = "certificate";
    const PEERS: &str = "certificate for other nodes";
    let shown = |whose: &dyn Fn(&str) -> bool| {
        let mut all = status?["certificates"].as_array()?.iter();
        all.find(|shown| shown["listener"].as_str().is_some_and(whose))?["ends_at"].as_u64()
    };
    let own = TlsListeners::read(&config.tls).map(|tls| {
        let ends = config.tls.listeners.iter().find_map(|name| tls.not_after(*name))?;
        Some(certificate(OWN, ends, shown(&|name| name != "cluster")))
    });
    let peers = cluster::read(TlsListeners::default(), &config.cluster).map(|tls| {
        let ends = tls.peers()?.not_after()?;
        Some(certificate(PEERS, ends, shown(&|name| name == "cluster")))
    });
    let wrong =
        |check, remedy: &'static str| move |why: String| Some(Finding::wrong(check, why, remedy));
    let own = own.unwrap_or_else(wrong(OWN, "check tls.certificate and tls.key"));
    let peers = peers.unwrap_or_else(wrong(PEERS, cluster::REMEDY));
    own.into_iter().chain(peers).collect()
}

/// A certificate whose file ends at a Unix time, seconds. A running node shows the one that it read
/// last.
fn certificate(check: &'static str, ends: u64, shown: Option<u64>) -> Finding {
    if let Some(shown) = shown.filter(|shown| *shown != ends) {
        let [shown, ends] = [shown, ends].map(text::utc);
        let detail = format!("the node shows one that ends at {shown}, the file's ends at {ends}");
        return Finding::warning(check, detail, "cresset reload");
    }
    let now = shown_now().seconds();
    match ends_soon(ends, now) {
        None => Finding::good(check, format!("ends at {}", text::utc(ends))),
        Some(soon) if ends < now => Finding::wrong(check, soon, "renew it, then cresset reload"),
        Some(soon) => Finding::warning(check, soon, "renew it, then cresset reload"),
    }
}

async fn data_folder(context: &Context, status: Option<Value>) -> Vec<Finding> {
    let shown = context.data_dir.display();
    let place = match cresset_node::ledger::place(&context.data_dir, &context.config) {
        Ok(place) => place,
        Err(error) => return vec![misplaced(error)],
    };
    if !Store::exists(&place) {
        let what = format!("there is none in {shown}");
        let missing = Finding::warning("ledger", what, "cresset init (or cresset quickstart)");
        return std::iter::once(missing).chain(ports(&context.config)).collect();
    }
    let mut findings = vec![ledger(context).await, privacy(&context.data_dir)];
    findings.extend(failover(&context.config));
    if let Some(status) = status {
        findings.push(node(&status));
        let stored = status["ledger_time_at"].as_u64().unwrap_or(0);
        findings.push(clock(&context.config, UnixMillis(stored * 1_000)));
    } else {
        let stored = Store::stored_time(&place);
        findings.extend(stored.ok().map(|stored| clock(&context.config, stored)));
        findings.extend(ports(&context.config));
    }
    findings.push(models(context));
    findings
}

fn misplaced(NodeError { message, remedy }: NodeError) -> Finding {
    let remedy = remedy.unwrap_or_else(|| "correct the setting".into());
    Finding::wrong("ledger", message, remedy)
}

/// What a failover of the ledger's database may lose.
fn failover(config: &Config) -> Option<Finding> {
    let remedy = "add a synchronous standby, name it in the server's synchronous_standby_names, and set ledger.standbys";
    cresset_node::ledger::failover_warning(config)
        .map(|what| Finding::warning("standbys", what, remedy))
}

async fn ledger(context: &Context) -> Finding {
    let restore = match context.config.ledger.url {
        None => "cresset ledger audit, then cresset ledger restore FILE",
        Some(_) => "do what it says; cresset ledger audit names violations",
    };
    match super::ledger::report(context).await {
        Err(failure) => Finding::wrong("ledger", failure.to_string(), restore),
        Ok(report) if report["ok"] == true => Finding::good(
            "ledger",
            format!("{} entries, every invariant holds", report["checked"]["entries"]),
        ),
        Ok(report) => {
            let violations = report["violations"].as_array().map_or(0, Vec::len);
            Finding::wrong("ledger", format!("{violations} invariants are violated"), restore)
        }
    }
}

/// Whether this machine's clock fits the ledger's time.
fn clock(config: &Config, stored: UnixMillis) -> Finding {
    let shown = shown_now();
    let ahead = shown.seconds() as i64 - stored.seconds() as i64;
    match cresset_node::ledger::limits(config).clock.judge(shown, stored) {
        Ok(()) => Finding::good(
            "clock",
            format!(
                "{shown}; the last time in the ledger is {stored}: the clock is {}",
                text::ahead(ahead)
            ),
        ),
        Err(why) => Finding::wrong(
            "clock",
            why,
            "set the clock and restart the node; or give a command --accept-clock while the node is stopped",
        ),
    }
}

/// Whether other users of the machine can open what only the node may read.
fn privacy(data_dir: &Path) -> Finding {
    let open = private_files::open_to_others(data_dir);
    match open.first() {
        None => Finding::good("file rights", "no other user can open the ledger or the records"),
        Some(first) => Finding::warning(
            "file rights",
            format!("other users can open {} files, such as {}", open.len(), first.display()),
            format!("start the node, or chmod go= {}/*", data_dir.display()),
        ),
    }
}

fn node(status: &Value) -> Finding {
    match status["reason"].as_str() {
        None => {
            Finding::good("node", format!("ready on {}", status["listen"].as_str().unwrap_or("-")))
        }
        Some(reason) => Finding::wrong("node", reason, "cresset status"),
    }
}

fn servable(context: &Context) -> CommandResult<Vec<QualifiedModel>> {
    let servable = context.assembly()?.servable(&[])?;
    servable.refused.iter().for_each(|why| note(&format!("not served: {why}")));
    Ok(servable.models)
}

fn models(context: &Context) -> Finding {
    match servable(context) {
        Ok(models) if models.is_empty() => {
            Finding::warning("models", "there is no model to serve", "cresset run NAME")
        }
        Ok(models) => {
            let name = |model: &QualifiedModel| model.manifest().name.clone();
            let first = models.iter().min_by_key(|model| model.proof_ends_at());
            let ends = |model| {
                let ends =
                    ends_soon(QualifiedModel::proof_ends_at(model), SystemClock.now().seconds())?;
                Some(format!("the proof of {} {ends}", name(model)))
            };
            if let Some(ends) = first.and_then(ends) {
                return Finding::warning("models", ends, RENEWAL);
            }
            let names: Vec<String> = models.iter().map(name).collect();
            Finding::good("models", format!("qualified: {}", names.join(", ")))
        }
        Err(failure) => Finding::wrong("models", failure.to_string(), "cresset models list"),
    }
}

/// The ports that a node would take.
fn ports(config: &Config) -> [Finding; 2] {
    [port("port", config.listen.public), port("operator port", config.listen.operator)]
}

fn port(check: &'static str, address: SocketAddr) -> Finding {
    match TcpListener::bind(address) {
        Ok(_) => Finding::good(check, format!("{address} is free")),
        Err(error) => Finding::wrong(
            check,
            format!("{address}: {error}"),
            "stop what uses it, or set another under [listen]",
        ),
    }
}

fn report(document: &Value) -> String {
    let checks = document["checks"].as_array().map_or(&[][..], Vec::as_slice);
    checks.iter().fold(String::new(), |mut out, finding| {
        let sign = match finding["verdict"].as_str() {
            Some("good") => style(Style::Good, "ok   "),
            Some("warning") => style(Style::Warning, "warn "),
            _ => style(Style::Error, "WRONG"),
        };
        let word = |name: &str| finding[name].as_str().unwrap_or_default();
        let _ = writeln!(out, "{sign}  {:14} {}", word("check"), word("detail"));
        if let Some(remedy) = finding["remedy"].as_str() {
            let _ = writeln!(out, "{:22} mend: {remedy}", "");
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_node::GpuHealth;

    #[test]
    fn a_gpus_condition_is_told_and_warned_of_and_never_wrong() {
        let check = |sensor: Result<GpuHealth, &str>, verdict, detail: &str| {
            let sensor = sensor.map(|health| GpuSensor::new(move || health.clone()));
            let found = gpu_condition("cuda:0", sensor.map_err(str::to_owned));
            assert_eq!((found.verdict, found.detail.as_str()), (verdict, detail));
            assert_eq!(found.remedy.is_some(), verdict == Severity::Warning);
        };
        let why = "libnvidia-ml.so.1 cannot be loaded";
        let unknown = "cuda:0: not known, as libnvidia-ml.so.1 cannot be loaded";
        check(Err(why), Severity::Good, unknown);
        let cool = GpuHealth { celsius: Some(41), ..GpuHealth::default() };
        check(Ok(cool.clone()), Severity::Good, "cuda:0: 41 °C");
        let broken = GpuHealth { uncorrected_errors: Some(1), ..cool };
        let told = "cuda:0: 41 °C, uncorrected errors: 1; its memory had errors that it could not \
                    correct";
        check(Ok(broken), Severity::Warning, told);
    }
}
