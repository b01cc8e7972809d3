//! The addresses of a node and the phase of its start.

use cresset_store::OpenProgress;
use cresset_tls::{ListenerName, TlsListeners};
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

/// The steps of a start, in their order.
pub enum StartPhase {
    /// The ledger is being opened.
    Ledger(Arc<OpenProgress>),
    /// The releases and their qualification records are being read.
    Models,
    /// The named model is being loaded.
    Loading(String),
    /// The start is over: clients are accepted.
    Serving,
}

/// The addresses of a node and the phase of its start.
pub struct StartState {
    pub public: SocketAddr,
    /// Absent in a program without the operator's listener.
    pub operator: Option<SocketAddr>,
    /// The address without TLS at which commands on this machine reach what `public` offers with
    /// TLS.
    pub local: OnceLock<SocketAddr>,
    pub tls: TlsListeners,
    /// The address of the node's own gateway, once it has one.
    pub gateway: Arc<OnceLock<SocketAddr>>,
    phase: Mutex<StartPhase>,
}

impl StartState {
    pub fn new(
        public: SocketAddr,
        operator: Option<SocketAddr>,
        tls: TlsListeners,
        phase: StartPhase,
    ) -> Arc<Self> {
        let (local, gateway) = (OnceLock::new(), Arc::default());
        Arc::new(Self { public, operator, local, tls, gateway, phase: Mutex::new(phase) })
    }

    pub fn enter(&self, phase: StartPhase) {
        *self.phase.lock() = phase;
    }

    /// The open listeners that show a certificate, each with the Unix time, seconds, after which it
    /// is not valid.
    pub fn certificates(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let is_open = |listener| listener != ListenerName::Gateway || self.gateway.get().is_some();
        let open = ListenerName::ALL.into_iter().filter(move |listener| is_open(*listener));
        let own =
            open.filter_map(|listener| Some((listener.word(), self.tls.not_after(listener)?)));
        let peers = self.tls.peers().and_then(|peers| peers.not_after());
        own.chain(peers.map(|ends_at| ("cluster", ends_at)))
    }

    /// What the start is doing; `None` once it is over.
    pub fn doing(&self) -> Option<String> {
        match &*self.phase.lock() {
            StartPhase::Ledger(progress) => Some(progress.step()),
            StartPhase::Models => Some("reading the models".into()),
            StartPhase::Loading(name) => Some(format!("loading {name}")),
            StartPhase::Serving => None,
        }
    }
}

impl StartState {
    /// Why the node is not ready yet; `None` once the start is over.
    pub fn not_ready_because(&self) -> Option<String> {
        self.doing().map(|doing| format!("the node is starting: {doing}"))
    }
}
