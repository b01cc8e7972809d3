//! The qualification record: what was proven, with which evidence, and when.

use crate::canary::CanaryCase;
use crate::checks;
use crate::context_proof::ContextProof;
use crate::goldens::GoldensOrigin;
use crate::identity::{Identity, Origin, Release};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Version of the checks and gates, from `policy.toml`. It is raised when one of them changes
/// meaning; older records then no longer count.
pub const POLICY_VERSION: u32 = crate::policy::VERSION;

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
    #[serde(default)]
    pub grade: Grade,
    /// The release whose reference outputs the comparison used, if not this one.
    #[serde(default)]
    pub like: Option<String>,
    /// The reference outputs that the comparison used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goldens: Option<GoldensOrigin>,
    /// Sentences that say what the verdict rests on and what it does not cover.
    pub notes: Vec<String>,
    /// The largest prompt + output that really ran with every check passed; 0 when not qualified.
    pub qualified_context_tokens: u32,
    pub checks: Vec<CheckResult>,
    /// Positions that every load computes again before the model is served.
    #[serde(default)]
    pub canary: Vec<CanaryCase>,
    /// Tokens a second by what was computed; the full suite measures them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub speed: Vec<(String, f64)>,
    /// What took memory when the checks were done: a part's name and its bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<(String, u64)>,
    /// What became of each fault that was planted to prove that these checks can fail; empty
    /// without a self-test.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub self_test: Vec<SelfTestLine>,
}

/// What became of a planted fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SelfTestLine {
    /// Where it was planted: in a `file`, an `op`, the `scheduler` or over `http`.
    pub place: String,
    pub fault: String,
    /// The check that has to find it; of a harmless change, none.
    pub check: String,
    /// The check that found it, or `the loader`, if it refused the file.
    pub found_by: Option<String>,
    /// Whether it was found; of a harmless change, whether every check that passes for the healthy
    /// release passes for it, too.
    pub right: bool,
    /// What the check measured, or why the file was refused.
    pub told: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Qualified,
    Failed,
    /// No check failed, but a required one could not run. The release is not served.
    Inconclusive,
}

/// The kind of reference that a release's outputs were compared with, the strongest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grade {
    /// Reference outputs of the release itself.
    Reference,
    /// Reference outputs of a sister release.
    Like,
    /// Nothing.
    #[default]
    #[serde(rename = "self")]
    SelfOnly,
}

impl Grade {
    pub fn name(self) -> &'static str {
        match self {
            Self::Reference => "reference",
            Self::Like => "like",
            Self::SelfOnly => "self",
        }
    }

    /// The grade that checks lead to. `like` names the sister release whose outputs they used.
    pub(crate) fn of(checks: &[CheckResult], like: Option<&str>) -> Self {
        let mut compared = checks.iter().filter(|check| check.id.ends_with("goldens")).peekable();
        let all = compared.peek().is_some() && compared.all(|c| c.state != CheckState::NotRun);
        match like {
            _ if !all => Self::SelfOnly,
            None => Self::Reference,
            Some(_) => Self::Like,
        }
    }
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
    /// Curves behind the measured value.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub series: Vec<Series>,
}

/// A measured curve, for the report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    pub name: String,
    /// Names of the two axes, each with its unit.
    pub axes: [String; 2],
    /// In ascending order of the first value.
    pub points: Vec<(f64, f64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckState {
    Passed,
    Failed,
    NotRun,
    /// The model lacks a capability, which is not offered. Nothing else depends on it.
    Withheld,
}

impl CheckState {
    /// Whether the check found what it looks for.
    pub fn is_red(self) -> bool {
        matches!(self, Self::Failed | Self::Withheld)
    }
}

impl Record {
    /// The record with what became of planted faults, as one of its own: checks that missed one
    /// prove nothing.
    #[must_use]
    pub fn with_self_test(self, lines: Vec<SelfTestLine>) -> Self {
        let mut record = Self { id: Uuid::now_v7(), self_test: lines, ..self };
        record.verdict = record.due_verdict();
        if record.verdict != Verdict::Qualified {
            record.qualified_context_tokens = 0;
        }
        record
    }

    /// The record that a check contradicts which was run again while the release was served.
    #[must_use]
    pub fn contradicted_by(&self, proof: &ContextProof) -> Self {
        let mut record =
            Self { id: Uuid::now_v7(), finished_at: proof.finished_at, ..self.clone() };
        for check in &mut record.checks {
            if let Some(again) = proof.checks.iter().find(|again| again.id == check.id) {
                check.clone_from(again);
            }
        }
        let tokens = proof.context_tokens;
        record.notes.push(format!("The checks of {tokens} tokens were run again, and one failed."));
        record.verdict = record.due_verdict();
        record.qualified_context_tokens = 0;
        record
    }

    /// The verdict that checks and planted faults lead to.
    fn due_verdict(&self) -> Verdict {
        if self.self_test.iter().all(|line| line.right) {
            Verdict::of(&self.checks, self.identity.release.origin)
        } else {
            Verdict::Failed
        }
    }

    /// Whether the check with this id was run and passed.
    pub fn has_passed(&self, id: &str) -> bool {
        self.checks.iter().any(|check| check.id == id && check.state == CheckState::Passed)
    }

    pub fn failed_checks(&self) -> impl Iterator<Item = &CheckResult> {
        self.checks.iter().filter(|check| check.state == CheckState::Failed)
    }
}

/// A contradiction within a record. No suite writes such a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordFault {
    #[error("its checks are not those of the suite")]
    Checks,
    #[error("its checks or planted faults lead to another verdict")]
    Verdict,
    #[error("its checks lead to another grade")]
    Grade,
    #[error("it ended before it began")]
    Times,
    #[error("it does not hold both digests of each file")]
    Digests,
}

/// Whether the comparison with the release's own reference could not run.
pub(crate) fn lacks_reference(check: &CheckResult) -> bool {
    check.state == CheckState::NotRun && check.id.ends_with("goldens")
}

impl Verdict {
    /// The verdict that checks lead to. A published release is not proven without the comparison
    /// with its reference; an operator's own release has no reference.
    pub(crate) fn of(checks: &[CheckResult], origin: Origin) -> Self {
        let any = |state| checks.iter().any(|check| check.state == state);
        match origin {
            _ if any(CheckState::Failed) => Self::Failed,
            Origin::Published if checks.iter().any(lacks_reference) => Self::Inconclusive,
            Origin::Published | Origin::Operator => Self::Qualified,
        }
    }
}

impl Record {
    /// Judges the record's checks again. A record of another policy had other checks, so of those
    /// only the verdict is judged.
    pub(crate) fn check(&self) -> Result<(), RecordFault> {
        let ids = self.checks.iter().map(|check| check.id.as_str());
        if self.policy_version == POLICY_VERSION
            && !ids.eq(checks::ALL.iter().map(|check| check.id))
        {
            return Err(RecordFault::Checks);
        }
        let Release { files, blake3, .. } = &self.identity.release;
        if self.policy_version == POLICY_VERSION && !files.keys().eq(blake3.keys()) {
            return Err(RecordFault::Digests);
        }
        let right = self.due_verdict() == self.verdict;
        if !right || (self.verdict != Verdict::Qualified && self.qualified_context_tokens > 0) {
            return Err(RecordFault::Verdict);
        }
        if self.policy_version == POLICY_VERSION
            && Grade::of(&self.checks, self.like.as_deref()) != self.grade
        {
            return Err(RecordFault::Grade);
        }
        if self.finished_at < self.started_at { Err(RecordFault::Times) } else { Ok(()) }
    }
}
