//! A node in this process: the qualified models, the store behind them, the listeners in front.

#![expect(clippy::disallowed_methods, reason = "the start is timed")]

use super::device;
use super::load;
use super::releases::{cannot_load, servable};
use super::support::context::Context;
use super::support::output::{Failure, Result, note};
use super::support::progress::Progress;
use crate::catalogue::QualifiedModel;
use crate::clock::SystemClock;
use crate::config::ListenSettings;
use crate::ids::ModelId;
use crate::server::operator::{self, socket, status};
use crate::server::{self, Node};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// What to do when a port is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// Say so and stop: the operator asked for this address.
    None,
    /// Take any free one: the address does not matter to whoever asked.
    AnyPort,
}

/// Both listeners, bound before anything slow starts.
pub struct Ports {
    public: TcpListener,
    operator: TcpListener,
}

impl Ports {
    pub async fn bind(listen: &ListenSettings, fallback: Fallback) -> Result<Self> {
        raise_file_limit();
        let public = bind(listen.public, "--listen", fallback).await?;
        let operator = bind(listen.operator, "--operator", fallback).await?;
        Ok(Self { public, operator })
    }
}

/// Many systems let a process have 1 024 files open until it asks for more: fewer than the
/// connections a node may have.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // Refused, connections wait until others end.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

async fn bind(address: SocketAddr, flag: &str, fallback: Fallback) -> Result<TcpListener> {
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == ErrorKind::AddrInUse && fallback == Fallback::AnyPort => {
            note(&format!("{address} is taken; using a free port"));
            Ok(TcpListener::bind(SocketAddr::new(address.ip(), 0)).await?)
        }
        Err(error) => Err(Failure::new(format!("cannot listen on {address}: {error}")).remedy(
            format!("stop what listens there, or choose another address with {flag} ADDR"),
        )),
    }
}

/// A started node. Dropping it without `drain` ends its work at once.
pub struct Running {
    live: Arc<operator::Live>,
    stop: CancellationToken,
    surfaces: JoinSet<()>,
}

/// Opens the ledger, offers every qualified model, loads `pinned` for good (where none is named, as
/// many as fit) and opens the doors.
///
/// Health and the operator socket answer from the beginning; clients are accepted once those models
/// are loaded.
pub async fn start(context: &Context, ports: Ports, pinned: &[String]) -> Result<Running> {
    let store = context.open_store()?;
    let models = servable(context, pinned)?;
    if let Some(place) = device::sentence(&context.config)? {
        note(&format!("models run {place}"));
    }
    let node = Node::new(context.config.clone(), store, Arc::new(SystemClock));
    let (stop, mut surfaces) = (CancellationToken::new(), JoinSet::new());
    let live = Arc::new(operator::Live {
        node: node.clone(),
        public: ports.public.local_addr()?,
        operator: ports.operator.local_addr()?,
    });
    let limits = context.config.http.clone();
    let (routes, operator_stop) = (operator::router(live.clone()), stop.clone());
    let operator_limits = limits.clone();
    surfaces.spawn(async move {
        server::serve(ports.operator, routes, &operator_limits, operator_stop).await;
    });
    let door = socket::bind(&context.data_dir).map_err(|error| {
        Failure::new(format!(
            "cannot open the operator socket in {}: {error}",
            context.data_dir.display()
        ))
    })?;
    let (socket_live, dir, socket_stop) = (live.clone(), context.data_dir.clone(), stop.clone());
    surfaces.spawn(async move { socket::serve(door, socket_live, &dir, socket_stop).await });
    let mut failed = None;
    for (id, name, stays) in offer(context, &node, models, pinned.len()).await? {
        if stays {
            preload(&node, id, &name).await?;
        } else if pinned.is_empty() && node.pool.has_room(id) {
            failed = preload(&node, id, &name).await.err().or(failed);
        }
    }
    if let Some(why) = failed.filter(|_| !node.pool.is_ready()) {
        return Err(why);
    }
    let (routes, public_stop) = (server::router(node.clone()), stop.clone());
    surfaces.spawn(async move { server::serve(ports.public, routes, &limits, public_stop).await });
    Ok(Running { live, stop, surfaces })
}

/// Makes the models known to the node, the first `pinned` ones for good. Another one that can never
/// be loaded is left out.
async fn offer(
    context: &Context,
    node: &Node,
    models: Vec<QualifiedModel>,
    pinned: usize,
) -> Result<Vec<(ModelId, String, bool)>> {
    let mut offered = Vec::new();
    for (index, model) in models.into_iter().enumerate() {
        let stays = index < pinned;
        let (id, name) = (model.id(), model.manifest().name.clone());
        let bytes = load::expected_bytes(&model, &context.config);
        let config = context.config.clone();
        let reading = tokio::task::spawn_blocking(move || load::served(model, &config));
        let served = reading.await.map_err(Failure::new)?.map_err(|why| cannot_load(&name, why))?;
        match node.pool.offer(served, bytes, stays) {
            Ok(()) => offered.push((id, name, stays)),
            Err(why) if stays => {
                return Err(Failure::new(format!("{name} cannot stay loaded: {why}")));
            }
            Err(why) => note(&format!("not served: {name}: {why}")),
        }
    }
    if offered.is_empty() {
        return Err(Failure::new("no qualified model fits engine.memory_mib")
            .remedy("raise it, or lower engine.kv_mib"));
    }
    Ok(offered)
}

async fn preload(node: &Node, id: ModelId, name: &str) -> Result {
    let began = Instant::now();
    let spinner = Progress::steps(format!("loading {name}"));
    let loaded = node.pool.preload(id).await;
    spinner.clear();
    loaded.map_err(|why| cannot_load(name, why))?;
    note(&format!("loaded {name} in {:.1} s", began.elapsed().as_secs_f64()));
    Ok(())
}

impl Running {
    pub fn public_url(&self) -> String {
        format!("http://{}", self.live.public)
    }

    pub fn operator_url(&self) -> String {
        format!("http://{}", self.live.operator)
    }

    pub fn status(&self) -> Value {
        status::of(&self.live)
    }

    /// The ready event's list of models.
    pub fn models(&self) -> Vec<Value> {
        let models = self.live.node.models();
        models
            .iter()
            .map(|model| json!({ "id": model.qualified.id(), "name": model.qualified.manifest().name }))
            .collect()
    }

    /// Takes nothing new, lets running requests finish within the grace time, then closes the
    /// doors.
    pub async fn drain(mut self) {
        self.live.node.drain().await;
        self.stop.cancel();
        while self.surfaces.join_next().await.is_some() {}
    }
}
