//! `cresset serve`: runs the node until a signal ends it. SIGHUP reads again what may change while
//! it runs.

#[cfg(feature = "prover")]
use super::requalify;
use super::support::context::Context;
use super::support::output::{CommandError, CommandResult, note};
use super::support::{node_client, service_manager, shutdown, values};
use clap::Args;
use cresset_node::PortFallback;
use cresset_node::config::Override;
use serde_json::json;
use std::net::{Ipv4Addr, SocketAddr};
use tokio::signal::unix::{SignalKind, signal};

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cresset serve                                        every qualified model of the data folder
  cresset serve --model smollm2-135m-instruct          this one stays loaded, others come and go
  cresset serve --listen 127.0.0.1:0
  cresset serve --requalify                            after another program or other settings
Models are loaded when a request names them, and the least recently used one makes room \
(engine.memory_mib).
Health, readiness and `cresset status` answer from the first moment and say what the start is \
doing.
SIGTERM or Ctrl-C drains: nothing new is taken, running requests finish. A second one ends at \
once, and so does the first before the node is ready.
When a GPU is lost, which only a new process can mend, it drains too and then exits with 1.
SIGHUP takes over what changed, as `cresset reload` does, and logs it.
A release whose record is too old is proven again by the quick suite before the start. With \
--requalify so is each whose record is of another build, hardware or setting: the node then serves \
with its limits. The full \
suite runs beside the node, at the lowest priority and with the model in memory a second time, \
for each release that is served by a quick record; when it has passed the node serves with its \
limits. It ends with the node, and goes on the next time. No client sees a lower limit if the new \
program runs `cresset qualify NAME --suite full` while the old node still serves.")]
pub(super) struct Arguments {
    /// Load this model, by name or id, at the start and keep it loaded; may be given more than once
    /// [default: at the start as many of the qualified models as fit; none of them is kept loaded]
    #[arg(long, value_name = "NAME")]
    model: Vec<String>,
    /// Address of the public /v1 surface; a port alone means this machine alone, port 0 picks a
    /// free one
    #[arg(long, value_name = "ADDR", value_parser = values::listen_address)]
    listen: Option<SocketAddr>,
    /// The port of --listen, on this machine alone
    #[arg(long, value_name = "PORT", hide = true, conflicts_with = "listen")]
    port: Option<u16>,
    /// Address of the operator surface: health, readiness, metrics
    #[arg(long, value_name = "ADDR", value_parser = values::listen_address)]
    operator: Option<SocketAddr>,
    /// Address of a gateway, for tools that know no ids and send no headers of theirs [default:
    /// none]
    #[arg(long, value_name = "ADDR", value_parser = values::listen_address)]
    gateway: Option<SocketAddr>,
    /// Take the place of the node that runs; `cresset upgrade` starts the new program so
    #[arg(long, hide = true, conflicts_with = "requalify")]
    take_over: bool,
    /// Prove again what an upgrade has made stale: quick before the start, full while it serves
    #[arg(long)]
    requalify: bool,
}

impl Arguments {
    /// The configuration keys that the flags set, with their values.
    pub(super) fn overrides(&self) -> Vec<Override> {
        let flag = |key: &str, address: Option<SocketAddr>| {
            address.map(|at| (key.to_owned(), at.to_string()))
        };
        let port = self.port.map(|port| (Ipv4Addr::LOCALHOST, port).into());
        let flags = [
            flag("listen.public", self.listen.or(port)),
            flag("listen.operator", self.operator),
            flag("gateway.listen", self.gateway),
        ];
        flags.into_iter().flatten().collect()
    }
}

pub(super) async fn run(context: Context, arguments: Arguments) -> CommandResult {
    let shutdown = shutdown::on_signal()?;
    let mut hangup = signal(SignalKind::hangup())?;
    #[cfg(not(feature = "prover"))]
    if arguments.requalify {
        return Err(crate::without::refused("--requalify is given", "prover"));
    }
    #[cfg(feature = "prover")]
    if !arguments.take_over {
        let quick = requalify::quick(context.assembly()?, arguments.requalify);
        tokio::select! {
            done = quick => done?,
            () = shutdown.cancelled() => {
                note("stopped before it was ready");
                return Ok(());
            }
        }
    }
    let assembly = context.assembly()?;
    let starting = async {
        if arguments.take_over {
            return node_client::take_over(assembly, &arguments.model).await;
        }
        node_client::start(assembly, PortFallback::None, &arguments.model).await
    };
    let running = tokio::select! {
        started = starting => started?,
        () = shutdown.cancelled() => {
            note("stopped before it was ready");
            return Ok(());
        }
    };
    let ready = json!({
        "event": "ready",
        "listen": running.public_url(),
        "operator": running.operator_url(),
        "gateway": running.gateway_url(),
        "models": running.models(),
    });
    let tools = running.gateway_url().map(|url| format!("; for tools: {url}/v1"));
    let listening = format!("listening on {}{}", running.public_url(), tools.unwrap_or_default());
    let told = context.output.line(&ready, listening);
    // The reader of the first process's output may have closed it by now, which must not end this
    // node.
    if !arguments.take_over {
        told?;
    }
    if running.models().is_empty() {
        note("no model is served yet: `cresset run NAME` fetches, proves and serves one");
    }
    service_manager::ready();
    #[cfg(feature = "prover")]
    let full = arguments.requalify.then(|| requalify::full(&context)).transpose()?;
    let outcome = loop {
        tokio::select! {
            () = shutdown.cancelled() => break Ok(()),
            _ = hangup.recv() => running.reload().await,
            () = running.handed_over() => break Ok(()),
            () = running.all_devices_lost() => break Err(lost_device()),
        }
    };
    service_manager::stopping();
    note("draining: nothing new is taken; a second signal ends at once");
    #[cfg(feature = "prover")]
    if let Some(full) = full {
        full.end().await;
    }
    running.drain().await;
    outcome
}

/// The failure that ends the process, so that its service manager starts it again.
pub(super) fn lost_device() -> CommandError {
    CommandError::new(
        "the GPU is lost: no call of this process can use it again, so the node ended",
    )
    .remedy("start it again; if that repeats, look for Xid errors in the kernel's log (`dmesg`)")
}
