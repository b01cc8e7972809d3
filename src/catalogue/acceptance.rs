//! An operator's statements that a release without reference outputs is to be served. They are
//! signed as records are, and each holds for the identity that it names alone: other files, another
//! build or another setting need another one.

use super::records::CLOCK_SLACK_SECONDS;
use super::signed_files::SignedFiles;
use super::{Catalogue, Result};
use cresset_base::UnixMillis;
use cresset_qualification::{Identity, Record};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

const ACCEPTANCES: SignedFiles =
    SignedFiles { payload_type: "application/vnd.cresset.acceptance+json", ending: "acceptance" };

/// A statement that a release is to be served, or is no more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Acceptance {
    pub id: Uuid,
    pub identity: Identity,
    pub accepted: bool,
    /// The operator's own words.
    pub reason: String,
    /// Unix seconds.
    pub at: u64,
}

impl Catalogue {
    /// Writes down that the release of this record is to be served, or is no more.
    pub fn accept(
        &self,
        record: &Record,
        accepted: bool,
        reason: &str,
        now: UnixMillis,
    ) -> Result<Acceptance> {
        let identity = record.identity.clone();
        let (id, reason) = (Uuid::now_v7(), reason.to_owned());
        let acceptance = Acceptance { id, identity, accepted, reason, at: now.seconds() };
        let name = &acceptance.identity.release.name;
        ACCEPTANCES.keep(&self.data, name, id, &acceptance)?;
        Ok(acceptance)
    }

    /// The statements about a release that were signed here, newest first.
    pub fn acceptances(&self, name: &str) -> Result<Vec<Acceptance>> {
        ACCEPTANCES.all(&self.data, name)
    }

    /// The acceptance that holds for this identity now.
    pub(super) fn acceptance(
        &self,
        present: &Identity,
        now: UnixMillis,
    ) -> Result<Option<Acceptance>> {
        let latest = now.seconds() + CLOCK_SLACK_SECONDS;
        let mut all = self.acceptances(&present.release.name)?.into_iter();
        let newest =
            all.find(|found| found.at <= latest && found.identity.difference(present).is_none());
        Ok(newest.filter(|found| found.accepted))
    }
}
