//! What the checks found of an endpoint. It proves nothing about a release of this node, so it is
//! no record.

use super::CHECKS;
use crate::checks::CheckInput;
use crate::goldens::Goldens;
use crate::record::{CheckResult, CheckState, POLICY_VERSION, Verdict};
use crate::subject::Subject;
use crate::suite::{SuiteProgress, SuiteScope, perform, unix_seconds};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EndpointReport {
    pub url: String,
    pub model: String,
    /// The release that was expected there.
    pub release: Option<String>,
    pub policy_version: u32,
    pub suite: String,
    /// Unix seconds.
    pub started_at: u64,
    pub finished_at: u64,
    pub verdict: Verdict,
    pub notes: Vec<String>,
    pub checks: Vec<CheckResult>,
}

impl EndpointReport {
    /// Runs the checks that need a completions surface, or those of them that `only` names.
    pub fn run(
        subject: &mut dyn Subject,
        goldens: Option<&Goldens>,
        scope: SuiteScope,
        only: &[String],
        progress: &mut dyn FnMut(SuiteProgress),
    ) -> Self {
        let started_at = unix_seconds();
        let wanted = |id: &str| only.is_empty() || only.iter().any(|name| name == id);
        let checks: Vec<_> = CHECKS.iter().filter(|check| wanted(check.id)).collect();
        let files = BTreeMap::new();
        let mut results = Vec::with_capacity(checks.len());
        for (done, check) in checks.iter().enumerate() {
            progress(SuiteProgress { done, total: checks.len(), check: check.id });
            let input = CheckInput { subject: &mut *subject, files: &files, goldens, scope };
            results.push(perform(check, input));
        }
        let mut notes = Vec::new();
        if goldens.is_none() {
            notes.push("There are no reference outputs to compare with.".into());
        }
        Self {
            url: String::new(),
            model: String::new(),
            release: None,
            policy_version: POLICY_VERSION,
            suite: scope.suite.name().into(),
            started_at,
            finished_at: unix_seconds(),
            verdict: verdict(&results),
            notes,
            checks: results,
        }
    }
}

/// What an endpoint does not offer is no failure; if nothing could be checked, nothing is known.
fn verdict(checks: &[CheckResult]) -> Verdict {
    let any = |state| checks.iter().any(|check| check.state == state);
    match (any(CheckState::Failed), any(CheckState::Passed)) {
        (true, _) => Verdict::Failed,
        (false, true) => Verdict::Qualified,
        (false, false) => Verdict::Inconclusive,
    }
}
