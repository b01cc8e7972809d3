//! Connections to the node, and what the gateway itself asks it.

use super::answer::refuse;
use super::{GatewayRefusal, IDEMPOTENCY_KEY, MODELS, upstream_bounds};
use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::header::{ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use tokio::runtime::Handle;
use tokio_rustls::rustls::ClientConfig;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;
use uuid::Uuid;

/// Times that one request is sent when its connection breaks before an answer begins. Sending it
/// again is safe because it carries the same idempotency key.
pub(super) const SENDS: u32 = 3;
/// Models on a page: the most that the node gives.
const PAGE: u32 = 100;

/// Where the node of a gateway is.
#[derive(Debug)]
pub enum GatewayUpstream {
    /// At `http` or `https`, a host and a port.
    Remote { address: Uri, tls: Box<ClientConfig> },
    /// In this process: its public surface, which takes `prompt` in place of messages here, and
    /// what tells of the prompts of chat requests.
    Here { node: Router, prompts: Router },
}

#[derive(Clone, Debug)]
pub(super) enum NodeConnections {
    Remote(Box<DistantNode>),
    Here { node: Router, prompts: Router },
}

#[derive(Clone, Debug)]
pub(super) struct DistantNode {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    address: Uri,
}

impl NodeConnections {
    pub(super) fn new(upstream: GatewayUpstream) -> Result<Self, String> {
        let (address, tls) = match upstream {
            GatewayUpstream::Here { node, prompts } => return Ok(Self::Here { node, prompts }),
            GatewayUpstream::Remote { address, tls } => (address, tls),
        };
        let is_known = matches!(address.scheme_str(), Some("http" | "https"));
        if !is_known || address.path_and_query().is_some_and(|path| path != "/") {
            return Err(format!("{address}: an address like http://host:port is needed, no path"));
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.enforce_http(false);
        let secured = HttpsConnectorBuilder::new().with_tls_config(*tls).https_or_http();
        let connector = secured.enable_http1().wrap_connector(connector);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self::Remote(Box::new(DistantNode { client, address })))
    }

    /// The node's answer. A relay asks for fewer output tokens where the node says how many are
    /// left, and says which bound of the node a request met.
    pub(super) async fn send(
        &self,
        head: &Parts,
        body: &Bytes,
    ) -> Result<Response<Body>, GatewayRefusal> {
        let remote = match self {
            Self::Here { node, .. } => return Ok(asked_here(node, head, body).await),
            Self::Remote(remote) => remote,
        };
        let answer = remote.send(head, body).await?;
        if !upstream_bounds::may_tell(answer.status()) {
            return Ok(answer);
        }
        let (mut told, refusal) = collected(answer).await?.into_parts();
        if let Some((head, body)) = upstream_bounds::fitted(head, body, &refusal) {
            return remote.send(&head, &body).await;
        }
        told.headers.remove(CONTENT_LENGTH);
        let refusal = upstream_bounds::explained(&refusal).unwrap_or(refusal);
        Ok(Response::from_parts(told, refusal.into()))
    }

    /// The models that the credential of a request can use, as the node describes them. They are
    /// asked for each time, because credentials, plans and models change.
    pub(super) async fn models(&self, of: &Parts) -> Result<Vec<Value>, GatewayRefusal> {
        let mut models = Vec::new();
        let mut path = format!("{MODELS}?limit={PAGE}");
        loop {
            let answer = collected(self.send(&question(of, &path), &Bytes::new()).await?).await?;
            let mut page: Value = serde_json::from_slice(answer.body()).unwrap_or_default();
            let Value::Array(data) = page["data"].take() else {
                let (head, body) = answer.into_parts();
                return Err(super::answer::whole(head, body).into());
            };
            models.extend(data);
            match page["next_after"].as_str() {
                Some(after) => path = format!("{MODELS}?limit={PAGE}&after={after}"),
                None => return Ok(models),
            }
        }
    }
}

impl DistantNode {
    async fn send(&self, head: &Parts, body: &Bytes) -> Result<Response<Body>, GatewayRefusal> {
        let Ok(uri) = self.target(&head.uri) else {
            let why = "the request's path cannot be passed on";
            return Err(refuse(StatusCode::BAD_REQUEST, why, false).into());
        };
        let mut may_have_arrived = false;
        for send in 1..=SENDS {
            match self.client.request(addressed(head, &uri, body)).await {
                Ok(mut response) => {
                    // How the node framed its answer says nothing of the gateway's.
                    for hop in [CONNECTION, TRANSFER_ENCODING] {
                        response.headers_mut().remove(hop);
                    }
                    return Ok(response.map(Body::new));
                }
                Err(error) => {
                    may_have_arrived |= !error.is_connect();
                    tracing::warn!(%error, send, "the node did not answer");
                }
            }
        }
        let why = "the node cannot be reached: see whether it runs";
        Err(refuse(StatusCode::BAD_GATEWAY, why, !may_have_arrived).into())
    }

    pub(super) fn target(&self, asked: &Uri) -> Result<Uri, hyper::http::Error> {
        let path = asked.path_and_query().map_or("/", |path| path.as_str());
        let mut parts = self.address.clone().into_parts();
        parts.path_and_query = Some(path.parse()?);
        Ok(Uri::from_parts(parts)?)
    }
}

/// A request of `head` and `body` for the node's address.
fn addressed(head: &Parts, uri: &Uri, body: &Bytes) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(body.clone()));
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = uri.clone();
    *request.headers_mut() = head.headers.clone();
    request
}

/// The answer of a router in this process. It sees the client's own connection.
pub(super) async fn asked_here(router: &Router, head: &Parts, body: &Bytes) -> Response<Body> {
    let request = Request::from_parts(head.clone(), Body::from(body.clone()));
    let Ok(answer) = router.clone().oneshot(request).await;
    answer
}

/// Cancels the run behind a stream whose client closed it.
#[derive(Debug)]
pub(super) struct StreamStop {
    node: NodeConnections,
    head: Parts,
    /// Ends with the gateway. It closes streams by itself then, and their clients come back.
    closing: CancellationToken,
}

impl StreamStop {
    /// For the request `of`, which the node calls `run`.
    pub(super) fn new(
        node: &NodeConnections,
        of: &Parts,
        run: Uuid,
        closing: &CancellationToken,
    ) -> Self {
        let mut head = question(of, &format!("/v1/requests/{run}"));
        head.method = Method::DELETE;
        Self { node: node.clone(), head, closing: closing.clone() }
    }

    pub(super) fn is_allowed(&self) -> bool {
        !self.closing.is_cancelled()
    }

    /// Asks the node once. After a failure the run ends with the node's own grace.
    pub(super) fn send(self) {
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move { drop(self.node.send(&self.head, &Bytes::new()).await) });
        }
    }
}

/// A question of the gateway's own, under the credential of the request `of`.
pub(super) fn question(of: &Parts, path: &str) -> Parts {
    let (mut head, ()) = Request::new(()).into_parts();
    head.method = Method::GET;
    head.uri = Uri::try_from(path).unwrap_or_else(|_| Uri::from_static(MODELS));
    head.headers = of.headers.clone();
    head.extensions = of.extensions.clone();
    for name in [CONTENT_LENGTH, CONTENT_TYPE, ACCEPT_ENCODING, IDEMPOTENCY_KEY] {
        head.headers.remove(name);
    }
    head
}

/// The whole answer of the node.
pub(super) async fn collected(answer: Response<Body>) -> Result<Response<Bytes>, GatewayRefusal> {
    let (head, body) = answer.into_parts();
    match body.collect().await {
        Ok(body) => Ok(Response::from_parts(head, body.to_bytes())),
        Err(error) => {
            tracing::warn!(%error, "the node's answer broke off");
            let why = "the node's answer broke off";
            Err(refuse(StatusCode::BAD_GATEWAY, why, true).into())
        }
    }
}
