//! The limits of the HTTP surface.

use cresset_base::section;

section! {
/// Limits of the HTTP surface.
pub struct HttpSettings {
    /// Time for a new connection to send its first byte, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub first_byte_seconds: u64 = 10,
    /// Time to read a request's line and headers, from their first byte, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub header_seconds: u64 = 10,
    /// Time to read a request's body, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub body_seconds: u64 = 30,
    /// Time a client may take no bytes of an answer before its connection is closed, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub write_stall_seconds: u64 = 30,
    /// Time a connection may stay open without a request on it, seconds. It should be longer than
    /// clients keep connections for reuse.
    #[schemars(range(min = 1, max = 86_400))]
    pub idle_seconds: u64 = 120,
    /// Time to go on receiving after a connection's last answer, seconds. Closing while a client
    /// still sends could keep it from reading that answer.
    #[schemars(range(min = 0, max = 60))]
    pub linger_seconds: u64 = 2,
    /// Silence on a stream before a keep-alive comment is sent, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub keep_alive_seconds: u64 = 10,
    /// Number of headers in one request.
    #[schemars(range(min = 8, max = 1_024))]
    pub max_headers: usize = 64,
    /// Size of the request line and headers of one request, bytes.
    #[schemars(range(min = 8_192, max = 1 << 20))]
    pub max_header_bytes: usize = 32 * 1024,
    /// Size of the body of one request, bytes.
    #[schemars(range(min = 1_024, max = 64 << 20))]
    pub max_body_bytes: usize = 256 * 1024,
    /// Open connections in all.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub max_connections: usize = 4096,
    /// Files that the process keeps for the ledger, models and the operator surface. Where the
    /// system allows fewer open files (`ulimit -n`) than these and `max_connections` together,
    /// fewer connections are accepted.
    #[schemars(range(min = 16, max = 1 << 20))]
    pub reserved_files: usize = 128,
    /// Open connections from one IPv4 address or IPv6 /64 network. Further ones are closed at once.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub max_connections_per_ip: usize = 1024,
    /// Concurrent streams on one HTTP/2 connection.
    #[schemars(range(min = 1, max = 65_536))]
    pub max_http2_streams: u32 = 32,
    /// Streams of one HTTP/2 connection that a client may open and reset before they were served.
    #[schemars(range(min = 1, max = 65_536))]
    pub max_http2_resets: usize = 64,
    /// Time between two HTTP/2 pings, which find out that a client is gone, seconds.
    #[schemars(range(min = 1, max = 3_600))]
    pub http2_ping_seconds: u64 = 20,
    /// Failed authentications from one IPv4 address or IPv6 /64 network in a minute. Each further
    /// one closes its connection. A valid credential is accepted all the same, whatever others
    /// behind the same address send.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub failed_auth_per_minute: u32 = 600,
}
}
