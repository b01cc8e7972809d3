//! What a node has to do with the other nodes of its ledger: the listener for them, and the way to
//! theirs.

use super::{NodeError, RunningNode, open_files};
use crate::config::Config;
use cresset_api::{self, Forwarder};
use cresset_tls::{ClusterSettings, TlsListeners};
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Arc;
use tokio::net::TcpListener;

pub(super) async fn bind(config: &Config) -> Result<Option<TcpListener>, NodeError> {
    let Some(at) = config.cluster.listen else { return Ok(None) };
    TcpListener::bind(at).await.map(Some).map_err(|error| {
        NodeError::new(format!("cannot listen on {at} for other nodes: {error}"))
            .remedy("stop what listens there, or set cluster.listen to another address")
    })
}

/// What mends a certificate that other nodes would refuse.
pub const REMEDY: &str =
    "check cluster.certificate, cluster.key, cluster.authority and cluster.address";

/// Adds what the node shows to others. The error is a sentence; one is that they would refuse it.
pub fn read(tls: TlsListeners, settings: &ClusterSettings) -> Result<TlsListeners, String> {
    let tls = tls.with_peers(settings)?;
    if let (Some(peers), Some(at)) = (tls.peers(), settings.listen) {
        peers.check_own(&told(settings, at))?;
    }
    Ok(tls)
}

/// The address that other nodes are told, for a listener at `bound`.
fn told(settings: &ClusterSettings, bound: SocketAddr) -> String {
    let port = bound.port();
    match settings.address.as_deref() {
        None => bound.to_string(),
        Some(text) if text.parse::<Ipv6Addr>().is_ok() => format!("[{text}]:{port}"),
        Some(text) if text.ends_with(']') || !text.contains(':') => format!("{text}:{port}"),
        Some(text) => text.to_owned(),
    }
}

impl RunningNode {
    /// The way to other nodes.
    pub(super) fn forwarder(&self) -> Option<Arc<Forwarder>> {
        let node = self.live.node.clone();
        let most = open_files::of_peers(&self.config).max_connections;
        let peers = self.live.start.tls.peers()?.clone();
        Some(Arc::new(Forwarder::new(node, peers, most)))
    }

    /// Takes requests that other nodes pass on, and tells them where.
    pub(super) fn accept_peers(&mut self, listener: TcpListener) -> Result<(), NodeError> {
        let Some(peers) = self.live.start.tls.peers() else { return Ok(()) };
        let node = &self.live.node;
        let bound = listener.local_addr().map_err(NodeError::new)?;
        let at = told(&self.config.cluster, bound);
        node.store.tell(|facts| facts.cluster.clone_from(&at));
        let (tls, limits) = (peers.acceptor(), open_files::of_peers(&self.config));
        let (routes, stopped) = (cresset_api::router_for_peers(self.api()), self.stop.clone());
        self.surfaces.spawn(async move {
            cresset_transport::serve(listener, Some(tls), routes, &limits, stopped).await;
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_told_a_whole_address() {
        let check = |address: Option<&str>, expect: &str| {
            let address = address.map(str::to_owned);
            let settings = ClusterSettings { address, ..ClusterSettings::default() };
            assert_eq!(told(&settings, "10.0.0.7:9443".parse().unwrap()), expect);
        };
        check(None, "10.0.0.7:9443");
        check(Some("node1.example"), "node1.example:9443");
        check(Some("node1.example:1"), "node1.example:1");
        check(Some("10.0.0.8"), "10.0.0.8:9443");
        check(Some("fd00::1"), "[fd00::1]:9443");
        check(Some("[fd00::1]"), "[fd00::1]:9443");
        check(Some("[fd00::1]:1"), "[fd00::1]:1");
    }
}
