//! Proves what is still open of a release that a node serves, in idle steps of the engine that
//! serves it: a longer context, or its record anew before that ends.

use crate::qualify::Examined;
use crate::subject::EngineSubject;
use crate::{Prover, Scoring, UnqualifiedModel};
use cresset_base::{Clock, SystemClock, failpoint, lower_thread_priority};
use cresset_catalogue::FileDigests;
use cresset_engine::EngineHandle;
use cresset_kernels::gpu::ProductChoices;
use cresset_node::{Assembly, DueProof, NodeError, Proving};
use cresset_pool::ServedModel;
use cresset_qualification::context_proof::ContextProof;
use cresset_qualification::{Identity, Suite, SuiteScope};

/// Lets the threads that answer requests go before those of a proof.
fn give_way() {
    failpoint!("prover::priority", |_| ());
    if let Err(error) = lower_thread_priority() {
        tracing::debug!(%error, "a proof keeps its priority");
    }
}

/// The part of the prover that a running node calls.
pub struct BackgroundProver;

impl Proving for BackgroundProver {
    fn prove(
        &self,
        assembly: &Assembly,
        served: &ServedModel,
        engine: EngineHandle,
        due: DueProof,
    ) -> Result<(), NodeError> {
        give_way();
        let computing = rayon::ThreadPoolBuilder::new().build().map_err(NodeError::new)?;
        computing.install(|| Prover(assembly).prove_due(served, engine, due))
    }
}

impl Prover<'_> {
    /// As `Proving::prove`, at the priority of the thread that calls.
    pub(super) fn prove_due(
        &self,
        served: &ServedModel,
        engine: EngineHandle,
        due: DueProof,
    ) -> Result<(), NodeError> {
        match due {
            DueProof::Context(tokens) => self.prove_context(served, engine, tokens),
            DueProof::Renewal => self.renew(served, engine),
        }
    }

    /// Proves a longer context. Where that fails, what was proven is tried again: if that fails,
    /// too, the record is contradicted.
    fn prove_context(
        &self,
        served: &ServedModel,
        engine: EngineHandle,
        tokens: u32,
    ) -> Result<(), NodeError> {
        let qualified = &served.qualified;
        let (mut subject, identity) = self.serving(served, engine, FileDigests::default())?;
        let interruption = subject.interruption();
        let mut run = |tokens| {
            let proof = ContextProof::run(&mut subject, &identity, tokens);
            let finished_at = SystemClock.now().seconds();
            (!interruption.is_here()).then_some(ContextProof { finished_at, ..proof })
        };
        let Some(proof) = run(tokens) else { return Ok(()) };
        let catalogue = self.catalogue();
        let name = &qualified.manifest().name;
        if let Some(why) = proof.failure() {
            tracing::warn!(name, tokens, why, "a longer context was not proven");
            let Some(again) = run(qualified.qualified_context_tokens()) else { return Ok(()) };
            if again.failure().is_some() {
                let records = catalogue.records(name).map_err(NodeError::new)?;
                let record = records.iter().find(|r| r.id.to_string() == qualified.record_id());
                let record = record.ok_or_else(|| NodeError::new("its record has gone"))?;
                let contradicted = record.contradicted_by(&again);
                return catalogue.save_record(&contradicted).map(drop).map_err(NodeError::new);
            }
        }
        catalogue.keep_context_proof(&proof).map_err(NodeError::new)
    }

    /// Runs the quick suite over the context that is proven by now, and keeps the record.
    fn renew(&self, served: &ServedModel, engine: EngineHandle) -> Result<(), NodeError> {
        let (catalogue, qualified) = (self.catalogue(), &served.qualified);
        let goldens = match &qualified.evidence().like {
            Some(release) => catalogue.goldens_named(release).map(Some),
            None => catalogue.goldens_of(qualified.manifest()),
        };
        let goldens = goldens.map_err(NodeError::new)?;
        let digests = catalogue.digests(qualified.manifest()).map_err(NodeError::new)?;
        let (subject, identity) = self.serving(served, engine, digests)?;
        let scope = SuiteScope::new(Suite::Quick, qualified.qualified_context_tokens(), &subject);
        let mut examined = Examined { identity, scope, goldens, subject };
        self.run_suite(&mut examined, &mut |_| ()).map(drop)
    }

    /// The engine that serves a release as a subject, and what its proofs are about.
    fn serving(
        &self,
        served: &ServedModel,
        engine: EngineHandle,
        digests: FileDigests,
    ) -> Result<(EngineSubject, Identity), NodeError> {
        let manifest = served.qualified.manifest();
        let mut identity = self.catalogue().identity(manifest, &self.host());
        identity.release.blake3 = digests.blake3;
        identity.host.products.clone_from(served.qualified.products());
        let products = served.qualified.products().iter().map(String::as_str);
        let model = UnqualifiedModel {
            text: served.text.clone(),
            engine,
            bytes: self.expected_bytes(&served.qualified),
            source: served.qualified.source().clone(),
            scoring: Scoring::default(),
            products: ProductChoices::of(products),
        };
        let subject = EngineSubject::new(self.0, manifest, model, digests.sha256);
        Ok((subject.map_err(NodeError::new)?.in_background(), identity))
    }
}
