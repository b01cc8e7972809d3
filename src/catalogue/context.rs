//! The context that a release is proven for: that of its record, and what was proven beyond it
//! while a node served it.

use super::records::CLOCK_SLACK_SECONDS;
use super::signed_files::SignedFiles;
use super::{Catalogue, Result};
use cresset_base::UnixMillis;
use cresset_qualification::context_proof::ContextProof;
use cresset_qualification::{Identity, Record, Verdict};
use std::fmt;

const CONTEXT_PROOFS: SignedFiles =
    SignedFiles { payload_type: "application/vnd.cresset.context-proof+json", ending: "context" };

/// How far the context of a release is proven, tokens of prompt and output.
#[derive(Clone, Debug, PartialEq)]
pub struct ProvenContext {
    pub tokens: u32,
    /// The shortest length that failed, and why. It is tried again after the next qualification.
    pub failed: Option<FailedContext>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct FailedContext {
    pub tokens: u32,
    pub why: String,
}

impl fmt::Display for FailedContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens failed: {}", self.tokens, self.why)
    }
}

impl Catalogue {
    /// Keeps what was found of a longer context.
    pub fn keep_context_proof(&self, proof: &ContextProof) -> Result<()> {
        CONTEXT_PROOFS.keep(&self.data, &proof.identity.release.name, proof.id, proof)
    }

    /// The context that holds for this identity now, of records that fit it, newest first.
    /// `deciding` is the one that counts, and `not_before` the oldest time of a proof, in Unix
    /// seconds.
    pub(super) fn proven_context(
        &self,
        present: &Identity,
        fitting: &[Record],
        deciding: &Record,
        not_before: u64,
        now: UnixMillis,
    ) -> Result<ProvenContext> {
        // What was proven before a failure proves nothing any more.
        let failed = fitting.iter().find(|record| record.verdict != Verdict::Qualified);
        let since = failed.map_or(not_before, |record| record.finished_at.max(not_before));
        let times = since..=now.seconds() + CLOCK_SLACK_SECONDS;
        let mut proofs: Vec<ContextProof> =
            CONTEXT_PROOFS.all(&self.data, &present.release.name)?;
        proofs.retain(|proof| {
            let fits = proof.identity.difference(present).is_none();
            fits && proof.is_whole() && times.contains(&proof.finished_at)
        });
        let failed = proofs.iter().filter(|proof| proof.finished_at >= deciding.finished_at);
        let failed = failed.filter_map(|proof| {
            Some(FailedContext { tokens: proof.context_tokens, why: proof.failure()? })
        });
        let failed = failed.min_by_key(|failed| failed.tokens);
        let below = failed.as_ref().map_or(u32::MAX, |failed| failed.tokens);
        let passed = proofs.iter().filter(|proof| proof.failure().is_none());
        let passed = passed.map(|proof| proof.context_tokens).filter(|tokens| *tokens < below);
        let tokens = passed.max().unwrap_or(0).max(deciding.qualified_context_tokens);
        Ok(ProvenContext { tokens, failed })
    }
}
