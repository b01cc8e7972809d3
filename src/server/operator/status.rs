//! What the node is doing, for `cresset status`, readiness and the operator's eyes.

use super::Live;
use crate::engine::handle::EngineStats;
use crate::server::{LoadedModel, Node};
use serde_json::{Value, json};

/// Why new work would be refused now; `None` when the node is ready.
pub fn not_ready_because(node: &Node) -> Option<&'static str> {
    let models = node.models();
    if node.is_draining() {
        Some("the node is draining: it finishes what runs and then stops")
    } else if !node.store.healthy() {
        Some("the ledger does not commit, or an audit of it failed: see the log and `cresset ledger audit`")
    } else if models.is_empty() {
        Some("no qualified model is loaded")
    } else if models.iter().any(|model| !model.engine.is_alive()) {
        Some("an engine has stopped: restart the node and see the log")
    } else {
        None
    }
}

/// The status document of a running node.
pub fn of(live: &Live) -> Value {
    let node = &live.node;
    let reason = not_ready_because(node);
    let models = node.models();
    let stats: Vec<EngineStats> = models.iter().map(|model| model.engine.stats()).collect();
    json!({
        "running": true,
        "ready": reason.is_none(),
        "reason": reason,
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "listen": format!("http://{}", live.public),
        "operator": format!("http://{}", live.operator),
        "draining": node.is_draining(),
        "ledger_healthy": node.store.healthy(),
        "memory_bytes": resident_bytes(),
        "requests_running": stats.iter().map(|engine| engine.running).sum::<usize>(),
        "requests_waiting": stats.iter().map(|engine| engine.waiting).sum::<usize>(),
        "tokens_per_second": stats.iter().map(|engine| engine.tokens_per_second).sum::<f64>(),
        "models": models.iter().zip(&stats).map(|(model, stats)| of_model(model, stats)).collect::<Vec<_>>(),
    })
}

/// The same document where no node runs.
pub fn stopped() -> Value {
    json!({
        "running": false,
        "ready": false,
        "reason": "no node runs on this data folder",
        "version": env!("CARGO_PKG_VERSION"),
        "models": [],
    })
}

fn of_model(model: &LoadedModel, stats: &EngineStats) -> Value {
    json!({
        "id": model.qualified.id(),
        "name": model.qualified.manifest().name,
        "record_id": model.qualified.record_id(),
        "alive": model.engine.is_alive(),
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_blocks_total": stats.blocks_total,
        "kv_blocks_used": stats.blocks_used,
        "steps": stats.steps,
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "preemptions": stats.preemptions,
        "tokens_per_second": stats.tokens_per_second,
    })
}

/// Memory of this process, bytes, where the platform tells.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kibibytes * 1024)
}
