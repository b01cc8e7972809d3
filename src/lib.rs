//! Cresset: an inference node with an exact ledger, for your own program.
//!
//! [`Node::builder`] makes a node of a configuration and a data folder. [`Node::client`] asks it in
//! the process, and `/v1` over HTTP gets the same answers. The crates below this one are details of
//! the implementation, and change without notice. `ARCHITECTURE.md` beside this file is their map.

#![deny(missing_docs)]

pub use cresset_client::{AnswerStream, ChatAnswer, ClientError};
pub use cresset_commands::{AdminCommand, AdminError};
pub use cresset_node::{Client, Node, NodeBuilder, NodeError, Proving, StartEvent, config};
#[cfg(feature = "prover")]
pub use cresset_prover::{BackgroundProver, ensure_qualified};
