//! A node in this process: qualified models into engines, the store behind them, the listeners in front.

use super::context::Context;
use super::load::{Loaded, load};
use super::output::{Failure, Result, note};
use super::progress::Progress;
use super::releases::{cannot_load, servable};
use crate::catalogue::QualifiedModel;
use crate::clock::SystemClock;
use crate::config::Listen;
use crate::server::operator::{self, socket, status};
use crate::server::{self, LoadedModel, Node};
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
    pub async fn bind(listen: &Listen, fallback: Fallback) -> Result<Self> {
        let public = bind(listen.public, "--listen", fallback).await?;
        let operator = bind(listen.operator, "--operator", fallback).await?;
        Ok(Self { public, operator })
    }
}

async fn bind(address: SocketAddr, flag: &str, fallback: Fallback) -> Result<TcpListener> {
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == ErrorKind::AddrInUse && fallback == Fallback::AnyPort => {
            note(&format!("{address} is taken; using a free port"));
            Ok(TcpListener::bind(SocketAddr::new(address.ip(), 0)).await?)
        }
        Err(error) => Err(Failure::new(format!("cannot listen on {address}: {error}"))
            .remedy(format!("stop what listens there, or choose another address with {flag} ADDR"))),
    }
}

/// A started node. Dropping it without `drain` ends its work at once.
pub struct Running {
    live: Arc<operator::Live>,
    stop: CancellationToken,
    surfaces: JoinSet<()>,
}

/// Opens the ledger, loads `models` (every qualified one when none is named) and opens the doors.
///
/// Health and the operator socket answer from the beginning; clients are accepted once every model is loaded.
pub async fn start(context: &Context, ports: Ports, models: &[String]) -> Result<Running> {
    let store = context.open_store()?;
    let qualified = servable(context, models)?;
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
    surfaces.spawn(async move { server::serve(ports.operator, routes, &operator_limits, operator_stop).await });
    let door = socket::bind(&context.data_dir).map_err(|error| {
        Failure::new(format!("cannot open the operator socket in {}: {error}", context.data_dir.display()))
    })?;
    let (socket_live, dir, socket_stop) = (live.clone(), context.data_dir.clone(), stop.clone());
    surfaces.spawn(async move { socket::serve(door, socket_live, &dir, socket_stop).await });
    for model in qualified {
        node.insert_model(load_model(context, model).await?);
    }
    let (routes, public_stop) = (server::router(node.clone()), stop.clone());
    surfaces.spawn(async move { server::serve(ports.public, routes, &limits, public_stop).await });
    Ok(Running { live, stop, surfaces })
}

/// Loads weights and tokenizer on a thread that may block, and starts the engine.
async fn load_model(context: &Context, qualified: QualifiedModel) -> Result<LoadedModel> {
    let (name, began) = (qualified.manifest().name.clone(), Instant::now());
    let (source, config) = (qualified.source().clone(), context.config.clone());
    let spinner = Progress::steps(format!("loading {name}"));
    let loading = tokio::task::spawn_blocking(move || load(&source, &config));
    let loaded = loading.await.map_err(Failure::new)?;
    spinner.clear();
    let Loaded { text, engine } = loaded.map_err(|why| cannot_load(&name, &why))?;
    note(&format!("loaded {name} in {:.1} s", began.elapsed().as_secs_f64()));
    Ok(LoadedModel { qualified, text, engine })
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

    /// Takes nothing new, lets running requests finish within the grace time, then closes the doors.
    pub async fn drain(mut self) {
        self.live.node.drain().await;
        self.stop.cancel();
        while self.surfaces.join_next().await.is_some() {}
    }
}
