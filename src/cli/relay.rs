//! `cresset relay`: a gateway of its own, for clients on this machine or near the node that send no
//! headers of theirs, know models by name, or speak in other services' spellings.

use super::support::context::Context;
use super::support::output::{CommandError, CommandResult};
use super::support::{shutdown, values};
use clap::Args;
use cresset_base::shown_now;
use cresset_gateway::{self, Gateway, GatewayOptions, GatewayUpstream, metrics_listener};
use cresset_telemetry::RelayMetrics;
use cresset_telemetry::traces::Traces;
use cresset_tls::{ListenerName, TlsListeners};
use cresset_transport::HttpSettings;
use hyper::Uri;
use serde_json::json;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use tokio::net::TcpListener;
use uuid::Uuid;

/// Largest body taken from a client, bytes. The node may be another machine's, with other limits.
const MAX_BODY: usize = 64 << 20;

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cresset relay --upstream http://127.0.0.1:8080 --key-file quickstart.key
Then give the tool http://127.0.0.1:11435/v1 as its base address.")]
pub(super) struct Arguments {
    /// Address to listen on; a port alone means this machine alone
    #[arg(
        long,
        value_name = "ADDR",
        default_value = "127.0.0.1:11435",
        value_parser = values::listen_address
    )]
    listen: SocketAddr,
    /// The node, as http://host:port or https://host:port
    #[arg(long, value_name = "URL")]
    upstream: Uri,
    /// File with the key to send in place of the client's; only on a loopback address
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// PEM file with certificates of authorities that are trusted besides the public ones, for an
    /// https:// node [default: tls.trusted]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Address of this machine at which /metrics tells the relay's metrics; a port alone is enough
    /// [default: none]
    #[arg(long, value_name = "ADDR", value_parser = values::listen_address)]
    metrics: Option<SocketAddr>,
    /// Session for requests that name none [default: a fresh one for this run]
    #[arg(long, value_name = "UUID")]
    session: Option<Uuid>,
    /// Name besides localhost under which clients address the relay, such as host.docker.internal;
    /// may be repeated
    #[arg(long, value_name = "NAME")]
    host: Vec<String>,
    /// Origin of a web page that may use the relay, such as http://localhost:3000; may be repeated
    #[arg(long, value_name = "URL")]
    origin: Vec<String>,
    /// Further name of a model, such as claude-*=smollm2-135m-instruct; may be repeated
    #[arg(long, value_name = "NAME=MODEL", value_parser = alias)]
    alias: Vec<(String, String)>,
}

/// `NAME=MODEL`.
fn alias(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(name, model)| !name.is_empty() && !model.is_empty());
    let (name, model) = pair.ok_or("give a name and a model, as NAME=MODEL")?;
    Ok((name.to_owned(), model.to_owned()))
}

pub(super) async fn run(context: &Context, arguments: Arguments) -> CommandResult {
    let listener = TcpListener::bind(arguments.listen).await.map_err(|error| {
        CommandError::new(format!("cannot listen on {}: {error}", arguments.listen))
    })?;
    let scraped = match arguments.metrics {
        Some(address) => Some(metrics_listener::bind(address).await.map_err(CommandError::new)?),
        None => None,
    };
    let (listen, upstream) = (listener.local_addr()?, arguments.upstream.clone());
    let session = arguments.session.unwrap_or_else(Uuid::new_v4);
    let trusted = arguments.ca.as_deref().or(context.config.tls.trusted.as_deref());
    let listeners = TlsListeners::read(&context.config.tls).map_err(CommandError::new)?;
    let metrics = RelayMetrics::new(shown_now().seconds());
    if let Some(at) = listeners.not_after(ListenerName::Gateway) {
        metrics.certificates.set(ListenerName::Gateway.word(), at);
    }
    let traces = Traces::start(&context.config.traces, "cresset relay", metrics.spans.clone());
    let options = GatewayOptions {
        upstream: GatewayUpstream::Remote {
            address: arguments.upstream,
            tls: Box::new(cresset_tls::client(trusted).map_err(CommandError::new)?),
        },
        http: HttpSettings { max_body_bytes: MAX_BODY, ..context.config.http.clone() },
        key: arguments.key_file.as_deref().map(key).transpose()?,
        session,
        hosts: arguments.host,
        origins: arguments.origin,
        aliases: arguments.alias.into_iter().collect(),
        metrics: metrics.gateway.clone(),
        traces: traces.clone(),
    };
    let gateway = Gateway::new(options, listen).map_err(CommandError::new)?;
    let address = listeners.url(ListenerName::Gateway, listen);
    let told = scraped.as_ref().map(TcpListener::local_addr).transpose()?;
    let told = told.map(|at| format!("http://{at}/metrics"));
    let ready = json!({ "event": "ready", "listen": address, "session": session, "metrics": told });
    context.output.line(&ready, format!("relaying {address} to {upstream}"))?;
    let tls = listeners.acceptor(ListenerName::Gateway);
    let shutdown = shutdown::on_signal()?;
    if let Some(scraped) = scraped {
        let limits = context.config.http.clone();
        tokio::spawn(metrics_listener::serve(scraped, metrics, limits, shutdown.clone()));
    }
    cresset_gateway::serve(listener, tls, gateway, shutdown).await;
    traces.end().await;
    Ok(())
}

fn key(file: &Path) -> CommandResult<String> {
    std::fs::read_to_string(file).map_err(|error| {
        CommandError::new(format!("{}: {error}", file.display())).remedy("check --key-file")
    })
}
