//! The accept loop of an HTTP surface, with every time limit and bound that a hostile or broken client can run into.

use crate::config::Http;
use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

/// Address of the other end of a request's connection.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub IpAddr);

/// A breath before accepting again when the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// HTTP/2 streams a client may open and reset before the connection is closed (the rapid-reset attack).
const MAX_RESET_STREAMS: usize = 64;
const HTTP2_PING: Duration = Duration::from_secs(20);

/// Serves `router` until `shutdown`, then lets open exchanges end. Nothing new is accepted meanwhile.
pub async fn serve(listener: TcpListener, router: Router, limits: &Http, shutdown: CancellationToken) {
    let builder = Arc::new(protocol(limits));
    let graceful = GracefulShutdown::new();
    let seats = Arc::new(Semaphore::new(limits.max_connections));
    let addresses = Addresses::new(limits.max_connections_per_ip);
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => break,
            accepted = accept(&listener, &seats) => accepted,
        };
        let Ok((stream, peer, seat)) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let Some(place) = addresses.enter(peer.ip()) else { continue };
        let connection = Connection { stream, peer: Peer(peer.ip()), _seat: seat, _place: place };
        tokio::spawn(connection.serve(builder.clone(), router.clone(), graceful.watcher(), limits.clone()));
    }
    drop(listener);
    graceful.shutdown().await;
}

async fn accept(
    listener: &TcpListener,
    seats: &Arc<Semaphore>,
) -> io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    let seat = seats.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, peer) = listener.accept().await?;
    Ok((stream, peer, seat))
}

/// HTTP/1.1 and HTTP/2 with prior knowledge, bounded.
fn protocol(limits: &Http) -> auto::Builder<TokioExecutor> {
    let header_bytes = u32::try_from(limits.max_header_bytes).unwrap_or(u32::MAX);
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_secs(limits.header_seconds))
        .max_headers(limits.max_headers)
        .max_buf_size(limits.max_header_bytes);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(header_bytes)
        .max_concurrent_streams(limits.max_http2_streams)
        .max_pending_accept_reset_streams(MAX_RESET_STREAMS)
        .max_local_error_reset_streams(MAX_RESET_STREAMS)
        .keep_alive_interval(HTTP2_PING)
        .keep_alive_timeout(Duration::from_secs(limits.write_stall_seconds));
    builder
}

struct Connection {
    stream: TcpStream,
    peer: Peer,
    _seat: OwnedSemaphorePermit,
    _place: Place,
}

impl Connection {
    async fn serve(self, builder: Arc<auto::Builder<TokioExecutor>>, router: Router, watcher: Watcher, limits: Http) {
        let Self { stream, peer, _seat, _place } = self;
        // Without it a token's few bytes would wait for the acknowledgement of the token before.
        if stream.set_nodelay(true).is_err() {
            return;
        }
        let io = TokioIo::new(TimedStream::new(stream, &limits));
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            router.clone().oneshot(request.map(Body::new))
        });
        let connection = builder.serve_connection(io, service).into_owned();
        if let Err(error) = watcher.watch(connection).await {
            tracing::debug!(%error, "connection ended");
        }
    }
}

/// Connections per address. IPv6 clients count by /64, which is what one customer has.
#[derive(Clone)]
struct Addresses {
    limit: usize,
    open: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// One connection's place in the count; given back on drop.
struct Place {
    address: IpAddr,
    addresses: Addresses,
}

impl Addresses {
    fn new(limit: usize) -> Self {
        Self { limit, open: Arc::default() }
    }

    fn enter(&self, address: IpAddr) -> Option<Place> {
        let address = network(address);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(address).or_default();
        if *count >= self.limit {
            return None;
        }
        *count += 1;
        Some(Place { address, addresses: self.clone() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.addresses.open.lock().unwrap_or_else(PoisonError::into_inner);
        let left = open.get_mut(&self.address).map_or(0, |count| {
            *count -= 1;
            *count
        });
        if left == 0 {
            open.remove(&self.address);
        }
    }
}

fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((u128::from(v6) & !u128::from(u64::MAX)).into()),
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// A socket that gives up on a client which never says anything, or takes no bytes for too long.
struct TimedStream {
    stream: TcpStream,
    /// Runs until the first byte arrives.
    silence: Option<Pin<Box<Sleep>>>,
    /// Runs while a write is refused.
    stall: Option<Pin<Box<Sleep>>>,
    write_stall: Duration,
}

impl TimedStream {
    fn new(stream: TcpStream, limits: &Http) -> Self {
        let silence = Some(Box::pin(tokio::time::sleep(Duration::from_secs(limits.first_byte_seconds))));
        Self { stream, silence, stall: None, write_stall: Duration::from_secs(limits.write_stall_seconds) }
    }

    /// Passes a write's result on, unless the client has refused bytes for too long.
    fn watch_stall<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stall = None;
            return written;
        }
        let write_stall = self.write_stall;
        let stall = self.stall.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + write_stall)));
        ready!(stall.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes no bytes")))
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, buffer) {
            self.silence = None;
            return Poll::Ready(read);
        }
        let Some(silence) = &mut self.silence else { return Poll::Pending };
        ready!(silence.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client says nothing")))
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch_stall(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.watch_stall(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.watch_stall(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.watch_stall(cx, closed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_so_many_places_and_gets_them_back() {
        let addresses = Addresses::new(2);
        let check = |text: &str| addresses.enter(text.parse().unwrap());
        let first = check("10.0.0.1").unwrap();
        let _second = check("::ffff:10.0.0.1").unwrap();
        assert!(check("10.0.0.1").is_none());
        assert!(check("10.0.0.2").is_some());
        drop(first);
        assert!(check("10.0.0.1").is_some());
        let _v6 = (check("2001:db8::1").unwrap(), check("2001:db8::2").unwrap());
        assert!(check("2001:db8::3").is_none(), "one /64 is one customer");
        assert!(check("2001:db8:0:1::1").is_some());
    }
}
