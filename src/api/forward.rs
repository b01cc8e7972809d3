//! Passes requests on to the other nodes of a shared ledger.
//!
//! A request goes as it came, with its client's own credential, and its answer comes back as the
//! other node sends it. That node checks everything itself, because nodes vouch for nobody. Each
//! request has a connection of its own, so that a client that goes away is noticed there as well. A
//! request goes one hop: what came from another node is never passed on.

use super::access_log::{AccessLine, Hop};
use axum::body::Body;
use axum::extract::FromRequestParts;
use axum::http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use axum::http::request::Parts;
use axum::http::{Request, Uri};
use axum::response::Response;
use axum::{Extension, Router};
use bytes::Bytes;
use cresset_request::{Services, lease_lost};
use cresset_store::ListedNode;
use cresset_tls::PeerTls;
use futures_util::future::BoxFuture;
use futures_util::stream;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

/// Marks a request that another node has passed on.
pub(super) const FORWARDED: HeaderName = HeaderName::from_static("x-cresset-forwarded");

/// The longest time until another node has accepted a connection and shown its certificate.
const CONNECT: Duration = Duration::from_secs(2);

/// Headers about one connection; the length is told anew.
const OF_CONNECTION: [HeaderName; 9] = [
    CONNECTION,
    CONTENT_LENGTH,
    EXPECT,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// The way to other nodes.
pub struct Forwarder {
    services: Arc<Services>,
    peers: Arc<PeerTls>,
    /// One for each connection.
    places: Arc<Semaphore>,
}

/// Extracts the way to other nodes. There is none for a request that came from one of them.
pub struct Onward(pub Option<Arc<Forwarder>>);

impl<S: Sync> FromRequestParts<S> for Onward {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let forwarder = parts.extensions.get::<Arc<Forwarder>>();
        Ok(Self(forwarder.filter(|_| !parts.headers.contains_key(FORWARDED)).cloned()))
    }
}

/// Lets the handlers of `routes` pass requests on, where there is a way.
pub fn forwarding(routes: Router, forwarder: Option<Arc<Forwarder>>) -> Router {
    match forwarder {
        Some(forwarder) => routes.layer(Extension(forwarder)),
        None => routes,
    }
}

/// What an answer needs as long as it is under way.
struct OpenExchange {
    /// Drives the connection, which closes with it.
    _connection: AbortOnDropHandle<()>,
    _place: OwnedSemaphorePermit,
    /// Ends when the other node has lost its lease.
    lost: BoxFuture<'static, ()>,
    services: Arc<Services>,
}

impl Forwarder {
    /// `most` connections are open at once.
    pub fn new(services: Arc<Services>, peers: Arc<PeerTls>, most: usize) -> Self {
        Self { services, peers, places: Arc::new(Semaphore::new(most)) }
    }

    /// The answer of the first of these nodes that gives one; `None` if none does.
    pub(super) async fn send(
        &self,
        nodes: &[ListedNode],
        head: &Parts,
        body: &Bytes,
        line: &AccessLine,
    ) -> Option<Response> {
        for node in nodes {
            match self.ask(node, head, body).await {
                Ok(answer) => {
                    line.passed(Hop::Sent);
                    self.services.metrics.forwarded("answered");
                    return Some(answer);
                }
                Err(why) => {
                    let ListedNode { boot, facts, .. } = node;
                    tracing::warn!(%boot, at = facts.cluster, why, "a node gave no answer");
                }
            }
        }
        if !nodes.is_empty() {
            self.services.metrics.forwarded("unreachable");
        }
        None
    }

    async fn ask(&self, node: &ListedNode, head: &Parts, body: &Bytes) -> Result<Response, String> {
        let place = self.places.clone().try_acquire_owned();
        let place = place.map_err(|_| "cluster.max_connections are open to other nodes")?;
        let told = &node.facts.cluster;
        let address = self.peers.address(told)?;
        let connecting = timeout(CONNECT, address.connect()).await;
        let socket = connecting.map_err(|_| "it took too long to connect")?.map_err(shown)?;
        let (mut sender, connection) = handshake(TokioIo::new(socket)).await.map_err(shown)?;
        let connection = AbortOnDropHandle::new(tokio::spawn(async move {
            // Its failure is that of the exchange.
            let _ = connection.await;
        }));
        let (services, boot) = (self.services.clone(), node.boot);
        let lost = Box::pin(async move { lease_lost(&services, boot).await });
        let services = self.services.clone();
        let mut open = OpenExchange { _connection: connection, _place: place, lost, services };
        let answer = tokio::select! {
            answer = sender.send_request(request(head, body, told)?) => answer.map_err(shown)?,
            () = &mut open.lost => return Err("it has lost its lease".into()),
        };
        let (mut head, body) = answer.into_parts();
        // How the other node framed its answer says nothing of this one's.
        for name in [CONNECTION, TRANSFER_ENCODING] {
            head.headers.remove(name);
        }
        Ok(Response::from_parts(head, passed_on(body, open)))
    }
}

fn shown(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The same request for another node, which is told to be at `authority`.
fn request(head: &Parts, body: &Bytes, authority: &str) -> Result<Request<Full<Bytes>>, String> {
    let mut headers: HeaderMap = head.headers.clone();
    for name in OF_CONNECTION {
        headers.remove(name);
    }
    // HTTP/2 has no such header.
    let host = head.uri.authority().map_or(authority, |named| named.as_str());
    headers.entry(HOST).or_insert(HeaderValue::from_str(host).map_err(shown)?);
    headers.insert(FORWARDED, HeaderValue::from_static("1"));
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut request = Request::new(Full::new(body.clone()));
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = path.parse::<Uri>().map_err(shown)?;
    *request.headers_mut() = headers;
    Ok(request)
}

/// The body of an answer, piece by piece. It breaks off when that of the other node does, or when
/// that node has lost its lease.
fn passed_on(body: Incoming, open: OpenExchange) -> Body {
    let pieces = stream::unfold(Some((body, open)), async |state| {
        let (mut body, mut open) = state?;
        let frame = tokio::select! {
            frame = body.frame() => frame?.map_err(shown),
            () = &mut open.lost => Err("it has lost its lease".to_owned()),
        };
        Some(match frame {
            Ok(frame) => (Ok(frame.into_data().unwrap_or_default()), Some((body, open))),
            Err(why) => {
                tracing::warn!(why, "the answer of another node broke off");
                open.services.metrics.forwarded("broken");
                (Err(io::Error::other(why)), None)
            }
        })
    });
    Body::from_stream(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_goes_as_it_came_but_for_what_is_about_the_connection() {
        let (head, ()) = Request::post("/v1/chat/completions?a=b")
            .header("Host", "api.example")
            .header("Authorization", "Bearer secret")
            .header("Connection", "keep-alive")
            .header("Transfer-Encoding", "chunked")
            .header("X-Own", "one")
            .header("X-Own", "two")
            .body(())
            .unwrap()
            .into_parts();
        let sent = request(&head, &Bytes::from_static(b"{ }"), "10.0.0.7:9443").unwrap();
        assert_eq!(
            (sent.method().as_str(), sent.uri().to_string()),
            ("POST", head.uri.to_string())
        );
        let told: Vec<_> =
            sent.headers().iter().map(|(name, value)| (name.as_str(), value)).collect();
        let expect = [
            ("host", "api.example"),
            ("authorization", "Bearer secret"),
            ("x-own", "one"),
            ("x-own", "two"),
            ("x-cresset-forwarded", "1"),
        ];
        assert_eq!(told.len(), expect.len(), "{told:?}");
        for (name, value) in expect {
            assert!(told.iter().any(|(n, v)| *n == name && *v == value), "{name}: {told:?}");
        }
        let (head, ()) =
            Request::delete("https://api.example/v1/requests/1").body(()).unwrap().into_parts();
        let sent = request(&head, &Bytes::new(), "10.0.0.7:9443").unwrap();
        assert_eq!(
            (sent.uri().to_string(), &sent.headers()["host"]),
            ("/v1/requests/1".into(), &HeaderValue::from_static("api.example"))
        );
    }
}
