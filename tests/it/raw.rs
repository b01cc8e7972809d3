//! Sends requests as bytes on a socket and reads answers as they come, for requests that no HTTP
//! library would send.

use super::support::{CHAT, World, chat_headers};
use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uuid::Uuid;

/// One answer, parsed from the bytes of a connection that has ended.
#[derive(Clone, Debug)]
pub struct Raw {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Raw {
    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.filter(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value).next()
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }

    /// The bytes without those that differ in every answer: the date and the response's id.
    pub fn steady(&self) -> String {
        let id = self.header("x-request-id").unwrap_or("none");
        let head = self
            .head
            .lines()
            .filter(|line| !line.starts_with("date: "))
            .collect::<Vec<_>>()
            .join("\n");
        format!("{head}\n\n{}", self.body).replace(id, "ID")
    }

    /// Checks the headers that every answer carries, and those that every refusal adds.
    pub fn assert_standard_headers(&self, what: &str) {
        let id = self.header("x-request-id").unwrap_or_default();
        assert!(Uuid::parse_str(id).is_ok(), "{what}: {self:?}");
        assert_eq!(self.header("x-content-type-options"), Some("nosniff"), "{what}");
        assert!(
            self.header("cache-control").is_some_and(|v| v.starts_with("private, no-store")),
            "{what}"
        );
        if self.status >= 400 {
            assert!(
                matches!(self.header("x-should-retry"), Some("true" | "false")),
                "{what}: {self:?}"
            );
            assert_eq!(self.header("content-type"), Some("application/json"), "{what}");
        }
    }
}

/// Sends bytes, then reads until the node closes the connection.
pub async fn talk(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The node may close the connection before it has read everything.
    let _ = stream.write_all(bytes).await;
    until_closed(&mut stream).await
}

pub async fn until_closed(stream: &mut TcpStream) -> String {
    let mut seen = Vec::new();
    // A reset ends the connection as well.
    let _ = tokio::time::timeout(Duration::from_secs(30), stream.read_to_end(&mut seen))
        .await
        .expect("it is closed");
    String::from_utf8_lossy(&seen).into_owned()
}

/// Splits the bytes of a connection into answers; each but the last has a `Content-Length`.
pub fn answers(text: &str) -> Vec<Raw> {
    let mut found = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (head, after) =
            rest.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {text:?}"));
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|code| code.parse().ok())
            .unwrap_or_else(|| panic!("{text:?}"));
        let mut answer = Raw { status, head: head.replace("\r\n", "\n"), body: String::new() };
        let length = match answer.header("content-length") {
            _ if status == 100 => 0,
            Some(length) => length.parse().unwrap(),
            None => after.len(),
        };
        let (body, next) = after.split_at_checked(length).unwrap_or((after, ""));
        body.clone_into(&mut answer.body);
        rest = next;
        found.push(answer);
    }
    found
}

/// Sends these bytes and returns the answer, which must be the only one.
pub async fn ask(address: SocketAddr, bytes: &[u8]) -> Raw {
    let text = talk(address, bytes).await;
    let mut found = answers(&text);
    assert_eq!(
        found.len(),
        1,
        "{}: {text:?}",
        String::from_utf8_lossy(&bytes[..bytes.len().min(80)])
    );
    found.remove(0)
}

/// The header lines of a well-formed completion request.
pub fn header_lines(key: &str, id: Uuid) -> String {
    let headers = chat_headers(key, &id.to_string());
    let lines: Vec<String> =
        headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    format!("host: a\r\n{}", lines.concat())
}

/// The bytes of a whole completion request.
pub fn completion(world: &World, id: Uuid, body: &Value) -> String {
    let body = body.to_string();
    let headers = header_lines(&world.key, id);
    format!("POST {CHAT} HTTP/1.1\r\n{headers}content-length: {}\r\n\r\n{body}", body.len())
}
