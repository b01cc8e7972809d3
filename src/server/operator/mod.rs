//! The operator's side of the node, never reachable from the public listener: commands over a Unix
//! socket in the data folder, and health, readiness and metrics over TCP.

pub mod admin;
pub mod command;
mod health;
mod lists;
mod long_commands;
pub mod metrics;
pub mod socket;
pub mod status;
pub mod view;

pub use admin::Operator;
pub use command::{AdminCommand, AdminError, RequestScope};
pub use health::router;
pub use long_commands::LongCommands;

use crate::request::Services;
use std::net::SocketAddr;
use std::sync::Arc;

/// A running node and its addresses.
pub struct Live {
    pub node: Arc<Services>,
    pub public: SocketAddr,
    pub operator: SocketAddr,
    pub long_commands: LongCommands,
}
