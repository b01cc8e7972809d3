//! The operator's side of the node, never reachable from the public listener: commands over a Unix
//! socket in the data folder, and health, readiness and metrics over TCP.

pub mod admin;
pub mod command;
mod health;
mod lists;
mod long_commands;
pub mod metrics;
mod receipt_check;
pub mod socket;
mod start;
pub mod status;
pub mod view;

pub use admin::Operator;
pub use command::{AdminCommand, AdminError, RequestScope};
pub use long_commands::LongCommands;
pub use start::{OperatorRoutes, StartPhase, StartState};

use crate::request::Services;
use serde_json::Value;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// Asks the node to take over what changed; it answers with what it took over.
pub type Reloads = mpsc::Sender<oneshot::Sender<Value>>;

/// An assembled node, its addresses and what is left of its start.
pub struct Live {
    pub node: Arc<Services>,
    pub start: Arc<StartState>,
    pub long_commands: LongCommands,
    pub reloads: Reloads,
}
