//! Runs the checks over a subject and writes the record.

#![expect(clippy::disallowed_methods, reason = "checks are timed")]

use crate::checks::{ALL, Check, CheckFinding, CheckInput};
use crate::goldens::{Goldens, GoldensOrigin};
use crate::identity::{Identity, Origin};
use crate::record::{CheckResult, Grade, POLICY_VERSION, Record, Verdict, lacks_reference};
use crate::subject::{Subject, SubjectError};
use serde::{Deserialize, Serialize};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use uuid::Uuid;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Suite {
    /// Takes seconds: short reference cases, a bounded context.
    Quick,
    /// Takes minutes: every reference case, the whole context.
    Full,
}

impl Suite {
    pub fn name(self) -> &'static str {
        match self {
            Self::Quick => "quick",
            Self::Full => "full",
        }
    }
}

/// The extent of a suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuiteScope {
    pub suite: Suite,
    /// Longest prompt + output run, tokens.
    pub context_tokens: u32,
    /// Reference cases with longer prompts are left out.
    pub golden_prompt_tokens: u32,
    /// Positions that are compared with a second implementation.
    pub witness_tokens: u32,
    /// Tokens that are read of each plain text.
    pub text_tokens: u32,
    /// Tokens that are read of each document of the goldens.
    pub document_tokens: u32,
    /// How long memory is watched under load.
    pub soak_seconds: u32,
}

impl SuiteScope {
    /// `quick_context_tokens` bounds the quick suite only; nothing goes past what the subject
    /// serves.
    pub fn new(suite: Suite, quick_context_tokens: u32, subject: &dyn Subject) -> Self {
        let served = subject.context_tokens();
        match suite {
            Suite::Quick => Self {
                suite,
                context_tokens: served.min(quick_context_tokens),
                golden_prompt_tokens: 80.min(served),
                witness_tokens: 512,
                text_tokens: 128,
                document_tokens: 96,
                soak_seconds: 0,
            },
            Suite::Full => Self {
                suite,
                context_tokens: served,
                golden_prompt_tokens: served,
                witness_tokens: 2560,
                text_tokens: 1024,
                document_tokens: served,
                soak_seconds: 120,
            },
        }
    }
}

/// Progress of a suite: `done` of `total` checks are done, and `check` runs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SuiteProgress {
    pub done: usize,
    pub total: usize,
    pub check: &'static str,
}

/// A report of a run about its progress.
#[derive(Clone, Copy, Debug)]
pub enum SuiteEvent<'a> {
    Begins(SuiteProgress),
    /// Another check is done; the run up to here.
    Ended(&'a UnfinishedRun),
}

/// A run between two checks. A later process may go on from here, unless what is being proven has
/// changed. The results that it has stand: a check that failed is not run again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UnfinishedRun {
    pub policy_version: u32,
    pub identity: Identity,
    pub scope: SuiteScope,
    /// The reference that it compares with.
    #[serde(default)]
    pub goldens: Option<GoldensOrigin>,
    /// Unix seconds.
    pub started_at: u64,
    /// Results of the first checks.
    pub checks: Vec<CheckResult>,
}

impl UnfinishedRun {
    pub fn begin(identity: Identity, scope: SuiteScope, goldens: Option<&Goldens>) -> Self {
        Self {
            policy_version: POLICY_VERSION,
            identity,
            scope,
            goldens: goldens.map(|goldens| goldens.origin.clone()),
            started_at: unix_seconds(),
            checks: Vec::new(),
        }
    }

    /// Whether a run that begins as `begun` may go on from here.
    pub fn goes_on(&self, begun: &Self) -> bool {
        let ids = self.checks.iter().map(|check| check.id.as_str());
        self.policy_version == begun.policy_version
            && self.identity.difference(&begun.identity).is_none()
            && self.scope == begun.scope
            && self.goldens == begun.goldens
            && self.checks.len() <= ALL.len()
            && ids.eq(ALL.iter().take(self.checks.len()).map(|check| check.id))
    }

    /// Runs every check that was not run yet. A check that cannot finish has failed.
    pub fn proceed(
        mut self,
        subject: &mut dyn Subject,
        goldens: Option<&Goldens>,
        on_event: &mut dyn FnMut(SuiteEvent),
    ) -> Record {
        let taken_over = self.checks.len();
        for (done, check) in ALL.iter().enumerate().skip(taken_over) {
            on_event(SuiteEvent::Begins(SuiteProgress { done, total: ALL.len(), check: check.id }));
            let files = &self.identity.release.files;
            let input = CheckInput { subject, files, goldens, scope: self.scope };
            self.checks.push(perform(check, input));
            on_event(SuiteEvent::Ended(&self));
        }
        self.finish(taken_over, subject, goldens)
    }

    fn finish(self, taken_over: usize, subject: &dyn Subject, goldens: Option<&Goldens>) -> Record {
        let Self { policy_version, identity, scope, goldens: origin, started_at, checks } = self;
        let sister = goldens.filter(|goldens| !goldens.are_about(&identity.release.files));
        let like = sister.map(|goldens| goldens.origin.release.clone());
        let mut notes = notes(&checks, &identity, scope, subject);
        notes.extend(like.as_deref().map(about_a_sister));
        if taken_over > 0 {
            notes.push(format!(
                "{taken_over} of {} results were taken over from a run that was interrupted.",
                checks.len()
            ));
        }
        let verdict = Verdict::of(&checks, identity.release.origin);
        let qualified = if verdict == Verdict::Qualified { scope.context_tokens } else { 0 };
        Record {
            id: Uuid::now_v7(),
            policy_version,
            suite: scope.suite.name().into(),
            notes,
            identity,
            started_at,
            finished_at: unix_seconds(),
            verdict,
            grade: Grade::of(&checks, like.as_deref()),
            like,
            goldens: origin,
            qualified_context_tokens: qualified,
            checks,
            canary: Vec::new(),
            speed: Vec::new(),
            memory: subject.memory(),
            self_test: Vec::new(),
        }
    }
}

/// Runs every check once, from the first one on.
pub fn run(
    subject: &mut dyn Subject,
    identity: Identity,
    goldens: Option<&Goldens>,
    scope: SuiteScope,
    progress: &mut dyn FnMut(SuiteProgress),
) -> Record {
    let run = UnfinishedRun::begin(identity, scope, goldens);
    run.proceed(subject, goldens, &mut |event| {
        if let SuiteEvent::Begins(at) = event {
            progress(at);
        }
    })
}

/// Runs the checks with these ids alone, in the order of the suite. They prove nothing by
/// themselves, so no record is made.
pub fn run_only(
    ids: &[String],
    subject: &mut dyn Subject,
    identity: &Identity,
    goldens: Option<&Goldens>,
    scope: SuiteScope,
    progress: &mut dyn FnMut(SuiteProgress),
) -> Vec<CheckResult> {
    let wanted: Vec<&Check> =
        ALL.iter().filter(|check| ids.iter().any(|id| id == check.id)).collect();
    let total = wanted.len();
    let mut results = Vec::with_capacity(total);
    for (done, check) in wanted.into_iter().enumerate() {
        progress(SuiteProgress { done, total, check: check.id });
        let files = &identity.release.files;
        results.push(perform(check, CheckInput { subject, files, goldens, scope }));
    }
    results
}

pub(crate) fn perform(check: &Check, mut input: CheckInput) -> CheckResult {
    let began = Instant::now();
    let finding = (check.run)(&mut input).unwrap_or_else(|error| match error {
        SubjectError::Unavailable(why) => CheckFinding::not_run(why, "an answer"),
        error => CheckFinding::new(false, error.to_string(), "an answer"),
    });
    CheckResult {
        id: check.id.into(),
        stage: check.stage.into(),
        proves: check.proves.into(),
        state: finding.state,
        value: finding.value,
        gate: finding.gate,
        seconds: began.elapsed().as_secs_f64(),
        series: finding.series,
    }
}

fn notes(
    checks: &[CheckResult],
    identity: &Identity,
    scope: SuiteScope,
    subject: &dyn Subject,
) -> Vec<String> {
    let mut notes = Vec::new();
    if checks.iter().any(lacks_reference) {
        notes.push(match identity.release.origin {
            Origin::Operator => {
                "Self-consistency only: there are no reference outputs for this release.".into()
            }
            Origin::Published => {
                "The reference outputs of this release do not fit its files: not proven.".to_owned()
            }
        });
    }
    let (ran, served) = (scope.context_tokens, subject.context_tokens());
    if ran < served {
        notes.push(format!(
            "Context was run up to {ran} of {served} tokens; the full suite runs all of it."
        ));
    }
    notes
}

fn about_a_sister(release: &str) -> String {
    format!(
        "Compared with the reference of {release}: a change of the weights that keeps the mean KL \
         within the bound is not found."
    )
}

pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Release;
    use crate::record::CheckState;
    use crate::testing::fake::{self, Fake};
    use crate::testing::planted_faults::{Faulty, PlantedFault, planted_for};
    use crate::testing::records;

    fn identity(origin: Origin) -> Identity {
        let Identity { release, host } = records::of(Verdict::Qualified).identity;
        Identity {
            release: Release { origin, files: fake::files(), blake3: fake::files(), ..release },
            host,
        }
    }

    fn record(subject: &mut dyn Subject, origin: Origin, goldens: Option<&Goldens>) -> Record {
        let scope = scope(subject);
        run(subject, identity(origin), goldens, scope, &mut |_| {})
    }

    /// The full suite with the shortest soak.
    fn scope(subject: &dyn Subject) -> SuiteScope {
        SuiteScope { soak_seconds: 0, ..SuiteScope::new(Suite::Full, 0, subject) }
    }

    fn red(record: &Record) -> Vec<&str> {
        record.failed_checks().map(|check| check.id.as_str()).collect()
    }

    #[test]
    fn a_right_subject_is_all_green() {
        let record = record(&mut Fake::default(), Origin::Published, Some(&fake::goldens()));
        assert_eq!(record.verdict, Verdict::Qualified, "{:#?}", record.checks);
        assert!(record.checks.iter().all(|check| check.state == CheckState::Passed));
        assert_eq!(record.qualified_context_tokens, 1024);
    }

    #[test]
    fn each_planted_fault_turns_its_check_red() {
        let goldens = fake::goldens();
        for check in ALL {
            for &fault in planted_for(check.id) {
                // A comparison with the reference finds most faults; the other checks have to find
                // theirs without it.
                let compares = ["hyper_parameters", "distributions"].contains(&check.id);
                let compares = compares || check.id.ends_with("goldens");
                let goldens = compares.then_some(&goldens);
                let mut faulty = Faulty::new(Fake::default(), fault);
                let (ids, scope) = ([check.id.to_owned()], scope(&faulty));
                let own = identity(Origin::Operator);
                let results = run_only(&ids, &mut faulty, &own, goldens, scope, &mut |_| {});
                assert!(results[0].state.is_red(), "{fault:?}: {results:?}");
            }
        }
    }

    #[test]
    fn prompts_with_tools_are_compared_with_the_reference() {
        let mut goldens = fake::goldens();
        let red = |goldens: &Goldens| {
            let record = record(&mut Fake::default(), Origin::Published, Some(goldens));
            red(&record).contains(&"tool_calls")
        };
        assert!(!red(&goldens));
        goldens.tool_conversations[0].prompt.push(' ');
        assert!(red(&goldens));
    }

    #[test]
    fn a_lost_block_is_found_by_its_check_alone() {
        for check in ["evicted_prefix", "preemption", "restart", "full_cache", "soak"] {
            for &fault in planted_for(check) {
                let mut faulty = Faulty::new(Fake::default(), fault);
                let record = record(&mut faulty, Origin::Operator, None);
                assert_eq!((red(&record), record.verdict), (vec![check], Verdict::Failed));
                assert_eq!(record.qualified_context_tokens, 0);
            }
        }
    }

    #[test]
    fn a_published_release_is_not_proven_without_its_reference() {
        let graded = record(&mut Fake::default(), Origin::Operator, Some(&fake::goldens()));
        assert_eq!((graded.grade, graded.check()), (Grade::Reference, Ok(())));
        let alone = record(&mut Fake::default(), Origin::Operator, None);
        assert_eq!((alone.grade, alone.check()), (Grade::SelfOnly, Ok(())));
        let verdict = |origin| record(&mut Fake::default(), origin, None).verdict;
        assert_eq!(verdict(Origin::Published), Verdict::Inconclusive);
        assert_eq!(verdict(Origin::Operator), Verdict::Qualified);
    }

    #[test]
    fn a_greedy_difference_counts_where_the_reference_is_decided() {
        let red = |goldens: &Goldens, fault| {
            let mut subject = Faulty::new(Fake::default(), fault);
            let record = record(&mut subject, Origin::Published, Some(goldens));
            record.failed_checks().any(|check| check.id == "greedy_goldens")
        };
        let mut goldens = fake::goldens();
        assert!(red(&goldens, PlantedFault::WrongToken));
        let token = &mut goldens.cases[0].top2[40];
        let found = token[0].0 ^ 1;
        token[1] = (found, 1.0 - 1e-4);
        assert!(!red(&goldens, PlantedFault::WrongToken), "the second choice is close");
        // The tokens after such a place are compared as well, with the reference's tokens before.
        goldens.cases[0].greedy_ids[45] ^= 1;
        assert!(red(&goldens, PlantedFault::WrongToken));
        let mut goldens = fake::goldens();
        goldens.cases[0].top2[40][1] = (found ^ 3, 1.0 - 1e-4);
        assert!(red(&goldens, PlantedFault::WrongToken), "a third token is wrong however close");
    }

    /// The results of the first checks, as another process would find them.
    fn interrupted_after(checks: usize, subject: &mut dyn Subject) -> UnfinishedRun {
        let mut found = None;
        let scope = scope(subject);
        let run = UnfinishedRun::begin(identity(Origin::Operator), scope, None);
        run.proceed(subject, None, &mut |event| match event {
            SuiteEvent::Ended(run) if run.checks.len() == checks => found = Some(run.clone()),
            _ => {}
        });
        found.unwrap()
    }

    #[test]
    fn an_interrupted_run_goes_on_after_its_last_check() {
        let run = interrupted_after(7, &mut Fake::default());
        let mut begun = Vec::new();
        let record = run.clone().proceed(&mut Fake::default(), None, &mut |event| {
            if let SuiteEvent::Begins(at) = event {
                begun.push(at.done);
            }
        });
        assert_eq!(begun, (7..ALL.len()).collect::<Vec<_>>());
        assert_eq!(record.verdict, Verdict::Qualified);
        assert_eq!(record.checks[..7], run.checks);
        assert_eq!(record.started_at, run.started_at);
        assert!(record.notes.iter().any(|note| note.starts_with("7 of ")), "{:?}", record.notes);
    }

    #[test]
    fn a_failed_check_stays_failed_after_an_interruption() {
        let mut faulty = Faulty::new(Fake::default(), PlantedFault::ByteFlipped);
        let run = interrupted_after(1, &mut faulty);
        let record = run.proceed(&mut Fake::default(), None, &mut |_| {});
        assert_eq!((record.verdict, red(&record)), (Verdict::Failed, vec!["digests"]));
    }

    #[test]
    fn an_interrupted_run_belongs_to_what_it_was_run_for() {
        let run = interrupted_after(2, &mut Fake::default());
        let (own, scope) = (identity(Origin::Operator), run.scope);
        let begun = |own: &Identity, scope| UnfinishedRun::begin(own.clone(), scope, None);
        assert!(run.goes_on(&begun(&own, scope)));
        let mut other = own.clone();
        other.host.engine.executable_sha256.push('1');
        assert!(!run.goes_on(&begun(&other, scope)));
        assert!(!run.goes_on(&begun(&own, SuiteScope { suite: Suite::Quick, ..scope })));
        assert!(!run.goes_on(&begun(&own, SuiteScope { context_tokens: 1, ..scope })));
        assert!(!run.goes_on(&UnfinishedRun::begin(own.clone(), scope, Some(&fake::goldens()))));
        let mut gap = run.clone();
        gap.checks.remove(0);
        assert!(!gap.goes_on(&begun(&own, scope)));
        let old = UnfinishedRun { policy_version: POLICY_VERSION - 1, ..run };
        assert!(!old.goes_on(&begun(&own, scope)));
    }

    #[test]
    fn named_checks_run_alone() {
        let ids = ["usage".to_owned(), "digests".to_owned()];
        let mut fake = Fake::default();
        let (own, scope) = (identity(Origin::Operator), SuiteScope::new(Suite::Quick, 600, &fake));
        let results = run_only(&ids, &mut fake, &own, None, scope, &mut |_| {});
        let found: Vec<&str> = results.iter().map(|check| check.id.as_str()).collect();
        assert_eq!(found, ["digests", "usage"]);
    }

    #[test]
    fn the_quick_suite_says_how_far_it_went() {
        let mut fake = Fake::default();
        let scope = SuiteScope::new(Suite::Quick, 600, &fake);
        let record = run(&mut fake, identity(Origin::Operator), None, scope, &mut |_| {});
        assert_eq!((record.suite.as_str(), record.qualified_context_tokens), ("quick", 600));
        assert!(record.notes.iter().any(|note| note.contains("600 of 1024")), "{:?}", record.notes);
    }

    #[test]
    fn any_changed_part_of_the_identity_is_named() {
        type Change = fn(&mut Identity);
        let old = identity(Origin::Published);
        assert_eq!(old.difference(&old), None);
        let changes: &[(&str, Change)] = &[
            ("release", |i| i.release.release_id = Uuid::max()),
            ("release files", |i| i.release.files.clear()),
            ("release terms", |i| i.release.terms["limits"] = 1.into()),
            ("release origin", |i| i.release.origin = Origin::Operator),
            ("engine version", |i| i.host.engine.version.push('1')),
            ("dependencies", |i| i.host.engine.lockfile_sha256.push('1')),
            ("executable", |i| i.host.engine.executable_sha256.push('1')),
            ("hardware", |i| i.host.hardware.threads = 3),
            ("hardware", |i| i.host.hardware.features.push("avx2".into())),
            ("serving setting", |i| i.host.settings.dequantise = true),
            ("serving setting", |i| i.host.settings.weights.push('q')),
            ("serving setting", |i| i.host.settings.kv_mib += 1),
            ("serving setting", |i| i.host.settings.gpu_graph_rows += 1),
            ("serving setting", |i| i.host.settings.tensor_parallel += 1),
        ];
        for (part, change) in changes {
            let mut new = old.clone();
            change(&mut new);
            assert_eq!(old.difference(&new).map(|d| d.part), Some(*part));
        }
    }
}
