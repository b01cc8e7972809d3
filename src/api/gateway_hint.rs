//! The node's own gateway, as `/v1` tells of it in its refusals: it adds what clients leave out.

use axum::http::header::HOST;
use axum::http::request::Parts;
use axum::http::uri::Authority;
use cresset_transport::Peer;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, OnceLock};

/// Where the gateway is, once there is one.
#[derive(Clone, Debug, Default)]
pub struct GatewayHint {
    pub address: Arc<OnceLock<SocketAddr>>,
    /// Whether it shows a certificate.
    pub is_secured: bool,
    /// Names under which clients on other machines address it.
    pub names: Vec<String>,
}

impl GatewayHint {
    /// What to tell the sender of a request, if there is a gateway, which `does` what was wanted.
    /// The address is told only to those who can reach it there.
    pub fn sentence(&self, head: &Parts, does: &str) -> Option<String> {
        let address = self.address.get()?;
        Some(match self.place(*address, head) {
            Some(place) => {
                let scheme = if self.is_secured { "https" } else { "http" };
                format!("The gateway of this node, {scheme}://{place}, {does}.")
            }
            None => format!("This node has a gateway, which {does}; its operator knows where."),
        })
    }

    /// Host and port at which the sender reaches the gateway. A proxy on this machine sends
    /// requests of others, under a name of its own.
    fn place(&self, address: SocketAddr, head: &Parts) -> Option<String> {
        let host = host(head)?;
        if self.names.iter().any(|name| name.eq_ignore_ascii_case(&host)) {
            return Some(format!("{host}:{}", address.port()));
        }
        let literal = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        let is_here =
            host == "localhost" || literal.is_ok_and(|ip| ip.to_canonical().is_loopback());
        let is_own = head.extensions.get::<Peer>().is_some_and(|peer| peer.is_local());
        let own = match address.ip().to_canonical() {
            ip if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
            ip => ip,
        };
        let reaches = is_here && is_own && own.is_loopback();
        reaches.then(|| SocketAddr::new(own, address.port()).to_string())
    }
}

/// The name by which the request was addressed, in lower case.
fn host(head: &Parts) -> Option<String> {
    let header = head.headers.get(HOST).and_then(|host| host.to_str().ok()?.parse().ok());
    let authority: Authority = header.or_else(|| head.uri.authority().cloned())?;
    Some(authority.host().to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    #[test]
    fn the_address_is_told_to_those_who_reach_it() {
        let told = |listen: &str, host: &str, peer: &str| {
            let hint = GatewayHint { names: vec!["Box.home".into()], ..GatewayHint::default() };
            hint.address.set(listen.parse().unwrap()).unwrap();
            let request = Request::get("/").header(HOST, host).body(()).unwrap();
            let (mut head, ()) = request.into_parts();
            head.extensions.insert(Peer::from(peer.parse::<IpAddr>().unwrap()));
            hint.sentence(&head, "helps").unwrap()
        };
        for (listen, host, peer, place) in [
            ("127.0.0.1:9", "localhost:8080", "127.0.0.1", Some("http://127.0.0.1:9,")),
            ("127.0.0.1:9", "127.0.0.1", "127.0.0.1", Some("http://127.0.0.1:9,")),
            ("[::1]:9", "[::1]:8080", "::1", Some("http://[::1]:9,")),
            ("0.0.0.0:9", "localhost", "127.0.0.1", Some("http://127.0.0.1:9,")),
            ("0.0.0.0:9", "box.home:8080", "10.0.0.9", Some("http://box.home:9,")),
            ("127.0.0.1:9", "localhost", "10.0.0.9", None),
            ("127.0.0.1:9", "node.example", "127.0.0.1", None),
            ("10.0.0.7:9", "localhost", "127.0.0.1", None),
            ("0.0.0.0:9", "10.0.0.7", "10.0.0.9", None),
        ] {
            let told = told(listen, host, peer);
            assert_eq!(told.contains("://"), place.is_some(), "{host} {peer}: {told}");
            assert!(told.contains(place.unwrap_or("operator")), "{host} {peer}: {told}");
        }
        let (head, ()) = Request::get("/").body(()).unwrap().into_parts();
        assert_eq!(GatewayHint::default().sentence(&head, "helps"), None);
    }
}
