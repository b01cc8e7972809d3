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

pub mod cli;
pub mod config;
pub mod gateway;
pub mod node;
pub mod server;
