//! Reports what the node is doing, for `cresset status` and for the readiness check.

use super::{Live, StartState, budgets, gpus, view};
use cresset_base::memory::resident_bytes;
use cresset_base::{UnixMillis, shown_now};
use cresset_catalogue::FailedContext;
use cresset_engine::EngineStats;
use cresset_pool::{DeviceView, ModelView};
use cresset_request::{RecentError, Services};
use cresset_tls::{ListenerName, ends_soon};
use serde_json::{Value, json};

/// Why new work would be refused now; `None` when the node is ready.
pub fn not_ready_because(live: &Live) -> Option<String> {
    live.start.not_ready_because().or_else(|| unavailable_because(&live.node).map(str::to_owned))
}

const NO_MODEL: &str = "no model is served yet: `cresset run NAME` fetches, proves and serves one, \
                        and `cresset models list` shows those that are here";

fn unavailable_because(node: &Services) -> Option<&'static str> {
    if node.is_draining() {
        Some("the node is draining: it finishes what runs and then stops")
    } else if !node.store.healthy() {
        Some(
            "the ledger does not commit, or an audit of it failed: see the log and `cresset ledger audit`",
        )
    } else if let Some(reason) = node.store.admission_block() {
        Some(reason)
    } else if node.pool.is_stalled() {
        Some("a model's engine does not finish its step: see `cresset status` and the log")
    } else if node.pool.is_ready() {
        None
    } else if node.pool.views().is_empty() {
        Some(NO_MODEL)
    } else if node.pool.views().iter().any(|view| view.failure.is_some()) {
        Some("no model is loaded, and one failed: see `cresset status` and the log")
    } else {
        Some("no qualified model is loaded")
    }
}

/// The status document of a running node.
pub fn of(live: &Live) -> Value {
    let node = &live.node;
    let reason = not_ready_because(live);
    let models = node.pool.views();
    let stats: Vec<EngineStats> = models.iter().map(ModelView::stats).collect();
    let devices = node.pool.devices();
    let [budget, free] = [|one: &DeviceView| one.budget, |one: &DeviceView| one.free]
        .map(|bytes| devices.iter().map(bytes).sum::<u64>());
    let state = json!({
        "draining": node.is_draining(),
        "ledger_healthy": node.store.healthy(),
        "ledger_time_at": node.store.now().seconds(),
        "ledger_fully_audited_at": node.store.fully_audited_at().map(UnixMillis::seconds),
        "clock_ahead_seconds": shown_now().seconds() as i64 - node.store.now().seconds() as i64,
        "wrong_operator_tokens": live.files.tokens.wrong_ones(),
        "memory_bytes": resident_bytes(),
        "model_memory_bytes": budget - free,
        "model_memory_limit_bytes": budget,
        "requests_running": stats.iter().map(|engine| engine.running).sum::<usize>(),
        "requests_waiting": stats.iter().map(|engine| engine.waiting).sum::<usize>(),
        "generated_tokens_since_start": node.metrics.generated_tokens(),
        "tokens_per_second": stats.iter().map(|engine| engine.tokens_per_second).sum::<f64>(),
        "devices": devices.iter().map(of_device).collect::<Vec<_>>(),
        "gpus": live.gpus.iter().map(gpus::of_gpu).collect::<Vec<_>>(),
        "models": models
            .iter()
            .zip(&stats)
            .map(|(view, stats)| of_model(view, stats))
            .collect::<Vec<_>>(),
        "last_backups": live.files.backups.read(),
        "budget_alerts": budgets::notices(&node.store.budget_notices()),
        "last_errors": node.recent_errors.all().iter().rev().map(of_error).collect::<Vec<_>>(),
    });
    view::merged(of_process(&live.start, reason.as_deref()), state)
}

/// The same document while the ledger is opened and the models are read.
pub fn starting(start: &StartState) -> Value {
    let process = of_process(start, start.not_ready_because().as_deref());
    view::merged(process, json!({ "models": [] }))
}

/// `starting` is what the start is doing, null once it is over.
fn of_process(start: &StartState, not_ready_because: Option<&str>) -> Value {
    json!({
        "running": true,
        "ready": not_ready_because.is_none(),
        "reason": not_ready_because,
        "starting": start.doing(),
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "listen": start.tls.url(ListenerName::Public, start.public),
        "local": start.local.get().map(|address| format!("http://{address}")),
        "operator": start.operator.map(|at| start.tls.url(ListenerName::Operator, at)),
        "gateway": start.gateway.get().map(|at| start.tls.url(ListenerName::Gateway, *at)),
        "certificates": start
            .certificates()
            .map(|(listener, ends_at)| json!({ "listener": listener, "ends_at": ends_at }))
            .collect::<Vec<_>>(),
    })
}

/// The certificate of a status document that ends first, if it is to be renewed, as the words of a
/// sentence. All listeners of clients and operators show one; `now` is in Unix seconds.
pub fn certificate_to_renew(status: &Value, now: u64) -> Option<String> {
    let all = status["certificates"].as_array()?.iter();
    let first = all.min_by_key(|certificate| certificate["ends_at"].as_u64())?;
    let ends = ends_soon(first["ends_at"].as_u64()?, now)?;
    let whose = if first["listener"] == "cluster" { " for other nodes" } else { "" };
    Some(format!("certificate{whose} {ends}"))
}

/// Which model's proof ends first and when, once that is less than two weeks away. A node renews
/// proofs while models are loaded, unless `qualification.background` is off.
pub fn proof_to_renew(status: &Value, now: u64) -> Option<String> {
    let all = status["models"].as_array()?.iter();
    let ends_at = |model: &&Value| model["proof_ends_at"].as_u64().unwrap_or(u64::MAX);
    let first = all.min_by_key(ends_at)?;
    let ends = ends_soon(ends_at(&first), now)?;
    Some(format!("proof of {} {ends}", first["name"].as_str()?))
}

/// The context of a model in a status document or a list, in words.
pub fn context_words(model: &Value) -> String {
    let number = |name: &str| model[name].as_u64().unwrap_or(0);
    let (proven, goal) = (number("qualified_context_tokens"), number("context_goal_tokens"));
    match model["context_state"].as_str() {
        Some(state @ ("rising" | "stopped" | "partial")) => format!("{proven} of {goal}, {state}"),
        _ => proven.to_string(),
    }
}

/// The same document for a node that does not run.
pub fn stopped() -> Value {
    json!({
        "running": false,
        "ready": false,
        "reason": "no node runs on this data folder",
        "version": env!("CARGO_PKG_VERSION"),
        "models": [],
    })
}

fn of_error(error: &RecentError) -> Value {
    json!({ "at": error.at.seconds(), "model": error.model, "message": error.message })
}

fn of_device(device: &DeviceView) -> Value {
    json!({
        "name": device.name,
        "lost": device.is_lost,
        "model_memory_bytes": device.budget - device.free,
        "model_memory_limit_bytes": device.budget,
        "generated_tokens": device.stats.generated_tokens,
        "requests_running": device.stats.running,
        "requests_waiting": device.stats.waiting,
    })
}

/// `requests_active` have the model's engine, `requests_held` wait for the model to be loaded.
fn of_model(view: &ModelView, stats: &EngineStats) -> Value {
    let qualified = &view.model.qualified;
    let state = json!({
        "id": qualified.id(),
        "name": qualified.manifest().name,
        "record_id": qualified.record_id(),
        "grade": qualified.evidence().grade,
        "suite": qualified.evidence().suite,
        "kv_dtype": qualified.evidence().kv_dtype,
        "qualified_at": qualified.evidence().qualified_at,
        "proof_ends_at": qualified.proof_ends_at(),
        "qualified_context_tokens": qualified.qualified_context_tokens(),
        "context_goal_tokens": view.model.context_goal(),
        "context_state": view.model.context_state(),
        "context_failure": qualified.failed_context().map(FailedContext::to_string),
        "accepted_because": qualified.evidence().acceptance.as_ref().map(|found| &found.reason),
        "state": view.state(),
        "alive": !view.engines.is_empty(),
        "failure": view.failure,
        "pinned": view.usage.pinned,
        "bytes": view.usage.bytes,
        "requests_active": view.usage.active,
        "requests_held": view.usage.waiting,
    });
    view::merged(state, json!(stats))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_certificate_that_ends_first_is_named_when_it_is_to_be_renewed() {
        let named =
            |certificates: Value| certificate_to_renew(&json!({ "certificates": certificates }), 0);
        let [soon, late] = [86_400, 1_300_000];
        let of = |listener: &str, ends_at: u64| json!({ "listener": listener, "ends_at": ends_at });
        let ends = "ends at 1970-01-02 00:00:00Z";
        let own = named(json!([of("public", soon), of("cluster", late)]));
        assert_eq!(own.unwrap(), format!("certificate {ends}"));
        let peers = named(json!([of("public", late), of("cluster", soon)]));
        assert_eq!(peers.unwrap(), format!("certificate for other nodes {ends}"));
        assert_eq!(named(json!([of("public", late)])), None);
        assert_eq!(named(json!([])), None);
    }
}
