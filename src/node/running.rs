//! A node that runs in this process: its clients, its addresses and its end.

#![expect(clippy::disallowed_methods, reason = "the grace time is measured")]

use crate::background_proofs::BackgroundProofs;
use crate::config::Config;
use crate::reload::{AskedReload, Reloader};
use crate::services::api;
use crate::{Assembly, NodeError, open_files};
use cresset_api::{Api, ApiSettings, GatewayHint};
use cresset_commands::{Live, StartPhase};
use cresset_tls::ListenerName;
use serde_json::{Value, json};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// A started node. Dropping it without `drain` ends its work at once.
pub struct RunningNode {
    pub(super) config: Arc<Config>,
    pub(super) live: Arc<Live>,
    pub(super) stop: CancellationToken,
    pub(super) surfaces: JoinSet<()>,
    /// Callers that wait for a reload, until someone answers them.
    pub(super) asked: Option<mpsc::Receiver<AskedReload>>,
}

impl RunningNode {
    /// Keeps the node in step with its data folder and its configuration.
    pub(super) fn take_over_changes(&mut self, assembly: Assembly) {
        let (node, start) = (self.live.node.clone(), self.live.start.clone());
        if let Some(proofs) = BackgroundProofs::new(&assembly, &node.pool) {
            self.surfaces.spawn(proofs.run(self.stop.clone()));
        }
        let reloader = Reloader { assembly, node, start };
        if let Some(asked) = self.asked.take() {
            self.surfaces.spawn(reloader.run(asked, self.stop.clone()));
        }
    }

    /// Takes over what changed, as `cresset reload` does. The log tells what that was.
    pub async fn reload(&self) {
        let (answer, told) = oneshot::channel();
        if self.live.reloads.send(answer).await.is_ok() {
            // It is dropped only when the node stops.
            let _ = told.await;
        }
    }

    /// Follows what other nodes decide that share the ledger.
    pub(super) fn follow_cluster(&mut self) {
        let (node, stop) = (self.live.node.clone(), self.stop.clone());
        if let Some(interval) = node.store.look_interval() {
            self.surfaces.spawn(async move {
                stop.run_until_cancelled(cresset_request::follow_cluster(&node, interval)).await;
            });
        }
    }

    /// The public surface, which tells of the gateway.
    pub(super) fn api(&self) -> Api {
        let start = &self.live.start;
        let gateway = GatewayHint {
            address: start.gateway.clone(),
            is_secured: start.tls.acceptor(ListenerName::Gateway).is_some(),
            names: self.config.gateway.names.clone(),
        };
        let settings = ApiSettings { gateway, ..self.config.api() };
        Api { settings: settings.into(), ..api(&self.live.node, &self.config) }
    }

    /// Serves the public surface on `listener`.
    pub async fn accept_clients(&mut self, listener: TcpListener) -> Result<(), NodeError> {
        let _node = self.live.node.clone();
        let [limits, _, local_limits] = open_files::limited(&self.config);
        let (routes, stopped) = (cresset_api::router(self.api()), self.stop.clone());
        let routes = cresset_api::forwarding(routes, self.forwarder());
        let tls = self.live.start.tls.acceptor(ListenerName::Public);
        if tls.is_some() {
            let own = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(NodeError::new)?;
            let _ = self.live.start.local.set(own.local_addr().map_err(NodeError::new)?);
            let (routes, stopped) = (routes.clone(), stopped.clone());
            self.surfaces.spawn(async move {
                cresset_transport::serve(own, None, routes, &local_limits, stopped).await;
            });
        }
        self.surfaces.spawn(async move {
            cresset_transport::serve(listener, tls, routes, &limits, stopped).await;
        });
        self.live.start.enter(StartPhase::Serving);
        Ok(())
    }

    /// The address at which clients are accepted.
    pub fn public_url(&self) -> String {
        self.live.start.tls.url(ListenerName::Public, self.live.start.public)
    }

    /// The address of the gateway, if the node has one.
    pub fn gateway_url(&self) -> Option<String> {
        let start = &self.live.start;
        start.gateway.get().map(|address| start.tls.url(ListenerName::Gateway, *address))
    }

    /// The address of health, readiness and metrics.
    pub fn operator_url(&self) -> Option<String> {
        let start = &self.live.start;
        start.operator.map(|address| start.tls.url(ListenerName::Operator, address))
    }

    /// The status document, as the operator's surfaces show it.
    pub fn status(&self) -> Value {
        cresset_commands::status(&self.live)
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
