//! The metrics of a gateway in a process of its own: a listener for this machine alone.

use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use cresset_telemetry::{ProcessSample, RelayMetrics, metrics_text};
use cresset_transport::{HostGuard, HttpSettings};
use hyper::StatusCode;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Listens on `address`. The error is a sentence that says what to change.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, String> {
    if !address.ip().to_canonical().is_loopback() {
        return Err(format!(
            "{address} can be reached from other machines, and metrics ask for no credential: use \
             127.0.0.1"
        ));
    }
    let bound = TcpListener::bind(address).await;
    bound.map_err(|error| format!("cannot listen on {address}: {error}"))
}

/// Answers `/metrics` on `listener` until `shutdown`.
pub async fn serve(
    listener: TcpListener,
    metrics: RelayMetrics,
    limits: HttpSettings,
    shutdown: CancellationToken,
) {
    let Ok(address) = listener.local_addr() else { return };
    let (metrics, names) = (Arc::new(metrics), HostGuard::new(address, &[]));
    let scrape = move |request: Request| {
        let answer = answer(&metrics, &names, &request);
        async move { answer }
    };
    let routes = Router::new().route("/metrics", get(scrape));
    cresset_transport::serve(listener, None, routes, &limits, shutdown).await;
}

fn answer(metrics: &RelayMetrics, names: &HostGuard, request: &Request) -> Response {
    match names.refusal(request.uri(), request.headers()) {
        Some(why) => (StatusCode::FORBIDDEN, why.text()).into_response(),
        None => {
            metrics_text(request.headers(), metrics.text(ProcessSample::take())).into_response()
        }
    }
}
