//! Cresset: an inference node with an exact ledger, for your own program or as a server.
//!
//! `ARCHITECTURE.md` beside this file is the map of its crates.

pub use cresset_node::*;
