//! Starts a node in this process: the qualified models, the store behind them, the listeners in
//! front.

#![expect(clippy::disallowed_methods, reason = "the start is timed")]

#[cfg(feature = "console")]
use crate::handover;
use crate::listeners::Listeners;
use crate::running::RunningNode;
use crate::services::services;
use crate::start_event::{StartEvent, Watcher};
use crate::starting::{ClientListeners, StartingNode};
use crate::{
    Assembly, ComputeDevice, NodeError, cannot_load, cluster, ledger, open_files, private_files,
};
use cresset_base::{Clock, ModelId, SystemClock, UnixMillis};
use cresset_catalogue::QualifiedModel;
use cresset_commands::StartPhase;
use cresset_pool::ModelPool;
use cresset_store::Store;
use cresset_tls::ends_soon;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use tokio::net::TcpListener;
use tokio::task::spawn_blocking;

/// The reaction to a port in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortFallback {
    /// Fail, because the operator asked for this address.
    None,
    /// Take any free port, because the caller accepts every one.
    AnyPort,
}

async fn bind(
    address: SocketAddr,
    flag: &str,
    fallback: PortFallback,
    watcher: Watcher<'_>,
) -> Result<TcpListener, NodeError> {
    let bound = match TcpListener::bind(address).await {
        Err(error) if error.kind() == ErrorKind::AddrInUse && fallback == PortFallback::AnyPort => {
            watcher(StartEvent::Note(format!("{address} is taken; using a free port")));
            TcpListener::bind(SocketAddr::new(address.ip(), 0)).await
        }
        bound => bound,
    };
    bound.map_err(|error| {
        NodeError::new(format!("cannot listen on {address}: {error}"))
            .remedy(format!("stop what listens there, or choose another address with {flag} ADDR"))
    })
}

impl Assembly {
    /// Starts a node: opens the ledger, offers every qualified model, loads the `pinned` ones for
    /// good (if none is named, as many as fit) and accepts clients.
    ///
    /// The operator's listener and socket answer from the beginning, and take commands once the
    /// ledger is open; clients are accepted once those models are loaded. Dropping the future ends
    /// the start.
    pub async fn start(
        &self,
        fallback: PortFallback,
        pinned: &[String],
        watcher: Watcher<'_>,
    ) -> Result<RunningNode, NodeError> {
        self.prepare(watcher);
        // All listeners are bound before anything slow starts.
        let listeners = self.bind_all(fallback, watcher).await?;
        let locked = ledger::lock(&self.data_dir, &self.config)?;
        let (mut starting, clients) = StartingNode::open(self, listeners)?;
        let store = starting.ledger(locked, &self.config, watcher).await?;
        starting.start.enter(StartPhase::Models);
        let pool = self.new_pool();
        let running = self.build_services(starting, store, pool.clone());
        if let Err(why) = self.load_into(&pool, pinned, &running, watcher).await {
            // The ledger is closed in order: nothing was wrong with it.
            running.drain().await;
            return Err(why);
        }
        self.serve(running, clients).await
    }

    async fn load_into(
        &self,
        pool: &Arc<ModelPool>,
        pinned: &[String],
        running: &RunningNode,
        watcher: Watcher<'_>,
    ) -> Result<(), NodeError> {
        let offered = self.offer_all(pool, pinned, watcher).await?;
        let start = running.live.start.clone();
        let enter = move |name: &str| start.enter(StartPhase::Loading(name.to_owned()));
        load_first(pool, offered, pinned, &enter, watcher).await
    }

    /// Without the operator's socket nobody gives listeners away.
    #[cfg(not(feature = "console"))]
    #[expect(clippy::unused_async, reason = "with the feature it waits")]
    pub async fn take_over(&self, _: &[String], _: Watcher<'_>) -> Result<RunningNode, NodeError> {
        Err(NodeError::without("console", "--take-over is given"))
    }

    /// Takes the place of the node that runs on the data folder: loads the models as `start` does,
    /// takes that node's listeners, and opens the ledger when that node has settled what it ran.
    /// Until clients are accepted, they wait.
    #[cfg(feature = "console")]
    pub async fn take_over(
        &self,
        pinned: &[String],
        watcher: Watcher<'_>,
    ) -> Result<RunningNode, NodeError> {
        self.prepare(watcher);
        let pool = self.new_pool();
        let offered = self.offer_all(&pool, pinned, watcher).await?;
        // The node that runs serves on.
        if offered.is_empty() {
            return Err(NodeError::new("there is no model to serve")
                .remedy("prove one with this program: `cresset qualify NAME`"));
        }
        load_first(&pool, offered, pinned, &|_| (), watcher).await?;
        let listeners = handover::take(&self.data_dir)?;
        watcher(StartEvent::TookOver);
        watcher(StartEvent::Doing("waiting until the old process has ended its work".into()));
        let locked = ledger::lock_when_free(&self.data_dir, &self.config).await?;
        let (mut starting, clients) = StartingNode::open(self, listeners)?;
        let store = starting.ledger(locked, &self.config, watcher).await?;
        self.serve(self.build_services(starting, store, pool), clients).await
    }

    fn prepare(&self, watcher: Watcher<'_>) {
        open_files::raise_limit();
        let told = [
            open_files::note(&self.config),
            private_files::make(&self.data_dir),
            ledger::failover_warning(&self.config),
        ];
        told.into_iter().flatten().for_each(|text| watcher(StartEvent::Note(text)));
    }

    async fn bind_all(
        &self,
        fallback: PortFallback,
        watcher: Watcher<'_>,
    ) -> Result<Listeners, NodeError> {
        let listen = &self.config.listen;
        let public = bind(listen.public, "--listen", fallback, watcher).await?;
        #[cfg(feature = "console")]
        let operator = Some(bind(listen.operator, "--operator", fallback, watcher).await?);
        #[cfg(not(feature = "console"))]
        let operator = None;
        let gateway = match self.config.gateway.listen {
            Some(_) if cfg!(not(feature = "gateway")) => {
                return Err(NodeError::without("gateway", "gateway.listen is set"));
            }
            Some(at) => Some(bind(at, "--gateway", fallback, watcher).await?),
            None => None,
        };
        let cluster = cluster::bind(&self.config).await?;
        Ok(Listeners { public, operator, gateway, cluster })
    }

    fn new_pool(&self) -> Arc<ModelPool> {
        ModelPool::new(&self.config.engine, self.device_budgets())
    }

    /// Makes every qualified model known to the pool.
    async fn offer_all(
        &self,
        pool: &Arc<ModelPool>,
        pinned: &[String],
        watcher: Watcher<'_>,
    ) -> Result<Vec<(ModelId, String)>, NodeError> {
        let (assembly, names) = (self.clone(), pinned.to_vec());
        let reading = spawn_blocking(move || assembly.servable(&names));
        let servable = reading.await.map_err(NodeError::new)??;
        let refused = servable.refused.iter().map(|why| format!("not served: {why}"));
        let now = SystemClock.now().seconds();
        let ending = servable.models.iter().filter_map(|model| {
            let ends = ends_soon(model.proof_ends_at(), now)?;
            Some(format!("the proof of {} {ends}", model.manifest().name))
        });
        let devices = self.devices().filter_map(ComputeDevice::sentence);
        let devices = devices.map(|place| format!("models run {place}"));
        refused.chain(ending).chain(devices).for_each(|text| watcher(StartEvent::Note(text)));
        self.offer(pool, servable.models, pinned.len(), watcher).await
    }

    fn build_services(
        &self,
        mut starting: StartingNode,
        store: Store,
        pool: Arc<ModelPool>,
    ) -> RunningNode {
        let gpus = self.devices().flat_map(ComputeDevice::sensors);
        starting.gpus = gpus.filter_map(|(name, sensor)| Some((name, sensor.ok()?))).collect();
        let node = services(&self.config, store, self.catalogue(), Some(pool));
        starting.finish(node)
    }

    /// Accepts clients.
    async fn serve(
        &self,
        mut running: RunningNode,
        clients: ClientListeners,
    ) -> Result<RunningNode, NodeError> {
        running.take_over_changes(self.clone());
        running.follow_cluster();
        running.accept_clients(clients.public).await?;
        #[cfg(feature = "gateway")]
        if let Some(listener) = clients.gateway {
            running.open_gateway(listener, self.gateway_key()?)?;
        }
        if let Some(listener) = clients.cluster {
            running.accept_peers(listener)?;
        }
        #[cfg(feature = "console")]
        running.offer_handover(self.data_dir.clone(), clients.shared);
        Ok(running)
    }

    /// Makes the models known to the pool, the first `pinned` ones for good. Other models
    /// that cannot be read, or can never be loaded, are left out. Returns the offered ones in the
    /// same order.
    pub(super) async fn offer(
        &self,
        pool: &ModelPool,
        models: Vec<QualifiedModel>,
        pinned: usize,
        watcher: Watcher<'_>,
    ) -> Result<Vec<(ModelId, String)>, NodeError> {
        if models.is_empty() {
            return Ok(Vec::new());
        }
        let (mut offered, mut unreadable) = (Vec::new(), None);
        for (index, model) in models.into_iter().enumerate() {
            let pinned = index < pinned;
            let (id, name) = (model.id(), model.manifest().name.clone());
            let assembly = self.clone();
            let reading = spawn_blocking(move || {
                (assembly.expected_bytes(&model), assembly.served_model(model))
            });
            let (bytes, read) = reading.await.map_err(NodeError::new)?;
            let served = match read.map_err(|why| cannot_load(&name, why)) {
                Ok(served) => served,
                Err(why) if pinned => return Err(why),
                Err(why) => {
                    watcher(StartEvent::Note(format!("not served: {why}")));
                    unreadable = Some(why);
                    continue;
                }
            };
            match pool.offer(served, bytes, pinned) {
                Ok(()) => {
                    if let Some(served) = pool.get(id) {
                        self.note_prices(&served.qualified, SystemClock.now());
                    }
                    offered.push((id, name));
                }
                Err(why) if pinned => {
                    return Err(NodeError::new(format!("{name} cannot stay loaded: {why}")));
                }
                Err(why) => watcher(StartEvent::Note(format!("not served: {name}: {why}"))),
            }
        }
        if let Some(why) = unreadable.filter(|_| offered.is_empty()) {
            return Err(why);
        }
        if offered.is_empty() {
            return Err(NodeError::new("no qualified model fits engine.memory_mib")
                .remedy("raise it, or lower engine.kv_mib (on a GPU engine.gpu_kv_mib)"));
        }
        Ok(offered)
    }
}

impl Assembly {
    /// Takes note of a model's prices, if they are others than those before.
    pub(super) fn note_prices(&self, model: &QualifiedModel, at: UnixMillis) {
        let (catalogue, manifest) = (self.catalogue(), model.manifest());
        if let Err(error) = catalogue.note_prices(manifest, at) {
            tracing::warn!(name = manifest.name, %error, "prices could not be noted");
        }
    }
}

/// Loads the pinned models or, if there are none, as many as fit. `enter` hears the name of
/// each.
async fn load_first(
    pool: &Arc<ModelPool>,
    offered: Vec<(ModelId, String)>,
    pinned: &[String],
    enter: &(dyn Fn(&str) + Sync),
    watcher: Watcher<'_>,
) -> Result<(), NodeError> {
    let mut failed = None;
    for (index, (id, name)) in offered.into_iter().enumerate() {
        if index < pinned.len() {
            enter(&name);
            preload(pool, id, &name, watcher).await?;
        } else if pinned.is_empty() && pool.has_room(id) {
            enter(&name);
            failed = preload(pool, id, &name, watcher).await.err().or(failed);
        }
    }
    match failed {
        Some(why) if !pool.is_ready() => Err(why),
        _ => Ok(()),
    }
}

async fn preload(
    pool: &Arc<ModelPool>,
    id: ModelId,
    name: &str,
    watcher: Watcher<'_>,
) -> Result<(), NodeError> {
    let began = Instant::now();
    watcher(StartEvent::Doing(format!("loading {name}")));
    pool.preload(id).await.map_err(|why| cannot_load(name, why))?;
    let seconds = began.elapsed().as_secs_f64();
    watcher(StartEvent::Note(format!("loaded {name} in {seconds:.1} s")));
    Ok(())
}
