//! Starts a node in this process: the qualified models, the store behind them, the listeners in
//! front.

#![expect(clippy::disallowed_methods, reason = "the start is timed")]

use super::handover::{self, Listeners, SharedListeners};
use super::models::cannot_load;
use super::reload::{AskedReload, Reloader};
use super::services::{api, services};
use super::{Assembly, ComputeDevice, NodeError, cluster, ledger, open_files, private_files};
use crate::config::Config;
use crate::gateway::{self, Gateway, GatewayOptions};
use crate::server::operator::page::PageState;
use crate::server::operator::{
    Live, LongCommands, OperatorFiles, OperatorRoutes, OwnProgram, Reloads, StartPhase, StartState,
    page, socket, status,
};
use crate::server::{self, Api};
use cresset_base::clock::{Clock, SystemClock, UnixMillis};
use cresset_base::ids::ModelId;
use cresset_catalogue::QualifiedModel;
use cresset_pool::ModelPool;
use cresset_request::Services;
use cresset_store::{LockedStore, OpenProgress, Store};
use cresset_tls::{ListenerName, TlsListeners};
use serde_json::{Value, json};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::{JoinSet, spawn_blocking};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// The reaction to a port in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortFallback {
    /// Fail, because the operator asked for this address.
    None,
    /// Take any free port, because the caller accepts every one.
    AnyPort,
}

/// An event that is told to the person who watches a start.
#[derive(Debug)]
pub enum StartEvent {
    Note(String),
    /// Work that lasts until the next event or the end of the start.
    Doing(String),
    /// This process is the node from now on.
    TookOver,
}

/// Receives the events of a start, in order.
type Watcher<'a> = &'a mut (dyn FnMut(StartEvent) + Send);

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

/// A node whose operators are answered already and that is not assembled yet.
struct StartingNode {
    start: Arc<StartState>,
    routes: Arc<OperatorRoutes>,
    stop: CancellationToken,
    surfaces: JoinSet<()>,
    files: OperatorFiles,
    program: OwnProgram,
}

/// The listeners at which clients are accepted, and handles of all listeners for the process that
/// takes them over.
struct ClientListeners {
    public: TcpListener,
    gateway: Option<TcpListener>,
    cluster: Option<TcpListener>,
    shared: SharedListeners,
}

/// A started node. Dropping it without `drain` ends its work at once.
pub struct RunningNode {
    pub(super) live: Arc<Live>,
    pub(super) stop: CancellationToken,
    pub(super) surfaces: JoinSet<()>,
    /// Callers that wait for a reload, until someone answers them.
    asked: Option<mpsc::Receiver<AskedReload>>,
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
        let (mut starting, clients) = self.opened(listeners)?;
        let store = starting.ledger(locked, &self.config, watcher).await?;
        starting.start.enter(StartPhase::Models);
        let pool = self.new_pool();
        let running = self.assembled(starting, store, pool.clone());
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

    /// Takes the place of the node that runs on the data folder: loads the models as `start` does,
    /// takes that node's listeners, and opens the ledger when that node has settled what it ran.
    /// Until clients are accepted, they wait.
    pub async fn take_over(
        &self,
        pinned: &[String],
        watcher: Watcher<'_>,
    ) -> Result<RunningNode, NodeError> {
        self.prepare(watcher);
        let pool = self.new_pool();
        let offered = self.offer_all(&pool, pinned, watcher).await?;
        load_first(&pool, offered, pinned, &|_| (), watcher).await?;
        let listeners = handover::take(&self.data_dir)?;
        watcher(StartEvent::TookOver);
        watcher(StartEvent::Doing("waiting until the old process has ended its work".into()));
        let locked = ledger::lock_when_free(&self.data_dir, &self.config).await?;
        let (mut starting, clients) = self.opened(listeners)?;
        let store = starting.ledger(locked, &self.config, watcher).await?;
        self.serve(self.assembled(starting, store, pool), clients).await
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
        let operator = bind(listen.operator, "--operator", fallback, watcher).await?;
        let gateway = match self.config.gateway.listen {
            Some(at) => Some(bind(at, "--gateway", fallback, watcher).await?),
            None => None,
        };
        let cluster = cluster::bind(&self.config).await?;
        Ok(Listeners { public, operator, gateway, cluster })
    }

    /// Opens the operator's surfaces; the listeners of clients stay as they are.
    fn opened(&self, listeners: Listeners) -> Result<(StartingNode, ClientListeners), NodeError> {
        let shared = listeners.shared().map_err(NodeError::new)?;
        let Listeners { public, operator, gateway, cluster } = listeners;
        let address = public.local_addr().map_err(NodeError::new)?;
        let mut starting = StartingNode::open(&self.config, &self.data_dir, address, operator)?;
        let source = self.source.as_ref();
        starting.program.config = source.and_then(|source| source.file.named()).map(Path::to_owned);
        Ok((starting, ClientListeners { public, gateway, cluster, shared }))
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
        let devices = self.devices().filter_map(ComputeDevice::sentence);
        let devices = devices.map(|place| format!("models run {place}"));
        refused.chain(devices).for_each(|text| watcher(StartEvent::Note(text)));
        self.offer(pool, servable.models, pinned.len(), watcher).await
    }

    fn assembled(&self, starting: StartingNode, store: Store, pool: Arc<ModelPool>) -> RunningNode {
        let node = services(&self.config, store, self.catalogue(), Some(pool));
        starting.assembled(node, self.config.clone().into())
    }

    /// Accepts clients.
    async fn serve(
        &self,
        mut running: RunningNode,
        clients: ClientListeners,
    ) -> Result<RunningNode, NodeError> {
        running.take_over_changes(self.clone());
        running.heed_other_nodes();
        running.accept_clients(clients.public).await?;
        if let Some(listener) = clients.gateway {
            running.open_gateway(listener, self.gateway_key()?)?;
        }
        if let Some(listener) = clients.cluster {
            running.accept_peers(listener)?;
        }
        let (taken, stop) = (running.live.handed_over.clone(), running.stop.clone());
        let given = handover::give(self.data_dir.clone(), clients.shared, taken, stop);
        running.surfaces.spawn(given);
        Ok(running)
    }

    /// The key that the gateway sends for its clients.
    fn gateway_key(&self) -> Result<Option<String>, NodeError> {
        let Some(path) = &self.config.gateway.key_file else { return Ok(None) };
        std::fs::read_to_string(path).map(Some).map_err(|error| {
            NodeError::new(format!("{}: {error}", path.display())).remedy("check gateway.key_file")
        })
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
    failed.filter(|_| !pool.is_ready()).map_or(Ok(()), Err)
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

impl StartingNode {
    async fn ledger(
        &mut self,
        locked: LockedStore,
        config: &Config,
        watcher: Watcher<'_>,
    ) -> Result<Store, NodeError> {
        watcher(StartEvent::Doing("opening the ledger".into()));
        let progress = Arc::<OpenProgress>::default();
        self.start.enter(StartPhase::Ledger(progress.clone()));
        ledger::open(locked, config, progress).await
    }

    /// Opens the operator's surfaces: `operator` and the socket in `data_dir`, whose ledger this
    /// process holds. `public` is the address at which clients are accepted later.
    fn open(
        config: &Config,
        data_dir: &Path,
        public: SocketAddr,
        operator: TcpListener,
    ) -> Result<Self, NodeError> {
        let addresses = [public, operator.local_addr().map_err(NodeError::new)?];
        let tls = TlsListeners::read(&config.tls)
            .map_err(|why| NodeError::new(why).remedy("check tls.certificate and tls.key"))?;
        let tls = cluster::read(tls, &config.cluster)
            .map_err(|why| NodeError::new(why).remedy(cluster::REMEDY))?;
        let secured = tls.acceptor(ListenerName::Operator);
        let files = OperatorFiles::open(data_dir).map_err(NodeError::new)?;
        let start = StartState::new(addresses, tls, StartPhase::Models);
        let routes = OperatorRoutes::new(start.clone());
        let (stop, mut surfaces) = (CancellationToken::new(), JoinSet::new());
        let [_, limits, _] = open_files::limited(config);
        let (listener, stopped) = (routes.listener(config), stop.clone());
        surfaces.spawn(async move {
            server::serve(operator, secured, listener, &limits, stopped).await;
        });
        let bound = socket::bind(data_dir).map_err(|error| {
            let shown = data_dir.display();
            NodeError::new(format!("cannot open the operator socket in {shown}: {error}"))
        })?;
        let (commands, dir, stopped) = (routes.socket(), data_dir.to_owned(), stop.clone());
        surfaces.spawn(async move { socket::serve(bound, commands, &dir, stopped).await });
        let program = OwnProgram { data_dir: data_dir.to_owned(), config: None };
        Ok(Self { start, routes, stop, surfaces, files, program })
    }

    /// Passes operators on to the assembled node.
    fn assembled(self, node: Arc<Services>, config: Arc<Config>) -> RunningNode {
        let Self { start, routes, stop, mut surfaces, files, program } = self;
        let (reloads, asked) = mpsc::channel(1);
        let long_commands = LongCommands::default();
        let (public, page) = (server::router(api(&node, &config)), PageState::default());
        let live = Arc::new(Live {
            node,
            config,
            start,
            long_commands,
            reloads,
            files,
            page,
            handed_over: CancellationToken::new(),
            program,
            public,
        });
        surfaces.spawn(page::history::sample(live.clone(), stop.clone()));
        routes.pass_on(&live);
        RunningNode { live, stop, surfaces, asked: Some(asked) }
    }
}

impl RunningNode {
    /// Opens the operator's surfaces of an assembled node. `public` is the address at which clients
    /// are accepted later.
    pub fn open(
        node: Arc<Services>,
        config: Config,
        data_dir: &Path,
        public: SocketAddr,
        operator: TcpListener,
    ) -> Result<Self, NodeError> {
        let starting = StartingNode::open(&config, data_dir, public, operator)?;
        Ok(starting.assembled(node, config.into()))
    }

    /// Keeps the node in step with its data folder and its configuration.
    fn take_over_changes(&mut self, assembly: Assembly) {
        let (node, start) = (self.live.node.clone(), self.live.start.clone());
        let reloader = Reloader { assembly, node, start };
        if let Some(asked) = self.asked.take() {
            self.surfaces.spawn(reloader.run(asked, self.stop.clone()));
        }
    }

    /// Follows what other nodes decide that share the ledger.
    fn heed_other_nodes(&mut self) {
        let (node, stop) = (self.live.node.clone(), self.stop.clone());
        if let Some(interval) = node.store.look_interval() {
            self.surfaces.spawn(async move {
                stop.run_until_cancelled(cresset_request::heed_other_nodes(&node, interval)).await;
            });
        }
    }

    /// The public surface.
    pub(super) fn api(&self) -> Api {
        api(&self.live.node, &self.live.config)
    }

    /// Serves the public surface on `listener`.
    pub async fn accept_clients(&mut self, listener: TcpListener) -> Result<(), NodeError> {
        let _node = self.live.node.clone();
        let [limits, _, local_limits] = open_files::limited(&self.live.config);
        let (routes, stopped) = (server::router(self.api()), self.stop.clone());
        let routes = server::forwarding(routes, self.forwarder());
        let tls = self.live.start.tls.acceptor(ListenerName::Public);
        if tls.is_some() {
            let own = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(NodeError::new)?;
            let _ = self.live.start.local.set(own.local_addr().map_err(NodeError::new)?);
            let (routes, stopped) = (routes.clone(), stopped.clone());
            self.surfaces.spawn(async move {
                server::serve(own, None, routes, &local_limits, stopped).await;
            });
        }
        self.surfaces.spawn(async move {
            server::serve(listener, tls, routes, &limits, stopped).await;
        });
        self.live.start.enter(StartPhase::Serving);
        Ok(())
    }

    /// Serves clients that do not know the node's ways on `listener`. With a `key` they need none
    /// of their own.
    pub fn open_gateway(
        &mut self,
        listener: TcpListener,
        key: Option<String>,
    ) -> Result<SocketAddr, NodeError> {
        let config = &self.live.config;
        let [.., http] = open_files::limited(config);
        let listen = listener.local_addr().map_err(NodeError::new)?;
        let start = &self.live.start;
        let options = GatewayOptions {
            upstream: gateway::reachable(*start.local.get().unwrap_or(&start.public)),
            tls: cresset_tls::client(None).map_err(NodeError::new)?,
            http,
            key,
            session: Uuid::new_v4(),
            hosts: config.gateway.names.clone(),
            origins: config.gateway.origins.clone(),
            aliases: config.gateway.aliases.clone(),
            metrics: self.live.node.metrics.gateway.clone(),
            traces: self.live.node.traces.clone(),
            counter: Some(server::counting(self.api())),
        };
        let gateway = Gateway::new(options, listen).map_err(NodeError::new)?;
        let (tls, stopped) = (start.tls.acceptor(ListenerName::Gateway), self.stop.clone());
        let _ = start.gateway.set(listen);
        self.surfaces.spawn(async move { gateway::serve(listener, tls, gateway, stopped).await });
        Ok(listen)
    }

    pub(super) fn reloads(&self) -> &Reloads {
        &self.live.reloads
    }

    /// The address at which clients are accepted.
    pub fn public_url(&self) -> String {
        self.live.start.tls.url(ListenerName::Public, self.live.start.public)
    }

    /// The address of health, readiness and metrics.
    pub fn operator_url(&self) -> String {
        self.live.start.tls.url(ListenerName::Operator, self.live.start.operator)
    }

    /// The address of the gateway, if the node has one.
    pub fn gateway_url(&self) -> Option<String> {
        let start = &self.live.start;
        start.gateway.get().map(|address| start.tls.url(ListenerName::Gateway, *address))
    }

    /// The status document, as the operator's surfaces show it.
    pub fn status(&self) -> Value {
        status::of(&self.live)
    }

    /// Id and name of each served model.
    pub fn models(&self) -> Vec<Value> {
        let models = self.live.node.pool.models();
        models
            .iter()
            .map(|model| json!({ "id": model.qualified.id(), "name": model.qualified.manifest().name }))
            .collect()
    }

    /// Closes the listeners without waiting for anything.
    pub fn stop_listening(&self) {
        self.stop.cancel();
    }

    /// Takes no new requests, lets running ones finish within the grace time, then closes the
    /// listeners.
    pub async fn drain(mut self) {
        if self.live.handed_over.is_cancelled() {
            self.end_after_handover().await;
        } else {
            self.live.node.drain().await;
            self.stop_listening();
        }
        while self.surfaces.join_next().await.is_some() {}
        self.live.node.traces.end().await;
    }

    /// Waits until every GPU on which models run is lost for this process.
    pub async fn all_devices_lost(&self) {
        self.live.node.pool.all_devices_lost().await;
    }

    /// Waits until another process has taken the listeners.
    pub async fn handed_over(&self) {
        self.live.handed_over.cancelled().await;
    }

    /// Ends without refusing anything: what this process has accepted it answers, within the grace
    /// time.
    async fn end_after_handover(&mut self) {
        let began = Instant::now();
        self.stop_listening();
        let grace = Duration::from_secs(self.live.node.requests.drain_grace_seconds);
        let ended = async { while self.surfaces.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(grace, ended).await;
        self.live.node.drain_within(grace.saturating_sub(began.elapsed())).await;
    }
}
