//! A kept-alive HTTP/1.1 connection that costs little per answer, so that the node is measured and
//! not the client.

use cresset_tls::{NodeAddress, Socket};
use std::io;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

/// Largest answer that is read into memory, bytes.
const MAX_ANSWER: usize = 16 << 20;

pub(super) struct LoadConnection {
    stream: BufReader<Socket>,
    line: Vec<u8>,
    body: RemainingBody,
}

/// The part of an answer's body that is still to be read.
#[derive(Clone, Copy, Debug, PartialEq)]
enum RemainingBody {
    Done,
    Sized(usize),
    /// Bytes left in the chunk; its line end follows.
    Chunk(usize),
    /// The next line is a chunk's size.
    NextChunk,
    UntilClosed,
}

impl LoadConnection {
    pub(super) async fn open(node: &NodeAddress) -> io::Result<Self> {
        let stream = BufReader::new(node.connect().await?);
        Ok(Self { stream, line: Vec::new(), body: RemainingBody::Done })
    }

    /// Sends a whole request and reads the answer up to its body; returns the status.
    pub(super) async fn send(&mut self, request: &[u8]) -> io::Result<u16> {
        self.stream.get_mut().write_all(request).await?;
        self.read_line().await?;
        let status =
            std::str::from_utf8(&self.line).ok().and_then(|line| line.get(9..12)?.parse().ok());
        let status = status.ok_or_else(|| broken("the answer is not HTTP"))?;
        self.body = RemainingBody::UntilClosed;
        loop {
            self.read_line().await?;
            if self.line.is_empty() {
                return Ok(status);
            }
            if let Some(length) = header(&self.line, "content-length") {
                self.body = RemainingBody::Sized(
                    length.parse().map_err(|_| broken("a content length is no number"))?,
                );
            } else if header(&self.line, "transfer-encoding")
                .is_some_and(|value| value.eq_ignore_ascii_case("chunked"))
            {
                self.body = RemainingBody::NextChunk;
            }
        }
    }

    /// Appends what has arrived of the body, at least one byte; false at its end.
    pub(super) async fn piece(&mut self, out: &mut Vec<u8>) -> io::Result<bool> {
        if self.body == RemainingBody::NextChunk {
            self.body = RemainingBody::Chunk(self.chunk_size().await?);
        }
        let most = match self.body {
            RemainingBody::Chunk(0) => {
                self.read_line().await?;
                self.body = RemainingBody::Done;
                0
            }
            RemainingBody::Done | RemainingBody::NextChunk => 0,
            RemainingBody::Sized(left) | RemainingBody::Chunk(left) => left,
            RemainingBody::UntilClosed => usize::MAX,
        };
        if most == 0 {
            return Ok(false);
        }
        let arrived = self.stream.fill_buf().await?;
        let taken = arrived.len().min(most);
        out.extend_from_slice(&arrived[..taken]);
        self.stream.consume(taken);
        self.took(taken).await
    }

    async fn chunk_size(&mut self) -> io::Result<usize> {
        self.read_line().await?;
        let size = std::str::from_utf8(&self.line).ok();
        size.and_then(|size| usize::from_str_radix(size, 16).ok())
            .ok_or_else(|| broken("a chunk has no size"))
    }

    async fn took(&mut self, taken: usize) -> io::Result<bool> {
        match &mut self.body {
            RemainingBody::Sized(left) | RemainingBody::Chunk(left) if taken > 0 => *left -= taken,
            RemainingBody::UntilClosed => {}
            _ => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
        if self.body == RemainingBody::Chunk(0) {
            self.read_line().await?;
            self.body = RemainingBody::NextChunk;
        }
        Ok(taken > 0)
    }

    /// Reads what is left of the body into `out`.
    pub(super) async fn rest(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        while self.piece(out).await? {
            if out.len() > MAX_ANSWER {
                return Err(broken("the answer is too long"));
            }
        }
        Ok(())
    }

    /// The next line, without its end.
    async fn read_line(&mut self) -> io::Result<()> {
        self.line.clear();
        self.stream.read_until(b'\n', &mut self.line).await?;
        if self.line.pop() != Some(b'\n') {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.line.pop_if(|byte| *byte == b'\r');
        Ok(())
    }
}

/// The value of a header line with this name.
fn header<'a>(line: &'a [u8], name: &str) -> Option<&'a str> {
    let (found, value) = std::str::from_utf8(line).ok()?.split_once(':')?;
    found.eq_ignore_ascii_case(name).then(|| value.trim())
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    /// Status and body that a client reads when a server sends `bytes` and closes the connection.
    async fn read(bytes: &'static str) -> io::Result<(u16, String)> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let node = NodeAddress::new(&url, None).map_err(io::Error::other)?;
        let mut connection = LoadConnection::open(&node).await?;
        let (mut server, _) = listener.accept().await?;
        server.write_all(bytes.as_bytes()).await?;
        drop(server);
        let (status, mut body) = (connection.send(b"").await?, Vec::new());
        connection.rest(&mut body).await?;
        Ok((status, String::from_utf8(body).unwrap()))
    }

    #[tokio::test]
    async fn bodies_end_where_their_framing_says() {
        for (bytes, expect) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc", Some((200, "ab"))),
            ("HTTP/1.1 402 No\r\ncontent-length:0\r\n\r\n", Some((402, ""))),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\na\r\n0123456789\r\n0\r\n\r\nx",
                Some((200, "ab0123456789")),
            ),
            ("HTTP/1.1 200 OK\r\n\r\nall", Some((200, "all"))),
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\nab", None),
            ("SSH-2.0-nothing\r\n", None),
            ("", None),
        ] {
            let found = read(bytes).await.ok();
            assert_eq!(
                found.as_ref().map(|(status, body)| (*status, body.as_str())),
                expect,
                "{bytes:?}"
            );
        }
    }
}
