//! The accept loop of an HTTP surface, with every time limit and bound against hostile or broken
//! clients.

use super::client_stream::{ClientStream, HeadRefusal};
use super::connections::{
    ConnectionPermit, ConnectionPermits, Peer, UnheardConnection, UnheardConnections,
};
use super::http2::{self, KeptBody, Streams};
use crate::HttpSettings;
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Request, header};
use axum::response::Response;
use bytes::BytesMut;
use cresset_tls::Socket;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2 as hyper_http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

/// The pause before accepting again when the process is out of file descriptors: long enough for a
/// connection to end, short beside a client's patience.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Time for the first bytes of a connection that was accepted just before the end.
const LATE_START: Duration = Duration::from_millis(250);
/// That time passes in steps of this length, because no client can send while the whole machine
/// stands still, and a standstill makes one step longer and not all of them.
const LATE_STEP: Duration = Duration::from_millis(10);
/// An HTTP/2 client sends this first.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes added to the library's own bounds, so that ours are reached first and answered like any
/// other refusal.
const SLACK: usize = 96 << 10;

/// Serves `router`, with TLS if there is a `tls`, until `shutdown`, then lets open exchanges end.
/// Nothing new is accepted meanwhile.
pub async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    router: Router,
    limits: &HttpSettings,
    shutdown: CancellationToken,
) {
    let limits = Arc::new(limits.clone());
    let slots = Arc::new(Semaphore::new(limits.max_connections));
    let permits = ConnectionPermits::new(limits.max_connections_per_ip);
    let unheard = UnheardConnections::default();
    let connections = TaskTracker::new();
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        let Ok((socket, address)) = accepted else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let peer = Peer::from(address.ip());
        let Some(permit) = permits.take(peer) else { continue };
        // What was accepted is not dropped for a shutdown while there is a place for it.
        let free = slots.clone().try_acquire_owned().ok();
        let slot = match free {
            Some(slot) => slot,
            None => match shutdown.run_until_cancelled(slot(&slots, &unheard)).await {
                Some(Ok(slot)) => slot,
                _ => break,
            },
        };
        let connection = ClientConnection {
            peer,
            tls: tls.clone(),
            router: router.clone(),
            limits: limits.clone(),
            shutdown: shutdown.clone(),
            unheard: unheard.enter().into(),
            _slot: slot,
            _permit: permit,
        };
        connections.spawn(connection.serve(socket));
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

/// A place for a connection while all are taken: the one that has sent no request for longest gives
/// up its own.
async fn slot(
    slots: &Arc<Semaphore>,
    unheard: &UnheardConnections,
) -> Result<OwnedSemaphorePermit, AcquireError> {
    unheard.close_oldest();
    slots.clone().acquire_owned().await
}

struct ClientConnection {
    peer: Peer,
    tls: Option<TlsAcceptor>,
    router: Router,
    limits: Arc<HttpSettings>,
    shutdown: CancellationToken,
    unheard: Arc<UnheardConnection>,
    _slot: OwnedSemaphorePermit,
    _permit: ConnectionPermit,
}

impl ClientConnection {
    async fn serve(self, socket: TcpStream) {
        let unheard = self.unheard.clone();
        tokio::select! {
            () = unheard.closed() => {}
            () = self.converse(socket) => {}
        }
    }

    async fn converse(self, socket: TcpStream) {
        // Without it the few bytes of a token would wait for the acknowledgement of the previous
        // ones.
        if socket.set_nodelay(true).is_err() {
            return;
        }
        let begun = async {
            let mut socket = self.secured(socket).await?;
            let read = greet(&mut socket, &self.limits).await?;
            Some((socket, read))
        };
        let begun = tokio::select! {
            biased;
            begun = begun => begun,
            () = self.ending(LATE_START) => None,
        };
        let ended = match begun {
            None => return,
            Some((socket, read)) if read.starts_with(PREFACE) => self.http2(socket, read).await,
            Some((socket, read)) => self.http1(socket, read).await,
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection ended early");
        }
    }

    /// Returns when the listener has closed and the connection, if it waits for a request, is to
    /// end: after `patience` where the first one has not arrived.
    async fn ending(&self, patience: Duration) {
        self.shutdown.cancelled().await;
        let mut waited = Duration::ZERO;
        while self.unheard.is_unheard() && waited < patience {
            sleep(LATE_STEP).await;
            waited += LATE_STEP;
        }
    }

    /// The connection, with TLS where the listener speaks it. `None` when the client does not, or
    /// takes too long.
    async fn secured(&self, socket: TcpStream) -> Option<Socket> {
        let Some(tls) = &self.tls else { return Some(Either::Left(socket)) };
        let HttpSettings { first_byte_seconds, header_seconds, .. } = *self.limits;
        let time = Duration::from_secs(first_byte_seconds + header_seconds);
        match timeout(time, Box::pin(tls.accept(socket))).await.ok()? {
            Ok(socket) => Some(Either::Right(Box::new(socket.into()))),
            Err(error) => {
                tracing::debug!(%error, "a client does not speak TLS as this listener does");
                None
            }
        }
    }

    async fn http1(self, socket: Socket, read: BytesMut) -> hyper::Result<()> {
        let refusal = HeadRefusal::default();
        let io =
            TokioIo::new(ClientStream::http1(socket, read, self.limits.clone(), refusal.clone()));
        let (router, peer, unheard) = (self.router.clone(), self.peer, self.unheard.clone());
        let service = service_fn(move |request: Request<Incoming>| {
            unheard.heard();
            let (router, refused) = (router.clone(), refusal.get().cloned());
            async move {
                match refused {
                    Some(error) => Ok(error.response()),
                    None => answer(router, peer, request.map(Body::new)).await,
                }
            }
        });
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            // Heads arrive complete and have a timer of their own: this one covers only the wait
            // between two requests.
            .header_read_timeout(Duration::from_secs(self.limits.idle_seconds))
            .max_headers(self.limits.max_headers)
            .max_buf_size(self.limits.max_header_bytes + SLACK);
        let mut connection = pin!(builder.serve_connection(io, service));
        // The first request has begun, so that it may take the time of every head.
        let patience = Duration::from_secs(self.limits.header_seconds);
        tokio::select! {
            biased;
            ended = connection.as_mut() => ended,
            () = self.ending(patience) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        }
    }

    async fn http2(self, socket: Socket, read: BytesMut) -> hyper::Result<()> {
        let stall = Duration::from_secs(self.limits.write_stall_seconds);
        let idle = Duration::from_secs(self.limits.idle_seconds);
        let linger = Duration::from_secs(self.limits.linger_seconds);
        let streams = Streams::new(stall);
        let builder = http2_builder(&self.limits, streams.clone());
        let io = TokioIo::new(ClientStream::http2(socket, read, self.limits.clone()));
        let (router, peer, unheard) = (self.router.clone(), self.peer, self.unheard.clone());
        let service = service_fn(move |request: Request<Incoming>| {
            unheard.heard();
            let router = router.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = KeptBody::new(body);
                let request = Request::from_parts(head, Body::new(body.clone()));
                let response = answer(router, peer, request).await?;
                Ok::<_, Infallible>(http2::timed(response, body, linger))
            }
        });
        let mut connection = pin!(builder.serve_connection(io, service));
        let patience = tokio::select! {
            biased;
            ended = connection.as_mut() => return ended,
            () = self.ending(LATE_START) => Duration::MAX,
            () = streams.idle(idle) => stall,
        };
        connection.as_mut().graceful_shutdown();
        timeout(patience, connection).await.unwrap_or(Ok(()))
    }
}

/// Reads enough of the first bytes to tell HTTP/1 from HTTP/2. `None` when they do not come in
/// time.
async fn greet(socket: &mut Socket, limits: &HttpSettings) -> Option<BytesMut> {
    let mut read = BytesMut::with_capacity(4096);
    let first =
        timeout(Duration::from_secs(limits.first_byte_seconds), socket.read_buf(&mut read)).await;
    first.ok()?.ok().filter(|count| *count > 0)?;
    let rest = async {
        while read.len() < PREFACE.len() && PREFACE.starts_with(&read) {
            if socket.read_buf(&mut read).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        io::Result::Ok(())
    };
    timeout(Duration::from_secs(limits.header_seconds), rest).await.ok()?.ok()?;
    Some(read)
}

fn http2_builder(limits: &HttpSettings, streams: Streams) -> hyper_http2::Builder<Streams> {
    let mut builder = hyper_http2::Builder::new(streams);
    builder
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(limits.max_header_bytes + SLACK).unwrap_or(u32::MAX))
        .max_concurrent_streams(limits.max_http2_streams)
        .max_pending_accept_reset_streams(limits.max_http2_resets)
        .max_local_error_reset_streams(limits.max_http2_resets)
        .keep_alive_interval(Duration::from_secs(limits.http2_ping_seconds))
        .keep_alive_timeout(Duration::from_secs(limits.write_stall_seconds));
    builder
}

async fn answer(
    router: Router,
    peer: Peer,
    mut request: Request<Body>,
) -> Result<Response, Infallible> {
    request.extensions_mut().insert(peer);
    let chunked = request.headers().contains_key(header::TRANSFER_ENCODING);
    let mut response = router.oneshot(request).await?;
    if chunked {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}
