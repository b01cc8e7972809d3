//! A node while it starts: its operators are answered already, its clients not yet.

use crate::config::Config;
#[cfg(feature = "console")]
use crate::console::OperatorSurfaces;
#[cfg(feature = "console")]
use crate::handover::SharedListeners;
use crate::listeners::Listeners;
use crate::running::RunningNode;
use crate::start_event::StartEvent;
use crate::{Assembly, NodeError, cluster, ledger};
use cresset_commands::{
    Live, LongCommands, ModelJobs, OperatorFiles, OwnProgram, Sessions, StartPhase, StartState,
    WatchedGpu,
};
use cresset_request::Services;
use cresset_store::{LockedStore, OpenProgress, Store};
use cresset_tls::TlsListeners;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// A node whose operators are answered already and that is not assembled yet.
pub(super) struct StartingNode {
    pub config: Arc<Config>,
    pub start: Arc<StartState>,
    pub stop: CancellationToken,
    pub surfaces: JoinSet<()>,
    files: OperatorFiles,
    program: OwnProgram,
    pub gpus: Vec<WatchedGpu>,
    #[cfg(feature = "console")]
    operators: OperatorSurfaces,
}

/// The listeners at which clients are accepted.
pub(super) struct ClientListeners {
    pub public: TcpListener,
    #[cfg_attr(not(feature = "gateway"), expect(dead_code, reason = "nothing serves it"))]
    pub gateway: Option<TcpListener>,
    pub cluster: Option<TcpListener>,
    /// Handles of all listeners for the process that takes them over.
    #[cfg(feature = "console")]
    pub shared: SharedListeners,
}

impl StartingNode {
    /// Opens the operator's surfaces; the listeners of clients stay as they are.
    pub(super) fn open(
        assembly: &Assembly,
        listeners: Listeners,
    ) -> Result<(Self, ClientListeners), NodeError> {
        #[cfg(feature = "console")]
        let shared = listeners.shared().map_err(NodeError::new)?;
        let Listeners { public, operator, gateway, cluster } = listeners;
        let address = public.local_addr().map_err(NodeError::new)?;
        let config = Arc::new(assembly.config.clone());
        let mut starting = Self::new(config, &assembly.data_dir, address, operator)?;
        let source = assembly.source.as_ref();
        starting.program.config = source.and_then(|source| source.file.named()).map(Path::to_owned);
        let clients = ClientListeners {
            public,
            gateway,
            cluster,
            #[cfg(feature = "console")]
            shared,
        };
        Ok((starting, clients))
    }

    /// Opens the operator's surfaces: `operator` and the socket in `data_dir`, whose ledger this
    /// process holds. `public` is the address at which clients are accepted later.
    #[cfg_attr(
        not(feature = "console"),
        expect(clippy::needless_pass_by_value, reason = "with the feature it is served")
    )]
    pub(super) fn new(
        config: Arc<Config>,
        data_dir: &Path,
        public: SocketAddr,
        operator: Option<TcpListener>,
    ) -> Result<Self, NodeError> {
        let address = operator.as_ref().map(TcpListener::local_addr).transpose();
        let address = address.map_err(NodeError::new)?;
        let tls = TlsListeners::read(&config.tls)
            .map_err(|why| NodeError::new(why).remedy("check tls.certificate and tls.key"))?;
        let tls = cluster::read(tls, &config.cluster)
            .map_err(|why| NodeError::new(why).remedy(cluster::REMEDY))?;
        let files = OperatorFiles::open(data_dir).map_err(NodeError::new)?;
        let start = StartState::new(public, address, tls, StartPhase::Models);
        let (stop, surfaces) = (CancellationToken::new(), JoinSet::new());
        #[cfg(feature = "console")]
        let (mut surfaces, operator) = (surfaces, operator);
        #[cfg(feature = "console")]
        let operators =
            OperatorSurfaces::open((&config, &start), data_dir, operator, (&mut surfaces, &stop))?;
        let program = OwnProgram { data_dir: data_dir.to_owned(), config: None };
        Ok(Self {
            config,
            start,
            stop,
            surfaces,
            files,
            program,
            gpus: Vec::new(),
            #[cfg(feature = "console")]
            operators,
        })
    }

    pub(super) async fn ledger(
        &mut self,
        locked: LockedStore,
        config: &Config,
        watcher: &mut (dyn FnMut(StartEvent) + Send),
    ) -> Result<Store, NodeError> {
        watcher(StartEvent::Doing("opening the ledger".into()));
        let progress = Arc::<OpenProgress>::default();
        self.start.enter(StartPhase::Ledger(progress.clone()));
        ledger::open(locked, config, progress).await
    }

    /// Passes operators on to the assembled node.
    pub(super) fn finish(self, node: Arc<Services>) -> RunningNode {
        let Self { config, start, stop, surfaces, files, program, gpus, .. } = self;
        let (reloads, asked) = mpsc::channel(1);
        let live = Arc::new(Live {
            node,
            settings: config.operator(),
            start,
            gpus,
            long_commands: LongCommands::default(),
            reloads,
            files,
            sessions: Sessions::default(),
            jobs: ModelJobs::default(),
            upgrading: tokio::sync::Mutex::default(),
            handed_over: CancellationToken::new(),
            program,
        });
        #[cfg_attr(not(feature = "console"), expect(unused_mut, reason = "no surface is added"))]
        let mut running = RunningNode { config, live, stop, surfaces, asked: Some(asked) };
        #[cfg(feature = "console")]
        self.operators.pass_on(&mut running);
        running
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
        operator: Option<TcpListener>,
    ) -> Result<Self, NodeError> {
        Ok(StartingNode::new(config.into(), data_dir, public, operator)?.finish(node))
    }
}
