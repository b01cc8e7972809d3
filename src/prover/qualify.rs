//! Qualifies a release on this machine.

use crate::Prover;
use crate::subject::EngineSubject;
use cresset_base::{Clock, SystemClock, UnixMillis, failpoint};
use cresset_catalogue::Manifest;
use cresset_node::{NodeError, cannot_load};
use cresset_qualification::{
    CheckResult, Goldens, Identity, Record, Suite, SuiteEvent, SuiteProgress, SuiteScope,
    UnfinishedRun, Verdict, canary, run_only, speed,
};

impl Prover<'_> {
    /// Loads the release's engine, runs the suite over it and keeps the record. A run of the same
    /// release, build, hardware and settings that was interrupted goes on after its last check.
    /// Blocking: never call it on an async thread.
    pub fn qualify(
        &self,
        manifest: &Manifest,
        suite: Suite,
        like: Option<&str>,
        progress: &mut dyn FnMut(SuiteProgress),
    ) -> Result<Record, NodeError> {
        let mut examined = self.examine(manifest, suite, like)?;
        let record = self.run_suite(&mut examined, progress)?;
        examined.subject.engine.shutdown();
        record.ok_or_else(|| NodeError::new("the engine ended"))
    }

    /// Runs the suite and keeps the record. `None` where that was interrupted.
    pub(super) fn run_suite(
        &self,
        examined: &mut Examined,
        progress: &mut dyn FnMut(SuiteProgress),
    ) -> Result<Option<Record>, NodeError> {
        let catalogue = self.catalogue();
        let Examined { identity, scope, goldens, subject } = examined;
        let now = SystemClock.now();
        let hours = self.config.qualification.resume_hours;
        let not_before = UnixMillis(now.0.saturating_sub(hours.saturating_mul(3_600_000)));
        let begun = UnfinishedRun::begin(identity.clone(), *scope, goldens.as_ref());
        let run = catalogue.unfinished_run(begun, not_before, now).map_err(NodeError::new)?;
        let (interruption, products) = (subject.interruption(), subject.products.clone());
        let mut record = run.proceed(subject, goldens.as_ref(), &mut |event| match event {
            SuiteEvent::Begins(at) => progress(at),
            SuiteEvent::Ended(_) if interruption.is_here() => {}
            SuiteEvent::Ended(run) => {
                let mut run = run.clone();
                run.identity.host.products = products.lines();
                // Without it the next run only takes longer.
                if let Err(why) = catalogue.keep_unfinished_run(&run) {
                    tracing::warn!(%why, "the checks up to here cannot be kept");
                }
                failpoint!("qualification::ended");
            }
        });
        if record.verdict == Verdict::Qualified {
            let own = goldens.as_ref().filter(|_| record.like.is_none());
            let canary = canary::of(subject, own);
            if interruption.is_here() {
                return Ok(None);
            }
            let name = &identity.release.name;
            record.canary = canary.map_err(|why| {
                NodeError::new(format!("the boot canary of {name} failed: {why}"))
            })?;
            if scope.suite == Suite::Full {
                record.speed = speed::of(subject).map_err(NodeError::new)?;
            }
        }
        if interruption.is_here() {
            return Ok(None);
        }
        // By the clock that judges its age.
        record.finished_at = SystemClock.now().seconds().max(record.started_at);
        // The checks may have computed products of shapes that a load does not.
        record.identity.host.products = products.lines();
        catalogue.save_record(&record).map_err(NodeError::new)?;
        let name = &identity.release.name;
        catalogue.forget_unfinished_run(name, scope.suite).map_err(NodeError::new)?;
        Ok(Some(record))
    }

    /// Runs the checks with these ids alone and keeps nothing. Blocking, as `qualify` is.
    pub fn run_checks(
        &self,
        manifest: &Manifest,
        suite: Suite,
        like: Option<&str>,
        ids: &[String],
        progress: &mut dyn FnMut(SuiteProgress),
    ) -> Result<Vec<CheckResult>, NodeError> {
        let mut examined = self.examine(manifest, suite, like)?;
        let Examined { identity, scope, goldens, subject } = &mut examined;
        let results = run_only(ids, subject, identity, goldens.as_ref(), *scope, progress);
        subject.engine.shutdown();
        Ok(results)
    }

    /// Loads the release's engine. `like` names a sister release whose goldens are used.
    pub(super) fn examine(
        &self,
        manifest: &Manifest,
        suite: Suite,
        like: Option<&str>,
    ) -> Result<Examined, NodeError> {
        let catalogue = self.catalogue();
        let goldens = match like {
            Some(release) => catalogue.goldens_named(release).map(Some),
            None => catalogue.goldens_of(manifest),
        };
        let goldens = goldens.map_err(NodeError::new)?;
        let digests = catalogue.digests(manifest).map_err(NodeError::new)?;
        let source = catalogue.source(manifest).map_err(NodeError::new)?;
        // The engine gets the bytes whose SHA-256 was compared, or none.
        let source = source.with_digests(digests.blake3.clone());
        let products = self.products_to_check(manifest)?;
        let model =
            self.load(&source, &products).map_err(|why| cannot_load(&manifest.name, why))?;
        let mut identity = catalogue.identity(manifest, &self.host());
        identity.host.products = products.lines();
        identity.release.blake3 = digests.blake3;
        let subject =
            EngineSubject::new(self.0, manifest, model, digests.sha256).map_err(NodeError::new)?;
        let scope =
            SuiteScope::new(suite, self.config.qualification.quick_context_tokens, &subject);
        Ok(Examined { identity, scope, goldens, subject })
    }
}

/// A release with its engine, ready for the checks.
pub(super) struct Examined {
    pub identity: Identity,
    pub scope: SuiteScope,
    pub goldens: Option<Goldens>,
    pub subject: EngineSubject,
}
