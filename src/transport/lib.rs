//! Transport of the Cresset node: sockets, connections and their limits, HTTP/1 heads, HTTP/2
//! streams, and protection of listeners without credentials. It knows no request's meaning.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod auth_failures;
#[cfg(feature = "self-test")]
mod changed_exchange;
mod client_stream;
mod connections;
mod head_error;
mod host_guard;
mod http1_head;
mod http2;
mod listener;
mod log_labels;
mod raw_members;
mod settings;

pub use auth_failures::AuthFailures;
#[cfg(feature = "self-test")]
pub use changed_exchange::{ChangedExchange, changed};
pub use connections::Peer;
pub use head_error::{ErrorObject, HeadError, set_headers, set_json};
pub use host_guard::{HostGuard, HostRefusal};
pub use listener::serve;
pub use log_labels::{known_method, route};
pub use raw_members::RawMembers;
pub use settings::HttpSettings;
