//! Cresset: an embedded inference node with a built-in HTTP API, whose every request is
//! authenticated and billed exactly.
//!
//! `ARCHITECTURE.md` beside this file is the map: which module may use which, and one request's way
//! through them.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

pub mod catalogue;
pub mod cli;
pub mod clock;
pub mod config;
mod durable_file;
pub mod engine;
mod failpoint;
mod file_lock;
pub mod gateway;
pub mod ids;
pub mod ledger;
pub mod metrics;
pub mod node;
pub mod pool;
pub mod recent;
pub mod request;
pub mod server;
pub mod store;
pub mod text;
pub mod tls;
pub mod traces;
