//! The node's own gateway.

use crate::running::RunningNode;
use crate::{Assembly, NodeError, limited};
use cresset_api::Api;
use cresset_gateway::{Gateway, GatewayOptions, GatewayUpstream};
use cresset_tls::ListenerName;
use cresset_transport::HttpSettings;
use std::net::SocketAddr;
use tokio::net::TcpListener;
use uuid::Uuid;

impl Assembly {
    /// The key that the gateway sends for its clients.
    pub(super) fn gateway_key(&self) -> Result<Option<String>, NodeError> {
        let Some(path) = &self.config.gateway.key_file else { return Ok(None) };
        std::fs::read_to_string(path).map(Some).map_err(|error| {
            NodeError::new(format!("{}: {error}", path.display())).remedy("check gateway.key_file")
        })
    }
}

impl RunningNode {
    /// Serves clients that do not know the node's ways on `listener`. With a `key` they need none
    /// of their own.
    pub fn open_gateway(
        &mut self,
        listener: TcpListener,
        key: Option<String>,
    ) -> Result<SocketAddr, NodeError> {
        let config = &self.config;
        let [.., http] = limited(config);
        let api = Api { settings: config.gateway_api().into(), ..self.api() };
        let routes = cresset_api::router(api.clone());
        let listen = listener.local_addr().map_err(NodeError::new)?;
        let start = &self.live.start;
        let options = GatewayOptions {
            upstream: GatewayUpstream::Here {
                node: cresset_api::forwarding(routes, self.forwarder()),
                prompts: cresset_api::prompts(api.clone()),
            },
            http: HttpSettings { max_body_bytes: api.settings.http.max_body_bytes, ..http },
            key,
            session: Uuid::new_v4(),
            hosts: config.gateway.names.clone(),
            origins: config.gateway.origins.clone(),
            aliases: config.gateway.aliases.clone(),
            metrics: self.live.node.metrics.gateway.clone(),
            traces: self.live.node.traces.clone(),
        };
        let gateway = Gateway::new(options, listen).map_err(NodeError::new)?;
        let (tls, stopped) = (start.tls.acceptor(ListenerName::Gateway), self.stop.clone());
        let _ = start.gateway.set(listen);
        self.surfaces
            .spawn(async move { cresset_gateway::serve(listener, tls, gateway, stopped).await });
        Ok(listen)
    }
}
