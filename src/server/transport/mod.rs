//! Transport: sockets, connections and their limits, HTTP/1 heads, HTTP/2 streams.

pub mod auth_failures;
#[cfg(feature = "self-test")]
pub mod changed_exchange;
mod client_stream;
pub mod connections;
pub mod http1_head;
mod http2;
pub mod listener;
