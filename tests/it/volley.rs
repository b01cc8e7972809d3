//! Raw connections for races and crashes. Each sends its request except for the last byte; then all
//! last bytes are sent together. An answer that breaks off counts as an answer.

use crate::process::Reply;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// A connection whose request lacks only its last byte.
pub struct Call {
    stream: TcpStream,
    last: u8,
}

impl Call {
    /// `head` is the request line and headers, each with its line end.
    fn new(base: &str, head: &str, body: &str) -> Self {
        let address = base.strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_mins(2))).unwrap();
        let length = body.len();
        let text = format!(
            "{head}Host: {address}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        let (last, ahead) = text.as_bytes().split_last().unwrap();
        stream.write_all(ahead).unwrap();
        Self { stream, last: *last }
    }

    pub fn chat(base: &str, key: &str, id: &str, body: &Value) -> Self {
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n\
             Idempotency-Key: {id}\r\nX-Service-Session-Id: 5f0f3b0a-3c0e-4c3a-9d4e-0b8f6d1c2a11\r\n"
        );
        Self::new(base, &head, &body.to_string())
    }

    pub fn plain(base: &str, method: &str, path: &str, key: &str) -> Self {
        Self::new(base, &format!("{method} {path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"), "")
    }

    fn send(&mut self) {
        // If the node has ended meanwhile, reading the answer will show it.
        let _ = self.stream.write_all(&[self.last]);
    }

    /// Reads the whole answer; `None` if the connection ended before the answer did.
    fn answer(mut self) -> Option<Reply> {
        let mut raw = Vec::new();
        self.stream.read_to_end(&mut raw).ok()?;
        parse(&raw)
    }

    /// Sends one request alone and reads its answer.
    pub fn go(mut self) -> Option<Reply> {
        self.send();
        self.answer()
    }
}

/// Sends all last bytes together and returns the answers in the order of the calls.
pub fn volley(mut calls: Vec<Call>) -> Vec<Option<Reply>> {
    // The pause lets the node read the bytes that were sent ahead.
    std::thread::sleep(Duration::from_millis(50));
    calls.iter_mut().for_each(Call::send);
    let readers: Vec<_> =
        calls.into_iter().map(|call| std::thread::spawn(|| call.answer())).collect();
    readers.into_iter().map(|reader| reader.join().unwrap()).collect()
}

fn parse(raw: &[u8]) -> Option<Reply> {
    let end = raw.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&raw[..end]).ok()?;
    let mut lines = head.split("\r\n");
    let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let headers: BTreeMap<String, String> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, v)| (name.to_lowercase(), v.to_owned()))
        .collect();
    let rest = &raw[end + 4..];
    let body = match headers.get("content-length") {
        Some(length) => rest.get(..length.parse().ok()?)?.to_vec(),
        None => unchunk(rest)?,
    };
    Some(Reply { status, headers, body: String::from_utf8(body).ok()? })
}

/// Joins the chunks up to the empty one that ends them; `None` if that one is missing.
fn unchunk(mut raw: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = raw.windows(2).position(|pair| pair == b"\r\n")?;
        let length = usize::from_str_radix(std::str::from_utf8(&raw[..end]).ok()?, 16).ok()?;
        if length == 0 {
            return Some(body);
        }
        body.extend_from_slice(raw.get(end + 2..end + 2 + length)?);
        raw = raw.get(end + 4 + length..)?;
    }
}
