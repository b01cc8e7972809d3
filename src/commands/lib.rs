//! What operators ask of a node, without HTTP: commands as data, who may give them, what was done,
//! and the state of a node. The command line executes them on a store alone, or sends them to a
//! running node.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod account_names;
mod acts;
mod admin;
mod budgets;
mod closing;
mod command;
mod error;
mod gpus;
mod jobs;
mod last_backups;
mod lists;
mod long_commands;
pub mod metrics;
mod node_commands;
mod operator;
mod receipt_check;
mod role;
mod roles;
mod sessions;
pub mod socket;
mod start;
mod status;
mod tokens;
mod upgrade;
pub mod view;
mod written_names;
mod wrong_tokens;

pub use acts::ACTS;
pub use command::{AdminCommand, RequestScope};
pub use error::AdminError;
pub use gpus::WatchedGpu;
pub use jobs::{ModelJob, ModelJobs, OwnProgram};
pub use long_commands::LongCommands;
pub use operator::Operator;
pub use role::Role;
pub use roles::Actor;
pub use sessions::{Notice, SessionView, Sessions};
pub use start::{StartPhase, StartState};
pub use status::{
    certificate_to_renew, context_words, not_ready_because, of as status, proof_to_renew, starting,
    stopped,
};
pub use tokens::{OperatorTokens, TOKENS, digest};
pub use wrong_tokens::TokenRefusal;

use acts::ActLog;
use cresset_catalogue::Catalogue;
use cresset_request::{Plan, Services};
use cresset_store::RequestSettings;
use last_backups::LastBackups;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Asks the node to take over what changed; it answers with what it took over.
pub type Reloads = mpsc::Sender<oneshot::Sender<Value>>;

/// What commands take from the configuration, as it was at the start.
#[derive(Clone, Debug)]
pub struct OperatorSettings {
    /// For accounts that are changed while no node runs.
    pub plans: BTreeMap<String, Plan>,
    /// Beginning of every credential.
    pub prefix: String,
    pub requests: RequestSettings,
    /// Folders of this machine from which models are added by others than the node's own user.
    pub folders: Vec<PathBuf>,
}

/// Files of the data folder beside the ledger: who may give commands from afar, what operators did,
/// the manifests, and the times of backups.
pub struct OperatorFiles {
    pub tokens: OperatorTokens,
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
    pub settings: OperatorSettings,
    pub start: Arc<StartState>,
    pub long_commands: LongCommands,
    pub reloads: Reloads,
    pub files: OperatorFiles,
    pub gpus: Vec<WatchedGpu>,
    /// Who looks at the operator's page.
    pub sessions: Sessions,
    pub jobs: ModelJobs,
    /// Held while another program is to take this one's place.
    pub upgrading: tokio::sync::Mutex<()>,
    /// How jobs call this program.
    pub program: OwnProgram,
    /// Tells that another process has taken the listeners.
    pub handed_over: CancellationToken,
}

#[cfg(test)]
fn test_settings() -> OperatorSettings {
    OperatorSettings {
        plans: BTreeMap::from([("default".into(), Plan::default())]),
        prefix: "cresset".into(),
        requests: RequestSettings::default(),
        folders: Vec::new(),
    }
}
