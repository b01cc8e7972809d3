//! What a restore did, for the operator.

use cresset_ledger::{Account, Credential, StateError};
use std::path::PathBuf;

/// Whether the replaced ledger could tell who was locked out since the backup was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ReplacedState {
    /// There was none.
    #[default]
    Absent,
    Read,
    /// It, or a part of it, is damaged; the text says how.
    Unreadable(String),
}

/// Rows of the replaced ledger that the backup did not know, and that are gone with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostRows {
    pub accounts: u64,
    pub credentials: u64,
    pub requests: u64,
}

#[derive(Clone, Debug, Default)]
pub struct RestoreReport {
    /// The names under which the replaced files are kept.
    pub replaced_files: Vec<PathBuf>,
    /// The node's own files that were put in place. Those that were the same before are not named.
    pub restored_files: Vec<PathBuf>,
    /// Stored answers of the backup.
    pub answers: u64,
    pub replaced: ReplacedState,
    /// Credentials that are valid in the backup and were revoked in the replaced ledger.
    pub kept_revoked: Vec<Credential>,
    /// Accounts that are active in the backup and were suspended in the replaced ledger.
    pub kept_suspended: Vec<Account>,
    /// Credentials of the backup that are not revoked and that the replaced ledger did not know, or
    /// could not tell.
    pub valid_again: Vec<Credential>,
    /// `None` when the replaced ledger could not be counted.
    pub lost: Option<LostRows>,
}

impl RestoreReport {
    /// Records that a part of the replaced ledger could not be read.
    pub(super) fn doubt(&mut self, error: &StateError) {
        if self.replaced == ReplacedState::Read {
            self.replaced = ReplacedState::Unreadable(error.to_string());
        }
    }
}
