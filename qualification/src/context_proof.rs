//! Proves a longer context than the record of a release: its checks of the context, run at that
//! length. A node runs them while it serves, over the weights in memory.

use crate::checks::{ALL, Check, CheckInput};
use crate::identity::Identity;
use crate::record::{CheckResult, CheckState, POLICY_VERSION};
use crate::subject::Subject;
use crate::suite::{Suite, SuiteScope, perform, unix_seconds};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Ids of the checks that prove a length, in the order of the suite. The first always runs.
const CHECKS: [&str; 2] = ["context_length", "long_context"];

/// The result of these checks at one length. It is written once and never changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContextProof {
    pub id: Uuid,
    pub policy_version: u32,
    pub identity: Identity,
    /// Prompt + output that was run, tokens.
    pub context_tokens: u32,
    /// Unix seconds.
    pub finished_at: u64,
    pub checks: Vec<CheckResult>,
}

impl ContextProof {
    /// Runs the checks with prompt and output of `context_tokens` together.
    pub fn run(subject: &mut dyn Subject, identity: &Identity, context_tokens: u32) -> Self {
        let full = SuiteScope::new(Suite::Full, 0, subject);
        let scope = SuiteScope { context_tokens, ..full };
        let mut run = |check: &Check| {
            let files = &identity.release.files;
            perform(check, CheckInput { subject, files, goldens: None, scope })
        };
        let checks = ALL.iter().filter(|check| CHECKS.contains(&check.id)).map(&mut run).collect();
        Self {
            id: Uuid::now_v7(),
            policy_version: POLICY_VERSION,
            identity: identity.clone(),
            context_tokens,
            finished_at: unix_seconds(),
            checks,
        }
    }

    /// Whether these are the checks of this build, and the length was run at all.
    pub fn is_whole(&self) -> bool {
        let ids = self.checks.iter().map(|check| check.id.as_str());
        self.policy_version == POLICY_VERSION
            && ids.eq(CHECKS)
            && self.checks[0].state != CheckState::NotRun
    }

    /// What failed at this length, if something did.
    pub fn failure(&self) -> Option<String> {
        let failed = self.checks.iter().find(|check| check.state == CheckState::Failed)?;
        let CheckResult { id, value, gate, .. } = failed;
        Some(format!("{id}: {value}, where the check demands {gate}"))
    }
}

/// The length to prove next: twice as much, up to `goal`. `None` where that is proven.
pub fn next_context_tokens(proven: u32, goal: u32) -> Option<u32> {
    (proven > 0 && proven < goal).then(|| proven.saturating_mul(2).min(goal))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Verdict;
    use crate::testing::fake::Fake;
    use crate::testing::planted_faults::{Faulty, planted_for};
    use crate::testing::records;

    #[test]
    fn lengths_double_up_to_the_goal() {
        let all = |mut proven, goal| {
            let mut lengths = Vec::new();
            while let Some(next) = next_context_tokens(proven, goal) {
                lengths.push(next);
                proven = next;
            }
            lengths
        };
        assert_eq!(all(2_048, 10_000), [4_096, 8_192, 10_000]);
        assert_eq!(all(u32::MAX - 1, u32::MAX), [u32::MAX]);
        assert_eq!((all(2_048, 2_048), all(0, 9)), (vec![], vec![]), "nothing is proven of 0");
    }

    #[test]
    fn a_length_is_proven_by_its_checks_and_by_no_others() {
        let identity = records::of(Verdict::Qualified).identity;
        let proof = ContextProof::run(&mut Fake::default(), &identity, 1_000);
        assert!(proof.is_whole() && proof.failure().is_none(), "{proof:?}");
        assert!(proof.checks.iter().all(|check| check.state == CheckState::Passed), "{proof:?}");
        for id in CHECKS {
            for &fault in planted_for(id) {
                let mut faulty = Faulty::new(Fake::default(), fault);
                let proof = ContextProof::run(&mut faulty, &identity, 1_000);
                assert!(proof.is_whole());
                assert!(proof.failure().is_some_and(|why| why.contains(id)), "{fault:?}");
            }
        }
        let changes: [fn(&mut ContextProof); 4] = [
            |p| p.policy_version -= 1,
            |p| drop(p.checks.pop()),
            |p| p.checks.reverse(),
            |p| p.checks[0].state = CheckState::NotRun,
        ];
        for change in changes {
            let mut other = proof.clone();
            change(&mut other);
            assert!(!other.is_whole());
        }
    }
}
