//! A node in your own program.

use crate::config::Config;
use crate::{Assembly, NodeError, PortFallback, Proving, RunningNode, StartEvent, ledger};
use axum::Router;
use axum::body::Body;
use cresset_client::{AnswerStream, ClientError, HttpCall, accepted, completion};
use cresset_commands::{AdminCommand, AdminError, Operator};
use cresset_store::Store;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use tower::ServiceExt;
use uuid::Uuid;

/// The host that requests within the process name.
const IN_PROCESS: &str = "localhost";

/// How a node starts. Made by [`Node::builder`].
pub struct NodeBuilder {
    config: Config,
    data_dir: PathBuf,
    models: Vec<String>,
    prover: Option<Arc<dyn Proving>>,
    watcher: Box<dyn FnMut(StartEvent) + Send>,
}

impl NodeBuilder {
    /// The folder with ledger, models and records; `data` where none is named. It is made with an
    /// empty ledger where there is none.
    #[must_use]
    pub fn data_dir(self, folder: impl Into<PathBuf>) -> Self {
        Self { data_dir: folder.into(), ..self }
    }

    /// A release, by its name, that is loaded before the start ends, and for good. Without any, as
    /// many qualified ones are loaded as fit.
    #[must_use]
    pub fn model(mut self, name: impl Into<String>) -> Self {
        self.models.push(name.into());
        self
    }

    /// Proves more of its releases while the node serves them, as `qualification.background` says:
    /// `BackgroundProver`, with the feature `prover`.
    #[must_use]
    pub fn prover(self, prover: Arc<dyn Proving>) -> Self {
        Self { prover: Some(prover), ..self }
    }

    /// Receives what the start does, in order.
    #[must_use]
    pub fn on_event(self, watcher: impl FnMut(StartEvent) + Send + 'static) -> Self {
        Self { watcher: Box::new(watcher), ..self }
    }

    /// Opens the ledger, loads models and accepts clients. The error names what to change; one is
    /// that no release of the data folder is qualified on this hardware.
    pub async fn start(mut self) -> Result<Node, NodeError> {
        if !Store::exists(&ledger::place(&self.data_dir, &self.config)?) {
            ledger::create(&self.data_dir, &self.config)?;
        }
        let mut assembly = Assembly::new(self.data_dir, self.config)?;
        assembly.prover = self.prover;
        let running = assembly.start(PortFallback::None, &self.models, &mut self.watcher).await?;
        Ok(Node(running))
    }
}

/// A node that runs in this process, on the runtime that started it. It also listens on the
/// addresses of its configuration. Dropping it without [`Node::shutdown`] ends its work at once.
pub struct Node(RunningNode);

impl Node {
    /// Begins a node with these settings.
    pub fn builder(config: Config) -> NodeBuilder {
        NodeBuilder {
            config,
            data_dir: "data".into(),
            models: Vec::new(),
            prover: None,
            watcher: Box::new(|_| ()),
        }
    }

    /// The address of `/v1`, with the port that is used.
    pub fn url(&self) -> String {
        self.0.public_url()
    }

    /// The address of health, readiness and metrics; `None` without the feature `console`.
    pub fn operator_url(&self) -> Option<String> {
        self.0.operator_url()
    }

    /// The address of the node's own gateway.
    pub fn gateway_url(&self) -> Option<String> {
        self.0.gateway_url()
    }

    /// The status document, as `cresset status --json` prints it.
    pub fn status(&self) -> Value {
        self.0.status()
    }

    /// The public surface for a service of your own. Framing, header sizes, connection limits and
    /// timeouts are then that service's: the node's listener is not involved.
    pub fn router(&self) -> Router {
        cresset_api::router(self.0.api())
    }

    /// Gives an operator's command, in the name of the user that the process runs as.
    pub async fn execute(&self, command: AdminCommand) -> Result<Value, AdminError> {
        Operator::of(&self.0.live).execute_for(&cresset_commands::Actor::node_user(), command).await
    }

    /// Makes an account with this many microcredits, and returns a key for it.
    pub async fn open_account(&self, name: &str, microcredits: u64) -> Result<String, AdminError> {
        let (trial, premium) = (0, microcredits);
        let (name, plan, reference) = (name.to_owned(), None, None);
        let create = AdminCommand::AccountCreate { name, plan, trial, premium, reference };
        let account = serde_json::from_value(self.execute(create).await?["id"].take());
        let account = account.map_err(|error| AdminError::Unavailable(error.to_string()))?;
        let create = AdminCommand::KeyCreate { account, label: None, expires_at: None };
        let key = self.execute(create).await?;
        Ok(key["secret"].as_str().unwrap_or_default().to_owned())
    }

    /// Asks with this key in the process itself, without a socket.
    pub fn client(&self, key: &str) -> Client {
        Client { router: self.router(), key: key.to_owned(), session: Uuid::new_v4() }
    }

    /// Takes no new requests, lets running ones finish within `requests.drain_grace_seconds`, and
    /// closes ledger and listeners.
    pub async fn shutdown(self) {
        self.0.drain().await;
    }
}

/// A client within the process. Admission, idempotency, settlement and the bytes of answers are
/// those that clients over HTTP get.
#[derive(Clone)]
pub struct Client {
    router: Router,
    key: String,
    session: Uuid,
}

impl Client {
    /// Asks for a completion. `body` is that of `POST /v1/chat/completions`, with the id of the
    /// model; the answer is streamed.
    pub async fn ask(&self, body: Value) -> Result<AnswerStream<Body>, ClientError> {
        let (request, call) = completion(&self.key, self.session, body);
        AnswerStream::of(request, self.send(call).await?).await
    }

    /// Reads a document of the public surface, such as `/v1/models` or `/v1/credits`.
    pub async fn get(&self, path: &str) -> Result<Value, ClientError> {
        accepted(self.send(HttpCall::get(path).bearer(&self.key)).await?).await
    }

    async fn send(&self, call: HttpCall) -> Result<axum::response::Response, ClientError> {
        let request = call.request(IN_PROCESS)?.map(Body::new);
        let Ok(response) = self.router.clone().oneshot(request).await;
        Ok(response)
    }
}
