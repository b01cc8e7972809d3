//! The qualification record: what was proven, with which evidence, and when.

use crate::identity::Identity;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Version of the checks and gates. It is raised when one of them changes meaning; older records
/// then no longer count.
pub const POLICY_VERSION: u32 = 1;

/// A qualification record. It is written once and never changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub id: Uuid,
    pub policy_version: u32,
    pub suite: String,
    pub identity: Identity,
    /// Unix seconds.
    pub started_at: u64,
    pub finished_at: u64,
    pub verdict: Verdict,
    /// Sentences that say what the verdict rests on and what it does not cover.
    pub notes: Vec<String>,
    /// The largest prompt + output that really ran with every check passed; 0 when not qualified.
    pub qualified_context_tokens: u32,
    pub checks: Vec<CheckResult>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Qualified,
    Failed,
    /// No check failed, but a required one could not run. The release is not served.
    Inconclusive,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckResult {
    pub id: String,
    pub stage: String,
    pub proves: String,
    pub state: CheckState,
    /// The measured value.
    pub value: String,
    /// The value that was required.
    pub gate: String,
    pub seconds: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckState {
    Passed,
    Failed,
    NotRun,
}

impl Record {
    pub fn failed_checks(&self) -> impl Iterator<Item = &CheckResult> {
        self.checks.iter().filter(|check| check.state == CheckState::Failed)
    }
}
