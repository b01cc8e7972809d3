//! A client's socket as the HTTP library sees it. It hands on only heads that were examined, ends
//! slow clients (slowloris, and those that refuse bytes), and loses no last answer.
//!
//! An HTTP/1 head is held back until it is whole and was found good. In place of a refused head the
//! library gets a request of our own, the last one of the connection; the service answers it with
//! the refusal. So every response, to broken requests too, is made in one place and looks alike.

use super::http1_head::{self, RequestHead};
use crate::HeadError;
use crate::HttpSettings;
use bytes::{Buf, BytesMut};
use cresset_tls::Socket;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// Why the connection's last request is refused, once a head was refused.
pub(super) type HeadRefusal = Arc<OnceLock<HeadError>>;

/// The request that replaces a refused head.
const LAST_REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";

/// Room made for a head before each read, bytes.
const HEAD_ROOM: usize = 4096;

pub(super) struct ClientStream {
    socket: Socket,
    limits: Arc<HttpSettings>,
    /// Bytes read from the socket and not handed on.
    buffer: BytesMut,
    /// Bytes of the buffer that may be handed on now.
    passed: usize,
    /// Bytes after those that pass unexamined: the rest of a body, or all of HTTP/2.
    body: u64,
    /// Bytes of the buffer in which the head's end was searched.
    looked: usize,
    /// Runs while a head has begun and is not complete.
    head_due: Option<Pin<Box<Sleep>>>,
    refusal: HeadRefusal,
    /// Runs while the client refuses bytes.
    stall: Option<Pin<Box<Sleep>>>,
    /// Runs while unread bytes are thrown away after the last answer.
    linger: Option<Pin<Box<Sleep>>>,
}

impl ClientStream {
    /// `read` was read from the socket before.
    pub(super) fn http1(
        socket: Socket,
        read: BytesMut,
        limits: Arc<HttpSettings>,
        refusal: HeadRefusal,
    ) -> Self {
        Self {
            socket,
            limits,
            buffer: read,
            passed: 0,
            body: 0,
            looked: 0,
            head_due: None,
            refusal,
            stall: None,
            linger: None,
        }
    }

    /// Passes everything on as it is: HTTP/2 has one framing only.
    pub(super) fn http2(socket: Socket, read: BytesMut, limits: Arc<HttpSettings>) -> Self {
        let passed = read.len();
        Self { passed, body: u64::MAX, ..Self::http1(socket, read, limits, HeadRefusal::default()) }
    }

    /// Reads on until the next head may be handed on. False at the end of the connection.
    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        loop {
            // Some clients send an empty line after a body.
            while self.buffer.starts_with(b"\r\n") {
                self.buffer.advance(2);
                self.looked = 0;
            }
            match http1_head::examine(&self.buffer, &mut self.looked, &self.limits) {
                Ok(Some(head)) => return Poll::Ready(Ok(self.pass(head))),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Ok(self.refuse(error))),
            }
            self.buffer.reserve(HEAD_ROOM);
            match pin!(self.socket.read_buf(&mut self.buffer)).poll(cx) {
                Poll::Ready(Ok(0)) => return Poll::Ready(Ok(false)),
                Poll::Ready(read) => drop(read?),
                Poll::Pending if self.buffer.is_empty() => return Poll::Pending,
                Poll::Pending => {
                    let time = Duration::from_secs(self.limits.header_seconds);
                    ready!(
                        self.head_due
                            .get_or_insert_with(|| Box::pin(sleep(time)))
                            .as_mut()
                            .poll(cx)
                    );
                    return Poll::Ready(Ok(self.refuse(HeadError::Timeout)));
                }
            }
        }
    }

    fn pass(&mut self, RequestHead { length, body }: RequestHead) -> bool {
        let of_body = usize::try_from(body).unwrap_or(usize::MAX).min(self.buffer.len() - length);
        self.passed = length + of_body;
        self.body = body - of_body as u64;
        self.looked = 0;
        self.head_due = None;
        true
    }

    fn refuse(&mut self, error: HeadError) -> bool {
        self.buffer = LAST_REQUEST.into();
        self.passed = LAST_REQUEST.len();
        // Nothing is handed on after the refusal, so it is set once.
        self.refusal.get_or_init(|| error);
        true
    }

    fn poll_body(&mut self, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let most = usize::try_from(self.body).unwrap_or(usize::MAX).min(out.remaining());
        let mut part = ReadBuf::new(out.initialize_unfilled_to(most));
        ready!(Pin::new(&mut self.socket).poll_read(cx, &mut part))?;
        let count = part.filled().len();
        out.advance(count);
        self.body -= count as u64;
        Poll::Ready(Ok(()))
    }

    /// Passes a write's result on, unless the client has refused bytes for too long.
    fn watch_stall<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stall = None;
            return written;
        }
        let time = Duration::from_secs(self.limits.write_stall_seconds);
        ready!(self.stall.get_or_insert_with(|| Box::pin(sleep(time))).as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes no bytes")))
    }

    /// Whether the client may be sending bytes that will not be read.
    fn has_unread(&self) -> bool {
        self.body > 0 || !self.buffer.is_empty() || self.refusal.get().is_some()
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            if self.passed > 0 {
                let count = self.passed.min(out.remaining());
                out.put_slice(&self.buffer.split_to(count));
                self.passed -= count;
                return Poll::Ready(Ok(()));
            }
            if self.body > 0 {
                return self.poll_body(cx, out);
            }
            if self.refusal.get().is_some() {
                return Poll::Pending;
            }
            if !ready!(self.poll_head(cx))? {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.watch_stall(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, slices);
        self.watch_stall(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.socket).poll_flush(cx);
        self.watch_stall(cx, flushed)
    }

    /// Closes, then discards what still arrives for a while: a socket closed over unread bytes is
    /// reset, and a reset destroys the answer on its way.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.linger.is_none() {
            let closed = Pin::new(&mut self.socket).poll_shutdown(cx);
            ready!(self.watch_stall(cx, closed))?;
        }
        let time = Duration::from_secs(self.limits.linger_seconds);
        while self.has_unread() {
            let linger = self.linger.get_or_insert_with(|| Box::pin(sleep(time)));
            if linger.as_mut().poll(cx).is_ready() {
                break;
            }
            let mut thrown = [0; HEAD_ROOM];
            let mut thrown = ReadBuf::new(&mut thrown);
            ready!(Pin::new(&mut self.socket).poll_read(cx, &mut thrown))?;
            if thrown.filled().is_empty() {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }
}
