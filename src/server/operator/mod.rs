//! The operator's side of the node, never reachable from the public listener: commands over a Unix
//! socket in the data folder, and health, readiness and metrics over TCP.

mod account_names;
mod acts;
pub mod admin;
mod budgets;
mod closing;
pub mod command;
mod health;
mod jobs;
mod last_backups;
mod lists;
mod long_commands;
pub mod metrics;
pub mod metrics_text;
mod node_commands;
pub mod page;
mod receipt_check;
mod remote;
mod roles;
pub mod socket;
mod start;
pub mod status;
mod tokens;
mod upgrade;
pub mod view;

pub use acts::ACTS;
pub use admin::Operator;
pub use command::{AdminCommand, AdminError, RequestScope};
pub use jobs::{ModelJob, OwnProgram};
pub use long_commands::LongCommands;
pub use roles::{Actor, Role};
pub use start::{OperatorRoutes, StartPhase, StartState};
pub use tokens::TOKENS;

use crate::config::Config;
use acts::ActLog;
use axum::Router;
use cresset_catalogue::Catalogue;
use cresset_request::Services;
use last_backups::LastBackups;
use page::PageState;
use serde_json::Value;
use std::io;
use std::path::Path;
use std::sync::Arc;
use tokens::OperatorTokens;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Asks the node to take over what changed; it answers with what it took over.
pub type Reloads = mpsc::Sender<oneshot::Sender<Value>>;

/// Files of the data folder beside the ledger: who may give commands from afar, what operators did,
/// the manifests, and the times of backups.
pub struct OperatorFiles {
    tokens: OperatorTokens,
    acts: ActLog,
    catalogue: Catalogue,
    backups: LastBackups,
}

impl OperatorFiles {
    /// Those of a data folder whose ledger this process has. The error names the file that cannot
    /// be read.
    pub fn open(data_dir: &Path) -> io::Result<Self> {
        Ok(Self {
            tokens: OperatorTokens::open(data_dir)?,
            acts: ActLog::open(data_dir)?,
            catalogue: Catalogue::new(data_dir),
            backups: LastBackups::of(data_dir),
        })
    }
}

/// An assembled node, its addresses and what is left of its start.
pub struct Live {
    pub node: Arc<Services>,
    /// As it was at the start.
    pub config: Arc<Config>,
    pub start: Arc<StartState>,
    pub long_commands: LongCommands,
    pub reloads: Reloads,
    pub files: OperatorFiles,
    pub page: PageState,
    /// How jobs call this program.
    pub program: OwnProgram,
    /// Tells that another process has taken the listeners.
    pub handed_over: CancellationToken,
    /// The public surface, which the page's chat asks.
    pub public: Router,
}
