//! The operator's surfaces from the first moment of a start. Until the node is assembled they
//! answer what the start is doing; then they pass everything on to the node.

use super::{AdminCommand, AdminError, Live, health, socket, status};
use crate::config::Config;
use crate::server::own_names::OwnNames;
use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use cresset_store::OpenProgress;
use cresset_tls::{ListenerName, TlsListeners};
use parking_lot::Mutex;
use serde_json::json;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use tower::ServiceExt;

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
    pub operator: SocketAddr,
    /// The address without TLS at which commands on this machine reach what `public` offers with
    /// TLS.
    pub local: OnceLock<SocketAddr>,
    pub tls: TlsListeners,
    /// The address of the node's own gateway, once it has one.
    pub gateway: OnceLock<SocketAddr>,
    phase: Mutex<StartPhase>,
}

impl StartState {
    pub fn new(
        [public, operator]: [SocketAddr; 2],
        tls: TlsListeners,
        phase: StartPhase,
    ) -> Arc<Self> {
        let (local, gateway) = (OnceLock::new(), OnceLock::new());
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

/// The routes of the operator's listener and of the operator's socket, whatever the node's state.
pub struct OperatorRoutes {
    start: Arc<StartState>,
    /// The listener's and the socket's routes of the assembled node.
    node: OnceLock<[Router; 2]>,
}

impl OperatorRoutes {
    pub fn new(start: Arc<StartState>) -> Arc<Self> {
        Arc::new(Self { start, node: OnceLock::new() })
    }

    /// Passes everything on to the node from now on.
    pub fn pass_on(&self, live: &Arc<Live>) {
        self.node.get_or_init(|| [health::router(live.clone()), socket::router(live.clone())]);
    }

    /// Health, readiness, metrics and the OpenAPI document. Requests that a web page of another
    /// site could have sent are refused.
    pub fn listener(self: &Arc<Self>, config: &Config) -> Router {
        let names = OwnNames::new(self.start.operator, &config.listen.operator_names);
        Router::new()
            .fallback(async |State(routes): State<Arc<Self>>, request: Request| {
                match routes.node.get() {
                    Some([listener, _]) => answered(listener, request).await,
                    None => routes.start.health(request.uri().path()),
                }
            })
            .layer(from_fn_with_state(Arc::new(names), require_own_name))
            .with_state(self.clone())
    }

    /// The commands of operators.
    pub fn socket(self: &Arc<Self>) -> Router {
        Router::new()
            .fallback(async |State(routes): State<Arc<Self>>, request: Request| {
                match routes.node.get() {
                    Some([_, socket]) => answered(socket, request).await,
                    None => routes.start.command(request).await,
                }
            })
            .with_state(self.clone())
    }
}

async fn answered(routes: &Router, request: Request) -> Response {
    let Ok(answer) = routes.clone().oneshot(request).await;
    answer
}

impl StartState {
    /// Why the node is not ready yet; `None` once the start is over.
    pub(super) fn not_ready_because(&self) -> Option<String> {
        self.doing().map(|doing| format!("the node is starting: {doing}"))
    }

    fn health(&self, path: &str) -> Response {
        if path == "/healthz" {
            return health::alive().into_response();
        }
        health::unavailable(self.not_ready_because().as_deref())
    }

    /// The status is told; every other command needs the ledger.
    async fn command(&self, request: Request) -> Response {
        let body = to_bytes(request.into_body(), socket::MAX_COMMAND_BYTES).await;
        if let Ok(AdminCommand::Status) = serde_json::from_slice(&body.unwrap_or_default()) {
            return Json(status::starting(self)).into_response();
        }
        socket::refused(&AdminError::Starting(self.not_ready_because().unwrap_or_default()))
    }
}

/// Refuses requests that a web page of another site could have sent.
async fn require_own_name(
    State(names): State<Arc<OwnNames>>,
    request: Request,
    next: Next,
) -> Response {
    match names.refusal(request.uri(), request.headers()) {
        None => next.run(request).await,
        Some(why) => {
            let message = format!("{why}; further names stand in listen.operator_names");
            let body = json!({ "status": "forbidden", "message": message });
            (StatusCode::FORBIDDEN, Json(body)).into_response()
        }
    }
}
