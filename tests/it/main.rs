//! Everything that is tested from outside, in one binary: a file per subject.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod api;
mod cli;
mod clients;
mod crash;
mod fleet;
mod hostile;
mod idempotency;
mod lifecycle;
mod operator;
mod process;
mod release;
mod secrecy;
mod soak;
mod sse;
mod support;
mod text_goldens;
mod tidy;
